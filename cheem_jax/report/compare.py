"""Where two runs first differ, in the order of what happened, told for people."""

import enum
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from cheem_jax.report.earlier import side_by_side
from cheem_jax.report.record import read

Entry = Mapping[str, Any]
Place = tuple[str | int, ...]

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
"""The order in which a task's report came about; whatever else it holds came later."""


class Missing(enum.Enum):
    """What a side of a difference lacks: one value, an entry of the record, or all that the other one goes on with."""

    VALUE = "missing"
    ENTRY = "without that entry"
    REST = "stopped"


class Difference(NamedTuple):
    """The first place where two runs differ, and what each says; as text a sentence."""

    place: str
    first: Any
    second: Any

    @property
    def stopped(self) -> Literal["first", "second"] | None:
        """The run that is equal to the other one as far as it goes, if this is all there is."""
        return "first" if self.first is Missing.REST else "second" if self.second is Missing.REST else None

    def __str__(self) -> str:
        if self.stopped:
            return f"equal as far as both go, but the {self.stopped} run stopped before {self.place}"
        if Missing.ENTRY in self:
            return f"{self.place}: only the {'second' if self.first is Missing.ENTRY else 'first'} run tells of it"
        first, second = _told(self.first, self.second)
        return f"{self.place} is {first} there and {second} here"


def timeless(value: Any) -> Any:
    """A record's entry or results without the circumstances of the run."""
    if isinstance(value, Mapping):
        return {key: timeless(item) for key, item in value.items() if key not in CIRCUMSTANCES}
    return [timeless(item) for item in value] if isinstance(value, list | tuple) else value


def first_difference(first: Path, second: Path) -> Difference | None:
    """Between two run directories; None where they tell the same."""
    return next(differences(first, second), None)


def differences(first: Path, second: Path) -> Iterator[Difference]:
    """The first one of each file: the config, the record, the results."""
    configs = side_by_side(config_of(first), config_of(second))
    if found := difference_of_values(configs[0], configs[1], "config.json"):
        yield found
    in_record = difference_of_records(read(first), read(second), configs[0].get("tasks", ()))
    if in_record:
        yield in_record
    if in_record is None or not in_record.stopped:
        results = _read_json(first / "results.json"), _read_json(second / "results.json")
        if found := difference_of_results(results[0], results[1]):
            yield found


def config_of(directory: Path) -> dict[str, Any]:
    """What a run directory was begun with; raises ValueError where it is none."""
    config = _read_json(directory / "config.json")
    if config is None:
        raise ValueError(f"{str(directory)!r} is no run directory (it has no config.json); give one that a run left")
    return config


def difference_of_records(first: Sequence[Entry], second: Sequence[Entry], tasks: Sequence[str]) -> Difference | None:
    """Between the entries of two records, which are paired by what they tell of; `tasks` are names in order."""
    left, right = _paired(first), _paired(second)
    while left and right:
        mine, other = next(iter(left)), next(iter(right))
        if other not in left:
            return Difference(_subject(other, tasks), Missing.ENTRY, right[other])
        if mine not in right:
            return Difference(_subject(mine, tasks), left[mine], Missing.ENTRY)
        # where the order alone differs, nothing was measured differently
        pair = left.pop(mine), right.pop(mine)
        if found := _first_leaf(*pair, lambda place, key=mine: _words(key, place, tasks)):
            return found
    for key, entry in left.items():
        return Difference(_subject(key, tasks), entry, Missing.REST)
    for key, entry in right.items():
        return Difference(_subject(key, tasks), Missing.REST, entry)
    return None


def difference_of_results(first: Any, second: Any) -> Difference | None:
    """Between what two `results.json` hold; None stands for a file that is not there."""
    if (first is None) != (second is None):
        sides = (Missing.REST, second) if first is None else (first, Missing.REST)
        return Difference("results.json was written", *sides)
    return difference_of_values(timeless(first), timeless(second), "results.json")


def difference_of_values(first: Any, second: Any, file: str) -> Difference | None:
    """Between two JSON values, leaf by leaf in the order of the first."""
    return _first_leaf(first, second, lambda place: f"{file}: {_dotted(place)}" if place else file)


def _paired(entries: Sequence[Entry]) -> dict[Place, Entry]:
    """Entries under what they tell of: event, method, task and, where the same is told again, a count.

    Those of nothing but circumstances, such as that a process went on with the run, are left out.
    """
    found: dict[Place, Entry] = {}
    for entry in map(timeless, entries):
        if entry.keys() <= {"event"}:
            continue
        report = entry.get("report", {})
        index = entry.get("index", report.get("index", -1) if isinstance(report, Mapping) else -1)
        key, count = (entry["event"], entry.get("method", "") if entry["event"] != "run" else "", index), 0
        while (*key, count) in found:
            count += 1
        found[*key, count] = entry
    return found


def _first_leaf(first: Any, second: Any, words: Callable[[Place], str], place: Place = ()) -> Difference | None:
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        keys = dict.fromkeys((*first, *second))
        if place == ("report",):
            keys = sorted(keys, key=lambda key: STORY.index(key) if key in STORY else len(STORY))
        pairs = [(key, first.get(key, Missing.VALUE), second.get(key, Missing.VALUE)) for key in keys]
    elif isinstance(first, list) and isinstance(second, list):
        longest = range(max(len(first), len(second)))
        pairs = [
            (i, *(side[i] if i < len(side) else Missing.VALUE for side in (first, second)))
            for i in longest
        ]  # fmt: skip
    else:
        return None if first == second else Difference(words(place), first, second)
    for key, one, other in pairs:
        if found := _first_leaf(one, other, words, (*place, key)):
            return found
    return None


def _subject(key: Place, tasks: Sequence[str]) -> str:
    """What an entry tells of."""
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


def _words(key: Place, place: Place, tasks: Sequence[str]) -> str:
    """A value of an entry in the words of the method; of what it does not know, the field's name."""
    subject = _subject(key, tasks)

    def task(index: Any) -> str:
        return _task(index, tasks)

    match place:
        case ("report", "similarity", row, block):
            earlier = "the backbone's own task" if row == 0 else task(int(row) - 1)
            return f"{subject}: similarity to {earlier} at block {_number(block)}"
        case ("report", "supernet_losses", epoch):
            return f"{subject}: supernet loss of epoch {_number(epoch)}"
        case ("report", "searched"):
            return f"{subject}: the number of networks scored"
        case ("report", "validation_accuracy"):
            return f"{subject}: validation accuracy of the network chosen"
        case ("report", "best_validation_accuracy"):
            return f"{subject}: best validation accuracy of the search"
        case ("report", "architecture", block):
            return f"{subject}: architecture at block {_number(block)}"
        case ("report", "finetune_losses", epoch):
            return f"{subject}: fine-tuning loss of epoch {_number(epoch)}"
        case ("methods", method, "accuracy", index):
            return f"{subject}, {method}: accuracy on {task(index)}"
        case ("methods", method, "local_accuracy", index):
            return f"{subject}, {method}: accuracy on {task(index)}, the task given,"
        case ("methods", method, "routing", row, column):
            return f"{subject}, {method}: the share of {task(row)} that is taken for {task(column)}"
        case ("checkpoints", method, index):
            return f"{subject}, {method}: content hash of {task(index)}"
        case ("report" | "methods", *rest) if rest:
            return f"{subject}: {_dotted(tuple(rest))}"
        case ():
            return subject
    return f"{subject}: {_dotted(place)}"


def _task(index: Any, tasks: Sequence[str]) -> str:
    number = f"task {_number(index)}"
    return f"{number} {tasks[index]!r}" if isinstance(index, int) and 0 <= index < len(tasks) else number


def _number(position: Any) -> Any:
    """People count from one."""
    return position + 1 if isinstance(position, int) else position


def _dotted(place: Place) -> str:
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place)
    return text.removeprefix(".")


def _told(first: Any, second: Any) -> tuple[str, str]:
    """Both values with as many digits, or as much of the text, as tells them apart."""
    if isinstance(first, float) and isinstance(second, float):
        for digits in range(5, 18):
            pair = f"{first:.{digits}g}", f"{second:.{digits}g}"
            if pair[0] != pair[1]:
                return pair
    one, other = _text(first), _text(second)
    if Missing.VALUE in (first, second) or max(len(one), len(other)) <= 40:
        return _cut(one, 0), _cut(other, 0)
    at = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    begin = max(at - 12, 0) if at > 20 else 0
    return _cut(one, begin), _cut(other, begin)


def _text(value: Any) -> str:
    return value.value if isinstance(value, Missing) else json.dumps(value)


def _cut(text: str, begin: int) -> str:
    end = begin + (40 if begin == 0 and len(text) <= 40 else 25)
    return ("…" if begin else "") + text[begin:end] + ("…" if end < len(text) else "")


def _read_json(file: Path) -> Any:
    if not file.exists():
        return None
    try:
        return json.loads(file.read_text())
    except ValueError as error:
        raise ValueError(f"{file} is no JSON ({error}); restore it from a copy") from error
