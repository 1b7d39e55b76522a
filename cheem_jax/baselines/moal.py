"""MoAL: slowly moving adapters, and a closed-form head on random features, exact for all images of
the stream.

Adapters parallel to every FFN train through the stream with an auxiliary cosine head; since the
second task a moving average replaces them. The predicting head is ridge regression on a random
projection, updated by recursive least squares. Means of old classes follow the drift of the
features, and "rumination" shifts new features to old means and repeats the update for those that
the head classifies wrongly. Gao et al., "Knowledge Memorization and Rumination for Pre-trained
Model-based Class-Incremental Learning", CVPR 2025.
"""

import dataclasses
import enum
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, NamedTuple

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
    padded_columns,
)
from cheem_jax.baselines.baseline import MUCH_MEMORY, at_least_one, params_report
from cheem_jax.baselines.fitting import FitBatch, Fitter, Fitting, Init, numbered, unnumbered
from cheem_jax.baselines.heads import local_cross_entropy
from cheem_jax.core.images import Images
from cheem_jax.core.keys import Phase, order_at
from cheem_jax.core.routing import normalise
from cheem_jax.core.settings import Advance
from cheem_jax.data.task import Task
from cheem_jax.run.session import Session

RIDGES = tuple(10.0**power for power in range(-8, 9))
"""Penalties of the first task's ridge regression to select from."""
DRIFT_PENALTIES = tuple(10.0**power for power in range(-6, 3))
"""Penalties on the drift map's distance from the identity, relative to the features' mean
square."""


ANALYTIC_BATCH = 512
"""Images per step of recursive least squares; rumination predicts before each step."""
FIRST_SCALE = 0.9
"""Factor of the analytic head's weight after the first task, as in the official code."""
EMA = 0.999
"""Share of the averaged adapters that each epoch keeps, since the second task."""


class Order(enum.IntEnum):
    """Orders of `Phase.ALIGNMENT_ORDER`; the number is part of the key, so new members are
    appended."""

    RIDGE = 0
    """The first task's images, whose last fifth is held out."""
    RUMINATION = 1
    DRIFT = 2
    """The new task's images, whose last tenth is held out."""


@dataclasses.dataclass(frozen=True)
class MoalConfig(AdapterConfig):
    """MoAL with the optimizer of the paper's comparison."""

    name: ClassVar[str] = "moal"
    hidden: int = 5000
    """Random features of the predicting head (official: 5000 to 20000); its memory grows with their
    square."""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least_one(self, "hidden")


class Analytic(NamedTuple):
    """The predicting head in float64 on the host; logits are random features times `weight`.

    `inverse` is that of the random features' second moments plus the ridge penalty, over all images
    learned.
    """

    inverse: Float[np.ndarray, "H H"]
    weight: Float[np.ndarray, "H C"]


class MoalState(NamedTuple):
    """State between tasks."""

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
        executor = self.executor

        def loss(learned, fixed, batch: FitBatch):
            (adapters, weight, sigma), (leaves, seen, num) = learned, fixed
            vit = executor.vit_of(leaves)
            features = adapted_features(vit, adapters, batch.inputs["images"], batch.key)
            # sigma is a learned scale: cosines alone are too small for a softmax
            logits = sigma * cosines(features, weight)
            return local_cross_entropy(logits, batch.labels + seen, batch.weights, 0, num)

        @executor.jit
        def average(old, new):
            return jax.tree.map(lambda a, b: EMA * a + (1 - EMA) * b, old, new)

        self.fitter = Fitter(loss, jit=executor.jit, layout=executor.layout)
        self._average = average

    def check(self, tasks: Sequence[Task]) -> list[str]:
        hidden = self.config.hidden
        num_classes = sum(len(task.classes) for task in tasks)
        # three inverses: the stored one, the updated one, and the decrement of a step
        needed = 8 * hidden * (3 * hidden + 2 * num_classes)
        if needed <= MUCH_MEMORY:
            return []
        return [
            f"{hidden} random features take up to {needed / 2**30:.1f} GiB of memory on the host"
        ]

    def start(self, task: Task) -> tuple[Bottleneck, jax.Array, jax.Array]:
        """Adapters, the auxiliary head with columns for the new classes, and its scale."""
        columns = self.new_columns(task)
        known = self.known
        if not known:
            return self.new_adapters(task), padded_columns(columns), jnp.ones(())
        columns = np.concatenate([known.auxiliary, columns], axis=1)
        return known.adapters, padded_columns(columns), jnp.asarray(known.sigma)

    def fixed(self, task: Task) -> Any:
        """The backbone, and the numbers of classes before and after the task."""
        seen = self.classes.num
        return self.executor.leaves, np.int32(seen), np.int32(seen + len(task.classes))

    def after_epoch(self, fitting: Fitting) -> Fitting:
        """Since the second task: move the average of the adapters, which starts at those of the
        previous task."""
        if not self.known:
            return fitting
        before = self.known.adapters
        if "averaged" in fitting.more:
            before = unnumbered(before, fitting.more["averaged"])
        averaged = numbered(self._average(before, fitting.learned[0]))
        return fitting._replace(more={"averaged": averaged})

    def finish(self, task: Task, fitting: Fitting, session: Session) -> dict[str, Any]:
        """Store the averaged adapters and the auxiliary head, and update the analytic head."""
        known = self.known
        seen = self.classes.num
        num = len(task.classes)
        images = task.train.images
        labels = task.train.labels
        adapters, auxiliary, sigma = fitting.learned
        if known:
            adapters = unnumbered(adapters, fitting.more["averaged"])
        total = len(labels) * (2 if known else 1)
        with session.phase("features", total, fitting.saved) as advance:
            new = self.features_with(adapters, images, advance)
            old = self.features_with(known.adapters, images, advance) if known else new
        with session.phase("head"):
            means = np.stack(
                [new[labels == c].mean(axis=0, dtype=np.float64) for c in range(num)]
            ).astype(np.float32)
            if known:
                order = order_at(self.key(task, Phase.ALIGNMENT_ORDER, Order.DRIFT), len(labels))
                old_means = (known.means @ drift_map(old[order], new[order])).astype(np.float32)
                means = np.concatenate([old_means, means])
        rumination = shifted_sources(labels + np.int32(seen), means, seen)
        total = len(labels) + (len(rumination[0]) if known else 0)
        with session.phase("head", total, fitting.saved) as advance:
            if known:
                projection = known.projection
                analytic, report = self._next_head(task, new, means, rumination, advance)
            else:
                projection = self._projection(task)
                analytic, penalty = self._first_head(projection, new, task)
                report = {"ridge": penalty}
                advance(len(labels))
        auxiliary = np.asarray(auxiliary)[:, : seen + num]
        self.known = MoalState(adapters, auxiliary, sigma, projection, analytic, means)
        width = self.executor.config.width
        hidden = self.config.hidden
        added = adapter_params(self.executor.config, self.config.bottleneck)
        stored = (0 if known else added + 1 + hidden * (width + hidden)) + (
            2 * width + hidden
        ) * num
        learned = added + 1 + (width + hidden) * (seen + num)
        return {
            **report,
            **params_report(
                self.executor.config,
                added=0 if known else added,
                learned=learned,
                stored=stored,
            ),
        }

    def costs(self) -> dict[str, int]:
        """FLOPs per image; the paper counts one plain pass, neither adapters nor head."""
        width = self.executor.config.width
        hidden = self.config.hidden
        return self.adapted_costs(0, head=2 * hidden * (width + self.classes.num))

    def _projection(self, task: Task) -> Float[np.ndarray, "H D"]:
        """Uniform within 1/sqrt(D)."""
        width = self.executor.config.width
        bound = width**-0.5
        key = self.key(task, Phase.METHOD_INIT, Init.EXTRA)
        shape = (self.config.hidden, width)
        return np.asarray(jax.random.uniform(key, shape, minval=-bound, maxval=bound))

    def _first_head(
        self, projection: np.ndarray, features: np.ndarray, task: Task
    ) -> tuple[Analytic, float]:
        """Ridge regression; its penalty is selected on the last fifth of the shuffled training
        images."""
        order = order_at(self.key(task, Phase.ALIGNMENT_ORDER, Order.RIDGE), len(features))
        cut = max(1, len(features) * 4 // 5)
        held_out = order[cut:]

        def rows(order: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
            for part in _parts(order):
                targets = one_hot(task.train.labels[part], len(task.classes))
                yield lift(features[part], projection), targets

        moments, products = second_moments(rows(order[:cut]))
        # a single image is both held out and learned
        held_out_rows = functools.partial(rows, held_out if len(held_out) else order)
        penalty = best_ridge(moments, products, held_out_rows)
        more_moments, more_products = second_moments(rows(held_out))
        inverse, penalty = ridge_inverse(moments + more_moments, penalty)
        weight = FIRST_SCALE * (inverse @ (products + more_products))
        return Analytic(inverse, weight), penalty

    def _next_head(
        self,
        task: Task,
        features: np.ndarray,
        means: np.ndarray,
        rumination: tuple[np.ndarray, np.ndarray],
        advance: Advance,
    ) -> tuple[Analytic, dict[str, Any]]:
        """Recursive least squares on the new features, then on the `rumination` of
        `shifted_sources`.

        Also returns the number of ruminated images and of the wrong predictions among them.
        """
        known = self.known
        seen = self.classes.num
        num = len(means)
        labels = task.train.labels + np.int32(seen)
        # copies: the stored head changes only after the task is learned
        columns = np.zeros((self.config.hidden, num - seen))
        weight = np.concatenate([known.analytic.weight, columns], axis=1)
        analytic = Analytic(known.analytic.inverse.copy(), weight)
        for part in _parts(np.arange(len(labels))):
            lifted = lift(features[part], known.projection)
            least_squares(analytic, lifted, one_hot(labels[part], num))
            advance(len(part))
        sources, classes = rumination
        shifts = np.zeros_like(means)
        shifts[:seen] = means[:seen] - means[nearest_new(means, seen)]
        wrong = 0
        order = order_at(self.key(task, Phase.ALIGNMENT_ORDER, Order.RUMINATION), len(sources))
        for part in _parts(order):
            own = classes[part]
            lifted = lift(features[sources[part]] + shifts[own], known.projection)
            is_wrong = (lifted @ analytic.weight).argmax(axis=1) != own
            if is_wrong.any():
                least_squares(analytic, lifted[is_wrong], one_hot(own[is_wrong], num))
            wrong += int(is_wrong.sum())
            advance(len(part))
        inverse = (analytic.inverse + analytic.inverse.T) / 2
        report = {"ruminated": len(sources), "ruminated_wrong": wrong}
        return Analytic(inverse, analytic.weight), report

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
        parts = _parts(np.arange(len(features)))
        return np.concatenate(
            [lift(features[part], known.projection) @ known.analytic.weight for part in parts]
        )


def _parts(order: np.ndarray) -> Iterator[np.ndarray]:
    starts = range(0, len(order), ANALYTIC_BATCH)
    return (order[start : start + ANALYTIC_BATCH] for start in starts)


def lift(
    features: Float[np.ndarray, "N D"], projection: Float[np.ndarray, "H D"]
) -> Float[np.ndarray, "N H"]:
    """Compute random features in float64."""
    return np.maximum(features.astype(np.float64) @ projection.T.astype(np.float64), 0)


def one_hot(labels: Int[np.ndarray, "N"], num: int) -> Float[np.ndarray, "N C"]:
    """Targets of the analytic head."""
    return np.eye(num)[labels]


Lifted = Iterator[tuple[np.ndarray, np.ndarray]]
"""Random features and their targets, part by part."""


def second_moments(rows: Lifted) -> tuple[Float[np.ndarray, "H H"], Float[np.ndarray, "H C"]]:
    """Sums of products of random features with each other, and with the targets."""
    moments, products = 0.0, 0.0
    for lifted, targets in rows:
        moments, products = moments + lifted.T @ lifted, products + lifted.T @ targets
    return np.asarray(moments), np.asarray(products)


def best_ridge(
    moments: Float[np.ndarray, "H H"],
    products: Float[np.ndarray, "H C"],
    held_out: Callable[[], Lifted],
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
            float(((lifted @ weight - targets) ** 2).sum()) for lifted, targets in held_out()
        )
    return min(errors, key=lambda penalty: (errors[penalty], -penalty))


def ridge_inverse(
    moments: Float[np.ndarray, "H H"], penalty: float
) -> tuple[Float[np.ndarray, "H H"], float]:
    """The inverse of the moments plus a penalty, and the penalty, multiplied by ten while the sum
    is singular in float64."""
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
    """Add images to the regression, in place: one step of recursive least squares.

    The result equals a regression on all images. Woodbury's identity is used with a Cholesky factor
    of the N x N matrix.
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
    """Fit a linear map from old features of shuffled images to their new features.

    Least squares with a penalty on the distance from the identity, which is selected on the last
    tenth: a few images determine little in many dimensions, and features drift little.
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
    """The images of rumination and their classes: each image with its own class, and once for every
    old class whose nearest new class is its own."""
    images = {new: np.flatnonzero(labels == new) for new in range(seen, len(means))}
    shifted = [images[new] for new in nearest_new(means, seen)]
    old_classes = np.repeat(np.arange(seen), [len(rows) for rows in shifted])
    sources = np.concatenate([np.arange(len(labels)), *shifted])
    return sources, np.concatenate([labels, old_classes]).astype(np.int32)
