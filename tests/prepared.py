"""Small data sets, prepared by TFDS with the features of the real ones and random images."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow_datasets as tfds
from PIL import Image
from pixels import encode
from tensorflow_datasets.core.utils import tqdm_utils

from cheem_jax.data.benchmarks.table import BY_NAME, BenchmarkTask, task_names

OWN_FEATURES = {"fgvc_aircraft/default": ("file_name", 100), "gtsrb": ("file_name", 43)} | {
    task.builder: ("file_name", task.num_classes)
    for task in map(BY_NAME.__getitem__, task_names("cil"))
    if task.archives
}


def png(rng: np.random.Generator, shape: tuple[int, ...]) -> bytes:
    """Return an image of noise, with as many channels as `shape` says."""
    pixels = rng.integers(0, 256, shape, np.uint8)
    return encode(Image.fromarray(pixels[..., 0] if shape[-1] == 1 else pixels))


def features_of(spec: str) -> Any:
    """Return the features of a stock builder, or of a builder of this library."""
    name, _, version = spec.partition(":")
    if name in OWN_FEATURES:
        key, num = OWN_FEATURES[name]
        classes = [f"class {label}" for label in range(num)]
        return tfds.features.FeaturesDict(
            {
                "image": tfds.features.Image(shape=(None, None, 3)),
                "label": tfds.features.ClassLabel(names=classes),
                key: tfds.features.Text(),
            }
        )
    return tfds.builder(f"{name}:{version}", data_dir="/nonexistent").info.features


def value_of(feature: Any, rng: np.random.Generator) -> Any:
    """Return a value that fits a feature."""
    match feature:
        case tfds.features.BBoxFeature():
            return tfds.features.BBox(0.0, 0.0, 1.0, 1.0)
        case tfds.features.ClassLabel():
            return 0
        case tfds.features.Text():
            return "text"
        case tfds.features.Scalar():
            return 0
        case tfds.features.Image():
            return png(rng, tuple(side or 6 for side in feature.shape))
    raise AssertionError(feature)


def prepare_small(
    data_dir: Path,
    spec: str,
    labels: Mapping[str, np.ndarray],
    *,
    key: str | None = None,
    more: Mapping[str, Any] = {},
) -> Path:
    """Write a data set with these labels in its splits; `key` is the text feature that names the
    images, and `more` has further features."""
    name, _, version = spec.partition(":")
    name, _, config = name.partition("/")
    features = tfds.features.FeaturesDict({**features_of(spec), **more})
    rng = np.random.default_rng(len(name))

    class Small(tfds.core.GeneratorBasedBuilder, skip_registration=True):
        VERSION = tfds.core.Version(version)
        BUILDER_CONFIGS = [tfds.core.BuilderConfig(name=config, version=version)] if config else []

        def _info(self):
            return tfds.core.DatasetInfo(builder=self, features=features)

        def _split_generators(self, dl_manager):
            return {split: self._generate_examples(split) for split in labels}

        def _generate_examples(self, split):
            shape = tuple(side or 6 for side in features["image"].shape)
            for row, label in enumerate(labels[split].tolist()):
                example = {
                    n: value_of(f, rng)
                    for n, f in features.items()
                    if n not in ("image", "label", key)
                }
                example |= {"image": png(rng, shape), "label": label}
                if key is not None:
                    example[key] = f"{split}_{row:05d}.png"
                yield row, example

    Small.name = name
    tfds.disable_progress_bar()
    try:
        builder = Small(data_dir=data_dir, config=config or None)
        builder.download_and_prepare(
            file_format="array_record", download_dir=data_dir / "downloads"
        )
    finally:
        tqdm_utils.display_progress_bar(True)
    return Path(builder.data_dir)


def small_task(data_dir: Path, task: BenchmarkTask, sizes: Mapping[str, int]) -> np.ndarray:
    """Prepare a benchmark's task with `sizes` images of each class in each TFDS split."""
    key = task.key.removeprefix("class/")
    num = task.num_classes + len(task.dropped)
    labels = {split: np.repeat(np.arange(num), size) for split, size in sizes.items()}
    prepare_small(data_dir, task.spec, labels, key=key if key not in ("bytes", "pixels") else None)
