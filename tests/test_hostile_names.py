"""Names of classes, tasks and files that a stranger chose: markup and escape sequences are text."""

import json
import re
import unicodedata
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import small
from commands import cheem
from PIL import Image
from serving import Colours, ask, picture, serving
from test_memory import begin

import cheem_jax
from cheem_jax.core.paths import printable
from cheem_jax.memory.hub import model_card
from cheem_jax.report.grid import Grid

MARKUP = "<img src=x onerror=alert(1)>|[a](javascript:b)![c](http:d)&lt;"
HOSTILE = f"\x1b[2J\x9b31m\x1b]0;title\x07{MARKUP}\u202e"
"""Clears a terminal, colours and renames it, and reverses the rest of the line."""


def controls(text: str) -> set[str]:
    """Characters of a text that a terminal would execute, except line breaks and tabs."""
    order = set("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
    return {sign for sign in text if unicodedata.category(sign) == "Cc" or sign in order} - {
        "\n",
        "\t",
    }


class Elements(HTMLParser):
    """Elements of a page that run or load something."""

    def __init__(self, text: str):
        super().__init__()
        self.attributes: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.attributes += [name for name, _ in attrs]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A task, two classes and their images, all with the name."""
    folder = tmp_path_factory.mktemp("images") / f"task {HOSTILE}".replace("/", "")
    rng = np.random.default_rng(0)
    for split in ("train", "val", "test"):
        for label in range(2):
            place = folder / split / f"class {label} {HOSTILE}".replace("/", "")
            place.mkdir(parents=True)
            for row in range(4):
                pixels = np.full((8, 8, 3), 200 * label, np.uint8) + rng.integers(
                    0, 50, (8, 8, 3), np.uint8
                )
                Image.fromarray(pixels).save(place / f"{row} {HOSTILE}.png".replace("/", ""))
    return folder


def test_no_command_writes_the_control_characters_of_a_name(capsys, folder, tmp_path):
    directory = tmp_path / "memory"
    file = next(folder.glob("test/*/0*.png"))
    broken = file.with_name(f"broken {HOSTILE}.png".replace("/", ""))
    broken.write_bytes(b"no image")
    unknown = f"unknown {HOSTILE}"

    def run(expected, *words):
        status, out, err = cheem(capsys, *words)
        assert status == expected, (words, err)
        assert not controls(out + err), words
        return out

    with small.shared_executors():
        begin(directory)
        run(2, "learn", directory, folder)
        run(0, "data", "verify", folder, "--skip-broken")
        run(0, "learn", directory, folder, "--skip-broken")
        for options in ((), ("--format", "csv")):
            assert "img src=x" in re.sub(
                r"\s", " ", run(1, "predict", directory, file, broken, *options)
            )
        prediction = json.loads(run(0, "predict", directory, file, "--json"))
        assert prediction["task"] == folder.name  # exactly, since JSON escapes it
        run(0, "evaluate", directory, folder, "--skip-broken")
        run(2, "predict", directory, file, "--task", unknown)
        card = model_card(cheem_jax.open(directory), "someone/pets")
    for words in (("info",), ("watch", "--once")):
        assert "img src=x" in re.sub(r"\s", " ", run(0, words[0], directory, *words[1:]))
    run(0, "report", directory, "--out", tmp_path / "page.html")
    run(2, "info", unknown)
    run(2, "forget", directory, unknown)
    assert "onerror" not in Elements((tmp_path / "page.html").read_text()).attributes
    assert not controls(card) and "onerror" not in Elements(card).attributes
    assert "](" not in card and "&amp;lt;" in card
    [row] = [line for line in card.splitlines() if line.startswith("| task [")]
    assert len(re.findall(r"(?<!\\)\|", row)) == 5  # columns


def test_cells_of_a_markdown_table_are_text():
    grid = Grid("", ("a", "b"), (("a\\|b\nc", "p < 0.05 <b>**x**"),), 1)
    assert grid.to_markdown().splitlines()[2] == r"| a\\\|b c | p < 0.05 &lt;b>**x** |"


def test_metrics_have_no_control_characters_and_no_further_line():
    class Hostile(Colours):
        tasks = (f"dark {HOSTILE}\ncheem_images_total 7", "bright")
        classes = {
            name: Colours.classes[old] for name, old in zip(tasks, Colours.tasks, strict=True)
        }
        architectures = dict.fromkeys(tasks, ("skip",))

    with serving(Hostile()) as served:
        ask(served.port, "POST", "/predict", picture((32, 32, 32)), Content_Type="image/png")
        answer = ask(served.port, "GET", "/metrics")
    text = answer.body.decode()
    assert not controls(text) and "\ncheem_images_total 7" not in text and "img src=x" in text
    assert answer.headers["content-type"].startswith("text/plain")
    assert answer.headers["x-content-type-options"] == "nosniff"


def test_tabs_breaks_and_letters_of_every_script_are_printable():
    text = "a\tb\nسلام café 👩‍👧 हिन्दी"
    assert printable(text) == text
    assert printable(HOSTILE) == f"[2J31m]0;title{MARKUP}"
