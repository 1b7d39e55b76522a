"""Finals, which go beyond the paper: a few of the search's best networks are fine-tuned in rounds.

After a round the better half on validation images goes on (successive halving). The score that found them only ranks;
here each is judged by what it becomes, at every learning rate that is asked for.
"""

import dataclasses
import itertools
import math
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from cheem_jax.cheem.evolution import Scored, rank


@dataclasses.dataclass(frozen=True)
class FinalsConfig:
    """Who is fine-tuned; the default is the paper's one network at one rate."""

    networks: int = 1
    """Best networks of the search that differ from each other in a quarter of the blocks."""
    rates: tuple[float, ...] = ()
    """Learning rates at which each is fine-tuned; none: that of `finetune`."""

    def __post_init__(self) -> None:
        if self.networks < 1:
            raise ValueError(f"finals networks is {self.networks}; expected at least 1")
        if not all(rate > 0 for rate in self.rates):
            raise ValueError(f"finals rates are {self.rates}; expected positive numbers")


class Finalist(NamedTuple):
    """A network that is fine-tuned, and Adam's rate."""

    codes: Int[np.ndarray, "L"]
    rate: float


def finalists(
    scored: Scored, num_images: int, tolerance: float, *, config: FinalsConfig, rate: float
) -> list[Finalist]:
    """The first in rank at every rate, best first; fewer networks where not enough differ. `rate` is the usual one."""
    chosen: list[np.ndarray] = []
    for index in rank(scored, num_images, tolerance):
        genome = scored.genomes[index]
        # neighbours of the best reach what it reaches: a final among them would decide little
        is_new = all(4 * np.sum(genome != other) >= len(genome) for other in chosen)
        if not chosen or (np.isfinite(scored.correct[index]) and is_new):
            chosen.append(genome)
        if len(chosen) == config.networks:
            break
    return [Finalist(*pair) for pair in itertools.product(chosen, config.rates or (rate,))]


def rounds(num: int, epochs: int) -> list[tuple[int, int]]:
    """Of each round its last epoch, and how many of `num` finalists go on; all are over by half of the epochs."""
    halvings = math.ceil(math.log2(num)) if num > 1 else 0
    ends = [min(max(1, i * epochs // (2 * halvings)), epochs) for i in range(1, halvings + 1)]
    kept = list(itertools.accumulate(ends, lambda left, _: (left + 1) // 2, initial=num))[1:]
    return list(zip(ends, kept, strict=True))


def epochs_of(plan: list[tuple[int, int]], num: int, epochs: int) -> int:
    """Epochs of all finalists together, where `plan` are the rounds of `num` and the winner trains for `epochs`."""
    total, begin = 0, 0
    for end, kept in [*plan, (epochs, 1)]:
        total, begin, num = total + num * (end - begin), end, kept
    return total
