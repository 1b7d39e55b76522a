"""Batches of one shape: the last, partial one is padded and masked, so no data set needs a program of its own."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np


class Rows(NamedTuple):
    """`rows` are indices into the data set; padding repeats the first row and has mask 0."""

    rows: np.ndarray
    mask: np.ndarray
    size: int


def batches(order: np.ndarray, batch_size: int) -> Iterator[Rows]:
    """The rows of `order` in batches of exactly `batch_size`; `size` counts the real ones."""
    for start in range(0, len(order), batch_size):
        rows = order[start : start + batch_size]
        size = len(rows)
        mask = np.zeros(batch_size, np.float32)
        mask[:size] = 1.0
        padded = np.concatenate([rows, np.full(batch_size - size, rows[0], rows.dtype)])
        yield Rows(padded, mask, size)


def num_batches(num: int, batch_size: int) -> int:
    """Batches that `num` rows fill, the partial one included."""
    return -(-num // batch_size)
