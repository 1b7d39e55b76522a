"""Find the first difference between two runs, in the order in which the values were recorded."""

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
"""Keys whose values describe the circumstances of a run, such as times, memory use and the machine.
They are not results."""

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
"""Keys of a task's report in the order in which their values are measured. The values of other keys
are measured later."""


class Difference(NamedTuple):
    """The first difference between two runs, and a sentence about it."""

    place: str
    text: str
    stopped: Literal["first", "second"] | None = None
    """The run that stopped earlier, if there is no other difference."""

    def __str__(self) -> str:
        return self.text


def timeless(value: Any) -> Any:
    """Return an entry of a record, or the results of a run, without the values that describe the
    circumstances of the run."""
    if isinstance(value, Mapping):
        return {key: timeless(item) for key, item in value.items() if key not in CIRCUMSTANCES}
    return [timeless(item) for item in value] if isinstance(value, list | tuple) else value


def differences(first: Path, second: Path) -> Iterator[Difference]:
    """Yield the first difference between the configs of two run directories, then the first
    difference between their records."""
    configs = read_config(first), read_config(second)
    for leaf in find_differences(*configs)[:1]:
        yield _different(NAME, leaf)
    if difference := difference_of_records(read(first), read(second), configs[0].get("tasks", ())):
        yield difference


def read_config(directory: Path) -> dict[str, Any]:
    """Read the config in a run directory. Raises ValueError if the directory has no config."""
    if not (directory / NAME).exists():
        raise ValueError(
            f"{str(directory)!r} is not a run directory (it has no {NAME}); give the value of a"
            " run's --run-dir"
        )
    return read_object(directory / NAME)


def difference_of_records(
    first: Sequence[Entry], second: Sequence[Entry], tasks: Sequence[str]
) -> Difference | None:
    """Find the first difference between two records. Entries of the two records that have the same
    subject, such as a task and a method, are compared. `tasks` contains the task names in learning
    order."""
    first_entries, second_entries = _by_subject(first, tasks), _by_subject(second, tasks)
    for subject in first_entries:
        # Entries with the same subject can have different positions in the two records.
        if subject in second_entries and (
            leaves := find_differences(first_entries[subject], second_entries[subject])
        ):
            return _different(subject, leaves[0])
    for one, other, which in (
        (first_entries, second_entries, "first"),
        (second_entries, first_entries, "second"),
    ):
        for subject in one:
            if subject in other:
                continue
            if [*one][: len(other)] == [*other]:
                stopped = "second" if which == "first" else "first"
                text = f"equal up to where the {stopped} run stopped, before {subject}"
                return Difference(subject, text, stopped)
            return Difference(subject, f"{subject}: only in the record of the {which} run")
    return None


def _different(subject: str, leaf: Leaf) -> Difference:
    place = f"{subject}: {dotted(leaf.place)}"
    return Difference(place, str(leaf._replace(place=(place,))))


def _by_subject(entries: Sequence[Entry], tasks: Sequence[str]) -> dict[str, Entry]:
    """Return the entries of a record in order, keyed by subject, such as a task and a method. If a
    subject is repeated, a number is appended to the key.

    Entries that contain only circumstances are omitted, such as the entry of a process that resumed
    the run.
    """
    entries_by_subject: dict[str, Entry] = {}
    for entry in map(timeless, entries):
        if entry.keys() <= {"event"}:
            continue
        about = subject = _subject(entry, tasks)
        count = 1
        while subject in entries_by_subject:
            count += 1
            subject = f"{about} ({count})"
        report = entry.pop("report", {})
        keys = sorted(report, key=lambda key: STORY.index(key) if key in STORY else len(STORY))
        entries_by_subject[subject] = entry | {key: report[key] for key in keys}
    return entries_by_subject


def _subject(entry: Entry, tasks: Sequence[str]) -> str:
    """Name the subject of an entry, such as a task and a method."""
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
