"""Tables and numbers of the experiment with a planted structure."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from charts import spread

from cheem_jax.report.table import NONE, Grid
from studies.planting.claims import CLAIMS, Verdict, judge, summarise
from studies.planting.structure import NAMES, Costs, count, structure_of

Runs = Mapping[str, Sequence[Mapping[str, Any]]]
"""Results, one per seed, keyed by sampling."""
Verdicts = Mapping[str, Sequence[Mapping[str, Verdict | None]]]
"""Verdicts, one mapping per run, keyed by sampling."""
TITLES = {"hee": "HEE", "uniform": "uniform"}


def judge_all(runs: Runs, costs: Costs) -> Verdicts:
    """Evaluate every claim for every run."""
    return {
        sampling: [judge(results, costs) for results in group] for sampling, group in runs.items()
    }


def claims_grid(verdicts: Verdicts) -> Grid:
    """Make a row per claim and sampling."""
    rows = []
    for claim in CLAIMS:
        for sampling, runs in verdicts.items():
            one = summarise(claim, sampling, [run[claim] for run in runs])
            rows.append(
                (
                    claim,
                    TITLES[sampling],
                    f"{one.met} of {one.runs}",
                    NONE if one.chance is None else f"{100 * one.chance:.0f} %",
                    NONE if one.p is None else f"{one.p:.2g}",
                    spread(one.value, 2),
                    NONE if one.level is None else f"{one.level:.2f}",
                )
            )
    columns = ("claim", "sampling", "met", "by\nchance", "p", "value", "no pref-\nerence")
    return Grid("Claims", columns, tuple(rows), 2)


def tasks_grid(runs: Runs, costs: Costs) -> Grid:
    """Make a row per task and sampling with accuracy, costs and the sources of the blocks' experts,
    as means over runs."""
    rows = []
    for index, name in enumerate(NAMES):
        for sampling, group in runs.items():
            counts = [count(structure_of(results, costs)) for results in group]
            heads = [results["references"]["frozen_linear"] for results in group]
            flops = np.mean([100 * one.flops[0, index] / costs.plain for one in counts])
            blocks = np.mean([one.source[0, index] for one in counts], axis=0)
            adapts = np.mean([one.adapts[0, index] for one in counts])
            accuracies = (
                [100 * results["local_accuracy"][-1][index] for results in side]
                for side in (group, heads)
            )
            rows.append(
                (
                    f"T{index + 1} {name}",
                    TITLES[sampling],
                    *map(spread, accuracies),
                    f"{flops:.1f}",
                    spread([float(one.added[0, index]) for one in counts], 2),
                    *(f"{number:.1f}" for number in (*blocks, adapts)),
                )
            )
    columns = (
        "task",
        "sampling",
        "accuracy\n%",
        "frozen\n%",
        "FLOPs %\nof base",
        "params\nadded %",
        "of the\nfamily",
        "of\nothers",
        "base",
        "new",
        "skip",
        "adapted",
    )
    return Grid("Tasks", columns, tuple(rows), 2)


def numbers(runs: Runs, verdicts: Verdicts) -> list[dict[str, Any]]:
    """Return the architectures and verdicts of every run as JSON values."""
    return [
        {
            "sampling": sampling,
            "seed": results["seed"],
            "base_means": results["base_means"],
            "architectures": {task["name"]: task["architecture"] for task in results["tasks"]},
            "verdicts": {
                name: verdict
                and verdict._replace(
                    value=None if np.isnan(verdict.value) else verdict.value  # pyright: ignore[reportArgumentType]
                )._asdict()
                for name, verdict in run_verdicts.items()
            },
        }
        for sampling, group in runs.items()
        for results, run_verdicts in zip(group, verdicts[sampling], strict=True)
    ]
