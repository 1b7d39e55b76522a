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

EMPTY, FRAME = "#f4f4f4", "#dcdcdc"
IMAGES_BAR, CLASSES_BAR = "#9ec3dc", "#cfc3df"
NUM_EXAMPLES = 5  # images of a task in the stream's figure
IMAGE_SIDE = 112  # about the pixels of an image of the contact sheet
FEW_CLASSES, EXAMPLES_EACH = 4, 4

# All positions are pixels from the upper left, so that images keep whole pixels.
_MARGIN, _GAP, _TITLE = 28, 12, 50
_CAPTION = 24


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
    columns: int = 10,
    rows: int = 8,
) -> None:
    """One example per class with its name under it; several of each class where there are few."""
    if not classes or min(columns, rows) < 1 or len(images) != len(labels):
        raise ValueError(
            f"a contact sheet needs a class, a column and a row, and a label per image; got {len(classes)} classes, "
            f"{columns} columns, {rows} rows, {len(images)} images and {len(labels)} labels"
        )
    if len(labels) and not 0 <= labels.min() <= labels.max() < len(classes):
        raise ValueError(
            f"labels from {labels.min()} to {labels.max()} do not fit {len(classes)} classes; they count from 0"
        )
    title = _shortened(title, 10 * DPI, 12)
    cells, captions = _arrange(len(classes), columns, rows)
    num_rows, num_columns = (1 + max(cell[axis] for cell in cells) for axis in (0, 1))
    side = _shown_side(images.shape[1])
    captioned = sorted({row for row, *_ in captions})
    tops = [_TITLE + row * (side + _GAP) + _CAPTION * sum(r < row for r in captioned) for row in range(num_rows)]
    width = max(num_columns * (side + _GAP) - _GAP, math.ceil(_text_width(title, 12))) + 2 * _MARGIN
    left = (width - num_columns * (side + _GAP) + _GAP) // 2
    canvas = _Canvas(width, tops[-1] + side + _CAPTION + _MARGIN // 2)
    canvas.text(width / 2, _TITLE / 2, title, 12)
    for row, column, index, example, of in cells:
        of_class = np.flatnonzero(labels == index)
        place = (left + column * (side + _GAP), tops[row], side)
        if example < len(of_class):
            canvas.image(images[of_class[example * len(of_class) // min(of, len(of_class))]], *place)
        elif example == 0:
            canvas.image(None, *place)
    for row, column, span, index in captions:
        room = span * (side + _GAP) - 6
        x, y = left - _GAP / 2 + column * (side + _GAP), tops[row] + side + 13
        text = _shortened(classes[index], room, 7)
        if span == 1:
            canvas.text(x + (side + _GAP) / 2, y, text, 7)
        else:
            canvas.text(x + _GAP / 2, y, text, 7, align="left")
    canvas.save(file)


def stream_figure(rows: Sequence[StreamRow], file: Path, *, title: str) -> None:
    """A task per row in learning order: examples, and bars of training images and classes on log scales."""
    if not rows:
        raise ValueError(f"no tasks to draw in {file}; pass one StreamRow per task")
    side, gap, bar_width = 84, 6, 300
    names = [_shortened(row.name, 260, 10) for row in rows]
    examples = _MARGIN + 44 + math.ceil(max(_text_width(name, 10) for name in names)) + 20
    images = examples + NUM_EXAMPLES * (side + gap) + 24
    val = images + bar_width + 190
    test = val + 110
    classes = test + 40
    width = classes + bar_width * 2 // 3 + 90 + _MARGIN
    head = _TITLE + 56
    canvas = _Canvas(width, head + len(rows) * (side + gap) + _MARGIN // 2)
    canvas.text(width / 2, _TITLE / 2, _shortened(title, width - _MARGIN, 12), 12)
    for x, text in ((images, "training images"), (classes, "classes")):
        canvas.text(x, _TITLE + 18, text, 9, FAINT, "left")
    for x, text in ((val, "val"), (test, "test")):
        canvas.text(x, _TITLE + 18, text, 9, FAINT, "right")
    bottom = head + len(rows) * (side + gap)
    image_bar = _LogBar(images, bar_width, [row.num_train for row in rows], IMAGES_BAR)
    class_bar = _LogBar(classes, bar_width * 2 // 3, [row.classes for row in rows], CLASSES_BAR)
    for bar in (image_bar, class_bar):
        bar.draw_scale(canvas, head, bottom)
    for index, (name, row) in enumerate(zip(names, rows, strict=True)):
        top = head + index * (side + gap)
        middle = top + side / 2
        canvas.text(_MARGIN, middle, f"T{index}", 10, FAINT, "left")
        canvas.text(_MARGIN + 44, middle, name, 10, INK, "left")
        if row.examples is None or not len(row.examples):
            canvas.box(examples, top, NUM_EXAMPLES * (side + gap) - gap, side, EMPTY)
        else:
            for position, image in enumerate(row.examples[:NUM_EXAMPLES]):
                canvas.image(image, examples + position * (side + gap), top, side)
        image_bar.draw(canvas, row.num_train, middle)
        canvas.text(val, middle, f"{row.num_val:,}", 9, FAINT, "right")
        canvas.text(test, middle, f"{row.num_test:,}", 9, FAINT, "right")
        class_bar.draw(canvas, row.classes, middle)
    canvas.save(file)


def _arrange(
    num_classes: int, columns: int, rows: int
) -> tuple[list[tuple[int, int, int, int, int]], list[tuple[int, int, int, int]]]:
    """Cells (row, column, class, which example, of how many) and captions (row, column, columns spanned, class)."""
    if num_classes <= min(FEW_CLASSES, rows):  # a row each
        cells = [(c, e, c, e, columns) for c in range(num_classes) for e in range(columns)]
        return cells, [(c, 0, columns, c) for c in range(num_classes)]
    if num_classes <= columns:  # a column each
        each = min(rows, EXAMPLES_EACH)
        cells = [(e, c, c, e, each) for e in range(each) for c in range(num_classes)]
        return cells, [(each - 1, c, 1, c) for c in range(num_classes)]
    shown = min(num_classes, columns * rows)
    chosen = np.linspace(0, num_classes - 1, shown).round().astype(int).tolist()
    cells = [(*divmod(place, columns), index, 0, 1) for place, index in enumerate(chosen)]
    return cells, [(row, column, 1, index) for row, column, index, *_ in cells]


class _LogBar:
    """Bars that begin a decade or less below the smallest count: on a log scale there is no zero."""

    def __init__(self, x: int, width: int, counts: Sequence[int], colour: str) -> None:
        present = [count for count in counts if count > 0] or [1]
        self.first = max(math.ceil(math.log10(min(present))) - 1, 0)
        self.last = max(math.log10(max(present)), self.first + 1)
        self.x, self.width, self.colour = x, width, colour

    def length(self, count: float) -> float:
        return self.width * (math.log10(count) - self.first) / (self.last - self.first)

    def draw_scale(self, canvas: "_Canvas", top: float, bottom: float) -> None:
        for decade in range(self.first, math.floor(self.last) + 1):
            x = self.x + self.length(10**decade)
            canvas.box(x, top - 4, 1, bottom - top, FRAME)
            text = f"{10 ** (decade % 3)}{'kMGT'[decade // 3 - 1] if decade >= 3 else ''}"
            canvas.text(x, top - 14, text, 7, FAINT)

    def draw(self, canvas: "_Canvas", count: int, y: float) -> None:
        length = max(self.length(count), 2) if count > 0 else 0
        x, text = self.x + length + 8, f"{count:,}"
        canvas.box(self.x, y - 13, length, 26, self.colour)
        canvas.box(x - 4, y - 13, _text_width(text, 10) + 8, 26, "white")  # no line of the scale through the number
        canvas.text(x, y, text, 10, align="left")


class _Canvas:
    """A figure drawn in pixels."""

    def __init__(self, width: int, height: int) -> None:
        self.figure = Image.new("RGB", (width, height), "white")
        self.draw = ImageDraw.Draw(self.figure)

    def box(self, x: float, y: float, width: float, height: float, colour: str) -> None:
        if round(width) > 0:
            left, top = round(x), round(y)
            self.draw.rectangle((left, top, left + round(width) - 1, top + round(height) - 1), fill=colour)

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


def _shown_side(side: int) -> int:
    """Small images in whole multiples, so that every pixel stays a square; large ones reduced."""
    return IMAGE_SIDE if side > 1.5 * IMAGE_SIDE else side * max(1, round(IMAGE_SIDE / side))


def _shortened(text: str, room: float, size: float) -> str:
    """The text in one line, its middle left out as far as `room` in pixels asks for."""
    text = " ".join(text.encode(errors="replace").decode().split())
    if _text_width(text[: int(room) + 1], size) <= room:  # no letter is narrower than a pixel
        return text
    kept = min(len(text), int(room))
    while kept > 1 and _text_width(_ends(text, kept), size) > room:
        kept -= 1
    return _ends(text, kept)


def _ends(text: str, kept: int) -> str:
    return f"{text[: (kept + 1) // 2].rstrip()}…{text[len(text) - kept // 2 :].lstrip()}"


def _text_width(text: str, size: float) -> float:
    return _font(size).getlength(text)


@functools.cache
def _font(size: float) -> ImageFont.FreeTypeFont:
    return ImageFont.truetype(findfont("DejaVu Sans"), round(size * DPI / 72))
