"""Numbers, tables and a figure from the record of a study of the search."""

from collections.abc import Callable, Mapping, Sequence
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

Numbers = Mapping[str, Any]
RESAMPLES = 2000
SCORES = {"shared_head": "shared head", "closed_form": "closed form"}
PAPER, PLUS = "quick", "plus"
NAME = "search_study"
OFFSET = 0.15
"""Half of the distance between the two sides of a task in the figure."""


def bootstrap(
    value: float, num: int, resample: Callable[[np.random.Generator], float]
) -> dict[str, Any]:
    """A value of `num` things with its 95 % interval."""
    rng = np.random.default_rng(0)
    resampled = [resample(rng) for _ in range(RESAMPLES)]
    low, high = np.nanquantile(resampled, (0.025, 0.975))
    return {"value": value, "low": float(low), "high": float(high), "num": num}


def correlation(
    *pairs: tuple[Float[np.ndarray, "P"], Float[np.ndarray, "P"]],
) -> dict[str, Any] | None:
    """Spearman's rank correlation, mean over the pairs; the interval resamples the networks of each
    pair.

    None without pairs, and if all values of one side are equal.
    """

    def spearman(x: np.ndarray, y: np.ndarray) -> float:
        if len(x) < 3 or not np.ptp(x) or not np.ptp(y):
            return float("nan")
        result: Any = spearmanr(x, y)
        return float(result.statistic)

    def resample(rng: np.random.Generator) -> float:
        rows = [rng.integers(0, len(x), len(x)) for x, _ in pairs]
        return float(np.mean([spearman(x[i], y[i]) for (x, y), i in zip(pairs, rows, strict=True)]))

    if not pairs or np.isnan(value := float(np.mean([spearman(x, y) for x, y in pairs]))):
        return None
    return bootstrap(value, sum(len(x) for x, _ in pairs), resample)


def rankings(entries: Sequence[Entry]) -> list[dict[str, Any]]:
    """Correlation of each score with accuracy after stand-alone training, over validation and test
    images: a row per task and position with all samples trained, and the mean."""
    rows = []
    pairs = {name: [] for name in SCORES}
    for sampled in entries:
        if sampled["event"] != "sampled":
            continue
        common = ("task", "position", "data_sha256", "settings", "num", "rate")
        unit = {"event": "trained", **{name: sampled[name] for name in common}}
        trained = {tuple(e["genome"]): e for e in entries if unit.items() <= e.items()}
        accuracies = [accuracy_of(trained.get(tuple(genome))) for genome in sampled["genomes"]]
        if None in accuracies:
            continue
        row = {name: sampled[name] for name in ("task", "position", "rate")}
        for name, scores in pairs.items():
            scores.append((np.array(sampled[name]), np.array(accuracies, np.float64)))
            row[name] = correlation(scores[-1])
        rows.append(row)
    mean = {"task": "mean", "position": "", **{name: correlation(*pairs[name]) for name in SCORES}}
    return [*rows, mean] if len(rows) > 1 else rows


def accuracy_of(entry: Entry | None) -> float | None:
    """Accuracy over validation and test images together; None if training failed or is missing."""
    if entry is None or entry["test_accuracy"] is None:
        return None
    counts = np.array([entry["num_val"], entry["num_test"]])
    return float(counts @ [entry["val_accuracy"], entry["test_accuracy"]] / counts.sum())


def found_by(entries: Sequence[Entry]) -> list[dict[str, Any]]:
    """Test accuracy by recipe and rate, and of the all-Reuse network: a row per task and
    position."""
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
    """Test accuracy of each seed by rate, and the rate with the best mean on validation images; a
    failed training counts as 0."""
    test: dict[str, dict[str, float]] = {}
    val: dict[str, list[float]] = {}
    for entry in entries:
        rate = f"{entry['rate']:g}"
        test.setdefault(rate, {})[str(entry["seed"])] = entry["test_accuracy"] or 0.0
        val.setdefault(rate, []).append(entry["val_accuracy"] or 0.0)
    best = max(val, key=lambda rate: float(np.mean(val[rate])), default=None)
    return {"best_rate": best, "test": test}


def gain(
    rows: Sequence[Numbers], recipe: str, other: str, rate: str | None
) -> dict[str, Any] | None:
    """Gain of a recipe over another at a rate, or at the best rate of each (None), as a fraction.

    Mean over tasks of the means over common seeds; the interval resamples tasks and seeds.
    """
    gains = []
    for row in rows:
        if not {recipe, other} <= row["recipes"].keys():
            continue
        ours, theirs = (
            side["test"].get(rate or side["best_rate"], {})
            for side in (row["recipes"][name] for name in (recipe, other))
        )
        if seeds := sorted(ours.keys() & theirs.keys()):
            gains.append(np.array([ours[seed] - theirs[seed] for seed in seeds]))
    if not gains:
        return None

    def resample(rng: np.random.Generator) -> float:
        tasks = rng.integers(0, len(gains), len(gains))
        return float(np.mean([rng.choice(gains[i], len(gains[i])).mean() for i in tasks]))

    return bootstrap(float(np.mean([one.mean() for one in gains])), len(gains), resample)


def costs(entries: Sequence[Entry]) -> dict[str, dict[str, Any]]:
    """Forward passes, seconds by phase, FLOPs and added parameters by recipe, means over the units
    that all recipes learned."""
    learned = [entry for entry in entries if entry["event"] == "learned" and entry["genome"]]
    recipes = dict.fromkeys(entry["recipe"] for entry in learned)
    units: dict[tuple[Any, ...], dict[str, Entry]] = {}
    for entry in learned:
        unit = tuple(entry[name] for name in ("task", "position", "rate", "seed"))
        units.setdefault(unit, {})[entry["recipe"]] = entry
    common = [unit for unit in units.values() if unit.keys() == recipes.keys()]
    means = {}
    for recipe in recipes if common else ():
        group = [unit[recipe] for unit in common]
        phases = dict.fromkeys(phase for entry in group for phase in entry["seconds"])
        means[recipe] = {
            "num": len(group),
            **{
                name: float(np.mean([entry[name] for entry in group]))
                for name in ("passes", "flops", "params_added")
            },
            "seconds": {
                phase: float(np.mean([entry["seconds"].get(phase, 0.0) for entry in group]))
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
    if study["found"]:
        draw(study, directory / f"{NAME}.png")
        parts.append(f"![Score against accuracy, and accuracy by recipe]({NAME}.png)")
    write_page(directory / NAME, "\n\n".join(parts) + "\n", study)
    return grids


def numbers_of(entries: Sequence[Entry], setting: Numbers) -> dict[str, Any]:
    """All numbers of the tables, as JSON values."""
    rows = found_by(entries)
    recipes = dict.fromkeys(name for row in rows for name in row["recipes"])
    rates = dict.fromkeys(
        rate for row in rows for side in row["recipes"].values() for rate in side["test"]
    )
    gains = [
        {"recipe": name, "rate": rate, **value}
        for name in recipes
        for rate in (*rates, None)
        if name != PAPER and (value := gain(rows, name, PAPER, rate)) is not None
    ]
    return {
        **{name: setting[name] for name in ("stream", "backbone", "image_size")},
        "ranking": rankings(entries),
        "found": rows,
        "gains": gains,
        "costs": costs(entries),
    }


def grids_of(study: Numbers) -> list[Grid]:
    """The tables that have rows; docs/search.md explains them."""
    grids = (
        ranking_grid(study["ranking"]),
        found_grid(study["found"]),
        gain_grid(study["gains"]),
        cost_grid(study["costs"]),
    )
    return [grid for grid in grids if grid.rows]


def ranking_grid(ranking: Sequence[Numbers]) -> Grid:
    """Both rank correlations by task and position."""
    rows = [
        (row["task"], row["position"], *(_interval(row[name], 2) for name in SCORES))
        for row in ranking
    ]
    columns = ("task", "position", *SCORES.values())
    return Grid("Correlation of scores and accuracy", columns, tuple(rows), 2)


def found_grid(rows: Sequence[Numbers]) -> Grid:
    """Mean test accuracy by task, recipe and rate, and of the all-Reuse network at its best
    rate."""
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
    """Points over the paper's search by recipe and rate."""
    rows = [
        (one["recipe"], one["rate"] or "each at its best", _interval(one, 1, 100), str(one["num"]))
        for one in gains
    ]
    columns = ("recipe", "rate", "points", "tasks")
    return Grid(f"Points over `{PAPER}`", columns, tuple(rows), 2)


def cost_grid(costs: Mapping[str, Numbers]) -> Grid:
    """Costs of learning a task and of its network by recipe; a training step counts as three
    forward passes."""
    phases = dict.fromkeys(phase for one in costs.values() for phase in one["seconds"])
    seconds = (f"{phase}\ns" for phase in phases)
    columns = ("recipe", "forward\npasses", *seconds, "all\ns", "FLOPs", "parameters\nadded")
    rows = [
        (
            name,
            number(one["passes"], 0),
            *(number(one["seconds"].get(phase, 0.0), 1) for phase in phases),
            number(sum(one["seconds"].values()), 1),
            format_flops(one["flops"]),
            number(one["params_added"], 0),
        )
        for name, one in costs.items()
    ]
    return Grid("Costs per task", columns, tuple(rows), 1)


def draw(study: Numbers, file: Path) -> None:
    """Each score's correlation and each recipe's accuracy at its best rate, by task."""
    rows = study["found"]
    figure = Figure(figsize=(9.6, 1.2 + 0.35 * len(rows)), dpi=DPI, layout="constrained")
    correlation_axes, accuracy_axes = figure.subplots(1, 2)
    ranked = {(row["task"], row["position"]): row for row in study["ranking"]}
    sides = (("shared_head", PAPER, COST, -OFFSET), ("closed_form", PLUS, ACCURACY, OFFSET))
    handles: tuple[list[Line2D], list[Line2D]] = ([], [])
    for score, recipe, color, offset in sides:
        for labels, label in zip(handles, (SCORES[score], recipe), strict=True):
            labels.append(Line2D([], [], marker="o", linestyle="", color=color, label=label))
        for place, row in enumerate(rows):
            y = place + offset
            if rank := ranked.get((row["task"], row["position"]), {}).get(score):
                ends = [rank["low"], rank["high"]]
                correlation_axes.plot(ends, [y, y], color=color, alpha=0.35, linewidth=3)
                correlation_axes.plot(rank["value"], y, "o", color=color)
            if side := row["recipes"].get(recipe):
                tests = [100 * value for value in side["test"][side["best_rate"]].values()]
                accuracy_axes.plot(tests, [y] * len(tests), "o", color=color, markersize=4)
    names = [f"{row['task']}, {row['position'].split()[0]}" for row in rows]
    titles = (("score and accuracy", "Spearman"), ("target networks", "test accuracy, %"))
    for axes, (title, x), labels in zip(
        (correlation_axes, accuracy_axes), titles, handles, strict=True
    ):
        axes.set_yticks(range(len(rows)), names if axes is correlation_axes else [""] * len(rows))
        axes.set_ylim(len(rows) - 0.5, -0.5)
        frame(axes, title, x, grid=True)
        axes.legend(handles=labels, frameon=False, fontsize=8, labelcolor=INK, loc="best")
    save(figure, file)


def _mean(tests: Mapping[str, float] | None) -> str:
    return percent(sum(tests.values()) / len(tests)) if tests else NONE


def _interval(one: Numbers | None, decimals: int, factor: float = 1.0) -> str:
    if one is None:
        return NONE
    numbers = (f"{factor * one[name]:.{decimals}f}" for name in ("value", "low", "high"))
    return "{} ({} to {})".format(*(number.replace("-", "−") for number in numbers))
