"""Command lines: the `cheem` command, and what every experiment's `main` shares.

The table of commands is here; a command's own module is imported when that command is given.
"""

import contextlib
import difflib
import errno
import importlib
import io
import logging
import os
import re
import select
import shutil
import signal
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from cheem_jax import __version__
from cheem_jax.core.atomic import REFUSING
from cheem_jax.core.interruption import Stopped
from cheem_jax.core.paths import shown, with_absolute_paths

Settings = TypeVar("Settings")

PURPOSE = (
    "Continual learning with Vision Transformers: earlier tasks keep their parameters, no old image"
    " is stored."
)
STATUS = (
    "Exit status: 0 done; 1 done in part (doctor: something is broken); 2 bad input or something"
    " missing; 128 + N stopped by signal N."
)
ALL = "--help-all"


def parse(
    settings: type[Settings] | Settings, arguments: Sequence[str] | None = None, **options: Any
) -> Settings:
    """The command line as `settings`, a dataclass or an instance that holds the defaults; its paths
    are absolute.

    tyro draws a titled box around a complaint; a command answers in one line and ends with status
    2.
    """
    import tyro

    complaint = io.StringIO()
    kind, default = (settings, None) if isinstance(settings, type) else (type(settings), settings)
    if wanted := {"-h", "--help", ALL}.intersection(
        sys.argv[1:] if arguments is None else arguments
    ):
        from cheem_jax.cli.arguments import print_help

        print_help(kind, shows_all=ALL in wanted, default=default, **options)
        raise SystemExit(0)
    try:
        with contextlib.redirect_stderr(complaint):
            parsed = tyro.cli(kind, default=default, args=arguments, **options)
    except SystemExit as stop:
        if stop.code:
            text = re.sub("╭.*╮|[╰╯│─]", " ", complaint.getvalue())
            print(f"error: {' '.join(text.split())}", file=sys.stderr)
            raise SystemExit(2) from stop
        raise
    with _failures_in_a_line():
        return with_absolute_paths(parsed)


def columns() -> int:
    """The width of a text for people."""
    return min(shutil.get_terminal_size().columns, 100)


def run_command(
    command: Callable[[Settings], int | None],
    settings: Settings,
    directory: Path | None = None,
    *,
    computes: bool = True,
) -> None:
    """Run a command's main: bad input ends in one line and status 2, Ctrl-C in a line that says how
    to go on.

    A status that the command returns, other than 0, ends the process. What `computes` keeps its
    compiled programs. A process of a job of several ends at once where it fails, so that the others
    need not wait for it.
    """
    try:
        with _reader_may_leave(), _failures_in_a_line(directory, getattr(settings, "kept", "")):
            # of an image that is too large: whoever reads it says so, by name and in one line
            warnings.filterwarnings("ignore", message=r"Image size \(\d+ pixels\) exceeds limit")
            warnings.filterwarnings(
                "ignore", module=r"PIL\.TiffImagePlugin"
            )  # of EXIF that is corrupted
            if computes:  # not every command needs JAX, so it is not imported with this module
                from cheem_jax.engine.compilation import (
                    NotKept,
                    allow_ordinary_programs,
                    keep_programs,
                )

                for note in allow_ordinary_programs():
                    print(f"note: {note}", file=sys.stderr)
                try:
                    keep_programs()
                except NotKept as error:
                    print(f"note: {error}; they are compiled again in every run", file=sys.stderr)
            status = command(settings)
        if status:
            raise SystemExit(status)
    except BaseException as error:
        if (hosts := sys.modules.get("cheem_jax.engine.hosts")) is not None:
            hosts.leave(error)
        raise


@contextlib.contextmanager
def _failures_in_a_line(directory: Path | None = None, kept: str = "") -> Iterator[None]:
    """Bad input, missing packages and Ctrl-C end in one line and a status; a fault of our own keeps
    its traceback.

    `directory` is where the command writes, for errors of a disk that name no file; `kept` says
    what a stop leaves where there is none.
    """
    try:
        yield
    except KeyboardInterrupt as stop:
        number = stop.signal_number if isinstance(stop, Stopped) else signal.SIGINT
        if directory is not None and isinstance(stop, Stopped):
            kept = f" In {shown(directory)} {stop}; the same command resumes from there."
        elif directory is not None and directory.exists():
            kept = (
                f" Finished tasks are in {shown(directory)}; the same command resumes after them."
            )
        print(f"\nstopped.{kept}", file=sys.stderr)
        raise SystemExit(128 + number) from None
    except Exception as error:
        if (sentence := _sentence(error, directory)) is None:
            raise
        print(f"error: {sentence}", file=sys.stderr)
        for line in getattr(error, "advice", ()):
            print(f"  {line}", file=sys.stderr)
        raise SystemExit(2) from error


def _sentence(error: Exception, directory: Path | None) -> str | None:
    """What a user reads of an error; None for a fault of our own."""
    text = f"{' '.join(str(error).split()):.4000}"
    jax = sys.modules.get("jax")
    is_of_jax = jax is not None and isinstance(error, jax.errors.JaxRuntimeError)
    if isinstance(error, MemoryError) or (is_of_jax and "RESOURCE_EXHAUSTED" in text):
        reason = str(error).splitlines()[0] if text else "no memory left"
        return (
            f"out of memory ({reason}); try a smaller batch size, less kept on the device"
            " (memory_gb) or a smaller image size; finished tasks are safe"
        )
    if isinstance(error, ImportError):
        if error.name is None:  # an extra's, and whoever raised it says how to get it
            return text
        is_ours = error.name.split(".")[0] == "cheem_jax"
        return (
            None if is_ours else f"{text}; `cheem doctor` tells what is missing and how to get it"
        )
    if isinstance(error, BrokenPipeError) and _reader_is_gone():
        return None
    if isinstance(error, OSError) and error.errno in REFUSING:
        room = (
            ""
            if error.errno == errno.EROFS
            else "free some room there and give the same command again, or "
        )
        return (
            f"{error.filename or directory or 'a file'} cannot be written: {error.strerror};"
            f" {room}choose a folder on another disk; what was saved stays"
        )
    if isinstance(error, RuntimeError | AssertionError) and (asked := _missing_platform()):
        reason = f" ({text:.300})" if text else ""
        return (
            f"JAX has no device for JAX_PLATFORMS={asked}{reason}; set JAX_PLATFORMS=cpu, or unset"
            " it to use what is there; `cheem doctor` shows what is"
        )
    return text if isinstance(error, ValueError | OSError | FloatingPointError) else None


def _missing_platform() -> str | None:
    """The platforms that the user asks JAX for, if it finds no device of them."""
    jax = sys.modules.get("jax")
    if jax is None or not (asked := jax.config.jax_platforms):
        return None
    try:
        jax.devices()
    except (RuntimeError, AssertionError):
        return asked
    return None


@contextlib.contextmanager
def _reader_may_leave() -> Iterator[None]:
    """`cheem ... | head` ends without a word and with the status of SIGPIPE, as other commands do.

    Output that is closed from the start (`>&-`) is thrown away.
    """
    for number, name in ((1, "stdout"), (2, "stderr")):
        if getattr(sys, name) is None:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(
                nowhere, number
            )  # which would otherwise be the number of the next file that is opened
            setattr(sys, name, open(number, "w", closefd=False))  # noqa: SIM115, it stays open to the end
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        if not _reader_is_gone():
            raise
        os.dup2(
            os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno()
        )  # for what the buffer still holds
        raise SystemExit(128 + signal.SIGPIPE) from None


def _reader_is_gone() -> bool:
    """Whether standard output is a pipe that nobody reads; the broken one may also be a
    worker's."""
    try:
        poll = select.poll()
        poll.register(sys.stdout.fileno(), 0)
        return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))
    except (OSError, ValueError):  # no file at all
        return False


class Command(NamedTuple):
    """A sub-command; its module, in this folder, is imported when it is given."""

    name: str
    module: str
    settings: str
    """Dataclass of its options. If the arguments decide the defaults, its method `defaults` returns
    an instance."""
    function: str
    """Function of the settings that returns the exit status; None: 0."""
    help: str
    computes: bool = True
    """Whether the command compiles functions, which are then cached."""

    def load(self) -> tuple[Any, Callable[[Any], int | None]]:
        """The settings and the function. Raises ImportError if a package is missing."""
        module = importlib.import_module(f"cheem_jax.cli.{self.module}")
        return getattr(module, self.settings), getattr(module, self.function)


GROUPS: dict[str, tuple[Command, ...]] = {
    "use a memory": (
        Command(
            "learn",
            "memory",
            "Learn",
            "learn_tasks",
            "Learn tasks into a new or existing memory; images of earlier tasks are not needed.",
        ),
        Command(
            "predict",
            "ask",
            "Predict",
            "predict_images",
            "Predict the task and the class of images, and say which blocks answered.",
        ),
        Command(
            "evaluate",
            "ask",
            "Evaluate",
            "evaluate_memory",
            "Measure a memory's accuracy on labelled images of its tasks.",
        ),
        Command(
            "info",
            "info",
            "Info",
            "show_info",
            "Show a memory's tasks, their networks, the pool of experts, and sizes.",
            computes=False,
        ),
        Command(
            "forget",
            "memory",
            "Forget",
            "forget_tasks",
            "Delete tasks and the experts that only they use. This cannot be undone.",
        ),
        Command(
            "export",
            "memory",
            "Export",
            "export_memory",
            "Export one task's network, or the whole memory with its router.",
        ),
        Command(
            "serve",
            "ask",
            "Serve",
            "serve_memory",
            "Predict over HTTP, with a page for browsers (extra `serve`).",
        ),
        Command(
            "push",
            "memory",
            "Push",
            "push_memory",
            "Push a memory, which contains no image, to the Hugging Face hub.",
            computes=False,
        ),
        Command(
            "pull",
            "memory",
            "Pull",
            "pull_memory",
            "Pull a memory from the Hugging Face hub.",
            computes=False,
        ),
    ),
    "look": (
        Command(
            "report",
            "report",
            "Report",
            "write_report_page",
            "Draw runs and memories as one HTML page.",
            computes=False,
        ),
        Command(
            "watch",
            "report",
            "Watch",
            "watch_run",
            "Watch a run or memory that another process works on.",
            computes=False,
        ),
        Command(
            "tensorboard",
            "report",
            "Tensorboard",
            "write_tensorboard",
            "Write TensorBoard event files of runs or memories.",
            computes=False,
        ),
    ),
    "data and weights": (
        Command(
            "data list",
            "data",
            "List",
            "list_data",
            "List the tasks of the benchmarks: prepared or missing, licence, source.",
            computes=False,
        ),
        Command(
            "data prepare",
            "data",
            "Prepare",
            "prepare_data",
            "Download and prepare data sets, or say how to get them.",
            computes=False,
        ),
        Command(
            "data verify",
            "data",
            "Verify",
            "verify_data",
            "Decode every image; find broken files, copies across splits and wrong labels.",
            computes=False,
        ),
        Command(
            "data show",
            "data",
            "Show",
            "show_data",
            "Draw a contact sheet of each task, or a figure of a whole stream.",
            computes=False,
        ),
        Command(
            "convert",
            "convert",
            "Convert",
            "convert_weights",
            "Convert weights of a timm ViT.",
        ),
    ),
    "learn a stream": (
        Command(
            "run",
            "run",
            "Run",
            "run_seeds",
            "Learn a stream of tasks with CHEEM or another method; a stopped run resumes.",
        ),
        Command(
            "demo",
            "demo",
            "Demo",
            "learn_demo",
            "Learn six small bundled tasks; minutes on a laptop, no network.",
        ),
    ),
    "the rest": (
        Command(
            "doctor",
            "doctor",
            "Doctor",
            "examine",
            "Check packages, devices, memory and caches, and say how to repair them.",
            computes=False,
        ),
        Command(
            "completion",
            "arguments",
            "Completion",
            "print_completion",
            "Print a script with which a shell completes `cheem`.",
            computes=False,
        ),
    ),
}
"""Commands as the help shows them."""

COMMANDS: dict[str, Command] = {
    command.name: command for group in GROUPS.values() for command in group
}


def main() -> None:
    """The `cheem` command."""
    with _reader_may_leave():
        words = sys.argv[1:]
        if words[:1] == ["help"]:
            words = [*words[1:], "--help"]
        prefix = "data " if words[:1] == ["data"] else ""
        rest = words[1:] if prefix else words
        if not rest or rest[0] in ("-h", "--help", ALL):
            _print_help(prefix)
            return
        if words[0] in ("-V", "--version"):
            print(f"cheem_jax {__version__}")
            return
        name = prefix + rest[0]
        arguments = rest[1:]
        if name not in COMMANDS:
            print(f"error: {_unknown(name, prefix)}", file=sys.stderr)
            raise SystemExit(2)
        command = COMMANDS[name]
        # without a home folder it tells in several lines that it works all the same
        logging.getLogger("matplotlib").setLevel(logging.ERROR)
        with _failures_in_a_line():
            kind, function = command.load()
            defaults = kind.defaults(arguments) if hasattr(kind, "defaults") else kind
            settings = parse(defaults, arguments, prog=f"cheem {name}", description=command.help)
        run_command(
            function, settings, getattr(settings, "run_dir", None), computes=command.computes
        )


def _print_help(prefix: str) -> None:
    width = max(map(len, COMMANDS)) + 4
    most = columns()
    print(f"usage: cheem {prefix}COMMAND [--help]{'' if prefix else ' | cheem --version'}")
    if not prefix:
        print(f"\n{textwrap.fill(PURPOSE, most)}")
    for heading, group in GROUPS.items():
        shown = [command for command in group if command.name.startswith(prefix)]
        if shown:
            print("" if prefix else f"\n{heading}:")
        for command in shown:
            name = f"  {command.name}".ljust(width)
            print(
                textwrap.fill(
                    command.help, most, initial_indent=name, subsequent_indent=" " * width
                )
            )
    print(
        "\n"
        + textwrap.fill(
            "`cheem COMMAND --help` shows a command's options and their defaults.", most
        )
    )
    print(textwrap.fill(STATUS, most))


def _unknown(name: str, prefix: str) -> str:
    known = [command for command in COMMANDS if command.startswith(prefix)]
    last = name.removeprefix(prefix)
    # what lies below `data` is also found by its own word
    near = difflib.get_close_matches(name, known, n=1) or [
        command for command in known if difflib.get_close_matches(last, command.split()[-1:])
    ]
    nearest = f"nearest: {', '.join(near)}; " if near else ""
    return f"unknown command {name!r}; {nearest}expected one of: {', '.join(known)}"
