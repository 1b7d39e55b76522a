"""Feeds: data sets as images, or as cached tokens with which passes start.

Without augmentation, the results of the leading frozen blocks are identical in every epoch. In a
supernet, these results are the tokens of block 0; in fine-tuning, they are the tokens of the first
block that learns. These tokens are cached if they fit a memory budget. Augmented images differ in
every epoch, so steps with augmentation start with images on the host.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeVar, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

from cheem_jax.core.images import Images, in_turn
from cheem_jax.core.machine import host_memory
from cheem_jax.core.settings import Advance, no_progress
from cheem_jax.engine import hosts
from cheem_jax.engine.batches import batches
from cheem_jax.engine.executor import Executor, Gather, Network, Tokens
from cheem_jax.engine.layout import Layout

T = TypeVar("T")


@runtime_checkable
class Feed(Protocol):
    """A data set as images, or as cached tokens after frozen leading blocks."""

    block: int | None = None
    """Block whose tokens are cached; None if passes start with images."""

    def follow(self, order: Sequence[np.ndarray]) -> Iterator[Tokens | Gather]:
        """Yield the source of a pass for each array of row numbers."""
        ...

    def at(self, epoch: int) -> "Feed":
        """Return the feed for one training epoch; only augmented images differ between epochs."""
        return self

    def on(self, executor: Executor) -> "Feed":
        """Return a feed of the same data for `executor`, which runs on one of the devices."""
        ...

    def parts(self, order: Sequence[np.ndarray]) -> Iterator["Feed"]:
        """Yield a separate feed for each array of row numbers."""
        return (Subset(self, rows) for rows in order)


class HostImages(Feed):
    """uint8 images `[N, S, S, 3]` in the host's memory or in files; each batch is copied to the
    device."""

    def __init__(self, executor: Executor, images: Images):
        self.executor, self.images = executor, images

    def follow(self, order: Sequence[np.ndarray]) -> Iterator[Tokens]:
        """Yield the tokens of block 0 for each array of row numbers. Files are read ahead."""
        return map(self.executor.begin, self.executor.layout.read(self.images, order))

    def on(self, executor: Executor) -> Feed:
        """Return a feed of the same images for `executor`."""
        return HostImages(executor, self.images)

    def parts(self, order: Sequence[np.ndarray]) -> Iterator[Feed]:
        """Yield a separate feed for each array of row numbers. Each image is read only once, even
        if more than one device uses the feed."""
        return (HostImages(self.executor, images) for images in in_turn(self.images, order))


class Subset(Feed):
    """Some rows of another feed."""

    def __init__(self, feed: Feed, rows: np.ndarray):
        self.feed, self.rows = feed, rows
        self.block = feed.block

    def follow(self, order: Sequence[np.ndarray]) -> Iterator[Tokens | Gather]:
        """Yield the source of a pass for each array of row numbers. The numbers count the rows of
        this subset."""
        return self.feed.follow([self.rows[rows] for rows in order])

    def at(self, epoch: int) -> Feed:
        """Return the same subset of the feed for one training epoch."""
        return Subset(self.feed.at(epoch), self.rows)

    def on(self, executor: Executor) -> Feed:
        """Return the same subset of the feed for `executor`."""
        return Subset(self.feed.on(executor), self.rows)


class Cached(Feed):
    """Cached tokens `[N, ...]` of one block, or uint8 images if `block` is None.

    On an accelerator, the values are in device memory: the device gathers each batch by row number,
    and the compiled function normalises images. On a CPU, tokens are NumPy arrays, because NumPy
    gathers rows without a compiled function; images are not cached.
    """

    def __init__(self, layout: Layout, block: int | None, values: np.ndarray | jax.Array):
        self.block, self.layout, self.values = block, layout, values

    def follow(self, order: Sequence[np.ndarray]) -> Iterator[Tokens | Gather]:
        """Yield the source of a pass for each array of row numbers."""
        return map(self._gather, order)

    def on(self, executor: Executor) -> Feed:
        """Return a feed of the same values for `executor`, which runs on one of the devices."""
        place = self.layout.devices.index(executor.layout.devices[0])
        return Cached(executor.layout, self.block, self.layout.copy(self.values, place))

    def _gather(self, rows: np.ndarray) -> Tokens | Gather:
        if isinstance(self.values, np.ndarray):
            assert self.block is not None
            values = self.layout.join(self.values[self.layout.local_rows(rows)])
            return Tokens(self.block, jnp.asarray(values))
        return Gather(self.block, self.values, np.asarray(rows, np.int32))


class Budget:
    """Memory budget of a task in bytes: `free` bytes can still be cached, `used` bytes are cached,
    and `refused` describes the values that did not fit."""

    def __init__(self, num_bytes: int):
        self.free = num_bytes
        self.used = 0
        self.refused = list[str]()

    def make(self, name: str, num_bytes: int, function: Callable[[], T]) -> T | None:
        """Return the result of `function` if its `num_bytes` fit the budget; otherwise return None.

        If the device's memory is exhausted, this call and later calls return None.
        """
        if num_bytes <= self.free:
            try:
                value = function()
            except jax.errors.JaxRuntimeError as error:
                if "RESOURCE_EXHAUSTED" not in str(error):
                    raise
                self.free = 0
            else:
                self.free -= num_bytes
                self.used += num_bytes
                return value
        used = f"{num_bytes / 2**30:.3g} GB next to {self.used / 2**30:.3g} GB cached"
        self.refused.append(f"{name}, {used}")
        return None


def feed_images(executor: Executor, images: Images, budget: Budget) -> Feed:
    """Return a feed of images. The images are on the accelerator if they are decoded and fit the
    budget, otherwise on the host."""
    plain = HostImages(executor, images)
    if executor.device.is_host or not isinstance(images, np.ndarray):
        return plain

    def put() -> Feed:
        return Cached(executor.layout, None, _on_device(executor.layout, images))

    return budget.make("images on the device", images.nbytes, put) or plain


def cached_bytes(executor: Executor, num_images: int, block: int) -> int:
    """Return the number of bytes of the cached tokens of `num_images` images at `block`."""
    config = executor.config
    is_trimmed = block == executor.num_blocks or (
        executor.outputs[block] is not None and executor.placement == "mlp_down"
    )
    num_tokens = config.num_outputs if is_trimmed else config.num_tokens
    return executor.cached_type.itemsize * num_images * num_tokens * config.width


def cache_tokens(
    name: str,
    executor: Executor,
    images: Feed,
    num_images: int,
    prefix: Network,
    *,
    batch_size: int,
    budget: Budget,
    advance: Advance = no_progress,
) -> Feed:
    """Compute and cache the tokens after the frozen blocks of `prefix`.

    Returns `images` if the tokens do not fit the budget or are cached already.
    """
    if images.block == len(prefix):
        return images

    def compute() -> Feed:
        values = _compute(executor, images, num_images, prefix, batch_size, advance)
        return Cached(executor.layout, len(prefix), values)

    num_bytes = cached_bytes(executor, num_images, len(prefix))
    return budget.make(name, num_bytes, compute) or images


def _compute(
    executor: Executor,
    images: Feed,
    num_images: int,
    prefix: Network,
    batch_size: int,
    advance: Advance,
) -> np.ndarray | jax.Array:
    """Compute the tokens of every image after the blocks of `prefix`."""
    layout = executor.layout
    dtype = executor.cached_type
    stays = not executor.device.is_host and not layout.is_many
    cache: Any = None
    pieces = list(batches(np.arange(num_images), executor.forward_rows(batch_size, num_images)))
    sources = images.follow([batch.rows for batch in pieces])
    for batch, source in zip(pieces, sources, strict=True):
        values: Any = executor.advance(prefix, source, len(prefix)).values
        shape = (num_images, *values.shape[1:])
        if stays:
            cache = jnp.zeros(shape, dtype) if cache is None else cache
            cache = _write(cache, values, np.int32(batch.rows[0]), size=batch.size)
        else:
            cache = np.empty(shape, dtype) if cache is None else cache
            cache[batch.rows[: batch.size]] = hosts.fetch(values)[: batch.size]
        advance(batch.size)
    if executor.device.is_host:
        return cache
    # If the device's memory is exhausted, the error is raised here, before the budget counts the
    # tokens as cached.
    return jax.block_until_ready(cache if stays else _on_device(layout, cache))


@functools.partial(jax.jit, static_argnames="size", donate_argnums=0)
def _write(cache, values, start, *, size: int):
    """Write the first `size` rows of `values` to `cache` in place, starting at row `start`."""
    return jax.lax.dynamic_update_slice_in_dim(cache, values[:size].astype(cache.dtype), start, 0)


def prefetch(layout: Layout, work: Iterable[T], num: int = 2) -> Iterator[T]:
    """Yield the items of `work`; another thread prepares up to `num` items in advance.

    With more than one device, the main thread prepares the items, because functions with sums over
    devices must be dispatched in the same order in every process.
    """
    if layout.is_many:
        yield from work
        return
    iterator = iter(work)
    end = object()
    with ThreadPoolExecutor(1, "cheem-feed") as thread:
        waiting = [thread.submit(next, iterator, end) for _ in range(num)]
        while (item := waiting.pop(0).result()) is not end:
            waiting.append(thread.submit(next, iterator, end))
            yield item  # pyright: ignore[reportReturnType]


def memory_budget(gigabytes: float | None) -> int:
    """Convert the setting `memory_gb` to bytes; None means a quarter of the device's memory. The
    memory of a CPU is that of the machine, or of its container.

    Raises ValueError for a number that is not in 0..1e9.
    """
    if gigabytes is not None:
        if not 0 <= gigabytes <= 1e9:
            raise ValueError(f"memory_gb is {gigabytes}; expected 0 (cache nothing) to 1e9 GB")
        return int(gigabytes * 2**30)
    statistics = jax.local_devices()[0].memory_stats() or {}
    memory = statistics.get("bytes_limit")
    if memory is None:
        memory = host_memory()
    # All processes must cache the same data sets, so they use the smallest of their budgets. The
    # budgets are compared in MiB, because JAX's integers have 32 bits.
    return hosts.smallest(int(memory) // 4 >> 20) << 20


def _on_device(layout: Layout, values: np.ndarray) -> jax.Array:
    return jax.block_until_ready(
        layout.replicate(values) if layout.is_many else jax.device_put(values)
    )
