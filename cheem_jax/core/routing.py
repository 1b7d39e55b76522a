"""External memory: what tasks store of the frozen features, and how it infers the task ID of a test
image.

The default is S-Prompts' router, which the paper adopts: L2-normalised features, k-means with K = 5
per task, nearest centroid in L1 distance, per image. Settings come first, then what each kind of
router stores of a task's training features (no image, and no single feature), then the routers over
the statistics of all tasks.
"""

import abc
import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Float, Int

Metric = Literal["l1", "l2", "cosine"]
Kind = Literal["kmeans", "class_means", "lda", "gaussian", "ridge"]
Reads = Literal["last", "early", "levels"]
_SCIPY_METRICS: dict[Metric, Literal["cityblock", "euclidean", "cosine"]] = {
    "l1": "cityblock",
    "l2": "euclidean",
    "cosine": "cosine",
}
BLOCK_BYTES = 4 * 2**20
"""Bytes of the distances that are computed together."""
PART = 1024
"""Centroids that are compared together."""
NUM_QUANTILES = 201
"""Quantiles of a task's distances, in steps of half a percent."""
SMALLEST = 1e-6
"""Smallest regularisation: below it rounding decides whether a matrix is invertible."""


@dataclasses.dataclass(frozen=True)
class RouterConfig:
    """How the task ID of an image is inferred: exemplar-free, and from the backbone's own pass."""

    kind: Kind = "kmeans"
    """What a task stores: `kmeans` centroids (S-Prompts, the paper), `class_means`, these with one
    covariance for all tasks (`lda`) or one per task (`gaussian`), or sums for a `ridge` regression
    of task IDs on random features."""
    features: Reads = "last"
    """Features that the router reads: the `last` CLS token (the paper) or what pools the tokens;
    `early`: mean patch tokens at a quarter and at half of the depth, where the router's pass then
    ends; `levels`: those at each quarter, and the last CLS token."""
    num_centroids: int = 5
    """Centroids per task of `kmeans`, K; clipped to the number of training images."""
    metric: Metric = "l1"
    """Distance between a test image's normalised feature and a centroid or class mean."""
    shrinkage: float = 0.01
    """Share of a multiple of the identity in the covariances of `lda` and `gaussian`."""
    projections: int = 1000
    """Random features of `ridge`."""
    penalty: float = 0.01
    """Penalty of `ridge`, in means of its Gram matrix's diagonal."""

    def __post_init__(self) -> None:
        if self.num_centroids < 1:
            raise ValueError(
                f"num_centroids is {self.num_centroids}; a task needs at least 1 centroid"
            )
        if self.projections < 1:
            raise ValueError(
                f"projections is {self.projections}; expected at least 1 random feature"
            )
        if not SMALLEST <= self.shrinkage <= 1:
            raise ValueError(
                f"shrinkage is {self.shrinkage}; expected a share from {SMALLEST:g} to 1"
            )
        if not self.penalty >= SMALLEST:
            raise ValueError(f"penalty is {self.penalty}; expected at least {SMALLEST:g}")

    def blocks(self, depth: int) -> tuple[int, ...]:
        """The blocks at which the mean patch token is read, for a backbone of `depth` blocks.

        It is the mean of the tokens that every choice at a block shares. The last block has the CLS
        token alone. Raises ValueError if the backbone has too few blocks.
        """
        quarters = {"last": (), "early": (1, 2), "levels": (1, 2, 3)}[self.features]
        if quarters and depth < 3:
            raise ValueError(
                f"router features {self.features!r} need a backbone of at least 3 blocks, not"
                f" {depth}"
            )
        return tuple(sorted({min(depth * quarter // 4, depth - 2) for quarter in quarters}))

    def until(self, depth: int) -> int:
        """The block where the router's pass ends: L if the last CLS token is read."""
        return depth if self.features != "early" else self.blocks(depth)[-1]

    def num_parts(self, depth: int) -> int:
        """The number of tokens that are read, each of the backbone's width."""
        return len(self.blocks(depth)) + (self.features != "early")


PAPER = RouterConfig()
"""S-Prompts' router, which the paper adopts."""


class TaskStatistics(NamedTuple):
    """All that the router stores of a task; later tasks do not change it."""

    centroids: Float[np.ndarray, "K E"]
    """The centroids of k-means, or the class means."""
    moments: Mapping[str, np.ndarray] = {}
    """Other arrays of some kinds, by name; symmetric matrices by their upper triangles."""


def normalise(features: Float[np.ndarray, "N E"]) -> Float[np.ndarray, "N E"]:
    """Rows scaled to unit L2 norm; a zero row stays zero."""
    return features / np.maximum(np.linalg.norm(features, axis=1, keepdims=True), 1e-12)


def fit_centroids(
    features: Float[np.ndarray, "N E"], *, seed: int, config: RouterConfig
) -> Float[np.ndarray, "K E"]:
    """k-means centroids of one task's training features; not re-normalised."""
    # imported here: prediction needs neither, and both take two seconds to import
    from sklearn.cluster import KMeans
    from threadpoolctl import threadpool_limits

    points = normalise(features)
    distinct = len(np.unique(points, axis=0))
    num = min(config.num_centroids, distinct)  # k-means cannot separate equal points
    # scikit-learn documents n_init as int or "auto"; its signature lets a type checker see the text
    # only
    kmeans = KMeans(num, n_init=10, max_iter=300, tol=1e-4, random_state=seed)  # pyright: ignore[reportArgumentType]
    # threads sum in the order in which they finish, so centroids would differ from run to run
    with threadpool_limits(1, user_api="openmp"):
        return kmeans.fit(points).cluster_centers_.astype(np.float32)


def check_labels(labels: Int[np.ndarray, "N"], config: RouterConfig) -> None:
    """ValueError if such a router cannot be fitted to a task with these training labels."""
    if config.kind == "gaussian" and len(np.unique(labels)) == len(labels):
        raise ValueError(
            "router kind 'gaussian' needs a class of several images, as one image per class has no"
            " covariance; set lda"
        )


def fit_statistics(
    features: Float[np.ndarray, "N E"],
    labels: Int[np.ndarray, "N"],
    config: RouterConfig,
    *,
    seed: int,
) -> TaskStatistics:
    """The statistics of one task's training features; `seed` initialises k-means. Raises as
    `check_labels`."""
    match config.kind:
        case "kmeans":
            return TaskStatistics(fit_centroids(features, seed=seed, config=config))
        case "class_means":
            return TaskStatistics(class_means(normalise(features), labels))
        case "lda" | "gaussian":
            points = normalise(features).astype(np.float64)
            means = class_means(points, labels)
            check_labels(labels, config)
            apart = points - means[np.searchsorted(np.unique(labels), labels)]
            return TaskStatistics(means, {"scatter": packed(apart.T @ apart / len(points))})
        case "ridge":
            seen = random_features(normalise(features), config.projections)
            moments = {
                "gram": packed(seen.T @ seen / len(seen)),
                "mean": seen.mean(axis=0).astype(np.float32),
            }
            return TaskStatistics(fit_centroids(features, seed=seed, config=config), moments)


def num_kept(config: RouterConfig, width: int, num_classes: int) -> int:
    """Upper bound of the numbers that a router stores of a task with so many classes, for features
    of this width."""
    rows = config.num_centroids if config.kind in ("kmeans", "ridge") else num_classes
    match config.kind:
        case "lda" | "gaussian":
            more = width * (width + 1) // 2
        case "ridge":
            more = config.projections * (config.projections + 3) // 2
        case _:
            more = 0
    return rows * width + more


def joined(parts: Sequence[Float[np.ndarray, "N D"]]) -> Float[np.ndarray, "N E"]:
    """Several tokens concatenated, each scaled to unit length so that none outweighs the others."""
    return (
        parts[0] if len(parts) == 1 else np.concatenate([normalise(part) for part in parts], axis=1)
    )


def class_means(
    points: Float[np.ndarray, "N E"], labels: Int[np.ndarray, "N"]
) -> Float[np.ndarray, "C E"]:
    """The mean of each class that has images."""
    return np.stack([points[labels == label].mean(axis=0) for label in np.unique(labels)]).astype(
        np.float32
    )


def random_features(points: Float[np.ndarray, "N E"], num: int) -> Float[np.ndarray, "N M"]:
    """relu(x W) with a Gaussian W of a fixed seed, so that no task has to store it (RanPAC, section
    3)."""
    return np.maximum(points @ projection(points.shape[1], num), 0)


@functools.cache
def projection(width: int, num: int) -> Float[np.ndarray, "E M"]:
    """W; the same for all tasks and runs, or their sums could not be added."""
    return np.random.default_rng(0).standard_normal((width, num))


def packed(matrix: Float[np.ndarray, "E E"]) -> Float[np.ndarray, "P"]:
    """The upper triangle of a symmetric matrix in float32."""
    return matrix[np.triu_indices(len(matrix))].astype(np.float32)


def unpacked(triangle: Float[np.ndarray, "P"]) -> Float[np.ndarray, "E E"]:
    """The whole matrix in float64."""
    size = int(np.sqrt(2 * len(triangle)))
    matrix = np.zeros((size, size))
    matrix[np.triu_indices(size)] = triangle
    return np.triu(matrix, 1).T + matrix


class Router(abc.ABC):
    """Infers the task ID of images from the statistics of all tasks."""

    def __init__(self, config: RouterConfig):
        self.config = config
        self._tasks: tuple[TaskStatistics, ...] = ()

    def __len__(self) -> int:
        """Tasks."""
        return len(self._tasks)

    def follow(self, tasks: Sequence[TaskStatistics]) -> "Router":
        """Make this the router of these tasks, and return it; unchanged tasks cost nothing."""
        pairs = zip(self._tasks, tasks, strict=False)
        if len(tasks) != len(self) or any(old.centroids is not new.centroids for old, new in pairs):
            self._tasks = tuple(tasks)
            self._update()
        return self

    @abc.abstractmethod
    def distances(self, features: Float[np.ndarray, "N E"]) -> Float[np.ndarray, "N T"]:
        """Distance of each image from each task: smaller is nearer; for some kinds it may be
        negative."""

    def route(self, features: Float[np.ndarray, "N E"]) -> Int[np.ndarray, "N"]:
        """The nearest task of each image (ties: the lowest)."""
        return self.distances(features).argmin(axis=1).astype(np.int32)

    @abc.abstractmethod
    def _update(self) -> None:
        """Compute what distances need from the tasks' statistics."""

    def _total(self, moment: str) -> Float[np.ndarray, "E E"]:
        """The sum of a symmetric matrix over all tasks, in their order, on which the last bits
        depend."""
        total = unpacked(self._tasks[0].moments[moment])
        for task in self._tasks[1:]:
            total += unpacked(task.moments[moment])
        return total


class NearestCentroid(Router):
    """The task of the nearest centroid (`kmeans`) or class mean (`class_means`) in the router's
    metric.

    Distances are SciPy's `cdist` in float64, block by block. For 5,000 centroids in L1 it takes 0.3
    ms per image and core at width 96, and 3 ms at width 768. A compiled float32 loop takes a third
    of that, but its rounding must be corrected and every number of centroids compiles.
    """

    rows: Float[np.ndarray, "M E"]
    """The centroids of all tasks."""
    first: Int[np.ndarray, "T"]
    """The row of each task's first centroid."""

    def distances(self, features: Float[np.ndarray, "N E"]) -> Float[np.ndarray, "N T"]:
        """See `Router.distances`: to the nearest centroid of each task."""
        from scipy.spatial.distance import (
            cdist,
        )  # SciPy takes long to import, and settings need none of it

        points = normalise(features)
        found = np.empty((len(features), len(self)))
        size = max(BLOCK_BYTES // (8 * len(self.rows)), 1)
        for rows in (slice(begin, begin + size) for begin in range(0, len(points), size)):
            # centroids in parts, because SciPy copies its arguments
            parts = [self.rows[begin : begin + PART] for begin in range(0, len(self.rows), PART)]
            apart = [
                cdist(points[rows], part, _SCIPY_METRICS[self.config.metric]) for part in parts
            ]
            found[rows] = np.minimum.reduceat(np.concatenate(apart, axis=1), self.first, axis=1)
        return found

    def _update(self) -> None:
        self.rows = np.concatenate([task.centroids for task in self._tasks])
        self.first = np.cumsum([0, *(len(task.centroids) for task in self._tasks[:-1])])


class SharedCovariance(Router):
    """Linear discriminant analysis: the nearest class mean by Mahalanobis distance under one
    covariance.

    The covariance is the mean over tasks of the scatter within their classes, so that tasks with
    more images have no more weight. A new task only adds its scatter to the sum.
    """

    whitening: Float[np.ndarray, "E E"]
    """Maps features to coordinates in which the covariance is the identity."""
    rows: Float[np.ndarray, "C E"]
    """All class means in these coordinates."""
    first: Int[np.ndarray, "T"]
    """The row of each task's first class."""

    def distances(self, features: Float[np.ndarray, "N E"]) -> Float[np.ndarray, "N T"]:
        """See `Router.distances`: Mahalanobis."""
        squared = squared_distances(normalise(features) @ self.whitening, self.rows)
        return as_float32_tells(np.sqrt(np.minimum.reduceat(squared, self.first, axis=1)))

    def _update(self) -> None:
        scatter = self._total("scatter") / len(self)
        self.whitening, _ = whitening_of(scatter, self.config.shrinkage)
        self.rows = np.concatenate([task.centroids for task in self._tasks]) @ self.whitening
        self.first = np.cumsum([0, *(len(task.centroids) for task in self._tasks[:-1])])


class OwnCovariance(Router):
    """Gaussians at the class means of each task, which share one covariance per task.

    The distance is minus twice the log-density of the nearest class, up to a constant.
    """

    parts: list[tuple[np.ndarray, np.ndarray, float]]
    """Per task: whitening, whitened class means, log-determinant of the covariance."""

    def distances(self, features: Float[np.ndarray, "N E"]) -> Float[np.ndarray, "N T"]:
        points = normalise(features)
        found = [
            squared_distances(points @ own, rows).min(axis=1) + size
            for own, rows, size in self.parts
        ]
        return np.stack(found, axis=1)

    def _update(self) -> None:
        self.parts = []
        for task in self._tasks:
            own, size = whitening_of(unpacked(task.moments["scatter"]), self.config.shrinkage)
            self.parts.append((own, task.centroids @ own, size))


class RidgeOnTasks(Router):
    """Ridge regression of task IDs on random features, with the same weight for every task (RanPAC,
    eq. 4)."""

    weights: Float[np.ndarray, "M T"]

    def distances(self, features: Float[np.ndarray, "N E"]) -> Float[np.ndarray, "N T"]:
        """See `Router.distances`: minus the regression's output."""
        return as_float32_tells(
            -(random_features(normalise(features), self.config.projections) @ self.weights)
        )

    def _update(self) -> None:
        from scipy.linalg import cho_factor, cho_solve

        gram = self._total("gram")
        gram += self.config.penalty * np.trace(gram) / len(gram) * np.eye(len(gram))
        means = np.stack([task.moments["mean"] for task in self._tasks], axis=1).astype(np.float64)
        self.weights = cho_solve(cho_factor(gram), means)


def make_router(config: RouterConfig) -> Router:
    """The router of a configuration, without tasks."""
    kinds = {"lda": SharedCovariance, "gaussian": OwnCovariance, "ridge": RidgeOnTasks}
    return kinds.get(config.kind, NearestCentroid)(config)


def route(
    features: Float[np.ndarray, "N E"],
    centroids: Sequence[Float[np.ndarray, "_ E"]],
    config: RouterConfig,
) -> Int[np.ndarray, "N"]:
    """The task of each image's nearest centroid (ties: the lowest task), in the router's metric."""
    return (
        NearestCentroid(config).follow([TaskStatistics(rows) for rows in centroids]).route(features)
    )


def distances(
    features: Float[np.ndarray, "N E"],
    centroids: Sequence[Float[np.ndarray, "_ E"]],
    config: RouterConfig,
) -> Float[np.ndarray, "N T"]:
    """Distance from each image to the nearest centroid of each task, in the router's metric."""
    return (
        NearestCentroid(config)
        .follow([TaskStatistics(rows) for rows in centroids])
        .distances(features)
    )


def whitening_of(
    scatter: Float[np.ndarray, "E E"], shrinkage: float
) -> tuple[Float[np.ndarray, "E E"], float]:
    """The map to coordinates in which the shrunk covariance is the identity, and the
    log-determinant of the latter."""
    from scipy.linalg import solve_triangular

    size = len(scatter)
    scale = np.trace(scatter) / len(scatter)
    # a task of equal images has no scatter, and a zero matrix no inverse
    shrunk = (1 - shrinkage) * scatter + max(shrinkage * scale, 1e-12) * np.eye(size)
    factor = np.linalg.cholesky(shrunk)
    whitening = solve_triangular(factor, np.eye(size), lower=True).T
    return whitening, float(2 * np.log(np.diag(factor)).sum())


def as_float32_tells(distances: Float[np.ndarray, "N T"]) -> Float[np.ndarray, "N T"]:
    """Distances rounded to float32, the precision of the features.

    Finer differences are rounding errors of a matrix product. On some processors these differ
    between equal columns, and equal tasks would no longer tie.
    """
    return distances.astype(np.float32).astype(np.float64)


def squared_distances(
    points: Float[np.ndarray, "N E"], rows: Float[np.ndarray, "C E"]
) -> Float[np.ndarray, "N C"]:
    """Squared Euclidean distances by one matrix product."""
    own = np.einsum("ne,ne->n", points, points)[:, None] + np.einsum("ce,ce->c", rows, rows)
    return np.maximum(own - 2 * points @ rows.T, 0)


def calibrate(own: Float[np.ndarray, "N"]) -> Float[np.ndarray, "Q"]:
    """Quantiles of a task's distances from its own validation images, which open-set prediction
    stores."""
    return np.quantile(own, np.linspace(0, 1, NUM_QUANTILES)).astype(np.float32)


def threshold(quantiles: Float[np.ndarray, "Q"], rate: float) -> float:
    """The distance above which an image is rejected, so that about a share `rate` of the task's own
    images is.

    Raises ValueError unless 0 < rate < 1.
    """
    if not 0 < rate < 1:
        raise ValueError(
            f"open_set is {rate}; expected the share of own images to reject, between 0 and 1, such"
            " as 0.05"
        )
    return float(np.interp(1 - rate, np.linspace(0, 1, len(quantiles)), quantiles))
