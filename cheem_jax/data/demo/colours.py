"""The very easy task: cloudy fields of one colour."""

import numpy as np

from cheem_jax.data.demo import paint

CLASSES = ("red", "yellow", "green", "blue")
HUES = np.array([0.0, 0.15, 0.36, 0.61])


def draw(rng: np.random.Generator, labels: np.ndarray, image_size: int) -> np.ndarray:
    """uint8 `[N, S, S, 3]`; hues of different classes never meet."""
    num = len(labels)
    hue = (HUES[labels] + rng.uniform(-0.04, 0.04, num)) % 1
    colour = paint.hsv(hue, rng.uniform(0.65, 0.95, num), rng.uniform(0.6, 0.9, num))
    return paint.finish(rng, paint.ground(rng, colour, image_size, unrest=0.16), grain=0.03)
