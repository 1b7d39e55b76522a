"""Hand-written gradients against JAX's own, in both precisions."""

import functools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cheem_jax.core.kernels import activate, attend, layer_norm, product

RNG = np.random.default_rng(0)


def array(*shape):
    return jnp.asarray(RNG.normal(size=shape).astype(np.float32))


def plain_norm(x, scale, bias):
    mean = x.mean(-1, keepdims=True)
    variance = ((x - mean) ** 2).mean(-1, keepdims=True)
    return (x - mean) / jnp.sqrt(variance + 1e-6) * scale + bias


def plain_attention(query, key, value):
    scores = query @ key.mT / query.shape[-1] ** 0.5
    return jax.nn.softmax(scores, axis=-1) @ value


CASES = {
    "product": (product, lambda x, w: x @ w, (array(2, 5, 7), array(7, 3))),
    "norm": (lambda x, s, b: layer_norm(x, s, b, 1e-6), plain_norm, (array(2, 5, 16), array(16), array(16))),
    "gelu": (
        lambda x, b: activate(x, b, "gelu"),
        lambda x, b: jax.nn.gelu(x + b, approximate=False),
        (4 * array(2, 3, 50), array(50)),
    ),
    "quick": (
        lambda x, b: activate(x, b, "quick_gelu"),
        lambda x, b: (x + b) * jax.nn.sigmoid(1.702 * (x + b)),
        (4 * array(2, 3, 50), array(50)),
    ),
    "tanh": (
        lambda x, b: activate(x, b, "gelu_tanh"),
        lambda x, b: jax.nn.gelu(x + b, approximate=True),
        (4 * array(2, 3, 50), array(50)),
    ),
    "silu": (lambda x, b: activate(x, b, "silu"), lambda x, b: jax.nn.silu(x + b), (4 * array(2, 3, 50), array(50))),
    "attention": (attend, plain_attention, (array(2, 3, 5, 8), array(2, 3, 7, 8), array(2, 3, 7, 8))),
}


@functools.partial(jax.jit, static_argnums=0)
def value_and_gradients(function, grad, *arguments):
    value, pull = jax.vjp(function, *arguments)
    return value, pull(grad)


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_are_jaxs_own(name):
    ours, plain, arguments = CASES[name]
    grad = array(*jax.eval_shape(plain, *arguments).shape)
    value, gradients = value_and_gradients(ours, grad, *arguments)
    wanted, expected = value_and_gradients(plain, grad, *arguments)
    np.testing.assert_allclose(value, wanted, atol=3e-6)
    chex.assert_trees_all_close(gradients, expected, atol=2e-5)


def test_gelu_is_zero_and_flat_far_below_zero():
    value, pull = jax.vjp(lambda a: activate(a, jnp.zeros(2), "gelu"), jnp.array([-30.0, -8.0]))
    np.testing.assert_allclose(value, 0, atol=1e-6)
    np.testing.assert_allclose(pull(jnp.ones(2))[0], 0, atol=1e-6)


def test_attention_survives_scores_that_overflow_an_exponential():
    query, key = 1e3 * jnp.ones((1, 1, 2, 4)), jnp.asarray([[[[1.0] * 4, [-1.0] * 4]]])
    assert np.isfinite(attend(query, key, array(1, 1, 2, 4))).all()


@pytest.mark.parametrize("name", ["product", "attention"])
def test_bfloat16_rounds_operands_and_nothing_else(name):
    ours, plain, arguments = CASES[name]
    grad = array(*jax.eval_shape(plain, *arguments).shape)
    found = value_and_gradients(lambda *given: ours(*given, "bfloat16"), grad, *arguments)
    expected = value_and_gradients(plain, grad, *arguments)
    assert not np.array_equal(found[0], expected[0])
    np.testing.assert_allclose(found[0], expected[0], atol=0.06)
    chex.assert_trees_all_equal_dtypes(found, expected)
    chex.assert_trees_all_close(found[1], expected[1], atol=0.1)


@pytest.mark.parametrize("name", ["product", "attention"])
def test_no_operand_of_a_bfloat16_product_is_transposed_on_a_cpu(name):
    """Else XLA computes it in float32."""
    ours, plain, arguments = CASES[name]
    grad = array(*jax.eval_shape(plain, *arguments).shape)
    program = jax.jit(lambda *given: value_and_gradients(lambda *own: ours(*own, "bfloat16"), grad, *given))
    found = re.findall(
        r"lhs_contracting_dims={(\d)}.*rhs_contracting_dims={(\d)}", program.lower(*arguments).compile().as_text()
    )
    assert len(found) >= 3 and {int(left) - int(right) for left, right in found} == {1}


def test_a_product_keeps_only_what_the_other_operands_gradient_needs():
    x, weight = array(64, 32), array(32, 16)
    frozen = jax.vjp(lambda x: product(x, weight), x)[1]
    learned = jax.vjp(lambda weight: product(x, weight), weight)[1]
    assert [leaf.shape for leaf in jax.tree.leaves(frozen)] == [weight.shape]
    assert [leaf.shape for leaf in jax.tree.leaves(learned)] == [x.shape]
