"""Forward-only passes over whole data sets: mean class tokens, features, answers, counts of right answers."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import jax
import numpy as np
from jaxtyping import Float, Int

from cheem_jax.execution.batches import batches
from cheem_jax.execution.stages import Dense, Stages
from cheem_jax.pool import Head

Network = Sequence[Dense]


@runtime_checkable
class Advance(Protocol):
    """Called after work on so many images, with a note for people."""

    def __call__(self, num_images: int, note: str = "", /) -> object: ...


class TokenMeans(NamedTuple):
    """Mean class tokens `[networks, L, D]` (zero where skipped) and the first network's features `[N, D]`."""

    means: Float[np.ndarray, "E L D"]
    features: Float[np.ndarray, "N D"]


def token_means(
    stages: Stages, networks: Sequence[Network], images: np.ndarray, *, batch_size: int, advance: Advance
) -> TokenMeans:
    """Average class tokens of several networks over the same images (paper's mu), sums kept in float64."""
    width = stages.config.width
    sums = np.zeros((len(networks), stages.num_blocks, width))
    features = []
    for batch in batches(np.arange(len(images)), batch_size):
        pending = []
        for walked in stages.run_networks(networks, images[batch.rows], batch.mask):
            pending += [(walked.index, block, s) for block, s in enumerate(walked.sums) if s is not None]
            if walked.index == 0:
                features.append((stages.features(walked.tokens), batch.size))
        for (index, block, _), total in zip(pending, jax.device_get([s for *_, s in pending]), strict=True):
            sums[index, block] += total
        advance(batch.size * len(networks))
    means = (sums / len(images)).astype(np.float32)
    return TokenMeans(means, np.concatenate([np.asarray(f)[:size] for f, size in features]))


def network_features(
    stages: Stages, network: Network, images: np.ndarray, *, batch_size: int
) -> Float[np.ndarray, "N D"]:
    """Features of one network for every image."""
    found = []
    for batch in batches(np.arange(len(images)), batch_size):
        (walked,) = stages.run_networks([network], images[batch.rows], batch.mask)
        found.append(np.asarray(stages.features(walked.tokens))[: batch.size])
    return np.concatenate(found)


def answers(
    stages: Stages, network: Network, head: Head, num_classes: int, images: np.ndarray, *, batch_size: int
) -> Int[np.ndarray, "N"]:
    """The class that one network and its (padded) head give each image."""
    found = []
    for batch in batches(np.arange(len(images)), batch_size):
        (walked,) = stages.run_networks([network], images[batch.rows], batch.mask)
        labels = np.zeros(batch_size, np.int32)
        answer, _ = stages.classify(head, walked.tokens, labels, batch.mask, num_classes)
        found.append(np.asarray(answer)[: batch.size])
    return np.concatenate(found).astype(np.int32)


def count_right(
    stages: Stages,
    networks: Sequence[Network],
    head: Head,
    num_classes: int,
    images: np.ndarray,
    labels: np.ndarray,
    *,
    batch_size: int,
    advance: Advance,
) -> Int[np.ndarray, "P"]:
    """Right answers of several networks with one shared head, shared prefixes run once per batch."""
    counts = np.zeros(len(networks), np.int64)
    for batch in batches(np.arange(len(images)), batch_size):
        pending = []
        for walked in stages.run_networks(networks, images[batch.rows], batch.mask):
            _, right = stages.classify(head, walked.tokens, labels[batch.rows], batch.mask, num_classes)
            pending.append((walked.index, right))
        for (index, _), right in zip(pending, jax.device_get([r for _, r in pending]), strict=True):
            counts[index] += int(right)
        advance(batch.size * len(networks))
    return counts
