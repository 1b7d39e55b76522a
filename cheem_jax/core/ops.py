"""The four ops of a block, as pytrees (paper section 'Supernet Construction').

Each op is a NamedTuple, and its type is part of jit's cache key. Architectures with the same op
kinds therefore share a compiled function, whichever experts they use.
"""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from cheem_jax.core.kernels import product
from cheem_jax.core.settings import Precision


class Expert(NamedTuple):
    """The plastic layer of a block. F is the hidden width of the MLP for `mlp_down`, and F = D for
    `attn_proj`."""

    weight: Float[Array, "F D"]
    bias: Float[Array, "D"]


class LowRank(NamedTuple):
    """A LoRA pair in row-vector convention. It adds `down @ up` to the weight of an expert."""

    down: Float[Array, "F r"]
    up: Float[Array, "r D"]


class Reuse(NamedTuple):
    """Use an existing expert unchanged; its parameters stay frozen."""

    expert: Expert


class Adapt(NamedTuple):
    """Use a frozen expert with a learned low-rank change."""

    expert: Expert
    pair: LowRank


class New(NamedTuple):
    """Use a new expert, which is learned for the task."""

    expert: Expert


class Skip(NamedTuple):
    """Omit the residual branch that contains the plastic layer."""


Op = Reuse | Adapt | New | Skip
Ops = Sequence[Op]
"""One op per block. The types of the ops are part of the pytree structure."""
Learned = Expert | LowRank
"""Trained parameters of an op."""


def trained_params(op: Op) -> Learned | None:
    """Return the trained parameters of an op: the low-rank pair of Adapt, or the expert of New.
    Return None for Reuse and Skip."""
    match op:
        case Adapt(_, pair):
            return pair
        case New(expert):
            return expert
    return None


def with_learned(op: Op, learned: Any) -> Op:
    """Return a copy of the op with its trained parameters replaced by `learned`. Reuse and Skip are
    returned unchanged."""
    match op:
        case Adapt(expert, _):
            return Adapt(expert, learned)
        case New():
            return New(learned)
    return op


def apply_op(
    op: Reuse | Adapt | New, u: Float[Array, "B N F"], precision: Precision = "float32"
) -> Float[Array, "B N D"]:
    """Compute the output of the plastic layer, before the residual sum."""
    y = product(u, op.expert.weight, precision) + op.expert.bias
    if isinstance(op, Adapt):
        y = y + product(product(u, op.pair.down, precision), op.pair.up, precision)
    return y


def merge(expert: Expert, pair: LowRank) -> Expert:
    """Merge a low-rank pair into its expert. The outputs of the result and of `Adapt(expert, pair)`
    differ by at most 1e-5 of the largest output."""
    return Expert(expert.weight + pair.down @ pair.up, expert.bias)


def truncate(pair: LowRank, rank: int) -> LowRank:
    """Return the pair of the given rank whose product is closest to `down @ up`, by singular value
    decomposition. If the pair does not have a higher rank, it is returned unchanged."""
    if pair.down.shape[1] <= rank:
        return pair
    # With down = Q1 R1 and up = (Q2 R2)^T, only the small matrix R1 R2^T has to be decomposed. The
    # host computes in float64, so the result does not depend on the accelerator.
    down_basis, down_factor = np.linalg.qr(np.asarray(pair.down, np.float64))
    up_basis, up_factor = np.linalg.qr(np.asarray(pair.up, np.float64).T)
    u, singular_values, v = np.linalg.svd(down_factor @ up_factor.T)
    # A narrow layer can have fewer singular values than `rank`; the others are zero.
    num = min(rank, len(singular_values))
    scale = np.sqrt(singular_values[:num])
    columns = [(0, 0), (0, rank - num)]
    down = np.pad(down_basis @ u[:, :num] * scale, columns)
    up = np.pad(up_basis @ v[:num].T * scale, columns).T
    return LowRank(jnp.asarray(down, pair.down.dtype), jnp.asarray(up, pair.up.dtype))


def init_low_rank(key: jax.Array, *, num_inputs: int, width: int, rank: int) -> LowRank:
    """Initialise a low-rank pair as in LoRA: `down` is Kaiming-uniform with a = sqrt(5), and `up`
    is zero. Adapt therefore starts with the output of Reuse."""
    bound = num_inputs**-0.5
    down = jax.random.uniform(key, (num_inputs, rank), minval=-bound, maxval=bound)
    return LowRank(down, jnp.zeros((rank, width)))


def init_new(key: jax.Array, base: Expert, *, how: Literal["random", "copy"] = "random") -> Expert:
    """Initialise New: `random` samples the weight from a standard normal distribution truncated at
    ±2, times 0.02, and sets the bias to zero; `copy` returns the base expert."""
    if how == "copy":
        return base
    weight = 0.02 * jax.random.truncated_normal(key, -2.0, 2.0, base.weight.shape)
    return Expert(weight, jnp.zeros_like(base.bias))
