"""Settings for each kind of device. All differences between an accelerator and a CPU are defined
here.

The settings affect results only by rounding.
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
    """Settings of one kind of device; the defaults are for a CPU."""

    is_host: bool = True
    """Whether device memory is host memory. If so, NumPy gathers the rows of a batch, the arguments
    of compiled functions are not copied, and the overhead of calling these functions is
    negligible."""
    forward_sizes: tuple[int, ...] = ()
    """Batch sizes, in images, from which the batch size of forward passes is selected. A size is
    excluded if it does not fit in memory or is not larger than a training batch. If no size
    remains, or if all images fit in one training batch, forward passes use the batch size of
    training."""
    is_narrow: bool = False
    """Whether matrix products of bfloat16 operands, and the residuals of these products, are stored
    in bfloat16."""
    attention: Literal["ours", "cudnn", "xla"] = "ours"
    """Implementation of bfloat16 attention: `ours` is the implementation in `kernels`; `cudnn` and
    `xla` are implementations of `jax.nn.dot_product_attention`."""
    remark: str = ""
    """Message for the log if cuDNN's attention is not available."""


CPU = Device()
ACCELERATOR = Device(False, forward_sizes=(256, 512), is_narrow=True)

DETERMINISTIC: dict[str, Any] = {"xla_gpu_deterministic_ops": True, "xla_gpu_autotune_level": 0}
"""Compiler options that forbid sums whose order depends on threads, and kernels selected by
measured time."""

_traced_for: ContextVar[Device | None] = ContextVar("traced_for", default=None)


def default_device(*, deterministic: bool = False) -> Device:
    """Return the settings for the default device. `deterministic` selects only operations that
    return identical bits in every run."""
    if jax.default_backend() == "cpu":
        return CPU
    # The gradient of cuDNN's attention is summed in the order in which thread blocks finish, so its
    # bits differ between runs.
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
    """Return the reason why cuDNN's attention or its gradient does not compile for the default
    device; None if both compile."""

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
    # The compilation fails if cuDNN does not support the platform, the compute capability or the
    # library version. `default_device` then selects the attention in `kernels`.
    except Exception as error:
        reason = str(error).strip() or type(error).__name__
        return reason.splitlines()[0][:120]
    return None


def deterministic_jit(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Compile a function that has no executor, and so does not know `engine.deterministic`. On an
    accelerator, it computes identical bits in every run, because experts and means that it computes
    are stored."""

    @functools.cache
    def compiled() -> Callable[..., Any]:
        # not before the first call: importing the library starts no device
        chosen = None if jax.default_backend() == "cpu" else DETERMINISTIC
        return jax.jit(function, compiler_options=chosen, **options)

    @functools.wraps(function)
    def call(*arguments, **named):
        return compiled()(*arguments, **named)

    return call


def current() -> Device:
    """Return the settings of the device for which the current function is traced."""
    return _traced_for.get() or default_device()


def traced_for(device: Device, function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function so that `current()` returns `device` inside of it."""

    @functools.wraps(function)
    def traced(*arguments, **named):
        token = _traced_for.set(device)
        try:
            return function(*arguments, **named)
        finally:
            _traced_for.reset(token)

    return traced
