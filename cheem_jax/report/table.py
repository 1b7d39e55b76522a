"""Tables of a run for the terminal and the report, made from `results.json`."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cheem_jax.backbone.config import CONFIGS, at_image_size
from cheem_jax.backbone.flops import backbone_flops
from cheem_jax.core.architecture import from_strings
from cheem_jax.core.paths import shown
from cheem_jax.report.grid import Grid
from cheem_jax.report.memories import learned_accuracy, unmeasured
from cheem_jax.run.progress import Progress
from cheem_jax.run.results import Results

METHODS = {
    "cheem": "CHEEM",
    "cheem_lite": "CHEEM-lite",
    "lora_cl": "LoRA-CL",
    "s_prompts": "S-Prompts",
    "l2p": "L2P",
    "dualprompt": "DualPrompt",
    "coda_prompt": "CODA-Prompt",
    "diki": "DIKI",
    "ewc": "EWC",
    "tuna": "TUNA",
    "moal": "MoAL",
    "ranpac": "RanPAC",
    "ease": "EASE",
    "moe_adapters": "MoE-Adapters",
    "frozen_linear": "frozen, linear heads",
    "lora_finetune": "LoRA fine-tuning",
    "full_finetune": "full fine-tuning",
}
UPPER_BOUNDS = ("full_finetune", "lora_finetune")
"""Methods that are upper bounds: they are given the task ID."""
AGNOSTIC = ("average_accuracy", "last_accuracy", "incremental_accuracy", "average_forgetting")
"""Measures for which the task ID is inferred, so upper bounds lack them."""
EXPLAINED = {
    "frozen_linear": (
        "frozen, linear heads: on the pretrained backbone's features, with the same router"
    ),
    "lora_finetune": (
        "LoRA fine-tuning: separate low-rank pairs per task, task ID given (an upper bound)"
    ),
    "full_finetune": (
        "full fine-tuning: a separate network per task, task ID given (the upper bound)"
    ),
}
SHORT = METHODS | {
    "frozen_linear": "frozen",
    "full_finetune": "full FT",
    "lora_finetune": "LoRA FT",
}
BASE_MEANS = {
    "known": "the mean CLS tokens of the pretraining data were measured on its images",
    "neutral": (
        "the mean CLS tokens of the pretraining data are unknown for this setting; their "
        "similarity is taken as neutral, and `cheem convert --base-data` measures it"
    ),
}
MEANING = {
    "reuse": "an expert as it is",
    "adapt": "an expert with a low-rank Δ",
    "new": "a new expert",
    "skip": "the branch left out",
}
"""Description of each op, displayed in legends."""
ARCHITECTURE = "archi-\ntecture"
SIZES = ("classes", "train\nimages")
"""Columns that are omitted in the terminal because the table would be too wide."""
NONE = "–"
IMAGES_COUNT = (
    "last accuracy: over the test images of all tasks, after the last one; Ā, the average"
    " incremental accuracy: mean over steps of the accuracy over all tasks so far"
)


def method_grid(results: Results) -> Grid:
    """Make the table with one row for the run's method, and one row for each baseline and each
    upper bound of the run."""
    names = (
        "average_accuracy",
        "last_accuracy",
        "incremental_accuracy",
        "local_average_accuracy",
        "average_forgetting",
        "flops_paper",
        "flops_executed",
        "params_added_percent",
        "seconds",
    )
    columns = ("method", *(COLUMNS[name][0] for name in names))
    rows = []
    for method, run in _runs(results).items():
        values = {
            **run,
            **{f"flops_{key}": flops for key, flops in (run.get("flops") or {}).items()},
        }
        # upper bounds are given the task ID, so they have no task-agnostic accuracy
        if method in UPPER_BOUNDS:
            average = values.pop("average_accuracy", None)
            values = {"local_average_accuracy": average, **values, **dict.fromkeys(AGNOSTIC)}
        cells = [
            NONE if values.get(name) is None else COLUMNS[name][1](values[name]) for name in names
        ]
        rows.append((METHODS.get(method, method), *cells))
    title = f"{results['stream']}: {len(results['tasks'])} tasks, {results['backbone']}"
    explained = [EXPLAINED[name] for name in _runs(results) if name in EXPLAINED]
    explained.append(IMAGES_COUNT)
    return Grid(
        title, columns, tuple(rows), 1, "\n".join(filter(None, [*explained, fom_line(results)]))
    )


def task_grid(results: Results) -> Grid:
    """Make the table with one row per task: accuracies in percent after the last task, and FLOPs
    per image.

    Columns titled `given` are accuracies with the task ID given.
    """
    runs = _runs(results)
    has_architecture = all("architecture" in task for task in results["tasks"])
    columns = ["task", *([ARCHITECTURE] if has_architecture else []), *SIZES]
    accuracies = []
    for name, run in runs.items():
        short = SHORT.get(name, name)
        for key, title in (("accuracy", f"{short}\n%"), ("local_accuracy", f"{short}\ngiven\n%")):
            if run.get(key) and (key, name in UPPER_BOUNDS) != ("accuracy", True):
                columns.append(title)
                accuracies.append(last_row(run[key]))
    if unmeasured(results):
        columns.append("after\nlearning\n%")
        accuracies.append(learned_accuracy(results))
    compared = [task.get("frozen_head") for task in results["tasks"]]
    if any(compared):
        columns += ["network\nval\n%", "frozen\nval\n%"]
        accuracies += [[one and one[key] for one in compared] for key in ("network", "frozen")]
    is_bound = results.get("method") in UPPER_BOUNDS
    columns += [*([] if is_bound else ["task ID\nright\n%"]), "FLOPs\n% of\nbase"]
    base = plain_flops(results)
    rows = []
    for index, task in enumerate(results["tasks"]):
        flops = task.get("flops", task.get("flops_method"))
        rows.append(
            (
                f"T{index + 1} {task['name']}",
                *([letters(task["architecture"])] if has_architecture else []),
                str(len(task["classes"])),
                str(task["num_train"]),
                *(percent(row[index]) for row in accuracies),
                *([] if is_bound else [percent(results["routing"][index][index])]),
                (
                    number(100 * flops / base, 1)
                    if base and flops is not None
                    else format_flops(flops)
                ),
            )
        )
    right = "" if is_bound else "; task ID right: images whose task ID is inferred correctly"
    caption = f"given: with the task ID given{right}\nFLOPs: per image by the paper's convention"
    if has_architecture:
        caption = (
            f"R reuse, A adapt, N new, S skip, one per block; {caption}, of the target network"
            " without the router"
        )
    if any(compared):
        caption += (
            "\nval: on validation images, of the learned network and of the frozen backbone with a"
            " ridge head"
        )
        if used := [
            f"T{i}" for i, one in enumerate(compared, 1) if one and one["kept"] == "frozen"
        ]:
            caption += f"; the latter is more accurate and used for {', '.join(used)}"
    for index, task in enumerate(results["tasks"]):
        if additions := task.get("extended"):
            images = additions[0]["num_train"][0]
            classes = additions[0]["num_classes"][0]
            caption += (
                f"\nT{index + 1} was learned from {images:,} training images of {classes} classes"
                " and extended since"
            )
            if task.get("tested_on") == "validation":
                caption += (
                    "; its accuracy since is on validation images, unless it was evaluated later"
                )
    return Grid(
        "per task, after the last one", tuple(columns), tuple(rows), 1 + has_architecture, caption
    )


def setting_rows(results: Results) -> list[tuple[str, str]]:
    """List the settings of a run as names and values."""
    keys = (
        "method",
        "backbone",
        "source",
        "router",
        "stream",
        "preset",
        "placement",
        "image_size",
        "seed",
    )
    rows = [
        (key.replace("_", " "), str(results[key])) for key in keys if results.get(key) is not None
    ]
    if means := results.get("base_means"):
        rows.append(("base means", str(BASE_MEANS.get(means, means))))
    if peak := results.get("peak_memory_bytes"):
        rows.append(("peak memory", f"{peak / 1e9:.2f} GB"))
    return rows


def fom_line(results: Results) -> str:
    """Describe CHEEM's figure of merit relative to each baseline. Also describe the gaps of CHEEM
    and of the baseline to the upper bound, in percentage points.

    An undefined figure of merit is displayed as a dash. The text is empty if the results have no
    upper bound.
    """
    fom, others = results.get("fom") or {}, results.get("references") or {}
    upper = others.get("full_finetune", {}).get("average_accuracy")
    if upper is None:
        return ""
    parts = []
    for name, value in fom.items():
        gaps = [100 * (upper - run["average_accuracy"]) for run in (results, others[name])]
        short = SHORT.get(name, name)
        text = number(value, 2)
        method = SHORT.get(results.get("method", "cheem"), "this method")
        below = f"points below full FT: {method} {gaps[0]:.1f}, {short} {gaps[1]:.1f}"
        parts.append(f"FoM against {short}: {text} ({below})")
    return "\n".join(parts)


def letters(architecture: Sequence[str]) -> str:
    """Abbreviate an architecture to one letter per block: R, A, N or S."""
    return "".join(choice.kind[0].upper() for choice in from_strings(architecture))


def accuracy_key(method: str) -> str:
    """Return the key of a method's accuracies in the results. Upper bounds have only accuracies
    with the task ID given."""
    return "local_accuracy" if method in UPPER_BOUNDS else "accuracy"


def last_row(accuracy: Sequence[Any]) -> Sequence[int | float | None]:
    """Return the accuracies after the last task; `accuracy` is a matrix or already the last row."""
    return accuracy[-1] if isinstance(accuracy[-1], Sequence) else accuracy


def plain_flops(results: Results) -> int | None:
    """Return the FLOPs of the plain backbone per image by the paper's convention; None if the
    backbone is not built in."""
    config = CONFIGS.get(results["backbone"])
    return backbone_flops(at_image_size(config, results["image_size"])) if config else None


def spread(num: int, most: int) -> list[int]:
    """Select at most `most` evenly spaced indices in 0..num-1, including the first and the last."""
    return np.unique(np.linspace(0, num - 1, min(num, most)).round().astype(int)).tolist()


def percent(value: int | float | None) -> str:
    """Format a fraction as a percentage with one decimal; None becomes a dash."""
    return NONE if value is None else f"{100 * value:.1f}"


def number(value: int | float | None, decimals: int) -> str:
    return NONE if value is None else f"{value:,.{decimals}f}"


def format_flops(value: int | float | None) -> str:
    """Format FLOPs in G with two decimals, or in M with one decimal if they are below one billion;
    None becomes a dash."""
    if value is None:
        return NONE
    return f"{value / 1e9:.2f} G" if value >= 1e9 else f"{value / 1e6:.1f} M"


COLUMNS: dict[str, tuple[str, Callable[[float], str]]] = {
    "average_accuracy": ("average\naccuracy\n%", percent),
    "last_accuracy": ("last\naccuracy\n%", percent),
    "incremental_accuracy": ("Ā\n%", percent),
    "local_average_accuracy": ("task ID\ngiven\n%", percent),
    "local_last_accuracy": ("last, task\nID given\n%", percent),
    "local_incremental_accuracy": ("Ā, task\nID given\n%", percent),
    "just_trained": ("right after\nlearning\n%", percent),
    "average_forgetting": ("forget-\nting\npoints", percent),
    "local_average_forgetting": ("forget-\nting, task\nID given", percent),
    "flops_paper": ("FLOPs\npaper", format_flops),
    "flops_explicit": ("FLOPs with\nattention", format_flops),
    "flops_executed": ("FLOPs\nexecuted", format_flops),
    "params_learned": ("params\nlearned\nper task", lambda v: f"{v / 1e3:,.1f} k"),
    "params_stored": ("params\nstored,\nall tasks", lambda v: f"{v / 1e3:,.1f} k"),
    "params_added_percent": ("params\nadded\n%", lambda v: number(v, 2)),
    "seconds": ("time\ns", lambda v: number(v, 0)),
    "fom": ("FoM of\nCHEEM", lambda v: number(v, 2)),
}
"""Column title and formatting function of each measure."""


def _runs(results: Results) -> dict[str, Results]:
    return {results.get("method", "cheem"): results, **(results.get("references") or {})}


def show(progress: Progress, results: dict[str, Any], directory: Path) -> None:
    """Print the tables of a finished run, the number of compiled functions, and the paths of the
    report and the results."""
    progress.console.print(task_grid(results).without(SIZES).to_rich())
    progress.console.print(method_grid(results).to_rich())
    compiled = results["compile"]
    cached = f", {compiled['cached']} read from the cache" if compiled.get("cached") else ""
    progress.say(
        f"{compiled['programs']} functions compiled{cached} in {compiled['seconds']:.1f} s"
    )
    progress.say(
        f"report: {shown(directory / 'report.html')}   numbers: {shown(directory / 'results.json')}"
    )
