"""What a stream contains: example images of every class, or of every task."""

import functools
import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Integer, UInt8
from matplotlib.font_manager import findfont
from PIL import Image, ImageDraw, ImageFont

from cheem_jax.core.atomic import write_atomically
from cheem_jax.report.figures import DPI, INK
from cheem_jax.report.table import spread

EMPTY, FRAME = "#f4f4f4", "#dcdcdc"
COLUMNS, ROWS = 10, 8
"""Images next to each other, and rows of a contact sheet."""
MOST_OF_CLASS, MOST_OF_TASK = 8, 5
"""Images of a class in a contact sheet, and of a task in the figure of a stream."""
SIDE = 112
"""About the pixels of an image's side."""
MARGIN, GAP, TITLE, CAPTION = 28, 12, 50, 24
"""Pixels, as all positions are, so that images keep whole pixels."""

Images = UInt8[np.ndarray, "_ _ _ 3"]
"""`[K, S, S, 3]`, of other sizes in each group."""


class StreamRow(NamedTuple):
    """One task of a stream as its figure shows it."""

    name: str
    classes: int
    num_train: int
    num_val: int
    num_test: int
    examples: Images
    """At most five are shown."""


def contact_sheet(
    images: Images, labels: Integer[np.ndarray, "_"], classes: Sequence[str], file: Path, *, title: str
) -> None:
    """Examples of each class over its name, as many as there is room for.

    Where there are more classes than places, some are left out, evenly spread.
    """
    chosen = spread(len(classes), COLUMNS * ROWS)
    groups = [(classes[label], images[labels == label]) for label in chosen]
    _draw(groups, min(MOST_OF_CLASS, COLUMNS * ROWS // len(chosen)), file, title)


def stream_figure(rows: Sequence[StreamRow], file: Path, *, title: str) -> None:
    """Examples of each task in learning order over its name, its classes and images."""
    groups = [
        (f"T{index} {row.name}: {row.classes:,} classes, {row.num_train:,} training, {row.num_val:,} validation and "
         f"{row.num_test:,} test images", row.examples)
        for index, row in enumerate(rows)
    ]  # fmt: skip
    _draw(groups, MOST_OF_TASK, file, title)


def _draw(groups: Sequence[tuple[str, Images]], each: int, file: Path, title: str) -> None:
    """A PNG of at most `each` images of every group over its caption; an empty box where it has none."""
    num_columns = min(COLUMNS // each, len(groups)) * each
    num_rows = math.ceil(len(groups) * each / num_columns)
    # small images in whole multiples, so that every pixel stays a square; large ones reduced
    side = groups[0][1].shape[1]
    side = SIDE if side > 1.5 * SIDE else side * max(1, round(SIDE / side))
    wide, tall = side + GAP, side + CAPTION
    title = _shortened(title, 10 * DPI, 12)
    width = max(num_columns * wide - GAP, math.ceil(_font(12).getlength(title))) + 2 * MARGIN
    left = (width - num_columns * wide + GAP) // 2
    figure = Image.new("RGB", (width, TITLE + num_rows * tall + MARGIN // 2), "white")
    drawing = ImageDraw.Draw(figure)
    drawing.text((width / 2, TITLE / 2), title, font=_font(12), fill=INK, anchor="mm")
    for number, (caption, images) in enumerate(groups):
        row, column = divmod(number * each, num_columns)
        x, y = left + column * wide, TITLE + row * tall
        num = min(each, len(images))
        for place in range(num):
            image, at = images[place * len(images) // num], x + place * wide
            # a thin frame, since many an image is white at its edge
            drawing.rectangle((at - 1, y - 1, at + side, y + side), fill=FRAME)
            method = Image.Resampling.NEAREST if len(image) <= side else Image.Resampling.LANCZOS
            figure.paste(Image.fromarray(image).resize((side, side), method), (at, y))
        if not num:
            drawing.rectangle((x, y, x + side - 1, y + side - 1), fill=EMPTY)
        caption = _shortened(caption, each * wide - GAP, 7)
        drawing.text((x, y + side + 13), caption, font=_font(7), fill=INK, anchor="lm")
    file.parent.mkdir(parents=True, exist_ok=True)
    content = io.BytesIO()
    figure.save(content, "PNG")
    write_atomically(file, content.getvalue())


def _shortened(text: str, room: float, size: float) -> str:
    """The text in one line, cut off at so many pixels."""
    text = " ".join(text.encode(errors="replace").decode().split())
    kept = text[: int(room) + 1]  # no letter is narrower than a pixel
    while len(kept) > 1 and _font(size).getlength(kept) > room:
        kept = f"{kept[:-2].rstrip()}…"
    return kept


@functools.cache
def _font(size: float) -> ImageFont.FreeTypeFont:
    return ImageFont.truetype(findfont("DejaVu Sans"), round(size * DPI / 72))
