"""Names and settings that do not need JAX."""

import dataclasses
from typing import Literal, Protocol, runtime_checkable

Kind = Literal["reuse", "adapt", "new", "skip"]
Placement = Literal["mlp_down", "attn_proj"]
KINDS: tuple[Kind, ...] = ("reuse", "adapt", "new", "skip")
COLOURS = {"reuse": "#9CCEA7", "adapt": "#FEB24C", "new": "#9EC9E2", "skip": "#F2ACCA"}
"""Colour of each op kind in the terminal, figures and the report."""
Precision = Literal["float32", "bfloat16"]
"""Operand type of matrix products; they are accumulated in float32."""
Activation = Literal["gelu", "gelu_tanh", "quick_gelu", "silu"]
Token = Literal["component", "block"]
"""Source of mean CLS tokens: the plastic layer's output before the residual sum, or the
block's output."""


@runtime_checkable
class Advance(Protocol):
    """A callback after each step: the number of its images, and a note to show."""

    def __call__(self, num_images: int, note: str = "", /) -> object: ...


@dataclasses.dataclass(frozen=True)
class SeedsConfig:
    """Separate seeds, to vary one part of a run and keep the others; default: the run's seed."""

    initialisation: int | None = None
    """Initial parameters of New, Adapt and heads."""
    order: int | None = None
    """The order of the training images."""
    sampling: int | None = None
    """The architectures that supernet training samples."""
    search: int | None = None
    """The evolutionary search."""


@dataclasses.dataclass(frozen=True)
class FitConfig:
    """One phase of gradient training (paper: Adam, 1e-3, no weight decay)."""

    epochs: int
    """Passes over the training images (paper: 50 in the supernet, 20 in fine-tuning)."""
    learning_rate: float = 1e-3
    """Adam's initial learning rate (paper: 0.001)."""
    schedule: Literal["cosine", "epoch_cosine", "constant"] = "cosine"
    """Learning rate over the steps of the phase: cosine decay to 0; the CODA-Prompt code's cosine
    by whole epochs, which ends at 1.6 % of the initial rate; or constant."""
    non_finite: Literal["stop", "skip"] = "stop"
    """If a loss or gradient is non-finite: stop with an error, or skip that step and count it."""

    def __post_init__(self) -> None:
        if self.epochs < 1:
            raise ValueError(f"epochs is {self.epochs}; a phase needs at least 1")
        if not self.learning_rate > 0:
            raise ValueError(f"learning_rate is {self.learning_rate}; expected a positive number")
