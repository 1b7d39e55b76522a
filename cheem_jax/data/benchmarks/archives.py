"""Read archives, their file lists, and their labelled images, without unpacking to disk.

All data set readers use this module.
"""

import contextlib
import dataclasses
import functools
import gzip
import io
import tarfile
import zipfile
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import numpy as np

from cheem_jax.data.files import (
    MAX_FILES,
    MAX_RATIO,
    SMALL_BYTES,
    FolderFiles,
    files_of,
    is_hidden,
    list_files,
    too_large,
)
from cheem_jax.data.task import check_labels

ARCHIVE_SUFFIXES = (".zip", ".tar", ".tgz", ".gz")

GZIP_MAGIC = b"\x1f\x8b"

Reader = Callable[[], bytes]
KeyOf = Callable[[str], str | None]
"""Function that returns the key of an image, given the name of a member of an archive. It returns
None if the member is not an image of the data set."""


def members(path: Path) -> Iterator[tuple[str, Reader]]:
    """Yield the name of every visible file, and a function that reads the file. The function is
    valid until the next file is yielded.

    `path` is a folder, zip, tar or tar.gz. A tar.gz inside of a folder or zip is replaced by its
    files. If `path` is a folder, names start with the folder's name, as in an archive of the
    folder. Raises FileNotFoundError if `path` does not exist. If an archive is corrupted, truncated
    or huge, raises ValueError with the name of the archive.
    """
    if path.is_file() and not zipfile.is_zipfile(path):
        with path.open("rb") as file:
            yield from _tar_members(file, str(path))
        return
    names = list_files(path)
    files = files_of(path, names)
    top = f"{path.absolute().name}/" if path.is_dir() else ""
    for row, name in enumerate(names):
        if name.endswith(".tar.gz"):
            yield from _tar_members(io.BytesIO(files.read(row)), files.where(row))
        else:
            yield top + name, functools.partial(files.read, row)


def _tar_members(file: io.BufferedIOBase, where: str) -> Iterator[tuple[str, Reader]]:
    """Yield the members of an open tar or tar.gz, except links and devices. `where` is the
    archive's name in errors."""
    num_bytes = file.seek(0, io.SEEK_END)
    most = max(SMALL_BYTES, MAX_RATIO * num_bytes)
    file.seek(0)
    is_packed = file.read(len(GZIP_MAGIC)) == GZIP_MAGIC
    file.seek(max(0, num_bytes - tarfile.BLOCKSIZE))
    is_complete = is_packed or not file.read().strip(b"\0")
    file.seek(0)
    with (
        _named(where),
        _Unpacked(file, most) if is_packed else contextlib.nullcontext(file) as unpacked,
        tarfile.open(fileobj=unpacked, mode="r:") as archive,
    ):
        # tarfile accepts an archive whose end is missing
        if not is_complete:
            raise ValueError("it does not end with a block of zeros")
        for number, member in enumerate(archive, start=1):
            if number > MAX_FILES:
                raise ValueError(f"refused as a bomb: more than {MAX_FILES} members")
            if reason := too_large(member.size):
                raise ValueError(f"member {member.name!r}: {reason}")
            name = member.name.removeprefix("./")
            if member.isfile() and not any(map(is_hidden, name.split("/"))):
                yield name, functools.partial(_read_member, archive, member, where)
        # Read to the real end, where gzip verifies its checksum, because tarfile treats corrupted
        # data as the end of the archive.
        while unpacked.read(2**20):
            pass


class _Unpacked(gzip.GzipFile):
    """A gzip file that raises ValueError if more than `most` bytes are unpacked in total, or if one
    call reads more bytes than a member is allowed to have."""

    def __init__(self, file: io.BufferedIOBase, most: int):
        super().__init__(fileobj=file, mode="rb")
        self.most = most

    def read(self, size: int | None = -1) -> bytes:
        # Limit the size, because tarfile does not: if a member has a long name, tarfile reads as
        # many bytes as the archive states for this name.
        if size is not None and (reason := too_large(size)):
            raise ValueError(reason)
        data = super().read(size)
        self._refuse_beyond(self.tell())
        return data

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._refuse_beyond(offset)
        return super().seek(offset, whence)

    def _refuse_beyond(self, place: int) -> None:
        if place > self.most:
            raise ValueError(f"refused as a bomb: more than {self.most} bytes unpacked")


def _read_member(archive: tarfile.TarFile, member: tarfile.TarInfo, where: str) -> bytes:
    with _named(f"{where}: member {member.name!r}"):
        file: Any = archive.extractfile(member)
        return file.read()


@contextlib.contextmanager
def _named(where: str) -> Iterator[None]:
    """Convert exceptions of tarfile, gzip and zlib to a ValueError with the archive's name."""
    try:
        yield
    except Exception as error:
        raise ValueError(
            f"{where}: corrupted, truncated or neither a zip nor a tar"
            f" ({error or type(error).__name__}); download it again"
        ) from error


class MissingArchive(FileNotFoundError):
    """An archive does not exist. Archives with incomplete content raise other errors."""


def locate(place: Path, *needed: tuple[str, ...]) -> list[Path]:
    """For each tuple of names, return an existing path in `place`: the first folder or, if there is
    no folder, the first archive.

    The first name of a tuple is the name of the official archive. Raises MissingArchive with the
    names of all missing archives.
    """
    existing = [[place / name for name in names if (place / name).exists()] for names in needed]
    if missing := [
        " or ".join(names) for names, paths in zip(needed, existing, strict=True) if not paths
    ]:
        raise MissingArchive(
            f"{place}: missing {', '.join(missing)}; put the archive or its content there"
        )
    return [next((path for path in paths if path.is_dir()), paths[0]) for paths in existing]


def read_files(path: Path, *names: str) -> list[bytes]:
    """Read small files, identified by the end of their names, from a folder or archive. If `path`
    is a single file and not an archive, read that file."""
    if path.is_file() and path.suffix.lower() not in ARCHIVE_SUFFIXES:
        return [FolderFiles(path.parent, [path.name]).read(0)]
    contents: dict[str, bytes] = {}
    for member, read in members(path):
        for name in names:
            if name not in contents and f"/{member}".endswith(f"/{name}"):
                contents[name] = read()
        if len(contents) == len(names):
            break
    if missing := [name for name in names if name not in contents]:
        raise FileNotFoundError(
            f"{path}: missing {', '.join(missing)}; check the version of the data set"
        )
    return [contents[name] for name in names]


def text_lines(data: bytes, where: str) -> list[str]:
    """Return the non-empty lines of a text file."""
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{where}: not a text file in UTF-8: {error}") from error
    return [line.strip() for line in text.splitlines() if line.strip()]


def label_keys(
    rows: Iterable[tuple[str, Hashable]], classes: Sequence[Hashable], where: str
) -> dict[str, int]:
    """Return the labels, keyed by image key; `rows` contains pairs of image key and class.

    Raises ValueError for an unknown class, a repeated key, or a class without images.
    """
    label_of = {name: label for label, name in enumerate(classes)}
    labels: dict[str, int] = {}
    wrong = []
    for key, name in rows:
        if key in labels or name not in label_of:
            wrong.append(f"{key!r} of class {name!r}")
        else:
            labels[key] = label_of[name]
    if wrong:
        raise ValueError(
            f"{where}: {len(wrong)} images occur twice or belong to no class of this data set; the"
            f" first are {wrong[:3]}"
        )
    check_labels(where, classes, np.array(list(labels.values()), int))
    return labels


def below(folder: str, depth: int, *suffixes: str) -> KeyOf:
    """Return a function that converts the name of a file to a key: the last `depth` parts of the
    name. The key is None unless the file is `depth` levels below `folder` and has one of the
    suffixes."""

    def key_of(name: str) -> str | None:
        parts = name.split("/")
        inside = len(parts) > depth and parts[-depth - 1] == folder
        return (
            "/".join(parts[-depth:])
            if inside and PurePosixPath(name).suffix.lower() in suffixes
            else None
        )

    return key_of


class LabelledImage(NamedTuple):
    """An encoded image, with a key that is unique in its split."""

    key: str
    image: bytes
    label: int


@dataclasses.dataclass(frozen=True)
class Source:
    """The images of one split: an archive or folder, and the label of each image key."""

    path: Path
    key_of: KeyOf
    labels: Mapping[str, int]
    convert: Callable[[bytes, str], bytes] | None = None
    """Function that re-encodes an image. Its arguments are the bytes of the image, and the name of
    the image for error messages."""

    def read(self) -> Iterator[LabelledImage]:
        """Yield every labelled image once. Raises ValueError if an image is absent or occurs more
        than once."""
        keys: set[str] = set()
        for name, read in members(self.path):
            key = self.key_of(name)
            if key is None or key not in self.labels:
                continue
            if key in keys:
                raise ValueError(
                    f"{self.path}: image {key!r} occurs twice, the second time as {name!r}"
                )
            keys.add(key)
            image = read() if self.convert is None else self.convert(read(), f"{self.path}: {name}")
            yield LabelledImage(key, image, self.labels[key])
        if absent := sorted(self.labels.keys() - keys):
            raise ValueError(
                f"{self.path}: {len(absent)} of {len(self.labels)} listed images are absent, the"
                f" first are {absent[:3]}; if it was downloaded or unpacked only in part, download"
                " or unpack it again, or remove the folder, so that the archive next to it is read"
            )


class Reading(NamedTuple):
    """The classes of a data set, and the images of its splits."""

    classes: tuple[str, ...]
    sources: Mapping[str, Source]
    """Sources, keyed by split."""
