"""Gradient training of any pytree: parts of a batch add up, and non-finite values reach no
parameter."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cheem_jax.baselines.fitting import FitBatch, Fitter, Inputs, over_batches
from cheem_jax.core.settings import FitConfig
from cheem_jax.run.training import images_left

RNG = np.random.default_rng(0)
X = RNG.normal(size=(21, 3)).astype(np.float32)
Y = np.arange(21, dtype=np.int32) % 2
CONFIG = FitConfig(epochs=3, learning_rate=0.1)


def loss(weight, fixed, batch: FitBatch):
    return (batch.weights * (batch.inputs["x"] @ weight + fixed - batch.labels) ** 2).sum()


def fitted(fitter, x=X, config=CONFIG, *, batch_size=8, **more):
    return fitter.run(
        fitter.begin(jnp.zeros(3)),
        np.float32(0.5),
        Y,
        Inputs(x=x),
        config,
        batch_size=batch_size,
        order_key=jax.random.key(1),
        noise_key=jax.random.key(2),
        advance=lambda num, note="", /: None,
        **more,
    )


def test_a_batch_computed_in_parts_trains_the_same_as_the_whole_batch():
    whole, parts = (
        fitted(Fitter(loss)),
        fitted(Fitter(loss, rows=lambda batch_size, working_set: 2)),
    )
    np.testing.assert_allclose(parts.learned, whole.learned, rtol=1e-5)
    np.testing.assert_allclose(parts.progress.losses, whole.progress.losses, rtol=1e-5)
    assert images_left(whole.progress, CONFIG, 21, 8) == 0


def test_a_fit_of_least_squares_ends_where_the_closed_form_is():
    result = fitted(
        Fitter(loss), config=FitConfig(epochs=400, learning_rate=0.05), batch_size=21
    ).learned
    wanted = np.linalg.lstsq(X, Y - 0.5, rcond=None)[0]
    np.testing.assert_allclose(result, wanted, atol=2e-3)


@pytest.mark.parametrize("rows", [8, 2])
def test_a_non_finite_step_stops_the_fit_or_is_left_out_and_changes_no_parameter(rows):
    x = X.copy()
    x[5] = np.nan
    fitter = Fitter(loss, rows=lambda batch_size, working_set: rows)
    with pytest.raises(FloatingPointError, match="non-finite loss or gradient at step"):
        fitted(fitter, x)
    fitting = fitted(fitter, x, FitConfig(epochs=3, learning_rate=0.1, non_finite="skip"))
    assert np.isfinite(fitting.learned).all() and fitting.progress.skipped == 3


def test_a_rate_can_be_scaled_and_a_rate_of_zero_changes_nothing():
    np.testing.assert_array_equal(fitted(Fitter(loss), scale=0.0).learned, np.zeros(3))


def test_no_images_are_refused_in_one_line():
    with pytest.raises(ValueError, match="no images to predict"):
        over_batches(lambda read: read["x"], Inputs(x=X[:0]), batch_size=4)
