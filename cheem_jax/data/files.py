"""The files of a folder or zip, as sorted relative names, and reading the images among them."""

import hashlib
import os
import stat
import threading
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import NoReturn, Protocol, runtime_checkable

IMAGE_SUFFIXES = frozenset(".jpg .jpeg .png .bmp .gif .webp .tif .tiff .ppm .pgm".split())
MAX_DEPTH = 6  # folders below the root that are looked into, so that a link to a parent ends
MAX_FILE_BYTES = 256 * 2**20
MAX_FILES = 5_000_000  # in one folder or archive; ImageNet has 1.4 million
SMALL_BYTES, MAX_RATIO = 2**30, 100  # what unpacks to more than both is a bomb: pictures are packed already


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

    def file(self, row: int) -> Path:
        """Where it lies."""
        return self.root / self.names[row]

    def read(self, row: int) -> bytes:
        file = self.file(row)
        status = file.stat()
        if not stat.S_ISREG(status.st_mode):
            raise ValueError(f"{self.where(row)}: not a regular file")  # a pipe would be waited for
        if status.st_size > MAX_FILE_BYTES:
            raise ValueError(f"{self.where(row)}: {status.st_size} bytes, at most {MAX_FILE_BYTES} are accepted")
        return file.read_bytes()


class ZipFiles:
    """Members of a zip file below `root` ("" or "folder/"), opened once in every process that reads.

    The threads of a process read in turns, since the list of members is large and decoding takes longer than reading.
    """

    def __init__(self, path: Path, names: Sequence[str], root: str, stamp: str):
        self.path, self.names, self.root, self.stamp = path, list(names), root, stamp
        self._lock, self._archive = threading.Lock(), None

    def __reduce__(self):
        return ZipFiles, (self.path, self.names, self.root, self.stamp)

    def __len__(self) -> int:
        return len(self.names)

    def key(self, row: int) -> str:
        return self.names[row]

    def where(self, row: int) -> str:
        return f"{self.path}/{self.root}{self.names[row]}"

    def read(self, row: int) -> bytes:
        try:
            with self._lock:
                if self._archive is None:
                    if stamp_of([self.path]) != self.stamp:
                        raise ValueError("the zip has changed since it was looked at")
                    self._archive = _Archive(self.path)
                return self._archive.read_member(self.root + self.names[row])
        except Exception as error:  # checksum, compression method, cut-off file: zipfile and zlib raise many types
            raise ValueError(f"{self.where(row)} cannot be read: {error}") from error


class _Archive(zipfile.ZipFile):
    """Closes its file when nobody holds it any more."""

    def read_member(self, name: str) -> bytes:
        """No more than the directory tells, whatever the packed bytes would unpack to."""
        with self.open(name) as member:
            return member.read(self.getinfo(name).file_size + 1)

    def __del__(self):
        self.close()


def files_of(path: Path, names: Sequence[str], root: str = "") -> FolderFiles | ZipFiles:
    """Named files below `root` ("" or "folder/") of a folder or zip that `list_files` has checked."""
    return FolderFiles(path / root, names) if path.is_dir() else ZipFiles(path, names, root, stamp_of([path]))


def stamp_of(files: Iterable[Path]) -> str:
    """Changes when one of the files changes in size or time."""
    digest = hashlib.sha256()
    for status in map(os.stat, files):
        digest.update(f"{status.st_size} {status.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def list_files(path: Path, *, any_name: bool = False) -> list[str]:
    """Names of all visible files relative to `path`, sorted; with `any_name` those included that are no valid text.

    Hidden files and `__MACOSX` are left out. Raises FileNotFoundError, or ValueError for a file that is
    no zip or a zip with members that no image set has.
    """
    if path.is_dir():
        names = sorted(_list_folder(path))
    elif path.is_file():
        names = sorted(_list_zip(path))
    else:
        raise FileNotFoundError(f"{path}: no such folder or zip file")
    if len(names) > MAX_FILES:
        raise ValueError(f"{path}: {len(names)} files, at most {MAX_FILES} are accepted; use several folders or zips")
    for name in () if any_name else names:
        try:
            name.encode()
        except UnicodeEncodeError:
            raise ValueError(f"{path}: the name {ascii(name)} is not valid Unicode; rename the file") from None
    return names


def empty_folders(path: Path) -> list[str]:
    """Visible folders below a folder that hold nothing at all, by relative name."""
    return sorted(
        Path(folder).relative_to(path).as_posix()
        for folder, subfolders, names in _walk(path)
        if not subfolders and not names and Path(folder) != path
    )


def is_image(name: str) -> bool:
    return PurePosixPath(name).suffix.lower() in IMAGE_SUFFIXES


def is_hidden(part: str) -> bool:
    return part.startswith(".") or part == "__MACOSX"


def _list_folder(path: Path) -> Iterable[str]:
    for folder, _, names in _walk(path):
        parts = Path(folder).relative_to(path).parts
        yield from ("/".join((*parts, name)) for name in names if not is_hidden(name))


def _walk(path: Path) -> Iterator[tuple[str, list[str], list[str]]]:
    """As `os.walk`, without hidden folders; a folder that cannot be read is an error, not an empty one."""
    num = 0
    for folder, subfolders, names in os.walk(path, followlinks=True, onerror=_fail):
        num += len(subfolders) + len(names)
        if num > MAX_FILES:  # a few links to parents are enough, since each multiplies
            raise ValueError(f"{path}: more than {MAX_FILES} files and folders; are there links to parent folders?")
        deep = len(Path(folder).relative_to(path).parts) >= MAX_DEPTH
        subfolders[:] = [] if deep else [name for name in subfolders if not is_hidden(name)]
        yield folder, subfolders, names


def _fail(error: OSError) -> NoReturn:
    raise error


def _list_zip(path: Path) -> set[str]:
    try:
        archive = zipfile.ZipFile(path)
    except Exception as error:  # damaged directories also raise OSError, struct.error, NotImplementedError
        raise ValueError(f"{path} is no readable zip file ({error}); expected a zip or a folder") from error
    files: set[str] = set()
    with archive:
        _refuse_bomb(path, archive.infolist())
        for member in archive.infolist():
            if fault := _fault(member):
                raise ValueError(f"{path}: refused because of member {member.filename!r}: {fault}")
            if member.is_dir() or any(is_hidden(part) for part in member.filename.split("/")):
                continue
            if member.filename in files:
                raise ValueError(f"{path}: member {member.filename!r} occurs twice")
            files.add(member.filename)
    return files


def _refuse_bomb(path: Path, members: Sequence[zipfile.ZipInfo]) -> None:
    size = path.stat().st_size
    if len(members) > MAX_FILES:
        raise ValueError(f"{path}: {len(members)} members, at most {MAX_FILES} are accepted; use several zips")
    if sum(member.compress_size for member in members) > size:
        raise ValueError(f"{path}: its members take more bytes than the file has, so they overlap or are cut off")
    total = sum(member.file_size for member in members)
    if total > max(SMALL_BYTES, MAX_RATIO * size):
        raise ValueError(f"{path}: refused as a bomb: {size} bytes unpack to {total}, over {MAX_RATIO} times as many")


def _fault(member: zipfile.ZipInfo) -> str | None:
    """What makes a zip member unsafe or absurd, if anything."""
    parts = member.filename.removesuffix("/").split("/")
    if "\\" in member.filename or parts[0][1:2] == ":" or any(part in ("", ".", "..") for part in parts):
        return "its name is not a plain relative one"
    if member.flag_bits & 1:
        return "it is encrypted"
    if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        # zipfile unpacks the others to any size in one go, whatever the directory tells
        return f"it is packed by method {member.compress_type}; zip it again, stored or deflated"
    if member.file_size > MAX_FILE_BYTES:
        return f"it unpacks to {member.file_size} bytes, at most {MAX_FILE_BYTES} are accepted"
    return None
