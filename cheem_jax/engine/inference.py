"""Answering with the task unknown: the frozen base network names the task, and its activations are
not thrown away.

A task's network that begins with Reuse of the base experts equals the base network up to its first
difference: it is resumed there (paper section 'Inference' runs both from the image). Images are
grouped by task within a batch and padded to few sizes, so that no request compiles.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from cheem_jax.core.keys import next_power_of_two
from cheem_jax.core.pool import Head
from cheem_jax.core.routing import PAPER, RouterConfig, joined
from cheem_jax.engine.batches import batches
from cheem_jax.engine.executor import Executor, Gather, Network, Tokens
from cheem_jax.engine.feed import Feed, HostImages
from cheem_jax.engine.passes import read_on_the_way

Route = Callable[[Float[np.ndarray, "N D"]], Int[np.ndarray, "N"]]


class Outline(NamedTuple):
    """What can be said of a network without putting it together."""

    codes: tuple[int, ...]
    num_classes: int


@runtime_checkable
class Networks(Protocol):
    """Task networks that are put together when they are asked for."""

    @property
    def outlines(self) -> Sequence[Outline]: ...
    def network(self, index: int) -> Network: ...
    def head(self, index: int) -> Head:
        """Padded to a power of two outputs."""
        ...


class Inferred(NamedTuple):
    """Per image the task and the class within it (-1 where a logit is no number)."""

    tasks: Int[np.ndarray, "N"]
    classes: Int[np.ndarray, "N"]


class Inference:
    """The base network and all task networks over one executor."""

    def __init__(
        self,
        executor: Executor,
        base: Network,
        networks: Networks,
        *,
        batch_size: int,
        sizes: Sequence[int] | None = None,
        reads: RouterConfig = PAPER,
    ):
        self.executor, self.base, self.networks = executor, base, networks
        self.batch_size = batch_size
        self.rows = executor.rows(batch_size)
        depth = executor.num_blocks
        self._blocks = reads.blocks(depth)
        self._until = reads.until(depth)
        # the base network is not run further than the router reads: what a task's shares behind
        # that runs as its own
        self.differences = [
            min(first_difference(base, outline.codes), self._until)
            for outline in self.networks.outlines
        ]
        self.sizes = bucket_sizes(self.rows) if sizes is None else tuple(sizes)

    def __call__(self, feed: Feed, num: int, route: Route) -> Inferred:
        """Answers to `num` images."""
        found = Inferred(np.zeros(num, np.int32), np.zeros(num, np.int32))
        for task, place, rows, reached in self._routed(feed, num, route):
            found.tasks[place], found.classes[place] = task, self._answers(task, rows, reached)
        return found

    def features(self, feed: Feed, num: int, route: Route) -> Float[np.ndarray, "N D"]:
        """Features of each image by the network of its task; zeros where the route names none
        (-1)."""
        found = np.zeros((num, self.executor.config.width), np.float32)
        for task, place, rows, reached in self._routed(feed, num, route):
            if task >= 0:
                groups = self._last_tokens(task, rows, reached)
                found[place] = np.concatenate(
                    [np.asarray(self.executor.features(last))[:size] for last, size in groups]
                )
        return found

    def _routed(
        self, feed: Feed, num: int, route: Route
    ) -> Iterator[tuple[int, np.ndarray, np.ndarray, dict[int, np.ndarray | jax.Array]]]:
        """Of each batch and each of its tasks: the task, its images, their rows in the batch, the
        base's tokens."""
        for batch in batches(np.arange(num), self.batch_size):
            features, reached = self._base(feed, batch.rows)
            tasks = np.asarray(route(features), np.int32)[: batch.size]
            for task in np.unique(tasks).tolist():
                rows = np.flatnonzero(tasks == task)
                yield task, batch.rows[rows], rows, reached

    def prepare(self, *, classify: bool = True) -> None:
        """Compile what any request can call, by answering blank images in groups of every size.

        Without `classify` what `features` calls.
        """
        size = self.executor.config.image_size
        blank = np.zeros((self.batch_size, size, size, 3), np.uint8)
        _, reached = self._base(HostImages(self.executor, blank), np.arange(self.batch_size))
        for task in self._examples():
            for num in self.sizes:
                if classify:
                    self._answers(task, np.arange(num), reached)
                else:
                    for last, _ in self._last_tokens(task, np.arange(num), reached):
                        self.executor.features(last)

    def _examples(self) -> Iterator[int]:
        """Few networks that together call every program that any of them calls."""
        known = set()
        for task, (begin, outline) in enumerate(
            zip(self.differences, self.networks.outlines, strict=True)
        ):
            runs = self.executor.programs_of(
                begin, [code == SKIP for code in outline.codes[begin:]]
            )
            programs = {*runs, ("head", next_power_of_two(outline.num_classes))}
            if not programs <= known:
                known |= programs
                yield task

    def _base(
        self, feed: Feed, rows: np.ndarray
    ) -> tuple[np.ndarray, dict[int, np.ndarray | jax.Array]]:
        """Features of a batch and the base network's tokens wherever some network leaves it."""
        stops = sorted(set(self.differences))

        def read(source: Tokens | Gather) -> tuple[list[jax.Array], list[jax.Array]]:
            tokens = self.executor.resolve(source)
            kept = list[jax.Array]()
            found = read_on_the_way(
                self.executor,
                self.base,
                tokens,
                blocks=self._blocks,
                until=self._until,
                keep=lambda tokens: kept.append(tokens.values),
                stops=stops,
            )
            return found, kept

        sources = feed.follow(np.split(rows, range(self.rows, len(rows), self.rows)))
        parts, kept = zip(*self.executor.each(read, sources), strict=True)
        reached = dict(zip(stops, zip(*kept, strict=True), strict=True))
        # on a CPU numpy gathers without a program; elsewhere a batch is one part and stays on the
        # device
        join = np.concatenate if self.executor.device.is_host else jnp.concatenate
        features = joined(
            [np.concatenate(part) for part in zip(*jax.device_get(parts), strict=True)]
        )
        return features, {
            block: kept[0] if len(kept) == 1 else join([*map(np.asarray, kept)])
            for block, kept in reached.items()
        }

    def _answers(
        self, task: int, rows: np.ndarray, reached: dict[int, np.ndarray | jax.Array]
    ) -> np.ndarray:
        head = self.networks.head(task)
        num_classes = self.networks.outlines[task].num_classes
        found = []
        for last, size in self._last_tokens(task, rows, reached):
            blank = np.zeros(len(last), np.int32)
            answers, _ = self.executor.classify(
                head, last, blank, blank.astype(np.float32), num_classes
            )
            found.append(np.asarray(answers)[:size])
        return np.concatenate(found)

    def _last_tokens(
        self, task: int, rows: np.ndarray, reached: dict[int, np.ndarray | jax.Array]
    ) -> Iterator[tuple[jax.Array, int]]:
        """The last tokens of a task's network in groups, padded ones behind the real rows, and how
        many are real."""
        block = self.differences[task]
        network = self.networks.network(task)
        values = reached[block]

        def run(group: tuple[np.ndarray, int]) -> tuple[jax.Array, int]:
            padded, size = group
            if self.executor.device.is_host:
                tokens = Tokens(block, jnp.asarray(np.asarray(values)[padded]))
            else:
                tokens = self.executor.resolve(
                    Gather(block, jnp.asarray(values), padded.astype(np.int32))
                )
            return self.executor.advance(network, tokens, self.executor.num_blocks).values, size

        return self.executor.each(run, pieces(rows, self.sizes))


SKIP = -1
"""The code of a block that a finished network skips."""


def first_difference(base: Network, codes: Sequence[int]) -> int:
    """The first block where a network of these codes leaves the base network; L where it never
    does."""
    pairs = enumerate(zip(base, codes, strict=True))
    return next((block for block, (step, code) in pairs if step.code != code), len(base))


def bucket_sizes(rows: int) -> tuple[int, ...]:
    """Sizes to which groups are padded: the full one, a half, a quarter."""
    return tuple(sorted({rows, max(rows // 2, 1), max(rows // 4, 1)}, reverse=True))


def pieces(rows: np.ndarray, sizes: Sequence[int]) -> list[tuple[np.ndarray, int]]:
    """`rows` cut into parts of these sizes, largest first; with the real rows of each.

    What is left is padded to the smallest size that holds it, if at least half of that is real.
    """
    found = []
    start = 0
    while start < len(rows):
        left = len(rows) - start
        fits = [size for size in sizes if left <= size <= 2 * left][-1:] or [
            size for size in sizes if size <= left
        ]
        size = fits[0] if fits else sizes[-1]
        part = rows[start : start + size]
        found.append((np.concatenate([part, np.full(size - len(part), part[0])]), len(part)))
        start += size
    return found
