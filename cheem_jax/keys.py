"""PRNG keys by position: a key is a function of where it is used, so a resumed run draws what an unbroken one would."""

import enum
import functools

import jax
import jax.numpy as jnp
import numpy as np


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


def key_at(key: jax.Array, *position: int) -> jax.Array:
    """`key` folded with each number in turn, as in `key_at(root, task, Phase.SEARCH, generation)`."""
    return _fold(key, np.asarray(position, np.uint32))


def seed_at(key: jax.Array, *position: int) -> int:
    """A seed in [0, 2**32) for libraries that take numbers instead of keys."""
    return int(_bits(key_at(key, *position), 1)[0])


def order_at(key: jax.Array, num: int) -> np.ndarray:
    """A random order of `num` items; the length is padded to a power of two, so few programs serve all data sets."""
    return np.argsort(np.asarray(_bits(key, next_power_of_two(num)))[:num], kind="stable")


def next_power_of_two(num: int) -> int:
    """The smallest power of two that is at least `num` (padding buckets keep compiled programs few)."""
    return 1 << max(num - 1, 0).bit_length()


@jax.jit
def _fold(key, position):
    for i in range(position.shape[0]):
        key = jax.random.fold_in(key, position[i])
    return key


@functools.partial(jax.jit, static_argnums=1)
def _bits(key, num):
    return jax.random.bits(key, (num,), jnp.uint32)
