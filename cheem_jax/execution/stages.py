"""Composed compiled stages: how any architecture runs without compiling anything new.

Blocks have equal shapes, so one program per (op kind, does its input need a gradient) serves every block, task and
architecture; the host composes them. The backward pass stops at the first learnable op: what lies before it runs
forward only and keeps no residuals, and Skip costs nothing.
"""

import functools
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from cheem_jax.architecture import Architecture
from cheem_jax.backbone.vit import ViT
from cheem_jax.ops import Adapt, Expert, Kind, LowRank, New, Placement, Reuse, Skip
from cheem_jax.pool import Head, base_pool

Token = Literal["component", "block"]
"""Where mean class tokens are read: the plastic layer's output before the residual sum, or the block's output."""


class Dense(NamedTuple):
    """One block of a forward-only network; equal codes at a block promise equal experts. No expert: Skip."""

    code: int
    expert: Expert | None


class Path(NamedTuple):
    """One network's way through a batch: last tokens, and per block the summed class token (None where skipped)."""

    index: int
    tokens: jax.Array
    sums: list[jax.Array | None]


class Stages:
    """The compiled stages of one frozen backbone at one placement of the memory.

    Arrays: images uint8 `[B, S, S, 3]`, tokens `[B, N, D]`, mask float32 `[B]` (0 marks padding of the last batch).
    """

    def __init__(self, vit: ViT, placement: Placement, *, token: Token = "component"):
        self.config, self.placement, self.token = vit.config, placement, token
        self.base_pool = base_pool(vit, placement)
        graphdef, state = nnx.split(vit)
        self._leaves, treedef = jax.tree.flatten(state)
        splits = [nnx.split(block) for block in vit.blocks]
        self._blocks = [tuple(jax.tree.leaves(state)) for _, state in splits]
        block_graph, block_tree = splits[0][0], jax.tree.structure(splits[0][1])

        def run(leaves, op, x):
            block = nnx.merge(block_graph, jax.tree.unflatten(block_tree, leaves))
            return block.run(op, x, placement=placement)

        def whole(leaves) -> ViT:
            return nnx.merge(graphdef, jax.tree.unflatten(treedef, leaves))

        @jax.jit
        def embed(leaves, images):
            return whole(leaves).embed(images)

        @functools.partial(jax.jit, static_argnames="kind")
        def forward(leaves, expert, x, mask, *, kind: Literal["reuse", "skip"]):
            y, component = run(leaves, Reuse(expert) if kind == "reuse" else Skip(), x)
            if component is None:
                return y, None
            tokens = (component if token == "component" else y)[:, 0]
            return y, mask @ tokens

        @functools.partial(jax.jit, static_argnames=("kind", "needs_input"))
        def linearise(leaves, expert, learned, x, *, kind: Kind, needs_input: bool):
            def output(learned, x):
                match kind:
                    case "reuse":
                        op = Reuse(expert)
                    case "adapt":
                        op = Adapt(expert, learned)
                    case "new":
                        op = New(learned)
                    case "skip":
                        op = Skip()
                return run(leaves, op, x)[0]

            if needs_input:
                return jax.vjp(output, learned, x)
            return jax.vjp(lambda learned: output(learned, x), learned)

        @jax.jit
        def backward(vjp, grad):
            return vjp(grad)

        @jax.jit
        def loss(leaves, head, x, labels, mask, num_classes):
            def mean_loss(head, x):
                logits = masked_logits(head, whole(leaves).features(x), num_classes)
                losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
                return (losses * mask).sum() / mask.sum()

            return jax.value_and_grad(mean_loss, argnums=(0, 1))(head, x)

        @jax.jit
        def classify(leaves, head, x, labels, mask, num_classes):
            logits = masked_logits(head, whole(leaves).features(x), num_classes)
            answers = logits.argmax(axis=-1)
            return answers, ((answers == labels) & (mask > 0)).sum()

        @jax.jit
        def features(leaves, x):
            return whole(leaves).features(x)

        self._embed, self._forward, self._linearise, self._backward = embed, forward, linearise, backward
        self._loss, self._classify, self._features = loss, classify, features

    @property
    def num_blocks(self) -> int:
        return len(self._blocks)

    def embed(self, images: np.ndarray) -> jax.Array:
        """Tokens of the first block."""
        return self._embed(self._leaves, images)

    def features(self, tokens: jax.Array) -> jax.Array:
        """Features `[B, D]` of the last block's tokens."""
        return self._features(self._leaves, tokens)

    def classify(self, head: Head, tokens, labels, mask, num_classes: int) -> tuple[jax.Array, jax.Array]:
        """Class answers `[B]` of a padded head and how many of the unmasked ones are right."""
        return self._classify(self._leaves, head, tokens, labels, mask, np.int32(num_classes))

    def loss_and_grads(
        self,
        architecture: Architecture,
        experts: Sequence[Expert | None],
        learned: Sequence[Expert | LowRank | None],
        head: Head,
        images: np.ndarray,
        labels: np.ndarray,
        mask: np.ndarray,
        num_classes: int,
    ) -> tuple[jax.Array, dict[int, Expert | LowRank], Head]:
        """Mean loss of one batch, its gradients per block that learns, and the head's gradient.

        `experts` are the frozen ones behind reuse and adapt, `learned` the parameters behind adapt and new, per block.
        """
        kinds = [choice.kind for choice in architecture]
        first = next((i for i, kind in enumerate(kinds) if kind in ("adapt", "new")), len(kinds))
        x = self.embed(images)
        for i in range(first):
            x, _ = self._forward(self._blocks[i], experts[i], x, mask, kind=kinds[i])
        tape: list[Any] = []
        for i in range(first, len(kinds)):
            x, vjp = self._linearise(
                self._blocks[i], experts[i], learned[i], x, kind=kinds[i], needs_input=i > first
            )
            tape.append(vjp)
        loss, (head_grad, grad) = self._loss(self._leaves, head, x, labels, mask, np.int32(num_classes))
        grads: dict[int, Expert | LowRank] = {}
        for i in reversed(range(first, len(kinds))):
            learned_grad, *rest = self._backward(tape.pop(), grad)
            grad = rest[0] if rest else grad
            if learned_grad is not None:
                grads[i] = learned_grad
        return loss, grads, head_grad

    def run_networks(
        self, networks: Sequence[Sequence[Dense]], images: np.ndarray, mask: np.ndarray
    ) -> Iterator[Path]:
        """Every network over one batch, forward only, each shared prefix once.

        Networks are visited in the order of their codes, so a stack of one batch's activations (at most L + 1) is all
        the memory that sharing needs. Results equal running each alone: the same programs see the same inputs.
        """
        stack: list[tuple[jax.Array, jax.Array | None]] = [(self.embed(images), None)]
        previous: Sequence[Dense] = ()
        for index in sorted(range(len(networks)), key=lambda i: [step.code for step in networks[i]]):
            network = networks[index]
            shared = 0
            while shared < len(previous) and previous[shared].code == network[shared].code:
                shared += 1
            del stack[shared + 1 :]
            for block in range(shared, len(network)):
                expert = network[block].expert
                kind = "skip" if expert is None else "reuse"
                stack.append(self._forward(self._blocks[block], expert, stack[-1][0], mask, kind=kind))
            previous = network
            yield Path(index, stack[-1][0], [total for _, total in stack[1:]])


def masked_logits(head: Head, features: jax.Array, num_classes) -> jax.Array:
    """Logits with the head's padding pushed out of reach."""
    logits = features @ head.weight + head.bias
    return jnp.where(jnp.arange(logits.shape[-1]) < num_classes, logits, -1e30)
