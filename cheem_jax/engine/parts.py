"""Parts of a batch side by side: what one program leaves of a CPU's cores, another one takes.

Between its large products a network does things that occupy one core; two parts at once fill the gaps, and each part
stays closer to its core. On an accelerator a batch is one part, and nothing here happens.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import jax

P = TypeVar("P")
R = TypeVar("R")

NUM_AT_ONCE = 2
"""Parts at a time: more would share the caches, and hold more activations."""


@functools.cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(NUM_AT_ONCE, thread_name_prefix="parts")


def side_by_side(function: Callable[[P], R], parts: Sequence[P]) -> Iterator[R]:
    """`function` of each part, in their order; it returns once its arrays are computed."""

    def computed(part: P) -> R:
        # programs are dispatched ahead of the work: without a bound all parts' activations would be held at once
        return jax.block_until_ready(function(part))

    if len(parts) == 1:
        return iter([function(parts[0])])
    return _threads().map(computed, parts)
