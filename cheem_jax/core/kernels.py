"""The most expensive functions of a Vision Transformer, with custom gradients.

JAX's automatic gradients of these functions would store and read two to three times as many
residuals as the custom gradients; on a CPU, this memory traffic costs as much time as the
arithmetic. The docstring of each function lists its residuals. `Precision` is the operand type of
matrix products. Parameters, sums, LayerNorm, softmax and the residual stream are float32. On an
accelerator, matrix products also return the operand type (`is_narrow`).
"""

import functools
import math
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Array, Float

from cheem_jax.core.device import current
from cheem_jax.core.settings import Activation, Precision

_SIGMOIDS = {"quick_gelu": 1.702, "silu": 1.0}
"""The factor of each activation function of the form x * sigmoid(factor * x)."""
_TANH = 2.0 * (2.0 / math.pi) ** 0.5
_CUBIC = 0.044715
"""`_TANH` and `_CUBIC` are the constants of the tanh approximation of GELU (Hendrycks and Gimpel,
2016). The approximation is computed with a sigmoid, because 0.5 (1 + tanh(a)) = sigmoid(2 a)."""
IS_DIVIDED: ContextVar[bool] = ContextVar("is_divided", default=False)
"""Whether the function that is being traced will be sharded over more than one device."""


def _custom_gradient(static: int) -> Any:
    """Make a decorator for a function with a custom gradient. Argument number `static` is not an
    array."""
    # The return type is Any, because the type of `custom_vjp` hides that the function returns an
    # array.
    return functools.partial(jax.custom_vjp, nondiff_argnums=(static,))


def is_narrow(precision: Precision) -> bool:
    """Return whether matrix products return bfloat16. They do if `precision` is bfloat16 and the
    device is an accelerator, because memory bandwidth limits small products there."""
    return precision == "bfloat16" and current().is_narrow


def dot(
    a: Float[Array, "*B M K"],
    b: Float[Array, "*B K N"],
    precision: Precision,
    *,
    narrow: bool = False,
) -> Float[Array, "*B M N"]:
    """Compute `a @ b` with operands in `precision`. The result is bfloat16 if `narrow`, else
    float32."""
    dtype = jnp.dtype(precision)
    a = a.astype(dtype)
    b = b.astype(dtype)
    if precision == "bfloat16" and current().is_host:
        # the CPU's bfloat16 kernels do not support transposed operands; without a fixed layout, XLA
        # would compute in float32
        a, b = _in_order(a), _in_order(b)
    return jnp.matmul(a, b, preferred_element_type=jnp.bfloat16 if narrow else jnp.float32)


def product(
    x: Float[Array, "*B K"], weight: Float[Array, "K N"], precision: Precision = "float32"
) -> Float[Array, "*B N"]:
    """Compute `x @ weight`. Residuals: the operands that the requested gradients need, in
    `precision`.

    On a CPU, the result and the gradient of x are float32. On an accelerator, both are computed in
    `precision`, and the gradient of x is then cast to the type of x. The gradient of the weight is
    always float32.
    """
    # Cast x outside of the custom gradient: JAX then casts the gradient back to the type of x.
    return _product(x.astype(jnp.bfloat16) if is_narrow(precision) else x, weight, precision)


@_custom_gradient(2)
def _product(x, weight, precision):
    flat = x.reshape(-1, x.shape[-1])
    return dot(flat, weight, precision, narrow=is_narrow(precision)).reshape(*x.shape[:-1], -1)


def _product_forward(x, weight, precision):
    dtype = jnp.dtype(precision)
    residual_x = x.value.astype(dtype) if weight.perturbed else None
    residual_weight = weight.value.astype(dtype) if x.perturbed else None
    return _product(x.value, weight.value, precision), (residual_x, residual_weight)


def _product_backward(precision, residuals, grad):
    x, weight = residuals
    flat = grad.reshape(-1, grad.shape[-1])
    grad_x = grad_weight = None
    if weight is not None:
        grad_x = dot(flat, weight.T, precision, narrow=is_narrow(precision)).reshape(
            *grad.shape[:-1], -1
        )
    if x is not None:
        grad_weight = dot(x.reshape(-1, x.shape[-1]).T, flat, precision)
    return grad_x, grad_weight


_product.defvjp(_product_forward, _product_backward, symbolic_zeros=True)


@_custom_gradient(3)
def layer_norm(
    x: Float[Array, "*B D"], scale: Float[Array, "D"], bias: Float[Array, "D"], epsilon: float
) -> Float[Array, "*B D"]:
    """Normalise the last axis (LayerNorm) with the two-pass variance. Residuals: x, `scale`, and
    the mean and the inverse standard deviation of each row."""
    return _layer_norm_forward(x, scale, bias, epsilon)[0]


def _layer_norm_forward(x, scale, bias, epsilon):
    mean = _row_mean(x)
    centred = x - mean
    inverse = jax.lax.rsqrt(_row_mean(centred * centred) + epsilon)
    return centred * inverse * scale + bias, (x, mean, inverse, scale)


def _layer_norm_backward(epsilon, residuals, grad):
    x, mean, inverse, scale = residuals
    normal = (x - mean) * inverse
    grad_normal = grad * scale
    grad_x = inverse * (
        grad_normal - _row_mean(grad_normal) - normal * _row_mean(grad_normal * normal)
    )
    axes = tuple(range(grad.ndim - 1))
    return grad_x, (grad * normal).sum(axes), grad.sum(axes)


layer_norm.defvjp(_layer_norm_forward, _layer_norm_backward)


def _row_mean(x: Float[Array, "*B D"]) -> Float[Array, "*B 1"]:
    # use a matrix product, because XLA's CPU backend does not vectorise row sums
    width = x.shape[-1]
    return jnp.matmul(x, jnp.full((width, 1), 1.0 / width, x.dtype), precision="highest")


@_custom_gradient(2)
def activate(
    x: Float[Array, "*B F"], bias: Float[Array, "F"], activation: Activation
) -> Float[Array, "*B F"]:
    """Compute the activation function of `x + bias`: GELU, one of its approximations, or SiLU.
    Residuals: x and `bias`; x is the result of a product, so it is in memory already.

    The result is `a * gate` with a = x + bias. The gradient recomputes the gate, which is cheaper
    than storing the derivative.
    """
    a = x + bias
    return a * _gate(a, activation)


def _slope(a, activation):
    gate = _gate(a, activation)
    if activation in _SIGMOIDS:
        return gate + _SIGMOIDS[activation] * a * gate * (1.0 - gate)
    if activation == "gelu_tanh":
        return gate + _TANH * a * (1.0 + 3.0 * _CUBIC * a * a) * gate * (1.0 - gate)
    density = jnp.exp(-0.5 * a * a) * (0.5 / jnp.pi) ** 0.5
    return gate + a * density


def _gate(a, activation):
    if activation in _SIGMOIDS:
        return jax.nn.sigmoid(_SIGMOIDS[activation] * a)
    if activation == "gelu_tanh":
        return jax.nn.sigmoid(_TANH * a * (1.0 + _CUBIC * a * a))
    return 0.5 + 0.5 * jax.lax.erf(a * 0.5**0.5)


def _activate_forward(x, bias, activation):
    # Without the barrier, XLA would compute the preceding product twice, for the value and for the
    # residual.
    x = jax.lax.optimization_barrier(x)
    a = x + bias
    return a * _gate(a, activation), (x, bias)


def _activate_backward(activation, residuals, grad):
    x, bias = residuals
    grad = grad * _slope(x + bias, activation)
    return grad.astype(x.dtype), grad.reshape(-1, grad.shape[-1]).sum(0)


activate.defvjp(_activate_forward, _activate_backward)


def attend(
    query: Float[Array, "B H M d"],
    key: Float[Array, "B H N d"],
    value: Float[Array, "B H N d"],
    precision: Precision = "float32",
) -> Float[Array, "B H M d"]:
    """Compute softmax attention. Residuals: query, key, value, output and the exponentials of the
    scores.

    On a GPU in bfloat16, cuDNN's flash attention is used if it compiles (`Device.attention`) and
    supports the shapes, and if the function is not sharded. Flash attention stores only one number
    per query and head instead of the exponentials.
    """
    num, width = query.shape[-2:]
    implementation = current().attention
    fits = (
        precision == "bfloat16"
        and num == key.shape[-2]
        and has_flash_head(width)
        and not IS_DIVIDED.get()
    )
    if implementation == "ours" or not fits:
        return _attend(query, key, value, precision)

    def tokens_first(x):
        # cuDNN's gradient supports only sequences of even length, so a sequence of odd length is
        # padded with one masked token
        return jnp.pad(
            x.astype(jnp.bfloat16).transpose(0, 2, 1, 3), ((0, 0), (0, num % 2), (0, 0), (0, 0))
        )

    lengths = jnp.full(query.shape[:1], num, jnp.int32) if num % 2 else None
    mixed = jax.nn.dot_product_attention(
        *map(tokens_first, (query, key, value)),
        query_seq_lengths=lengths,
        key_value_seq_lengths=lengths,
        implementation=implementation,
    )
    return mixed[:, :num].transpose(0, 2, 1, 3)


def has_flash_head(width: int) -> bool:
    """Return whether cuDNN's attention supports heads of this width."""
    return width % 8 == 0 and width <= 128


@_custom_gradient(3)
def _attend(query, key, value, precision):
    return _attended(query * query.shape[-1] ** -0.5, key, value, precision)[0]


def _attend_forward(query, key, value, precision):
    # Without the layout constraint, XLA would create two copies of query, key and value: one for
    # the products and one for the residuals.
    query, key, value = map(_in_order, (query * query.shape[-1] ** -0.5, key, value))
    mixed, weights, inverse = _attended(query, key, value, precision)
    return mixed, (query, key, value, weights, inverse, mixed)


def _attended(query, key, value, precision):
    scores = dot(query, key.mT, precision)
    weights = jnp.exp(scores - scores.max(axis=-1, keepdims=True))
    inverse = 1.0 / weights.sum(axis=-1, keepdims=True)
    # normalise after the product, which has fewer columns than the weights
    return dot(weights, value, precision) * inverse, weights, inverse


def _attend_backward(precision, residuals, grad):
    query, key, value, weights, inverse, mixed = residuals
    grad = grad * inverse
    pull = (grad * mixed).sum(axis=-1, keepdims=True)
    grad_scores = weights * (dot(grad, value.mT, precision) - pull)
    grads = (
        dot(grad_scores, key, precision) * query.shape[-1] ** -0.5,
        dot(grad_scores.mT, query, precision),
        dot(weights.mT, grad, precision),
    )
    return tuple(grad.astype(x.dtype) for grad, x in zip(grads, (query, key, value), strict=True))


def _in_order(values):
    # a layout constraint on sharded arrays would gather the whole batch on each device
    if IS_DIVIDED.get():
        return values
    return with_layout_constraint(values, Layout(tuple(range(values.ndim))))


_attend.defvjp(_attend_forward, _attend_backward)
