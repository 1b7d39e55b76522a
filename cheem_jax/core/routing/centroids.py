"""External memory: task centroids of the frozen backbone's features infer the task ID of a test image.

The default is S-Prompts' router, which the paper adopts: L2-normalised features, k-means with K = 5 per task, nearest
centroid in L1 distance, per image.
"""

from collections.abc import Iterator, Sequence
from typing import Literal

import numpy as np
from jaxtyping import Float, Int
from scipy.spatial.distance import cdist

from cheem_jax.core.routing.config import Metric, RouterConfig

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


def normalise(features: Float[np.ndarray, "N E"]) -> Float[np.ndarray, "N E"]:
    """Rows scaled to unit L2 norm; a zero row stays zero."""
    return features / np.maximum(np.linalg.norm(features, axis=1, keepdims=True), 1e-12)


def fit_centroids(features: Float[np.ndarray, "N E"], *, seed: int, config: RouterConfig) -> Float[np.ndarray, "K E"]:
    """k-means centroids of one task's training features; not re-normalised."""
    # imported here: prediction needs neither, and both take two seconds to import
    from sklearn.cluster import KMeans
    from threadpoolctl import threadpool_limits

    points = normalise(features)
    distinct = len(np.unique(points, axis=0))
    num = min(config.num_centroids, distinct)  # k-means cannot separate equal points
    # scikit-learn documents n_init as int or "auto"; its signature lets a type checker see the text only
    kmeans = KMeans(num, n_init=10, max_iter=300, tol=1e-4, random_state=seed)  # pyright: ignore[reportArgumentType]
    # threads sum in the order in which they finish, so centroids would differ from run to run
    with threadpool_limits(1, user_api="openmp"):
        return kmeans.fit(points).cluster_centers_.astype(np.float32)


def route(
    features: Float[np.ndarray, "N E"], centroids: Sequence[Float[np.ndarray, "_ E"]], config: RouterConfig
) -> Int[np.ndarray, "N"]:
    """The task of each image's nearest centroid (ties: the lowest task), in the router's metric."""
    return CentroidIndex(config.metric, centroids).route(features)


def distances(
    features: Float[np.ndarray, "N E"], centroids: Sequence[Float[np.ndarray, "_ E"]], config: RouterConfig
) -> Float[np.ndarray, "N T"]:
    """Distance from each image to the nearest centroid of each task, in the router's metric."""
    return CentroidIndex(config.metric, centroids).distances(features)


class CentroidIndex:
    """The centroids of all tasks in one array.

    Distances are SciPy's `cdist` in float64, block by block. For 5,000 centroids in L1 it takes 0.3 ms per image and
    core at width 96, and 3 ms at width 768. A compiled float32 loop takes a third of that, but its rounding must be
    corrected and every size of the index compiles.
    """

    def __init__(self, metric: Metric, centroids: Sequence[Float[np.ndarray, "_ E"]] = ()):
        self.metric: Metric = metric
        self._tasks: list[Float[np.ndarray, "_ E"]] = []
        self._first = [0]  # row of each task's first centroid, and the number of all
        self._rows = np.zeros((0, 0), np.float32)
        self.follow(centroids)

    def __len__(self) -> int:
        """Tasks."""
        return len(self._tasks)

    @property
    def nbytes(self) -> int:
        """Bytes of the buffer."""
        return self._rows.nbytes

    def follow(self, centroids: Sequence[Float[np.ndarray, "_ E"]]) -> "CentroidIndex":
        """Make this the index of these tasks, and return it; arrays that it contains already are not copied again.

        A full buffer doubles, so adding n tasks one by one copies fewer than 3 n tasks.
        """
        pairs = enumerate(zip(self._tasks, centroids, strict=False))
        same = next((i for i, (old, new) in pairs if old is not new), min(len(self), len(centroids)))
        del self._tasks[same:], self._first[same + 1 :]
        begin = self._first[-1]
        needed = begin + sum(map(len, centroids[same:]))
        if needed > len(self._rows) or not begin:
            grown = np.zeros((max(needed, 2 * begin), centroids[-1].shape[1] if needed else 0), np.float32)
            if begin:
                grown[:begin] = self._rows[:begin]
            self._rows = grown
        for task in centroids[same:]:
            self._rows[self._first[-1] : self._first[-1] + len(task)] = task
            self._tasks.append(task)
            self._first.append(self._first[-1] + len(task))
        return self

    def distances(self, features: Float[np.ndarray, "N E"]) -> Float[np.ndarray, "N T"]:
        """Distance from each image to the nearest centroid of each task."""
        points = normalise(features)
        found = np.empty((len(points), len(self)))
        for rows in self._blocks(len(points)):
            found[rows] = np.minimum.reduceat(self._exact(points[rows]), self._first[:-1], axis=1)
        return found

    def route(self, features: Float[np.ndarray, "N E"]) -> Int[np.ndarray, "N"]:
        """The task of each image's nearest centroid (ties: the lowest task)."""
        points = normalise(features)
        nearest = np.empty(len(points), np.int64)
        for rows in self._blocks(len(points)):
            nearest[rows] = self._exact(points[rows]).argmin(axis=1)
        return (np.searchsorted(self._first, nearest, side="right") - 1).astype(np.int32)

    def _exact(self, points: Float[np.ndarray, "N E"]) -> Float[np.ndarray, "N M"]:
        """Distance from each point to each centroid in float64, a part at a time because SciPy copies its arguments."""
        found = np.empty((len(points), self._first[-1]))
        for begin in range(0, found.shape[1], PART):
            part = slice(begin, min(begin + PART, found.shape[1]))
            found[:, part] = cdist(points, self._rows[part], _SCIPY_METRICS[self.metric])
        return found

    def _blocks(self, num: int) -> Iterator[slice]:
        """Rows in blocks whose distances to all centroids take at most `BLOCK_BYTES`, with at least one row."""
        size = max(BLOCK_BYTES // (8 * self._first[-1]), 1)
        return (slice(begin, min(begin + size, num)) for begin in range(0, num, size))


def calibrate(own: Float[np.ndarray, "N"]) -> Float[np.ndarray, "Q"]:
    """Quantiles of a task's distances from its own validation images, which open-set prediction stores."""
    return np.quantile(own, np.linspace(0, 1, NUM_QUANTILES)).astype(np.float32)


def threshold(quantiles: Float[np.ndarray, "Q"], rate: float) -> float:
    """The distance above which an image is rejected, so that about a share `rate` of the task's own images is.

    Raises ValueError unless 0 < rate < 1.
    """
    if not 0 < rate < 1:
        raise ValueError(
            f"open_set is {rate}; expected the share of own images to reject, between 0 and 1, such as 0.05"
        )
    return float(np.interp(1 - rate, np.linspace(0, 1, len(quantiles)), quantiles))
