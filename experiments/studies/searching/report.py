"""What the record of a study of the search says, with its costs, as numbers, tables, a page and a
figure."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from charts import ACCURACY, COST, frame, write_page
from jaxtyping import Float
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from scipy.stats import spearmanr

from cheem_jax.report.figures import DPI, INK, save
from cheem_jax.report.table import NONE, Grid, format_flops, number, percent
from studies.searching.units import Entry

RESAMPLES = 2000
SCORES = ("shared_head", "closed_form")


def correlation(
    *pairs: tuple[Float[np.ndarray, "P"], Float[np.ndarray, "P"]],
) -> dict[str, Any] | None:
    """Spearman's rank correlation, mean over the `pairs`, with the 95 % interval of a bootstrap
    over the networks of each; None where all of a pair are equal."""

    def found(x: np.ndarray, y: np.ndarray) -> float:
        if len(x) < 3 or not np.ptp(x) or not np.ptp(y):
            return float("nan")
        result: Any = spearmanr(x, y)
        return float(result.statistic)

    if not pairs or np.isnan(value := float(np.mean([found(x, y) for x, y in pairs]))):
        return None
    rng = np.random.default_rng(0)
    drawn = [
        [(x[rows], y[rows]) for rows in rng.integers(0, len(x), (RESAMPLES, len(x)))]
        for x, y in pairs
    ]
    low, high = np.nanquantile(
        np.mean([[found(*one) for one in own] for own in drawn], axis=0), (0.025, 0.975)
    )
    return {
        "value": value,
        "low": float(low),
        "high": float(high),
        "num": sum(len(x) for x, _ in pairs),
    }


def rankings(entries: Sequence[Entry]) -> list[dict[str, Any]]:
    """A row per task and position whose sampled networks are all trained, and their mean: how each
    score correlates with accuracy after stand-alone training, over validation and test images."""
    rows = []
    pairs = {name: [] for name in SCORES}
    for sampled in entries:
        if sampled["event"] != "sampled":
            continue
        same = {
            name: sampled[name]
            for name in ("task", "position", "data_sha256", "settings", "num", "rate")
        }
        trained = {
            tuple(e["genome"]): e
            for e in entries
            if e["event"] == "trained" and same.items() <= e.items()
        }
        reached = [accuracy_of(trained.get(tuple(genome))) for genome in sampled["genomes"]]
        if None in reached:
            continue
        own = {name: (np.array(sampled[name]), np.array(reached, np.float64)) for name in SCORES}
        for name, pair in own.items():
            pairs[name].append(pair)
        rows.append(
            {
                "task": sampled["task"],
                "position": sampled["position"],
                "rate": sampled["rate"],
                **{name: correlation(pair) for name, pair in own.items()},
            }
        )
    mean = {"task": "mean", "position": "", **{name: correlation(*pairs[name]) for name in SCORES}}
    return [*rows, mean] if len(rows) > 1 else rows


def accuracy_of(entry: Entry | None) -> float | None:
    """Accuracy over validation and test images together; None where training failed or is not
    over."""
    if entry is None or entry["test_accuracy"] is None:
        return None
    counts = np.array([entry["num_val"], entry["num_test"]])
    return float(counts @ [entry["val_accuracy"], entry["test_accuracy"]] / counts.sum())


def found_by(entries: Sequence[Entry]) -> list[dict[str, Any]]:
    """A row per task and position: mean test accuracy over the seeds by recipe and rate, and at the
    rate that is best on validation images; `reuse` is the all-Reuse network at its best rate."""
    rows = []
    for task, position in dict.fromkeys(
        (e["task"], e["position"]) for e in entries if e["event"] == "learned"
    ):
        own = [e for e in entries if (e.get("task"), e.get("position")) == (task, position)]
        recipes = dict.fromkeys(e["recipe"] for e in own if e["event"] == "learned")
        rows.append(
            {
                "task": task,
                "position": position,
                "recipes": {
                    recipe: _by_rate([e for e in own if e.get("recipe") == recipe])
                    for recipe in recipes
                },
                "reuse": _by_rate([e for e in own if e["event"] == "reuse"]),
            }
        )
    return rows


def _by_rate(entries: Sequence[Entry]) -> dict[str, Any]:
    """Test accuracy of each seed by rate, and the rate with the best mean on validation images; a
    network that could not be trained counts as 0."""
    own: dict[str, list[Entry]] = {}
    for entry in entries:
        own.setdefault(f"{entry['rate']:g}", []).append(entry)
    val = {
        rate: float(np.mean([entry["val_accuracy"] or 0 for entry in found]))
        for rate, found in own.items()
    }
    return {
        "best_rate": max(val, key=lambda rate: val[rate], default=None),
        "test": {
            rate: {str(e["seed"]): e["test_accuracy"] or 0.0 for e in found}
            for rate, found in own.items()
        },
    }


def gain(
    rows: Sequence[Mapping[str, Any]], recipe: str, other: str, rate: str | None
) -> dict[str, Any] | None:
    """Points that a recipe is ahead of another at a rate, or each at its best (None): mean over
    tasks of the means over their common seeds, with the 95 % interval of a bootstrap over tasks and
    seeds."""
    differences = []
    for row in rows:
        if not {recipe, other} <= row["recipes"].keys():
            continue
        sides = [row["recipes"][name] for name in (recipe, other)]
        tests = [
            side["test"].get(side["best_rate"] if rate is None else rate, {}) for side in sides
        ]
        if seeds := tests[0].keys() & tests[1].keys():
            differences.append(
                np.array([tests[0][seed] - tests[1][seed] for seed in sorted(seeds)])
            )
    if not differences:
        return None
    rng = np.random.default_rng(0)
    drawn = [
        np.mean([rng.choice(differences[i], len(differences[i])).mean() for i in tasks])
        for tasks in rng.integers(0, len(differences), (RESAMPLES, len(differences)))
    ]
    low, high = np.quantile(drawn, (0.025, 0.975))
    value = float(np.mean([own.mean() for own in differences]))
    return {"value": value, "low": float(low), "high": float(high), "num": len(differences)}


def costs(entries: Sequence[Entry]) -> dict[str, dict[str, Any]]:
    """Means by recipe over what all recipes learned: forward passes, seconds by phase, FLOPs and
    parameters added."""
    learned = [
        entry for entry in entries if entry["event"] == "learned" and entry["genome"] is not None
    ]
    recipes = dict.fromkeys(entry["recipe"] for entry in learned)
    by_place: dict[tuple[Any, ...], dict[str, Entry]] = {}
    for entry in learned:
        place = tuple(entry[name] for name in ("task", "position", "rate", "seed"))
        by_place.setdefault(place, {})[entry["recipe"]] = entry
    common = [found for found in by_place.values() if found.keys() == recipes.keys()]
    means = {}
    for recipe in recipes if common else ():
        own = [found[recipe] for found in common]
        means[recipe] = {
            "num": len(own),
            **{
                name: float(np.mean([entry[name] for entry in own]))
                for name in ("passes", "flops", "params_added")
            },
            "seconds": {
                phase: float(np.mean([entry["seconds"].get(phase, 0.0) for entry in own]))
                for phase in dict.fromkeys(phase for entry in own for phase in entry["seconds"])
            },
        }
    return means


NAME = "search_study"
TITLES = {"shared_head": "shared head", "closed_form": "closed form"}
PAPER, PLUS = "quick", "plus"
OFFSET = 0.15
"""Half of what lies between the two sides of a task in the figure."""


def write(directory: Path, entries: Sequence[Entry], setting: Mapping[str, Any]) -> list[Grid]:
    """Page, numbers and figure of what the record holds so far; returns the tables."""
    found = found_in(entries, setting)
    grids = grids_of(found)
    title = f"{found['stream']}, {found['backbone']} at {found['image_size']} pixels"
    parts = [f"# The search on {title}", *(grid.to_markdown() for grid in grids)]
    if picture(found, directory / f"{NAME}.png"):
        parts.append(f"![Score against accuracy, and what each recipe finds]({NAME}.png)")
    write_page(directory / NAME, "\n\n".join(parts) + "\n", found)
    return grids


def found_in(entries: Sequence[Entry], setting: Mapping[str, Any]) -> dict[str, Any]:
    """All numbers of the page, as JSON values."""
    rows = found_by(entries)
    rates = dict.fromkeys(
        rate for row in rows for own in row["recipes"].values() for rate in own["test"]
    )
    others = dict.fromkeys(name for row in rows for name in row["recipes"] if name != PAPER)
    gains = [
        {"recipe": name, "rate": rate, **value}
        for name in others
        for rate in (*rates, None)
        if (value := gain(rows, name, PAPER, rate)) is not None
    ]
    names = ("stream", "backbone", "image_size")
    return {
        **{name: setting[name] for name in names},
        "ranking": rankings(entries),
        "found": rows,
        "gains": gains,
        "costs": costs(entries),
    }


def grids_of(found: Mapping[str, Any]) -> list[Grid]:
    """The tables that have rows."""
    grids = [ranking_grid(found["ranking"]), found_grid(found["found"]), gain_grid(found["gains"])]
    return [grid for grid in (*grids, cost_grid(found["costs"])) if grid.rows]


def ranking_grid(ranking: Sequence[Mapping[str, Any]]) -> Grid:
    """A row per task and position: both rank correlations with their intervals."""
    rows = [
        (row["task"], row["position"], *(_interval(row[name], 2) for name in SCORES))
        for row in ranking
    ]
    caption = (
        "Spearman's correlation of an architecture's score in one supernet with its accuracy after"
        " stand-alone training (validation and test images); 95 % intervals, bootstrap over"
        " architectures. They are few, so one task's interval is wide."
    )
    return Grid(
        "How scores rank networks", ("task", "position", *TITLES.values()), tuple(rows), 2, caption
    )


def found_grid(rows: Sequence[Mapping[str, Any]]) -> Grid:
    """A row per task and position: mean test accuracy of what each recipe found, by rate and at the
    best rate."""
    recipes = list(dict.fromkeys(name for row in rows for name in row["recipes"]))
    rates = {
        name: list(
            dict.fromkeys(
                rate for row in rows for rate in row["recipes"].get(name, {"test": {}})["test"]
            )
        )
        for name in recipes
    }
    columns = ["task", "position", *(f"{name}\n{rate}" for name in recipes for rate in rates[name])]
    lines = []
    for row in rows:
        tests = {name: side["test"] for name, side in row["recipes"].items()}
        cells = [_mean(tests.get(name, {}).get(rate)) for name in recipes for rate in rates[name]]
        seeds = min(len(seeds) for test in tests.values() for seeds in test.values())
        reuse = row["reuse"]
        lines.append(
            (
                row["task"],
                row["position"],
                *cells,
                _mean(reuse["test"].get(reuse["best_rate"])),
                str(seeds),
            )
        )
    columns += ["all\nReuse", "seeds"]
    caption = (
        "Test accuracy, %, the task ID given, mean over seeds, by learning rate. All "
        "Reuse: at the rate with the higher accuracy on validation images."
    )
    return Grid("What each search finds", tuple(columns), tuple(lines), 2, caption)


def gain_grid(gains: Sequence[Mapping[str, Any]]) -> Grid:
    """A row per recipe and rate: points over the paper's search."""
    rows = [
        (
            gain["recipe"],
            gain["rate"] or "each at its best",
            _interval({name: 100 * gain[name] for name in ("value", "low", "high")}, 1),
            str(gain["num"]),
        )
        for gain in gains
    ]
    caption = "Mean over tasks; 95 % intervals, bootstrap over tasks and seeds."
    return Grid(
        f"Points over `{PAPER}`", ("recipe", "rate", "points", "tasks"), tuple(rows), 2, caption
    )


def cost_grid(found: Mapping[str, Mapping[str, Any]]) -> Grid:
    """A row per recipe: what learning a task costs, and what the found network costs."""
    phases = list(dict.fromkeys(phase for own in found.values() for phase in own["seconds"]))
    seconds = (f"{phase}\ns" for phase in phases)
    columns = ("recipe", "forward\npasses", *seconds, "all\ns", "FLOPs", "parameters\nadded")
    rows = [
        (
            name,
            number(own["passes"], 0),
            *(number(own["seconds"].get(phase, 0.0), 1) for phase in phases),
            number(sum(own["seconds"].values()), 1),
            format_flops(own["flops"]),
            number(own["params_added"], 0),
        )
        for name, own in found.items()
    ]
    caption = (
        "Means per task over what all recipes learned. A training step on an image counts as three"
        " forward passes. Seconds compare only where nothing else ran."
    )
    return Grid("What it costs", columns, tuple(rows), 1, caption)


def picture(found: Mapping[str, Any], file: Path) -> bool:
    """Each score's correlation and each recipe's accuracy at its best rate, by task; False where
    nothing is known."""
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
                left.plot(
                    [found_rank["low"], found_rank["high"]],
                    [y, y],
                    color=color,
                    alpha=0.35,
                    linewidth=3,
                )
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
    value, low, high = (
        f"{found[name]:.{decimals}f}".replace("-", "−") for name in ("value", "low", "high")
    )
    return f"{value} ({low} to {high})"
