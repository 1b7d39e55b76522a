"""Tables, page, numbers and figure of a study of the search."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from charts import frame, write_page
from matplotlib.figure import Figure

from cheem_jax.report.figures import DPI, INK, save
from cheem_jax.report.table import NONE, Grid, format_flops, letters, number, percent
from studies.searching.measures import (
    COMPARED,
    CORRELATIONS,
    correlations,
    points_of,
    summary,
    trainings,
    winners_of,
    without_search,
)  # fmt: skip
from studies.searching.units import PAPER, Entry

NAME = "search_study"
COLUMNS = (
    "super-\nnet %", "images\nscored", "FLOPs\npaper", "FLOPs,\nshared\nprefix", "vali-\ndation %", "test %",
)  # fmt: skip
OTHERS = """The searches other than the paper's (`search.cost resumed`, `search.rungs`, `search.warm_start`) no longer
exist, since none was better; commit 8285c44, which recorded these numbers, has them."""
TITLES = {"spearman": "Spearman", "kendall": "Kendall"}


def write(directory: Path, entries: Sequence[Entry], setting: Mapping[str, Any]) -> list[Grid]:
    """Page, numbers and figure of what the record holds so far; returns the tables."""
    found = found_in(entries, setting)
    parts = [f"# The search on {found['stream']}, {found['backbone']}", *parts_of(found, 2)]
    if picture(found, directory / f"{NAME}.png"):
        parts.append(f"![accuracy in the supernet against accuracy after retraining]({NAME}.png)")
    write_page(directory / NAME, "\n\n".join(parts) + "\n", found)
    return grids_of(found)


def found_in(entries: Sequence[Entry], setting: Mapping[str, Any]) -> dict[str, Any]:
    """All numbers of the page, as JSON values; `losses` of the setting are the run's own by task."""
    own = {name: value for name, value in setting.items() if name not in ("tasks", "losses")}
    tasks = [task for task in setting["tasks"] if any(entry.get("task") == task for entry in entries)]
    supernets = {
        entry["task"]: {
            **{name: entry[name] for name in ("num_train", "num_val", "num_test")},
            "same_losses": None if (losses := setting["losses"].get(entry["task"])) is None
            else losses == entry["losses"],
        }
        for entry in entries if entry["event"] == "supernet" and entry["task"] in tasks
    }  # fmt: skip
    points = {task: points_of(entries, task) for task in tasks}
    winners = [winner for task in tasks for winner in winners_of(entries, task)]
    winners = [winner for winner in winners if winner["seed"] in setting["search_seeds"]]
    return {
        **own,
        "supernets": supernets,
        "points": {
            task: {name: values.tolist() for name, values in own._asdict().items()} for task, own in points.items()
        },
        "ranking": {
            **{task: correlations(own) for task, own in points.items()},
            **({"mean over tasks": correlations(*points.values())} if len(points) > 1 else {}),
        },
        "drawn": without_search(points, setting["num"]),
        "variants": summary(winners),
        "winners": winners,
    }


def parts_of(found: Mapping[str, Any], level: int) -> list[str]:
    """What was done and all tables, as Markdown under headings of a level."""
    parts = [told(found)]
    for grid in grids_of(found):
        parts += [f"{'#' * level} {grid.title}", grid.to_markdown(), *([grid.caption] if grid.caption else [])]
    return parts


def grids_of(found: Mapping[str, Any]) -> list[Grid]:
    """How the supernet ranks, and what searches found as far as their networks were retrained."""
    winners = found["winners"]
    return [
        ranking_grid(found["ranking"]),
        *([drawn_grid(found)] if found["drawn"] else []),
        *([variant_grid(found["variants"]), task_grid(winners)] if winners else []),
    ]


def told(found: Mapping[str, Any]) -> str:
    """What was done, and whether the supernets are those of the run."""
    lines = [
        f"Supernets of CHEEM's run with seed {found['seed']}, trained again with its keys: {found['num']} "
        "architectures per task, sampled by HEE and uniformly, and the winners of searches with the seeds "
        f"{', '.join(map(str, found['search_seeds']))}, each trained from scratch as fine-tuning does, the task ID "
        "given. A task's supernet has the experts of the tasks before it, in the order "
        f"{', '.join(found['order'])}.",
        "",
    ]
    same = {
        None: "losses unknown to the run's record", True: "the same losses as in the run",
        False: "other losses than in the run",
    }  # fmt: skip
    for task, own in found["supernets"].items():
        sizes = "{num_train:,}, {num_val:,} and {num_test:,}".format(**own)
        lines.append(f"- {task}: {sizes} images to train, validate and test; {same[own['same_losses']]}")
    if any(winner["variant"] != PAPER for winner in found["winners"]):
        lines += ["", OTHERS]
    return "\n".join(lines)


def ranking_grid(ranking: Mapping[str, Mapping[str, Any]]) -> Grid:
    """A row per task: rank correlations with their intervals."""
    columns = ["task", "archi-\ntectures"]
    columns += [f"{TITLES[kind]}\n{told}" for told in ("val", "test", "val to test") for kind in CORRELATIONS]
    rows = []
    for task, found in ranking.items():
        cells = [found[name][kind] for name in COMPARED for kind in CORRELATIONS]
        num = next((cell["num"] for cell in cells if cell is not None), None)
        rows.append((task, NONE if num is None else str(num), *map(_interval, cells)))
    caption = (
        "Between an architecture's validation accuracy in the supernet and its accuracy after stand-alone training; "
        "*val to test*: between the two latter, the limit of any choice by validation images. 95 % intervals, "
        "bootstrap over architectures."
    )
    return Grid("How the supernet ranks architectures", tuple(columns), tuple(rows), 1, caption)


def title_of(drawn: Mapping[str, Any]) -> str:
    """Networks that were drawn, and how many of them were trained."""
    several = f"best of {drawn['trained']} sampled" if drawn["trained"] > 1 else "one sampled"
    return f"{several} {'by HEE' if drawn['drawn'] == 'HEE' else 'uniformly'}"


def drawn_grid(found: Mapping[str, Any]) -> Grid:
    """Networks that were drawn and trained beside what the paper's search finds, accuracy on test images by task."""
    tasks = list(found["drawn"][0]["test_accuracy"])
    rows = [(title_of(row), f"{row['trained']}.0", list(row["test_accuracy"].values())) for row in found["drawn"]]
    own = [winner for winner in found["winners"] if winner["variant"] == PAPER and winner["task"] in tasks]
    if {winner["task"] for winner in own} == set(tasks):
        by_task = [[winner for winner in own if winner["task"] == task] for task in tasks]
        cost = np.mean([trainings(winner, found["supernets"][winner["task"]], found["epochs"]) for winner in own])
        found_by_it = [float(np.mean([winner["test_accuracy"] for winner in winners])) for winners in by_task]
        rows.append(("supernet and the paper's search", f"{cost:.1f}", found_by_it))
    caption = (
        "Test accuracy, %, of the network that is best on validation images among so many sampled and trained, mean "
        "over all ways to take them. *Trainings*: the cost in trainings of one network; of a search its supernet, its "
        "scoring (three forward passes as one training step) and the training of its winner."
    )
    lines = [
        (title, cost, *(percent(value) for value in (*values, float(np.mean(values))))) for title, cost, values in rows
    ]
    return Grid("What a search is worth", ("network", "trainings", *tasks, "mean"), tuple(lines), 1, caption)


def variant_grid(rows: Sequence[Mapping[str, Any]]) -> Grid:
    """A row per kind of search: means over tasks and seeds, and the difference to the paper's."""
    columns = ("search", "searches", *COLUMNS, "test: points\nover paper's", "p")
    lines = []
    for row in rows:
        gain = row.get("gain")
        points, p = NONE, NONE
        if gain is not None:
            value, low, high = (f"{100 * gain[name]:+.1f}".replace("-", "−") for name in ("value", "low", "high"))
            points, p = f"{value} ({low} to {high})", "< 0.001" if gain["p"] < 0.001 else f"{gain['p']:.3f}"
        lines.append((row["variant"], str(row["searches"]), *_cells(row), points, p))
    caption = (
        "Means over tasks and seeds. *Images scored* are candidates times images, the cost of a search. The difference "
        "to the paper's search has a 95 % interval of the paired bootstrap over seeds and test images; p is two-sided, "
        "not corrected for the number of rows."
    )
    return Grid("What each search finds", columns, tuple(lines), 1, caption)


def task_grid(winners: Sequence[Entry]) -> Grid:
    """A row per task and seed of the paper's search."""
    rows = tuple(
        (winner["task"], letters(winner["architecture"]), str(winner["seed"]), *_cells(winner))
        for winner in winners
        if winner["variant"] == PAPER
    )
    caption = "A letter per block: Reuse, Adapt, New or Skip."
    return Grid("The paper's search by task", ("task", "archi-\ntecture", "seed", *COLUMNS), rows, 2, caption)


def picture(found: Mapping[str, Any], file: Path) -> bool:
    """A panel per task: accuracy in the supernet, and after retraining on validation and test images; False where
    nothing is to be seen yet."""
    shown = {task: points for task, points in found["points"].items() if points["val"]}
    if not shown:
        return False
    figure = Figure(figsize=(0.6 + 3.4 * len(shown), 3.6), dpi=DPI, layout="constrained")
    for axes, (task, points) in zip(figure.subplots(1, len(shown), squeeze=False)[0], shown.items(), strict=True):
        supernet, val, test = ([100 * value for value in points[name]] for name in ("supernet", "val", "test"))
        axes.plot(supernet, val, "o", color="#1b6ca8", markersize=5, label="validation")
        axes.plot(supernet, test, "o", color="#c8553d", markersize=5, markerfacecolor="none", label="test")
        frame(axes, task, "in the supernet, %", "retrained, %")
        axes.legend(frameon=False, fontsize=8, labelcolor=INK)
    save(figure, file)
    return True


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        percent(row["supernet_accuracy"]), number(row["candidate_images"], 0), format_flops(row["flops"]),
        format_flops(row["flops_resumed"]), percent(row["val_accuracy"]), percent(row["test_accuracy"]),
    )  # fmt: skip


def _interval(found: Mapping[str, Any] | None) -> str:
    return NONE if found is None else "{value:.2f} ({low:.2f} to {high:.2f})".format(**found)
