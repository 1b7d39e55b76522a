"""Tables, page, numbers and picture of a study of the search."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from searching.measures import CORRELATIONS, correlations, points_of, summary, winners_of
from searching.units import VARIANTS, Entry

from cheem_jax.atomic import write_atomically
from cheem_jax.report.figures import DPI, FAINT, INK, save
from cheem_jax.report.table import NONE, Grid, format_flops, number, percent

NAME = "search_study"
COLUMNS = (
    "super-\nnet %", "images\nscored", "FLOPs\npaper", "FLOPs\nresumed", "vali-\ndation %", "test %",
)  # fmt: skip
TITLES = {"spearman": "Spearman", "kendall": "Kendall"}


def write(directory: Path, entries: Sequence[Entry], setting: Mapping[str, Any]) -> list[Grid]:
    """Page, numbers and picture of what the record holds so far; returns the tables."""
    tasks = [task for task in setting["tasks"] if any(entry.get("task") == task for entry in entries)]
    ranking = {task: correlations(entries, task) for task in tasks}
    winners = [winner for task in tasks for winner in winners_of(entries, task)]
    winners = [winner for winner in winners if winner["seed"] in setting["search_seeds"]]
    rows = summary(winners)
    grids = [ranking_grid(ranking), *([variant_grid(rows), *task_grids(winners)] if winners else [])]
    numbers = {"setting": dict(setting), "ranking": ranking, "variants": rows, "winners": winners}
    write_atomically(directory / f"{NAME}.json", json.dumps(numbers, indent=1) + "\n")
    parts = [f"# The search on {setting['stream']}, {setting['backbone']}\n\n{told(setting, entries)}"]
    for grid in grids:
        parts.append(f"## {grid.title}\n\n{grid.to_markdown()}" + (f"\n\n{grid.caption}" if grid.caption else ""))
    shown = {task: points_of(entries, task) for task in tasks}
    shown = {task: points for task, points in shown.items() if len(points.val)}
    if shown:
        picture(shown, directory / f"{NAME}.png")
        parts.append(f"![accuracy in the supernet against accuracy after retraining]({NAME}.png)")
    write_atomically(directory / f"{NAME}.md", "\n\n".join(parts) + "\n")
    return grids


def told(setting: Mapping[str, Any], entries: Sequence[Entry]) -> str:
    """What was done, and whether the supernets are those of the run."""
    lines = [
        f"Supernets of the run `{setting['run']}`, trained again with its keys; {setting['num']} architectures per "
        "task drawn by HEE and uniformly, and the winners of searches with the seeds "
        f"{', '.join(map(str, setting['search_seeds']))}, each trained from scratch as fine-tuning does. The true task "
        "is given."
    ]
    for entry in entries:
        if entry["event"] == "supernet" and entry["task"] in setting["tasks"]:
            losses = setting["losses"].get(entry["task"])
            same = "unknown to the run's record" if losses is None else "other losses than in the run"
            if losses == entry["losses"]:
                same = "the same losses as in the run"
            sizes = "{num_train:,}, {num_val:,} and {num_test:,}".format(**entry)
            lines.append(f"- {entry['task']}: {sizes} images to train, validate and test; {same}")
    return "\n".join([lines[0], "", *lines[1:]])


def ranking_grid(ranking: Mapping[str, Mapping[str, Any]]) -> Grid:
    """A row per task: rank correlations with their intervals."""
    columns = ["task", "archi-\ntectures"]
    columns += [f"{TITLES[kind]}\n{split}" for split in ("val", "test") for kind in CORRELATIONS]
    rows = []
    for task, found in ranking.items():
        cells = [found[split][kind] for split in ("val", "test") for kind in CORRELATIONS]
        num = next((cell["num"] for cell in cells if cell is not None), None)
        rows.append((task, NONE if num is None else str(num), *map(_interval, cells)))
    caption = "With 95 % intervals of a bootstrap over architectures."
    return Grid("How the supernet ranks architectures", tuple(columns), tuple(rows), 1, caption)


def variant_grid(rows: Sequence[Mapping[str, Any]]) -> Grid:
    """A row per kind of search: means over tasks and seeds, and the difference to the paper's."""
    columns = ("search", "searches", *COLUMNS, "test: points\nover paper's")
    lines = []
    for row in rows:
        gain = row["against_paper"]["test_accuracy"]
        if row["variant"] == "paper" or gain is None:
            text = NONE
        else:
            error = gain["standard_error"]
            text = f"{100 * gain['mean']:+.2f}" + ("" if error is None else f" ± {100 * error:.2f}")
        lines.append((row["variant"], str(row["searches"]), *_cells(row), text))
    caption = (
        "Means over tasks and seeds; ± is the standard error of the difference over searches of the same supernet and "
        "seed, which counts seeds of one task as independent."
    )
    return Grid("What each search finds", columns, tuple(lines), 1, caption)


def task_grids(winners: Sequence[Entry]) -> list[Grid]:
    """A table per task with a row per search."""
    grids = []
    for task in dict.fromkeys(winner["task"] for winner in winners):
        own = [
            winner
            for variant in VARIANTS
            for winner in winners
            if (winner["task"], winner["variant"]) == (task, variant)
        ]
        rows = tuple(
            (
                winner["variant"], "".join(choice[0].upper() for choice in winner["architecture"]),
                str(winner["seed"]), *_cells(winner),
            )
            for winner in own
        )  # fmt: skip
        grids.append(Grid(task, ("search", "archi-\ntecture", "seed", *COLUMNS), rows, 2))
    return grids


def picture(shown: Mapping[str, Any], file: Path) -> None:
    """A panel per task: accuracy in the supernet, and after retraining on validation and test images."""
    figure = Figure(figsize=(0.6 + 3.4 * len(shown), 3.6), dpi=DPI, layout="constrained")
    for axes, (task, points) in zip(figure.subplots(1, len(shown), squeeze=False)[0], shown.items(), strict=True):
        axes.plot(100 * points.supernet, 100 * points.val, "o", color="#1b6ca8", markersize=5, label="validation")
        axes.plot(
            100 * points.supernet, 100 * points.test, "o", color="#c8553d", markersize=5, markerfacecolor="none",
            label="test",
        )  # fmt: skip
        axes.set_title(task.replace("$", r"\$"), fontsize=10, color=INK, loc="left")
        axes.set_xlabel("in the supernet, %", color=FAINT)
        axes.set_ylabel("retrained, %", color=FAINT)
        axes.tick_params(colors=INK, labelsize=9)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=8, labelcolor=INK)
    save(figure, file)


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        percent(row["supernet_accuracy"]), number(row["candidate_images"], 0), format_flops(row["flops"]),
        format_flops(row["flops_resumed"]), percent(row["val_accuracy"]), percent(row["test_accuracy"]),
    )  # fmt: skip


def _interval(found: Mapping[str, Any] | None) -> str:
    return NONE if found is None else "{value:.2f} ({low:.2f} to {high:.2f})".format(**found)
