"""What the paper claims, checked on collected runs: a number, an interval, a verdict by a rule, and
their tables."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from cheem_jax.core.architecture import from_strings
from cheem_jax.report.table import METHODS, NONE, Grid
from studies.paper.collected import Cell, Cells, Collected
from studies.paper.paired import Estimate, accuracy_difference, mean_difference, rank_correlation
from studies.paper.printed import TOLD_METHOD, printed

HOLDS = "confirmed"
FAILS = "refuted"
OPEN = "not decided"
NOT_RUN = "not run"
EQUAL = 0.01
FAR = 0.20
ORDERS = 0.02
"""Accuracy that counts as equal, as a collapse, and as insensitive to the order."""
CHEEM = Cell("cheem")
CLOSED_FORM = Cell("cheem", "closed-form score")
"""CHEEM with the search of `quick_plus`."""
SEARCHES = {CHEEM: "the paper's search", CLOSED_FORM: "closed-form score"}
COLLAPSING = ("l2p", "dualprompt", "coda_prompt")
SOUND = ("s_prompts", "frozen_linear")


class Verdict(NamedTuple):
    """One line of the table of claims."""

    claim: str
    estimate: Estimate | None
    """None where it was not run or has no value."""
    unit: str
    """`points`, of fractions; anything else is shown as it is."""
    seeds: tuple[int, ...]
    word: str
    why: str = ""
    """What is missing where there is no estimate."""
    search: str = ""
    """Which of CHEEM's searches the line is about; empty where it is about none."""


class Claim(NamedTuple):
    """A claim of the paper with the rule that decides it; `check` gives a line per comparison."""

    letter: str
    title: str
    rule: str
    check: Callable[[Cells], list[Verdict]]


def above(estimate: Estimate, bound: float = 0.0) -> str:
    """Whether the interval lies above the bound, below it, or on both sides."""
    return HOLDS if estimate.low > bound else FAILS if estimate.high < bound else OPEN


def below(estimate: Estimate, bound: float = 0.0) -> str:
    """The other way round."""
    return HOLDS if estimate.high < bound else FAILS if estimate.low > bound else OPEN


def within(estimate: Estimate, bound: float) -> str:
    """Whether the interval lies between plus and minus the bound, outside, or across."""
    if -bound < estimate.low and estimate.high < bound:
        return HOLDS
    return FAILS if estimate.low > bound or estimate.high < -bound else OPEN


def largest_gap() -> float:
    """By how much CHEEM stays below full fine-tuning in the paper at most, over streams and
    backbones: a fraction."""
    table = printed()["upper_bounds"]
    gaps = [
        table[cell._replace(method=TOLD_METHOD)].value - number.value
        for cell, number in table.items()
        if cell.method == "cheem" and cell.measure == "average_accuracy"
    ]
    return round(max(gaps), 2) / 100


def compared(
    claim: str,
    cells: Cells,
    ours: Cell,
    theirs: Cell,
    word: Callable[[Estimate], str],
    *,
    given: tuple[bool, bool] = (False, False),
    without: str = "",
) -> Verdict:
    """Difference of average accuracy, paired by seed and test image.

    `given`: whether our method and the other one are given the task ID; `without` names a task that
    is left out.
    """
    (pairs, why), search = (
        in_common(cells, ours, theirs),
        SEARCHES.get(ours._replace(order="default"), ""),
    )
    if why:
        return Verdict(claim, None, "points", (), NOT_RUN, why, search)
    order = [name for name in next(iter(pairs.values()))[0].run.order if name != without]
    a, b = (
        [pair[side].answers(order, given=given[side]) for pair in pairs.values()] for side in (0, 1)
    )
    estimate = accuracy_difference(a, b)
    return Verdict(claim, estimate, "points", tuple(pairs), word(estimate), search=search)


def in_common(
    cells: Cells, ours: Cell, theirs: Cell
) -> tuple[dict[int, tuple[Collected, Collected]], str]:
    """Runs of both cells by seed, or why there are none."""
    if missing := [cell.title for cell in (ours, theirs) if cell not in cells]:
        return {}, f"no run of {' and of '.join(missing)}"
    pairs = {
        seed: (run, cells[theirs][seed])
        for seed, run in cells[ours].items()
        if seed in cells[theirs]
    }
    return pairs, "" if pairs else f"no seed was run with both {ours.title} and {theirs.title}"


def searches(cells: Cells) -> list[Cell]:
    """CHEEM as the paper has it and with the other search, those that were run; the former where
    neither was."""
    return [cell for cell in (CHEEM, CLOSED_FORM) if cell in cells] or [CHEEM]


def better_than(method: str) -> Callable[[Cells], list[Verdict]]:
    """CHEEM's average accuracy minus that of a method."""
    return lambda cells: [
        compared(f"{ours.title} − {METHODS[method]}", cells, ours, Cell(method), above)
        for ours in searches(cells)
    ]


def close_to_the_bound(cells: Cells) -> list[Verdict]:
    """CHEEM minus full fine-tuning, with the task ID given to both and to the bound alone."""
    bound = Cell(TOLD_METHOD)
    margin = -largest_gap()

    def line(ours: Cell, what: str, given: tuple[bool, bool]) -> Verdict:
        title = f"{ours.title} − full fine-tuning, {what}"
        return compared(title, cells, ours, bound, lambda found: above(found, margin), given=given)

    return [
        line(ours, what, given)
        for ours in searches(cells)
        for what, given in (
            ("task ID given to both", (True, True)),
            ("task ID given to the latter alone, as in the paper", (False, True)),
        )
    ]


def easy_tasks_skip_more(cells: Cells) -> list[Verdict]:
    """Rank correlation over tasks of the accuracy of frozen heads with the number of blocks that
    chose Skip."""
    return [_skips_of(cells, ours) for ours in searches(cells)]


def _skips_of(cells: Cells, ours: Cell) -> Verdict:
    title = f"{ours.title}: rank correlation"
    search = SEARCHES[ours]
    x = []
    y = []
    seeds = []
    for seed, collected in cells.get(ours, {}).items():
        results, order = collected.run.results, collected.run.order
        frozen = results["yardsticks"].get("frozen_linear", {}).get("local_accuracy")
        if frozen is None and seed in cells.get(Cell("frozen_linear"), {}):
            of_method = cells[Cell("frozen_linear")][seed].answers(order, given=True)
            frozen = [[float(task.mean()) for task in of_method]]
        if frozen is not None:
            seeds.append(seed)
            x.append(frozen[-1])
            chosen = [from_strings(task["architecture"]) for task in results["tasks"]]
            y.append(
                [sum(choice.kind == "skip" for choice in architecture) for architecture in chosen]
            )
    if not seeds:
        return Verdict(
            title, None, "", (), NOT_RUN, "no run of CHEEM with frozen heads beside it", search
        )
    try:
        found = rank_correlation(np.array(x, float), np.array(y, float))
    except ValueError:
        why = "in some run all tasks skip equally often, so that nothing can correlate"
        return Verdict(title, None, "", tuple(seeds), OPEN, why, search)
    word = above(found) if found.p < 0.05 else OPEN
    return Verdict(title, found, "", tuple(seeds), word, search=search)


def fewer_parameters_than_uniform(cells: Cells) -> list[Verdict]:
    """HEE minus uniform sampling, of every search that has both: average accuracy, and parameters
    added per task."""
    usual = searches(cells)
    both = [ours for ours in usual if uniform_of(ours) in cells] or usual[:1]
    return [
        line
        for ours in both
        for line in _without_hee(cells, ours, "" if ours == CHEEM else f"{ours.title}: ")
    ]


def uniform_of(ours: Cell) -> Cell:
    """The runs that sample architectures uniformly."""
    return ours._replace(variant=", ".join(filter(None, ("uniform", ours.variant))))


def _without_hee(cells: Cells, ours: Cell, whose: str) -> list[Verdict]:
    uniform = uniform_of(ours)
    accuracy = compared(
        f"{whose}HEE − uniform, accuracy", cells, ours, uniform, lambda found: above(found, -EQUAL)
    )
    title = f"{whose}HEE − uniform, parameters added per task"
    unit = "% of the backbone"
    pairs, why = in_common(cells, ours, uniform)
    if why:
        return [accuracy, Verdict(title, None, unit, (), NOT_RUN, why, accuracy.search)]
    tasks = [[side.run.results["tasks"] for side in pair] for pair in pairs.values()]
    added = np.array(
        [[[task["params_added_percent"] for task in side] for side in pair] for pair in tasks],
        float,
    )
    found = mean_difference(added[:, 0], added[:, 1])
    return [
        accuracy,
        Verdict(title, found, unit, tuple(pairs), below(found), search=accuracy.search),
    ]


def prompts_collapse(cells: Cells) -> list[Verdict]:
    """Methods whose heads answer for all tasks together, below one with a head per task and below
    frozen features."""
    return [
        compared(
            f"{METHODS[sound]} − {METHODS[method]}",
            cells,
            Cell(sound),
            Cell(method),
            lambda e: above(e, FAR),
        )
        for sound in SOUND
        for method in COLLAPSING
    ]


def insensitive_to_the_order(cells: Cells) -> list[Verdict]:
    """CHEEM, with either search, in each other order minus the same in the usual one."""
    pairs = [(cell, cell._replace(order="default")) for cell in cells if cell.order != "default"]
    pairs = [(cell, usual) for cell, usual in pairs if usual in (CHEEM, CLOSED_FORM)]
    if not pairs:
        return [
            Verdict(
                "CHEEM in other orders",
                None,
                "points",
                (),
                NOT_RUN,
                "no run of CHEEM in another order",
            )
        ]
    return [
        compared(f"{cell.title} − usual order", cells, cell, usual, lambda e: within(e, ORDERS))
        for cell, usual in pairs
    ]


def claims() -> list[Claim]:
    """All claims, in the order of the page."""
    zero = "interval above 0 confirms it, below 0 refutes it"
    return [
        Claim(
            "a",
            "CHEEM is more accurate than LoRA-CL",
            f"average accuracy; {zero}",
            better_than("lora_cl"),
        ),
        Claim(
            "b",
            "CHEEM is more accurate than S-Prompts",
            f"average accuracy; {zero}",
            better_than("s_prompts"),
        ),
        Claim(
            "c",
            "CHEEM is close to full fine-tuning",
            f"close: at most {100 * largest_gap():.1f} points below it, the paper's largest gap"
            " (the whole interval)",
            close_to_the_bound,
        ),
        Claim(
            "d",
            "easy tasks skip more blocks",
            "Spearman's coefficient over tasks, of the accuracy of frozen heads with the task ID"
            f" given (chance included) and the number of blocks that chose Skip; {zero}, with p"
            " below 0.05",
            easy_tasks_skip_more,
        ),
        Claim(
            "e",
            "HEE adds fewer parameters than uniform sampling at equal accuracy",
            f"accuracy at most {100 * EQUAL:.0f} point below (the whole interval), and parameters"
            " below 0",
            fewer_parameters_than_uniform,
        ),
        Claim(
            "f",
            "prompting methods whose head spans all tasks collapse",
            f"a collapse: more than {100 * FAR:.0f} points below a method with a head per task (the"
            " whole interval)",
            prompts_collapse,
        ),
        Claim(
            "g",
            "CHEEM is insensitive to the order of the tasks",
            f"the whole interval within ± {100 * ORDERS:.0f} points confirms it, all outside"
            " refutes it; a small p says that the order matters, not by how much",
            insensitive_to_the_order,
        ),
        Claim(
            "h",
            "CHEEM is more accurate than frozen, linear heads (not a claim of the paper)",
            f"average accuracy; {zero}",
            better_than("frozen_linear"),
        ),
    ]


def in_short(judged: Sequence[tuple[Claim, Sequence[Verdict]]]) -> str:
    """The claims by what became of them, with the search where it matters: two differ, or only the
    other one ran."""
    titles = {
        HOLDS: "Confirmed here",
        FAILS: "**Refuted here**",
        OPEN: "Not decided by these runs",
        NOT_RUN: "Not run, or not in full",
    }
    found = {word: [] for word in titles}
    for claim, lines in judged:
        words = {
            search: of_claim([line for line in lines if line.search == search])
            for search in searches_of(lines)
        }
        is_told = len(set(words.values())) > 1 or list(words) == [SEARCHES[CLOSED_FORM]]
        for search, word in words.items() if is_told else [("", of_claim(lines))]:
            found[word].append(
                f"({claim.letter}) {claim.title}" + (f" ({search})" if search else "")
            )
    told = [
        f"- {title}: {'; '.join(found[word])}." for word, title in titles.items() if found[word]
    ]
    alone = sorted(
        {
            c.letter
            for c, lines in judged
            for line in lines
            if line.estimate and len(line.seeds) == 1
        }
    )
    if alone:
        told.append(
            f"- Of {', '.join(f'({letter})' for letter in alone)} at least one line rests on a"
            " single seed, which says nothing about others."
        )
    return "\n".join(told)


def unbeaten(
    baselines: Sequence[tuple[str, Cell, Cell]],
    cells: Cells,
    measured: Mapping[Cell, Mapping[str, Any]],
) -> str:
    """Methods of which these runs do not show that CHEEM is more accurate, as more lines."""
    told: dict[str, list[str]] = {FAILS: [], OPEN: []}
    for title, ours, theirs in baselines:
        line = compared(title, cells, ours, theirs, above)
        if line.estimate is not None and line.word != HOLDS:
            value, interval, *_ = shown(line)
            ratio = measured[theirs]["flops_paper"]["mean"] / measured[ours]["flops_paper"]["mean"]
            alone = "one seed; " if len(line.seeds) == 1 else ""
            told[line.word].append(
                f"{title} (CHEEM {value}, {interval}; {alone}{ratio:.1f} times CHEEM's FLOPs)"
            )
    words = {FAILS: "**More accurate** than", OPEN: "No significant difference from"}
    return "".join(
        f"\n- {words[word]} {baselines[0][1].title} with the paper's router: {'; '.join(found)}."
        for word, found in told.items()
        if found
    )


def searches_of(lines: Sequence[Verdict]) -> list[str]:
    """The searches that the lines of a claim are of, in their order."""
    return list(dict.fromkeys(line.search for line in lines))


def of_claim(lines: Sequence[Verdict]) -> str:
    """One word for all lines of a claim."""
    words = {line.word for line in lines}
    return next((word for word in (FAILS, NOT_RUN, OPEN) if word in words), HOLDS)


def verdict_grid(judged: Sequence[tuple[Claim, Sequence[Verdict]]]) -> Grid:
    """A row per comparison."""
    columns = ("claim", "compared", "verdict", *NUMBERS)
    rows = [
        (
            f"({claim.letter}) {claim.title}" if index == 0 else "",
            line.claim,
            _word(line),
            *shown(line),
        )
        for claim, lines in judged
        for index, line in enumerate(lines)
    ]
    return Grid("", columns, tuple(rows), 3)


NUMBERS = ("measured", "95 % interval", "over tasks", "p", "by seed")


def shown(line: Verdict) -> tuple[str, ...]:
    """Cells under `NUMBERS`."""
    found = line.estimate
    if found is None:
        return line.why, *[NONE] * (len(NUMBERS) - 1)

    def text_of(value: float) -> str:
        text = f"{100 * value:+.1f}" if line.unit == "points" else f"{value:+.2f}"
        return text.lstrip("+-") if not text.strip("+-0.") else text.replace("-", "−")

    unit = f" {line.unit}" if line.unit else ""
    seeds = ", ".join(
        f"{seed}: {text_of(value)}" for seed, value in zip(line.seeds, found.per_seed, strict=True)
    )
    p = "< 0.001" if found.p < 0.001 else f"{found.p:.3f}"
    wide = NONE if found.over_tasks is None else " to ".join(map(text_of, found.over_tasks))
    return (
        f"{text_of(found.value)}{unit}",
        f"{text_of(found.low)} to {text_of(found.high)}",
        wide,
        p,
        seeds,
    )


def _word(line: Verdict) -> str:
    alone = line.estimate is not None and len(line.seeds) == 1
    return (
        f"{f'**{line.word}**' if line.word == FAILS else line.word}{' (one seed)' if alone else ''}"
    )
