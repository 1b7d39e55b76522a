"""Ridge regression on random features: penalties, moments, and sums that float64 cannot solve."""

import numpy as np
import pytest

from cheem_jax.baselines.ridge import (
    RIDGES,
    best_ridge,
    lift,
    moments_and_penalty,
    one_hot,
    ridge_inverse,
    second_moments,
)


def test_the_penalty_is_the_best_on_held_out_images():
    rng = np.random.default_rng(1)
    truth = rng.normal(size=(20, 3))
    x, noisy = rng.normal(size=(200, 20)), rng.normal(size=(200, 3))
    held = rng.normal(size=(50, 20))
    exact = best_ridge(
        *second_moments(iter([(x[:100], x[:100] @ truth), (x[100:], x[100:] @ truth)])),
        lambda: iter([(held, held @ truth)]),
    )
    nothing = best_ridge(
        *second_moments(iter([(x, noisy)])), lambda: iter([(held, np.zeros((50, 3)))])
    )
    assert exact == 1e-8 and nothing == 1e8


def test_a_penalty_too_small_for_float64_grows_until_it_is_not():
    x = np.random.default_rng(0).normal(size=(3, 30)) * 1e6
    inverse, penalty = ridge_inverse(x.T @ x, 1e-8)
    assert 1e-8 < penalty < 1e3 and np.isfinite(inverse).all()


@pytest.mark.parametrize("hidden", [30, 100])
def test_the_penalty_of_a_task_is_the_best_on_its_last_fifth_with_many_or_few_features(hidden):
    rng = np.random.default_rng(3)
    labels = rng.integers(0, 3, 100).astype(np.int32)
    features = (rng.normal(size=(100, 8)) + labels[:, None]).astype(np.float32)
    projection = rng.normal(size=(hidden, 8)).astype(np.float32)
    order = rng.permutation(100)
    moments, products, penalty = moments_and_penalty(features, labels, 3, projection, order)
    x, y = lift(features, projection), one_hot(labels, 3)
    np.testing.assert_allclose(moments, x.T @ x, rtol=1e-10)
    np.testing.assert_allclose(products, x.T @ y, rtol=1e-10)
    # the regression as least squares on more rows, which is never singular
    learned, held_out = np.split(order, [80])
    errors = {}
    for ridge in RIDGES:
        rows = np.concatenate([x[learned], ridge**0.5 * np.eye(hidden)])
        targets = np.concatenate([y[learned], np.zeros((hidden, 3))])
        weight = np.linalg.lstsq(rows, targets, rcond=None)[0]
        errors[ridge] = ((x[held_out] @ weight - y[held_out]) ** 2).sum()
    assert penalty == min(errors, key=errors.__getitem__) and RIDGES[0] < penalty < RIDGES[-1]


def test_a_single_image_is_learned_and_held_out():
    projection = np.eye(4, dtype=np.float32)
    features = np.ones((1, 4), np.float32)
    moments, products, penalty = moments_and_penalty(
        features, np.zeros(1, np.int32), 1, projection, np.zeros(1, np.int64)
    )
    np.testing.assert_array_equal(moments, np.ones((4, 4)))
    np.testing.assert_array_equal(products, np.ones((4, 1)))
    assert penalty == RIDGES[0]
