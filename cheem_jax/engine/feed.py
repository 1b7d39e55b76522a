"""Where the tokens of a batch come from: images on the host or on the device, or activations that
were kept.

Without augmentation, what no step of a phase changes is the same in every epoch: in a supernet the
tokens of block 0, in fine-tuning those of the first block that learns. They are kept where they fit
a stated budget. Augmented images are new in every epoch, so each of their steps begins with pixels
on the host.
"""

import contextlib
import copy
import functools
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeVar, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

from cheem_jax.core.images import Images
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
    """uint8 images `[N, S, S, 3]` that the host holds or reads; each batch is copied to the
    device."""

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

    An accelerator holds them; what a batch needs is gathered there by index, and images are
    normalised inside the program.
    """

    def __init__(self, layout: Layout, block: int | None, values: np.ndarray | jax.Array):
        # a CPU's device memory is the host's, and numpy gathers without a program
        self.block, self.layout, self.values = block, layout, values

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
            return Tokens(
                self.block, jnp.asarray(self.layout.joined(self.values[self.layout.mine(rows)]))
            )
        return Gather(self.block, self.values, np.asarray(rows, np.int32))


def feed_on(feed: Feed, executor: Executor) -> Feed:
    """The same data for an executor on one of the devices, where they lie already if they were kept
    there."""
    match feed:
        case HostImages():
            return HostImages(executor, feed.images)
        case Subset():
            return Subset(feed_on(feed.feed, executor), feed.rows)
        case Kept():
            return feed.on(executor.layout)
    raise TypeError(f"{type(feed).__name__} is no feed that can be moved to one device")


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
        return Kept(executor.layout, None, _on_device(executor.layout, images))
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
    if isinstance(images, Kept) and images.block == len(prefix):
        return images
    num_bytes = kept_bytes(executor, num_images, len(prefix))
    if not budget.take(name, num_bytes):
        return images
    with budget.taken(name, num_bytes):
        return Kept(
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
    for batch, tokens in zip(pieces, fed(images, [batch.rows for batch in pieces]), strict=True):
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
