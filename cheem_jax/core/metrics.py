"""Arithmetic on results, in numpy.

Everywhere an accuracy matrix is `accuracy[learned, task]`: row i was measured after learning task
i, column j on the test images of task j, values in [0, 1] (or all in percent), NaN where task j was
not learned yet.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Integer
from scipy.special import log_softmax

Number = int | float
MOST_TEMPERATURE = 5.0
"""Bound of a fitted temperature, and its inverse: where every validation image is right, any
sharper one is better."""


def average_accuracy(accuracy: Float[np.ndarray, "T T"]) -> float:
    """Mean over all tasks after the last one (paper eq. 'avg_accuracy_lll')."""
    last = accuracy[-1]
    if np.isnan(last).any():
        raise ValueError(
            f"no accuracy after the last task for tasks {np.flatnonzero(np.isnan(last)).tolist()};"
            " for a stream that is not finished pass the square of the tasks learned, accuracy[:t"
            " + 1, :t + 1]"
        )
    return float(last.mean())


def average_forgetting(accuracy: Float[np.ndarray, "T T"]) -> float | None:
    """Mean over all tasks but the last of the best accuracy since learning minus the accuracy at
    the end.

    The best includes the end, so no task counts below 0 (paper eq. 'avg_forgetting'). None for a
    single task.
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
    """Each task's accuracy right after it was learned: the diagonal."""
    return np.diagonal(accuracy).copy()


def figure_of_merit(
    upper: Number, acc_m: Number, flops_m: Number, acc_n: Number, flops_n: Number
) -> float | None:
    """How many times m is better than n: (upper - acc_n) / (upper - acc_m) * flops_n / flops_m (eq.
    'fom').

    `upper` is the upper bound's average accuracy. None where either method reaches it.
    """
    gap_m, gap_n = upper - acc_m, upper - acc_n
    if gap_m <= 0 or gap_n <= 0:
        return None
    return gap_n / gap_m * flops_n / flops_m


def routing_confusion(
    true: Integer[np.ndarray, " B"], chosen: Integer[np.ndarray, " B"], num_tasks: int
) -> Float[np.ndarray, "T T"]:
    """Fraction of each true task's images (row) that went to each task (column); NaN where it has
    none."""
    for name, tasks in (("true", true), ("chosen", chosen)):
        if len(tasks) and not (0 <= tasks.min() and tasks.max() < num_tasks):
            raise ValueError(
                f"{name} tasks span {tasks.min()}..{tasks.max()}, expected 0..{num_tasks - 1}"
            )
    counts = np.zeros((num_tasks, num_tasks))
    np.add.at(counts, (true, chosen), 1)
    totals = counts.sum(axis=1, keepdims=True)
    return np.divide(counts, totals, out=np.full_like(counts, np.nan), where=totals > 0)


def fit_temperature(logits: Float[np.ndarray, "N C"], labels: Integer[np.ndarray, "N"]) -> float:
    """The temperature by which softmax(logits / temperature) gives the labels the highest mean
    log-probability.

    Between 1/5 and 5; 1 where a logit is non-finite.
    """
    if not np.isfinite(logits).all():
        return 1.0

    # here, because it is slow to import and every command imports this module
    from scipy.optimize import minimize_scalar

    def loss(log_temperature):
        return -log_probability(logits / np.exp(log_temperature), labels)

    found: Any = minimize_scalar(
        loss, bounds=(-np.log(MOST_TEMPERATURE), np.log(MOST_TEMPERATURE)), method="bounded"
    )
    return float(np.exp(found.x))


def log_probability(logits: Float[np.ndarray, "N C"], labels: Integer[np.ndarray, "N"]) -> float:
    """Mean log-probability that softmax(logits) gives the labels."""
    return float(
        log_softmax(logits.astype(np.float64), axis=1)[np.arange(len(labels)), labels].mean()
    )


def fitted(logits: Float[np.ndarray, "N C"], labels: Integer[np.ndarray, "N"]) -> tuple[int, float]:
    """Correct answers, and the mean log-probability with the temperature fitted to these images.

    Nothing is correct where a logit is non-finite.
    """
    if not np.isfinite(logits).all():
        return 0, -np.inf
    right = int((logits.argmax(axis=1) == labels).sum())
    return right, log_probability(logits / fit_temperature(logits, labels), labels)


def calibration_error(
    confidence: Float[np.ndarray, "N"], right: Bool[np.ndarray, "N"], num_bins: int = 15
) -> float:
    """Expected calibration error: |accuracy - mean confidence| in bins of equal width, weighted by
    their images."""
    bins = np.minimum((confidence * num_bins).astype(int), num_bins - 1)
    return float(np.abs(np.bincount(bins, right - confidence)).sum() / len(confidence))


def matrix_to_json(matrix: Float[np.ndarray, "R C"]) -> list[list[float | None]]:
    """Nested lists with None (JSON null) for NaN."""
    return [[None if np.isnan(value) else float(value) for value in row] for row in matrix]


def matrix_from_json(rows: Sequence[Sequence[Number | None]]) -> Float[np.ndarray, "R C"]:
    """Inverse of `matrix_to_json`."""
    return np.array(
        [[np.nan if value is None else value for value in row] for row in rows], dtype=np.float64
    )
