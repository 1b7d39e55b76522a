"""`cheem report`, `cheem tensorboard` and `cheem watch`: a run or memory as a page, as event files,
while it works."""

import contextlib
import dataclasses
import os
import signal
import sys
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
from cheem_jax.report.status import Snapshot, look
from cheem_jax.report.tensorboard import check_installed, write_events
from cheem_jax.run.directory import NAME
from cheem_jax.run.progress import SECONDS_BETWEEN_LINES, Progress, on_screen

DOCTYPE = b"<!doctype html"
"""How a page begins, in lower case: what begins otherwise is not overwritten."""


@dataclasses.dataclass(frozen=True)
class Report:
    """Draw one or several runs or memories as a single HTML page that needs no network."""

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN [RUN ...]")]
    """Directories of runs or memories, or folders that hold some at any depth."""
    out: Path | None = None
    """The file to write; default: report.html in the first folder named."""
    images: bool = True
    """Show test images of runs with right and wrong predictions, if the images are available."""
    figures: bool = False
    """Also write figures (PNG) and tables (CSV) into `figures` in the folder of every run."""


def write_report_page(settings: Report) -> None:
    """Write the page and say where it is."""
    if not settings.runs:
        raise ValueError(
            "no run was named; give a run directory, such as runs/demo after `cheem demo`"
        )
    progress = Progress()
    file = settings.out or settings.runs[0] / PAGE
    if file.is_dir():
        raise ValueError(f"--out {str(file)!r} is a folder; expected the name of a file to write")
    if file.exists():
        with file.open("rb") as stream:
            if not stream.read(100).lstrip().lower().startswith(DOCTYPE):
                raise ValueError(
                    f"--out {str(file)!r} is there and is no HTML page; name another file"
                )
    try:
        runs, left_out = write_page(settings.runs, file, images=settings.images)
    except OSError as error:
        raise ValueError(
            f"{file} cannot be written ({error.strerror}); name another file with --out"
        ) from error
    for directory, reason in left_out:
        progress.say(f"left out {shown(directory)}: {reason}")
    if settings.figures:
        from cheem_jax.report.figures import write_figures  # Matplotlib is slow to import

        for run in runs:
            progress.say(f"wrote {shown(write_figures(run.directory, run.results))}")
    progress.say(f"wrote {shown(file)} ({file.stat().st_size / 1e6:.1f} MB): open it in a browser")


def refresh_page(memory: Path) -> None:
    """Write a memory's `report.html`; a page that cannot be made is one line and no error."""
    try:
        write_page([memory], memory / PAGE)
    except (ValueError, OSError) as error:
        print(f"note: {PAGE} is not written ({error})", file=sys.stderr)


@dataclasses.dataclass(frozen=True)
class Tensorboard:
    """Write TensorBoard event files of runs or memories, finished or not; written again, they
    continue."""

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN [RUN ...]")]
    """Directories of runs or memories."""


def write_tensorboard(settings: Tensorboard) -> None:
    """Event files into `tensorboard` in every run's directory."""
    check_installed()
    if not settings.runs:
        raise ValueError("no run is named; e.g. `cheem tensorboard runs/demo`")
    for directory in settings.runs:
        if not (directory / NAME).is_file():
            raise ValueError(
                f"{str(directory)!r} is not a run directory (it has no {NAME}); give what --run-dir"
                " said"
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
    progress.say(f"look at them with: tensorboard --logdir {shown(Path(above))}")


OTHER_LINES = 20
"""Lines of a view besides its tasks."""
MOST_ROWS = 40
"""Tasks shown where nothing says how many lines there is room for."""


@dataclasses.dataclass(frozen=True)
class Watch:
    """Watch a run or memory that another process works on: what is learned, learning now, and the
    time left."""

    run_dir: Annotated[Path, tyro.conf.Positional]
    """The directory of the run or memory; shown once where nobody works on it."""
    every: float = 1.0
    """The view is updated after this many seconds."""
    once: bool = False
    """Show it once and end."""


def watch_run(settings: Watch, console: Console | None = None) -> None:
    """Shows the run until it is finished or stopped; Ctrl-C ends the view and leaves the run
    alone."""
    if not settings.every > 0:
        raise ValueError(
            f"every is {settings.every}; expected seconds between two looks, more than 0"
        )
    console = console or Console(width=None if on_screen() else 100)
    seen = look(settings.run_dir, time.time())
    if not settings.once and not seen.is_over:
        with contextlib.suppress(KeyboardInterrupt), _shows(console) as show:
            while not seen.is_over:
                show(seen)
                sleep(settings.every)
                seen = look(settings.run_dir, time.time())
        seen = look(settings.run_dir, time.time())
    console.print(view(seen, console.width, MOST_ROWS))


@contextlib.contextmanager
def _shows(console: Console) -> Iterator[Callable[[Snapshot], None]]:
    """Redraws a separate screen, which is gone afterwards; without one, a line now and then and
    after every task."""
    if not console.is_terminal or console.is_dumb_terminal:
        said, num_finished = 0.0, None

        def say(seen: Snapshot) -> None:
            nonlocal said, num_finished
            if (
                seen.num_finished != num_finished
                or time.monotonic() - said >= SECONDS_BETWEEN_LINES
            ):
                said = time.monotonic()
                num_finished = seen.num_finished
                console.print(Text(line(seen)), soft_wrap=True)

        yield say
        return
    usual = signal.signal(
        signal.SIGTERM, signal.default_int_handler
    )  # gives the terminal back as well
    try:
        with Live(console=console, screen=True, auto_refresh=False) as live:
            yield lambda seen: live.update(
                view(seen, console.width, max(3, console.height - OTHER_LINES)), refresh=True
            )
    finally:
        signal.signal(signal.SIGTERM, usual)
