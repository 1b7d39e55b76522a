"""Numbers, tables and a figure from the record of a study of the search."""

import operator
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from charts import ACCURACY, COST, frame, write_page
from matplotlib.figure import Figure
from scipy.stats import t

from cheem_jax.report.figures import DPI, FAINT, INK, save
from cheem_jax.report.table import NONE, Grid, format_flops, number, percent
from studies.searching.units import LORA, Entry

Numbers = Mapping[str, Any]
NAME = "search_study"
FIRST = "first"
"""Position of a task without earlier tasks."""
COSTS = {"params_added": ("parameters added, k", 1e-3), "flops": ("FLOPs per image, M", 1e-6)}


def latest(entries: Sequence[Entry]) -> list[Entry]:
    """Return the units without those of earlier images of a task or of earlier settings, which a
    later unit has replaced."""
    units = [entry for entry in entries if entry["event"] in ("learned", "reuse")]
    images = {unit["task"]: unit.get("data_sha256") for unit in units}
    last = {}
    for unit in units:
        if unit.get("data_sha256") == images[unit["task"]]:
            keys = ("task", "position", "recipe", "rate", "seed")
            last[tuple(unit.get(key) for key in keys)] = unit
    return list(last.values())


def accuracies_by_task(entries: Sequence[Entry]) -> list[dict[str, Any]]:
    """Return one row per task and position: test accuracies by recipe and rate, and those of the
    all-Reuse network."""
    groups: dict[tuple[str, str], list[Entry]] = {}
    for entry in entries:
        if entry["event"] in ("learned", "reuse"):
            groups.setdefault((entry["task"], entry["position"]), []).append(entry)
    rows = []
    for (task, position), group in groups.items():
        recipes: dict[str, list[Entry]] = {}
        for entry in group:
            recipes.setdefault(entry.get("recipe", ""), []).append(entry)
        reuse = recipes.pop("", [])
        if recipes:
            by_rate = {recipe: _by_rate(one) for recipe, one in recipes.items()}
            row = {"task": task, "position": position, "recipes": by_rate}
            rows.append({**row, "reuse": _by_rate(reuse)})
    return rows


def _by_rate(entries: Sequence[Entry]) -> dict[str, Any]:
    """Return the test accuracy of each seed by rate, the rate with the best mean accuracy on
    validation images, and that mean. A failed training counts as 0."""
    test: dict[str, dict[str, float]] = {}
    val: dict[str, list[float]] = {}
    for entry in entries:
        rate = f"{entry['rate']:g}"
        test.setdefault(rate, {})[str(entry["seed"])] = entry["test_accuracy"] or 0.0
        val.setdefault(rate, []).append(entry["val_accuracy"] or 0.0)
    means = {rate: float(np.mean(values)) for rate, values in val.items()}
    best = max(means, key=lambda rate: means[rate], default=None)
    return {"best_rate": best, "val": means.get(best or ""), "test": test}


def best_lora(rows: Sequence[Numbers]) -> str | None:
    """Return the recipe of LoRA-CL with the highest mean accuracy on validation images, each task
    at its best rate; None if no recipe has all tasks."""
    first = [row["recipes"] for row in rows if row["position"] == FIRST]
    complete = [name for name in LORA if first and all(name in recipes for recipes in first)]
    return max(
        complete, key=lambda name: np.mean([one[name]["val"] for one in first]), default=None
    )


def gain(rows: Sequence[Numbers], recipe: str, other: str) -> dict[str, Any] | None:
    """Compute the gain of a recipe over another, each task at its best rate, as a fraction.

    The value is the mean over tasks; that of a task is the mean over its positions and common
    seeds. The 95 % interval is Student's over the tasks, None for a single task. LoRA-CL has
    results as the first task only, which hold for every position.
    """
    first = {row["task"]: row["recipes"] for row in rows if row["position"] == FIRST}
    gains: dict[str, list[float]] = {}
    for row in rows:
        ours = row["recipes"].get(recipe)
        theirs = row["recipes"].get(other)
        if other.partition("/")[0] in LORA:
            theirs = first.get(row["task"], {}).get(other)
        if ours is None or theirs is None:
            continue
        ours, theirs = (side["test"][side["best_rate"]] for side in (ours, theirs))
        if seeds := ours.keys() & theirs.keys():
            mean = float(np.mean([ours[seed] - theirs[seed] for seed in sorted(seeds)]))
            gains.setdefault(row["task"], []).append(mean)
    if not gains:
        return None
    by_task = np.array([np.mean(values) for values in gains.values()])
    value = float(by_task.mean())
    numbers: dict[str, Any] = {"value": value, "low": None, "high": None, "num": len(by_task)}
    if len(by_task) > 1:
        half = t.ppf(0.975, len(by_task) - 1) * by_task.std(ddof=1) / np.sqrt(len(by_task))
        numbers |= {"low": value - float(half), "high": value + float(half)}
    return numbers


def costs(entries: Sequence[Entry]) -> dict[str, dict[str, Any]]:
    """Compute accuracy, forward passes, seconds by phase, FLOPs and added parameters by recipe:
    means over seeds, then over the first tasks and rates with which all recipes learned."""
    learned = [
        entry
        for entry in entries
        if entry["event"] == "learned" and entry["genome"] and entry["position"] == FIRST
    ]
    recipes = dict.fromkeys(entry["recipe"] for entry in learned)
    groups: dict[tuple[str, float], dict[str, list[Entry]]] = {}
    for entry in learned:
        group = groups.setdefault((entry["task"], entry["rate"]), {})
        group.setdefault(entry["recipe"], []).append(entry)
    common = [group for group in groups.values() if group.keys() == recipes.keys()]

    def mean(recipe: str, value: Callable[[Entry], float]) -> float:
        return float(np.mean([np.mean([value(one) for one in group[recipe]]) for group in common]))

    means = {}
    for recipe in recipes if common else ():
        phases = dict.fromkeys(
            phase for group in common for entry in group[recipe] for phase in entry["seconds"]
        )
        means[recipe] = {
            "num": len(common),
            **{
                name: mean(recipe, operator.itemgetter(name))
                for name in ("test_accuracy", "passes", "flops", "params_added")
            },
            "seconds": {
                phase: mean(recipe, lambda entry, phase=phase: entry["seconds"].get(phase, 0.0))
                for phase in phases
            },
        }
    return means


def write(directory: Path, entries: Sequence[Entry], setting: Numbers) -> list[Grid]:
    """Write tables, numbers and figure of the record; return the tables."""
    study = numbers_of(entries, setting)
    grids = grids_of(study)
    title = f"{study['stream']}, {study['backbone']} at {study['image_size']} pixels"
    parts = [f"# The search on {title}", *(grid.to_markdown() for grid in grids)]
    if study["costs"]:
        draw(study, directory / f"{NAME}.png")
        parts.append(f"![Accuracy against parameters and FLOPs by recipe]({NAME}.png)")
    write_page(directory / NAME, "\n\n".join(parts) + "\n", study)
    return grids


def numbers_of(entries: Sequence[Entry], setting: Numbers) -> dict[str, Any]:
    """Return all numbers of the tables as JSON values."""
    entries = latest(entries)
    rows = accuracies_by_task(entries)
    recipes = dict.fromkeys(name for row in rows for name in row["recipes"])
    references = [
        name for name in (best_lora(rows), "quick") if name is not None and name in recipes
    ]
    gains = [
        {"recipe": name, "over": reference, **value}
        for name in recipes
        for reference in references
        if name != reference and (value := gain(rows, name, reference)) is not None
    ]
    return {
        **{name: setting[name] for name in ("stream", "backbone", "image_size")},
        "accuracies": rows,
        "gains": gains,
        "costs": costs(entries),
    }


def grids_of(study: Numbers) -> list[Grid]:
    """Return the tables that have rows; docs/search.md explains them."""
    grids = (
        accuracy_grid(study["accuracies"]),
        gain_grid(study["gains"]),
        cost_grid(study["costs"]),
    )
    return [grid for grid in grids if grid.rows]


def accuracy_grid(rows: Sequence[Numbers]) -> Grid:
    """Make the table of mean test accuracies by task, recipe and rate, and of the all-Reuse network
    at its best rate."""
    columns = dict.fromkeys(
        (name, rate)
        for recipe in dict.fromkeys(name for row in rows for name in row["recipes"])
        for row in rows
        for name, side in row["recipes"].items()
        for rate in side["test"]
        if name == recipe
    )
    lines = []
    for row in rows:
        tests = {name: side["test"] for name, side in row["recipes"].items()}
        seeds = min(len(seeds) for test in tests.values() for seeds in test.values())
        reuse = row["reuse"]["test"].get(row["reuse"]["best_rate"])
        cells = [_mean(tests.get(name, {}).get(rate)) for name, rate in columns]
        lines.append((row["task"], row["position"], *cells, _mean(reuse), str(seeds)))
    titles = (f"{name}\n{rate}" for name, rate in columns)
    titles = ("task", "position", *titles, "all\nReuse", "seeds")
    return Grid("Test accuracy, %, task ID given", titles, tuple(lines), 2)


def gain_grid(gains: Sequence[Numbers]) -> Grid:
    """Make the table of differences in accuracy between recipes, each task at its best rate."""
    rows = [
        (
            one["recipe"],
            one["over"],
            points(one),
            str(one["num"]),
        )
        for one in gains
    ]
    columns = ("recipe", "minus", "points", "tasks")
    return Grid("Differences in accuracy", columns, tuple(rows), 2)


def cost_grid(costs: Mapping[str, Numbers]) -> Grid:
    """Make the table of accuracies and costs by recipe; a training step counts as three forward
    passes."""
    phases = dict.fromkeys(phase for one in costs.values() for phase in one["seconds"])
    seconds = (f"{phase}\ns" for phase in phases)
    columns = (
        *("recipe", "accuracy\n%", "parameters\nadded", "FLOPs", "forward\npasses"),
        *(*seconds, "all\ns"),
    )
    rows = [
        (
            name,
            percent(one["test_accuracy"]),
            number(one["params_added"], 0),
            format_flops(one["flops"]),
            number(one["passes"], 0),
            *(number(one["seconds"].get(phase, 0.0), 1) for phase in phases),
            number(sum(one["seconds"].values()), 1),
        )
        for name, one in costs.items()
    ]
    return Grid("Accuracy and costs as a first task", columns, tuple(rows), 1)


def draw(study: Numbers, file: Path, ranks: Sequence[str] = tuple(LORA)) -> None:
    """Draw accuracy against added parameters and against FLOPs: a point per recipe, with the
    interval of its difference from LoRA-CL, and the recipes of LoRA-CL in `ranks` as a curve."""
    costs = study["costs"]
    curve = [name for name in ranks if name in costs]
    halves = {
        one["recipe"]: 100 * (one["high"] - one["value"])
        for one in study["gains"]
        if one["over"] in LORA and one["high"] is not None
    }
    figure = Figure(figsize=(9.6, 3.8), dpi=DPI, layout="constrained")
    for axes, (cost, (label, factor)) in zip(figure.subplots(1, 2), COSTS.items(), strict=True):
        points = {
            name: (factor * one[cost], 100 * one["test_accuracy"]) for name, one in costs.items()
        }
        if curve:
            axes.plot(*zip(*(points[name] for name in curve), strict=True), "-", color=FAINT)
        for name, (x, y) in points.items():
            color = COST if name in ranks else ACCURACY
            axes.errorbar(x, y, halves.get(name), fmt="o", color=color, elinewidth=0.8)
            axes.annotate(name, (x, y), (4, 4), textcoords="offset points", size=7, color=INK)
        frame(axes, "", label, "test accuracy, %", grid=True)
    save(figure, file)


def points(one: Numbers) -> str:
    """Return a difference in points, with its interval if it has one."""
    values = [100 * one[name] for name in ("value", "low", "high") if one[name] is not None]
    text = "{:.1f} ({:.1f} to {:.1f})" if len(values) > 1 else "{:.1f}"
    return text.format(*values).replace("-", "−")


def _mean(tests: Mapping[str, float] | None) -> str:
    return percent(sum(tests.values()) / len(tests)) if tests else NONE
