"""Settings per kind of device: the one place where an accelerator differs from a CPU.

They change no result beyond rounding.
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
    """Settings of one kind of device; the defaults are a CPU's."""

    is_host: bool = True
    """Device memory is host memory: NumPy gathers rows, arguments are not copied, and a call costs
    almost nothing."""
    forward_sizes: tuple[int, ...] = ()
    """Images per forward pass, if memory and data set allow; empty: those of a training step."""
    is_narrow: bool = False
    """Products of bfloat16 operands are written in bfloat16, and so are their residuals."""
    attention: Literal["ours", "cudnn", "xla"] = "ours"
    """bfloat16 attention: `kernels.attend`, or an implementation of
    `jax.nn.dot_product_attention`."""
    remark: str = ""
    """For the log: why bfloat16 attention is not cuDNN's."""


CPU = Device()
ACCELERATOR = Device(False, forward_sizes=(256, 512), is_narrow=True)

_traced_for: ContextVar[Device | None] = ContextVar("traced_for", default=None)


def here(*, deterministic: bool = False) -> Device:
    """The default device's kind; `deterministic`: with equal bits in every run."""
    if jax.default_backend() == "cpu":
        return CPU
    # the gradient of cuDNN's attention sums in the order in which thread blocks finish
    if deterministic:
        return ACCELERATOR
    problem = flash_problem()
    if problem is None:
        return dataclasses.replace(ACCELERATOR, attention="cudnn")
    return dataclasses.replace(
        ACCELERATOR, remark=f"attention is XLA's, as cuDNN's does not compile ({problem})"
    )


@functools.cache
def flash_problem() -> str | None:
    """Why cuDNN's attention and its gradient do not compile for the default device, else None."""

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

    x = jax.ShapeDtypeStruct((2, 8, 1, 64), jnp.bfloat16)
    lengths = jax.ShapeDtypeStruct((2,), jnp.int32)
    try:
        jax.jit(jax.grad(loss)).lower(x, lengths).compile()
    except Exception as error:  # platform, compute capability or library: XLA's attention remains
        reason = str(error).strip() or type(error).__name__
        return reason.splitlines()[0][:120]
    return None


def current() -> Device:
    """The kind of device for which the current function is traced."""
    return _traced_for.get() or here()


def traced_for(device: Device, function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function so that `current()` is `device` in it."""

    @functools.wraps(function)
    def traced(*arguments, **named):
        token = _traced_for.set(device)
        try:
            return function(*arguments, **named)
        finally:
            _traced_for.reset(token)

    return traced
