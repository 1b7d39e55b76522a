"""What the generated families share: colours, mottled grounds, grain and antialiased masks."""

import numpy as np
from jaxtyping import Float, UInt8
from PIL import Image

SUPERSAMPLE = 4
"""Masks are drawn this many times larger and then averaged down."""


def hsv(hue, saturation, value) -> np.ndarray:
    """RGB in [0, 1] with a last axis of 3; hue in turns, all arguments broadcast."""
    hue, saturation, value = np.broadcast_arrays(hue, saturation, value)
    sector = (np.array([5.0, 3.0, 1.0]) + hue[..., None] * 6) % 6
    ramp = np.clip(np.minimum(sector, 4 - sector), 0, 1)
    return value[..., None] * (1 - saturation[..., None] * ramp)


def mottle(rng: np.random.Generator, num: int, image_size: int, cells: int) -> Float[np.ndarray, "num S S"]:
    """Smooth noise: normal values on a grid of `cells` x `cells` squares, interpolated with a cosine."""
    grid = rng.standard_normal((num, cells + 1, cells + 1))
    position = (np.arange(image_size) + 0.5) / image_size * cells
    left = position.astype(int)
    weight = 0.5 - 0.5 * np.cos(np.pi * (position - left))
    rows = grid[:, left] * (1 - weight[:, None]) + grid[:, left + 1] * weight[:, None]
    return rows[:, :, left] * (1 - weight) + rows[:, :, left + 1] * weight


def ground(
    rng: np.random.Generator, colour: Float[np.ndarray, "num 3"], image_size: int, unrest: float
) -> Float[np.ndarray, "num S S 3"]:
    """A field of one colour per image with cloudy changes of brightness and a little of hue."""
    num = len(colour)
    light = mottle(rng, num, image_size, 3) + 0.6 * mottle(rng, num, image_size, 7)
    tint = np.stack([mottle(rng, num, image_size, 2) for _ in range(3)], axis=-1)
    return colour[:, None, None, :] * (1 + unrest * (light[..., None] + 0.4 * tint))


def blend(mask, front, back) -> np.ndarray:
    """`front` where the mask `[num, S, S]` is 1, `back` where it is 0."""
    return back + mask[..., None] * (front - back)


def finish(
    rng: np.random.Generator, images: Float[np.ndarray, "num S S 3"], grain: float
) -> UInt8[np.ndarray, "num S S 3"]:
    """Adds grain (standard deviation, full range 1) and rounds to bytes."""
    noisy = images + grain * rng.standard_normal(images.shape)
    return np.round(np.clip(noisy, 0, 1) * 255).astype(np.uint8)


def shrink(mask: Image.Image) -> Float[np.ndarray, "S S"]:
    """A supersampled 8-bit mask averaged down, as coverage in [0, 1]."""
    return np.asarray(mask.reduce(SUPERSAMPLE), np.float64) / 255
