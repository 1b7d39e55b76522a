"""Type names and settings that do not depend on JAX."""

import dataclasses
import functools
import math
import types
import typing
from typing import Any, Literal, Protocol, runtime_checkable

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


def no_progress(num_images: int, note: str = "", /) -> None:
    """Do nothing. This is the `Advance` callback of passes whose progress is not displayed."""


def check_seed(seed: int) -> None:
    """Raise ValueError if a seed is not an integer in [0, 2**32). JAX uses the lowest 32 bits of a
    seed, so that other integers would repeat the keys of a smaller one."""
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**32:
        raise ValueError(f"seed is {seed!r:.40}; expected an integer from 0 to {2**32 - 1}")


def check_types(settings: Any) -> None:
    """Raise ValueError if a field of a settings dataclass does not have its declared type. A
    misspelt choice would otherwise select another one silently."""
    for name, hint in _hints(type(settings)).items():
        value = getattr(settings, name)
        if not fits(value, hint):
            raise ValueError(f"{name} is {value!r:.60}; expected {_words(hint)}")


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    hints = typing.get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


def fits(value: Any, hint: Any) -> bool:
    """Return whether a value has the type `hint`. An integer is also a float, a boolean is neither,
    and only the first type of a tuple is compared."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint in (Any, ...):
        return True
    if origin is Literal:
        return value in args
    if origin in (types.UnionType, typing.Union):
        return any(fits(value, one) for one in args)
    if hint is float:
        return isinstance(value, float | int) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if not isinstance(value, origin or hint):
        return False
    if origin is dict:
        return all(fits(one, args[1]) for one in value.values())
    # a tuple has one type for all values, followed by `...`, or a type per value
    return all(fits(one, args[0]) for one in value) if origin in (tuple, list) else True


def _words(hint: Any) -> str:
    """Return the description of a type for error messages."""
    args = typing.get_args(hint)
    if typing.get_origin(hint) is Literal:
        return f"{'one of ' * (len(args) > 1)}{', '.join(map(str, args))}"
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        return " or ".join(map(_words, args))
    if typing.get_origin(hint) is tuple:
        return f"a tuple, each {_words(args[0])}"
    names = {int: "an integer", float: "a number", types.NoneType: "None"}
    return names.get(hint, getattr(hint, "__name__", str(hint)))


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
        check_types(self)
        if self.epochs < 1:
            raise ValueError(f"epochs is {self.epochs}; a phase needs at least 1")
        if not 0 < self.learning_rate < math.inf:
            raise ValueError(
                f"learning_rate is {self.learning_rate}; expected a positive, finite number"
            )
