"""The paper's figure as an interactive table: the op at each block of each task, and where its expert comes from."""

from typing import NamedTuple

from cheem_jax.core.architecture import from_strings
from cheem_jax.report.memories import FORGOTTEN, MARK, cell_text
from cheem_jax.report.page.specs import Results

ROWS = 400
"""Tasks that are shown."""


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
            if expert is not None and not 0 <= expert < len(block):
                raise ValueError(f"task {task['name']!r} uses expert {expert} of a block with {len(block)}")
            cells.append(Cell(choice.kind, cell_text(choice, block), expert))
        rows.append(Row(f"T{index} {task['name']}", tuple(cells), f"{task['params_added_percent']:.1f} %"))
    caption = "Point at or tap a cell to see its expert's history and who shares it."
    if len(tasks) > ROWS:
        caption += f" The first {ROWS} of {len(tasks):,} tasks are shown."
    if any(MARK in cell.text for row in rows for cell in row.cells):
        caption += f" {MARK}: from a forgotten task, whose expert stays because it is needed."
    histories = tuple(tuple((_number(e["origin"]), _number(e["parent"])) for e in block) for block in pool)
    return Architectures(len(pool), tuple(rows), histories, caption)


def _number(place: int | str | None) -> int:
    return place if isinstance(place, int) else -2 if place == FORGOTTEN else -1
