"""Compute class statistics of a task, and select the best candidate for an extended task.

The statistics of a task are the number of images and the mean feature of each class (`counts`,
`means`), and one within-class `covariance` for all classes. The features are computed by the
network of the task. Images of earlier classes are not stored, so samples from normal distributions
replace these images.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int
from scipy.optimize import minimize_scalar

from cheem_jax.core.metrics import MOST_TEMPERATURE, fit_temperature, log_probability
from cheem_jax.core.pool import Head, TaskMemory, compute_logits
from cheem_jax.core.routing import (
    NUM_QUANTILES,
    TaskStatistics,
    packed,
    unpacked,
    whitening_matrix,
)
from cheem_jax.data.files import composed
from cheem_jax.data.task import Split, Task, spelled_as

Statistics = Mapping[str, np.ndarray]
SAMPLES = 20_000
"""Number of features that are sampled for a task, divided among its classes. At least 10 and at
most 200 features are sampled per class."""
MOVE_PENALTIES = (0.001, 0.01, 0.1, 1.0, 10.0)
"""Ridge penalties per image; `move_samples` selects one of them by cross-validation."""
SHRINKAGE = 0.1
"""Fraction of the covariance of a discriminant head that is replaced by a multiple of the
identity."""


def label_among(learned: Sequence[str], task: Task) -> Task:
    """Relabel the images of `task`: its classes become the learned classes, followed by the new
    classes.

    Classes are matched by name. Raises ValueError if a name differs from a learned name only in
    upper and lower case.
    """
    names = spelled_as(task.classes, learned)
    by_case = {composed(name).casefold(): name for name in learned}
    new = [name for name in names if name not in learned]
    clashes = [
        f"{name!r} and {by_case[key]!r}"
        for name in new
        if (key := composed(name).casefold()) in by_case
    ]
    if clashes:
        raise ValueError(
            f"task {task.name!r}: new and learned classes differ in upper and lower case alone:"
            f" {', '.join(clashes[:4])}; give equal classes the learned name, and others another"
            " one"
        )
    classes = (*learned, *new)
    labels = np.array([classes.index(name) for name in names], np.int32)
    parts = {name: Split(split.images, labels[split.labels]) for name, split in task.splits.items()}
    # learned classes can lack images, which only the purpose `measure` accepts
    return dataclasses.replace(task, classes=classes, **parts, purpose="measure")


def absent_classes(task: Task, learned: TaskMemory) -> list[str]:
    """List the learned classes that have no new image.

    Raises ValueError if there are such classes, but the task has no statistics to replace their
    images.
    """
    present = set(task.train.labels.tolist())
    absent = [name for label, name in enumerate(learned.classes) if label not in present]
    if absent and not learned.statistics:
        raise ValueError(
            f"task {task.name!r} has no statistics of its classes (it was learned in a run), so it"
            " can only be extended with new images of every learned class; absent:"
            f" {', '.join(map(repr, absent[:8]))}"
        )
    return absent


def can_finetune(task: Task, learned: TaskMemory, num_before: int) -> bool:
    """Return whether fine-tuning is a candidate for an extension.

    The new images have to contain every learned class, and their number has to be at least
    `num_before`, the number of earlier training images. For a task without statistics, fine-tuning
    is the only way to add classes, so any number of images is sufficient.
    """
    if absent_classes(task, learned):
        return False
    is_only_way = not learned.statistics and len(task.classes) > len(learned.classes)
    return is_only_way or len(task.train.labels) >= num_before


class Candidate(NamedTuple):
    """A candidate for the extended task, and its accuracies in [0, 1]."""

    kind: Literal["unchanged", "head", "network"]
    head: Head
    new: float
    """Accuracy on the new validation images."""
    old: float | None
    """Accuracy on samples of the earlier classes; None if the task has no statistics."""


def best_candidate(candidates: Sequence[Candidate]) -> Candidate:
    """Select the most accurate candidate.

    If the first candidate is the unchanged task, another candidate is selected only if it is more
    accurate on the new validation images and not less accurate on the samples of earlier classes.
    If the first candidate is not the unchanged task, the task has new classes. In this case, the
    candidate with the highest sum of both accuracies is selected.
    """
    first = candidates[0]
    if first.kind != "unchanged":
        return max(candidates, key=lambda one: one.new + (one.old or 0))
    better = [
        one for one in candidates[1:] if one.new > first.new and (one.old or 0) >= (first.old or 0)
    ]
    return max(better, key=lambda one: one.new, default=first)


def sample_features(
    statistics: Statistics, seed: int
) -> tuple[Float[np.ndarray, "S D"], Int[np.ndarray, "S"]]:
    """Sample features from one normal distribution per class, and return them with their labels.
    Without statistics, both arrays are empty."""
    if not statistics:
        return np.zeros((0, 0)), np.zeros(0, np.int32)
    means = statistics["means"].astype(np.float64)
    num = int(np.clip(SAMPLES // len(means), 10, 200))
    values, vectors = np.linalg.eigh(unpacked(statistics["covariance"]))
    noise = np.random.default_rng(seed).standard_normal((len(means) * num, means.shape[1]))
    labels = np.repeat(np.arange(len(means), dtype=np.int32), num)
    return means[labels] + noise @ (vectors * np.sqrt(np.maximum(values, 0))).T, labels


def move_samples(
    samples: Float[np.ndarray, "S D"],
    before: Float[np.ndarray, "N D"],
    after: Float[np.ndarray, "N D"],
) -> Float[np.ndarray, "S D"]:
    """Map sampled features of one network to the features of another network.

    The map adds a difference that a ridge regression predicts. The regression is fitted to `before`
    and `after`, the features of the same images in both networks.
    """
    from sklearn.linear_model import RidgeCV  # imported here, because the import is slow

    ridge = RidgeCV(len(before) * np.array(MOVE_PENALTIES)).fit(before, after - before)
    return samples + ridge.predict(samples)


def new_temperature(
    task: TaskMemory,
    head: Head,
    samples: Float[np.ndarray, "S D"],
    labels: Int[np.ndarray, "S"],
    val: Float[np.ndarray, "V D"],
    val_labels: Int[np.ndarray, "V"],
) -> float:
    """Fit the temperature of `head`, a new head on the network of `task`.

    Returns the geometric mean of two temperatures whose errors have opposite signs. With the first
    temperature, samples of the earlier classes have the same mean log-probability as with the
    task's old head and old temperature. The first temperature is too low if many classes are new:
    samples are easier to classify than images, and new classes lower the log-probability of earlier
    classes. The second temperature is fitted to the new validation images. The second temperature
    is too high, because the network has not learned the classes of these images.
    """
    wanted = log_probability(compute_logits(samples, task.head) / task.temperature, labels)
    logits = compute_logits(samples, head)
    bound = float(np.log(MOST_TEMPERATURE))

    def difference(log_temperature):
        return abs(log_probability(logits / np.exp(log_temperature), labels) - wanted)

    fit: Any = minimize_scalar(difference, bounds=(-bound, bound), method="bounded")
    return float(np.sqrt(np.exp(fit.x) * fit_temperature(compute_logits(val, head), val_labels)))


def class_statistics(
    features: Float[np.ndarray, "N D"], labels: Int[np.ndarray, "N"], num_classes: int
) -> dict[str, np.ndarray]:
    """Compute the number of images and the mean feature of each class, and one within-class
    covariance for all classes. The mean of a class without images is zero."""
    points = features.astype(np.float64)
    counts = np.bincount(labels, minlength=num_classes)
    means = np.zeros((num_classes, points.shape[1]))
    np.add.at(means, labels, points)
    means /= np.maximum(counts, 1)[:, None]
    deviations = points - means[labels]
    return {
        "counts": counts,
        "means": means.astype(np.float32),
        "covariance": packed(deviations.T @ deviations / len(points)),
    }


def add_statistics(old: Statistics, new: Statistics) -> dict[str, np.ndarray]:
    """Combine the statistics of old and new images, computed from the features of one network.

    `new` can have additional classes, which follow the classes of `old`.
    """
    num_new = len(new["counts"]) - len(old["counts"])
    counts = np.pad(old["counts"], (0, num_new))
    means = np.pad(old["means"], ((0, num_new), (0, 0)))
    total = counts + new["counts"]
    share = new["counts"] / np.maximum(total, 1)
    shift = new["means"].astype(np.float64) - means
    between = (shift * (counts * share)[:, None]).T @ shift
    within = sum(one["counts"].sum() * unpacked(one["covariance"]) for one in (old, new))
    return {
        "counts": total,
        "means": (means + share[:, None] * shift).astype(np.float32),
        "covariance": packed((within + between) / total.sum()),
    }


def add_router_statistics(
    old: TaskStatistics, new: TaskStatistics, labels: Int[np.ndarray, "N"], num_classes: int
) -> TaskStatistics:
    """Combine the router's statistics of old and new images; `labels` belong to the new images.

    With an `lda` router, the result equals the statistics computed from all images at once. With a
    `kmeans` router, the centroids of the new images are appended to the old centroids.
    """
    if not new.moments:
        return TaskStatistics(np.concatenate([old.centroids, new.centroids]))
    present = np.unique(labels)
    means = np.zeros((num_classes, new.centroids.shape[1]), np.float32)
    means[present] = new.centroids
    together = add_statistics(
        {
            "counts": old.moments["counts"],
            "means": old.centroids,
            "covariance": old.moments["scatter"],
        },
        {
            "counts": np.bincount(labels, minlength=num_classes),
            "means": means,
            "covariance": new.moments["scatter"],
        },
    )
    counts = together["counts"].astype(np.float32)
    return TaskStatistics(together["means"], {"scatter": together["covariance"], "counts": counts})


def mix_quantiles(
    old: Float[np.ndarray, "Q"], new: Float[np.ndarray, "Q"], share: float
) -> Float[np.ndarray, "Q"]:
    """Compute the quantiles of a mixture of two sets of distances. `old` and `new` are the
    quantiles of the sets, and `share` and 1 - `share` are the weights of the sets."""
    weights = np.repeat([share, 1 - share], NUM_QUANTILES)
    steps = np.linspace(0, 1, NUM_QUANTILES)
    mixed = np.quantile(np.concatenate([old, new]), steps, weights=weights, method="inverted_cdf")
    return mixed.astype(np.float32)


def discriminant_head(statistics: Statistics, old: Head) -> Head:
    """Compute a head by linear discriminant analysis with one covariance for all classes.

    The head predicts the class whose mean has the smallest Mahalanobis distance. Its weights are
    scaled to the norm of the old head's weights, so that probabilities stay similar. The first
    columns of the new head belong to the classes of the old head.
    """
    whitening = whitening_matrix(unpacked(statistics["covariance"]), SHRINKAGE)
    means = statistics["means"].astype(np.float64)
    weight = whitening @ (means @ whitening).T
    bias = -(means.T * weight).sum(axis=0) / 2
    norms = [
        np.linalg.norm(columns - columns.mean(axis=1, keepdims=True))
        for columns in (np.asarray(old.weight), weight[:, : old.bias.shape[0]])
    ]
    # with a single class, the norm is 0, because there are no differences between columns
    scale = norms[0] / norms[1] if min(norms) > 1e-12 else 1.0
    return Head(jnp.asarray(scale * weight, jnp.float32), jnp.asarray(scale * bias, jnp.float32))
