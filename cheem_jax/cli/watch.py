"""`cheem watch`: a run of another process, seen while it works."""

import dataclasses
import signal
import sys
import time
from pathlib import Path
from time import sleep
from typing import Annotated

import tyro
from rich.console import Console
from rich.live import Live
from rich.text import Text

from cheem_jax.report.live import line, view
from cheem_jax.report.status import Snapshot, look
from cheem_jax.run.progress import SECONDS_BETWEEN_LINES

OTHER_LINES = 20
"""Lines of a view besides its tasks."""
MOST_ROWS = 40
"""Tasks shown where nothing says how many lines there is room for."""


@dataclasses.dataclass(frozen=True)
class Watch:
    """Watch a run or memory that another process works on: what is learned, learning now, and the time left."""

    run_dir: Annotated[Path, tyro.conf.Positional]
    """The directory of the run or memory; shown once where nobody works on it."""
    every: float = 1.0
    """The view is updated after this many seconds."""
    once: bool = False
    """Show it once and end."""


def watch_run(settings: Watch, console: Console | None = None) -> None:
    """Shows the run until it is finished or stopped; Ctrl-C ends the view and leaves the run alone."""
    if not settings.every > 0:
        raise ValueError(f"every is {settings.every}; expected seconds between two looks, more than 0")
    shown = console or Console(width=None if sys.stdout.isatty() else 100)
    seen = look(settings.run_dir, time.time())
    if not settings.once and not seen.is_over:
        try:
            is_screen = shown.is_terminal and not shown.is_dumb_terminal
            seen = (_live if is_screen else _lines)(settings, seen, shown)
        except KeyboardInterrupt:
            seen = look(settings.run_dir, time.time())
    shown.print(view(seen, shown.width, MOST_ROWS))


def _live(settings: Watch, seen: Snapshot, console: Console) -> Snapshot:
    """Redraws a screen of its own, which is gone afterwards."""
    usual = signal.signal(signal.SIGTERM, signal.default_int_handler)  # gives the terminal back as well
    try:
        with Live(console=console, screen=True, auto_refresh=False) as live:
            while not seen.is_over:
                rows = max(3, console.height - OTHER_LINES)
                live.update(view(seen, console.width, rows), refresh=True)
                sleep(settings.every)
                seen = look(settings.run_dir, time.time())
    finally:
        signal.signal(signal.SIGTERM, usual)
    return seen


def _lines(settings: Watch, seen: Snapshot, console: Console) -> Snapshot:
    """A line now and then, and after every task."""
    said, shown = 0.0, None
    while not seen.is_over:
        if seen.num_finished != shown or time.monotonic() - said >= SECONDS_BETWEEN_LINES:
            said, shown = time.monotonic(), seen.num_finished
            console.print(Text(line(seen)), soft_wrap=True)
        sleep(settings.every)
        seen = look(settings.run_dir, time.time())
    return seen
