"""A run directory belongs to one configuration, which is compared on resuming, and to one process
at a time."""

import contextlib
import json
import os
import shutil
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import filelock

from cheem_jax.core.atomic import write_atomically
from cheem_jax.core.paths import is_of_system
from cheem_jax.run.differences import settings_apart, summary
from cheem_jax.run.record import read_object, to_json

NAME = "config.json"
LOCK = ".lock"
OWNER = ".owner.json"
OURS = (f".{NAME}.", LOCK, OWNER, f".{OWNER}.", ".status.json", "..status.json.")


def claim(
    directory: Path, config: Mapping[str, Any], defaults: Mapping[str, Any] | None = None
) -> bool:
    """Write `config.json`, or check that the one there has the same settings; True if a run is to
    be resumed.

    `defaults` are those of `settings_apart`. Raises ValueError naming the first setting that
    differs where the directory contains another run, or files of something else.
    """
    config = to_json(config)
    if (directory / NAME).exists():
        _check_same(directory, read_object(directory / NAME), config, defaults)
        return True
    refuse_foreign(directory)
    directory.mkdir(parents=True, exist_ok=True)
    write_atomically(directory / NAME, json.dumps(config, indent=1) + "\n")
    return False


def check_held(
    directory: Path, known: Mapping[str, Any], defaults: Mapping[str, Any] | None = None
) -> None:
    """Raises ValueError where a run in the directory differs in what is known of another, before
    its data are read."""
    if (directory / NAME).exists():
        held = {key: value for key, value in read_object(directory / NAME).items() if key in known}
        _check_same(directory, held, to_json(known), defaults)


def _check_same(
    directory: Path,
    held: Mapping[str, Any],
    config: Mapping[str, Any],
    defaults: Mapping[str, Any] | None,
) -> None:
    if found := settings_apart(held, config, to_json(defaults)):
        raise ValueError(
            f"run directory {str(directory)!r} contains another run: {summary(found, 'settings')}. "
            "Choose another --run-dir, or give the settings that it was begun with"
        )


def refuse_foreign(directory: Path) -> None:
    """Raises ValueError where there is something else than a run; touches nothing."""
    if not directory.exists() or (directory / NAME).exists():
        return
    # a killed first write and the lock leave hidden files, which are no reason to refuse
    if not directory.is_dir() or not all(is_of_system(file.name) for file in directory.iterdir()):
        raise ValueError(
            f"{str(directory)!r} is not a run directory (it has no {NAME}) and is not empty; choose"
            " another --run-dir"
        )


def check_space(directory: Path, needed: int, what: str) -> None:
    """Raises ValueError where the disk has less than `needed` bytes left."""
    free = shutil.disk_usage(directory).free
    if free < needed:
        raise ValueError(
            f"{what} takes at most {needed / 2**20:,.1f} MB on the disk (rolling checkpoints, which"
            f" go when it is learned, results and figures), and {str(directory)!r} has"
            f" {free / 2**20:,.1f} MB left; free some and give the same command again, which"
            " resumes from here"
        )


@contextlib.contextmanager
def hold(directory: Path) -> Iterator[None]:
    """The directory, made if there is none, for this process alone. Raises ValueError naming the
    process that has it.

    Only a process that writes locks it. The system releases the lock when the process ends, however
    that happens.
    """
    refuse_foreign(directory)
    directory.mkdir(parents=True, exist_ok=True)
    owner = directory / OWNER
    # a soft lock, which is only a file, would outlive its process
    lock = filelock.FileLock(directory / LOCK, fallback_to_soft=False)
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        raise ValueError(
            f"{str(directory)!r} is in use by {_owner(owner)}; wait for it or choose another folder"
        ) from None
    try:
        write_atomically(
            owner, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}) + "\n"
        )
        yield
    finally:
        with contextlib.suppress(OSError):  # of a failing disk; the next owner writes it again
            owner.unlink(missing_ok=True)
        lock.release()


def _owner(file: Path) -> str:
    try:
        owner = json.loads(file.read_text())
        return f"process {owner['pid']} on {owner['host']}"
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return "another process"
