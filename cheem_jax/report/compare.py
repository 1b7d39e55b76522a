"""Where two runs first differ, in the order of what happened, in words."""

import enum
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from cheem_jax.run.differences import Place, dotted, leaves, sentence, settings_apart
from cheem_jax.run.record import read, read_object

Entry = Mapping[str, Any]
NAME = "config.json"

CIRCUMSTANCES = frozenset((
    "time", "seconds", "seconds_total", "compile_seconds", "checkpoint_seconds", "peak_memory_bytes",
    "compile", "hits", "misses", "evictions", "fingerprint", "conditions", "command", "data", "versions", "upper_bound",
    "device",
))  # fmt: skip
"""What a clock, the memory, the history of a process, or the machine and who used it decide: no result of a run."""

STORY = (
    "index", "name", "classes", "num_train", "num_val", "num_test", "similarity", "supernet_losses", "search",
    "searched", "validation_accuracy", "best_validation_accuracy", "architecture", "experts", "finetune_losses",
)  # fmt: skip
"""The order in which a task's report came about; everything else came later."""


class Absent(enum.Enum):
    """What a run lacks: an entry of the record, or all that the other one continues with."""

    ENTRY = enum.auto()
    REST = enum.auto()


class Difference(NamedTuple):
    """The first place where two runs differ, and the value in each; as text a sentence."""

    place: str
    first: Any
    second: Any

    @property
    def stopped(self) -> Literal["first", "second"] | None:
        """The run that is equal to the other one as far as it goes, if this is all there is."""
        return "first" if self.first is Absent.REST else "second" if self.second is Absent.REST else None

    def __str__(self) -> str:
        if self.stopped:
            return f"equal as far as both go, but the {self.stopped} run stopped before {self.place}"
        if Absent.ENTRY in self:
            return f"{self.place}: only in the record of the {'second' if self.first is Absent.ENTRY else 'first'} run"
        return sentence(self.place, self.first, self.second)


def timeless(value: Any) -> Any:
    """A record's entry or results without the circumstances of the run."""
    if isinstance(value, Mapping):
        return {key: timeless(item) for key, item in value.items() if key not in CIRCUMSTANCES}
    return [timeless(item) for item in value] if isinstance(value, list | tuple) else value


def differences(first: Path, second: Path) -> Iterator[Difference]:
    """The first one of each file: the config, the record, the results."""
    configs = config_of(first), config_of(second)
    for leaf in settings_apart(*configs)[:1]:
        yield Difference(f"{NAME}: {dotted(leaf.place)}", leaf.first, leaf.second)
    in_record = difference_of_records(read(first), read(second), configs[0].get("tasks", ()))
    if in_record:
        yield in_record
    if in_record is None or not in_record.stopped:
        if found := difference_of_results(_results(first), _results(second)):
            yield found


def config_of(directory: Path) -> dict[str, Any]:
    """The settings that a run directory was begun with; raises ValueError where it is none."""
    if not (directory / NAME).exists():
        raise ValueError(f"{str(directory)!r} is not a run directory (it has no {NAME}); give one that a run left")
    return read_object(directory / NAME)


def difference_of_records(first: Sequence[Entry], second: Sequence[Entry], tasks: Sequence[str]) -> Difference | None:
    """Between the entries of two records, which are paired by event, method and task; `tasks` are names in order."""
    left, right = _paired(first), _paired(second)
    while left and right:
        mine, other = next(iter(left)), next(iter(right))
        if other not in left:
            return Difference(_subject(other, tasks), Absent.ENTRY, right[other])
        if mine not in right:
            return Difference(_subject(mine, tasks), left[mine], Absent.ENTRY)
        # where the order alone differs, nothing was measured differently
        one, two = _as_it_happened(left.pop(mine)), _as_it_happened(right.pop(mine))
        if found := difference_of_values(one, two, _subject(mine, tasks)):
            return found
    for key, entry in left.items():
        return Difference(_subject(key, tasks), entry, Absent.REST)
    for key, entry in right.items():
        return Difference(_subject(key, tasks), Absent.REST, entry)
    return None


def difference_of_results(first: Any, second: Any) -> Difference | None:
    """Between the contents of two `results.json`; None is a missing file."""
    if (first is None) != (second is None):
        left, right = (Absent.REST, second) if first is None else (first, Absent.REST)
        return Difference("results.json was written", left, right)
    return difference_of_values(timeless(first), timeless(second), "results.json")


def difference_of_values(first: Any, second: Any, subject: str) -> Difference | None:
    """Between two JSON values of the subject, in the order of the first."""
    leaf = next(leaves(first, second), None)
    return None if leaf is None else Difference(f"{subject}: {dotted(leaf.place)}", leaf.first, leaf.second)


def _as_it_happened(entry: Entry) -> Entry:
    """An entry with the values of its report in the order in which they came about."""
    report = entry.get("report", {})
    keys = sorted(report, key=lambda key: STORY.index(key) if key in STORY else len(STORY))
    return {key: value for key, value in entry.items() if key != "report"} | {key: report[key] for key in keys}


def _paired(entries: Sequence[Entry]) -> dict[Place, Entry]:
    """Entries by event, method, task and, where one comes again, a count.

    Those of nothing but circumstances, such as that a process resumed the run, are left out.
    """
    found: dict[Place, Entry] = {}
    for entry in map(timeless, entries):
        if entry.keys() <= {"event"}:
            continue
        index = entry.get("index", entry.get("report", {}).get("index", -1))
        key, count = (entry["event"], entry.get("method", "") if entry["event"] != "run" else "", index), 0
        while (*key, count) in found:
            count += 1
        found[*key, count] = entry
    return found


def _subject(key: Place, tasks: Sequence[str]) -> str:
    """What an entry is about."""
    event, method, index, count = key
    again = f" ({int(count) + 1})" if count else ""
    task = _task(index, tasks)
    match event:
        case "run":
            return f"the run's setting{again}"
        case "learned":
            return f"{task}, {method}{again}"
        case "evaluated":
            return f"the evaluation after {task}{again}"
        case "upper_bound":
            return f"the upper bound of {task}{again}"
    parts = [f"event {event!r}{again}", *([f"method {method}"] if method else []), *([task] if index != -1 else [])]
    return ", ".join(parts)


def _task(index: Any, tasks: Sequence[str]) -> str:
    number = f"task {index + 1}"
    return f"{number} {tasks[index]!r}" if 0 <= index < len(tasks) else number


def _results(directory: Path) -> dict[str, Any] | None:
    file = directory / "results.json"
    return read_object(file) if file.exists() else None
