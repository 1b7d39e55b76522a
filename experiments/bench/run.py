"""All benchmarks of a machine without an accelerator, each in a process of its own, and the tables of all records.

python experiments/bench/run.py [--only steps,data] [--out docs/benchmarks] [--quick]

`OUT/tables.txt` has what was reached next to the goals, and all numbers; `--only tables` measures nothing.
"""

import dataclasses
import json
import math
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flax.traverse_util import flatten_dict

from cheem_jax.cli.main import parse, run_command
from cheem_jax.core.atomic import write_atomically
from cheem_jax.report.table import NONE, Grid

ROOT = Path(__file__).parents[2]
PARTS = ("steps", "tasks", "methods", "sharing", "many_tasks", "footprint", "demo_compile", "data", "collectives")

Found = Mapping[str, Any]

HEAD = """# Benchmarks

`make bench` measures, and `experiments/bench/run.py` writes this file from `docs/benchmarks/*.json`. Sides take turns.
Seconds are medians (of a whole search the sum), and ratios are ratios of those. `docs/benchmarks.md` says what was
measured.
"""
MET = {None: NONE, True: "yes", False: "**no**"}
SHOWN = ("part", "quick", "machine", "rows")
"""What of a record is not among its further numbers."""


@dataclasses.dataclass(frozen=True)
class All:
    """What is run and where its numbers go."""

    only: str = ",".join(PARTS)
    """Parts, separated by commas; tables: none."""
    out: Path = ROOT / "docs" / "benchmarks"
    """Folder of the JSON files and the tables; figures are written next to it."""
    quick: bool = False
    """Settings so small that the numbers mean nothing: to see whether everything runs."""
    loaded: bool = False
    """Measure while other programs use the processors; without it that is refused, as it distorts even ratios."""


def main(settings: All) -> None:
    """Run the parts one after the other, then write the tables; one that fails does not stop the others."""
    parts = [] if settings.only == "tables" else [part.strip() for part in settings.only.split(",")]
    if unknown := [part for part in parts if part not in PARTS]:
        raise ValueError(f"unknown parts {unknown}; expected some of: {', '.join(PARTS)}")
    options = ["--out", str(settings.out.resolve()), *(["--quick"] if settings.quick else [])]
    options += ["--loaded"] if settings.loaded else []
    failed = []
    for part in parts:
        start = time.perf_counter()
        print(f"== {part}", flush=True)
        if subprocess.run([sys.executable, "-m", f"experiments.bench.{part}", *options], cwd=ROOT).returncode:
            failed.append(part)
        print(f"== {part}: {time.perf_counter() - start:.0f} s", flush=True)
    if settings.out.is_dir():
        write_atomically(settings.out / "tables.txt", render(settings.out))
        print(f"tables: {settings.out / 'tables.txt'}")
    if failed:
        print(f"error: these parts failed, see above: {', '.join(failed)}", file=sys.stderr)
        raise SystemExit(1)


def render(folder: Path) -> str:
    """The whole text."""
    sections = [HEAD]
    for file in sorted(folder.glob("*.json")):
        found = json.loads(file.read_text())
        sections += [f"## {file.stem}", f"{_machine(found['machine'], found['quick'])}.", _goals(found["rows"])]
        further = {name: value for name, value in found.items() if name not in SHOWN}
        if numbers := leaves(further):
            sections.append(_numbers([numbers], [""]))
        for name, value in further.items():
            if isinstance(value, list) and value and isinstance(value[0], Mapping):
                entries = [leaves(entry) for entry in value]
                sections.append(_numbers(entries, [name, *[""] * (len(entries) - 1)]))
    return "\n\n".join(sections) + "\n"


def leaves(found: Found) -> dict[str, str | float]:
    """Single numbers and words by dotted names; samples and other lists are left out."""
    return {name: value for name, value in flatten_dict(found, sep=".").items() if isinstance(value, str | float | int)}


def _machine(machine: Found, is_quick: bool) -> str:
    device = "" if machine["platform"] == "cpu" else f"{machine['device']}, "
    others = ("cpu", "cores", "platform", "device", "date", "other_work")
    versions = ", ".join(f"{name} {version}" for name, version in machine.items() if name not in others)
    quick = "; **settings too small to mean anything**" if is_quick else ""
    load = f"; other work {100 * machine['other_work']:.0f} %" if "other_work" in machine else ""
    return f"{device}{machine['cpu']}, {machine['cores']} cores; {versions}; {machine['date']}{load}{quick}"


def _goals(rows: Sequence[Found]) -> str:
    body = []
    for row in rows:
        seconds = "<br>".join(f"{name}: {_seconds(value)}" for name, value in row["seconds"].items())
        goal = NONE if row["goal"] is None else f"{row['sense']} {_number(row['goal'])}"
        unit = {"x": "×"}.get(row["unit"], row["unit"])
        reached = "not measured" if row["reached"] is None else f"{_number(row['reached'])} {unit}"
        ceiling = NONE if row["ceiling"] is None else _number(row["ceiling"])
        share = f"{100 * row['share']:.0f} %" if row.get("share") else NONE
        body.append((row["what"], seconds or NONE, reached, share, ceiling, goal, MET[row["met"]], row["note"]))
    columns = ("what", "median seconds", "reached", "of the matrix peak", "ceiling", "goal", "met", "note")
    return Grid("", columns, tuple(body), len(columns)).to_markdown()


def _numbers(entries: Sequence[Mapping[str, str | float]], columns: Sequence[str]) -> str:
    """A row per number, a column per entry."""
    names = dict.fromkeys(name for entry in entries for name in entry)
    cells = [(name, *(_number(entry.get(name, "")) for entry in entries)) for name in names]
    return Grid("", ("", *columns), tuple(cells), 1).to_markdown()


def _seconds(value: float) -> str:
    return f"{_number(1e3 * value)} ms" if value < 1 else f"{_number(value)} s"


def _number(value: float | str) -> str:
    """Three significant digits, whole numbers from a hundred on."""
    if isinstance(value, str):
        return value
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    if abs(value) >= 100 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.{max(0, 2 - math.floor(math.log10(abs(value))))}f}"


if __name__ == "__main__":
    run_command(main, parse(All, description=__doc__))
