"""The state of a run or a memory: its files, its current phase, and the process that works on it.
The state is read from the directory, so any process can read it."""

import functools
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from cheem_jax.report.memories import is_memory, read_evaluated, with_evaluated
from cheem_jax.run import record
from cheem_jax.run.directory import NAME as CONFIG
from cheem_jax.run.directory import OWNER
from cheem_jax.run.progress import STATUS_FILE, Doing
from cheem_jax.run.results import results_of

CLOCK_ERROR = 5.0
"""Tolerance in seconds for comparing the start of a process (from /proc) with the modification time
of its owner file."""


class Owner(NamedTuple):
    """The process that works on a run, and the time when it locked the directory (seconds since
    1970)."""

    pid: int
    host: str
    since: float

    @property
    def is_self(self) -> bool:
        """Whether this process is the owner. It locks a memory while it writes the page of the
        memory, and the page is about the other work."""
        return (self.pid, self.host) == (os.getpid(), socket.gethostname())

    def activity(self, config: Mapping[str, Any]) -> str:
        """Describe the activity of the process in a clause; `config` is the configuration of the
        memory."""
        who = f"process {self.pid} on {self.host}"
        learning = (config.get("learning") or {}).get("name")
        return f"{who} is learning {learning!r} now" if learning else f"{who} works on it now"


def read_status(directory: Path) -> Doing | None:
    """Read the last status of a run; None if it is missing or cannot be read."""
    try:
        return Doing(**read_object(directory / STATUS_FILE))
    except TypeError:  # the status is missing, or another version wrote it
        return None


def read_owner(directory: Path) -> Owner | None:
    """Find the process that works on the run; None if there is none.

    This function does not acquire the lock, because a run that starts at the same moment would then
    fail to acquire it. A process on another machine counts as alive until it removes its owner
    file.
    """
    read = read_object(directory / OWNER)
    try:
        owner = Owner(read["pid"], read["host"], (directory / OWNER).stat().st_mtime)
    except (OSError, KeyError):
        return None
    return owner if owner.host != socket.gethostname() or lives(owner.pid, owner.since) else None


def lives(pid: int, since: float) -> bool:
    """Return whether the process `pid` is alive and started before `since`. A process that started
    later is a different process with a reused ID."""
    try:
        os.kill(pid, 0)
    except PermissionError:  # the process belongs to another user
        pass
    except (OSError, OverflowError):
        return False
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        boot = next(
            line for line in Path("/proc/stat").read_text().splitlines() if line.startswith("btime")
        )
        start = int(boot.split()[1]) + int(fields[19]) / os.sysconf("SC_CLK_TCK")
    except (OSError, IndexError, ValueError, StopIteration):  # not Linux
        return True
    # States Z and X: the process ended, and its parent has not collected its exit status yet.
    return fields[0] not in ("Z", "X") and start < since + CLOCK_ERROR


def read_object(file: Path) -> dict[str, Any]:
    """Read the JSON object in a file. Return {} if the file is missing or cannot be read."""
    try:
        return record.read_object(file)
    except (OSError, ValueError):
        return {}


class Snapshot(NamedTuple):
    """The state of a run or a memory at `time` (seconds since 1970), read from its directory."""

    directory: Path
    config: dict[str, Any]
    entries: list[dict[str, Any]]
    results: dict[str, Any]
    """Results of the measured tasks; {} if no task is measured or the record cannot be read."""
    trouble: list[str]
    """One sentence per file that cannot be read."""
    status: Doing | None
    owner: Owner | None
    time: float

    @property
    def names(self) -> list[str]:
        """Names of the tasks of the stream or the memory."""
        return self.config.get("tasks") or [task["name"] for task in self.results.get("tasks", ())]

    @property
    def setting(self) -> dict[str, Any]:
        """The `run` entry of the record, with the run's settings; {} if there is none."""
        return next((entry for entry in self.entries if entry["event"] == "run"), {})

    @property
    def num_finished(self) -> int:
        """Number of tasks that are learned and measured."""
        return len(self.results.get("tasks", ()))

    @property
    def is_memory(self) -> bool:
        return is_memory(self.config)

    @property
    def is_over(self) -> bool:
        """Whether no process works on the run: it is finished or stopped."""
        return self.owner is None

    @property
    def is_finished(self) -> bool:
        """Whether no process works on the run and all tasks and upper bounds are measured."""
        is_bound_missing = any(entry.get("upper_bound") for entry in self.entries) and (
            "full_finetune" not in self.results.get("references", ())
        )
        return self.is_over and 0 < len(self.names) <= self.num_finished and not is_bound_missing


def read_snapshot(directory: Path, now: float) -> Snapshot:
    """Read the directory of a run or a memory. Raises ValueError if the directory is neither."""
    if not directory.is_dir():
        raise ValueError(
            f"folder {str(directory)!r} does not exist; a run creates its folder when it starts;"
            " give the value of its --run-dir"
        )
    config = {}
    trouble = []
    try:
        config = record.read_object(directory / CONFIG)
    except FileNotFoundError:
        below = sorted(
            file.parent for depth in ("*", "*/*") for file in directory.glob(f"{depth}/{CONFIG}")
        )
        way_out = (
            f"it contains {len(below)} runs, such as {str(below[0])!r}"
            if below
            else "give the value of a run's --run-dir"
        )
        raise ValueError(
            f"{str(directory)!r} is not a run directory (it has no {CONFIG}); {way_out}"
        ) from None
    except (OSError, ValueError) as error:
        trouble.append(f"{CONFIG} cannot be read ({error})")
    try:
        stat = (directory / record.NAME).stat()
        entries, results, missing = _read_results(directory, stat.st_size, stat.st_mtime_ns)
    except OSError:
        entries, results, missing = [], {}, []
    if results and is_memory(config):
        results = with_evaluated(results, read_evaluated(directory, config))
    status = read_status(directory)
    owner = read_owner(directory)
    return Snapshot(directory, config, entries, results, [*trouble, *missing], status, owner, now)


@functools.lru_cache(maxsize=1)
def _read_results(
    directory: Path, size: int, changed: int
) -> tuple[list[dict[str, Any]], dict[str, Any], list[str]]:
    """Read a record; return its entries, the results, and sentences about errors. The return value
    is cached until `size` or `changed` (modification time) of the record changes."""
    entries = []
    results = {}
    try:
        entries = record.read(directory)
        if any(entry["event"] == "evaluated" for entry in entries):
            results = record.to_json(results_of(entries))
    except (OSError, ValueError) as error:
        return entries, results, [f"{error}; its numbers are missing below"]
    return entries, results, []
