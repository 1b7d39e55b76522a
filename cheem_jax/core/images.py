"""Image arrays that are indexed by row: in memory, memory-mapped, or decoded on access."""

from collections.abc import Iterator, Sequence
from typing import Protocol, runtime_checkable

import numpy as np


@runtime_checkable
class Images(Protocol):
    """Images, uint8 `[N, S, S, 3]`: an array, or an object that is indexed like an array."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> np.dtype: ...
    def __len__(self) -> int: ...
    def __getitem__(self, rows: np.ndarray | slice, /) -> np.ndarray: ...


@runtime_checkable
class ReadsAhead(Protocol):
    """Images that are read faster if the order is known in advance."""

    def follow(self, order: Sequence[np.ndarray], /) -> Iterator[np.ndarray]:
        """Yield the images for each array of row numbers in `order`."""
        ...


def in_turn(images: Images, order: Sequence[np.ndarray]) -> Iterator[np.ndarray]:
    """Yield the images for each array of row numbers in `order`. Images are read in advance if
    `images` is a `ReadsAhead`."""
    return (
        images.follow(order) if isinstance(images, ReadsAhead) else (images[rows] for rows in order)
    )
