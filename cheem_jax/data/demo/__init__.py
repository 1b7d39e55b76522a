"""The bundled demo stream: six tasks made on the user's machine in seconds, without network.

shapes -> letters -> colours -> textures -> shapes_recoloured -> digits. `colours` is very easy, `digits` are
real, and `shapes_recoloured` is the planted kin of `shapes`: new draws of the same classes in other colours.
"""

import zlib
from collections.abc import Callable

import numpy as np

from cheem_jax.data.demo import colours, digits, letters, shapes, textures
from cheem_jax.data.task import Split, Stream, Task

Draw = Callable[[np.random.Generator, np.ndarray, int], np.ndarray]
"""(generator, labels [N], image size) to uint8 images [N, S, S, 3]."""

FAMILIES: dict[str, tuple[tuple[str, ...], Draw]] = {
    "shapes": (shapes.CLASSES, shapes.draw),
    "letters": (letters.CLASSES, letters.draw),
    "colours": (colours.CLASSES, colours.draw),
    "textures": (textures.CLASSES, textures.draw),
    "shapes_recoloured": (shapes.CLASSES, shapes.draw_recoloured),
}

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
    real = digits.task(sizes, image_size, _generator(seed, "digits"))
    return Stream("demo", (*(_generated(name, sizes, image_size, seed) for name in FAMILIES), real))


def _generated(name: str, sizes: dict[str, int], image_size: int, seed: int) -> Task:
    classes, draw = FAMILIES[name]
    splits = {}
    for split, num in sizes.items():
        rng = _generator(seed, f"{name}/{split}")
        labels = rng.permutation(np.arange(num, dtype=np.int32) % len(classes))
        splits[split] = Split(draw(rng, labels, image_size), labels)
    return Task(name, classes, **splits)


def _generator(seed: int, purpose: str) -> np.random.Generator:
    """Drawn by name, so that a new family would leave the others' pictures as they are."""
    return np.random.default_rng([seed, zlib.crc32(purpose.encode())])
