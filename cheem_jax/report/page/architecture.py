"""The paper's figure as an interactive table: the op at each block of each task, and where its expert comes from."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from cheem_jax.core.architecture import from_strings
from cheem_jax.report.memories import FORGOTTEN, MARK, origin_name

Results = Mapping[str, Any]
ROWS = 400
"""Tasks that are shown."""
MEANING = {
    "reuse": "an expert as it is",
    "adapt": "an expert with a low-rank Δ",
    "new": "a new expert",
    "skip": "the branch left out",
}


class Cell(NamedTuple):
    """One block of one task; `expert` is the pool index of what runs there, None where skipped."""

    kind: str
    text: str
    expert: int | None


class Row(NamedTuple):
    label: str
    cells: tuple[Cell, ...]
    added: str


class Architectures(NamedTuple):
    """The grid, and for tooltips per block and expert its origin (-1: base, -2: forgotten) and parent (-1: none)."""

    num_blocks: int
    rows: tuple[Row, ...]
    pool: tuple[tuple[tuple[int, int], ...], ...]
    caption: str


def architectures(results: Results) -> Architectures:
    """Tasks in rows under the base, blocks in columns. Raises ValueError where the results contradict themselves."""
    pool, tasks = results["pool"], results["tasks"]
    rows = [Row("base", tuple(Cell("base", "base", 0) for _ in pool), "")]
    for index, task in enumerate(tasks[:ROWS]):
        cells = []
        for block, choice, expert in zip(pool, from_strings(task["architecture"]), task["experts"], strict=True):
            source = "" if choice.expert is None else origin_name(block[choice.expert]["origin"])
            text = {"reuse": source, "adapt": f"{source}+Δ"}.get(choice.kind, choice.kind)
            if expert is not None and not 0 <= expert < len(block):
                raise ValueError(f"task {task['name']!r} uses expert {expert} of a block with {len(block)}")
            cells.append(Cell(choice.kind, text, expert))
        rows.append(Row(f"T{index} {task['name']}", tuple(cells), f"{task['params_added_percent']:.1f} %"))
    caption = "Point at or tap a cell to see its expert's history and who shares it."
    if len(tasks) > ROWS:
        caption += f" The first {ROWS} of {len(tasks):,} tasks are shown."
    if any(MARK in cell.text for row in rows for cell in row.cells):
        caption += f" {MARK}: from a forgotten task, whose expert stays because it is needed."
    described = tuple(
        tuple((_number(e["origin"]), -1 if e["parent"] is None else e["parent"]) for e in block) for block in pool
    )
    return Architectures(len(pool), tuple(rows), described, caption)


def _number(origin: int | str) -> int:
    return origin if isinstance(origin, int) else -2 if origin == FORGOTTEN else -1
