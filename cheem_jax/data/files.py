"""The image files of a folder or zip, as sorted relative names with a function that reads each."""

import contextlib
import functools
import os
import zipfile
from collections.abc import Callable
from pathlib import Path, PurePosixPath

IMAGE_SUFFIXES = frozenset(".jpg .jpeg .png .bmp .gif .webp .tif .tiff .ppm .pgm".split())
MAX_DEPTH = 6  # folders below the root that are looked into, so that a link to a parent ends
MAX_FILE_BYTES = 256 * 2**20

Reader = Callable[[], bytes]


def list_files(path: Path, stack: contextlib.ExitStack) -> dict[str, Reader]:
    """Every visible file by its name relative to `path`, sorted; a zip stays open until `stack` closes.

    Hidden files and `__MACOSX` are left out. Raises FileNotFoundError, or ValueError for a file that is
    no zip or a zip with members that no image set has.
    """
    if path.is_dir():
        files = _list_folder(path)
    elif path.is_file():
        files = _list_zip(path, stack)
    else:
        raise FileNotFoundError(f"{path}: no such folder or zip file")
    return {name: files[name] for name in sorted(files)}


def is_image(name: str) -> bool:
    return PurePosixPath(name).suffix.lower() in IMAGE_SUFFIXES


def is_hidden(part: str) -> bool:
    return part.startswith(".") or part == "__MACOSX"


def _list_folder(path: Path) -> dict[str, Reader]:
    files: dict[str, Reader] = {}
    for folder, subfolders, names in os.walk(path, followlinks=True):
        parts = Path(folder).relative_to(path).parts
        keep = [name for name in subfolders if not is_hidden(name)]
        subfolders[:] = keep if len(parts) < MAX_DEPTH else []
        for name in names:
            if not is_hidden(name):
                files["/".join((*parts, name))] = functools.partial(_read_file, Path(folder, name))
    return files


def _read_file(file: Path) -> bytes:
    size = file.stat().st_size
    if size > MAX_FILE_BYTES:
        raise ValueError(f"{file}: {size} bytes, at most {MAX_FILE_BYTES} are accepted")
    return file.read_bytes()


def _list_zip(path: Path, stack: contextlib.ExitStack) -> dict[str, Reader]:
    try:
        archive = stack.enter_context(zipfile.ZipFile(path))
    except Exception as error:  # damaged directories also raise OSError, struct.error, NotImplementedError
        raise ValueError(f"{path} is no readable zip file ({error}); expected a zip or a folder") from error
    files: dict[str, Reader] = {}
    for member in archive.infolist():
        if fault := _fault(member):
            raise ValueError(f"{path}: refused because of member {member.filename!r}: {fault}")
        if member.is_dir() or any(is_hidden(part) for part in member.filename.split("/")):
            continue
        if member.filename in files:
            raise ValueError(f"{path}: member {member.filename!r} occurs twice")
        files[member.filename] = functools.partial(_read_member, archive, member, path)
    return files


def _fault(member: zipfile.ZipInfo) -> str | None:
    """What makes a zip member unsafe or absurd, if anything."""
    parts = member.filename.removesuffix("/").split("/")
    if "\\" in member.filename or parts[0][1:2] == ":" or any(part in ("", ".", "..") for part in parts):
        return "its name is not a plain relative one"
    if member.flag_bits & 1:
        return "it is encrypted"
    if member.file_size > MAX_FILE_BYTES:
        return f"it unpacks to {member.file_size} bytes, at most {MAX_FILE_BYTES} are accepted"
    return None


def _read_member(archive: zipfile.ZipFile, member: zipfile.ZipInfo, path: Path) -> bytes:
    try:
        return archive.read(member)
    except Exception as error:  # checksum, compression method, cut-off file: zipfile and zlib raise many types
        raise ValueError(f"{path}: member {member.filename!r} cannot be read: {error}") from error
