"""The memory on the disk: a directory per task, and what can be had of it where some are damaged."""

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cheem_jax.architecture import from_strings, to_strings
from cheem_jax.checkpoint import Arrays, load_task, load_tasks, named, save_task, saved_tasks, task_directory
from cheem_jax.ops import Expert, LowRank
from cheem_jax.pool import Head, Memory, Pool, StoredExpert, TaskMemory, grow


def save_memory_task(root: Path, memory: Memory, index: int, rank: int) -> Path:
    """Save what task `index` added to the memory; `rank` is that of its Adapt pairs."""
    task = memory.tasks[index]
    experts = {}
    for block, expert in enumerate(task.experts):
        if expert is not None and memory.pool[block][expert].origin == index:
            experts[str(block)] = memory.pool[block][expert].params._asdict()
    arrays = {
        "experts": experts,
        "head": task.head._asdict(),
        "means": task.means,
        "centroids": task.centroids,
    }
    meta = {
        "name": task.name,
        "classes": list(task.classes),
        "architecture": to_strings(task.architecture),
        "experts": list(task.experts),
        "rank": rank,
    }
    directory = task_directory(root, index, task.name)
    save_task(directory, arrays, meta)
    return directory


def open_memory(root: Path, pool: Pool) -> Memory:
    """The memory of all saved tasks, grown from the backbone's own pool by reading one small directory per task.

    Raises ValueError that names every damaged task, not the first alone.
    """
    memory, directories = Memory(pool), saved_tasks(root)
    for directory, (arrays, meta) in zip(directories, load_tasks(directories), strict=True):
        memory = _with_task(memory, directory, arrays, meta)
    return memory


def with_task(memory: Memory, directory: Path) -> Memory:
    """A memory and the next task, as it is saved."""
    arrays, meta = load_task(directory)
    return _with_task(memory, directory, arrays, meta)


def open_usable(root: Path, pool: Pool) -> tuple[Memory, dict[str, str]]:
    """What of a damaged memory still answers exactly as before, and why each other task does not, by directory.

    What builds on a damaged task's experts is lost with it. The memory is for answering: its pool has gaps.
    """
    blocks, tasks, lost = [list(block) for block in pool], list[TaskMemory](), dict[str, str]()
    for index, directory in enumerate(saved_tasks(root)):
        try:
            arrays, meta = load_task(directory)
            with named(directory):
                task, learned = _task_of(arrays, meta)
        except ValueError as error:
            lost[directory.name] = str(error)
            continue
        missing = []
        for number, (block, choice, expert) in enumerate(zip(blocks, task.architecture, task.experts, strict=True)):
            block += [_gap()] * (1 + max(-1 if e is None else e for e in (expert, choice.expert)) - len(block))
            needed = choice.expert if number in learned else expert
            if needed is not None and block[needed] is _gap():
                missing.append(number)
        if missing:
            lost[directory.name] = f"builds on experts of a damaged task in blocks {missing}"
            continue
        for number, params in learned.items():
            expert = task.experts[number]
            assert expert is not None
            blocks[number][expert] = StoredExpert(params, task.architecture[number].expert, index)
        tasks.append(task)
    return Memory(tuple(map(tuple, blocks)), tuple(tasks)), lost


@functools.cache
def _gap() -> StoredExpert:
    """Stands where an expert is lost; of a shape that nothing can be computed with."""
    return StoredExpert(Expert(jnp.zeros((0, 0)), jnp.zeros(0)), None, None)


def _with_task(memory: Memory, directory: Path, arrays: Arrays, meta: Mapping[str, Any]) -> Memory:
    with named(directory):
        task, learned = _task_of(arrays, meta)
        pool, experts = grow(memory.pool, task.architecture, learned, len(memory.tasks))
        if experts != task.experts:
            raise ValueError(
                f"it uses experts {list(task.experts)}, but the pool before it gives {list(experts)}; an earlier task "
                "is missing or from another run"
            )
    return Memory(pool, (*memory.tasks, task))


def _task_of(arrays: Arrays, meta: Mapping[str, Any]) -> tuple[TaskMemory, dict[int, Expert | LowRank]]:
    arrays = jax.tree.map(jnp.asarray, arrays)
    learned: dict[int, Expert | LowRank] = {
        int(block): LowRank(**leaves) if "down" in leaves else Expert(**leaves)
        for block, leaves in arrays["experts"].items()
    }
    task = TaskMemory(
        meta["name"], tuple(meta["classes"]), from_strings(meta["architecture"]), tuple(meta["experts"]),
        Head(**arrays["head"]), np.asarray(arrays["means"]), np.asarray(arrays["centroids"]),
    )  # fmt: skip
    return task, learned
