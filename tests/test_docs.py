"""The documentation site, without building it: pages, links, names, commands, drawings and worked
numbers.

`make docs` builds it and also checks anchors.
"""

import ast
import dataclasses
import importlib
import json
import re
import shlex
import xml.etree.ElementTree
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import jax
import numpy as np
import pytest
import yaml

from cheem_jax.backbone.config import CONFIGS
from cheem_jax.cheem import hee
from cheem_jax.cli.commands import COMMANDS
from cheem_jax.core.ops import Expert, init_low_rank
from cheem_jax.core.settings import COLOURS

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
SITE = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
PROJECT = "project/"  # pages that docs/site_hook.py adds from the root of the repository
PAGES = sorted(DOCS.rglob("*.md"))
DRAWINGS = sorted((DOCS / "drawings").glob("*.svg"))
SVG = "{http://www.w3.org/2000/svg}"
CODE = re.compile(r"^```.*?^```|`[^`\n]+`", re.MULTILINE | re.DOTALL)


def name_of(page: Path) -> str:
    return page.relative_to(DOCS).as_posix()


def pages_of(nav: list) -> Iterator[str]:
    """Yield every page that a `nav` of mkdocs names."""
    for entry in nav:
        for value in entry.values() if isinstance(entry, dict) else [entry]:
            yield from pages_of(value) if isinstance(value, list) else [value]


def commands_in(text: str) -> Iterator[list[str]]:
    """Yield the words after `cheem` of every command in a page: in consoles, scripts and `inline
    code`."""
    for code in CODE.findall(text):
        for line in code.strip("`").replace("\\\n", " ").splitlines():
            for command in line.split("|"):
                if result := re.match(r"\s*(?:\$ )?cheem ([^#]*)", command):
                    yield shlex.split(result[1])


def unknown_in(words: list[str]) -> str | None:
    """Return the unknown parts of a command: its name or an option."""
    name = next((name for num in (2, 1) if (name := " ".join(words[:num])) in COMMANDS), None)
    if name is None:
        return None if words[:1] in ([], ["--help"], ["data"]) else f"cheem {words[0]}"
    settings, _ = COMMANDS[name].load()
    accepted = {field.name.replace("_", "-") for field in dataclasses.fields(settings)} | {"help"}
    options = [
        word.removeprefix("--").split("=")[0].split(".")[0]
        for word in words
        if word.startswith("--")
    ]
    return next((f"cheem {name} --{option}" for option in options if option not in accepted), None)


def resolves(name: str) -> bool:
    """Whether a dotted name is a module or an attribute of one."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        try:
            result = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        for part in parts[end:]:
            if not hasattr(result, part):
                return False
            result = getattr(result, part)
        return True
    return False


def test_every_page_of_the_site_exists():
    missing = [
        page
        for page in pages_of(SITE["nav"])
        if not (
            ROOT / page.removeprefix(PROJECT) if page.startswith(PROJECT) else DOCS / page
        ).is_file()
    ]
    assert not missing


def test_every_page_is_on_the_site_or_left_out_on_purpose():
    left_out = set(SITE["not_in_nav"].split())
    assert {name_of(page) for page in PAGES} - left_out == {
        page for page in pages_of(SITE["nav"]) if not page.startswith(PROJECT)
    }


def test_the_hook_adds_every_page_outside_of_docs_to_the_site():
    tree = ast.parse((DOCS / "site_hook.py").read_text())
    values = {
        node.targets[0].id: ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and node.targets[0].id in ("PAGES", "FILES")
    }
    assert all((ROOT / name).is_file() for name in values["PAGES"] + values["FILES"])
    assert {PROJECT + name for name in values["PAGES"]} == {
        page for page in pages_of(SITE["nav"]) if page.startswith(PROJECT)
    }


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_link_of_a_page_leads_to_a_file(page):
    targets = re.findall(r"\]\(([^)\s]+)\)", CODE.sub("", page.read_text()))
    inside = [target.split("#")[0] for target in targets if not re.match(r"[a-z]+:", target)]
    assert not [target for target in inside if target and not (page.parent / target).exists()]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_name_of_the_package_and_every_script_in_a_page_exists(page):
    text = page.read_text()
    names = re.findall(r"^::: ([\w.]+)|[`\[](cheem_jax(?:\.\w+)+)[`\]]", text, re.MULTILINE)
    scripts = set(re.findall(r"\bexperiments/[a-z_]+\.py\b", text))
    assert not [name for name in sorted({a or b for a, b in names}) if not resolves(name)]
    assert not [script for script in sorted(scripts) if not (ROOT / script).is_file()]


def test_the_pages_of_names_name_some():
    for page in (
        "paper-to-code.md",
        *(f"reference/{name}.md" for name in ("use", "method", "memory", "engine")),
    ):
        assert len(re.findall(r"cheem_jax\.\w+", (DOCS / page).read_text())) >= 4


@pytest.mark.parametrize("page", [*PAGES, ROOT / "README.md"], ids=lambda page: page.name)
def test_every_command_in_a_page_is_known_with_its_options(page):
    assert not [
        unknown for words in commands_in(page.read_text()) if (unknown := unknown_in(words))
    ]


def test_an_unknown_command_or_option_in_a_page_would_be_noticed():
    text = (
        "`cheem leran X`, `cheem data list`, then\n```console\n$ cheem report runs/demo --colour"
        " red  # no\n```\n"
    )
    assert [unknown_in(words) for words in commands_in(text)] == [
        "cheem leran",
        None,
        "cheem report --colour",
    ]


@pytest.mark.parametrize("drawing", DRAWINGS, ids=lambda drawing: drawing.stem)
def test_a_drawing_can_be_read_aloud_in_the_dark_and_without_a_network(drawing):
    text = drawing.read_text()
    root = xml.etree.ElementTree.fromstring(text)
    assert root.get("role") == "img"
    for name in ("title", "desc"):
        [element] = root.findall(f"{SVG}{name}")
        assert element.text and element.get("id") in (root.get("aria-labelledby") or "").split()
    assert "prefers-color-scheme: dark" in text
    assert text.count("http") == text.count('xmlns="http') == 1
    used = {kind for kind in COLOURS if re.search(rf'class="{kind}\b', text)}
    assert used and all(f".{kind} {{ fill: {COLOURS[kind]} }}" in text for kind in used)
    sizes = [float(size) for size in re.findall(r"font(?:-size)?: ([\d.]+)px", text)]
    assert min(sizes) * 700 / float(root.get("width") or 0) >= 11.5


def test_every_drawing_has_a_page():
    shown = {
        PurePosixPath(name).stem
        for page in PAGES
        for name in re.findall(r"drawings/[\w-]+\.svg", page.read_text())
    }
    assert shown == {drawing.stem for drawing in DRAWINGS}


def test_the_worked_sampling_example_equals_the_code():
    text = (DOCS / "concepts" / "sampling.md").read_text()
    rows = re.findall(r"^\|.*\| ((?:Reuse|Adapt) \d|New|Skip) \| (0\.\d+) \|$", text, re.MULTILINE)
    stated = {candidate: float(probability) for candidate, probability in rows}
    [table] = hee.exploit_table(np.array([[0.6], [-0.2]]), [[0], [1]], [2])
    order = ("Reuse 0", "Reuse 1", "Adapt 0", "Adapt 1", "New", "Skip")
    assert stated == {
        name: round(float(value), 3) for name, value in zip(order, table, strict=False)
    }
    drawing = (DOCS / "drawings" / "sampling.svg").read_text()
    assert all(f">{value:.3f}<" in drawing for value in stated.values())
    psi, aux = hee.first_level(np.array([0.6, -0.2]))
    assert [f"{value:.3f}" for value in (*psi, aux)] == re.findall(
        r"^\| (?:base|cars|Aux) \| (0\.\d+)", text, re.MULTILINE
    )


def figures_of(record: dict) -> list[float]:
    """Return the numbers of a benchmark's record about its rows: seconds, results, goals and the
    numbers in its notes."""
    if "cells" in record:  # of an accelerator: every number of every cell
        return numbers_in([record["cells"], record["before"]])
    result = []
    for row in record["rows"]:
        result += [
            *row["seconds"].values(),
            row["reached"],
            row["goal"],
            row["ceiling"],
            row.get("share"),
        ]
        result += re.findall(r"\d+(?:\.\d+)?", row["note"].replace(",", ""))
    return [float(value) for value in result if value is not None]


def numbers_in(values) -> list[float]:
    if isinstance(values, dict | list):
        parts = values.values() if isinstance(values, dict) else values
        return [number for part in parts for number in numbers_in(part)]
    return [float(values)] if isinstance(values, int | float) else []


def test_the_figures_of_the_benchmarks_are_those_of_their_records():
    records = {
        file.stem: json.loads(file.read_text()) for file in (DOCS / "benchmarks").glob("*.json")
    }
    checked = 0
    wrong = []
    head = []
    for line in (DOCS / "benchmarks.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if cells[-1] == "record":
            head = cells
        if (record := records.get(cells[-1].strip("`"))) is None:
            continue
        figures = figures_of(record)
        described = (
            2 if "time" in head else 1
        )  # the other cells have figures: times, ratios and goals
        for number in re.findall(
            r"(?<![\w.])\d[\d,]*(?:\.\d+)?(?!\w)", " ".join(cells[described:-1])
        ):
            decimals = len(number.partition(".")[2])
            printed = {
                f"{scale * value:.{decimals}f}" for value in figures for scale in (1, 100, 1000)
            }  # as is, %, ms
            checked += 1
            if number.replace(",", "") not in printed:
                wrong.append((number, line))
    assert not wrong
    assert checked > 90


def test_the_benchmarks_say_where_each_record_was_measured():
    text = (DOCS / "benchmarks.md").read_text()
    places = text[: text.index("\n## ")].splitlines()
    files = list((DOCS / "benchmarks").glob("*.json"))
    assert files
    for file in files:
        machine = json.loads(file.read_text())["machine"]
        [row] = [line for line in places if line.startswith("|") and f"`{file.stem}`" in line]
        _, cpu, date, *_ = row.split(" | ")
        assert machine["cpu"].replace("(R)", "").startswith(cpu) and machine["date"] == date
        assert (
            f"jax {machine['jax']}, jaxlib {machine['jaxlib']} and flax {machine['flax']}" in text
        )


def test_the_bytes_that_a_task_leaves_are_those_of_its_arrays():
    rows = {
        cells[0]: cells[2:]
        for line in (DOCS / "concepts" / "block.md").read_text().splitlines()
        if len(cells := [cell.strip() for cell in line.strip("|").split("|")]) == 4
    }

    def percent(num: int) -> str:
        kilobytes = 4 * num / 1000
        return (
            f"{kilobytes / 1000:.1f} MB"
            if kilobytes >= 1000
            else f"{kilobytes:.{int(kilobytes < 10)}f} kB"
        )

    for column, backbone in enumerate(("deit_tiny", "vit_base")):
        vit = CONFIGS[backbone]
        pair = init_low_rank(jax.random.key(0), num_inputs=vit.mlp_width, width=vit.width, rank=16)
        new = Expert(np.zeros((vit.mlp_width, vit.width)), np.zeros(vit.width))
        sizes = {
            "a pair, rank 16": sum(leaf.size for leaf in pair),
            "a New expert": sum(leaf.size for leaf in new),
            "head, per class": vit.width + 1,
            "means, 12 blocks": vit.depth * vit.width,
            "centroids, K = 5": 5 * vit.width,
        }
        assert {part: rows[part][column] for part in sizes} == {
            part: percent(num) for part, num in sizes.items()
        }
