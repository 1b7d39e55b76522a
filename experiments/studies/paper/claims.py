"""The paper's claims, checked on collected runs: every row has a difference, its interval and a
verdict.

A verdict compares the 95 % interval with the values that agree with the claim: the claim is
confirmed if the interval is inside of their range, refuted if it is outside, and not decided
otherwise. With fewer than MIN_SEEDS seeds no claim is decided.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from cheem_jax.core.architecture import from_strings
from cheem_jax.report.table import METHODS, NONE, Grid
from studies.paper.collected import Cell, Cells, Collected
from studies.paper.paired import Estimate, accuracy_difference, mean_difference, rank_correlation
from studies.paper.printed import UPPER_BOUND, printed

CONFIRMED = "confirmed"
REFUTED = "refuted"
OPEN = "not decided"
TOO_FEW = "too few seeds"
NOT_RUN = "not run"
MIN_SEEDS = 3
"""Minimum number of seeds of a verdict."""
CHEEM = Cell("cheem")
CLOSED_FORM = Cell("cheem", "closed-form score")
"""CHEEM with the search that `quick_plus` had before backward elimination."""
ELIMINATION = Cell("cheem", "elimination")
"""CHEEM with the search of `quick_plus`."""
Range = tuple[float, float]
"""Range of the values that agree with a claim, without its ends."""
POSITIVE: Range = (0.0, math.inf)
NEGATIVE: Range = (-math.inf, 0.0)
NOT_WORSE: Range = (-0.005, math.inf)
"""Differences that count as not worse than LoRA-CL."""
EQUAL: Range = (-0.01, math.inf)
"""Differences that count as equal accuracy: CHEEM is at most one point less accurate."""
COLLAPSE: Range = (0.20, math.inf)
SAME: Range = (-0.02, 0.02)
"""Differences in accuracy between orders of the tasks that count as no difference."""


class Verdict(NamedTuple):
    """One row of the table of claims."""

    compared: str
    word: str
    estimate: Estimate | None = None
    seeds: tuple[int, ...] = ()
    unit: str = "points"
    """Unit of the estimate. With `points`, estimates are fractions and shown in %; with any other
    unit, estimates are shown unscaled."""
    missing: str = ""
    """Reason for the missing estimate."""


def verdict(estimate: Estimate, agree: Range) -> str:
    """Compare the interval of an estimate with the values that agree with a claim."""
    if len(estimate.per_seed) < MIN_SEEDS:
        return TOO_FEW
    low, high = agree
    if low < estimate.low and estimate.high < high:
        return CONFIRMED
    return REFUTED if estimate.high < low or estimate.low > high else OPEN


def largest_gap() -> float:
    """Return the paper's largest gap between CHEEM and full fine-tuning as a fraction."""
    table = printed()["upper_bounds"]
    gaps = [
        table[cell._replace(method=UPPER_BOUND)].value - number.value
        for cell, number in table.items()
        if cell.method == "cheem" and cell.measure == "average_accuracy"
    ]
    return round(max(gaps), 2) / 100


def pairs_of(
    cells: Cells, ours: Cell, theirs: Cell
) -> tuple[dict[int, tuple[Collected, Collected]], str]:
    """Return the runs of both cells, keyed by common seed, and the reason if there are none."""
    if missing := [cell.title for cell in (ours, theirs) if cell not in cells]:
        return {}, f"no run of {' and of '.join(missing)}"
    common = cells[ours].keys() & cells[theirs].keys()
    pairs = {seed: (cells[ours][seed], cells[theirs][seed]) for seed in sorted(common)}
    return pairs, "" if pairs else f"no seed was run with both {ours.title} and {theirs.title}"


def compare(
    compared: str,
    cells: Cells,
    ours: Cell,
    theirs: Cell,
    agree: Range = POSITIVE,
    *,
    with_task_ids: tuple[bool, bool] = (False, False),
) -> Verdict:
    """Estimate the difference in average accuracy, paired by seed and test image.

    `with_task_ids` tells for each side whether the task ID is given.
    """
    pairs, missing = pairs_of(cells, ours, theirs)
    if missing:
        return Verdict(compared, NOT_RUN, missing=missing)
    order = next(iter(pairs.values()))[0].run.order
    a, b = (
        [
            pair[side].correct_by_task(order, with_task_id=with_task_ids[side])
            for pair in pairs.values()
        ]
        for side in (0, 1)
    )
    estimate = accuracy_difference(a, b)
    return Verdict(compared, verdict(estimate, agree), estimate, tuple(pairs))


def searches(cells: Cells) -> list[Cell]:
    """Return the cells of CHEEM with each search that was run, or the cell of the paper's search if
    none was run."""
    return [cell for cell in (CHEEM, CLOSED_FORM, ELIMINATION) if cell in cells] or [CHEEM]


def rival(ours: Cell, method: str) -> Cell:
    """Return the cell of a method with which a search is compared. The learning rate of elimination
    rises at the start, so it is compared with LoRA-CL whose rate does the same."""
    return Cell(method, "rising rate" if (ours, method) == (ELIMINATION, "lora_cl") else "")


def better_than(method: str, agree: Range = POSITIVE) -> Callable[[Cells], list[Verdict]]:
    """Compare CHEEM's average accuracy with that of a method."""

    def compared(cells: Cells) -> list[Verdict]:
        rows = []
        for ours in searches(cells):
            theirs = rival(ours, method)
            rows.append(compare(f"{ours.title} − {theirs.title}", cells, ours, theirs, agree))
        return rows

    return compared


def close_to_the_bound(cells: Cells) -> list[Verdict]:
    """Compare CHEEM with full fine-tuning, with the task ID given to both, and to full fine-tuning
    only."""
    sides = {
        "task ID given to both": (True, True),
        "task ID given to the latter alone, as in the paper": (False, True),
    }
    agree = (-largest_gap(), math.inf)
    return [
        compare(
            f"{ours.title} − full fine-tuning, {side}",
            cells,
            ours,
            Cell(UPPER_BOUND),
            agree,
            with_task_ids=with_task_ids,
        )
        for ours in searches(cells)
        for side, with_task_ids in sides.items()
    ]


def easy_tasks_skip_more(cells: Cells) -> list[Verdict]:
    """Correlate, over tasks, the rank of the accuracy of frozen heads with the task ID given and
    the rank of the number of blocks with Skip."""
    return [_skips(cells, ours) for ours in searches(cells)]


def _skips(cells: Cells, ours: Cell) -> Verdict:
    compared = f"{ours.title}: rank correlation"
    accuracies: dict[int, list[float]] = {}
    skipped: dict[int, list[int]] = {}
    for seed, collected in cells.get(ours, {}).items():
        results = collected.run.results
        heads = cells.get(Cell("frozen_linear"), {}).get(seed)
        if "frozen_linear" in results["references"]:
            accuracies[seed] = results["references"]["frozen_linear"]["local_accuracy"][-1]
        elif heads is not None:
            correct = heads.correct_by_task(collected.run.order, with_task_id=True)
            accuracies[seed] = [float(task.mean()) for task in correct]
        else:
            continue
        skipped[seed] = [
            sum(choice.kind == "skip" for choice in from_strings(task["architecture"]))
            for task in results["tasks"]
        ]
    seeds = tuple(accuracies)
    if not seeds:
        missing = "no run of CHEEM with frozen heads"
        return Verdict(compared, NOT_RUN, unit="", missing=missing)
    x, y = (np.array(list(rows.values()), float) for rows in (accuracies, skipped))
    if any(np.ptp(row) == 0 for row in (*x, *y)):
        missing = "in some run all tasks skip equally often, so there is no correlation"
        return Verdict(compared, OPEN, seeds=seeds, unit="", missing=missing)
    estimate = rank_correlation(x, y)
    word = verdict(estimate, POSITIVE)
    word = OPEN if word != TOO_FEW and estimate.p >= 0.05 else word
    return Verdict(compared, word, estimate, seeds, unit="")


def fewer_parameters_than_uniform(cells: Cells) -> list[Verdict]:
    """Compare HEE with uniform sampling for every search that was run with both: average accuracy,
    and parameters added per task."""
    both = [ours for ours in searches(cells) if _uniform(ours) in cells] or searches(cells)[:1]
    return [row for ours in both for row in _without_hee(cells, ours)]


def _uniform(ours: Cell) -> Cell:
    return ours._replace(variant=", ".join(filter(None, ("uniform", ours.variant))))


def _without_hee(cells: Cells, ours: Cell) -> list[Verdict]:
    prefix = "" if ours == CHEEM else f"{ours.title}: "
    accuracy = compare(f"{prefix}HEE − uniform, accuracy", cells, ours, _uniform(ours), EQUAL)
    compared = f"{prefix}HEE − uniform, parameters added per task"
    unit = "% of the backbone"
    pairs, missing = pairs_of(cells, ours, _uniform(ours))
    if missing:
        return [accuracy, Verdict(compared, NOT_RUN, unit=unit, missing=missing)]
    added = np.array(
        [
            [[task["params_added_percent"] for task in side.run.results["tasks"]] for side in pair]
            for pair in pairs.values()
        ]
    )
    estimate = mean_difference(added[:, 0], added[:, 1])
    word = verdict(estimate, NEGATIVE)
    return [accuracy, Verdict(compared, word, estimate, tuple(pairs), unit)]


def prompts_collapse(cells: Cells) -> list[Verdict]:
    """Compare methods with one head over all tasks with S-Prompts and with frozen heads."""
    return [
        compare(f"{METHODS[sound]} − {METHODS[method]}", cells, Cell(sound), Cell(method), COLLAPSE)
        for sound in ("s_prompts", "frozen_linear")
        for method in ("l2p", "dualprompt", "coda_prompt")
    ]


def insensitive_to_the_order(cells: Cells) -> list[Verdict]:
    """Compare CHEEM in every other order of the tasks with the same search in the usual order."""
    return [
        compare(f"{cell.title} − usual order", cells, cell, usual, SAME)
        for cell in cells
        if (usual := cell._replace(order="default")) in (CHEEM, CLOSED_FORM, ELIMINATION)
        and cell != usual
    ]


CLAIMS: dict[str, Callable[[Cells], list[Verdict]]] = {
    "(a) CHEEM is more accurate than LoRA-CL": better_than("lora_cl"),
    "(b) CHEEM is more accurate than S-Prompts": better_than("s_prompts"),
    "(c) CHEEM is close to full fine-tuning": close_to_the_bound,
    "(d) easy tasks skip more blocks": easy_tasks_skip_more,
    "(e) HEE adds fewer parameters than uniform sampling at equal accuracy": (
        fewer_parameters_than_uniform
    ),
    "(f) prompting methods whose head spans all tasks collapse": prompts_collapse,
    "(g) CHEEM is insensitive to the order of the tasks": insensitive_to_the_order,
    "(h) CHEEM is more accurate than frozen, linear heads (not a claim of the paper)": (
        better_than("frozen_linear")
    ),
    "(i) CHEEM is at most 0.5 points less accurate than LoRA-CL (not a claim of the paper)": (
        better_than("lora_cl", NOT_WORSE)
    ),
}
"""Functions that check the claims, in the order of the page, which states the rules."""
NUMBERS = ("measured", "95 % interval", "over tasks", "p", "by seed")


Verdicts = Mapping[str, Sequence[Verdict]]
"""The rows of each claim."""


def check_claims(cells: Cells) -> Verdicts:
    """Check all claims."""
    return {claim: check(cells) for claim, check in CLAIMS.items()}


def claim_grid(checked: Verdicts) -> Grid:
    """Make a row per comparison, without claims that were not run."""
    rows = []
    for claim, verdicts in checked.items():
        if all(one.word == NOT_RUN for one in verdicts):
            continue
        for index, one in enumerate(verdicts):
            word = f"**{one.word}**" if one.word == REFUTED else one.word
            rows.append((claim if index == 0 else "", one.compared, word, *number_cells(one)))
    return Grid("", ("claim", "compared", "verdict", *NUMBERS), tuple(rows), 3)


def number_cells(row: Verdict) -> Sequence[str]:
    """Return the cells of a row in the columns `NUMBERS`."""
    estimate = row.estimate
    if estimate is None:
        return row.missing, *[NONE] * (len(NUMBERS) - 1)

    def text(value: float) -> str:
        digits = f"{100 * value:+.1f}" if row.unit == "points" else f"{value:+.2f}"
        return digits.lstrip("+-") if not digits.strip("+-0.") else digits.replace("-", "−")

    seeds = zip(row.seeds, estimate.per_seed, strict=True)
    return (
        f"{text(estimate.value)} {row.unit}".strip(),
        f"{text(estimate.low)} to {text(estimate.high)}",
        NONE if estimate.over_tasks is None else " to ".join(map(text, estimate.over_tasks)),
        "< 0.001" if estimate.p < 0.001 else f"{estimate.p:.3f}",
        ", ".join(f"{seed}: {text(value)}" for seed, value in seeds),
    )
