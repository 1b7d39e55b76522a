"""Filled or outlined shapes a little turned, stretched and moved, on a restless ground, in two colourings."""

from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageDraw

from cheem_jax.data.demo import paint

Range = tuple[float, float]


def draw(rng: np.random.Generator, labels: np.ndarray, image_size: int) -> np.ndarray:
    """uint8 `[N, S, S, 3]`: warm shapes, pink to yellow, on blue and violet."""
    return _draw(rng, labels, image_size, front=(-0.08, 0.16), back=(0.60, 0.76))


def draw_recoloured(rng: np.random.Generator, labels: np.ndarray, image_size: int) -> np.ndarray:
    """As `draw` in other colours: green to sky-blue shapes on red and brown."""
    return _draw(rng, labels, image_size, front=(0.30, 0.54), back=(-0.04, 0.08))


def _draw(rng: np.random.Generator, labels: np.ndarray, image_size: int, *, front: Range, back: Range) -> np.ndarray:
    num = len(labels)
    mask = np.stack([_mask(rng, OUTLINES[CLASSES[label]], image_size) for label in labels])
    bright = paint.hsv(rng.uniform(*front, num) % 1, rng.uniform(0.3, 0.75, num), rng.uniform(0.75, 1.0, num))
    dark = paint.hsv(rng.uniform(*back, num) % 1, rng.uniform(0.5, 0.8, num), rng.uniform(0.3, 0.5, num))
    field = paint.ground(rng, dark, image_size, unrest=0.25)
    shape = paint.ground(rng, bright, image_size, unrest=0.06)
    return paint.finish(rng, paint.blend(mask, shape, field), grain=0.035)


def _mask(rng: np.random.Generator, outline: np.ndarray, image_size: int) -> np.ndarray:
    """Coverage `[S, S]` of an outline that is turned, stretched and moved at random."""
    side = image_size * paint.SUPERSAMPLE
    angle, stretch = rng.uniform(-0.7, 0.7), rng.uniform(0.88, 1.14)
    radius = rng.uniform(0.3, 0.42) * side
    centre = side / 2 + rng.uniform(-1, 1, 2) * min(0.47 * side - radius, 0.09 * side)
    turn = np.array([[np.cos(angle), np.sin(angle)], [-np.sin(angle), np.cos(angle)]])
    corners = outline * (stretch, 1 / stretch) @ turn * radius + centre
    points = [(float(x), float(y)) for x, y in corners]
    canvas = Image.new("L", (side, side))
    if rng.random() < 0.5:
        ImageDraw.Draw(canvas).polygon(points, fill=255)
    else:
        width = round(rng.uniform(0.07, 0.1) * side)
        # Past the first corner again, so that the last joint is round like the others.
        ImageDraw.Draw(canvas).line(points + points[:2], fill=255, width=width, joint="curve")
    return paint.shrink(canvas)


def _arc(start: float, stop: float, num: int, radius: float = 1.0, centre: float = 0.0) -> np.ndarray:
    """Points `[num, 2]` on a circle around (centre, 0), angles in degrees."""
    angles = np.radians(np.linspace(start, stop, num))
    return np.stack([centre + radius * np.cos(angles), radius * np.sin(angles)], axis=1)


def _regular(num: int, inner: float = 1.0, start: float = -90.0) -> np.ndarray:
    """A regular polygon with a corner on top, or with every second corner at radius `inner` a star."""
    corners = _arc(start, start + 360.0, num + 1)[:-1]
    corners[1::2] *= inner
    return corners


def _heart() -> np.ndarray:
    t = np.linspace(0, 2 * np.pi, 49)[:-1]
    height = 13 * np.cos(t) - 5 * np.cos(2 * t) - 2 * np.cos(3 * t) - np.cos(4 * t)
    return np.stack([np.sin(t) ** 3, -height / 16], axis=1)


def _centred(points: np.ndarray | Sequence[tuple[float, float]]) -> np.ndarray:
    """Moved to the middle of its box and scaled to reach 1 at most."""
    corners = np.array(points)
    corners = corners - (corners.min(axis=0) + corners.max(axis=0)) / 2
    return corners / np.linalg.norm(corners, axis=1).max()


_W = 0.34  # half width of a bar of the cross, in units of its half length
OUTLINES: dict[str, np.ndarray] = {
    "circle": _centred(_regular(48)) * 0.92,
    "triangle": _centred(_regular(3)),
    "square": _centred(_regular(4, start=45.0)),
    "star": _centred(_regular(10, inner=0.45)),
    "cross": _centred(
        [(_W, -1.0), (_W, -_W), (1.0, -_W), (1.0, _W), (_W, _W), (_W, 1.0)]
        + [(-_W, 1.0), (-_W, _W), (-1.0, _W), (-1.0, -_W), (-_W, -_W), (-_W, -1.0)]
    ),
    "crescent": _centred(np.concatenate([_arc(50.0, 310.0, 30), _arc(292.0, 68.0, 24, 0.826, 0.334)])),
    "heart": _centred(_heart()),
    "arrow": _centred([(-1.0, -0.3), (0.1, -0.3), (0.1, -0.8), (1.0, 0.0), (0.1, 0.8), (0.1, 0.3), (-1.0, 0.3)]),
}
"""Corners around the origin, none further away than 1."""

CLASSES = tuple(OUTLINES)
