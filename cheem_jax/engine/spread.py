"""Run the search on more than one device: each device evaluates some of the candidates on all
validation images.

If each batch were split over the devices instead, every block would need a sum over devices,
because a forward pass sums the CLS tokens of a batch at every block. Candidates that share a prefix
tend to be evaluated on the same device, which runs the prefix once (`Stages.walk`).
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from jaxtyping import Float, Int

from cheem_jax.backbone.flops import executed_halves
from cheem_jax.core.pool import Head
from cheem_jax.core.settings import Advance, no_progress
from cheem_jax.engine import hosts
from cheem_jax.engine.batches import batches
from cheem_jax.engine.executor import Executor, Network, shared_prefix
from cheem_jax.engine.feed import Feed
from cheem_jax.engine.passes import count_correct, network_features


def count_correct_spread(
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
    """Count the correct predictions of each network as `passes.count_correct` does, with the
    networks divided among the devices."""
    sizes = {"num_classes": num_classes, "batch_size": batch_size}
    if not executor.layout.is_many:
        return count_correct(executor, networks, head, images, labels, advance=advance, **sizes)
    counts = np.zeros(len(networks), np.int32)

    def evaluate(place: int, group: Sequence[Network], feed: Feed, rows: np.ndarray) -> np.ndarray:
        one = executor.on(place)
        copied = executor.layout.copy(head, place)
        return count_correct(one, group, copied, feed, labels[rows], advance=no_progress, **sizes)

    for group, _, right in _on_devices(
        executor, networks, images, len(labels), batch_size, evaluate, advance
    ):
        counts[group] += right
    return hosts.total(counts).astype(np.int64)


def features_spread(
    executor: Executor,
    networks: Sequence[Network],
    images: Feed,
    num: int,
    *,
    batch_size: int,
    advance: Advance,
) -> Float[np.ndarray, "P N D"]:
    """Compute the features of each network as `passes.network_features` does, with the networks
    divided among the devices. Every process gets all features."""
    if not executor.layout.is_many:
        return network_features(
            executor, networks, images, num, batch_size=batch_size, advance=advance
        )
    features = np.zeros((len(networks), num, executor.config.width), np.float32)

    def evaluate(place: int, group: Sequence[Network], feed: Feed, rows: np.ndarray) -> np.ndarray:
        return network_features(executor.on(place), group, feed, len(rows), batch_size=batch_size)

    for group, rows, values in _on_devices(
        executor, networks, images, num, batch_size, evaluate, advance
    ):
        features[np.asarray(group)[:, None], rows] = values
    return hosts.total(features)


def _on_devices(
    executor: Executor,
    networks: Sequence[Network],
    images: Feed,
    num: int,
    batch_size: int,
    evaluate: Callable[[int, Sequence[Network], Feed, np.ndarray], np.ndarray],
    advance: Advance,
) -> Iterator[tuple[list[int], np.ndarray, np.ndarray]]:
    """For each batch and each device of this process, yield the indices of the device's networks,
    the rows of the batch, and the result of `evaluate`.

    All devices finish a batch before the next batch starts, so all processes report progress
    equally often.
    """
    layout = executor.layout
    groups = divided(executor, networks, layout.num)
    local = {
        place: [layout.copy(networks[index], place) for index in groups[place]]
        for place in layout.local
        if groups[place]
    }
    # `evaluate` runs up to `executor.forward_rows` images per call, so smaller batches would mean
    # smaller calls
    size = max(batch_size, executor.forward_rows(batch_size, num))
    order = [batch.rows[: batch.size] for batch in batches(np.arange(num), size)]
    with ThreadPoolExecutor(len(layout.local), "search") as threads:
        for rows, feed in zip(order, images.parts(order), strict=True):
            feeds = [feed.on(executor.on(place)) for place in local]
            results = threads.map(evaluate, local, local.values(), feeds, [rows] * len(local))
            for place, result in zip(local, results, strict=True):
                yield groups[place], rows, result
            advance(len(rows) * len(networks))


def divided(executor: Executor, networks: Sequence[Network], num: int) -> list[list[int]]:
    """Sort the networks as `Stages.walk` does, and divide them into `num` groups with nearly equal
    FLOPs. Return the indices of the networks in each group.

    A group is a range of the sorted networks, so networks that share a prefix tend to be in the
    same group. The FLOPs of the largest group are as low as possible for such ranges.
    """
    order = sorted(range(len(networks)), key=lambda i: _codes(networks[i]))
    alone = [added_flops(executor, (), networks[index]) for index in order]
    added = [math.inf]
    added += [added_flops(executor, networks[a], networks[b]) for a, b in itertools.pairwise(order)]

    def cut(bound: float) -> list[list[int]]:
        """Form groups of at most `bound` FLOPs per image; only a group of one network can exceed
        the bound."""
        groups: list[list[int]] = []
        filled = 0.0
        for index, first, more in zip(order, alone, added, strict=True):
            if filled + more <= bound:
                groups[-1].append(index)
                filled += more
            else:
                groups.append([index])
                filled = first
        return groups

    low = 0.0
    high = float(sum(alone))
    for _ in range(30):
        bound = (low + high) / 2
        low, high = (low, bound) if len(cut(bound)) <= num else (bound, high)
    groups = cut(high)
    return groups + [[] for _ in range(num - len(groups))]


def added_flops(executor: Executor, previous: Network, network: Network) -> float:
    """Return the FLOPs per image of a network without the prefix that it shares with the previous
    network."""
    last = len(network) - 1
    total = 0
    for block in range(shared_prefix(_codes(previous), _codes(network)), len(network)):
        attention, ffn = executed_halves(executor.config, last=block == last)
        plastic, other = (ffn, attention) if executor.placement == "mlp_down" else (attention, ffn)
        total += other + (0 if network[block].expert is None else plastic)
    return float(total)


def _codes(network: Network) -> list[int]:
    return [step.code for step in network]
