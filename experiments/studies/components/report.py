"""The table of the components, ours beside the paper's, and its files."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from charts import mean_std, spread, write_page
from scipy.stats import rankdata

from cheem_jax.core import metrics
from cheem_jax.report.table import NONE, Grid, number
from studies.components.learning import Component
from studies.components.units import Entry, Place, chosen_rate, found_at, mean_validation
from studies.paper.printed import Cell, printed

Row = dict[str, Any]
PAPER = "ViT-Base on VDD"
MEASURES = {"average_accuracy": -1, "average_forgetting": 1}
"""Both in %; rank 1 is the most accurate and the least forgetful."""


def rows_of(
    entries: Sequence[Entry], components: Sequence[Component], num_params: Mapping[str, int], setting: Mapping[str, Any]
) -> list[Row]:
    """A row per component whose units are all there; accuracies and forgetting in %."""
    rates, seeds, num_tasks = setting["training"]["rates"], setting["seeds"], len(setting["tasks"])
    rows, papers = [], printed()["components"]
    for component in components:
        rate = chosen_rate(entries, component, rates, seeds, num_tasks)
        if rate is None:
            continue
        places = [Place(component.name, seed, rate) for seed in seeds]
        sequences = [found_at(entries, "sequential", place) for place in places]
        diverged = any(found_at(entries, "diverged", place) for place in places)
        if not diverged and any(len(sequence) < num_tasks for sequence in sequences):
            continue
        matrices = [] if diverged else [_matrix(sequence) for sequence in sequences]
        transfer = [found_at(entries, "transfer", place) for place in places]
        accuracy = [[units[index]["test_accuracy"] for index in range(num_tasks)] for units in transfer]
        forgetting = [metrics.average_forgetting(matrix) for matrix in matrices]
        cell = Cell("vdd", "vit_base", "component", "", str(component.index))
        rows.append({
            "index": component.index, "name": component.name, "title": component.title,
            "params": num_params[component.name],
            "params_percent": 100 * num_params[component.name] / setting["backbone_params"],
            "rate": rate,
            "validation": {
                f"{tried:g}": mean_validation(entries, component, tried, seeds, num_tasks) for tried in rates
            },
            "average_accuracy": in_percent([np.mean(row) for row in accuracy]),
            "average_forgetting": None if diverged or None in forgetting else in_percent(forgetting),
            "sequential_average_accuracy":
                None if diverged else in_percent([metrics.average_accuracy(matrix) for matrix in matrices]),
            "accuracy": accuracy,
            "sequential_accuracy": [metrics.matrix_to_json(matrix) for matrix in matrices],
            "paper": {name: papers[cell._replace(measure=name)].value for name in MEASURES},
        })  # fmt: skip
    for row in rows:
        row["ranks"] = {}
    for measure, sign in MEASURES.items():
        if all(row[measure] for row in rows):
            # equal numbers of right answers may differ in the last bits
            ours = rankdata(np.round([sign * row[measure]["mean"] for row in rows], 6), method="min")
            papers = rankdata([sign * row["paper"][measure] for row in rows], method="min")
            for row, rank, theirs in zip(rows, ours, papers, strict=True):
                row["ranks"][measure] = {"ours": int(rank), "paper": int(theirs)}
    return rows


def _matrix(sequence: Mapping[int, Entry]) -> np.ndarray:
    matrix = np.full((len(sequence), len(sequence)), np.nan)
    for index, entry in sequence.items():
        matrix[index, : index + 1] = entry["accuracy"]
    return matrix


def in_percent(values: Sequence[Any]) -> dict[str, Any]:
    percent = [100 * float(value) for value in values]
    return {**(mean_std(percent) or {}), "runs": percent}


def table(rows: Sequence[Row], setting: Mapping[str, Any]) -> Grid:
    """Ours, and the paper's numbers of another backbone and stream."""
    columns = (
        "", "component", "params\nper\ntask", "% of\nback-\nbone", "rate", "accu-\nracy\nours", "for-\ngetting\nours",
        "accu-\nracy\npaper", "for-\ngetting\npaper", "rank acc.\nours,\npaper", "rank forg.\nours,\npaper",
    )  # fmt: skip
    ends = ends_of(setting)
    lines = []
    for row in rows:
        ranks = row["ranks"]
        lines.append((
            str(row["index"]), row["title"], f"{row['params']:,}", number(row["params_percent"], 2),
            f"{row['rate']:g}" + ("*" if row["rate"] in ends else ""),
            *(spread(row[measure], 2) for measure in MEASURES),
            *(number(row["paper"][measure], 2) for measure in MEASURES),
            *("{ours}, {paper}".format(**ranks[measure]) if measure in ranks else NONE for measure in MEASURES),
        ))  # fmt: skip
    title = f"Components of a block, fine-tuned: {setting['stream']}, {setting['backbone']}"
    return Grid(title, columns, tuple(lines), 2, caption(rows, setting))


def ends_of(setting: Mapping[str, Any]) -> tuple[float, ...]:
    """The outer rates, where there are inner ones."""
    rates = setting["training"]["rates"]
    return (min(rates), max(rates)) if len(rates) > 2 else ()


def caption(rows: Sequence[Row], setting: Mapping[str, Any]) -> str:
    """What was done, and what the columns are."""
    training, seeds, tasks = setting["training"], setting["seeds"], setting["tasks"]
    most = training["max_train"]
    spread = ", with the standard deviation" if len(seeds) > 1 else ""
    lines = [
        f"ours: {setting['backbone']} on {setting['stream']} ({', '.join(tasks)}); mean over seeds "
        f"{', '.join(map(str, seeds))}{spread}. paper: {PAPER}, another backbone and stream: compare orders, not "
        "values.",
        "accuracy, %: each task learned from the pretrained backbone (transfer); forgetting, points: one backbone "
        "through the stream, all tasks but the last. A head per task, the true task given.",
        f"Adam, no weight decay, cosine to 0, {training['epochs']} epochs of "
        f"{'all' if most is None else f'at most {most}'} training images per task, batches of "
        f"{training['batch_size']}; heads begin at random and learn at {training['head_rate']:g}.",
        f"rate: the best of {', '.join(f'{rate:g}' for rate in training['rates'])} on the validation splits, task to "
        "task, one per component; the same sequentially." + (" *: at an end of the sweep." if ends_of(setting) else ""),
        "params: the component in all blocks, heads apart. MHSA: with its output projection.",
    ]
    if len(rows) > 2 and all(len(row["ranks"]) == 2 for row in rows):
        accuracy, forgetting = (
            _rank_correlation([row[measure]["mean"] for row in rows], [row["paper"][measure] for row in rows])
            for measure in MEASURES
        )
        accuracy, forgetting = ("none" if np.isnan(found) else f"{found:.2f}" for found in (accuracy, forgetting))
        lines.append(
            f"ranks: 1 is the most accurate and the least forgetful of these {len(rows)}; Spearman's correlation of "
            f"ours with the paper's is {accuracy} for accuracy and {forgetting} for forgetting."
        )
    if any(row["average_forgetting"] is None for row in rows) and len(tasks) > 1:
        lines.append(f"{NONE}: the sequence diverged at this rate.")
    return "\n".join(lines)


def _rank_correlation(a: Sequence[float], b: Sequence[float]) -> float:
    ours, theirs = np.round(a, 6), np.round(b, 6)
    if min(np.ptp(ours), np.ptp(theirs)) == 0:  # of equal values there is none
        return float("nan")
    return float(np.corrcoef(rankdata(ours), rankdata(theirs))[0, 1])


def sweep(rows: Sequence[Row], setting: Mapping[str, Any]) -> Grid:
    """What the rates were chosen by."""
    rates = [f"{rate:g}" for rate in setting["training"]["rates"]]
    lines = tuple(
        (str(row["index"]), row["title"], *(number(100 * row["validation"][rate], 2) for rate in rates)) for row in rows
    )
    title = "Mean validation accuracy by rate, %, task to task"
    return Grid(title, ("", "component", *rates), lines, 2)


def write(directory: Path, rows: Sequence[Row], setting: Mapping[str, Any]) -> None:
    """Table and numbers."""
    if not rows:
        return
    grid, rates = table(rows, setting), sweep(rows, setting)
    numbers = {"setting": dict(setting), "paper": PAPER, "components": list(rows)}
    notes = grid.caption.replace("\n", "  \n")
    text = f"# {grid.title}\n\n{grid.to_markdown()}\n\n{notes}\n\n## {rates.title}\n\n{rates.to_markdown()}\n"
    write_page(directory / "component_study", text, numbers, grid)
