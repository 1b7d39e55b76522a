"""One program for every architecture: op kinds are data, and equal blocks run in a loop on the device.

Where the host's dispatch is the limit (a small backbone on a large accelerator) many training steps run in one call:
their architectures are drawn beforehand, and every parameter they touch travels in a table with one slot per step, so
the program depends on the number of steps per call and not on the pool. The price: no block knows at compile time that
nothing before it learns, so the backward pass always runs to the first block.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Bool, Float, Int

from cheem_jax.backbone.vit import Block, ViT, summary
from cheem_jax.core.architecture import Architecture, Choice
from cheem_jax.core.ops import KINDS, Adapt, Expert, LowRank, New, Placement, Reuse, Skip
from cheem_jax.engine.executor import (
    Batch,
    Executor,
    Gather,
    Learners,
    Mask,
    Network,
    Place,
    Setup,
    Step,
    Tokens,
    Trained,
    Update,
    guard,
)

T = TypeVar("T")
SKIP = KINDS.index("skip")
NEW = Choice("new")


class Drawn(NamedTuple):
    """One op per block as data; experts and pairs may hold anything where the op kind has no use for them."""

    kinds: Int[Array, "L"]
    experts: Expert
    pairs: LowRank | None
    """None in passes that learn nothing: their pairs are merged."""


class Slots(NamedTuple):
    """All that some steps touch: per block K frozen experts, K learners of pairs, and New's learner."""

    experts: tuple[tuple[Expert, ...], ...]
    pairs: tuple[tuple[Any, ...], ...]
    news: tuple[Any, ...]


class Calls(NamedTuple):
    """What each of K steps does: op kinds and slots per block, data, learning rate, and whether it counts."""

    kinds: Int[np.ndarray, "K L"]
    slots: Int[np.ndarray, "K L"]
    data: Any
    """Rows `[K, B]` of a data set on the device, or the steps' own tokens `[K, B, N, D]`."""
    labels: Int[ArrayLike, "K B"]
    weights: Float[ArrayLike, "K B"]
    rates: Float[np.ndarray, "K"]
    counts: Bool[np.ndarray, "K"]


class Scan(Executor):
    """One program; `steps_per_call` training steps in one dispatch."""

    name = "scan"

    def __init__(self, vit: ViT, placement: Placement, *, steps_per_call: int = 8, **settings: Any):
        super().__init__(vit, placement, **settings)
        self.steps_per_call = steps_per_call
        self._train = self.jit(self._train_of, static_argnums=(0, 1))
        self._pass = self.jit(self._forward_of, static_argnums=(0, 1))

    def train(
        self,
        learners: Learners,
        head: Any,
        architectures: Sequence[Architecture],
        steps: Sequence[Step],
        *,
        rates: Sequence[float],
        setup: Setup,
    ) -> Trained:
        """See `Executor.train`; shorter calls are filled up with steps that do not count."""
        learners, losses = dict(learners), []
        for start in range(0, len(steps), self.steps_per_call):
            part = slice(start, start + self.steps_per_call)
            batches = [step[0] for step in steps[part]]
            changed, head, found = self._train_call(learners, head, architectures[part], batches, rates[part], setup)
            learners |= changed
            losses += found
        return Trained(learners, head, losses)

    def _train_call(
        self,
        learners: Learners,
        head: Any,
        architectures: Sequence[Architecture],
        batches: Sequence[Batch],
        rates: Sequence[float],
        setup: Setup,
    ) -> tuple[Learners, Any, list[jax.Array]]:
        """The learners that some of the steps changed, the head's, and the losses."""
        size, blocks, experts = self.steps_per_call, range(self.num_blocks), setup.experts
        missing = [len(architectures) - 1] * (size - len(architectures))
        order = [*range(len(architectures)), *missing]
        columns = list(zip(*architectures, strict=True))  # per block, the choice of each step
        used = [list(dict.fromkeys(c.expert for c in column if c.expert is not None)) for column in columns]
        pair, full = setup.blank
        tables = Slots(
            tuple(_filled([experts[b][e] for e in used[b]], experts[b][0], size) for b in blocks),
            tuple(
                _filled([learners[place] if place[1] in columns[b] else pair for place in places], pair, size)
                for b, places in enumerate(_pairs(used))
            ),
            tuple(learners[b, NEW] if NEW in columns[b] else full for b in blocks),
        )
        block, values, data = self._sources([batches[i].tokens for i in order])
        calls = Calls(
            np.array([[KINDS.index(architectures[i][b].kind) for b in blocks] for i in order], np.int32),
            np.array([[_slot(used[b], architectures[i][b]) for b in blocks] for i in order], np.int32),
            data,
            _stacked([batches[i].labels for i in order]),
            _stacked([batches[i].weights for i in order]),
            np.asarray([rates[i] for i in order], np.float32),
            np.arange(size) < len(architectures),
        )
        losses, pairs, news, head = self._train(
            setup.update, block, (self.leaves, self.blocks), tables, head, values, calls, np.int32(setup.num_classes)
        )
        changed: dict[Place, Any] = {(b, NEW): news[b] for b in blocks if NEW in columns[b]}
        for b, places in enumerate(_pairs(used)):
            # only those that a step adapted: an expert that was only reused has a blank beside it
            changed |= {place: new for place, new in zip(places, pairs[b], strict=False) if place[1] in columns[b]}
        return changed, head, list(losses)[: len(architectures)]

    def _sources(self, sources: Sequence[Tokens | Gather]) -> tuple[int | None, jax.Array | None, Any]:
        """What the steps begin with: block, a data set on the device, and rows of it; or no data set, and tokens."""
        gathers = [source for source in sources if isinstance(source, Gather)]
        if len(gathers) == len(sources):
            rows = np.stack([self.layout.mine(gather.rows) for gather in gathers])
            return gathers[0].block, gathers[0].values, self.layout.joined(rows, axis=1)
        tokens = [self.resolve(source) for source in sources]
        return tokens[0].block, None, _stacked([found.values for found in tokens])

    def _forward(
        self, network: Network, begin: int, until: int, values: jax.Array, mask: Mask
    ) -> tuple[jax.Array, list[jax.Array | None]]:
        if begin == until:
            return values, []
        base = [self.base_pool[begin + i][0].params for i in range(len(network))]
        experts = tuple(base[i] if step.expert is None else step.expert for i, step in enumerate(network))
        kinds = np.array([SKIP if step.expert is None else 0 for step in network], np.int32)
        last, sums = self._pass(begin, until, (self.leaves, self.blocks), kinds, experts, values, mask)
        return last, [None if step.expert is None else total for step, total in zip(network, sums, strict=True)]

    # ---- what is compiled

    def _finish(self, block: Block, drawn: Drawn, z, outputs: int | None):
        """One block behind its start, its op chosen while it runs; also the class token that sums are made of."""
        kind, expert, pair = drawn
        placement = self.placement

        def leave(op):
            u = None if isinstance(op, Skip) else block.widen(z, placement=placement, outputs=outputs)
            y, component = block.leave(op, z, u, placement=placement, outputs=outputs)
            seen = y if self.token == "block" or component is None else component
            return y, summary(seen, self.config)

        frozen = jax.tree.map(jax.lax.stop_gradient, expert)
        if pair is None:
            return jax.lax.cond(kind == SKIP, lambda: leave(Skip()), lambda: leave(Reuse(frozen)))
        ops = {"reuse": Reuse(frozen), "adapt": Adapt(frozen, pair), "new": New(expert), "skip": Skip()}
        return jax.lax.switch(kind, [functools.partial(leave, ops[name]) for name in KINDS])

    def _run(self, blocks, drawn: Drawn, z, begin: int, until: int, mask):
        """From the tokens of block `begin` to those of `until`, and each block's summed class token."""
        # full steps of the loop finish a block and enter the next one; the last two blocks are not like the others
        turns = range(begin, min(until, self.num_blocks - 2))
        sums = []
        if turns:
            own, following = _stack([blocks[i] for i in turns]), _stack([blocks[i + 1] for i in turns])

            def turn(z, data):
                own, following, op = data
                y, seen = self._finish(self.block_of(own), op, z, None)
                return self.block_of(following).enter(y, placement=self.placement), mask @ seen

            z, totals = jax.lax.scan(turn, z, (own, following, _part(drawn, slice(len(turns)))))
            sums += list(totals)
        for i in range(begin + len(turns), until):
            z, seen = self._finish(self.block_of(blocks[i]), _part(drawn, i - begin), z, self.outputs[i])
            sums.append(mask @ seen)
            if i + 1 < self.num_blocks:
                following = self.block_of(blocks[i + 1])
                z = following.enter(z, placement=self.placement, outputs=self.outputs[i + 1])
        return z, sums

    def _forward_of(self, begin, until, frozen, kinds, experts, z, mask):
        return self._run(frozen[1], Drawn(kinds, _stack(experts), None), z, begin, until, mask)

    def _loss_of(self, begin, frozen, kinds, experts, pairs, head, z, labels, weights, num_classes):
        drawn = _part(Drawn(kinds, experts, pairs), slice(begin, None))
        last, _ = self._run(frozen[1], drawn, z, begin, self.num_blocks, weights)
        return self.mean_loss(frozen[0], head, last, labels, weights, num_classes)

    def _train_of(
        self, update: Update, block, frozen, tables: Slots, head, values, calls: Calls, num_classes
    ):  # fmt: skip
        begin = block or 0
        experts, pairs = (_stack([_stack(row) for row in table]) for table in (tables.experts, tables.pairs))
        blocks = jnp.arange(self.num_blocks)

        def step(state, call: Calls):
            pairs, news, head = state
            data = call.data if values is None else values[call.data]
            z = self.begin_of(frozen[0], data) if block is None else data
            own_pairs = jax.tree.map(lambda leaf: leaf[blocks, call.slots], pairs)
            is_new, is_adapt = (call.kinds == KINDS.index(kind) for kind in ("new", "adapt"))
            dense = jax.tree.map(
                lambda new, old: jnp.where(_like(is_new, new), new, old[blocks, call.slots]), news.params, experts
            )
            loss, (new_grads, pair_grads, head_grad) = jax.value_and_grad(self._loss_of, argnums=(3, 4, 5))(
                begin, frozen, call.kinds, dense, own_pairs.params, head.params, z, call.labels, call.weights,
                num_classes,
            )  # fmt: skip
            loss = guard(loss, (new_grads, pair_grads, head_grad))
            updates = jax.vmap(update, in_axes=(0, 0, None, None))
            counts = call.counts & (blocks >= begin)
            own_pairs = _where(is_adapt & counts, updates(own_pairs, pair_grads, call.rates, loss), own_pairs)
            pairs = jax.tree.map(lambda old, new: old.at[blocks, call.slots].set(new), pairs, own_pairs)
            news = _where(is_new & counts, updates(news, new_grads, call.rates, loss), news)
            head = _where(call.counts, update(head, head_grad, call.rates, loss), head)
            return (pairs, news, head), loss

        (pairs, news, head), losses = jax.lax.scan(step, (pairs, _stack(tables.news), head), calls)
        return tuple(losses), [_rows(row) for row in _rows(pairs)], _rows(news), head


def _slot(used: list[int], choice: Choice) -> int:
    return 0 if choice.expert is None else used.index(choice.expert)


def _pairs(used: Sequence[Sequence[int]]) -> list[list[Place]]:
    """Per block the place of each used expert's Adapt."""
    return [[(block, Choice("adapt", expert)) for expert in experts] for block, experts in enumerate(used)]


def _filled(found: list[T], filler: T, size: int) -> tuple[T, ...]:
    return (*found, *[filler] * (size - len(found)))


def _stacked(arrays: Sequence[Any]) -> Any:
    """Equal arrays as one, where the first is."""
    return np.stack(arrays) if isinstance(arrays[0], np.ndarray) else jnp.stack(arrays)


def _stack(trees: Sequence[Any]) -> Any:
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


def _part(tree: Any, index: int | slice) -> Any:
    return jax.tree.map(lambda leaf: leaf[index], tree)


def _rows(tree: Any) -> list[Any]:
    """A pytree of arrays `[n, ...]` as n pytrees."""
    num = jax.tree.leaves(tree)[0].shape[0]
    return [_part(tree, i) for i in range(num)]


def _like(flags: Any, leaf: jax.Array) -> jax.Array:
    return flags.reshape(flags.shape + (1,) * (leaf.ndim - flags.ndim))


def _where(flags: Any, new: Any, old: Any) -> Any:
    return jax.tree.map(lambda a, b: jnp.where(_like(flags, a), a, b), new, old)
