"""What a run or memory is doing, for whoever looks from another process.

`.status.json` contains the phase at work. It is rewritten now and then and removed at the end; nothing is resumed from
it, so a write that fails is left out, and none waits for the disk. `look` reads all that a directory contains.
"""

import contextlib
import datetime
import json
import math
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cheem_jax.engine.passes import Advance
from cheem_jax.report.memories import is_memory
from cheem_jax.report.table import TOLD
from cheem_jax.run import record

NAME = ".status.json"
OWNER, CONFIG = ".owner.json", "config.json"
"""As `run_directory` writes them."""
SECONDS_BETWEEN = 2.0
"""At least so many between two writes in a phase; its beginning is written at once, as it may compile for minutes."""
LARGEST_SHARE = 0.01
"""Share of the time that writing may take; a slow disk makes it rarer."""
NUM_LOSSES = 60
CLOCK_ERROR = 5.0
"""Seconds by which the system's clocks may disagree."""
MALFORMED = (KeyError, TypeError, ValueError, AttributeError, IndexError)
"""What a corrupted entry of a record may raise."""


class Doing(NamedTuple):
    """A phase at work: `done` of `total` images in `seconds`, written by process `pid` at `time` (since 1970)."""

    phase: str
    task: str
    done: int
    total: int
    seconds: float
    note: str
    losses: list[float]
    """The last loss that was noted in each of the phase's latest epochs."""
    pid: int
    time: float

    @property
    def rate(self) -> float:
        """Images per second since the phase began; 0 before the first ones."""
        return self.done / self.seconds if self.seconds > 0 else 0.0

    @property
    def left(self) -> float | None:
        """Seconds until the phase ends at that rate; None before its first images."""
        return max(0.0, (self.total - self.done) / self.rate) if self.rate else None


class Owner(NamedTuple):
    """The process that works on a run, and since when (seconds since 1970)."""

    pid: int
    host: str
    since: float


class Status:
    """The status file of one run; as a context manager it removes the file at the end.

    One that does not write belongs to a process that another one writes for.
    """

    def __init__(self, directory: Path, *, writes: bool = True, clock: Callable[[], float] = time.monotonic):
        self.file, self.writes, self.clock = directory / NAME, writes, clock
        self._last, self._took = -math.inf, 0.0

    def __enter__(self) -> "Status":
        return self

    def __exit__(self, *raised: object) -> None:
        if self.writes:
            with contextlib.suppress(OSError):
                self.file.unlink(missing_ok=True)

    @contextlib.contextmanager
    def phase(self, name: str, task: str, total: int, shown: AbstractContextManager[Advance]) -> Iterator[Advance]:
        """`shown`, a phase on the screen, written for watchers too; `total` in images."""
        start, done, noted = self.clock(), 0, ""
        losses: dict[str, float] = {}

        def write(every: float) -> None:
            now = self.clock()
            if now - self._last >= max(every, self._took / LARGEST_SHARE):
                latest = list(losses.values())[-NUM_LOSSES:]
                self._write(Doing(name, task, done, total, now - start, noted, latest, os.getpid(), time.time()))
                self._last = self.clock()
                self._took = self._last - now

        with shown as show:

            def advance(num_images: int, note: str = "") -> None:
                nonlocal done, noted
                done += num_images
                if note != noted:
                    noted = note
                    epoch, _, loss = note.rpartition(" loss ")
                    with contextlib.suppress(ValueError):
                        if epoch and math.isfinite(value := float(loss)):
                            losses[epoch] = value
                write(SECONDS_BETWEEN)
                show(num_images, note)

            write(0.0)
            yield advance

    def _write(self, doing: Doing) -> None:
        if not self.writes:
            return
        sibling = self.file.with_name(f".{NAME}.{os.getpid()}.tmp")
        try:
            sibling.write_text(json.dumps(doing._asdict()))
            os.replace(sibling, self.file)
        except OSError:
            with contextlib.suppress(OSError):
                sibling.unlink(missing_ok=True)


def read_status(directory: Path) -> Doing | None:
    """The last status of a run; None where there is none that can be read."""
    read = read_object(directory / NAME)
    try:
        return Doing(
            str(read["phase"]), str(read["task"]), int(read["done"]), int(read["total"]), float(read["seconds"]),
            str(read["note"]), [float(loss) for loss in read["losses"]], int(read["pid"]), float(read["time"]),
        )  # fmt: skip
    except (ValueError, KeyError, TypeError, OverflowError):
        return None


def read_owner(directory: Path) -> Owner | None:
    """The process that works on the run; None where there is none.

    Does not touch the lock: a run that begins at that moment would find it taken. A process on another machine cannot
    be asked, and counts as alive until it removes its name.
    """
    read = read_object(directory / OWNER)
    try:
        owner = Owner(int(read["pid"]), str(read["host"]), (directory / OWNER).stat().st_mtime)
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        return None
    return owner if owner.host != socket.gethostname() or _lives(owner.pid, owner.since) else None


def _lives(pid: int, since: float) -> bool:
    """Whether it is the process that wrote its name then: process numbers are used again, in containers soon."""
    try:
        os.kill(pid, 0)
    except PermissionError:  # of another user
        pass
    except (OSError, OverflowError):
        return False
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        boot = next(line for line in Path("/proc/stat").read_text().splitlines() if line.startswith("btime"))
        begun = int(boot.split()[1]) + int(fields[19]) / os.sysconf("SC_CLK_TCK")
    except (OSError, IndexError, ValueError, StopIteration):  # no Linux
        return True
    # Z, X: ended, and its parent has not asked yet
    return fields[0] not in ("Z", "X") and begun < since + CLOCK_ERROR


def read_object(file: Path) -> dict[str, Any]:
    """A JSON object; {} where there is none, or it cannot be read."""
    try:
        return record.read_object(file)
    except (OSError, ValueError):
        return {}


class Snapshot(NamedTuple):
    """A run or memory at `time` (seconds since 1970), from its directory; tasks by index, accuracies in [0, 1]."""

    directory: Path
    config: dict[str, Any]
    entries: list[dict[str, Any]]
    trouble: list[str]
    """What cannot be read, in words."""
    results: dict[str, Any]
    """`results.json`; {} while a process works."""
    status: Doing | None
    owner: Owner | None
    time: float
    stamp: tuple[int, int] | None
    """Size and time of the record, which is read again only when they change."""
    setting: dict[str, Any]
    names: list[str]
    reports: dict[int, dict[str, Any]]
    accuracy: np.ndarray
    """After each task (row) on each task (column), NaN where not measured: `[T, T]`."""
    given: np.ndarray
    """The same with the task ID given."""
    seconds: dict[int, float]
    """What each finished task took."""
    has_bounds: bool
    """Whether the run also measures the upper bound of every task."""
    bounds: list[float]
    """Seconds of each upper bound that is known."""
    last: float | None
    """When the record was last written, seconds since 1970."""
    begun: float
    """When work on the unfinished task began."""

    @property
    def num_finished(self) -> int:
        """Tasks that are learned and measured."""
        return max(self.seconds, default=-1) + 1

    @property
    def is_memory(self) -> bool:
        return is_memory(self.config)

    @property
    def is_over(self) -> bool:
        """Whether no process works on it: finished or stopped."""
        return self.owner is None

    @property
    def is_finished(self) -> bool:
        """Whether no process works on it and nothing that it was to do is left."""
        num_bounds = len(self.names) if self.has_bounds else 0
        return self.is_over and 0 < len(self.names) <= self.num_finished and len(self.bounds) >= num_bounds


def look(directory: Path, now: float, before: Snapshot | None = None) -> Snapshot:
    """Read the directory of a run or memory. Raises ValueError where it is none."""
    if not directory.is_dir():
        raise ValueError(f"no folder {str(directory)!r}; a run makes it when it begins: give what its --run-dir says")
    trouble = []
    try:
        config = record.read_object(directory / CONFIG)
    except FileNotFoundError:
        below = sorted(file.parent for depth in ("*", "*/*") for file in directory.glob(f"{depth}/{CONFIG}"))
        way_out = (
            f"it contains {len(below)} runs, such as {str(below[0])!r}" if below else "give what a run's --run-dir says"
        )
        raise ValueError(f"{str(directory)!r} is not a run directory (it has no {CONFIG}); {way_out}") from None
    except (OSError, ValueError) as error:
        config = {}
        trouble.append(f"{CONFIG} cannot be read ({error})")
    try:
        stat = (directory / record.NAME).stat()
        stamp = (stat.st_size, stat.st_mtime_ns)
    except OSError:
        stamp = None
    if before is not None and before.stamp == stamp:
        entries, trouble = before.entries, before.trouble
    else:
        entries, corrupted = _entries(directory)
        trouble += corrupted
    status, owner = read_status(directory), read_owner(directory)
    results = read_object(directory / "results.json") if owner is None else {}
    return Snapshot(directory, config, entries, trouble, results, status, owner, now, stamp, *_facts(config, entries))


def _entries(directory: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """The record; of a corrupted one the lines that still are entries, and what is wrong."""
    try:
        return record.read(directory), []
    except OSError as error:
        return [], [f"{record.NAME} cannot be read ({error})"]
    except ValueError as error:
        trouble = f"{error}; numbers below may be wrong"
    entries = []
    for line in (directory / record.NAME).read_bytes().decode("utf-8", errors="replace").splitlines():
        with contextlib.suppress(ValueError, RecursionError):
            entry = json.loads(line)
            if isinstance(entry, dict) and isinstance(entry.get("event"), str):
                entries.append(entry)
    return entries, [trouble]


def _facts(config: Mapping[str, Any], entries: Sequence[dict[str, Any]]) -> tuple[Any, ...]:
    """The fields of a snapshot that follow from its record; an entry that lacks something is left out."""
    setting = next((entry for entry in entries if entry["event"] == "run"), {})
    tasks = config.get("tasks")
    is_known = isinstance(tasks, list) and all(isinstance(name, str) for name in tasks)
    names = (tasks if is_known else None) or list(setting.get("split_sha256") or {})
    accuracy, given = np.full((2, len(names), len(names)), np.nan)
    reports, seconds, bounds, learning = {}, {}, [], {}
    has_bounds = any(entry["event"] == "upper_bound" or entry.get("upper_bound") for entry in entries)
    last, begun = None, 0.0
    for entry in entries:
        with contextlib.suppress(*MALFORMED):
            last = datetime.datetime.fromisoformat(entry["time"]).timestamp()
            begun = last if entry["event"] != "learned" else begun
            match entry["event"]:
                case "learned":
                    index = entry["report"]["index"]
                    learning[index] = learning.get(index, 0.0) + entry["seconds"]
                    if entry["method"] == setting["method"]:
                        reports[index] = entry["report"]
                case "evaluated":
                    index, found = entry["index"], entry["methods"][setting["method"]]
                    routed = "local_accuracy" if setting["method"] in TOLD else "accuracy"
                    accuracy[index, : index + 1] = found[routed]
                    given[index, : index + 1] = found["local_accuracy"]
                    seconds[index] = learning.get(index, 0.0) + entry["seconds"]
                case "upper_bound":
                    bounds.append(entry["seconds"])
    return setting, names, reports, accuracy, given, seconds, has_bounds, bounds, last, begun
