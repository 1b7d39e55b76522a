"""Ridge regression on random features, in float64 on the host, for MoAL and RanPAC.

JAX computes in float32, which is not precise enough for the second moments of thousands of
features.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import scipy.linalg
from jaxtyping import Float, Int

from cheem_jax.core.settings import Advance, no_progress

RIDGES = tuple(10.0**power for power in range(-8, 9))
"""Candidate penalties of the regression."""
ANALYTIC_BATCH = 512
"""Number of images per step of a regression."""

Factor = tuple[np.ndarray, bool]
"""Result of SciPy's `cho_factor`: a Cholesky factor, and whether it is lower triangular."""
Lifted = Iterator[tuple[np.ndarray, np.ndarray]]
"""Batches of random features and their targets."""


def lift(
    features: Float[np.ndarray, "N D"], projection: Float[np.ndarray, "H D"]
) -> Float[np.ndarray, "N H"]:
    """Compute random features in float64."""
    return np.maximum(features.astype(np.float64) @ projection.T.astype(np.float64), 0)


def one_hot(labels: Int[np.ndarray, "N"], num: int) -> Float[np.ndarray, "N C"]:
    """Return one-hot targets for the regression."""
    return np.eye(num)[labels]


def steps(order: np.ndarray) -> Iterator[np.ndarray]:
    """Divide row numbers into the steps of a regression."""
    starts = range(0, len(order), ANALYTIC_BATCH)
    return (order[start : start + ANALYTIC_BATCH] for start in starts)


def ridge_logits(
    features: Float[np.ndarray, "N D"],
    projection: Float[np.ndarray, "H D"],
    weight: Float[np.ndarray, "H C"],
) -> Float[np.ndarray, "N C"]:
    """Compute the logits of a regression: random features times `weight`."""
    parts = steps(np.arange(len(features)))
    return np.concatenate([lift(features[part], projection) @ weight for part in parts])


def second_moments(rows: Lifted) -> tuple[Float[np.ndarray, "H H"], Float[np.ndarray, "H C"]]:
    """Return two sums over images: the products of the random features with each other, and the
    products of the random features with the targets."""
    moments: Any = 0.0
    products: Any = 0.0
    for lifted, targets in rows:
        moments += lifted.T @ lifted
        products += lifted.T @ targets
    return np.asarray(moments), np.asarray(products)


def moments_and_penalty(
    features: Float[np.ndarray, "N D"],
    labels: Int[np.ndarray, "N"],
    num: int,
    projection: Float[np.ndarray, "H D"],
    order: Int[np.ndarray, "N"],
    advance: Advance = no_progress,
) -> tuple[Float[np.ndarray, "H H"], Float[np.ndarray, "H C"], float]:
    """Select the penalty of a task's regression. Return both results of `second_moments` for all
    images of the task, and the penalty.

    The penalty is selected on the last fifth of the row numbers in `order`, by a regression on the
    other images.
    """
    fitted, held_out = np.split(order, [max(1, len(features) * 4 // 5)])

    def rows(order: np.ndarray, advance: Advance = no_progress) -> Lifted:
        for part in steps(order):
            yield lift(features[part], projection), one_hot(labels[part], num)
            advance(len(part))

    moments, products = second_moments(rows(fitted, advance))
    # if there is only one image, it is both fitted and held out
    chosen = held_out if len(held_out) else fitted
    if len(fitted) < len(projection):
        # with fewer images than random features, the kernel matrix is smaller than the moments and
        # yields identical predictions
        lifted = lift(features[fitted], projection)
        kernels = [(more @ lifted.T, targets) for more, targets in rows(chosen)]
        targets = one_hot(labels[fitted], num)
        penalty = best_ridge(lifted @ lifted.T, targets, lambda: iter(kernels))
    else:
        penalty = best_ridge(moments, products, lambda: rows(chosen))
    if len(held_out):
        more_moments, more_products = second_moments(rows(held_out, advance))
        moments += more_moments
        products += more_products
    return moments, products, penalty


def best_ridge(
    moments: Float[np.ndarray, "H H"],
    products: Float[np.ndarray, "H C"],
    held_out: Callable[[], Lifted],
) -> float:
    """Select the penalty with the smallest squared error on held-out images (ties: the largest
    penalty)."""
    errors = {}
    for penalty in RIDGES:
        try:
            weight = scipy.linalg.cho_solve(_factor(moments, penalty), products)
        except np.linalg.LinAlgError:
            # the penalty is too small: the moments plus the penalty are singular in float64
            continue
        errors[penalty] = sum(
            float(((lifted @ weight - targets) ** 2).sum()) for lifted, targets in held_out()
        )
    return min(errors, key=lambda penalty: (errors[penalty], -penalty))


def ridge_factor(moments: Float[np.ndarray, "H H"], penalty: float) -> tuple[Factor, float]:
    """Factorise the moments plus a penalty. Return the factor and the final penalty.

    The penalty is multiplied by ten until the sum is not singular in float64.
    """
    while True:
        try:
            return _factor(moments, penalty), penalty
        except np.linalg.LinAlgError:
            penalty *= 10


def ridge_inverse(
    moments: Float[np.ndarray, "H H"], penalty: float
) -> tuple[Float[np.ndarray, "H H"], float]:
    """Invert the moments plus a penalty. Return the inverse and the penalty, which `ridge_factor`
    can increase."""
    factor, penalty = ridge_factor(moments, penalty)
    inverse = scipy.linalg.cho_solve(factor, np.eye(len(moments)))
    return (inverse + inverse.T) / 2, penalty


def _factor(moments: np.ndarray, penalty: float) -> Factor:
    total = moments.copy()
    np.fill_diagonal(total, total.diagonal() + penalty)
    # the transposed view of a symmetric array is in LAPACK's order, so LAPACK needs no copy
    return scipy.linalg.cho_factor(total.T, overwrite_a=True)
