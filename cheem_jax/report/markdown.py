"""`report.md`: a run on one page, with its tables and figures."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cheem_jax.core.atomic import write_atomically
from cheem_jax.report import figures
from cheem_jax.report.memories import (
    FORGOTTEN,
    ROUTED_TO_FORGOTTEN,
    UNAVAILABLE,
    after_learning,
    arrivals,
    routed_to_forgotten,
    unmeasured,
)
from cheem_jax.report.table import NONE, Grid, method_grid, number, percent, spread, task_grid

Results = Mapping[str, Any]

BASE_MEANS = {
    "known": "the mean CLS tokens of the pretraining data were measured on its images",
    "neutral": "the mean CLS tokens of the pretraining data are unknown for this setting; their "
    "similarity is taken as neutral, and `cheem convert --base-data` measures it",
}


def write_report(directory: Path, results: Results) -> Path:
    """Draw the figures into `figures/`, write `report.md` next to them and return its file."""
    draw = {"accuracy": figures.accuracy_heatmap}
    if "pool" in results:
        draw["architectures"] = figures.architecture_grid
    if "similarity" in results:
        draw["similarity"] = figures.similarity_heatmap
    for name, function in draw.items():
        function(results, directory / "figures" / f"{name}.png")
    file = directory / "report.md"
    write_atomically(file, report(results))
    return file


def report(results: Results) -> str:
    """The text of `report.md`."""
    methods, tasks = method_grid(results), task_grid(results)
    parts = [
        f"# {results['stream']} on {results['backbone']}",
        _setting(results).to_markdown(),
        "## Result",
        methods.to_markdown(),
        _lines(methods.caption),
        "## Tasks",
        tasks.to_markdown(),
        _lines(tasks.caption),
        *_networks(results),
        "## Accuracy after every task",
        "![Accuracy after learning each task on each task](figures/accuracy.png)",
        _after_learning(results),
        *_similarity(results),
        "## Routing",
        "The task to which the router sends each task's test images, after the last task, in % of the row"
        + (", of some tasks evenly spread." if len(results["tasks"]) > figures.MOST_CELLS else "."),
        _routing(results).to_markdown(),
        "## Parameters added",
        _parameters(results).to_markdown(),
        "## Time",
        _seconds(results).to_markdown(),
        _cost(results),
        "## Notes",
        _notes(results),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _setting(results: Results) -> Grid:
    keys = ("backbone", "source", "stream", "preset", "placement", "image_size", "base_means", "seed")
    rows = [(key.replace("_", " "), str(results[key])) for key in keys if results.get(key) is not None]
    return Grid("setting", ("setting", "value"), tuple(rows), 2)


def _networks(results: Results) -> list[str]:
    if "pool" not in results:
        return []
    return ["## Networks", "![Op at each block of each task](figures/architectures.png)", _pool(results)]


def _similarity(results: Results) -> list[str]:
    if "similarity" not in results:
        return []
    image = "![Similarity of each task to the earlier ones at each block](figures/similarity.png)"
    return ["## Similarity of tasks", image]


def _pool(results: Results) -> str:
    there = [
        [expert for expert, arrived in zip(block, places, strict=True) if arrived is not None]
        for block, places in zip(results["pool"], arrivals(results), strict=True)
    ]
    kinds = Counter(expert["kind"] for block in there for expert in block)
    left = sum(expert["origin"] == FORGOTTEN for block in there for expert in block)
    sizes = ", ".join(str(len(block)) for block in there)
    return (
        f"Experts per block, the base's included: {sizes}; "
        f"{kinds['full'] - len(there)} learned in full, {kinds['adapted']} adapted"
        + (f", {left} of them from forgotten tasks." if left else ".")
    )


def _after_learning(results: Results) -> str:
    values = ", ".join(map(percent, results["just_trained"]))
    found = ""
    if results["average_accuracy"] is None:
        mean, num = after_learning(results)
        found = f" Task-agnostic: {percent(mean)} %, mean of {num:,} tasks."
    forgetting = results["local_average_forgetting"]
    local = "" if forgetting is None else f" Average forgetting with the task ID given: {100 * forgetting:.3g} points."
    return f"Right after learning, with the task ID given, in task order: {values} %.{found}{local}"


def _routing(results: Results) -> Grid:
    shown = spread(len(results["tasks"]), figures.MOST_CELLS)
    rows = []
    for index in shown:
        row = results["routing"][index]
        rows.append((f"T{index} {results['tasks'][index]['name']}", *(percent(row[other]) for other in shown)))
    return Grid("routing", ("true task", *(f"T{index}" for index in shown)), tuple(rows), 1)


def _seconds(results: Results) -> Grid:
    tasks = results["tasks"]
    phases = list(dict.fromkeys(phase for task in tasks for phase in task["seconds"]))

    def row(name: str, seconds: Sequence[float]) -> tuple[str, ...]:
        return (name, *(number(value, 1) for value in (*seconds, sum(seconds))))

    rows = [
        row(f"T{index} {task['name']}", [task["seconds"].get(phase, 0.0) for phase in phases])
        for index, task in enumerate(tasks)
    ]
    totals = [sum(task["seconds"].get(phase, 0.0) for task in tasks) for phase in phases]
    return Grid("seconds", ("task", *(f"{phase} s" for phase in phases), "all s"), (*rows, row("all", totals)), 1)


def _parameters(results: Results) -> Grid:
    """What each task added, by where it is kept."""
    names = {
        "params_added": "New and Adapt", "head_params": "head", "centroid_params": "centroids",
        "params_learned": "trained in all", "params_stored": "stored in all",
    }  # fmt: skip
    shown = [key for key in names if all(key in task for task in results["tasks"])]
    rows = [
        (f"T{index} {task['name']}", *(f"{task[key]:,}" for key in shown))
        for index, task in enumerate(results["tasks"])
    ]
    return Grid("parameters", ("task", *(names[key] for key in shown)), tuple(rows), 1)


def _cost(results: Results) -> str:
    compiled = results["compile"]
    text = (
        f"The whole run: {number(results['seconds_total'], 0)} s. "
        f"{compiled['programs']} compiled functions in {number(compiled['seconds'], 1)} s."
    )
    peak = results.get("peak_memory_bytes")
    return text if peak is None else f"{text} Peak memory {peak / 1e9:.2f} GB."


def _notes(results: Results) -> str:
    base_means = BASE_MEANS.get(results["base_means"], "")
    notes = [
        "A prediction is right only if task and class are; columns with `given` have the task ID given.",
        "Forgetting: best accuracy since learning minus that at the end, mean over all tasks but the last.",
        "FLOPs are 2 x multiply-adds per image, router included. `paper`: patch embedding and linear layers, "
        "no attention products; docs/methods.md says what it counts of adapters. `executed`: every matrix product that "
        "ran.",
        "Parameters added: all besides the backbone in % of it, mean over tasks, without heads and centroids.",
    ]
    if empty := unmeasured(results):
        notes.append(f"{NONE}: not measured, of {len(empty):,} tasks: {UNAVAILABLE}.")
    if routed_to_forgotten(results):
        notes.append(f"Routing and accuracies were measured before a task was forgotten; {ROUTED_TO_FORGOTTEN}.")
    if "similarity" in results:
        notes.append(f"Base means {results['base_means']}{': ' if base_means else ''}{base_means}.")
    splits = {name: sha256 for name, sha256 in results.get("split_sha256", {}).items() if sha256}
    if splits:
        hashes = ", ".join(f"{name} `{sha256[:12]}`" for name, sha256 in splits.items())
        notes.append(f"Splits, by the hash of which file is where with which label: {hashes}.")
    return "\n".join(f"- {note}" for note in notes)


def _lines(text: str) -> str:
    """Keeps the caption's line breaks, which Markdown would join."""
    return text.replace("\n", "  \n")
