"""What the readers of the data sets share: finding archives, reading their lists, yielding labelled images."""

import collections
import dataclasses
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import numpy as np

from cheem_jax.data.benchmarks.archives import Reader, is_listed, members
from cheem_jax.data.files import MAX_FILE_BYTES
from cheem_jax.data.task import check_class_names, check_labels

ARCHIVE_SUFFIXES = (".zip", ".tgz", ".gz", ".tar")

KeyOf = Callable[[str], str | None]
"""The key of the image under a member's name; None for what is no image of the data set."""


class Example(NamedTuple):
    """An encoded image; `key` is unique in its split."""

    key: str
    image: bytes
    label: int


class Reading(NamedTuple):
    """A data set ready to be read; every call of a split's function reads it again."""

    classes: tuple[str, ...]
    splits: dict[str, Callable[[], Iterator[Example]]]


@dataclasses.dataclass(frozen=True)
class Source:
    """The images of one split: where they are, and the label of each key."""

    path: Path
    key_of: KeyOf
    labels: Mapping[str, int]
    convert: Callable[[bytes, str], bytes] | None = None
    """Re-codes an image, given its bytes and its name for errors."""
    walk: Callable[[Path], Iterator[tuple[str, Reader]]] = members

    def read(self) -> Iterator[Example]:
        """Every labelled image once; ValueError if some are absent."""
        seen: set[str] = set()
        for name, read in self.walk(self.path):
            key = self.key_of(name)
            if key is None or key not in self.labels:
                continue
            if key in seen:
                raise ValueError(f"{self.path}: image {key!r} occurs twice, the second time as {name!r}")
            seen.add(key)
            image = read() if self.convert is None else self.convert(read(), f"{self.path}: {name}")
            yield Example(key, image, self.labels[key])
        self.refuse_absent(seen)

    def refuse_absent(self, present: Collection[str | None]) -> None:
        """ValueError unless all labelled images are among these keys."""
        if absent := sorted(key for key in self.labels if key not in present):
            raise ValueError(
                f"{self.path}: {len(absent)} of {len(self.labels)} listed images are absent, first {absent[:3]}; "
                "was it unpacked or downloaded only in part? Download or unpack it again, or remove a folder that was "
                "unpacked in part, so that the archive next to it is read"
            )


def make_reading(name: str, classes: tuple[str, ...], sources: Mapping[str, Source]) -> Reading:
    """Checks what can be known before an image is read. `name` is for errors."""
    check_class_names(name, classes)
    for split, source in sources.items():
        check_labels(name, split, classes, np.array(list(source.labels.values()), np.int64))
        if is_listed(source.path) and source.walk is members:  # of a tar it is known only when all is read
            source.refuse_absent({source.key_of(member) for member, _ in members(source.path)})
    for (one, first), (other, second) in itertools.combinations(sources.items(), 2):
        if first.path == second.path and (shared := sorted(first.labels.keys() & second.labels.keys())):
            raise ValueError(f"{name}: {len(shared)} images are in both {one} and {other}, first {shared[:3]}")
    return Reading(classes, {split: source.read for split, source in sources.items()})


class Missing(FileNotFoundError):
    """An archive that does not exist, unlike one whose content is incomplete."""


def locate(place: Path, *needed: tuple[str, ...]) -> list[Path]:
    """Of each tuple the first name that exists below `place`, folders before archives.

    The official archive comes first in its tuple. FileNotFoundError lists all that is missing.
    """
    if not place.is_dir():
        raise Missing(f"{place}: no such folder; make it and put {_listing(needed)} there")
    existing = [[place / name for name in names if (place / name).exists()] for names in needed]
    if missing := [names for names, paths in zip(needed, existing, strict=True) if not paths]:
        raise Missing(f"{place}: missing {_listing(missing)}; put the archive or what it unpacks to there")
    return [next((path for path in paths if path.is_dir()), paths[0]) for paths in existing]


def _listing(needed: Sequence[tuple[str, ...]]) -> str:
    return ", ".join(names[0] + (f" (or {' or '.join(names[1:])})" if names[1:] else "") for names in needed)


def read_files(path: Path, *names: str) -> list[bytes]:
    """Small files by the end of their names from a folder or archive; or `path` itself, if it is the file."""
    if path.is_file() and path.suffix.lower() not in ARCHIVE_SUFFIXES:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ValueError(f"{path}: {path.stat().st_size} bytes, at most {MAX_FILE_BYTES} are accepted")
        return [path.read_bytes()] * len(names)
    found: dict[str, bytes] = {}
    for member, read in members(path):
        for name in names:
            if name not in found and f"/{member}".endswith(f"/{name}"):
                found[name] = read()
        if len(found) == len(names):
            break
    if missing := [name for name in names if name not in found]:
        raise FileNotFoundError(f"{path}: missing {', '.join(missing)} in it; is it another version of the data set?")
    return [found[name] for name in names]


def lines_of(data: bytes, where: str) -> list[str]:
    """The non-empty lines of a list."""
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{where}: not a text file in UTF-8: {error}") from error
    return [line.strip() for line in text.splitlines() if line.strip()]


def below(folder: str, depth: int, suffix: str) -> KeyOf:
    """Keys are the last `depth` parts of the names right below `folder`."""

    def key_of(name: str) -> str | None:
        parts = name.split("/")
        inside = len(parts) > depth and parts[-depth - 1] == folder
        return "/".join(parts[-depth:]) if inside and PurePosixPath(name).suffix.lower() == suffix else None

    return key_of


def unique(pairs: list[tuple[str, int]], where: str) -> dict[str, int]:
    """Labels by key; ValueError if a key is listed twice."""
    counted = collections.Counter(key for key, _ in pairs)
    if twice := sorted(key for key, num in counted.items() if num > 1):
        raise ValueError(f"{where}: images listed more than once: {twice[:3]}")
    return dict(pairs)
