"""`metrics.jsonl`: one JSON line per measurement. All results of a run are computed from this file.

Lines are appended. A resumed run removes the lines of a task that was not saved. Each line ends
with its own hash, which detects changes on the disk.
"""

import datetime
import hashlib
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from cheem_jax.core.atomic import room_for, to_disk, write_atomically

NAME = "metrics.jsonl"


def to_json(value: Any) -> Any:
    """Convert a value to plain JSON values: arrays and tuples become lists, non-finite numbers
    become null, and paths become text."""
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
    if hasattr(value, "__array__"):  # NumPy and JAX arrays and scalars
        return to_json(np.asarray(value).tolist())
    raise TypeError(
        f"{type(value).__name__} {value!r} cannot be converted to JSON; expected numbers, text,"
        " lists or arrays"
    )


def read_object(file: Path) -> dict[str, Any]:
    """Read a file that contains a JSON object. Raises FileNotFoundError if the file is missing, and
    ValueError if its content is not a JSON object."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not JSON ({error}); restore it from a copy") from error
    if not isinstance(value, dict):
        raise ValueError(f"{file} does not contain a JSON object; restore it from a copy")
    return value


class Record:
    """The record of a run directory, open for appending. Opening the record removes an incomplete
    last line.

    Each new line contains `fingerprint`, if it is not None. Only one process of a job writes the
    record; with `writes=False`, this process changes nothing.
    """

    def __init__(self, directory: Path, fingerprint: str | None = None, *, writes: bool = True):
        self.file = directory / NAME
        self.fingerprint = fingerprint
        self.writes = writes
        if writes:
            directory.mkdir(parents=True, exist_ok=True)
            if (
                self.file.exists()
                and self.file.stat().st_size
                and not self.file.read_bytes().endswith(b"\n")
            ):
                self.replace(read(directory))

    def write(self, event: str, **values: Any) -> None:
        """Append a line with the event, the current time (UTC, ISO 8601) and `values`, and sync it
        to disk."""
        if "time" in values:
            raise ValueError(
                "`time` is the time of the entry; give the value another name, such as `seconds`"
            )
        if not self.writes:
            return
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
        stamp = {} if self.fingerprint is None else {"fingerprint": self.fingerprint}
        line = _line({"event": event, "time": now, **stamp, **to_json(values)})
        with room_for(self.file, len(line)), self.file.open("a", encoding="utf-8") as stream:
            stream.write(line)
            stream.flush()
            os.fsync(stream.fileno())
        to_disk(self.file.parent)

    def keep(self, predicate: Callable[[dict[str, Any]], bool]) -> None:
        """Remove all entries for which `predicate` is false."""
        self.replace([entry for entry in read(self.file.parent) if predicate(entry)])

    def replace(self, entries: list[dict[str, Any]]) -> None:
        """Replace all entries by `entries`."""
        if self.writes:
            write_atomically(self.file, "".join(map(_line, entries)))


def read(directory: Path) -> list[dict[str, Any]]:
    """Read all entries in order; without a record, the result is empty. An incomplete last line is
    ignored.

    Raises ValueError with the number of the first changed line.
    """
    file = directory / NAME
    if not file.exists():
        return []
    *lines, torn = file.read_bytes().decode("utf-8", errors="replace").split("\n")
    return [_entry(line, f"{file}, line {number}") for number, line in enumerate(lines, start=1)]


def _line(entry: dict[str, Any]) -> str:
    body = json.dumps(entry, allow_nan=False)
    return f'{body[:-1]}, "check": "{hashlib.sha256(body.encode()).hexdigest()[:16]}"}}\n'


def _entry(line: str, where: str) -> dict[str, Any]:
    try:
        entry = json.loads(line)
        if isinstance(entry, dict) and entry.pop("check", None) and _line(entry) == f"{line}\n":
            if isinstance(entry.get("event"), str):
                return entry
    except (ValueError, RecursionError):
        pass
    raise ValueError(
        f"{where} was changed: {line[:60]!r}; restore the file from a copy, or choose another run"
        " directory"
    )
