"""Architectures, which consist of one choice per block, and their integer encoding. Architectures
are hashable, printable and convertible to JSON.

A block with n experts in the pool has 2n + 2 candidates in this order: Reuse(0..n-1),
Adapt(0..n-1), New, Skip.
"""

import functools
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from cheem_jax.core.settings import Kind


class Choice(NamedTuple):
    """The op of a block. `expert` is a pool index for `reuse` and `adapt`, and None otherwise."""

    kind: Kind
    expert: int | None = None

    def __str__(self) -> str:
        return self.kind if self.expert is None else f"{self.kind}:{self.expert}"


Architecture = tuple[Choice, ...]
_CHOICE = re.compile("(?P<with_expert>reuse|adapt):(?P<expert>[0-9]{1,9})|new|skip")


def parse_choice(text: Any) -> Choice:
    """Parse `str(choice)`, such as `"reuse:3"` or `"new"`. Raises ValueError for any other
    value."""
    match = _CHOICE.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        raise ValueError(
            f"{text!r:.60} is not a choice; expected 'reuse:N', 'adapt:N', 'new' or 'skip'"
        )
    kind: Any = match["with_expert"] or match[0]
    return Choice(kind, int(match["expert"]) if match["expert"] else None)


def to_strings(architecture: Architecture) -> list[str]:
    """Convert an architecture to a list of strings for JSON."""
    return [str(choice) for choice in architecture]


def from_strings(texts: Any) -> Architecture:
    """Convert the result of `to_strings` back to an architecture. Raises ValueError for other
    values."""
    if not isinstance(texts, list | tuple):
        raise ValueError(
            f"{texts!r:.60} is not an architecture; expected a list of one choice per block"
        )
    return tuple(map(parse_choice, texts))


def num_candidates(num_experts: int) -> int:
    """Return 2n + 2, the number of candidates of a block with n experts: Reuse and Adapt for each
    expert, New, and Skip."""
    return 2 * num_experts + 2


@functools.cache
def candidates(num_experts: int) -> tuple[Choice, ...]:
    """Return all candidates of a block, in the order of their indices."""
    experts = range(num_experts)
    reuse = [Choice("reuse", expert) for expert in experts]
    adapt = [Choice("adapt", expert) for expert in experts]
    return (*reuse, *adapt, Choice("new"), Choice("skip"))


def decode(codes: Sequence[int] | np.ndarray, num_experts: Sequence[int]) -> Architecture:
    """Convert one candidate index per block to an architecture."""
    return tuple(candidates(n)[code] for code, n in zip(codes, num_experts, strict=True))


def encode(architecture: Architecture, num_experts: Sequence[int]) -> np.ndarray:
    """Convert an architecture to int32 candidate indices, one per block. Raises ValueError if an
    expert is not in the pool."""
    codes = []
    for choice, n in zip(architecture, num_experts, strict=True):
        if choice not in candidates(n):
            raise ValueError(f"{choice} is not possible in a pool of {n} experts")
        codes.append(candidates(n).index(choice))
    return np.asarray(codes, np.int32)
