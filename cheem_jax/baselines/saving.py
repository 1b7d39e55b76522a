"""Checkpoints of the baselines: one directory per task; what is read back is restored under the directory's name."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from cheem_jax.run.checkpoint import load_task, load_tasks, named, save_task, saved_tasks, task_directory

T = TypeVar("T")
Restore = Callable[[Mapping[str, Any], Mapping[str, Any]], T]
"""Makes a method's state of a checkpoint's arrays and metadata."""


def save_and_restore(
    root: Path, task: tuple[int, str, Sequence[str]], arrays: Mapping[str, Any], restore: Restore[T], **meta: Any
) -> T:
    """Save a task, given by position, name and classes, below `root`, and restore it from disk as a resumed run would.

    `meta` are JSON values besides name and classes. Raises OSError if the checkpoint cannot be written.
    """
    index, name, classes = task
    directory = task_directory(root, index, name)
    save_task(directory, arrays, {"name": name, "classes": list(classes), **meta})
    return _restored(directory, load_task(directory), restore)


def restore_all(root: Path, restore: Restore[T]) -> list[T]:
    """Restore every task below `root`, in order; ValueError with the names of all corrupted checkpoints."""
    directories = saved_tasks(root)
    loaded = load_tasks(directories)
    return [_restored(directory, task, restore) for directory, task in zip(directories, loaded, strict=True)]


def restore_last(root: Path, restore: Restore[T]) -> T | None:
    """Restore the last task below `root`, for methods that store their whole state with each; None if there is none."""
    directories = saved_tasks(root)
    return _restored(directories[-1], load_task(directories[-1]), restore) if directories else None


def _restored(directory: Path, loaded: tuple[Mapping[str, Any], Mapping[str, Any]], restore: Restore[T]) -> T:
    with named(directory):
        return restore(*loaded)
