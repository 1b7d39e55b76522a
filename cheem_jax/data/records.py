"""Read encoded images from prepared TFDS data sets, from data sets of the Hugging Face hub, and
from folders that `save_to_disk` of the library `datasets` wrote.

This library decodes the bytes itself (`SkipDecoding`), because TFDS's decoder without TensorFlow
returns palette indices as colours, and keeps CMYK and alpha channels. Data sets on the hub are read
as Arrow files: code in their repositories never runs, and nothing is unpickled.
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
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cheem_jax.core.atomic import write_atomically
from cheem_jax.core.hub import TIMEOUT, hub_errors
from cheem_jax.core.npz import read_npz
from cheem_jax.core.paths import absolute
from cheem_jax.data.decode import OnProgress, opened, to_rgb
from cheem_jax.data.files import Encoded, FolderFiles, import_extra, join_first, stamp_of
from cheem_jax.data.task import SPLITS, Members, Plan, Purpose, splits_of

BY_BYTES, BY_PIXELS = "bytes", "pixels"
MAX_CLASSES = 1_000_000
NAME_FEATURES = ("file_name", "filename", "image/file_name", "name", "id")
HUB = "hf:"
"""Prefix that marks a source as a data set of the Hugging Face hub."""
_SPEC = re.compile(r"([a-z0-9_]+)(?:/([A-Za-z0-9_.-]+))?(?::(\d+\.\d+\.\d+))?")
_OWN_FEATURE = re.compile(r"tensorflow_datasets\.core\.features\.[a-z_]+\.[A-Za-z]+")


class Row(NamedTuple):
    """Key, label and position of one image in a data set. Rows sort by key first."""

    key: str
    label: int
    split: str
    position: int


@dataclasses.dataclass(eq=False)
class Records(Encoded):
    """Images of a data set, identified by split and position."""

    source: str | Path
    image: str
    """Name of an example's image field. The field contains the encoded bytes, or a dict with the
    bytes or a file name."""
    opened: Callable[[str], Any]
    """Function that opens the examples of a split. It can be pickled, and threads share its
    result."""
    places: Sequence[tuple[str, int]]
    keys: Sequence[str]
    roots: Sequence[Path]
    """Folders of the data set. Files that a row names must be inside one of these folders."""

    def where(self, row: int) -> str:
        split, position = self.places[row]
        return f"{self.source} split {split!r} #{position}"

    def read(self, row: int) -> bytes:
        split, position = self.places[row]
        try:
            example = self._splits[split][position][self.image]
            if isinstance(example, bytes):
                return example
            if example is None:
                raise ValueError("the row has no image")
            return example["bytes"] or self._read_file(example["path"])
        except Exception as error:  # array_record, protobuf and pyarrow raise their own error types
            raise ValueError(f"{self.where(row)} cannot be read: {error}") from error

    def _read_file(self, name: str) -> bytes:
        """Read a file that a row names. Files outside of `roots` are refused, because a downloaded
        data set could name any file on this machine, directly or through a link."""
        file = (self.roots[0] / name).resolve()
        if not any(file.is_relative_to(root.resolve()) for root in self.roots):
            raise ValueError(
                f"it names the file {name!r}, which is outside of the data set; save the data set"
                " with save_to_disk, which stores the images themselves"
            )
        return FolderFiles(file.parent, [file.name]).read(0)

    @functools.cached_property
    def _splits(self) -> dict[str, Any]:
        return {split: self.opened(split) for split in {split for split, _ in self.places}}


def plan_rows(
    name: str,
    classes: Sequence[str],
    rows: Mapping[str, Sequence[Row]],
    records: Callable[[Sequence[tuple[str, int]], Sequence[str]], Records],
    *,
    source: str,
    stamp: str,
    seed: int,
    floor: bool = False,
    ignored: Sequence[str] = (),
    is_benchmark: bool = True,
    purpose: Purpose = "learn",
) -> Plan:
    """Plan a task from `rows`, keyed by split. `records(places, keys)` returns the images at
    `places`, which are pairs of split and position, and identifies them by `keys`. For the other
    arguments, see `Plan.of`."""
    members: Members = {}
    places: dict[str, tuple[str, int]] = {}
    for split, split_rows in rows.items():
        members[split] = {}
        repeated = collections.Counter[str]()
        for row in split_rows:
            repeated[row.key] += 1
            # an image can occur more than once, in one split or in two, so its key must identify
            # the occurrence
            number = f"#{repeated[row.key]}" if repeated[row.key] > 1 else ""
            key = f"{split}/{row.key}{number}"
            members[split][key], places[key] = row.label, (row.split, row.position)

    def files(keys: Sequence[str]) -> Records:
        return records([places[key] for key in keys], keys)

    return Plan.of(
        name,
        classes,
        members,
        files,
        source=source,
        stamp=stamp,
        seed=seed,
        floor=floor,
        ignored=ignored,
        is_benchmark=is_benchmark,
        purpose=purpose,
    )


def _unused(title: str, splits: Iterable[str], used: Collection[str]) -> list[str]:
    """Return a note on the splits that are neither train nor validation nor test."""
    others = [split for split in splits if split not in used]
    return [f"{title}: splits ignored: {join_first(others)}"] if others else []


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A data set that TFDS has prepared in a directory, and the names of its image and label
    features."""

    directory: Path
    full_name: str
    """Name, config and version, such as `eurosat/rgb/2.0.0`."""
    image: str
    label: str
    texts: tuple[str, ...]
    """Names of the text features."""
    classes: tuple[str, ...]
    splits: tuple[str, ...]

    def index(
        self,
        splits: Iterable[str],
        key: str | None = None,
        *,
        on_progress: OnProgress | None = None,
    ) -> list[Row]:
        """List the images of `splits`, sorted by key.

        `key` selects the identifier of an image: the name of a text feature, `class/FEATURE` for a
        feature that is unique only within a class, or `bytes` or `pixels` for a hash of the image's
        bytes or pixels. By default, `key` is the first of `NAME_FEATURES` that is a text feature of
        the data set, otherwise `bytes`. Every example is read once, and the result is cached in the
        data set's folder if this folder is writable. Raises ValueError for unlabelled images.
        """
        key = key or next((name for name in NAME_FEATURES if name in self.texts), BY_BYTES)
        rows: list[Row] = []
        for split in splits:
            names, labels = self._keys_and_labels(split, key, on_progress)
            rows += map(Row, names, labels.tolist(), [split] * len(names), range(len(names)))
        return sorted(rows)

    @functools.cached_property
    def stamp(self) -> str:
        """Hash of the sizes and modification times of the files in `directory`."""
        return stamp_of(sorted(file for file in self.directory.iterdir() if file.is_file()))

    def records(self, places: Sequence[tuple[str, int]], keys: Sequence[str]) -> Records:
        """Return the images at `places`; each place is a TFDS split and a position in it."""
        opened = functools.partial(_source, self.directory, self.image)
        return Records(self.directory, self.image, opened, places, keys, [self.directory])

    def _keys_and_labels(
        self, split: str, key: str, on_progress: OnProgress | None
    ) -> tuple[list[str], np.ndarray]:
        """Read keys and labels of one split in TFDS's order, from the cache if it is still
        valid."""
        mark = hashlib.sha256(f"{key} {self.stamp}".encode()).hexdigest()[:16]
        file = self.directory / ".cheem_jax" / f"{split}-{mark}.npz"
        # a missing or truncated cache is written again
        with contextlib.suppress(OSError, ValueError, KeyError):
            arrays = read_npz(file)
            keys, labels = arrays["keys"], arrays["labels"]
            well_formed = keys.dtype.kind == "S" and labels.dtype == np.int32 and labels.ndim == 1
            if (
                well_formed
                and keys.shape == labels.shape
                and 0 <= labels.min() <= labels.max() < len(self.classes)
            ):
                return [name.decode() for name in keys.tolist()], labels
        source = _source(self.directory, self.image, split)
        names: list[str] = []
        # collect labels in a list, because the length of an array would have to be read from the
        # metadata, which can be wrong
        labels_read: list[int] = []
        for position in range(len(source)):
            try:
                example = source[position]
                labels_read.append(int(example[self.label]))
                names.append(self._key(example, key))
            except Exception as error:  # array_record and protobuf raise their own error types
                raise ValueError(
                    f"{self.directory}, split {split!r} #{position}, cannot be read: {error};"
                    " prepare it again"
                ) from error
            if on_progress is not None:
                on_progress(1)
        if not labels_read:
            raise ValueError(
                f"{self.full_name}: split {split!r} in {self.directory} has no example; prepare it"
                " again"
            )
        labels = np.array(labels_read, np.int32)
        if outside := int(np.sum((labels < 0) | (labels >= len(self.classes)))):
            raise ValueError(
                f"{self.full_name}: {outside} of {len(labels)} examples of split {split!r} have"
                f" labels outside 0..{len(self.classes) - 1} ({labels.min()} to {labels.max()}); -1"
                " says that the labels are withheld, so that nothing can be learned from or"
                " measured on these images; use another split"
            )
        # if the cache cannot be written (read-only folder, full disk), the next run reads all
        # examples again
        with contextlib.suppress(OSError):
            file.parent.mkdir(exist_ok=True)
            buffer = io.BytesIO()
            np.savez_compressed(
                buffer, keys=np.array([name.encode() for name in names]), labels=labels
            )
            write_atomically(file, buffer.getvalue())
        return names, labels

    def _key(self, example: dict[str, Any], key: str) -> str:
        if key == BY_BYTES:
            return hashlib.sha256(example[self.image]).hexdigest()
        # hash the pixels, because preparations of the same image on different machines can contain
        # different PNG files
        if key == BY_PIXELS:
            with opened(example[self.image], self.full_name) as image:
                pixels = np.asarray(to_rgb(image))
            return hashlib.sha256(f"{pixels.shape}".encode() + pixels.tobytes()).hexdigest()
        feature = key.removeprefix("class/")
        value = example[feature].decode()
        return value if key == feature else f"{self.classes[int(example[self.label])]}/{value}"


def default_data_dir() -> Path:
    """Return the folder in which TFDS stores data sets by default."""
    return absolute(os.environ.get("TFDS_DATA_DIR") or "~/tensorflow_datasets")


def plan_tfds(
    spec: str,
    data_dir: Path | None,
    *,
    name: str | None = None,
    seed: int = 0,
    purpose: Purpose = "learn",
) -> Plan:
    """Plan a task from the prepared TFDS data set `spec` (`NAME[/CONFIG][:VERSION]`) of labelled
    images.

    The train, validation and test splits are used. A missing validation or test split is cut from
    train. Raises FileNotFoundError if the data set is not prepared, and
    ValueError if it cannot be read.
    """
    prepared = open_prepared(spec, data_dir or default_data_dir())
    split_by_name = splits_of(prepared.full_name, prepared.splits)
    if "train" not in split_by_name.values() and not (split_by_name and purpose == "measure"):
        raise ValueError(f"{prepared.full_name} has no train split, only {sorted(prepared.splits)}")
    rows = {split: prepared.index([name]) for name, split in split_by_name.items()}
    source = f"tfds:{prepared.full_name}"
    stamp = prepared.stamp
    name = name or prepared.full_name.split("/")[0]
    return plan_rows(
        name,
        prepared.classes,
        rows,
        prepared.records,
        source=source,
        stamp=stamp,
        seed=seed,
        ignored=_unused(source, prepared.splits, split_by_name),
        purpose=purpose,
    )


def all_pictures(spec: str, split: str, data_dir: Path | None) -> Records:
    """Return the images of one split, or of a slice such as `train[:1000]`, in TFDS's order and
    without labels."""
    prepared = open_prepared(spec, data_dir or default_data_dir())
    positions = range(len(_source(prepared.directory, prepared.image, split)))
    return prepared.records(
        [(split, position) for position in positions], [f"{split}#{row}" for row in positions]
    )


def open_prepared(spec: str, data_dir: Path) -> Prepared:
    """Open a prepared data set by name. Raises FileNotFoundError if the data set is not prepared,
    and ValueError if it cannot be read."""
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
        # the data type of a text is that of any Python object
        texts = [
            name for name, one in features.items() if (one.np_dtype, one.shape) == (object, ())
        ]
        kind = builder.info.file_format.value
    # json, protobuf and TFDS raise their own error types for unreadable metadata
    except Exception as error:
        reason = f"{error or type(error).__name__}"[:500]
        raise ValueError(
            f"{directory} is not a data set of labelled images that TFDS can open: {reason}"
        ) from error
    if kind not in ("array_record", "parquet"):
        raise ValueError(
            f"{directory} was prepared in the format {kind!r}, which needs TensorFlow to be read;"
            " prepare it again in 'array_record' (`cheem data prepare`, or"
            " file_format='array_record'), after moving this folder away"
        )
    splits = tuple(builder.info.splits)
    return Prepared(directory, builder.info.full_name, image, label, tuple(texts), classes, splits)


def find_prepared(spec: str, data_dir: Path) -> Path:
    """Return the directory of the prepared data set `spec` (`NAME[/CONFIG][:VERSION]`). If `spec`
    has no version, the newest version is used. Raises FileNotFoundError if the data set is not
    prepared, and ValueError if `spec` is invalid or ambiguous."""
    matched = _SPEC.fullmatch(spec)
    if matched is None:
        raise ValueError(
            f"{spec!r} is not the name of a TFDS data set; expected NAME[/CONFIG][:VERSION], e.g."
            " eurosat/rgb:2.0.0"
        )
    name, config, version = matched.groups()
    directories: list[Path] = []
    for folder in [f"{name}/{config}"] if config else [name, f"{name}/*"]:
        # a killed preparation leaves a folder whose name is not a version
        infos = data_dir.glob(f"{folder}/{version or '*'}/dataset_info.json")
        directories = directories or [
            info.parent for info in infos if re.fullmatch(r"\d+\.\d+\.\d+", info.parent.name)
        ]
    if not directories:
        raise FileNotFoundError(f"{spec!r} is not prepared in {data_dir}")
    if len(configs := sorted({directory.parent.name for directory in directories})) > 1:
        raise ValueError(
            f"{spec!r} is prepared in several configs in {data_dir}; name one: {configs}"
        )
    return max(directories, key=lambda directory: tuple(map(int, directory.name.split("."))))


def import_tfds() -> Any:
    """Import TFDS. Raises ValueError if it is not installed."""
    tfds = import_extra("tensorflow_datasets", "datasets", "this")
    logging.getLogger("absl").addFilter(_no_advice)
    return tfds


def _no_advice(record: logging.LogRecord) -> bool:
    """Filter out TFDS's advice to install OpenCV, whose decoder is not used here."""
    return "OpenCV" not in str(record.msg)


def _source(directory: Path, image: str, split: str) -> Any:
    tfds = import_tfds()
    try:
        builder = _builder(directory)
        return builder.as_data_source(split=split, decoders={image: tfds.decode.SkipDecoding()})
    except Exception as error:  # for example, missing or truncated shards
        raise ValueError(f"{directory}, split {split!r}, cannot be opened: {error}") from error


def _builder(directory: Path) -> Any:
    """Open the TFDS builder of a prepared directory. Raises ValueError if features.json names a
    class that is not a feature of TFDS itself, because TFDS would import the module of that
    class."""
    file = directory / "features.json"
    named = _feature_classes(json.loads(file.read_text(encoding="utf-8")))
    if foreign := sorted({name for name in named if not _OWN_FEATURE.fullmatch(name)}):
        raise ValueError(
            f"{file} names the classes {foreign[:3]}; only features of TFDS itself are accepted"
        )
    return import_tfds().builder_from_directory(directory)


def _feature_classes(value: Any) -> Iterator[str]:
    """Yield the name of every Python class in a features.json, including names in strings that
    contain JSON. TFDS imports the modules of these classes."""
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


def _only(features: Any, kind: type, usual: str, where: str = "") -> str:
    """Return `usual` if a feature of type `kind` has this name, otherwise the name of the only
    feature of this type.

    Raises ValueError if the feature is missing or ambiguous; the message starts with `where`.
    """
    names = [name for name, feature in features.items() if isinstance(feature, kind)]
    if usual not in names and len(names) != 1:
        raise ValueError(
            f"{where}expected one column of {kind.__name__}, found {names or 'none'} among"
            f" {sorted(features)}; rename the one to use to {usual!r}, or cast it"
        )
    return usual if usual in names else names[0]


def is_saved(path: Path) -> bool:
    """Return whether `save_to_disk` of the library `datasets` wrote this folder."""
    of_one_split = (path / "dataset_info.json").is_file() and (path / "state.json").is_file()
    return of_one_split or (path / "dataset_dict.json").is_file()


def plan_hub(
    source: str | Path, *, name: str | None = None, seed: int = 0, purpose: Purpose = "learn"
) -> Plan:
    """Plan a data set as one task. `source` is the name of a data set on the hub (`NAME` or
    `NAME:CONFIG`), or the path of a folder that `save_to_disk` of the library `datasets` wrote.

    The data set must have one column of images and one of class labels, or columns called `image`
    and `label`. Missing splits are cut from train with `seed`. Raises OSError if
    the hub lacks the data set or does not answer, and ValueError for other errors.
    """
    datasets = import_extra("datasets", "hub", "this")
    if not isinstance(source, Path):
        source = source.removeprefix(HUB)
    title = f"{'' if isinstance(source, Path) else HUB}{source}"
    datasets.disable_progress_bars()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # by default it logs every attempt
    if not isinstance(source, Path):
        _ask_hub(source.partition(":")[0])
    try:
        if isinstance(source, Path):
            loaded = datasets.load_from_disk(str(source))
            default = source.resolve().name
            roots = [source]
        else:
            repository, _, config = source.partition(":")
            loaded = datasets.load_dataset(repository, config or None)
            default = name_in(source)
            roots = _cache_folders(repository)
    except Exception as error:  # the hub, Arrow and `datasets` raise their own error types
        reason = " ".join(f"{error or type(error).__name__}".split())[:300]
        way_out = (
            "check the name (hf:OWNER/NAME or hf:OWNER/NAME:CONFIG) and the network, or give a"
            " folder that save_to_disk of the library datasets wrote"
        )
        if isinstance(source, Path):
            way_out = "save it again with save_to_disk, without empty splits"
        raise ValueError(f"{title} cannot be read: {reason}; {way_out}") from error
    splits = loaded if isinstance(loaded, dict) else {"train": loaded}
    split_by_name = splits_of(title, splits)
    if "train" not in split_by_name.values() and not (split_by_name and purpose == "measure"):
        raise ValueError(f"{title} has no train split, only {sorted(splits)}")
    ignored = _unused(title, splits, split_by_name)
    splits = {split: splits[name] for name, split in split_by_name.items()}
    features = next(splits[split] for split in SPLITS if split in splits).features
    image = _only(features, datasets.Image, "image", f"{title}: ")
    label = _only(features, datasets.ClassLabel, "label", f"{title}: ")
    classes = features[label].names
    loaded = dict[str, list[Row]]()
    for split, rows in splits.items():
        if rows.features.get(label) != features[label] or image not in rows.features:
            raise ValueError(
                f"{title}: the columns of {split} are not those of train; save splits that have the"
                " same"
            )
        labels = np.array(
            [-1 if one is None else one for one in rows.select_columns([label])[:][label]], int
        )
        if outside := int(((labels < 0) | (labels >= len(classes))).sum()):
            raise ValueError(
                f"{title}: {outside} of {len(labels)} images of {split} have no label; save the"
                " other splits with save_to_disk, and give that folder"
            )
        loaded[split] = [
            Row(f"{at:07d}", label, split, at) for at, label in enumerate(labels.tolist())
        ]
        splits[split] = rows.select_columns([image]).cast_column(
            image, datasets.Image(decode=False)
        )
    files = {Path(file["filename"]) for rows in splits.values() for file in rows.cache_files}
    if isinstance(source, Path) and (
        outside := [file for file in files if not file.resolve().is_relative_to(source.resolve())]
    ):
        raise ValueError(
            f"{title}: its state.json names the file {str(outside[0])!r}, which is outside of this"
            " folder; save the data set again with save_to_disk"
        )
    records = functools.partial(Records, title, image, splits.__getitem__, roots=roots)
    return plan_rows(
        name or default,
        classes,
        loaded,
        records,
        source=title,
        stamp=stamp_of(sorted(files)),
        seed=seed,
        ignored=ignored,
        is_benchmark=False,
        purpose=purpose,
    )


def _cache_folders(repository: str) -> list[Path]:
    """Return the folders that contain a data set's downloaded files: its folder in the hub's cache,
    and the download folders of the library `datasets`."""
    from datasets import config
    from huggingface_hub import constants

    name = f"datasets--{repository.replace('/', '--')}"
    downloads = (config.DOWNLOADED_DATASETS_PATH, config.EXTRACTED_DATASETS_PATH)
    return [Path(constants.HF_HUB_CACHE, name), *map(Path, downloads)]


def _ask_hub(repository: str) -> None:
    """Raise OSError if the hub lacks the data set or does not answer. Without this check, the
    library `datasets` would retry for minutes."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import OfflineModeIsEnabled

    try:
        with (
            hub_errors(f"{HUB}{repository}", "read"),
            contextlib.suppress(OfflineModeIsEnabled),
        ):
            HfApi().dataset_info(repository, timeout=TIMEOUT)
    except OSError as error:
        raise OSError(
            f"{error}; HF_HUB_OFFLINE=1 takes a data set that was loaded before"
        ) from error


def name_in(spec: str) -> str:
    """Derive the name of a task from `OWNER/NAME[:CONFIG]`."""
    return spec.removeprefix(HUB).partition(":")[0].split("/")[-1]
