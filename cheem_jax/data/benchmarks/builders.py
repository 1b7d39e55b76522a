"""TensorFlow Datasets builders over the readers: prepared on disk as TFDS does it, without TensorFlow.

TFDS has no builder of the first two data sets. The others have the names, versions and features of its own
builders, so that reading prepared data does not depend on which of the two has made it. None is registered:
a second class of a name would clash, so `prepare_from_folder` makes them here.
"""

import functools
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import tensorflow_datasets as tfds

from cheem_jax.data.benchmarks import readers
from cheem_jax.data.benchmarks.archives import Reading, Source
from cheem_jax.data.decode import Progress

ORIGIN = "Read from the official files in a folder that the user filled, not downloaded by TensorFlow Datasets."


class DataSet(NamedTuple):
    """What TFDS is given of a data set."""

    version: str
    read: Callable[[Path], Reading]
    description: str
    key: str
    """The feature that contains an example's key."""
    text: Callable[[PurePosixPath], str] = str
    """What the stock builder stores for a key."""
    image_shape: tuple[int | None, int | None, int] = (None, None, 3)


_AIRCRAFT = DataSet(
    "1.0.0",
    readers.read_aircraft,
    "FGVC-Aircraft 2013b (robots.ox.ac.uk/~vgg/data/fgvc-aircraft): 100 variants, official parts.",
    "file_name",
    lambda key: key.stem,
)
DATA_SETS = {
    "fgvc_aircraft/default": _AIRCRAFT,
    "fgvc_aircraft/without_strip": _AIRCRAFT._replace(
        read=functools.partial(readers.read_aircraft, cut_strip=True),
        description=f"{_AIRCRAFT.description} The lowest 20 pixels are cut off; JPEG, quality 95.",
    ),
    "gtsrb": DataSet(
        "1.0.0",
        readers.read_gtsrb,
        "German Traffic Sign Recognition Benchmark (benchmark.ini.rub.de): 43 signs, PPM coded as PNG without loss.",
        "file_name",
    ),
    "cars196": DataSet(
        "2.1.0",
        readers.read_cars,
        "Stanford Cars (Krause et al., 3dRR 2013): 196 makes, models and years, without the bounding boxes.",
        "id",
        lambda key: key.stem,
    ),
    "sun397/standard-part1-120k": DataSet(
        "4.0.0",
        readers.read_sun397,
        "SUN397 (vision.princeton.edu/projects/2010/SUN): 397 scenes, the first official partition. The images are "
        "the original ones, not re-coded to 120,000 pixels as the configuration of TensorFlow Datasets' own.",
        "file_name",
    ),
    "eurosat/rgb": DataSet(
        "2.0.0",
        readers.read_eurosat,
        "EuroSAT (github.com/phelber/eurosat): ten kinds of land use seen by Sentinel-2, in red, green and blue.",
        "filename",
        lambda key: key.name,
        (64, 64, 3),
    ),
    # as TFDS's, but one split with everything instead of 30 sampled images of each class and the rest
    "caltech101": DataSet(
        "3.0.2",
        readers.read_caltech101,
        "Caltech-101 (doi.org/10.22002/D1.20086): 101 classes and the background class; all images are in train.",
        "image/file_name",
        lambda key: key.name,
    ),
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
    directory = data_dir / name / data_set.version
    if (directory / "dataset_info.json").is_file():
        return directory
    builder = _builder(name, data_dir, data_set, data_set.read(place), on_progress)
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


def _builder(full_name: str, data_dir: Path, data_set: DataSet, reading: Reading, on_progress: Progress) -> Any:
    """A builder of what a reader has found."""
    name, _, config = full_name.partition("/")

    class Builder(tfds.core.GeneratorBasedBuilder, skip_registration=True):
        VERSION = tfds.core.Version(data_set.version)
        BUILDER_CONFIGS = [tfds.core.BuilderConfig(name=config)] if config else []

        def _info(self) -> tfds.core.DatasetInfo:
            features = {
                "image": tfds.features.Image(shape=data_set.image_shape),
                "label": tfds.features.ClassLabel(names=reading.classes),
                data_set.key: tfds.features.Text(),
            }
            return _Info(
                builder=self,
                description=f"{data_set.description} {ORIGIN}",
                features=tfds.features.FeaturesDict(features),
                supervised_keys=("image", "label"),
            )

        def _split_generators(self, dl_manager: tfds.download.DownloadManager) -> dict[str, Any]:
            return {split: self._generate_examples(source) for split, source in reading.sources.items()}

        def _generate_examples(self, source: Source) -> Iterator[tuple[str, dict[str, Any]]]:
            for key, image, label in source.read():
                on_progress(1)
                yield key, {"image": image, "label": label, data_set.key: data_set.text(PurePosixPath(key))}

        def _log_download_bytes(self) -> None:
            """Nothing: TFDS would print here what it downloads."""

        def _log_download_done(self) -> None:
            """Nothing, as above."""

    Builder.name = name
    return Builder(data_dir=data_dir, config=config or None)
