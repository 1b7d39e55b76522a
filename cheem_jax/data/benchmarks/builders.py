"""Readers of data sets, and a TensorFlow Datasets (TFDS) builder that prepares them without
TensorFlow.

A reader uses official archives, or the unpacked folders, in the folder `place`, which the user
fills. It raises FileNotFoundError if archives are missing, and ValueError for corrupted archives,
inconsistent lists, and absent images.

`cars196`, `sun397`, `eurosat` and `caltech101` have the names, versions and features of TFDS's
builders, so it does not matter which builder prepared these data sets. The other data sets are not
in TFDS, or only in different versions. No builder is registered with TFDS, because a second class
with the same name would clash; `prepare_from_folder` creates each builder when it is needed.
"""

import csv
import functools
import io
import json
import operator
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import numpy as np

from cheem_jax.data.benchmarks.archives import (
    Reading,
    Source,
    below,
    label_keys,
    locate,
    members,
    read_files,
    text_lines,
)
from cheem_jax.data.benchmarks.table import BY_NAME, TASKS
from cheem_jax.data.decode import OnProgress, opened
from cheem_jax.data.files import IMAGE_SUFFIXES
from cheem_jax.data.task import cut, hashed_order

ORIGIN = (
    "Read from the official files in a folder that the user filled, not downloaded by TensorFlow"
    " Datasets."
)
STRIP_PIXELS = 20  # height of the copyright notice at the bottom of aircraft images
SECONDS = 60
MAX_BYTES = 2**31
"""Memory limit in bytes for the process that reads a MATLAB file."""
_PROGRAM = """
import contextlib, io, json, sys
with contextlib.suppress(ImportError, ValueError):  # not every system has this limit
    import resource
    resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv[2]),) * 2)
import numpy, scipy.io
variables = scipy.io.loadmat(io.BytesIO(sys.stdin.buffer.read()), squeeze_me=True,
    variable_names=[sys.argv[1]])
found = numpy.atleast_1d(variables[sys.argv[1]])
rows = found.ravel(order="F").tolist()  # MATLAB's order
if found.dtype.names:
    rows = [dict(zip(found.dtype.names, row)) for row in rows]
print(json.dumps(rows, default=lambda value: value.tolist()))
"""


def read_aircraft(place: Path, *, cut_strip: bool = False) -> Reading:
    """Read FGVC-Aircraft with its variants as classes and the splits train, validation and test.
    Keys are seven digits with `.jpg`.

    `cut_strip` removes the lowest 20 rows of pixels and re-encodes images as JPEG of quality 95.
    Without `cut_strip`, the files are not re-encoded.
    """
    [path] = locate(place, ("fgvc-aircraft-2013b.tar.gz", "fgvc-aircraft-2013b"))
    lists = {"train": "train", "validation": "val", "test": "test"}
    names = [f"images_variant_{part}.txt" for part in lists.values()]
    variants, *splits = _read_lists(path, "variants.txt", *names)
    convert = (
        functools.partial(_recode, cut=STRIP_PIXELS, format="JPEG", quality=95)
        if cut_strip
        else None
    )
    sources = {}
    for split, name, lines in zip(lists, names, splits, strict=True):
        pairs = [line.partition(" ") for line in lines]  # names of variants contain spaces
        labels = label_keys(
            ((f"{digits}.jpg", variant) for digits, _, variant in pairs),
            variants,
            f"{path}: {name}",
        )
        sources[split] = Source(path, below("images", 1, ".jpg"), labels, convert)
    return Reading(tuple(variants), sources)


def read_gtsrb(place: Path) -> Reading:
    """Read GTSRB with the splits train and test. Keys are `<class>/<track>_<frame>.ppm` in train
    and `<number>.ppm` in test. Images are re-encoded as PNG.

    The train split is the archive of 26,640 images (`GTSRB-Training_fixed.zip`).
    """
    train, test, truth = locate(
        place,
        ("GTSRB-Training_fixed.zip", "GTSRB-Training_fixed", "GTSRB/Training"),
        ("GTSRB_Final_Test_Images.zip", "GTSRB_Final_Test_Images", "GTSRB/Final_Test"),
        (
            "GTSRB_Final_Test_GT.zip",
            "GTSRB_Final_Test_GT",
            "GT-final_test.csv",
            "GTSRB/GT-final_test.csv",
        ),
    )
    in_lists = below("Training", 2, ".csv")
    rows = []
    for name, read in members(train):
        if key := in_lists(name):
            folder = key.partition("/")[0]
            listed = _annotations(text_lines(read(), f"{train}: {name}"), f"{train}: {name}")
            rows += [(f"{folder}/{file}", label) for file, label in listed]
    [lines] = _read_lists(truth, "GT-final_test.csv")
    classes = BY_NAME["gtsrb"].class_names
    numbers = range(len(classes))
    test_labels = label_keys(_annotations(lines, str(truth)), numbers, str(truth))
    as_png = functools.partial(_recode, format="PNG")
    sources = {
        "train": Source(
            train, below("Training", 2, ".ppm"), label_keys(rows, numbers, str(train)), as_png
        ),
        "test": Source(test, below("Images", 1, ".ppm"), test_labels, as_png),
    }
    return Reading(classes, sources)


def read_cars(place: Path) -> Reading:
    """Read Stanford Cars with the splits train and test. Keys are file names, which are not unique
    across splits."""
    test_list = "cars_test_annos_withlabels.mat"
    train, test, devkit, annotations = locate(
        place,
        ("cars_train.tgz", "cars_train"),
        ("cars_test.tgz", "cars_test"),
        ("car_devkit.tgz", "car_devkit", "devkit"),
        (test_list, f"devkit/{test_list}"),
    )
    meta, train_list = read_files(devkit, "cars_meta.mat", "cars_train_annos.mat")
    classes = tuple(map(str, read_variable(meta, "class_names", f"{devkit}: cars_meta.mat")))
    train_labels = _car_labels(train_list, f"{devkit}: cars_train_annos.mat", len(classes))
    test_labels = _car_labels(read_files(annotations, test_list)[0], str(annotations), len(classes))
    sources = {
        "train": Source(train, below("cars_train", 1, ".jpg"), train_labels),
        "test": Source(test, below("cars_test", 1, ".jpg"), test_labels),
    }
    return Reading(classes, sources)


def read_sun397(place: Path) -> Reading:
    """Read the first official partition of SUN397 with the splits train and test. Keys (such as
    `/a/abbey/sun_x.jpg`) and classes are those of the official lists.

    Some files named .jpg are PNG, BMP or GIF; they are not re-encoded.
    """
    images, partitions = locate(
        place, ("SUN397.tar.gz", "SUN397"), ("Partitions.zip", "Partitions")
    )
    names = ("Training_01.txt", "Testing_01.txt")
    classes, *lists = _read_lists(partitions, "ClassName.txt", *names)

    def key_of(name: str) -> str | None:
        _, top, rest = f"/{name}".partition("/SUN397/")
        return f"/{rest}" if top else None

    sources = {}
    for split, name, lines in zip(("train", "test"), names, lists, strict=True):
        pairs = ((line, line.rpartition("/")[0]) for line in lines)
        sources[split] = Source(images, key_of, label_keys(pairs, classes, f"{partitions}: {name}"))
    return Reading(tuple(classes), sources)


def read_eurosat(place: Path) -> Reading:
    """Read EuroSAT in RGB, which has only a train split. Keys are `<class folder>/<file>`."""
    [path] = locate(place, ("EuroSAT.zip", "2750", "EuroSAT"))
    return _read_class_folders("eurosat", path, "2750")


def read_caltech101(place: Path) -> Reading:
    """Read Caltech-101 with its background class; all images are in train. Keys are `<class
    folder>/<file>`."""
    folder, inner = "101_ObjectCategories", "101_ObjectCategories.tar.gz"
    [path] = locate(
        place, ("caltech-101.zip", folder, f"caltech-101/{folder}", inner, f"caltech-101/{inner}")
    )
    return _read_class_folders("caltech101", path, folder)


def _read_class_folders(task: str, path: Path, folder: str) -> Reading:
    """Read all images in the class folders below `folder` into the train split. The names of the
    class folders can differ in case from the class names."""
    key_of = below(folder, 2, ".jpg")
    classes = BY_NAME[task].class_names
    keys = sorted(key for name, _ in members(path) if (key := key_of(name)))
    rows = ((key, key.partition("/")[0].lower()) for key in keys)
    labels = label_keys(rows, [name.lower() for name in classes], f"{path}, below {folder}")
    return Reading(classes, {"train": Source(path, key_of, labels)})


def read_cub200(place: Path) -> Reading:
    """Read CUB-200-2011 with its official train and test splits, or the copy that the library PILOT
    provides, which has one folder per split. Keys are `<class folder>/<file>`."""
    [path] = locate(place, BY_NAME["cub200"].archives[0].names)
    if not path.name.startswith("CUB_200_2011"):
        return _read_train_and_test(path)
    names = ("classes.txt", "images.txt", "train_test_split.txt")
    classes, images, splits = (
        dict(line.split(maxsplit=1) for line in lines) for lines in _read_lists(path, *names)
    )
    labels = {}
    for split, mark in (("train", "1"), ("test", "0")):
        keys = [key for number, key in images.items() if splits.get(number) == mark]
        pairs = ((key, key.partition("/")[0]) for key in keys)
        labels[split] = label_keys(pairs, [*classes.values()], f"{path}: {split}")
    key_of = below("images", 2, ".jpg")
    return Reading(
        tuple(classes.values()), {split: Source(path, key_of, labels[split]) for split in labels}
    )


def read_imagenet_variant(place: Path, *, name: str) -> Reading:
    """Read ImageNet-R or ImageNet-A (`name` is `imagenet-r` or `imagenet-a`) from the copy that the
    library PILOT provides, which has one folder per split, or from the official archive, which has
    no splits. Keys are `<WordNet ID>/<file>`.

    This function splits the n images of the official archive: ceil(n / 5) images become the test
    split, distributed over the classes in proportion to the class sizes.
    """
    [path] = locate(place, BY_NAME[name.replace("-", "_")].archives[0].names)
    key_of = below(name, 2, ".jpg")
    keys = sorted(key for member, _ in members(path) if (key := key_of(member)))
    if not keys:
        return _read_train_and_test(path)
    classes = sorted({key.partition("/")[0] for key in keys})
    labels = label_keys(((key, key.partition("/")[0]) for key in keys), classes, str(path))
    order = hashed_order(keys, seed=0)
    is_test = cut(np.array([labels[key] for key in keys]), -(-len(keys) // 5), keep=2, order=order)
    sources = {}
    for split, mask in (("train", ~is_test), ("test", is_test)):
        chosen = {keys[row]: labels[keys[row]] for row in np.flatnonzero(mask)}
        sources[split] = Source(path, key_of, chosen)
    return Reading(tuple(classes), sources)


def read_pilot(place: Path, *, name: str) -> Reading:
    """Read a data set that the library PILOT provides, with one folder per split. Keys are `<class
    folder>/<file>`."""
    [path] = locate(place, (f"{name}.zip", name))
    return _read_train_and_test(path)


def _read_train_and_test(path: Path) -> Reading:
    """Read the images in `train/<class>/` and `test/<class>/` below any folder. Classes are the
    sorted folders of train."""
    key_of = {split: below(split, 2, *IMAGE_SUFFIXES) for split in ("train", "test")}
    names = [name for name, _ in members(path)]
    keys = {
        split: sorted(key for name in names if (key := of(name))) for split, of in key_of.items()
    }
    if missing := [f"{split}/<class>/<image>" for split in keys if not keys[split]]:
        raise FileNotFoundError(f"{path}: no image is at {' and '.join(missing)}")
    classes = sorted({key.partition("/")[0] for key in keys["train"]})
    sources = {}
    for split, of in key_of.items():
        pairs = ((key, key.partition("/")[0]) for key in keys[split])
        sources[split] = Source(path, of, label_keys(pairs, classes, f"{path}: {split}"))
    return Reading(tuple(classes), sources)


def _read_lists(path: Path, *names: str) -> list[list[str]]:
    """Return the non-empty lines of each text file in `names`. `path` is the folder or archive that
    contains the files."""
    files = zip(names, read_files(path, *names), strict=True)
    return [text_lines(data, f"{path}: {name}") for name, data in files]


def _annotations(lines: list[str], where: str) -> list[tuple[str, int]]:
    """Return the file name and class of each row of a GTSRB list."""
    rows = csv.DictReader(lines, delimiter=";")
    try:
        return [(row["Filename"], int(row["ClassId"])) for row in rows]
    except (KeyError, TypeError, ValueError, csv.Error) as error:
        raise ValueError(
            f"{where}, line {rows.line_num}: expected columns Filename and ClassId (a number)"
            f" separated by ';' ({error!r}); the list without classes cannot be used"
        ) from error


def _car_labels(data: bytes, where: str, num_classes: int) -> dict[str, int]:
    annotations = read_variable(data, "annotations", where)
    try:
        rows = [(str(row["fname"]), int(row["class"])) for row in annotations]
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise ValueError(
            f"{where}: annotations need the fields fname and class, a name and a number ({error!r})"
        ) from error
    return label_keys(rows, range(1, num_classes + 1), where)


def _recode(data: bytes, name: str, *, cut: int = 0, format: str, **options: int) -> bytes:
    """Convert an image to another format, without its lowest `cut` rows of pixels."""
    buffer = io.BytesIO()
    with opened(data, name) as image:
        if image.height <= cut:
            raise ValueError(f"the image has {image.height} rows, expected more than {cut}")
        image.crop((0, 0, image.width, image.height - cut)).save(buffer, format, **options)
    return buffer.getvalue()


def read_variable(data: bytes, name: str, where: str) -> list[Any]:
    """Return the elements of a variable in a `.mat` file, in MATLAB's order. Elements of a struct
    array are dicts.

    SciPy reads the file in a separate process, because some corrupted files cause a segmentation
    fault. Raises ValueError if the file is corrupted, lacks the variable, or exceeds the limits on
    time and memory. `where` is the file's name for messages.
    """
    try:
        process = subprocess.run(
            [sys.executable, "-P", "-c", _PROGRAM, name, str(MAX_BYTES)],
            input=data,
            capture_output=True,
            timeout=SECONDS,
            # limit OpenBLAS to one thread, because each thread uses address space, which is limited
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
        )
    except subprocess.TimeoutExpired as error:
        raise ValueError(
            f"{where}: variable {name!r} was not read within {SECONDS} seconds"
        ) from error
    if process.returncode != 0:
        last_line = process.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        reason = last_line or f"signal {-process.returncode}"
        raise ValueError(f"{where}: variable {name!r} cannot be read: {reason}; download it again")
    return json.loads(process.stdout)


class DataSet(NamedTuple):
    """Reader and features of a data set; further facts are in the module `table`."""

    read: Callable[[Path], Reading]
    key: str
    """Name of the feature that contains the key of an example."""
    text: Callable[[PurePosixPath], str] = str
    """Function that converts the key of an example to the text that TFDS stores as its key."""
    image_shape: tuple[int | None, int | None, int] = (None, None, 3)
    more: str = ""
    """Text that is appended to the description of the data set."""


_stem, _name = operator.attrgetter("stem"), operator.attrgetter("name")
DATA_SETS = {
    "fgvc_aircraft/default": DataSet(read_aircraft, "file_name", _stem),
    "fgvc_aircraft/without_strip": DataSet(
        functools.partial(read_aircraft, cut_strip=True),
        "file_name",
        _stem,
        more=" The lowest 20 pixels are cut off; JPEG, quality 95.",
    ),
    "gtsrb": DataSet(read_gtsrb, "file_name"),
    "cars196": DataSet(read_cars, "id", _stem),
    "sun397/standard-part1-120k": DataSet(read_sun397, "file_name"),
    "eurosat/rgb": DataSet(read_eurosat, "filename", _name, (64, 64, 3)),
    # This builder puts all images into one split, whereas TFDS's own builder samples 30 images of
    # each class for train.
    "caltech101": DataSet(read_caltech101, "image/file_name", _name),
    "cub200": DataSet(read_cub200, "file_name"),
    "imagenet_r": DataSet(functools.partial(read_imagenet_variant, name="imagenet-r"), "file_name"),
    "imagenet_a": DataSet(functools.partial(read_imagenet_variant, name="imagenet-a"), "file_name"),
    "vtab50": DataSet(functools.partial(read_pilot, name="vtab"), "file_name"),
    "omnibenchmark": DataSet(functools.partial(read_pilot, name="omnibenchmark"), "file_name"),
}
"""Data sets, keyed by `<name>` or `<name>/<config>`."""


def prepare_from_folder(
    name: str, data_dir: Path, place: Path, on_progress: OnProgress = lambda num: None
) -> Path:
    """Prepare a data set of `DATA_SETS` from the files in `place`. The data set is written to
    `<data_dir>/<name>[/<config>]/<version>`.

    If the data set is already prepared, `place` is not read. An error leaves nothing that looks
    like a prepared data set. `on_progress` is called with 1 after each image. Raises the errors of
    the readers, and ValueError for an unknown name.
    """
    if name not in DATA_SETS:
        raise ValueError(f"unknown builder {name!r}; expected one of {', '.join(DATA_SETS)}")
    import tensorflow_datasets as tfds  # a slow import, from an optional extra

    data_set = DATA_SETS[name]
    task = next(task for task in TASKS if task.builder.split("/")[0] == name.split("/")[0])
    directory = data_dir / name / task.version
    if (directory / "dataset_info.json").is_file():
        return directory
    reading = data_set.read(place)
    short, _, config = name.partition("/")

    class Info(tfds.core.DatasetInfo):
        def initialize_from_bucket(self) -> None:
            """Skip the published metadata, which describe TFDS's own builder and would have to be
            downloaded."""

    class Builder(tfds.core.GeneratorBasedBuilder, skip_registration=True):
        VERSION = tfds.core.Version(task.version)
        BUILDER_CONFIGS = [tfds.core.BuilderConfig(name=config)] if config else []

        def _info(self) -> Info:
            features = tfds.features.FeaturesDict(
                {
                    "image": tfds.features.Image(shape=data_set.image_shape),
                    "label": tfds.features.ClassLabel(names=reading.classes),
                    data_set.key: tfds.features.Text(),
                }
            )
            description = f"{task.description}{data_set.more} {ORIGIN}"
            return Info(
                builder=self,
                description=description,
                features=features,
                supervised_keys=("image", "label"),
            )

        def _split_generators(self, dl_manager: Any) -> dict[str, Any]:
            return {
                split: self._generate_examples(source) for split, source in reading.sources.items()
            }

        def _generate_examples(self, source: Source) -> Iterator[tuple[str, dict[str, Any]]]:
            for key, image, label in source.read():
                on_progress(1)
                yield (
                    key,
                    {
                        "image": image,
                        "label": label,
                        data_set.key: data_set.text(PurePosixPath(key)),
                    },
                )

        # These methods are empty, because TFDS's methods would print messages about downloads.
        def _log_download_bytes(self) -> None: ...
        def _log_download_done(self) -> None: ...

    Builder.name = short
    builder = Builder(data_dir=data_dir, config=config or None)
    downloads = tfds.download.DownloadConfig(manual_dir=place, try_download_gcs=False)
    tfds.disable_progress_bar()  # `on_progress` reports the progress
    try:
        # use a temporary folder, because TFDS creates folders for downloads that never happen
        with tempfile.TemporaryDirectory() as unused:
            builder.download_and_prepare(
                file_format="array_record", download_config=downloads, download_dir=unused
            )
    finally:
        tfds.enable_progress_bar()
    return directory
