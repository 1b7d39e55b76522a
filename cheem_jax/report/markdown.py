"""`report.md`: a run on one page, with its tables and figures."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cheem_jax.core.atomic import write_atomically
from cheem_jax.report import figures
from cheem_jax.report.memories import ROUTED_TO_FORGOTTEN, UNAVAILABLE, routed_to_forgotten, unmeasured
from cheem_jax.report.table import NONE, Grid, method_grid, percent, setting_rows, task_grid
from cheem_jax.run.progress import duration

Results = Mapping[str, Any]


def write_report(directory: Path, results: Results) -> Path:
    """Draw the figures into `figures/`, write `report.md` next to them and return its file."""
    file = directory / "report.md"
    figures.accuracy_heatmap(results, directory / "figures" / "accuracy.png")
    if "pool" in results:
        figures.architecture_grid(results, directory / "figures" / "architectures.png")
    write_atomically(file, report(results))
    return file


def report(results: Results) -> str:
    """The text of `report.md`."""
    methods, tasks = method_grid(results), task_grid(results)
    setting, compiled = setting_rows(results), results["compile"]
    setting.append(("time", f"{duration(results['seconds_total'])}, of which {compiled['seconds']:.1f} s to compile "
        f"{compiled['programs']} functions"))  # fmt: skip
    parts = [
        f"# {results['stream']} on {results['backbone']}",
        Grid("setting", ("setting", "value"), tuple(setting), 2).to_markdown(),
        "## Result",
        methods.to_markdown(),
        _lines(methods.caption),
        "## Tasks",
        tasks.to_markdown(),
        _lines(tasks.caption),
    ]
    if "pool" in results:
        parts += ["## Networks", "![Op at each block of each task](figures/architectures.png)"]
    parts += [
        "## Accuracy after every task",
        "![Accuracy after learning each task on each task](figures/accuracy.png)",
        "Right after learning, with the task ID given, in task order: "
        f"{', '.join(map(percent, results['just_trained']))} %.",
        "## Notes",
        "\n".join(f"- {note}" for note in _notes(results)),
    ]
    return "\n\n".join(parts) + "\n"


def _notes(results: Results) -> list[str]:
    notes = [
        "`cheem report` draws this run as a page, with charts of routing, similarity, the search and time.",
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
    splits = {name: sha256 for name, sha256 in results.get("split_sha256", {}).items() if sha256}
    if splits:
        hashes = ", ".join(f"{name} `{sha256[:12]}`" for name, sha256 in splits.items())
        notes.append(f"Splits, by the hash of which file is where with which label: {hashes}.")
    return notes


def _lines(text: str) -> str:
    """Keeps the caption's line breaks, which Markdown would join."""
    return text.replace("\n", "  \n")
