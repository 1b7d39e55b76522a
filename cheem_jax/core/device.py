"""Settings by kind of device: the one place where an accelerator differs from a CPU.

Nothing here changes what is computed, beyond rounding.
"""

import dataclasses
import functools
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, Literal

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Device:
    """A kind of device; the defaults are a CPU's."""

    is_host: bool = True
    """Its memory is the host's: NumPy gathers there, no argument is copied, and a call costs next
    to nothing."""
    forward_sizes: tuple[int, ...] = ()
    """Images per call of a forward pass, where memory and data set allow; none: as many as in a
    training step."""
    is_narrow: bool = False
    """Products of bfloat16 operands are written, and kept for their gradients, in bfloat16."""
    attention: Literal["ours", "cudnn", "xla"] = "ours"
    """bfloat16 attention: `kernels.attend` itself, or `jax.nn.dot_product_attention` by this
    implementation."""
    remark: str = ""
    """Why bfloat16 attention is not cuDNN's, for the log."""
    has_cholesky: bool = False
    """Symmetric systems are solved by one Cholesky factor each: eigenvectors are slow there."""


CPU = Device()
ACCELERATOR = Device(False, forward_sizes=(256, 512), is_narrow=True, has_cholesky=True)

_traced_for: ContextVar[Device | None] = ContextVar("traced_for", default=None)


def here(*, deterministic: bool = False) -> Device:
    """The kind of device that JAX computes on by default; `deterministic`: for equal bits in every
    run."""
    if jax.default_backend() == "cpu":
        return CPU
    if (
        deterministic
    ):  # the gradient of cuDNN's attention adds up in the order in which blocks finish
        return ACCELERATOR
    problem = flash_problem()
    if problem is None:
        return dataclasses.replace(ACCELERATOR, attention="cudnn")
    return dataclasses.replace(
        ACCELERATOR, remark=f"attention is XLA's, as cuDNN's does not compile ({problem})"
    )


@functools.cache
def flash_problem() -> str | None:
    """Why cuDNN's attention and its gradient cannot be compiled for the default device; None if
    they can."""

    def loss(x, lengths):
        attended = jax.nn.dot_product_attention(
            x,
            x,
            x,
            query_seq_lengths=lengths,
            key_value_seq_lengths=lengths,
            implementation="cudnn",
        )
        return attended.astype(jnp.float32).sum()

    shapes = (
        jax.ShapeDtypeStruct((2, 8, 1, 64), jnp.bfloat16),
        jax.ShapeDtypeStruct((2,), jnp.int32),
    )
    try:  # whatever the reason is (platform, compute capability, library), XLA's attention is there
        jax.jit(jax.grad(loss)).lower(*shapes).compile()
    except Exception as error:
        return (
            str(error).strip().splitlines()[0][:120] if str(error).strip() else type(error).__name__
        )
    return None


def current() -> Device:
    """The kind of device that the function being traced is compiled for."""
    return _traced_for.get() or here()


def traced_for(device: Device, function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, in which `current` is `device`."""

    @functools.wraps(function)
    def traced(*arguments, **named):
        token = _traced_for.set(device)
        try:
            return function(*arguments, **named)
        finally:
            _traced_for.reset(token)

    return traced
