"""Differences between methods, with intervals, from runs with the same seeds, tasks and test
images.

The bootstrap resamples seeds and, independently, the images within each task or the tasks. One
resample of images or tasks applies to every seed and to both sides, because all of them had the
same images and tasks. A bootstrap over few seeds underestimates their spread. With two or more
seeds, the interval therefore also contains Student's t interval over the means of the seeds, and
the p of a difference is the larger p of both. Differences in accuracy have a second, wider interval
for which the tasks are resampled, too.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float
from scipy.stats import rankdata, t

RESAMPLES = 10_000
SEED = 20_261
LEVEL = 0.95
ROUNDING = 1e-12
"""Resampled values of at most this size count as zero."""

BySeed = Sequence[Sequence[Bool[np.ndarray, "_"]]]
"""For each seed and task, whether the prediction of each test image is correct."""


class Estimate(NamedTuple):
    """A mean over seeds, its 95 % interval, and the two-sided p of no difference."""

    value: float
    low: float
    high: float
    p: float
    per_seed: tuple[float, ...]
    over_tasks: tuple[float, float] | None = None
    """Interval if the tasks are resampled, too."""


def accuracy_difference(ours: BySeed, theirs: BySeed, *, resamples: int = RESAMPLES) -> Estimate:
    """Estimate the mean over tasks of the accuracy of `ours` minus that of `theirs`, as a fraction.

    Item s of both sides is one seed. The interval of a single seed is over test images only. Raises
    ValueError if the sides differ in the number of seeds, tasks or images.
    """
    sizes = [[[len(task) for task in seed] for seed in side] for side in (ours, theirs)]
    if (
        not sizes[0]
        or sizes[0] != sizes[1]
        or any(not row or row != sizes[0][0] or 0 in row for row in sizes[0])
    ):
        raise ValueError(
            f"the sides have {sizes[0]} and {sizes[1]} test images by seed and task; expected the"
            " same tasks with the same images for every seed of both"
        )
    rng = np.random.default_rng(SEED)
    seeds = _shares(rng, len(ours), resamples)
    num_tasks = len(ours[0])
    resampled = np.zeros((resamples, num_tasks))
    per_seed = np.zeros(len(ours))
    for task in range(num_tasks):
        lead = np.stack(
            [
                a[task].astype(np.int8) - b[task].astype(np.int8)
                for a, b in zip(ours, theirs, strict=True)
            ],
            axis=1,
        )  # [N, S]
        # images with identical differences in all seeds are interchangeable, so their counts are
        # sampled
        patterns, counts = np.unique(lead, axis=0, return_counts=True)
        images = rng.multinomial(len(lead), counts / len(lead), size=resamples) / len(lead)
        resampled[:, task] = ((images @ patterns) * seeds).sum(axis=1)
        per_seed += lead.mean(axis=0) / num_tasks
    over_tasks = _estimate(per_seed, (resampled * _shares(rng, num_tasks, resamples)).sum(axis=1))
    return _estimate(per_seed, resampled.mean(axis=1))._replace(
        over_tasks=(over_tasks.low, over_tasks.high)
    )


def mean_difference(ours: Float[np.ndarray, "S T"], theirs: Float[np.ndarray, "S T"]) -> Estimate:
    """Estimate the mean difference over seeds and tasks of a measure that has no images; seeds and
    tasks are resampled."""
    rng = np.random.default_rng(SEED)
    lead = ours - theirs
    num_seeds, num_tasks = lead.shape
    tasks = _shares(rng, num_tasks, RESAMPLES)
    resampled = ((tasks @ lead.T) * _shares(rng, num_seeds, RESAMPLES)).sum(axis=1)
    return _estimate(lead.mean(axis=1), resampled)


def rank_correlation(x: Float[np.ndarray, "S T"], y: Float[np.ndarray, "S T"]) -> Estimate:
    """Estimate Spearman's coefficient over tasks, as a mean over seeds; seeds and tasks are
    resampled.

    p is that of permuted tasks, with one permutation for all seeds. Raises ValueError for a row of
    identical values, which has no coefficient.
    """
    if any(np.ptp(row) == 0 for row in (*x, *y)):
        raise ValueError("a rank correlation needs at least two different values in every row")
    rng = np.random.default_rng(SEED)
    num_seeds, num_tasks = x.shape
    per_seed = _spearman(x, y)
    seeds = rng.integers(num_seeds, size=(RESAMPLES, num_seeds, 1))
    tasks = rng.integers(num_tasks, size=(RESAMPLES, 1, num_tasks))
    resampled = _spearman(x[seeds, tasks], y[seeds, tasks]).mean(axis=-1)
    orders = rng.permuted(np.tile(np.arange(num_tasks), (RESAMPLES, 1)), axis=1)
    permuted = _spearman(x, y[np.arange(num_seeds)[:, None], orders[:, None, :]]).mean(axis=-1)
    as_large = np.count_nonzero(np.abs(permuted) >= abs(per_seed.mean()) - ROUNDING)
    estimate = _estimate(per_seed, resampled)
    # Student's interval does not know the bounds of a coefficient
    low, high = np.clip([estimate.low, estimate.high], -1, 1).tolist()
    return estimate._replace(low=low, high=high, p=(1 + as_large) / (RESAMPLES + 1))


def _shares(rng: np.random.Generator, num: int, resamples: int) -> Float[np.ndarray, "R N"]:
    """Return how often each of `num` items is in a resample, divided by `num`."""
    return rng.multinomial(num, np.full(num, 1 / num), size=resamples) / num


def _spearman(
    x: Float[np.ndarray, "*X T"], y: Float[np.ndarray, "*Y T"]
) -> Float[np.ndarray, "*Z"]:
    """Compute Spearman's coefficient over the last axis, with ties at their mean rank. It is 0 if
    one side is constant, which a resample can be."""
    a, b = (rankdata(values, axis=-1) for values in (x, y))
    a, b = (ranks - ranks.mean(axis=-1, keepdims=True) for ranks in (a, b))
    scale = np.sqrt((a**2).sum(axis=-1) * (b**2).sum(axis=-1))
    covariance = (a * b).sum(axis=-1)
    return np.divide(covariance, scale, out=np.zeros_like(covariance), where=scale > 0)


def _estimate(per_seed: Float[np.ndarray, "S"], resampled: Float[np.ndarray, "R"]) -> Estimate:
    low, high = _interval(resampled)
    rarer = min(np.count_nonzero(resampled <= ROUNDING), np.count_nonzero(resampled >= -ROUNDING))
    p = min(1.0, 2 * (1 + rarer) / (len(resampled) + 1))
    value = float(per_seed.mean())
    if (num := len(per_seed)) > 1:
        error = per_seed.std(ddof=1) / np.sqrt(num)
        half = float(t.ppf((1 + LEVEL) / 2, num - 1) * error)
        low, high = min(low, value - half), max(high, value + half)
        if error > ROUNDING:
            p = max(p, float(2 * t.sf(abs(value) / error, num - 1)))
    return Estimate(value, float(low), float(high), float(p), tuple(per_seed.tolist()))


def _interval(resampled: Float[np.ndarray, "R"]) -> tuple[float, float]:
    low, high = np.quantile(resampled, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)
