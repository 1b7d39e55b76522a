"""Pictures by row number, wherever they are: in memory, in a mapped file, or decoded when they are
asked for."""

from collections.abc import Iterator, Sequence
from typing import Protocol, runtime_checkable

import numpy as np


@runtime_checkable
class Images(Protocol):
    """uint8 `[N, S, S, 3]`; an array is one, and so is what only behaves like one."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> np.dtype: ...
    def __len__(self) -> int: ...
    def __getitem__(self, rows: np.ndarray | slice, /) -> np.ndarray: ...


@runtime_checkable
class ReadsAhead(Protocol):
    """Images that come faster when it is known which ones will be wanted."""

    def follow(self, order: Sequence[np.ndarray], /) -> Iterator[np.ndarray]:
        """The pictures of each of these rows in turn."""
        ...


def in_turn(images: Images, order: Sequence[np.ndarray]) -> Iterator[np.ndarray]:
    """The pictures of each of these rows in turn, read ahead where that pays."""
    return (
        images.follow(order) if isinstance(images, ReadsAhead) else (images[rows] for rows in order)
    )
