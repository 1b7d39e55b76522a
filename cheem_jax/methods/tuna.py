"""TUNA: an adapter per task beside every FFN, of which the most certain one answers, together with all of them merged.

One set of adapters goes on training through the stream; a copy is kept after each task. Heads are cosine classifiers,
aligned after each task on features drawn from a Gaussian per class. An image runs through every copy: the one whose
answer has the lowest entropy and a merged "universal" adapter decide together. Wang et al., "Integrating Task-Specific
and Universal Adapters for Pre-Trained Model-based Class-Incremental Learning", ICCV 2025; the merge follows Huang et
al., "EMR-Merging: Tuning-Free High-Performance Model Merging", NeurIPS 2024.
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

from cheem_jax import hosts
from cheem_jax.checkpoint import load_task, load_tasks, named, save_task, saved_tasks, task_directory
from cheem_jax.data.task import Task
from cheem_jax.execution.executor import Executor
from cheem_jax.execution.inference import Inferred
from cheem_jax.execution.passes import Advance
from cheem_jax.flops import adapter_flops, backbone_flops, backbone_params, executed_backbone_flops
from cheem_jax.images import Images
from cheem_jax.keys import Keys, Phase, order_at
from cheem_jax.methods.adapters import (
    Adapters,
    Optimizer,
    adapted_features,
    adapter_params,
    check_adapters,
    cosine_head,
    cosines,
    directions,
    executed_adapter_flops,
    grow_weight,
    init_adapters,
    unit,
)
from cheem_jax.methods.fitting import Batch, Fitter, Inputs, left, over_batches
from cheem_jax.methods.heads import FAR, Classes, columns, local_cross_entropy, padded, with_columns
from cheem_jax.methods.method import Answers, Clock, FrozenFeatures, Running, check_given
from cheem_jax.methods.prompting import saved
from cheem_jax.pool import Head
from cheem_jax.training import FitConfig, check_batch_size

JITTER = 1e-4
"""Added to every variance: classes of few images have a covariance without full rank."""
ALIGNMENT_PERIOD = 5
"""Epochs in which the alignment's rate falls along a cosine to 0; in as many it then rises again."""


@dataclasses.dataclass(frozen=True)
class TunaConfig:
    """TUNA with the paper's comparison's optimizer; options name what the official code does."""

    name: ClassVar[str] = "tuna"
    bottleneck: int = 16
    """Rank of an adapter."""
    scale: float = 0.1
    """Factor of what adapters give."""
    dropout: float = 0.1
    """Share of an adapter's hidden values that a training step leaves out."""
    temperature: float = 20.0
    """Factor of the cosines before each softmax."""
    margin: float = 0.0
    """What the true class's cosine is lowered by in training (official: 0.3 for ImageNet-A)."""
    orthogonality: float = 0.0
    """Weight of the term that turns an adapter's up half away from those of earlier tasks (official: 1e-3 for
    ImageNet-R, ImageNet-A and ObjectNet, else 0); theirs do not move."""
    universal: Literal["merged", "latest"] = "merged"
    """What answers beside the most certain adapter: the merge of all, or, as an index slip in the official code has
    it, the latest one."""
    statistics: Literal["covariance", "variance"] = "covariance"
    """A class's Gaussian for the alignment: D x D numbers, or D."""
    alignment_epochs: int = 30
    """Passes of the alignment of all heads from the second task on; 0: none (official: 10 for ImageNet-A)."""
    alignment_samples: int = 5
    """Features drawn per class and pass, times the batch size."""
    alignment_rate: float = 5e-3
    """Rate of the alignment's SGD at the start."""
    optimizer: Optimizer = "adam"
    """Adam, or the official code's SGD with momentum 0.9 and weight decay 5e-4 (at a rate of 0.01 to 0.05)."""
    fit: FitConfig = FitConfig(epochs=20)
    batch_size: int = 64

    def __post_init__(self) -> None:
        check_batch_size(self.batch_size)
        check_adapters(self)
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
        """A copy after each task; the last one is what the next task goes on with."""
        self.gaussians: list[Gaussians] = []
        self.head: Head | None = None
        self.classes = Classes()

        def features_of(adapters, leaves, images, key=None):
            return adapted_features(executor.vit_of(leaves), adapters, images, config, key)

        def loss(learned, fixed, batch: Batch):
            (adapters, head), (leaves, old, strength, num) = learned, fixed
            near = cosines(features_of(adapters, leaves, batch.inputs["images"], batch.key), head.weight)
            lowered = near - config.margin * jax.nn.one_hot(batch.labels, near.shape[-1])
            found = local_cross_entropy(config.temperature * lowered, batch.labels, batch.weights, 0, num)
            return found + strength * overlap(mean_rows(adapters), old)

        @executor.jit
        def answer(adapters, head, leaves, images, num):
            near = config.temperature * cosines(features_of(adapters, leaves, images), head.weight)
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
        def draw(key, mean, spread, num):
            noise = jax.random.normal(key, (num, len(mean)))
            return mean + (noise * spread if spread.ndim == 1 else noise @ spread.T)

        self._fitter = Fitter(loss, directions(config.optimizer), jit=executor.jit, layout=executor.layout)
        self._features, self._answer = executor.jit(features_of), answer
        self._align, self._aligner, self._draw = align, aligner, draw

    def check(self, tasks: Sequence[Task]) -> list[str]:
        """See `Method.check`."""
        config, width = self.config, self.executor.config.width
        if not config.alignment_epochs:
            return []
        images = np.concatenate([np.bincount(task.train.labels, minlength=len(task.classes)) for task in tasks])
        single, few, said = int((images == 1).sum()), int((images <= width).sum()), []
        if few and config.statistics == "covariance":
            said.append(
                f"{few} of {len(images)} classes have no more training images than features have dimensions "
                f"({width}), so their covariances lack full rank; {JITTER:g} is added to each variance. "
                "statistics=variance keeps less and needs fewer images"
            )
        if single:
            said.append(
                f"{single} classes have a single training image; the variance of their features is taken as {JITTER:g}"
            )
        return said

    def learn(self, task: Task, running: Running) -> dict[str, Any]:
        """Train the adapters and the task's head, keep a copy, align all heads."""
        config, keys, index, num = self.config, self.keys, len(self.bank), len(task.classes)
        seen, vit, num_images = int(self.classes.first[-1]), self.executor.config, len(task.train.labels)
        clock = Clock(running.saved.meta["seconds"] if running.saved else None)
        adapters = self.bank[-1] if self.bank else self.begin(keys.at(index, Phase.METHOD_INIT, 0))
        grown = grow_weight(
            keys.at(index, Phase.METHOD_INIT, 1), self.head and self.head.weight, vit.width, seen, num
        )  # fmt: skip
        fitting = self._fitter.begun((adapters, columns(grown, seen, num)), running.saved)
        strength = config.orthogonality * math.exp(-(index + 1))
        fixed = (self.executor.leaves, self._old_rows(), np.float32(strength), np.int32(num))
        state = functools.partial(saved, fitting, clock)
        total = left(fitting, config.fit, num_images, config.batch_size)
        with clock("train"), running.phase("train", total, state) as advance:
            self._fitter.run(
                fitting, fixed, task.train.labels, Inputs(task.train.images), config.fit,
                batch_size=config.batch_size, order_key=keys.at(index, Phase.METHOD_ORDER),
                noise_key=keys.at(index, Phase.METHOD_NOISE), advance=advance,
            )  # fmt: skip
        adapters, own = fitting.learned
        with clock("statistics"), running.phase("statistics", num_images, state) as advance:
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
        own_params, head_params = adapter_params(vit, config.bottleneck), vit.width * num
        return {
            "name": task.name,
            **self.costs(),
            "params_added_percent": 100 * own_params / backbone_params(vit),
            "params_learned": own_params + head_params,
            "params_stored": own_params + head_params + sum(leaf.size for leaf in gaussians[-1]),
            "losses": fitting.state.losses,
            "alignment_losses": losses,
            "skipped_steps": fitting.state.skipped,
            "seconds": clock.seconds,
        }

    def costs(self) -> dict[str, int]:
        """FLOPs of one image once the whole stream is learned: a pass per task and one of the universal adapter.

        The paper counts neither adapters nor heads.
        """
        vit, rank = self.executor.config, self.config.bottleneck
        num_classes, passes = int(self.classes.first[-1]), num_passes(max(self.num_tasks, len(self.bank)))
        plain, attended = backbone_flops(vit), backbone_flops(vit, count_attention=True)
        ran = executed_backbone_flops(vit) + executed_adapter_flops(vit, rank) + 2 * vit.width * num_classes
        return {
            "flops_method": passes * plain,
            "flops_explicit": passes * (attended + adapter_flops(vit, rank)),
            "flops_executed": passes * ran,
        }

    def begin(self, key: jax.Array) -> Adapters:
        """The adapters with which the stream begins."""
        return init_adapters(key, self.executor.config, self.config.bottleneck)

    def features(self, adapters: Adapters, images: Images, advance: Advance | None = None) -> Float[np.ndarray, "N D"]:
        """Features of any images in the network with these adapters."""

        def run(read: dict[str, Any]) -> jax.Array:
            return self._features(adapters, self.executor.leaves, read["images"])

        return over_batches(
            run,
            Inputs(images),
            len(images),
            batch_size=self.config.batch_size,
            advance=advance,
            layout=self.executor.layout,
        )

    @property
    def num_samples(self) -> int:
        """Features that the alignment draws of a class in each pass, and takes in a step."""
        return self.config.alignment_samples * self.config.batch_size

    def aligned(
        self, head: Head, gaussians: Sequence[Gaussians], index: int, advance: Advance
    ) -> tuple[Head, list[float]]:
        """The head, trained on features drawn from the Gaussians of all classes, and the mean loss of each pass."""
        config, keys, size = self.config, self.keys, self.num_samples
        means = np.concatenate([some.means for some in gaussians])
        spreads = np.concatenate([some.spreads for some in gaussians])
        labels = np.repeat(np.arange(len(means), dtype=np.int32), size)
        weight, losses = jnp.copy(head.weight), []
        moments = self._aligner.init(weight)
        for epoch in range(config.alignment_epochs):
            drawn = np.concatenate([
                np.asarray(self._draw(keys.at(index, Phase.ALIGNMENT, epoch, c), means[c], spreads[c], size))
                for c in range(len(means))
            ])  # fmt: skip
            order = order_at(keys.at(index, Phase.ALIGNMENT_ORDER, epoch), len(labels)).reshape(-1, size)
            rate = config.alignment_rate * 0.5 * (1 + math.cos(math.pi * epoch / ALIGNMENT_PERIOD))
            running = []
            for rows in order:
                weight, moments, loss = self._align(
                    weight, moments, np.float32(rate), drawn[rows], labels[rows], np.int32(len(means))
                )
                running.append(loss)
                advance(size)
            losses.append(float(np.mean(jax.device_get(running))))
            if not math.isfinite(losses[-1]):
                raise FloatingPointError(
                    f"tuna: the alignment's loss became no finite number in epoch {epoch + 1}; try an alignment_rate "
                    f"below {config.alignment_rate}"
                )
        return cosine_head(weight), losses

    def _old_rows(self) -> Float[np.ndarray, "T L r"]:
        """Mean unit rows of the kept adapters' up halves; zero, which overlaps with nothing, for tasks to come."""
        rows = np.zeros((max(self.num_tasks, len(self.bank)), self.executor.config.depth, self.config.bottleneck))
        for place, adapters in enumerate(self.bank if self.config.orthogonality else ()):
            rows[place] = mean_rows(adapters)
        return rows.astype(np.float32)

    def bytes_needed(self, task: Task) -> int:
        """Adapters, all heads and the task's Gaussians; in a rolling checkpoint and its successor both moments."""
        vit, num = self.executor.config, len(task.classes)
        spread = vit.width if self.config.statistics == "covariance" else 1
        head = vit.width * 2 * (int(self.classes.first[-1]) + num)
        learned = adapter_params(vit, self.config.bottleneck) + head
        return 4 * (learned + num * vit.width * (1 + spread) + 2 * 3 * learned)

    def scores(self, images: Images) -> tuple[Float[np.ndarray, "N P"], Int[np.ndarray, "N"]]:
        """Summed probabilities of all classes for each image, and the task whose adapter was the most certain."""
        assert self.head is not None
        head, leaves, num = self.head, self.executor.leaves, np.int32(self.classes.first[-1])
        universal = None
        if len(self.bank) > 1:
            universal = merge(self.bank) if self.config.universal == "merged" else self.bank[-1]
            universal = jax.tree.map(jnp.asarray, universal)

        def run(read: dict[str, Any]):
            found = hosts.fetch([self._answer(adapters, head, leaves, read["images"], num) for adapters in self.bank])
            beside = None if universal is None else self._answer(universal, head, leaves, read["images"], num)[0]
            probabilities, entropies = (np.stack(parts) for parts in zip(*found, strict=True))
            total, chosen = most_certain(probabilities, entropies)
            return total if beside is None else total + hosts.fetch(beside), chosen

        return over_batches(
            run, Inputs(images), len(images), batch_size=self.config.batch_size, layout=self.executor.layout
        )

    def predict(self, images: np.ndarray, tasks: Int[np.ndarray, "N"] | None = None) -> Inferred:
        """See `Method.predict`."""
        check_given(self.name, len(self.bank), tasks)
        return self.classes.inferred(self.scores(images)[0], tasks)

    def answers(self, index: int, task: Task) -> Answers:
        """See `Method.answers`."""
        return self.classes.answers(self.scores(task.test.images)[0], index)

    def save(self, root: Path) -> None:
        """Save the last task's adapters and Gaussians and all heads, and go on with what is read back."""
        assert self.head is not None
        arrays = {
            "adapters": self.bank[-1]._asdict(),
            "gaussians": self.gaussians[-1]._asdict(),
            "head": np.asarray(self.head.weight)[:, : self.classes.first[-1]],
        }
        name, classes = self.classes.names[-1], list(self.classes.classes[-1])
        directory = task_directory(root, len(self.bank) - 1, name)
        save_task(directory, arrays, {"name": name, "classes": classes})
        self.bank.pop()
        self.gaussians.pop()
        self._restore(directory, load_task(directory)[0])

    def open(self, root: Path) -> None:
        """Replace the state by what is saved."""
        self.bank, self.gaussians, self.head, self.classes = [], [], None, Classes()
        directories = saved_tasks(root)
        for directory, (arrays, meta) in zip(directories, load_tasks(directories), strict=True):
            with named(directory):
                self.classes.add(meta["name"], meta["classes"])
            self._restore(directory, arrays)

    def _restore(self, directory: Path, arrays: Mapping[str, Any]) -> None:
        with named(directory):
            self.bank.append(Adapters(**{name: jnp.asarray(part) for name, part in arrays["adapters"].items()}))
            self.gaussians.append(Gaussians(**arrays["gaussians"]))
            self.head = padded(cosine_head(arrays["head"]))


def num_passes(num_tasks: int) -> int:
    """Passes through the backbone that an image needs: one per task and the universal one, which the first is alone."""
    return num_tasks + 1 if num_tasks > 1 else 1


def merge(bank: Sequence[Adapters]) -> Adapters:
    """The universal adapter: each number has the sign of its mean over tasks, and the largest size under that sign."""
    return jax.tree.map(lambda *parts: _merged(np.stack([np.asarray(part) for part in parts])), *bank)


def _merged(tasks: Float[np.ndarray, "T *S"]) -> Float[np.ndarray, "*S"]:
    sign = np.where(tasks.mean(axis=0) > 0, 1, -1).astype(tasks.dtype)
    return sign * np.where(np.sign(tasks) == sign, np.abs(tasks), 0).max(axis=0)


def most_certain(
    probabilities: Float[np.ndarray, "T N P"], entropies: Float[np.ndarray, "T N"]
) -> tuple[Float[np.ndarray, "N P"], Int[np.ndarray, "N"]]:
    """For each image the probabilities with the lowest entropy, and whose they are (ties: the earliest task's)."""
    chosen = entropies.argmin(axis=0)
    return probabilities[chosen, np.arange(len(chosen))], chosen


def mean_rows(adapters: Adapters) -> Float[jax.Array, "L r"]:
    """Mean over the D rows of each block's up half, every row scaled to unit length."""
    return unit(adapters.up, axis=1).mean(axis=2)


def overlap(rows: Float[jax.Array, "L r"], old: Float[jax.Array, "T L r"]) -> Float[jax.Array, ""]:
    """How much up halves have in common, summed over old tasks and averaged over blocks.

    The mean of all D x D products of unit rows is the product of the two mean rows.
    """
    return jnp.abs((rows * old).sum(axis=-1)).mean(axis=-1).sum()


def gaussians_of(
    features: Float[np.ndarray, "N D"], labels: Int[np.ndarray, "N"], num: int, kind: str
) -> Gaussians:  # fmt: skip
    """A Gaussian per class; that of a single image has no spread but the jitter."""
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
