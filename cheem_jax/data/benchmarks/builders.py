"""TensorFlow Datasets builders over the readers: prepared on disk as TFDS does it, without TensorFlow.

TFDS has no builder of the first two data sets. The others have the names, versions and features of its own
builders, so that reading prepared data does not depend on which of the two has made it. None is registered:
a second class of a name would clash, so `prepare_from_folder` makes them here.
"""

import functools
import operator
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import tensorflow_datasets as tfds

from cheem_jax.data.benchmarks import readers
from cheem_jax.data.benchmarks.archives import Reading, Source
from cheem_jax.data.benchmarks.table import TASKS
from cheem_jax.data.decode import Progress

ORIGIN = "Read from the official files in a folder that the user filled, not downloaded by TensorFlow Datasets."


class DataSet(NamedTuple):
    """What the features of a data set are made from; the rest is in the table."""

    read: Callable[[Path], Reading]
    key: str
    """The feature that contains an example's key."""
    text: Callable[[PurePosixPath], str] = str
    """What the stock builder stores for a key."""
    image_shape: tuple[int | None, int | None, int] = (None, None, 3)
    more: str = ""
    """At the end of the description."""


_stem, _name = operator.attrgetter("stem"), operator.attrgetter("name")
DATA_SETS = {
    "fgvc_aircraft/default": DataSet(readers.read_aircraft, "file_name", _stem),
    "fgvc_aircraft/without_strip": DataSet(
        functools.partial(readers.read_aircraft, cut_strip=True),
        "file_name",
        _stem,
        more=" The lowest 20 pixels are cut off; JPEG, quality 95.",
    ),
    "gtsrb": DataSet(readers.read_gtsrb, "file_name"),
    "cars196": DataSet(readers.read_cars, "id", _stem),
    "sun397/standard-part1-120k": DataSet(readers.read_sun397, "file_name"),
    "eurosat/rgb": DataSet(readers.read_eurosat, "filename", _name, (64, 64, 3)),
    # as TFDS's, but one split with everything instead of 30 sampled images of each class and the rest
    "caltech101": DataSet(readers.read_caltech101, "image/file_name", _name),
}
"""By `<name>` or `<name>/<config>`."""


def prepare_from_folder(name: str, data_dir: Path, place: Path, on_progress: Progress = lambda num: None) -> Path:
    """Writes a data set of `DATA_SETS` from the files in `place` to `<data_dir>/<name>[/<config>]/<version>`.

    A data set that is prepared already stays as it is, and `place` is not read. After an error nothing is left that
    could be taken for a prepared data set. `on_progress` counts images. Raises what the readers raise, ValueError for
    an unknown name.
    """
    if name not in DATA_SETS:
        raise ValueError(f"no builder named {name!r}; there are {', '.join(DATA_SETS)}")
    data_set = DATA_SETS[name]
    task = next(task for task in TASKS if task.builder.split("/")[0] == name.split("/")[0])
    directory = data_dir / name / task.version
    if (directory / "dataset_info.json").is_file():
        return directory
    description = f"{task.description}{data_set.more} {ORIGIN}"
    builder = _builder(f"{name}:{task.version}", data_dir, data_set, data_set.read(place), description, on_progress)
    config = tfds.download.DownloadConfig(manual_dir=place, try_download_gcs=False)
    tfds.disable_progress_bar()  # `on_progress` counts already
    try:
        with tempfile.TemporaryDirectory() as unused:  # TFDS makes folders for downloads even if there are none
            builder.download_and_prepare(file_format="array_record", download_config=config, download_dir=unused)
    finally:
        tfds.enable_progress_bar()
    return directory


class _Info(tfds.core.DatasetInfo):
    def initialize_from_bucket(self) -> None:
        """Nothing: what TFDS publishes under a name describes its own builder, and asking takes a network."""


def _builder(
    spec: str, data_dir: Path, data_set: DataSet, reading: Reading, description: str, on_progress: Progress
) -> Any:
    """A builder of what a reader has found; `spec` is `<name>[/<config>]:<version>`."""
    name, _, version = spec.partition(":")
    name, _, config = name.partition("/")

    class Builder(tfds.core.GeneratorBasedBuilder, skip_registration=True):
        VERSION = tfds.core.Version(version)
        BUILDER_CONFIGS = [tfds.core.BuilderConfig(name=config)] if config else []

        def _info(self) -> tfds.core.DatasetInfo:
            features = tfds.features.FeaturesDict({
                "image": tfds.features.Image(shape=data_set.image_shape),
                "label": tfds.features.ClassLabel(names=reading.classes),
                data_set.key: tfds.features.Text(),
            })  # fmt: skip
            return _Info(builder=self, description=description, features=features, supervised_keys=("image", "label"))

        def _split_generators(self, dl_manager: tfds.download.DownloadManager) -> dict[str, Any]:
            return {split: self._generate_examples(source) for split, source in reading.sources.items()}

        def _generate_examples(self, source: Source) -> Iterator[tuple[str, dict[str, Any]]]:
            for key, image, label in source.read():
                on_progress(1)
                yield key, {"image": image, "label": label, data_set.key: data_set.text(PurePosixPath(key))}

        # TFDS would print here what it downloads
        def _log_download_bytes(self) -> None: ...
        def _log_download_done(self) -> None: ...

    Builder.name = name
    return Builder(data_dir=data_dir, config=config or None)
