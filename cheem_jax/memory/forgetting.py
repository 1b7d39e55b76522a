"""Forget tasks on request: remove their experts without changing predictions of other tasks.

Experts keep their positions in the pool, so the other tasks do not change. An expert of a forgotten
task stays if another task uses it, or if an adapted expert descends from it.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from cheem_jax.core.ops import Expert
from cheem_jax.core.pool import InternalMemory, StoredExpert, dense_expert, gone
from cheem_jax.data.task import check_names


class PoolPosition(NamedTuple):
    """Position of an expert in the pool."""

    block: int
    expert: int


class RetainedExpert(NamedTuple):
    """An expert of a forgotten task that was not removed, and the tasks that need it."""

    place: PoolPosition
    tasks: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Forgotten:
    """The memory without the forgotten tasks, and a summary of the changes to its experts."""

    memory: InternalMemory = dataclasses.field(repr=False)
    numbers: tuple[int, ...] = ()
    """Numbers of the forgotten tasks; they are not reused."""
    removed: tuple[PoolPosition, ...] = ()
    """Removed experts. Experts of tasks that were forgotten earlier are included if no remaining
    task needs them."""
    in_use: tuple[RetainedExpert, ...] = ()
    """Experts that other tasks use; they remain candidates for new tasks."""
    ancestors: tuple[RetainedExpert, ...] = ()
    """Experts that stay because adapted experts descend from them; they are no longer
    candidates."""
    merged: tuple[PoolPosition, ...] = ()
    """Adapted experts that became full experts, so that their ancestors could be removed."""


def forget(memory: InternalMemory, *names: str, erase: bool = False) -> Forgotten:
    """Return the memory without the named tasks.

    With `erase`, adapted experts that descend from an expert of a forgotten task become full
    experts. An expert of a forgotten task then stays only if another task uses it directly.
    Raises ValueError for unknown names.
    """
    names = tuple(check_names(names, [task.name for task in memory.tasks], "this memory"))
    tasks = zip(memory.numbers, memory.tasks, strict=True)
    return without_numbers(memory, *(n for n, task in tasks if task.name in names), erase=erase)


def without_numbers(memory: InternalMemory, *numbers: int, erase: bool = False) -> Forgotten:
    """Return the memory without the tasks that have these numbers; `erase` works as in `forget`."""
    tasks = tuple(
        task for n, task in zip(memory.numbers, memory.tasks, strict=True) if n not in numbers
    )
    forgotten = tuple(sorted((*memory.forgotten, *numbers)))
    pool = []
    removed = []
    in_use = []
    ancestors = []
    merged = []
    for b, block in enumerate(memory.pool):
        used = {task.experts[b] for task in tasks} - {None}
        block = list(block)
        if erase:
            for e, stored in enumerate(block):
                parent = stored.parent
                descends = parent is not None and block[parent].origin in forgotten
                if descends and parent not in used and e in _needed(block, used):
                    block[e] = StoredExpert(dense_expert(tuple(block), e), None, stored.origin)
                    merged.append(PoolPosition(b, e))
        needed = _needed(block, used)
        for e, stored in enumerate(block):
            if e not in needed and stored.origin is not None and not stored.is_gone:
                block[e] = gone(stored.origin)
                removed.append(PoolPosition(b, e))
            elif e in needed and stored.origin in numbers:
                group = in_use if e in used else ancestors
                users = tuple(
                    task.name
                    for task in tasks
                    if task.experts[b] == e
                    or (e not in used and e in _lineage(block, task.experts[b]))
                )
                group.append(RetainedExpert(PoolPosition(b, e), users))
        pool.append(tuple(block))
    merged = [place for place in merged if place not in removed]
    return Forgotten(
        InternalMemory(tuple(pool), tasks, forgotten),
        numbers,
        tuple(removed),
        tuple(in_use),
        tuple(ancestors),
        tuple(merged),
    )


def changed_tasks(before: InternalMemory, after: InternalMemory) -> list[int]:
    """Return the numbers of the remaining tasks whose adapted experts became full experts."""
    return [
        number
        for number in after.numbers
        if any(
            stored.origin == number
            and isinstance(stored.params, Expert)
            and not isinstance(old.params, Expert)
            for block, old_block in zip(after.pool, before.pool, strict=True)
            # an extension adds experts at the end of a block, so lengths can differ
            for stored, old in zip(block, old_block, strict=False)
        )
    ]


def _lineage(block: Sequence[StoredExpert], expert: int | None) -> Iterator[int]:
    """Yield the expert and all its ancestors."""
    while expert is not None:
        yield expert
        expert = block[expert].parent


def _needed(block: Sequence[StoredExpert], used: set[int | None]) -> set[int]:
    return {ancestor for expert in used for ancestor in _lineage(block, expert)}


def without_task(
    entries: Sequence[Mapping[str, Any]], index: int, name: str
) -> list[dict[str, Any]]:
    """Return the record without the task at `index`: without its entries, and without its rows and
    columns in other entries."""
    rest = []
    for entry in map(dict, entries):
        match entry["event"]:
            case "run":
                splits = {
                    task: split
                    for task, split in (entry.get("split_sha256") or {}).items()
                    if task != name
                }
                entry |= {"split_sha256": splits, "data": None, "command": None}
            case "learned":
                entry["report"] = report = dict(entry["report"])
                if report["index"] == index:
                    continue
                if report["index"] > index:
                    report["index"] -= 1
                    if "similarity" in report:
                        # the first row of similarities belongs to the pretraining data
                        report["similarity"] = _cut(report["similarity"], index + 1)
                report["pool"] = [
                    [_renumber(expert, index) for expert in block] for block in report["pool"]
                ]
            case "evaluated":
                if entry["index"] == index:
                    continue
                if entry["index"] > index:
                    entry["index"] -= 1
                    entry["methods"] = {
                        method: {
                            **measured,
                            "accuracy": _cut(measured["accuracy"], index),
                            "local_accuracy": _cut(measured["local_accuracy"], index),
                            "routing": [
                                _cut(row, index) for row in _cut(measured["routing"], index)
                            ],
                        }
                        for method, measured in entry["methods"].items()
                    }
                entry["checkpoints"] = {}
            case _ if entry.get("name") == name:
                continue
        rest.append(entry)
    return rest


def _renumber(expert: dict[str, Any], index: int) -> dict[str, Any]:
    origin = expert["origin"]
    if isinstance(origin, int):
        origin = "forgotten" if origin == index else origin - (origin > index)
    return {**expert, "origin": origin}


def _cut(values: Sequence[Any], index: int) -> list[Any]:
    return [*values[:index], *values[index + 1 :]]
