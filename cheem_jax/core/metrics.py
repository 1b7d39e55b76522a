"""Metrics, computed with NumPy.

An accuracy matrix is `accuracy[learned, task]`: the entry in row i and column j is the accuracy on
the test images of task j after learning task i. Accuracies are either all in [0, 1] or all in
percent. The accuracy of a task that is not learned yet is NaN.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Integer
from scipy.special import log_softmax

Number = int | float
MOST_TEMPERATURE = 5.0
"""Maximum of a fitted temperature; the minimum is 1 / MOST_TEMPERATURE. Without a minimum, the
temperature would be 0 if all images are classified correctly."""


def average_accuracy(accuracy: Float[np.ndarray, "T T"]) -> float:
    """Compute the mean accuracy over all tasks after the last task (paper eq.
    'avg_accuracy_lll')."""
    last = accuracy[-1]
    if np.isnan(last).any():
        raise ValueError(
            f"tasks {np.flatnonzero(np.isnan(last)).tolist()} have no accuracy after the last task;"
            " for an unfinished stream, pass the part of the learned tasks,"
            " accuracy[:t + 1, :t + 1]"
        )
    return float(last.mean())


def accuracy_curve(
    accuracy: Float[np.ndarray, "T T"], num_images: Integer[np.ndarray, "*steps T"]
) -> Float[np.ndarray, " T"]:
    """Compute the accuracy over all test images of tasks 0..t after learning task t, for each t.

    Every test image of the learned tasks has the same weight. `num_images` contains the number of
    test images (at least 1) of each task, or of each task at each step (`[T, T]`). The result for t
    is NaN if the accuracy of one of the tasks 0..t is NaN.
    """
    learned = np.tri(len(accuracy))
    weights = learned * num_images
    return (weights * np.where(learned, accuracy, 0)).sum(axis=1) / weights.sum(axis=1)


def average_forgetting(accuracy: Float[np.ndarray, "T T"]) -> float | None:
    """Compute the average forgetting over all tasks except the last (paper eq. 'avg_forgetting').

    The forgetting of a task is its best accuracy since it was learned minus its final accuracy. The
    best accuracy includes the final accuracy, so the forgetting of a task is at least 0. Returns
    None for a single task.
    """
    num_tasks = len(accuracy)
    learned = np.tri(num_tasks, dtype=bool)
    missing = np.argwhere(learned & np.isnan(accuracy)).tolist()
    if missing:
        raise ValueError(
            "forgetting needs every accuracy[learned, task] with learned >= task; missing"
            f" {missing}"
        )
    if num_tasks == 1:
        return None
    best = np.where(learned, accuracy, -np.inf).max(axis=0)
    return float((best - accuracy[-1])[:-1].mean())


def just_trained(accuracy: Float[np.ndarray, "T T"]) -> Float[np.ndarray, " T"]:
    """Return the accuracy of each task right after learning it: the diagonal of the matrix."""
    return np.diagonal(accuracy).copy()


def figure_of_merit(
    upper: Number, acc_m: Number, flops_m: Number, acc_n: Number, flops_n: Number
) -> float | None:
    """Compute the figure of merit of method m relative to method n (paper eq. 'fom').

    The value is (upper - acc_n) / (upper - acc_m) * flops_n / flops_m, where `upper` is the average
    accuracy of the upper bound; m is better than n if the value is above 1. Returns None if either
    method reaches `upper`.
    """
    gap_m = upper - acc_m
    gap_n = upper - acc_n
    if gap_m <= 0 or gap_n <= 0:
        return None
    return gap_n / gap_m * flops_n / flops_m


def routing_confusion(
    true: Integer[np.ndarray, " B"], inferred: Integer[np.ndarray, " B"], num_tasks: int
) -> Float[np.ndarray, "T T"]:
    """Compute the fraction of the images of each true task (row) that the router assigns to each
    task (column).

    All task indices are in 0..num_tasks-1. Rows without images are NaN.
    """
    counts = np.zeros((num_tasks, num_tasks))
    np.add.at(counts, (true, inferred), 1)
    totals = counts.sum(axis=1, keepdims=True)
    return np.divide(counts, totals, out=np.full_like(counts, np.nan), where=totals > 0)


class OpenSetMetrics(NamedTuple):
    """Metrics of a score that separates unknown images, which belong to no known task, from known
    images."""

    auroc: float
    """Probability that an unknown image has a larger score than a known image; ties count half."""
    fpr95: float
    """Share of unknown images that are accepted at the smallest threshold that accepts at least
    95 % of the known images."""


def open_set_metrics(
    known_scores: Float[np.ndarray, " N"], unknown_scores: Float[np.ndarray, " M"]
) -> OpenSetMetrics:
    """Compute AUROC and FPR95 from the scores of known and of unknown images.

    Images with large scores are rejected, and a non-finite score counts as the largest finite
    number. Each array must contain at least one score.
    """
    # imported here, because scikit-learn takes a second to import and every command imports this
    # module
    from sklearn.metrics import roc_auc_score, roc_curve

    largest = np.finfo(np.float64).max
    scores = np.concatenate([known_scores, unknown_scores]).astype(np.float64)
    scores = np.where(np.isfinite(scores), scores, largest)
    is_known = np.arange(len(scores)) < len(known_scores)
    # `drop_intermediate=True` could drop the first threshold that accepts 95 % of the known images
    accepted_unknown, accepted_known, _ = roc_curve(is_known, -scores, drop_intermediate=False)
    return OpenSetMetrics(
        float(roc_auc_score(~is_known, scores)),
        float(accepted_unknown[np.argmax(accepted_known >= 0.95)]),
    )


def open_set_steps(
    distances: Float[np.ndarray, "N T"], tasks: Integer[np.ndarray, " N"]
) -> list[OpenSetMetrics]:
    """Compute the open-set metrics after each task t except the last: images of tasks 0..t are
    known, images of later tasks are unknown, and the score is the distance to the nearest of tasks
    0..t.

    `distances` contains the distance from each image to each task; learning a later task must not
    change this distance. `tasks` contains the true task of each image.
    """
    steps = []
    for step in range(distances.shape[1] - 1):
        scores = distances[:, : step + 1].min(axis=1)
        steps.append(open_set_metrics(scores[tasks <= step], scores[tasks > step]))
    return steps


def fit_temperature(logits: Float[np.ndarray, "N C"], labels: Integer[np.ndarray, "N"]) -> float:
    """Fit the temperature in [1/5, 5] that maximises the `log_probability` of the labels. Returns 1
    if a logit is non-finite."""
    if not np.isfinite(logits).all():
        return 1.0

    # imported here, because SciPy's optimizers are slow to import, and every command imports this
    # module
    from scipy.optimize import minimize_scalar

    def loss(log_temperature):
        return -log_probability(logits / np.exp(log_temperature), labels)

    bound = np.log(MOST_TEMPERATURE)
    result: Any = minimize_scalar(loss, bounds=(-bound, bound), method="bounded")
    return float(np.exp(result.x))


def log_probability(logits: Float[np.ndarray, "N C"], labels: Integer[np.ndarray, "N"]) -> float:
    """Compute the mean log-probability of the labels under softmax(logits)."""
    log_probabilities = log_softmax(logits.astype(np.float64), axis=1)
    return float(log_probabilities[np.arange(len(labels)), labels].mean())


def calibration_error(
    confidence: Float[np.ndarray, "N"], correct: Bool[np.ndarray, "N"], num_bins: int = 15
) -> float:
    """Compute the expected calibration error: |accuracy - mean confidence| in bins of equal width,
    weighted by the fraction of images in each bin."""
    bins = np.minimum((confidence * num_bins).astype(int), num_bins - 1)
    return float(np.abs(np.bincount(bins, correct - confidence)).sum() / len(confidence))


def matrix_to_json(matrix: Float[np.ndarray, "R C"]) -> list[list[float | None]]:
    """Convert a matrix to nested lists, with None (JSON null) for NaN."""
    return [[None if np.isnan(value) else float(value) for value in row] for row in matrix]


def matrix_from_json(rows: Sequence[Sequence[Number | None]]) -> Float[np.ndarray, "R C"]:
    """Convert the result of `matrix_to_json` back to a matrix."""
    return np.array(rows, dtype=np.float64)
