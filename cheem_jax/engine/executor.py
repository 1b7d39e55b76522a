"""The interface of all executors, and the functions that they share.

A pass begins with `Tokens`, which every choice at a block shares (for `mlp_down` the tokens after
the block's attention half). They are computed from images, cached, or part of another network's
pass. The three executors cut the following blocks into compiled functions differently:

- `stages`: one function per op kind, composed by the host;
- `whole`: one function per signature, the tuple of op kinds;
- `scan`: one function, with op kinds as data.
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
from cheem_jax.core.device import Device, here, traced_for
from cheem_jax.core.ops import Adapt, Expert, New, Op, Reuse, Skip
from cheem_jax.core.pool import FAR, Head, base_pool
from cheem_jax.core.settings import Placement, Token
from cheem_jax.engine.batches import P, R
from cheem_jax.engine.compilation import jit_options
from cheem_jax.engine.layout import ONE, Layout

WORKING_SET = 5 * 2**20
"""Bytes of a block's widest activations (the plastic layer's input) above which a CPU needs more
time per image."""


class Dense(NamedTuple):
    """One block of a forward-only network; expert None is Skip.

    Two networks with equal codes at a block must have equal experts there.
    """

    code: int
    expert: Expert | None


Network = Sequence[Dense]


class Tokens(NamedTuple):
    """The tokens `[B, N, D]` that every choice at `block` shares, where a pass begins.

    If `block` is L, the number of blocks, they are the network's last tokens, reduced to the CLS
    token.
    """

    block: int
    values: Float[Array, "B N D"]


class Gather(NamedTuple):
    """The beginning of a pass as rows `[B]` of a data set `values` `[M, ...]` on the device.

    `values` are tokens of `block`, or uint8 images if `block` is None.
    """

    block: int | None
    values: jax.Array
    rows: Int[np.ndarray, "B"]


class Walked(NamedTuple):
    """One network's results for a batch: its last tokens, and the sum of the CLS tokens per block.

    A sum is None if the block is skipped, or before the block where the pass began.
    """

    index: int
    tokens: jax.Array
    sums: Sequence[jax.Array | None]


class Batch(NamedTuple):
    """Tokens, labels `[B]` and the images' weights `[B]` in a step's mean loss (0 for padding)."""

    tokens: Tokens | Gather
    labels: np.ndarray | jax.Array
    weights: np.ndarray | jax.Array


Mask = np.ndarray | jax.Array
"""`[B]`, 1 for images and 0 for padding."""

Step = Sequence[Batch]
"""The parts of one gradient step. Their weights sum to 1, so losses and gradients are summed."""

Planned = tuple[Architecture, Step, float]
"""One training step: its architecture, its data and its learning rate."""

Place = tuple[int, Choice]
"""A block and a learnable choice at it (Adapt of an expert, or New)."""

Learners = Mapping[Place, Any]
"""Learned parameters by place: pytrees with parameters in `params`, and the state of their
updates."""

Update = Callable[[Any, Any, Any, Any], Any]
"""A traced function from a learner, its gradients, the rate and the loss to the next learner.

The loss is NaN if a gradient is non-finite; the learner must then stay unchanged.
"""


class Setup(NamedTuple):
    """Constants of training steps. Functions are compiled per `update`: pass the same function."""

    experts: Sequence[Sequence[Expert]]
    """The frozen experts of each block."""
    num_classes: int
    update: Update
    blank: tuple[Any, Any]
    """An Adapt's and a New's learner of zeros, which fill unused slots."""


class Trained(NamedTuple):
    """The result of training steps: learners, the head's learner, and the loss of each step."""

    learners: dict[Place, Any]
    head: Any
    losses: list[jax.Array]


class Executor(abc.ABC):
    """One frozen backbone at one placement of the memory, and the functions of every executor.

    Arrays: images uint8 `[B, S, S, 3]`, tokens `[B, N, D]`, mask float32 `[B]`.
    """

    name: ClassVar[str]
    composes: ClassVar[bool] = False
    """Whether the host composes architectures of compiled functions, one per op kind."""
    steps_per_call: int = 1
    """Training steps in one dispatch."""
    reason: str = "as set"
    """Why this executor was chosen, in words for the log."""
    budget: int = 2**30
    """Bytes for cached results."""
    working: int = 2**30
    """Bytes for the activations of a forward pass."""

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
        self.placement: Placement = placement
        self.outputs = [vit.outputs(block) for block in range(vit.config.depth)]
        self._numbers: dict[int, Any] = {}
        self._on: dict[int, Executor] = {}
        graphdef, state = nnx.split(vit)
        leaves, treedef = jax.tree.flatten(state)
        splits = [nnx.split(block) for block in vit.blocks]
        placed = {id(leaf): layout.everywhere(leaf) for leaf in leaves}
        self.leaves = [placed[id(leaf)] for leaf in leaves]
        # a block's matrices are only operands of products: they are rounded once instead of in
        # every call
        operand = jnp.dtype(vit.config.precision)
        self.blocks = [
            tuple(
                leaf.astype(operand) if leaf.ndim == 2 else leaf
                for leaf in (placed[id(leaf)] for leaf in jax.tree.leaves(state))
            )
            for _, state in splits
        ]
        self.base_pool = jax.tree.map(
            lambda leaf: layout.everywhere(placed.get(id(leaf), leaf)),
            base_pool(vit.experts(placement)),
        )
        block_graph = splits[0][0]
        block_tree = jax.tree.structure(splits[0][1])
        compiler_options = jit_options(vit.config.precision, deterministic)

        def jit(function: Callable[..., Any], **options: Any) -> Any:
            return layout.jit(
                traced_for(device, function), compiler_options=compiler_options, **options
            )

        def block_of(leaves) -> Block:
            return nnx.merge(block_graph, jax.tree.unflatten(block_tree, leaves))

        def vit_of(leaves) -> ViT:
            return nnx.merge(graphdef, jax.tree.unflatten(treedef, leaves))

        def begin(leaves, images):
            vit = vit_of(leaves)
            x = vit.embed(images)
            return vit.blocks[0].enter(x, placement=placement, outputs=self.outputs[0])

        def features(leaves, tokens):
            return vit_of(leaves).features(tokens)

        def mean_loss(leaves, head, tokens, labels, weights, num_classes):
            logits = masked_logits(head, features(leaves, tokens), num_classes)
            return (optax.softmax_cross_entropy_with_integer_labels(logits, labels) * weights).sum()

        def classify(leaves, head, tokens, labels, mask, num_classes):
            logits = masked_logits(head, features(leaves, tokens), num_classes)
            # -1 if a logit is NaN, so that a broken network does not seem to predict class 0
            answers = jnp.where(jnp.isfinite(logits).all(axis=-1), logits.argmax(axis=-1), -1)
            return answers, ((answers == labels) & (mask > 0)).sum()

        self.jit = jit
        self.vit_of = vit_of
        self.block_of = block_of
        self.begin_of = begin
        self.mean_loss = mean_loss
        self._begin = jit(begin)
        self._features = jit(features)
        self._classify = jit(classify)
        self._mean_patch = jit(lambda tokens: mean_patch(tokens, vit.config))

    @property
    def cached_type(self) -> Any:
        """Type of cached tokens: float32 on a CPU, the run's precision on an accelerator."""
        return jnp.dtype("float32" if self.device.is_host else self.config.precision)

    @property
    def num_blocks(self) -> int:
        return len(self.blocks)

    def on(self, place: int) -> "Executor":
        """The executor on one of this process's devices; it shares the replicated arrays and
        compiles its functions again."""
        if place not in self._on:
            one = self._on[place] = copy.copy(self)
            one.layout = Layout([self.layout.devices[place]])
            one.leaves, one.blocks, one.base_pool = self.layout.copy(
                (self.leaves, self.blocks, self.base_pool), place
            )
        return self._on[place]

    def begin(self, images: np.ndarray | jax.Array) -> Tokens:
        """Tokens of block 0; with several devices, the images are split already (`Layout.rows`)."""
        return Tokens(0, self._begin(self.leaves, images))

    def resolve(self, source: Tokens | Gather) -> Tokens:
        """The tokens of a source."""
        if isinstance(source, Tokens):
            return source
        values = self.take(source.values, self.layout.rows(source.rows))
        return self.begin(values) if source.block is None else Tokens(source.block, values)

    def take(self, values: jax.Array, rows: Any) -> jax.Array:
        """Rows `[...]` of a data set `[M, ...]` on the device."""
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
        """Predicted classes `[B]` of a padded head, and the number of correct ones in the mask."""
        return self._classify(self.leaves, head, tokens, labels, mask, self.number(num_classes))

    def put(self, values: Any) -> Any:
        """Move an argument of several calls to an accelerator once; each call would copy it."""
        return values if self.device.is_host or self.layout.is_many else jax.device_put(values)

    def number(self, value: int) -> Any:
        """`put` of an int32 constant, cached."""
        if value not in self._numbers:
            self._numbers[value] = self.put(np.int32(value))
        return self._numbers[value]

    def rows(self, batch_size: int, working_set: int = WORKING_SET) -> int:
        """Images per call in batches of `batch_size`: a divisor of it.

        On a CPU, `stages` limits a block's widest activations to `working_set` bytes.
        """
        return batch_size

    def forward_rows(self, batch_size: int, num: int) -> int:
        """Images per call of a forward pass over `num` images: `rows` on a CPU.

        An accelerator can use more than a training step has: one of few sizes, the one with the
        least padding in the last call.
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
        """`function` of each piece of a forward pass, in order; on a CPU, `stages` computes two at
        a time."""
        return map(function, pieces)

    def walk(
        self, networks: Sequence[Network], tokens: Tokens | Gather, mask: Mask
    ) -> Iterator[Walked]:
        """Run every network forward from the same tokens; results are yielded in any order."""
        begin, values = self.resolve(tokens)
        for index, network in enumerate(networks):
            last, sums = self._forward(network[begin:], begin, self.num_blocks, values, mask)
            yield Walked(index, last, [None] * begin + sums)

    def advance(self, network: Network, tokens: Tokens | Gather, until: int) -> Tokens:
        """Run one network forward from its tokens to those of a later block."""
        begin, values = self.resolve(tokens)
        # the sums are unused; the mask keeps its type so that no second function is compiled
        mask = self.put(np.zeros(values.shape[0], np.float32))
        return Tokens(until, self._forward(network[begin:until], begin, until, values, mask)[0])

    @abc.abstractmethod
    def _forward(
        self, network: Network, begin: int, until: int, values: jax.Array, mask: Mask
    ) -> tuple[jax.Array, list[jax.Array | None]]:
        """From the tokens of block `begin` to those of `until`, with each block's sum of CLS
        tokens."""

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
        """Train one step per architecture; `learners` contains those of their Adapts and News.

        Learners outside of a step's architecture stay unchanged. If its loss or a gradient is
        non-finite, the returned loss is NaN and all learners stay unchanged. Blocks before a
        batch's tokens are ignored.
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
        """Train at most `steps_per_call` steps; returns the changed learners only."""

    def _compose(self, blocks, ops: Sequence[Op], z, begin: int, until: int):
        """Trace blocks `begin` to `until`, whose weights and ops are `blocks` and `ops`.

        Returns the tokens of block `until`, and the output and component of each block.
        """
        results = []
        for i in range(begin, until):
            settings: dict[str, Any] = {"placement": self.placement, "outputs": self.outputs[i]}
            block = self.block_of(blocks[i - begin])
            op = ops[i - begin]
            u = None if isinstance(op, Skip) else block.widen(z, **settings)
            y, component = block.leave(op, z, u, **settings)
            results.append((y, component))
            z = y
            if i + 1 < self.num_blocks:
                following = self.block_of(blocks[i + 1 - begin])
                z = following.enter(y, placement=self.placement, outputs=self.outputs[i + 1])
        return z, results

    def _compose_forward(self, blocks, experts: Sequence[Expert | None], z, mask, begin, until):
        """Trace dense experts from the tokens of block `begin` to those of `until`.

        Also returns each block's sum of CLS tokens over the mask; None if it is skipped.
        """
        ops = [Skip() if expert is None else Reuse(expert) for expert in experts]
        last, results = self._compose(blocks, ops, z, begin, until)
        return last, [
            None
            if component is None
            else mask @ summary(component if self.token == "component" else y, self.config)
            for y, component in results
        ]

    def start_of(self, block: int) -> int:
        """The first block that is trained if `block` is the first with a learner: it, or an earlier
        one."""
        return block

    def programs_of(self, begin: int, skipped: Sequence[bool]) -> set[Hashable]:
        """Keys of the functions that a forward pass from block `begin` compiles; `skipped` says
        which of its blocks are skipped."""
        return {begin, *enumerate(skipped, begin)}

    def counters(self) -> dict[str, Any]:
        """Statistics of the compiled functions, for the record."""
        return {"executor": self.name}


def ops_of(
    architecture: Architecture, experts: Sequence[Sequence[Expert]], learners: Learners
) -> list[Op]:
    """The ops of an architecture; `learners` contains those of its Adapts and News."""

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
    """Number of leading codes that two networks have in common."""
    pairs = enumerate(zip(codes, others, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(codes), len(others)))


def guard(loss: jax.Array, grads: Any) -> jax.Array:
    """The loss, or NaN if a gradient is non-finite, so that the step reaches no parameter."""
    finite = [jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(grads)]
    return jnp.where(jnp.stack(finite).all(), loss, jnp.nan) if finite else loss


def masked_logits(head: Head, features: jax.Array, num_classes) -> jax.Array:
    """Logits of a padded head; those of the padding are -1e30."""
    logits = features @ head.weight + head.bias
    return jnp.where(jnp.arange(logits.shape[-1]) < num_classes, logits, FAR)


@jax.jit
def _take(values, rows):
    batch = values[rows]
    # tokens can be cached in fewer bits than a pass uses
    return batch.astype(jnp.float32) if jnp.issubdtype(batch.dtype, jnp.floating) else batch


@jax.jit
def add(a, b):
    """Sum of two equal pytrees."""
    return jax.tree.map(jnp.add, a, b)
