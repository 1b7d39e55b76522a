"""What each kind of router stores of a task's training features: no image, and no single feature."""

import functools
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Int

from cheem_jax.core.routing.centroids import fit_centroids, normalise
from cheem_jax.core.routing.config import RouterConfig, TaskStatistics


def check_labels(labels: Int[np.ndarray, "N"], config: RouterConfig) -> None:
    """ValueError if such a router cannot be fitted to a task with these training labels."""
    if config.kind == "gaussian" and len(np.unique(labels)) == len(labels):
        raise ValueError(
            "router kind 'gaussian' needs a class of several images, as one image per class has no covariance; set lda"
        )


def fit_statistics(
    features: Float[np.ndarray, "N E"], labels: Int[np.ndarray, "N"], config: RouterConfig, *, seed: int
) -> TaskStatistics:
    """The statistics of one task's training features; `seed` initialises k-means. Raises as `check_labels`."""
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
            moments = {"gram": packed(seen.T @ seen / len(seen)), "mean": seen.mean(axis=0).astype(np.float32)}
            return TaskStatistics(fit_centroids(features, seed=seed, config=config), moments)


def num_kept(config: RouterConfig, width: int, num_classes: int) -> int:
    """Upper bound of the numbers that a router stores of a task with so many classes, for features of this width."""
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
    return parts[0] if len(parts) == 1 else np.concatenate([normalise(part) for part in parts], axis=1)


def class_means(points: Float[np.ndarray, "N E"], labels: Int[np.ndarray, "N"]) -> Float[np.ndarray, "C E"]:
    """The mean of each class that has images."""
    return np.stack([points[labels == label].mean(axis=0) for label in np.unique(labels)]).astype(np.float32)


def random_features(points: Float[np.ndarray, "N E"], num: int) -> Float[np.ndarray, "N M"]:
    """relu(x W) with a Gaussian W of a fixed seed, so that no task has to store it (RanPAC, section 3)."""
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
