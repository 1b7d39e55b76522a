"""TUNA: adapters per task; the most certain adapters and the merged adapters predict together.

One set of adapters is trained on all tasks in turn, and a copy is stored after each task. Heads are
cosine classifiers. After each task except the first, all heads are aligned: they are trained on
features sampled from one Gaussian per class. A prediction runs the image through the backbone with
every copy, and with the merged "universal" adapters. The prediction adds the probabilities of the
copy with the lowest entropy to the probabilities of the universal adapters. Wang et al.,
"Integrating Task-Specific and Universal Adapters for Pre-Trained Model-based Class-Incremental
Learning", ICCV 2025; the merge follows Huang et al., "EMR-Merging: Tuning-Free High-Performance
Model Merging", NeurIPS 2024.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from cheem_jax.baselines.adapters import (
    SGD,
    AdapterBaseline,
    AdapterConfig,
    Bottleneck,
    adapted_features,
    adapter_params,
    cosines,
    padded_columns,
)
from cheem_jax.baselines.baseline import at_least_one, params_report
from cheem_jax.baselines.fitting import FitBatch, Fitter, Fitting, Inputs
from cheem_jax.baselines.heads import local_cross_entropy
from cheem_jax.core.images import Images
from cheem_jax.core.keys import Phase, order_at
from cheem_jax.core.pool import FAR
from cheem_jax.core.settings import Advance
from cheem_jax.data.task import Task
from cheem_jax.engine import hosts
from cheem_jax.run.session import Session

JITTER = 1e-4
"""Number added to every variance, because the covariance of a class with few images does not have
full rank."""
TEMPERATURE = 20.0
"""Factor by which cosines are multiplied before each softmax."""
ALIGNMENT_PERIOD = 5
"""Number of epochs in half a period of the alignment's cosine schedule: the learning rate decays to
0 in these epochs, and increases again in the second half."""
ALIGNMENT_RATE = 5e-3
"""Initial learning rate of the alignment's SGD."""
SAMPLES = 5
"""Number of batches of features that the alignment samples per class and epoch."""


@dataclasses.dataclass(frozen=True)
class TunaConfig(AdapterConfig):
    """Settings of TUNA; adapters are trained with Adam, as in the CHEEM paper's comparison."""

    name: ClassVar[str] = "tuna"
    bottleneck: int = 16
    """Rank of an adapter."""
    alignment_epochs: int = 30
    """Number of epochs in which all heads are aligned after each task except the first (official:
    10 for ImageNet-A)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least_one(self, "alignment_epochs")


class Gaussians(NamedTuple):
    """One Gaussian of the features per class of a task: means, and Cholesky factors of the
    covariances."""

    means: Float[np.ndarray, "C D"]
    spreads: Float[np.ndarray, "C D D"]


class TunaTask(NamedTuple):
    """Adapters of a task, and the Gaussians of its classes. The next task starts with these
    adapters."""

    adapters: Bottleneck
    gaussians: Gaussians


class TunaState(NamedTuple):
    """Weight of the cosine head of all learned classes."""

    head: Float[np.ndarray, "D C"]


class Tuna(AdapterBaseline):
    """The TUNA learner."""

    Learned, State = TunaTask, TunaState
    config: TunaConfig

    def build(self) -> None:
        super().build()
        executor = self.executor
        self.state = TunaState(np.zeros((executor.config.width, 0), np.float32))

        def loss(learned, fixed, batch: FitBatch):
            (adapters, weight), (leaves, num) = learned, fixed
            vit = executor.merge_vit(leaves)
            features = adapted_features(vit, adapters, batch.inputs["images"], batch.key)
            return cosine_loss(features, weight, num, batch)

        def alignment_loss(weight, num, batch: FitBatch):
            return cosine_loss(batch.inputs["features"], weight, num, batch)

        @executor.jit
        def answer(adapters, weight, leaves, num, inputs):
            features = adapted_features(executor.merge_vit(leaves), adapters, inputs["images"])
            logits = TEMPERATURE * cosines(features, weight)
            logs = jax.nn.log_softmax(jnp.where(jnp.arange(logits.shape[-1]) < num, logits, FAR))
            probabilities = jnp.exp(logs)
            return probabilities, -(probabilities * logs).sum(axis=-1)

        @functools.partial(executor.jit, static_argnums=3)
        def sample(key, mean, spread, num):
            return mean + jax.random.normal(key, (num, len(mean))) @ spread.T

        self.fitter = Fitter(loss, jit=executor.jit, layout=executor.layout)
        self.aligner = Fitter(alignment_loss, SGD, jit=executor.jit)
        self._answer, self._sample = answer, sample

    def check(self, tasks: Sequence[Task]) -> list[str]:
        width = self.vit.width
        images = np.concatenate(
            [np.bincount(task.train.labels, minlength=len(task.classes)) for task in tasks]
        )
        single = int((images == 1).sum())
        few = int((images <= width).sum())
        notes = []
        if few:
            notes.append(
                f"{few} of {len(images)} classes do not have more training images than the"
                f" {width} dimensions of features, so their covariances do not have full rank;"
                f" {JITTER:g} is added to each variance"
            )
        if single:
            notes.append(
                f"{single} classes have a single training image; the variance of their features is"
                f" set to {JITTER:g}"
            )
        return notes

    def start(self, task: Task) -> tuple[Bottleneck, jax.Array]:
        """Return the adapters, and the initial columns of the head for the task."""
        adapters = self.tasks[-1].adapters if self.tasks else self.new_adapters(task)
        return adapters, padded_columns(self.new_columns(task))

    def finish(self, task: Task, fitting: Fitting, session: Session) -> dict[str, Any]:
        """Store a copy of the adapters and the task's Gaussians, and align all heads."""
        num = len(task.classes)
        labels = task.train.labels
        adapters, columns = fitting.learned
        with session.phase("statistics", len(labels), fitting.saved) as advance:
            features = self.features_with(adapters, task.train.images, advance)
            gaussians = fit_gaussians(features, labels, num)
        self.tasks.append(TunaTask(adapters, gaussians))
        head = np.concatenate([self.state.head, np.asarray(columns)[:, :num]], axis=1)
        losses = []
        if len(self.tasks) > 1:
            total = self.config.alignment_epochs * head.shape[1] * self.num_samples
            with session.phase("alignment", total, fitting.saved) as advance:
                head, losses = self.aligned(head, advance)
        self.state = TunaState(head)
        vit = self.vit
        added = adapter_params(vit, self.config.bottleneck)
        head_params = vit.width * num
        stored = added + head_params + sum(leaf.size for leaf in gaussians)
        report = params_report(vit, added=added, learned=added + head_params, stored=stored)
        return {**report, "alignment_losses": losses}

    def costs(self) -> dict[str, int]:
        """Report the FLOPs per image after the whole stream.

        Each task adds one pass and, with more than one task, the universal adapters add one more
        pass. The CHEEM paper counts T + 1 plain passes for T tasks, without adapters and heads.
        """
        num = max(self.num_tasks, len(self.tasks))
        passes = num + 1 if num > 1 else 1
        return {
            count: passes * flops for count, flops in self.adapted_costs(self.classes.num).items()
        }

    @property
    def num_samples(self) -> int:
        """Number of features that the alignment samples per class and epoch. The batch size of the
        alignment is the same number."""
        return SAMPLES * self.config.batch_size

    def aligned(
        self, head: Float[np.ndarray, "D C"], advance: Advance
    ) -> tuple[Float[np.ndarray, "D C"], list[float]]:
        """Train the head on features sampled from the Gaussians of all classes.

        Returns the head and the mean loss of each epoch. Raises FloatingPointError for a non-finite
        loss.
        """
        keys, size = self.keys, self.num_samples
        index = len(self.tasks) - 1
        means, spreads = (
            np.concatenate(parts)
            for parts in zip(*(task.gaussians for task in self.tasks), strict=True)
        )
        labels = np.repeat(np.arange(len(means), dtype=np.int32), size)
        weights = np.full(size, 1 / size, np.float32)
        fitting = self.aligner.begin(padded_columns(head))
        losses = []
        for epoch in range(self.config.alignment_epochs):
            sampled = np.concatenate(
                [
                    np.asarray(
                        self._sample(
                            keys.at(index, Phase.ALIGNMENT, epoch, c), means[c], spreads[c], size
                        )
                    )
                    for c in range(len(means))
                ]
            )
            order = order_at(keys.at(index, Phase.ALIGNMENT_ORDER, epoch), len(labels))
            rate = ALIGNMENT_RATE * 0.5 * (1 + math.cos(math.pi * epoch / ALIGNMENT_PERIOD))
            parts = (
                FitBatch({"features": sampled[rows]}, labels[rows], weights)
                for rows in order.reshape(-1, size)
            )
            error = (
                f"tuna: non-finite loss of the alignment in epoch {epoch + 1}; check that the"
                " features are finite, or set a smaller fit.learning_rate"
            )
            fitting, loss = self.aligner.epoch(
                fitting, rate, np.int32(len(means)), parts, advance, error
            )
            losses.append(loss)
        return np.asarray(fitting.learned)[:, : len(means)], losses

    def bytes_beside(self, task: Task) -> int:
        """Return the bytes of the task's Gaussians, and of the head's columns for earlier
        classes."""
        width = self.vit.width
        return 4 * (len(task.classes) * width * (1 + width) + width * self.classes.num)

    def logits(self, images: Images) -> Float[np.ndarray, "N P"]:
        """Add the probabilities of the most certain adapters to the probabilities of the universal
        adapters."""
        bank = [task.adapters for task in self.tasks]

        def run(bank, universal, *rest: Any) -> Float[np.ndarray, "N P"]:
            answers = hosts.fetch([self._answer(adapters, *rest) for adapters in bank])
            probabilities, entropies = (np.stack(parts) for parts in zip(*answers, strict=True))
            certain = most_certain(probabilities, entropies)
            if len(bank) == 1:
                return certain
            return certain + hosts.fetch(self._answer(universal, *rest)[0])

        head = padded_columns(self.state.head)
        num = np.int32(self.classes.num)
        return self.over(run, Inputs(images), bank, merge(bank), head, self.executor.leaves, num)


def cosine_loss(
    features: Float[Array, "B D"], weight: Float[Array, "D P"], num, batch: FitBatch
) -> Float[Array, ""]:
    """Compute the cross-entropy of scaled cosines over the first `num` classes."""
    logits = TEMPERATURE * cosines(features, weight)
    return local_cross_entropy(logits, batch.labels, batch.weights, 0, num)


def merge(bank: Sequence[Bottleneck]) -> Bottleneck:
    """Merge the adapters of all tasks into the universal adapter of each block.

    Each element has the sign of its mean over tasks, and the largest magnitude among the tasks'
    elements with this sign.
    """

    def merged(*parts: Any) -> Float[np.ndarray, "*S"]:
        tasks = np.stack([np.asarray(part) for part in parts])
        sign = np.where(tasks.mean(axis=0) > 0, 1, -1).astype(tasks.dtype)
        return sign * np.where(np.sign(tasks) == sign, np.abs(tasks), 0).max(axis=0)

    return jax.tree.map(merged, *bank)


def most_certain(
    probabilities: Float[np.ndarray, "T N P"], entropies: Float[np.ndarray, "T N"]
) -> Float[np.ndarray, "N P"]:
    """Return the probabilities with the lowest entropy for each image (ties select the earliest
    task)."""
    return probabilities[entropies.argmin(axis=0), np.arange(entropies.shape[1])]


def fit_gaussians(
    features: Float[np.ndarray, "N D"], labels: Int[np.ndarray, "N"], num: int
) -> Gaussians:
    """Fit a Gaussian per class. The variance of a class with a single image is `JITTER`."""
    means, spreads = [], []
    for c in range(num):
        points = features[labels == c].astype(np.float64)
        mean = points.mean(axis=0)
        centred = points - mean
        covariance = centred.T @ centred / max(len(points) - 1, 1)
        means.append(mean.astype(np.float32))
        spreads.append(
            np.linalg.cholesky(covariance + JITTER * np.eye(len(mean))).astype(np.float32)
        )
    return Gaussians(np.stack(means), np.stack(spreads))
