"""TensorFlow Datasets builders over the readers: prepared on disk as TFDS does it, without TensorFlow.

TFDS has no builder of the first two data sets. The others have the names, versions and features of its own
builders, so that reading prepared data does not depend on which of the two has made it. None is registered:
a second class of a name would clash, so `prepare_from_folder` takes them from here.
"""

import functools
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar

import tensorflow_datasets as tfds

from cheem_jax.data.benchmarks.readers import (
    read_aircraft,
    read_caltech101,
    read_cars,
    read_eurosat,
    read_gtsrb,
    read_sun397,
)
from cheem_jax.data.benchmarks.reading import Example, Reading
from cheem_jax.data.decode import Progress

ORIGIN = "Read from the official files in a folder that the user filled, not downloaded by TensorFlow Datasets."


class _Info(tfds.core.DatasetInfo):
    def initialize_from_bucket(self) -> None:
        """Nothing: what TFDS publishes under a name tells of its own builder, and asking takes a network."""


class _FromFolder(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    """A builder of what a reader has found."""

    KEY_FEATURE: ClassVar[str]
    IMAGE_SHAPE: ClassVar[tuple[int | None, int | None, int]] = (None, None, 3)
    DESCRIPTION: ClassVar[str]
    CITATION: ClassVar[str]
    HOMEPAGE: ClassVar[str]

    def __init__(self, reading: Reading, on_progress: Progress, **options: Any):
        self._reading, self._on_progress = reading, on_progress
        super().__init__(**options)

    def _info(self) -> tfds.core.DatasetInfo:
        features = {
            "image": tfds.features.Image(shape=self.IMAGE_SHAPE),
            "label": tfds.features.ClassLabel(names=self._reading.classes),
            self.KEY_FEATURE: tfds.features.Text(),
        }
        return _Info(
            builder=self,
            description=f"{self.DESCRIPTION} {ORIGIN}",
            features=tfds.features.FeaturesDict(features),
            supervised_keys=("image", "label"),
            homepage=self.HOMEPAGE,
            citation=f"{self.CITATION} ({ORIGIN})",
        )

    def _split_generators(self, dl_manager: tfds.download.DownloadManager) -> dict[str, Any]:
        del dl_manager  # nothing is downloaded
        return {split: self._generate_examples(read) for split, read in self._reading.splits.items()}

    def _generate_examples(self, read: Callable[[], Iterator[Example]]) -> Iterator[tuple[str, dict[str, Any]]]:
        for key, image, label in read():
            self._on_progress(1)
            yield key, {"image": image, "label": label, self.KEY_FEATURE: self._text(key)}

    def _text(self, key: str) -> str:
        """What the stock builder stores for a key."""
        return key

    def _log_download_bytes(self) -> None:
        """Nothing: TFDS would print here what it downloads."""

    def _log_download_done(self) -> None:
        """Nothing, as above."""


class FgvcAircraft(_FromFolder, skip_registration=True):
    name = "fgvc_aircraft"
    VERSION = tfds.core.Version("1.0.0")
    BUILDER_CONFIGS = [
        tfds.core.BuilderConfig(name="default", description="The images as they were published."),
        tfds.core.BuilderConfig(name="without_strip", description="The lowest 20 pixels cut off; JPEG, quality 95."),
    ]
    KEY_FEATURE = "file_name"
    DESCRIPTION = "FGVC-Aircraft 2013b: 100 aircraft variants in an official train, validation and test part."
    CITATION = "Maji et al., Fine-Grained Visual Classification of Aircraft, arXiv 1306.5151, 2013"
    HOMEPAGE = "https://www.robots.ox.ac.uk/~vgg/data/fgvc-aircraft/"


class Gtsrb(_FromFolder, skip_registration=True):
    name = "gtsrb"
    VERSION = tfds.core.Version("1.0.0")
    KEY_FEATURE = "file_name"
    DESCRIPTION = "German Traffic Sign Recognition Benchmark: 43 signs, PPM coded as PNG without loss."
    CITATION = "Stallkamp et al., Man vs. computer, Neural Networks 32, 2012"
    HOMEPAGE = "https://benchmark.ini.rub.de/"


class Cars196(_FromFolder, skip_registration=True):
    """As TFDS's, without the boxes."""

    name = "cars196"
    VERSION = tfds.core.Version("2.1.0")
    KEY_FEATURE = "id"
    DESCRIPTION = "Stanford Cars: 196 makes, models and years, without the bounding boxes."
    CITATION = "Krause et al., 3D Object Representations for Fine-Grained Categorization, 3dRR 2013"
    HOMEPAGE = "https://ai.stanford.edu/~jkrause/cars/car_dataset.html"

    def _text(self, key: str) -> str:
        return PurePosixPath(key).stem


class Sun397(_FromFolder, skip_registration=True):
    """As TFDS's, but for the images, which TFDS makes smaller and codes again."""

    name = "sun397"
    VERSION = tfds.core.Version("4.0.0")
    BUILDER_CONFIGS = [
        tfds.core.BuilderConfig(name="standard-part1-120k", description="Partition 1; the original images.")
    ]
    KEY_FEATURE = "file_name"
    DESCRIPTION = (
        "SUN397: 397 scenes, the first official partition. The images are the original ones of any size, "
        "not re-coded to 120,000 pixels as the name of the configuration says of TensorFlow Datasets' own."
    )
    CITATION = "Xiao et al., SUN Database: Large-scale Scene Recognition from Abbey to Zoo, CVPR 2010; original images"
    HOMEPAGE = "https://vision.princeton.edu/projects/2010/SUN/"


class Eurosat(_FromFolder, skip_registration=True):
    name = "eurosat"
    VERSION = tfds.core.Version("2.0.0")
    BUILDER_CONFIGS = [tfds.core.BuilderConfig(name="rgb", description="Sentinel-2 RGB channels")]
    KEY_FEATURE = "filename"
    IMAGE_SHAPE = (64, 64, 3)
    DESCRIPTION = "EuroSAT: ten kinds of land use seen by Sentinel-2, in red, green and blue."
    CITATION = "Helber et al., EuroSAT: A Novel Dataset and Deep Learning Benchmark, arXiv 1709.00029, 2017"
    HOMEPAGE = "https://github.com/phelber/eurosat"


class Caltech101(_FromFolder, skip_registration=True):
    """As TFDS's, but one split with everything instead of 30 sampled images of each class and the rest."""

    name = "caltech101"
    VERSION = tfds.core.Version("3.0.2")
    KEY_FEATURE = "image/file_name"
    DESCRIPTION = "Caltech-101: 101 classes and the background class; all images are in train."
    CITATION = "Fei-Fei et al., Learning generative visual models from few training examples, CVPR Workshop 2004"
    HOMEPAGE = "https://doi.org/10.22002/D1.20086"

    def _text(self, key: str) -> str:
        return PurePosixPath(key).name


BUILDERS: dict[str, tuple[type[_FromFolder], Callable[[Path], Reading]]] = {
    "fgvc_aircraft/default": (FgvcAircraft, read_aircraft),
    "fgvc_aircraft/without_strip": (FgvcAircraft, functools.partial(read_aircraft, cut_strip=True)),
    "gtsrb": (Gtsrb, read_gtsrb),
    "cars196": (Cars196, read_cars),
    "sun397/standard-part1-120k": (Sun397, read_sun397),
    "eurosat/rgb": (Eurosat, read_eurosat),
    "caltech101": (Caltech101, read_caltech101),
}
"""By `<name>` or `<name>/<config>`; a name alone stands for its first configuration."""


def prepare_from_folder(name: str, data_dir: Path, place: Path, on_progress: Progress = lambda num: None) -> Path:
    """Writes a data set of `BUILDERS` from the files in `place` to `<data_dir>/<name>[/<config>]/<version>`.

    A data set that is prepared already stays as it is, and `place` is not read. After an error nothing is left that
    could be taken for a prepared data set. `on_progress` counts images. Raises what the readers raise, ValueError for
    an unknown name.
    """
    full_name = next((known for known in BUILDERS if name in (known, known.partition("/")[0])), None)
    if full_name is None:
        raise ValueError(f"no builder named {name!r}; there are {', '.join(BUILDERS)}")
    builder_class, read = BUILDERS[full_name]
    directory = data_dir / full_name / str(builder_class.VERSION)
    if (directory / "dataset_info.json").is_file():
        return directory
    reading = read(place)
    builder = builder_class(reading, on_progress, data_dir=data_dir, config=full_name.partition("/")[2] or None)
    config = tfds.download.DownloadConfig(manual_dir=place, try_download_gcs=False)
    tfds.disable_progress_bar()  # `on_progress` counts already
    try:
        with tempfile.TemporaryDirectory() as unused:  # TFDS makes folders for downloads even if there are none
            builder.download_and_prepare(file_format="array_record", download_config=config, download_dir=unused)
    finally:
        tfds.enable_progress_bar()
    return directory
