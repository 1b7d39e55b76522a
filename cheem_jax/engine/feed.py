"""Where the tokens of a batch come from: images on the host or on the device, or activations that were kept.

Without augmentation, what no step of a phase changes is the same in every epoch: in a supernet the tokens of block 0,
in fine-tuning those of the first block that learns. They are kept where they fit a stated budget. Augmented images are
new in every epoch, so each of their steps begins with pixels on the host.
"""

import copy
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

from cheem_jax.core.images import Images
from cheem_jax.core.keys import next_power_of_two
from cheem_jax.engine import hosts
from cheem_jax.engine.batches import batches
from cheem_jax.engine.executor import Executor, Gather, Network, Tokens
from cheem_jax.engine.layout import Layout

T = TypeVar("T")


@runtime_checkable
class Feed(Protocol):
    """Rows of a data set to the tokens that a pass begins with."""

    def __call__(self, rows: np.ndarray, /) -> Tokens | Gather: ...


class HostImages:
    """uint8 images `[N, S, S, 3]` that the host holds or reads; each batch is copied to the device."""

    def __init__(self, executor: Executor, images: Images):
        self.executor, self.images = executor, images

    def __call__(self, rows: np.ndarray, /) -> Tokens:
        return next(self.follow([rows]))

    def follow(self, order: Sequence[np.ndarray]) -> Iterator[Tokens]:
        """The tokens of each of these rows in turn, the images read ahead where that pays."""
        return map(self.executor.begin, self.executor.layout.read(self.images, order))


class Subset:
    """The rows of a feed that are numbered by `rows`."""

    def __init__(self, feed: Feed, rows: np.ndarray):
        self.feed, self.rows = feed, rows

    def __call__(self, rows: np.ndarray, /) -> Tokens | Gather:
        return self.feed(self.rows[rows])

    def follow(self, order: Sequence[np.ndarray]) -> Iterator[Tokens | Gather]:
        """As `HostImages.follow`."""
        return fed(self.feed, [self.rows[rows] for rows in order])


def fed(feed: Feed, order: Sequence[np.ndarray]) -> Iterator[Tokens | Gather]:
    """What a feed gives for each of these rows in turn."""
    return feed.follow(order) if isinstance(feed, HostImages | Subset) else map(feed, order)


class Kept:
    """What is kept of every image: tokens of one block, or where `block` is None the image itself.

    On an accelerator the number of images is padded to a power of two, so that few programs serve all data sets; what
    a batch needs is gathered there by index, and images are normalised inside the program.
    """

    def __init__(self, layout: Layout, block: int | None, values: np.ndarray):
        self.block, self.layout = block, layout
        # a CPU's device memory is the host's, and numpy gathers without a program
        self.values = values if jax.default_backend() == "cpu" else _on_device(layout, values)

    def on(self, layout: Layout) -> "Kept":
        """The same on one of the devices."""
        own = copy.copy(self)
        own.layout = layout
        if isinstance(self.values, jax.Array):
            own.values = self.layout.copy(self.values, self.layout.devices.index(layout.devices[0]))
        return own

    def __call__(self, rows: np.ndarray, /) -> Tokens | Gather:
        if isinstance(self.values, np.ndarray):
            assert self.block is not None, "a CPU keeps no images: the host has them"
            return Tokens(self.block, jnp.asarray(self.layout.joined(self.values[self.layout.mine(rows)])))
        return Gather(self.block, self.values, np.asarray(rows, np.int32))


def feed_on(feed: Feed, executor: Executor) -> Feed:
    """The same data for an executor on one of the devices, where they lie already if they were kept there."""
    match feed:
        case HostImages():
            return HostImages(executor, feed.images)
        case Subset():
            return Subset(feed_on(feed.feed, executor), feed.rows)
        case Kept():
            return feed.on(executor.layout)
    raise TypeError(f"{type(feed).__name__} is no feed that can be moved to one device")


class Budget:
    """Bytes that one task may still keep; `refused` names what found no room."""

    def __init__(self, num_bytes: int):
        self.left, self.refused = num_bytes, list[str]()

    def take(self, name: str, num_bytes: int) -> bool:
        """Whether there is room, which is then gone."""
        if num_bytes > self.left:
            self.refused.append(name)
            return False
        self.left -= num_bytes
        return True


def feed_images(executor: Executor, images: Images, budget: Budget) -> Feed:
    """Images held on the device, if it is not the host itself, they are decoded and they fit."""
    if jax.default_backend() == "cpu" or not isinstance(images, np.ndarray):
        return HostImages(executor, images)
    held = next_power_of_two(len(images)) * math.prod(images.shape[1:])
    return (
        Kept(executor.layout, None, images)
        if budget.take("images on the device", held)
        else HostImages(executor, images)
    )


def kept_bytes(executor: Executor, num_images: int, block: int) -> int:
    """Bytes that the tokens of a block take for so many images."""
    behind_last = block == executor.num_blocks
    trimmed = behind_last or (executor.outputs[block] is not None and executor.placement == "mlp_down")
    num_tokens = executor.config.num_outputs if trimmed else executor.config.num_tokens
    return 4 * num_images * num_tokens * executor.config.width


def keep_tokens(
    name: str, executor: Executor, images: Feed, num_images: int, prefix: Network, *, batch_size: int, budget: Budget
) -> Feed:
    """Tokens behind the frozen blocks of `prefix`, computed now and kept if they fit.

    Where they do not fit, or are kept already, `images` is returned: each step then goes on from there.
    """
    if isinstance(images, Kept) and images.block == len(prefix):
        return images
    held = num_images if jax.default_backend() == "cpu" else next_power_of_two(num_images)  # as `_on_device` pads
    if not budget.take(name, kept_bytes(executor, held, len(prefix))):
        return images
    kept: np.ndarray | None = None
    pieces = list(batches(np.arange(num_images), executor.rows(batch_size)))
    for batch, tokens in zip(pieces, fed(images, [batch.rows for batch in pieces]), strict=True):
        values = hosts.fetch(executor.advance(prefix, tokens, len(prefix)).values)
        if kept is None:
            kept = np.empty((num_images, *values.shape[1:]), values.dtype)
        kept[batch.rows[: batch.size]] = values[: batch.size]
    assert kept is not None, "a data set holds at least one image"
    return Kept(executor.layout, len(prefix), kept)


def ahead(layout: Layout, work: Iterable[T], num: int = 2) -> Iterator[T]:
    """The items of `work`, up to `num` of them prepared by another thread while one is used.

    Over several devices the main thread prepares them: these wait for each other, and must meet programs in one order.
    """
    if layout.is_many:
        yield from work
        return
    iterator, end = iter(work), object()
    with ThreadPoolExecutor(1, "cheem-feed") as thread:
        waiting = [thread.submit(next, iterator, end) for _ in range(num)]
        while (item := waiting.pop(0).result()) is not end:
            waiting.append(thread.submit(next, iterator, end))
            yield item  # pyright: ignore[reportReturnType]


def memory_budget(gigabytes: float | None) -> int:
    """Bytes that may be spent on keeping things: what the user said, or a quarter of the device's memory.

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
    padded = np.zeros((next_power_of_two(len(values)), *values.shape[1:]), values.dtype)
    padded[: len(values)] = values
    return layout.everywhere(jax.device_put(padded))
