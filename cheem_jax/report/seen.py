"""What lies in a run's directory at one moment, and what its record tells so far."""

import datetime
import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cheem_jax.report import record
from cheem_jax.report.status import Doing, Owner, read_object, read_owner, read_status
from cheem_jax.report.table import TOLD

NAME = "config.json"
MALFORMED = (KeyError, TypeError, ValueError, AttributeError, IndexError)
"""What a damaged entry of a record may raise."""


class Seen(NamedTuple):
    """What lies in a run's directory at `time` (seconds since 1970)."""

    directory: Path
    config: dict[str, Any]
    entries: list[dict[str, Any]]
    trouble: list[str]
    """What cannot be read, in words."""
    results: dict[str, Any]
    """What the run itself made of its record; {} while it works."""
    status: Doing | None
    owner: Owner | None
    time: float
    stamp: tuple[int, int] | None
    """Size and time of the record, which is read again only when they change."""


class Facts(NamedTuple):
    """What the record tells of a run's own method; tasks by index, accuracies in [0, 1]."""

    setting: dict[str, Any]
    names: list[str]
    reports: dict[int, dict[str, Any]]
    accuracy: np.ndarray
    """After each task (row) on each task (column), NaN where not measured: `[T, T]`."""
    given: np.ndarray
    """The same with the true task given."""
    seconds: dict[int, float]
    """What each finished task took."""
    has_bounds: bool
    """Whether the run also measures the upper bound of every task."""
    bounds: list[float]
    """Seconds of each upper bound that is known."""
    last: float | None
    """When the record was last written, seconds since 1970."""
    begun: float
    """When work on the task that is not finished began."""

    @property
    def num_finished(self) -> int:
        """Tasks that are learned and measured."""
        return max(self.seconds, default=-1) + 1


def look(directory: Path, now: float, before: Seen | None = None) -> Seen:
    """Read a run's directory. Raises ValueError where there is no run."""
    if not directory.is_dir():
        raise ValueError(f"no folder {str(directory)!r}; a run makes it when it begins: give what its --run-dir says")
    config, trouble = {}, []
    try:
        config = json.loads((directory / NAME).read_text())
        if not isinstance(config, dict):
            raise ValueError("no JSON object")
    except FileNotFoundError:
        below = sorted(file.parent for depth in ("*", "*/*") for file in directory.glob(f"{depth}/{NAME}"))
        way_out = (
            f"it holds {len(below)} runs, such as {str(below[0])!r}" if below else "give what a run's --run-dir says"
        )
        raise ValueError(f"{str(directory)!r} is not a run directory (it has no {NAME}); {way_out}") from None
    except (OSError, ValueError, RecursionError) as error:
        config = {}
        trouble.append(f"{NAME} cannot be read ({error})")
    try:
        stat = (directory / record.NAME).stat()
        stamp = (stat.st_size, stat.st_mtime_ns)
    except OSError:
        stamp = None
    if before is not None and before.stamp == stamp:
        entries, trouble = before.entries, before.trouble
    else:
        entries, damage = _entries(directory)
        trouble += damage
    doing, owner = read_status(directory), read_owner(directory)
    results = read_object(directory / "results.json") if owner is None else {}
    return Seen(directory, config, entries, trouble, results, doing, owner, now, stamp)


def _entries(directory: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """The record; where it is damaged, the lines that still are entries, and what is wrong."""
    try:
        return record.read(directory), []
    except OSError as error:
        return [], [f"{record.NAME} cannot be read ({error})"]
    except ValueError as error:
        damage = f"{error}; numbers below may be wrong"
    entries = []
    for line in (directory / record.NAME).read_bytes().decode("utf-8", errors="replace").splitlines():
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(entry, dict) and isinstance(entry.get("event"), str):
            entries.append(entry)
    return entries, [damage]


def facts_of(seen: Seen) -> Facts:
    """What there is to show; an entry that lacks something is left out."""
    setting = next((entry for entry in seen.entries if entry["event"] == "run"), {})
    told = seen.config.get("tasks")
    known = isinstance(told, list) and all(isinstance(name, str) for name in told)
    names = (told if known else None) or list(setting.get("split_sha256") or {})
    num = len(names)
    accuracy, given = np.full((num, num), np.nan), np.full((num, num), np.nan)
    reports, seconds, bounds, learning = {}, {}, [], {}
    has_bounds = any(entry["event"] == "upper_bound" or entry.get("upper_bound") for entry in seen.entries)
    last, begun = None, 0.0
    for entry in seen.entries:
        try:
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
        except MALFORMED:
            continue
    return Facts(setting, names, reports, accuracy, given, seconds, has_bounds, bounds, last, begun)


def is_over(seen: Seen) -> bool:
    """Whether nobody works on it: finished or stopped."""
    return seen.owner is None
