"""The rolling checkpoint: the state of a running task, saved at intervals.

    checkpoints/cheem/running-000007/    in the form of a learned task; the newest one counts

The state includes the position in the work (task, phase, step), and PRNG keys are functions of the
position. A run that resumes therefore ends as an uninterrupted one.
"""

import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from cheem_jax.engine import hosts
from cheem_jax.run.checkpoint import load_task, save_task

ROLLING_FORMAT = "cheem_jax-running/5"
"""Format of the rolling checkpoint; a task whose checkpoint has another format starts again."""
SECONDS_BETWEEN = 30.0
"""Default seconds between two rolling checkpoints, at least."""
LARGEST_SHARE = 0.02
"""Largest share of the time for rolling checkpoints: a slow disk or a large supernet makes them
rarer."""


class Saved(NamedTuple):
    """The state of a running task: arrays by name, and JSON values."""

    arrays: dict[str, Any]
    meta: dict[str, Any]


class Rolling:
    """The rolling checkpoint of one method in one run, and the time at which the next one is
    due."""

    def __init__(
        self,
        root: Path,
        *,
        every: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        if every is not None and not every >= 0:
            raise ValueError(f"save_every is {every}; expected seconds, 0 or more")
        self.root = root
        self.every = every
        self.clock = clock
        self._last = clock()
        self._took = 0.0

    def due(self) -> bool:
        """Return whether the next rolling checkpoint is due."""
        wait = (
            self.every
            if self.every is not None
            else max(SECONDS_BETWEEN, self._took * (1 / LARGEST_SHARE - 1))
        )
        return self.clock() - self._last >= wait

    def save(self, task: int, state: Callable[[], Saved]) -> float:
        """Write a rolling checkpoint, then remove the earlier ones; returns the seconds that this
        took."""
        start = self.clock()
        before = self._directories()
        arrays, meta = state()
        number = 1 + max((int(directory.name.split("-")[1]) for directory in before), default=0)
        save_task(
            self.root / f"running-{number:06d}",
            arrays,
            {"running": ROLLING_FORMAT, "task": task, **meta},
        )
        if hosts.is_first():
            _remove(before)
        self._last = self.clock()
        self._took = self._last - start
        return self._took

    def open(self, task: int, say: Callable[[str], object]) -> Saved | None:
        """Read the newest intact rolling checkpoint of this task, or None; corrupted ones and those
        of other tasks are removed.

        Raises OSError or MemoryError if one cannot be read now: it might be intact.
        """
        saved = hosts.together(lambda: self._newest(task, say))
        hosts.check_equal(
            "rolling checkpoints",
            saved and saved.meta,
            "the run directory has to be one that all processes share",
        )
        if saved is None:
            self.clear()
        return saved

    def _newest(self, task: int, say: Callable[[str], object]) -> Saved | None:
        for directory in reversed(self._directories()):
            try:
                arrays, meta = load_task(directory)
            except ValueError as error:
                say(f"{error}; the task resumes from before it")
                continue
            if (meta.pop("running", None), meta.pop("task", None)) == (ROLLING_FORMAT, task):
                return Saved(arrays, meta)
        return None

    def clear(self) -> None:
        """Remove the rolling checkpoint of a learned task, and unfinished files of a killed
        process."""
        if hosts.is_first():
            _remove(self._directories())
            for remainder in self.root.glob(".running-*"):
                shutil.rmtree(remainder, ignore_errors=True)
        self._last = self.clock()

    def _directories(self) -> list[Path]:
        return sorted(
            d for d in self.root.glob("running-*") if re.fullmatch(r"running-\d+", d.name)
        )


def _remove(directories: list[Path]) -> None:
    for directory in directories:
        # rename it first, so that a partly removed directory is never read as a corrupted
        # checkpoint
        hidden = directory.with_name(f".{directory.name}.old")
        shutil.rmtree(hidden, ignore_errors=True)
        directory.rename(hidden)
        shutil.rmtree(hidden, ignore_errors=True)
