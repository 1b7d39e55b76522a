"""Which runs a page shows, and what their records contain besides the results."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from cheem_jax.report.finished import LeftOut, RunRecord, check_comparable, read
from cheem_jax.run import record
from cheem_jax.run.differences import leaves, summary


class Recorded(NamedTuple):
    """What the record contains of the run's own method and `results.json` does not."""

    begin: dict[str, Any]
    """The `run` entry: data, command and conditions; {} where the record cannot be read."""
    learned: tuple[dict[str, Any], ...]
    """The entry of each learned task in order; () where the record cannot be read."""
    trouble: str = ""
    """Why the record cannot be read."""


def load(folders: Sequence[Path]) -> tuple[list[RunRecord], LeftOut]:
    """All runs below the folders, finished ones first, then others and memories; and what is left out.

    Raises ValueError where there is none, or where finished ones differ in stream, order of tasks, data, weights or
    pixels.
    """
    runs, left_out = read(folders, others=True)
    if not runs:
        reasons = "; ".join(f"{directory}: {reason}" for directory, reason in left_out)
        raise ValueError(
            f"no run to show in {', '.join(map(str, folders))}{f' ({reasons})' if reasons else ''}; name a run "
            "directory with an evaluated task, such as runs/demo after `cheem demo`, a memory with a learned one, or a "
            "folder that contains some"
        )
    finished = [run for run in runs if run.is_finished]
    for run in finished[1:]:
        one, other = (
            {"stream": r.results["stream"], "backbone": r.results["backbone"], "order of tasks": r.order}
            for r in (finished[0], run)
        )
        if found := list(leaves(one, other)):
            raise ValueError(
                f"{finished[0].directory} and {run.directory} differ: {summary(found, 'values')}; give each a separate "
                "report"
            )
    check_comparable(finished)
    return runs, left_out


def record_of(run: RunRecord) -> Recorded:
    """The record of a run; where it is corrupted, why."""
    try:
        entries = record.read(run.directory)
        begin = next((entry for entry in entries if entry["event"] == "run"), {})
        own = [e for e in entries if e["event"] == "learned" and e["method"] == run.results["method"]]
        learned = tuple(sorted(own, key=lambda entry: entry["report"]["index"])[: len(run.order)])
        if [entry["report"]["name"] for entry in learned] != list(run.order):
            raise ValueError("its learned tasks are not those of the results")
    except (ValueError, KeyError, TypeError, OSError) as error:
        return Recorded({}, (), f"{error}")
    return Recorded(begin, learned)
