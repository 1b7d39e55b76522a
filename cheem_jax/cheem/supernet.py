"""The supernet of a new task: what can be sampled at each block, and what is learned behind it
(paper section 'Supernet Construction').

`Supernet` is what stays as it is while a task learns; `SupernetState` is what changes, an immutable
pytree that every step replaces. A candidate's parameters begin where it is first sampled, from a
key that depends only on its place, so memory grows with what was explored and not with the pool.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax

from cheem_jax.cheem.config import OpSettings
from cheem_jax.core.architecture import Architecture, Choice, decode, encode
from cheem_jax.core.keys import key_at, next_power_of_two
from cheem_jax.core.ops import Expert, LowRank, Op, init_low_rank, init_new
from cheem_jax.core.pool import Head
from cheem_jax.core.settings import Kind
from cheem_jax.engine.executor import Place, Setup, ops_of

_adam = optax.scale_by_adam()


class OpLearner(NamedTuple):
    """A learnable op with Adam's moments and step count of its own: where it is not sampled, it
    keeps all three."""

    params: Expert | LowRank
    adam: optax.OptState


class HeadLearner(NamedTuple):
    """The task's head, which every step updates."""

    params: Head
    adam: optax.OptState


Learner = TypeVar("Learner", OpLearner, HeadLearner)


class SupernetState(NamedTuple):
    """All that a task learns: a learner for each candidate that was sampled, and the head that all
    of them share."""

    learners: Mapping[Place, OpLearner]
    """By block and choice, such as `(3, Choice("adapt", 0))`."""
    head: HeadLearner


@dataclasses.dataclass(frozen=True, eq=False)
class Supernet:
    """What a task may choose at each block, and how what it learns begins. All methods are pure
    functions."""

    key: jax.Array
    """Root of the keys of all parameters; a candidate's key follows from its place."""
    experts: Sequence[Sequence[Expert]]
    """The frozen dense experts of each block (`pool.dense_experts`); the base's is the first."""
    num_classes: int
    settings: OpSettings = OpSettings()

    @functools.cached_property
    def sizes(self) -> tuple[int, ...]:
        """Experts per block."""
        return tuple(map(len, self.experts))

    @functools.cached_property
    def setup(self) -> Setup:
        """What an executor has to know of it to train it."""
        begun = functools.partial(init_learner, settings=self.settings)
        shapes = [
            jax.eval_shape(functools.partial(begun, kind=kind), self.key, self.experts[0][0])
            for kind in ("adapt", "new")
        ]
        adapt, new = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
        return Setup(
            self.experts, self.num_classes, adam_update(self.settings.new_rate), (adapt, new)
        )

    def init(self) -> SupernetState:
        """The state before the first step: a head, and no candidate sampled."""
        width = self.experts[0][0].bias.shape[0]
        # block index L is the head's place among the keys
        key = key_at(self.key, len(self.experts), 0)
        return SupernetState({}, init_head_learner(key, width, next_power_of_two(self.num_classes)))

    def begun_with(self, learned: Mapping[Place, Expert | LowRank], head: Head) -> SupernetState:
        """A state that begins with a network's own parameters and a padded head."""
        learners = {
            place: OpLearner(params, _adam.init(params)) for place, params in learned.items()
        }
        return SupernetState(learners, HeadLearner(head, _adam.init(head)))

    def with_learners(
        self, state: SupernetState, architectures: Iterable[Architecture]
    ) -> SupernetState:
        """The state with a learner for each Adapt and New of these architectures; those it has stay
        as they are."""
        places = {
            place for architecture in set(architectures) for place in learned_places(architecture)
        }
        missing = sorted(places - state.learners.keys())
        if not missing:
            return state
        return state._replace(
            learners={**state.learners, **{place: self._begin(*place) for place in missing}}
        )

    def learner(self, state: SupernetState, place: Place) -> OpLearner:
        """The learner of an Adapt or New, at its start where it was never sampled; the state does
        not change."""
        return state.learners[place] if place in state.learners else self._begin(*place)

    def ops(self, state: SupernetState, architecture: Architecture) -> list[Op]:
        """The ops of an architecture with the parameters behind them."""
        return ops_of(
            architecture, self.experts, self.with_learners(state, [architecture]).learners
        )

    def learned(
        self, state: SupernetState, architecture: Architecture
    ) -> dict[int, Expert | LowRank]:
        """Per block the learned parameters of an architecture's Adapt and New."""
        return {
            place[0]: self.learner(state, place).params for place in learned_places(architecture)
        }

    def trained_head(self, state: SupernetState) -> Head:
        """The head without its padding."""
        weight, bias = (np.asarray(leaf) for leaf in state.head.params)
        return Head(
            jnp.asarray(weight[:, : self.num_classes]), jnp.asarray(bias[: self.num_classes])
        )

    def inherit(self, state: SupernetState, architecture: Architecture) -> SupernetState:
        """What `state` has learned for one architecture, with fresh moments; nothing of the other
        candidates."""
        places = learned_places(architecture)
        learners = {place: _begun_again(self.learner(state, place)) for place in places}
        return SupernetState(learners, _begun_again(state.head))

    def frozen(self, block: int, choice: Choice) -> Expert | None:
        """The frozen expert behind a choice; None for New and Skip."""
        return None if choice.expert is None else self.experts[block][choice.expert]

    def code(self, block: int, choice: Choice) -> int:
        """Candidate index of a choice at a block."""
        return int(encode((choice,), self.sizes[block : block + 1])[0])

    def arrays(self, state: SupernetState) -> dict[str, Any]:
        """A state as arrays by name, learners by "block:candidate index"."""
        learners = {
            f"{place[0]}:{self.code(*place)}": _named(learner)
            for place, learner in state.learners.items()
        }
        return {"head": _named(state.head)} | ({"learners": learners} if learners else {})

    def from_arrays(self, arrays: Mapping[str, Any]) -> SupernetState:
        """Inverse of `arrays`."""
        learners = {}
        for name, leaves in arrays.get("learners", {}).items():
            block, code = map(int, name.split(":"))
            (choice,) = decode([code], self.sizes[block : block + 1])
            kind = LowRank if choice.kind == "adapt" else Expert
            learners[block, choice] = OpLearner(*_unnamed(kind, leaves))
        return SupernetState(learners, HeadLearner(*_unnamed(Head, arrays["head"])))

    def _begin(self, block: int, choice: Choice) -> OpLearner:
        key = key_at(self.key, block, self.code(block, choice))
        return init_learner(key, self.experts[block][0], kind=choice.kind, settings=self.settings)


def learned_places(architecture: Architecture) -> list[Place]:
    """The places of an architecture's Adapt and New, in the order of the blocks."""
    return [
        (block, choice)
        for block, choice in enumerate(architecture)
        if choice.kind in ("adapt", "new")
    ]


def _named(learner: OpLearner | HeadLearner) -> dict[str, Any]:
    adam = cast(Any, learner.adam)  # ScaleByAdamState, which optax types as any state
    return {
        "params": learner.params._asdict(),
        "count": adam.count,
        "mu": adam.mu._asdict(),
        "nu": adam.nu._asdict(),
    }


def _unnamed(
    kind: type[Expert | LowRank | Head], leaves: Mapping[str, Any]
) -> tuple[Any, optax.OptState]:
    params, mu, nu = (
        kind(**jax.tree.map(jnp.asarray, leaves[name])) for name in ("params", "mu", "nu")
    )
    return params, optax.ScaleByAdamState(jnp.asarray(leaves["count"]), mu, nu)


@functools.partial(jax.jit, static_argnames=("kind", "settings"))
def init_learner(key: jax.Array, base: Expert, *, kind: Kind, settings: OpSettings) -> OpLearner:
    """The learner of an Adapt or a New at its start; `base` is the block's expert 0."""
    if kind == "adapt":
        params = init_low_rank(
            key, num_inputs=base.weight.shape[0], width=base.weight.shape[1], rank=settings.rank
        )
    else:
        params = init_new(key, base, how=settings.new_init)
    return OpLearner(params, _adam.init(params))


@jax.jit
def _begun_again(learner: Learner) -> Learner:
    """The same parameters with fresh moments."""
    return learner._replace(adam=_adam.init(learner.params))


@functools.partial(jax.jit, static_argnums=(1, 2))
def init_head_learner(key, width: int, num_outputs: int) -> HeadLearner:
    """A head (truncated normal 0.02, zero bias) padded to a power of two outputs, with fresh
    moments."""
    weight = 0.02 * jax.random.truncated_normal(key, -2.0, 2.0, (width, num_outputs))
    head = Head(weight, jnp.zeros(num_outputs))
    return HeadLearner(head, _adam.init(head))


@functools.cache
def adam_update(new_rate: float = 1.0) -> Callable[..., Any]:
    """One Adam step (no weight decay) of a learner, where New's rate is a multiple of the others'.

    The bias correction counts this learner's own steps. Where the step's loss is non-finite (see
    `executor.guard`) the learner stays as it was. The same multiple gives the same function.
    """

    @jax.jit
    def update(learner: Learner, grads: Expert | LowRank | Head, learning_rate, loss) -> Learner:
        rate = new_rate * learning_rate if isinstance(learner.params, Expert) else learning_rate
        steps, adam = _adam.update(grads, learner.adam)
        params = jax.tree.map(lambda p, s: p - rate * s, learner.params, steps)
        updated = learner._replace(params=params, adam=adam)
        return jax.tree.map(
            lambda new, old: jnp.where(jnp.isfinite(loss), new, old), updated, learner
        )

    return update
