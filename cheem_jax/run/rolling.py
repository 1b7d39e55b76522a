"""The rolling checkpoint: the state of a task in progress, saved at intervals.

    checkpoints/cheem/running-000007/    same format as the checkpoint of a finished task

If there is more than one rolling checkpoint, the newest intact rolling checkpoint is read.
The state includes the position in the task (phase and step), and PRNG keys are functions of the
position. A resumed run therefore has the same result as an uninterrupted run.
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
"""Format of rolling checkpoints. If a rolling checkpoint has another format, its task starts from
the beginning."""
SECONDS_BETWEEN = 30.0
"""Default minimum number of seconds between two rolling checkpoints."""
LARGEST_SHARE = 0.02
"""Maximum fraction of the running time that is spent on saving rolling checkpoints. On a slow disk,
or with a large supernet, rolling checkpoints are therefore saved less often."""


class Saved(NamedTuple):
    """The state of a task in progress: a dict of arrays, and JSON values."""

    arrays: dict[str, Any]
    meta: dict[str, Any]


def check_interval(save_every: float | None) -> None:
    """Raise ValueError if the number of seconds between rolling checkpoints is negative or NaN."""
    if save_every is not None and not save_every >= 0:
        raise ValueError(f"save_every is {save_every}; expected seconds, 0 or more")


class Rolling:
    """The rolling checkpoint of a method in a run. A save is due every `every` seconds; if `every`
    is None, the interval depends on the duration of the last save."""

    def __init__(
        self,
        root: Path,
        *,
        every: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
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
        """Write a rolling checkpoint and remove the earlier ones. A state without arrays is not
        written, because the task then resumes from its beginning. Return the duration in
        seconds."""
        start = self.clock()
        before = self._directories()
        arrays, meta = state()
        if not arrays:
            return 0.0
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
        """Read the newest intact rolling checkpoint of a task. If there is none, remove all rolling
        checkpoints and return None.

        Raises OSError or MemoryError if a checkpoint cannot be read at present. In this case, no
        checkpoint is removed, because the unread checkpoint might be intact.
        """
        saved = hosts.together(lambda: self._newest(task, say))
        hosts.check_equal(
            "rolling checkpoints",
            saved and saved.meta,
            "use a run directory that all processes share",
        )
        if saved is None:
            self.clear()
        return saved

    def _newest(self, task: int, say: Callable[[str], object]) -> Saved | None:
        for directory in reversed(self._directories()):
            try:
                arrays, meta = load_task(directory)
            except ValueError as error:
                say(f"{error}; the task resumes from an earlier checkpoint, or starts again")
                continue
            if (meta.pop("running", None), meta.pop("task", None)) == (ROLLING_FORMAT, task):
                return Saved(arrays, meta)
        return None

    def clear(self) -> None:
        """Remove all rolling checkpoints, and unfinished files of killed processes."""
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
        # Rename the directory first, so that a partly removed checkpoint is not read as a corrupted
        # one.
        hidden = directory.with_name(f".{directory.name}.old")
        shutil.rmtree(hidden, ignore_errors=True)
        directory.rename(hidden)
        shutil.rmtree(hidden, ignore_errors=True)
