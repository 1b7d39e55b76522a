"""Tables, page, numbers and figure of a study of the search."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from charts import ACCURACY, COST, frame, write_page
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from cheem_jax.report.figures import DPI, INK, save
from cheem_jax.report.table import NONE, Grid, format_flops, number, percent
from studies.searching.measures import SCORES, costs, found_by, gain, rankings
from studies.searching.units import Entry

NAME = "search_study"
TITLES = {"shared_head": "shared head", "closed_form": "closed form"}
PAPER, PLUS = "quick", "plus"
OFFSET = 0.15
"""Half of what lies between the two sides of a task in the figure."""


def write(directory: Path, entries: Sequence[Entry], setting: Mapping[str, Any]) -> list[Grid]:
    """Page, numbers and figure of what the record holds so far; returns the tables."""
    found = found_in(entries, setting)
    title = f"# The search on {found['stream']}, {found['backbone']} at {found['image_size']} pixels"
    parts = [title, *(grid.to_markdown() for grid in grids_of(found))]
    if picture(found, directory / f"{NAME}.png"):
        parts.append(f"![Score against accuracy, and what each recipe finds]({NAME}.png)")
    write_page(directory / NAME, "\n\n".join(parts) + "\n", found)
    return grids_of(found)


def found_in(entries: Sequence[Entry], setting: Mapping[str, Any]) -> dict[str, Any]:
    """All numbers of the page, as JSON values."""
    rows = found_by(entries)
    rates = dict.fromkeys(rate for row in rows for own in row["recipes"].values() for rate in own["test"])
    others = dict.fromkeys(name for row in rows for name in row["recipes"] if name != PAPER)
    gains = [
        {"recipe": name, "rate": rate, **value}
        for name in others
        for rate in (*rates, None)
        if (value := gain(rows, name, PAPER, rate)) is not None
    ]
    names = ("stream", "backbone", "image_size")
    return {
        **{name: setting[name] for name in names}, "ranking": rankings(entries), "found": rows, "gains": gains,
        "costs": costs(entries),
    }  # fmt: skip


def grids_of(found: Mapping[str, Any]) -> list[Grid]:
    """The tables that have rows."""
    grids = [ranking_grid(found["ranking"]), found_grid(found["found"]), gain_grid(found["gains"])]
    return [grid for grid in (*grids, cost_grid(found["costs"])) if grid.rows]


def ranking_grid(ranking: Sequence[Mapping[str, Any]]) -> Grid:
    """A row per task and position: both rank correlations with their intervals."""
    rows = [(row["task"], row["position"], *(_interval(row[name], 2) for name in SCORES)) for row in ranking]
    caption = (
        "Spearman's correlation of an architecture's score in one supernet with its accuracy after stand-alone "
        "training (validation and test images); 95 % intervals, bootstrap over architectures. They are few, so one "
        "task's interval is wide."
    )
    return Grid("How scores rank networks", ("task", "position", *TITLES.values()), tuple(rows), 2, caption)


def found_grid(rows: Sequence[Mapping[str, Any]]) -> Grid:
    """A row per task and position: mean test accuracy of what each recipe found, by rate and at the best rate."""
    recipes = list(dict.fromkeys(name for row in rows for name in row["recipes"]))
    rates = {
        name: list(dict.fromkeys(rate for row in rows for rate in row["recipes"].get(name, {"test": {}})["test"]))
        for name in recipes
    }
    columns = ["task", "position", *(f"{name}\n{rate}" for name in recipes for rate in rates[name])]
    lines = []
    for row in rows:
        tests = {name: side["test"] for name, side in row["recipes"].items()}
        cells = [_mean(tests.get(name, {}).get(rate)) for name in recipes for rate in rates[name]]
        seeds = min(len(seeds) for test in tests.values() for seeds in test.values())
        reuse = row["reuse"]
        lines.append((row["task"], row["position"], *cells, _mean(reuse["test"].get(reuse["best_rate"])), str(seeds)))
    columns += ["all\nReuse", "seeds"]
    caption = (
        "Test accuracy, %, the task ID given, mean over seeds, by learning rate. All "
        "Reuse: at the rate with the higher accuracy on validation images."
    )
    return Grid("What each search finds", tuple(columns), tuple(lines), 2, caption)


def gain_grid(gains: Sequence[Mapping[str, Any]]) -> Grid:
    """A row per recipe and rate: points over the paper's search."""
    rows = [
        (gain["recipe"], gain["rate"] or "each at its best",
         _interval({name: 100 * gain[name] for name in ("value", "low", "high")}, 1), str(gain["num"]))
        for gain in gains
    ]  # fmt: skip
    caption = "Mean over tasks; 95 % intervals, bootstrap over tasks and seeds."
    return Grid(f"Points over `{PAPER}`", ("recipe", "rate", "points", "tasks"), tuple(rows), 2, caption)


def cost_grid(found: Mapping[str, Mapping[str, Any]]) -> Grid:
    """A row per recipe: what learning a task costs, and what the found network costs."""
    phases = list(dict.fromkeys(phase for own in found.values() for phase in own["seconds"]))
    columns = (
        "recipe",
        "forward\npasses",
        *(f"{phase}\ns" for phase in phases),
        "all\ns",
        "FLOPs",
        "parameters\nadded",
    )
    rows = [
        (name, number(own["passes"], 0), *(number(own["seconds"].get(phase, 0.0), 1) for phase in phases),
         number(sum(own["seconds"].values()), 1), format_flops(own["flops"]), number(own["params_added"], 0))
        for name, own in found.items()
    ]  # fmt: skip
    caption = (
        "Means per task over what all recipes learned. A training step on an image counts as three forward passes. "
        "Seconds compare only where nothing else ran."
    )
    return Grid("What it costs", columns, tuple(rows), 1, caption)


def picture(found: Mapping[str, Any], file: Path) -> bool:
    """Each score's correlation and each recipe's accuracy at its best rate, by task; False where nothing is known."""
    rows = found["found"]
    if not rows:
        return False
    figure = Figure(figsize=(9.6, 1.2 + 0.35 * len(rows)), dpi=DPI, layout="constrained")
    left, right = figure.subplots(1, 2)
    labels = [f"{row['task']}, {row['position'].split()[0]}" for row in rows]
    ranked = {(row["task"], row["position"]): row for row in found["ranking"]}
    sides = ((SCORES[0], PAPER, COST, -OFFSET), (SCORES[1], PLUS, ACCURACY, OFFSET))
    for score, recipe, color, offset in sides:
        for place, row in enumerate(rows):
            y = place + offset
            if found_rank := ranked.get((row["task"], row["position"]), {}).get(score):
                left.plot([found_rank["low"], found_rank["high"]], [y, y], color=color, alpha=0.35, linewidth=3)
                left.plot(found_rank["value"], y, "o", color=color)
            if side := row["recipes"].get(recipe):
                tests = [100 * value for value in side["test"][side["best_rate"]].values()]
                right.plot(tests, [y] * len(tests), "o", color=color, markersize=4)
    names = ([TITLES[score] for score, *_ in sides], [recipe for _, recipe, *_ in sides])
    titles = (("score and accuracy", "Spearman"), ("what the search finds", "test accuracy, %"))
    for axes, (title, x), own in zip((left, right), titles, names, strict=True):
        axes.set_yticks(range(len(rows)), labels if axes is left else [""] * len(rows))
        axes.set_ylim(len(rows) - 0.5, -0.5)
        frame(axes, title, x, grid=True)
        handles = [
            Line2D([], [], marker="o", linestyle="", color=side[2], label=name)
            for side, name in zip(sides, own, strict=True)
        ]
        axes.legend(handles=handles, frameon=False, fontsize=8, labelcolor=INK, loc="best")
    save(figure, file)
    return True


def _mean(tests: Mapping[str, float] | None) -> str:
    return percent(sum(tests.values()) / len(tests)) if tests else NONE


def _interval(found: Mapping[str, Any] | None, decimals: int) -> str:
    if found is None:
        return NONE
    value, low, high = (f"{found[name]:.{decimals}f}".replace("-", "−") for name in ("value", "low", "high"))
    return f"{value} ({low} to {high})"
