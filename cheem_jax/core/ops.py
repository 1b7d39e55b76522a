"""The four ops of a block, as pytrees (paper section 'Supernet Construction').

Each op is a NamedTuple, whose type is part of jit's cache key: two architectures with the same op
kinds share one compiled function, for any experts.
"""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from cheem_jax.core.kernels import product
from cheem_jax.core.settings import Precision


class Expert(NamedTuple):
    """The plastic layer of one block: F = 4D for `mlp_down`, D for `attn_proj`."""

    weight: Float[Array, "F D"]
    bias: Float[Array, "D"]


class LowRank(NamedTuple):
    """A LoRA pair in row-vector convention: the learned change of the weight is `down @ up`."""

    down: Float[Array, "F r"]
    up: Float[Array, "r D"]


class Reuse(NamedTuple):
    """An expert unchanged and frozen."""

    expert: Expert


class Adapt(NamedTuple):
    """A frozen expert plus a learned low-rank change."""

    expert: Expert
    pair: LowRank


class New(NamedTuple):
    """A new expert, learned from scratch."""

    expert: Expert


class Skip(NamedTuple):
    """No residual branch: the branch with the plastic layer is omitted."""


Op = Reuse | Adapt | New | Skip
Ops = Sequence[Op]
"""One op per block; the types of the ops are part of the pytree's structure."""
Learned = Expert | LowRank
"""Parameters of an op that are trained."""


def learned_of(op: Op) -> Learned | None:
    """The trained parameters of an op: Adapt's pair or New's expert; None for Reuse and Skip."""
    match op:
        case Adapt(_, pair):
            return pair
        case New(expert):
            return expert
    return None


def with_learned(op: Op, learned: Any) -> Op:
    """The op with other trained parameters."""
    match op:
        case Adapt(expert, _):
            return Adapt(expert, learned)
        case New():
            return New(learned)
    return op


def apply_op(
    op: Reuse | Adapt | New, u: Float[Array, "B N F"], precision: Precision = "float32"
) -> Float[Array, "B N D"]:
    """The output of the plastic layer, before the residual sum."""
    y = product(u, op.expert.weight, precision) + op.expert.bias
    if isinstance(op, Adapt):
        y = y + product(product(u, op.pair.down, precision), op.pair.up, precision)
    return y


def merge(expert: Expert, pair: LowRank) -> Expert:
    """The dense expert that is equivalent to `Adapt(expert, pair)`, up to 1e-5 of the largest
    output."""
    return Expert(expert.weight + pair.down @ pair.up, expert.bias)


def init_low_rank(key: jax.Array, *, num_inputs: int, width: int, rank: int) -> LowRank:
    """LoRA's initialisation: `down` Kaiming-uniform with a = sqrt(5), `up` zero; Adapt starts as
    Reuse."""
    bound = num_inputs**-0.5
    down = jax.random.uniform(key, (num_inputs, rank), minval=-bound, maxval=bound)
    return LowRank(down, jnp.zeros((rank, width)))


def init_new(key: jax.Array, base: Expert, *, how: Literal["random", "copy"] = "random") -> Expert:
    """Initialise New: truncated normal of deviation 0.02 and zero bias, or a copy of the base."""
    if how == "copy":
        return base
    weight = 0.02 * jax.random.truncated_normal(key, -2.0, 2.0, base.weight.shape)
    return Expert(weight, jnp.zeros_like(base.bias))
