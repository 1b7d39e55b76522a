"""PRNG keys that are computed from positions. A key depends only on the seeds of the run and on a
task, a phase and a position, so a resumed run samples the same values as an uninterrupted run."""

import enum
import functools
import zlib

import jax
import jax.numpy as jnp
import numpy as np

from cheem_jax.core.settings import SeedsConfig


class Phase(enum.IntEnum):
    """Purpose of a key. The number of a member is part of the key, so members are only appended and
    never renumbered."""

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
    SIMILARITY = 10  # unused
    METHOD_INIT = 11
    METHOD_ORDER = 12
    METHOD_NOISE = 13
    METHOD_TUNING = 14  # unused
    ALIGNMENT = 15
    ALIGNMENT_ORDER = 16
    SCORE = 17  # unused
    SUPERNET_AUGMENTATION = 18
    FINETUNE_AUGMENTATION = 19


ONE_SEED = SeedsConfig()
_SEED_FIELDS = {
    "INIT": "initialisation",
    "ORDER": "order",
    "MODE": "sampling",
    "DRAW": "sampling",
    "SEARCH": "search",
}
"""Field of `SeedsConfig`, keyed by the last word of a phase's name. Phases with other names use the
run's seed."""


class Keys:
    """The PRNG keys of a run, by task and phase."""

    def __init__(self, seed: int, seeds: SeedsConfig = ONE_SEED):
        self._roots = {}
        for phase in Phase:
            field = _SEED_FIELDS.get(phase.name.rpartition("_")[2], "")
            root = getattr(seeds, field, None)
            self._roots[phase] = jax.random.key(seed if root is None else root)

    def at(self, task: int, phase: Phase, *position: int) -> jax.Array:
        """Return the key of a position, such as an epoch, in a task's phase."""
        return key_at(self._roots[phase], task, phase, *position)

    def seed_at(self, task: int, phase: Phase) -> int:
        """Return a seed in [0, 2**32) that is derived from the key of a task's phase, for libraries
        that do not use JAX keys."""
        return int(_bits(self.at(task, phase), 1)[0])


def task_number(name: str) -> int:
    """Compute a task number from a task's name, for methods whose results do not depend on the
    order of tasks."""
    return zlib.crc32(name.encode())


def key_at(key: jax.Array, *position: int) -> jax.Array:
    """Fold each number of `position` into `key` in turn, as in `key_at(root, task, Phase.SEARCH,
    generation)`."""
    return _fold(key, np.asarray(position, np.uint32))


def order_at(key: jax.Array, num: int) -> np.ndarray:
    """Compute a random permutation of 0..num-1. The number of random values is rounded up to a
    power of two, so that similar values of `num` share a compiled function."""
    return np.argsort(np.asarray(_bits(key, next_power_of_two(num)))[:num], kind="stable")


def next_power_of_two(num: int) -> int:
    """Return the smallest power of two that is at least `num`."""
    return 1 << max(num - 1, 0).bit_length()


@jax.jit
def _fold(key, position):
    for i in range(position.shape[0]):
        key = jax.random.fold_in(key, position[i])
    return key


@functools.partial(jax.jit, static_argnums=1)
def _bits(key, num):
    return jax.random.bits(key, (num,), jnp.uint32)
