"""The page, the table and the numbers of a planted experiment, every sentence made from what was
measured."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from charts import spread

from cheem_jax.report.table import NONE, Grid
from studies.planting.claims import CLAIMS, NUM_REDRAWN, Summary, Verdict, holm, judge, summarise
from studies.planting.structure import NAMES, PLAN, Costs, counts_of, structure_of

Runs = Mapping[str, Sequence[Mapping[str, Any]]]
"""Results by sampling, one per seed."""
TITLES = {"hee": "HEE", "uniform": "uniform"}


class Judged(NamedTuple):
    """All runs, judged."""

    verdicts: dict[str, list[dict[str, Verdict | None]]]
    """By sampling, one per run."""
    summaries: list[Summary]
    """By claim, the samplings side by side."""


def judge_all(runs: Runs, costs: Costs) -> Judged:
    """Every claim in every run, and over the runs of a sampling."""
    verdicts = {
        sampling: [judge(results, costs) for results in found] for sampling, found in runs.items()
    }
    summaries = [
        summarise(claim.name, sampling, [run[claim.name] for run in found])
        for claim in CLAIMS
        for sampling, found in verdicts.items()
    ]
    return Judged(verdicts, summaries)


def claims_grid(summaries: Sequence[Summary]) -> Grid:
    """Claims and samplings in rows."""
    rows = tuple(
        (
            summary.claim,
            TITLES[summary.sampling],
            f"{summary.yes} of {summary.runs}",
            (
                "{:.0f}–{:.0f} %".format(*(100 * end for end in summary.interval))
                if summary.interval
                else NONE
            ),
            NONE if summary.chance is None else f"{100 * summary.chance:.0f} %",
            NONE if summary.p is None else f"{summary.p:.2g}",
            spread({"mean": summary.value, "std": summary.std}, 2),
            NONE if summary.level is None else f"{summary.level:.2f}",
        )
        for summary in summaries
    )
    columns = (
        "claim",
        "sampling",
        "found",
        "95 %\ninterval",
        "by\nchance",
        "p",
        "value",
        "no pref-\nerence",
    )
    return Grid("What was found", columns, rows, 2)


def tasks_grid(runs: Runs, costs: Costs) -> Grid:
    """Per task and sampling: accuracy, cost, and where its blocks take their experts from; means
    over runs."""
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
    rows = []
    for index, name in enumerate(NAMES):
        for sampling, found in runs.items():
            counts = [counts_of(structure_of(results, costs)) for results in found]
            accuracy = [100 * results["local_accuracy"][-1][index] for results in found]
            frozen = [
                100 * results["yardsticks"]["frozen_linear"]["local_accuracy"][-1][index]
                for results in found
            ]
            source = np.mean([count.source[0, index] for count in counts], axis=0)
            rows.append(
                (
                    f"T{index + 1} {name}",
                    TITLES[sampling],
                    spread(accuracy),
                    spread(frozen),
                    (
                        f"{np.mean([100 * count.flops[0, index] / costs.plain for count in counts]):.1f}"  # noqa: E501
                    ),
                    spread([float(count.added[0, index]) for count in counts], 2),
                    *(f"{blocks:.1f}" for blocks in source),
                    f"{np.mean([count.adapts[0, index] for count in counts]):.1f}",
                )
            )
    return Grid("What the tasks got", columns, tuple(rows), 2)


def findings(runs: Runs, summaries: Sequence[Summary]) -> list[str]:
    """Plain sentences, the claims by how they came out."""
    sentences = []
    by_claim = {
        claim.name: {s.sampling: s for s in summaries if s.claim == claim.name} for claim in CLAIMS
    }
    for sampling, of_sampling in runs.items():
        num = len(of_sampling)
        own = {name: found[sampling] for name, found in by_claim.items()}
        always = [name for name, s in own.items() if s.runs and s.yes == s.runs]
        never = [name for name, s in own.items() if s.runs and not s.yes]
        nothing = [name for name, s in own.items() if not s.runs]
        sometimes = [f"{n} ({s.yes} of {s.runs})" for n, s in own.items() if 0 < s.yes < s.runs]
        p = {name: s.p for name, s in own.items() if s.p is not None}
        beyond = [name for name, value in p.items() if value < 0.05]
        corrected = holm(p)
        parts = [
            (always, "in every run"),
            (sometimes, "in some"),
            (never, "in none"),
            (nothing, "could not be asked"),
        ]
        told = "; ".join(f"{how}: {', '.join(names)}" for names, how in parts if names)
        sentences.append(
            f"{TITLES[sampling]} sampling, {num} run{'' if num == 1 else 's'}, found {told}. More"
            " often than chance explains (p < 0.05, each claim for itself):"
            f" {', '.join(beyond) or 'none'}; corrected for {len(p)} claims (Holm):"
            f" {', '.join(corrected) or 'none'}."
        )
    return sentences


def page(runs: Runs, judged: Judged, costs: Costs, setting: str) -> str:
    """`planted.md`."""
    parts = ["# Planted synergy", setting, "## Findings"]
    parts += findings(runs, judged.summaries)
    parts += ["![target networks of all runs](architectures.png)"]
    plan = tuple(
        (f"T{i + 1} {task.name}", task.role, task.relative or NONE, task.answer)
        for i, task in enumerate(PLAN)
    )
    criteria = tuple(
        (claim.name, claim.statement, claim.value, claim.criterion) for claim in CLAIMS
    )
    for grid, note in (
        (Grid("What was planted", ("task", "role", "made from", "right answer"), plan, 4), ""),
        (
            Grid("What counts as found", ("claim", "statement", "value", "found if"), criteria, 4),
            "",
        ),
        (claims_grid(judged.summaries), NOTE),
        (tasks_grid(runs, costs), TASKS_NOTE),
    ):
        parts += [f"## {grid.title}", grid.to_markdown(), *filter(None, [note])]
    return "\n\n".join(parts) + "\n"


NOTE = f"""\
`found` is the number of runs that say yes of those that had something to find (a relative that added no expert leaves
nothing to draw on), with the Wilson interval. `by chance` is how often a yes would come out anyway, the larger of two:
structures whose every block is drawn from its 2n + 2 candidates ({NUM_REDRAWN} per run), and what is compared exchanged
at random: the experts of the found Reuse and Adapt, the earlier networks, or the tasks. `p` is the probability of so
many yes or more among independent runs with that chance; it is of each claim for itself, not corrected for their
number. `no preference` is the value without any: its expectation over all candidates, a random order, an equal share,
or the mean of the tasks compared with. Uniform sampling computes the similarity too but never asks it, so `seen` and
`offered` tell for it what HEE would have been offered."""  # noqa: E501
TASKS_NOTE = """\
Means over runs, ± standard deviation. Accuracy: with the true task given, since no router can tell shapes from its
twin; frozen: a linear classifier on the plain backbone. From `of the family` (of earlier tasks of shapes) to `skip`:
the mean number of blocks that take their expert from there; adapted: those of them that adapt it."""  # noqa: E501


def numbers(runs: Runs, judged: Judged) -> dict[str, Any]:
    """`planted.json`: claims, verdicts by run, and the summaries."""
    return {
        "plan": [{**task._asdict(), "draw": None, "classes": len(task.classes)} for task in PLAN],
        "claims": [{**claim._asdict(), "task": NAMES[claim.task]} for claim in CLAIMS],
        "summaries": [summary._asdict() for summary in judged.summaries],
        "runs": [
            {
                "sampling": sampling,
                "seed": results["seed"],
                "base_means": results["base_means"],
                "architectures": {task["name"]: task["architecture"] for task in results["tasks"]},
                "verdicts": {
                    name: verdict and verdict.to_json() for name, verdict in verdicts.items()
                },
            }
            for sampling, found in runs.items()
            for results, verdicts in zip(found, judged.verdicts[sampling], strict=True)
        ],
    }
