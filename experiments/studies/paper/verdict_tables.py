"""Verdicts and paired differences as lines and tables of the page."""

from collections.abc import Mapping, Sequence
from typing import Any

from cheem_jax.report.table import NONE, Grid
from studies.paper.claims import FAILS, HOLDS, NOT_RUN, OPEN, Claim, Verdict, above, compared
from studies.paper.collected import Cell, Cells


def in_short(judged: Sequence[tuple[Claim, Sequence[Verdict]]], changed: Sequence[str] = ()) -> str:
    """The claims by what became of them; `changed` would be judged otherwise by runs on another processor."""
    titles = {
        HOLDS: "Hold here", FAILS: "**Do not hold here**", OPEN: "Not decided by these runs",
        NOT_RUN: "Not run, or not in full",
    }  # fmt: skip
    found = {word: [f"({c.letter}) {c.title}" for c, lines in judged if of_claim(lines) == word] for word in titles}
    told = [f"- {title}: {'; '.join(found[word])}." for word, title in titles.items() if found[word]]
    alone = sorted({c.letter for c, lines in judged for line in lines if line.estimate and len(line.seeds) == 1})
    if alone:
        told.append(
            f"- Of {', '.join(f'({letter})' for letter in alone)} at least one line rests on a single seed, which says "
            "nothing about others."
        )
    if changed:
        told.append(f"- With CHEEM's run on another kind of processor {', '.join(changed)}.")
    return "\n".join(told)


def unbeaten(
    baselines: Sequence[tuple[str, Cell, Cell]], cells: Cells, measured: Mapping[str, Mapping[str, Any]]
) -> str:
    """Methods of which these runs do not show that CHEEM is more accurate, as more lines."""
    told: dict[str, list[str]] = {FAILS: [], OPEN: []}
    for title, ours, theirs in baselines:
        line = compared(title, cells, ours, theirs, above)
        if line.estimate is not None and line.word != HOLDS:
            value, interval, *_ = shown(line)
            ratio = measured[theirs.method]["flops_paper"]["mean"] / measured[ours.method]["flops_paper"]["mean"]
            alone = "one seed; " if len(line.seeds) == 1 else ""
            told[line.word].append(f"{title} (CHEEM {value}, {interval}; {alone}{ratio:.1f} times CHEEM's FLOPs)")
    words = {FAILS: "**More accurate** than", OPEN: "No significant difference from"}
    return "".join(
        f"\n- {words[word]} CHEEM with the paper's router: {'; '.join(found)}."
        for word, found in told.items() if found
    )  # fmt: skip


def of_claim(lines: Sequence[Verdict]) -> str:
    """One word for all lines of a claim."""
    words = {line.word for line in lines}
    return next((word for word in (FAILS, NOT_RUN, OPEN) if word in words), HOLDS)


def verdict_grid(judged: Sequence[tuple[Claim, Sequence[Verdict]]]) -> Grid:
    """A row per comparison."""
    columns = ("claim", "compared", "verdict", *NUMBERS)
    rows = [
        (f"({claim.letter}) {claim.title}" if index == 0 else "", line.claim, _word(line), *shown(line))
        for claim, lines in judged
        for index, line in enumerate(lines)
    ]
    return Grid("", columns, tuple(rows), 3)


def paired_grid(heading: str, pairs: Sequence[tuple[str, Cell, Cell]], cells: Cells) -> str:
    """A row per pair of a title: the average accuracy of the one minus that of the other."""
    lines = [compared(title, cells, one, other, lambda _: "") for title, one, other in pairs]
    return Grid("", (heading, *NUMBERS), tuple((line.claim, *shown(line)) for line in lines), 1).to_markdown()


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
    seeds = ", ".join(f"{seed}: {text_of(value)}" for seed, value in zip(line.seeds, found.per_seed, strict=True))
    p = "< 0.001" if found.p < 0.001 else f"{found.p:.3f}"
    wide = NONE if found.over_tasks is None else " to ".join(map(text_of, found.over_tasks))
    return f"{text_of(found.value)}{unit}", f"{text_of(found.low)} to {text_of(found.high)}", wide, p, seeds


def _word(line: Verdict) -> str:
    alone = line.estimate is not None and len(line.seeds) == 1
    return f"{f'**{line.word}**' if line.word == FAILS else line.word}{' (one seed)' if alone else ''}"
