"""Task-ID inference: routers over the statistics of all tasks."""

import abc
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Int
from scipy.linalg import cho_factor, cho_solve, solve_triangular

from cheem_jax.core.routing.centroids import CentroidIndex, normalise
from cheem_jax.core.routing.config import RouterConfig, TaskStatistics
from cheem_jax.core.routing.statistics import random_features, unpacked


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
        """Distance of each image from each task: smaller is nearer; for some kinds it may be negative."""

    def route(self, features: Float[np.ndarray, "N E"]) -> Int[np.ndarray, "N"]:
        """The nearest task of each image (ties: the lowest)."""
        return self.distances(features).argmin(axis=1).astype(np.int32)

    @abc.abstractmethod
    def _update(self) -> None:
        """Compute what distances need from the tasks' statistics."""

    def _total(self, moment: str) -> Float[np.ndarray, "E E"]:
        """The sum of a symmetric matrix over all tasks, in their order, on which the last bits depend."""
        total = unpacked(self._tasks[0].moments[moment])
        for task in self._tasks[1:]:
            total += unpacked(task.moments[moment])
        return total


class NearestCentroid(Router):
    """The task of the nearest centroid (`kmeans`) or class mean (`class_means`) in the router's metric."""

    def __init__(self, config: RouterConfig):
        super().__init__(config)
        self.index = CentroidIndex(config.metric)

    def distances(self, features: Float[np.ndarray, "N E"]) -> Float[np.ndarray, "N T"]:
        return self.index.distances(features)

    def route(self, features: Float[np.ndarray, "N E"]) -> Int[np.ndarray, "N"]:
        return self.index.route(features)

    def _update(self) -> None:
        self.index.follow([task.centroids for task in self._tasks])


class SharedCovariance(Router):
    """Linear discriminant analysis: the nearest class mean by Mahalanobis distance under one covariance.

    The covariance is the mean over tasks of the scatter within their classes, so that tasks with more images have no
    more weight. A new task only adds its scatter to the sum.
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
        found = [squared_distances(points @ own, rows).min(axis=1) + size for own, rows, size in self.parts]
        return np.stack(found, axis=1)

    def _update(self) -> None:
        self.parts = []
        for task in self._tasks:
            own, size = whitening_of(unpacked(task.moments["scatter"]), self.config.shrinkage)
            self.parts.append((own, task.centroids @ own, size))


class RidgeOnTasks(Router):
    """Ridge regression of task IDs on random features, with the same weight for every task (RanPAC, eq. 4)."""

    weights: Float[np.ndarray, "M T"]

    def distances(self, features: Float[np.ndarray, "N E"]) -> Float[np.ndarray, "N T"]:
        """See `Router.distances`: minus the regression's output."""
        return as_float32_tells(-(random_features(normalise(features), self.config.projections) @ self.weights))

    def _update(self) -> None:
        gram = self._total("gram")
        gram += self.config.penalty * np.trace(gram) / len(gram) * np.eye(len(gram))
        means = np.stack([task.moments["mean"] for task in self._tasks], axis=1).astype(np.float64)
        self.weights = cho_solve(cho_factor(gram), means)


def make_router(config: RouterConfig) -> Router:
    """The router of a configuration, without tasks."""
    kinds = {"lda": SharedCovariance, "gaussian": OwnCovariance, "ridge": RidgeOnTasks}
    return kinds.get(config.kind, NearestCentroid)(config)


def whitening_of(scatter: Float[np.ndarray, "E E"], shrinkage: float) -> tuple[Float[np.ndarray, "E E"], float]:
    """The map to coordinates in which the shrunk covariance is the identity, and the log-determinant of the latter."""
    size, scale = len(scatter), np.trace(scatter) / len(scatter)
    # a task of equal images has no scatter, and a zero matrix no inverse
    shrunk = (1 - shrinkage) * scatter + max(shrinkage * scale, 1e-12) * np.eye(size)
    factor = np.linalg.cholesky(shrunk)
    whitening = solve_triangular(factor, np.eye(size), lower=True).T
    return whitening, float(2 * np.log(np.diag(factor)).sum())


def as_float32_tells(distances: Float[np.ndarray, "N T"]) -> Float[np.ndarray, "N T"]:
    """Distances rounded to float32, the precision of the features.

    Finer differences are rounding errors of a matrix product. On some processors these differ between equal columns,
    and equal tasks would no longer tie.
    """
    return distances.astype(np.float32).astype(np.float64)


def squared_distances(points: Float[np.ndarray, "N E"], rows: Float[np.ndarray, "C E"]) -> Float[np.ndarray, "N C"]:
    """Squared Euclidean distances by one matrix product."""
    own = np.einsum("ne,ne->n", points, points)[:, None] + np.einsum("ce,ce->c", rows, rows)
    return np.maximum(own - 2 * points @ rows.T, 0)
