"""Internal memory: a growing pool of experts per block, and the state of each task (paper section
'Mixture-of-Experts').

Memories are immutable. Learning a task creates a new memory that shares the arrays of the previous
memory, so the parameters of earlier tasks cannot change.
"""

import dataclasses
import functools
import threading
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from cheem_jax.core.architecture import Architecture, Choice
from cheem_jax.core.device import deterministic_jit
from cheem_jax.core.keys import next_power_of_two
from cheem_jax.core.ops import Expert, LowRank, merge
from cheem_jax.core.routing import TaskStatistics


class StoredExpert(NamedTuple):
    """A full expert, or a low-rank pair that changes the expert with index `parent` in the same
    block."""

    params: Expert | LowRank
    parent: int | None
    origin: int | None
    """Number of the task that learned the expert; None for the pretrained backbone."""

    @property
    def is_gone(self) -> bool:
        """Whether the expert was deleted. A placeholder remains, so that the indices of other
        experts do not change."""
        return not self.params[0].size


BlockPool = tuple[StoredExpert, ...]
Pool = tuple[BlockPool, ...]


FAR = -1e30
"""Logit of a masked class. It is finite, so gradients do not become NaN."""


class Head(NamedTuple):
    """Linear classifier of a task."""

    weight: Float[Array, "D C"]
    bias: Float[Array, "C"]


def compute_logits(features: Float[np.ndarray, "*N D"], head: Head) -> Float[np.ndarray, "*N C"]:
    """Compute the logits of a head with NumPy."""
    return features @ np.asarray(head.weight) + np.asarray(head.bias)


def padded(head: Head) -> Head:
    """Pad a head with zeros, so that its number of classes is a power of two. Tasks with similar
    numbers of classes then share compiled functions."""
    num = head.bias.shape[0]
    extra = next_power_of_two(num) - num
    weight = np.pad(np.asarray(head.weight), ((0, 0), (0, extra)))
    return Head(jnp.asarray(weight), jnp.asarray(np.pad(np.asarray(head.bias), (0, extra))))


@dataclasses.dataclass(frozen=True)
class TaskMemory:
    """State of a learned task. The parameters of its experts are in the pool."""

    name: str
    classes: tuple[str, ...]
    architecture: Architecture
    experts: tuple[int | None, ...]
    """Pool index of the expert in each block; None for Skip."""
    head: Head
    means: Float[np.ndarray, "L D"]
    """Mean CLS token mu of the task at each block. Rows of skipped blocks are zero and not used."""
    centroids: Float[np.ndarray, "K E"]
    """Centroids of k-means, or class means, for the router (`TaskStatistics.centroids`)."""
    distances: Float[np.ndarray, "Q"] | None = None
    """Quantiles of the distance from a validation image to the nearest centroid of the task, at
    equally spaced levels from 0 to 1. None if the task was learned by `cheem run` instead of
    `cheem learn`, because runs do not compute these quantiles."""
    moments: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)
    """Further statistics for the router (`TaskStatistics.moments`); empty for k-means."""
    temperature: float = 1.0
    """Temperature of the class probabilities softmax(logits / temperature), fitted on validation
    images; 1 if not fitted."""
    statistics: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)
    """Moments of the features that the task's network computes for images of each class. When the
    task is extended, the moments replace the images of the learned classes. Empty if the task was
    learned by `cheem run` instead of `cheem learn`."""

    @property
    def router_statistics(self) -> TaskStatistics:
        """The task's statistics for the router."""
        return TaskStatistics(self.centroids, self.moments)


@dataclasses.dataclass(frozen=True)
class InternalMemory:
    """State of a continual learner: the pool, and the tasks in learning order.

    Each task has a number, which determines the PRNG keys of the task and is the `origin` of its
    experts. Numbers of `forgotten` tasks are not reused.
    """

    pool: Pool
    tasks: tuple[TaskMemory, ...] = ()
    forgotten: tuple[int, ...] = ()

    @property
    def next_number(self) -> int:
        """The number that the next task will have."""
        return len(self.tasks) + len(self.forgotten)

    @functools.cached_property
    def numbers(self) -> tuple[int, ...]:
        """Number of each task in `tasks`."""
        return tuple(sorted(set(range(self.next_number)) - set(self.forgotten)))

    def added(self, index: int) -> dict[int, StoredExpert]:
        """Return the experts that the task at `index` added to the pool, keyed by block."""
        number = self.numbers[index]
        used = zip(self.pool, self.tasks[index].experts, strict=True)
        return {
            block: stored[expert]
            for block, (stored, expert) in enumerate(used)
            if expert is not None and stored[expert].origin == number
        }

    def candidates(self) -> tuple[tuple[int, ...], ...]:
        """Return the pool indices of the experts in each block that a new task can select: the base
        expert, and every expert that at least one task uses.

        The remaining experts were used only by forgotten tasks, and stay in the pool only as
        parents of other experts. They are not candidates, because their similarity to a new task is
        unknown.
        """
        used = zip((0,) * len(self.pool), *(task.experts for task in self.tasks), strict=True)
        return tuple(tuple(sorted({*experts} - {None})) for experts in used)  # pyright: ignore[reportReturnType]

    def history(self) -> list[list[dict[str, Any]]]:
        """Return the origin, kind and parent of every expert as JSON values, by block. The origin
        is either an index into `tasks`, or the text `"base"` or `"forgotten"`."""
        origins: dict[int | None, int | str] = {None: "base"}
        origins |= {number: index for index, number in enumerate(self.numbers)}
        return [
            [
                {
                    "origin": origins.get(stored.origin, "forgotten"),
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
    """Make a pool from the pretrained plastic layers, one per block, such as
    `vit.experts("mlp_down")`."""
    return tuple((StoredExpert(expert, None, None),) for expert in experts)


def gone(origin: int | None = None) -> StoredExpert:
    """Make the placeholder of a deleted expert. Its weight is empty, so it cannot be applied."""
    return StoredExpert(Expert(jnp.zeros((0, 0)), jnp.zeros(0)), None, origin)


def pool_sizes(pool: Pool) -> tuple[int, ...]:
    """Return the number of experts in each block."""
    return tuple(len(block) for block in pool)


def dense_expert(block: BlockPool, index: int) -> Expert:
    """Return the dense weights of an expert: the full expert at the end of its chain of parents,
    into which all low-rank pairs of the chain are merged."""
    stored = block[index]
    if stored.parent is None:
        assert isinstance(stored.params, Expert)
        return stored.params
    assert isinstance(stored.params, LowRank)
    return merge_dense(dense_expert(block, stored.parent), stored.params)


def dense_experts(pool: Pool) -> list[list[Expert]]:
    """Return the dense weights of every expert of a pool, by block."""
    return [[dense_expert(block, index) for index in range(len(block))] for block in pool]


class DenseExperts:
    """The dense experts of a pool, which are merged on first use and cached up to `limit` bytes.

    The least recently used experts are evicted. Merging an expert again returns identical bits.
    Full experts are part of the pool and do not count towards the limit. Threads can share an
    instance.

    Args:
        pool: the experts.
        limit: maximum number of bytes of cached merged experts.
        earlier: dense experts of an earlier pool; cached experts that have not changed are reused.
    """

    def __init__(self, pool: Pool, limit: int, earlier: "DenseExperts | None" = None):
        self.pool = pool
        self.limit = limit
        self.merged = 0
        self.evicted = 0
        self.bytes = 0
        self.cached: dict[tuple[int, int], Expert] = {}
        """Cached experts keyed by block and index, least recently used first."""
        self._lock = threading.Lock()
        if earlier is None:
            return
        self.merged = earlier.merged
        for (block, index), expert in earlier.cached.items():
            if index < len(pool[block]) and pool[block][index] is earlier.pool[block][index]:
                self._cache((block, index), expert)
        self.evicted += earlier.evicted

    def __call__(self, block: int, index: int) -> Expert:
        """Return the dense expert at `index` of a block."""
        with self._lock:
            chain: list[tuple[int, LowRank]] = []
            while (expert := self._full_or_cached(block, index)) is None:
                stored = self.pool[block][index]
                assert isinstance(stored.params, LowRank) and stored.parent is not None
                chain.append((index, stored.params))
                index = stored.parent
            for child, pair in reversed(chain):
                expert = merge_dense(expert, pair)
                self._cache((block, child), expert)
                self.merged += 1
            return expert

    def _full_or_cached(self, block: int, index: int) -> Expert | None:
        stored = self.pool[block][index].params
        if isinstance(stored, Expert):
            return stored
        if (expert := self.cached.pop((block, index), None)) is not None:
            self.cached[block, index] = expert
        return expert

    def _cache(self, key: tuple[int, int], expert: Expert) -> None:
        self.bytes += sum(leaf.nbytes for leaf in expert)
        self.cached[key] = expert
        while self.bytes > self.limit:
            evicted = self.cached.pop(next(iter(self.cached)))
            self.bytes -= sum(leaf.nbytes for leaf in evicted)
            self.evicted += 1

    def prepare(self) -> None:
        """Compile the merge function for every shape of low-rank pairs."""
        params = [stored.params for block in self.pool for stored in block]
        pairs = {pair.down.shape: pair for pair in params if isinstance(pair, LowRank)}
        for pair in pairs.values():
            merge_dense(params[0], pair)

    def chosen(self, experts: Sequence[Sequence[int]]) -> list[Sequence[Expert]]:
        """Return the dense experts of each block at the pool indices `experts[block]`. An expert is
        merged when it is read from the result."""
        return [_Lazy(self, block, indices) for block, indices in enumerate(experts)]

    def __getitem__(self, block: int) -> Sequence[Expert]:
        """Return all dense experts of a block. An expert is merged when it is read from the
        result."""
        return _Lazy(self, block, range(len(self.pool[block])))

    def counters(self) -> dict[str, int]:
        """Return the numbers of merged and evicted experts, the cached bytes, and the limit in
        bytes."""
        return {
            "merged": self.merged,
            "evictions": self.evicted,
            "bytes": self.bytes,
            "limit_bytes": self.limit,
        }


class _Lazy(Sequence[Expert]):
    def __init__(self, experts: DenseExperts, block: int, indices: Sequence[int]):
        self._experts = experts
        self._block = block
        self._indices = indices

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: Any) -> Any:
        return self._experts(self._block, self._indices[index])


class Candidates(NamedTuple):
    """The experts that a new task can select. The candidates of each block are numbered
    consecutively; experts that only forgotten tasks used have no number."""

    indices: tuple[tuple[int, ...], ...]
    """Pool indices of the candidate experts in each block. The base expert is always the first."""
    experts: Sequence[Sequence[Expert]]
    """Dense weights of the candidate experts in each block."""
    earlier: list[tuple[int | None, ...]]
    """One tuple for the base network, followed by one tuple for the network of each task. A tuple
    contains the candidate index of the network's expert in each block; None for Skip."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of candidate experts in each block."""
        return tuple(map(len, self.indices))

    def in_pool(self, architecture: Architecture) -> Architecture:
        """Replace the candidate indices of an architecture by pool indices."""
        return tuple(
            Choice(choice.kind, None if choice.expert is None else indices[choice.expert])
            for choice, indices in zip(architecture, self.indices, strict=True)
        )


def collect_candidates(memory: InternalMemory, dense: DenseExperts) -> Candidates:
    """Collect the candidates for the next task of a memory."""
    indices = memory.candidates()
    numbers = [
        {None: None, **{index: number for number, index in enumerate(block)}} for block in indices
    ]
    networks = [(0,) * len(indices), *(task.experts for task in memory.tasks)]
    earlier = [
        tuple(block[expert] for expert, block in zip(experts, numbers, strict=True))
        for experts in networks
    ]
    return Candidates(indices, dense.chosen(indices), earlier)


def grow(
    pool: Pool, architecture: Architecture, learned: Mapping[int, Expert | LowRank], origin: int
) -> tuple[Pool, tuple[int | None, ...]]:
    """Add the New and Adapt experts of a task to the pool. Return the new pool, and the pool index
    of the task's expert in each block (None for Skip)."""
    blocks = []
    experts = []
    for index, (block, choice) in enumerate(zip(pool, architecture, strict=True)):
        if choice.kind in ("reuse", "skip"):
            experts.append(choice.expert)
        else:
            experts.append(len(block))
            # if the parent of an Adapt was deleted, the expert is stored as a merged, full expert
            parent = choice.expert if isinstance(learned[index], LowRank) else None
            block = (*block, StoredExpert(learned[index], parent, origin))
        blocks.append(block)
    return tuple(blocks), tuple(experts)


merge_dense = deterministic_jit(merge)
