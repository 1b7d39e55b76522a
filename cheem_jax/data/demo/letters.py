"""Capital letters in the fonts that matplotlib ships, tilted, sheared and moved, as ink on paper."""

import functools
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from cheem_jax.data.demo import paint

CLASSES = tuple("ABDEGHKMPRSY")
FONTS = (
    *("DejaVuSans", "DejaVuSans-Bold", "DejaVuSans-Oblique", "DejaVuSans-BoldOblique"),
    *("DejaVuSansMono", "DejaVuSansMono-Bold", "DejaVuSansMono-Oblique", "DejaVuSansMono-BoldOblique"),
    *("DejaVuSerif", "DejaVuSerif-Bold", "DejaVuSerif-Italic", "DejaVuSerif-BoldItalic"),
    *("STIXGeneral", "STIXGeneralBol", "STIXGeneralItalic", "STIXGeneralBolIta"),
    *("cmr10", "cmb10", "cmss10", "cmtt10", "cmmi10"),
)


def draw(rng: np.random.Generator, labels: np.ndarray, image_size: int) -> np.ndarray:
    """uint8 `[N, S, S, 3]`: dark ink of any hue on pale paper."""
    num = len(labels)
    fonts = rng.integers(len(FONTS), size=num)
    mask = np.stack(
        [
            _pose(rng, _glyph(FONTS[font], CLASSES[label], image_size), image_size)
            for font, label in zip(fonts, labels, strict=True)
        ]
    )
    ink = paint.hsv(rng.random(num), rng.uniform(0.4, 0.9, num), rng.uniform(0.1, 0.45, num))
    paper = paint.hsv(rng.uniform(0.06, 0.2, num), rng.uniform(0.03, 0.2, num), rng.uniform(0.85, 1.0, num))
    page = paint.ground(rng, paper, image_size, unrest=0.05)
    return paint.finish(rng, paint.blend(mask, ink[:, None, None], page), grain=0.03)


def _glyph(font: str, letter: str, image_size: int) -> Image.Image:
    """The supersampled letter, about 0.6 of the picture high, in the middle."""
    side = image_size * paint.SUPERSAMPLE
    canvas = Image.new("L", (side, side))
    face = _face(font, round(0.8 * side))
    left, top, right, bottom = face.getbbox(letter)
    corner = ((side - left - right) / 2, (side - top - bottom) / 2)
    ImageDraw.Draw(canvas).text(corner, letter, fill=255, font=face)
    return canvas


@functools.cache
def _face(font: str, size: int) -> ImageFont.FreeTypeFont:
    import matplotlib  # here, because importing it would slow down every start of the library

    file = Path(matplotlib.get_data_path(), "fonts", "ttf", f"{font}.ttf")
    return ImageFont.truetype(str(file), size, layout_engine=ImageFont.Layout.BASIC)


def _pose(rng: np.random.Generator, glyph: Image.Image, image_size: int) -> np.ndarray:
    """Coverage `[S, S]` of the letter after a random tilt, shear, change of size and shift."""
    side = glyph.width
    angle, shear = rng.uniform(-0.22, 0.22), rng.uniform(-0.2, 0.2)
    scale = rng.uniform(0.72, 1.05)
    shift = rng.uniform(-0.09, 0.09, 2) * side
    # Pillow wants the way back, from the new picture's pixels to the old one's.
    turn = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    back = np.linalg.inv(scale * turn @ np.array([[1.0, shear], [0.0, 1.0]]))
    offset = side / 2 - back @ (side / 2 + shift)
    matrix = (back[0, 0], back[0, 1], offset[0], back[1, 0], back[1, 1], offset[1])
    moved = glyph.transform((side, side), Image.Transform.AFFINE, matrix, Image.Resampling.BILINEAR)
    return paint.shrink(moved)
