"""Forgetting tasks on purpose: each goes with all that only forgotten ones use, and every other
task answers as before.

Experts keep their places in the pool, so that no other task has to be told. An expert of a
forgotten task stays while another task uses it, or while an adapted expert descends from it.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from cheem_jax.core.ops import Expert
from cheem_jax.core.pool import InternalMemory, StoredExpert, dense_expert, gone
from cheem_jax.data.task import check_names


class Place(NamedTuple):
    """An expert of the pool."""

    block: int
    expert: int


class Kept(NamedTuple):
    """An expert of a forgotten task that stays, and the tasks that need it."""

    place: Place
    tasks: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Forgotten:
    """The memory without some tasks, and what became of their experts."""

    memory: InternalMemory = dataclasses.field(repr=False)
    numbers: tuple[int, ...] = ()
    """Of the forgotten tasks; they are never used again."""
    removed: tuple[Place, ...] = ()
    """Experts that are gone, those included that only waited for this one."""
    in_use: tuple[Kept, ...] = ()
    """Stay, since other tasks use them; they remain candidates for new tasks."""
    ancestors: tuple[Kept, ...] = ()
    """Stay, since adapted experts descend from them; they are no candidates any more."""
    baked: tuple[Place, ...] = ()
    """Adapted experts that became full ones, so that what they descend from could go."""


def forget(memory: InternalMemory, *names: str, erase: bool = False) -> Forgotten:
    """The memory without the named tasks.

    With `erase`, adapted experts that descend from its own, or from those of tasks forgotten
    before, become full experts: of forgotten tasks only what others use as it is stays then. Raises
    ValueError for unknown names.
    """
    found = check_names(names, [task.name for task in memory.tasks], "this memory")
    named = zip(memory.numbers, memory.tasks, strict=True)
    return without_numbers(memory, tuple(n for n, task in named if task.name in found), erase=erase)


def without_numbers(
    memory: InternalMemory, numbers: tuple[int, ...], *, erase: bool = False
) -> Forgotten:
    """`forget` for tasks by number."""
    tasks = tuple(
        task for n, task in zip(memory.numbers, memory.tasks, strict=True) if n not in numbers
    )
    left = dataclasses.replace(
        memory, tasks=tasks, forgotten=tuple(sorted((*memory.forgotten, *numbers)))
    )
    blocks = []
    removed = []
    in_use = []
    ancestors = []
    baked = []
    for b, block in enumerate(memory.pool):
        used = {task.experts[b] for task in tasks} - {None}
        block = list(block)
        if erase:
            for place, stored in enumerate(block):
                own = stored.parent is not None and block[stored.parent].origin in left.forgotten
                if own and stored.parent not in used and place in _needed(block, used):
                    block[place] = StoredExpert(
                        dense_expert(tuple(block), place), None, stored.origin
                    )
                    baked.append(Place(b, place))
        needed = _needed(block, used)
        for place, stored in enumerate(block):
            if place not in needed and stored.origin is not None and not stored.is_gone:
                block[place] = gone(stored.origin)
                removed.append(Place(b, place))
            elif place in needed and stored.origin in numbers:
                who = tuple(
                    task.name
                    for task in tasks
                    if (e := task.experts[b]) == place
                    or (place not in used and place in set(_line(block, e)))
                )
                (in_use if place in used else ancestors).append(Kept(Place(b, place), who))
        blocks.append(tuple(block))
    left = dataclasses.replace(left, pool=tuple(blocks))
    return Forgotten(left, numbers, tuple(removed), tuple(in_use), tuple(ancestors), tuple(baked))


def changed_tasks(before: InternalMemory, after: InternalMemory) -> list[int]:
    """Numbers of the remaining tasks whose own experts are no longer what they were."""
    return [
        number
        for number in after.numbers
        if any(
            stored.origin == number
            and isinstance(stored.params, Expert)
            and not isinstance(old.params, Expert)
            for block, old_block in zip(after.pool, before.pool, strict=True)
            for stored, old in zip(block, old_block, strict=True)
        )
    ]


def _line(block: Sequence[StoredExpert], expert: int | None) -> Iterator[int]:
    """An expert and all that it descends from."""
    while expert is not None:
        yield expert
        expert = block[expert].parent


def _needed(block: Sequence[StoredExpert], used: set[int | None]) -> set[int]:
    return {ancestor for expert in used for ancestor in _line(block, expert)}


def without_task(
    entries: Sequence[Mapping[str, Any]], index: int, name: str
) -> list[dict[str, Any]]:
    """A record as if the task at `index` had never been: its lines go, and its columns in the lines
    of others."""
    kept = []
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
                    if "similarity" in report:  # the base's row comes first
                        report["similarity"] = _cut(report["similarity"], index + 1)
                report["pool"] = [
                    [_origin(expert, index) for expert in block] for block in report.get("pool", [])
                ]
            case "evaluated":
                if entry["index"] == index:
                    continue
                if entry["index"] > index:
                    entry["index"] -= 1
                    entry["methods"] = {
                        method: {
                            **found,
                            "accuracy": _cut(found["accuracy"], index),
                            "local_accuracy": _cut(found["local_accuracy"], index),
                            "routing": [_cut(row, index) for row in _cut(found["routing"], index)],
                        }
                        for method, found in entry["methods"].items()
                    }
                entry["checkpoints"] = {}
            case _ if entry.get("name") == name:
                continue
        kept.append(entry)
    return kept


def _origin(expert: dict[str, Any], index: int) -> dict[str, Any]:
    origin = expert["origin"]
    if isinstance(origin, int):
        origin = "forgotten" if origin == index else origin - (origin > index)
    return {**expert, "origin": origin}


def _cut(values: Sequence[Any], index: int) -> list[Any]:
    return [*values[:index], *values[index + 1 :]]
