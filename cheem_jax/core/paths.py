"""Paths as people give them. Each is made absolute where it enters, so that nothing below sees a relative one."""

import dataclasses
import os
from pathlib import Path
from typing import Any, TypeVar

Settings = TypeVar("Settings")


def absolute(path: str | os.PathLike[str]) -> Path:
    """The same place from the root on: `~` is expanded; `.`, `..` and trailing slashes are resolved.

    A symbolic link keeps its name unless `..` follows somewhere: only the file system knows what that means behind a
    link. Nothing has to exist there.
    """
    text = os.path.expanduser(os.fspath(path))
    return Path(os.path.realpath(text) if ".." in Path(text).parts else os.path.abspath(text))


def with_absolute_paths(settings: Settings) -> Settings:
    """A settings dataclass whose `Path` fields are absolute, those in tuples and in nested dataclasses included."""
    changes = {}
    for field in dataclasses.fields(settings):  # pyright: ignore[reportArgumentType]
        value = getattr(settings, field.name)
        if field.init and (changed := _absolute_paths_in(value)) != value:
            changes[field.name] = changed
    return dataclasses.replace(settings, **changes) if changes else settings  # pyright: ignore[reportArgumentType]


def _absolute_paths_in(value: Any) -> Any:
    if isinstance(value, Path):
        return absolute(value)
    if isinstance(value, tuple) and any(isinstance(one, Path) for one in value):
        return tuple(map(_absolute_paths_in, value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return with_absolute_paths(value)
    return value


def shown(path: Path) -> str:
    """An absolute path as a person would type it here: relative where it lies below the working directory."""
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) and path != here else str(path)
