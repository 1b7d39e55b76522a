"""What the formula families share: frames, noise, and how a field becomes a coloured picture.

Fields are float32 `[N, S, S]` in [0, 1] unless said otherwise; pixel positions lie in [-1, 1]^2.
"""

import numpy as np
from jaxtyping import Float

SIZE = 32
"""Pixels of a side."""
Fields = Float[np.ndarray, "N S S"]
Colours = Float[np.ndarray, "N S S 3"]


def grid(rng: np.random.Generator, count: int, *, turn: float, zoom: float, shift: float):
    """x, y of every pixel [N S S] in a frame turned (radians), zoomed (log) and shifted at random."""
    line = (np.arange(SIZE, dtype=np.float32) + 0.5) * (2 / SIZE) - 1
    angle = rng.uniform(-turn, turn, (count, 1, 1)).astype(np.float32)
    scale = np.exp(rng.uniform(-zoom, zoom, (2, count, 1, 1))).astype(np.float32)
    x0, y0 = rng.uniform(-shift, shift, (2, count, 1, 1)).astype(np.float32)
    x, y = line[None, None, :] - x0, line[None, :, None] - y0
    return (np.cos(angle) * x + np.sin(angle) * y) * scale[0], (np.cos(angle) * y - np.sin(angle) * x) * scale[1]


def two_colours(rng: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Two colours [N 1 1 3] apart in lightness; a quarter grey, a tenth white on black."""
    back, front = rng.uniform(0, 1, (2, count, 1, 1, 3)).astype(np.float32)
    grey = rng.uniform(0, 1, (count, 1, 1, 1)) < 0.25
    back = np.where(grey, back.mean(-1, keepdims=True), back)
    front = np.where(grey, front.mean(-1, keepdims=True), front)
    light, other = back.mean(-1, keepdims=True), front.mean(-1, keepdims=True)
    near = np.abs(light - other) < 0.3
    front = np.where(near, front + 0.65 * ((light < 0.5) - front), front)
    plain = rng.uniform(0, 1, (count, 1, 1, 1)) < 0.1
    return np.where(plain, 0, back).astype(np.float32), np.where(plain, 1, front).astype(np.float32)


def rough(rng: np.random.Generator, power: np.ndarray) -> Fields:
    """Random-phase noise with spectrum 1/f^power, scaled to mean 0 and deviation 1."""
    fy, fx = np.fft.fftfreq(SIZE)[:, None], np.fft.rfftfreq(SIZE)[None]
    radius = np.maximum(np.hypot(fy, fx), 1 / SIZE)
    return filtered(rng, radius ** -power[:, None, None])


def filtered(rng: np.random.Generator, gain: np.ndarray) -> Fields:
    white = np.fft.rfft2(rng.normal(0, 1, (len(gain), SIZE, SIZE)))
    field = np.fft.irfft2(white * gain, (SIZE, SIZE))
    field -= field.mean((1, 2), keepdims=True)
    return (field / (field.std((1, 2), keepdims=True) + 1e-6)).astype(np.float32)


def figure(rng: np.random.Generator, mask: Fields) -> Colours:
    """A coloured figure before a flat, shaded or rough background."""
    count = len(mask)
    back, front = two_colours(rng, count)
    x, y = grid(rng, count, turn=np.pi, zoom=0.0, shift=0.0)
    shade = 0.15 * rng.normal(0, 1, (count, 1, 1)) * x
    amount = rng.uniform(0, 0.16, (count, 1, 1)) * (rng.uniform(0, 1, (count, 1, 1)) < 0.6)
    shade = shade + amount * rough(rng, rng.uniform(0.3, 2.0, count))
    colour = back + (front - back) * mask[..., None]
    return (colour + (shade * (1 - 0.7 * mask))[..., None]).astype(np.float32)


def ramp(rng: np.random.Generator, field: Fields) -> Colours:
    """A texture coloured between two colours, with a third in the middle for a third of the images."""
    back, front = two_colours(rng, len(field))
    middle = rng.uniform(0, 1, (len(field), 1, 1, 3)).astype(np.float32)
    amount = (rng.uniform(0, 1, (len(field), 1, 1, 1)) < 0.33) * (4 * field * (1 - field))[..., None]
    colour = back + (front - back) * field[..., None]
    return (colour + amount * (middle - colour)).astype(np.float32)
