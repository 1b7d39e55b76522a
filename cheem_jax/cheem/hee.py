"""Hierarchical exploration-exploitation sampling in closed form (paper section 'Supernet Training
via HEE-NAS').

In every table with one row per earlier network (axis E), row 0 is the base network and row i + 1 is
the network of task i. NaN marks a block that the network skips.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from cheem_jax.core.architecture import num_candidates
from cheem_jax.core.keys import next_power_of_two
from cheem_jax.core.settings import Kind


def cosines(
    own_means: Float[np.ndarray, "E L D"],
    new_means: Float[np.ndarray, "E L D"],
    present: Bool[np.ndarray, "E L"],
) -> Float[np.ndarray, "E L"]:
    """Compute cos(mu_l^i, mu_l^{i->t}) for each earlier network and block.

    Args:
        own_means: mu of each earlier network on the images of the task that it was learned for.
        new_means: mu of each earlier network on the images of the new task.
        present: whether the earlier network has an expert in the block; the cosine is NaN if not.
    """
    a = own_means.astype(np.float64)
    b = new_means.astype(np.float64)
    norms = np.linalg.norm(a, axis=-1) * np.linalg.norm(b, axis=-1)
    return np.where(present, (a * b).sum(axis=-1) / np.maximum(norms, 1e-12), np.nan)


def norm_cosine(
    cosine: Float[np.ndarray, "E L"], neutral: Bool[np.ndarray, "E"] | None = None
) -> Float[np.ndarray, "E L"]:
    """Compute S = 2 (c - c_min) / (c_max - c_min) - 1, with the extremes over all blocks and
    earlier networks.

    Networks marked in `neutral` have unknown means: their S is 0, and the extremes ignore them. If
    all cosines are identical, every S is 0.
    """
    counted = cosine if neutral is None else cosine[~neutral]
    counted = counted[~np.isnan(counted)]
    similarity = np.where(np.isnan(cosine), np.nan, 0.0)
    if counted.size and counted.max() > counted.min():
        low = counted.min()
        high = counted.max()
        similarity = 2 * (cosine - low) / (high - low) - 1
    if neutral is not None:
        similarity[neutral] = 0.0
    return similarity


def first_level(similarity: Float[np.ndarray, "E"]) -> tuple[Float[np.ndarray, "E"], float]:
    """Compute psi of one block from the `similarity` S of each earlier network.

    Returns the probability of each earlier network (0 if the network skips the block), and the
    probability of Aux. Aux stands for New and Skip, and its similarity is -max S.
    """
    present = ~np.isnan(similarity)
    if not present.any():
        return np.zeros_like(similarity), 1.0
    scores = np.append(similarity[present], -similarity[present].max())
    weights = np.exp(scores - scores.max())
    weights /= weights.sum()
    psi = np.zeros_like(similarity)
    psi[present] = weights[:-1]
    return psi, float(weights[-1])


def exploit_table(
    similarity: Float[np.ndarray, "E L"],
    experts: Sequence[Sequence[int | None]],
    sizes: Sequence[int],
) -> Float[np.ndarray, "L C"]:
    """Compute the exact probability of each candidate in each block under exploitation.

    `experts[i][l]` is the index of the expert that network i uses in block l, or None if the
    network skips the block. At the first level of the hierarchy, each network has a separate
    probability (`first_level`). If two networks use the same expert, their probabilities are added
    up in the candidates of this expert. The candidate axis C is padded with zeros to a power of
    two.
    """
    table = _empty(sizes)
    for block, n in enumerate(sizes):
        psi, aux = first_level(similarity[:, block])
        for i in np.flatnonzero(psi).tolist():
            expert = experts[i][block]
            assert expert is not None, "a network that skips a block has no similarity there"
            reuse = 1.0 / (1.0 + np.exp(-similarity[i, block]))
            table[block, expert] += psi[i] * reuse
            table[block, n + expert] += psi[i] * (1.0 - reuse)
        table[block, 2 * n : 2 * n + 2] = aux / 2
    return table


def uniform_table(sizes: Sequence[int]) -> Float[np.ndarray, "L C"]:
    """Make the table for exploration: the 2n + 2 candidates of a block with n experts have the same
    probability."""
    table = _empty(sizes)
    for block, n in enumerate(sizes):
        table[block, : num_candidates(n)] = 1.0
    return table / table.sum(axis=1, keepdims=True)


def without(
    table: Float[np.ndarray, "L C"], removed: Sequence[Kind], sizes: Sequence[int]
) -> Float[np.ndarray, "L C"]:
    """Set the probability of the `removed` op kinds to 0, and normalise each block.

    If only removed ops had a probability above 0 in a block, the remaining candidates of the block
    have equal probabilities.
    """
    if not removed:
        return table
    allowed = np.zeros_like(table)
    for block, n in enumerate(sizes):
        kinds = ["reuse"] * n + ["adapt"] * n + ["new", "skip"]
        allowed[block, : len(kinds)] = ~np.isin(kinds, removed)
    rest = table * allowed
    rest = np.where(rest.any(axis=1, keepdims=True), rest, allowed)
    return rest / rest.sum(axis=1, keepdims=True)


@functools.partial(jax.jit, static_argnames="num")
def sample(key: jax.Array, table: Float[Array, "L C"], *, num: int) -> Int[Array, "num L"]:
    """Sample `num` architectures as candidate indices. Architecture i depends only on `key`,
    `table` and i."""
    draw = jax.vmap(lambda i: jax.random.categorical(jax.random.fold_in(key, i), jnp.log(table)))
    return draw(jnp.arange(num))


@functools.partial(jax.jit, static_argnames="num")
def sample_mixed(
    key: jax.Array,
    exploit: Float[Array, "L C"],
    uniform: Float[Array, "L C"],
    epsilon: float | Float[Array, ""],
    *,
    num: int,
) -> Int[Array, "num L"]:
    """Sample `num` architectures. Each architecture is sampled from `uniform` with probability
    `epsilon`, and from `exploit` otherwise."""

    def draw(i):
        mode_key, draw_key = jax.random.split(jax.random.fold_in(key, i))
        table = jnp.where(jax.random.bernoulli(mode_key, epsilon), uniform, exploit)
        return jax.random.categorical(draw_key, jnp.log(table))

    return jax.vmap(draw)(jnp.arange(num))


def _empty(sizes: Sequence[int]) -> np.ndarray:
    return np.zeros((len(sizes), next_power_of_two(num_candidates(max(sizes)))))
