"""Memories with sampled instead of learned architectures.

The costs of a step and of compilation depend on the number of experts, not on their accuracy.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from cheem_jax.cheem.expert_memory import task_network
from cheem_jax.cheem.hee import exploit_table
from cheem_jax.core.architecture import Architecture, Choice, decode
from cheem_jax.core.ops import Expert, LowRank
from cheem_jax.core.pool import Head, InternalMemory, TaskMemory, dense_experts, grow, pool_sizes
from cheem_jax.engine.executor import Dense, Executor

NUM_CLASSES, RANK = 10, 16


def sampled_memory(
    executor: Executor,
    num_tasks: int,
    *,
    rank: int = RANK,
    architecture: Architecture | None = None,
) -> InternalMemory:
    """Make a memory of untrained tasks with architectures from the exploiting sampler.

    If `architecture` is set, all tasks have that architecture, with separate parameters.
    """
    rng = np.random.default_rng(0)
    width = executor.config.width
    memory = InternalMemory(executor.base_pool)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(0.02 * rng.normal(size=shape), jnp.float32)

    def learned(block: int, choice: Choice) -> Expert | LowRank:
        num_inputs = memory.pool[block][0].params[0].shape[0]
        if choice.kind == "new":
            return Expert(normal(num_inputs, width), jnp.zeros(width))
        return LowRank(normal(num_inputs, rank), normal(rank, width))

    for index in range(num_tasks):
        chosen = architecture
        if chosen is None:
            table = sampled_table(rng, memory)
            chosen = decode(
                [rng.choice(len(row), p=row / row.sum()) for row in table], pool_sizes(memory.pool)
            )
        params = {
            i: learned(i, choice)
            for i, choice in enumerate(chosen)
            if choice.kind in ("adapt", "new")
        }
        pool, used = grow(memory.pool, chosen, params, index)
        means, centroids = (
            rng.normal(size=(num, width)).astype(np.float32) for num in (executor.num_blocks, 5)
        )
        names = tuple(f"class {i}" for i in range(NUM_CLASSES))
        head = Head(jnp.zeros((width, NUM_CLASSES)), jnp.zeros(NUM_CLASSES))
        memory = InternalMemory(
            pool,
            (
                *memory.tasks,
                TaskMemory(f"task {index}", names, chosen, used, head, means, centroids),
            ),
        )
    return memory


def experts_used(memory: InternalMemory) -> list[tuple[int | None, ...]]:
    """Return the expert in each block of the base network and of every task's network."""
    return [(0,) * len(memory.pool), *(task.experts for task in memory.tasks)]


def networks_of(memory: InternalMemory) -> list[list[Dense]]:
    """Return the base network and every task's network."""
    experts = dense_experts(memory.pool)
    return [task_network(experts, used) for used in experts_used(memory)]


def sampled_table(rng: np.random.Generator, memory: InternalMemory) -> np.ndarray:
    """Return the exploiting table of sampled similarities, which are similar in all blocks of one
    network."""
    earlier = experts_used(memory)
    sizes = pool_sizes(memory.pool)
    near = rng.uniform(-1, 1, (len(earlier), 1)) + 0.3 * rng.normal(size=(len(earlier), len(sizes)))
    absent = np.array([[expert is None for expert in used] for used in earlier])
    return exploit_table(np.where(absent, np.nan, np.clip(near, -1, 1)), earlier, sizes)


def sampled_kinds(sizes: Sequence[int], num: int) -> list[tuple[Choice, ...]]:
    """Sample architectures whose op kinds do not depend on the pool."""
    kinds = np.random.default_rng(0).integers(0, 4, (num, len(sizes)))
    rng = np.random.default_rng(1)
    architectures = []
    for row in kinds:
        experts = [int(rng.integers(0, size)) for size in sizes]
        options = [
            (Choice("reuse", e), Choice("adapt", e), Choice("new"), Choice("skip")) for e in experts
        ]
        architectures.append(tuple(option[kind] for option, kind in zip(options, row, strict=True)))
    return architectures
