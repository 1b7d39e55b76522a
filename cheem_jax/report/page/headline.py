"""The top of a run's page: its name, warnings, and its headline numbers."""

from collections.abc import Mapping

from cheem_jax.report.finished import RunRecord, variant_of
from cheem_jax.report.memories import (
    UNAVAILABLE,
    Evaluated,
    after_learning,
    left_undone,
    num_forgotten,
    unmeasured,
)
from cheem_jax.report.table import METHODS, NONE, UPPER_BOUNDS, Grid, format_flops, number, percent, plain_flops

Tile = tuple[str, str, str, str]
"""One headline number: its title, value and unit, and a note."""


def heading(run: RunRecord) -> tuple[str, str, str, list[str]]:
    """A run's name among others, its title, a sentence, and what to know before reading a number."""
    results, num = run.results, len(run.order)
    suffix, pixels = suffix_of(run), f"{results['image_size']} × {results['image_size']} pixels"
    tasks = f"{num:,} task{'s' if num > 1 else ''}"
    if run.is_memory:
        name = run.directory.resolve().name
        return (
            f"memory {name}{suffix}, {tasks} so far",
            f"Memory {name} on {results['backbone']}",
            f"{tasks} so far, of {pixels}, each learned from its own images alone; preset {results['preset']}, seed "
            f"{results['seed']}.",
            _about_memory(run),
        )
    name = f"{METHODS[results['method']]}{suffix}, seed {results['seed']}"
    warnings = []
    if not run.is_finished:
        of = f"{num} of {len(run.config['tasks'])} tasks"
        name += f", unfinished: {of}"
        warnings.append(f"Unfinished: {of} so far; every number is about these.")
    lead = f"{tasks} of {pixels}, learned one after the other; preset {results['preset']}."
    return name, f"{results['stream']} on {results['backbone']}", lead, warnings


def suffix_of(run: RunRecord) -> str:
    """How the run differs from the usual one of its method, to be put behind the name of that."""
    variant = variant_of(run)
    return f" ({variant})" if variant else ""


def _about_memory(run: RunRecord) -> list[str]:
    """What it has not measured, not finished or forgotten."""
    results, config, warnings = run.results, run.config, []
    later = [name for name in config["tasks"] if name not in run.order]
    if undone := left_undone(config, run.directory):
        warnings.append(f"{undone[0].upper()}{undone[1:]}.")
    elif later:
        warnings.append(f"Learned but not measured yet: {', '.join(later)}; the next `cheem learn` measures it.")
    if empty := unmeasured(results):
        named = ", ".join(f"T{index} {run.order[index]}" for index in empty[:5])
        named += f" and {len(empty) - 5} more" if len(empty) > 5 else ""
        warnings.append(f"Not measured after the last task, and shown as {NONE}: {named}; {UNAVAILABLE}.")
    if forgotten := num_forgotten(config):
        warnings.append(
            f"{forgotten:,} task{' was' if forgotten == 1 else 's were'} forgotten here: only the experts that other "
            "tasks need remain, and the other tasks are renumbered. Accuracies measured before are unchanged, "
            f"with images routed to {'it' if forgotten == 1 else 'them'} counted as wrong."
        )
    if config.get("keeps_base"):
        warnings.append("Predictions may include the pretraining classes; accuracies here were measured without them.")
    return warnings


def evaluated_grid(measured: Mapping[str, Evaluated]) -> Grid:
    """A row per task."""
    rows = tuple(
        (name, f"{one.num_images:,}", percent(one.accuracy), percent(one.accuracy_given), percent(one.found), one.date)
        for name, one in measured.items()
    )
    heads = ("task", "images", "accuracy %", "task ID given %", "task ID right %", "measured")
    return Grid("", heads, rows, 1)


def tiles_of(run: RunRecord, measured: Mapping[str, Evaluated]) -> tuple[Tile, ...]:
    """The headline numbers."""
    results = run.results
    is_bound, flops, plain = results["method"] in UPPER_BOUNDS, results["flops"], plain_flops(results)
    tiles, num = [], len(results["tasks"])
    if len(measured) == num:
        values = measured.values()
        images, date = sum(one.num_images for one in values), max(one.date for one in values).split()[0]
        mean, given = (sum(shares) / num for shares in zip(*(one[1:3] for one in values), strict=True))
        tiles.append(
            ("Average accuracy", percent(mean), "%", f"task-agnostic; cheem evaluate on {images:,} test images, {date}")
        )
        tiles.append(("Task ID given", percent(given), "%", "class predicted within the given task, same images"))
    elif results["local_average_accuracy"] is None:
        mean, count = after_learning(results)
        missing = f"not measured: `cheem evaluate {run.directory.resolve().name} DATA` fills this in, with test images "
        missing += f"of all {num:,} tasks ({len(measured):,} measured so far)"
        tiles.append(("Average accuracy", NONE, "", missing))
        tiles.append(("Right after learning", percent(mean), "%", f"mean over {count} of {num} tasks"))
    else:
        if not is_bound:
            tiles.append(("Average accuracy", percent(results["average_accuracy"]), "%",
                "task-agnostic: task ID inferred per image"))  # fmt: skip
        tiles.append(("Task ID given", percent(results["local_average_accuracy"]), "%",
            "class predicted within the given task"))  # fmt: skip
    if not is_bound and results["average_forgetting"] is not None:
        tiles.append(("Forgetting", percent(results["average_forgetting"]), "points",
            "from the best so far to the end, mean over tasks"))  # fmt: skip
    value, unit = format_flops(flops["paper"]).split()
    times = f"{flops['paper'] / plain:.2f} × the plain backbone" if plain else "by the paper's convention"
    tiles.append(("FLOPs per image", value, unit, times))
    learned = results.get("params_learned")
    tiles.append(("Parameters added", number(results["params_added_percent"], 2), "%",
        "per task, of the backbone" + ("" if learned is None else f"; {learned / 1e3:,.1f} k learned")))  # fmt: skip
    compiling = 100 * results["compile"]["seconds"] / max(results["seconds_total"], 1e-9)
    seconds = results["seconds_total"]
    everything = "learning and measuring" if results["stream"] == "memory" else "the whole run"
    unit, length = next((u, n) for u, n in (("h", 3600), ("min", 60), ("s", 1)) if seconds >= 2 * n or n == 1)
    tiles.append(("Time", number(seconds / length, 1), unit, f"{everything}; {compiling:.0f} % compiling"))
    return tuple(tiles)
