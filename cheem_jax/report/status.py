"""`.status.json`: what a run is doing at this moment, for whoever watches it from another process.

Rewritten now and then while a phase works, removed at the end. Nothing is gone on from it: a write that fails is left
out, and none waits for the disk.
"""

import contextlib
import json
import math
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

from cheem_jax.report.progress import Advance

NAME = ".status.json"
OWNER = ".owner.json"
"""As `run_directory` writes it."""
SECONDS_BETWEEN = 2.0
"""Least seconds between two writes in a phase; its beginning is told at once, since it may compile for minutes."""
LARGEST_SHARE = 0.01
"""Share of the time that writing may take; a slow disk makes it rarer."""
NUM_LOSSES = 60
CLOCK_ERROR = 5.0
"""Seconds by which the system's clocks may disagree."""


class Doing(NamedTuple):
    """A phase at work: `done` of `total` images in `seconds`, as told by process `pid` at `time` (since 1970)."""

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
        """`shown`, a phase on the screen, told to watchers as well; `total` in images."""
        start, done, noted = self.clock(), 0, ""
        losses: dict[str, float] = {}

        def tell(every: float) -> None:
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
                tell(SECONDS_BETWEEN)
                show(num_images, note)

            tell(0.0)
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
    """What the run told last; None where there is nothing, or nothing that can be read."""
    told = read_object(directory / NAME)
    try:
        return Doing(
            str(told["phase"]), str(told["task"]), int(told["done"]), int(told["total"]), float(told["seconds"]),
            str(told["note"]), [float(loss) for loss in told["losses"]], int(told["pid"]), float(told["time"]),
        )  # fmt: skip
    except (ValueError, KeyError, TypeError, OverflowError):
        return None


def read_owner(directory: Path) -> Owner | None:
    """The process that works on the run; None where there is none.

    Does not touch the lock: a run that begins at that moment would find it taken. A process on another machine cannot
    be asked, and counts as alive until it takes its name away.
    """
    told = read_object(directory / OWNER)
    try:
        owner = Owner(int(told["pid"]), str(told["host"]), (directory / OWNER).stat().st_mtime)
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        return None
    return owner if owner.host != socket.gethostname() or _lives(owner.pid, owner.since) else None


def _lives(pid: int, since: float) -> bool:
    """Whether it is the process that wrote its name then: numbers are given again, in containers soon."""
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
        told = json.loads(file.read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return told if isinstance(told, dict) else {}
