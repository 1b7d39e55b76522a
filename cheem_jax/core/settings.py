"""Type names and settings that do not depend on JAX."""

import dataclasses
from typing import Literal, Protocol, runtime_checkable

Kind = Literal["reuse", "adapt", "new", "skip"]
Placement = Literal["mlp_down", "attn_proj"]
KINDS: tuple[Kind, ...] = ("reuse", "adapt", "new", "skip")
COLOURS = {"reuse": "#9CCEA7", "adapt": "#FEB24C", "new": "#9EC9E2", "skip": "#F2ACCA"}
"""Colour of each op kind in the terminal, in figures and in the report."""
Precision = Literal["float32", "bfloat16"]
"""Operand type of matrix products, which are accumulated in float32."""
Activation = Literal["gelu", "gelu_tanh", "quick_gelu", "silu"]
Token = Literal["component", "block"]
"""Source of the mean CLS tokens: `component` is the output of the plastic layer before the residual
sum, and `block` is the output of the block."""


@runtime_checkable
class Advance(Protocol):
    """A callback that is called after each step. `num_images` is the number of images in the step,
    and `note` is displayed next to the progress."""

    def __call__(self, num_images: int, note: str = "", /) -> object: ...


def check_seed(seed: int) -> None:
    """Raise ValueError if a seed is not an integer in [0, 2**32). JAX uses the lowest 32 bits of a
    seed, so that other integers would repeat the keys of a smaller one."""
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**32:
        raise ValueError(f"seed is {seed!r:.40}; expected an integer from 0 to {2**32 - 1}")


@dataclasses.dataclass(frozen=True)
class SeedsConfig:
    """Separate seeds, for varying one source of randomness at a time. A seed that is None is
    replaced by the run's seed."""

    initialisation: int | None = None
    """Seed of the initial parameters of New, Adapt and heads."""
    order: int | None = None
    """Seed of the order of the training images."""
    sampling: int | None = None
    """Seed of the architectures that supernet training samples."""
    search: int | None = None
    """Seed of the evolutionary search."""

    def __post_init__(self) -> None:
        for seed in vars(self).values():
            if seed is not None:
                check_seed(seed)


@dataclasses.dataclass(frozen=True)
class FitConfig:
    """Settings of one phase of gradient training (paper: Adam without weight decay)."""

    epochs: int
    """Number of passes over the training images (paper: 50 in supernet training, 20 in
    fine-tuning)."""
    learning_rate: float = 1e-3
    """Highest learning rate of Adam (paper: 0.001)."""
    schedule: Literal["cosine", "warm_cosine", "epoch_cosine", "constant"] = "cosine"
    """Learning-rate schedule over the steps of the phase. `cosine` lowers the rate after every
    step, down to 0. `warm_cosine` raises the rate linearly in the first tenth of the steps, and
    then lowers it as `cosine` does. `epoch_cosine` lowers the rate after every epoch, down to 1.6 %
    of the initial rate, as in the CODA-Prompt code. `constant` does not change the rate."""
    non_finite: Literal["stop", "skip"] = "stop"
    """Reaction to a non-finite loss or gradient: `stop` raises an error; `skip` skips the step and
    counts it."""

    def __post_init__(self) -> None:
        if self.epochs < 1:
            raise ValueError(f"epochs is {self.epochs}; a phase needs at least 1")
        if not self.learning_rate > 0:
            raise ValueError(f"learning_rate is {self.learning_rate}; expected a positive number")
