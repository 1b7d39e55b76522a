"""Forward-only passes over whole data sets: mean class tokens, features, answers, counts of right answers."""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import jax
import numpy as np
from jaxtyping import Float, Int

from cheem_jax.core.pool import Head
from cheem_jax.engine import hosts
from cheem_jax.engine.batches import Rows, batches
from cheem_jax.engine.executor import Executor, Gather, Network, Tokens
from cheem_jax.engine.feed import Feed, fed


@runtime_checkable
class Advance(Protocol):
    """Called after work on so many images, with a note for people."""

    def __call__(self, num_images: int, note: str = "", /) -> object: ...


def unwatched(num_images: int, note: str = "", /) -> None:
    """An `Advance` for work that nobody watches."""


class TokenMeans(NamedTuple):
    """Mean class tokens `[networks, L, D]` (zero where skipped) and the first network's features `[N, D]`."""

    means: Float[np.ndarray, "E L D"]
    features: Float[np.ndarray, "N D"]


def token_means(
    executor: Executor, networks: Sequence[Network], images: Feed, num: int, *, batch_size: int, advance: Advance
) -> TokenMeans:
    """Average class tokens of several networks over the same `num` images (paper's mu), sums kept in float64."""
    sums = np.zeros((len(networks), executor.num_blocks, executor.config.width))
    features = []
    for batch, tokens in _in_order(executor, images, num, batch_size):
        pending = []
        for walked in executor.walk(networks, tokens, batch.mask):
            pending += [(walked.index, block, s) for block, s in enumerate(walked.sums) if s is not None]
            if walked.index == 0:
                features.append((executor.features(walked.tokens), batch.size))
        for (index, block, _), total in zip(pending, jax.device_get([s for *_, s in pending]), strict=True):
            sums[index, block] += total
        advance(batch.size * len(networks))
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
    """Features of several networks for the same `num` images, shared prefixes run once per batch."""
    found = np.empty((len(networks), num, executor.config.width), np.float32)
    for batch, tokens in _in_order(executor, images, num, batch_size):
        # read when the whole batch is under way: a look at a result waits for the device
        pending = [
            (walked.index, executor.features(walked.tokens)) for walked in executor.walk(networks, tokens, batch.mask)
        ]
        for index, features in pending:
            found[index, batch.rows[: batch.size]] = hosts.fetch(features)[: batch.size]
        advance(batch.size * len(networks))
    return found


def features_on_the_way(
    executor: Executor, network: Network, images: Feed, *, num: int, blocks: Sequence[int], until: int, batch_size: int
) -> list[Float[np.ndarray, "N D"]]:
    """What one network computes before its end: the mean patch token of the tokens at each of some blocks.

    Where the pass goes `until` the end, the features as well.
    """
    found: list[list[np.ndarray]] = []
    for batch, tokens in _in_order(executor, images, num, batch_size):
        walked = read_on_the_way(executor, network, executor.resolve(tokens), blocks=blocks, until=until)
        found.append([hosts.fetch(part)[: batch.size] for part in walked])
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
    executor: Executor, network: Network, head: Head, images: Feed, *, num: int, num_classes: int, batch_size: int
) -> Int[np.ndarray, "N"]:
    """The class that one network and its (padded) head give each image."""
    found = []
    for batch, tokens in _in_order(executor, images, num, batch_size):
        (walked,) = executor.walk([network], tokens, batch.mask)
        labels = executor.layout.rows(np.zeros(len(batch.rows), np.int32))
        answer, _ = executor.classify(head, walked.tokens, labels, batch.mask, num_classes)
        found.append(hosts.fetch(answer)[: batch.size])
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
    found, features = [], []
    for batch, tokens in _in_order(executor, images, num, batch_size):
        labels = executor.layout.rows(np.zeros(len(batch.rows), np.int32))
        for walked in executor.walk([base, network], tokens, batch.mask):
            if walked.index == 0:
                features.append(hosts.fetch(executor.features(walked.tokens))[: batch.size])
            else:
                answer, _ = executor.classify(head, walked.tokens, labels, batch.mask, num_classes)
                found.append(hosts.fetch(answer)[: batch.size])
    return np.concatenate(found).astype(np.int32), np.concatenate(features)


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
    """Right answers of several networks with one shared head, shared prefixes run once per batch."""
    counts = np.zeros(len(networks), np.int64)
    for batch, tokens in _in_order(executor, images, len(labels), batch_size):
        pending, own = [], executor.layout.rows(labels[batch.rows])
        for walked in executor.walk(networks, tokens, batch.mask):
            _, right = executor.classify(head, walked.tokens, own, batch.mask, num_classes)
            pending.append((walked.index, right))
        for (index, _), right in zip(pending, jax.device_get([r for _, r in pending]), strict=True):
            counts[index] += int(right)
        advance(batch.size * len(networks))
    return counts


def _in_order(executor: Executor, images: Feed, num: int, batch_size: int) -> Iterator[tuple[Rows, Tokens | Gather]]:
    pieces = list(batches(np.arange(num), executor.rows(batch_size)))
    coming = fed(images, [batch.rows for batch in pieces])
    for batch, tokens in zip(pieces, coming, strict=True):
        yield batch._replace(mask=executor.layout.weights(batch.mask)), tokens
