"""Architectures: one choice per block, hashable, printable, JSON; and their integer encoding.

A block whose pool holds n experts offers 2n + 2 candidates in this order: Reuse(0..n-1),
Adapt(0..n-1), New, Skip.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from cheem_jax.core.settings import KINDS, Kind


class Choice(NamedTuple):
    """One block's op; `expert` is the pool index for reuse and adapt, else None."""

    kind: Kind
    expert: int | None = None

    def __str__(self) -> str:
        return self.kind if self.expert is None else f"{self.kind}:{self.expert}"


Architecture = tuple[Choice, ...]


def parse_choice(text: Any) -> Choice:
    """`"reuse:3"`, `"adapt:0"`, `"new"` or `"skip"` as written by `str(choice)`; ValueError for
    anything else."""
    kind, _, expert = text.partition(":") if isinstance(text, str) else (None, "", "")
    needs_expert = kind in ("reuse", "adapt")
    is_number = expert.isascii() and expert.isdigit() and len(expert) < 10
    if kind not in KINDS or needs_expert != is_number or (expert and not needs_expert):
        raise ValueError(
            f"{text!r:.60} is no choice; expected 'reuse:N', 'adapt:N', 'new' or 'skip'"
        )
    return Choice(kind, int(expert) if needs_expert else None)


def to_strings(architecture: Architecture) -> list[str]:
    """The JSON form of an architecture."""
    return [str(choice) for choice in architecture]


def from_strings(texts: Any) -> Architecture:
    """Inverse of `to_strings`; ValueError for other JSON."""
    if not isinstance(texts, list | tuple):
        raise ValueError(
            f"{texts!r:.60} is not an architecture; expected a list of one choice per block"
        )
    return tuple(parse_choice(text) for text in texts)


def num_candidates(num_experts: int) -> int:
    """2n + 2: each expert reused or adapted, New and Skip."""
    return 2 * num_experts + 2


def decode(codes: Sequence[int] | np.ndarray, num_experts: Sequence[int]) -> Architecture:
    """Candidate indices, one per block, to choices."""
    choices = []
    for code, n in zip(codes, num_experts, strict=True):
        code = int(code)
        if not 0 <= code < num_candidates(n):
            raise ValueError(
                f"candidate {code} outside 0..{num_candidates(n) - 1} of a block with {n} experts"
            )
        if code < 2 * n:
            choices.append(Choice("reuse" if code < n else "adapt", code % n))
        else:
            choices.append(Choice("new" if code == 2 * n else "skip"))
    return tuple(choices)


def encode(architecture: Architecture, num_experts: Sequence[int]) -> np.ndarray:
    """Inverse of `decode`, as int32 `[L]`."""
    codes = []
    for choice, n in zip(architecture, num_experts, strict=True):
        if choice.kind in ("reuse", "adapt") and (
            choice.expert is None or not 0 <= choice.expert < n
        ):
            raise ValueError(f"{choice} names no expert of a pool with {n}")
        first = {"reuse": 0, "adapt": n, "new": 2 * n, "skip": 2 * n + 1}[choice.kind]
        codes.append(first + (choice.expert or 0))
    return np.asarray(codes, np.int32)
