"""One task while CHEEM learns it: what it may choose and what its phases share."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from cheem_jax.architecture import Architecture, Choice
from cheem_jax.data.task import Task
from cheem_jax.evolution import Scored, Searched
from cheem_jax.execution.feed import Budget, Feed
from cheem_jax.methods.method import Running
from cheem_jax.methods.underway import Underway
from cheem_jax.ops import Expert
from cheem_jax.pool import DenseExperts, Memory, Pool, pool_sizes


class Candidates(NamedTuple):
    """What a new task may choose at each block, numbered anew without the gaps that forgotten tasks leave."""

    kept: tuple[tuple[int, ...], ...]
    """The candidates as experts of the memory's pool; the base's is always the first."""
    pool: Pool
    sizes: tuple[int, ...]
    experts: Sequence[Sequence[Expert]]
    earlier: list[tuple[int | None, ...]]
    """The candidate that each earlier network uses: the base network first, then the tasks'."""


def candidates_of(memory: Memory, dense: DenseExperts) -> Candidates:
    """The candidates of the task that a memory learns next."""
    kept = memory.candidates()
    pool = tuple(tuple(block[i] for i in places) for block, places in zip(memory.pool, kept, strict=True))
    places = [{expert: place for place, expert in enumerate(block)} for block in kept]
    used_by_tasks = [
        tuple(None if expert is None else place[expert] for expert, place in zip(task.experts, places, strict=True))
        for task in memory.tasks
    ]
    return Candidates(kept, pool, pool_sizes(pool), dense.chosen(kept), [tuple(0 for _ in pool), *used_by_tasks])


class Tables(NamedTuple):
    """Probabilities of a task's candidates."""

    exploit: Float[np.ndarray, "L C"]
    uniform: Float[np.ndarray, "L C"]


@dataclasses.dataclass(frozen=True)
class Learning:
    """What the phases of a task share."""

    index: int
    """The task's number among the keys."""
    task: Task
    candidates: Candidates
    train: Feed
    """Training images, from where no choice at block 0 changes anything, if there is room to keep that."""
    val: Feed
    budget: Budget
    underway: Underway
    running: Running


FEW = 4
"""Networks that the similarity pass takes together, however little may be kept."""


def together(
    earlier: Sequence[Sequence[int | None]], experts: Sequence[Sequence[Expert]], limit: int
) -> Iterator[list[int]]:
    """The base network (first) and those of tasks in parts, each of experts of at most `limit` bytes, or of a few.

    Neighbours by their experts come together, since they share most. Usually all fit in one part.
    """
    size = sum(leaf.nbytes for leaf in experts[0][0])
    limit = max(limit, FEW * len(experts) * size)
    part, held = [0], {(block, 0) for block in range(len(experts))}
    order = sorted(range(1, len(earlier)), key=lambda i: [-1 if e is None else e for e in earlier[i]])
    for index in order:
        own = {(block, expert) for block, expert in enumerate(earlier[index]) if expert is not None}
        if len(held | own) * size > limit:
            yield part
            part, held = [], set()
        part.append(index)
        held |= own
    yield part


def in_pool(architecture: Architecture, kept: Sequence[Sequence[int]]) -> Architecture:
    """An architecture over candidates as one over the pool; `kept` are the candidates of each block."""
    return tuple(
        Choice(choice.kind, None if choice.expert is None else experts[choice.expert])
        for choice, experts in zip(architecture, kept, strict=True)
    )


def search_note(searched: Searched, num_images: int) -> str:
    """What a search has found so far."""
    best = 100 * np.nanmax(searched.scored.correct) / num_images
    return f"generation {searched.generations}: {len(searched.scored.genomes)} networks, best {best:.1f} %"


def search_report(codes: Int[np.ndarray, "L"], scored: Scored, *, num_images: int, population: int) -> dict[str, Any]:
    """What a task's report says about its search; `codes` is the architecture that it chose among `scored`."""
    chosen = int(np.flatnonzero((scored.genomes == codes).all(axis=1))[0])
    return {
        "searched": len(scored.genomes),
        "search": {
            "correct": scored.correct.tolist(),
            "flops": scored.flops.astype(int).tolist(),
            "population": population,
            "num_images": num_images,
            "chosen": chosen,
        },
        "validation_accuracy": float(scored.correct[chosen]) / num_images,
        "best_validation_accuracy": float(np.nanmax(scored.correct)) / num_images,
    }
