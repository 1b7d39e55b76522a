"""PRNG keys by position: a key is a function of where it is used, so a resumed run draws what an
unbroken one would."""

import enum
import functools
import zlib

import jax
import jax.numpy as jnp
import numpy as np

from cheem_jax.core.settings import SeedsConfig


class Phase(enum.IntEnum):
    """What a key is for; the number is part of the key, so members are only ever appended."""

    SUPERNET_INIT = 0
    SUPERNET_ORDER = 1
    SUPERNET_MODE = 2
    SUPERNET_DRAW = 3
    SEARCH = 4
    FINETUNE_INIT = 5
    FINETUNE_ORDER = 6
    CENTROIDS = 7
    UPPER_BOUND_INIT = 8
    UPPER_BOUND_ORDER = 9
    SIMILARITY = 10
    METHOD_INIT = 11
    METHOD_ORDER = 12
    METHOD_NOISE = 13
    METHOD_TUNING = 14
    ALIGNMENT = 15
    ALIGNMENT_ORDER = 16
    SCORE = 17
    SUPERNET_AUGMENTATION = 18
    FINETUNE_AUGMENTATION = 19


ONE_SEED = SeedsConfig()
_SEEDED_BY = {
    "INIT": "initialisation",
    "ORDER": "order",
    "MODE": "sampling",
    "DRAW": "sampling",
    "SEARCH": "search",
}
"""Which of these seeds a phase takes, by the last word of its name; others take the run's."""


class Keys:
    """Every key of a run, by task and purpose."""

    def __init__(self, seed: int, seeds: SeedsConfig = ONE_SEED):
        named = {phase: _SEEDED_BY.get(phase.name.rpartition("_")[2], "") for phase in Phase}
        own = {phase: getattr(seeds, name, None) for phase, name in named.items()}
        self._roots = {
            phase: jax.random.key(seed if other is None else other) for phase, other in own.items()
        }

    def at(self, task: int, phase: Phase, *position: int) -> jax.Array:
        """The key of a place in a task's phase."""
        return key_at(self._roots[phase], task, phase, *position)

    def seed_at(self, task: int, phase: Phase) -> int:
        """The same as a seed in [0, 2**32), for libraries that take numbers instead of keys."""
        return int(_bits(self.at(task, phase), 1)[0])


def task_number(name: str) -> int:
    """A task's number among the keys of a method whose tasks are independent: by name, whatever the
    order."""
    return zlib.crc32(name.encode())


def key_at(key: jax.Array, *position: int) -> jax.Array:
    """`key` folded with each number in turn, as in `key_at(root, task, Phase.SEARCH,
    generation)`."""
    return _fold(key, np.asarray(position, np.uint32))


def order_at(key: jax.Array, num: int) -> np.ndarray:
    """A random order of `num` items; the length is padded to a power of two, so few programs serve
    all data sets."""
    return np.argsort(np.asarray(_bits(key, next_power_of_two(num)))[:num], kind="stable")


def next_power_of_two(num: int) -> int:
    """The smallest power of two that is at least `num` (padding buckets keep compiled programs
    few)."""
    return 1 << max(num - 1, 0).bit_length()


@jax.jit
def _fold(key, position):
    for i in range(position.shape[0]):
        key = jax.random.fold_in(key, position[i])
    return key


@functools.partial(jax.jit, static_argnums=1)
def _bits(key, num):
    return jax.random.bits(key, (num,), jnp.uint32)
