"""The directory of a memory that a person keeps: complete in itself, and changed as a whole or not
at all.

    config.json                     what the memory is, and the generation that counts
    backbone.safetensors            the frozen backbone with its head and mean CLS tokens of its
    data base/                           where the pretraining data lie among features, if their
    classes are kept as a target generation-0001/cheem/000-cats  one directory per task, as in a run
    metrics.jsonl                   how each task was learned and what was measured evaluated.json
    what `cheem evaluate` measured since then

Learning adds a directory. Forgetting or extending a task writes a new generation beside the old one
and then says in `config.json` that it counts; whatever a killed process leaves is taken away by the
next one that writes.
"""

import contextlib
import dataclasses
import glob
import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from cheem_jax.cheem.saved_memory import save_forgotten, save_memory_task
from cheem_jax.core.atomic import REFUSING, to_disk, write_atomically
from cheem_jax.core.paths import is_of_system
from cheem_jax.core.pool import InternalMemory
from cheem_jax.memory.contents import FORMAT, MemoryConfig, checkpoints_of
from cheem_jax.memory.forgetting import changed_tasks
from cheem_jax.run.checkpoint import copy_task, saved_tasks
from cheem_jax.run.directory import NAME, OURS
from cheem_jax.run.record import to_json


def write_config(directory: Path, config: MemoryConfig) -> None:
    """Replace `config.json`, whole or not at all."""
    values = {"format": FORMAT, **to_json(dataclasses.asdict(config))}
    write_atomically(directory / NAME, json.dumps(values, indent=1) + "\n")


def write_generation(
    directory: Path, config: MemoryConfig, before: InternalMemory, after: InternalMemory
) -> None:
    """The next generation, complete and on the disk; it counts once `config.json` says so.

    Tasks that did not change share their files with the generation before.
    """
    old, new = (checkpoints_of(directory, config.generation + more) for more in (0, 1))
    shutil.rmtree(new, ignore_errors=True)  # of a process that was killed before it counted
    changed = changed_tasks(before, after)
    with made_whole(new) as partial:
        root = partial / "cheem"
        root.mkdir()
        saved = saved_tasks(old / "cheem")
        for number in range(after.next_number):
            if number in after.forgotten:
                save_forgotten(root, after, number)
            elif number in changed or number >= len(saved):  # which was extended
                save_memory_task(root, after, after.numbers.index(number), config.method.ops.rank)
            else:
                copy_task(saved[number], root / saved[number].name, _link)


def _link(source: str, target: str) -> None:
    """Files of a task are never written again, so two generations may share them; some file systems
    have no links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def remove_old_generations(directory: Path, generation: int) -> None:
    """Take away every generation that does not count, and nothing that is called almost so."""
    counting = checkpoints_of(directory, generation).name
    for folder in list(directory.iterdir()):
        is_one = re.fullmatch(r"generation-\d{4,}|\.generation-\d{4,}\.\d+\.partial", folder.name)
        if is_one and folder.name != counting:
            shutil.rmtree(folder)


def check_free(directory: Path) -> None:
    """Raises ValueError where something stands in the way of a new memory."""
    if directory.exists() and not directory.is_dir():
        raise ValueError(f"{str(directory)!r} is a file; a memory is a folder")
    if directory.exists() and not all(is_of_system(file.name) for file in directory.iterdir()):
        raise ValueError(
            f"{str(directory)!r} exists and is not empty; choose another folder for the memory, or"
            " empty it"
        )


@contextlib.contextmanager
def made_whole(directory: Path) -> Iterator[Path]:
    """A hidden folder to fill, whose content is the directory's at the end, on the disk; nothing is
    left if that fails.

    A new directory appears by one rename. One that is there may be a mount point, or below a folder
    that cannot be written: it is filled from a hidden folder inside, `config.json` last, without
    which nothing opens. Raises ValueError where there is something already, OSError naming the
    directory if it cannot be made.
    """
    check_free(directory)
    directory = directory.resolve()
    is_there = directory.is_dir()
    moved = list[Path]()
    name = f".{directory.name}.{os.getpid()}.partial"
    partial = directory / name if is_there else directory.with_name(name)
    for left in (
        directory.glob(f"{glob.escape(f'.{directory.name}.')}*.partial") if is_there else [partial]
    ):
        shutil.rmtree(left, ignore_errors=True)  # of a process that was killed
    try:
        partial.mkdir(parents=True)
    except OSError as error:
        way_out = (
            "" if error.errno in REFUSING else ": nothing can be made there; choose another folder"
        )
        raise OSError(error.errno, f"{error.strerror}{way_out}", str(directory)) from error
    try:
        yield partial
        for place in (*partial.rglob("*"), partial):
            to_disk(place)
        if is_there:
            for entry in sorted(partial.iterdir(), key=lambda entry: entry.name == NAME):
                if entry.name == NAME:
                    to_disk(directory)
                moved.append(directory / entry.name)
                os.rename(entry, moved[-1])
            to_disk(directory)
        else:
            os.replace(partial, directory)
            to_disk(directory.parent)
    except BaseException:
        for place in reversed(moved):
            remove(place)
        raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def take_away(directory: Path) -> None:
    """Remove a memory; a folder that has to stay, such as a mount point, keeps foreign hidden files
    alone."""
    (directory / NAME).unlink(missing_ok=True)  # from here on it is none
    for place in list(directory.iterdir()):
        if place.name.startswith(OURS) or not is_of_system(place.name):
            remove(place)
    with contextlib.suppress(OSError):
        directory.rmdir()


def remove(place: Path) -> None:
    """Remove a file or a folder with all that is in it, if it is there."""
    if place.is_dir() and not place.is_symlink():
        shutil.rmtree(place)
    else:
        place.unlink(missing_ok=True)
