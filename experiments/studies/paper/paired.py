"""Is one method better than another? Estimates with intervals from runs that share seeds, tasks and
test images.

All resample two things at once and independently: the seeds, and the images within each task (or
the tasks). A test image or a task that is drawn is drawn for every seed and for both sides, as all
of them met the same ones. Differences of accuracy have a second, wider interval for which the tasks
are drawn as well: for other tasks like these.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int
from scipy.stats import rankdata

RESAMPLES = 10_000
SEED = 20_261
LEVEL = 0.95
NOTHING = 1e-12
"""Below it a resampled value is zero but for rounding."""

Right = Sequence[Sequence[Bool[np.ndarray, "_"]]]
"""By seed and by task: which test images were answered rightly."""


class Estimate(NamedTuple):
    """A mean over seeds, its 95 % interval and the two-sided p of no difference; fractions, not
    percent."""

    value: float
    low: float
    high: float
    p: float
    per_seed: tuple[float, ...]
    over_tasks: tuple[float, float] | None = None
    """The interval with the tasks drawn too, where `low` and `high` keep them as they are."""


def accuracy_difference(ours: Right, theirs: Right, *, resamples: int = RESAMPLES) -> Estimate:
    """Mean over tasks of the accuracy of `ours` minus that of `theirs`, row s of both being one
    seed.

    Of one seed the interval is over test images alone. Raises ValueError where seeds, tasks or
    images differ in number.
    """
    sizes = [[[len(task) for task in seed] for seed in side] for side in (ours, theirs)]
    if (
        not sizes[0]
        or sizes[0] != sizes[1]
        or any(not row or row != sizes[0][0] or 0 in row for row in sizes[0])
    ):
        raise ValueError(
            f"the sides hold {sizes[0]} and {sizes[1]} test images by seed and task; expected the"
            " same tasks with the same images for every seed of both"
        )
    rng = np.random.default_rng(SEED)
    weights = _drawn_seeds(rng, len(ours), resamples)
    num_tasks = len(ours[0])
    drawn, per_seed = np.zeros((resamples, num_tasks)), np.zeros(len(ours))
    for task in range(num_tasks):
        pairs = zip(ours, theirs, strict=True)
        lead = np.stack(
            [a[task].astype(np.int8) - b[task].astype(np.int8) for a, b in pairs], axis=1
        )  # [N, S]
        # images that the seeds answered alike are one class, and only the number drawn from each
        # class matters
        patterns, counts = np.unique(lead, axis=0, return_counts=True)
        images = rng.multinomial(len(lead), counts / len(lead), size=resamples) / len(lead)
        drawn[:, task] = ((images @ patterns) * weights).sum(axis=1)
        per_seed += lead.mean(axis=0) / num_tasks
    tasks = (
        rng.multinomial(num_tasks, np.full(num_tasks, 1 / num_tasks), size=resamples) / num_tasks
    )
    low, high = _interval((drawn * tasks).sum(axis=1))
    return _estimate(per_seed, drawn.mean(axis=1))._replace(over_tasks=(low, high))


def mean_difference(ours: Float[np.ndarray, "S T"], theirs: Float[np.ndarray, "S T"]) -> Estimate:
    """Mean over seeds and tasks of a difference that has no images: seeds and tasks are
    resampled."""
    rng = np.random.default_rng(SEED)
    lead = ours - theirs
    num_seeds, num_tasks = lead.shape
    tasks = (
        rng.multinomial(num_tasks, np.full(num_tasks, 1 / num_tasks), size=RESAMPLES) / num_tasks
    )
    drawn = ((tasks @ lead.T) * _drawn_seeds(rng, num_seeds, RESAMPLES)).sum(axis=1)
    return _estimate(lead.mean(axis=1), drawn)


def rank_correlation(x: Float[np.ndarray, "S T"], y: Float[np.ndarray, "S T"]) -> Estimate:
    """Spearman's coefficient over tasks, mean over seeds; seeds and tasks are resampled for the
    interval.

    p is of the permutation of tasks, the same one for every seed. Raises ValueError where a row
    holds one value only: then there is no coefficient.
    """
    if any(len(np.unique(row)) == 1 for row in (*x, *y)):
        raise ValueError(
            "a rank correlation needs at least two different values in every row; one has only one"
        )
    rng = np.random.default_rng(SEED)
    num_seeds, num_tasks = x.shape
    per_seed = _spearman(x, y)
    seeds = rng.integers(num_seeds, size=(RESAMPLES, num_seeds, 1))
    tasks = rng.integers(num_tasks, size=(RESAMPLES, 1, num_tasks))
    drawn = _spearman(x[seeds, tasks], y[seeds, tasks]).mean(axis=-1)
    orders = rng.permuted(np.tile(np.arange(num_tasks), (RESAMPLES, 1)), axis=1)
    by_chance = _spearman(x, y[np.arange(num_seeds)[:, None], orders[:, None, :]]).mean(axis=-1)
    as_far = np.count_nonzero(np.abs(by_chance) >= abs(per_seed.mean()) - NOTHING)
    return _estimate(per_seed, drawn)._replace(p=(1 + as_far) / (RESAMPLES + 1))


def _drawn_seeds(
    rng: np.random.Generator, num_seeds: int, resamples: int
) -> Float[np.ndarray, "R S"]:
    counts: Int[np.ndarray, "R S"] = rng.multinomial(
        num_seeds, np.full(num_seeds, 1 / num_seeds), size=resamples
    )
    return counts / num_seeds


def _spearman(
    x: Float[np.ndarray, "*X T"], y: Float[np.ndarray, "*Y T"]
) -> Float[np.ndarray, "*Z"]:
    """Over the last axis, ties sharing their mean rank; 0 where a side is constant, as in some
    resamples."""
    a, b = (rankdata(values, axis=-1) for values in (x, y))
    a, b = (ranks - ranks.mean(axis=-1, keepdims=True) for ranks in (a, b))
    scale = np.sqrt((a**2).sum(axis=-1) * (b**2).sum(axis=-1))
    covariance = (a * b).sum(axis=-1)
    return np.divide(covariance, scale, out=np.zeros_like(covariance), where=scale > 0)


def _estimate(per_seed: Float[np.ndarray, "S"], drawn: Float[np.ndarray, "R"]) -> Estimate:
    low, high = _interval(drawn)
    rarer = min(np.count_nonzero(drawn <= NOTHING), np.count_nonzero(drawn >= -NOTHING))
    p = min(1.0, 2 * (1 + rarer) / (len(drawn) + 1))
    return Estimate(float(per_seed.mean()), low, high, p, tuple(per_seed.tolist()))


def _interval(drawn: Float[np.ndarray, "R"]) -> tuple[float, float]:
    low, high = np.quantile(drawn, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)
