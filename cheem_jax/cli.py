"""Command lines: the `cheem` command, and what every experiment's `main` shares."""

import contextlib
import io
import re
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import jax
import tyro

from cheem_jax.commands import data, demo, report, tensorboard, watch
from cheem_jax.data.sources import MissingTasks
from cheem_jax.execution.compilation import NotKept, keep_programs
from cheem_jax.interruption import Stopped

Settings = TypeVar("Settings")


def parse(settings: type[Settings] | Settings, arguments: Sequence[str] | None = None, **options: Any) -> Settings:
    """The command line as `settings`, a dataclass or an instance that holds the defaults.

    tyro draws a titled box around a complaint; a command answers in one line and ends with status 2.
    """
    complaint = io.StringIO()
    kind, default = (settings, None) if isinstance(settings, type) else (type(settings), settings)
    try:
        with contextlib.redirect_stderr(complaint):
            return tyro.cli(kind, default=default, args=arguments, **options)
    except SystemExit as stop:
        if stop.code:
            text = re.sub("╭.*╮|[╰╯│─]", " ", complaint.getvalue())
            print(f"error: {' '.join(text.split())}", file=sys.stderr)
            raise SystemExit(2) from stop
        raise


def run_command(command: Callable[[Settings], None], settings: Settings, directory: Path | None = None) -> None:
    """Run a command's main: bad input ends in one line and status 2, Ctrl-C in a line that says how to go on."""
    try:
        try:
            keep_programs()
        except NotKept as error:
            print(f"note: {error}; they are compiled again in every run", file=sys.stderr)
        command(settings)
    except (MemoryError, jax.errors.JaxRuntimeError) as error:
        if isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" not in str(error):
            raise
        reason = str(error).splitlines()[0] if str(error) else "no memory left"
        print(
            f"error: out of memory ({reason}); try a smaller batch size, less kept on the device (memory_gb) or a "
            "smaller image size; finished tasks are safe",
            file=sys.stderr,
        )
        raise SystemExit(2) from error
    except (ValueError, OSError, FloatingPointError) as error:
        print(f"error: {' '.join(str(error).split()):.4000}", file=sys.stderr)
        if isinstance(error, MissingTasks):
            print("\n".join(f"  {line}" for line in error.advice), file=sys.stderr)
        raise SystemExit(2) from error
    except KeyboardInterrupt as stop:
        begun = directory is not None and directory.exists()
        where = f" Finished tasks are in {directory}; the same command goes on after them." if begun else ""
        if isinstance(settings, data.Prepare):
            where = " What is ready is kept; the same command goes on."
        number = signal.SIGINT
        if isinstance(stop, Stopped):
            number = stop.signal_number
            if directory is not None:
                where = f" In {directory} {stop}; the same command goes on from there."
        print(f"\nstopped.{where}", file=sys.stderr)
        raise SystemExit(128 + number) from None


COMMANDS: dict[str, tuple[type, Callable[[Any], None]]] = {
    "demo": (demo.Demo, demo.learn_demo),
    "report": (report.Report, report.write_report_page),
    "watch": (watch.Watch, watch.watch_run),
    "tensorboard": (tensorboard.Tensorboard, tensorboard.write_tensorboard),
    "data list": (data.List, data.list_data),
    "data prepare": (data.Prepare, data.prepare_data),
    "data verify": (data.Verify, data.verify_data),
    "data show": (data.Show, data.show_data),
}


def main() -> None:
    """The `cheem` command."""
    words = sys.argv[1:]
    num = 2 if words[:1] == ["data"] else 1
    name, arguments = " ".join(words[:num]), words[num:]
    known = [command for command in COMMANDS if num == 1 or command.startswith("data ")]
    if not words or words[num - 1 :][:1] in ([], ["-h"], ["--help"]):
        print(f"usage: cheem {'data ' if num == 2 else ''}COMMAND [--help]\n")
        for command in known:
            print(f"  {command:<14}{(COMMANDS[command][0].__doc__ or '').splitlines()[0]}")
        return
    if name not in COMMANDS:
        print(f"error: unknown command {name!r}; expected one of: {', '.join(known)}", file=sys.stderr)
        raise SystemExit(2)
    kind, command = COMMANDS[name]
    settings = parse(kind, arguments, prog=f"cheem {name}")
    run_command(command, settings, getattr(settings, "run_dir", None))
