"""Collected runs beside the page's own, and what they show: the same seeds on another processor, other image sizes."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from cheem_jax.report.comparison import comparison
from cheem_jax.report.table import METHODS, UPPER_BOUNDS, Grid
from cheem_jax.run.differences import settings_apart, summary
from studies.paper.claims import CHEEM, Claim, Verdict, compared, of_claim, shown
from studies.paper.collected import Cell, Cells, Collected, is_usual, load
from studies.paper.results_setting import machines, number_of

AGAIN, SIZES = "again", "at_*"
"""Their folders, beside that of the page's runs."""


class Beside(NamedTuple):
    """What was found there."""

    again: Cells
    """Runs of the page made once more on another processor."""
    sizes: Sequence[Cells]
    """Runs on the same images in another size, a folder each, the smallest first."""


def load_beside(results: Path, cells: Cells) -> Beside:
    """What stands beside the folder of the page's runs, `cells`; raises ValueError where it does not belong to them."""
    folder = results.parent / AGAIN
    again = load(folder) if folder.is_dir() else {}
    for cell, found in again.items():
        for seed, run in found.items():
            if why := _no_twin(run, cells.get(cell, {}).get(seed)):
                raise ValueError(
                    f"{run.run.directory} is not a run of {results} made again on another processor: {why}; remove it"
                )
    first = next(run for found in cells.values() for run in found.values())
    sizes = [load(folder) for folder in results.parent.glob(SIZES) if folder.is_dir()]
    for run in (run for other in sizes for found in other.values() for run in found.values()):
        if why := _no_other_size(run, first):
            raise ValueError(f"{run.run.directory} is not a run on the same images in another size: {why}; remove it")
    return Beside(again, sorted(sizes, key=pixels_of))


def pixels_of(cells: Cells) -> int:
    """The size of the images."""
    return next(run.run.results["image_size"] for found in cells.values() for run in found.values())


def _no_twin(run: Collected, twin: Collected | None) -> str:
    if twin is None:
        return "no run there is of its method, settings and seed"
    if run.run.order != twin.run.order:
        return f"its tasks are {', '.join(run.run.order)}"
    if found := settings_apart(twin.run.config, run.run.config):
        return f"its settings differ from {twin.run.directory}: {summary(found, 'settings')}"
    processors = [one.record.get("conditions", {}).get("device", {}).get("processor") for one in (run, twin)]
    return f"both ran on {processors[0]}" if processors[0] == processors[1] else ""


def _no_other_size(run: Collected, first: Collected) -> str:
    if set(run.run.order) != set(first.run.order):
        return f"its tasks are {', '.join(run.run.order)}"
    if run.record["data"].get("split_seed") != first.record["data"].get("split_seed"):
        return "its splits have another seed"
    size = run.run.results["image_size"]
    return f"its size is {size} as well" if size == first.run.results["image_size"] else ""


def again_section(again: Cells, cells: Cells, others: Sequence[Cell], changed: Sequence[str]) -> list[str]:
    """What comparisons of single runs owe to the processor: `others` against either of two runs of CHEEM; `changed` is
    from `changed_verdicts`."""
    seeds = list(again.get(CHEEM, {}))
    if not seeds:
        return []
    theirs = {**cells, CHEEM: again[CHEEM]}
    ours = {**cells, CHEEM: {seed: cells[CHEEM][seed] for seed in seeds}}
    published = Cell(CHEEM.method, "above")
    both = {CHEEM: again[CHEEM], published: ours[CHEEM]}
    rows: list[tuple[str, ...]] = [("CHEEM run again − CHEEM above", *_found(both, CHEEM, published), "", "")]
    for cell in others:
        usual = is_usual(cells, cell)
        if set(seeds) & set(cells[cell]) and (usual or cell.method == CHEEM.method):
            one, other = (CHEEM, cell) if usual else (cell, CHEEM)
            title = f"{one.title} − {other.title}"
            rows.append((title, *_found(ours, one, other), *_found(theirs, one, other)))
    columns = ("compared", "with the run above", "95 % interval", "with the run made again", "95 % interval")
    pairs = [
        (mine["architecture"], its["architecture"])
        for seed in seeds
        for mine, its in zip(
            cells[CHEEM][seed].run.results["tasks"], again[CHEEM][seed].run.results["tasks"], strict=True
        )
    ]
    other_networks = sum(mine != its for mine, its in pairs)
    told = f"With it {', '.join(changed)}." if changed else "With it every verdict on a claim would be the same."
    return [
        "### The same seed on another kind of processor",
        f"CHEEM with {'seed' if len(seeds) == 1 else 'seeds'} {', '.join(map(str, seeds))} again, same settings, "
        f"another kind of processor: other networks for {other_networks} of {len(pairs)} tasks, since the last bits of "
        "losses decide among candidates that are nearly alike. No interval of a single seed on this page includes "
        'that; it adds to differences between runs of different processors ("Where", below). Average accuracy, from '
        f"{'this seed' if len(seeds) == 1 else 'these seeds'} alone:",
        Grid("", columns, tuple(rows), 1).to_markdown(),
        f"{told} Above and again, in this order:",
        "\n".join([*machines(list(ours[CHEEM].values())), *machines(list(again[CHEEM].values()))]),
    ]


def changed_verdicts(again: Cells, cells: Cells, judged: Sequence[tuple[Claim, Sequence[Verdict]]]) -> list[str]:
    """Claims that would be judged otherwise with the runs made again in the place of those of the page."""
    if not again:
        return []
    exchanged = {**cells, **{cell: {**cells[cell], **found} for cell, found in again.items()}}
    words = [(claim, of_claim(lines), of_claim(claim.check(exchanged))) for claim, lines in judged]
    return [f"({claim.letter}) would be “{then}” instead of “{now}”" for claim, now, then in words if now != then]


def _found(cells: Cells, one: Cell, other: Cell) -> tuple[str, ...]:
    return shown(compared("", cells, one, other, lambda _: ""))[:2]


def sizes_lines(
    sizes: Sequence[Cells], measured: Mapping[str, Mapping[str, Any]], routers: Mapping[str, Any] | None, pixels: int
) -> str:
    """What runs on other sizes of images reached, as more lines; all else is of the page's size, `pixels`."""
    best = [row["average_accuracy"]["mean"] for method, row in measured.items() if method not in UPPER_BOUNDS]
    best += [] if routers is None else [row["accuracy"] for row in map(routers["chosen"].get, METHODS) if row]
    highest, flops = max(best, default=1.0), measured["cheem"]["flops_paper"]["mean"] if "cheem" in measured else None
    told = []
    for cells in sizes:
        for cell, found in cells.items():
            if cell.method in UPPER_BOUNDS:
                continue
            [row] = comparison({cell.method: [one.run.results for one in found.values()]})
            accuracy, given, cost = (
                row[name]["mean"] for name in ("average_accuracy", "local_average_accuracy", "flops_paper")
            )
            most = f", more than any method without the task ID at {pixels}" if accuracy > highest else ""
            times = "" if flops is None else f"; an image costs {cost / flops:.1f} times CHEEM's FLOPs at {pixels}"
            told.append(
                f"\n- At {pixels_of(cells)} pixels instead of {pixels} ({number_of(len(found), 'run')}), {cell.title}: "
                f"{100 * accuracy:.1f} %, with the task ID given {100 * given:.1f} %{most}{times}."
            )
    return "".join(told)
