"""Which runs a page shows, and what their records contain besides the results."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from cheem_jax.report.finished import MEMORY, RunRecord, check_comparable, numbers_of, read
from cheem_jax.report.memories import as_of_run, is_memory
from cheem_jax.report.table import METHODS
from cheem_jax.run import record
from cheem_jax.run.differences import leaves, summary
from cheem_jax.run.record import to_json
from cheem_jax.run.results import results_of


class Loaded(NamedTuple):
    """The runs of a page, finished ones first, then others and memories; and folders left out, with the reason."""

    runs: tuple[RunRecord, ...]
    left_out: tuple[tuple[Path, str], ...]


class Recorded(NamedTuple):
    """What the record contains of the run's own method and `results.json` does not."""

    begin: dict[str, Any]
    """The `run` entry: data, command and conditions; {} where the record cannot be read."""
    learned: tuple[dict[str, Any], ...]
    """The entry of each learned task in order; () where the record cannot be read."""
    trouble: str = ""
    """Why the record cannot be read."""


def load(folders: Sequence[Path]) -> Loaded:
    """All runs below the folders, unfinished ones as far as they are.

    Raises ValueError where there is none, or where finished ones differ in stream, order of tasks, data, weights or
    pixels.
    """
    for folder in folders:
        if not folder.is_dir():
            raise ValueError(f"{str(folder)!r} is not a folder; expected a run directory, or a folder of several")
    runs, not_finished = read(folders)
    left_out = []
    for directory, reason in not_finished:
        run = _as_far_as_it_is(directory) if reason.startswith("unfinished") or reason == MEMORY else reason
        if isinstance(run, RunRecord):
            runs.append(run)
        else:
            left_out.append((directory, run))
    for run in [run for run in runs if run.results["method"] not in METHODS]:
        runs.remove(run)
        known = ", ".join(METHODS)
        left_out.append((run.directory, f"corrupted: its method is {run.results['method']!r:.40}, known are {known}"))
    if not runs:
        where = ", ".join(str(folder) for folder in folders)
        reasons = "; ".join(f"{directory}: {reason}" for directory, reason in left_out)
        raise ValueError(
            f"no run to show in {where or 'no folder'}{f' ({reasons})' if reasons else ''}; name a run directory with "
            "an evaluated task, such as runs/demo after `cheem demo`, a memory with a learned one, or a folder that "
            "contains some"
        )
    _check_one_table([run for run in runs if is_finished(run)])
    return Loaded(tuple(runs), tuple(left_out))


def is_finished(run: RunRecord) -> bool:
    """Whether every task of the stream was learned and evaluated; a memory never is: there may be another task."""
    return not run.is_memory and len(run.order) == len(run.config["tasks"])


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


def _as_far_as_it_is(directory: Path) -> RunRecord | str:
    """An unfinished run or a memory, or why it cannot be shown."""
    try:
        config, entries = record.read_object(directory / "config.json"), record.read(directory)
        if is_memory(config) and config.get("forgetting"):
            return (
                f"the memory is forgetting {config['forgetting']['name']!r}, or was stopped while it did: the next "
                "`cheem learn` or `cheem forget` finishes that"
            )
        if not any(entry["event"] == "evaluated" for entry in entries):
            return _nothing_yet(directory, config)
        run = RunRecord(directory, to_json(results_of(entries)), as_of_run(config))
        if not run.is_memory:
            numbers_of(run.results)  # a run measures every task
        return run if len(run.order) <= len(config["tasks"]) else "corrupted (it contains more tasks than its stream)"
    except (ValueError, KeyError, TypeError, OSError) as error:
        return f"corrupted ({error!r:.300})"


def _nothing_yet(directory: Path, config: dict[str, Any]) -> str:
    if not is_memory(config):
        return "unfinished, and no task is evaluated yet: the command that began the run resumes it"
    if config.get("learning"):
        return f"a memory with an interrupted first task {config['learning']['name']!r}: its `cheem learn` resumes it"
    return f"a memory that has learned no task yet: `cheem learn {directory} FOLDER` adds one"


def _check_one_table(runs: Sequence[RunRecord]) -> None:
    """Raises ValueError where finished runs cannot share the page's comparison."""
    for run in runs[1:]:
        one, other = (
            {"stream": r.results["stream"], "backbone": r.results["backbone"], "order of tasks": r.order}
            for r in (runs[0], run)
        )
        if found := list(leaves(one, other)):
            raise ValueError(
                f"{runs[0].directory} and {run.directory} differ: {summary(found, 'values')}; give each a separate "
                "report"
            )
    check_comparable(runs)
