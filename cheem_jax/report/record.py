"""`metrics.jsonl`: one JSON line per measurement, the only record of a run.

Lines are appended; going on after a stop drops those of a task that was not saved.
"""

import datetime
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from cheem_jax.atomic import write_atomically

NAME = "metrics.jsonl"


def to_json(value: Any) -> Any:
    """Plain JSON values: arrays become lists, numbers that are not finite null, tuples lists, paths text."""
    match value:
        case None | bool() | int() | str():
            return value
        case float():
            return value if math.isfinite(value) else None
        case dict():
            return {str(key): to_json(item) for key, item in value.items()}
        case list() | tuple():
            return [to_json(item) for item in value]
        case Path():
            return str(value)
    if hasattr(value, "__array__"):  # numpy and jax arrays and scalars
        return to_json(np.asarray(value).tolist())
    raise TypeError(f"{type(value).__name__} {value!r} has no JSON form here; expected numbers, text, lists, arrays")


class Record:
    """The record of one run directory, opened for appending."""

    def __init__(self, file: Path):
        self.file = file

    @classmethod
    def open(cls, directory: Path) -> "Record":
        """Opens or starts the record; a last line torn by a crash is dropped, so the next starts afresh."""
        directory.mkdir(parents=True, exist_ok=True)
        file = directory / NAME
        if file.exists() and file.stat().st_size and not file.read_bytes().endswith(b"\n"):
            _rewrite(file, read(directory))
        return cls(file)

    def write(self, event: str, **values: Any) -> None:
        """Appends one line with the event, the time (UTC, ISO 8601) and the values, flushed at once."""
        if "time" in values:
            raise ValueError("the record writes `time` itself; give the value another name, such as `seconds`")
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
        line = json.dumps({"event": event, "time": now, **to_json(values)}, allow_nan=False)
        with self.file.open("a", encoding="utf-8") as stream:
            stream.write(line + "\n")

    def keep(self, predicate: Callable[[dict[str, Any]], bool]) -> None:
        """Drops every line for which the predicate is false, such as those of an unfinished task."""
        _rewrite(self.file, [entry for entry in read(self.file.parent) if predicate(entry)])


def read(directory: Path) -> list[dict[str, Any]]:
    """All entries in order, [] without a record; a torn last line is ignored, another broken one an error."""
    file = directory / NAME
    if not file.exists():
        return []
    lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    entries = []
    for number, line in enumerate(lines, start=1):
        try:
            entries.append(json.loads(line))
        except json.JSONDecodeError as error:
            if number == len(lines):
                break
            raise ValueError(f"{file}, line {number}: expected one JSON object, found {line[:60]!r}") from error
    return entries


def _rewrite(file: Path, entries: list[dict[str, Any]]) -> None:
    write_atomically(file, "".join(json.dumps(entry) + "\n" for entry in entries))
