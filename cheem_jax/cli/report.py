"""`cheem report`, `cheem tensorboard` and `cheem watch`: display runs and memories as an HTML page,
as TensorBoard events, or live in the terminal."""

import contextlib
import dataclasses
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from time import sleep
from typing import Annotated

import tyro
from rich.console import Console
from rich.live import Live
from rich.text import Text

from cheem_jax.core.paths import shown
from cheem_jax.report.live import line, view
from cheem_jax.report.page.assemble import PAGE, write_page
from cheem_jax.report.status import Snapshot, read_snapshot
from cheem_jax.report.tensorboard import check_installed, write_events
from cheem_jax.run.directory import NAME
from cheem_jax.run.progress import SECONDS_BETWEEN_LINES, Progress, Terminal, on_screen

OUR_PAGE = re.compile(
    rb"\s*<!doctype html.*(content=\"cheem report\"|cheem report</title>)", re.DOTALL
)
"""Pattern of the first bytes of a page. Other files are not overwritten. Pages of earlier versions
name this command only in their title."""


@dataclasses.dataclass(frozen=True)
class Report:
    """Draw runs and memories as one HTML page that needs no network."""

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN [RUN ...]")]
    """Directories of runs or memories, or folders that contain such directories at any depth."""
    out: Path | None = None
    """HTML file to write; default: report.html in the first folder."""
    images: bool = True
    """Show test images with right and wrong predictions, if the images are available."""
    figures: bool = False
    """Also write figures (PNG) and tables (CSV) into a folder `figures` in every run directory."""


def write_report_page(settings: Report) -> None:
    """Write the page and print its file name."""
    if not settings.runs:
        raise ValueError("no run given; give a run directory, such as runs/demo after `cheem demo`")
    progress = Progress()
    file = settings.out or settings.runs[0] / PAGE
    if file.is_dir():
        raise ValueError(f"--out {str(file)!r} is a folder; expected the name of a file to write")
    if file.exists():
        with file.open("rb") as stream:
            if not OUR_PAGE.match(stream.read(4096)):
                raise ValueError(
                    f"{str(file)!r} exists and is not a page of `cheem report`; choose another file"
                    " with --out"
                )
    try:
        runs, left_out = write_page(settings.runs, file, images=settings.images)
    except OSError as error:
        reason = error.strerror or "unknown reason"
        way_out = "" if "choose" in reason else "; choose another file with --out"
        raise ValueError(f"{file} cannot be written ({reason}){way_out}") from error
    for directory, reason in left_out:
        progress.say(f"excluded {shown(directory)}: {reason}")
    if settings.figures:
        from cheem_jax.report.figures import write_figures  # imports Matplotlib, which is slow

        for run in runs:
            progress.say(f"wrote {shown(write_figures(run.directory, run.results))}")
    progress.say(f"wrote {shown(file)} ({file.stat().st_size / 1e6:.1f} MB): open it in a browser")


@dataclasses.dataclass(frozen=True)
class Tensorboard:
    """Write TensorBoard events of runs and memories, finished or not. A repeated command appends
    the new events."""

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN [RUN ...]")]
    """Directories of runs or memories."""


def write_tensorboard(settings: Tensorboard) -> None:
    """Write events into a folder `tensorboard` in every run directory."""
    check_installed()
    if not settings.runs:
        raise ValueError("no run given; give a run directory: `cheem tensorboard runs/demo`")
    for directory in settings.runs:
        if not (directory / NAME).is_file():
            raise ValueError(
                f"{str(directory)!r} is not a run directory (it has no {NAME}); give the run's"
                " --run-dir"
            )
    progress = Progress()
    for directory in settings.runs:
        folder = write_events(directory)
        is_empty = not any(folder.glob("*/"))
        progress.say(
            f"wrote {shown(folder)}"
            if not is_empty
            else f"{shown(directory)}: no task is learned yet"
        )
    above = os.path.commonpath(settings.runs)
    progress.say(f"display them with: tensorboard --logdir {shown(Path(above))}")


OTHER_LINES = 20
"""Number of lines of the display that are not rows of tasks."""
MOST_ROWS = 40
"""Maximum number of displayed tasks if the height of the output is unlimited."""

DAY = 86_400


@dataclasses.dataclass(frozen=True)
class Watch:
    """Watch a run or memory that another process works on: finished tasks, the current task, and
    the time left."""

    run_dir: Annotated[Path, tyro.conf.Positional]
    """Directory of the run or memory. If no process works on it, it is displayed once."""
    every: float = 1.0
    """Seconds between updates of the view."""
    once: bool = False
    """Display the run once and exit."""


def watch_run(settings: Watch, console: Console | None = None) -> None:
    """Display a run until it finishes or stops. Ctrl-C ends the display and does not affect the
    run."""
    if not 0 < settings.every <= DAY:
        raise ValueError(
            f"every is {settings.every}; expected a positive number of seconds between updates, at"
            f" most {DAY:,}"
        )
    console = console or Terminal(width=None if on_screen() else 100)
    snapshot = read_snapshot(settings.run_dir, time.time())
    if not settings.once and not snapshot.is_over:
        with contextlib.suppress(KeyboardInterrupt), _displaying(console) as show:
            while not snapshot.is_over:
                show(snapshot)
                sleep(settings.every)
                snapshot = read_snapshot(settings.run_dir, time.time())
        snapshot = read_snapshot(settings.run_dir, time.time())
    console.print(view(snapshot, console.width, MOST_ROWS))


@contextlib.contextmanager
def _displaying(console: Console) -> Iterator[Callable[[Snapshot], None]]:
    """Yield a function that displays a snapshot. In a terminal, it updates a separate screen.
    Otherwise, it prints a line after every task and every SECONDS_BETWEEN_LINES seconds."""
    if not console.is_terminal or console.is_dumb_terminal:
        printed, num_finished = 0.0, None

        def print_line(snapshot: Snapshot) -> None:
            nonlocal printed, num_finished
            if (
                snapshot.num_finished != num_finished
                or time.monotonic() - printed >= SECONDS_BETWEEN_LINES
            ):
                printed = time.monotonic()
                num_finished = snapshot.num_finished
                console.print(Text(line(snapshot)), soft_wrap=True)

        yield print_line
        return
    # on SIGTERM, restore the terminal as on Ctrl-C
    handler = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with Live(console=console, screen=True, auto_refresh=False) as live:
            yield lambda snapshot: live.update(
                view(snapshot, console.width, max(3, console.height - OTHER_LINES)), refresh=True
            )
    finally:
        signal.signal(signal.SIGTERM, handler)
