"""Auto-encoders infer the task whose features they rebuild best."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import expit

from cheem_jax.baselines import moe_adapters as moe_module
from cheem_jax.baselines.adapters import Bottleneck
from cheem_jax.baselines.moe_adapters import AutoEncoders, errors, init_autoencoder


@pytest.fixture(scope="module")
def programs():
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(moe_module, "HIDDEN", 5)
        patched.setattr(moe_module, "ITERATIONS", 60)
        patched.setattr(moe_module, "AUTOENCODER_BATCH", 8)
        yield AutoEncoders(12)


def clusters(num: int = 30, width: int = 12) -> list[np.ndarray]:
    """Features of three tasks, each around a separate centre."""
    rng = np.random.default_rng(0)
    return [
        (3 * rng.normal(size=width) + 0.3 * rng.normal(size=(num, width))).astype(np.float32)
        for _ in range(3)
    ]


def fitted(programs: AutoEncoders, features: np.ndarray, advance=lambda num, note="": None):
    return programs.fit(jax.random.key(0), jax.random.key(1), features, advance)


@pytest.mark.full
def test_the_error_of_an_image_is_the_mean_square_that_numpy_computes(programs):
    made = init_autoencoder(jax.random.key(3), 6)
    made = made._replace(down_bias=made.down_bias + 0.3, up_bias=made.up_bias - 0.2)
    features = np.random.default_rng(0).normal(size=(3, 6)).astype(np.float32)
    down, down_bias, up, up_bias = (np.asarray(leaf, np.float64) for leaf in made)
    inputs = expit(features.astype(np.float64))
    rebuilt = expit(np.maximum(inputs @ down + down_bias, 0) @ up + up_bias)
    np.testing.assert_allclose(
        errors(made, jnp.asarray(features)), ((inputs - rebuilt) ** 2).mean(axis=1), rtol=1e-5
    )


def test_each_tasks_images_go_to_their_own_auto_encoder_in_any_company(programs):
    parts = clusters()
    values = [fitted(programs, part[:20])[0] for part in parts]
    held_out = np.concatenate([part[20:] for part in parts])
    result = programs.route(held_out, values, batch_size=8)
    np.testing.assert_array_equal(result, np.repeat(np.arange(3), 10))
    assert result.dtype == np.int32
    np.testing.assert_array_equal(
        programs.route(held_out[::-1], values, batch_size=8)[::-1], result
    )
    np.testing.assert_array_equal(programs.route(held_out[5:8], values, batch_size=8), result[5:8])


def test_equal_errors_go_to_the_first_task(programs):
    zero = Bottleneck(*(jnp.zeros(shape) for shape in ((12, 5), 5, (5, 12), 12)))
    result = programs.route(clusters()[0], [zero, zero], batch_size=8)
    np.testing.assert_array_equal(result, 0)


@pytest.mark.parametrize(
    ("num", "iterations", "images"), [(20, 7, 20 + 20 + 8), (20, 6, 40), (5, 3, 15), (64, 3, 24)]
)
def test_a_fit_runs_all_its_steps(programs, num, iterations, images, monkeypatch):
    monkeypatch.setattr(moe_module, "ITERATIONS", iterations)
    reported = []
    _, losses = fitted(
        programs, np.zeros((num, 12), np.float32), lambda num, note="": reported.append(num)
    )
    assert len(reported) == iterations and sum(reported) == images == programs.images(num)
    assert len(losses) == -(-iterations // -(-num // 8))


def test_the_rate_falls_to_a_tenth_and_the_error_with_it(programs, monkeypatch):
    # one step per epoch; Adam's first steps move every weight that has a gradient by the rate
    features = clusters()[0][:8]
    ends = []
    monkeypatch.setattr(moe_module, "DECAY_EVERY", 2)
    for iterations in (1, 2, 3):
        monkeypatch.setattr(moe_module, "ITERATIONS", iterations)
        ends.append(fitted(programs, features)[0])
    monkeypatch.undo()
    moves = [
        np.abs(np.asarray(b.up_bias) - np.asarray(a.up_bias)).max()
        for a, b in zip(ends, ends[1:], strict=False)
    ]
    np.testing.assert_allclose(np.abs(ends[0].up_bias), 0.01, rtol=1e-3)
    assert 0.008 < moves[0] < 0.011 and 0.0008 < moves[1] < 0.0011
    _, losses = fitted(programs, clusters()[0])
    assert losses[-1] < losses[0] / 3


def test_data_sets_of_any_size_share_one_compiled_function(programs, compilations):
    fitted(programs, clusters()[0])
    with compilations() as compiled:
        fitted(programs, clusters()[1][:27])
    assert compiled.count == 0


def test_non_finite_features_are_refused(programs):
    with pytest.raises(FloatingPointError, match="non-finite error of an auto-encoder in epoch 1"):
        fitted(programs, np.full((9, 12), np.nan, np.float32))


def test_conv5_at_224_has_8_7_million_parameters(monkeypatch):
    monkeypatch.setattr(moe_module, "HIDDEN", 100)
    leaves = jax.eval_shape(lambda: init_autoencoder(jax.random.key(0), 43_264))
    assert sum(leaf.size for leaf in leaves) == 8_696_164
