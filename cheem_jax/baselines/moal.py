"""MoAL: adapters that move slowly, and a head over random features in closed form, exact for all
images ever seen.

Adapters parallel to every FFN train through the stream with an auxiliary cosine head; from the
second task on a moving average replaces them. The predicting head is ridge regression on a random
projection, updated by recursive least squares. Means of old classes follow the drift of the
features, and "rumination" shifts new features to old means and repeats the update for those that
the head gets wrong. Gao et al., "Knowledge Memorization and Rumination for Pre-trained Model-based
Class-Incremental Learning", CVPR 2025.
"""

import dataclasses
import enum
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import scipy.linalg
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
)
from cheem_jax.baselines.baseline import MUCH_MEMORY, at_least_one, expect, params_report
from cheem_jax.baselines.fitting import FitBatch, Fitter, Fitting, Init, numbered, unnumbered
from cheem_jax.baselines.heads import local_cross_entropy
from cheem_jax.core.images import Images
from cheem_jax.core.keys import Phase, order_at
from cheem_jax.core.routing import normalise
from cheem_jax.data.task import Task

RIDGES = tuple(10.0**power for power in range(-8, 9))
"""Penalties of the first task's ridge regression to select from."""
DRIFT_PENALTIES = tuple(10.0**power for power in range(-6, 3))
"""Penalties on the drift map's distance from the identity, relative to the features' mean
square."""


class Order(enum.IntEnum):
    """What `Phase.ALIGNMENT_ORDER` shuffles; the number is part of the key, so members are only
    ever appended."""

    RIDGE = 0
    """The first task's images, before the held-out fifth is cut off."""
    RUMINATION = 1
    DRIFT = 2
    """The new task's images, before the held-out tenth is cut off."""


@dataclasses.dataclass(frozen=True)
class MoalConfig(AdapterConfig):
    """MoAL with the optimizer of the paper's comparison; options name what the official code
    does."""

    name: ClassVar[str] = "moal"
    hidden: int = 5000
    """Random features of the predicting head (official: 5000 to 20000); its memory grows with their
    square."""
    first_scale: float = 0.9
    """Factor of that head's weight after the first task; with 1 it is the exact ridge
    regression."""
    ema: float = 0.999
    """Share of the averaged adapters that each epoch keeps, from the second task on."""
    compensate: bool = True
    """Let means of old classes follow the features' drift, by a linear map fitted on the new task's
    images."""
    ruminate: bool = True
    """Repeat the update for new features, and for those shifted to old classes' means, that the
    head gets wrong."""
    analytic_batch: int = 512
    """Images per step of recursive least squares; rumination looks for wrong predictions before
    each."""
    aux_init: Literal["small", "zeros"] = "small"
    """Start of the auxiliary head's new columns after the first task; at zero, as in the official
    code, the first step fixes their directions."""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least_one(self, "hidden", "analytic_batch")
        expect(
            self, "first_scale", 0 < self.first_scale <= 1, "a factor above 0, at most 1 (exact)"
        )
        expect(self, "ema", 0 <= self.ema <= 1, "0 (no average) to 1 (adapters stay as they are)")


class Analytic(NamedTuple):
    """The predicting head, in float64 on the host: logits are random features times `weight`.

    `inverse` is that of the random features' second moments plus the ridge penalty, over all images
    learned.
    """

    inverse: Float[np.ndarray, "H H"]
    weight: Float[np.ndarray, "H C"]


class MoalState(NamedTuple):
    """What MoAL stores between tasks."""

    adapters: Bottleneck
    auxiliary: Float[np.ndarray, "D C"]
    """The weight of the auxiliary cosine head."""
    sigma: jax.Array
    projection: Float[np.ndarray, "H D"]
    analytic: Analytic
    means: Float[np.ndarray, "C D"]


class Moal(AdapterBaseline):
    """See the module."""

    State = MoalState
    config: MoalConfig

    def build(self) -> None:
        super().build()
        executor, config = self.executor, self.config

        def loss(learned, fixed, batch: FitBatch):
            (adapters, weight, sigma), (leaves, seen, num) = learned, fixed
            vit = executor.vit_of(leaves)
            images = batch.inputs["images"]
            near = cosines(adapted_features(vit, adapters, images, config, batch.key), weight)
            # sigma is a learned scale: cosines alone are too small for a softmax
            return local_cross_entropy(sigma * near, batch.labels + seen, batch.weights, 0, num)

        @executor.jit
        def average(old, new):
            return jax.tree.map(lambda a, b: config.ema * a + (1 - config.ema) * b, old, new)

        self.fitter = Fitter(
            loss, directions(config.optimizer), jit=executor.jit, layout=executor.layout
        )
        self._average = average

    def check(self, tasks: Sequence[Task]) -> list[str]:
        hidden = self.config.hidden
        num_classes = sum(len(task.classes) for task in tasks)
        # three inverses: the stored one, the updated one, and what a step subtracts
        needed = 8 * hidden * (3 * hidden + 2 * num_classes)
        if needed <= MUCH_MEMORY:
            return []
        return [
            f"{hidden} random features take up to {needed / 2**30:.1f} GiB of memory on the host"
        ]

    def learn_task(self, task: Task, fitting: Fitting) -> dict[str, Any]:
        """Train adapters and auxiliary head, average them, then update the analytic head."""
        config = self.config
        known = self.known
        seen = self.classes.num
        num = len(task.classes)
        vit = self.executor.config
        images = task.train.images
        num_images = len(task.train.labels)
        fixed = (self.executor.leaves, np.int32(seen), np.int32(seen + num))
        self.train(fitting, task, fixed, after_epoch=self.after_epoch)
        adapters, auxiliary, sigma = fitting.learned
        if known:
            adapters = unnumbered(adapters, fitting.more["averaged"])
        with fitting.phase("features", num_images * (2 if known else 1)) as advance:
            new = self.features_with(adapters, images, advance)
            old = self.features_with(known.adapters, images, advance) if known else new
        labels = task.train.labels
        more = {}
        means = np.stack(
            [new[labels == c].mean(axis=0, dtype=np.float64) for c in range(num)]
        ).astype(np.float32)
        with fitting.session.phase("head"):
            if known:
                projection, old_means = known.projection, known.means
                if config.compensate:
                    order = order_at(self.key(task, Phase.ALIGNMENT_ORDER, Order.DRIFT), num_images)
                    old_means = (old_means @ drift_map(old[order], new[order])).astype(np.float32)
                means = np.concatenate([old_means, means])
                analytic, more = self._next_head(task, new, means, fitting)
            else:
                key = self.key(task, Phase.METHOD_INIT, Init.EXTRA)
                bound = vit.width**-0.5
                shape = (config.hidden, vit.width)
                projection = np.asarray(jax.random.uniform(key, shape, minval=-bound, maxval=bound))
                with fitting.session.phase("head", num_images, fitting.saved) as advance:
                    analytic, more["ridge"] = self._first_head(projection, new, task)
                    advance(num_images)
        auxiliary = np.asarray(auxiliary)[:, : seen + num]
        self.known = MoalState(adapters, auxiliary, sigma, projection, analytic, means)
        hidden = config.hidden
        width = vit.width
        added = adapter_params(vit, config.bottleneck)
        stored = (0 if known else added + 1 + hidden * (width + hidden)) + (
            2 * width + hidden
        ) * num
        learned = added + 1 + (width + hidden) * (seen + num)
        return {
            **more,
            **params_report(vit, added=0 if known else added, learned=learned, stored=stored),
        }

    def after_epoch(self, fitting: Fitting) -> None:
        """From the second task on: move the average of the adapters, which starts at those of the
        task before."""
        if self.known:
            before = self.known.adapters
            if "averaged" in fitting.more:
                before = unnumbered(before, fitting.more["averaged"])
            fitting.more["averaged"] = numbered(self._average(before, fitting.learned[0]))

    def costs(self) -> dict[str, int]:
        """FLOPs per image; the paper counts one plain pass, neither adapters nor head."""
        width = self.executor.config.width
        hidden = self.config.hidden
        return self.adapted_costs(0, head=2 * hidden * (width + self.classes.num))

    def start(self, task: Task) -> tuple[Bottleneck, jax.Array, jax.Array]:
        """Adapters, the auxiliary head with columns for the new classes, and its scale."""
        columns = self.new_columns(task)
        known = self.known
        if not known:
            return self.new_adapters(task), padded_columns(columns), jnp.ones(())
        if self.config.aux_init == "zeros":
            columns = np.zeros_like(columns)
        columns = np.concatenate([known.auxiliary, columns], axis=1)
        return known.adapters, padded_columns(columns), jnp.asarray(known.sigma)

    def _first_head(
        self, projection: np.ndarray, features: np.ndarray, task: Task
    ) -> tuple[Analytic, float]:
        """Ridge regression, and its penalty, which is selected on the last fifth of the shuffled
        training images."""
        order = order_at(self.key(task, Phase.ALIGNMENT_ORDER, Order.RIDGE), len(features))
        cut = max(1, len(features) * 4 // 5)
        held = order[cut:]

        def rows(order: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
            for part in _parts(order, self.config.analytic_batch):
                yield (
                    lift(features[part], projection),
                    one_hot(task.train.labels[part], len(task.classes)),
                )

        moments, products = second_moments(rows(order[:cut]))
        # a single image is held out and learned
        penalty = best_ridge(
            moments, products, functools.partial(rows, held if len(held) else order)
        )
        more_moments, more_products = second_moments(rows(held))
        moments, products = moments + more_moments, products + more_products
        inverse, penalty = ridge_inverse(moments, penalty)
        return Analytic(inverse, self.config.first_scale * (inverse @ products)), penalty

    def _next_head(
        self, task: Task, features: np.ndarray, means: np.ndarray, fitting: Fitting
    ) -> tuple[Analytic, dict[str, Any]]:
        """Recursive least squares on the new features, then rumination; and the images that both
        looked at."""
        config = self.config
        known = self.known
        seen = self.classes.num
        num = len(means)
        labels = task.train.labels + np.int32(seen)
        # copies: the stored head stays as it is until the task is learned
        weight = np.concatenate(
            [known.analytic.weight, np.zeros((config.hidden, num - seen))], axis=1
        )
        analytic = Analytic(known.analytic.inverse.copy(), weight)
        sources, classes = (
            shifted_sources(labels, means, seen) if config.ruminate else (labels[:0], labels[:0])
        )
        again = len(sources)
        wrong = 0
        shifts = np.zeros_like(means)
        shifts[:seen] = means[:seen] - means[nearest_new(means, seen)]
        with fitting.session.phase("head", len(labels) + again, fitting.saved) as advance:
            for part in _parts(np.arange(len(labels)), config.analytic_batch):
                least_squares(
                    analytic, lift(features[part], known.projection), one_hot(labels[part], num)
                )
                advance(len(part))
            order = order_at(self.key(task, Phase.ALIGNMENT_ORDER, Order.RUMINATION), again)
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

    def bytes_beside(self, task: Task) -> int:
        """See `TrainedBaseline.bytes_beside`: the analytic head with its projection, all means,
        averaged adapters."""
        vit = self.executor.config
        hidden = self.config.hidden
        num = self.classes.num + len(task.classes)
        averaged = 2 * adapter_params(vit, self.config.bottleneck)
        return 8 * hidden * (hidden + num) + 4 * (hidden * vit.width + vit.width * num + averaged)

    def logits(self, images: Images) -> Float[np.ndarray, "N C"]:
        """See `OneHead.logits`: those of the analytic head."""
        known = self.known
        features = self.features_with(known.adapters, images)
        parts = _parts(np.arange(len(features)), self.config.analytic_batch)
        return np.concatenate(
            [lift(features[part], known.projection) @ known.analytic.weight for part in parts]
        )


def _parts(order: np.ndarray, size: int) -> Iterator[np.ndarray]:
    return (order[start : start + size] for start in range(0, len(order), size))


def lift(
    features: Float[np.ndarray, "N D"], projection: Float[np.ndarray, "H D"]
) -> Float[np.ndarray, "N H"]:
    """Random features in float64."""
    return np.maximum(features.astype(np.float64) @ projection.T.astype(np.float64), 0)


def one_hot(labels: Int[np.ndarray, "N"], num: int) -> Float[np.ndarray, "N C"]:
    """Targets of the analytic head."""
    return np.eye(num)[labels]


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
) -> float:
    """The penalty with the smallest squared error on held-out images (ties: the largest
    penalty)."""
    errors = {}
    for penalty in RIDGES:
        try:
            weight = scipy.linalg.cho_solve(_factor(moments, penalty), products)
        except np.linalg.LinAlgError:
            continue  # too small: singular in float64
        errors[penalty] = sum(
            float(((lifted @ weight - targets) ** 2).sum()) for lifted, targets in held()
        )
    return min(errors, key=lambda penalty: (errors[penalty], -penalty))


def ridge_inverse(
    moments: Float[np.ndarray, "H H"], penalty: float
) -> tuple[Float[np.ndarray, "H H"], float]:
    """The inverse of the moments plus a penalty, and that penalty, tenfold while the sum is
    singular in float64."""
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
) -> None:
    """One step of recursive least squares, in place: as if these images had been in the regression
    from the start.

    By Woodbury's identity, with a Cholesky factor of the N x N matrix instead of its inverse.
    """
    inverse, weight = analytic
    gain = lifted @ inverse  # [N, H]
    lower = np.linalg.cholesky(np.eye(len(lifted)) + gain @ lifted.T)
    half = scipy.linalg.solve_triangular(lower, gain, lower=True)
    residual = scipy.linalg.solve_triangular(lower, targets - lifted @ weight, lower=True)
    inverse -= half.T @ half  # symmetric in every bit, and never an increase
    weight += half.T @ residual


def drift_map(
    old: Float[np.ndarray, "N D"], new: Float[np.ndarray, "N D"]
) -> Float[np.ndarray, "D D"]:
    """A linear map from old features of (shuffled) images to their new ones.

    Least squares with a penalty on the distance from the identity, selected on the last tenth: a
    few images in many dimensions determine little, and features drift little.
    """
    old, moved = old.astype(np.float64), new.astype(np.float64) - old
    num, width = old.shape
    cut = num * 9 // 10
    if not 0 < cut < num or not old.any():
        return np.eye(width)

    def fitted(rows: slice, penalty: float) -> np.ndarray:
        squares = old[rows].T @ old[rows]
        strength = penalty * np.trace(squares) / width
        return scipy.linalg.solve(
            squares + strength * np.eye(width), old[rows].T @ moved[rows], assume_a="pos"
        )

    def error(penalty: float) -> float:
        return float(((old[cut:] @ fitted(slice(cut), penalty) - moved[cut:]) ** 2).sum())

    best = min(DRIFT_PENALTIES, key=lambda penalty: (error(penalty), -penalty))
    return np.eye(width) + fitted(slice(None), best)


def nearest_new(means: Float[np.ndarray, "C D"], seen: int) -> Int[np.ndarray, "S"]:
    """For each of the `seen` old classes the new class with the most similar mean, by cosine."""
    points = normalise(means)
    return seen + (points[:seen] @ points[seen:].T).argmax(axis=1)


def shifted_sources(
    labels: Int[np.ndarray, "N"], means: Float[np.ndarray, "C D"], seen: int
) -> tuple[Int[np.ndarray, "M"], Int[np.ndarray, "M"]]:
    """The images of rumination and their classes: each with its own class, and once per old class
    nearest to it."""
    images = {new: np.flatnonzero(labels == new) for new in range(seen, len(means))}
    taken = [images[new] for new in nearest_new(means, seen)]
    classes = np.repeat(np.arange(seen), [len(rows) for rows in taken])
    return np.concatenate([np.arange(len(labels)), *taken]), np.concatenate(
        [labels, classes]
    ).astype(np.int32)
