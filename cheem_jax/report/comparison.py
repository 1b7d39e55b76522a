"""Comparison of methods: a table from the results of all runs, as text, CSV or numbers."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from cheem_jax.core import metrics
from cheem_jax.report.table import (
    AGNOSTIC,
    COLUMNS,
    IMAGES_COUNT,
    METHODS,
    NONE,
    UPPER_BOUNDS,
    Grid,
    percent,
)

Runs = Mapping[str, Sequence[Mapping[str, Any]]]
"""Results of runs, keyed by method or by another name of the row, with one item per seed."""

MEASURES = (
    "average_accuracy",
    "last_accuracy",
    "incremental_accuracy",
    "local_average_accuracy",
    "local_last_accuracy",
    "local_incremental_accuracy",
    "just_trained",
    "average_forgetting",
    "local_average_forgetting",
    "flops_paper",
    "flops_explicit",
    "flops_executed",
    "params_learned",
    "params_stored",
    "params_added_percent",
    "seconds",
    "fom",
)
"""Measures of the comparison. Accuracies are in [0, 1], FLOPs are per image, `params_learned` and
`params_stored` are numbers of parameters, and `seconds` is the time spent on learning."""


def comparison(runs_by_method: Runs) -> list[dict[str, Any]]:
    """Make one row per method, with the mean and the sample standard deviation of every measure
    over the runs of the method.

    The standard deviation is None if there is only one run. A measure is None if a run lacks it.
    `fom` is CHEEM's figure of merit relative to the method, computed from means over runs. It is
    None if runs of CHEEM or of the upper bound are missing. Rows named otherwise are recognised by
    the method of their runs; of several such rows of CHEEM, none is chosen.
    """
    rows = []
    for method, runs in runs_by_method.items():
        values = {
            name: [v for v in (measure(run, name) for run in runs) if v is not None]
            for name in MEASURES
        }
        rows.append(
            {
                "method": method,
                "runs": len(runs),
                "seeds": [run["seed"] for run in runs],
                "router": runs[0]["router"],
                **{
                    name: (
                        None
                        if len(each) < len(runs)
                        else {
                            "mean": float(np.mean(each)),
                            "std": float(np.std(each, ddof=1)) if len(each) > 1 else None,
                        }
                    )
                    for name, each in values.items()
                },
            }
        )
    cheem, upper = (_row_of(method, rows, runs_by_method) for method in ("cheem", "full_finetune"))
    for row in rows:
        is_bound = runs_by_method[row["method"]][0]["method"] in UPPER_BOUNDS
        if cheem and upper and row is not cheem and not is_bound:
            row["fom"] = _figure_of_merit(upper, cheem, row)
    return rows


def _row_of(
    method: str, rows: Sequence[dict[str, Any]], runs_by_method: Runs
) -> dict[str, Any] | None:
    """Return the row with the name of the method, or else its only row; None if there is no such
    row or more than one."""
    named = [row for row in rows if row["method"] == method]
    matching = named or [
        row for row in rows if runs_by_method[row["method"]][0]["method"] == method
    ]
    return matching[0] if len(matching) == 1 else None


def measure(run: Mapping[str, Any], name: str) -> float | None:
    """Return a measure of a run; None if the run lacks it. Upper bounds lack the measures in
    `AGNOSTIC`, and no single run has `fom`."""
    if name.startswith("flops_"):
        return run["flops"][name.removeprefix("flops_")]
    is_bound = run["method"] in UPPER_BOUNDS
    if name == "fom" or (is_bound and name in AGNOSTIC):
        return None
    value = run.get(name)
    return float(np.mean(value)) if isinstance(value, list) else value


def _figure_of_merit(
    upper: Mapping[str, Any], cheem: Mapping[str, Any], baseline: Mapping[str, Any]
) -> dict[str, Any] | None:
    measures = [upper["local_average_accuracy"]]
    measures += [
        row[name] for row in (cheem, baseline) for name in ("average_accuracy", "flops_paper")
    ]
    # 0 FLOPs stand for unknown ones
    if not all(measures) or not cheem["flops_paper"]["mean"] or not baseline["flops_paper"]["mean"]:
        return None
    value = metrics.figure_of_merit(*(each["mean"] for each in measures))
    return None if value is None else {"mean": value, "std": None}


ONLY_WIDE = (
    "local_last_accuracy",
    "local_incremental_accuracy",
    "local_average_forgetting",
    "flops_explicit",
    "flops_executed",
    "params_learned",
    "params_stored",
)
"""Measures that the terminal omits because the table would be too wide."""


def comparison_grid(
    runs_by_method: Runs,
    titles: Mapping[str, str] = METHODS,
    rows: Sequence[Mapping[str, Any]] | None = None,
) -> Grid:
    """Make the table of a comparison. `titles` contains the displayed name for each key of
    `runs_by_method`. `rows` is the result of `comparison`; if it is None, `comparison` is
    called."""
    rows = comparison(runs_by_method) if rows is None else rows
    first = next(iter(runs_by_method.values()))[0]
    several = any(row["runs"] > 1 for row in rows)

    def cell(row: Mapping[str, Any], name: str) -> str:
        value, (_, shown) = row[name], COLUMNS[name]
        if value is None:
            return NONE
        is_spread = shown is percent and value["std"] is not None
        return shown(value["mean"]) + (f" ± {percent(value['std'])}" if is_spread else "")

    lines = tuple(
        (
            titles[row["method"]],
            *([str(row["runs"])] if several else []),
            *(cell(row, name) for name in COLUMNS),
        )
        for row in rows
    )
    columns = ("method", *(["runs"] if several else []), *(title for title, _ in COLUMNS.values()))
    captions = [
        (
            "average accuracy: task-agnostic, the task ID inferred per image, mean over tasks;"
            " right after learning: each task when it was new, with the task ID given"
        ),
        IMAGES_COUNT,
        (
            "upper bounds are given the task ID; FLOPs: per image by the paper's convention; time:"
            " learning"
        ),
        (
            "FoM of CHEEM: how many times better than the method, from the gaps to full fine-tuning"
            " and the FLOPs"
        ),
    ]
    named: dict[str, list[str]] = {}
    for row in rows:
        if row["router"] != first["backbone"]:
            named.setdefault(row["router"], []).append(titles[row["method"]])
    captions += [
        f"{' and '.join(names)}: {router} infers the task ID" for router, names in named.items()
    ]
    title = (
        f"{first['stream']}: {len(first['tasks'])} tasks, {first['backbone']},"
        f" {first['image_size']} pixels"
    )
    return Grid(f"{title}, {first['preset']}", columns, lines, 1, "\n".join(captions))


def narrow(grid: Grid) -> Grid:
    """Return the table without the columns that the terminal omits."""
    return grid.without({COLUMNS[name][0] for name in ONLY_WIDE})


def to_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """Format a comparison as CSV with means and standard deviations; missing values are empty."""
    lines = [",".join(["method", "runs", *(f"{name},{name}_std" for name in MEASURES)])]
    for row in rows:
        cells = [row["method"], str(row["runs"])]
        for name in MEASURES:
            value = row[name] or {"mean": None, "std": None}
            cells += ["" if v is None else repr(v) for v in (value["mean"], value["std"])]
        lines.append(",".join(cells))
    return "\n".join(lines) + "\n"
