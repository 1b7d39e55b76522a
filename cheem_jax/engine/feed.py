"""Where the tokens of a batch come from: images on the host or on the device, or activations that
were kept.

Without augmentation, what no step of a phase changes is the same in every epoch: in a supernet the
tokens of block 0, in fine-tuning those of the first block that learns. They are kept where they fit
a stated budget. Augmented images are new in every epoch, so each of their steps begins with pixels
on the host.
"""

import contextlib
import functools
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeVar, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

from cheem_jax.core.images import Images, in_turn
from cheem_jax.engine import hosts
from cheem_jax.engine.batches import batches
from cheem_jax.engine.executor import Executor, Gather, Network, Tokens
from cheem_jax.engine.layout import Layout

T = TypeVar("T")


@runtime_checkable
class Feed(Protocol):
    """A data set as the beginnings of passes: its images, or tokens cached behind a frozen
    prefix."""

    block: int | None = None
    """The block whose tokens are cached; None: passes begin with images."""

    def follow(self, order: Sequence[np.ndarray]) -> Iterator[Tokens | Gather]:
        """Yield the tokens of each array of row numbers."""
        ...

    def at(self, epoch: int) -> "Feed":
        """The data set of one training epoch: only augmented images differ between epochs."""
        return self

    def on(self, executor: Executor) -> "Feed":
        """The same data set for an executor on one of the devices."""
        ...

    def parts(self, order: Sequence[np.ndarray]) -> Iterator["Feed"]:
        """Each array of row numbers as a data set of its own."""
        return (Subset(self, rows) for rows in order)


class HostImages(Feed):
    """uint8 images `[N, S, S, 3]` in the host's memory or in files; each batch is copied to the
    device."""

    def __init__(self, executor: Executor, images: Images):
        self.executor, self.images = executor, images

    def follow(self, order: Sequence[np.ndarray]) -> Iterator[Tokens]:
        """See `Feed.follow`; files are read ahead."""
        return map(self.executor.begin, self.executor.layout.read(self.images, order))

    def on(self, executor: Executor) -> Feed:
        """See `Feed.on`."""
        return HostImages(executor, self.images)

    def parts(self, order: Sequence[np.ndarray]) -> Iterator[Feed]:
        """See `Feed.parts`; each image is read once for all devices."""
        return (HostImages(self.executor, images) for images in in_turn(self.images, order))


class Subset(Feed):
    """Some rows of another feed."""

    def __init__(self, feed: Feed, rows: np.ndarray):
        self.feed, self.rows = feed, rows
        self.block = feed.block

    def follow(self, order: Sequence[np.ndarray]) -> Iterator[Tokens | Gather]:
        """See `Feed.follow`."""
        return self.feed.follow([self.rows[rows] for rows in order])

    def at(self, epoch: int) -> Feed:
        """See `Feed.at`."""
        return Subset(self.feed.at(epoch), self.rows)

    def on(self, executor: Executor) -> Feed:
        """See `Feed.on`."""
        return Subset(self.feed.on(executor), self.rows)


class Cached(Feed):
    """Tokens `[N, ...]` of one block, or uint8 images if `block` is None.

    On an accelerator they are in its memory: each batch is gathered there by row number, and images
    are normalised inside the compiled function. A CPU caches tokens as NumPy arrays, which gather
    without a compiled function, and no images.
    """

    def __init__(self, layout: Layout, block: int | None, values: np.ndarray | jax.Array):
        self.block, self.layout, self.values = block, layout, values

    def follow(self, order: Sequence[np.ndarray]) -> Iterator[Tokens | Gather]:
        """See `Feed.follow`."""
        return map(self._gather, order)

    def on(self, executor: Executor) -> Feed:
        """See `Feed.on`."""
        place = self.layout.devices.index(executor.layout.devices[0])
        return Cached(executor.layout, self.block, self.layout.copy(self.values, place))

    def _gather(self, rows: np.ndarray) -> Tokens | Gather:
        if isinstance(self.values, np.ndarray):
            assert self.block is not None
            values = self.layout.joined(self.values[self.layout.mine(rows)])
            return Tokens(self.block, jnp.asarray(values))
        return Gather(self.block, self.values, np.asarray(rows, np.int32))


class Budget:
    """Bytes that one task may still keep, and those it keeps; `refused` tells what found no room,
    and beside what."""

    def __init__(self, num_bytes: int):
        self.left = num_bytes
        self.kept = 0
        self.refused = list[str]()

    def take(self, name: str, num_bytes: int) -> bool:
        """Whether there is room, which is then gone."""
        if num_bytes > self.left:
            self._refuse(name, num_bytes)
            return False
        self.left -= num_bytes
        self.kept += num_bytes
        return True

    @contextlib.contextmanager
    def taken(self, name: str, num_bytes: int) -> Iterator[None]:
        """While what took these bytes comes into being: a device that turns out to be full refuses
        it after all."""
        try:
            yield
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            self.left = 0
            self.kept = self.kept - num_bytes
            self._refuse(name, num_bytes)

    def _refuse(self, name: str, num_bytes: int) -> None:
        self.refused.append(
            f"{name}, {num_bytes / 2**30:.3g} GB beside {self.kept / 2**30:.3g} GB kept"
        )


def feed_images(executor: Executor, images: Images, budget: Budget) -> Feed:
    """Images held on the device, if it is not the host itself, they are decoded and they fit."""
    plain = HostImages(executor, images)
    name = "images on the device"
    if (
        executor.device.is_host
        or not isinstance(images, np.ndarray)
        or not budget.take(name, images.nbytes)
    ):
        return plain
    with budget.taken(name, images.nbytes):
        return Cached(executor.layout, None, _on_device(executor.layout, images))
    return plain


def kept_bytes(executor: Executor, num_images: int, block: int) -> int:
    """Bytes that the tokens of a block take for so many images."""
    behind_last = block == executor.num_blocks
    trimmed = behind_last or (
        executor.outputs[block] is not None and executor.placement == "mlp_down"
    )
    num_tokens = executor.config.num_outputs if trimmed else executor.config.num_tokens
    return executor.kept_type.itemsize * num_images * num_tokens * executor.config.width


def keep_tokens(
    name: str,
    executor: Executor,
    images: Feed,
    num_images: int,
    prefix: Network,
    *,
    batch_size: int,
    budget: Budget,
) -> Feed:
    """Tokens behind the frozen blocks of `prefix`, computed now and kept if they fit.

    Where they do not fit, or are kept already, `images` is returned: each step then goes on from
    there.
    """
    if images.block == len(prefix):
        return images
    num_bytes = kept_bytes(executor, num_images, len(prefix))
    if not budget.take(name, num_bytes):
        return images
    with budget.taken(name, num_bytes):
        return Cached(
            executor.layout,
            len(prefix),
            _computed(executor, images, num_images, prefix, batch_size),
        )
    return images


def _computed(
    executor: Executor, images: Feed, num_images: int, prefix: Network, batch_size: int
) -> np.ndarray | jax.Array:
    """The tokens behind `prefix` of every image, where passes begin with them."""
    layout, dtype = executor.layout, executor.kept_type
    stays = not executor.device.is_host and not layout.is_many
    kept: Any = None
    pieces = list(batches(np.arange(num_images), executor.forward_rows(batch_size, num_images)))
    for batch, tokens in zip(pieces, images.follow([batch.rows for batch in pieces]), strict=True):
        values: Any = executor.advance(prefix, tokens, len(prefix)).values
        if stays:
            kept = jnp.zeros((num_images, *values.shape[1:]), dtype) if kept is None else kept
            kept = _written(kept, values, np.int32(batch.rows[0]), size=batch.size)
            continue
        values = hosts.fetch(values)
        kept = np.empty((num_images, *values.shape[1:]), dtype) if kept is None else kept
        kept[batch.rows[: batch.size]] = values[: batch.size]
    assert kept is not None, "a data set holds at least one image"
    if executor.device.is_host:
        return kept
    # ready before it counts as kept: a device without room says so late
    return jax.block_until_ready(kept if stays else _on_device(layout, kept))


@functools.partial(jax.jit, static_argnames="size", donate_argnums=0)
def _written(kept, values, start, *, size: int):
    """`kept` with the first `size` of `values` from row `start` on, in place."""
    return jax.lax.dynamic_update_slice_in_dim(kept, values[:size].astype(kept.dtype), start, 0)


def ahead(layout: Layout, work: Iterable[T], num: int = 2) -> Iterator[T]:
    """The items of `work`, up to `num` of them prepared by another thread while one is used.

    Over several devices the main thread prepares them: these wait for each other, and must meet
    programs in one order.
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
    """Bytes that may be spent on keeping things: what the user said, or a quarter of the device's
    memory.

    Raises ValueError for a number below 0.
    """
    if gigabytes is not None:
        if gigabytes < 0:
            raise ValueError(f"memory_gb is {gigabytes}; expected 0 (keep nothing) or more")
        return int(gigabytes * 2**30)
    statistics = jax.local_devices()[0].memory_stats() or {}
    if "bytes_limit" in statistics:
        found = int(statistics["bytes_limit"]) // 4
    else:
        found = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4
    return hosts.smallest(found)  # what one process keeps, each has to


def _on_device(layout: Layout, values: np.ndarray) -> jax.Array:
    return jax.block_until_ready(
        layout.everywhere(values) if layout.is_many else jax.device_put(values)
    )
