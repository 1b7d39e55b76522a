"""Backward elimination: a search that starts from a network that adapts every block, and replaces
Adapt by Reuse or Skip until the network is cheap enough. The paper does not contain this search.

The search is a pure function of arrays. The loss function is an argument, so tests can search a toy
landscape.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

Code = tuple[int, ...]


class Losses(NamedTuple):
    """Loss of each network on each validation image, `[P, N]`, and whether the network predicts the
    class of the image correctly, `[P, N]`."""

    values: Float[np.ndarray, "P N"]
    correct: Bool[np.ndarray, "P N"]


class Eliminated(NamedTuple):
    """All networks that an elimination has scored, in order: genomes `[P, L]`, and their losses and
    correct predictions `[P, N]`. The first network is the anchor, with which the elimination
    starts."""

    genomes: Int[np.ndarray, "P L"]
    losses: Float[np.ndarray, "P N"]
    correct: Bool[np.ndarray, "P N"]


LossFunction = Callable[[Int[np.ndarray, "P L"]], Losses]
CostFunction = Callable[[Int[np.ndarray, "P L"]], Float[np.ndarray, "P K"]]


def eliminate(
    score: LossFunction,
    anchor: Int[np.ndarray, "L"],
    changes: Sequence[Sequence[int]],
    costs: CostFunction,
    limits: Float[np.ndarray, "K"],
    *,
    on_scored: Callable[[Eliminated], object] = lambda eliminated: None,
    earlier: Eliminated | None = None,
) -> tuple[Int[np.ndarray, "L"], Eliminated]:
    """Replace genes of the anchor until no cost exceeds its limit.

    Each round scores networks that differ from the current network in one gene, and keeps the best
    of them. While a cost exceeds its limit, only networks that lower such a cost are scored. Then a
    network that adds no loss is better than all others, and the one with the lowest loss is best.
    If all networks add loss, the best one adds the least loss per cost saved. Afterwards, rounds
    continue as long as the best network does not have a higher loss than the current one. A block
    can change more than once, but only to a candidate that is later in the block's list in
    `changes`.

    Returns the genome of the last network, and all scored networks. A cost remains above its limit
    only if no further change lowers it, or if all such changes have non-finite losses. Raises
    ValueError if the anchor's loss is non-finite. A network with a non-finite loss is never kept.

    Args:
        score: maps genomes `[P, L]` to losses on N images; all calls use the same images.
        anchor: genome to start from.
        changes: for each block, the candidate indices that can replace the anchor's index, from the
            most to the least expensive.
        costs: maps genomes `[P, L]` to K costs of each network. A change to a later candidate must
            not raise a cost.
        limits: the largest value of each cost.
        on_scored: is called with the progress after each call of `score`.
        earlier: progress of an interrupted elimination to resume; the result is the same as without
            the interruption.
    """
    networks = earlier
    scored_before = [] if earlier is None else earlier.genomes.tolist()
    memo: dict[Code, int] = {tuple(genome): index for index, genome in enumerate(scored_before)}

    def losses(genomes: Sequence[Code]) -> Float[np.ndarray, "P"]:
        nonlocal networks
        if fresh := [genome for genome in genomes if genome not in memo]:
            rows = np.array(fresh, np.int32)
            scored = score(rows)
            memo.update({genome: len(memo) + i for i, genome in enumerate(fresh)})
            networks = (
                Eliminated(rows, *scored)
                if networks is None
                else Eliminated(*map(np.concatenate, zip(networks, (rows, *scored), strict=True)))
            )
            on_scored(networks)
        assert networks is not None, "the anchor, at least, is scored"
        return networks.losses[[memo[genome] for genome in genomes]].mean(axis=1)

    start = current = tuple(anchor.tolist())
    if not np.isfinite(losses([start])).all():
        raise ValueError(
            "the search found no architecture with a score: the loss of the network that adapts"
            " every block is non-finite; try lower learning rates"
        )
    over = costs(anchor[None])[0] - limits
    while options := cheaper(current, start, changes):
        cost = costs(np.array([current], np.int32))[0]
        excess = np.maximum(cost - limits, 0)
        is_over = bool(excess.any())
        saved = np.minimum(cost - costs(np.array(options, np.int32)), excess)
        # costs have different units, so each saving is a share of the anchor's excess
        shares = (saved / np.where(excess > 0, over, 1)).sum(axis=1)
        if is_over:
            options = [option for option, share in zip(options, shares, strict=True) if share > 0]
            shares = shares[shares > 0]
        if not options:
            break
        added = losses(options) - losses([current])
        # dividing a gain by its share would prefer the change that saves least
        prices = np.where(added > 0, added / shares, added) if is_over else added
        if not np.isfinite(prices).any() or (not is_over and np.nanmin(prices) > 0):
            break
        current = options[int(np.nanargmin(prices))]
    assert networks is not None, "the anchor, at least, is scored"
    return np.array(current, np.int32), networks


def cheaper(current: Code, start: Code, changes: Sequence[Sequence[int]]) -> list[Code]:
    """Return the genomes that differ from `current` in one block, where they have a candidate that
    is later in the block's list. `start` is the anchor."""
    genomes = []
    for block, (first, codes) in enumerate(zip(start, changes, strict=True)):
        ranks = (first, *codes)
        later = ranks[ranks.index(current[block]) + 1 :]
        genomes += [(*current[:block], code, *current[block + 1 :]) for code in later]
    return genomes
