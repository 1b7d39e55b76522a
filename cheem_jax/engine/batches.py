"""Batches of one shape, and parts of a batch side by side.

The last, partial batch is padded and masked, so no data set needs a program of its own. Between its
large products a network does things that occupy one core of a CPU; two parts at once fill the gaps,
and each part stays closer to its core. On an accelerator a batch is one part.
"""

import collections
import functools
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple, TypeVar

import jax
import numpy as np

P = TypeVar("P")
R = TypeVar("R")


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


NUM_AT_ONCE = 2
"""Parts at a time: more would share the caches, and hold more activations."""


@functools.cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(NUM_AT_ONCE, thread_name_prefix="parts")


def side_by_side(function: Callable[[P], R], parts: Iterable[P]) -> Iterator[R]:
    """`function` of each part, in their order; it returns once its arrays are computed.

    A part is taken when it is about to be computed.
    """

    def computed(part: P) -> R:
        # programs are dispatched ahead of the work: without a bound all parts' activations would be
        # held at once
        return jax.block_until_ready(function(part))

    waiting: collections.deque[Future[R]] = collections.deque()
    for part in parts:
        waiting.append(_threads().submit(computed, part))
        if len(waiting) > NUM_AT_ONCE:
            yield waiting.popleft().result()
    for future in waiting:
        yield future.result()
