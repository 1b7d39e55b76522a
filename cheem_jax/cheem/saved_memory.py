"""The memory on disk with one directory per task, and recovery of the usable tasks of a corrupted
memory."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from cheem_jax.core.architecture import from_strings, to_strings
from cheem_jax.core.ops import Expert, Learned, LowRank
from cheem_jax.core.pool import Head, InternalMemory, Pool, StoredExpert, TaskMemory, gone, grow
from cheem_jax.run.checkpoint import (
    Arrays,
    each_task,
    load_task,
    named,
    numbered_tasks,
    save_task,
    saved_tasks,
    task_directory,
)


def save_memory_task(root: Path, memory: InternalMemory, index: int, rank: int) -> Path:
    """Save the task at `index` with the experts that it added, and return its directory. `rank` is
    the rank of Adapt's low-rank pair."""
    task = memory.tasks[index]
    number = memory.numbers[index]
    arrays = {
        "experts": {
            str(block): stored.params._asdict() for block, stored in memory.added(index).items()
        },
        "head": task.head._asdict(),
        "means": task.means,
        "centroids": task.centroids,
    }
    if task.distances is not None:
        arrays["distances"] = task.distances
    if task.moments:
        arrays["moments"] = dict(task.moments)
    if task.temperature != 1:
        arrays["temperature"] = np.array([task.temperature], np.float32)
    if task.statistics:
        arrays["statistics"] = dict(task.statistics)
    meta = {
        "name": task.name,
        "classes": list(task.classes),
        "architecture": to_strings(task.architecture),
        "experts": list(task.experts),
        "rank": rank,
    }
    directory = task_directory(root, number, task.name)
    save_task(directory, arrays, meta)
    return directory


def save_forgotten(root: Path, memory: InternalMemory, number: int) -> Path:
    """Save the placeholder of forgotten task `number`, and return its directory.

    The placeholder contains the pool index of each expert that the task added, and the parameters
    of each such expert that other tasks still use. It contains no task name and no classes. Because
    of the placeholder, all other experts keep their pool indices when the memory is opened.
    """
    places: list[int | None] = []
    experts, parents = {}, {}
    for index, block in enumerate(memory.pool):
        added = [place for place, stored in enumerate(block) if stored.origin == number]
        places.append(added[0] if added else None)
        if added and not (stored := block[added[0]]).is_gone:
            experts[str(index)], parents[str(index)] = stored.params._asdict(), stored.parent
    directory = root / f"{number:03d}{FORGOTTEN}"
    # Orbax cannot store an empty tree
    save_task(
        directory,
        {"experts": experts, "nothing": np.zeros(1)},
        {"forgotten": places, "parents": parents},
    )
    return directory


FORGOTTEN = ".forgotten"
MOST_TASKS = 100_000
"""Maximum number of tasks that are looked for in a corrupted memory, whose settings can contain any
number."""


def open_memory(root: Path, pool: Pool) -> InternalMemory:
    """Open a saved memory: add all saved tasks to `pool`, the pool of the backbone.

    Raises ValueError with a message that names every corrupted task, not only the first.
    """
    memory = InternalMemory(pool)
    directories = saved_tasks(root)
    for directory, (arrays, meta) in zip(directories, each_task(directories), strict=True):
        memory = _with_saved(memory, directory, arrays, meta)
    return memory


def with_task(memory: InternalMemory, directory: Path) -> InternalMemory:
    """Load the task in `directory` and add it to a memory as the next task."""
    return _with_saved(memory, directory, *load_task(directory))


def _with_saved(
    memory: InternalMemory, directory: Path, arrays: Arrays, meta: Mapping[str, Any]
) -> InternalMemory:
    """Add the next task to a memory. Raises ValueError with a message that names `directory` if the
    task does not fit the earlier tasks."""
    with named(directory):
        if directory.name.endswith(FORGOTTEN):
            return _with_forgotten(memory, arrays, meta)
        task, learned = _task_of(arrays, meta)
        pool, experts = grow(memory.pool, task.architecture, learned, memory.next_number)
        if experts != task.experts:
            raise ValueError(
                f"it uses experts {list(task.experts)}, but the pool before it gives"
                f" {list(experts)}; an earlier task is missing or from another run"
            )
        for choice, block in zip(task.architecture, memory.pool, strict=True):
            if choice.expert is not None and choice.expert >= len(block):
                raise ValueError(f"{choice} is not possible in a pool of {len(block)} experts")
            if choice.kind == "reuse" and block[choice.expert or 0].is_gone:
                raise ValueError(f"{choice} is an expert that was removed")
        _check_head(task, memory.pool)
        _check_experts(memory.pool, learned, experts, _parents(task, learned))
        return InternalMemory(pool, (*memory.tasks, task), memory.forgotten)


def _with_forgotten(
    memory: InternalMemory, arrays: Arrays, meta: Mapping[str, Any]
) -> InternalMemory:
    experts = _experts_of(arrays)
    pool = list(memory.pool)
    number = memory.next_number
    parents = {int(block): parent for block, parent in meta["parents"].items()}
    _check_experts(memory.pool, experts, meta["forgotten"], parents)
    for index, (block, place) in enumerate(zip(memory.pool, meta["forgotten"], strict=True)):
        if place is None:
            continue
        if place != len(block):
            raise ValueError(
                f"its expert in block {index} was number {place}, but {len(block)} are before it"
            )
        stored = (
            StoredExpert(experts[index], parents[index], number)
            if index in experts
            else gone(number)
        )
        pool[index] = (*block, stored)
    return InternalMemory(tuple(pool), memory.tasks, (*memory.forgotten, number))


def open_usable(
    root: Path, pool: Pool, num_learned: int = 0
) -> tuple[InternalMemory, dict[str, str]]:
    """Open a corrupted memory without its lost tasks. Given the task ID, predictions for the
    remaining tasks do not change.

    Returns a memory with the remaining tasks, and the error for each lost task, keyed by directory
    name. A task is lost if its directory is corrupted or missing, or if it uses or adapts an expert
    of a lost task. `num_learned` is the number of tasks that were ever learned; the key of a
    missing directory is its number. The pool of the returned memory has gaps, so the memory can
    predict but not learn.
    """
    blocks = [list(block) for block in pool]
    tasks = list[TaskMemory]()
    lost = dict[str, str]()
    absent = list[int]()
    gap = gone()
    num = max(len(saved_tasks(root)), min(num_learned, MOST_TASKS))
    directories = numbered_tasks(root)  # listed last: another process can add a task in between
    for number in range(num):
        if (directory := directories.get(number)) is None:
            lost[f"{number:03d}"] = "its directory is missing; restore it from a copy"
            absent.append(number)
            continue
        try:
            arrays, meta = load_task(directory)
            with named(directory):
                if directory.name.endswith(FORGOTTEN):
                    task = None
                    places = meta["forgotten"]
                    learned = _experts_of(arrays)
                    parents = {int(block): parent for block, parent in meta["parents"].items()}
                else:
                    task, learned = _task_of(arrays, meta)
                    places = task.experts
                    parents = _parents(task, learned)
                    _check_head(task, pool)
                if len(places) != len(pool) or any(
                    not 0 <= place <= number + 1 for place in places if place is not None
                ):
                    raise ValueError(f"{places} are not its experts in {len(pool)} blocks")
                _check_experts(pool, learned, places, parents)
        except (ValueError, OSError) as error:
            lost[directory.name] = str(error)
            absent.append(number)
            continue
        missing = []
        for index, (block, place) in enumerate(zip(blocks, places, strict=True)):
            needed = parents[index] if index in learned else place
            block += [gap] * (1 + max(-1 if e is None else e for e in (place, needed)) - len(block))
            if task is not None and needed is not None and block[needed].is_gone:
                missing.append(index)
        if missing:
            lost[directory.name] = f"builds on experts of a lost task in blocks {missing}"
            absent.append(number)
            continue
        for index, params in learned.items():
            place, parent = places[index], parents[index]
            assert place is not None
            # An expert that a forgotten task learned can adapt an expert of a lost task. The
            # position of such an adapted expert stays a gap, so tasks that use it are lost, too.
            if parent is None or not blocks[index][parent].is_gone:
                blocks[index][place] = StoredExpert(params, parent, number)
        if task is None:
            absent.append(number)
        else:
            tasks.append(task)
    return InternalMemory(tuple(map(tuple, blocks)), tuple(tasks), tuple(absent)), lost


def _parents(task: TaskMemory, learned: Mapping[int, Learned]) -> dict[int, int | None]:
    """Return the parent of each expert that a task added. A full expert has none; an Adapt whose
    parent was erased is stored as a full expert."""
    return {
        block: task.architecture[block].expert if isinstance(params, LowRank) else None
        for block, params in learned.items()
    }


def _check_head(task: TaskMemory, pool: Pool) -> None:
    width = pool[0][0].params[1].shape[-1]
    if (shape := task.head.weight.shape) != (width, len(task.classes)):
        raise ValueError(
            f"its head has shape {shape}, expected {width} features and {len(task.classes)} classes"
        )


def _check_experts(
    pool: Pool,
    learned: Mapping[int, Learned],
    places: Sequence[int | None],
    parents: Mapping[int, int | None],
) -> None:
    """Refuse new experts that cannot be applied: prediction follows the chain of parents until a
    full expert, and never ends if the chain is a cycle."""
    for index, params in learned.items():
        base, place, parent = pool[index][0].params, places[index], parents[index]
        inputs, width = base[0].shape
        rank = params[0].shape[-1]
        is_pair = isinstance(params, LowRank)
        expected = [(inputs, rank), (rank, width)] if is_pair else [(inputs, width), (width,)]
        if (shapes := [leaf.shape for leaf in params]) != expected:
            raise ValueError(f"its expert in block {index} has shapes {shapes}, not {expected}")
        if parent is not None:
            earlier = pool[index][parent : parent + 1]  # empty if `pool` lacks lost experts
            fits = is_pair and place is not None and 0 <= parent < place
            fits = fits and not any(stored.is_gone for stored in earlier)
        else:
            fits = not is_pair and place is not None
        if not fits:
            raise ValueError(f"expert {place} of block {index} cannot adapt expert {parent}")


def _experts_of(arrays: Arrays) -> dict[int, Expert | LowRank]:
    experts = jax.device_put(arrays["experts"])
    return {
        int(block): LowRank(**leaves) if "down" in leaves else Expert(**leaves)
        for block, leaves in experts.items()
    }


def _task_of(
    arrays: Arrays, meta: Mapping[str, Any]
) -> tuple[TaskMemory, dict[int, Expert | LowRank]]:
    distances = arrays.get("distances")
    task = TaskMemory(
        meta["name"],
        tuple(meta["classes"]),
        from_strings(meta["architecture"]),
        tuple(meta["experts"]),
        Head(**jax.device_put(arrays["head"])),
        np.asarray(arrays["means"]),
        np.asarray(arrays["centroids"]),
        None if distances is None else np.asarray(distances),
        {name: np.asarray(values) for name, values in arrays.get("moments", {}).items()},
        float(arrays.get("temperature", np.ones(1))[0]),
        {name: np.asarray(values) for name, values in arrays.get("statistics", {}).items()},
    )
    learned = _experts_of(arrays)
    added = {block for block, c in enumerate(task.architecture) if c.kind in ("adapt", "new")}
    if learned.keys() != added:
        raise ValueError(
            f"it has experts for blocks {sorted(learned)}, but its architecture adds experts to"
            f" {sorted(added)}"
        )
    return task, learned
