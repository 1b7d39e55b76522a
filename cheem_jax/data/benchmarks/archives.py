"""What the readers of the data sets share: archives read in place, their lists, and their labelled
images.

Nothing is ever unpacked to disk.
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

ARCHIVE_SUFFIXES = (".zip", ".tgz", ".gz")

Reader = Callable[[], bytes]
KeyOf = Callable[[str], str | None]
"""The key of the image under a member's name; None for what is no image of the data set."""


def members(path: Path) -> Iterator[tuple[str, Reader]]:
    """Every visible file with a function that reads it, which is valid until the next file is asked
    for.

    `path` is a folder, zip or tar.gz; for a tar.gz inside come the files in that. Names of a folder
    begin with the folder's own name, as in an archive made of it. Raises FileNotFoundError, or
    ValueError naming the archive for what is corrupted, truncated or huge.
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
    """`members` of an open tar.gz; `where` names it in errors. Links and devices have no bytes and
    are left out."""
    most = max(SMALL_BYTES, MAX_RATIO * file.seek(0, io.SEEK_END))
    file.seek(0)
    with (
        _named(where),
        _Unpacked(file, most) as unpacked,
        tarfile.open(fileobj=unpacked, mode="r:") as archive,
    ):
        for number, member in enumerate(archive, start=1):
            if number > MAX_FILES:
                raise ValueError(f"refused as a bomb: more than {MAX_FILES} members")
            if fault := too_large(member.size):
                raise ValueError(f"member {member.name!r}: {fault}")
            name = member.name.removeprefix("./")
            if member.isfile() and not any(map(is_hidden, name.split("/"))):
                yield name, functools.partial(_read_member, archive, member, where)
        # tarfile takes what is damaged for the end; gzip notices that by its checksum, when it has
        # come to the end
        while unpacked.read(2**20):
            pass


class _Unpacked(gzip.GzipFile):
    """Refuses to unpack to more than `most` bytes in all, or to more at once than a member may
    have."""

    def __init__(self, file: io.BufferedIOBase, most: int):
        super().__init__(fileobj=file, mode="rb")
        self.most = most

    def read(self, size: int | None = -1) -> bytes:
        if size is not None and (
            fault := too_large(size)
        ):  # of a header: tarfile reads long names without asking
            raise ValueError(fault)
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
    """Whatever tarfile, gzip and zlib raise becomes a ValueError that names the archive."""
    try:
        yield
    except Exception as error:
        raise ValueError(
            f"{where}: corrupted, truncated or neither a zip nor a tar.gz"
            f" ({error or type(error).__name__}); download it again"
        ) from error


class Missing(FileNotFoundError):
    """An archive that does not exist, unlike one whose content is incomplete."""


def locate(place: Path, *needed: tuple[str, ...]) -> list[Path]:
    """Of each tuple the first name that exists below `place`, folders before archives.

    The official archive comes first in its tuple. FileNotFoundError lists all that is missing.
    """
    existing = [[place / name for name in names if (place / name).exists()] for names in needed]
    if missing := [
        " or ".join(names) for names, paths in zip(needed, existing, strict=True) if not paths
    ]:
        raise Missing(
            f"{place}: missing {', '.join(missing)}; put the archive or what it unpacks to there"
        )
    return [next((path for path in paths if path.is_dir()), paths[0]) for paths in existing]


def read_files(path: Path, *names: str) -> list[bytes]:
    """Small files by the end of their names from a folder or archive; or `path` itself, if it is
    the file."""
    if path.is_file() and path.suffix.lower() not in ARCHIVE_SUFFIXES:
        return [FolderFiles(path.parent, [path.name]).read(0)]
    found: dict[str, bytes] = {}
    for member, read in members(path):
        for name in names:
            if name not in found and f"/{member}".endswith(f"/{name}"):
                found[name] = read()
        if len(found) == len(names):
            break
    if missing := [name for name in names if name not in found]:
        raise FileNotFoundError(
            f"{path}: missing {', '.join(missing)} in it; is it another version of the data set?"
        )
    return [found[name] for name in names]


def lines_of(data: bytes, where: str) -> list[str]:
    """The non-empty lines of a list."""
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{where}: not a text file in UTF-8: {error}") from error
    return [line.strip() for line in text.splitlines() if line.strip()]


def label_keys(
    rows: Iterable[tuple[str, Hashable]], classes: Sequence[Hashable], where: str
) -> dict[str, int]:
    """Labels by key, from keys and their classes.

    Raises ValueError for an unknown class, for a key that comes twice, and for a class without any.
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
            f"{where}: {len(wrong)} images come twice or are of no class of this data set, first"
            f" {wrong[:3]}"
        )
    check_labels(where, classes, np.array(list(labels.values()), int))
    return labels


def below(folder: str, depth: int, suffix: str) -> KeyOf:
    """Keys are the last `depth` parts of the names right below `folder`."""

    def key_of(name: str) -> str | None:
        parts = name.split("/")
        inside = len(parts) > depth and parts[-depth - 1] == folder
        return (
            "/".join(parts[-depth:])
            if inside and PurePosixPath(name).suffix.lower() == suffix
            else None
        )

    return key_of


class Example(NamedTuple):
    """An encoded image; `key` is unique in its split."""

    key: str
    image: bytes
    label: int


@dataclasses.dataclass(frozen=True)
class Source:
    """The images of one split: where they are, and the label of each key."""

    path: Path
    key_of: KeyOf
    labels: Mapping[str, int]
    convert: Callable[[bytes, str], bytes] | None = None
    """Re-codes an image, given its bytes and its name for errors."""

    def read(self) -> Iterator[Example]:
        """Every labelled image once; ValueError if some are absent or occur twice."""
        seen: set[str] = set()
        for name, read in members(self.path):
            key = self.key_of(name)
            if key is None or key not in self.labels:
                continue
            if key in seen:
                raise ValueError(
                    f"{self.path}: image {key!r} occurs twice, the second time as {name!r}"
                )
            seen.add(key)
            image = read() if self.convert is None else self.convert(read(), f"{self.path}: {name}")
            yield Example(key, image, self.labels[key])
        if absent := sorted(self.labels.keys() - seen):
            raise ValueError(
                f"{self.path}: {len(absent)} of {len(self.labels)} listed images are absent, first"
                f" {absent[:3]}; was it unpacked or downloaded only in part? Download or unpack it"
                " again, or remove a folder that was unpacked in part, so that the archive next to"
                " it is read"
            )


class Reading(NamedTuple):
    """A data set ready to be read."""

    classes: tuple[str, ...]
    sources: Mapping[str, Source]
    """By split."""
