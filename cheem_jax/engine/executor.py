"""The interface behind which an architecture runs, and what all executors share.

A pass begins with `Tokens`: what every choice at a block has in common (for `mlp_down` the tokens
after its attention half). They come from images, from a cache, or from another network's pass; what
follows does not care. The three executors differ only in how the blocks after that are cut into
compiled programs:

- `stages` (one program per op kind, composed by the host),
- `whole` (one program per signature, the tuple of op kinds),
- `scan` (one program, op kinds as data).
"""

import abc
import copy
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Float, Int

from cheem_jax.backbone.vit import Block, ViT, mean_patch, summary
from cheem_jax.core.architecture import Architecture, Choice
from cheem_jax.core.device import Device, here, traced_for
from cheem_jax.core.ops import Adapt, Expert, New, Op, Reuse, Skip
from cheem_jax.core.pool import FAR, Head, base_pool
from cheem_jax.core.settings import Placement, Token
from cheem_jax.engine.compilation import jit_options
from cheem_jax.engine.layout import ONE, Layout

WORKING_SET = 5 * 2**20
"""Bytes of a block's widest activations (the plastic layer's input) above which a CPU gets slower
per image."""

Part = TypeVar("Part")
Result = TypeVar("Result")


class Dense(NamedTuple):
    """One block of a forward-only network; equal codes at a block promise equal experts. No expert:
    Skip."""

    code: int
    expert: Expert | None


Network = Sequence[Dense]


class Tokens(NamedTuple):
    """Where a pass goes on: the tokens `[B, N, D]` that every choice at `block` shares.

    Behind the last block (`block` = L) they are the network's last tokens, of which only the class
    token is kept.
    """

    block: int
    values: Float[Array, "B N D"]


class Gather(NamedTuple):
    """Tokens still to be taken from a data set on the device: rows `[B]` of `values` `[M, ...]`.

    `values` are uint8 images where `block` is None, else tokens of that block.
    """

    block: int | None
    values: jax.Array
    rows: Int[np.ndarray, "B"]


class Walked(NamedTuple):
    """What one network made of a batch: last tokens, and per block the summed class token.

    None where the block was skipped, or lies before the tokens that the pass began with.
    """

    index: int
    tokens: jax.Array
    sums: Sequence[jax.Array | None]


class Batch(NamedTuple):
    """Tokens, labels `[B]` and the images' weights in the mean loss of a step (0 for padding)."""

    tokens: Tokens | Gather
    labels: np.ndarray | jax.Array
    weights: np.ndarray | jax.Array


Mask = np.ndarray | jax.Array
"""`[B]`, 1 for images that count and 0 for padding."""

Step = Sequence[Batch]
"""What one gradient step learns from; its weights sum to 1, so losses and gradients of its parts
add up."""

Place = tuple[int, Choice]
"""Where something is learned: the block and the choice (Adapt of an expert, or New)."""

Learners = Mapping[Place, Any]
"""What is learned, by place: any pytree with the parameters in `params` and beside them what its
updates need."""

Update = Callable[[Any, Any, Any, Any], Any]
"""A learner, the gradients of its parameters, the rate and the loss to the next learner, as a
function that JAX traces.

Where a gradient is non-finite the loss is NaN, and the learner has to stay as it was.
"""


class Setup(NamedTuple):
    """What training steps share and do not change. Programs are compiled for each `update`: pass
    the same function."""

    experts: Sequence[Sequence[Expert]]
    """The frozen experts of each block."""
    num_classes: int
    update: Update
    blank: tuple[Any, Any]
    """An Adapt's and a New's learner of zeros: their shapes, to fill places that nobody reads."""


class Trained(NamedTuple):
    """What training steps return: the learners (all of them), the head's learner and the loss of
    each step."""

    learners: dict[Place, Any]
    head: Any
    losses: list[jax.Array]


class Executor(abc.ABC):
    """One frozen backbone at one placement of the memory, and the programs that every executor
    needs.

    Arrays: images uint8 `[B, S, S, 3]`, tokens `[B, N, D]`, mask float32 `[B]`.
    """

    name: ClassVar[str]
    composes: ClassVar[bool] = False
    """Whether an architecture runs as a composition of compiled functions, one per op kind and
    place in it."""
    steps_per_call: int = 1
    """Training steps that one dispatch runs."""
    reason: str = "as set"
    """Why this executor was taken, in words for the log."""
    budget: int = 2**30
    """Bytes that may be spent on keeping what is computed again and again."""
    working: int = 2**30
    """Bytes that the activations of a forward pass may take."""

    def __init__(
        self,
        vit: ViT,
        placement: Placement,
        *,
        token: Token = "component",
        deterministic: bool = False,
        layout: Layout = ONE,
        device: Device | None = None,
    ):
        self.config = vit.config
        self.token = token
        self.layout = layout
        self.device = device = device or here(deterministic=deterministic)
        self._numbers: dict[int, Any] = {}
        self._on: dict[int, Executor] = {}
        self.placement: Placement = placement
        self.outputs = [vit.outputs(block) for block in range(vit.config.depth)]
        graphdef, state = nnx.split(vit)
        leaves, treedef = jax.tree.flatten(state)
        splits = [nnx.split(block) for block in vit.blocks]
        placed = {id(leaf): layout.everywhere(leaf) for leaf in leaves}
        self.leaves = [placed[id(leaf)] for leaf in leaves]
        # matrices of a block are operands of products alone, so they are rounded once and not in
        # every call
        operand = jnp.dtype(vit.config.precision)
        self.blocks = [
            tuple(
                own.astype(operand) if own.ndim == 2 else own
                for own in (placed[id(leaf)] for leaf in leaves)
            )
            for leaves in (jax.tree.leaves(state) for _, state in splits)
        ]
        self.base_pool = jax.tree.map(
            lambda leaf: layout.everywhere(placed.get(id(leaf), leaf)),
            base_pool(vit.experts(placement)),
        )
        block_graph = splits[0][0]
        block_tree = jax.tree.structure(splits[0][1])
        first_outputs = self.outputs[0]
        compiler_options = jit_options(vit.config.precision, deterministic)

        def jit(function: Callable[..., Any], **options: Any) -> Any:
            return layout.jit(
                traced_for(device, function), compiler_options=compiler_options, **options
            )

        self.jit = jit

        def block_of(leaves) -> Block:
            return nnx.merge(block_graph, jax.tree.unflatten(block_tree, leaves))

        def vit_of(leaves) -> ViT:
            return nnx.merge(graphdef, jax.tree.unflatten(treedef, leaves))

        def begin(leaves, images):
            vit = vit_of(leaves)
            return vit.blocks[0].enter(
                vit.embed(images), placement=placement, outputs=first_outputs
            )

        def features(leaves, tokens):
            return vit_of(leaves).features(tokens)

        def mean_loss(leaves, head, tokens, labels, weights, num_classes):
            logits = masked_logits(head, vit_of(leaves).features(tokens), num_classes)
            return (optax.softmax_cross_entropy_with_integer_labels(logits, labels) * weights).sum()

        def classify(leaves, head, tokens, labels, mask, num_classes):
            logits = masked_logits(head, vit_of(leaves).features(tokens), num_classes)
            # a network that computes NaN must not pass for one that answers class 0
            answers = jnp.where(jnp.isfinite(logits).all(axis=-1), logits.argmax(axis=-1), -1)
            return answers, ((answers == labels) & (mask > 0)).sum()

        self.vit_of = vit_of
        self.block_of = block_of
        self.begin_of = begin
        self.mean_loss = mean_loss
        self._begin, self._features, self._classify = (
            self.jit(begin),
            self.jit(features),
            self.jit(classify),
        )
        self._mean_patch = self.jit(lambda tokens: mean_patch(tokens, vit.config))

    @property
    def kept_type(self) -> Any:
        """Type of tokens that are kept: float32 on a CPU; an accelerator keeps them in the run's
        precision."""
        return jnp.dtype("float32" if self.device.is_host else self.config.precision)

    @property
    def num_blocks(self) -> int:
        return len(self.blocks)

    def on(self, place: int) -> "Executor":
        """The same on one of this process's devices alone; it compiles for itself and copies
        nothing."""
        if place not in self._on:
            own = self._on[place] = copy.copy(self)
            own._numbers = {}
            own.layout = Layout([self.layout.devices[place]])
            own.leaves, own.blocks, own.base_pool = self.layout.copy(
                (self.leaves, self.blocks, self.base_pool), place
            )
        return self._on[place]

    def begin(self, images: np.ndarray | jax.Array) -> Tokens:
        """Tokens of block 0; over several devices the images are split already (`Layout.rows`)."""
        return Tokens(0, self._begin(self.leaves, images))

    def resolve(self, source: Tokens | Gather) -> Tokens:
        """The tokens themselves."""
        if isinstance(source, Tokens):
            return source
        taken = self.take(source.values, self.layout.rows(source.rows))
        return self.begin(taken) if source.block is None else Tokens(source.block, taken)

    def take(self, values: jax.Array, rows: Any) -> jax.Array:
        """Rows `[...]` of a data set on the device `[M, ...]`."""
        return _take(values, rows)

    def features(self, tokens: jax.Array) -> jax.Array:
        """Features `[B, D]` of the last block's tokens."""
        return self._features(self.leaves, tokens)

    def mean_patch(self, tokens: jax.Array) -> jax.Array:
        """Mean patch token `[B, D]` of tokens `[B, N, D]`."""
        return self._mean_patch(tokens)

    def classify(
        self, head: Head, tokens, labels, mask, num_classes: int
    ) -> tuple[jax.Array, jax.Array]:
        """Class answers `[B]` of a padded head and how many of the unmasked ones are right."""
        return self._classify(self.leaves, head, tokens, labels, mask, self.number(num_classes))

    def put(self, values: Any) -> Any:
        """What several calls take from the host, on the device, where that is another one: each
        call would copy it."""
        return values if self.device.is_host or self.layout.is_many else jax.device_put(values)

    def number(self, value: int) -> Any:
        """The same of an int32 that never changes."""
        if value not in self._numbers:
            self._numbers[value] = self.put(np.int32(value))
        return self._numbers[value]

    def rows(self, batch_size: int, working_set: int = WORKING_SET) -> int:
        """Images per call of a program, for batches of `batch_size`: a divisor of it.

        On a CPU `stages` takes as many as keep a block's widest activations within `working_set`
        bytes.
        """
        return batch_size

    def forward_rows(self, batch_size: int, num: int) -> int:
        """Images per call of a forward pass over `num` images: `rows` on a CPU.

        An accelerator takes more than a step has, in one of few sizes: that which leaves least of
        the last call empty.
        """
        per_image = (
            4
            * self.num_blocks
            * self.config.num_tokens
            * (self.config.width + self.config.mlp_width)
        )
        sizes = [
            size
            for size in self.device.forward_sizes
            if size > batch_size and size * per_image <= self.working
        ]
        if num <= batch_size or not sizes:
            return self.rows(batch_size)
        return min(sizes, key=lambda size: (-(-num // size) * size, -size))

    def each(self, function: Callable[[Part], Result], parts: Iterable[Part]) -> Iterator[Result]:
        """`function` of each part of a forward pass, in their order; on a CPU `stages` computes two
        at a time."""
        return map(function, parts)

    def walk(
        self, networks: Sequence[Network], tokens: Tokens | Gather, mask: Mask
    ) -> Iterator[Walked]:
        """Every network from the same tokens on, forward only, in any order."""
        begin, values = self.resolve(tokens)
        for index, network in enumerate(networks):
            last, sums = self._forward(network[begin:], begin, self.num_blocks, values, mask)
            yield Walked(index, last, [None] * begin + sums)

    def advance(self, network: Network, tokens: Tokens | Gather, until: int) -> Tokens:
        """The tokens of a later block of one network."""
        # sums come along and nobody reads them: a mask of another kind would be another program
        begin, values = self.resolve(tokens)
        mask = self.put(np.zeros(values.shape[0], np.float32))
        return Tokens(until, self._forward(network[begin:until], begin, until, values, mask)[0])

    @abc.abstractmethod
    def _forward(
        self, network: Network, begin: int, until: int, values: jax.Array, mask: Mask
    ) -> tuple[jax.Array, list[jax.Array | None]]:
        """From the tokens of block `begin` to those of `until`, and each block's summed class
        token."""

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
        """One step per architecture; `learners` holds what each Adapt and New of them learns.

        What an architecture does not hold keeps its learner; so does everything where the loss or a
        gradient is non-finite, and the loss returned is then NaN. Blocks before a batch's tokens
        are taken as done: whatever the architecture holds there is not looked at.
        """
        learners = dict(learners)
        losses = []
        for architecture, step, rate in zip(architectures, steps, rates, strict=True):
            changed, head, loss = self._train_step(
                learners, head, architecture, step, np.float32(rate), setup
            )
            learners |= changed
            losses.append(loss)
        return Trained(learners, head, losses)

    def _train_step(
        self,
        learners: Learners,
        head: Any,
        architecture: Architecture,
        step: Step,
        rate: np.float32,
        setup: Setup,
    ) -> tuple[Learners, Any, jax.Array]:
        """The learners that changed, the head's, and the loss; only for `train` as it is here."""
        raise NotImplementedError

    def _composed(self, blocks, ops: Sequence[Op], z, begin: int, until: int):
        """Traced: from the tokens of block `begin` to those of `until`; also each block's output
        and component.

        `blocks` and `ops` begin with those of `begin`.
        """
        seen = []
        for i in range(begin, until):
            block = self.block_of(blocks[i - begin])
            outputs = self.outputs[i]
            op = ops[i - begin]
            u = (
                None
                if isinstance(op, Skip)
                else block.widen(z, placement=self.placement, outputs=outputs)
            )
            y, component = block.leave(op, z, u, placement=self.placement, outputs=outputs)
            seen.append((y, component))
            z = y
            if i + 1 < self.num_blocks:
                following = self.block_of(blocks[i + 1 - begin])
                z = following.enter(y, placement=self.placement, outputs=self.outputs[i + 1])
        return z, seen

    def _sums(self, seen, mask) -> list[jax.Array | None]:
        """Traced: the summed class token of each block that `_composed` returned."""
        tokens = [component if self.token == "component" else y for y, component in seen]
        return [
            None if component is None else mask @ summary(own, self.config)
            for own, (_, component) in zip(tokens, seen, strict=True)
        ]

    def start_of(self, block: int) -> int:
        """Where a program begins that trains a network whose first block that learns is `block`:
        there, or before."""
        return block

    def programs_of(self, begin: int, skipped: Sequence[bool]) -> set[Hashable]:
        """What a forward pass from block `begin` on compiles, told apart by the blocks that it
        skips."""
        return {begin, *enumerate(skipped, begin)}

    def counters(self) -> dict[str, Any]:
        """What the record keeps about this executor's programs."""
        return {"executor": self.name}


def ops_of(
    architecture: Architecture, experts: Sequence[Sequence[Expert]], learners: Learners
) -> list[Op]:
    """The ops of an architecture; `learners` holds what each Adapt and New of it learns."""

    def op(block: int, choice: Choice) -> Op:
        match choice.kind:
            case "reuse":
                return Reuse(experts[block][cast(int, choice.expert)])
            case "adapt":
                return Adapt(
                    experts[block][cast(int, choice.expert)], learners[block, choice].params
                )
            case "new":
                return New(learners[block, choice].params)
            case "skip":
                return Skip()

    return [op(block, choice) for block, choice in enumerate(architecture)]


def guard(loss: jax.Array, grads: Any) -> jax.Array:
    """The loss, or NaN where one of its gradients is non-finite: such a step must not reach any
    parameter."""
    finite = [jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(grads)]
    return jnp.where(jnp.stack(finite).all(), loss, jnp.nan) if finite else loss


def masked_logits(head: Head, features: jax.Array, num_classes) -> jax.Array:
    """Logits with the head's padding pushed out of reach."""
    logits = features @ head.weight + head.bias
    return jnp.where(jnp.arange(logits.shape[-1]) < num_classes, logits, FAR)


@jax.jit
def _take(values, rows):
    taken = values[rows]
    # tokens may be kept in fewer bits than a pass begins with
    return taken.astype(jnp.float32) if jnp.issubdtype(taken.dtype, jnp.floating) else taken


@jax.jit
def add(a, b):
    """Sum of two equal pytrees."""
    return jax.tree.map(jnp.add, a, b)
