"""The files of a folder or zip, as sorted relative names, and reading the images among them."""

import hashlib
import os
import threading
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path, PurePosixPath
from typing import Protocol, runtime_checkable

IMAGE_SUFFIXES = frozenset(".jpg .jpeg .png .bmp .gif .webp .tif .tiff .ppm .pgm".split())
MAX_DEPTH = 6  # folders below the root that are looked into, so that a link to a parent ends
MAX_FILE_BYTES = 256 * 2**20


@runtime_checkable
class Encoded(Protocol):
    """Image files in a fixed order. They pickle, so that worker processes can read them as well."""

    def __len__(self) -> int: ...

    def key(self, row: int) -> str:
        """A file's name, unique in its task and the same on every machine."""
        ...

    def where(self, row: int) -> str:
        """The same file for people who look for it on this machine."""
        ...

    def read(self, row: int) -> bytes:
        """A file's bytes; ValueError or OSError naming the file where they cannot be had."""
        ...


class FolderFiles:
    """Files by their names relative to a folder."""

    def __init__(self, root: Path, names: Sequence[str]):
        self.root, self.names = root, list(names)

    def __len__(self) -> int:
        return len(self.names)

    def key(self, row: int) -> str:
        return self.names[row]

    def where(self, row: int) -> str:
        return str(self.root / self.names[row])

    def read(self, row: int) -> bytes:
        file = self.root / self.names[row]
        size = file.stat().st_size
        if size > MAX_FILE_BYTES:
            raise ValueError(f"{file}: {size} bytes, at most {MAX_FILE_BYTES} are accepted")
        return file.read_bytes()


class ZipFiles:
    """Members of a zip file below `root` ("" or "folder/"); every thread and process that reads opens it for itself."""

    def __init__(self, path: Path, names: Sequence[str], root: str):
        self.path, self.names, self.root = path, list(names), root
        self._mine = threading.local()

    def __reduce__(self):
        return ZipFiles, (self.path, self.names, self.root)

    def __len__(self) -> int:
        return len(self.names)

    def key(self, row: int) -> str:
        return self.names[row]

    def where(self, row: int) -> str:
        return f"{self.path}/{self.root}{self.names[row]}"

    def read(self, row: int) -> bytes:
        try:
            if not hasattr(self._mine, "archive"):
                self._mine.archive = _Archive(self.path)
            return self._mine.archive.read(self.root + self.names[row])
        except Exception as error:  # checksum, compression method, cut-off file: zipfile and zlib raise many types
            raise ValueError(f"{self.where(row)} cannot be read: {error}") from error


class _Archive(zipfile.ZipFile):
    """Closes its file when its thread has ended and nobody holds it any more."""

    def __del__(self):
        self.close()


def files_of(path: Path, names: Sequence[str], root: str = "") -> FolderFiles | ZipFiles:
    """Named files below `root` ("" or "folder/") of a folder or zip that `list_files` has checked."""
    return FolderFiles(path / root, names) if path.is_dir() else ZipFiles(path, names, root)


def stamp_of(files: Iterable[Path]) -> str:
    """Changes when one of the files changes in size or time."""
    digest = hashlib.sha256()
    for status in map(os.stat, files):
        digest.update(f"{status.st_size} {status.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def list_files(path: Path) -> list[str]:
    """Names of all visible files relative to `path`, sorted.

    Hidden files and `__MACOSX` are left out. Raises FileNotFoundError, or ValueError for a file that is
    no zip or a zip with members that no image set has.
    """
    if path.is_dir():
        return sorted(_list_folder(path))
    if path.is_file():
        return sorted(_list_zip(path))
    raise FileNotFoundError(f"{path}: no such folder or zip file")


def is_image(name: str) -> bool:
    return PurePosixPath(name).suffix.lower() in IMAGE_SUFFIXES


def is_hidden(part: str) -> bool:
    return part.startswith(".") or part == "__MACOSX"


def _list_folder(path: Path) -> Iterable[str]:
    for folder, subfolders, names in os.walk(path, followlinks=True):
        parts = Path(folder).relative_to(path).parts
        keep = [name for name in subfolders if not is_hidden(name)]
        subfolders[:] = keep if len(parts) < MAX_DEPTH else []
        yield from ("/".join((*parts, name)) for name in names if not is_hidden(name))


def _list_zip(path: Path) -> set[str]:
    try:
        archive = zipfile.ZipFile(path)
    except Exception as error:  # damaged directories also raise OSError, struct.error, NotImplementedError
        raise ValueError(f"{path} is no readable zip file ({error}); expected a zip or a folder") from error
    files: set[str] = set()
    with archive:
        for member in archive.infolist():
            if fault := _fault(member):
                raise ValueError(f"{path}: refused because of member {member.filename!r}: {fault}")
            if member.is_dir() or any(is_hidden(part) for part in member.filename.split("/")):
                continue
            if member.filename in files:
                raise ValueError(f"{path}: member {member.filename!r} occurs twice")
            files.add(member.filename)
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
