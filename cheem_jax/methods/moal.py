"""MoAL: adapters that move slowly, and a head over random features in closed form, exact for all images ever seen.

Adapters beside every FFN train through the stream with an auxiliary cosine head; from the second task on a moving
average replaces them. The head that answers is ridge regression on a random projection, carried on by recursive least
squares. Means of old classes follow the drift of the features, and "rumination" shifts new features to old means and
learns again what the head gets wrong. Gao et al., "Knowledge Memorization and Rumination for Pre-trained Model-based
Class-Incremental Learning", CVPR 2025.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import scipy.linalg
from jaxtyping import Float, Int

from cheem_jax.checkpoint import load_task, named, save_task, saved_tasks, task_directory
from cheem_jax.data.task import Task
from cheem_jax.execution.batches import num_batches
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
)
from cheem_jax.methods.fitting import Batch, Fitter, Inputs, left, numbered, over_batches, unnumbered
from cheem_jax.methods.heads import Classes, local_cross_entropy, padded, saved_classes
from cheem_jax.methods.method import Answers, Clock, FrozenFeatures, Running, check_given
from cheem_jax.pool import Head
from cheem_jax.rolling import Saved
from cheem_jax.training import FitConfig, check_batch_size

RIDGES = tuple(10.0**power for power in range(-8, 9))
"""Penalties of the first task's ridge regression to choose from."""
DRIFT_PENALTIES = tuple(10.0**power for power in range(-6, 3))
"""What the linear map of the drift pays for differing from the identity, relative to the features' mean square."""
MUCH_MEMORY = 4 * 2**30
"""Bytes of the analytic head from which on `check` speaks of them."""


@dataclasses.dataclass(frozen=True)
class MoalConfig:
    """MoAL with the paper's comparison's optimizer; options name what the official code does."""

    name: ClassVar[str] = "moal"
    bottleneck: int = 64
    """Rank of an adapter."""
    scale: float = 0.1
    """Factor of what adapters give."""
    dropout: float = 0.1
    """Share of an adapter's hidden values that a training step leaves out."""
    hidden: int = 5000
    """Random features of the head that answers (official: 5000 to 20000); its memory grows with the square."""
    first_scale: float = 0.9
    """Factor of that head's weight after the first task; with 1 it is the exact ridge regression."""
    ema: float = 0.999
    """What is left of the averaged adapters at the end of each epoch, from the second task on."""
    compensate: bool = True
    """Let means of old classes follow the features' drift, by a linear map fitted on the new task's images."""
    ruminate: bool = True
    """Learn again what the head gets wrong of the new features and of those shifted to old classes' means."""
    analytic_batch: int = 512
    """Images per step of recursive least squares; rumination looks for wrong answers before each."""
    aux_init: Literal["small", "zeros"] = "small"
    """Start of the auxiliary head's new columns after the first task; at zero, as in the official code, the first step
    fixes their directions."""
    optimizer: Optimizer = "adam"
    """Adam, or the official code's SGD with momentum 0.9 and weight decay 5e-4 (at a rate of 0.01)."""
    fit: FitConfig = FitConfig(epochs=20)
    batch_size: int = 64

    def __post_init__(self) -> None:
        check_batch_size(self.batch_size)
        check_adapters(self)
        for name in ("hidden", "analytic_batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; expected at least 1")
        if not 0 < self.first_scale <= 1:
            raise ValueError(f"first_scale is {self.first_scale}; expected a factor above 0, at most 1 (exact)")
        if not 0 <= self.ema <= 1:
            raise ValueError(f"ema is {self.ema}; expected 0 (no average) to 1 (adapters stay as they are)")


class Analytic(NamedTuple):
    """The head that answers, in float64 on the host: logits are `weight` times random features.

    `inverse` is that of the random features' second moments plus the ridge penalty, over all images learned.
    """

    inverse: Float[np.ndarray, "H H"]
    weight: Float[np.ndarray, "H C"]


class Known(NamedTuple):
    """What MoAL keeps between tasks."""

    adapters: Adapters
    auxiliary: Head
    sigma: jax.Array
    projection: Float[np.ndarray, "H D"]
    analytic: Analytic
    means: Float[np.ndarray, "C D"]


class Moal:
    """See the module."""

    name = "moal"

    def __init__(self, executor: Executor, features: FrozenFeatures, config: MoalConfig, keys: Keys, num_tasks: int):
        self.executor, self.config, self.keys = executor, config, keys
        self.known: Known | None = None
        self.classes = Classes()

        def features_of(adapters, leaves, images, key=None):
            return adapted_features(executor.vit_of(leaves), adapters, images, config, key)

        def loss(learned, fixed, batch: Batch):
            (adapters, head, sigma), (leaves, num) = learned, fixed
            near = cosines(features_of(adapters, leaves, batch.inputs["images"], batch.key), head.weight)
            return local_cross_entropy(sigma * near, batch.labels, batch.weights, 0, num)

        @executor.jit
        def average(old, new):
            return jax.tree.map(lambda a, b: config.ema * a + (1 - config.ema) * b, old, new)

        self._fitter = Fitter(loss, directions(config.optimizer), jit=executor.jit, layout=executor.layout)
        self._features, self._average = executor.jit(features_of), average

    def check(self, tasks: Sequence[Task]) -> list[str]:
        """See `Method.check`."""
        hidden, num_classes = self.config.hidden, sum(len(task.classes) for task in tasks)
        # kept, updated, and what a step subtracts
        needed = 8 * hidden * (3 * hidden + 2 * num_classes)
        if needed <= MUCH_MEMORY:
            return []
        return [f"{hidden} random features take up to {needed / 2**30:.1f} GiB of memory on the host"]

    def learn(self, task: Task, running: Running) -> dict[str, Any]:
        """Train adapters and auxiliary head, average them, then carry the analytic head on."""
        config, keys, index, num = self.config, self.keys, len(self.classes), len(task.classes)
        seen, vit, num_images = int(self.classes.first[-1]), self.executor.config, len(task.train.labels)
        clock, known = Clock(running.saved.meta["seconds"] if running.saved else None), self.known
        begun = self._begin(known, index, seen, num)
        fitting = self._fitter.begun(begun, running.saved)
        averaged = [begun[0]]
        if running.saved and "averaged" in running.saved.arrays:
            averaged[0] = unnumbered(begun[0], running.saved.arrays["averaged"])

        def state() -> Saved:
            arrays = {**fitting.arrays(), "averaged": numbered(averaged[0])}
            return Saved(arrays, {**fitting.meta(), "seconds": clock.so_far()})

        labels = task.train.labels + np.int32(seen)
        total = left(fitting, config.fit, num_images, config.batch_size)
        with clock("train"), running.phase("train", total, state) as advance:
            steps = num_batches(num_images, config.batch_size)

            def at_epochs_end(num_images: int, note: str = "", /) -> None:
                # before anything is kept of this step
                if known is not None and fitting.state.step % steps == 0:
                    averaged[0] = self._average(averaged[0], fitting.learned[0])
                advance(num_images, note)

            self._fitter.run(
                fitting, (self.executor.leaves, np.int32(seen + num)), labels, Inputs(task.train.images), config.fit,
                batch_size=config.batch_size, order_key=keys.at(index, Phase.METHOD_ORDER),
                noise_key=keys.at(index, Phase.METHOD_NOISE), advance=at_epochs_end,
            )  # fmt: skip
        adapters, auxiliary, sigma = fitting.learned
        adapters = adapters if known is None else averaged[0]
        told: dict[str, Any] = {}
        with clock("features"), running.phase("features", num_images * (2 if known else 1), state) as advance:
            new = self.features(adapters, task.train.images, advance)
            old = self.features(known.adapters, task.train.images, advance) if known else new
        own_means = class_means(new, task.train.labels, num)
        with clock("head"):
            if known is None:
                projection = _projection(keys.at(index, Phase.METHOD_INIT, 2), config.hidden, vit.width)
                with running.phase("head", num_images, state) as advance:
                    analytic, told["ridge"] = self._first_head(projection, new, labels, num, advance)
                means = own_means
            else:
                projection, means = known.projection, known.means
                if config.compensate:
                    order = order_at(keys.at(index, Phase.ALIGNMENT_ORDER, 2), num_images)
                    means = (means @ drift_map(old[order], new[order])).astype(np.float32)
                means = np.concatenate([means, own_means])
                analytic, told = self._next_head(known, new, labels, means, index, running, state)
        self.known = Known(adapters, auxiliary, sigma, projection, analytic, means)
        self.classes.add(task.name, task.classes)
        own_params, hidden, begins = adapter_params(vit, config.bottleneck), config.hidden, known is None
        return {
            "name": task.name,
            **self.costs(),
            **told,
            "params_added_percent": 100 * own_params / backbone_params(vit) if begins else 0.0,
            "params_learned": own_params + 1 + (vit.width + hidden) * (seen + num),
            "params_stored": (own_params + 1 + hidden * (vit.width + hidden) if begins else 0)
            + (2 * vit.width + hidden) * num,
            "losses": fitting.state.losses,
            "skipped_steps": fitting.state.skipped,
            "seconds": clock.seconds,
        }

    def costs(self) -> dict[str, int]:
        """FLOPs of one image; the paper counts one plain pass, neither adapters nor head."""
        vit, config = self.executor.config, self.config
        head = 2 * config.hidden * (vit.width + int(self.classes.first[-1]))
        return {
            "flops_method": backbone_flops(vit),
            "flops_explicit": backbone_flops(vit, count_attention=True) + adapter_flops(vit, config.bottleneck) + head,
            "flops_executed": executed_backbone_flops(vit) + executed_adapter_flops(vit, config.bottleneck) + head,
        }

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

    def _begin(self, known: Known | None, index: int, seen: int, num: int) -> tuple[Adapters, Head, jax.Array]:
        """What training begins with: all that is there, and columns for new classes."""
        vit, config, keys = self.executor.config, self.config, self.keys
        key = keys.at(index, Phase.METHOD_INIT, 1)
        if known is None:
            adapters = init_adapters(keys.at(index, Phase.METHOD_INIT, 0), vit, config.bottleneck)
            return adapters, grow_weight(key, None, vit.width, 0, num), jnp.ones(())
        head = grow_weight(key, known.auxiliary.weight, vit.width, seen, num)
        if config.aux_init == "zeros":
            weight = np.array(head.weight)
            weight[:, seen:] = 0
            head = cosine_head(weight)
        return known.adapters, head, known.sigma

    def _first_head(
        self, projection: np.ndarray, features: np.ndarray, labels: np.ndarray, num: int, advance: Advance
    ) -> tuple[Analytic, float]:
        """Ridge regression; its penalty is chosen on the last fifth of the shuffled training images."""
        config, num_images = self.config, len(features)
        order = order_at(self.keys.at(0, Phase.ALIGNMENT_ORDER, 0), num_images)
        cut = max(1, num_images * 4 // 5)
        held = order[cut:] if cut < num_images else order

        def rows(order: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
            for part in _parts(order, config.analytic_batch):
                yield lift(features[part], projection), one_hot(labels[part], num)

        moments, products = second_moments(rows(order[:cut]))
        penalty = best_ridge(moments, products, functools.partial(rows, held))
        if cut < num_images:
            more_moments, more_products = second_moments(rows(held))
            moments, products = moments + more_moments, products + more_products
        inverse, penalty = ridge_inverse(moments, penalty)
        advance(num_images)
        return Analytic(inverse, config.first_scale * (inverse @ products)), penalty

    def _next_head(
        self, known: Known, features: np.ndarray, labels: np.ndarray, means: np.ndarray, index: int,
        running: Running, state: Callable[[], Saved],
    ) -> tuple[Analytic, dict[str, Any]]:  # fmt: skip
        """Recursive least squares on the new features, then rumination; and how much that learned again."""
        config, seen, num = self.config, known.analytic.weight.shape[1], len(means)
        # copies: what is known stays as it is until the task is learned
        weight = np.concatenate([known.analytic.weight, np.zeros((config.hidden, num - seen))], axis=1)
        analytic = Analytic(known.analytic.inverse.copy(), weight)
        sources, classes, again, wrong = np.arange(len(labels)), labels, 0, 0
        if config.ruminate:
            sources, classes = shifted_sources(labels, means, seen)
            again = len(sources)
        shifts = np.zeros_like(means)
        shifts[:seen] = means[:seen] - means[nearest_new(means, seen)]
        with running.phase("head", len(labels) + again, state) as advance:
            for part in _parts(np.arange(len(labels)), config.analytic_batch):
                least_squares(analytic, lift(features[part], known.projection), one_hot(labels[part], num))
                advance(len(part))
            order = order_at(self.keys.at(index, Phase.ALIGNMENT_ORDER, 1), again) if again else np.arange(0)
            for part in _parts(order, config.analytic_batch):
                own = classes[part]
                lifted = lift(features[sources[part]] + shifts[own], known.projection)
                missed = (lifted @ analytic.weight).argmax(axis=1) != own
                if missed.any():
                    least_squares(analytic, lifted[missed], one_hot(own[missed], num))
                wrong += int(missed.sum())
                advance(len(part))
        inverse = (analytic.inverse + analytic.inverse.T) / 2
        return Analytic(inverse, analytic.weight), {"ruminated": again, "ruminated_wrong": wrong}

    def bytes_needed(self, task: Task) -> int:
        """All that is kept; in a rolling checkpoint and its successor what is trained, both moments and the average."""
        vit, config = self.executor.config, self.config
        num, adapters = int(self.classes.first[-1]) + len(task.classes), adapter_params(vit, config.bottleneck)
        kept = 4 * (adapters + 2 * vit.width * num + config.hidden * vit.width) + 8 * config.hidden * (
            config.hidden + num
        )
        return kept + 4 * 2 * (4 * adapters + 3 * 2 * vit.width * num)

    def logits(self, images: Images) -> Float[np.ndarray, "N C"]:
        """The analytic head's answers for all classes."""
        assert self.known is not None
        features, known = self.features(self.known.adapters, images), self.known
        parts = _parts(np.arange(len(features)), self.config.analytic_batch)
        return np.concatenate([lift(features[part], known.projection) @ known.analytic.weight for part in parts])

    def predict(self, images: np.ndarray, tasks: Int[np.ndarray, "N"] | None = None) -> Inferred:
        """See `Method.predict`."""
        check_given(self.name, len(self.classes), tasks)
        return self.classes.inferred(self.logits(images), tasks)

    def answers(self, index: int, task: Task) -> Answers:
        """See `Method.answers`."""
        return self.classes.answers(self.logits(task.test.images), index)

    def save(self, root: Path) -> None:
        """Save everything, as every task changes it, and go on with what is read back."""
        assert self.known is not None
        known, num = self.known, int(self.classes.first[-1])
        arrays = {
            "adapters": known.adapters._asdict(),
            "auxiliary": np.asarray(known.auxiliary.weight)[:, :num],
            "sigma": known.sigma,
            "projection": known.projection,
            "analytic": known.analytic._asdict(),
            "means": known.means,
        }
        name, classes = self.classes.names[-1], list(self.classes.classes[-1])
        directory = task_directory(root, len(self.classes) - 1, name)
        save_task(directory, arrays, {"name": name, "classes": classes})
        self._restore(directory, load_task(directory)[0])

    def open(self, root: Path) -> None:
        """Replace the state by what the last task saved; of earlier ones only the classes count."""
        directories = saved_tasks(root)
        self.known, self.classes = None, saved_classes(directories)
        if directories:
            self._restore(directories[-1], load_task(directories[-1])[0])

    def _restore(self, directory: Path, arrays: Mapping[str, Any]) -> None:
        with named(directory):
            adapters = Adapters(**{name: jnp.asarray(part) for name, part in arrays["adapters"].items()})
            analytic = Analytic(**arrays["analytic"])
            if analytic.inverse.dtype != np.float64:
                raise ValueError(f"the analytic head is {analytic.inverse.dtype}, expected float64")
            self.known = Known(
                adapters, padded(cosine_head(arrays["auxiliary"])), jnp.asarray(arrays["sigma"]),
                arrays["projection"], analytic, arrays["means"],
            )  # fmt: skip


def _projection(key: jax.Array, hidden: int, width: int) -> Float[np.ndarray, "H D"]:
    bound = width**-0.5
    return np.asarray(jax.random.uniform(key, (hidden, width), minval=-bound, maxval=bound))


def _parts(order: np.ndarray, size: int) -> Iterator[np.ndarray]:
    return (order[start : start + size] for start in range(0, len(order), size))


def lift(features: Float[np.ndarray, "N D"], projection: Float[np.ndarray, "H D"]) -> Float[np.ndarray, "N H"]:
    """Random features in float64."""
    return np.maximum(features.astype(np.float64) @ projection.T.astype(np.float64), 0)


def one_hot(labels: Int[np.ndarray, "N"], num: int) -> Float[np.ndarray, "N C"]:
    """Targets of the analytic head."""
    return np.eye(num)[labels]


def class_means(
    features: Float[np.ndarray, "N D"], labels: Int[np.ndarray, "N"], num: int
) -> Float[np.ndarray, "C D"]:  # fmt: skip
    """Mean feature of each class."""
    return np.stack([features[labels == c].mean(axis=0, dtype=np.float64) for c in range(num)]).astype(np.float32)


Rows = Iterator[tuple[np.ndarray, np.ndarray]]
"""Random features and their targets, part by part."""


def second_moments(rows: Rows) -> tuple[Float[np.ndarray, "H H"], Float[np.ndarray, "H C"]]:
    """Sums of products of random features with each other, and with the targets."""
    moments, products = 0.0, 0.0
    for lifted, targets in rows:
        moments, products = moments + lifted.T @ lifted, products + lifted.T @ targets
    return np.asarray(moments), np.asarray(products)


def best_ridge(
    moments: Float[np.ndarray, "H H"], products: Float[np.ndarray, "H C"], held: Callable[[], Rows]
) -> float:  # fmt: skip
    """The penalty with the smallest squared error on held-out images (ties: the larger one)."""
    errors = {}
    for penalty in RIDGES:
        try:
            weight = scipy.linalg.cho_solve(_factor(moments, penalty), products)
        except np.linalg.LinAlgError:
            continue  # too small for what float64 can tell apart
        errors[penalty] = sum(float(((lifted @ weight - targets) ** 2).sum()) for lifted, targets in held())
    return min(errors, key=lambda penalty: (errors[penalty], -penalty))


def ridge_inverse(moments: Float[np.ndarray, "H H"], penalty: float) -> tuple[Float[np.ndarray, "H H"], float]:
    """The inverse of the moments plus a penalty, tenfold as long as float64 cannot tell them from a singular matrix."""
    while True:
        try:
            factor = _factor(moments, penalty)
        except np.linalg.LinAlgError:
            penalty *= 10
            continue
        inverse = scipy.linalg.cho_solve(factor, np.eye(len(moments)))
        return (inverse + inverse.T) / 2, penalty


def _factor(moments: np.ndarray, penalty: float) -> tuple[np.ndarray, bool]:
    return scipy.linalg.cho_factor(moments + penalty * np.eye(len(moments)))


def least_squares(
    analytic: Analytic, lifted: Float[np.ndarray, "N H"], targets: Float[np.ndarray, "N C"]
) -> None:  # fmt: skip
    """One step of recursive least squares, in place: as if these images had been in the regression from the start."""
    inverse, weight = analytic
    gain = lifted @ inverse  # [N, H]
    lower = np.linalg.cholesky(np.eye(len(lifted)) + gain @ lifted.T)
    half = scipy.linalg.solve_triangular(lower, gain, lower=True)
    residual = scipy.linalg.solve_triangular(lower, targets - lifted @ weight, lower=True)
    inverse -= half.T @ half  # symmetric in every bit, and never an increase
    weight += half.T @ residual


def drift_map(old: Float[np.ndarray, "N D"], new: Float[np.ndarray, "N D"]) -> Float[np.ndarray, "D D"]:
    """A linear map from old features of (shuffled) images to their new ones.

    Least squares with a penalty on what differs from the identity, chosen on the last tenth: a few images in many
    dimensions say little, and features drift little.
    """
    old, moved = old.astype(np.float64), new.astype(np.float64) - old
    num, width = old.shape
    cut = num * 9 // 10
    if not 0 < cut < num:
        return np.eye(width)

    def fitted(rows: slice, penalty: float) -> np.ndarray:
        squares = old[rows].T @ old[rows]
        strength = penalty * np.trace(squares) / width
        return scipy.linalg.solve(squares + strength * np.eye(width), old[rows].T @ moved[rows], assume_a="pos")

    if not old.any():
        return np.eye(width)

    def error(penalty: float) -> float:
        return float(((old[cut:] @ fitted(slice(cut), penalty) - moved[cut:]) ** 2).sum())

    best = min(DRIFT_PENALTIES, key=lambda penalty: (error(penalty), -penalty))
    return np.eye(width) + fitted(slice(None), best)


def nearest_new(means: Float[np.ndarray, "C D"], seen: int) -> Int[np.ndarray, "S"]:
    """For each of the `seen` old classes the new one whose mean is the most similar by cosine."""
    points = means / np.maximum(np.linalg.norm(means, axis=1, keepdims=True), 1e-12)
    return seen + (points[:seen] @ points[seen:].T).argmax(axis=1)


def shifted_sources(
    labels: Int[np.ndarray, "N"], means: Float[np.ndarray, "C D"], seen: int
) -> tuple[Int[np.ndarray, "M"], Int[np.ndarray, "M"]]:
    """Images that rumination looks at, and the class each stands for: its own, or the old ones nearest to its own."""
    images = {new: np.flatnonzero(labels == new) for new in range(seen, len(means))}
    taken = [images[new] for new in nearest_new(means, seen)]
    classes = np.repeat(np.arange(seen), [len(rows) for rows in taken])
    return np.concatenate([np.arange(len(labels)), *taken]), np.concatenate([labels, classes]).astype(np.int32)
