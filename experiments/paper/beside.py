"""Collected runs that stand beside the page's own: the same seeds on another processor, pictures of another size."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from paper.claims import CHEEM, compared
from paper.collected import Cell, Cells, is_usual, load
from paper.results_setting import machines
from paper.verdict_tables import numbers_of

from cheem_jax.report.comparison import comparison
from cheem_jax.report.table import TOLD, Grid

AGAIN, SIZES = "again", "at_*"
"""Their folders, beside that of the page's runs."""


class Beside(NamedTuple):
    """What was found there."""

    again: Cells
    """CHEEM's runs made again elsewhere; nothing where there are none."""
    sizes: Sequence[Cells]
    """Runs on pictures of another size, a folder each."""


def load_beside(results: Path) -> Beside:
    """What stands beside the folder of the page's runs."""
    again = results.parent / AGAIN
    sizes = [load(folder) for folder in sorted(results.parent.glob(SIZES)) if folder.is_dir()]
    return Beside(load(again) if again.is_dir() else {}, sizes)


def again_section(again: Cells, cells: Cells, others: Sequence[Cell]) -> list[str]:
    """What one seed's comparisons owe to the processor: `others` against either of two runs with the same seed."""
    seeds = sorted(set(again.get(CHEEM, {})) & set(cells.get(CHEEM, {})))
    if not seeds:
        return []
    theirs = {**cells, CHEEM: {seed: again[CHEEM][seed] for seed in seeds}}
    ours = {**cells, CHEEM: {seed: cells[CHEEM][seed] for seed in seeds}}
    both = {CHEEM: theirs[CHEEM], Cell("cheem", "above"): ours[CHEEM]}
    rows: list[tuple[str, ...]] = [
        ("CHEEM made again − CHEEM above", *_found(both, CHEEM, Cell("cheem", "above")), "", "")
    ]
    for cell in others:
        usual = is_usual(cells, cell)
        title = f"CHEEM − {cell.title}" if usual else f"{cell.title} − CHEEM"
        one, other = (CHEEM, cell) if usual else (cell, CHEEM)
        if set(seeds) & set(cells[cell]):
            rows.append((title, *_found(ours, one, other), *_found(theirs, one, other)))
    columns = ("compared", "with the run above", "95 % interval", "with the run made again", "95 % interval")
    told = ("seed " if len(seeds) == 1 else "seeds ") + ", ".join(map(str, seeds))
    return [
        "### The same seed on another kind of processor",
        f"CHEEM with {told} once more, with the same settings and on another kind of processor. A supernet's losses "
        "differ in their last bits there, and these decide among candidates that are nearly alike, so that a run finds "
        "other networks. No interval on this page contains that: where both sides ran on different kinds of processors "
        '("Where", below), a difference between single runs owes something to it. All comparisons that have '
        f"{'this seed' if len(seeds) == 1 else 'these seeds'}, and with no other:",
        Grid("", columns, tuple(rows), 1).to_markdown(),
        "Above:\n\n" + "\n".join(machines(list(ours[CHEEM].values()))) + "\n\nMade again:\n\n"
        + "\n".join(machines(list(theirs[CHEEM].values()))),
    ]  # fmt: skip


def _found(cells: Cells, one: Cell, other: Cell) -> tuple[str, ...]:
    return numbers_of(compared("", cells, one, other, lambda _: ""))[:2]


def sizes_lines(sizes: Sequence[Cells], best: float, flops: float) -> str:
    """What runs on other sizes of pictures reached, as more lines; `best` is the highest average accuracy here of what
    is not told the task, and `flops` are CHEEM's per image in the paper's count."""
    told = []
    for cells in sizes:
        for cell, found in cells.items():
            if cell.method in TOLD:
                continue
            runs = [one.run.results for one in found.values()]
            [row] = comparison({cell.method: runs})
            accuracy, given, cost = (
                row[name]["mean"] for name in ("average_accuracy", "local_average_accuracy", "flops_paper")
            )
            most = ", more than any method here that is not told the task" if accuracy > best else ""
            told.append(
                f"\n- The same pictures at {runs[0]['image_size']} pixels ({len(runs)} run{'s'[: len(runs) > 1]}): "
                f"{cell.title} reach {100 * accuracy:.1f} % (task given: {100 * given:.1f} %) for {cost / flops:.1f} "
                f"times CHEEM's FLOPs{most}."
            )
    return "".join(told)
