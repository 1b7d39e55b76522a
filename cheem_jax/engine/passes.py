"""Functions that run forward passes over whole data sets. They compute mean CLS tokens, features,
classes, or the number of correct predictions."""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeVar

import jax
import numpy as np
from jaxtyping import Float, Int

from cheem_jax.core.pool import Head
from cheem_jax.core.settings import Advance, no_progress
from cheem_jax.engine import hosts
from cheem_jax.engine.batches import Rows, batches
from cheem_jax.engine.executor import Executor, Gather, Network, Tokens
from cheem_jax.engine.feed import Feed

T = TypeVar("T")


class TokenMeans(NamedTuple):
    """Mean CLS tokens `[E, L, D]` of E networks (zeros at skipped blocks), and features `[N, D]` of
    the first network."""

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
    """Average the CLS tokens of each network over the same `num` images (mu in the paper).

    Sums over batches are computed in float64.
    """
    sums = np.zeros((len(networks), executor.num_blocks, executor.config.width))
    features = []

    def run(batch: Rows, tokens: Tokens | Gather) -> tuple[dict, np.ndarray]:
        first = None
        totals = {}
        for walked in executor.walk(networks, tokens, batch.mask):
            for block, total in enumerate(walked.sums):
                if total is not None:
                    totals[walked.index, block] = total
            if walked.index == 0:
                first = executor.features(walked.tokens)
        # fetch after the whole batch is dispatched, because fetching waits for the device
        return jax.device_get(totals), hosts.fetch(first)[: batch.size]

    for size, (totals, first) in _in_order(executor, images, num, batch_size, run):
        for place, total in totals.items():
            sums[place] += total
        features.append(first)
        advance(size * len(networks))
    return TokenMeans((sums / num).astype(np.float32), np.concatenate(features))


def network_features(
    executor: Executor,
    networks: Sequence[Network],
    images: Feed,
    num: int,
    *,
    batch_size: int,
    advance: Advance = no_progress,
) -> Float[np.ndarray, "P N D"]:
    """Compute the features of each network for the same `num` images. Shared prefixes run once per
    batch."""
    features = np.empty((len(networks), num, executor.config.width), np.float32)

    def run(batch: Rows, tokens: Tokens | Gather) -> None:
        # fetch after the whole batch is dispatched, because fetching waits for the device
        pending = [
            (walked.index, executor.features(walked.tokens))
            for walked in executor.walk(networks, tokens, batch.mask)
        ]
        for index, values in pending:
            features[index, batch.rows[: batch.size]] = hosts.fetch(values)[: batch.size]

    for size, _ in _in_order(executor, images, num, batch_size, run):
        advance(size * len(networks))
    return features


def intermediate_features(
    executor: Executor,
    network: Network,
    images: Feed,
    *,
    num: int,
    blocks: Sequence[int],
    until: int,
    batch_size: int,
    advance: Advance = no_progress,
) -> list[Float[np.ndarray, "N D"]]:
    """Compute the mean of all tokens except the CLS token at each of `blocks`. If `until` is the
    number of blocks, also compute the features of the images."""

    def run(batch: Rows, tokens: Tokens | Gather) -> list[jax.Array]:
        return batch_features(executor, network, tokens, blocks=blocks, until=until)

    return _collect(executor, images, num, batch_size, run, advance)


def batch_features(
    executor: Executor,
    network: Network,
    tokens: Tokens | Gather,
    *,
    blocks: Sequence[int],
    until: int,
    stops: Sequence[int] = (),
    keep: Callable[[Tokens], object] = lambda tokens: None,
) -> list[jax.Array]:
    """Compute the results of `intermediate_features` for one batch; `keep` is called with the
    tokens at each of `stops`."""
    features = []
    for block in sorted({*blocks, *stops, until}):
        tokens = executor.advance(network, tokens, block)
        if block in stops:
            keep(tokens)
        if block in blocks:
            features.append(executor.mean_patch(tokens.values))
    if until == executor.num_blocks:
        features.append(executor.features(tokens.values))
    return features


def classes_and_features(
    executor: Executor,
    networks: Sequence[Network],
    head: Head,
    images: Feed,
    *,
    num: int,
    num_classes: int,
    batch_size: int,
) -> list[np.ndarray]:
    """Predict classes `[N]` with the first network and its padded head, and compute features
    `[N, D]` with each of the other networks. Shared prefixes run once per batch."""

    def run(batch: Rows, tokens: Tokens | Gather) -> list[jax.Array]:
        labels = executor.layout.rows(np.zeros(len(batch.rows), np.int32))
        last = {
            walked.index: walked.tokens for walked in executor.walk(networks, tokens, batch.mask)
        }
        classes, _ = executor.classify(head, last.pop(0), labels, batch.mask, num_classes)
        return [classes, *map(executor.features, last.values())]

    return _collect(executor, images, num, batch_size, run)


def count_correct(
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
    """Count the correct predictions of each network with the same head. Shared prefixes run once
    per batch."""
    counts = np.zeros(len(networks), np.int64)

    def run(batch: Rows, tokens: Tokens | Gather) -> dict[int, np.ndarray]:
        targets = executor.put(executor.layout.rows(labels[batch.rows]))
        pending = {}
        for walked in executor.walk(networks, tokens, batch.mask):
            _, right = executor.classify(head, walked.tokens, targets, batch.mask, num_classes)
            pending[walked.index] = right
        # fetch after the whole batch is dispatched, because fetching waits for the device
        return jax.device_get(pending)

    for size, right in _in_order(executor, images, len(labels), batch_size, run):
        counts[list(right)] += np.array(list(right.values()))
        advance(size * len(networks))
    return counts


def _collect(
    executor: Executor,
    images: Feed,
    num: int,
    batch_size: int,
    run: Callable[[Rows, Tokens | Gather], list[jax.Array]],
    advance: Advance = no_progress,
) -> list[np.ndarray]:
    """Call `run` for each batch, and return its arrays, concatenated over all batches without
    padding."""

    def fetch(batch: Rows, tokens: Tokens | Gather) -> list[np.ndarray]:
        return [hosts.fetch(values)[: batch.size] for values in run(batch, tokens)]

    parts = []
    for size, arrays in _in_order(executor, images, num, batch_size, fetch):
        parts.append(arrays)
        advance(size)
    return [np.concatenate(arrays) for arrays in zip(*parts, strict=True)]


def _in_order(
    executor: Executor,
    images: Feed,
    num: int,
    batch_size: int,
    run: Callable[[Rows, Tokens | Gather], T],
) -> Iterator[tuple[int, T]]:
    """Yield the number of images of each batch and the result of `run`, in order."""
    pieces = list(batches(np.arange(num), executor.forward_rows(batch_size, num)))
    masked = (
        batch._replace(mask=executor.put(executor.layout.weights(batch.mask))) for batch in pieces
    )
    sources = zip(masked, images.follow([batch.rows for batch in pieces]), strict=True)
    results = executor.each(lambda source: run(*source), sources)
    return zip((batch.size for batch in pieces), results, strict=True)
