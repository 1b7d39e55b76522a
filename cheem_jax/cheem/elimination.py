"""Backward elimination: a search that starts from a network that adapts every block, and replaces
Adapt by Reuse or Skip as long as the validation loss allows it. The paper does not contain this
search.

The search is a pure function of arrays. The loss function is an argument, so tests can search a toy
landscape.
"""

from collections.abc import Callable, Iterable, Sequence
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
    changes: Sequence[Sequence[int]],
    *,
    standard_errors: float,
    on_scored: Callable[[Eliminated], object] = lambda eliminated: None,
    earlier: Eliminated | None = None,
) -> tuple[Int[np.ndarray, "L"], Eliminated]:
    """Replace genes of the anchor as long as the validation loss does not increase significantly.

    First, each change of one gene is scored alone. Then the changes are tried one after another,
    each together with the changes accepted before it. They are tried in increasing order of the
    mean loss that each change has alone. A network is accepted if its loss minus the anchor's loss
    on the same image, averaged over images, is at most `standard_errors` times the standard error
    of this average. Most of the noise of a small validation set cancels in these differences. A
    block can change more than once, but only to a candidate that is later in the block's list in
    `changes`.

    Returns the genome of the last accepted network, and all scored networks. Raises ValueError if
    the anchor's loss is non-finite. A network with a non-finite loss is not accepted.

    Args:
        score: maps genomes `[P, L]` to losses on N images; all calls use the same images.
        anchor: genome to start from.
        changes: for each block, the candidate indices that can replace the anchor's index, from the
            most to the least expensive.
        standard_errors: tolerance, in standard errors; 0 accepts no increase of the mean loss.
        on_scored: is called with the progress after each call of `score`.
        earlier: progress of an interrupted elimination to resume; the result is the same as without
            the interruption.
    """
    memo: dict[Code, int] = {}
    networks = Eliminated(
        np.zeros((0, len(anchor)), np.int32), np.zeros((0, 0)), np.zeros((0, 0), bool)
    )
    if earlier is not None:
        networks = earlier
        memo = {tuple(genome.tolist()): index for index, genome in enumerate(earlier.genomes)}

    def losses(genomes: Iterable[Code]) -> Float[np.ndarray, "P N"]:
        nonlocal networks
        wanted = list(genomes)
        fresh = [genome for genome in dict.fromkeys(wanted) if genome not in memo]
        if fresh:
            rows = np.array(fresh, np.int32)
            scored = score(rows)
            memo.update({genome: len(memo) + i for i, genome in enumerate(fresh)})
            networks = (
                Eliminated(rows, *scored)
                if not len(networks.genomes)
                else Eliminated(*map(np.concatenate, zip(networks, (rows, *scored), strict=True)))
            )
            on_scored(networks)
        return networks.losses[[memo[genome] for genome in wanted]]

    start = tuple(anchor.tolist())
    singles = [(block, code) for block, codes in enumerate(changes) for code in codes]
    base, *alone = losses([start, *(changed(start, *single) for single in singles)])
    if not np.isfinite(base).all():
        raise ValueError(
            "the search found no architecture with a score: the loss of the network that adapts"
            " every block is non-finite; try lower learning rates"
        )
    # NaN is last in this order
    order = np.argsort([np.mean(values - base) for values in alone], kind="stable")
    current = start
    for index in order:
        block, code = singles[index]
        ranks = (start[block], *changes[block])
        if ranks.index(code) < ranks.index(current[block]):
            continue
        candidate = changed(current, block, code)
        (values,) = losses([candidate])
        if is_accepted(values - base, standard_errors):
            current = candidate
    return np.array(current, np.int32), networks


def is_accepted(differences: Float[np.ndarray, "N"], standard_errors: float) -> bool:
    """Return whether the mean of paired differences is at most `standard_errors` times its standard
    error. Return False if a difference is non-finite."""
    error = np.std(differences, ddof=1) / np.sqrt(len(differences)) if len(differences) > 1 else 0.0
    return bool(np.mean(differences) <= standard_errors * error)


def changed(genome: Code, block: int, code: int) -> Code:
    """Return a copy of `genome` with the candidate `code` in block number `block`."""
    return (*genome[:block], code, *genome[block + 1 :])
