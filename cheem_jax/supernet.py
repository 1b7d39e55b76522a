"""The supernet of a new task: what can be drawn at each block, and the parameters behind it.

A candidate's parameters (and its Adam moments) are made when it is first drawn, from a key that depends only on its
position, so memory grows with what was explored and not with the pool.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax

from cheem_jax.architecture import Architecture, Choice, encode
from cheem_jax.keys import key_at, next_power_of_two
from cheem_jax.ops import Adapt, Expert, LowRank, New, Op, Reuse, Skip, init_low_rank, init_new
from cheem_jax.pool import Head, Pool, dense_expert, pool_sizes

_adam = optax.scale_by_adam()


class OpLearner(NamedTuple):
    """A learnable op with Adam's moments and step count of its own: where it is not drawn, it keeps all three."""

    params: Expert | LowRank
    adam: optax.OptState


class HeadLearner(NamedTuple):
    """The task's head, which every step updates."""

    params: Head
    adam: optax.OptState


Learner = TypeVar("Learner", OpLearner, HeadLearner)


@dataclasses.dataclass(frozen=True)
class OpSettings:
    """How the learnable ops of a block begin."""

    rank: int = 16
    """Rank of Adapt's low-rank pair; the paper states none, and 40 gives 68.1 GFLOPs for ViT-B where it prints 68.2."""
    new_init: Literal["random", "copy", "zero"] = "random"
    """Start of New: truncated normal 0.02, a copy of the base expert, or zeros."""

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"rank is {self.rank}; a low-rank pair needs at least rank 1")


class Supernet:
    """Dense frozen experts and lazily made learners of one task.

    `learners` maps (block, candidate index) to an `OpLearner`; `head` is shared by all architectures.
    """

    def __init__(
        self,
        key: jax.Array,
        pool: Pool,
        num_classes: int,
        settings: OpSettings,
        experts: Sequence[Sequence[Expert]] | None = None,
    ):
        self.key, self.pool, self.settings, self.num_classes = key, pool, settings, num_classes
        self.sizes = pool_sizes(pool)
        self.experts = experts or [[dense_expert(block, i) for i in range(len(block))] for block in pool]
        self.learners: dict[tuple[int, int], OpLearner] = {}
        width = self.experts[0][0].bias.shape[0]
        # block index L is the head's place among the keys
        self.head = init_head_learner(key_at(key, len(pool), 0), width, next_power_of_two(num_classes))

    def untrained(self) -> "Supernet":
        """A supernet like this one before its first step."""
        return Supernet(self.key, self.pool, self.num_classes, self.settings, self.experts)

    def frozen(self, block: int, choice: Choice) -> Expert | None:
        """The frozen expert behind a choice; None for New and Skip."""
        return None if choice.expert is None else self.experts[block][choice.expert]

    def learner(self, block: int, choice: Choice) -> OpLearner | None:
        """The learner behind Adapt and New, made now if this is its first draw; None for Reuse and Skip."""
        if choice.kind not in ("adapt", "new"):
            return None
        place = (block, self.code(block, choice))
        if place not in self.learners:
            key, base = key_at(self.key, *place), self.experts[block][0]
            if choice.kind == "adapt":
                self.learners[place] = init_pair_learner(key, base.weight.shape, self.settings.rank)
            else:
                self.learners[place] = init_new_learner(key, base, self.settings.new_init)
        return self.learners[place]

    def store(self, block: int, choice: Choice, learner: OpLearner) -> None:
        """Put back a learner after its update."""
        self.learners[block, self.code(block, choice)] = learner

    def code(self, block: int, choice: Choice) -> int:
        """Candidate index of a choice at a block."""
        return int(encode((choice,), self.sizes[block : block + 1])[0])

    def inherit(self, trained: "Supernet", architecture: Architecture) -> None:
        """Begin with what another supernet has learned for an architecture; Adam begins anew."""
        for block, choice in enumerate(architecture):
            learner = trained.learner(block, choice)
            if learner is not None:
                self.store(block, choice, _begun_again(learner))
        self.head = _begun_again(trained.head)

    def arrays(self) -> dict[str, Any]:
        """Everything learned so far with its moments, as arrays by name."""
        learners = {f"{block}:{code}": _named(learner) for (block, code), learner in self.learners.items()}
        return {"head": _named(self.head)} | ({"learners": learners} if learners else {})

    def restore(self, arrays: Mapping[str, Any]) -> None:
        """Go on with what `arrays` gave."""
        self.head = HeadLearner(*_unnamed(Head, arrays["head"]))
        for place, leaves in arrays.get("learners", {}).items():
            block, code = map(int, place.split(":"))
            kind = LowRank if "down" in leaves["params"] else Expert
            self.learners[block, code] = OpLearner(*_unnamed(kind, leaves))

    def ops(self, architecture: Architecture) -> list[Op]:
        """The ops of an architecture with the parameters behind them."""
        found: list[Op] = []
        for block, choice in enumerate(architecture):
            expert, learner = self.frozen(block, choice), self.learner(block, choice)
            match choice.kind:
                case "reuse":
                    found.append(Reuse(cast(Expert, expert)))
                case "adapt":
                    found.append(Adapt(cast(Expert, expert), cast(LowRank, cast(OpLearner, learner).params)))
                case "new":
                    found.append(New(cast(Expert, cast(OpLearner, learner).params)))
                case "skip":
                    found.append(Skip())
        return found

    def learned(self, architecture: Architecture) -> dict[int, Expert | LowRank]:
        """Per block the learned parameters of an architecture's Adapt and New."""
        found = {}
        for block, choice in enumerate(architecture):
            learner = self.learner(block, choice)
            if learner is not None:
                found[block] = learner.params
        return found

    def trained_head(self) -> Head:
        """The head without its padding."""
        weight, bias = (np.asarray(leaf) for leaf in self.head.params)
        return Head(jnp.asarray(weight[:, : self.num_classes]), jnp.asarray(bias[: self.num_classes]))


def _named(learner: OpLearner | HeadLearner) -> dict[str, Any]:
    adam = cast(Any, learner.adam)  # ScaleByAdamState, which optax types as any state
    return {
        "params": learner.params._asdict(),
        "count": adam.count,
        "mu": adam.mu._asdict(),
        "nu": adam.nu._asdict(),
    }


def _unnamed(kind: type[Expert | LowRank | Head], leaves: Mapping[str, Any]) -> tuple[Any, optax.OptState]:
    params, mu, nu = (kind(**jax.tree.map(jnp.asarray, leaves[name])) for name in ("params", "mu", "nu"))
    return params, optax.ScaleByAdamState(jnp.asarray(leaves["count"]), mu, nu)


@functools.partial(jax.jit, static_argnums=(1, 2))
def init_pair_learner(key, shape: tuple[int, int], rank: int) -> OpLearner:
    """A low-rank pair at its start with fresh moments."""
    pair = init_low_rank(key, num_inputs=shape[0], width=shape[1], rank=rank)
    return OpLearner(pair, _adam.init(pair))


@functools.partial(jax.jit, static_argnums=2)
def init_new_learner(key, base: Expert, how: Literal["random", "copy", "zero"]) -> OpLearner:
    """A New expert at its start with fresh moments."""
    expert = init_new(key, base, how=how)
    return OpLearner(expert, _adam.init(expert))


@jax.jit
def _begun_again(learner: Learner) -> Learner:
    """The same parameters with fresh moments."""
    return learner._replace(adam=_adam.init(learner.params))


@functools.lru_cache
def blank_learners(num_inputs: int, width: int, rank: int) -> tuple[OpLearner, OpLearner]:
    """Zeros in the shapes of Adapt's and New's learners, to fill places that nobody reads."""
    shapes = jax.eval_shape(
        lambda key, base: (
            init_pair_learner(key, (num_inputs, width), rank),
            init_new_learner(key, Expert(*base), "zero"),
        ),
        jax.random.key(0),
        (jax.ShapeDtypeStruct((num_inputs, width), jnp.float32), jax.ShapeDtypeStruct((width,), jnp.float32)),
    )
    return jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes)


@functools.partial(jax.jit, static_argnums=(1, 2))
def init_head_learner(key, width: int, num_outputs: int) -> HeadLearner:
    """A head (truncated normal 0.02, zero bias) padded to a power of two outputs, with fresh moments."""
    weight = 0.02 * jax.random.truncated_normal(key, -2.0, 2.0, (width, num_outputs))
    head = Head(weight, jnp.zeros(num_outputs))
    return HeadLearner(head, _adam.init(head))


@jax.jit
def adam_update(learner: Learner, grads: Expert | LowRank | Head, learning_rate, loss) -> Learner:
    """One Adam step (no weight decay); the bias correction counts this learner's own steps.

    Where the step's (guarded) loss is no finite number the learner stays as it was.
    """
    steps, adam = _adam.update(grads, learner.adam)
    params = jax.tree.map(lambda p, s: p - learning_rate * s, learner.params, steps)
    updated = learner._replace(params=params, adam=adam)
    return jax.tree.map(lambda new, old: jnp.where(jnp.isfinite(loss), new, old), updated, learner)


def guard(loss: jax.Array, grads: Any) -> jax.Array:
    """The loss, or NaN where one of its gradients is no finite number: such a step must not reach any parameter."""
    finite = [jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(grads)]
    return jnp.where(jnp.stack(finite).all(), loss, jnp.nan) if finite else loss
