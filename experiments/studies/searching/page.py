"""Tables and figure of `docs/search.md` from the recorded units of the study."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from cheem_jax.report.table import NONE, Grid, number, percent
from studies.searching.report import COSTS, FIRST, accuracies_by_task, draw, gain, points
from studies.searching.units import AUGMENTED, RANKS, Entry

WINNER = "backward-90/32"
UNSEEN = ("caltech101", "food10", "mnist", "daimler_pedestrians", "cifar10")
"""Sets on which no search was developed."""
TITLES = {
    "reuse": "all Reuse",
    "quick": "paper's search",
    "plus": "closed form",
    "plus-finalists": "closed form, earlier",
    "lora-64": "LoRA-CL",
    "lora-64/32": "LoRA-CL, rank 32",
    "backward-90-any/32": "any block skipped",
    "last-2/32": "last two skipped",
    "backward-90": "elimination",
    "backward-90/32": "rank 32",
    "backward-90/16": "rank 16",
    "backward-90/8": "rank 8",
}
"""Titles of recipes in tables."""
CURVE = {
    f"lora-64{suffix}": f"LoRA-CL {rank}"
    for suffix, rank in (("/8", 8), ("/16", 16), ("/32", 32), ("", 64))
}
POINTS = {"plus": "closed form", WINNER: "elimination", **CURVE}
"""Titles of recipes in the figure."""


class Compared(NamedTuple):
    """Units of one table."""

    image_size: int
    is_first: bool
    recipes: tuple[str, ...]
    is_unseen: bool | None = False
    """Whether the sets are those of `UNSEEN`, or all others; None: all sets."""
    is_augmented: bool = False
    """Whether the training images were augmented."""


TABLES = {
    "first": Compared(
        96,
        True,
        (
            *("quick", "plus", "lora-64", "backward-90"),
            *(f"backward-90/{rank}" for rank in RANKS),
        ),
    ),
    "unseen": Compared(
        96,
        True,
        ("lora-64", "backward-90", *(f"backward-90/{rank}" for rank in RANKS)),
        is_unseen=True,
    ),
    "augmented": Compared(
        96,
        True,
        tuple(f"{name}{suffix}" for name in ("lora-64", "backward-90") for suffix in ("", "/32")),
        is_unseen=None,
        is_augmented=True,
    ),
    "behind": Compared(96, False, ("reuse", "quick", "plus-finalists", WINNER)),
    "at_224": Compared(
        224,
        True,
        (
            *("reuse", "quick", "plus-finalists", "lora-64"),
            *("backward-90-any/32", "last-2/32", WINNER),
        ),
    ),
}
"""Compared units, keyed by the table's name on the page."""
SETTINGS = {
    "first task, 96 pixels, all sets": Compared(96, True, (WINNER,), None),
    "the same, augmented": TABLES["augmented"],
    "developed on": TABLES["first"],
    "unseen": TABLES["unseen"],
    "fourth task, 96": TABLES["behind"],
    "first task, 224": TABLES["at_224"],
}
"""Units of the table of differences, keyed by title."""


def read(file: Path) -> list[Entry]:
    """Read the committed units."""
    units = json.loads(file.read_text())["units"]
    return [{"event": "learned", "val_accuracy": None, **unit} for unit in units]


def tables(units: Sequence[Entry]) -> dict[str, str]:
    """Return all tables of the page as Markdown, keyed by name."""
    made = {name: accuracy_grid(units, compared) for name, compared in TABLES.items()}
    made["differences"] = difference_grid(units)
    return {name: grid.to_markdown() for name, grid in made.items()}


def select(units: Sequence[Entry], compared: Compared) -> list[Entry]:
    """Return the units of a table, with the usual learning rate. The suffix of recipes that augment
    is removed."""
    suffix = AUGMENTED if compared.is_augmented else ""
    names = {unit["recipe"]: unit["recipe"].replace(suffix, "") for unit in units}
    return [
        {**unit, "recipe": names[unit["recipe"]]}
        for unit in units
        if unit["image_size"] == compared.image_size
        and (unit["position"] == FIRST) == compared.is_first
        and compared.is_unseen in (None, unit["task"] in UNSEEN)
        and suffix in unit["recipe"]
        and names[unit["recipe"]] in compared.recipes
        and unit["rate"] == 3e-3
    ]


def means(units: Sequence[Entry], field: str) -> dict[tuple[str, str], float]:
    """Return means over seeds, keyed by task and recipe."""
    values: dict[tuple[str, str], list[float]] = {}
    for unit in units:
        if field in unit:
            values.setdefault((unit["task"], unit["recipe"]), []).append(unit[field])
    return {place: float(np.mean(seeds)) for place, seeds in values.items()}


def accuracy_grid(units: Sequence[Entry], compared: Compared) -> Grid:
    """Make a table of mean test accuracies in %, and of mean costs over the sets that all recipes
    learned."""
    selected = select(units, compared)
    recipes = compared.recipes
    accuracy = means(selected, "test_accuracy")
    tasks = list(dict.fromkeys(unit["task"] for unit in selected))
    common = [task for task in tasks if all((task, name) in accuracy for name in recipes)]
    rows = [(task, *(percent(accuracy.get((task, name))) for name in recipes)) for task in tasks]
    if len(common) < 2:
        return Grid("", ("task", *(TITLES[name] for name in recipes)), tuple(rows), 1)
    rows.append(
        (
            f"mean of {len(common)} sets",
            *(
                percent(float(np.mean([accuracy[task, name] for task in common])))
                for name in recipes
            ),
        )
    )
    for title, field, factor in (
        ("parameters added, k", "params_added", 1e-3),
        ("MFLOPs", "flops", 1e-6),
        ("forward passes, k", "passes", 1e-3),
    ):
        values = means(selected, field)
        cells = [
            number(factor * float(np.mean([values[task, name] for task in common])), 0)
            if all((task, name) in values for task in common)
            else NONE
            for name in recipes
        ]
        rows.append((title, *cells))
    return Grid("", ("task", *(TITLES[name] for name in recipes)), tuple(rows), 1)


def draw_page(units: Sequence[Entry], file: Path) -> None:
    """Draw accuracy against parameters and FLOPs: means over the sets that all recipes learned as
    the first task at 96 pixels. The curve of LoRA-CL consists of truncated copies of one network.
    """
    selected = select(units, Compared(96, True, tuple(POINTS)))
    values = {field: means(selected, field) for field in ("test_accuracy", *COSTS)}
    tasks = dict.fromkeys(unit["task"] for unit in selected)
    common = [
        task
        for task in tasks
        if all((task, name) in one for name in POINTS for one in values.values())
    ]
    costs = {
        title: {
            field: float(np.mean([one[task, name] for task in common]))
            for field, one in values.items()
        }
        for name, title in POINTS.items()
    }
    by_task = accuracies_by_task([unit for unit in selected if unit["task"] in common])
    gains = [
        {"recipe": title, "over": "lora-64", **difference}
        for name, title in POINTS.items()
        if name not in CURVE and (difference := gain(by_task, name, "lora-64"))
    ]
    draw({"costs": costs, "gains": gains}, file, tuple(CURVE.values()))


def difference_grid(units: Sequence[Entry]) -> Grid:
    """Make the table of differences between backward elimination, truncated to rank 32, and other
    recipes. The past of LoRA-CL does not matter, so it is compared as a first task everywhere."""
    loras = ("lora-64", "lora-64/32")
    rows = []
    for title, compared in SETTINGS.items():
        lora = select(units, compared._replace(is_first=True, recipes=loras))
        others = [unit for unit in select(units, compared) if unit["recipe"] not in loras]
        by_task = accuracies_by_task([*others, *lora])
        for recipe in dict.fromkeys((*compared.recipes, *loras)):
            difference = gain(by_task, WINNER, recipe)
            if recipe not in (WINNER, "reuse") and not recipe.startswith("backward"):
                cells = (points(difference), str(difference["num"])) if difference else (NONE, "0")
                rows.append((title, TITLES[recipe], *cells))
    return Grid("", ("setting", "minus", "points", "sets"), tuple(rows), 2)
