"""A session: the record, rolling checkpoint, display and stop requests of one process that works on
a run."""

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from cheem_jax.core.interruption import Stop, stop_requests
from cheem_jax.core.settings import Advance, no_progress
from cheem_jax.engine import hosts
from cheem_jax.engine.compilation import Mark
from cheem_jax.run.directory import check_space, claim, hold
from cheem_jax.run.fingerprint import digest
from cheem_jax.run.peak import Peak
from cheem_jax.run.progress import Progress, Status
from cheem_jax.run.record import Record
from cheem_jax.run.rolling import Rolling, Saved, check_interval

CALLS_BETWEEN = 8
"""Number of progress reports after which the processes of a job agree again on saving and
stopping."""
SPARE_BYTES = 4 * 2**20
"""Disk space in bytes for the record, results and figures of a task."""


class Session:
    """The directory, record, rolling checkpoint, display and stop requests of a run.

    `Session()` is for tests and notebooks: it has no directory, displays nothing and is never
    interrupted. If `progress` is None, all phases report to `advance`.
    """

    is_resumed = False
    """Whether the directory already contained this run."""

    def __init__(
        self,
        record: Record | None = None,
        progress: Progress | None = None,
        *,
        stop: Stop | None = None,
        status: Status | None = None,
        checkpoints: Path | None = None,
        save_every: float | None = None,
        advance: Advance = no_progress,
    ):
        check_interval(save_every)
        self.progress = progress
        self.stop = Stop() if stop is None else stop
        self.checkpoints = checkpoints
        """Folder with the checkpoints of all methods; None means `checkpoints` in the run
        directory."""
        self.saved: Saved | None = None
        """State of the task in the rolling checkpoint of an earlier process; None without such a
        checkpoint."""
        self.saving_seconds = 0.0
        """Seconds spent on saving rolling checkpoints of the task."""
        self.peak = Peak()
        """Peak memory since the work began; by default, since the process began."""
        self._record = record
        self._status = status
        self._save_every = save_every
        self._advance = advance
        self._title = ""
        self._number = 0
        self._rolling: Rolling | None = None
        self._seconds: dict[str, float] = {}
        self._start = time.perf_counter()
        self._spent = 0.0
        self._outermost: tuple[str, float] | None = None

    @property
    def record(self) -> Record:
        """The record of the run directory."""
        assert self._record is not None, "a session without a directory has no record"
        return self._record

    @property
    def directory(self) -> Path:
        """The run directory."""
        return self.record.file.parent

    def root(self, method: str) -> Path:
        """Return the folder of a method's checkpoints."""
        return (self.checkpoints or self.directory / "checkpoints") / method

    def begin(self, method: str, task: str, number: int) -> None:
        """Begin the task named `task` with task number `number`, or resume it from its rolling
        checkpoint."""
        self._title = task
        self._number = number
        self._rolling = Rolling(self.root(method), every=self._save_every)
        self._seconds = {}
        self._start = time.perf_counter()
        self._spent = 0.0
        self.saving_seconds = 0.0
        self.saved = self._rolling.open(number, self.say)
        if self.saved is not None:
            self._seconds = self.saved.meta.pop("seconds")
            # an earlier version did not save it
            self._spent = self.saved.meta.pop("spent", 0.0)
            self.say(f"{task}: resuming from its rolling checkpoint")

    def finish(self) -> None:
        """Remove the rolling checkpoint of the task. Call this method after the task is saved
        completely."""
        if self._rolling is not None:
            self._rolling.clear()
        self.saved = None

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds of each phase of the task, including seconds in earlier processes. The seconds of
        an inner phase count towards the outermost phase."""
        if self._outermost is None:
            return dict(self._seconds)
        name, start = self._outermost
        return {**self._seconds, name: self._seconds.get(name, 0.0) + time.perf_counter() - start}

    def since(self, start: Mark) -> dict[str, Any]:
        """Return the seconds and compilations since `start` for the record. The seconds include
        those of earlier processes until they saved the rolling checkpoint from which the task
        resumed, like the seconds of its phases."""
        costs = start.since()
        return {**costs, "seconds": costs["seconds"] + self._spent}

    @contextmanager
    def phase(
        self,
        name: str,
        total: int = 0,
        state: Callable[[], Saved] | None = None,
        *,
        title: str | None = None,
    ) -> Iterator[Advance]:
        """Measure the seconds of a phase and display its progress. Yields a function that reports
        finished images.

        Each report saves a rolling checkpoint if one is due, and raises Stopped if a signal
        requested a stop. The processes of a job make both decisions together, at every
        `CALLS_BETWEEN`-th report.

        Args:
            name: name of the phase.
            total: number of images; with 0, nothing is displayed.
            state: function that returns the state to save. With None, no state is saved, and a
                resumed task starts the phase again.
            title: displayed title; by default, the name of the task.
        """
        calls = itertools.count(1)
        with self._timed(name), self.display(name, total, title or self._title) as display:

            def advance(num_images: int, note: str = "", /) -> None:
                if hosts.count() == 1 or next(calls) % CALLS_BETWEEN == 0:
                    self._save_or_stop(name, state)
                # this call is last, because it raises an error if the output is a pipe without a
                # reader
                display(num_images, note)

            yield advance

    def check_stop(self) -> None:
        """Raise Stopped if a signal requested a stop in any process of the job."""
        if hosts.agree_to_stop(self.stop):
            raise self.stop.stopped("all learned tasks are saved")

    def check_room(self, num_bytes: int, what: str) -> None:
        """Raise ValueError if the disk does not have enough free space for arrays of `num_bytes`
        bytes; `what` is the subject of the message."""
        hosts.run_on_first(lambda: check_space(self.directory, num_bytes + SPARE_BYTES, what))

    def say(self, text: str) -> None:
        """Display a line of text."""
        if self.progress is not None:
            self.progress.say(text)

    def expect(self, seconds: float | None) -> None:
        """Set the estimated end of the task in the status file, `seconds` from now; None removes
        the estimate."""
        if self._status is not None:
            self._status.ends = None if seconds is None else time.time() + seconds

    def save(self, state: Callable[[], Saved]) -> None:
        """Replace the rolling checkpoint of the task. A session without a directory saves
        nothing."""

        def with_seconds() -> Saved:
            arrays, meta = state()
            spent = self._spent + time.perf_counter() - self._start
            return Saved(arrays, {**meta, "seconds": self.seconds, "spent": spent})

        if self._rolling is not None:
            self.saving_seconds += self._rolling.save(self._number, with_seconds)

    def _save_or_stop(self, name: str, state: Callable[[], Saved] | None) -> None:
        is_due = state is not None and self._rolling is not None and self._rolling.due()
        signal, is_due = divmod(hosts.largest(2 * (self.stop.signal_number or 0) + is_due), 2)
        if state is not None and (is_due or signal):
            self.save(state)
        if signal:
            self.stop.signal_number = signal
            until = f"this step of the {name} phase"
            if state is None:
                until = "the last rolling checkpoint"
            raise self.stop.stopped(f"all work up to {until} is saved")

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        if self._outermost is not None:
            yield
            return
        self._outermost = name, time.perf_counter()
        try:
            yield
        finally:
            self._seconds = self.seconds
            self._outermost = None

    def display(self, name: str, total: int, title: str) -> AbstractContextManager[Advance]:
        """Display a phase `name` of the task `title` with `total` images, without measuring its
        seconds."""
        if self.progress is None:
            return contextlib.nullcontext(self._advance)
        if not total:
            return contextlib.nullcontext(no_progress)
        shown = self.progress.phase(name, task=title, total=total)
        return shown if self._status is None else self._status.phase(name, title, total, shown)


@contextmanager
def open_session(
    directory: Path,
    config: Mapping[str, Any],
    conditions: Mapping[str, Any],
    progress: Progress,
    save_every: float | None = None,
) -> Iterator[Session]:
    """Lock and claim a run directory for this process or its job, and handle signals.

    `config` is the content of `config.json`, and `conditions` is the result of `fingerprint.take`.
    Raises ValueError if another process has locked the directory, or if the directory contains
    other files or another run.
    """
    check_interval(save_every)  # before anything is written
    with contextlib.ExitStack() as stack, stop_requests() as stop:

        def claim_directory() -> bool:
            stack.enter_context(hold(directory))
            return claim(directory, config)

        is_claimed = hosts.together(lambda: hosts.is_first() and claim_directory())
        status = stack.enter_context(Status(directory, writes=hosts.is_first()))
        record = Record(directory, digest(conditions), writes=hosts.is_first())
        session = Session(record, progress, stop=stop, status=status, save_every=save_every)
        session.is_resumed = bool(hosts.largest(int(is_claimed)))
        yield session
