"""Make user-supplied paths absolute when settings are read, so that all other code uses absolute
paths. Remove control characters from names in messages."""

import dataclasses
import os
import re
from pathlib import Path
from typing import Any, TypeVar

_Settings = TypeVar("_Settings")

_URL = re.compile(r"([a-z][a-z0-9+.-]+):/+(.*)", re.IGNORECASE | re.DOTALL)
"""Pattern of a URL. A single slash after the colon matches too, because `Path` merges two slashes.
A single letter before the colon does not match, because it is a Windows drive."""
_CONTROLS = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
"""Pattern of the control characters other than tab and line feed, and of the characters that change
the direction of the text after them."""


def absolute(path: str | os.PathLike[str], start: Path | None = None) -> Path:
    """Convert a path to an absolute path. `~` is expanded; `.`, `..` and trailing slashes are
    resolved.

    Symbolic links are resolved only if the path contains `..`, whose meaning after a link depends
    on the file system. The path does not have to exist. Relative paths are relative to `start`, by
    default the working directory. Raises ValueError for an empty path, for a URL, and for `~` if
    the home folder is unknown.
    """
    text = os.fspath(path)
    if not text:
        raise ValueError(
            "'' is an empty path; give a file or folder, or . for the working directory"
        )
    if url := _URL.fullmatch(text):
        raise ValueError(_refusal(url[1].lower(), url[2]))
    expanded = os.path.expanduser(text)
    if expanded.split(os.sep)[0] == "~":
        raise ValueError(
            f"{text!r}: the home folder is unknown (HOME is not set, and the system does not know"
            " this user); set HOME, or give the full path"
        )
    full = os.path.join(start or "", expanded)
    return Path(os.path.realpath(full) if ".." in Path(full).parts else os.path.abspath(full))


def _refusal(scheme: str, rest: str) -> str:
    if scheme == "file":
        return f"'file:///{rest}' is a URL, expected a path; give '/{rest}'"
    if scheme == "hf":
        return (
            f"'hf://{rest}' is a URL; a data set of the Hugging Face hub is written hf:OWNER/NAME"
        )
    return (
        f"'{scheme}://{rest}' is a URL; expected a file or folder of this machine: download it, or"
        " mount the bucket and give its folder"
    )


SYSTEM_FOLDERS = frozenset(
    (
        "__macosx",
        "__pycache__",
        "@eadir",
        "@recycle",
        "@recently-snapshot",
        "#recycle",
        "#snapshot",
        "$recycle.bin",
        "system volume information",
        "lost+found",
        "network trash folder",
        "temporary items",
    )
)
"""Folders that network storage, file systems and archivers create for copies, thumbnails or deleted
files."""
_SYSTEM_FILES = frozenset(("desktop.ini", "thumbs.db", "ehthumbs.db", "icon\r"))


def is_of_system(name: str) -> bool:
    """Return whether `name` is the name of a hidden file or folder, or of a file or folder that an
    operating system or an editor creates."""
    return (
        name.startswith(".")
        or name.endswith("~")
        or name.casefold() in SYSTEM_FOLDERS | _SYSTEM_FILES
    )


def user_cache() -> Path:
    """Return the folder for the caches of this library. Raises ValueError if the home folder is
    unknown."""
    return absolute(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "cheem_jax"


def with_absolute_paths(settings: _Settings) -> _Settings:
    """Make all paths of a settings dataclass absolute, including those in tuples and nested
    dataclasses."""
    changes = {}
    for field in dataclasses.fields(settings):  # pyright: ignore[reportArgumentType]
        value = getattr(settings, field.name)
        if field.init and (changed := _absolute_paths_in(value)) != value:
            changes[field.name] = changed
    return dataclasses.replace(settings, **changes) if changes else settings  # pyright: ignore[reportArgumentType]


def _absolute_paths_in(value: Any) -> Any:
    if isinstance(value, Path):
        return absolute(value)
    if isinstance(value, tuple):
        return tuple(map(_absolute_paths_in, value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return with_absolute_paths(value)
    return value


def printable(text: str) -> str:
    """Remove control characters. The names of classes, tasks and files can be from untrusted
    sources, and a terminal would execute escape sequences in the names."""
    return _CONTROLS.sub("", text)


def shown(path: Path) -> str:
    """Format a path for messages: relative if it is inside the working directory."""
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) and path != here else str(path)
