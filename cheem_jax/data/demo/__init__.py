"""The bundled demo stream: six tasks made on the user's machine in seconds, without network.

shapes -> letters -> colours -> textures -> shapes_recoloured -> digits. `colours` is very easy, `digits` are
real, and `shapes_recoloured` is the planted kin of `shapes`: new images of the same classes in other colours.
"""

import zlib

import numpy as np
from PIL import Image

from cheem_jax.data.demo.drawing import FAMILIES
from cheem_jax.data.splits import cut
from cheem_jax.data.task import Split, Stream, Task

TASKS = (*FAMILIES, "digits")


def demo_stream(
    *, image_size: int = 32, seed: int = 0, num_train: int = 600, num_val: int = 150, num_test: int = 250
) -> Stream:
    """The six tasks with the given numbers of images each, the classes balanced (of the digits nearly).

    The same for the same arguments; a generated split does not depend on the sizes of the others.
    Raises ValueError for fewer images than classes, or more than the real digits allow.
    """
    if image_size < 8:
        raise ValueError(f"image_size must be at least 8 for the demo stream, got {image_size}")
    sizes = {"train": num_train, "val": num_val, "test": num_test}
    most_classes = max(len(classes) for classes, _ in FAMILIES.values())
    if min(sizes.values()) < most_classes:
        raise ValueError(f"every split needs at least {most_classes} images, one of each letter; got {sizes}")
    real = _digits(sizes, image_size, _generator(seed, "digits"))
    return Stream("demo", (*(_generated(name, sizes, image_size, seed) for name in FAMILIES), real))


def _generated(name: str, sizes: dict[str, int], image_size: int, seed: int) -> Task:
    classes, draw = FAMILIES[name]
    splits = {}
    for split, num in sizes.items():
        rng = _generator(seed, f"{name}/{split}")
        labels = rng.permutation(np.arange(num, dtype=np.int32) % len(classes))
        splits[split] = Split(draw(rng, labels, image_size), labels)
    return Task(name, classes, **splits)


def _digits(sizes: dict[str, int], image_size: int, rng: np.random.Generator) -> Task:
    """Real handwritten digits, white on black: disjoint splits of the 1,797 images that scikit-learn contains.

    The test split is drawn first and from all images, so that it does not depend on the other sizes.
    """
    from sklearn.datasets import load_digits  # here, because importing it takes a second

    small, labels = (np.asarray(array) for array in load_digits(return_X_y=True))  # its stubs name pandas' types too
    if sum(sizes.values()) > len(labels):
        raise ValueError(f"there are {len(labels)} digits in all, the splits ask for {sizes}")
    left, splits = np.arange(len(labels)), {}
    for split in ("test", "val", "train"):
        order = np.concatenate([rng.permutation(np.flatnonzero(labels[left] == digit)) for digit in range(10)])
        taken = cut(labels[left], sizes[split], keep=0, order=order)
        chosen = left[taken]
        splits[split] = Split(_enlarge(small[chosen], image_size), labels[chosen].astype(np.int32))
        left = left[~taken]
    return Task("digits", tuple("0123456789"), **splits)


def _enlarge(rows: np.ndarray, image_size: int) -> np.ndarray:
    """Rows of 64 grey values in 0..16 to uint8 `[N, S, S, 3]`, bicubic."""
    small = np.round(rows.reshape(-1, 8, 8) * (255 / 16)).astype(np.uint8)
    size = (image_size, image_size)
    grey = [np.asarray(Image.fromarray(p).resize(size, Image.Resampling.BICUBIC)) for p in small]
    return np.repeat(np.stack(grey)[..., None], 3, axis=-1)


def _generator(seed: int, purpose: str) -> np.random.Generator:
    """Seeded by the purpose, so that a new family would leave the others' images as they are."""
    return np.random.default_rng([seed, zlib.crc32(purpose.encode())])
