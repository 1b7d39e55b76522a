"""Backward elimination: a search that starts from a network that adapts every block, and skips the
least useful blocks until the network is cheap enough. The paper does not contain this search.

The search is a pure function of arrays. The loss function is an argument, so tests can search a toy
landscape.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from cheem_jax.cheem.evolution import Score

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
    flops_of: Score,
    max_flops: float,
    *,
    on_scored: Callable[[Eliminated], object] = lambda eliminated: None,
    earlier: Eliminated | None = None,
) -> tuple[Int[np.ndarray, "L"], Eliminated]:
    """Skip blocks of the anchor until its FLOPs do not exceed a limit.

    Each round scores the networks that skip one more block, and keeps the network with the lowest
    mean loss. All blocks have the same FLOPs, so the loss alone decides.

    Returns the genome of the last network, and all scored networks. The FLOPs remain above the
    limit only if all blocks are skipped, or if all further networks have non-finite losses. Raises
    ValueError if the anchor's loss is non-finite.

    Args:
        score: maps genomes `[P, L]` to losses on N images; all calls use the same images.
        anchor: genome to start from.
        skips: candidate index of Skip in each block.
        flops_of: maps genomes `[P, L]` to the FLOPs of each network.
        max_flops: limit of the FLOPs.
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
            "the search found no architecture with a score: the loss of the network that adapts"
            " every block is non-finite; try lower learning rates"
        )
    while flops_of(np.array([current], np.int32))[0] > max_flops:
        options = [
            (*current[:block], int(skip), *current[block + 1 :])
            for block, skip in enumerate(skips)
            if current[block] != skip
        ]
        means = losses(options) if options else np.empty(0)
        if not np.isfinite(means).any():
            break
        current = options[int(np.nanargmin(means))]
    assert networks is not None, "the anchor, at least, is scored"
    return np.array(current, np.int32), networks
