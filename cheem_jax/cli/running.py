"""Run a command, and turn bad input, full disks, Ctrl-C and closed pipes into one line and an exit
status."""

import codecs
import contextlib
import errno
import io
import os
import select
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from cheem_jax.core.atomic import REFUSING
from cheem_jax.core.interruption import Stopped
from cheem_jax.core.paths import printable, shown

Settings = TypeVar("Settings")


def run_command(
    command: Callable[[Settings], int | None],
    settings: Settings,
    directory: Path | None = None,
    *,
    computes: bool = True,
) -> None:
    """Run a command; exit with SystemExit if it fails or returns a status other than 0.

    `directory` is the folder in which the command writes and resumes; `computes` enables the cache
    of compiled functions. If a process of a job fails, it ends immediately, so that the other
    processes do not wait for it.
    """
    try:
        with errors_in_a_line(directory), output_handled():
            # the loaders report large images and corrupted EXIF data themselves
            warnings.filterwarnings("ignore", message=r"Image size \(\d+ pixels\) exceeds limit")
            warnings.filterwarnings("ignore", module=r"PIL\.TiffImagePlugin")
            if computes:
                _cache_compiled_functions()
            status = command(settings)
        if status:
            raise SystemExit(status)
    except BaseException as error:
        if (hosts := sys.modules.get("cheem_jax.engine.hosts")) is not None:
            hosts.leave(error)
        raise


def _cache_compiled_functions() -> None:
    # imports JAX, which some commands do not need
    from cheem_jax.engine.compilation import NotCached, enable_cache, reset_strict_options

    for note in reset_strict_options():
        print(f"note: {note}", file=sys.stderr)
    try:
        enable_cache()
    except NotCached as error:
        print(f"note: {error}; they are compiled again in every run", file=sys.stderr)


@contextlib.contextmanager
def errors_in_a_line(directory: Path | None = None) -> Iterator[None]:
    """Replace expected errors and Ctrl-C with one printed line and SystemExit. Unexpected errors
    keep their traceback.

    `directory` is mentioned after Ctrl-C and in errors without a file name.
    """
    try:
        yield
    except KeyboardInterrupt as stop:
        note = ""
        number = stop.signal_number if isinstance(stop, Stopped) else signal.SIGINT
        if directory is not None and isinstance(stop, Stopped):
            note = f" In {shown(directory)} {stop}; the same command resumes from there."
        elif directory is not None and directory.exists():
            note = f" Finished tasks are in {shown(directory)}; the same command resumes."
        print(printable(f"\nstopped.{note}"), file=sys.stderr)
        raise SystemExit(128 + number) from None
    except Exception as error:
        if (sentence := _sentence(error, directory)) is None:
            raise
        print(printable(f"error: {sentence}"), file=sys.stderr)
        for line in getattr(error, "advice", ()):
            print(printable(f"  {line}"), file=sys.stderr)
        raise SystemExit(2) from error


def _sentence(error: Exception, directory: Path | None) -> str | None:
    """Return the line to print. None means that the error is raised again: it is a bug in this
    library, or a closed pipe."""
    text = f"{' '.join(str(error).split()):.4000}"
    jax = sys.modules.get("jax")
    match error:
        case MemoryError():
            pass
        case ImportError(name=None):  # a package of an extra; the message says how to install it
            return text
        case ImportError(name=str(name)):
            is_ours = name.split(".")[0] == "cheem_jax"
            return None if is_ours else f"{text}; `cheem doctor` says how to install it"
        case BrokenPipeError() if _output_is_closed():
            return None
        case OSError(errno=number) if number in REFUSING:
            room = "" if number == errno.EROFS else "free disk space and repeat the command, or "
            return (
                f"{error.filename or directory or 'a file'} cannot be written: {error.strerror};"
                f" {room}choose a folder on another disk; saved files are kept"
            )
        case ValueError() | OSError() | FloatingPointError():
            return text
        case _ if jax is None:
            return None
        case jax.errors.JaxRuntimeError() if "RESOURCE_EXHAUSTED" in text:
            pass
        case RuntimeError() | AssertionError() if platforms := _missing_platforms():
            reason = f" ({text:.300})" if text else ""
            return (
                f"JAX has no device for JAX_PLATFORMS={platforms}{reason}; set JAX_PLATFORMS=cpu,"
                " or unset it; `cheem doctor` shows the devices"
            )
        case _:
            return None
    reason = str(error).splitlines()[0] if text else "no memory left"
    return (
        f"out of memory ({reason}); try a smaller batch size, less memory for the device's cache"
        " (memory_gb) or a smaller image size; finished tasks are safe"
    )


def _missing_platforms() -> str | None:
    """Return the value of JAX_PLATFORMS if JAX has no device for it, else None."""
    jax = sys.modules["jax"]
    try:
        jax.devices()
    except (RuntimeError, AssertionError):
        return jax.config.jax_platforms
    return None


@contextlib.contextmanager
def output_handled() -> Iterator[None]:
    """End `cheem ... | head` silently with the status of SIGPIPE. Discard output to a stream that
    was closed before the start (`>&-`). Print names that are invalid text as their bytes, and
    characters that the encoding of standard output lacks as escape sequences.

    Raises ValueError if the output cannot be written, such as to a full disk.
    """
    for number, name in ((1, "stdout"), (2, "stderr")):
        if getattr(sys, name) is None:
            # otherwise, the next opened file would get the number of the closed stream
            os.dup2(os.open(os.devnull, os.O_WRONLY), number)
            setattr(sys, name, os.fdopen(number, "w", closefd=False))
    if isinstance(sys.stdout, io.TextIOWrapper):
        is_utf8 = codecs.lookup(sys.stdout.encoding).name == "utf-8"
        sys.stdout.reconfigure(errors="surrogateescape" if is_utf8 else "backslashreplace")
    try:
        yield
    except BrokenPipeError:
        if not _output_is_closed():
            raise
        raise _closed() from None
    finally:
        _flush()


def _flush() -> None:
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        raise _closed() from None
    except OSError as error:
        _discard()
        raise ValueError(
            f"standard output cannot be written ({error.strerror}); free disk space, or redirect"
            " the output to a file on another disk"
        ) from error


def _closed() -> SystemExit:
    _discard()
    return SystemExit(128 + signal.SIGPIPE)


def _discard() -> None:
    """Discard the buffer of standard output and later output, so that exiting does not fail."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _output_is_closed() -> bool:
    """Return whether the reader of standard output has closed it. BrokenPipeError alone does not
    show this, because the pipe of a worker process can also raise it."""
    try:
        poll = select.poll()
        poll.register(sys.stdout.fileno(), 0)
        return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))
    except (OSError, ValueError):  # standard output is not a file
        return False
