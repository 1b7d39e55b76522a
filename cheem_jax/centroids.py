"""External memory: task centroids of the frozen backbone's features name the task of a test image.

The default is S-Prompts' router, which the paper adopts: L2-normalised features, k-means with K = 5 per task, nearest
centroid in L1 distance, decided per image.
"""

import dataclasses
from collections.abc import Sequence
from typing import Literal

import numpy as np
from jaxtyping import Float, Int
from scipy.spatial.distance import cdist

Metric = Literal["l1", "l2", "cosine"]
_SCIPY_METRICS: dict[Metric, Literal["cityblock", "euclidean", "cosine"]] = {
    "l1": "cityblock",
    "l2": "euclidean",
    "cosine": "cosine",
}


@dataclasses.dataclass(frozen=True)
class RouterConfig:
    """How task centroids are made and compared."""

    num_centroids: int = 5
    """Centroids per task, K; clipped to the number of training images."""
    metric: Metric = "l1"
    """Distance between a test image's normalised feature and a centroid."""

    def __post_init__(self) -> None:
        if self.num_centroids < 1:
            raise ValueError(f"num_centroids is {self.num_centroids}; a task needs at least 1 centroid")


def normalise(features: Float[np.ndarray, "N E"]) -> Float[np.ndarray, "N E"]:
    """Rows scaled to unit L2 norm; a zero row stays zero."""
    return features / np.maximum(np.linalg.norm(features, axis=1, keepdims=True), 1e-12)


def fit_centroids(features: Float[np.ndarray, "N E"], *, seed: int, config: RouterConfig) -> Float[np.ndarray, "K E"]:
    """k-means centroids of one task's training features; not re-normalised."""
    # here, because whoever only answers needs neither, and they take two seconds to import
    from sklearn.cluster import KMeans
    from threadpoolctl import threadpool_limits

    points = normalise(features)
    distinct = len(np.unique(points, axis=0))
    num = min(config.num_centroids, distinct)  # k-means cannot separate equal points
    # scikit-learn documents n_init as int or "auto"; its signature lets a type checker see the text only
    kmeans = KMeans(num, n_init=10, max_iter=300, tol=1e-4, random_state=seed)  # pyright: ignore[reportArgumentType]
    # several threads add up their parts in the order in which they finish, so sums would differ from run to run
    with threadpool_limits(1, user_api="openmp"):
        return kmeans.fit(points).cluster_centers_.astype(np.float32)


def route(
    features: Float[np.ndarray, "N E"], centroids: Sequence[Float[np.ndarray, "_ E"]], config: RouterConfig
) -> Int[np.ndarray, "N"]:
    """The task of each image: that of the nearest centroid, ties to the lowest task."""
    return np.argmin(distances(features, centroids, config), axis=1).astype(np.int32)


def distances(
    features: Float[np.ndarray, "N E"], centroids: Sequence[Float[np.ndarray, "_ E"]], config: RouterConfig
) -> Float[np.ndarray, "N T"]:
    """From each image to the nearest centroid of each task, in the router's metric."""
    points = normalise(features)
    return np.stack([cdist(points, c, _SCIPY_METRICS[config.metric]).min(axis=1) for c in centroids], axis=1)


NUM_QUANTILES = 201


def calibrate(own: Float[np.ndarray, "N"]) -> Float[np.ndarray, "Q"]:
    """What a task keeps of the distances of its validation images: quantiles in steps of half a percent."""
    return np.quantile(own, np.linspace(0, 1, NUM_QUANTILES)).astype(np.float32)


def threshold(quantiles: Float[np.ndarray, "Q"], rate: float) -> float:
    """The distance beyond which an image counts as foreign, so that of a task's own about `rate` do."""
    if not 0 < rate < 1:
        raise ValueError(
            f"open_set is {rate}; expected the share of own images to refuse, between 0 and 1, such as 0.05"
        )
    return float(np.interp(1 - rate, np.linspace(0, 1, len(quantiles)), quantiles))
