"""Batches of equal shape, and parts of a batch that two threads compute.

The last, partial batch is padded and masked, so functions are compiled for one batch size only. On
a CPU, some operations between the large matrix products of a network use only one core. Meanwhile,
a second core computes another part of the batch. The activations of each part stay in the caches of
one core. On an accelerator, a batch is not divided into parts.
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
    """Row numbers `rows` `[B]` of a batch in its data set, and a `mask` `[B]`. Padding repeats the
    first row and has mask 0."""

    rows: np.ndarray
    mask: np.ndarray
    size: int
    """Number of rows without padding."""


def batches(order: np.ndarray, batch_size: int) -> Iterator[Rows]:
    """Cut the rows of `order` into batches of exactly `batch_size`."""
    for start in range(0, len(order), batch_size):
        rows = order[start : start + batch_size]
        size = len(rows)
        mask = (np.arange(batch_size) < size).astype(np.float32)
        yield Rows(np.concatenate([rows, np.repeat(rows[:1], batch_size - size)]), mask, size)


def num_batches(num: int, batch_size: int) -> int:
    """Return the number of batches into which `num` rows are cut, including a partial last
    batch."""
    return -(-num // batch_size)


NUM_AT_ONCE = 2
"""Number of parts computed at the same time. More parts would compete for the caches and need more
memory."""


@functools.cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(NUM_AT_ONCE, thread_name_prefix="parts")


def side_by_side(function: Callable[[P], R], parts: Iterable[P]) -> Iterator[R]:
    """Call `function` on each part in one of NUM_AT_ONCE threads, and yield the results in order.

    Each part is read from `parts` shortly before `function` is called on it.
    """

    def compute(part: P) -> R:
        # JAX returns before a computation finishes. Without this wait, the activations of all parts
        # would be in memory at the same time.
        return jax.block_until_ready(function(part))

    waiting: collections.deque[Future[R]] = collections.deque()
    for part in parts:
        waiting.append(_threads().submit(compute, part))
        if len(waiting) > NUM_AT_ONCE:
            yield waiting.popleft().result()
    for future in waiting:
        yield future.result()
