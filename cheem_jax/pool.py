"""Internal memory: per block a growing pool of experts, and what each task keeps (paper section 'Mixture-of-Experts').

Everything is immutable: learning a task returns a new memory that shares the old one's arrays, so nothing that an
earlier task needs can change.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Float

from cheem_jax.architecture import Architecture
from cheem_jax.backbone.vit import ViT
from cheem_jax.ops import Expert, LowRank, Placement, merge


class StoredExpert(NamedTuple):
    """A full expert (weight and bias), or a low-rank pair on top of its parent in the same block."""

    params: Expert | LowRank
    parent: int | None
    origin: int | None
    """The task that learned it; None is the pretrained backbone."""

    def describe(self) -> dict[str, Any]:
        """Its place in the pool's history, as JSON values."""
        return {
            "origin": "base" if self.origin is None else self.origin,
            "kind": "full" if self.parent is None else "adapted",
            "parent": self.parent,
        }


BlockPool = tuple[StoredExpert, ...]
Pool = tuple[BlockPool, ...]


class Head(NamedTuple):
    """A task's linear classifier on the class token."""

    weight: Float[Array, "D C"]
    bias: Float[Array, "C"]


@dataclasses.dataclass(frozen=True)
class TaskMemory:
    """What one learned task keeps beside its experts; `experts` holds a pool index per block, None where skipped."""

    name: str
    classes: tuple[str, ...]
    architecture: Architecture
    experts: tuple[int | None, ...]
    head: Head
    means: Float[np.ndarray, "L D"]
    """mu of this task per block; rows of skipped blocks are zero and never read."""
    centroids: Float[np.ndarray, "K E"]


@dataclasses.dataclass(frozen=True)
class Memory:
    """The whole state of a continual learner: pool and tasks in the order in which they were learned."""

    pool: Pool
    tasks: tuple[TaskMemory, ...] = ()


def base_pool(vit: ViT, placement: Placement) -> Pool:
    """One expert per block: the pretrained plastic layer."""
    return tuple((StoredExpert(block.expert(placement), None, None),) for block in vit.blocks)


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


def grow(
    pool: Pool, architecture: Architecture, learned: Mapping[int, Expert | LowRank], origin: int
) -> tuple[Pool, tuple[int | None, ...]]:
    """The pool with a task's New and Adapt as experts, and the expert each block of the task uses."""
    blocks, experts = [], []
    for index, (block, choice) in enumerate(zip(pool, architecture, strict=True)):
        match choice.kind:
            case "skip":
                experts.append(None)
            case "reuse":
                experts.append(choice.expert)
            case "adapt" | "new":
                experts.append(len(block))
                block = (*block, StoredExpert(learned[index], choice.expert, origin))
        blocks.append(block)
    return tuple(blocks), tuple(experts)


merge_dense = jax.jit(merge)
