"""Composed compiled stages: how any architecture runs without compiling anything new.

Blocks have equal shapes, so one program per (op kind, where its input's gradient is wanted) serves
every block, task and architecture; the host composes them. The backward pass stops at the first
learnable op: what lies before it runs forward only and keeps nothing, and Skip costs nothing.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from cheem_jax.backbone.vit import ViT, summary
from cheem_jax.core.architecture import Architecture
from cheem_jax.core.ops import Expert, Learned, Ops, Reuse, Skip, learned_of, with_learned
from cheem_jax.core.pool import Head
from cheem_jax.core.settings import Placement
from cheem_jax.engine.batches import side_by_side
from cheem_jax.engine.executor import (
    WORKING_SET,
    Batch,
    Dense,
    Executor,
    Gather,
    Learners,
    Mask,
    Network,
    Part,
    Result,
    Setup,
    Step,
    Tokens,
    Walked,
    add,
    guard,
    ops_of,
)


class Stages(Executor):
    """The default where dispatching a program is cheap beside running it."""

    name = "stages"
    composes = True

    def __init__(self, vit: ViT, placement: Placement, **settings: Any):
        super().__init__(vit, placement, **settings)
        token = self.token
        block_of = self.block_of

        def enter(leaves, x, *, outputs):
            return block_of(leaves).enter(x, placement=placement, outputs=outputs)

        def widen(leaves, z, *, outputs):
            # products read it rounded anyway: so it is written once, and in half the bytes
            return (
                block_of(leaves)
                .widen(z, placement=placement, outputs=outputs)
                .astype(vit.config.precision)
            )

        def leave(leaves, expert, z, u, mask, *, outputs):
            op = Skip() if expert is None else Reuse(expert)
            y, component = block_of(leaves).leave(op, z, u, placement=placement, outputs=outputs)
            if component is None:
                return y, None
            return y, mask @ summary(component if token == "component" else y, vit.config)

        def linearise(leaves, op, x, *, outputs):
            def output(learned, x):
                return block_of(leaves).run(
                    with_learned(op, learned), x, placement=placement, outputs=outputs
                )[0]

            return linearised(jax.vjp(output, learned_of(op), x), (leaves, op, x))

        def linearise_first(leaves, op, z, *, outputs):
            def output(learned):
                block = block_of(leaves)
                own = with_learned(op, learned)
                u = block.widen(z, placement=placement, outputs=outputs)
                return block.leave(own, z, u, placement=placement, outputs=outputs)[0]

            return linearised(jax.vjp(output, learned_of(op)), (leaves, op, z))

        def backward(vjp, grad, loss):
            learned, *rest = vjp(grad)
            return learned, rest, guard(loss, learned)

        def loss_and_gradients(leaves, head, *data):
            loss, grads = jax.value_and_grad(self.mean_loss, argnums=(1, 2))(leaves, head, *data)
            return guard(loss, grads[0]), grads

        self._enter = self.jit(enter, static_argnames="outputs")
        self._widen = self.jit(widen, static_argnames="outputs")
        self._leave = self.jit(leave, static_argnames="outputs")
        self._linearise = self.jit(linearise, static_argnames="outputs")
        self._linearise_first = self.jit(linearise_first, static_argnames="outputs")
        self._backward = self.jit(backward)
        self._loss = self.jit(loss_and_gradients)

    def rows(self, batch_size: int, working_set: int = WORKING_SET) -> int:
        """See `Executor.rows`."""
        per_image = 4 * self.config.num_tokens * self.config.mlp_width
        if not self.device.is_host or self.layout.is_many or batch_size * per_image <= working_set:
            return batch_size
        fitting = max(working_set // per_image, 1)
        return max(num for num in range(1, fitting + 1) if batch_size % num == 0)

    def each(self, function: Callable[[Part], Result], parts: Iterable[Part]) -> Iterator[Result]:
        """See `Executor.each`. The first runs alone, so that what it compiles is compiled once."""
        if not self.device.is_host or self.layout.is_many:
            yield from map(function, parts)
            return
        following = iter(parts)
        yield from map(function, itertools.islice(following, 1))
        yield from side_by_side(function, following)

    def _train_step(
        self,
        learners: Learners,
        head: Any,
        architecture: Architecture,
        step: Step,
        rate: np.float32,
        setup: Setup,
    ) -> tuple[Learners, Any, jax.Array]:
        # which every update takes
        ops = ops_of(architecture, setup.experts, learners)
        rate = self.put(rate)

        def gradients(batch: Batch):
            return self.gradients(ops, head.params, batch, setup.num_classes)

        results = side_by_side(gradients, step) if len(step) > 1 else map(gradients, step)
        loss, grads, head_grad = next(results)
        for more_loss, more_grads, more_head in results:
            loss, head_grad = add(loss, more_loss), add(head_grad, more_head)
            grads = {block: add(grad, more_grads[block]) for block, grad in grads.items()}
        places = {(block, architecture[block]): grad for block, grad in grads.items()}
        changed = {
            place: setup.update(learners[place], grad, rate, loss) for place, grad in places.items()
        }
        return changed, setup.update(head, head_grad, rate, loss), loss

    def gradients(
        self, ops: Ops, head: Head, batch: Batch, num_classes: int
    ) -> tuple[jax.Array, dict[int, Learned], Head]:
        """Weighted loss of one batch, its gradients per block that learns, and the head's gradient.

        The loss is NaN where any of the gradients is non-finite. Runs forward only up to the first
        op that learns.
        """
        begin, z = self.resolve(batch.tokens)
        # which every block takes
        num = self.num_blocks
        weights = self.put(batch.weights)
        first = next((i for i in range(begin, num) if learned_of(ops[i]) is not None), num)
        frozen = [Dense(0, op.expert if isinstance(op, Reuse) else None) for op in ops[begin:first]]
        z, _ = self._forward(frozen, begin, first, z, weights)
        tape: list[Any] = []
        for i in range(first, num):
            stage = self._linearise_first if i == first else self._linearise
            given = (self.blocks[i], ops[i], z)
            z, residuals = stage(*given, outputs=self.outputs[i])
            tape.append(residuals.vjp(given))
        loss, (head_grad, grad) = self._loss(
            self.leaves, head, z, batch.labels, weights, self.number(num_classes)
        )
        grads: dict[int, Learned] = {}
        for i in reversed(range(first, num)):
            # a stage's linearisation is the largest thing a step keeps: let go of it as soon as it
            # is used
            learned_grad, rest, loss = self._backward(tape.pop(), grad, loss)
            grad = rest[0] if rest else grad
            if learned_grad is not None:
                grads[i] = learned_grad
        return loss, grads, head_grad

    def walk(
        self, networks: Sequence[Network], tokens: Tokens | Gather, mask: Mask
    ) -> Iterator[Walked]:
        """Every network over one batch, each shared prefix once.

        Networks are visited in the order of their codes, depth first, so a stack of one batch's
        activations (at most 2 L + 1) is all the memory that sharing needs. Siblings that differ
        from a block on share that block's start, for `mlp_down` attention and up-projection.
        Results equal running each alone: the same programs see the same inputs.
        """
        begin, values = self.resolve(tokens)
        num = self.num_blocks
        starts: list[Start] = [
            Start(values)
        ]  # of block `begin`, `begin` + 1, ...; behind the last: the output
        sums: list[jax.Array | None] = []
        previous: Network = ()
        for index in sorted(
            range(len(networks)), key=lambda i: [step.code for step in networks[i]]
        ):
            network = networks[index][begin:]
            shared = 0
            while shared < len(previous) and previous[shared].code == network[shared].code:
                shared += 1
            del starts[shared + 1 :], sums[shared:]
            for depth in range(shared, len(network)):
                block = begin + depth
                y, total = self._finish(block, network[depth].expert, starts[depth], mask)
                starts.append(Start(self._enter_next(block + 1, y)))
                sums.append(total)
            previous = network
            yield Walked(index, starts[num - begin].z, [None] * begin + sums)

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
        # without work for attn_proj, where a block's choices differ from its first tokens on
        if block == self.num_blocks or self.placement == "attn_proj":
            return x
        return self._enter(self.blocks[block], x, outputs=self.outputs[block])

    def _finish(
        self, block: int, expert: Expert | None, start: "Start", mask
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
    jax.tree_util.register_dataclass, data_fields=["kept"], meta_fields=["places", "structure"]
)
@dataclasses.dataclass(frozen=True)
class Residuals:
    """What a backward pass needs of a stage beyond the stage's own arguments, which `jit` would
    copy to return them."""

    kept: list[jax.Array]
    places: tuple[int | None, ...]
    """Per leaf of the linearisation which argument it is; None: the next of `kept`."""
    structure: Any

    def vjp(self, arguments: Any) -> Any:
        """The linearisation, given the arguments that the stage was called with."""
        given = jax.tree.leaves(arguments)
        kept = iter(self.kept)
        return self.structure.unflatten(
            [next(kept) if place is None else given[place] for place in self.places]
        )


def linearised(value_and_vjp: tuple[Any, Any], arguments: Any) -> tuple[Any, Residuals]:
    """A stage's value and what to return of its linearisation, told apart by identity while JAX
    traces the stage."""
    value, vjp = value_and_vjp
    leaves, structure = jax.tree.flatten(vjp)
    number = {id(leaf): place for place, leaf in enumerate(jax.tree.leaves(arguments))}
    places = tuple(number.get(id(leaf)) for leaf in leaves)
    return value, Residuals([leaf for leaf in leaves if id(leaf) not in number], places, structure)


@dataclasses.dataclass
class Start:
    """What a block's choices share: its first tokens, and the plastic layer's input once somebody
    needs it."""

    z: jax.Array
    u: jax.Array | None = None
