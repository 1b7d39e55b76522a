"""Procedural two-tone textures, turned, scaled and shifted at random."""

from collections.abc import Callable

import numpy as np
from jaxtyping import Float

from cheem_jax.data.demo import paint

Plane = Float[np.ndarray, "num P P"]


def draw(rng: np.random.Generator, labels: np.ndarray, image_size: int) -> np.ndarray:
    """uint8 `[N, S, S, 3]`: a pattern between two muted colours, under cloudy light."""
    num = len(labels)
    pattern = np.empty((num, image_size, image_size))
    for label, name in enumerate(CLASSES):
        members = np.flatnonzero(labels == label)
        pattern[members] = _pattern(rng, PATTERNS[name], len(members), image_size)
    hue = rng.random(num)
    pale = paint.hsv(hue, rng.uniform(0.05, 0.3, num), rng.uniform(0.65, 0.95, num))
    deep = paint.hsv(
        (hue + rng.uniform(-0.2, 0.2, num)) % 1, rng.uniform(0.15, 0.45, num), rng.uniform(0.15, 0.45, num)
    )
    light = 1 + 0.08 * paint.mottle(rng, num, image_size, 2)
    flip = rng.random(num) < 0.5
    pattern[flip] = 1 - pattern[flip]
    mixed = paint.blend(pattern, pale[:, None, None], deep[:, None, None])
    return paint.finish(rng, mixed * light[..., None], grain=0.05)


def _pattern(rng: np.random.Generator, value: Callable[[Plane, Plane], Plane], num: int, image_size: int) -> Plane:
    """Brightness in [0, 1]: `value` of turned and scaled coordinates in periods, softly thresholded at 0."""
    side = 2 * image_size  # drawn twice as large and averaged, against aliasing
    at = (np.arange(side) + 0.5) / side - 0.5
    y, x = at[:, None], at[None, :]
    angle, periods, bend = (rng.uniform(*r, (num, 1, 1)) for r in ((0, 2 * np.pi), (2.6, 4.6), (-0.5, 0.5)))
    u = periods * (np.cos(angle) * x + np.sin(angle) * y) + rng.uniform(-0.5, 0.5, (num, 1, 1))
    v = periods * (np.cos(angle) * y - np.sin(angle) * x) + rng.uniform(-0.5, 0.5, (num, 1, 1))
    wobble = 0.12 * paint.mottle(rng, num, side, 3)
    soft = 0.5 + 0.5 * np.tanh(3 * value(u + wobble + 0 * bend, v + wobble))
    return soft.reshape(num, image_size, 2, image_size, 2).mean(axis=(2, 4))


def _wave(t: Plane) -> Plane:
    return np.sin(2 * np.pi * t)


def _zigzag(t: Plane) -> Plane:
    """Triangle wave in [-1, 1] of period 1."""
    return 4 * np.abs(t % 1 - 0.5) - 1


def _lines(t: Plane, width: float) -> Plane:
    """Positive within `width` periods of every whole number."""
    return 8 * (width - np.abs((t + 0.5) % 1 - 0.5))


def _bricks(u: Plane, v: Plane) -> Plane:
    row = np.floor(v)
    return np.maximum(_lines(v, 0.1), _lines(u / 1.8 + 0.5 * (row % 2), 0.06))


PATTERNS: dict[str, Callable[[Plane, Plane], Plane]] = {
    "stripes": lambda u, v: 1.5 * _wave(u),
    "checks": lambda u, v: 4 * _wave(u / 2) * _wave(v / 2),
    "dots": lambda u, v: 8 * (0.3 - np.hypot((u + 0.5) % 1 - 0.5, (v + 0.5) % 1 - 0.5)),
    "rings": lambda u, v: 1.5 * _wave(np.hypot(u, v)),
    "zigzag": lambda u, v: 1.5 * _wave(u + 0.35 * _zigzag(v / 1.4)),
    "bricks": _bricks,
    "grid": lambda u, v: np.maximum(_lines(u, 0.14), _lines(v, 0.14)),
    "triangles": lambda u, v: _wave(u) + _wave(u / 2 + 0.866 * v) + _wave(u / 2 - 0.866 * v),
}
"""Signed values over two coordinates in periods; the sign says which of the two colours."""

CLASSES = tuple(PATTERNS)
