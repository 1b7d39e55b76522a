"""A run that goes on: what is saved is opened, and record and checkpoints have to tell the same story."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cheem_jax.checkpoint import load_manifest, load_meta, saved_tasks
from cheem_jax.data.task import Stream
from cheem_jax.methods.method import Method
from cheem_jax.report.record import Record, read


def restore(directory: Path, stream: Stream, methods: tuple[Method, ...], record: Record) -> int:
    """Open what is saved and drop from the record what belongs to an unfinished task; returns finished tasks.

    Raises ValueError where checkpoints and record do not tell the same story.
    """
    saved = {method.name: saved_tasks(directory / "checkpoints" / method.name) for method in methods}
    damaged = []
    for method in methods:
        try:
            method.open(directory / "checkpoints" / method.name)
        except ValueError as error:
            damaged.append(str(error))
    if damaged:
        raise ValueError(" / ".join(damaged))
    told: set[tuple[str, int]] = set()

    def belongs(entry: dict[str, Any]) -> bool:
        if entry["event"] != "learned":
            return True
        place = (entry["method"], entry["report"]["index"])
        if place[1] >= len(saved[place[0]]) or place in told:
            return False
        told.add(place)
        return True

    record.keep(belongs)
    evaluated = [entry for entry in read(directory) if entry["event"] == "evaluated"]
    finished = len(evaluated)
    if (measured := [entry["index"] for entry in evaluated]) != list(range(finished)):
        raise ValueError(
            f"{record.file} has lost a line: it tells the measurements after the tasks {measured}, one after the other "
            "from 0 on was expected; bring it back from a copy, or begin anew with another --run-dir"
        )
    if evaluated:
        _check_contents(evaluated[-1]["checkpoints"], saved)
    names = {name: [load_meta(d)["name"] for d in directories] for name, directories in saved.items()}
    expected = [task.name for task in stream.tasks]
    whole = {(name, index) for name, found in names.items() for index in range(len(found))} == told
    if not whole or any(
        found != expected[: len(found)] or not finished <= len(found) <= finished + 1 for found in names.values()
    ):
        raise ValueError(
            f"record and checkpoints of {str(directory)!r} differ: the record has {finished} finished tasks and tells "
            f"how {sorted(told)} were learned, the checkpoints hold {names}; bring back what is missing, or begin "
            f"anew with another --run-dir"
        )
    return finished


def _check_contents(recorded: Mapping[str, Sequence[str]], saved: Mapping[str, Sequence[Path]]) -> None:
    """Raises ValueError for a whole checkpoint that is not the one that was recorded, such as another run's."""
    for method, contents in recorded.items():
        for place, content in zip(saved[method], contents, strict=False):
            if load_manifest(place)["content_sha256"] != content:
                raise ValueError(f"checkpoint {place} is whole, but not the one that this run saved; bring that back")
