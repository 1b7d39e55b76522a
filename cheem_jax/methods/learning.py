"""One task while CHEEM learns it: what it may choose, what its phases share, and where its search may begin."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from cheem_jax.architecture import Architecture, Choice, encode
from cheem_jax.data.task import Task
from cheem_jax.evolution import SearchConfig, Searched
from cheem_jax.execution.feed import Budget, Feed, Subset
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


def first_genomes(
    tables: Tables, candidates: Candidates, similarity: Float[np.ndarray, "E L"]
) -> Int[np.ndarray, "W L"]:
    """Where a search begins that starts warm: HEE's likeliest architecture, all Reuse and all Adapt of the base, and
    each earlier task's network as Reuse and Skip, the most similar first.

    Those that hold a removed op are left out.
    """
    sizes, present = candidates.sizes, ~np.isnan(similarity)
    mean = np.nansum(similarity, axis=1) / np.maximum(present.sum(axis=1), 1)
    networks = [
        tuple(Choice("skip") if expert is None else Choice("reuse", expert) for expert in candidates.earlier[i])
        for i in 1 + np.argsort(-mean[1:], kind="stable")
    ]
    plain = [(Choice(kind, 0),) * len(sizes) for kind in ("reuse", "adapt")]
    genomes = np.stack([
        tables.exploit.argmax(axis=1).astype(np.int32),
        *(encode(architecture, sizes) for architecture in (*plain, *networks)),
    ])  # fmt: skip
    possible = (tables.exploit + tables.uniform)[np.arange(len(sizes)), genomes] > 0
    return genomes[possible.all(axis=1)]


def parts_of(feed: Feed, labels: Int[np.ndarray, "N"], rows: Sequence[np.ndarray]) -> list[tuple[Feed, np.ndarray]]:
    """Images and labels that each rung of a search adds; one rung has them as they are."""
    return [(feed, labels)] if len(rows) == 1 else [(Subset(feed, part), labels[part]) for part in rows]


def in_pool(architecture: Architecture, kept: Sequence[Sequence[int]]) -> Architecture:
    """An architecture over candidates as one over the pool; `kept` are the candidates of each block."""
    return tuple(
        Choice(choice.kind, None if choice.expert is None else experts[choice.expert])
        for choice, experts in zip(architecture, kept, strict=True)
    )


def search_note(searched: Searched, num_images: int) -> str:
    """What a search has found so far."""
    best = 100 * np.nanmax(searched.scored.correct) / num_images
    num = len(searched.scored.genomes) + len(searched.dropped)
    return f"generation {searched.generations}: {num} networks, best {best:.1f} %"


def search_report(
    codes: Int[np.ndarray, "L"],
    searched: Searched,
    flops: Int[np.ndarray, "P"],
    num_images: int,
    config: SearchConfig,
) -> dict[str, Any]:
    """What a task's report tells of its search; `flops` by the paper's convention, whatever the search compared."""
    scored = searched.scored
    chosen = int(np.flatnonzero((scored.genomes == codes).all(axis=1))[0])
    told: dict[str, Any] = {
        "correct": scored.correct.tolist(),
        "flops": flops.tolist(),
        "population": config.rung_candidates[-1],
        "num_images": num_images,
        "chosen": chosen,
    }
    if config.cost != "network":
        told["flops_compared"] = scored.flops.astype(int).tolist()
    if config.rungs > 1:
        told["dropped"] = len(searched.dropped)
    return {
        "searched": len(scored.genomes) + len(searched.dropped),
        "search": told,
        "validation_accuracy": float(scored.correct[chosen]) / num_images,
        "best_validation_accuracy": float(np.nanmax(scored.correct)) / num_images,
    }
