"""One compiled function for all architectures: op kinds are arguments, and a call runs many steps.

A call with many steps saves the most time if the host's dispatches limit the speed, such as for a
small backbone on a large accelerator. The architectures of the steps are sampled before the call.
The parameters of these architectures are stacked in tables with one slot per step, so the function
depends on the number of steps per call and not on the size of the pool. In each step, every block
applies one dense expert: the expert in the selected slot (plus the change by Adapt), the expert of
New, or zeros for Skip. The function does not branch, so the device never waits for the host. The
function has one disadvantage: it is compiled for a fixed first block that can learn. This block and
all later blocks store residuals for their gradients, even if the architecture of a step learns
nothing at these blocks.
"""

import math
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import ArrayLike, Bool, Float, Int

from cheem_jax.backbone.vit import ViT
from cheem_jax.core.architecture import Choice
from cheem_jax.core.ops import Expert, LowRank, Reuse, merge
from cheem_jax.core.settings import Placement
from cheem_jax.engine.executor import (
    Executor,
    Gather,
    Learners,
    Mask,
    Network,
    Place,
    Planned,
    Setup,
    Tokens,
    Trained,
    Update,
    guard,
)

NEW = Choice("new")
NUM_STARTS = 4
"""Number of evenly spaced blocks at which a backward pass can end. Each of these blocks has a
separate compiled function."""


class Tables(NamedTuple):
    """Parameters that K steps use: the experts of every block of the pass, and the learners of
    every block that can be trained."""

    experts: tuple[tuple[Expert, ...], ...]
    """K frozen experts per block; zeros for Skip."""
    pairs: tuple[tuple[Any, ...], ...]
    """K learners of low-rank pairs per block."""
    news: tuple[Any, ...]
    """The learner of New per block."""


class Calls(NamedTuple):
    """Inputs of K steps: slots and op kinds per block, data, and learning rates. `counts` is false
    for padding steps, whose results are discarded."""

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
    """Static inputs of a compiled function for K steps."""

    update: Update
    block: int | None
    """Block whose tokens are the data; None if the data are images."""
    start: int
    """First block that can learn."""
    packed: tuple[tuple[tuple[int, ...], str] | None, ...]
    """Shape and type of each packed field of `Calls` for one step; None for a field that is not
    packed."""


class Scan(Executor):
    """Executor with one compiled training function for each block at which the backward pass can
    end; a dispatch runs `steps_per_call` training steps."""

    name = "scan"
    omits_skipped = False

    def __init__(self, vit: ViT, placement: Placement, *, steps_per_call: int = 8, **settings: Any):
        super().__init__(vit, placement, **settings)
        self.steps_per_call = steps_per_call
        self.nothing: Expert = jax.tree.map(jnp.zeros_like, self.base_pool[0][0].params)
        """Expert of zeros for skipped blocks; all blocks have the same shapes."""
        self._train = self.jit(self._trace_training, static_argnums=0)
        self._pass = self.jit(self._trace_forward, static_argnums=(0, 1))

    def on(self, place: int) -> Executor:
        """Return a copy of the executor for device number `place` (see `Executor.on`)."""
        one = super().on(place)
        assert isinstance(one, Scan)
        one.nothing = self.layout.copy(self.nothing, place)
        return one

    def backward_end(self, block: int) -> int:
        """Round `block` down to one of NUM_STARTS blocks, so that few functions are compiled. If
        `block` is the number of blocks L, only the head learns, and `block` is not rounded."""
        spacing = -(-self.num_blocks // NUM_STARTS)
        return block if block == self.num_blocks else block - block % spacing

    def _train_call(
        self, learners: Learners, head: Any, plan: Sequence[Planned], setup: Setup
    ) -> Trained:
        """Train up to `steps_per_call` steps. If `plan` contains fewer steps, the call is filled
        with steps whose results are discarded.

        The backward pass ends at the first block with a learner, rounded down by `backward_end`,
        even if the architectures of these steps do not use that learner. A supernet soon has a
        learner at its first block; after that, all steps of the supernet use the same function.
        """
        size = self.steps_per_call
        num = len(plan)
        architectures = [architecture for architecture, _, _ in plan]
        order = [min(step, num - 1) for step in range(size)]
        batches = [plan[i][1][0] for i in order]
        block, data = self._sources([batch.tokens for batch in batches])
        begin = block or 0
        first = min((b for b, _ in learners), default=self.num_blocks)
        start = max(self.backward_end(first), begin)
        forward, learning = range(begin, self.num_blocks), range(start, self.num_blocks)
        columns = list(zip(*architectures, strict=True))  # each block's choices
        used = [list(dict.fromkeys(choice.expert for choice in column)) for column in columns]
        places: dict[int, list[Place]] = {
            b: [(b, Choice("adapt", expert)) for expert in used[b]] for b in learning
        }
        pair, full = setup.blank
        experts = [
            [self.nothing if e is None else setup.experts[b][e] for e in used[b]] for b in forward
        ]
        pairs = [
            [learners[place] if place[1] in columns[b] else pair for place in places[b]]
            for b in learning
        ]
        tables = Tables(
            tuple(_filled(row, size) for row in experts),
            tuple(_filled(row, size) for row in pairs),
            tuple(learners[b, NEW] if NEW in columns[b] else full for b in learning),
        )
        slots = [[used[b].index(architectures[i][b].expert) for b in forward] for i in order]
        kinds = np.array([[architectures[i][b].kind for b in learning] for i in order], str)
        packed, inputs = _pack(
            Calls(
                np.array(slots, np.int32),
                kinds == "adapt",
                kinds == "new",
                data,
                _stacked([batch.labels for batch in batches], np.int32),
                _stacked([batch.weights for batch in batches], np.float32),
                np.array([plan[i][2] for i in order], np.float32),
                np.arange(size) < num,
                np.full(size, setup.num_classes, np.int32),
            )
        )
        losses, new_pairs, news, head = self._train(
            Program(setup.update, block, start, packed),
            (self.leaves, self.blocks[begin:]),
            tables,
            head,
            inputs,
        )
        changed: dict[Place, Any] = {
            (b, NEW): new for b, new in zip(learning, news, strict=True) if NEW in columns[b]
        }
        for b, learned in zip(learning, new_pairs, strict=True):
            # An expert that was only reused has a blank learner, which is not returned.
            changed |= {
                place: new
                for place, new in zip(places[b], learned, strict=False)
                if place[1] in columns[b]
            }
        return Trained(changed, head, list(losses)[:num])

    def _sources(self, sources: Sequence[Tokens | Gather]) -> tuple[int | None, jax.Array]:
        """Return the block at which the steps start (None for images), and the stacked data of the
        steps.

        A separate function gathers rows, so that the training function does not depend on the size
        of the data set.
        """
        gathers = [source for source in sources if isinstance(source, Gather)]
        if len(gathers) == len(sources):
            rows = np.stack([self.layout.local_rows(gather.rows) for gather in gathers])
            return gathers[0].block, self.take(gathers[0].values, self.layout.join(rows, axis=1))
        tokens = [self.resolve(source) for source in sources]
        return tokens[0].block, jnp.stack([each.values for each in tokens])

    def _forward(
        self, network: Network, begin: int, until: int, values: jax.Array, mask: Mask
    ) -> tuple[jax.Array, list[jax.Array | None]]:
        if begin == until:
            return values, []
        experts = [self.nothing if step.expert is None else step.expert for step in network]
        last, sums = self._pass(begin, until, self.blocks[begin:], experts, values, mask)
        pairs = zip(network, sums, strict=True)
        return last, [None if step.expert is None else total for step, total in pairs]

    def function_keys(self, begin: int, skipped: Sequence[bool]) -> set[Hashable]:
        """Return a single key, because one function runs all blocks."""
        return {begin}

    # ---- compiled functions

    def _trace_forward(self, begin: int, until: int, blocks, experts: Sequence[Expert], z, mask):
        return self._compose_forward(blocks, experts, z, mask, begin, until)

    def _trace_training(self, program: Program, frozen, tables: Tables, head, inputs):
        begin = program.block or 0
        start = program.start
        leaves, blocks = frozen
        num_frozen = start - begin
        num_learning = len(tables.news)
        experts = _stack([_stack(row) for row in tables.experts])
        pairs = _stack([_stack(row) for row in tables.pairs])
        news = _stack(tables.news)

        def compute_loss(dense: Sequence[Expert], params, z, call: Calls):
            ops = [Reuse(expert) for expert in dense]
            last, _ = self._compose(blocks[num_frozen:], ops, z, start, self.num_blocks)
            return self.mean_loss(leaves, params, last, call.labels, call.weights, call.num_classes)

        def step(state, inputs):
            pairs, news, head = state
            call = _unpack(program.packed, *inputs)
            z = self.trace_begin(leaves, call.data) if program.block is None else call.data
            chosen = _in_slots(experts, call.slots)
            ops = [Reuse(expert) for expert in _unstack(chosen, range(num_frozen))]
            z, _ = self._compose(blocks, ops, z, begin, start)
            dense = _part(chosen, slice(num_frozen, None))
            slots = call.slots[num_frozen:]
            learned = _in_slots(pairs, slots)
            if learned is not None:
                pair = _masked(call.adapts, learned.params)
                dense = _where(call.news, news.params, jax.vmap(merge)(dense, pair))
            loss, (grads, head_grad) = jax.value_and_grad(compute_loss, argnums=(0, 1))(
                _unstack(dense, range(num_learning)), head.params, z, call
            )
            if learned is None:
                loss = guard(loss, head_grad)
            else:
                # The gradient of the dense expert is also the gradient of New. By the chain rule,
                # it yields the gradients of the low-rank pair.
                grad = _stack(grads)
                pair_grad = LowRank(grad.weight @ pair.up.mT, pair.down.mT @ grad.weight)
                new_grads = _masked(call.news, grad)
                pair_grads = _masked(call.adapts, pair_grad)
                loss = guard(loss, (new_grads, pair_grads, head_grad))
                updates = jax.vmap(program.update, in_axes=(0, 0, None, None))
                learned = updates(learned, pair_grads, call.rates, loss)
                is_its_slot = slots[:, None] == jnp.arange(self.steps_per_call)
                learns = (call.adapts & call.counts)[:, None]
                pairs = _where(learns & is_its_slot, _part(learned, np.s_[:, None]), pairs)
                new = updates(news, new_grads, call.rates, loss)
                news = _where(call.news & call.counts, new, news)
            new_head = program.update(head, head_grad, call.rates, loss)
            return (pairs, news, _where(call.counts, new_head, head)), loss

        (pairs, news, head), losses = jax.lax.scan(step, (pairs, news, head), inputs)
        blocks_of_pairs = _unstack(pairs, range(num_learning))
        slots = [_unstack(row, range(self.steps_per_call)) for row in blocks_of_pairs]
        return tuple(losses), slots, _unstack(news, range(num_learning)), head


def _pack(calls: Calls) -> tuple[Any, tuple[np.ndarray, list[Any]]]:
    """Pack all NumPy fields into one array `[K, n]`. Return the layout of the array, and the inputs
    of the compiled function.

    One array saves time, because copying a few numbers to an accelerator is as slow as copying
    thousands.
    """
    packed = tuple(
        (field.shape[1:], field.dtype.name) if isinstance(field, np.ndarray) else None
        for field in calls
    )
    rows = [
        (field.astype(np.int32) if field.dtype == bool else field)
        .reshape(len(field), -1)
        .view(np.int32)
        for field in calls
        if isinstance(field, np.ndarray)
    ]
    rest = [field for field in calls if not isinstance(field, np.ndarray)]
    return packed, (np.concatenate(rows, axis=1), rest)


def _unpack(packed: Any, row: jax.Array, rest: Sequence[jax.Array]) -> Calls:
    """Unpack the fields of one step."""
    others = iter(rest)
    fields = []
    begin = 0
    for entry in packed:
        if entry is None:
            fields.append(next(others))
            continue
        shape, dtype = entry
        end = begin + math.prod(shape)
        part = row[begin:end].reshape(shape)
        begin = end
        is_float = dtype == "float32"
        fields.append(
            jax.lax.bitcast_convert_type(part, jnp.float32) if is_float else part.astype(dtype)
        )
    return Calls(*fields)


def _filled(row: list[Any], size: int) -> tuple[Any, ...]:
    return (*row, *[row[0]] * (size - len(row)))


def _stacked(arrays: Sequence[Any], dtype: type[np.generic]) -> Any:
    """Stack arrays of the same shape; NumPy arrays stay on the host."""
    if isinstance(arrays[0], np.ndarray):
        return np.stack(arrays).astype(dtype)
    return jnp.stack(arrays)


def _stack(trees: Sequence[Any]) -> Any:
    """Stack pytrees of the same structure along a new first axis. Return None for an empty
    sequence."""
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees) if trees else None


def _part(tree: Any, index: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf[index], tree)


def _unstack(tree: Any, indices: range) -> list[Any]:
    return [_part(tree, i) for i in indices]


def _in_slots(tree: Any, slots: Int[ArrayLike, "n"]) -> Any:
    """Select, for each of n blocks, the entry at the block's slot in leaves `[n, K, ...]`."""
    slots = jnp.asarray(slots)
    blocks = jnp.arange(len(slots))
    return jax.tree.map(lambda leaf: leaf.at[blocks, slots].get(mode="promise_in_bounds"), tree)


def _where(flags: Any, new: Any, old: Any) -> Any:
    """Select `new` where the flag is set, and `old` elsewhere; `flags` has the leading axes of the
    leaves."""

    def select(a, b):
        return jnp.where(flags.reshape(flags.shape + (1,) * (b.ndim - flags.ndim)), a, b)

    return jax.tree.map(select, new, old)


def _masked(flags: Any, tree: Any) -> Any:
    """Replace values, including NaN, by zeros where the flag is not set; `flags` has the leading
    axes of the leaves."""
    return _where(flags, tree, jax.tree.map(jnp.zeros_like, tree))
