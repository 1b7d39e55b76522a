"""The bundled demo stream: six tasks, generated within seconds without network access.

shapes -> letters -> colours -> textures -> shapes_recoloured -> digits. `colours` is very easy,
`digits` contains real images, and `shapes_recoloured` contains new images of the classes of
`shapes` in other colours, so that experts can be reused.

The arguments of each `draw_*` function are a random generator, labels (int `[N]`) and the image
size S; the result is uint8 `[N, S, S, 3]`.
"""

import functools
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Float, UInt8
from PIL import Image, ImageDraw, ImageFont

from cheem_jax.data.task import Split, Stream, Task, cut

# The shapes task: filled or outlined shapes, slightly rotated, stretched and moved, on a mottled
# background

Range = tuple[float, float]


def draw_shapes(
    rng: np.random.Generator,
    labels: np.ndarray,
    image_size: int,
    *,
    front: Range = (-0.08, 0.16),
    back: Range = (0.60, 0.76),
) -> np.ndarray:
    """Draw shapes with hues in `front` on backgrounds with hues in `back`. By default, the shapes
    are pink to yellow, and the backgrounds are blue to violet."""
    num = len(labels)
    mask = np.stack([_shape_mask(rng, OUTLINES[SHAPES[label]], image_size) for label in labels])
    bright = hsv(
        rng.uniform(*front, num) % 1, rng.uniform(0.3, 0.75, num), rng.uniform(0.75, 1.0, num)
    )
    dark = hsv(rng.uniform(*back, num) % 1, rng.uniform(0.5, 0.8, num), rng.uniform(0.3, 0.5, num))
    field = ground(rng, dark, image_size, unrest=0.25)
    shape = ground(rng, bright, image_size, unrest=0.06)
    return finish(rng, blend(mask, shape, field), grain=0.035)


draw_recoloured_shapes = functools.partial(draw_shapes, front=(0.30, 0.54), back=(-0.04, 0.08))
"""Draw shapes in green to sky blue on red and brown backgrounds."""


def _shape_mask(rng: np.random.Generator, outline: np.ndarray, image_size: int) -> np.ndarray:
    """Draw an outline with random rotation, stretch and position. Return the fraction of each pixel
    that the shape covers, `[S, S]`."""
    side = image_size * SUPERSAMPLE
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
        # continue past the first corner, so that the last joint is round, too
        ImageDraw.Draw(canvas).line(points + points[:2], fill=255, width=width, joint="curve")
    return shrink(canvas)


def _arc(
    start: float, stop: float, num: int, radius: float = 1.0, centre: float = 0.0
) -> np.ndarray:
    """Return points `[num, 2]` on a circle around (centre, 0), evenly spaced between the angles
    `start` and `stop` in degrees."""
    angles = np.radians(np.linspace(start, stop, num))
    return np.stack([centre + radius * np.cos(angles), radius * np.sin(angles)], axis=1)


def _regular(num: int, inner: float = 1.0, start: float = -90.0) -> np.ndarray:
    """Return the corners of a regular polygon, by default with a corner on top. If `inner` is not
    1, the radius of every second corner is `inner`, which makes a star."""
    corners = _arc(start, start + 360.0, num + 1)[:-1]
    corners[1::2] *= inner
    return corners


def _heart() -> np.ndarray:
    t = np.linspace(0, 2 * np.pi, 49)[:-1]
    height = 13 * np.cos(t) - 5 * np.cos(2 * t) - 2 * np.cos(3 * t) - np.cos(4 * t)
    return np.stack([np.sin(t) ** 3, -height / 16], axis=1)


def _centred(points: np.ndarray | Sequence[tuple[float, float]]) -> np.ndarray:
    """Move points so that the centre of their bounding box is at the origin, and scale them so that
    the largest distance from the origin is 1."""
    corners = np.array(points)
    corners = corners - (corners.min(axis=0) + corners.max(axis=0)) / 2
    return corners / np.linalg.norm(corners, axis=1).max()


_W = 0.34  # half the width of the cross's bars, relative to half their length
OUTLINES: dict[str, np.ndarray] = {
    "circle": _centred(_regular(48)) * 0.92,
    "triangle": _centred(_regular(3)),
    "square": _centred(_regular(4, start=45.0)),
    "star": _centred(_regular(10, inner=0.45)),
    "cross": _centred(
        [(_W, -1.0), (_W, -_W), (1.0, -_W), (1.0, _W), (_W, _W), (_W, 1.0)]
        + [(-_W, 1.0), (-_W, _W), (-1.0, _W), (-1.0, -_W), (-_W, -_W), (-_W, -1.0)]
    ),
    "crescent": _centred(
        np.concatenate([_arc(50.0, 310.0, 30), _arc(292.0, 68.0, 24, 0.826, 0.334)])
    ),
    "heart": _centred(_heart()),
    "arrow": _centred(
        [(-1.0, -0.3), (0.1, -0.3), (0.1, -0.8), (1.0, 0.0), (0.1, 0.8), (0.1, 0.3), (-1.0, 0.3)]
    ),
}
"""Corner points of each shape, at a distance of at most 1 from the origin."""

SHAPES = tuple(OUTLINES)

# The letters task: capital letters in matplotlib's fonts, tilted, sheared and moved, in ink
# on paper

LETTERS = tuple("ABDEGHKMPRSY")
FONTS = (
    *("DejaVuSans", "DejaVuSans-Bold", "DejaVuSans-Oblique", "DejaVuSans-BoldOblique"),
    *(
        "DejaVuSansMono",
        "DejaVuSansMono-Bold",
        "DejaVuSansMono-Oblique",
        "DejaVuSansMono-BoldOblique",
    ),
    *("DejaVuSerif", "DejaVuSerif-Bold", "DejaVuSerif-Italic", "DejaVuSerif-BoldItalic"),
    *("STIXGeneral", "STIXGeneralBol", "STIXGeneralItalic", "STIXGeneralBolIta"),
    *("cmr10", "cmb10", "cmss10", "cmtt10", "cmmi10"),
)


def draw_letters(rng: np.random.Generator, labels: np.ndarray, image_size: int) -> np.ndarray:
    """Draw letters in dark ink of any hue on pale paper."""
    num = len(labels)
    fonts = rng.integers(len(FONTS), size=num)
    mask = np.stack(
        [
            _pose(rng, _glyph(FONTS[font], LETTERS[label], image_size), image_size)
            for font, label in zip(fonts, labels, strict=True)
        ]
    )
    ink = hsv(rng.random(num), rng.uniform(0.4, 0.9, num), rng.uniform(0.1, 0.45, num))
    paper = hsv(
        rng.uniform(0.06, 0.2, num), rng.uniform(0.03, 0.2, num), rng.uniform(0.85, 1.0, num)
    )
    page = ground(rng, paper, image_size, unrest=0.05)
    return finish(rng, blend(mask, ink[:, None, None], page), grain=0.03)


def _glyph(font: str, letter: str, image_size: int) -> Image.Image:
    """Draw a letter in the middle of a supersampled image. The letter is about 0.6 times as high as
    the image."""
    side = image_size * SUPERSAMPLE
    canvas = Image.new("L", (side, side))
    face = _face(font, round(0.8 * side))
    x0, y0, x1, y1 = face.getbbox(letter)
    corner = ((side - x0 - x1) / 2, (side - y0 - y1) / 2)
    ImageDraw.Draw(canvas).text(corner, letter, fill=255, font=face)
    return canvas


@functools.cache
def _face(font: str, size: int) -> ImageFont.FreeTypeFont:
    # imported here, because an import at the top would slow down every start of the library
    import matplotlib

    file = Path(matplotlib.get_data_path(), "fonts", "ttf", f"{font}.ttf")
    return ImageFont.truetype(str(file), size, layout_engine=ImageFont.Layout.BASIC)


def _pose(rng: np.random.Generator, glyph: Image.Image, image_size: int) -> np.ndarray:
    """Tilt, shear, scale and shift a letter at random. Return the fraction of each pixel that the
    letter covers, `[S, S]`."""
    side = glyph.width
    angle, shear = rng.uniform(-0.22, 0.22), rng.uniform(-0.2, 0.2)
    scale = rng.uniform(0.72, 1.05)
    shift = rng.uniform(-0.09, 0.09, 2) * side
    # Pillow needs the inverse map, from pixels of the new image to pixels of the old image
    turn = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    back = np.linalg.inv(scale * turn @ np.array([[1.0, shear], [0.0, 1.0]]))
    offset = side / 2 - back @ (side / 2 + shift)
    matrix = (back[0, 0], back[0, 1], offset[0], back[1, 0], back[1, 1], offset[1])
    moved = glyph.transform((side, side), Image.Transform.AFFINE, matrix, Image.Resampling.BILINEAR)
    return shrink(moved)


# The colours task, which is very easy: images filled with one mottled colour

COLOURS = ("red", "yellow", "green", "blue")
HUES = np.array([0.0, 0.15, 0.36, 0.61])


def draw_colours(rng: np.random.Generator, labels: np.ndarray, image_size: int) -> np.ndarray:
    """Fill images with one mottled colour. The hues of different classes never overlap."""
    num = len(labels)
    hue = (HUES[labels] + rng.uniform(-0.04, 0.04, num)) % 1
    colour = hsv(hue, rng.uniform(0.65, 0.95, num), rng.uniform(0.6, 0.9, num))
    return finish(rng, ground(rng, colour, image_size, unrest=0.16), grain=0.03)


# The textures task: procedural two-tone patterns, rotated, scaled and shifted

Plane = Float[np.ndarray, "num P P"]


def draw_textures(rng: np.random.Generator, labels: np.ndarray, image_size: int) -> np.ndarray:
    """Draw one pattern per image, in two muted colours with uneven lighting."""
    num = len(labels)
    pattern = np.empty((num, image_size, image_size))
    for label, name in enumerate(TEXTURES):
        members = np.flatnonzero(labels == label)
        pattern[members] = _pattern(rng, PATTERNS[name], len(members), image_size)
    hue = rng.random(num)
    pale = hsv(hue, rng.uniform(0.05, 0.3, num), rng.uniform(0.65, 0.95, num))
    deep = hsv(
        (hue + rng.uniform(-0.2, 0.2, num)) % 1,
        rng.uniform(0.15, 0.45, num),
        rng.uniform(0.15, 0.45, num),
    )
    light = 1 + 0.08 * mottle(rng, num, image_size, 2)
    flip = rng.random(num) < 0.5
    pattern[flip] = 1 - pattern[flip]
    mixed = blend(pattern, pale[:, None, None], deep[:, None, None])
    return finish(rng, mixed * light[..., None], grain=0.05)


def _pattern(
    rng: np.random.Generator, value: Callable[[Plane, Plane], Plane], num: int, image_size: int
) -> Plane:
    """Evaluate `value` at randomly rotated, scaled and shifted coordinates in units of periods. A
    soft threshold at 0 converts the results to brightness in [0, 1]."""
    side = 2 * image_size  # supersampled by two, against aliasing
    at = (np.arange(side) + 0.5) / side - 0.5
    y, x = at[:, None], at[None, :]
    angle, periods, bend = (
        rng.uniform(*r, (num, 1, 1)) for r in ((0, 2 * np.pi), (2.6, 4.6), (-0.5, 0.5))
    )
    u = periods * (np.cos(angle) * x + np.sin(angle) * y) + rng.uniform(-0.5, 0.5, (num, 1, 1))
    v = periods * (np.cos(angle) * y - np.sin(angle) * x) + rng.uniform(-0.5, 0.5, (num, 1, 1))
    wobble = 0.12 * mottle(rng, num, side, 3)
    soft = 0.5 + 0.5 * np.tanh(3 * value(u + wobble + 0 * bend, v + wobble))
    return soft.reshape(num, image_size, 2, image_size, 2).mean(axis=(2, 4))


def _wave(t: Plane) -> Plane:
    return np.sin(2 * np.pi * t)


def _zigzag(t: Plane) -> Plane:
    """Return a triangle wave with period 1 and values in [-1, 1]."""
    return 4 * np.abs(t % 1 - 0.5) - 1


def _lines(t: Plane, width: float) -> Plane:
    """Return values that are positive if `t` is less than `width` periods from a whole number."""
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
"""Functions of two coordinates in units of periods. The sign of the result selects one of two
colours."""

TEXTURES = tuple(PATTERNS)

# Helpers shared by all tasks: colours, mottled backgrounds, grain and antialiased masks

SUPERSAMPLE = 4
"""Masks are supersampled by this factor and then averaged."""


def hsv(hue, saturation, value) -> np.ndarray:
    """Convert HSV to RGB in [0, 1] along a new last axis of size 3. The arguments are broadcast; a
    hue of 1 is a full circle."""
    hue, saturation, value = np.broadcast_arrays(hue, saturation, value)
    sector = (np.array([5.0, 3.0, 1.0]) + hue[..., None] * 6) % 6
    ramp = np.clip(np.minimum(sector, 4 - sector), 0, 1)
    return value[..., None] * (1 - saturation[..., None] * ramp)


def mottle(
    rng: np.random.Generator, num: int, image_size: int, cells: int
) -> Float[np.ndarray, "num S S"]:
    """Sample smooth noise: normal values on a grid of `cells` x `cells` squares with cosine
    interpolation."""
    grid = rng.standard_normal((num, cells + 1, cells + 1))
    position = (np.arange(image_size) + 0.5) / image_size * cells
    first = position.astype(int)
    weight = 0.5 - 0.5 * np.cos(np.pi * (position - first))
    rows = grid[:, first] * (1 - weight[:, None]) + grid[:, first + 1] * weight[:, None]
    return rows[:, :, first] * (1 - weight) + rows[:, :, first + 1] * weight


def ground(
    rng: np.random.Generator, colour: Float[np.ndarray, "num 3"], image_size: int, unrest: float
) -> Float[np.ndarray, "num S S 3"]:
    """Fill each image with one colour. The brightness, and less strongly the hue, varies smoothly
    across the image; `unrest` scales the variation."""
    num = len(colour)
    light = mottle(rng, num, image_size, 3) + 0.6 * mottle(rng, num, image_size, 7)
    tint = np.stack([mottle(rng, num, image_size, 2) for _ in range(3)], axis=-1)
    return colour[:, None, None, :] * (1 + unrest * (light[..., None] + 0.4 * tint))


def blend(mask, front, back) -> np.ndarray:
    """Blend two images: `front` where the mask is 1, `back` where it is 0."""
    return back + mask[..., None] * (front - back)


def finish(
    rng: np.random.Generator, images: Float[np.ndarray, "num S S 3"], grain: float
) -> UInt8[np.ndarray, "num S S 3"]:
    """Add Gaussian noise with the standard deviation `grain` (in units of the full range), and
    round to bytes."""
    noisy = images + grain * rng.standard_normal(images.shape)
    return np.round(np.clip(noisy, 0, 1) * 255).astype(np.uint8)


def shrink(mask: Image.Image) -> Float[np.ndarray, "S S"]:
    """Average a supersampled 8-bit mask. Return the fraction of each pixel that the mask covers."""
    return np.asarray(mask.reduce(SUPERSAMPLE), np.float64) / 255


Draw = Callable[[np.random.Generator, np.ndarray, int], np.ndarray]

FAMILIES: dict[str, tuple[tuple[str, ...], Draw]] = {
    "shapes": (SHAPES, draw_shapes),
    "letters": (LETTERS, draw_letters),
    "colours": (COLOURS, draw_colours),
    "textures": (TEXTURES, draw_textures),
    "shapes_recoloured": (SHAPES, draw_recoloured_shapes),
}
"""Classes and drawing function of each generated task."""

TASKS = (*FAMILIES, "digits")


def demo_stream(
    *,
    image_size: int = 32,
    seed: int = 0,
    num_train: int = 600,
    num_val: int = 150,
    num_test: int = 250,
) -> Stream:
    """Generate the six tasks with the given numbers of images and balanced classes (the digits are
    nearly balanced).

    The result depends only on the arguments. Except for the digits, the images of a split do not
    depend on the sizes of the other splits. Raises ValueError if a split has fewer images than a
    task has classes, or if the splits together have more images than scikit-learn has digits.
    """
    if image_size < 8:
        raise ValueError(f"image_size must be at least 8 for the demo stream, got {image_size}")
    sizes = {"train": num_train, "val": num_val, "test": num_test}
    most_classes = max(len(classes) for classes, _ in FAMILIES.values())
    if min(sizes.values()) < most_classes:
        raise ValueError(
            f"every split needs at least {most_classes} images, one of each letter; got {sizes}"
        )
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
    """Split scikit-learn's 1,797 handwritten digits, which are white on black.

    The test split is sampled first and from all images, so it does not depend on the sizes of the
    other splits.
    """
    # imported here, because importing scikit-learn takes a second
    from sklearn.datasets import load_digits

    # converted to arrays, because the types in scikit-learn's stubs include pandas types
    small, labels = (np.asarray(array) for array in load_digits(return_X_y=True))
    if sum(sizes.values()) > len(labels):
        raise ValueError(f"there are {len(labels)} digits in all, the splits ask for {sizes}")
    rest = np.arange(len(labels))
    splits = {}
    for split in ("test", "val", "train"):
        order = np.concatenate(
            [rng.permutation(np.flatnonzero(labels[rest] == digit)) for digit in range(10)]
        )
        mask = cut(labels[rest], sizes[split], keep=0, order=order)
        chosen = rest[mask]
        splits[split] = Split(_enlarge(small[chosen], image_size), labels[chosen].astype(np.int32))
        rest = rest[~mask]
    return Task("digits", tuple("0123456789"), **splits)


def _enlarge(rows: np.ndarray, image_size: int) -> np.ndarray:
    """Resize images of 8 x 8 grey values in 0..16, one per row, to uint8 `[N, S, S, 3]` with a
    bicubic filter."""
    small = np.round(rows.reshape(-1, 8, 8) * (255 / 16)).astype(np.uint8)
    size = (image_size, image_size)
    grey = [np.asarray(Image.fromarray(p).resize(size, Image.Resampling.BICUBIC)) for p in small]
    return np.repeat(np.stack(grey)[..., None], 3, axis=-1)


def _generator(seed: int, purpose: str) -> np.random.Generator:
    """Make a random generator from the seed and a purpose such as `shapes/train`, so that adding a
    task does not change the images of the other tasks."""
    return np.random.default_rng([seed, zlib.crc32(purpose.encode())])
