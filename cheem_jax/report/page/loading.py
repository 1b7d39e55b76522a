"""Which runs a page shows, and what their record tells beside the results."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from cheem_jax.report import record
from cheem_jax.report.finished import Run, check_comparable, read
from cheem_jax.report.table import METHODS
from cheem_jax.results import results_of


class Loaded(NamedTuple):
    """The runs of a page, and the folders that could not be shown, each with the reason."""

    runs: tuple[Run, ...]
    left_out: tuple[tuple[Path, str], ...]


class Told(NamedTuple):
    """What the record tells of the run's own method that `results.json` does not hold."""

    begin: dict[str, Any]
    """The `run` entry: data, command and conditions; {} where the record cannot be read."""
    learned: tuple[dict[str, Any], ...]
    """The entry of each learned task in order; () where the record cannot be read."""
    damage: str = ""
    """Why the record cannot be read."""


def load(folders: Sequence[Path]) -> Loaded:
    """All finished runs below the folders; a single unfinished one as far as it is.

    Raises ValueError where there is none, or where runs differ in stream, order of tasks, data, weights or pixels.
    """
    for folder in folders:
        if not folder.is_dir():
            raise ValueError(f"{str(folder)!r} is no folder; expected a run directory or a folder that holds runs")
    runs, left_out = read(folders)
    if not runs and len(left_out) == 1 and left_out[0][1].startswith("unfinished"):
        return Loaded((_unfinished(left_out[0][0]),), ())
    for run in [run for run in runs if run.results["method"] not in METHODS]:
        runs.remove(run)
        known = ", ".join(METHODS)
        left_out.append((run.directory, f"damaged: its method is {run.results['method']!r:.40}, known are {known}"))
    if not runs:
        where = ", ".join(str(folder) for folder in folders)
        reasons = "; ".join(f"{directory}: {reason}" for directory, reason in left_out)
        raise ValueError(
            f"no finished run in {where or 'no folder'}{f' ({reasons})' if reasons else ''}; name a run directory, "
            "such as runs/demo after `cheem demo`, or a folder that holds some"
        )
    _check_one_table(runs)
    return Loaded(tuple(runs), tuple(left_out))


def tell(run: Run) -> Told:
    """The record of a run; damage is told and stops nothing."""
    try:
        entries = record.read(run.directory)
        begin = next((entry for entry in entries if entry["event"] == "run"), {})
        own = [e for e in entries if e["event"] == "learned" and e["method"] == run.results["method"]]
        learned = tuple(sorted(own, key=lambda entry: entry["report"]["index"])[: len(run.order)])
        if [entry["report"]["name"] for entry in learned] != list(run.order):
            raise ValueError("its learned tasks are not those of the results")
    except (ValueError, KeyError, TypeError, OSError) as error:
        return Told({}, (), f"{error}")
    return Told(begin, learned)


def _unfinished(directory: Path) -> Run:
    try:
        results = results_of(record.read(directory))
        return Run(directory, results, json.loads((directory / "config.json").read_text()))
    except ValueError as error:
        raise ValueError(
            f"{directory} cannot be shown yet ({error}); a report needs one evaluated task: give the command that "
            "began the run again, which goes on from where it stopped"
        ) from error


def _check_one_table(runs: Sequence[Run]) -> None:
    first = runs[0]
    for run in runs[1:]:
        for what, ours, theirs in (
            ("stream", run.results["stream"], first.results["stream"]),
            ("backbone", run.results["backbone"], first.results["backbone"]),
            ("order of tasks", run.order, first.order),
        ):
            if ours != theirs:
                raise ValueError(
                    f"{run.directory} and {first.directory} differ in {what}: {ours!r:.200} and {theirs!r:.200}; "
                    "give each its own report"
                )
    check_comparable(runs)
