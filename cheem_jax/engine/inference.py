"""Compute the features of each image with the network of its inferred task. The network starts with
tokens of the base network.

If the leading blocks of a task network reuse base experts, they compute the same tokens as the base
network. The task network therefore starts with the base network's tokens at the first block where
the two networks differ; in the paper (section 'Inference'), both networks start with the image.
Images are grouped by task within a batch, and groups are padded to a few sizes, so that no request
compiles a function.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from cheem_jax.core.routing import PAPER, RouterConfig, join_tokens
from cheem_jax.engine.batches import batches
from cheem_jax.engine.executor import Executor, Gather, Network, Tokens, shared_prefix
from cheem_jax.engine.feed import Feed, HostImages
from cheem_jax.engine.passes import batch_features

Route = Callable[[Float[np.ndarray, "N D"]], Int[np.ndarray, "N"]]

SKIP = -1
"""Code of a skipped block."""


@runtime_checkable
class Networks(Protocol):
    """Task networks that are built on request."""

    @property
    def codes(self) -> Sequence[Sequence[int]]:
        """For each network, the codes `[L]` of its blocks. If two networks have the same code at a
        block, their experts at that block are identical."""
        ...

    def network(self, index: int) -> Network: ...


class Inferred(NamedTuple):
    """Inferred task of each image, and the class within that task; the class is -1 if a logit is
    non-finite."""

    tasks: Int[np.ndarray, "N"]
    classes: Int[np.ndarray, "N"]


class Inference:
    """The base network and all task networks, which one executor runs."""

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
        self.executor = executor
        self.base = base
        self.networks = networks
        self.batch_size = batch_size
        self.rows = executor.rows(batch_size)
        self.sizes = bucket_sizes(self.rows) if sizes is None else tuple(sizes)
        self._blocks = reads.blocks(executor.num_blocks)
        self._until = reads.until(executor.num_blocks)
        # The base network stops at the last block that the router reads. Task networks that are
        # identical to the base network up to that block continue there.
        base_codes = [step.code for step in base]
        self.differences = [
            min(shared_prefix(base_codes, codes), self._until) for codes in networks.codes
        ]

    def features(self, feed: Feed, num: int, route: Route) -> Float[np.ndarray, "N D"]:
        """Compute the features of `num` images, each with the network of its task. Images for which
        `route` returns -1 get zeros."""
        features = np.zeros((num, self.executor.config.width), np.float32)
        for batch in batches(np.arange(num), self.batch_size):
            read, reached = self._run_base(feed, batch.rows)
            tasks = np.asarray(route(read))[: batch.size]
            for task in np.unique(tasks[tasks >= 0]).tolist():
                rows = np.flatnonzero(tasks == task)
                features[batch.rows[rows]] = self._run_task(task, rows, reached)
        return features

    def prepare(self) -> None:
        """Compile every function that a request can call, by running blank images in groups of each
        size."""
        size = self.executor.config.image_size
        blank = np.zeros((self.batch_size, size, size, 3), np.uint8)
        _, reached = self._run_base(HostImages(self.executor, blank), np.arange(self.batch_size))
        for task in self._examples():
            for num in self.sizes:
                self._run_task(task, np.arange(num), reached)

    def _examples(self) -> Iterator[int]:
        """Yield the indices of a few networks that together call all compiled functions."""
        covered = set()
        for task, codes in enumerate(self.networks.codes):
            begin = self.differences[task]
            functions = self.executor.function_keys(begin, [code == SKIP for code in codes[begin:]])
            if not functions <= covered:
                covered |= functions
                yield task

    def _run_base(
        self, feed: Feed, rows: np.ndarray
    ) -> tuple[np.ndarray, dict[int, np.ndarray | jax.Array]]:
        """Compute the router's features of a batch, and the base network's tokens at each block
        where a task network continues."""
        stops = sorted(set(self.differences))

        def run(source: Tokens | Gather) -> tuple[list[jax.Array], list[jax.Array]]:
            reached = list[jax.Array]()
            features = batch_features(
                self.executor,
                self.base,
                source,
                blocks=self._blocks,
                until=self._until,
                stops=stops,
                keep=lambda tokens: reached.append(tokens.values),
            )
            return features, reached

        parts = np.split(rows, range(self.rows, len(rows), self.rows))
        features, reached = zip(*self.executor.each(run, feed.follow(parts)), strict=True)
        # On a CPU, NumPy gathers rows without a compiled function. On an accelerator, a batch is
        # one part and stays on the device.
        join = np.concatenate if self.executor.device.is_host else jnp.concatenate
        read = [np.concatenate(part) for part in zip(*jax.device_get(features), strict=True)]
        return join_tokens(read), {
            block: values[0] if len(values) == 1 else join([*map(np.asarray, values)])
            for block, values in zip(stops, zip(*reached, strict=True), strict=True)
        }

    def _run_task(
        self, task: int, rows: np.ndarray, reached: dict[int, np.ndarray | jax.Array]
    ) -> Float[np.ndarray, "N D"]:
        """Compute the features of the given rows of a batch with the network of a task."""
        block = self.differences[task]
        network = self.networks.network(task)
        values = reached[block]

        def run(group: tuple[np.ndarray, int]) -> tuple[jax.Array, int]:
            padded, size = group
            if self.executor.device.is_host:
                source = Tokens(block, jnp.asarray(np.asarray(values)[padded]))
            else:
                source = Gather(block, jnp.asarray(values), padded.astype(np.int32))
            last = self.executor.advance(network, source, self.executor.num_blocks)
            return self.executor.features(last.values), size

        groups = self.executor.each(run, pieces(rows, self.sizes))
        return np.concatenate([np.asarray(features)[:size] for features, size in groups])


def bucket_sizes(rows: int) -> tuple[int, ...]:
    """Return the sizes to which groups are padded: `rows`, half of `rows`, and a quarter of
    `rows`."""
    return tuple(sorted({rows, max(rows // 2, 1), max(rows // 4, 1)}, reverse=True))


def pieces(rows: np.ndarray, sizes: Sequence[int]) -> list[tuple[np.ndarray, int]]:
    """Cut `rows` into parts whose lengths are among `sizes`, and pad the last part if necessary.
    Return each part with its number of rows without padding. `sizes` are in descending order.

    The rest of the rows is padded to the smallest size that contains it if it fills at least half
    of that size, or if all sizes are larger. Otherwise, the rest is cut into smaller parts.
    """
    parts = []
    start = 0
    while start < len(rows):
        rest = len(rows) - start
        fits = [size for size in sizes if rest <= size <= 2 * rest][-1:]
        fits += [size for size in sizes if size <= rest]
        size = fits[0] if fits else sizes[-1]
        part = rows[start : start + size]
        parts.append((np.concatenate([part, np.full(size - len(part), part[0])]), len(part)))
        start += size
    return parts
