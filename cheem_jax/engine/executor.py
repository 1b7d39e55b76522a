"""The interface of all executors, and the functions that they share.

A pass starts with the `Tokens` of a block, which do not depend on the choice at this block: the
input of the block or, for `mlp_down`, the tokens after the block's attention half. The tokens are
computed from images, read from a cache, or reused from another network's pass. The three executors
run the blocks of a pass with different compiled functions:

  - `stages`: one function per op kind; the host calls these functions block by block;
  - `whole`: one function per signature (the tuple of op kinds of an architecture);
  - `scan`: one function for all architectures; op kinds are arguments.
"""

import abc
import copy
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Float, Int

from cheem_jax.backbone.vit import Block, ViT, mean_patch, summary
from cheem_jax.core.architecture import Architecture, Choice
from cheem_jax.core.device import Device, default_device, traced_for
from cheem_jax.core.ops import Adapt, Expert, New, Op, Reuse, Skip
from cheem_jax.core.pool import FAR, Head, base_pool
from cheem_jax.core.settings import Placement, Token
from cheem_jax.engine.batches import P, R
from cheem_jax.engine.compilation import jit_options
from cheem_jax.engine.layout import ONE, Layout

WORKING_SET = 5 * 2**20
"""Limit in bytes for a block's widest activations, which are the input of the plastic layer. If
they are larger, a CPU needs more time per image."""


class Dense(NamedTuple):
    """A block of a forward-only network; the expert is None for Skip.

    If two networks have the same code at a block, their experts at that block must be identical.
    """

    code: int
    expert: Expert | None


Network = Sequence[Dense]


class Tokens(NamedTuple):
    """Tokens `[B, N, D]` at the start of a pass; they do not depend on the choice at `block`.

    If `block` is the number of blocks L, the tokens are the output of the last block. This output
    contains only the CLS token, if the backbone has one.
    """

    block: int
    values: Float[Array, "B N D"]


class Gather(NamedTuple):
    """The input of a pass: the rows of `values` `[M, ...]`, a data set on the device, at the
    indices `rows` `[B]`. `values` contains the tokens that enter `block`, or images if `block` is
    None."""

    block: int | None
    values: jax.Array
    rows: Int[np.ndarray, "B"]


class Walked(NamedTuple):
    """The results of network `index` for a batch: the final tokens, and for each block the sum of
    the CLS tokens over the images.

    The sum is None at a block that the network skips, and at blocks before the start of the pass.
    """

    index: int
    tokens: jax.Array
    sums: Sequence[jax.Array | None]


class Batch(NamedTuple):
    """Tokens, labels `[B]`, and the weight `[B]` of each image in the mean loss of a step (0 for
    padding)."""

    tokens: Tokens | Gather
    labels: np.ndarray | jax.Array
    weights: np.ndarray | jax.Array


Mask = np.ndarray | jax.Array
"""`[B]`, 1 for images and 0 for padding."""

Step = Sequence[Batch]
"""Batches of one gradient step. All their weights together sum to 1, so the loss and the gradients
of the step are the sums over the batches."""

Planned = tuple[Architecture, Step, float]
"""A training step: its architecture, its data and its learning rate."""

Place = tuple[int, Choice]
"""A block and a learnable choice at this block (Adapt of an expert, or New)."""

Learners = Mapping[Place, Any]
"""Learners, keyed by block and choice. A learner is a pytree with the learned parameters in
`params` and the state of the optimizer."""

Update = Callable[[Any, Any, Any, Any], Any]
"""Traced function that maps a learner, its gradients, the learning rate and the loss to the updated
learner.

If a gradient is non-finite, the loss is NaN, and the function must return the learner unchanged.
"""


class Setup(NamedTuple):
    """Constants of training steps. All calls must pass the same function object as `update`,
    because functions are compiled again for each new object."""

    experts: Sequence[Sequence[Expert]]
    """Frozen experts of each block."""
    num_classes: int
    update: Update
    blank: tuple[Any, Any]
    """Two learners of zeros, one for Adapt and one for New. `scan` uses them for experts and blocks
    without a learner."""


class Trained(NamedTuple):
    """Result of training: the learners, the learner of the head, and the loss of each step."""

    learners: dict[Place, Any]
    head: Any
    losses: list[jax.Array]


class Executor(abc.ABC):
    """A frozen backbone with one placement of the memory, and the functions that run networks based
    on this backbone.

    Arrays: images are uint8 `[B, S, S, 3]`, tokens `[B, N, D]`, masks float32 `[B]`.
    """

    name: ClassVar[str]
    composes: ClassVar[bool] = False
    """Whether the host composes an architecture from compiled functions, one per op kind."""
    omits_skipped: ClassVar[bool] = True
    """Whether a skipped branch costs nothing."""
    steps_per_call: int = 1
    """Number of training steps per dispatch."""
    reason: str = "as set"
    """Reason why this executor was chosen, as text for the log."""
    budget: int = 2**30
    """Maximum number of bytes of cached results."""
    working: int = 2**30
    """Maximum number of bytes of activations in a forward pass."""

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
        self.device = device = device or default_device(deterministic=deterministic)
        self.placement: Placement = placement
        self.outputs = [vit.outputs(block) for block in range(vit.config.depth)]
        self.numbers: dict[int, Any] = {}
        self._on: dict[int, Executor] = {}
        graphdef, state = nnx.split(vit)
        leaves, treedef = jax.tree.flatten(state)
        splits = [nnx.split(block) for block in vit.blocks]
        self.leaves = [layout.replicate(leaf) for leaf in leaves]
        placed = dict(zip(map(id, leaves), self.leaves, strict=True))
        # matrices are only operands of products, so they are rounded here, not in every call
        operand = jnp.dtype(vit.config.precision)
        self.blocks = [
            tuple(
                leaf.astype(operand) if leaf.ndim == 2 else leaf
                for leaf in (placed[id(leaf)] for leaf in jax.tree.leaves(state))
            )
            for _, state in splits
        ]
        self.base_pool = jax.tree.map(
            lambda leaf: layout.replicate(placed.get(id(leaf), leaf)),
            base_pool(vit.experts(placement)),
        )
        block_graph = splits[0][0]
        block_tree = jax.tree.structure(splits[0][1])
        compiler = jit_options(vit.config.precision, deterministic)

        def jit(function: Callable[..., Any], **options: Any) -> Any:
            return layout.jit(traced_for(device, function), compiler_options=compiler, **options)

        def merge_block(leaves) -> Block:
            return nnx.merge(block_graph, jax.tree.unflatten(block_tree, leaves))

        def merge_vit(leaves) -> ViT:
            return nnx.merge(graphdef, jax.tree.unflatten(treedef, leaves))

        def begin(leaves, images):
            vit = merge_vit(leaves)
            x = vit.embed(images)
            return vit.blocks[0].enter(x, placement=placement, outputs=self.outputs[0])

        def features(leaves, tokens):
            return merge_vit(leaves).features(tokens)

        def mean_loss(leaves, head, tokens, labels, weights, num_classes):
            logits = masked_logits(head, features(leaves, tokens), num_classes)
            return (optax.softmax_cross_entropy_with_integer_labels(logits, labels) * weights).sum()

        def classify(leaves, head, tokens, labels, mask, num_classes):
            logits = masked_logits(head, features(leaves, tokens), num_classes)
            # The class is -1 if a logit is non-finite; argmax would return class 0 for a broken
            # network.
            answers = jnp.where(jnp.isfinite(logits).all(axis=-1), logits.argmax(axis=-1), -1)
            return answers, ((answers == labels) & (mask > 0)).sum()

        self.jit = jit
        self.merge_vit = merge_vit
        self.merge_block = merge_block
        self.trace_begin = begin
        self.mean_loss = mean_loss
        self._begin = jit(begin)
        self._features = jit(features)
        self._classify = jit(classify)
        self._mean_patch = jit(lambda tokens: mean_patch(tokens, vit.config))

    @property
    def cached_type(self) -> Any:
        """Type of cached tokens: float32 on a CPU, the configured precision on an accelerator."""
        return jnp.dtype("float32" if self.device.is_host else self.config.precision)

    @property
    def num_blocks(self) -> int:
        return len(self.blocks)

    def on(self, place: int) -> "Executor":
        """Return a copy of the executor for device number `place` of the layout. The copy shares
        the replicated arrays but compiles its own functions."""
        if place not in self._on:
            one = self._on[place] = copy.copy(self)
            one.layout = Layout([self.layout.devices[place]])
            one.numbers = {}  # the cached constants can be on another device
            one.leaves, one.blocks, one.base_pool = self.layout.copy(
                (self.leaves, self.blocks, self.base_pool), place
            )
        return self._on[place]

    def begin(self, images: np.ndarray | jax.Array) -> Tokens:
        """Compute the tokens of block 0 from images. With more than one device, the images must
        already be split over the devices (`Layout.rows`)."""
        return Tokens(0, self._begin(self.leaves, images))

    def resolve(self, source: Tokens | Gather) -> Tokens:
        """Return the tokens of a source. If `source` is a `Gather`, gather its rows; if these rows
        are images, also compute their tokens."""
        if isinstance(source, Tokens):
            return source
        values = self.take(source.values, self.layout.rows(source.rows))
        return self.begin(values) if source.block is None else Tokens(source.block, values)

    def take(self, values: jax.Array, rows: Any) -> jax.Array:
        """Gather rows of a data set `[M, ...]` on the device."""
        return _take(values, rows)

    def features(self, tokens: jax.Array) -> jax.Array:
        """Compute features `[B, D]` from the tokens of the last block."""
        return self._features(self.leaves, tokens)

    def mean_patch(self, tokens: jax.Array) -> jax.Array:
        """Compute the mean `[B, D]` of tokens `[B, N, D]` without the CLS token."""
        return self._mean_patch(tokens)

    def classify(
        self, head: Head, tokens, labels, mask, num_classes: int
    ) -> tuple[jax.Array, jax.Array]:
        """Predict classes `[B]` with a padded head. Also return the number of correct predictions
        among the images with mask 1."""
        return self._classify(self.leaves, head, tokens, labels, mask, self.number(num_classes))

    def put(self, values: Any) -> Any:
        """Copy `values` to the accelerator, so that several calls can use them without a copy in
        each call. On a CPU or with a mesh, return `values` unchanged."""
        return values if self.device.is_host or self.layout.is_many else jax.device_put(values)

    def number(self, value: int) -> Any:
        """Return `value` as a cached int32 constant; `put` is called once per value."""
        if value not in self.numbers:
            self.numbers[value] = self.put(np.int32(value))
        return self.numbers[value]

    def rows(self, batch_size: int, working_set: int = WORKING_SET) -> int:
        """Return the number of images per call, a divisor of `batch_size`.

        On a CPU, `stages` limits the widest activations of a block to `working_set` bytes.
        """
        return batch_size

    def forward_rows(self, batch_size: int, num: int) -> int:
        """Return the number of images per call of a forward pass over `num` images.

        On a CPU, the number is `rows(batch_size)`. An accelerator can process more images per call
        in a forward pass than in a training step. Of the device's `forward_sizes` that fit in
        memory, the size with the least padding is selected.
        """
        config = self.config
        per_image = 4 * self.num_blocks * config.num_tokens * (config.width + config.mlp_width)
        sizes = [
            size
            for size in self.device.forward_sizes
            if size > batch_size and size * per_image <= self.working
        ]
        if num <= batch_size or not sizes:
            return self.rows(batch_size)
        return min(sizes, key=lambda size: (-(-num // size) * size, -size))

    def each(self, function: Callable[[P], R], pieces: Iterable[P]) -> Iterator[R]:
        """Apply `function` to each piece of a forward pass, and yield the results in order. On a
        CPU, `stages` computes two pieces at the same time."""
        return map(function, pieces)

    def walk(
        self, networks: Sequence[Network], tokens: Tokens | Gather, mask: Mask
    ) -> Iterator[Walked]:
        """Run every network forward from the same tokens. The order of the results is
        unspecified."""
        begin, values = self.resolve(tokens)
        for index, network in enumerate(networks):
            last, sums = self._forward(network[begin:], begin, self.num_blocks, values, mask)
            yield Walked(index, last, [None] * begin + sums)

    def advance(self, network: Network, tokens: Tokens | Gather, until: int) -> Tokens:
        """Run a network forward from `tokens`, and return the tokens of block `until`."""
        begin, values = self.resolve(tokens)
        # The sums of the CLS tokens are not used, so the mask is zero. It has the type of the masks
        # in `walk`, so that no second function is compiled.
        mask = self.put(np.zeros(values.shape[0], np.float32))
        return Tokens(until, self._forward(network[begin:until], begin, until, values, mask)[0])

    @abc.abstractmethod
    def _forward(
        self, network: Network, begin: int, until: int, values: jax.Array, mask: Mask
    ) -> tuple[jax.Array, list[jax.Array | None]]:
        """Compute the tokens of block `until` from the tokens of block `begin`, and the sum of the
        CLS tokens at each block."""

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
        """Train one step per architecture; `learners` contains the learners of all Adapt and New
        ops in `architectures`.

        Learners that are not in the architecture of a step stay unchanged in that step. If a step
        has a non-finite loss or gradient, it returns a non-finite loss and changes no learner. If a
        batch starts at a later block than 0, the ops of the blocks before this start are ignored.
        """
        learners = dict(learners)
        losses = []
        plan = list(zip(architectures, steps, rates, strict=True))
        for begin in range(0, len(plan), self.steps_per_call):
            part = plan[begin : begin + self.steps_per_call]
            changed, head, more_losses = self._train_call(learners, head, part, setup)
            learners |= changed
            losses += more_losses
        return Trained(learners, head, losses)

    @abc.abstractmethod
    def _train_call(
        self, learners: Learners, head: Any, plan: Sequence[Planned], setup: Setup
    ) -> Trained:
        """Train at most `steps_per_call` steps; the result contains only changed learners."""

    def _compose(self, blocks, ops: Sequence[Op], z, begin: int, until: int):
        """Trace the blocks from `begin` to `until` (exclusive). The weights of these blocks are in
        `blocks`, and their ops in `ops`.

        Returns the tokens of block `until`, and each block's output and component output.
        """
        results = []
        for i in range(begin, until):
            settings: dict[str, Any] = {"placement": self.placement, "outputs": self.outputs[i]}
            block = self.merge_block(blocks[i - begin])
            op = ops[i - begin]
            u = None if isinstance(op, Skip) else block.widen(z, **settings)
            y, component = block.leave(op, z, u, **settings)
            results.append((y, component))
            z = y
            if i + 1 < self.num_blocks:
                following = self.merge_block(blocks[i + 1 - begin])
                z = following.enter(y, placement=self.placement, outputs=self.outputs[i + 1])
        return z, results

    def _compose_forward(self, blocks, experts: Sequence[Expert | None], z, mask, begin, until):
        """Trace a network of dense experts from the tokens of block `begin` to the tokens of block
        `until`.

        Also returns the masked sum of the CLS tokens at each block; None if the block is skipped.
        """
        ops = [Skip() if expert is None else Reuse(expert) for expert in experts]
        last, results = self._compose(blocks, ops, z, begin, until)
        return last, [
            None
            if component is None
            else mask @ summary(component if self.token == "component" else y, self.config)
            for y, component in results
        ]

    def backward_end(self, block: int) -> int:
        """Return the block at which the backward pass ends if `block` is the first block with a
        learner. In `scan`, the backward pass can end at an earlier block."""
        return block

    def function_keys(self, begin: int, skipped: Sequence[bool]) -> set[Hashable]:
        """Return the keys of the functions that a forward pass from block `begin` calls; `skipped`
        has one flag per block of the pass."""
        return {begin, *enumerate(skipped, begin)}

    def counters(self) -> dict[str, Any]:
        """Return statistics of compiled functions, for the record."""
        return {"executor": self.name}


def make_ops(
    architecture: Architecture, experts: Sequence[Sequence[Expert]], learners: Learners
) -> list[Op]:
    """Make the ops of an architecture; `learners` contains the learners of its Adapt and New
    ops."""

    def op(block: int, choice: Choice) -> Op:
        match choice.kind:
            case "reuse":
                return Reuse(experts[block][cast(int, choice.expert)])
            case "adapt":
                expert = experts[block][cast(int, choice.expert)]
                return Adapt(expert, learners[block, choice].params)
            case "new":
                return New(learners[block, choice].params)
            case "skip":
                return Skip()

    return [op(block, choice) for block, choice in enumerate(architecture)]


def shared_prefix(codes: Sequence[int], others: Sequence[int]) -> int:
    """Return the number of identical leading codes of two networks."""
    pairs = enumerate(zip(codes, others, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(codes), len(others)))


def guard(loss: jax.Array, grads: Any) -> jax.Array:
    """Return the loss, or NaN if a gradient is non-finite. If the loss is NaN, updates leave all
    parameters unchanged."""
    finite = [jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(grads)]
    return jnp.where(jnp.stack(finite).all(), loss, jnp.nan) if finite else loss


def masked_logits(head: Head, features: jax.Array, num_classes) -> jax.Array:
    """Compute the logits of a padded head; logits of the padding are `FAR` (-1e30)."""
    logits = features @ head.weight + head.bias
    return jnp.where(jnp.arange(logits.shape[-1]) < num_classes, logits, FAR)


@jax.jit
def _take(values, rows):
    batch = values[rows]
    # cached tokens can have a lower precision than the tokens of a pass
    return batch.astype(jnp.float32) if jnp.issubdtype(batch.dtype, jnp.floating) else batch


@jax.jit
def add(a, b):
    """Add two pytrees of the same structure."""
    return jax.tree.map(jnp.add, a, b)
