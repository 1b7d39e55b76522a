"""Generated tables inside of hand-written pages.

A table is the text between `<!-- table NAME -->` and `<!-- end -->`. The rest of the page is prose,
which does not change.
"""

import re
from collections.abc import Mapping
from pathlib import Path

from cheem_jax.core.atomic import write_atomically

BEGIN = "<!-- table "
END = "<!-- end -->"


def begin(name: str) -> str:
    """Return the marker before a table."""
    return f"{BEGIN}{name} -->"


def tables_in(text: str) -> set[str]:
    """Return the names of the tables of a page."""
    return set(re.findall(re.escape(BEGIN) + "(.+?) -->", text))


def fill(text: str, tables: Mapping[str, str]) -> str:
    """Replace the tables of a page, which are keyed by name; append a table whose marker is
    missing. Raises ValueError if a table has no end, because the text after it would be lost."""
    for name, table in tables.items():
        if begin(name) not in text:
            text += f"\n## {name.capitalize()}\n\n{begin(name)}\n{END}\n"
        before, _, rest = text.partition(begin(name))
        inside, marker, after = rest.partition(END)
        if not marker or BEGIN in inside:
            raise ValueError(f"the page has {begin(name)!r} without {END!r} after it; add one")
        text = f"{before}{begin(name)}\n\n{table.strip()}\n\n{END}{after}"
    return text


def write_tables(page: Path, tables: Mapping[str, str], title: str) -> None:
    """Write the tables into a page; a missing page is created with `title`."""
    text = page.read_text() if page.is_file() else f"# {title}\n"
    page.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(page, fill(text, tables))
