"""TUNA: adapters per task, of which the most certain ones predict, together with a merge of all of them.

One set of adapters trains through the stream; a copy is kept after each task. Heads are cosine classifiers, aligned
after each task on features sampled from a Gaussian per class. An image runs through every copy: the prediction with the
lowest entropy and that of the merged "universal" adapters are summed. Wang et al., "Integrating Task-Specific and
Universal Adapters for Pre-Trained Model-based Class-Incremental Learning", ICCV 2025; the merge follows Huang et al.,
"EMR-Merging: Tuning-Free High-Performance Model Merging", NeurIPS 2024.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from cheem_jax.backbone.flops import adapter_flops
from cheem_jax.baselines.adapters import (
    AdapterConfig,
    Adapters,
    adapted_features,
    adapter_params,
    compiled_features,
    cosine_head,
    cosines,
    directions,
    executed_adapter_flops,
    grow_weight,
    init_adapters,
    unit,
)
from cheem_jax.baselines.costs import params_report, plain_flops
from cheem_jax.baselines.fitting import FitBatch, Fitter, Init, Inputs, over_batches, train_task
from cheem_jax.baselines.saving import restore_all, save_and_restore
from cheem_jax.cheem.heads import FAR, Classes, columns, local_cross_entropy, padded, saved_classes, with_columns
from cheem_jax.core.images import Images
from cheem_jax.core.keys import Keys, Phase, order_at
from cheem_jax.core.pool import Head
from cheem_jax.data.task import Task
from cheem_jax.engine import hosts
from cheem_jax.engine.executor import Executor
from cheem_jax.engine.inference import Inferred
from cheem_jax.engine.passes import Advance
from cheem_jax.run.method import Answers, Clock, FrozenFeatures, Running, check_given

JITTER = 1e-4
"""Added to every variance: classes of few images have a covariance without full rank."""
ALIGNMENT_PERIOD = 5
"""Epochs of half a cosine: the alignment's rate falls to 0 in so many epochs, and rises again in as many."""


@dataclasses.dataclass(frozen=True)
class TunaConfig(AdapterConfig):
    """TUNA with the optimizer of the paper's comparison; options name what the official code does."""

    name: ClassVar[str] = "tuna"
    bottleneck: int = 16
    """Rank of an adapter."""
    temperature: float = 20.0
    """Factor of the cosines before each softmax."""
    margin: float = 0.0
    """Subtracted from the true class's cosine in training (official: 0.3 for ImageNet-A)."""
    orthogonality: float = 0.0
    """Weight of the term that makes an adapter's up half orthogonal to those of earlier tasks, which stay as they are
    (official: 1e-3 for ImageNet-R, ImageNet-A and ObjectNet, else 0)."""
    universal: Literal["merged", "latest"] = "merged"
    """Adapters that predict together with the most certain ones: the merge of all, or, after an index slip in the
    official code, the latest ones."""
    statistics: Literal["covariance", "variance"] = "covariance"
    """A class's Gaussian for the alignment: D x D numbers, or D."""
    alignment_epochs: int = 30
    """Passes of the alignment of all heads from the second task on; 0: none (official: 10 for ImageNet-A)."""
    alignment_samples: int = 5
    """Features sampled per class and pass, in batches."""
    alignment_rate: float = 5e-3
    """Rate of the alignment's SGD at the start."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.temperature > 0:
            raise ValueError(f"temperature is {self.temperature}; expected a positive factor of the cosines")
        for name in ("margin", "orthogonality"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} is {getattr(self, name)}; expected 0 (none) or more")
        if self.alignment_epochs < 0 or self.alignment_samples < 1 or not self.alignment_rate > 0:
            raise ValueError(
                f"the alignment has {self.alignment_epochs} epochs, {self.alignment_samples} x batch_size samples and "
                f"the rate {self.alignment_rate}; expected 0 epochs (none) or more, 1 sample or more, a positive rate"
            )


class Gaussians(NamedTuple):
    """Features of each class of a task: means, and Cholesky factors of the covariances or standard deviations."""

    means: Float[np.ndarray, "C D"]
    spreads: Float[np.ndarray, "C D *D"]


class Tuna:
    """See the module."""

    name = "tuna"

    def __init__(self, executor: Executor, features: FrozenFeatures, config: TunaConfig, keys: Keys, num_tasks: int):
        self.executor, self.config, self.keys, self.num_tasks = executor, config, keys, num_tasks
        self.bank: list[Adapters] = []
        """A copy after each task; the next task continues from the last one."""
        self.gaussians: list[Gaussians] = []
        self.head: Head | None = None
        self.classes = Classes()

        def loss(learned, fixed, batch: FitBatch):
            (adapters, head), (leaves, old, strength, num) = learned, fixed
            images, vit = batch.inputs["images"], executor.vit_of(leaves)
            near = cosines(adapted_features(vit, adapters, images, config, batch.key), head.weight)
            # a margin makes training harder than prediction: the true class has to win by it
            lowered = near - config.margin * jax.nn.one_hot(batch.labels, near.shape[-1])
            found = local_cross_entropy(config.temperature * lowered, batch.labels, batch.weights, 0, num)
            return found + strength * overlap(mean_rows(adapters), old)

        @executor.jit
        def answer(adapters, head, leaves, images, num):
            features = adapted_features(executor.vit_of(leaves), adapters, images, config)
            near = config.temperature * cosines(features, head.weight)
            logs = jax.nn.log_softmax(jnp.where(jnp.arange(near.shape[-1]) < num, near, FAR))
            found = jnp.exp(logs)
            return found, -(found * logs).sum(axis=-1)

        aligner = directions("sgd")

        @functools.partial(executor.jit, donate_argnums=(0, 1))
        def align(weight, moments, rate, features, labels, num):
            def loss(weight):
                near = config.temperature * cosines(features, weight)
                return local_cross_entropy(near, labels, jnp.full(len(labels), 1 / len(labels)), 0, num)

            value, grads = jax.value_and_grad(loss)(weight)
            updates, moments = aligner.update(grads, moments, weight)
            return weight - rate * updates, moments, value

        @functools.partial(executor.jit, static_argnums=3)
        def sample(key, mean, spread, num):
            noise = jax.random.normal(key, (num, len(mean)))
            return mean + (noise * spread if spread.ndim == 1 else noise @ spread.T)

        self._fitter = Fitter(loss, directions(config.optimizer), jit=executor.jit, layout=executor.layout)
        self.features, self._answer = compiled_features(executor, config), answer
        self._align, self._aligner, self._sample = align, aligner, sample

    def check(self, tasks: Sequence[Task]) -> list[str]:
        """See `Method.check`."""
        config, width = self.config, self.executor.config.width
        if not config.alignment_epochs:
            return []
        images = np.concatenate([np.bincount(task.train.labels, minlength=len(task.classes)) for task in tasks])
        single, few, said = int((images == 1).sum()), int((images <= width).sum()), []
        if few and config.statistics == "covariance":
            said.append(
                f"{few} of {len(images)} classes have at most as many training images as features have dimensions "
                f"({width}), so their covariances lack full rank; {JITTER:g} is added to each variance. "
                "statistics=variance stores less and needs fewer images"
            )
        if single:
            said.append(
                f"{single} classes have a single training image; the variance of their features is taken as {JITTER:g}"
            )
        return said

    def learn(self, task: Task, running: Running) -> dict[str, Any]:
        """Train the adapters and the task's head, keep a copy, align all heads."""
        config, keys, index, num = self.config, self.keys, len(self.bank), len(task.classes)
        seen, vit, clock = self.classes.num, self.executor.config, Clock.of(running)
        adapters = self.bank[-1] if self.bank else self.begin(keys.at(index, Phase.METHOD_INIT, Init.LEARNED))
        weight, head_key = self.head and self.head.weight, keys.at(index, Phase.METHOD_INIT, Init.HEAD)
        grown = grow_weight(head_key, weight, vit.width, seen, num)
        fitting = self._fitter.begun((adapters, columns(grown, seen, num)), running.saved)
        strength = config.orthogonality * math.exp(-(index + 1))
        fixed = (self.executor.leaves, self._old_rows(), np.float32(strength), np.int32(num))
        train_task(
            self._fitter, fitting, fixed, task.train.labels, Inputs(task.train.images),
            config=config, keys=keys, number=index, running=running, clock=clock,
        )  # fmt: skip
        adapters, own = fitting.learned
        state = functools.partial(fitting.saved, clock)
        with clock("statistics"), running.phase("statistics", len(task.train.labels), state) as advance:
            features = self.features(adapters, task.train.images, advance)
            gaussians = [*self.gaussians, gaussians_of(features, task.train.labels, num, config.statistics)]
        head, losses = with_columns(grown, own, seen, num), []
        if index and config.alignment_epochs:
            total = config.alignment_epochs * (seen + num) * self.num_samples
            with clock("alignment"), running.phase("alignment", total, state) as advance:
                head, losses = self.aligned(head, gaussians, index, advance)
        self.bank.append(adapters)
        self.gaussians, self.head = gaussians, head
        self.classes.add(task.name, task.classes)
        added, head_params = adapter_params(vit, config.bottleneck), vit.width * num
        stored = added + head_params + sum(leaf.size for leaf in gaussians[-1])
        return {
            "name": task.name,
            **self.costs(),
            **params_report(vit, added=added, learned=added + head_params, stored=stored),
            "alignment_losses": losses,
            **fitting.report(clock),
        }

    def costs(self) -> dict[str, int]:
        """FLOPs per image after the whole stream: a pass per task and one with the universal adapters.

        The paper's count (T + 1) F0 contains neither adapters nor heads.
        """
        vit, rank = self.executor.config, self.config.bottleneck
        plain, passes = plain_flops(vit, self.classes.num), num_passes(max(self.num_tasks, len(self.bank)))
        return {
            "flops_method": passes * plain["flops_method"],
            "flops_explicit": passes * (plain["flops_explicit"] + adapter_flops(vit, rank)),
            "flops_executed": passes * (plain["flops_executed"] + executed_adapter_flops(vit, rank)),
        }

    def begin(self, key: jax.Array) -> Adapters:
        """The initial adapters of the first task."""
        return init_adapters(key, self.executor.config, self.config.bottleneck)

    @property
    def num_samples(self) -> int:
        """Features that the alignment samples per class in each pass, and the batch size of its steps."""
        return self.config.alignment_samples * self.config.batch_size

    def aligned(
        self, head: Head, gaussians: Sequence[Gaussians], index: int, advance: Advance
    ) -> tuple[Head, list[float]]:
        """The head, trained on features sampled from the Gaussians of all classes, and the mean loss of each pass.

        Raises FloatingPointError for a non-finite loss.
        """
        config, keys, size = self.config, self.keys, self.num_samples
        means = np.concatenate([some.means for some in gaussians])
        spreads = np.concatenate([some.spreads for some in gaussians])
        labels = np.repeat(np.arange(len(means), dtype=np.int32), size)
        weight, losses = jnp.copy(head.weight), []
        moments = self._aligner.init(weight)
        for epoch in range(config.alignment_epochs):
            sampled = np.concatenate([
                np.asarray(self._sample(keys.at(index, Phase.ALIGNMENT, epoch, c), means[c], spreads[c], size))
                for c in range(len(means))
            ])  # fmt: skip
            order = order_at(keys.at(index, Phase.ALIGNMENT_ORDER, epoch), len(labels)).reshape(-1, size)
            rate = config.alignment_rate * 0.5 * (1 + math.cos(math.pi * epoch / ALIGNMENT_PERIOD))
            running = []
            for rows in order:
                weight, moments, loss = self._align(
                    weight, moments, np.float32(rate), sampled[rows], labels[rows], np.int32(len(means))
                )
                running.append(loss)
                advance(size)
            losses.append(float(np.mean(jax.device_get(running))))
            if not math.isfinite(losses[-1]):
                raise FloatingPointError(
                    f"tuna: non-finite loss of the alignment in epoch {epoch + 1}; set an alignment_rate below "
                    f"{config.alignment_rate}"
                )
        return cosine_head(weight), losses

    def _old_rows(self) -> Float[np.ndarray, "T L r"]:
        """Mean unit rows of the stored adapters' up halves; for future tasks 0, which overlaps with nothing."""
        rows = np.zeros((max(self.num_tasks, len(self.bank)), self.executor.config.depth, self.config.bottleneck))
        for index, adapters in enumerate(self.bank if self.config.orthogonality else ()):
            rows[index] = mean_rows(adapters)
        return rows.astype(np.float32)

    def bytes_needed(self, task: Task) -> int:
        """See `Method.bytes_needed`: adapters, heads, Gaussians; two rolling checkpoints with Adam's moments."""
        vit, num = self.executor.config, len(task.classes)
        spread = vit.width if self.config.statistics == "covariance" else 1
        head = vit.width * 2 * (self.classes.num + num)
        learned = adapter_params(vit, self.config.bottleneck) + head
        return 4 * (learned + num * vit.width * (1 + spread) + 2 * 3 * learned)

    def scores(self, images: Images) -> tuple[Float[np.ndarray, "N P"], Int[np.ndarray, "N"]]:
        """Summed probabilities of all classes for each image, and the task whose adapters have the lowest entropy."""
        assert self.head is not None
        head, leaves, num = self.head, self.executor.leaves, np.int32(self.classes.num)
        universal = None
        if len(self.bank) > 1:
            universal = merge(self.bank) if self.config.universal == "merged" else self.bank[-1]
            universal = jax.tree.map(jnp.asarray, universal)

        def run(read: dict[str, Any]):
            found = hosts.fetch([self._answer(adapters, head, leaves, read["images"], num) for adapters in self.bank])
            probabilities, entropies = (np.stack(parts) for parts in zip(*found, strict=True))
            # p of the adapters with the lowest entropy plus p of the universal ones
            total, chosen = most_certain(probabilities, entropies)
            if universal is None:
                return total, chosen
            return total + hosts.fetch(self._answer(universal, head, leaves, read["images"], num)[0]), chosen

        return over_batches(run, Inputs(images), batch_size=self.config.batch_size, layout=self.executor.layout)

    def predict(self, images: np.ndarray, tasks: Int[np.ndarray, "N"] | None = None) -> Inferred:
        """See `Method.predict`."""
        check_given(self.name, len(self.bank), tasks)
        return self.classes.inferred(self.scores(images)[0], tasks)

    def answers(self, index: int, task: Task) -> Answers:
        """See `Method.answers`."""
        return self.classes.answers(self.scores(task.test.images)[0], index)

    def save(self, root: Path) -> None:
        """See `Method.save`: the last task's adapters and Gaussians, and all heads."""
        assert self.head is not None
        arrays = {
            "adapters": self.bank[-1]._asdict(),
            "gaussians": self.gaussians[-1]._asdict(),
            "head": np.asarray(self.head.weight)[:, : self.classes.num],
        }
        self.bank[-1], self.gaussians[-1], self.head = save_and_restore(root, self.classes.last, arrays, _restored)

    def open(self, root: Path) -> None:
        """See `Method.open`."""
        self.bank, self.gaussians, self.head, self.classes = [], [], None, saved_classes(root)
        for adapters, gaussians, self.head in restore_all(root, _restored):
            self.bank.append(adapters)
            self.gaussians.append(gaussians)


def _restored(arrays: Mapping[str, Any], meta: Mapping[str, Any]) -> tuple[Adapters, Gaussians, Head]:
    adapters = Adapters(**{name: jnp.asarray(part) for name, part in arrays["adapters"].items()})
    return adapters, Gaussians(**arrays["gaussians"]), padded(cosine_head(arrays["head"]))


def num_passes(num_tasks: int) -> int:
    """Passes per image: one per task, and from the second task on one with the universal adapters."""
    return num_tasks + 1 if num_tasks > 1 else 1


def merge(bank: Sequence[Adapters]) -> Adapters:
    """The universal adapters: each number has the sign of its mean over tasks, and its largest size with that sign."""
    return jax.tree.map(lambda *parts: _merged(np.stack([np.asarray(part) for part in parts])), *bank)


def _merged(tasks: Float[np.ndarray, "T *S"]) -> Float[np.ndarray, "*S"]:
    sign = np.where(tasks.mean(axis=0) > 0, 1, -1).astype(tasks.dtype)
    return sign * np.where(np.sign(tasks) == sign, np.abs(tasks), 0).max(axis=0)


def most_certain(
    probabilities: Float[np.ndarray, "T N P"], entropies: Float[np.ndarray, "T N"]
) -> tuple[Float[np.ndarray, "N P"], Int[np.ndarray, "N"]]:
    """For each image the probabilities with the lowest entropy, and the task of their adapters (ties: the earliest)."""
    chosen = entropies.argmin(axis=0)
    return probabilities[chosen, np.arange(len(chosen))], chosen


def mean_rows(adapters: Adapters) -> Float[jax.Array, "L r"]:
    """Mean over the D rows of each block's up half, every row scaled to unit length."""
    return unit(adapters.up, axis=1).mean(axis=2)


def overlap(rows: Float[jax.Array, "L r"], old: Float[jax.Array, "T L r"]) -> Float[jax.Array, ""]:
    """Overlap of up halves, summed over old tasks and averaged over blocks.

    The mean of all D x D products of unit rows is the product of the two mean rows.
    """
    return jnp.abs((rows * old).sum(axis=-1)).mean(axis=-1).sum()


def gaussians_of(features: Float[np.ndarray, "N D"], labels: Int[np.ndarray, "N"], num: int, kind: str) -> Gaussians:
    """A Gaussian per class; `kind` is `TunaConfig.statistics`. A single image's has no spread but the jitter."""
    means, spreads = [], []
    for c in range(num):
        own = features[labels == c].astype(np.float64)
        mean = own.mean(axis=0)
        centred, degrees = own - mean, max(len(own) - 1, 1)
        if kind == "variance":
            spread = np.sqrt((centred**2).sum(axis=0) / degrees + JITTER)
        else:
            spread = np.linalg.cholesky(centred.T @ centred / degrees + JITTER * np.eye(len(mean)))
        means.append(mean.astype(np.float32))
        spreads.append(spread.astype(np.float32))
    return Gaussians(np.stack(means), np.stack(spreads))
