"""The eleven components of a ViT block that the paper fine-tunes, and how one is learned with a task's head.

(Appendix, table 'acc_vs_forgetting'.) A component is taken out of all blocks as a tuple of arrays, learned apart from
the backbone and put back: what does not belong to it never meets a gradient.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from charts import names_in
from flax import nnx

from cheem_jax.baselines.fitting import FitBatch, Fitter, Fitting, Inputs, over_batches
from cheem_jax.cheem.heads import head_logits, local_cross_entropy
from cheem_jax.cheem.supernet import init_head_learner
from cheem_jax.cheem.training import FitConfig
from cheem_jax.core.images import Images
from cheem_jax.core.keys import Keys, Phase, next_power_of_two, order_at
from cheem_jax.core.pool import Head
from cheem_jax.data.task import Split
from cheem_jax.engine.executor import Executor
from cheem_jax.engine.passes import Advance
from cheem_jax.run.rolling import Saved


class Component(NamedTuple):
    """Layers of a block; of the fused `qkv` only the `thirds` from the first to before the second."""

    index: int
    """As in the paper's table."""
    name: str
    title: str
    layers: tuple[str, ...]
    thirds: tuple[int, int] = (0, 3)


COMPONENTS = (
    Component(1, "ln1_ln2", "LN1 + LN2", ("norm1", "norm2")),
    Component(2, "ffn", "FFN", ("up", "down")),
    Component(3, "mlp_down", "MLP-down", ("down",)),
    Component(4, "ln2", "LN2", ("norm2",)),
    Component(5, "mhsa_ln1", "MHSA + LN1", ("qkv", "proj", "norm1")),
    Component(6, "ln1", "LN1", ("norm1",)),
    Component(7, "query", "Query", ("qkv",), (0, 1)),
    Component(8, "key", "Key", ("qkv",), (1, 2)),
    Component(9, "query_key", "Query + Key", ("qkv",), (0, 2)),
    Component(10, "value", "Value", ("qkv",), (2, 3)),
    Component(11, "projection", "Projection", ("proj",)),
)


class Piece(NamedTuple):
    """Columns `begin` to `end` of the last axis of one of the backbone's leaves."""

    leaf: int
    begin: int
    end: int


def components_of(text: str) -> list[Component]:
    """The components that are asked for by name or index, in the paper's order."""
    if text == "all":
        return list(COMPONENTS)
    known = {word: component for component in COMPONENTS for word in (component.name, str(component.index))}
    asked = {known[word] for word in names_in("--components", text, known)}
    return [component for component in COMPONENTS if component in asked]


def pieces_of(executor: Executor, component: Component) -> tuple[Piece, ...]:
    """Where a component lies among the executor's leaves."""
    _, state = nnx.split(executor.vit_of(executor.leaves))
    pieces = []
    for number, (path, leaf) in enumerate(jax.tree.leaves_with_path(state)):
        names = [str(getattr(key, "key", getattr(key, "name", key))) for key in path]
        layer = names[2] if names[0] == "blocks" else None
        if layer in component.layers:
            size = leaf.shape[-1]
            first, last = component.thirds if layer == "qkv" else (0, 3)
            pieces.append(Piece(number, first * size // 3, last * size // 3))
    return tuple(pieces)


def num_params(executor: Executor) -> dict[str, int]:
    """Parameters of every component in all blocks, by name."""
    return {
        component.name: sum(part.size for part in taken(executor.leaves, pieces_of(executor, component)))
        for component in COMPONENTS
    }


def taken(leaves: Sequence[Any], pieces: Sequence[Piece]) -> tuple[np.ndarray, ...]:
    """The component's own arrays, on the host."""
    return tuple(np.asarray(leaves[piece.leaf])[..., piece.begin : piece.end] for piece in pieces)


def put_back(leaves: Sequence[Any], pieces: Sequence[Piece], parts: Sequence[Any]) -> list[Any]:
    """The leaves with the component's arrays in their places."""
    found = list(leaves)
    for piece, part in zip(pieces, parts, strict=True):
        leaf = leaves[piece.leaf]
        if part.shape != leaf.shape:
            part = jnp.concatenate([leaf[..., : piece.begin], part, leaf[..., piece.end :]], axis=-1)
        found[piece.leaf] = part
    return found


@dataclasses.dataclass(frozen=True)
class Training:
    """How every component is trained: Adam, no weight decay, cosine to 0 over each task."""

    epochs: int
    rates: tuple[float, ...]
    """Rates of the component that are swept, largest last."""
    batch_size: int = 64
    head_rate: float = 1e-3
    """Rate of a task's head, which begins at random; not swept."""
    max_train: int | None = None
    """Training images of a task, sampled by the seed; None: all."""


class Learned(NamedTuple):
    """A component's arrays and a task's padded head."""

    parts: tuple[jax.Array, ...]
    head: Head


class Network:
    """A backbone with other weights in some of its leaves: one compiled function answers for all components."""

    def __init__(self, executor: Executor, batch_size: int):
        self.executor, self.batch_size = executor, batch_size

        @executor.jit
        def answer(leaves, head, images, num):
            logits = head_logits(head, executor.vit_of(leaves)(images))
            logits = jnp.where(jnp.arange(logits.shape[-1]) < num, logits, -1e30)
            # a network that ended in NaN must not pass for one that answers class 0
            return jnp.where(jnp.isfinite(logits).all(axis=-1), logits.argmax(axis=-1), -1)

        self._answer = answer

    def accuracy(self, leaves: list[Any], head: Head, split: Split, num_classes: int) -> float:
        """Accuracy in [0, 1] with the task ID given."""
        num = np.int32(num_classes)
        found = over_batches(
            lambda read: self._answer(leaves, head, read["images"], num), Inputs(split.images),
            batch_size=self.batch_size,
        )  # fmt: skip
        return float((found == split.labels).mean())


class Learner:
    """The compiled step of one component, for all tasks and rates."""

    def __init__(self, network: Network, component: Component):
        self.network, self.component = network, component
        self.executor = executor = network.executor
        self.pieces = pieces = pieces_of(executor, component)
        self.pretrained = taken(executor.leaves, pieces)

        def loss(learned, fixed, batch: FitBatch):
            leaves, num = fixed
            features = executor.vit_of(put_back(leaves, pieces, learned.parts))(batch.inputs["images"])
            logits = head_logits(learned.head, features)
            return local_cross_entropy(logits, batch.labels, batch.weights, 0, num)

        def rows(batch_size: int, working_set: int) -> int:
            return executor.rows(batch_size, 6 * working_set)  # as for full fine-tuning

        self._fitter = Fitter(loss, jit=executor.jit, rows=rows)

    def begun(self, keys: Keys, index: int, num_classes: int, parts: Any, saved: Saved | None = None) -> Fitting:
        """A task at its start from these parts on with a fresh head, or as far as an earlier process brought it."""
        key = keys.at(index, Phase.UPPER_BOUND_INIT)
        head = init_head_learner(key, self.executor.config.width, next_power_of_two(num_classes)).params
        return self._fitter.begun(Learned(parts, head), saved)

    def fit(
        self, fitting: Fitting, keys: Keys, index: int, num_classes: int, split: Split, training: Training,
        rate: float, advance: Advance,
    ) -> None:  # fmt: skip
        """Train in place to the last epoch."""
        images, labels = images_of(keys, index, split, training.max_train)
        head_scale = Head(*[training.head_rate / rate] * 2)  # pyright: ignore[reportArgumentType]
        self._fitter.run(
            fitting, (self.executor.leaves, np.int32(num_classes)), labels, Inputs(images),
            FitConfig(training.epochs, rate), batch_size=training.batch_size,
            order_key=keys.at(index, Phase.UPPER_BOUND_ORDER), noise_key=keys.at(index, Phase.METHOD_NOISE),
            advance=advance, scale=Learned((1.0,) * len(self.pieces), head_scale),  # pyright: ignore[reportArgumentType]
        )  # fmt: skip

    def leaves(self, parts: Any) -> list[Any]:
        """The backbone with these parts."""
        return put_back(self.executor.leaves, self.pieces, parts)


def images_of(keys: Keys, index: int, split: Split, most: int | None) -> tuple[Images, np.ndarray]:
    """A task's training images and labels, or so many of them."""
    if most is None or len(split.labels) <= most:
        return split.images, split.labels
    rows = np.sort(order_at(keys.at(index, Phase.METHOD_TUNING), len(split.labels))[:most])
    return split.images[rows], split.labels[rows]
