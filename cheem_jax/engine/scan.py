"""One program for every architecture: what an architecture holds is data, and many steps run in one
call.

Where the host's dispatch is the limit (a small backbone on a large accelerator) a call saves the
most that does many training steps: their architectures are drawn beforehand, and every parameter
that they touch travels in a table with one slot per step, so the program depends on the number of
steps per call and not on the pool. Every block computes one dense expert: that of its slot with
Adapt's change added, New's own, or zeros where it is skipped. Nothing branches, so a device never
asks the host what comes next. The price: a program knows only how many of the first blocks hold
nothing that learns, and the rest of the network keeps what its gradient needs whatever was drawn.
"""

import math
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import ArrayLike, Bool, Float, Int

from cheem_jax.backbone.vit import ViT
from cheem_jax.core.architecture import Architecture, Choice
from cheem_jax.core.ops import Expert, LowRank, Reuse, merge
from cheem_jax.core.settings import Placement
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
NEW = Choice("new")
NUM_STARTS = 4
"""Blocks at which a backward pass may end, evenly apart: each is a program of its own."""


class Tables(NamedTuple):
    """All that some steps touch, per block: experts from the steps' first block on, learners where
    something learns."""

    experts: tuple[tuple[Expert, ...], ...]
    """K frozen ones, zeros for Skip."""
    pairs: tuple[tuple[Any, ...], ...]
    """K learners of pairs."""
    news: tuple[Any, ...]
    """New's learner."""


class Calls(NamedTuple):
    """What each of K steps does: slots and op kinds per block, data, learning rate, and whether it
    counts."""

    slots: Int[np.ndarray, "K blocks"]
    adapts: Bool[np.ndarray, "K learning"]
    news: Bool[np.ndarray, "K learning"]
    data: jax.Array
    """Tokens `[K, B, N, D]`, or uint8 images `[K, B, S, S, 3]`."""
    labels: Int[ArrayLike, "K B"]
    weights: Float[ArrayLike, "K B"]
    rates: Float[np.ndarray, "K"]
    counts: Bool[np.ndarray, "K"]
    num_classes: Int[np.ndarray, "K"]


class Program(NamedTuple):
    """What a program for K steps is compiled for, beside shapes."""

    update: Update
    block: int | None
    """Where the steps' data begin; images where None."""
    start: int
    """The first block that may learn."""
    packed: tuple[tuple[tuple[int, ...], str] | None, ...]
    """Shape and type of a step's part of each of the `Calls` that travel packed."""


class Scan(Executor):
    """One program for each block where the backward pass may end; `steps_per_call` training steps
    in one dispatch."""

    name = "scan"

    def __init__(self, vit: ViT, placement: Placement, *, steps_per_call: int = 8, **settings: Any):
        super().__init__(vit, placement, **settings)
        self.steps_per_call = steps_per_call
        self.nothing: Expert = jax.tree.map(jnp.zeros_like, self.base_pool[0][0].params)
        """What a block computes that is skipped: blocks have equal shapes."""
        self._train = self.jit(self._train_of, static_argnums=0)
        self._pass = self.jit(self._forward_of, static_argnums=(0, 1))

    def on(self, place: int) -> Executor:
        """See `Executor.on`."""
        own = super().on(place)
        assert isinstance(own, Scan)
        own.nothing = self.layout.copy(self.nothing, place)
        return own

    def start_of(self, block: int) -> int:
        """See `Executor.start_of`: few programs serve all; behind the last block nothing learns but
        the head."""
        return (
            block if block == self.num_blocks else block - block % -(-self.num_blocks // NUM_STARTS)
        )

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
        """See `Executor.train`; shorter calls are filled up with steps that do not count.

        The backward pass ends before the first block with a learner, whether these steps hold it or
        not: a supernet soon has one at the first block, and then one program serves all its steps.
        """
        learners = dict(learners)
        losses = []
        start = self.start_of(min((block for block, _ in learners), default=self.num_blocks))
        for begin in range(0, len(steps), self.steps_per_call):
            part = slice(begin, begin + self.steps_per_call)
            batches = [step[0] for step in steps[part]]
            changed, head, found = self._train_call(
                learners, head, architectures[part], batches, rates[part], setup, start
            )
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
        start: int,
    ) -> tuple[Learners, Any, list[jax.Array]]:
        """The learners that some of the steps changed, the head's, and the losses."""
        size = self.steps_per_call
        num = len(architectures)
        order = [min(step, num - 1) for step in range(size)]
        block, data = self._sources([batches[i].tokens for i in order])
        begin = block or 0
        start = max(start, begin)
        frozen, learning = range(begin, self.num_blocks), range(start, self.num_blocks)
        columns = list(zip(*architectures, strict=True))  # per block, the choice of each step
        used = [list(dict.fromkeys(choice.expert for choice in column)) for column in columns]
        places: dict[int, list[Place]] = {
            b: [(b, Choice("adapt", e)) for e in used[b]] for b in learning
        }
        pair, full = setup.blank
        tables = Tables(
            tuple(_filled([self._expert(setup, b, e) for e in used[b]], size) for b in frozen),
            tuple(
                _filled(
                    [learners[place] if place[1] in columns[b] else pair for place in places[b]],
                    size,
                )
                for b in learning
            ),
            tuple(learners[b, NEW] if NEW in columns[b] else full for b in learning),
        )
        calls = Calls(
            np.array(
                [[used[b].index(architectures[i][b].expert) for b in frozen] for i in order],
                np.int32,
            ),
            np.array(
                [[architectures[i][b].kind == "adapt" for b in learning] for i in order], bool
            ),
            np.array([[architectures[i][b].kind == "new" for b in learning] for i in order], bool),
            data,
            _stacked([batches[i].labels for i in order], np.int32),
            _stacked([batches[i].weights for i in order], np.float32),
            np.array([rates[i] for i in order], np.float32),
            np.arange(size) < num,
            np.full(size, setup.num_classes, np.int32),
        )
        how, packed = _packed(calls)
        losses, pairs, news, head = self._train(
            Program(setup.update, block, start, how),
            (self.leaves, self.blocks[begin:]),
            tables,
            head,
            packed,
        )
        changed: dict[Place, Any] = {
            (b, NEW): new for b, new in zip(learning, news, strict=True) if NEW in columns[b]
        }
        for b, own in zip(learning, pairs, strict=True):
            # only those that a step adapted: an expert that was only reused has a blank beside it
            changed |= {
                place: new
                for place, new in zip(places[b], own, strict=False)
                if place[1] in columns[b]
            }
        return changed, head, list(losses)[:num]

    def _expert(self, setup: Setup, block: int, expert: int | None) -> Expert:
        # what New begins with is never looked at
        return self.nothing if expert is None else setup.experts[block][expert]

    def _sources(self, sources: Sequence[Tokens | Gather]) -> tuple[int | None, jax.Array]:
        """What the steps begin with: a block (None: images), and its tokens.

        They are gathered by a program of their own: those of the steps do not depend on the size of
        a data set.
        """
        gathers = [source for source in sources if isinstance(source, Gather)]
        if len(gathers) == len(sources):
            rows = np.stack([self.layout.mine(gather.rows) for gather in gathers])
            return gathers[0].block, self.take(gathers[0].values, self.layout.joined(rows, axis=1))
        tokens = [self.resolve(source) for source in sources]
        return tokens[0].block, jnp.stack([found.values for found in tokens])

    def _forward(
        self, network: Network, begin: int, until: int, values: jax.Array, mask: Mask
    ) -> tuple[jax.Array, list[jax.Array | None]]:
        if begin == until:
            return values, []
        experts = tuple(self.nothing if step.expert is None else step.expert for step in network)
        last, sums = self._pass(
            begin, until, (self.leaves, self.blocks[begin:]), experts, values, mask
        )
        return last, [
            None if step.expert is None else total
            for step, total in zip(network, sums, strict=True)
        ]

    def programs_of(self, begin: int, skipped: Sequence[bool]) -> set[Hashable]:
        """See `Executor.programs_of`: one for all blocks together, whatever is skipped."""
        return {begin}

    # ---- what is compiled

    def _forward_of(self, begin: int, until: int, frozen, experts: Sequence[Expert], z, mask):
        last, seen = self._composed(
            frozen[1], [Reuse(expert) for expert in experts], z, begin, until
        )
        return last, self._sums(seen, mask)

    def _train_of(self, program: Program, frozen, tables: Tables, head, data):
        begin = program.block or 0
        start = program.start
        leaves, blocks = frozen
        num_frozen = start - begin
        experts = _stack([_stack(row) for row in tables.experts])
        pairs, news = _stack([_stack(row) for row in tables.pairs]), _stack(tables.news)

        def loss_of(dense: Sequence[Expert], params, z, call: Calls):
            last, _ = self._composed(
                blocks[num_frozen:], [Reuse(own) for own in dense], z, start, self.num_blocks
            )
            return self.mean_loss(leaves, params, last, call.labels, call.weights, call.num_classes)

        def step(state, part):
            pairs, news, head = state
            call = _unpacked(program.packed, *part)
            z = self.begin_of(leaves, call.data) if program.block is None else call.data
            chosen = _taken(experts, call.slots)
            z, _ = self._composed(
                blocks, [Reuse(own) for own in _rows(chosen, 0, num_frozen)], z, begin, start
            )
            dense = _part(chosen, slice(num_frozen, None))
            slots = call.slots[num_frozen:]
            is_adapt = call.adapts
            is_new = call.news
            own = _taken(pairs, slots)
            if own is not None:
                pair = _masked(is_adapt, own.params)
                dense = _where(is_new, news.params, jax.vmap(merge)(dense, pair))
            loss, (grads, head_grad) = jax.value_and_grad(loss_of, argnums=(0, 1))(
                _rows(dense, 0, self.num_blocks - start), head.params, z, call
            )
            if own is not None:
                # the gradient of a dense expert is New's, and by the chain rule it gives those of a
                # pair
                grad = _stack(grads)
                pair_grad = LowRank(grad.weight @ pair.up.mT, pair.down.mT @ grad.weight)
                new_grads, pair_grads = _masked(is_new, grad), _masked(is_adapt, pair_grad)
                loss = guard(loss, (new_grads, pair_grads, head_grad))
                updates = jax.vmap(program.update, in_axes=(0, 0, None, None))
                own = updates(own, pair_grads, call.rates, loss)
                is_its_slot = slots[:, None] == jnp.arange(self.steps_per_call)
                learns = (is_adapt & call.counts)[:, None]
                pairs = _where(
                    learns & is_its_slot, jax.tree.map(lambda leaf: leaf[:, None], own), pairs
                )
                news = _where(
                    is_new & call.counts, updates(news, new_grads, call.rates, loss), news
                )
            else:
                loss = guard(loss, head_grad)
            head = _where(call.counts, program.update(head, head_grad, call.rates, loss), head)
            return (pairs, news, head), loss

        (pairs, news, head), losses = jax.lax.scan(step, (pairs, news, head), data)
        num = len(tables.news)
        slots = [_rows(row, 0, self.steps_per_call) for row in _rows(pairs, 0, num)]
        return tuple(losses), slots, _rows(news, 0, num), head


def _packed(calls: Calls) -> tuple[Any, tuple[np.ndarray, list[Any]]]:
    """How to read what the host holds of K steps, and that as one array `[K, n]` with the rest.

    A copy to an accelerator takes as long for a few numbers as for thousands.
    """
    how = tuple(
        (leaf.shape[1:], leaf.dtype.name) if isinstance(leaf, np.ndarray) else None
        for leaf in calls
    )
    held = [
        leaf.astype(np.int32) if leaf.dtype == bool else leaf
        for leaf in calls
        if isinstance(leaf, np.ndarray)
    ]
    rows = [leaf.reshape(len(leaf), -1).view(np.int32) for leaf in held]
    return how, (
        np.concatenate(rows, axis=1),
        [leaf for leaf in calls if not isinstance(leaf, np.ndarray)],
    )


def _unpacked(how: Any, row: jax.Array, others: Sequence[jax.Array]) -> Calls:
    """One step's part of what was packed."""
    rest = iter(others)
    found = []
    place = 0
    for entry in how:
        if entry is None:
            found.append(next(rest))
            continue
        shape, dtype = entry
        part = row[place : place + math.prod(shape)].reshape(shape)
        place += math.prod(shape)
        found.append(
            jax.lax.bitcast_convert_type(part, jnp.float32)
            if dtype == "float32"
            else part.astype(dtype)
        )
    return Calls(*found)


def _filled(found: list[T], size: int) -> tuple[T, ...]:
    return (*found, *[found[0]] * (size - len(found)))


def _stacked(arrays: Sequence[Any], dtype: type[np.generic]) -> Any:
    """Equal arrays as one, on the host where they are there."""
    if isinstance(arrays[0], np.ndarray):
        return np.stack(arrays).astype(dtype)
    return jnp.stack(arrays)


def _stack(trees: Sequence[Any]) -> Any:
    """Equal pytrees as one with a new first axis; None of none."""
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees) if trees else None


def _part(tree: Any, index: int | slice) -> Any:
    return jax.tree.map(lambda leaf: leaf[index], tree)


def _rows(tree: Any, begin: int, end: int) -> list[Any]:
    """Some of the pytrees of which `tree` is the stack."""
    return [_part(tree, i) for i in range(begin, end)]


def _taken(tree: Any, slots: Int[ArrayLike, "n"]) -> Any:
    """Of leaves `[n, K, ...]` the slot of each of the n."""
    slots = jnp.asarray(slots)
    blocks = jnp.arange(len(slots))
    return jax.tree.map(lambda leaf: leaf.at[blocks, slots].get(mode="promise_in_bounds"), tree)


def _like(flags: jax.Array, leaf: jax.Array) -> jax.Array:
    return flags.reshape(flags.shape + (1,) * (leaf.ndim - flags.ndim))


def _where(flags: Any, new: Any, old: Any) -> Any:
    return jax.tree.map(lambda a, b: jnp.where(_like(flags, b), a, b), new, old)


def _masked(flags: Any, tree: Any) -> Any:
    """Zeros where the flags are not set, whatever is there."""
    return jax.tree.map(lambda leaf: jnp.where(_like(flags, leaf), leaf, 0), tree)
