"""Composed compiled stages: how any architecture runs without compiling anything new.

Blocks have equal shapes, so one program per (op kind, does its input need a gradient) serves every block, task and
architecture; the host composes them. The backward pass stops at the first learnable op: what lies before it runs
forward only and keeps no residuals, and Skip costs nothing.
"""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from cheem_jax.architecture import Architecture
from cheem_jax.backbone.vit import Block, ViT
from cheem_jax.ops import Adapt, Expert, Kind, LowRank, New, Placement, Reuse, Skip
from cheem_jax.pool import Head, base_pool

Token = Literal["component", "block"]
"""Where mean class tokens are read: the plastic layer's output before the residual sum, or the block's output."""


class Dense(NamedTuple):
    """One block of a forward-only network; equal codes at a block promise equal experts. No expert: Skip."""

    code: int
    expert: Expert | None


class Walked(NamedTuple):
    """What one network made of a batch: last tokens, and per block the summed class token (None where skipped)."""

    index: int
    tokens: jax.Array
    sums: list[jax.Array | None]


class Stages:
    """The compiled stages of one frozen backbone at one placement of the memory.

    Arrays: images uint8 `[B, S, S, 3]`, tokens `[B, N, D]`, mask float32 `[B]` (0 marks padding of the last batch).
    """

    def __init__(self, vit: ViT, placement: Placement, *, token: Token = "component"):
        self.config, self.token = vit.config, token
        self.placement: Placement = placement
        self.base_pool = base_pool(vit, placement)
        graphdef, state = nnx.split(vit)
        self._leaves, treedef = jax.tree.flatten(state)
        splits = [nnx.split(block) for block in vit.blocks]
        self._blocks = [tuple(jax.tree.leaves(state)) for _, state in splits]
        block_graph, block_tree = splits[0][0], jax.tree.structure(splits[0][1])

        def block_of(leaves) -> Block:
            return nnx.merge(block_graph, jax.tree.unflatten(block_tree, leaves))

        def whole(leaves) -> ViT:
            return nnx.merge(graphdef, jax.tree.unflatten(treedef, leaves))

        @jax.jit
        def embed(leaves, images):
            return whole(leaves).embed(images)

        @jax.jit
        def enter(leaves, x):
            return block_of(leaves).enter(x, placement=placement)

        @jax.jit
        def widen(leaves, z):
            return block_of(leaves).widen(z, placement=placement)

        @jax.jit
        def leave(leaves, expert, z, u, mask):
            op = Skip() if expert is None else Reuse(expert)
            y, component = block_of(leaves).leave(op, z, u, placement=placement)
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
                return block_of(leaves).run(op, x, placement=placement)[0]

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
            # a network that computes NaN must not pass for one that answers class 0
            answers = jnp.where(jnp.isfinite(logits).all(axis=-1), logits.argmax(axis=-1), -1)
            return answers, ((answers == labels) & (mask > 0)).sum()

        @jax.jit
        def features(leaves, x):
            return whole(leaves).features(x)

        self._embed, self._enter, self._widen, self._leave = embed, enter, widen, leave
        self._linearise, self._backward = linearise, backward
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
            expert = None if kinds[i] == "skip" else experts[i]
            x, _ = self._finish(i, expert, self._start(i, x), mask)
        tape: list[Any] = []
        for i in range(first, len(kinds)):
            x, vjp = self._linearise(self._blocks[i], experts[i], learned[i], x, kind=kinds[i], needs_input=i > first)
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
    ) -> Iterator[Walked]:
        """Every network over one batch, forward only, each shared prefix once.

        Networks are visited in the order of their codes, depth first, so a stack of one batch's activations (at most
        2 L + 1) is all the memory that sharing needs. Siblings that differ from a block on share that block's start,
        for `mlp_down` attention and up-projection. Results equal running each alone: the same programs see the same
        inputs.
        """
        reached: list[jax.Array] = [self.embed(images)]  # input of block 0, 1, ...
        sums: list[jax.Array | None] = []
        starts: list[Start] = []
        previous: Sequence[Dense] = ()
        for index in sorted(range(len(networks)), key=lambda i: [step.code for step in networks[i]]):
            network = networks[index]
            shared = 0
            while shared < len(previous) and previous[shared].code == network[shared].code:
                shared += 1
            del reached[shared + 1 :], sums[shared:], starts[shared + 1 :]
            for block in range(shared, len(network)):
                if block == len(starts):
                    starts.append(self._start(block, reached[block]))
                y, total = self._finish(block, network[block].expert, starts[block], mask)
                reached.append(y)
                sums.append(total)
            previous = network
            yield Walked(index, reached[-1], list(sums))

    def _start(self, block: int, x: jax.Array) -> "Start":
        # without work for attn_proj, where a block's choices differ from its first tokens on
        z = x if self.placement == "attn_proj" else self._enter(self._blocks[block], x)
        return Start(z)

    def _finish(self, block: int, expert: Expert | None, start: "Start", mask) -> tuple[jax.Array, jax.Array | None]:
        if expert is None and self.placement == "mlp_down":
            return start.z, None
        if expert is not None and start.u is None:
            start.u = self._widen(self._blocks[block], start.z)
        return self._leave(self._blocks[block], expert, start.z, None if expert is None else start.u, mask)


@dataclasses.dataclass
class Start:
    """What a block's choices share: its first tokens, and the plastic layer's input once somebody needs it."""

    z: jax.Array
    u: jax.Array | None = None


def masked_logits(head: Head, features: jax.Array, num_classes) -> jax.Array:
    """Logits with the head's padding pushed out of reach."""
    logits = features @ head.weight + head.bias
    return jnp.where(jnp.arange(logits.shape[-1]) < num_classes, logits, -1e30)
