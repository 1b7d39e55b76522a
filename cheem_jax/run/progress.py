"""Progress display of a run: bars on a terminal, lines at intervals elsewhere, and a status file
for other processes."""

import contextlib
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple

from rich import progress as bars
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from cheem_jax.core.architecture import from_strings
from cheem_jax.core.paths import printable
from cheem_jax.core.settings import COLOURS, Advance

SECONDS_BETWEEN_LINES = 15.0
SHORTEST_MEASURED = 0.1
"""Minimum duration of a phase in seconds for its speed to be displayed."""
NAME_WIDTH = 20
STATUS_FILE = ".status.json"
SECONDS_BETWEEN_WRITES = 2.0
"""Minimum number of seconds between two writes of the status file within a phase. The start of a
phase is written immediately, because compiling can delay the next write by minutes."""
LARGEST_SHARE = 0.01
"""Maximum fraction of the running time that is spent on writing the status file. On a slow disk,
the file is therefore written less often."""


class Terminal(Console):
    """Console that uses `printable` to remove control characters from everything that it prints."""

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            if segment.control:
                yield segment
            else:
                yield Segment(printable(segment.text), segment.style)

    def on_broken_pipe(self) -> None:
        """Raise the BrokenPipeError again; rich would exit with status 1."""
        raise  # noqa: PLE0704  (called in an `except` block)


class Progress:
    """Display of phases (with images/s and remaining time), messages, and architectures."""

    def __init__(
        self, console: Console | None = None, *, clock: Callable[[], float] = time.monotonic
    ):
        self.console = console or _console()
        self.clock = clock
        self.has_bars = self.console.is_terminal and not self.console.is_dumb_terminal
        self._explained = False
        self._bars = bars.Progress(
            bars.TextColumn("{task.fields[phase]:<10}", style="bold"),
            bars.TextColumn("{task.fields[task]}", markup=False),
            bars.BarColumn(bar_width=24),
            bars.TaskProgressColumn(),
            bars.TextColumn("{task.fields[speed]}"),
            bars.TimeRemainingColumn(compact=True),
            bars.TextColumn("{task.fields[note]}", style="dim", markup=False),
            console=self.console,
            transient=True,
            refresh_per_second=4,  # few refreshes, so that the CPU cores are available for training
        )

    def say(self, message: str) -> None:
        """Print a line above the bars."""
        self.console.print(Text(message), soft_wrap=True)

    @contextlib.contextmanager
    def phase(
        self, phase: str, *, task: str, total: int, unit: str = "images"
    ) -> Iterator[Advance]:
        """Display a phase of a task; `total` is the number of items in the phase, and `unit` is a
        plural noun for these items.

        Exceptions pass through, including KeyboardInterrupt.
        """
        start = said = self.clock()
        done = 0
        bar = None
        if self.has_bars:
            if not self._bars.tasks:
                self._bars.start()
            bar = self._bars.add_task("", total=total, phase=phase, task=task, speed="", note="")
        else:
            self.say(f"[{phase}] {task}: {total:,} {unit}")

        def advance(num_images: int, note: str = "") -> None:
            nonlocal done, said
            done += num_images
            now = self.clock()
            rate = done / max(now - start, 1e-9)
            # before the first progress, no speed is known
            speed = f"{rate:,.0f} {unit}/s" if done else ""
            if bar is not None:
                self._bars.update(bar, advance=num_images, speed=speed, note=note)
            elif now - said >= SECONDS_BETWEEN_LINES:
                said = now
                rest = f"{duration(max(total - done, 0) / rate)} left" if done else ""
                line = f"[{phase}] {task}: {done:,} of {total:,} {unit}"
                self.say(", ".join(part for part in (line, speed, rest, note) if part))

        try:
            yield advance
        finally:
            if bar is not None:
                self._bars.remove_task(bar)
                if not self._bars.tasks:
                    self._bars.stop()  # restores the cursor, also after Ctrl-C
        seconds = self.clock() - start
        # a phase that ends immediately used a cache, so its speed has no meaning
        rate = f", {done / seconds:,.0f} {unit}/s" if done and seconds >= SHORTEST_MEASURED else ""
        self.say(f"[{phase}] {task}: done in {duration(seconds)}, {done:,} {unit}{rate}")

    def architecture(self, task: str, choices: Sequence[str]) -> None:
        """Display an architecture as a row with one letter (R, A, N or S) per block. Experts are
        displayed with their number, except the base expert (0)."""
        if not self._explained:
            legend = Text("blocks in order: ")
            for kind in COLOURS:
                legend.append(f" {kind[0].upper()} ", style=self._style(kind)).append(f" {kind}  ")
            self.console.print(
                legend.append("number: expert in the pool, base expert without"), soft_wrap=True
            )
            self._explained = True
        row = Text(f"{task:<{NAME_WIDTH}} ")
        for choice in from_strings(choices):
            row.append(
                f" {choice.kind[0].upper()}{choice.expert or ' '} ", style=self._style(choice.kind)
            )
        self.console.print(row, soft_wrap=True)

    def _style(self, kind: str) -> str:
        return f"#202020 on {COLOURS[kind]}" if self.console.color_system else ""


class Doing(NamedTuple):
    """The current phase: `done` of `total` images after `seconds`, written by process `pid` at
    `time` (seconds since 1970)."""

    phase: str
    task: str
    done: int
    total: int
    seconds: float
    note: str
    pid: int
    time: float
    ends: float | None = None
    """Estimated end of the task in seconds since 1970; None without an estimate."""


class Status:
    """The status file of a run. As a context manager, it removes the file at the end.

    Only one process of a job writes the file; with `writes=False`, this process writes nothing.
    """

    def __init__(
        self, directory: Path, *, writes: bool = True, clock: Callable[[], float] = time.monotonic
    ):
        self.file = directory / STATUS_FILE
        self.writes = writes
        self.clock = clock
        self._last = -math.inf
        self._took = 0.0
        self.ends: float | None = None
        """Estimated end of the task in seconds since 1970; None without an estimate."""

    def __enter__(self) -> "Status":
        return self

    def __exit__(self, *raised: object) -> None:
        if self.writes:
            with contextlib.suppress(OSError):
                self.file.unlink(missing_ok=True)

    @contextlib.contextmanager
    def phase(
        self, name: str, task: str, total: int, shown: AbstractContextManager[Advance]
    ) -> Iterator[Advance]:
        """Display a phase with the context manager `shown`, and write the phase's progress to the
        status file; `total` is the number of images in the phase."""
        start = self.clock()
        done = 0
        noted = ""

        def write(every: float) -> None:
            now = self.clock()
            if now - self._last >= max(every, self._took / LARGEST_SHARE):
                self._write(
                    Doing(
                        name,
                        task,
                        done,
                        total,
                        now - start,
                        noted,
                        os.getpid(),
                        time.time(),
                        self.ends,
                    )
                )
                self._last = self.clock()
                self._took = self._last - now

        with shown as show:

            def advance(num_images: int, note: str = "") -> None:
                nonlocal done, noted
                done = done + num_images
                noted = note
                write(SECONDS_BETWEEN_WRITES)
                show(num_images, note)

            write(0.0)
            yield advance

    def _write(self, doing: Doing) -> None:
        if not self.writes:
            return
        sibling = self.file.with_name(f".{STATUS_FILE}.{os.getpid()}.tmp")
        with contextlib.suppress(OSError):
            try:
                sibling.write_text(json.dumps(doing._asdict()))
                os.replace(sibling, self.file)
            finally:
                sibling.unlink(missing_ok=True)


def on_screen() -> bool:
    """Return whether standard output is a terminal. `sys.stdout` is None in processes without a
    console."""
    return sys.stdout is not None and sys.stdout.isatty()


def _console() -> Terminal:
    """Make a console. Outside of a terminal, such as in notebooks and logs, it prints plain lines
    even if FORCE_COLOR is set, because bars would fill hundreds of lines."""
    is_screen = on_screen()
    return Terminal(
        width=None if is_screen else 100,
        force_jupyter=False,
        force_terminal=None if is_screen else False,
    )


def duration(seconds: float) -> str:
    """Format seconds as `4.5 s`, `2 min 07 s`, `3 h 05 min` or `2 d 4 h`."""
    seconds = max(seconds, 0.0)
    if round(seconds) < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours < 24:
        return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {seconds:02d} s"
    return f"{hours // 24} d {hours % 24} h"
