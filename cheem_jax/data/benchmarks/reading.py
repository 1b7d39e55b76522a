"""What the readers of the data sets share: finding archives, reading their lists, yielding labelled images."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
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
    """A data set ready to be read; every call of a split's function reads it anew."""

    classes: tuple[str, ...]
    splits: dict[str, Callable[[], Iterator[Example]]]


@dataclasses.dataclass(frozen=True)
class Source:
    """The images of one split: where they lie, and the label of each key."""

    path: Path
    key_of: KeyOf
    labels: Mapping[str, int]
    convert: Callable[[bytes, str], bytes] = lambda data, name: data
    """Re-codes an image, given its bytes and its name for errors."""
    walk: Callable[[Path], Iterator[tuple[str, Reader]]] = members

    def read(self) -> Iterator[Example]:
        """Every labelled image once; ValueError if some are not there."""
        seen: set[str] = set()
        for name, read in self.walk(self.path):
            key = self.key_of(name)
            if key is None or key not in self.labels:
                continue
            if key in seen:
                raise ValueError(f"{self.path}: image {key!r} occurs twice, the second time as {name!r}")
            seen.add(key)
            yield Example(key, self.convert(read(), f"{self.path}: {name}"), self.labels[key])
        self._refuse_absent(seen)

    def check(self) -> None:
        """ValueError for absent images where a look at the names tells; of a tar it shows only when read."""
        if is_listed(self.path) and self.walk is members:
            self._refuse_absent({self.key_of(name) for name, _ in members(self.path)})

    def _refuse_absent(self, present: set[str | None] | set[str]) -> None:
        absent = sorted(key for key in self.labels if key not in present)
        if absent:
            raise ValueError(
                f"{self.path}: {len(absent)} of {len(self.labels)} listed images are absent, first {absent[:3]}; "
                "half unpacked or half downloaded? Fetch or unpack it again, or remove a half unpacked folder "
                "so that the archive beside it is read"
            )


def make_reading(name: str, classes: tuple[str, ...], sources: Mapping[str, Source]) -> Reading:
    """Checks what can be known before an image is read. `name` is for errors."""
    check_class_names(name, classes)
    for split, source in sources.items():
        check_labels(name, split, classes, np.array(list(source.labels.values()), np.int64))
        source.check()
        for other, earlier in sources.items():
            if other == split:
                break
            if earlier.path == source.path and (shared := sorted(earlier.labels.keys() & source.labels.keys())):
                raise ValueError(f"{name}: {len(shared)} images are in both {other} and {split}, first {shared[:3]}")
    return Reading(classes, {split: source.read for split, source in sources.items()})


class Missing(FileNotFoundError):
    """An archive that is not there at all, unlike one whose content is incomplete."""


def locate(place: Path, *needed: tuple[str, ...]) -> list[Path]:
    """Of each tuple the first name that exists below `place`, folders before archives.

    The official archive comes first in its tuple. FileNotFoundError lists all that is missing.
    """
    if not place.is_dir():
        raise Missing(f"{place}: no such folder; make it and put {_listing(needed)} there")
    found: list[Path] = []
    missing: list[tuple[str, ...]] = []
    for names in needed:
        there = [place / name for name in names if (place / name).exists()]
        if there:
            found.append(next((path for path in there if path.is_dir()), there[0]))
        else:
            missing.append(names)
    if missing:
        raise Missing(f"{place}: missing {_listing(missing)}; put the archive or what it unpacks to there")
    return found


def _listing(needed: tuple[tuple[str, ...], ...] | list[tuple[str, ...]]) -> str:
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
    labels = dict(pairs)
    if len(labels) < len(pairs):
        keys = sorted(key for key, _ in pairs)
        twice = sorted({a for a, b in zip(keys, keys[1:], strict=False) if a == b})
        raise ValueError(f"{where}: images listed more than once: {twice[:3]}")
    return labels
