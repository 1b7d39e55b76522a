"""`cheem convert`: convert the weights of a plain timm ViT, DeiT or DINO to this library's format,
and add mean CLS tokens of the pretraining data.

    cheem convert --backbone deit_tiny --output deit_tiny.safetensors
    cheem convert --backbone deit_tiny --weights FILE --output deit_tiny.safetensors \
        --base-data DIR_OR_ZIP --image-size 96
"""

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path

from cheem_jax.backbone.means import pooled_means
from cheem_jax.backbone.params import build
from cheem_jax.backbone.weights import Pretrained, load_pretrained, resize, save_converted
from cheem_jax.core.images import Images
from cheem_jax.core.paths import absolute, shown
from cheem_jax.data.decode import decode_in_order
from cheem_jax.data.folder import plan_task
from cheem_jax.data.load import ImagesConfig, load_train
from cheem_jax.data.records import all_pictures

_TFDS = re.compile(r"tfds:([^:\[]+(?::\d+\.\d+\.\d+)?):(.+)")


@dataclasses.dataclass(frozen=True)
class Convert:
    """Convert timm weights. The converted weights keep their image size, which can be changed when
    they are loaded."""

    output: Path
    """The .safetensors file to write."""
    backbone: str = "deit_tiny"
    """One of this library's backbones, or the timm name of another plain ViT, such as
    vit_small_patch16_224.dino."""
    weights: Path | None = None
    """A safetensors or npz file with timm's names, or a converted file; default: timm's repository
    on the hub."""
    base_data: str | None = None
    """Training images of the pretraining data: a folder, a zip, or tfds:NAME:SPLIT."""
    image_size: int | None = None
    """Height and width in pixels of the images from which the mean CLS tokens of --base-data are
    computed; default: the image size of the weights."""
    overwrite: bool = False
    """Replace an existing output file."""


def convert_weights(settings: Convert) -> None:
    """Convert the weights and print a summary. Raises ValueError, OSError or ImportError for
    invalid settings, unreadable files and missing packages."""
    check(settings)
    print_summary(
        settings, write(settings, load_pretrained(settings.backbone, weights=settings.weights))
    )


def check(settings: Convert) -> None:
    """Check the settings before any file is read. Raises ValueError for settings that contradict
    each other or the existing files."""
    if settings.output.suffix != ".safetensors":
        raise ValueError(f"--output must end in .safetensors, got {str(settings.output)!r}")
    if settings.output.exists() and not settings.overwrite:
        raise ValueError(f"{settings.output} exists; choose another --output or add --overwrite")
    if settings.image_size is not None and settings.base_data is None:
        raise ValueError(
            "--image-size applies to --base-data, which is missing; give both or neither"
        )


def write(settings: Convert, pretrained: Pretrained) -> Pretrained:
    """Compute the mean CLS tokens of --base-data, add them to the weights, write the result to the
    output, and return it."""
    if settings.base_data is not None:
        size = settings.image_size
        sized = resize(pretrained, pretrained.config.image_size if size is None else size)
        vit = build(sized.config, sized.params)
        means = pooled_means(vit, base_images(settings.base_data, sized.config.image_size))
        pretrained = dataclasses.replace(pretrained, base_means={**pretrained.base_means, **means})
    settings.output.parent.mkdir(parents=True, exist_ok=True)
    save_converted(settings.output, pretrained)
    return pretrained


def print_summary(settings: Convert, written: Pretrained) -> None:
    """Print the name and size of the weights, the hash of their source, and the keys of the mean
    CLS tokens."""
    numbers = sum(value.size for value in written.params.values())
    print(
        f"{shown(settings.output)}: {written.config.name}, {numbers:,} numbers from"
        f" {written.source}"
    )
    print(f"sha256 of the source: {written.sha256}")
    print(f"base means: {', '.join(written.base_means) or 'none (give --base-data)'}")


def base_images(base_data: str, image_size: int) -> Iterator[Images]:
    """Yield the training images of --base-data in chunks, uint8 `[N, S, S, 3]`."""
    if not base_data.startswith("tfds:"):
        yield load_train(plan_task(absolute(base_data)), image_size, ImagesConfig("memory")).images
        return
    name, split = parse_tfds(base_data)
    files = all_pictures(name, split, None)
    yield from decode_in_order(files, image_size, range(len(files)))


def parse_tfds(base_data: str) -> tuple[str, str]:
    """Split tfds:NAME:SPLIT into the names of the data set and the split."""
    match = _TFDS.fullmatch(base_data)
    if not match:
        raise ValueError(
            f"--base-data is {base_data!r}; expected tfds:NAME:SPLIT, such as tfds:imagenet_v2:test"
        )
    return match[1], match[2]
