"""TUNA: adapters per task, of which the most certain ones predict, together with a merge of all of
them.

One set of adapters trains through the stream; a copy is kept after each task. Heads are cosine
classifiers, aligned after each task on features sampled from a Gaussian per class. An image runs
through every copy: the prediction with the lowest entropy and that of the merged "universal"
adapters are summed. Wang et al., "Integrating Task-Specific and Universal Adapters for Pre-Trained
Model-based Class-Incremental Learning", ICCV 2025; the merge follows Huang et al., "EMR-Merging:
Tuning-Free High-Performance Model Merging", NeurIPS 2024.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from cheem_jax.baselines.adapters import (
    AdapterBaseline,
    AdapterConfig,
    Bottleneck,
    adapted_features,
    adapter_params,
    cosines,
    directions,
    padded_columns,
    unit,
)
from cheem_jax.baselines.baseline import at_least_one, expect, params_report, positive
from cheem_jax.baselines.fitting import FitBatch, Fitter, Fitting, Inputs
from cheem_jax.baselines.heads import local_cross_entropy
from cheem_jax.core.images import Images
from cheem_jax.core.keys import Phase, order_at
from cheem_jax.core.pool import FAR
from cheem_jax.core.settings import Advance
from cheem_jax.data.task import Task
from cheem_jax.engine import hosts

JITTER = 1e-4
"""Added to every variance: classes of few images have a covariance without full rank."""
ALIGNMENT_PERIOD = 5
"""Epochs of half a cosine: the alignment's rate falls to 0 in so many epochs, and rises again in as
many."""


@dataclasses.dataclass(frozen=True)
class TunaConfig(AdapterConfig):
    """TUNA with the optimizer of the paper's comparison; options name what the official code
    does."""

    name: ClassVar[str] = "tuna"
    bottleneck: int = 16
    """Rank of an adapter."""
    temperature: float = 20.0
    """Factor of the cosines before each softmax."""
    margin: float = 0.0
    """Subtracted from the true class's cosine in training (official: 0.3 for ImageNet-A)."""
    orthogonality: float = 0.0
    """Weight of the term that makes an adapter's up half orthogonal to those of earlier tasks,
    which stay as they are (official: 1e-3 for ImageNet-R, ImageNet-A and ObjectNet, else 0)."""
    universal: Literal["merged", "latest"] = "merged"
    """Adapters that predict together with the most certain ones: the merge of all, or, after an
    index slip in the official code, the latest ones."""
    statistics: Literal["covariance", "variance"] = "covariance"
    """A class's Gaussian for the alignment: D x D numbers, or D."""
    alignment_epochs: int = 30
    """Passes of the alignment of all heads from the second task on; 0: none (official: 10 for
    ImageNet-A)."""
    alignment_samples: int = 5
    """Features sampled per class and pass, in batches."""
    alignment_rate: float = 5e-3
    """Rate of the alignment's SGD at the start."""

    def __post_init__(self) -> None:
        super().__post_init__()
        positive(self, "temperature", "alignment_rate")
        at_least_one(self, "alignment_samples")
        for name in ("margin", "orthogonality", "alignment_epochs"):
            expect(self, name, getattr(self, name) >= 0, "0 (none) or more")


class Gaussians(NamedTuple):
    """Features of each class of a task: means, and Cholesky factors of the covariances or standard
    deviations."""

    means: Float[np.ndarray, "C D"]
    spreads: Float[np.ndarray, "C D *D"]


class TunaTask(NamedTuple):
    """What a task keeps; the next task continues from its adapters."""

    adapters: Bottleneck
    gaussians: Gaussians


class TunaState(NamedTuple):
    """The weight of the cosine head, of all classes so far."""

    head: Float[np.ndarray, "D C"]


class Tuna(AdapterBaseline):
    """See the module."""

    Learned, State = TunaTask, TunaState
    config: TunaConfig

    def build(self) -> None:
        super().build()
        executor, config = self.executor, self.config
        self.known = TunaState(np.zeros((executor.config.width, 0), np.float32))

        def loss(learned, fixed, batch: FitBatch):
            (adapters, weight), (leaves, old, strength, num) = learned, fixed
            images = batch.inputs["images"]
            vit = executor.vit_of(leaves)
            near = cosines(adapted_features(vit, adapters, images, config, batch.key), weight)
            # a margin makes training harder than prediction: the true class has to win by it
            lowered = near - config.margin * jax.nn.one_hot(batch.labels, near.shape[-1])
            found = local_cross_entropy(
                config.temperature * lowered, batch.labels, batch.weights, 0, num
            )
            return found + strength * overlap(mean_rows(adapters), old)

        @executor.jit
        def answer(adapters, weight, leaves, num, inputs):
            features = adapted_features(executor.vit_of(leaves), adapters, inputs["images"], config)
            near = config.temperature * cosines(features, weight)
            logs = jax.nn.log_softmax(jnp.where(jnp.arange(near.shape[-1]) < num, near, FAR))
            found = jnp.exp(logs)
            return found, -(found * logs).sum(axis=-1)

        def alignment_loss(weight, num, batch: FitBatch):
            near = config.temperature * cosines(batch.inputs["features"], weight)
            return local_cross_entropy(near, batch.labels, batch.weights, 0, num)

        @functools.partial(executor.jit, static_argnums=3)
        def sample(key, mean, spread, num):
            noise = jax.random.normal(key, (num, len(mean)))
            return mean + (noise * spread if spread.ndim == 1 else noise @ spread.T)

        self.fitter = Fitter(
            loss, directions(config.optimizer), jit=executor.jit, layout=executor.layout
        )
        self.aligner = Fitter(alignment_loss, directions("sgd"), jit=executor.jit)
        self._answer, self._sample = answer, sample

    def check(self, tasks: Sequence[Task]) -> list[str]:
        config = self.config
        width = self.executor.config.width
        if not config.alignment_epochs:
            return []
        images = np.concatenate(
            [np.bincount(task.train.labels, minlength=len(task.classes)) for task in tasks]
        )
        single = int((images == 1).sum())
        few = int((images <= width).sum())
        said = []
        if few and config.statistics == "covariance":
            said.append(
                f"{few} of {len(images)} classes have at most as many training images as features"
                f" have dimensions ({width}), so their covariances lack full rank; {JITTER:g} is"
                " added to each variance. statistics=variance stores less and needs fewer images"
            )
        if single:
            said.append(
                f"{single} classes have a single training image; the variance of their features is"
                f" taken as {JITTER:g}"
            )
        return said

    def start(self, task: Task) -> tuple[Bottleneck, jax.Array]:
        """Adapters, and the columns of the task's classes."""
        adapters = self.tasks[-1].adapters if self.tasks else self.new_adapters(task)
        return adapters, padded_columns(self.new_columns(task))

    def learn_task(self, task: Task, fitting: Fitting) -> dict[str, Any]:
        """Train the adapters and the task's head, keep a copy, align all heads."""
        config = self.config
        index = len(self.tasks)
        num = len(task.classes)
        labels = task.train.labels
        seen = self.classes.num
        vit = self.executor.config
        strength = config.orthogonality * math.exp(-(index + 1))
        # mean unit rows of the stored adapters' up halves; for future tasks 0, which overlaps with
        # nothing
        old = np.zeros((max(self.num_tasks, index), vit.depth, config.bottleneck), np.float32)
        for place, known in enumerate(self.tasks if strength else ()):
            old[place] = mean_rows(known.adapters)
        self.train(fitting, task, (self.executor.leaves, old, np.float32(strength), np.int32(num)))
        adapters, own = fitting.learned
        with fitting.phase("statistics", len(labels)) as advance:
            features = self.features_with(adapters, task.train.images, advance)
            own_gaussians = gaussians_of(features, labels, num, config.statistics)
        gaussians = [*(task.gaussians for task in self.tasks), own_gaussians]
        head = np.concatenate([self.known.head, np.asarray(own)[:, :num]], axis=1)
        losses = []
        if index and config.alignment_epochs:
            total = config.alignment_epochs * (seen + num) * self.num_samples
            with fitting.phase("alignment", total) as advance:
                head, losses = self.aligned(head, gaussians, index, advance)
        self.tasks.append(TunaTask(adapters, gaussians[-1]))
        self.known = TunaState(head)
        added = adapter_params(vit, config.bottleneck)
        head_params = vit.width * num
        stored = added + head_params + sum(leaf.size for leaf in gaussians[-1])
        report = params_report(vit, added=added, learned=added + head_params, stored=stored)
        return {**report, "alignment_losses": losses}

    def costs(self) -> dict[str, int]:
        """FLOPs per image after the whole stream: a pass per task and, for two or more, one with
        universal adapters.

        The paper's count (T + 1) F0 contains neither adapters nor heads.
        """
        num = max(self.num_tasks, len(self.tasks))
        passes = num + 1 if num > 1 else 1
        return {
            count: passes * flops for count, flops in self.adapted_costs(self.classes.num).items()
        }

    @property
    def num_samples(self) -> int:
        """Features that the alignment samples per class in each pass, and the batch size of its
        steps."""
        return self.config.alignment_samples * self.config.batch_size

    def aligned(
        self,
        head: Float[np.ndarray, "D C"],
        gaussians: Sequence[Gaussians],
        index: int,
        advance: Advance,
    ) -> tuple[Float[np.ndarray, "D C"], list[float]]:
        """The head, trained on features sampled from the Gaussians of all classes, and the mean
        loss of each pass.

        Raises FloatingPointError for a non-finite loss.
        """
        config, keys, size = self.config, self.keys, self.num_samples
        means, spreads = (np.concatenate(parts) for parts in zip(*gaussians, strict=True))
        labels = np.repeat(np.arange(len(means), dtype=np.int32), size)
        fitting = self.aligner.begun(padded_columns(head))
        losses = []
        weights = np.full(size, 1 / size, np.float32)
        for epoch in range(config.alignment_epochs):
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
            order = order_at(keys.at(index, Phase.ALIGNMENT_ORDER, epoch), len(labels)).reshape(
                -1, size
            )
            rate = config.alignment_rate * 0.5 * (1 + math.cos(math.pi * epoch / ALIGNMENT_PERIOD))
            running = []
            for rows in order:
                batch = FitBatch({"features": sampled[rows]}, labels[rows], weights)
                running.append(
                    self.aligner.step(fitting, np.float32(rate), np.int32(len(means)), batch)
                )
                advance(size)
            losses.append(float(np.mean(jax.device_get(running))))
            if not math.isfinite(losses[-1]):
                raise FloatingPointError(
                    f"tuna: non-finite loss of the alignment in epoch {epoch + 1}; set an"
                    f" alignment_rate below {config.alignment_rate}"
                )
        return np.asarray(fitting.learned)[:, : len(means)], losses

    def bytes_beside(self, task: Task) -> int:
        """See `TrainedBaseline.bytes_beside`: the task's Gaussians, and the columns of earlier
        classes."""
        width = self.executor.config.width
        num = len(task.classes)
        spread = width if self.config.statistics == "covariance" else 1
        return 4 * (num * width * (1 + spread) + width * self.classes.num)

    def logits(self, images: Images) -> Float[np.ndarray, "N P"]:
        """See `OneHead.logits`: the probabilities by the most certain adapters plus those by the
        universal ones."""
        bank = [task.adapters for task in self.tasks]
        universal = merge(bank) if self.config.universal == "merged" else bank[-1]

        def run(bank, universal, *rest: Any) -> Float[np.ndarray, "N P"]:
            found = hosts.fetch([self._answer(adapters, *rest) for adapters in bank])
            probabilities, entropies = (np.stack(parts) for parts in zip(*found, strict=True))
            total = most_certain(probabilities, entropies)
            return (
                total if len(bank) == 1 else total + hosts.fetch(self._answer(universal, *rest)[0])
            )

        head = padded_columns(self.known.head)
        num = np.int32(self.classes.num)
        return self.over(run, Inputs(images), bank, universal, head, self.executor.leaves, num)


def merge(bank: Sequence[Bottleneck]) -> Bottleneck:
    """The universal adapters: each number has the sign of its mean over tasks, and its largest size
    with that sign."""

    def merged(*parts: Any) -> Float[np.ndarray, "*S"]:
        tasks = np.stack([np.asarray(part) for part in parts])
        sign = np.where(tasks.mean(axis=0) > 0, 1, -1).astype(tasks.dtype)
        return sign * np.where(np.sign(tasks) == sign, np.abs(tasks), 0).max(axis=0)

    return jax.tree.map(merged, *bank)


def most_certain(
    probabilities: Float[np.ndarray, "T N P"], entropies: Float[np.ndarray, "T N"]
) -> Float[np.ndarray, "N P"]:
    """For each image the probabilities with the lowest entropy (ties: of the earliest task's
    adapters)."""
    return probabilities[entropies.argmin(axis=0), np.arange(entropies.shape[1])]


def mean_rows(adapters: Bottleneck) -> Float[jax.Array, "L r"]:
    """Mean over the D rows of each block's up half, every row scaled to unit length."""
    return unit(jnp.asarray(adapters.up), axis=1).mean(axis=2)


def overlap(rows: Float[jax.Array, "L r"], old: Float[jax.Array, "T L r"]) -> Float[jax.Array, ""]:
    """Overlap of up halves, summed over old tasks and averaged over blocks.

    The mean of all D x D products of unit rows is the product of the two mean rows.
    """
    return jnp.abs((rows * old).sum(axis=-1)).mean(axis=-1).sum()


def gaussians_of(
    features: Float[np.ndarray, "N D"], labels: Int[np.ndarray, "N"], num: int, kind: str
) -> Gaussians:
    """A Gaussian per class; `kind` is `TunaConfig.statistics`. A single image's has no spread but
    the jitter."""
    means, spreads = [], []
    for c in range(num):
        own = features[labels == c].astype(np.float64)
        mean = own.mean(axis=0)
        centred = own - mean
        degrees = max(len(own) - 1, 1)
        if kind == "variance":
            spread = np.sqrt((centred**2).sum(axis=0) / degrees + JITTER)
        else:
            spread = np.linalg.cholesky(centred.T @ centred / degrees + JITTER * np.eye(len(mean)))
        means.append(mean.astype(np.float32))
        spreads.append(spread.astype(np.float32))
    return Gaussians(np.stack(means), np.stack(spreads))
