"""Hand-written gradients against JAX's own, in both precisions."""

import dataclasses
import functools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cheem_jax.core import device
from cheem_jax.core.device import ACCELERATOR, traced_for
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
    "norm": (
        lambda x, s, b: layer_norm(x, s, b, 1e-6),
        plain_norm,
        (array(2, 5, 16), array(16), array(16)),
    ),
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
    "silu": (
        lambda x, b: activate(x, b, "silu"),
        lambda x, b: jax.nn.silu(x + b),
        (4 * array(2, 3, 50), array(50)),
    ),
    "attention": (
        attend,
        plain_attention,
        (array(2, 3, 5, 8), array(2, 3, 7, 8), array(2, 3, 7, 8)),
    ),
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
    query = 1e3 * jnp.ones((1, 1, 2, 4))
    key = jnp.asarray([[[[1.0] * 4, [-1.0] * 4]]])
    assert np.isfinite(attend(query, key, array(1, 1, 2, 4))).all()


@pytest.mark.parametrize("name", ["product", "attention"])
def test_bfloat16_rounds_operands_and_nothing_else(name):
    ours, plain, arguments = CASES[name]
    grad = array(*jax.eval_shape(plain, *arguments).shape)
    result = value_and_gradients(lambda *given: ours(*given, "bfloat16"), grad, *arguments)
    expected = value_and_gradients(plain, grad, *arguments)
    assert not np.array_equal(result[0], expected[0])
    np.testing.assert_allclose(result[0], expected[0], atol=0.06)
    chex.assert_trees_all_equal_dtypes(result, expected)
    chex.assert_trees_all_close(result[1], expected[1], atol=0.1)


@pytest.mark.parametrize("name", ["product", "attention"])
def test_no_operand_of_a_bfloat16_product_is_transposed_on_a_cpu(name):
    """Otherwise XLA computes it in float32."""
    ours, plain, arguments = CASES[name]
    grad = array(*jax.eval_shape(plain, *arguments).shape)
    program = jax.jit(
        lambda *given: value_and_gradients(lambda *args: ours(*args, "bfloat16"), grad, *given)
    )
    result = re.findall(
        r"lhs_contracting_dims={(\d)}.*rhs_contracting_dims={(\d)}",
        program.lower(*arguments).compile().as_text(),
    )
    assert len(result) >= 3 and {int(first) - int(right) for first, right in result} == {1}


def test_a_product_stores_only_the_operands_that_the_gradient_needs():
    x, weight = array(64, 32), array(32, 16)
    frozen = jax.vjp(lambda x: product(x, weight), x)[1]
    learned = jax.vjp(lambda weight: product(x, weight), weight)[1]
    assert [leaf.shape for leaf in jax.tree.leaves(frozen)] == [weight.shape]
    assert [leaf.shape for leaf in jax.tree.leaves(learned)] == [x.shape]


@pytest.mark.parametrize("num", [pytest.param(8, marks=pytest.mark.full), 7])
def test_attention_of_a_library_equals_ours_for_even_and_odd_numbers_of_tokens(num):
    """The padded call that cuDNN gets on a GPU, by the same function's implementation for any
    device."""
    rng = np.random.default_rng(num)
    parts = [jnp.asarray(rng.normal(size=(2, 3, num, 16)), jnp.bfloat16) for _ in range(3)]

    def loss(*parts):
        return (attend(*parts, "bfloat16").astype(jnp.float32) ** 2).sum()

    other = traced_for(dataclasses.replace(ACCELERATOR, attention="xla"), loss)
    text = str(jax.make_jaxpr(other)(*parts))
    assert f"bf16[2,{num + num % 2},3,16]" in text and "custom_vjp" not in text
    wanted, result = (jax.value_and_grad(one, argnums=(0, 1, 2))(*parts) for one in (loss, other))
    assert abs(result[0] / wanted[0] - 1) < 5e-3
    for ours, theirs in zip(wanted[1], result[1], strict=True):
        ours, theirs = (np.asarray(one, np.float32) for one in (ours, theirs))
        assert np.abs(ours - theirs).max() < 2e-2 * np.abs(ours).max()


def test_only_the_last_block_and_unusual_heads_keep_our_attention_on_a_gpu():
    gpu = dataclasses.replace(ACCELERATOR, attention="xla")
    whole, first = (jax.ShapeDtypeStruct((2, 3, num, 16), jnp.bfloat16) for num in (8, 1))
    narrow = jax.ShapeDtypeStruct((2, 3, 8, 12), jnp.bfloat16)
    for given, precision in (
        ((first, whole, whole), "bfloat16"),
        ((narrow,) * 3, "bfloat16"),
        ((whole,) * 3, "float32"),
    ):
        text = str(
            jax.make_jaxpr(traced_for(gpu, lambda *p, kind=precision: attend(*p, kind)))(*given)
        )
        assert "custom_vjp" in text  # ours has a separate gradient


def test_an_accelerator_writes_bfloat16_products_and_learns_from_float32_gradients():
    rng = np.random.default_rng(0)
    x, weight = (jnp.asarray(rng.normal(size=size), jnp.float32) for size in ((2, 5, 16), (16, 8)))

    def loss(x, weight):
        return (
            activate(product(x, weight, "bfloat16"), jnp.ones(8), "gelu").astype(jnp.float32) ** 2
        ).sum()

    plain = jax.value_and_grad(loss, argnums=(0, 1))
    narrow = traced_for(ACCELERATOR, plain)
    wanted = plain(x, weight)
    result = narrow(x, weight)
    assert abs(result[0] / wanted[0] - 1) < 5e-3
    for ours, theirs in zip(wanted[1], result[1], strict=True):
        assert theirs.dtype == jnp.float32
        np.testing.assert_allclose(theirs, ours, atol=1e-2 * float(jnp.abs(ours).max()))
    text = str(jax.make_jaxpr(narrow)(x, weight))
    products = [line for line in text.splitlines() if "dot_general" in line]
    assert sorted("bf16" in line.split(" = ")[0] for line in products) == [False, True, True]


def test_without_cudnn_the_attention_stays_and_the_log_says_so(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    device.flash_problem.cache_clear()
    result = device.default_device()
    device.flash_problem.cache_clear()
    assert result.attention == "ours" and "does not compile (" in result.remark
    assert not result.is_host and result.is_narrow
    assert device.default_device(deterministic=True) == ACCELERATOR


def test_with_cudnn_its_attention_is_taken(monkeypatch):
    assert device.default_device().is_host  # the tests run on a CPU
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(device, "flash_problem", lambda: None)
    assert device.default_device() == dataclasses.replace(ACCELERATOR, attention="cudnn")


@pytest.mark.parametrize(
    ("error", "reason"),
    [(ValueError("no head of 20\nmore"), "no head of 20"), (KeyError(), "KeyError")],
)
def test_the_reason_against_cudnn_is_the_first_line_of_the_error(monkeypatch, error, reason):
    def refuse(*arrays, **settings):
        raise error

    monkeypatch.setattr(jax.nn, "dot_product_attention", refuse)
    device.flash_problem.cache_clear()
    assert device.flash_problem() == reason
    device.flash_problem.cache_clear()
