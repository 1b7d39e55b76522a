"""External memory: statistics of frozen features per task, and the router that infers the task ID
from these statistics.

The default is the router of S-Prompts, as in the CHEEM paper. Features are L2-normalised, k-means
fits K = 5 centroids per task, and an image is assigned to the task of the nearest centroid in L1
distance. The statistics contain neither images nor features of individual images.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from cheem_jax.core.settings import check_types

Reads = Literal["last", "early", "levels"]
BLOCK_BYTES = 4 * 2**20
"""Maximum size in bytes of the part of a distance matrix that is computed at once."""
NUM_QUANTILES = 201
"""Number of quantiles that `calibrate` computes, at levels from 0 to 1 in steps of 0.005."""
SMALLEST = 1e-6
"""Minimum shrinkage. With smaller values, rounding determines the smallest eigenvalues."""


@dataclasses.dataclass(frozen=True)
class RouterConfig:
    """Settings of task-ID inference. The router stores no exemplars."""

    kind: Literal["kmeans", "lda"] = "kmeans"
    """Statistics of a task: `kmeans` stores centroids (S-Prompts, the CHEEM paper); `lda` stores
    class means, and one covariance shared by all tasks."""
    features: Reads = "last"
    """Features that the router reads. `last` is the last CLS token (the CHEEM paper), or the pooled
    tokens if the backbone has no CLS token. `early` consists of the mean tokens at 1/4 and 1/2 of
    the depth, so the router's pass through the backbone ends at half of the depth. `levels`
    consists of the mean tokens at 1/4, 1/2 and 3/4 of the depth, and the `last` features. A mean is
    over all tokens except the CLS token: patches, and registers if the backbone has them."""
    num_centroids: int = 5
    """Number of centroids per task for `kmeans` (K); a task with fewer distinct training features
    has fewer centroids."""
    shrinkage: float = 0.01
    """Fraction of the covariance that is replaced by a multiple of the identity, for `lda`."""

    def __post_init__(self) -> None:
        check_types(self)
        if self.num_centroids < 1:
            raise ValueError(f"num_centroids is {self.num_centroids}; expected at least 1")
        if not SMALLEST <= self.shrinkage <= 1:
            raise ValueError(
                f"shrinkage is {self.shrinkage}; expected a share from {SMALLEST:g} to 1"
            )

    def blocks(self, depth: int) -> tuple[int, ...]:
        """Return the blocks at which mean tokens are read, for a backbone with `depth`
        blocks.

        The tokens are read before the plastic layer, so all candidate ops of the block share them.
        The last block is excluded because it computes only the CLS token. Raises ValueError if the
        router reads mean tokens and the backbone has fewer than 3 blocks.
        """
        quarters = {"last": (), "early": (1, 2), "levels": (1, 2, 3)}[self.features]
        if quarters and depth < 3:
            raise ValueError(
                f"router features {self.features!r} need a backbone with at least 3 blocks, but it"
                f" has {depth}"
            )
        return tuple(sorted({min(depth * quarter // 4, depth - 2) for quarter in quarters}))

    def until(self, depth: int) -> int:
        """Return the index of the block at which the router's pass through the backbone ends. The
        index is `depth` if the router reads the `last` features."""
        return depth if self.features != "early" else self.blocks(depth)[-1]

    def num_parts(self, depth: int) -> int:
        """Return the number of tokens per image that the router reads. Each token has the width of
        the backbone."""
        return len(self.blocks(depth)) + (self.features != "early")


PAPER = RouterConfig()
"""The router of S-Prompts, which the CHEEM paper adopts."""


class TaskStatistics(NamedTuple):
    """Statistics of one task for the router; later tasks do not change them."""

    centroids: Float[np.ndarray, "K E"]
    """Centroids of k-means, or class means for `lda`."""
    moments: Mapping[str, np.ndarray] = {}
    """For `lda`, `scatter` is the upper triangle of the covariance within the task's classes, and
    `counts` is the number of images of each class. The mapping is empty for `kmeans`."""


def normalise(features: Float[np.ndarray, "N E"]) -> Float[np.ndarray, "N E"]:
    """Scale each row to unit L2 norm; a zero row remains zero."""
    return features / np.maximum(np.linalg.norm(features, axis=1, keepdims=True), 1e-12)


def join_tokens(parts: Sequence[Float[np.ndarray, "N D"]]) -> Float[np.ndarray, "N E"]:
    """Concatenate the tokens of each image. Each array in `parts` contains one token per image. If
    there is more than one part, each token is scaled to unit length, so that all parts have the
    same weight."""
    if len(parts) == 1:
        return parts[0]
    return np.concatenate([normalise(part) for part in parts], axis=1)


def fit_centroids(
    features: Float[np.ndarray, "N E"], num_centroids: int, *, seed: int
) -> Float[np.ndarray, "K E"]:
    """Normalise the training features of a task, and fit at most `num_centroids` k-means centroids
    to them."""
    # imported here, because the imports take two seconds and prediction does not need them
    from sklearn.cluster import KMeans
    from threadpoolctl import threadpool_limits

    points = normalise(features)
    num = min(num_centroids, len(np.unique(points, axis=0)))  # identical points share a centroid
    # scikit-learn documents n_init as int or "auto", but type checkers only accept str
    kmeans = KMeans(num, n_init=10, max_iter=300, tol=1e-4, random_state=seed)  # pyright: ignore[reportArgumentType]
    # With more than one thread, the order of sums, and therefore the centroids, would differ
    # between runs.
    with threadpool_limits(1, user_api="openmp"):
        return kmeans.fit(points).cluster_centers_.astype(np.float32)


def fit_statistics(
    features: Float[np.ndarray, "N E"],
    labels: Int[np.ndarray, "N"],
    config: RouterConfig,
    *,
    seed: int,
) -> TaskStatistics:
    """Fit the router's statistics to the training features of a task; `seed` initialises
    k-means."""
    if config.kind == "kmeans":
        return TaskStatistics(fit_centroids(features, config.num_centroids, seed=seed))
    points = normalise(features).astype(np.float64)
    classes, rows, counts = np.unique(labels, return_inverse=True, return_counts=True)
    means = np.stack([points[labels == label].mean(axis=0) for label in classes])
    means = means.astype(np.float32)
    residuals = points - means[rows]
    scatter = packed(residuals.T @ residuals / len(points))
    return TaskStatistics(means, {"scatter": scatter, "counts": counts.astype(np.float32)})


def num_stored(config: RouterConfig, width: int, num_classes: int) -> int:
    """Return the maximum number of stored values per task, for features of size `width`."""
    if config.kind == "kmeans":
        return config.num_centroids * width
    return num_classes * (width + 1) + width * (width + 1) // 2


def packed(matrix: Float[np.ndarray, "E E"]) -> Float[np.ndarray, "P"]:
    """Return the upper triangle of a symmetric matrix in float32."""
    return matrix[np.triu_indices(len(matrix))].astype(np.float32)


def unpacked(triangle: Float[np.ndarray, "P"]) -> Float[np.ndarray, "E E"]:
    """Restore a symmetric matrix in float64 from its upper triangle."""
    size = int(np.sqrt(2 * len(triangle)))
    matrix = np.zeros((size, size))
    matrix[np.triu_indices(size)] = triangle
    return np.triu(matrix, 1).T + matrix


@dataclasses.dataclass(frozen=True, eq=False)
class Router:
    """Infers task IDs from the statistics of all tasks.

    `kmeans` selects the task of the nearest centroid in L1 distance. `lda` selects the task of the
    nearest class mean in Mahalanobis distance. The Mahalanobis distance uses the within-class
    covariance, averaged over tasks and shrunk.
    """

    config: RouterConfig
    tasks: tuple[TaskStatistics, ...] = ()

    def follow(self, tasks: Sequence[TaskStatistics]) -> "Router":
        """Return a router for `tasks`: this router if its tasks are the same, so that its cached
        arrays are reused, and a new router otherwise."""
        pairs = zip(self.tasks, tasks, strict=False)
        if len(tasks) == len(self.tasks) and all(a.centroids is b.centroids for a, b in pairs):
            return self
        return Router(self.config, tuple(tasks))

    @functools.cached_property
    def whitening(self) -> Float[np.ndarray, "E E"] | None:
        """For `lda`, the matrix that whitens the shrunk covariance; None for `kmeans`."""
        if self.config.kind == "kmeans":
            return None
        # The covariances are summed in the order of the tasks, because the last bits of the sum
        # depend on the order.
        scatters = (unpacked(task.moments["scatter"]) for task in self.tasks)
        return whitening_matrix(
            sum(scatters, np.zeros(())) / len(self.tasks), self.config.shrinkage
        )

    @functools.cached_property
    def rows(self) -> Float[np.ndarray, "M E"]:
        """The centroids or whitened class means of all tasks, in float64 for SciPy."""
        rows = np.concatenate([task.centroids for task in self.tasks]).astype(np.float64)
        return rows if self.whitening is None else rows @ self.whitening

    @functools.cached_property
    def first(self) -> Int[np.ndarray, "T"]:
        """Index of the first row of each task in `rows`."""
        return np.cumsum([0, *(len(task.centroids) for task in self.tasks[:-1])])

    def distances(self, features: Float[np.ndarray, "N E"]) -> Float[np.ndarray, "N T"]:
        """Compute the distance from each image to the nearest centroid or class mean of each
        task."""
        points = normalise(features)
        if self.whitening is None:
            return _nearest_in_l1(points, self.rows, self.first)
        points = points @ self.whitening
        squares = (np.einsum("ne,ne->n", x, x) for x in (points, self.rows))
        norms = np.add.outer(*squares)
        squared = np.maximum(norms - 2 * points @ self.rows.T, 0)
        nearest = np.sqrt(np.minimum.reduceat(squared, self.first, axis=1))
        # float64 digits beyond float32 are rounding errors of the product. On some processors these
        # errors differ between identical columns, so identical tasks would not tie.
        return nearest.astype(np.float32).astype(np.float64)

    def route(self, features: Float[np.ndarray, "N E"]) -> Int[np.ndarray, "N"]:
        """Return the index of the nearest task for each image; ties select the lowest index."""
        return self.distances(features).argmin(axis=1).astype(np.int32)


def centroid_distances(
    features: Float[np.ndarray, "N E"], centroids: Sequence[Float[np.ndarray, "_ E"]]
) -> Float[np.ndarray, "N T"]:
    """Compute the L1 distance from each image to the nearest centroid of each task."""
    return Router(PAPER, tuple(map(TaskStatistics, centroids))).distances(features)


def _nearest_in_l1(
    points: Float[np.ndarray, "N E"], rows: Float[np.ndarray, "M E"], first: Int[np.ndarray, "T"]
) -> Float[np.ndarray, "N T"]:
    # On one core, SciPy's float64 loop needs 0.3 ms per image for 5,000 rows of width 96, and 3 ms
    # for 5,000 rows of width 768. A compiled float32 loop needs a third of the time, but its
    # rounding requires a correction, and it would be compiled again for each number of rows. SciPy
    # is imported here, because it is slow to import and only distances need it.
    from scipy.spatial.distance import cdist

    size = max(BLOCK_BYTES // (8 * len(rows)), 1)
    blocks = [points[begin : begin + size] for begin in range(0, max(len(points), 1), size)]
    distances = (cdist(block, rows, "cityblock") for block in blocks)
    return np.concatenate([np.minimum.reduceat(block, first, axis=1) for block in distances])


def whitening_matrix(
    scatter: Float[np.ndarray, "E E"], shrinkage: float
) -> Float[np.ndarray, "E E"]:
    """Shrink the covariance `scatter`, and compute its whitening matrix W. If the covariance of
    points is the shrunk covariance, the covariance of `points @ W` is the identity."""
    from scipy.linalg import solve_triangular

    identity = np.eye(len(scatter))
    # A stored covariance is rounded to float32, so its eigenvalues are wrong by up to `rounding`.
    # Without the minimum of 1e-12, the zero covariance of identical images would have no Cholesky
    # factor.
    rounding = np.finfo(np.float32).eps * np.trace(scatter)
    multiple = max(shrinkage * (np.trace(scatter) / len(scatter)), rounding, 1e-12)
    factor = np.linalg.cholesky((1 - shrinkage) * scatter + multiple * identity)
    return solve_triangular(factor, identity, lower=True).T


def calibrate(distances: Float[np.ndarray, "N"]) -> Float[np.ndarray, "Q"]:
    """Compute quantiles of the distances from a task's validation images to the task, for open-set
    prediction."""
    return np.quantile(distances, np.linspace(0, 1, NUM_QUANTILES)).astype(np.float32)


def threshold(quantiles: Float[np.ndarray, "Q"], rate: float) -> float:
    """Compute the distance above which an image is rejected: the (1 - `rate`) quantile of the
    distances of the task's validation images.

    `quantiles` is the result of `calibrate`. Raises ValueError unless 0 < rate < 1.
    """
    if not 0 < rate < 1:
        raise ValueError(
            f"open_set is {rate}; expected the share of a task's images to reject, between 0 and 1,"
            " such as 0.05"
        )
    return float(np.interp(1 - rate, np.linspace(0, 1, len(quantiles)), quantiles))


def rejection_scores(
    distances: Float[np.ndarray, "N"], quantiles: Float[np.ndarray, "Q"]
) -> Float[np.ndarray, "N"]:
    """Compute, for each image, the share of a task's validation images that are nearer to the task
    than the image is.

    With `threshold(quantiles, rate)`, an image is rejected if its score is above 1 - `rate`.
    `quantiles` is the result of `calibrate`. The score of a NaN distance is 1.
    """
    # equal distances span several quantiles, and the share of nearer images is the lowest of them
    below = np.nextafter(distances, -np.inf)
    shares = np.interp(below, quantiles, np.linspace(0, 1, len(quantiles)))
    return np.nan_to_num(shares, nan=1.0)
