"""Architectures: one choice per block, hashable, printable, JSON; and their integer encoding.

A block whose pool has n experts offers 2n + 2 candidates in this order: Reuse(0..n-1),
Adapt(0..n-1), New, Skip.
"""

import functools
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from cheem_jax.core.settings import Kind


class Choice(NamedTuple):
    """One block's op; `expert` is the pool index for reuse and adapt, else None."""

    kind: Kind
    expert: int | None = None

    def __str__(self) -> str:
        return self.kind if self.expert is None else f"{self.kind}:{self.expert}"


Architecture = tuple[Choice, ...]
_CHOICE = re.compile("(?P<with_expert>reuse|adapt):(?P<expert>[0-9]{1,9})|new|skip")


def parse_choice(text: Any) -> Choice:
    """Parse `str(choice)`, such as `"reuse:3"` or `"new"`; ValueError for any other value."""
    match = _CHOICE.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        raise ValueError(
            f"{text!r:.60} is not a choice; expected 'reuse:N', 'adapt:N', 'new' or 'skip'"
        )
    kind: Any = match["with_expert"] or match[0]
    return Choice(kind, int(match["expert"]) if match["expert"] else None)


def to_strings(architecture: Architecture) -> list[str]:
    """The JSON form of an architecture."""
    return [str(choice) for choice in architecture]


def from_strings(texts: Any) -> Architecture:
    """Inverse of `to_strings`; ValueError for other JSON."""
    if not isinstance(texts, list | tuple):
        raise ValueError(
            f"{texts!r:.60} is not an architecture; expected a list of one choice per block"
        )
    return tuple(map(parse_choice, texts))


def num_candidates(num_experts: int) -> int:
    """2n + 2: each expert reused or adapted, New and Skip."""
    return 2 * num_experts + 2


@functools.cache
def candidates(num_experts: int) -> tuple[Choice, ...]:
    """All candidates of a block, in the order of their codes."""
    experts = range(num_experts)
    reuse = [Choice("reuse", expert) for expert in experts]
    adapt = [Choice("adapt", expert) for expert in experts]
    return (*reuse, *adapt, Choice("new"), Choice("skip"))


def decode(codes: Sequence[int] | np.ndarray, num_experts: Sequence[int]) -> Architecture:
    """The architecture of candidate indices, one per block."""
    return tuple(candidates(n)[code] for code, n in zip(codes, num_experts, strict=True))


def encode(architecture: Architecture, num_experts: Sequence[int]) -> np.ndarray:
    """Inverse of `decode`, as int32 `[L]`; ValueError for experts that a pool does not have."""
    codes = []
    for choice, n in zip(architecture, num_experts, strict=True):
        if choice not in candidates(n):
            raise ValueError(f"{choice} names no expert of a pool with {n}")
        codes.append(candidates(n).index(choice))
    return np.asarray(codes, np.int32)
