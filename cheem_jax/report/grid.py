"""A table of text cells, which can be printed to the terminal or formatted as Markdown or CSV."""

import csv
import io
import re
from collections.abc import Collection
from typing import NamedTuple

import rich.box
import rich.table
from rich.text import Text

from cheem_jax.core.paths import printable


class Grid(NamedTuple):
    """A table of text cells; the first `num_left` columns are left-aligned, the others
    right-aligned."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    num_left: int
    caption: str = ""

    @property
    def heads(self) -> list[str]:
        """Column titles without line breaks."""
        return [column.replace("-\n", "").replace("\n", " ") for column in self.columns]

    def without(self, titles: Collection[str]) -> "Grid":
        """Return the table without the columns that have one of `titles`."""
        indices = [index for index, column in enumerate(self.columns) if column not in titles]
        rows = tuple(tuple(row[index] for index in indices) for row in self.rows)
        return self._replace(columns=tuple(self.columns[index] for index in indices), rows=rows)

    @property
    def width(self) -> int:
        """Number of characters per row, including two blanks after each column."""
        cells = zip(self.columns, *self.rows, strict=True)
        return sum(max(map(len, [*column.split("\n"), *rest])) + 2 for column, *rest in cells)

    def to_rich(self) -> rich.table.Table:
        """Make a table for the terminal. If the table is wider than 80 characters, columns are
        separated by one blank instead of two."""
        gap = 1 if self.width <= 80 else 0  # the box adds one blank
        table = rich.table.Table(
            title=Text(self.title),
            caption=Text(self.caption) if self.caption else None,
            box=rich.box.SIMPLE_HEAD,
            pad_edge=False,
            padding=(0, gap, 0, 0),
            title_justify="left",
            caption_justify="left",
        )
        for index, column in enumerate(self.columns):
            is_left = index < self.num_left
            justify = "left" if is_left else "right"
            table.add_column(
                column, justify=justify, overflow="fold", no_wrap=index == 1 and is_left
            )
        for row in self.rows:
            # task names can contain brackets, which rich would read as markup
            table.add_row(*map(Text, row))
        return table

    def to_csv(self) -> str:
        """Format the table as CSV; cells are as displayed."""
        text = io.StringIO()
        lines = csv.writer(text, quoting=csv.QUOTE_ALL, lineterminator="\n")
        lines.writerow(self.heads)
        lines.writerows(self.rows)
        return text.getvalue()

    def to_markdown(self) -> str:
        """Format the table as Markdown, without the title and caption.

        HTML, links and images in the cells are displayed as plain text, but bold text stays bold.
        """
        aligns = ["---" if index < self.num_left else "---:" for index in range(len(self.columns))]
        rows = ([*map(_escape, row)] for row in (self.heads, *self.rows))
        heads, *body = ("| " + " | ".join(row) + " |" for row in rows)
        return "\n".join((heads, "| " + " | ".join(aligns) + " |", *body))


def _escape(text: str) -> str:
    """Escape HTML, links, images and column separators in a cell of a Markdown table."""
    text = re.sub(r"[\\|]", r"\\\g<0>", printable(text).replace("\n", " "))
    text = text.replace("&", "&amp;").replace("](", r"]\(")
    return re.sub(r"<(?=\S)", "&lt;", text)  # `<` starts a tag only if no blank follows
