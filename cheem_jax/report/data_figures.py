"""What a stream contains: example images of every class, and the tasks next to each other."""

import functools
import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Integer, UInt8
from matplotlib.font_manager import findfont
from PIL import Image, ImageDraw, ImageFont

from cheem_jax.core.atomic import write_atomically
from cheem_jax.report.figures import DPI, FAINT, INK
from cheem_jax.report.table import spread

EMPTY, FRAME = "#f4f4f4", "#dcdcdc"
NUM_EXAMPLES, EXAMPLE_SIDE = 5, 84
"""Images of a task in the stream's figure, and the pixels of their sides."""
IMAGE_SIDE = 112
"""About the pixels of an image's side in the contact sheet."""
COLUMNS, ROWS, EXAMPLES_EACH = 10, 8, 8
"""Of the contact sheet: places, and images of a class at most."""
MARGIN, GAP, TITLE, CAPTION = 28, 12, 50, 24
"""Pixels, as all positions are, so that images keep whole pixels."""


class StreamRow(NamedTuple):
    """One task of a stream as its figure shows it."""

    name: str
    classes: int
    num_train: int
    num_val: int
    num_test: int
    examples: UInt8[np.ndarray, "K S S 3"] | None
    """At most five are shown; None leaves an empty box."""


def contact_sheet(
    images: UInt8[np.ndarray, "N S S 3"],
    labels: Integer[np.ndarray, "N"],
    classes: Sequence[str],
    file: Path,
    *,
    title: str,
) -> None:
    """Examples of each class with its name under the first, as many as there is room for.

    Where there are more classes than places, some are left out, evenly spread.
    """
    chosen = spread(len(classes), COLUMNS * ROWS)
    each = min(EXAMPLES_EACH, COLUMNS * ROWS // len(chosen))
    num_columns = min(COLUMNS // each, len(chosen)) * each
    # small images in whole multiples, so that every pixel stays a square; large ones reduced
    side = images.shape[1]
    side = IMAGE_SIDE if side > 1.5 * IMAGE_SIDE else side * max(1, round(IMAGE_SIDE / side))
    wide, tall = side + GAP, side + CAPTION
    title = _shortened(title, 10 * DPI, 12)
    width = max(num_columns * wide - GAP, math.ceil(_text_width(title, 12))) + 2 * MARGIN
    left = (width - num_columns * wide + GAP) // 2
    canvas = _Canvas(width, TITLE + math.ceil(len(chosen) * each / num_columns) * tall + MARGIN // 2)
    canvas.text(width / 2, TITLE / 2, title, 12)
    for number, label in enumerate(chosen):
        row, column = divmod(number * each, num_columns)
        x, y = left + column * wide, TITLE + row * tall
        of_class = images[labels == label]
        num = min(each, len(of_class))
        for place in range(num):
            canvas.image(of_class[place * len(of_class) // num], x + place * wide, y, side)
        if not num:
            canvas.image(None, x, y, side)
        text = _shortened(classes[label], each * wide - GAP, 7)
        if each == 1:
            canvas.text(x + side / 2, y + side + 13, text, 7)
        else:
            canvas.text(x, y + side + 13, text, 7, align="left")
    canvas.save(file)


def stream_figure(rows: Sequence[StreamRow], file: Path, *, title: str) -> None:
    """A task per row in learning order: examples, and how many images and classes it has."""
    step = EXAMPLE_SIDE + 6
    names = [_shortened(row.name, 260, 10) for row in rows]
    examples = MARGIN + 44 + math.ceil(max(_text_width(name, 10) for name in names)) + 20
    first = examples + NUM_EXAMPLES * step + 150
    columns = {head: first + 130 * place for place, head in enumerate(("training", "validation", "test", "classes"))}
    width, top = columns["classes"] + 10 + MARGIN, TITLE + 36
    canvas = _Canvas(width, top + len(rows) * step + MARGIN // 2)
    canvas.text(width / 2, TITLE / 2, _shortened(title, width - MARGIN, 12), 12)
    for head, x in columns.items():
        canvas.text(x, TITLE + 18, head, 9, FAINT, "right")
    for index, (name, row) in enumerate(zip(names, rows, strict=True)):
        y = top + index * step
        middle = y + EXAMPLE_SIDE / 2
        canvas.text(MARGIN, middle, f"T{index}", 10, FAINT, "left")
        canvas.text(MARGIN + 44, middle, name, 10, INK, "left")
        if row.examples is None or not len(row.examples):
            canvas.box(examples, y, NUM_EXAMPLES * step - 6, EXAMPLE_SIDE, EMPTY)
        else:
            for place, image in enumerate(row.examples[:NUM_EXAMPLES]):
                canvas.image(image, examples + place * step, y, EXAMPLE_SIDE)
        for x, count in zip(columns.values(), (row.num_train, row.num_val, row.num_test, row.classes), strict=True):
            canvas.text(x, middle, f"{count:,}", 10, INK, "right")
    canvas.save(file)


class _Canvas:
    """A figure drawn in pixels."""

    def __init__(self, width: int, height: int) -> None:
        self.figure = Image.new("RGB", (width, height), "white")
        self.draw = ImageDraw.Draw(self.figure)

    def box(self, x: int, y: int, width: int, height: int, colour: str) -> None:
        self.draw.rectangle((x, y, x + width - 1, y + height - 1), fill=colour)

    def image(self, image: UInt8[np.ndarray, "S S 3"] | None, x: int, y: int, side: int) -> None:
        """With a thin frame, since many an image is white at its edge; an empty box where there is none."""
        if image is None:
            self.box(x, y, side, side, EMPTY)
            return
        self.box(x - 1, y - 1, side + 2, side + 2, FRAME)
        method = Image.Resampling.NEAREST if image.shape[0] <= side else Image.Resampling.LANCZOS
        self.figure.paste(Image.fromarray(image).resize((side, side), method), (x, y))

    def text(
        self, x: float, y: float, text: str, size: float, colour: str = INK,
        align: Literal["left", "center", "right"] = "center",
    ) -> None:  # fmt: skip
        anchor = {"left": "lm", "center": "mm", "right": "rm"}[align]
        self.draw.text((x, y), text, font=_font(size), fill=colour, anchor=anchor)

    def save(self, file: Path) -> None:
        """Write a PNG whole or not at all."""
        file.parent.mkdir(parents=True, exist_ok=True)
        content = io.BytesIO()
        self.figure.save(content, "PNG")
        write_atomically(file, content.getvalue())


def _shortened(text: str, room: float, size: float) -> str:
    """The text in one line, cut off at so many pixels."""
    text = " ".join(text.encode(errors="replace").decode().split())
    kept = text[: int(room) + 1]  # no letter is narrower than a pixel
    while len(kept) > 1 and _text_width(kept, size) > room:
        kept = f"{kept[:-2].rstrip()}…"
    return kept


def _text_width(text: str, size: float) -> float:
    return _font(size).getlength(text)


@functools.cache
def _font(size: float) -> ImageFont.FreeTypeFont:
    return ImageFont.truetype(findfont("DejaVu Sans"), round(size * DPI / 72))
