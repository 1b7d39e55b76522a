"""Run directories. A run directory belongs to one configuration, and at most one process uses it at
a time."""

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
from cheem_jax.run.differences import find_differences, summary
from cheem_jax.run.record import read_object, to_json

NAME = "config.json"
LOCK = ".lock"
OWNER = ".owner.json"
OURS = (f".{NAME}.", LOCK, OWNER, f".{OWNER}.", ".status.json", "..status.json.")
"""Prefixes of the hidden files that this library writes."""


def claim(directory: Path, config: Mapping[str, Any]) -> bool:
    """Write `config.json`, or compare the existing file with `config`. Return True if the directory
    already contained this run.

    Raises ValueError if the directory contains other files or a run with other settings; the
    message contains the first setting that differs.
    """
    if (directory / NAME).exists():
        check_settings(directory, config, is_whole=True)
        return True
    refuse_foreign(directory)
    directory.mkdir(parents=True, exist_ok=True)
    write_atomically(directory / NAME, json.dumps(to_json(config), indent=1) + "\n")
    return False


def check_settings(directory: Path, config: Mapping[str, Any], *, is_whole: bool = False) -> None:
    """Raise ValueError if the directory contains a run with other settings.

    If `is_whole` is false, `config` contains only a part of the settings, because the other
    settings are unknown until the data are read. In this case, only the keys of `config` are
    compared.
    """
    if not (directory / NAME).exists():
        return
    recorded = read_object(directory / NAME)
    if not is_whole:
        recorded = {key: value for key, value in recorded.items() if key in config}
    # An earlier version did not record the router (only its weights) and the measured split (only
    # the fingerprint of its images).
    is_same_data = recorded.get("data_sha256") == to_json(config.get("data_sha256"))
    absent = {"router", *(["measured_on"] if is_same_data else [])} - recorded.keys()
    config = {key: value for key, value in config.items() if key not in absent}
    differences = find_differences(recorded, to_json(config))
    # images of another split have other fingerprints, so the split is the cause
    if differences := sorted(differences, key=lambda leaf: leaf.place[0] != "measured_on"):
        names = {leaf.place[0] for leaf in differences}
        is_data = "data_sha256" in names and "measured_on" not in names
        data = "; streamed images need unchanged files and --images.keep stream" * is_data
        raise ValueError(
            f"run directory {str(directory)!r} contains another run:"
            f" {summary(differences, 'settings')}. Choose another --run-dir, or use the"
            f" settings of that run{data}"
        )


def refuse_foreign(directory: Path) -> None:
    """Raise ValueError if the directory is neither empty nor a run directory."""
    if not directory.exists() or (directory / NAME).exists():
        return
    # A process that was killed before it wrote `config.json` leaves only hidden files.
    if not directory.is_dir() or not all(is_of_system(file.name) for file in directory.iterdir()):
        raise ValueError(
            f"{str(directory)!r} is not a run directory (it has no {NAME}) and is not empty; choose"
            " another --run-dir"
        )


def check_space(directory: Path, needed: int, what: str) -> None:
    """Raise ValueError if the disk has less than `needed` free bytes; `what` is the subject of the
    message."""
    free = shutil.disk_usage(directory).free
    if free < needed:
        raise ValueError(
            f"{what} needs at most {needed / 2**20:,.1f} MB on disk (with rolling checkpoints,"
            f" which are removed later, results and figures), but {str(directory)!r} has only"
            f" {free / 2**20:,.1f} MB; free disk space, and repeat the command to resume"
        )


@contextlib.contextmanager
def hold(directory: Path) -> Iterator[None]:
    """Lock a directory for this process, and create it if it does not exist.

    Processes that only read need no lock. Raises ValueError if another process has locked the
    directory; the message identifies that process. The system releases the lock when the process
    ends.
    """
    refuse_foreign(directory)
    directory.mkdir(parents=True, exist_ok=True)
    owner = directory / OWNER
    # A soft lock is a plain file, which would remain if its process is killed.
    lock = filelock.FileLock(directory / LOCK, fallback_to_soft=False)
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        raise ValueError(
            f"{str(directory)!r} is in use by {_owner(owner)}; wait for the process, or choose"
            " another folder"
        ) from None
    try:
        write_atomically(
            owner, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}) + "\n"
        )
        yield
    finally:
        with contextlib.suppress(OSError):  # the disk can fail; the next owner replaces the file
            owner.unlink(missing_ok=True)
        lock.release()


def _owner(file: Path) -> str:
    try:
        owner = read_object(file)
        return f"process {owner['pid']} on {owner['host']}"
    except (OSError, ValueError, KeyError):
        return "another process"
