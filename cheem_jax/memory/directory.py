"""The files in the directory of a memory; changes are atomic.

    config.json                     settings, state, and the number of the valid generation
    backbone.safetensors            frozen backbone with its head and mean CLS tokens
    base/                           router statistics of the pretraining data, if the memory also
                                    predicts the classes of these data
    generation-0001/cheem/000-cats  one directory per task, as in a run
    metrics.jsonl                   record of the learned tasks and of accuracies
    evaluated.json                  latest accuracies, measured by `cheem evaluate`

Learning a task adds a directory. Forgetting or extending a task writes a new generation next to the
old generation, and then marks the new generation as valid in `config.json`. Unfinished files of a
killed process are removed by the next process that changes the memory.
"""

import contextlib
import dataclasses
import glob
import json
import os
import re
import shutil
import socket
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from cheem_jax.cheem.saved_memory import save_forgotten, save_memory_task
from cheem_jax.core.atomic import REFUSING, to_disk, write_atomically
from cheem_jax.core.paths import is_of_system
from cheem_jax.core.pool import InternalMemory
from cheem_jax.memory.contents import (
    FORMAT,
    MemoryConfig,
    checkpoint_folder,
    parse_config,
    read_config,
)
from cheem_jax.memory.forgetting import changed_tasks, without_task
from cheem_jax.report.memories import EVALUATED
from cheem_jax.report.status import lives
from cheem_jax.run.checkpoint import copy_task, saved_tasks
from cheem_jax.run.directory import LOCK, NAME, OURS, hold
from cheem_jax.run.record import Record, read, to_json
from cheem_jax.run.results import write_results

DERIVED = (
    ".status.json",
    EVALUATED,
    "answers.npz",
    "report.html",
    "figures",
    "tensorboard",
)
"""Files and folders that are derived from the record. They are removed when a task is forgotten,
because they contain names and classes of tasks."""


def write_config(directory: Path, config: MemoryConfig) -> None:
    """Replace `config.json` atomically."""
    values = {"format": FORMAT, **to_json(dataclasses.asdict(config))}
    write_atomically(directory / NAME, json.dumps(values, indent=1) + "\n")


def write_generation(
    directory: Path, config: MemoryConfig, before: InternalMemory, after: InternalMemory
) -> None:
    """Write the checkpoints of the next generation. The new checkpoints become valid when the
    caller writes the number of the new generation to `config.json`.

    Unchanged tasks share their files with the previous generation.
    """
    root = checkpoint_folder(directory, config.generation)
    new = checkpoint_folder(directory, config.generation + 1).parent
    shutil.rmtree(new, ignore_errors=True)  # left by a killed process
    changed = changed_tasks(before, after)
    with new_directory(new) as partial:
        new_root = partial / root.name
        new_root.mkdir()
        saved = saved_tasks(root)
        for number in range(after.next_number):
            if number in after.forgotten:
                save_forgotten(new_root, after, number)
            elif number in changed or number >= len(saved):  # an extended task gets a new number
                index = after.numbers.index(number)
                save_memory_task(new_root, after, index, config.method.ops.stored_rank)
            else:
                copy_task(saved[number], new_root / saved[number].name, _link)


def _link(source: str, target: str) -> None:
    """Hard-link a file of a task, or copy it if the file system does not support links. Links are
    safe, because files of saved tasks are never written again."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def remove_old_generations(directory: Path, generation: int) -> None:
    """Remove all generations except `generation`; folders with similar names are not touched."""
    valid = checkpoint_folder(directory, generation).parent.name
    for folder in list(directory.iterdir()):
        is_generation = re.fullmatch(
            r"generation-\d{4,}|\.generation-\d{4,}\.(.+\.)?\d+\.partial", folder.name
        )
        if is_generation and folder.name != valid:
            shutil.rmtree(folder)


def remove_forgotten(directory: Path, config: MemoryConfig, memory: InternalMemory) -> None:
    """Remove the tasks in `config.forgetting` from the record, and remove the files in `DERIVED`.

    `memory` is the memory without these tasks. Repeating the call changes nothing.
    """
    remove_temporary(directory)
    entries = read(directory)
    names = {(report["index"], report["name"]) for report in _reports(entries)}
    for task in config.forgetting or ():
        # An extended task has an old and a new report of the same name. After the old report is
        # removed, the new report can get the index of the old report. A repeated call must not
        # remove the new report.
        is_recorded = not task.get("extended") or len(names) > len(memory.tasks)
        if is_recorded and (task["index"], task["name"]) in names:
            entries = without_task(entries, task["index"], task["name"])
    if reports := _reports(entries):
        max(reports, key=lambda report: report["index"])["pool"] = memory.history()
    Record(directory).replace(entries)
    for name in DERIVED:
        remove(directory / name)
    write_results(directory)


def remove_temporary(directory: Path) -> None:
    """Remove the unfinished files of a killed process."""
    for file in directory.glob(".*.tmp"):
        if re.fullmatch(r"\..+\.\d+\.tmp", file.name):
            file.unlink(missing_ok=True)


def remove_interrupted(directory: Path, root: Path) -> None:
    """Remove the files with the name of an interrupted task, except `config.json`, the record and
    the rolling checkpoint. `root` is the folder of the checkpoints."""
    remove_temporary(directory)
    for name in (".status.json", "report.html"):
        remove(directory / name)
    for remainder in root.glob(".*.partial"):
        remove(remainder)


def _reports(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [entry["report"] for entry in entries if entry["event"] == "learned"]


def check_free(directory: Path) -> None:
    """Raise ValueError if the directory is a file or is not empty, so that no memory can be created
    in it."""
    if directory.exists() and not directory.is_dir():
        raise ValueError(f"{str(directory)!r} is a file; a memory is a folder")
    if directory.exists() and not all(is_of_system(file.name) for file in directory.iterdir()):
        raise ValueError(
            f"{str(directory)!r} exists and is not empty; choose another folder for the memory, or"
            " empty it"
        )


@contextlib.contextmanager
def new_directory(directory: Path) -> Iterator[Path]:
    """Yield a hidden folder. When the block ends, the folder's content becomes the content of
    `directory`.

    If the block fails, nothing is left behind, and new folders above `directory` are removed, too.
    If `directory` does not exist, the hidden folder is created next to it and renamed at the end.
    If `directory` exists, it can be a mount point, or its parent can be read-only. The hidden
    folder is therefore created inside `directory`, and its content is moved at the end,
    `config.json` last. Hidden folders of killed processes are removed.

    Raises ValueError if `directory` is not empty, cannot be created or is in use by another
    process, and OSError with the name of `directory` if the disk is full or read-only.
    """
    check_free(directory)
    directory = directory.resolve()
    exists = directory.is_dir()
    moved = list[Path]()
    # machines that share a disk can have processes of equal number
    name = f".{directory.name}.{socket.gethostname()}.{os.getpid()}.partial"
    partial = directory / name if exists else directory.with_name(name)
    with contextlib.ExitStack() as stack:
        stack.callback(remove_empty_folders, missing_folders(directory))
        try:
            if exists:  # another process can create a memory in the same folder
                stack.enter_context(hold(directory))
                check_free(directory)
            for folder in partial.parent.glob(f"{glob.escape(f'.{directory.name}.')}*.partial"):
                # inside `directory`, the lock shows that the process is dead
                if exists or folder == partial or _is_dead(folder, directory.name):
                    shutil.rmtree(folder, ignore_errors=True)
            partial.mkdir(parents=True)
        except OSError as error:
            if error.errno in REFUSING:
                raise OSError(error.errno, error.strerror, str(directory)) from error
            raise ValueError(
                f"{str(directory)!r} cannot be created ({error.strerror}); choose another folder"
            ) from error
        try:
            yield partial
            for path in (*partial.rglob("*"), partial):
                to_disk(path)
            if exists:
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
            for path in reversed(moved):
                remove(path)
            if exists:
                (directory / LOCK).unlink(missing_ok=True)
            raise
        finally:
            shutil.rmtree(partial, ignore_errors=True)


def missing_folders(directory: Path) -> list[Path]:
    """Return the folders above `directory` that do not exist, the innermost first."""
    return [folder for folder in directory.parents if not folder.exists()]


def remove_empty_folders(folders: Iterable[Path]) -> None:
    """Remove those of `folders` that are empty, in their order."""
    for folder in folders:
        with contextlib.suppress(OSError):
            folder.rmdir()


def _is_dead(partial: Path, name: str) -> bool:
    """Return whether `partial` is the hidden folder for `name` of a process of this machine that
    has ended."""
    ours = re.escape(f".{name}.{socket.gethostname()}.")
    pid = re.fullmatch(rf"{ours}(\d+)\.partial", partial.name)
    with contextlib.suppress(OSError):
        return pid is not None and not lives(int(pid[1]), partial.stat().st_mtime)
    return False


def remove_empty(directory: Path) -> None:
    """Remove a memory that never learned or began a task. A memory that another process has locked
    stays, because that process can learn a task."""
    with contextlib.suppress(ValueError), hold(directory):
        config = parse_config(read_config(directory), directory)
        if not config.num_learned and config.learning is None:
            remove_memory(directory)


def remove_memory(directory: Path) -> None:
    """Remove a memory. If the folder contains hidden files of other software, these files and the
    folder stay."""
    (directory / NAME).unlink(missing_ok=True)  # without this file, the folder is not a memory
    for path in list(directory.iterdir()):
        if path.name.startswith(OURS) or not is_of_system(path.name):
            remove(path)
    with contextlib.suppress(OSError):
        directory.rmdir()


def remove(path: Path) -> None:
    """Remove a file, or a folder with its content, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
