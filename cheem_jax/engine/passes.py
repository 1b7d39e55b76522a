"""Forward-only passes over whole data sets: mean class tokens, features, answers, counts of right
answers."""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeVar

import jax
import numpy as np
from jaxtyping import Float, Int

from cheem_jax.core.pool import Head
from cheem_jax.core.settings import Advance
from cheem_jax.engine import hosts
from cheem_jax.engine.batches import Rows, batches
from cheem_jax.engine.executor import Executor, Gather, Network, Tokens
from cheem_jax.engine.feed import Feed

T = TypeVar("T")


def unwatched(num_images: int, note: str = "", /) -> None:
    """An `Advance` for work that nobody watches."""


class TokenMeans(NamedTuple):
    """Mean class tokens `[networks, L, D]` (zero where skipped) and the first network's features
    `[N, D]`."""

    means: Float[np.ndarray, "E L D"]
    features: Float[np.ndarray, "N D"]


def token_means(
    executor: Executor,
    networks: Sequence[Network],
    images: Feed,
    num: int,
    *,
    batch_size: int,
    advance: Advance,
) -> TokenMeans:
    """Average class tokens of several networks over the same `num` images (paper's mu), sums kept
    in float64."""
    sums = np.zeros((len(networks), executor.num_blocks, executor.config.width))
    features = []

    def summed(
        batch: Rows, tokens: Tokens | Gather
    ) -> tuple[list[tuple[int, int, np.ndarray]], jax.Array | None]:
        places = []
        pending = []
        own = None
        for walked in executor.walk(networks, tokens, batch.mask):
            places += [
                (walked.index, block)
                for block, total in enumerate(walked.sums)
                if total is not None
            ]
            pending += [total for total in walked.sums if total is not None]
            own = executor.features(walked.tokens) if walked.index == 0 else own
        # read when the whole batch is under way: a look at a result waits for the device
        return [
            (*place, total) for place, total in zip(places, jax.device_get(pending), strict=True)
        ], own

    for size, (totals, own) in _in_order(executor, images, num, batch_size, summed):
        for index, block, total in totals:
            sums[index, block] += total
        features += [] if own is None else [(own, size)]
        advance(size * len(networks))
    means = (sums / num).astype(np.float32)
    return TokenMeans(means, np.concatenate([hosts.fetch(f)[:size] for f, size in features]))


def network_features(
    executor: Executor,
    networks: Sequence[Network],
    images: Feed,
    num: int,
    *,
    batch_size: int,
    advance: Advance = unwatched,
) -> Float[np.ndarray, "P N D"]:
    """Features of several networks for the same `num` images, shared prefixes run once per
    batch."""
    found = np.empty((len(networks), num, executor.config.width), np.float32)

    def read(batch: Rows, tokens: Tokens | Gather) -> None:
        # read when the whole batch is under way: a look at a result waits for the device
        pending = [
            (walked.index, executor.features(walked.tokens))
            for walked in executor.walk(networks, tokens, batch.mask)
        ]
        for index, features in pending:
            found[index, batch.rows[: batch.size]] = hosts.fetch(features)[: batch.size]

    for size, _ in _in_order(executor, images, num, batch_size, read):
        advance(size * len(networks))
    return found


def features_on_the_way(
    executor: Executor,
    network: Network,
    images: Feed,
    *,
    num: int,
    blocks: Sequence[int],
    until: int,
    batch_size: int,
) -> list[Float[np.ndarray, "N D"]]:
    """What one network computes before its end: the mean patch token of the tokens at each of some
    blocks.

    Where the pass goes `until` the end, the features as well.
    """

    def read(batch: Rows, tokens: Tokens | Gather) -> list[np.ndarray]:
        walked = read_on_the_way(
            executor, network, executor.resolve(tokens), blocks=blocks, until=until
        )
        return [hosts.fetch(part)[: batch.size] for part in walked]

    found = [parts for _, parts in _in_order(executor, images, num, batch_size, read)]
    return [np.concatenate(parts) for parts in zip(*found, strict=True)]


def read_on_the_way(
    executor: Executor,
    network: Network,
    tokens: Tokens,
    *,
    blocks: Sequence[int],
    until: int,
    keep: Callable[[Tokens], object] = lambda tokens: None,
    stops: Sequence[int] = (),
) -> list[jax.Array]:
    """The same for one batch; `keep` is given the tokens at each of the `stops`."""
    found = []
    for block in sorted({*blocks, *stops, until}):
        tokens = executor.advance(network, tokens, block)
        if block in stops:
            keep(tokens)
        if block in blocks:
            found.append(executor.mean_patch(tokens.values))
    return [*found, executor.features(tokens.values)] if until == executor.num_blocks else found


def answers(
    executor: Executor,
    network: Network,
    head: Head,
    images: Feed,
    *,
    num: int,
    num_classes: int,
    batch_size: int,
) -> Int[np.ndarray, "N"]:
    """The class that one network and its (padded) head give each image."""

    def answered(batch: Rows, tokens: Tokens | Gather) -> np.ndarray:
        (walked,) = executor.walk([network], tokens, batch.mask)
        labels = executor.layout.rows(np.zeros(len(batch.rows), np.int32))
        answer, _ = executor.classify(head, walked.tokens, labels, batch.mask, num_classes)
        return hosts.fetch(answer)[: batch.size]

    found = [answer for _, answer in _in_order(executor, images, num, batch_size, answered)]
    return np.concatenate(found).astype(np.int32)


def answers_and_features(
    executor: Executor,
    base: Network,
    network: Network,
    head: Head,
    images: Feed,
    *,
    num: int,
    num_classes: int,
    batch_size: int,
) -> tuple[Int[np.ndarray, "N"], Float[np.ndarray, "N D"]]:
    """`answers` of one network and `network_features` of another, what both share run once."""

    def read(batch: Rows, tokens: Tokens | Gather) -> tuple[np.ndarray, np.ndarray]:
        labels = executor.layout.rows(np.zeros(len(batch.rows), np.int32))
        last = {
            walked.index: walked.tokens
            for walked in executor.walk([base, network], tokens, batch.mask)
        }
        features = executor.features(last[0])
        answer, _ = executor.classify(head, last[1], labels, batch.mask, num_classes)
        return hosts.fetch(answer)[: batch.size], hosts.fetch(features)[: batch.size]

    found = [parts for _, parts in _in_order(executor, images, num, batch_size, read)]
    answers, features = (np.concatenate(parts) for parts in zip(*found, strict=True))
    return answers.astype(np.int32), features


def count_right(
    executor: Executor,
    networks: Sequence[Network],
    head: Head,
    images: Feed,
    labels: np.ndarray,
    *,
    num_classes: int,
    batch_size: int,
    advance: Advance,
) -> Int[np.ndarray, "P"]:
    """Right answers of several networks with one shared head, shared prefixes run once per
    batch."""
    counts = np.zeros(len(networks), np.int64)

    def counted(batch: Rows, tokens: Tokens | Gather) -> tuple[list[int], list[np.ndarray]]:
        order = []
        pending = []
        own = executor.put(executor.layout.rows(labels[batch.rows]))
        for walked in executor.walk(networks, tokens, batch.mask):
            _, right = executor.classify(head, walked.tokens, own, batch.mask, num_classes)
            order.append(walked.index)
            pending.append(right)
        return order, jax.device_get(pending)

    for size, (order, right) in _in_order(executor, images, len(labels), batch_size, counted):
        counts[order] += np.asarray(right, np.int64)
        advance(size * len(networks))
    return counts


def _in_order(
    executor: Executor,
    images: Feed,
    num: int,
    batch_size: int,
    work: Callable[[Rows, Tokens | Gather], T],
) -> Iterator[tuple[int, T]]:
    """The images of each batch in order and what `work` makes of it."""
    pieces = list(batches(np.arange(num), executor.forward_rows(batch_size, num)))
    masked = (
        batch._replace(mask=executor.put(executor.layout.weights(batch.mask))) for batch in pieces
    )
    coming = zip(masked, images.follow([batch.rows for batch in pieces]), strict=True)
    found = executor.each(lambda given: work(*given), coming)
    return zip((batch.size for batch in pieces), found, strict=True)
