"""Where two runs first differ, in the order of what happened, in words."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from cheem_jax.run.differences import Leaf, dotted, find_differences
from cheem_jax.run.directory import NAME
from cheem_jax.run.record import read, read_object
from cheem_jax.run.results import Entry

CIRCUMSTANCES = frozenset(
    (
        "time",
        "seconds",
        "seconds_total",
        "compile_seconds",
        "checkpoint_seconds",
        "peak_memory_bytes",
        "compile",
        "hits",
        "misses",
        "evictions",
        "fingerprint",
        "conditions",
        "command",
        "data",
        "versions",
        "upper_bound",
        "device",
    )
)
"""What a clock, the memory, the history of a process, or the machine and who used it decide: no
result of a run."""

STORY = (
    "index",
    "name",
    "classes",
    "num_train",
    "num_val",
    "num_test",
    "similarity",
    "supernet_losses",
    "search",
    "searched",
    "validation_accuracy",
    "best_validation_accuracy",
    "score",
    "best_score",
    "architecture",
    "experts",
    "finetune_losses",
)
"""The order in which a task's report came about; everything else came later."""


class Difference(NamedTuple):
    """The first place where two runs differ, and a sentence about it."""

    place: str
    said: str
    stopped: Literal["first", "second"] | None = None
    """The run that is equal to the other one as far as it goes, if this is all there is."""

    def __str__(self) -> str:
        return self.said


def timeless(value: Any) -> Any:
    """A record's entry or results without the circumstances of the run."""
    if isinstance(value, Mapping):
        return {key: timeless(item) for key, item in value.items() if key not in CIRCUMSTANCES}
    return [timeless(item) for item in value] if isinstance(value, list | tuple) else value


def differences(first: Path, second: Path) -> Iterator[Difference]:
    """The first one of each file that is not made from another: the config, the record."""
    configs = config_of(first), config_of(second)
    for leaf in find_differences(*configs)[:1]:
        yield _different(NAME, leaf)
    if found := difference_of_records(read(first), read(second), configs[0].get("tasks", ())):
        yield found


def config_of(directory: Path) -> dict[str, Any]:
    """The settings that a run directory was begun with; raises ValueError where it is none."""
    if not (directory / NAME).exists():
        raise ValueError(
            f"{str(directory)!r} is not a run directory (it has no {NAME}); give one that a run"
            " left"
        )
    return read_object(directory / NAME)


def difference_of_records(
    first: Sequence[Entry], second: Sequence[Entry], tasks: Sequence[str]
) -> Difference | None:
    """Between the entries of two records, which are paired by what they are about; `tasks` are
    names in order."""
    left, right = _by_subject(first, tasks), _by_subject(second, tasks)
    for subject in left:
        # where the order alone differs, nothing was measured differently
        if subject in right and (found := find_differences(left[subject], right[subject])):
            return _different(subject, found[0])
    for one, other, which in ((left, right, "first"), (right, left, "second")):
        for subject in one:
            if subject in other:
                continue
            if [*one][: len(other)] == [*other]:
                stopped = "second" if which == "first" else "first"
                said = f"equal as far as both go, but the {stopped} run stopped before {subject}"
                return Difference(subject, said, stopped)
            return Difference(subject, f"{subject}: only in the record of the {which} run")
    return None


def _different(subject: str, leaf: Leaf) -> Difference:
    place = f"{subject}: {dotted(leaf.place)}"
    return Difference(place, str(leaf._replace(place=(place,))))


def _by_subject(entries: Sequence[Entry], tasks: Sequence[str]) -> dict[str, Entry]:
    """Entries by what they are about and, where one comes again, a count, each in the order in
    which it came about.

    Those of nothing but circumstances, such as that a process resumed the run, are left out.
    """
    found: dict[str, Entry] = {}
    for entry in map(timeless, entries):
        if entry.keys() <= {"event"}:
            continue
        about = subject = _subject(entry, tasks)
        count = 1
        while subject in found:
            count += 1
            subject = f"{about} ({count})"
        report = entry.pop("report", {})
        keys = sorted(report, key=lambda key: STORY.index(key) if key in STORY else len(STORY))
        found[subject] = entry | {key: report[key] for key in keys}
    return found


def _subject(entry: Entry, tasks: Sequence[str]) -> str:
    """What an entry is about."""
    index, method = (
        entry.get("index", entry.get("report", {}).get("index")),
        entry.get("method", ""),
    )
    task = (
        ""
        if index is None
        else f"task {index + 1}" + (f" {tasks[index]!r}" if index < len(tasks) else "")
    )
    match entry["event"]:
        case "run":
            return "the run's setting"
        case "learned":
            return f"{task}, {method}"
        case "evaluated":
            return f"the evaluation after {task}"
        case "upper_bound":
            return f"the upper bound of {task}"
    return ", ".join(filter(None, (f"event {entry['event']!r}", method, task)))
