"""The four ops a task may choose at a block, as pytrees (paper section 'Supernet Construction').

Each op is a NamedTuple whose type is part of jit's cache key: two architectures with the same kinds
share one compiled program, whichever experts they hold.
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
    """An expert of its own, learned from scratch."""

    expert: Expert


class Skip(NamedTuple):
    """The residual branch that holds the plastic layer is left out whole."""


Op = Reuse | Adapt | New | Skip
Ops = Sequence[Op]
"""One op per block: a static pytree, since the types of the ops are part of its structure."""
Learned = Expert | LowRank
"""Parameters that gradient steps change."""


def learned_of(op: Op) -> Learned | None:
    """What gradient steps change in an op: Adapt's pair, New's expert, nothing in Reuse and
    Skip."""
    match op:
        case Adapt(_, pair):
            return pair
        case New(expert):
            return expert
    return None


def with_learned(op: Op, learned: Any) -> Op:
    """The same op with other learned parameters."""
    match op:
        case Adapt(expert, _):
            return Adapt(expert, learned)
        case New():
            return New(learned)
    return op


def apply_op(
    op: Reuse | Adapt | New, u: Float[Array, "B N F"], precision: Precision = "float32"
) -> Float[Array, "B N D"]:
    """The plastic layer's output before the residual sum."""
    y = product(u, op.expert.weight, precision) + op.expert.bias
    if isinstance(op, Adapt):
        y = y + product(product(u, op.pair.down, precision), op.pair.up, precision)
    return y


def merge(expert: Expert, pair: LowRank) -> Expert:
    """The dense expert that computes what `Adapt(expert, pair)` does (law: equal to 1e-5 of the
    largest entry)."""
    return Expert(expert.weight + pair.down @ pair.up, expert.bias)


def init_low_rank(key: jax.Array, *, num_inputs: int, width: int, rank: int) -> LowRank:
    """LoRA's own start: `down` Kaiming-uniform with a = sqrt(5), `up` zero, so Adapt begins as
    Reuse."""
    bound = num_inputs**-0.5
    down = jax.random.uniform(key, (num_inputs, rank), minval=-bound, maxval=bound)
    return LowRank(down, jnp.zeros((rank, width)))


def init_new(
    key: jax.Array, base: Expert, *, how: Literal["random", "copy", "zero"] = "random"
) -> Expert:
    """A New expert: truncated normal 0.02 and zero bias (default), a copy of the base, or zeros."""
    match how:
        case "random":
            weight = 0.02 * jax.random.truncated_normal(key, -2.0, 2.0, base.weight.shape)
            return Expert(weight, jnp.zeros_like(base.bias))
        case "copy":
            return base
        case "zero":
            return Expert(jnp.zeros_like(base.weight), jnp.zeros_like(base.bias))
