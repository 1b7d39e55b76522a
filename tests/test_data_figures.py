"""The contact sheet and the stream's figure, with ordinary and with odd data."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from cheem_jax.report.figures import StreamRow, contact_sheet, stream_figure

RED, GREEN, EMPTY = (200, 30, 40), (10, 160, 60), (0xF4, 0xF4, 0xF4)


def plain(colours: list[tuple[int, int, int]], side: int = 8) -> np.ndarray:
    return np.broadcast_to(
        np.array(colours, np.uint8)[:, None, None], (len(colours), side, side, 3)
    ).copy()


def sheet(file: Path, images: np.ndarray, labels: list[int], classes: list[str]) -> np.ndarray:
    contact_sheet(images, np.array(labels, np.int64), classes, file, title="set · train")
    with Image.open(file) as image:
        assert image.format == "PNG"
        return np.asarray(image.convert("RGB"))


def count(pixels: np.ndarray, colour: tuple[int, int, int]) -> int:
    return int((pixels == colour).all(-1).sum())


def test_every_class_has_one_example_with_its_own_pixels(tmp_path):
    images = plain([RED, GREEN] + [(index, 0, 0) for index in range(1, 10)])
    pixels = sheet(tmp_path / "sub" / "a.png", images, [*range(11)], [f"c{i}" for i in range(11)])
    # 8 pixels a side, fourteen times as large
    assert count(pixels, RED) == count(pixels, GREEN) == 112**2
    assert [file.name for file in (tmp_path / "sub").iterdir()] == ["a.png"]


def test_few_classes_get_several_examples_each(tmp_path):
    pixels = sheet(
        tmp_path / "a.png", plain([RED] * 3 + [GREEN] * 12), [0] * 3 + [1] * 12, ["red", "green"]
    )
    assert count(pixels, RED) == 3 * 112**2 and count(pixels, GREEN) == 8 * 112**2
    images = plain([RED] * 20 + [(0, 0, index) for index in range(19)])
    pixels = sheet(
        tmp_path / "b.png", images, [0] * 20 + [*range(1, 20)], [f"c{i}" for i in range(20)]
    )
    assert count(pixels, RED) == 4 * 112**2


def test_several_examples_are_different_images(tmp_path):
    colours = [(index, 0, 90) for index in range(3)]
    pixels = sheet(tmp_path / "a.png", plain(colours), [0, 0, 0], ["only"])
    assert [count(pixels, colour) for colour in colours] == [112**2] * 3


def test_many_classes_are_chosen_evenly_with_the_first_and_the_last(tmp_path):
    images = plain([RED] + [(0, 0, 0)] * 1621 + [GREEN])
    pixels = sheet(
        tmp_path / "a.png", images, list(range(1623)), [f"class_{i}" for i in range(1623)]
    )
    assert count(pixels, RED) == count(pixels, GREEN) == 112**2
    assert pixels.shape[0] < 1500 and pixels.shape[1] < 1500


@pytest.mark.parametrize("side", [1, 28, 72, 100, 224])
def test_small_images_are_enlarged_in_whole_steps_and_large_ones_reduced(tmp_path, side):
    board = np.zeros((1, side, side, 3), np.uint8)
    board[:, ::2] = RED
    pixels = sheet(tmp_path / "a.png", board, [0], ["stripes"])
    assert 150 < pixels.shape[0] < 300
    if side < 200:
        times = max(1, round(112 / side))
        assert count(pixels, RED) == ((side + 1) // 2 * times) * (side * times)


@pytest.mark.parametrize(
    "name",
    [
        "$^{x}$",
        "$",
        "a_b^c",
        r"\frac{",
        "",
        "long " * 400,
        "W" * 5000,
        "crème brûlée",
        "狗 🐶",
        "two\nlines\t",
        "\ud800",
    ],
)
@pytest.mark.parametrize("num_classes", [1, 6, 30])
def test_any_class_name_is_rendered_without_changing_the_size_of_the_figure(
    tmp_path, name, num_classes
):
    images = plain([RED] * num_classes)
    labels = list(range(num_classes))
    odd = sheet(tmp_path / "odd.png", images, labels, [name] * num_classes)
    assert odd.shape == sheet(tmp_path / "a.png", images, labels, ["a"] * num_classes).shape
    contact_sheet(images, np.array(labels), ["a"] * num_classes, tmp_path / "title.png", title=name)
    below = odd[-30:]  # a caption of the last row stays off the left and right edges
    assert (below[:, :20] == 255).all() and (below[:, -20:] == 255).all()


def test_a_class_without_examples_leaves_an_empty_box(tmp_path):
    pixels = sheet(tmp_path / "a.png", plain([RED]), [1], ["none", "red"])
    # smooth text
    assert count(pixels, RED) == 112**2 and count(pixels, EMPTY) == pytest.approx(112**2, rel=0.01)
    sheet(tmp_path / "b.png", np.zeros((0, 8, 8, 3), np.uint8), [], ["none"] * 20)


NONE = np.zeros((0, 8, 8, 3), np.uint8)


def row(
    name: str = "task", classes: int = 10, num_train: int = 1000, examples: np.ndarray = NONE
) -> StreamRow:
    return StreamRow(name, classes, num_train, num_val=100, num_test=200, examples=examples)


def stream(file: Path, rows: list[StreamRow], title: str = "A stream") -> np.ndarray:
    stream_figure(rows, file, title=title)
    with Image.open(file) as image:
        assert image.format == "PNG"
        return np.asarray(image.convert("RGB"))


def test_a_task_shows_at_most_five_examples_or_an_empty_box(tmp_path):
    pixels = stream(
        tmp_path / "a.png",
        [row(examples=plain([RED] * 9)), row(examples=plain([GREEN] * 2, 300)), row()],
    )
    assert count(pixels, RED) == 5 * 112**2 and count(pixels, GREEN) == 2 * 112**2
    assert count(pixels, EMPTY) == pytest.approx(112**2, rel=0.01)  # some of it in the smooth text


@pytest.mark.parametrize(
    "rows",
    [
        [row()],
        [row("$^{x}$"), row("_" * 300), row("狗"), row("")],
        [row(classes=1, num_train=1)],
        [row(classes=1623, num_train=1_232_167), row(classes=1, num_train=0)],
        [row(classes=0, num_train=0)],
        [row(f"task_{index}", num_train=10**index) for index in range(1, 13)],
    ],
)
def test_figures_of_unusual_streams_have_a_readable_size(tmp_path, rows):
    pixels = stream(tmp_path / "a.png", rows, title="$x_" * 100)
    assert 150 < pixels.shape[0] < 1300 and 600 < pixels.shape[1] < 2000
    assert (pixels[:, -10:] == 255).all() and (pixels[:, :10] == 255).all()
