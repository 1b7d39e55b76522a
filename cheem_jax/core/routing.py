"""External memory: statistics of frozen features per task, and the router that infers task IDs
from them.

The default is S-Prompts' router, which the paper adopts: L2-normalised features, k-means with
K = 5 centroids per task, and per image the task of the nearest centroid in L1 distance. The
statistics contain no image and no single feature.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Float, Int

Reads = Literal["last", "early", "levels"]
BLOCK_BYTES = 4 * 2**20
"""Bytes of the distances that are computed at once."""
NUM_QUANTILES = 201
"""Quantiles of a task's distances, in steps of half a percent."""
SMALLEST = 1e-6
"""Smallest shrinkage: below it, rounding decides whether a covariance is invertible."""


@dataclasses.dataclass(frozen=True)
class RouterConfig:
    """How the task ID of an image is inferred: exemplar-free, and from the backbone's own pass."""

    kind: Literal["kmeans", "lda"] = "kmeans"
    """Statistics of a task: `kmeans` centroids (S-Prompts, the paper), or class means with one
    covariance for all tasks (`lda`)."""
    features: Reads = "last"
    """Features that the router reads: the `last` CLS token (the paper) or the pooled tokens;
    `early`: mean patch tokens at a quarter and at half of the depth, and the router's pass ends
    there; `levels`: mean patch tokens at each quarter, and the last CLS token."""
    num_centroids: int = 5
    """Centroids per task of `kmeans`, K; at most the number of distinct training features."""
    shrinkage: float = 0.01
    """Share of a multiple of the identity in the covariance of `lda`."""

    def __post_init__(self) -> None:
        if self.num_centroids < 1:
            raise ValueError(
                f"num_centroids is {self.num_centroids}; a task needs at least 1 centroid"
            )
        if not SMALLEST <= self.shrinkage <= 1:
            raise ValueError(
                f"shrinkage is {self.shrinkage}; expected a share from {SMALLEST:g} to 1"
            )

    def blocks(self, depth: int) -> tuple[int, ...]:
        """The blocks at which mean patch tokens are read, for a backbone of `depth` blocks.

        Every choice at a block shares these tokens. The last block is excluded: it computes the
        CLS token only. Raises ValueError if the backbone has fewer than 3 blocks.
        """
        quarters = {"last": (), "early": (1, 2), "levels": (1, 2, 3)}[self.features]
        if quarters and depth < 3:
            raise ValueError(
                f"router features {self.features!r} need a backbone of at least 3 blocks, not"
                f" {depth}"
            )
        return tuple(sorted({min(depth * quarter // 4, depth - 2) for quarter in quarters}))

    def until(self, depth: int) -> int:
        """The block at which the router's pass ends: L if it reads the last CLS token."""
        return depth if self.features != "early" else self.blocks(depth)[-1]

    def num_parts(self, depth: int) -> int:
        """Tokens that the router reads, each of the backbone's width."""
        return len(self.blocks(depth)) + (self.features != "early")


PAPER = RouterConfig()
"""S-Prompts' router, which the paper adopts."""


class TaskStatistics(NamedTuple):
    """The router's statistics of one task; later tasks do not change them."""

    centroids: Float[np.ndarray, "K E"]
    """Centroids of k-means, or class means."""
    moments: Mapping[str, np.ndarray] = {}
    """`scatter` of `lda`: the covariance within the task's classes, as its upper triangle."""


def normalise(features: Float[np.ndarray, "N E"]) -> Float[np.ndarray, "N E"]:
    """Scale each row to unit L2 norm; a zero row stays zero."""
    return features / np.maximum(np.linalg.norm(features, axis=1, keepdims=True), 1e-12)


def join_tokens(parts: Sequence[Float[np.ndarray, "N D"]]) -> Float[np.ndarray, "N E"]:
    """Concatenate several tokens, each scaled to unit length so that all weigh the same."""
    if len(parts) == 1:
        return parts[0]
    return np.concatenate([normalise(part) for part in parts], axis=1)


def fit_centroids(
    features: Float[np.ndarray, "N E"], num_centroids: int, *, seed: int
) -> Float[np.ndarray, "K E"]:
    """The k-means centroids of a task's normalised training features; their norm is below 1."""
    # imported here: both take two seconds to import, and prediction needs neither
    from sklearn.cluster import KMeans
    from threadpoolctl import threadpool_limits

    points = normalise(features)
    num = min(num_centroids, len(np.unique(points, axis=0)))  # equal points share a centroid
    # scikit-learn documents n_init as int or "auto"; type checkers see str only
    kmeans = KMeans(num, n_init=10, max_iter=300, tol=1e-4, random_state=seed)  # pyright: ignore[reportArgumentType]
    # with several threads the order of a sum, and so the centroids, would differ between runs
    with threadpool_limits(1, user_api="openmp"):
        return kmeans.fit(points).cluster_centers_.astype(np.float32)


def fit_statistics(
    features: Float[np.ndarray, "N E"],
    labels: Int[np.ndarray, "N"],
    config: RouterConfig,
    *,
    seed: int,
) -> TaskStatistics:
    """The statistics of one task's training features; `seed` initialises k-means."""
    if config.kind == "kmeans":
        return TaskStatistics(fit_centroids(features, config.num_centroids, seed=seed))
    points = normalise(features).astype(np.float64)
    classes, rows = np.unique(labels, return_inverse=True)
    means = np.stack([points[labels == label].mean(axis=0) for label in classes])
    means = means.astype(np.float32)
    residuals = points - means[rows]
    return TaskStatistics(means, {"scatter": packed(residuals.T @ residuals / len(points))})


def num_stored(config: RouterConfig, width: int, num_classes: int) -> int:
    """At most so many numbers are stored per task, for features of `width` numbers."""
    if config.kind == "kmeans":
        return config.num_centroids * width
    return num_classes * width + width * (width + 1) // 2


def packed(matrix: Float[np.ndarray, "E E"]) -> Float[np.ndarray, "P"]:
    """The upper triangle of a symmetric matrix in float32."""
    return matrix[np.triu_indices(len(matrix))].astype(np.float32)


def unpacked(triangle: Float[np.ndarray, "P"]) -> Float[np.ndarray, "E E"]:
    """The symmetric matrix of an upper triangle in float64."""
    size = int(np.sqrt(2 * len(triangle)))
    matrix = np.zeros((size, size))
    matrix[np.triu_indices(size)] = triangle
    return np.triu(matrix, 1).T + matrix


@dataclasses.dataclass(frozen=True, eq=False)
class Router:
    """Infers task IDs from the statistics of all tasks.

    `kmeans`: the task of the nearest centroid in L1 distance. `lda`: the task of the nearest class
    mean in Mahalanobis distance, under the mean over tasks of the covariance within their classes.
    """

    config: RouterConfig
    tasks: tuple[TaskStatistics, ...] = ()

    def follow(self, tasks: Sequence[TaskStatistics]) -> "Router":
        """The router of these tasks; this one, with its sums, if its tasks are the same."""
        pairs = zip(self.tasks, tasks, strict=False)
        if len(tasks) == len(self.tasks) and all(a.centroids is b.centroids for a, b in pairs):
            return self
        return Router(self.config, tuple(tasks))

    @functools.cached_property
    def whitening(self) -> Float[np.ndarray, "E E"] | None:
        """`lda`: the map to coordinates in which the shrunk covariance is the identity."""
        if self.config.kind == "kmeans":
            return None
        # in the order of the tasks, because the last bits depend on it
        scatters = (unpacked(task.moments["scatter"]) for task in self.tasks)
        return whitening_of(sum(scatters, np.zeros(())) / len(self.tasks), self.config.shrinkage)

    @functools.cached_property
    def rows(self) -> Float[np.ndarray, "M E"]:
        """The centroids or whitened class means of all tasks, in float64 as SciPy needs them."""
        rows = np.concatenate([task.centroids for task in self.tasks]).astype(np.float64)
        return rows if self.whitening is None else rows @ self.whitening

    @functools.cached_property
    def first(self) -> Int[np.ndarray, "T"]:
        """The first row of each task."""
        return np.cumsum([0, *(len(task.centroids) for task in self.tasks[:-1])])

    def distances(self, features: Float[np.ndarray, "N E"]) -> Float[np.ndarray, "N T"]:
        """The distance from each image to the nearest row of each task."""
        points = normalise(features)
        if self.whitening is None:
            return _nearest_in_l1(points, self.rows, self.first)
        points = points @ self.whitening
        squares = (np.einsum("ne,ne->n", one, one) for one in (points, self.rows))
        norms = np.add.outer(*squares)
        squared = np.maximum(norms - 2 * points @ self.rows.T, 0)
        nearest = np.sqrt(np.minimum.reduceat(squared, self.first, axis=1))
        # Finer differences than float32 are rounding errors of the product. On some processors
        # these differ between equal columns, and equal tasks would not tie.
        return nearest.astype(np.float32).astype(np.float64)

    def route(self, features: Float[np.ndarray, "N E"]) -> Int[np.ndarray, "N"]:
        """The nearest task of each image (ties: the lowest)."""
        return self.distances(features).argmin(axis=1).astype(np.int32)


def centroid_distances(
    features: Float[np.ndarray, "N E"], centroids: Sequence[Float[np.ndarray, "_ E"]]
) -> Float[np.ndarray, "N T"]:
    """L1 distance from each image to the nearest of each task's centroids."""
    return Router(PAPER, tuple(map(TaskStatistics, centroids))).distances(features)


def _nearest_in_l1(
    points: Float[np.ndarray, "N E"], rows: Float[np.ndarray, "M E"], first: Int[np.ndarray, "T"]
) -> Float[np.ndarray, "N T"]:
    # SciPy's float64 loop needs 0.3 ms per image and core for 5,000 rows of 96 numbers, and 3 ms
    # for rows of 768. A compiled float32 loop needs a third of that, but its rounding requires a
    # correction and each number of rows compiles.
    from scipy.spatial.distance import cdist  # slow to import, and settings do not need it

    size = max(BLOCK_BYTES // (8 * len(rows)), 1)
    blocks = [points[begin : begin + size] for begin in range(0, max(len(points), 1), size)]
    distances = (cdist(block, rows, "cityblock") for block in blocks)
    return np.concatenate([np.minimum.reduceat(block, first, axis=1) for block in distances])


def whitening_of(scatter: Float[np.ndarray, "E E"], shrinkage: float) -> Float[np.ndarray, "E E"]:
    """The map to coordinates in which the shrunk covariance is the identity."""
    from scipy.linalg import solve_triangular

    identity = np.eye(len(scatter))
    # equal images have no scatter, and a zero matrix has no Cholesky factor
    multiple = max(shrinkage * (np.trace(scatter) / len(scatter)), 1e-12)
    factor = np.linalg.cholesky((1 - shrinkage) * scatter + multiple * identity)
    return solve_triangular(factor, identity, lower=True).T


def calibrate(distances: Float[np.ndarray, "N"]) -> Float[np.ndarray, "Q"]:
    """Quantiles of a task's distances from its validation images, for open-set prediction."""
    return np.quantile(distances, np.linspace(0, 1, NUM_QUANTILES)).astype(np.float32)


def threshold(quantiles: Float[np.ndarray, "Q"], rate: float) -> float:
    """The distance that about a share `rate` of the task's own images exceeds.

    Raises ValueError unless 0 < rate < 1.
    """
    if not 0 < rate < 1:
        raise ValueError(
            f"open_set is {rate}; expected the share of own images to reject, between 0 and 1, such"
            " as 0.05"
        )
    return float(np.interp(1 - rate, np.linspace(0, 1, len(quantiles)), quantiles))
