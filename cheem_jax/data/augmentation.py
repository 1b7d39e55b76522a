"""Augment training images by a crop and two random operations, as in RandAugment (Cubuk et al.,
2020).

No image is mirrored, because the mirror image of a letter or a traffic sign has another meaning.
Pillow computes the augmented images, so their pixels depend neither on the device nor on JAX. An
augmented image depends only on the original image, its row in the training images, the seed and the
epoch. It is therefore identical in a resumed run, and on any number of devices.
"""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from jaxtyping import UInt8
from PIL import Image, ImageEnhance, ImageOps

from cheem_jax.core.images import Images, in_turn
from cheem_jax.engine.executor import Executor, Tokens
from cheem_jax.engine.feed import HostImages

SMALLEST_AREA = 0.5
"""Minimum area of a crop, as a fraction of the image's area."""
NUM_CHANGES = 2


def _affine(image: Image.Image, across: float, down: float) -> Image.Image:
    """Shear an image about its centre."""
    half = image.width / 2
    matrix = (1, across, -across * half, down, 1, -down * half)
    return image.transform(image.size, Image.Transform.AFFINE, matrix, Image.Resampling.BILINEAR)


CHANGES: dict[str, Callable[[Image.Image, float], Image.Image]] = {
    "identity": lambda image, strength: image,
    "autocontrast": lambda image, strength: ImageOps.autocontrast(image),
    "equalize": lambda image, strength: ImageOps.equalize(image),
    "rotate": lambda image, strength: image.rotate(20 * strength, Image.Resampling.BILINEAR),
    "shear_x": lambda image, strength: _affine(image, 0.2 * strength, 0),
    "shear_y": lambda image, strength: _affine(image, 0, 0.2 * strength),
    "solarize": lambda image, strength: ImageOps.solarize(image, round(256 - 128 * abs(strength))),
    "posterize": lambda image, strength: ImageOps.posterize(image, 8 - round(4 * abs(strength))),
    "color": lambda image, strength: ImageEnhance.Color(image).enhance(1 + 0.6 * strength),
    "contrast": lambda image, strength: ImageEnhance.Contrast(image).enhance(1 + 0.6 * strength),
    "brightness": (
        lambda image, strength: ImageEnhance.Brightness(image).enhance(1 + 0.6 * strength)
    ),
    "sharpness": lambda image, strength: ImageEnhance.Sharpness(image).enhance(1 + 0.6 * strength),
}
"""Augmentation operations, keyed by name. Each accepts a strength in [-1, 1]."""


def augment(
    image: UInt8[np.ndarray, "S S 3"], rng: np.random.Generator
) -> UInt8[np.ndarray, "S S 3"]:
    """Crop an image at random, resize it to the original size, and apply two operations of random
    strength."""
    size = image.shape[0]
    side = size * math.sqrt(rng.uniform(SMALLEST_AREA, 1))
    x, y = rng.uniform(0, size - side, 2)
    result = Image.fromarray(image).resize(
        (size, size), Image.Resampling.BICUBIC, box=(x, y, x + side, y + side)
    )
    for name in rng.choice(list(CHANGES), NUM_CHANGES):
        result = CHANGES[name](result, rng.uniform(-1, 1))
    return np.asarray(result)


class AugmentedImages(HostImages):
    """Training images, augmented for one epoch. Each training phase of each task uses a different
    `seed`."""

    def __init__(self, executor: Executor, images: Images, seed: int, epoch: int = 0):
        super().__init__(executor, images)
        self.seed, self.epoch = seed, epoch

    def at(self, epoch: int) -> "AugmentedImages":
        """Return the same images with the augmentation of another epoch."""
        return AugmentedImages(self.executor, self.images, self.seed, epoch)

    def follow(self, order: Sequence[np.ndarray]) -> Iterator[Tokens]:
        """Augment the images of each batch, and yield the batch as `Tokens`. Each array in `order`
        contains the rows of one batch."""
        layout = self.executor.layout
        local = [layout.local_rows(rows) for rows in order]
        for rows, images in zip(local, in_turn(self.images, local), strict=True):
            yield self.executor.begin(layout.join(augmented(images, rows, self.seed, self.epoch)))


def augmented(
    images: UInt8[np.ndarray, "B S S 3"], rows: np.ndarray, *place: int
) -> UInt8[np.ndarray, "B S S 3"]:
    """Augment images. The random generator of each image is seeded with `place` (seed and epoch)
    and the row of the image."""
    rngs = (np.random.default_rng([*place, row]) for row in rows.tolist())
    return np.stack(list(_threads().map(augment, images, rngs)))


@functools.cache
def _threads() -> ThreadPoolExecutor:
    # threads are sufficient, because Pillow releases the interpreter's lock while it computes
    return ThreadPoolExecutor(thread_name_prefix="augment")
