"""The search over several devices: each evaluates candidates of its own, on all validation images.

No sums between devices are needed, as a batch divided over them would need at every block.
Candidates that begin alike stay together, so that what they share still runs once (`Stages.walk`).
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from jaxtyping import Float, Int

from cheem_jax.backbone.flops import executed_halves
from cheem_jax.core.pool import Head
from cheem_jax.core.settings import Advance
from cheem_jax.engine import hosts
from cheem_jax.engine.batches import batches
from cheem_jax.engine.executor import Executor, Network
from cheem_jax.engine.feed import Feed
from cheem_jax.engine.passes import count_right, network_features, unwatched


def count_right_spread(
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
    """`passes.count_right`, the networks divided over the devices where one holds a whole
    network."""
    common = {"num_classes": num_classes, "batch_size": batch_size}
    if not executor.layout.is_many:
        return count_right(executor, networks, head, images, labels, advance=advance, **common)
    counts = np.zeros(len(networks), np.int32)

    def evaluate(place: int, mine: Sequence[Network], feed: Feed, rows: np.ndarray) -> np.ndarray:
        own = executor.layout.copy(head, place)
        return count_right(
            executor.on(place), mine, own, feed, labels[rows], advance=unwatched, **common
        )

    for group, _, right in _divided(
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
    """`passes.network_features`, the networks divided in the same way; every process gets all of
    them."""
    if not executor.layout.is_many:
        return network_features(
            executor, networks, images, num, batch_size=batch_size, advance=advance
        )
    found = np.zeros((len(networks), num, executor.config.width), np.float32)

    def evaluate(place: int, mine: Sequence[Network], feed: Feed, rows: np.ndarray) -> np.ndarray:
        return network_features(executor.on(place), mine, feed, len(rows), batch_size=batch_size)

    for group, rows, features in _divided(
        executor, networks, images, num, batch_size, evaluate, advance
    ):
        found[np.asarray(group)[:, None], rows] = features
    return hosts.total(found)


def _divided(
    executor: Executor,
    networks: Sequence[Network],
    images: Feed,
    num: int,
    batch_size: int,
    evaluate: Callable[[int, Sequence[Network], Feed, np.ndarray], np.ndarray],
    advance: Advance,
) -> Iterator[tuple[list[int], np.ndarray, np.ndarray]]:
    """Of each device of this process and each batch: the networks' indices, the images' rows, what
    `evaluate` made.

    All devices work on one batch before the next, so that every process reports its progress as
    often as the others.
    """
    layout = executor.layout
    groups = divided(executor, networks, layout.num)
    mine = {
        place: [layout.copy(networks[index], place) for index in groups[place]]
        for place in layout.local
        if groups[place]
    }
    sizes = max(
        batch_size, executor.forward_rows(batch_size, num)
    )  # `rows` may be a part of a batch
    order = [batch.rows[: batch.size] for batch in batches(np.arange(num), sizes)]
    with ThreadPoolExecutor(len(layout.local), "search") as threads:
        for rows, feed in zip(order, images.parts(order), strict=True):
            feeds = [feed.on(executor.on(place)) for place in mine]
            found = threads.map(evaluate, mine, mine.values(), feeds, [rows] * len(mine))
            for place, result in zip(mine, found, strict=True):
                yield groups[place], rows, result
            advance(len(rows) * len(networks))


def divided(executor: Executor, networks: Sequence[Network], num: int) -> list[list[int]]:
    """Indices of networks in `num` groups of nearly equal work, those with a common beginning side
    by side.

    The largest group has as little to do as groups of neighbours allow; the order is that in which
    `walk` visits.
    """
    order = sorted(range(len(networks)), key=lambda i: [step.code for step in networks[i]])
    low = 0.0
    high = _work(executor, [networks[i] for i in order])
    groups = _cut(executor, networks, order, high)
    for _ in range(30):  # halving: the least bound that `num` groups can keep
        bound = (low + high) / 2
        found = _cut(executor, networks, order, bound)
        if len(found) <= num:
            groups, high = found, bound
        else:
            low = bound
    return groups + [[] for _ in range(num - len(groups))]


def _cut(
    executor: Executor, networks: Sequence[Network], order: Sequence[int], bound: float
) -> list[list[int]]:
    """The order in groups, each filled as long as its work stays within the bound; a single one may
    be beyond it."""
    groups: list[list[int]] = []
    filled = 0.0
    for index in order:
        previous = networks[groups[-1][-1]] if groups else ()
        more = _more(executor, previous, networks[index])
        if groups and filled + more <= bound:
            groups[-1].append(index)
            filled += more
        else:
            groups.append([index])
            filled = _more(executor, (), networks[index])
    return groups


def _work(executor: Executor, networks: Sequence[Network]) -> float:
    return float(
        sum(
            _more(executor, before, own)
            for before, own in zip([(), *networks], networks, strict=False)
        )
    )


def _more(executor: Executor, previous: Network, network: Network) -> float:
    """FLOPs per image of a network whose beginning has been computed as far as it equals the
    previous one's."""
    shared = 0
    while shared < len(previous) and previous[shared].code == network[shared].code:
        shared += 1
    total = 0
    last = len(network) - 1
    for block in range(shared, len(network)):
        attention, ffn = executed_halves(executor.config, last=block == last)
        plastic, other = (ffn, attention) if executor.placement == "mlp_down" else (attention, ffn)
        total += other + (0 if network[block].expert is None else plastic)
    return float(total)
