"""Prepared TFDS data sets, read without TensorFlow: as bytes, which the library's own decoder then decodes.

TFDS's decoder without TensorFlow gives palette images their indices as colours and leaves CMYK and alpha channels
in, hence `SkipDecoding`.
"""

import collections
import contextlib
import dataclasses
import functools
import hashlib
import io
import json
import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cheem_jax.core.atomic import write_atomically
from cheem_jax.core.npz import read_npz
from cheem_jax.core.paths import absolute
from cheem_jax.data.decode import Progress, decode_pixels
from cheem_jax.data.files import Encoded, stamp_of
from cheem_jax.data.splits import SPLITS, Members, cut_missing
from cheem_jax.data.task import Plan

BY_BYTES, BY_PIXELS = "bytes", "pixels"
MAX_CLASSES = 1_000_000
NAME_FEATURES = ("file_name", "filename", "image/file_name", "name", "id")
_SPEC = re.compile(r"([a-z0-9_]+)(?:/([A-Za-z0-9_.-]+))?(?::(\d+\.\d+\.\d+))?")
_OWN_FEATURE = re.compile(r"tensorflow_datasets\.core\.features\.[a-z_]+\.[A-Za-z]+")


class Records(Encoded):
    """Images of a prepared data set: each in a split of TFDS's at a position."""

    def __init__(self, directory: Path, image: str, places: Sequence[tuple[str, int]], keys: Sequence[str]):
        super().__init__(keys)
        self.directory, self.image, self.places = directory, image, list(places)

    def where(self, row: int) -> str:
        split, position = self.places[row]
        return f"{self.directory} split {split!r} #{position} ({self.keys[row]})"

    def read(self, row: int) -> bytes:
        split, position = self.places[row]
        try:
            return self._sources[split][position][self.image]
        except Exception as error:  # array_record and protobuf raise their own
            raise ValueError(f"{self.where(row)} cannot be read: {error}") from error

    @functools.cached_property
    def _sources(self) -> dict[str, Any]:
        """TFDS's splits: they can be pickled, and serve many threads at a time."""
        return {split: _source(self.directory, self.image, split) for split in {split for split, _ in self.places}}


class Row(NamedTuple):
    """One image of a prepared data set; sorted by key, then label, then place."""

    key: str
    label: int
    split: str
    position: int


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
    splits: tuple[str, ...]

    def index(self, splits: Iterable[str], key: str | None = None, *, on_progress: Progress | None = None) -> list[Row]:
        """All images of some splits, sorted.

        `key` names the text feature that tells images apart, `class/FEATURE` if it does so within a class only,
        or says that the file's bytes or pixels do; by default the first feature that looks like a file name. Every
        example is read for this once; the result is kept in the data set's own folder if that can be written to.
        Raises ValueError for unlabelled images.
        """
        key = key or next((name for name in NAME_FEATURES if name in self.features), BY_BYTES)
        rows: list[Row] = []
        for split in splits:
            names, labels = self._known(split, key, on_progress)
            rows += map(Row, names, labels.tolist(), [split] * len(names), range(len(names)))
        return sorted(rows)

    def plan(self, task: str, rows: Mapping[str, Sequence[Row]], classes: Sequence[str], cut: Callable) -> Plan:
        """A task from rows of some of our splits; `cut` makes the others from train, in place."""
        members: Members = {}
        places: dict[str, tuple[str, int]] = {}
        for split, found in rows.items():
            members[split] = {}
            repeated = collections.Counter[str]()
            for row in found:
                repeated[row.key] += 1
                # the same image may come twice, and be in two official splits: its key must say which is meant
                number = f"#{repeated[row.key]}" if repeated[row.key] > 1 else ""
                key = f"{split}/{row.key}{number}"
                members[split][key], places[key] = row.label, (row.split, row.position)
        cut(members)
        return Plan.of(
            task,
            classes,
            members,
            lambda keys: Records(self.directory, self.image, [places[key] for key in keys], keys),
            source=f"tfds:{self.full_name}",
            stamp=_stamp(self.directory),
        )

    def _known(self, split: str, key: str, on_progress: Progress | None) -> tuple[list[str], np.ndarray]:
        """Keys and labels of one split in TFDS's order, from an earlier pass if nothing has changed since."""
        mark = hashlib.sha256(f"{key} {_stamp(self.directory)}".encode()).hexdigest()[:16]
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
        labels = np.array(found, np.int32)
        if outside := int(np.sum((labels < 0) | (labels >= len(self.classes)))):
            raise ValueError(
                f"{self.full_name}: {outside} of {len(labels)} examples of split {split!r} have labels outside "
                f"0..{len(self.classes) - 1} ({labels.min()} to {labels.max()}); -1 says that the labels are withheld, "
                "so that nothing can be learned from or measured on these images; use another split"
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
    if "train" not in prepared.splits:
        raise ValueError(f"{prepared.full_name} has no train split, only {sorted(prepared.splits)}")
    return prepared.plan(
        name or prepared.full_name.split("/")[0],
        {SPLITS[split]: prepared.index([split]) for split in prepared.splits if split in SPLITS},
        prepared.classes,
        lambda members: cut_missing(prepared.full_name, prepared.classes, members, seed),
    )


def all_pictures(spec: str, split: str, data_dir: Path | None) -> Records:
    """The images of one split, or of a slice such as `train[:1000]`, in TFDS's order; labels are not read."""
    prepared = open_prepared(spec, data_dir or default_data_dir())
    positions = range(len(_source(prepared.directory, prepared.image, split)))
    places = [(split, position) for position in positions]
    return Records(prepared.directory, prepared.image, places, [f"{split}#{position}" for position in positions])


def open_prepared(spec: str, data_dir: Path) -> Prepared:
    """A prepared data set by name; raises FileNotFoundError, or ValueError if it cannot be read."""
    tfds = import_tfds()
    directory = find_prepared(spec, data_dir)
    try:
        builder = _builder(directory)
        features = builder.info.features
        image = _only(features, tfds.features.Image, "image")
        label = _only(features, tfds.features.ClassLabel, "label")
        num_examples = sum(info.num_examples for info in builder.info.splits.values())
        if num_examples > (num_bytes := sum(file.stat().st_size for file in directory.iterdir())):
            raise ValueError(f"its metadata says {num_examples} examples in {num_bytes} bytes")
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
    splits = tuple(builder.info.splits)
    return Prepared(directory, builder.info.full_name, image, label, tuple(features), classes, splits)


def find_prepared(spec: str, data_dir: Path) -> Path:
    """The directory of `NAME[/CONFIG][:VERSION]`; of several versions the newest. Raises FileNotFoundError."""
    matched = _SPEC.fullmatch(spec)
    if matched is None:
        raise ValueError(
            f"{spec!r} is not the name of a TFDS data set; expected NAME[/CONFIG][:VERSION], e.g. eurosat/rgb:2.0.0"
        )
    name, config, version = matched.groups()
    found: list[Path] = []
    for folder in [f"{name}/{config}"] if config else [name, f"{name}/*"]:
        # what a killed preparation left has another name than a version
        infos = data_dir.glob(f"{folder}/{version or '*'}/dataset_info.json")
        found = found or [info.parent for info in infos if re.fullmatch(r"\d+\.\d+\.\d+", info.parent.name)]
    if not found:
        raise FileNotFoundError(f"{spec!r} is not prepared in {data_dir}")
    if len(configs := sorted({directory.parent.name for directory in found})) > 1:
        raise ValueError(f"{spec!r} is prepared in several configs in {data_dir}; name one: {configs}")
    return max(found, key=lambda directory: tuple(map(int, directory.name.split("."))))


def _stamp(directory: Path) -> str:
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
