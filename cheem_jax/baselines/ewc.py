"""EWC: the whole backbone trains on every task, under a quadratic penalty on weights that earlier tasks need.

The diagonal Fisher information of a finished task says how much each weight matters to it; the loss of the next task
penalises moving such weights. One network and one head predict for all classes, without task-ID inference. Kirkpatrick
et al., "Overcoming catastrophic forgetting in neural networks", PNAS 2017, with the one running Fisher of online EWC:
Schwarz et al., "Progress & Compress: A scalable framework for continual learning", ICML 2018.
"""

import dataclasses
import enum
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int

from cheem_jax.backbone.flops import backbone_params
from cheem_jax.baselines.costs import params_report, plain_flops
from cheem_jax.baselines.fitting import FitBatch, Fitter, Fitting, Inputs, left, numbered, over_batches, unnumbered
from cheem_jax.baselines.saving import restore_last, save_and_restore
from cheem_jax.cheem.heads import (
    FAR,
    Classes,
    columns,
    cut,
    grow_head,
    head_logits,
    local_cross_entropy,
    padded,
    saved_classes,
    with_columns,
)
from cheem_jax.cheem.training import FitConfig, check_batch_size
from cheem_jax.core.images import Images
from cheem_jax.core.keys import Keys, Phase, order_at
from cheem_jax.core.pool import Head
from cheem_jax.data.task import Task
from cheem_jax.engine.batches import batches
from cheem_jax.engine.executor import Executor
from cheem_jax.engine.inference import Inferred
from cheem_jax.engine.passes import Advance
from cheem_jax.run.method import Answers, Clock, FrozenFeatures, Running, check_given
from cheem_jax.run.rolling import Saved

TUNED_ON = 3
"""Tasks of the stream on which the penalty's strength is selected."""
GRADIENT_BYTES = 2**30
"""Budget for the gradients of a chunk of images, each of which has the backbone's size."""


class Noise(enum.IntEnum):
    """What `Phase.METHOD_NOISE` samples; the number is part of the key, so members are only ever appended."""

    TRAINING = 0
    LABELS = 1
    """Labels of the Fisher information, from the network's softmax."""
    IMAGES = 2
    """The images that the Fisher information is estimated on."""
    BATCHES = 3
    """Their order, where gradients are averaged over batches."""


@dataclasses.dataclass(frozen=True)
class EwcConfig:
    """Online EWC; the paper does not say how it set the penalty."""

    name: ClassVar[str] = "ewc"
    penalties: tuple[float, ...] = (1.0, 10.0, 100.0, 1e3, 1e4, 1e5)
    """Strengths of the penalty. Of several, the one with the best average validation accuracy over the stream's first
    three tasks is selected, where a prediction is the argmax over the classes of all three."""
    gamma: float = 1.0
    """Factor of the running Fisher information when a task's is added to it."""
    fisher: Literal["sampled", "empirical", "batch"] = "sampled"
    """Squared gradients per image, of labels sampled from the network's softmax or of the true ones; `batch` squares
    the mean gradient of a batch, a frequent mistake that makes them smaller by up to the batch size."""
    fisher_images: int = 0
    """Training images, sampled once per task, that the Fisher information is estimated on; 0: all."""
    head_learning_rate: float = 1e-3
    """Rate of the head at the start; `fit.learning_rate` is the backbone's."""
    fit: FitConfig = FitConfig(epochs=20, learning_rate=5e-5)
    batch_size: int = 64

    def __post_init__(self) -> None:
        check_batch_size(self.batch_size)
        if not self.penalties or not all(0 <= penalty < float("inf") for penalty in self.penalties):
            raise ValueError(f"penalties are {self.penalties}; expected at least one, all finite and at least 0")
        if not 0 <= self.gamma <= 1:
            raise ValueError(f"gamma is {self.gamma}; expected 0 (only the last task's Fisher) to 1 (all tasks' sum)")
        if self.fisher_images < 0:
            raise ValueError(f"fisher_images is {self.fisher_images}; expected a number of images, or 0 for all")
        if not self.head_learning_rate > 0:
            raise ValueError(f"head_learning_rate is {self.head_learning_rate}; expected a positive number")


class EwcState(NamedTuple):
    """What EWC stores between tasks: the backbone's weights, their Fisher information (0 at the start), the head."""

    leaves: list[jax.Array]
    fisher: list[jax.Array]
    head: Head | None


class Ewc:
    """See the module."""

    name = "ewc"

    def __init__(self, executor: Executor, features: FrozenFeatures, config: EwcConfig, keys: Keys, num_tasks: int):
        self.executor, self.config, self.keys = executor, config, keys
        self.known: EwcState | None = None
        self.classes = Classes()
        self.penalty = config.penalties[0] if len(config.penalties) == 1 else None
        """The strength in use; None before it is selected."""
        self._first: list[Task] = []
        num_params = sum(leaf.size for leaf in executor.leaves)
        per_image = max(1, min(32, GRADIENT_BYTES // (4 * num_params)))
        self.chunk = config.batch_size if config.fisher == "batch" else per_image
        """Images whose gradients are computed at once."""

        def logits(leaves, head, images):
            return head_logits(head, executor.vit_of(leaves)(images))

        def loss(learned, fixed, batch: FitBatch):
            (leaves, head), (known, fisher, strength, num) = learned, fixed
            found = logits(leaves, head, batch.inputs["images"])
            local = local_cross_entropy(found, batch.labels, batch.weights, 0, num)
            # CE + lambda / 2 * sum F (theta - theta*)^2 (Kirkpatrick et al., eq. 3), F and theta* of online EWC
            return local + 0.5 * strength * moved(leaves, known, fisher)

        @functools.partial(executor.jit, donate_argnums=0)
        def add_fisher(sums, leaves, head, images, labels, weights, rows, key, num):
            def of_batch(leaves):
                return local_cross_entropy(logits(leaves, head, images), labels, weights / weights.sum(), 0, num)

            def of_image(leaves, image, label, row):
                found = logits(leaves, head, image[None])
                if config.fisher == "sampled":
                    own = jnp.where(jnp.arange(found.shape[-1]) < num, jax.lax.stop_gradient(found[0]), FAR)
                    label = jax.random.categorical(jax.random.fold_in(key, row), own)
                return -local_cross_entropy(found, label[None], jnp.ones(1), 0, num)

            # the Fisher information is a mean of squares, not the square of a mean, which is far smaller
            if config.fisher == "batch":
                new = jax.tree.map(lambda g: weights.sum() * g * g, jax.grad(of_batch)(leaves))
            else:
                new = squared_gradients(of_image, leaves, weights, images, labels, rows)
            return jax.tree.map(jnp.add, sums, new)

        @executor.jit
        def scaled(fisher, factor):
            return jax.tree.map(lambda leaf: factor * leaf, fisher)

        self._fitter = Fitter(loss, _optimizer(config), jit=executor.jit, layout=executor.layout)
        self._add_fisher, self._scaled, self._answer = add_fisher, scaled, executor.jit(logits)

    def check(self, tasks: Sequence[Task]) -> list[str]:
        """See `Method.check`."""
        self._first, num = list(tasks[:TUNED_ON]), len(self.config.penalties)
        if num == 1:
            return []
        if len(tasks) == 1:
            return [f"a single task needs no penalty, so the {num} penalties are not compared"]
        names = ", ".join(task.name for task in self._first[1:])
        return [f"learns {names} {num} times beforehand, to select one of {num} penalties on the validation split"]

    def learn(self, task: Task, running: Running) -> dict[str, Any]:
        """Train backbone and head under the penalty, then add the task's Fisher information."""
        index, num, seen = len(self.classes), len(task.classes), self.classes.num
        penalties, vit = self.config.penalties, self.executor.config
        tunes = index == 0 and len(penalties) > 1
        if tunes and [shown.name for shown in self._first[:1]] != [task.name]:
            raise ValueError(
                f"ewc selects one of {len(penalties)} penalties on a stream's first tasks, but knows no stream that "
                f"starts with {task.name!r}: call check(tasks) first, or give one penalty"
            )
        if tunes and len(self._first) == 1:
            tunes, self.penalty = False, self.config.penalties[0]
        clock, tried = Clock.of(running), np.full(len(penalties), np.nan)
        if running.saved and "tried" in running.saved.arrays:
            tried = np.array(running.saved.arrays["tried"], np.float64)
        before = self._before()
        fitting = self._begun(before, index, seen, num, running.saved)

        def state() -> Saved:
            return fitting.saved(clock, tried=tried)

        total = left(fitting, self.config.fit, len(task.train.labels), self.config.batch_size)
        strength = 0.0 if index == 0 else self.penalty
        with clock("train"), running.phase("train", total, state) as advance:
            self._train(fitting, before, task, index=index, strength=strength, advance=advance)
        with clock("fisher"), running.phase("fisher", self._num_fisher(task), state) as advance:
            leaves, head = fitting.learned
            fisher = self.add_fisher(before.fisher, leaves, head, task, index=index, advance=advance)
        known = EwcState(leaves, fisher, self._head_with(before, head, index, seen, num))
        if tunes:
            with clock("penalty"):
                self._tune(known, tried, running, state)
            self.penalty = penalties[int(tried.argmax())]
        self.known = known
        self.classes.add(task.name, task.classes)
        backbone, head = backbone_params(vit), (vit.width + 1) * num
        # the weights replace the pretrained ones; their Fisher information is stored with the first task
        stored = (backbone if index == 0 else 0) + head
        return {
            "name": task.name,
            "penalty": self.penalty,
            **({"penalty_accuracies": dict(zip(map(str, penalties), tried.tolist(), strict=True))} if tunes else {}),
            **plain_flops(vit, seen + num),
            **params_report(vit, added=0, learned=backbone + head, stored=stored),
            **fitting.report(clock),
        }

    def bytes_needed(self, task: Task) -> int:
        """See `Method.bytes_needed`: weights, Fisher information, head; two rolling checkpoints with Adam's moments."""
        params = sum(leaf.size for leaf in self.executor.leaves)
        head = (self.executor.config.width + 1) * 2 * (self.classes.num + len(task.classes))
        return 4 * (2 * params + head + 2 * 3 * (params + head))

    def add_fisher(
        self, fisher: list[jax.Array], leaves: list[jax.Array], head: Head, task: Task, *, index: int, advance: Advance
    ) -> list[jax.Array]:
        """The running Fisher information plus that of task `index`; `head` contains the task's columns alone."""
        labels, batched = task.train.labels, self.config.fisher == "batch"
        rows = np.arange(len(labels))
        if 0 < self.config.fisher_images < len(labels):
            order = order_at(self.keys.at(index, Phase.METHOD_NOISE, Noise.IMAGES), len(labels))
            rows = np.sort(order[: self.config.fisher_images])
        if batched:
            # shuffled as in training, because neighbours may be of one class
            rows = rows[order_at(self.keys.at(index, Phase.METHOD_NOISE, Noise.BATCHES), len(rows))]
        key = self.keys.at(index, Phase.METHOD_NOISE, Noise.LABELS)
        pieces = list(batches(rows, self.chunk))
        read = Inputs(task.train.images).follow([piece.rows for piece in pieces])
        sums = self._scaled(fisher, np.float32(self.config.gamma))
        for piece, inputs in zip(pieces, read, strict=True):
            # each image has the same weight, and a batch as a whole the number of its images
            weights = piece.mask / np.float32(len(rows))
            sums = self._add_fisher(
                sums, leaves, head, inputs["images"], labels[piece.rows], weights, piece.rows.astype(np.int32), key,
                np.int32(len(task.classes)),
            )  # fmt: skip
            advance(piece.size)
        return jax.block_until_ready(sums)

    def _before(self) -> EwcState:
        if self.known is not None:
            return self.known
        leaves = list(self.executor.leaves)
        return EwcState(leaves, self._scaled(leaves, np.float32(0)), None)

    def _begun(self, before: EwcState, index: int, seen: int, num: int, saved: Saved | None = None) -> Fitting:
        return self._fitter.begun((before.leaves, columns(self._grown(before, index, seen, num), seen, num)), saved)

    def _grown(self, before: EwcState, index: int, seen: int, num: int) -> Head:
        key = self.keys.at(index, Phase.METHOD_INIT)
        return grow_head(key, before.head, self.executor.config.width, seen, num)

    def _head_with(self, before: EwcState, own: Head, index: int, seen: int, num: int) -> Head:
        return with_columns(self._grown(before, index, seen, num), own, seen, num)

    def _train(
        self, fitting: Fitting, before: EwcState, task: Task, *, index: int, strength: float | None, advance: Advance
    ) -> None:
        assert strength is not None
        fixed = (before.leaves, before.fisher, np.float32(strength), np.int32(len(task.classes)))
        self._fitter.run(
            fitting,
            fixed,
            task.train.labels,
            Inputs(task.train.images),
            self.config.fit,
            batch_size=self.config.batch_size,
            order_key=self.keys.at(index, Phase.METHOD_ORDER),
            noise_key=self.keys.at(index, Phase.METHOD_NOISE, Noise.TRAINING),
            advance=advance,
        )

    def _num_fisher(self, task: Task) -> int:
        num = len(task.train.labels)
        return min(num, self.config.fisher_images) if self.config.fisher_images else num

    def _tune(self, begun: EwcState, tried: np.ndarray, running: Running, state: Callable[[], Saved]) -> None:
        """Fill in the validation accuracy of each penalty that was not tried yet.

        The first task has no penalty, so all start from its state, with the keys that the stream itself will use.
        """
        tasks, todo = self._first, np.flatnonzero(np.isnan(tried))
        training = sum(self.config.fit.epochs * len(task.train.labels) for task in tasks[1:])
        fishers, validation = sum(map(self._num_fisher, tasks[1:-1])), sum(len(task.val.labels) for task in tasks)
        with running.phase("penalty", len(todo) * (training + fishers + validation), state) as advance:
            for place in todo:
                try:
                    tried[place] = self._accuracy_with(self.config.penalties[place], begun, tasks, advance)
                except FloatingPointError:
                    tried[place] = -1.0
        if tried.max() < 0:
            raise FloatingPointError(
                f"ewc: non-finite losses on the first {len(tasks)} tasks with each of the penalties "
                f"{self.config.penalties}; set a learning rate below {self.config.fit.learning_rate}"
            )

    def _accuracy_with(self, strength: float, known: EwcState, tasks: Sequence[Task], advance: Advance) -> float:
        first = np.cumsum([0, *(len(task.classes) for task in tasks)])
        for index, task in enumerate(tasks[1:], 1):
            seen, num = int(first[index]), len(task.classes)
            fitting = self._begun(known, index, seen, num)
            self._train(fitting, known, task, index=index, strength=strength, advance=advance)
            (leaves, head), fisher = fitting.learned, known.fisher
            if index + 1 < len(tasks):  # no task follows the last one, so nothing needs its Fisher information
                fisher = self.add_fisher(fisher, leaves, head, task, index=index, advance=advance)
            known = EwcState(leaves, fisher, self._head_with(known, head, index, seen, num))
        accuracies = []
        for index, task in enumerate(tasks):
            logits = self._logits(known, task.val.images, advance)[:, : first[-1]]
            right = np.isfinite(logits).all(axis=1) & (logits.argmax(axis=1) == first[index] + task.val.labels)
            accuracies.append(right.mean())
        return float(np.mean(accuracies))

    def _logits(self, known: EwcState, images: Images, advance: Advance | None = None) -> Float[np.ndarray, "N P"]:
        def answer(read: dict[str, Any]) -> jax.Array:
            return self._answer(known.leaves, known.head, read["images"])

        return over_batches(
            answer, Inputs(images), batch_size=self.config.batch_size, advance=advance, layout=self.executor.layout
        )

    def logits(self, images: Images) -> Float[np.ndarray, "N P"]:
        """Logits of all classes so far, padded, for each image."""
        assert self.known is not None
        return self._logits(self.known, images)

    def predict(self, images: np.ndarray, tasks: Int[np.ndarray, "N"] | None = None) -> Inferred:
        """See `Method.predict`."""
        check_given(self.name, len(self.classes), tasks)
        return self.classes.inferred(self.logits(images), tasks)

    def answers(self, index: int, task: Task) -> Answers:
        """See `Method.answers`."""
        return self.classes.answers(self.logits(task.test.images), index)

    def save(self, root: Path) -> None:
        """See `Method.save`: weights, Fisher information and head, which every task changes."""
        assert self.known is not None and self.known.head is not None
        arrays = {
            "backbone": numbered(self.known.leaves),
            "fisher": numbered(self.known.fisher),
            "head": cut(self.known.head, self.classes.num)._asdict(),
        }
        self.known = save_and_restore(root, self.classes.last, arrays, self._restored, penalty=self.penalty)

    def open(self, root: Path) -> None:
        """See `Method.open`: the last task's state; earlier checkpoints give their classes alone."""
        self.classes, self.known = saved_classes(root), restore_last(root, self._restored)

    def _restored(self, arrays: Mapping[str, Any], meta: Mapping[str, Any]) -> EwcState:
        like, self.penalty = self.executor.leaves, meta["penalty"]
        weights, fisher = unnumbered(like, arrays["backbone"]), unnumbered(like, arrays["fisher"])
        return EwcState(weights, fisher, padded(Head(**arrays["head"])))


def moved(leaves: Sequence[Array], known: Sequence[Array], fisher: Sequence[Array]) -> Float[Array, ""]:
    """Sum over all weights of F (theta - theta*)^2: how far each moved, weighted by its Fisher information."""
    return sum(
        ((f * (leaf - star) ** 2).sum() for leaf, star, f in zip(leaves, known, fisher, strict=True)), jnp.zeros(())
    )


def squared_gradients(
    log_likelihood: Callable[..., jax.Array], params: Any, weights: Float[Array, "B"], *examples: Array
) -> Any:
    """Weighted sum over images of the squared gradient of `log_likelihood(params, *example)`, one gradient per image.

    The mean over images estimates the Fisher information's diagonal if the labels are sampled from the model.
    """
    grads = jax.vmap(jax.grad(log_likelihood), (None, *[0] * len(examples)))(params, *examples)
    return jax.tree.map(lambda g: (weights.reshape(-1, *[1] * (g.ndim - 1)) * g * g).sum(axis=0), grads)


def _optimizer(config: EwcConfig) -> optax.GradientTransformation:
    """Adam with a separate rate for the head."""
    ratio = config.head_learning_rate / config.fit.learning_rate

    def scale(updates, params):
        backbone, head = updates
        return backbone, jax.tree.map(lambda update: ratio * update, head)

    return optax.chain(optax.scale_by_adam(), optax.stateless(scale))
