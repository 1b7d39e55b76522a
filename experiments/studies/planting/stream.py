"""A stream whose right structure is known: a task, its kin and its twin, an easy one, an alien one, and one unrelated.

The answers stand here, written down before anything is measured; `claims.py` turns them into yes or no.
"""

import zlib
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from cheem_jax.data import demo
from cheem_jax.data.task import Split, Stream, Task

Draw = Callable[[np.random.Generator, np.ndarray, int], np.ndarray]
"""(generator, labels [N], image size) to uint8 images [N, S, S, 3]."""

IMAGE_SIZE = 32
LAGS = {
    "right": (0, 1), "down": (1, 0), "down_right": (1, 1), "down_left": (1, -1),
    "right_2": (0, 2), "down_2": (2, 0), "down_2_right": (2, 1), "down_right_2": (1, 2),
}  # fmt: skip
"""Rows and columns between the two pixels of the noise that agree."""
FLIPS = 0.1
"""Share of pixels that break the rule."""


def draw_noise(rng: np.random.Generator, labels: np.ndarray, image_size: int) -> np.ndarray:
    """uint8 `[N, S, S, 3]`: two-coloured noise in which a pixel mostly repeats the one a class's lag away.

    Every pixel for itself is a coin toss in all classes, and nothing is larger than a few pixels.
    """
    pattern = np.empty((len(labels), image_size, image_size))
    for label, lag in enumerate(LAGS.values()):
        members = np.flatnonzero(labels == label)
        pattern[members] = _lagged(rng, lag, len(members), image_size)
    front, back = rng.random((2, len(labels), 1, 1, 3))
    return demo.finish(rng, demo.blend(pattern, front, back), grain=0.03)


def _lagged(rng: np.random.Generator, lag: tuple[int, int], num: int, size: int) -> Float[np.ndarray, "num S S"]:
    rows, columns = lag
    field = rng.integers(0, 2, (size, size, num))
    flips = rng.random((size, size, num)) < FLIPS
    for y in range(rows, size):  # in the order in which pixels depend on each other
        for x in range(max(columns, 0), size + min(columns, 0)):
            field[y, x] = field[y - rows, x - columns] ^ flips[y, x]
    return np.moveaxis(field, -1, 0).astype(float)


class Planted(NamedTuple):
    """One task of the stream and its right answer."""

    name: str
    role: str
    classes: tuple[str, ...]
    draw: Draw
    answer: str
    relative: str | None = None
    """The earlier task that it is made from."""


PLAN = (
    Planted(
        "shapes", "origin", demo.SHAPES, demo.draw_shapes,
        "only the base to draw on; what it adds is what its kin and its twin can find",
    ),
    Planted(
        "letters", "unrelated", demo.LETTERS, demo.draw_letters,
        "as hard as shapes and of no use to its kin: its experts are there to be left alone",
    ),
    Planted(
        "colours", "easy", demo.COLOURS, demo.draw_colours,
        "the first layers tell the classes apart: skips blocks, the cheapest network of all",
    ),
    Planted(
        "shapes_recoloured", "kin", demo.SHAPES, demo.draw_recoloured_shapes,
        "the classes of shapes in other colours: draws on the experts of shapes, adds little",
        "shapes",
    ),
    Planted(
        "noise", "alien", tuple(LAGS), draw_noise,
        "nothing larger than a few pixels, neither shapes nor strokes: draws less on others' experts, adds more",
    ),
    Planted(
        "shapes_again", "twin", demo.SHAPES, demo.draw_shapes,
        "the distribution of shapes, new draws: draws on the experts of shapes, adds least",
        "shapes",
    ),
)  # fmt: skip
"""The alien stands between kin and twin, so that their mean place is its own: later tasks find fuller pools."""

NAMES = tuple(task.name for task in PLAN)


def place_of(role: str) -> int:
    """Index in the stream of the one task of this role."""
    return [task.role for task in PLAN].index(role)


RELATED = tuple(map(place_of, ("origin", "kin", "twin")))
"""The family of shapes, as indices in the stream."""


def planted_stream(*, seed: int, num_train: int, num_val: int, num_test: int) -> Stream:
    """The planned tasks with so many images each, classes balanced; the same for the same arguments.

    Raises ValueError for fewer images than classes.
    """
    sizes = {"train": num_train, "val": num_val, "test": num_test}
    most = max(len(task.classes) for task in PLAN)
    if min(sizes.values()) < most:
        raise ValueError(f"every split needs at least {most} images, one of each letter; got {sizes}")
    return Stream("planted", tuple(_generated(task, sizes, seed) for task in PLAN))


def _generated(planted: Planted, sizes: dict[str, int], seed: int) -> Task:
    splits = {}
    for split, num in sizes.items():
        rng = np.random.default_rng([seed, zlib.crc32(f"planted/{planted.name}/{split}".encode())])
        labels = rng.permutation(np.arange(num, dtype=np.int32) % len(planted.classes))
        splits[split] = Split(planted.draw(rng, labels, IMAGE_SIZE), labels)
    return Task(planted.name, planted.classes, **splits)
