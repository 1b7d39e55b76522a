"""The supernet of a new task: the candidates of each block and their learned parameters (paper
section 'Supernet Construction').

`Supernet` is constant during a task. `SupernetState` is an immutable pytree, and every step returns
a new one. A candidate's parameters are initialised when it is first sampled, from a key that
depends only on the block and the candidate. Memory therefore grows with the number of sampled
candidates, not with the size of the pool.
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
from cheem_jax.core.ops import Expert, LowRank, Op, init_low_rank, init_new, truncate
from cheem_jax.core.pool import Head
from cheem_jax.core.settings import Kind
from cheem_jax.engine.executor import Place, Setup, make_ops

_adam = optax.scale_by_adam()


class OpLearner(NamedTuple):
    """A learnable op with its Adam moments and step count. Steps that do not sample the op leave
    all three unchanged."""

    params: Expert | LowRank
    adam: optax.OptState


class HeadLearner(NamedTuple):
    """The task's head and its Adam state; every step updates them."""

    params: Head
    adam: optax.OptState


Learner = TypeVar("Learner", OpLearner, HeadLearner)


class SupernetState(NamedTuple):
    """The learned part of a supernet: one learner per sampled candidate, and one head for all
    architectures."""

    learners: Mapping[Place, OpLearner]
    """Learners keyed by block and choice, such as `(3, Choice("adapt", 0))`."""
    head: HeadLearner


@dataclasses.dataclass(frozen=True, eq=False)
class Supernet:
    """The candidates of each block, and the initialisation of their learners. All methods are pure
    functions."""

    key: jax.Array
    """Root key of the parameters; the key of a candidate depends on its block and its index."""
    experts: Sequence[Sequence[Expert]]
    """Frozen dense experts of each block (`pool.dense_experts`), the base expert first."""
    num_classes: int
    settings: OpSettings = OpSettings()

    @functools.cached_property
    def sizes(self) -> tuple[int, ...]:
        """Number of experts in each block."""
        return tuple(map(len, self.experts))

    @functools.cached_property
    def setup(self) -> Setup:
        """The executor's inputs for training this supernet."""
        init = functools.partial(init_learner, settings=self.settings)
        shapes = [
            jax.eval_shape(functools.partial(init, kind=kind), self.key, self.experts[0][0])
            for kind in ("adapt", "new")
        ]
        adapt, new = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
        return Setup(
            self.experts, self.num_classes, adam_update(self.settings.new_rate), (adapt, new)
        )

    def init(self) -> SupernetState:
        """Make the state before the first step: an initialised head and no learners."""
        width = self.experts[0][0].bias.shape[0]
        # blocks use the indices 0 to L - 1, so the head's key is made from the unused index L
        key = key_at(self.key, len(self.experts), 0)
        return SupernetState({}, init_head_learner(key, width, next_power_of_two(self.num_classes)))

    def start_from(self, learned: Mapping[Place, Expert | LowRank], head: Head) -> SupernetState:
        """Make a state from a network's learned parameters and a padded head, with zero Adam
        moments."""
        learners = {
            place: OpLearner(params, _adam.init(params)) for place, params in learned.items()
        }
        return SupernetState(learners, HeadLearner(head, _adam.init(head)))

    def with_learners(
        self, state: SupernetState, architectures: Iterable[Architecture]
    ) -> SupernetState:
        """Initialise the Adapt and New learners of `architectures` that the state does not
        contain."""
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
        """Return the learner of an Adapt or New at `place`, newly initialised if the candidate was
        never sampled. The state does not change."""
        return state.learners[place] if place in state.learners else self._begin(*place)

    def ops(self, state: SupernetState, architecture: Architecture) -> list[Op]:
        """Return the ops of an architecture with their parameters."""
        return make_ops(
            architecture, self.experts, self.with_learners(state, [architecture]).learners
        )

    def learned(
        self, state: SupernetState, architecture: Architecture
    ) -> dict[int, Expert | LowRank]:
        """Return the parameters to store of an architecture's Adapt and New, keyed by block. Pairs
        are truncated to the rank that is stored."""
        learned = {
            place[0]: self.learner(state, place).params for place in learned_places(architecture)
        }
        rank = self.settings.stored_rank
        return {
            block: truncate(params, rank) if isinstance(params, LowRank) else params
            for block, params in learned.items()
        }

    def trained_head(self, state: SupernetState) -> Head:
        """Return the head without its padding."""
        weight, bias = (np.asarray(leaf) for leaf in state.head.params)
        return Head(
            jnp.asarray(weight[:, : self.num_classes]), jnp.asarray(bias[: self.num_classes])
        )

    def inherit(self, state: SupernetState, architecture: Architecture) -> SupernetState:
        """Make a state with the head and with the learners of one architecture; all Adam moments
        are reset to zero."""
        places = learned_places(architecture)
        learners = {place: _restarted(self.learner(state, place)) for place in places}
        return SupernetState(learners, _restarted(state.head))

    def frozen(self, block: int, choice: Choice) -> Expert | None:
        """Return the frozen expert of a choice, or None for New and Skip."""
        return None if choice.expert is None else self.experts[block][choice.expert]

    def code(self, block: int, choice: Choice) -> int:
        """Return the candidate index of a choice in a block."""
        return int(encode((choice,), self.sizes[block : block + 1])[0])

    def arrays(self, state: SupernetState) -> dict[str, Any]:
        """Convert a state to a dict of arrays. The keys of learners are "block:candidate index"."""
        learners = {
            f"{place[0]}:{self.code(*place)}": _named(learner)
            for place, learner in state.learners.items()
        }
        return {"head": _named(state.head)} | ({"learners": learners} if learners else {})

    def from_arrays(self, arrays: Mapping[str, Any]) -> SupernetState:
        """Restore a state from the result of `arrays`."""
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
    """Return (block, choice) for each Adapt and New of an architecture, in the order of the
    blocks."""
    return [
        (block, choice)
        for block, choice in enumerate(architecture)
        if choice.kind in ("adapt", "new")
    ]


def _named(learner: OpLearner | HeadLearner) -> dict[str, Any]:
    # the type is ScaleByAdamState, but optax declares only the base type of this class
    adam = cast(Any, learner.adam)
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
    """Initialise the learner of an Adapt or New; `base` is the base expert of the block."""
    if kind == "adapt":
        params = init_low_rank(
            key, num_inputs=base.weight.shape[0], width=base.weight.shape[1], rank=settings.rank
        )
    else:
        params = init_new(key, base, how=settings.new_init)
    return OpLearner(params, _adam.init(params))


@jax.jit
def _restarted(learner: Learner) -> Learner:
    """Reset the Adam state of a learner."""
    return learner._replace(adam=_adam.init(learner.params))


@functools.partial(jax.jit, static_argnums=(1, 2))
def init_head_learner(key, width: int, num_outputs: int) -> HeadLearner:
    """Initialise a head: weights from 0.02 times a standard normal truncated at ±2, zero bias.
    `num_outputs` is the number of classes padded to a power of two."""
    weight = 0.02 * jax.random.truncated_normal(key, -2.0, 2.0, (width, num_outputs))
    head = Head(weight, jnp.zeros(num_outputs))
    return HeadLearner(head, _adam.init(head))


@functools.cache
def adam_update(new_rate: float = 1.0) -> Callable[..., Any]:
    """Make a function that updates a learner by one Adam step without weight decay. The learning
    rate of New is multiplied by `new_rate`.

    Bias correction uses the step count of the learner. If the loss of the step is non-finite (see
    `executor.guard`), the learner does not change. Calls with the same `new_rate` return the same
    function.
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
