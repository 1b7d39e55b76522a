"""Compiled functions (stages) that the host composes: any architecture runs without further
compilation.

All blocks have the same shapes. The functions for an op kind, with and without the gradient of the
block's input, therefore run at every block, for every task and architecture. The backward pass ends
at the first learnable op. Blocks before that op run forward only and store no residuals; Skip costs
no FLOPs.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from cheem_jax.backbone.vit import ViT, summary
from cheem_jax.core.ops import Expert, Learned, Ops, Reuse, Skip, trained_params, with_learned
from cheem_jax.core.pool import Head
from cheem_jax.core.settings import Placement
from cheem_jax.engine.batches import P, R, side_by_side
from cheem_jax.engine.executor import (
    WORKING_SET,
    Batch,
    Dense,
    Executor,
    Gather,
    Learners,
    Mask,
    Network,
    Planned,
    Setup,
    Tokens,
    Trained,
    Update,
    Walked,
    add,
    guard,
    make_ops,
    shared_prefix,
)


class Stages(Executor):
    """Executor for devices on which dispatching a function needs much less time than running it."""

    name = "stages"
    composes = True

    def __init__(self, vit: ViT, placement: Placement, **settings: Any):
        super().__init__(vit, placement, **settings)
        token = self.token
        merge_block = self.merge_block

        def enter(leaves, x, *, outputs):
            return merge_block(leaves).enter(x, placement=placement, outputs=outputs)

        def widen(leaves, z, *, outputs):
            u = merge_block(leaves).widen(z, placement=placement, outputs=outputs)
            # Only matrix products use `u`, and they round it to this precision anyway. In bfloat16,
            # `u` needs half the bytes of float32.
            return u.astype(vit.config.precision)

        def leave(leaves, expert, z, u, mask, *, outputs):
            op = Skip() if expert is None else Reuse(expert)
            y, component = merge_block(leaves).leave(op, z, u, placement=placement, outputs=outputs)
            if component is None:
                return y, None
            return y, mask @ summary(component if token == "component" else y, vit.config)

        def linearise(leaves, op, x, *, outputs, is_first):
            settings: dict[str, Any] = {"placement": placement, "outputs": outputs}

            def output(learned, x):
                block = merge_block(leaves)
                trained = with_learned(op, learned)
                if not is_first:
                    return block.run(trained, x, **settings)[0]
                # At the first block that learns, `x` has already passed `enter` and needs no
                # gradient.
                return block.leave(trained, x, block.widen(x, **settings), **settings)[0]

            learned = trained_params(op)
            value_and_vjp = (
                jax.vjp(lambda learned: output(learned, x), learned)
                if is_first
                else jax.vjp(output, learned, x)
            )
            return linearised(value_and_vjp, (leaves, op, x))

        def backward(vjp, grad, loss):
            learned, *rest = vjp(grad)
            return learned, rest, guard(loss, learned)

        def loss_and_gradients(leaves, head, *data):
            loss, grads = jax.value_and_grad(self.mean_loss, argnums=(1, 2))(leaves, head, *data)
            return guard(loss, grads[0]), grads

        jit = functools.partial(self.jit, static_argnames="outputs")
        self._enter = jit(enter)
        self._widen = jit(widen)
        self._leave = jit(leave)
        self._linearise = self.jit(linearise, static_argnames=("outputs", "is_first"))
        self._backward = self.jit(backward)
        self._loss = self.jit(loss_and_gradients)

        @functools.cache
        def updater(update: Update):
            def update_each(pairs, rate, loss):
                return [update(learner, grad, rate, loss) for learner, grad in pairs]

            return self.jit(update_each)

        self._updater = updater

    def rows(self, batch_size: int, working_set: int = WORKING_SET) -> int:
        """Return the number of images per call, a divisor of `batch_size`. On a CPU, limit the
        widest activations of a block to `working_set` bytes."""
        per_image = 4 * self.config.num_tokens * self.config.mlp_width
        if not self.device.is_host or self.layout.is_many or batch_size * per_image <= working_set:
            return batch_size
        largest = max(working_set // per_image, 1)
        return max(num for num in range(1, largest + 1) if batch_size % num == 0)

    def each(self, function: Callable[[P], R], pieces: Iterable[P]) -> Iterator[R]:
        """Apply `function` to each piece of a forward pass, and yield the results in order.

        On a CPU, two pieces run at the same time. Only the first piece runs alone, so that two
        threads do not compile the same functions.
        """
        if not self.device.is_host or self.layout.is_many:
            yield from map(function, pieces)
            return
        rest = iter(pieces)
        yield from map(function, itertools.islice(rest, 1))
        yield from side_by_side(function, rest)

    def _train_call(
        self, learners: Learners, head: Any, plan: Sequence[Planned], setup: Setup
    ) -> Trained:
        ((architecture, step, rate),) = plan
        ops = make_ops(architecture, setup.experts, learners)
        rate = self.put(np.float32(rate))

        def gradients(batch: Batch):
            return self.gradients(ops, head.params, batch, setup.num_classes)

        results = side_by_side(gradients, step) if len(step) > 1 else map(gradients, step)
        loss, grads, head_grad = next(results)
        for more_loss, more_grads, more_head in results:
            # Gradients are added block by block, because a function for all blocks would be
            # compiled again for each architecture.
            loss = add(loss, more_loss)
            head_grad = add(head_grad, more_head)
            grads = {block: add(grad, more_grads[block]) for block, grad in grads.items()}
        places = {block: (block, architecture[block]) for block in grads}
        pairs = {places[block]: (learners[places[block]], grad) for block, grad in grads.items()}
        if self.device.is_host:
            changed = {place: setup.update(*pair, rate, loss) for place, pair in pairs.items()}
            return Trained(changed, setup.update(head, head_grad, rate, loss), [loss])
        # A call costs the host of an accelerator more than these updates cost the accelerator, so
        # all learners of a kind share a call. A function is compiled for each number of learners;
        # copies on every device prevent that new learners, which are on one, compile it again.
        update = self._updater(setup.update)
        changed = {}
        for kind in ("adapt", "new"):
            some = {
                place: (self.layout.replicate(learner), grad)
                for place, (learner, grad) in pairs.items()
                if place[1].kind == kind
            }
            if some:
                changed |= zip(some, update(list(some.values()), rate, loss), strict=True)
        (head,) = update([(head, head_grad)], rate, loss)
        return Trained(changed, head, [loss])

    def gradients(
        self, ops: Ops, head: Head, batch: Batch, num_classes: int
    ) -> tuple[jax.Array, dict[int, Learned], Head]:
        """Compute the weighted loss of a batch, the gradients of each block with a learner, and the
        head's gradients.

        The loss is NaN if a gradient is non-finite.
        """
        begin, z = self.resolve(batch.tokens)
        num = self.num_blocks
        weights = self.put(batch.weights)
        first = next((i for i in range(begin, num) if trained_params(ops[i]) is not None), num)
        frozen = [Dense(0, op.expert if isinstance(op, Reuse) else None) for op in ops[begin:first]]
        z, _ = self._forward(frozen, begin, first, z, weights)
        tape: list[Any] = []
        for i in range(first, num):
            arguments = (self.blocks[i], ops[i], z)
            z, residuals = self._linearise(*arguments, outputs=self.outputs[i], is_first=i == first)
            tape.append(residuals.vjp(arguments))
        loss, (head_grad, grad) = self._loss(
            self.leaves, head, z, batch.labels, weights, self.number(num_classes)
        )
        grads: dict[int, Learned] = {}
        for i in reversed(range(first, num)):
            # Linearisations are the largest arrays of a step, so each one is freed after its use.
            learned_grad, rest, loss = self._backward(tape.pop(), grad, loss)
            grad = rest[0] if rest else grad
            if learned_grad is not None:
                grads[i] = learned_grad
        return loss, grads, head_grad

    def walk(
        self, networks: Sequence[Network], tokens: Tokens | Gather, mask: Mask
    ) -> Iterator[Walked]:
        """Run every network over one batch; each shared prefix runs once.

        Networks are visited depth first, in the order of their codes, so at most 2 L + 1
        activations are in memory. If two networks first differ at a block, they still share the
        start of that block. For `mlp_down`, this start is the attention half and the up-projection.
        Results are identical to those of separate passes, because the same functions get the same
        inputs.
        """
        begin, values = self.resolve(tokens)
        num = self.num_blocks
        # The entries are the starts of blocks `begin`, `begin` + 1, ...; the last entry is the
        # network's output.
        starts = [Start(values)]
        sums: list[jax.Array | None] = []
        codes = [[step.code for step in network[begin:]] for network in networks]
        previous: Sequence[int] = ()
        for index in sorted(range(len(networks)), key=codes.__getitem__):
            shared = shared_prefix(previous, codes[index])
            previous = codes[index]
            del starts[shared + 1 :], sums[shared:]
            for block in range(begin + shared, num):
                y, total = self._finish(block, networks[index][block].expert, starts[-1], mask)
                starts.append(Start(self._enter_next(block + 1, y)))
                sums.append(total)
            yield Walked(index, starts[-1].z, [None] * begin + sums)

    def _forward(
        self, network: Network, begin: int, until: int, values: jax.Array, mask: Mask
    ) -> tuple[jax.Array, list[jax.Array | None]]:
        sums = []
        for block, step in enumerate(network, begin):
            y, total = self._finish(block, step.expert, Start(values), mask)
            values = self._enter_next(block + 1, y)
            sums.append(total)
        return values, sums

    def _enter_next(self, block: int, x: jax.Array) -> jax.Array:
        # for attn_proj, `Block.enter` returns its input
        if block == self.num_blocks or self.placement == "attn_proj":
            return x
        return self._enter(self.blocks[block], x, outputs=self.outputs[block])

    def _finish(
        self, block: int, expert: Expert | None, start: "Start", mask: Mask
    ) -> tuple[jax.Array, jax.Array | None]:
        leaves = self.blocks[block]
        outputs = self.outputs[block]
        if expert is None:
            if self.placement == "mlp_down":
                return start.z, None
            return self._leave(leaves, None, start.z, None, mask, outputs=outputs)
        if start.u is None:
            start.u = self._widen(leaves, start.z, outputs=outputs)
        return self._leave(leaves, expert, start.z, start.u, mask, outputs=outputs)


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["stored"], meta_fields=["places", "structure"]
)
@dataclasses.dataclass(frozen=True)
class Residuals:
    """The leaves of a stage's linearisation. The stage's arguments are left out, because `jit`
    would copy them."""

    stored: list[jax.Array]
    places: tuple[int | None, ...]
    """For each leaf of the linearisation, the index of the identical argument; None if the leaf is
    the next item of `stored`."""
    structure: Any

    def vjp(self, arguments: Any) -> Any:
        """Rebuild the linearisation with the arguments of the stage's call."""
        leaves = jax.tree.leaves(arguments)
        stored = iter(self.stored)
        return self.structure.unflatten(
            [next(stored) if place is None else leaves[place] for place in self.places]
        )


def linearised(value_and_vjp: tuple[Any, Any], arguments: Any) -> tuple[Any, Residuals]:
    """Return the value of a stage and the residuals of its linearisation. A leaf that is one of the
    `arguments` is recognised by the identity of its tracer."""
    value, vjp = value_and_vjp
    leaves, structure = jax.tree.flatten(vjp)
    number = {id(leaf): place for place, leaf in enumerate(jax.tree.leaves(arguments))}
    places = tuple(number.get(id(leaf)) for leaf in leaves)
    return value, Residuals([leaf for leaf in leaves if id(leaf) not in number], places, structure)


@dataclasses.dataclass
class Start:
    """Values that all choices at a block share: the tokens `z` at its start, and the plastic
    layer's input `u`, which is computed when a choice first needs it."""

    z: jax.Array
    u: jax.Array | None = None
