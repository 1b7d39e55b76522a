"""EWC: the whole backbone trains on every task, under a quadratic penalty on weights that earlier
tasks need.

The diagonal Fisher information of a finished task says how much each weight matters to it; the loss
of the next task penalises moving such weights. One network and one head predict for all classes,
without task-ID inference. Kirkpatrick et al., "Overcoming catastrophic forgetting in neural
networks", PNAS 2017, with the one running Fisher of online EWC: Schwarz et al., "Progress &
Compress: A scalable framework for continual learning", ICML 2018.
"""

import copy
import dataclasses
import enum
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float

from cheem_jax.backbone.flops import backbone_params
from cheem_jax.baselines.baseline import (
    OneHead,
    at_least_one,
    expect,
    no_classes,
    params_report,
    pass_costs,
    positive,
)
from cheem_jax.baselines.fitting import FitBatch, Fitter, Fitting, Inputs
from cheem_jax.baselines.heads import Classes, cut, grow_head, head_logits, local_cross_entropy
from cheem_jax.core.images import Images
from cheem_jax.core.keys import Phase, order_at
from cheem_jax.core.pool import FAR, Head, padded
from cheem_jax.core.settings import Advance, FitConfig
from cheem_jax.data.task import Task
from cheem_jax.engine.batches import batches
from cheem_jax.run.session import Session

TUNED_ON = 3
"""Tasks of the stream on which the penalty's strength is selected."""
GRADIENT_BYTES = 2**30
"""Budget for the gradients of a chunk of images, each of which has the backbone's size."""


class Noise(enum.IntEnum):
    """What `Phase.METHOD_NOISE` samples; the number is part of the key, so members are only ever
    appended."""

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
    """Strengths of the penalty. Of several, the one with the best average validation accuracy over
    the stream's first three tasks is selected, where a prediction is the argmax over the classes of
    all three."""
    gamma: float = 1.0
    """Factor of the running Fisher information when a task's is added to it."""
    fisher: Literal["sampled", "empirical", "batch"] = "sampled"
    """Squared gradients per image, of labels sampled from the network's softmax or of the true
    ones; `batch` squares the mean gradient of a batch, a frequent mistake that makes them smaller
    by up to the batch size."""
    fisher_images: int = 0
    """Training images, sampled once per task, that the Fisher information is estimated on; 0:
    all."""
    head_learning_rate: float = 1e-3
    """Rate of the head at the start; `fit.learning_rate` is the backbone's."""
    fit: FitConfig = FitConfig(epochs=20, learning_rate=5e-5)
    batch_size: int = 64

    def __post_init__(self) -> None:
        at_least_one(self, "batch_size")
        positive(self, "head_learning_rate")
        if not self.penalties or not all(0 <= penalty < float("inf") for penalty in self.penalties):
            raise ValueError(
                f"penalties are {self.penalties}; expected at least one, all finite and at least 0"
            )
        expect(
            self,
            "gamma",
            0 <= self.gamma <= 1,
            "0 (only the last task's Fisher) to 1 (all tasks' sum)",
        )
        expect(self, "fisher_images", self.fisher_images >= 0, "a number of images, or 0 for all")


class EwcState(NamedTuple):
    """What EWC stores between tasks: the backbone's weights, their Fisher information (0 at the
    start), the head."""

    backbone: list[Any]
    fisher: list[Any]
    head: Head
    """The columns of all classes so far, without padding, on the host."""


class Ewc(OneHead):
    """See the module."""

    State = EwcState
    config: EwcConfig

    def build(self) -> None:
        executor, config = self.executor, self.config
        self.penalty = config.penalties[0] if len(config.penalties) == 1 else None
        """The strength in use; None before it is selected."""
        self._first: list[Task] = []
        num_params = sum(leaf.size for leaf in executor.leaves)
        per_image = max(1, min(32, GRADIENT_BYTES // (4 * num_params)))
        self.chunk = config.batch_size if config.fisher == "batch" else per_image
        """Images whose gradients are computed at once."""

        def logits(leaves, head, inputs):
            return head_logits(head, executor.vit_of(leaves)(inputs["images"]))

        def loss(learned, fixed, batch: FitBatch):
            (leaves, head), (known, fisher, strength, num) = learned, fixed
            found = logits(leaves, head, batch.inputs)
            local = local_cross_entropy(found, batch.labels, batch.weights, 0, num)
            moved = sum(
                (f * (leaf - star) ** 2).sum()
                for leaf, star, f in zip(leaves, known, fisher, strict=True)
            )
            # CE + lambda / 2 * sum F (theta - theta*)^2 (Kirkpatrick et al., eq. 3), F and theta*
            # of online EWC
            return local + 0.5 * strength * moved

        @functools.partial(executor.jit, donate_argnums=0)
        def add_fisher(sums, leaves, head, inputs, labels, weights, rows, key, num):
            def of_batch(leaves):
                return local_cross_entropy(
                    logits(leaves, head, inputs), labels, weights / weights.sum(), 0, num
                )

            def of_image(leaves, image, label, row):
                found = logits(leaves, head, {"images": image[None]})
                if config.fisher == "sampled":
                    own = jnp.where(
                        jnp.arange(found.shape[-1]) < num, jax.lax.stop_gradient(found[0]), FAR
                    )
                    label = jax.random.categorical(jax.random.fold_in(key, row), own)
                return -local_cross_entropy(found, label[None], jnp.ones(1), 0, num)

            # the Fisher information is a mean of squares, not the square of a mean, which is far
            # smaller
            if config.fisher == "batch":
                new = jax.tree.map(lambda g: weights.sum() * g * g, jax.grad(of_batch)(leaves))
            else:
                new = squared_gradients(of_image, leaves, weights, inputs["images"], labels, rows)
            return jax.tree.map(jnp.add, sums, new)

        @executor.jit
        def scaled(fisher, factor):
            return jax.tree.map(lambda leaf: factor * leaf, fisher)

        # Adam, with a separate rate for the head
        ratio = config.head_learning_rate / config.fit.learning_rate
        adam = optax.chain(optax.scale_by_adam(), optax.masked(optax.scale(ratio), (False, True)))
        self.fitter = Fitter(loss, adam, jit=executor.jit, layout=executor.layout)
        self._add_fisher = add_fisher
        self._scaled = scaled
        self._answer = executor.jit(logits)
        leaves = list(executor.leaves)
        self.known = EwcState(
            leaves, scaled(leaves, np.float32(0)), no_classes(executor.config.width)
        )

    def check(self, tasks: Sequence[Task]) -> list[str]:
        self._first, num = list(tasks[:TUNED_ON]), len(self.config.penalties)
        if num == 1:
            return []
        if len(tasks) == 1:
            return [f"a single task needs no penalty, so the {num} penalties are not compared"]
        names = ", ".join(task.name for task in self._first[1:])
        return [
            f"learns {names} {num} times beforehand, to select one of {num} penalties on the"
            " validation split"
        ]

    def learn_task(self, task: Task, fitting: Fitting) -> dict[str, Any]:
        """Train backbone and head under the penalty, then add the task's Fisher information.

        Raises ValueError where the penalty cannot be selected.
        """
        penalties = self.config.penalties
        vit = self.executor.config
        num = len(task.classes)
        if self.penalty is None and [shown.name for shown in self._first[:1]] != [task.name]:
            raise ValueError(
                f"ewc selects one of {len(penalties)} penalties on a stream's first tasks, but"
                f" knows no stream that starts with {task.name!r}: call check(tasks) first, or give"
                " one penalty"
            )
        before = self.known
        begins = not self.classes.num
        report = {}
        strength = np.float32(0 if begins else self.penalty)
        self.train(fitting, task, (before.backbone, before.fisher, strength, np.int32(num)))
        with fitting.phase("fisher", self._num_fisher(task)) as advance:
            fisher = self.add_fisher(before.fisher, fitting, task, advance)
        leaves, own = fitting.learned
        head = jax.tree.map(
            lambda *parts: np.concatenate(parts, axis=-1), before.head, cut(own, num)
        )
        self.known = EwcState(leaves, fisher, head)
        if self.penalty is None and len(self._first) == 1:
            self.penalty = penalties[0]
        elif self.penalty is None:
            tried = self._tune(fitting)
            self.penalty = penalties[int(tried.argmax())]
            report["penalty_accuracies"] = dict(
                zip(map(str, penalties), tried.tolist(), strict=True)
            )
        backbone = backbone_params(vit)
        head_params = (vit.width + 1) * num
        # the weights replace the pretrained ones; their Fisher information is stored with the first
        # task
        stored = (backbone if begins else 0) + head_params
        report["penalty"] = self.penalty
        return {
            **report,
            **params_report(vit, added=0, learned=backbone + head_params, stored=stored),
        }

    def costs(self) -> dict[str, int]:
        """FLOPs per image of one plain pass."""
        return pass_costs(self.executor.config, self.classes.num)

    def start(self, task: Task) -> tuple[list[Any], Head]:
        """The backbone's weights, and columns of the task's classes alone: its loss sees no
        others."""
        key = self.key(task, Phase.METHOD_INIT)
        width = self.executor.config.width
        return list(self.known.backbone), grow_head(key, None, width, 0, len(task.classes))

    def add_fisher(
        self, fisher: list[Any], fitting: Fitting, task: Task, advance: Advance
    ) -> list[jax.Array]:
        """The running Fisher information plus that of the next task, whose training has
        finished."""
        labels, (leaves, head), num = task.train.labels, fitting.learned, self._num_fisher(task)
        rows = np.arange(len(labels))
        if num < len(labels):
            rows = np.sort(
                order_at(self.key(task, Phase.METHOD_NOISE, Noise.IMAGES), len(labels))[:num]
            )
        if self.config.fisher == "batch":
            # shuffled as in training, because neighbours may be of one class
            rows = rows[order_at(self.key(task, Phase.METHOD_NOISE, Noise.BATCHES), len(rows))]
        key = self.key(task, Phase.METHOD_NOISE, Noise.LABELS)
        pieces = list(batches(rows, self.chunk))
        read = Inputs(task.train.images).follow([piece.rows for piece in pieces])
        sums = self._scaled(fisher, np.float32(self.config.gamma))
        for piece, inputs in zip(pieces, read, strict=True):
            # each image has the same weight, and a batch as a whole the number of its images
            weights = piece.mask / np.float32(len(rows))
            sums = self._add_fisher(
                sums,
                leaves,
                head,
                inputs,
                labels[piece.rows],
                weights,
                piece.rows.astype(np.int32),
                key,
                np.int32(len(task.classes)),
            )
            advance(piece.size)
        return jax.block_until_ready(sums)

    def _num_fisher(self, task: Task) -> int:
        return min(len(task.train.labels), self.config.fisher_images or len(task.train.labels))

    def _tune(self, fitting: Fitting) -> Float[np.ndarray, "penalties"]:
        """The mean validation accuracy with each penalty, of which `fitting` keeps those that were
        tried already.

        The first task has no penalty, so all start from its state, with the keys that the stream
        itself will use.
        """
        tasks = self._first
        untried = np.full(len(self.config.penalties), np.nan)
        tried = fitting.more["tried"] = np.array(fitting.more.get("tried", untried), np.float64)
        todo, (first, *others) = np.flatnonzero(np.isnan(tried)), tasks
        total = sum(
            self.config.fit.epochs * len(task.train.labels) + self._num_fisher(task)
            for task in others
        )
        with fitting.phase("penalty", len(todo) * total) as advance:
            session = Session(advance=advance)
            for place in todo:
                trial = copy.copy(self)
                accuracies = []
                trial.penalty = self.config.penalties[place]
                trial.classes = Classes([first.name], [first.classes])
                try:
                    for task in others:
                        trial.learn(task, session)
                except FloatingPointError:
                    tried[place] = -1.0
                    continue
                for index, task in enumerate(tasks):
                    found = trial.classes.inferred(trial.logits(task.val.images))
                    accuracies.append(
                        ((found.tasks == index) & (found.classes == task.val.labels)).mean()
                    )
                tried[place] = np.mean(accuracies)
        if tried.max() < 0:
            raise FloatingPointError(
                f"ewc: non-finite losses on the first {len(tasks)} tasks with each of the penalties"
                f" {self.config.penalties}; set a learning rate below"
                f" {self.config.fit.learning_rate}"
            )
        return tried

    def logits(self, images: Images) -> Float[np.ndarray, "N P"]:
        return self.over(self._answer, Inputs(images), self.known.backbone, padded(self.known.head))

    def meta(self) -> dict[str, Any]:
        """The strength of the penalty."""
        return {"penalty": self.penalty}

    def restore(self, index: int, arrays: Mapping[str, Any], meta: Mapping[str, Any]) -> None:
        super().restore(index, arrays, meta)
        self.penalty = meta["penalty"]


def squared_gradients(
    log_likelihood: Callable[..., jax.Array],
    params: Any,
    weights: Float[Array, "B"],
    *examples: Array,
) -> Any:
    """Weighted sum over images of the squared gradient of `log_likelihood(params, *example)`, one
    gradient per image.

    The mean over images estimates the Fisher information's diagonal if the labels are sampled from
    the model.
    """
    grads = jax.vmap(jax.grad(log_likelihood), (None, *[0] * len(examples)))(params, *examples)
    return jax.tree.map(
        lambda g: (weights.reshape(-1, *[1] * (g.ndim - 1)) * g * g).sum(axis=0), grads
    )
