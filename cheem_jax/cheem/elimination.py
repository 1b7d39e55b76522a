"""Backward elimination: a search that starts from a network that adapts every block, and skips the
least useful blocks. The paper does not contain this search.

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


def eliminate(
    score: LossFunction,
    anchor: Int[np.ndarray, "L"],
    skips: Int[np.ndarray, "L"],
    num_skipped: int,
    *,
    first: int = 0,
    on_scored: Callable[[Eliminated], object] = lambda eliminated: None,
    earlier: Eliminated | None = None,
) -> tuple[Int[np.ndarray, "L"], Eliminated]:
    """Skip blocks of the anchor, one per round.

    Each round scores the networks that skip one more block, and keeps the network with the lowest
    mean loss.

    Returns the genome of the last network, and all scored networks. Fewer blocks are skipped only
    if all further networks have non-finite losses. Raises ValueError if the anchor's loss is
    non-finite.

    Args:
        score: maps genomes `[P, L]` to losses on N images; all calls use the same images.
        anchor: genome to start from.
        skips: candidate index of Skip in each block.
        num_skipped: number of blocks to skip, at most L - `first`.
        first: index of the first block that can be skipped.
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

    current = tuple(anchor.tolist())
    if not np.isfinite(losses([current])).all():
        raise ValueError(
            "the network that adapts every block has a non-finite loss on validation images before"
            " training; check the weights of the backbone and of earlier tasks"
        )
    for _ in range(num_skipped):
        options = [
            (*current[:block], int(skip), *current[block + 1 :])
            for block, skip in enumerate(skips)
            if block >= first and current[block] != skip
        ]
        means = losses(options)
        if not np.isfinite(means).any():
            break
        current = options[int(np.nanargmin(means))]
    assert networks is not None, "the anchor, at least, is scored"
    return np.array(current, np.int32), networks


def count_scored(num_blocks: int, num_skipped: int) -> int:
    """Count the networks that `eliminate` scores: the anchor, and in each round one per block that
    is not yet skipped. `num_blocks` is the number of blocks that can be skipped."""
    return 1 + sum(num_blocks - rounds for rounds in range(num_skipped))
