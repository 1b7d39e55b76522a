"""The rolling checkpoint: the state of a task while it is learned, saved now and then.

    checkpoints/cheem/running-000007/    as a learned task's directory; the newest intact one counts

Its place in the work (task, phase, step) is part of it, and keys follow from places, so a run that
resumes from it ends as one that was never stopped.
"""

import contextlib
import itertools
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

from cheem_jax.core.interruption import Stop
from cheem_jax.core.settings import Advance
from cheem_jax.engine import hosts
from cheem_jax.engine.passes import unwatched
from cheem_jax.run.checkpoint import load_task, save_task

ROLLING_FORMAT = "cheem_jax-running/4"
"""Nothing resumes from that of another version: its task begins again."""
SECONDS_BETWEEN = 30.0
"""At least so many seconds between two rolling checkpoints, by default."""
CALLS_BETWEEN = 8
"""Reports of work after which the processes of a job ask each other whether to save or to stop."""
LARGEST_SHARE = 0.02
"""Share of the time that rolling checkpoints may take: a slow disk or a large supernet makes them
rarer."""


class Saved(NamedTuple):
    """The state of a running task: arrays by name, and JSON values."""

    arrays: dict[str, Any]
    meta: dict[str, Any]


OpenPhase = Callable[[str, int], AbstractContextManager[Advance]]


class Rolling:
    """The rolling checkpoint of one method in one run, and when the next one is due."""

    def __init__(
        self,
        root: Path,
        stop: Stop,
        *,
        every: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        if every is not None and not every >= 0:
            raise ValueError(f"save_every is {every}; expected seconds, 0 or more")
        self.root = root
        self.stop = stop
        self.every = every
        self.clock = clock
        self.seconds = 0.0
        """Spent on saving so far."""
        self._last = clock()
        self._took = 0.0

    def due(self) -> bool:
        """Whether it is time to save again."""
        wait = (
            self.every
            if self.every is not None
            else max(SECONDS_BETWEEN, self._took * (1 / LARGEST_SHARE - 1))
        )
        return self.clock() - self._last >= wait

    def agreed(self) -> tuple[bool, bool]:
        """Whether to save and whether to stop: what any process of the job wants counts for all."""
        number, due = divmod(hosts.largest(2 * (self.stop.signal_number or 0) + self.due()), 2)
        if number:
            self.stop.signal_number = number  # never back to None: a signal may have come meanwhile
        return bool(due), bool(number)

    def save(self, task: int, state: Callable[[], Saved]) -> None:
        """Write a new one, then remove the one before."""
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
        self.seconds += self._took

    def open(self, task: int, say: Callable[[str], object]) -> Saved | None:
        """The newest intact one of this task, if there is any; what is corrupted or of another task
        is removed.

        Raises OSError or MemoryError where one cannot be read now, which may be intact.
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
        """Remove it: the task is saved for good. Also removes what a killed process left
        unfinished."""
        if hosts.is_first():
            _remove(self._directories())
            for left in self.root.glob(".running-*"):
                shutil.rmtree(left, ignore_errors=True)
        self._last = self.clock()

    def _directories(self) -> list[Path]:
        return sorted(
            d for d in self.root.glob("running-*") if re.fullmatch(r"running-\d+", d.name)
        )


class RunningTask:
    """One task while it is learned: its phases on the screen, its state on the disk, and requests
    to stop."""

    def __init__(self, task: int, rolling: Rolling, phase: OpenPhase, say: Callable[[str], object]):
        self.task, self.rolling, self._phase = task, rolling, phase
        self.saved = rolling.open(task, say)
        """What an earlier process left of this task."""

    @contextlib.contextmanager
    def phase(
        self, name: str, total: int, state: Callable[[], Saved] | None = None
    ) -> Iterator[Advance]:
        """A phase of `total` images; `state` gives what is worth keeping at any call of the
        `advance` it yields.

        Raises Stopped out of `advance` where a signal has asked for it, after saving.
        """
        rolling = self.rolling
        calls = itertools.count(1)
        with self._phase(name, total) if total else contextlib.nullcontext(unwatched) as shown:

            def advance(num_images: int, note: str = "", /) -> None:
                # what is shown comes last: whoever reads it may be gone
                asked = hosts.count() == 1 or next(calls) % CALLS_BETWEEN == 0
                due, stop = rolling.agreed() if asked else (False, False)
                if state is not None and (due or stop):
                    rolling.save(self.task, state)
                if stop:
                    place = "before" if state is None else "up to this step of"
                    raise rolling.stop.stopped(f"everything {place} the {name} phase is kept")
                shown(num_images, note)

            yield advance


def _remove(directories: list[Path]) -> None:
    for directory in directories:
        # first out of sight, so that a half removed one is never taken for a corrupted one
        hidden = directory.with_name(f".{directory.name}.old")
        shutil.rmtree(hidden, ignore_errors=True)
        directory.rename(hidden)
        shutil.rmtree(hidden, ignore_errors=True)
