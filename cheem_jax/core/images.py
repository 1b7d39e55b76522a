"""Images by row number: in memory, in a mapped file, or decoded when they are read."""

from collections.abc import Iterator, Sequence
from typing import Protocol, runtime_checkable

import numpy as np


@runtime_checkable
class Images(Protocol):
    """uint8 `[N, S, S, 3]`: an array, or an object that can be indexed like one."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> np.dtype: ...
    def __len__(self) -> int: ...
    def __getitem__(self, rows: np.ndarray | slice, /) -> np.ndarray: ...


@runtime_checkable
class ReadsAhead(Protocol):
    """Images that are faster to read in an order that is known in advance."""

    def follow(self, order: Sequence[np.ndarray], /) -> Iterator[np.ndarray]:
        """The images of each element of `order`, row numbers, in turn."""
        ...


def in_turn(images: Images, order: Sequence[np.ndarray]) -> Iterator[np.ndarray]:
    """The images of each element of `order` in turn, read ahead if `images` can."""
    return (
        images.follow(order) if isinstance(images, ReadsAhead) else (images[rows] for rows in order)
    )
