"""A record as if a task had never been learned."""

from collections.abc import Mapping, Sequence
from typing import Any


def without_task(entries: Sequence[Mapping[str, Any]], index: int, name: str) -> list[dict[str, Any]]:
    """A record as if the task at `index` had never been: its lines go, and its columns in the lines of others."""
    return [changed for entry in entries if (changed := _without_task(dict(entry), index, name)) is not None]


def _without_task(entry: dict[str, Any], index: int, name: str) -> dict[str, Any] | None:
    match entry["event"]:
        case "run":
            known = {task: split for task, split in (entry.get("split_sha256") or {}).items() if task != name}
            return {**entry, "split_sha256": known, "data": None, "command": None}
        case "learned":
            report = dict(entry["report"])
            if report["index"] == index:
                return None
            if report["index"] > index:
                report["index"] -= 1
                if "similarity" in report:  # the base's row comes first
                    report["similarity"] = _cut(report["similarity"], index + 1)
            report["pool"] = [[_origin(expert, index) for expert in block] for block in report.get("pool", [])]
            return {**entry, "report": report}
        case "evaluated":
            if entry["index"] == index:
                return None
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
            return {**entry, "checkpoints": {}}
        case _:
            return entry if entry.get("name") != name else None


def _origin(expert: dict[str, Any], index: int) -> dict[str, Any]:
    origin = expert["origin"]
    if isinstance(origin, int):
        origin = "forgotten" if origin == index else origin - (origin > index)
    return {**expert, "origin": origin}


def _cut(values: Sequence[Any], index: int) -> list[Any]:
    return [*values[:index], *values[index + 1 :]]
