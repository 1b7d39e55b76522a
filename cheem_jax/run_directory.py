"""A run directory belongs to one configuration, which is compared before going on, and to one process at a time."""

import contextlib
import json
import os
import shutil
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import filelock

from cheem_jax.atomic import write_atomically
from cheem_jax.report.earlier import check_run, completed
from cheem_jax.report.record import to_json

NAME, LOCK, OWNER = "config.json", ".lock", ".owner.json"
OURS = (f".{NAME}.", LOCK, OWNER, f".{OWNER}.", ".status.json", "..status.json.")


def claim(directory: Path, config: Mapping[str, Any]) -> bool:
    """Write `config.json`, or check that the one there says the same; True if a run is to be continued.

    Raises ValueError with every difference where the directory holds another run, or files of something else.
    """
    config = to_json(config)
    if (held := _held(directory)) is not None:
        _check_same(directory, held, config)
        return True
    refuse_foreign(directory)
    directory.mkdir(parents=True, exist_ok=True)
    write_atomically(directory / NAME, json.dumps(config, indent=1) + "\n")
    return False


def check_held(directory: Path, known: Mapping[str, Any]) -> None:
    """Raises ValueError where a run in the directory differs in what is known of another, before its data are read."""
    if (held := _held(directory)) is not None:
        _check_same(directory, {key: value for key, value in held.items() if key in known}, to_json(known))


def _held(directory: Path) -> dict[str, Any] | None:
    file = directory / NAME
    if not file.exists():
        return None
    try:
        held = json.loads(file.read_text())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is no JSON ({error}); choose another run directory") from error
    if not isinstance(held, dict):
        raise ValueError(f"{file} holds no JSON object; choose another run directory")
    return held


def _check_same(directory: Path, held: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    check_run(held, directory / NAME)
    # a setting that did not exist yet had the value of before in effect
    if differences := list(_differences(completed(held), completed(config))):
        raise ValueError(
            f"run directory {str(directory)!r} holds another run: {'; '.join(differences)}. "
            f"Choose another --run-dir, or give the settings that it was begun with"
        )


def refuse_foreign(directory: Path) -> None:
    """Raises ValueError where there is something else than a run; touches nothing."""
    if not directory.exists() or (directory / NAME).exists():
        return
    # a killed first write and the lock leave hidden files, which are no reason to refuse
    if not directory.is_dir() or any(not file.name.startswith(OURS) for file in directory.iterdir()):
        raise ValueError(
            f"{str(directory)!r} is no run directory (it has no {NAME}) and is not empty; choose another --run-dir"
        )


def check_space(directory: Path, needed: int, what: str) -> None:
    """Raises ValueError where the disk has less than `needed` bytes left."""
    free = shutil.disk_usage(directory).free
    if free < needed:
        raise ValueError(
            f"{what} may take {needed / 2**20:,.1f} MB on the disk, and {str(directory)!r} has {free / 2**20:,.1f} MB "
            f"left; free some and give the same command again, which goes on from here"
        )


@contextlib.contextmanager
def hold(directory: Path) -> Iterator[None]:
    """The directory, made if there is none, for this process alone. Raises ValueError naming the process that has it.

    Whoever learns there holds it first; who only looks does not. The system lets go of the lock with its process,
    however that ends.
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
        write_atomically(owner, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}) + "\n")
        yield
    finally:
        with contextlib.suppress(OSError):  # of a failing disk; the next owner writes it anew
            owner.unlink(missing_ok=True)
        lock.release()


def _owner(file: Path) -> str:
    try:
        told = json.loads(file.read_text())
        return f"process {told['pid']} on {told['host']}"
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return "another process"


def _differences(held: Any, wanted: Any, place: str = "") -> Iterator[str]:
    if isinstance(held, dict) and isinstance(wanted, dict):
        for key in dict.fromkeys((*held, *wanted)):
            inner = f"{place}.{key}" if place else key
            yield from _differences(held.get(key, _Missing), wanted.get(key, _Missing), inner)
    elif held != wanted:
        yield f"{place} is {_told(held)} there and {_told(wanted)} here"


class _Missing:
    """Stands for a setting that one side does not have."""


def _told(value: Any) -> str:
    return "missing" if value is _Missing else json.dumps(value)
