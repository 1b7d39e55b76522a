"""Prepared TFDS data sets, read without TensorFlow: as bytes, which the library's own decoder then decodes.

TFDS's decoder without TensorFlow gives palette images their indices as colours and leaves CMYK and alpha channels
in, hence `SkipDecoding`.
"""

import collections
import contextlib
import dataclasses
import hashlib
import io
import json
import logging
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cheem_jax.core.atomic import write_atomically
from cheem_jax.core.npz import read_npz
from cheem_jax.core.paths import absolute
from cheem_jax.data.decode import Progress, decode_pixels
from cheem_jax.data.files import stamp_of
from cheem_jax.data.splits import SPLITS, cut_missing
from cheem_jax.data.task import Part, Plan

BY_BYTES, BY_PIXELS = "bytes", "pixels"
MAX_CLASSES = 1_000_000
NAME_FEATURES = ("file_name", "filename", "image/file_name", "name", "id")
_SPEC = re.compile(r"([a-z0-9_]+)(?:/([A-Za-z0-9_.-]+))?(?::(\d+\.\d+\.\d+))?")
_OWN_FEATURE = re.compile(r"tensorflow_datasets\.core\.features\.[a-z_]+\.[A-Za-z]+")


class Records:
    """Images of a prepared data set: each in a split of TFDS's at a position."""

    def __init__(self, directory: Path, image: str, splits: Sequence[str], positions: np.ndarray, keys: Sequence[str]):
        self.directory, self.image = directory, image
        self.splits, self.positions, self.keys = list(splits), positions, list(keys)
        self._lock, self._opened = threading.Lock(), dict[str, Any]()

    def __reduce__(self):
        return Records, (self.directory, self.image, self.splits, self.positions, self.keys)

    def __len__(self) -> int:
        return len(self.keys)

    def key(self, row: int) -> str:
        return self.keys[row]

    def where(self, row: int) -> str:
        return f"{self.directory} split {self.splits[row]!r} #{self.positions[row]} ({self.keys[row]})"

    def read(self, row: int) -> bytes:
        split = self.splits[row]
        with self._lock:  # opening alone: array_record's readers serve many threads at a time
            if split not in self._opened:
                self._opened[split] = _source(self.directory, self.image, split)
        try:
            return self._opened[split][int(self.positions[row])][self.image]
        except Exception as error:  # array_record and protobuf raise their own
            raise ValueError(f"{self.where(row)} cannot be read: {error}") from error

    def chosen(self, rows: np.ndarray, keys: Sequence[str] | None = None) -> "Records":
        """Some of them in the given order, under other keys if those are given."""
        splits = [self.splits[row] for row in rows]
        named = [self.keys[row] for row in rows] if keys is None else keys
        return Records(self.directory, self.image, splits, self.positions[rows], named)


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A data set that TFDS has prepared in a directory, and the parts of it that make a classification task."""

    directory: Path
    full_name: str
    """As in `eurosat/rgb/2.0.0`."""
    image: str
    label: str
    features: tuple[str, ...]
    classes: tuple[str, ...]
    splits: dict[str, int]

    def index(
        self, splits: Sequence[str], key: str | None = None, *, on_progress: Progress | None = None
    ) -> tuple[Records, np.ndarray]:
        """All images of some splits and their labels int32 `[N]`, sorted by key.

        `key` names the text feature that tells images apart, `class/FEATURE` if it does so within a class only,
        or says that the file's bytes or pixels do; by default the first feature that looks like a file name. Every
        example is read for this once; the result is kept in the data set's own folder if that can be written to.
        Raises ValueError for unlabelled images.
        """
        key = key or next((name for name in NAME_FEATURES if name in self.features), BY_BYTES)
        rows: list[tuple[str, int, str, int]] = []  # sorted by key, then label, then place
        for split in splits:
            names, labels = self._known(split, key, on_progress)
            rows += [
                (name, label, split, at) for at, (name, label) in enumerate(zip(names, labels.tolist(), strict=True))
            ]
        rows.sort()
        repeated = collections.Counter[str]()
        keys = []
        for name, *_ in rows:  # the same image twice
            repeated[name] += 1
            keys.append(name if repeated[name] == 1 else f"{name}#{repeated[name]}")
        positions = np.array([position for *_, position in rows], np.int64)
        records = Records(self.directory, self.image, [split for _, _, split, _ in rows], positions, keys)
        return records, np.array([label for _, label, _, _ in rows], np.int32)

    def _known(self, split: str, key: str, on_progress: Progress | None) -> tuple[list[str], np.ndarray]:
        """Keys and labels of one split in TFDS's order, from an earlier pass if nothing has changed since."""
        mark = hashlib.sha256(f"{key} {stamp(self.directory)}".encode()).hexdigest()[:16]
        file = self.directory / ".cheem_jax" / f"{split}-{mark}.npz"
        # what does not exist or was truncated by a crash is made again
        with contextlib.suppress(OSError, ValueError, KeyError):
            arrays = read_npz(file)
            keys, labels = arrays["keys"], arrays["labels"]
            well_formed = keys.dtype.kind == "S" and labels.dtype == np.int32 and labels.ndim == 1
            if well_formed and keys.shape == labels.shape and 0 <= labels.min() <= labels.max() < len(self.classes):
                return [name.decode() for name in keys.tolist()], labels
        source = _source(self.directory, self.image, split)
        names: list[str] = []
        found: list[int] = []  # grows with what is read, whatever the metadata says
        for position in range(len(source)):
            try:
                example = source[position]
                found.append(int(example[self.label]))
                names.append(self._key(example, key))
            except Exception as error:  # array_record and protobuf raise their own
                raise ValueError(
                    f"{self.directory}, split {split!r} #{position}, cannot be read: {error}; prepare it again"
                ) from error
            if on_progress is not None:
                on_progress(1)
        if not found:
            raise ValueError(f"{self.full_name}: split {split!r} in {self.directory} has no example; prepare it again")
        if max(found) >= len(self.classes) or min(found) < -1:
            raise ValueError(
                f"{self.directory}, split {split!r}: labels {min(found)}..{max(found)} of {len(self.classes)} classes"
            )
        labels = np.array(found, np.int32)
        if unlabelled := int((labels < 0).sum()):
            raise ValueError(
                f"{self.full_name}: {unlabelled} of {len(labels)} examples of split {split!r} have the label -1: "
                "their labels are withheld, so nothing can be learned from or measured on them; use another split"
            )
        with contextlib.suppress(OSError):  # somebody else's data set, or a full disk: the next run reads all again
            file.parent.mkdir(exist_ok=True)
            buffer = io.BytesIO()
            np.savez_compressed(buffer, keys=np.array([name.encode() for name in names]), labels=labels)
            write_atomically(file, buffer.getvalue())
        return names, labels

    def _key(self, example: dict[str, Any], key: str) -> str:
        if key == BY_BYTES:
            return hashlib.sha256(example[self.image]).hexdigest()
        if key == BY_PIXELS:  # PNG files are written while preparing, and not by everybody with the same bytes
            pixels = decode_pixels(example[self.image], name=self.full_name)
            return hashlib.sha256(f"{pixels.shape}".encode() + pixels.tobytes()).hexdigest()
        feature = key.removeprefix("class/")
        value = example[feature].decode()
        return value if key == feature else f"{self.classes[int(example[self.label])]}/{value}"


def default_data_dir() -> Path:
    """TFDS's own default folder."""
    return absolute(os.environ.get("TFDS_DATA_DIR") or "~/tensorflow_datasets")


def plan_tfds(spec: str, data_dir: Path | None, *, name: str | None = None, seed: int = 0) -> Plan:
    """A task from any prepared TFDS data set of labelled images: `NAME[/CONFIG][:VERSION]`.

    Its train, validation and test splits are taken; a missing validation or test part is cut from train as for
    folders. Raises FileNotFoundError or ValueError.
    """
    prepared = open_prepared(spec, data_dir or default_data_dir())
    known = {split: SPLITS[split] for split in prepared.splits if split in SPLITS}
    if "train" not in known.values():
        raise ValueError(f"{prepared.full_name} has no train split, only {sorted(prepared.splits)}")
    indexed = {ours: prepared.index([split]) for split, ours in known.items()}
    task = name or prepared.full_name.split("/")[0]
    parts = cut_parts(
        indexed, lambda keys, labels: cut_missing(task, prepared.full_name, prepared.classes, keys, labels, seed)
    )
    return Plan(task, prepared.classes, **parts, source=f"tfds:{prepared.full_name}", stamp=stamp(prepared.directory))


def cut_parts(
    known: Mapping[str, tuple[Records, np.ndarray]], cut: Callable[[dict[str, list[str]], dict[str, np.ndarray]], None]
) -> dict[str, Part]:
    """All three splits from those that are known; `cut` makes the others from keys and labels of train, in place."""
    # an image may be in two official splits, and its key must say which is meant
    keys = {split: [f"{split}/{key}" for key in records.keys] for split, (records, _) in known.items()}
    places = {key: (split, row) for split, names in keys.items() for row, key in enumerate(names)}
    labels = {split: found for split, (_, found) in known.items()}
    cut(keys, labels)
    parts = {}
    for split, names in keys.items():
        origin, rows = known[places[names[0]][0]][0], np.array([places[name][1] for name in names], int)
        parts[split] = Part(origin.chosen(rows, names), labels[split])
    return parts


def all_pictures(spec: str, split: str, data_dir: Path | None) -> Records:
    """The images of one split, or of a slice such as `train[:1000]`, in TFDS's order; labels are not read."""
    prepared = open_prepared(spec, data_dir or default_data_dir())
    num = len(_source(prepared.directory, prepared.image, split))
    keys = [f"{split}#{row}" for row in range(num)]
    return Records(prepared.directory, prepared.image, [split] * num, np.arange(num), keys)


def open_prepared(spec: str, data_dir: Path) -> Prepared:
    """A prepared data set by name; raises FileNotFoundError, or ValueError if it cannot be read."""
    tfds = import_tfds()
    directory = find_prepared(spec, data_dir)
    try:
        builder = _builder(directory)
        features = builder.info.features
        image = _only(features, tfds.features.Image, "image")
        label = _only(features, tfds.features.ClassLabel, "label")
        sizes = {name: info.num_examples for name, info in builder.info.splits.items()}
        if sum(sizes.values()) > (num_bytes := sum(file.stat().st_size for file in directory.iterdir())):
            raise ValueError(f"its metadata says {sum(sizes.values())} examples in {num_bytes} bytes")
        if (num := features[label].num_classes or 0) > MAX_CLASSES:
            raise ValueError(f"{num} classes, expected at most {MAX_CLASSES}")
        classes = tuple(features[label].names)
        kind = builder.info.file_format.value
    except Exception as error:  # unreadable metadata: json, protobuf and TFDS raise their own
        reason = f"{error or type(error).__name__}"[:500]
        raise ValueError(f"{directory} is not a data set of labelled images that TFDS can open: {reason}") from error
    if kind not in ("array_record", "parquet"):
        raise ValueError(
            f"{directory} was prepared in the format {kind!r}, which needs TensorFlow to be read; prepare it again in "
            f"'array_record' (`cheem data prepare`, or file_format='array_record'), after moving this folder away"
        )
    return Prepared(directory, builder.info.full_name, image, label, tuple(features), classes, sizes)


def find_prepared(spec: str, data_dir: Path) -> Path:
    """The directory of `NAME[/CONFIG][:VERSION]`; of several versions the newest. Raises FileNotFoundError."""
    matched = _SPEC.fullmatch(spec)
    if matched is None:
        raise ValueError(
            f"{spec!r} is not the name of a TFDS data set; expected NAME[/CONFIG][:VERSION], e.g. eurosat/rgb:2.0.0"
        )
    name, config, version = matched.groups()
    below = data_dir / name / config if config else data_dir / name
    found = _versions(below, version)
    if not found and config is None:
        found = [directory for folder in below.glob("*/") for directory in _versions(folder, version)]
        if configs := sorted({directory.parent.name for directory in found} if len(found) > 1 else ()):
            raise ValueError(f"{spec!r} is prepared in several configs in {data_dir}; name one: {configs}")
    if not found:
        raise FileNotFoundError(f"{spec!r} is not prepared in {data_dir}")
    return max(found, key=lambda directory: tuple(map(int, directory.name.split("."))))


def _versions(folder: Path, version: str | None) -> list[Path]:
    """Prepared directories in a folder; what a killed preparation left is not one of them."""
    found = (info.parent for info in folder.glob(f"{version or '*'}/dataset_info.json"))
    return [directory for directory in found if re.fullmatch(r"\d+\.\d+\.\d+", directory.name)]


def stamp(directory: Path) -> str:
    """`Plan.stamp` of a prepared data set."""
    return stamp_of(sorted(file for file in directory.iterdir() if file.is_file()))


def import_tfds() -> Any:
    """TFDS, or ValueError that says how to get it."""
    try:
        import tensorflow_datasets as tfds
    except ImportError as error:
        raise ValueError(
            f"TFDS is needed for this and cannot be imported ({error}): `pip install 'cheem_jax[datasets]'`"
        ) from error
    absl = logging.getLogger("absl")
    if _no_advice not in absl.filters:
        absl.addFilter(_no_advice)
    return tfds


def _no_advice(record: logging.LogRecord) -> bool:
    """TFDS recommends OpenCV for a decoder that is not used here."""
    return "OpenCV" not in str(record.msg)


def _source(directory: Path, image: str, split: str) -> Any:
    tfds = import_tfds()
    try:
        builder = _builder(directory)
        return builder.as_data_source(split=split, decoders={image: tfds.decode.SkipDecoding()})
    except Exception as error:  # missing or truncated shards
        raise ValueError(f"{directory}, split {split!r}, cannot be opened: {error}") from error


def _builder(directory: Path) -> Any:
    """TFDS's builder of a prepared directory, after a check that opening it imports nothing but TFDS's features."""
    file = directory / "features.json"
    named = _feature_classes(json.loads(file.read_text()))
    if foreign := sorted({name for name in named if not _OWN_FEATURE.fullmatch(name)}):
        raise ValueError(f"{file} names the classes {foreign[:3]}; only features of TFDS itself are accepted")
    return import_tfds().builder_from_directory(directory)


def _feature_classes(value: Any) -> Iterator[str]:
    """Every Python class that a features.json names, also in JSON inside of texts: TFDS imports their modules."""
    if isinstance(value, dict):
        for key, item in value.items():
            if key in ("pythonClassName", "python_class_name", "type") and isinstance(item, str):
                yield item
            else:
                yield from _feature_classes(item)
    elif isinstance(value, list):
        for item in value:
            yield from _feature_classes(item)
    elif isinstance(value, str) and value.lstrip()[:1] in ("{", "["):
        with contextlib.suppress(ValueError):
            yield from _feature_classes(json.loads(value))


def _only(features: Any, kind: type, usual: str) -> str:
    names = [name for name, feature in features.items() if isinstance(feature, kind)]
    if usual in names:
        return usual
    if len(names) != 1:
        raise ValueError(f"expected one {kind.__name__} feature, found {names or 'none'} among {sorted(features)}")
    return names[0]
