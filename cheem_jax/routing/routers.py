"""Naming the task of each image from what all tasks keep."""

import abc
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Int
from scipy.linalg import cho_factor, cho_solve, solve_triangular

from cheem_jax.routing.centroids import CentroidIndex, normalise
from cheem_jax.routing.config import Place, RouterConfig
from cheem_jax.routing.statistics import random_features, unpacked


class Router(abc.ABC):
    """The statistics of all tasks, ready for many questions."""

    def __init__(self, config: RouterConfig):
        self.config = config
        self._places: tuple[Place, ...] = ()

    def __len__(self) -> int:
        """Tasks."""
        return len(self._places)

    def follow(self, places: Sequence[Place]) -> "Router":
        """Make it the router of these tasks, and return it; nothing is done where it is that already."""
        pairs = zip(self._places, places, strict=False)
        if len(places) != len(self) or any(old.centroids is not new.centroids for old, new in pairs):
            self._places = tuple(places)
            self._update()
        return self

    @abc.abstractmethod
    def distances(self, features: Float[np.ndarray, "N E"]) -> Float[np.ndarray, "N T"]:
        """How far each image is from each task; the smaller, the nearer, and for some kinds below 0."""

    def route(self, features: Float[np.ndarray, "N E"]) -> Int[np.ndarray, "N"]:
        """The task of each image: the nearest, ties to the lowest."""
        return self.distances(features).argmin(axis=1).astype(np.int32)

    @abc.abstractmethod
    def _update(self) -> None:
        """Make ready what the places say."""

    def _total(self, moment: str) -> Float[np.ndarray, "E E"]:
        """The sum of a symmetric matrix over the tasks, in their order."""
        total = unpacked(self._places[0].moments[moment])
        for place in self._places[1:]:
            total += unpacked(place.moments[moment])
        return total


class NearestCentroid(Router):
    """The task of the nearest centroid (`kmeans`) or class mean (`class_means`) in the router's metric."""

    def __init__(self, config: RouterConfig):
        super().__init__(config)
        self.index = CentroidIndex(config.metric)

    def distances(self, features: Float[np.ndarray, "N E"]) -> Float[np.ndarray, "N T"]:
        """See `Router.distances`."""
        return self.index.distances(features)

    def route(self, features: Float[np.ndarray, "N E"]) -> Int[np.ndarray, "N"]:
        """See `Router.route`."""
        return self.index.route(features)

    def _update(self) -> None:
        self.index.follow([place.centroids for place in self._places])


class SharedCovariance(Router):
    """Linear discriminant analysis: the nearest class mean by Mahalanobis distance under one covariance.

    It is the mean over tasks of their scatter within classes, so that no task counts more for having more images;
    a running sum over tasks and nothing else changes when one is added.
    """

    whitening: Float[np.ndarray, "E E"]
    """Maps features to where the covariance is the identity."""
    rows: Float[np.ndarray, "C E"]
    """All class means there."""
    first: Int[np.ndarray, "T"]
    """The row of each task's first class."""

    def distances(self, features: Float[np.ndarray, "N E"]) -> Float[np.ndarray, "N T"]:
        """See `Router.distances`: Mahalanobis."""
        squared = squared_distances(normalise(features) @ self.whitening, self.rows)
        return as_float32_tells(np.sqrt(np.minimum.reduceat(squared, self.first, axis=1)))

    def _update(self) -> None:
        scatter = self._total("scatter") / len(self)
        self.whitening, _ = whitening_of(scatter, self.config.shrinkage)
        self.rows = np.concatenate([place.centroids for place in self._places]) @ self.whitening
        self.first = np.cumsum([0, *(len(place.centroids) for place in self._places[:-1])])


class OwnCovariance(Router):
    """Gaussians about the class means of each task, which share the covariance within its classes.

    What is compared is minus twice the log-density of the nearest class, up to a constant.
    """

    parts: list[tuple[np.ndarray, np.ndarray, float]]
    """Per task: whitening, class means there, log-determinant of the covariance."""

    def distances(self, features: Float[np.ndarray, "N E"]) -> Float[np.ndarray, "N T"]:
        """See `Router.distances`."""
        points = normalise(features)
        found = [squared_distances(points @ own, rows).min(axis=1) + size for own, rows, size in self.parts]
        return np.stack(found, axis=1)

    def _update(self) -> None:
        self.parts = []
        for place in self._places:
            own, size = whitening_of(unpacked(place.moments["scatter"]), self.config.shrinkage)
            self.parts.append((own, place.centroids @ own, size))


class RidgeOnTasks(Router):
    """Ridge regression on task indicators from random features, its sums balanced over tasks (RanPAC, eq. 4)."""

    weights: Float[np.ndarray, "M T"]

    def distances(self, features: Float[np.ndarray, "N E"]) -> Float[np.ndarray, "N T"]:
        """See `Router.distances`: minus what the regression answers."""
        return as_float32_tells(-(random_features(normalise(features), self.config.projections) @ self.weights))

    def _update(self) -> None:
        gram = self._total("gram")
        gram += self.config.penalty * np.trace(gram) / len(gram) * np.eye(len(gram))
        means = np.stack([place.moments["mean"] for place in self._places], axis=1).astype(np.float64)
        self.weights = cho_solve(cho_factor(gram), means)


def make_router(config: RouterConfig) -> Router:
    """The router of a configuration, of no task yet."""
    kinds = {"lda": SharedCovariance, "gaussian": OwnCovariance, "ridge": RidgeOnTasks}
    return kinds.get(config.kind, NearestCentroid)(config)


def whitening_of(scatter: Float[np.ndarray, "E E"], shrinkage: float) -> tuple[Float[np.ndarray, "E E"], float]:
    """Maps to where the shrunk covariance is the identity; and the logarithm of its determinant."""
    size, scale = len(scatter), np.trace(scatter) / len(scatter)
    # a task of equal images has no scatter at all, and a zero matrix no inverse
    shrunk = (1 - shrinkage) * scatter + max(shrinkage * scale, 1e-12) * np.eye(size)
    factor = np.linalg.cholesky(shrunk)
    whitening = solve_triangular(factor, np.eye(size), lower=True).T
    return whitening, float(2 * np.log(np.diag(factor)).sum())


def as_float32_tells(distances: Float[np.ndarray, "N T"]) -> Float[np.ndarray, "N T"]:
    """Distances as float32 tells them apart, which is what the features hold.

    What is finer is the rounding of a matrix product. On some processors it differs between equal columns, and equal
    tasks would no longer tie.
    """
    return distances.astype(np.float32).astype(np.float64)


def squared_distances(points: Float[np.ndarray, "N E"], rows: Float[np.ndarray, "C E"]) -> Float[np.ndarray, "N C"]:
    """Squared Euclidean distances by one matrix product."""
    own = np.einsum("ne,ne->n", points, points)[:, None] + np.einsum("ce,ce->c", rows, rows)
    return np.maximum(own - 2 * points @ rows.T, 0)
