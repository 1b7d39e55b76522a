"""How an exported memory names the task: the router's comparison as part of the program."""

from collections.abc import Callable, Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from cheem_jax.core.routing.config import Metric
from cheem_jax.core.routing.routers import OwnCovariance, RidgeOnTasks, SharedCovariance, make_router
from cheem_jax.core.routing.statistics import projection
from cheem_jax.export.subject import Subject

Distances = Callable[[Float[Array, "B E"]], Float[Array, "B T"]]


def distances_of(subject: Subject) -> Distances:
    """What the router of a memory compares, in float32: features to how far each task is."""
    router = make_router(subject.router).follow([task.place for task in subject.tasks])
    match router:
        case SharedCovariance():
            ends = [*router.first[1:], len(router.rows)]
            own = [router.rows[begin:end] for begin, end in zip(router.first, ends, strict=True)]
            return _shared(_single(router.whitening), [_single(rows) for rows in own])
        case OwnCovariance():
            return _own([(_single(own), _single(rows), size) for own, rows, size in router.parts])
        case RidgeOnTasks():
            width = subject.tasks[0].centroids.shape[1]
            return _ridge(_single(projection(width, subject.router.projections)), _single(router.weights))
        case _:
            return to_centroids(subject)


def to_centroids(subject: Subject) -> Distances:
    """To the nearest centroid of each task: what thresholds of the open set are about, whatever names the task."""
    centroids = _rectangular([task.centroids for task in subject.tasks])
    return lambda features: distances_to(features, centroids, subject.router.metric)


def joined(parts: Sequence[Float[Array, "B D"]]) -> Float[Array, "B E"]:
    """See `routing.statistics.joined`."""
    return parts[0] if len(parts) == 1 else jnp.concatenate([_unit(part) for part in parts], axis=1)


def distances_to(
    features: Float[Array, "B E"], centroids: Float[np.ndarray, "T K E"], metric: Metric
) -> Float[Array, "B T"]:
    """To the nearest centroid of each task, as `CentroidIndex` compares them."""
    points = _unit(features)[:, None]
    flat = centroids.reshape(-1, centroids.shape[-1])
    match metric:
        case "l1":
            found = jnp.abs(points - flat).sum(axis=-1)
        case "l2":
            found = jnp.sqrt(((points - flat) ** 2).sum(axis=-1))
        case "cosine":
            found = 1.0 - (points * (flat / np.linalg.norm(flat, axis=1, keepdims=True))).sum(axis=-1)
    return found.reshape(-1, *centroids.shape[:2]).min(axis=2)


def _shared(whitening: np.ndarray, rows: Sequence[np.ndarray]) -> Distances:
    def distances(features):
        points = _unit(features) @ whitening
        return jnp.sqrt(jnp.stack([_nearest(points, own) for own in rows], axis=1))

    return distances


def _own(parts: Sequence[tuple[np.ndarray, np.ndarray, float]]) -> Distances:
    def distances(features):
        points = _unit(features)
        return jnp.stack([_nearest(points @ own, rows) + size for own, rows, size in parts], axis=1)

    return distances


def _ridge(directions: np.ndarray, weights: np.ndarray) -> Distances:
    return lambda features: -(jnp.maximum(_unit(features) @ directions, 0) @ weights)


def _nearest(points: Float[Array, "B E"], rows: Float[np.ndarray, "C E"]) -> Float[Array, "B"]:
    # squares of differences: in float32 the expanded form would cancel
    return ((points[:, None] - rows) ** 2).sum(axis=-1).min(axis=1)


def _single(values: np.ndarray) -> np.ndarray:
    return values.astype(np.float32)


def _unit(features: Float[Array, "B E"]) -> Float[Array, "B E"]:
    norm = jnp.sqrt((features * features).sum(axis=1, keepdims=True))
    return features / jnp.maximum(norm, 1e-12)


def _rectangular(centroids: list[np.ndarray]) -> Float[np.ndarray, "T K E"]:
    """Tasks with fewer centroids repeat their first one."""
    most = max(map(len, centroids))
    return np.stack([np.concatenate([c, np.repeat(c[:1], most - len(c), axis=0)]) for c in centroids])
