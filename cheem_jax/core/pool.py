"""Internal memory: per block a growing pool of experts, and what each task keeps (paper section
'Mixture-of-Experts').

Everything is immutable: learning a task returns a new memory that shares the old one's arrays, so
nothing that an earlier task needs can change.
"""

import dataclasses
import functools
import threading
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from cheem_jax.core.architecture import Architecture, Choice
from cheem_jax.core.keys import next_power_of_two
from cheem_jax.core.ops import Expert, LowRank, merge
from cheem_jax.core.routing import TaskStatistics


class StoredExpert(NamedTuple):
    """A full expert (weight and bias), or a low-rank pair on top of its parent in the same
    block."""

    params: Expert | LowRank
    parent: int | None
    origin: int | None
    """The task that learned it; None is the pretrained backbone."""

    @property
    def is_gone(self) -> bool:
        """Whether it only keeps its place, so that the experts behind it keep theirs."""
        return not self.params[0].size


BlockPool = tuple[StoredExpert, ...]
Pool = tuple[BlockPool, ...]


FAR = -1e30
"""Logit of a masked class; finite, so that no gradient becomes NaN."""


class Head(NamedTuple):
    """A task's linear classifier on the class token."""

    weight: Float[Array, "D C"]
    bias: Float[Array, "C"]


def logits_of(features: Float[np.ndarray, "N D"], head: Head) -> Float[np.ndarray, "N C"]:
    """A head's logits, on the host."""
    return features @ np.asarray(head.weight) + np.asarray(head.bias)


def padded(head: Head) -> Head:
    """Pad a head to a power of two classes, so that few compiled functions serve all tasks."""
    num = head.bias.shape[0]
    extra = next_power_of_two(num) - num
    weight = np.pad(np.asarray(head.weight), ((0, 0), (0, extra)))
    return Head(jnp.asarray(weight), jnp.asarray(np.pad(np.asarray(head.bias), (0, extra))))


@dataclasses.dataclass(frozen=True)
class TaskMemory:
    """What one learned task keeps beside its experts; `experts` holds a pool index per block, None
    where skipped."""

    name: str
    classes: tuple[str, ...]
    architecture: Architecture
    experts: tuple[int | None, ...]
    head: Head
    means: Float[np.ndarray, "L D"]
    """mu of this task per block; rows of skipped blocks are zero and never read."""
    centroids: Float[np.ndarray, "K E"]
    distances: Float[np.ndarray, "Q"] | None = None
    """Quantiles of the distance from this task's validation images to its nearest centroid, in
    equal steps from 0 to 1; None where nobody asked for them."""
    moments: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)
    """What else names the task, where the router is not one by centroids."""
    temperature: float = 1.0
    """Of its probabilities, softmax(logits / temperature), fitted on its validation images; 1 where
    nobody asked."""
    statistics: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)
    """Of its classes in its own network's features, where more images may follow; empty where
    nobody asked for them."""

    @property
    def router_statistics(self) -> TaskStatistics:
        """The statistics that the router reads."""
        return TaskStatistics(self.centroids, self.moments)


@dataclasses.dataclass(frozen=True)
class InternalMemory:
    """The whole state of a continual learner: pool and tasks in the order in which they were
    learned.

    Every task that was ever learned has a number, which decides its PRNG keys and is the `origin`
    of its experts. Numbers of `forgotten` tasks are never used again.
    """

    pool: Pool
    tasks: tuple[TaskMemory, ...] = ()
    forgotten: tuple[int, ...] = ()

    @property
    def next_number(self) -> int:
        """The number of the task that is learned next."""
        return len(self.tasks) + len(self.forgotten)

    @functools.cached_property
    def numbers(self) -> tuple[int, ...]:
        """The number of each task."""
        return tuple(sorted(set(range(self.next_number)) - set(self.forgotten)))

    def added(self, index: int) -> dict[int, StoredExpert]:
        """What the task at `index` added to the pool, by block."""
        number = self.numbers[index]
        experts = self.tasks[index].experts
        used = {
            block: self.pool[block][expert]
            for block, expert in enumerate(experts)
            if expert is not None
        }
        return {block: stored for block, stored in used.items() if stored.origin == number}

    def candidates(self) -> tuple[tuple[int, ...], ...]:
        """Per block the experts that a new task may choose: the base's and those that a task uses.

        Without forgotten tasks these are all; what only others descend from has no similarity to be
        chosen by.
        """
        used = [
            {0, *(task.experts[block] for task in self.tasks)} - {None}
            for block in range(len(self.pool))
        ]
        return tuple(tuple(sorted(block)) for block in used)  # pyright: ignore[reportReturnType]

    def history(self) -> list[list[dict[str, Any]]]:
        """Where every expert comes from, as JSON values; origins are places among `tasks`."""
        place: dict[int | None, int | str] = {
            number: index for index, number in enumerate(self.numbers)
        }
        place[None] = "base"
        return [
            [
                {
                    "origin": place.get(stored.origin, "forgotten"),
                    "kind": (
                        "gone" if stored.is_gone else "full" if stored.parent is None else "adapted"
                    ),
                    "parent": stored.parent,
                }
                for stored in block
            ]
            for block in self.pool
        ]


def base_pool(experts: Sequence[Expert]) -> Pool:
    """A pool with one expert per block: the pretrained layers, such as
    `vit.experts("mlp_down")`."""
    return tuple((StoredExpert(expert, None, None),) for expert in experts)


def gone(origin: int | None = None) -> StoredExpert:
    """Stands where an expert is lost or forgotten; of a shape that nothing can be computed with."""
    return StoredExpert(Expert(jnp.zeros((0, 0)), jnp.zeros(0)), None, origin)


def pool_sizes(pool: Pool) -> tuple[int, ...]:
    """Experts per block."""
    return tuple(len(block) for block in pool)


def dense_expert(block: BlockPool, index: int) -> Expert:
    """The dense weight of an expert, its chain of low-rank pairs merged from the root upwards."""
    stored = block[index]
    if stored.parent is None:
        assert isinstance(stored.params, Expert)
        return stored.params
    assert isinstance(stored.params, LowRank)
    return merge_dense(dense_expert(block, stored.parent), stored.params)


def dense_experts(pool: Pool) -> list[list[Expert]]:
    """The dense weights of all experts of a pool, by block."""
    return [[dense_expert(block, index) for index in range(len(block))] for block in pool]


class DenseExperts:
    """The dense experts of a pool, each merged when it is first asked for and kept while `limit`
    bytes allow.

    Whichever are kept, an expert is the same bits: its chain is merged from the root upwards. What
    was asked for longest ago goes first; full experts are the pool's own and take nothing here.
    Threads may share it.
    """

    def __init__(self, pool: Pool, limit: int):
        self.pool, self.limit = pool, limit
        self.merged = self.evicted = self.bytes = 0
        """Experts merged and dropped so far, and the bytes of those that are kept."""
        self._kept: dict[tuple[int, int], Expert] = {}  # that of the latest use last
        self._lock = threading.Lock()

    def __call__(self, block: int, index: int) -> Expert:
        """The expert at `index` of a block."""
        with self._lock:
            chain: list[tuple[int, LowRank]] = []
            place = index
            while (found := self._there(block, place)) is None:
                stored = self.pool[block][place]
                assert isinstance(stored.params, LowRank) and stored.parent is not None
                chain.append((place, stored.params))
                place = stored.parent
            for place, pair in reversed(chain):
                found = merge_dense(found, pair)
                self._keep((block, place), found)
                self.merged += 1
            return found

    def _there(self, block: int, index: int) -> Expert | None:
        """A full expert, or one that is kept, which is the latest used from now on."""
        stored = self.pool[block][index].params
        if isinstance(stored, Expert):
            return stored
        if (kept := self._kept.pop((block, index), None)) is not None:
            self._kept[block, index] = kept
        return kept

    def prepare(self) -> None:
        """Compile what merging calls, once for each shape of a pair."""
        params = [stored.params for block in self.pool for stored in block]
        pairs = {pair.down.shape: pair for pair in params if isinstance(pair, LowRank)}
        for pair in pairs.values():
            merge_dense(params[0], pair)

    def chosen(self, experts: Sequence[Sequence[int]]) -> "list[Sequence[Expert]]":
        """These experts of each block as sequences that merge what is taken out of them."""
        return [_Chosen(self, block, kept) for block, kept in enumerate(experts)]

    def __getitem__(self, block: int) -> Sequence[Expert]:
        """All experts of a block, merged as they are taken out."""
        return _Chosen(self, block, range(len(self.pool[block])))

    def counters(self) -> dict[str, int]:
        """Experts merged and dropped so far, and the bytes of those that are kept."""
        return {
            "merged": self.merged,
            "evictions": self.evicted,
            "bytes": self.bytes,
            "limit_bytes": self.limit,
        }

    def grown(self, pool: Pool, limit: int) -> "DenseExperts":
        """Those of a pool that other tasks have made of this one, with what is kept of experts that
        did not change."""
        found = DenseExperts(pool, limit)
        for (block, index), expert in self._kept.items():
            if index < len(pool[block]) and pool[block][index] is self.pool[block][index]:
                found._keep((block, index), expert)
        found.merged = self.merged
        found.evicted = found.evicted + self.evicted
        return found

    def _keep(self, place: tuple[int, int], expert: Expert) -> None:
        self.bytes += sum(leaf.nbytes for leaf in expert)
        self._kept[place] = expert
        while self.bytes > self.limit:
            oldest = next(iter(self._kept))
            self.bytes -= sum(leaf.nbytes for leaf in self._kept.pop(oldest))
            self.evicted += 1


class _Chosen(Sequence[Expert]):
    def __init__(self, experts: DenseExperts, block: int, places: Sequence[int]):
        self._experts, self._block, self._places = experts, block, places

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: Any) -> Any:
        return self._experts(self._block, self._places[index])


class Candidates(NamedTuple):
    """What a new task may choose at each block, numbered anew without the gaps that forgotten tasks
    leave."""

    kept: tuple[tuple[int, ...], ...]
    """The candidates as experts of the memory's pool; the base's is always the first."""
    experts: Sequence[Sequence[Expert]]
    """Their dense weights."""
    earlier: list[tuple[int | None, ...]]
    """The candidate that each earlier network uses: the base network first, then the tasks'."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """Experts per block."""
        return tuple(map(len, self.kept))

    def in_pool(self, architecture: Architecture) -> Architecture:
        """An architecture over candidates as one over the pool."""
        return tuple(
            Choice(choice.kind, None if choice.expert is None else experts[choice.expert])
            for choice, experts in zip(architecture, self.kept, strict=True)
        )


def candidates_of(memory: InternalMemory, dense: DenseExperts) -> Candidates:
    """The candidates of the task that a memory learns next."""
    kept = memory.candidates()
    places = [{expert: place for place, expert in enumerate(block)} for block in kept]
    used_by_tasks = [
        tuple(
            None if expert is None else place[expert]
            for expert, place in zip(task.experts, places, strict=True)
        )
        for task in memory.tasks
    ]
    return Candidates(kept, dense.chosen(kept), [tuple(0 for _ in kept), *used_by_tasks])


def grow(
    pool: Pool, architecture: Architecture, learned: Mapping[int, Expert | LowRank], origin: int
) -> tuple[Pool, tuple[int | None, ...]]:
    """The pool with a task's New and Adapt as experts, and the expert each block of the task
    uses."""
    blocks, experts = [], []
    for index, (block, choice) in enumerate(zip(pool, architecture, strict=True)):
        if choice.kind in ("reuse", "skip"):
            experts.append(choice.expert)
        else:
            experts.append(len(block))
            # an adapted expert whose parent was erased has become a full one
            parent = choice.expert if isinstance(learned[index], LowRank) else None
            block = (*block, StoredExpert(learned[index], parent, origin))
        blocks.append(block)
    return tuple(blocks), tuple(experts)


merge_dense = jax.jit(merge)
