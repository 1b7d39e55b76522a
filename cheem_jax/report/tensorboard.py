"""TensorBoard event files of a run, all from its record.

    tensorboard/cheem/events.out.tfevents.cheem_jax          one folder per method, so that curves
    lie over each other tensorboard/frozen_linear/events.out.tfevents.cheem_jax

Equal records give equal bytes, and a longer record gives the same ones and more, which an open
TensorBoard follows.
"""

import datetime
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import filelock
import numpy as np

from cheem_jax.report.memories import as_of_run
from cheem_jax.report.table import UPPER_BOUNDS
from cheem_jax.run.directory import NAME as CONFIG
from cheem_jax.run.record import read, read_object
from cheem_jax.run.results import averages, matrices

FOLDER, NAME = "tensorboard", "events.out.tfevents.cheem_jax"
AVERAGES = {
    "average/accuracy": "average_accuracy",
    "average/given_accuracy": "local_average_accuracy",
    "average/forgetting": "average_forgetting",
}
"""Tags, and the names in the results."""
COSTS = (
    "flops_method", "flops_executed", "flops_explicit",
    "params_added", "params_added_percent", "params_learned", "params_stored",
)  # fmt: skip


class Point(NamedTuple):
    """A number, or a text in Markdown, of one method; after task i the step is i + 1."""

    method: str
    tag: str
    value: float | str
    step: int
    time: float
    """Seconds since 1970."""


def check_installed() -> None:
    """Raises ValueError where what writes event files is missing."""
    try:
        import tensorboardX  # noqa: F401  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ValueError(
            f"TensorBoard's event files need the package tensorboardX ({error}); pip install"
            " 'cheem_jax[tensorboard]'"
        ) from error


def write_events(directory: Path) -> Path:
    """Write the event files of a run, finished or not, and return their folder.

    Raises ValueError where the record is missing or corrupted, or tensorboardX is not installed.
    """
    check_installed()
    entries = read(directory)
    setting = next((entry for entry in entries if entry["event"] == "run"), None)
    if setting is None:
        raise ValueError(
            f"{str(directory)!r} has no record of a run yet; give the folder of one, as its"
            " --run-dir said"
        )
    try:
        points = list(points_of(entries))
    except (KeyError, TypeError, IndexError) as error:
        raise ValueError(
            f"the record in {str(directory)!r} lacks what event files need ({error!r})"
        ) from error
    folder = directory / FOLDER
    folder.mkdir(exist_ok=True)
    with filelock.FileLock(folder / ".lock"):  # the run itself may write them at this moment
        for method in dict.fromkeys((setting["method"], *(point.method for point in points))):
            own = [point for point in points if point.method == method]
            config = _config(directory, setting) if method == setting["method"] else None
            file = folder / method / NAME
            file.parent.mkdir(parents=True, exist_ok=True)
            _write(file, own, config, _seconds(setting))
    return folder


def points_of(entries: Sequence[Mapping[str, Any]]) -> Iterator[Point]:
    """All numbers of a record, in its order."""
    evaluated: list[Mapping[str, Any]] = []
    names: dict[int, str] = {}
    for entry in entries:
        time = _seconds(entry)
        match entry["event"]:
            case "learned":
                report = entry["report"]
                names[report["index"]] = f"T{report['index'] + 1}_{report['name']}"
                for tag, value, step in _learned(report, names[report["index"]]):
                    yield Point(entry["method"], tag, value, step, time)
            case "evaluated":
                evaluated.append(entry)
                step = len(evaluated)
                yield Point(
                    next(iter(entry["methods"])), "seconds/evaluate", entry["seconds"], step, time
                )
                for method in entry["methods"]:
                    for tag, value in _measured(evaluated, method, names):
                        yield Point(method, tag, value, step, time)
            case "upper_bound":
                tag = f"given_accuracy/T{entry['index'] + 1}_{entry['name']}"
                yield Point("full_finetune", tag, entry["test_accuracy"], entry["index"] + 1, time)
                yield Point(
                    "full_finetune", "seconds/bound", entry["seconds"], entry["index"] + 1, time
                )


def _learned(report: Mapping[str, Any], name: str) -> Iterator[tuple[str, float | str, int]]:
    """Tag, value and step of all that is known when a task is learned; losses are over epochs."""
    step = report["index"] + 1
    for key, values in report.items():
        if key.endswith("losses") and isinstance(values, list):
            phase = key.removesuffix("losses").rstrip("_") or "train"
            for epoch, loss in enumerate(values, start=1):
                if loss is not None:  # was not finite
                    yield f"loss_{phase}/{name}", loss, epoch
    for key in COSTS:
        if report.get(key) is not None:
            yield f"cost/{key}", report[key], step
    for phase, seconds in report["seconds"].items():
        yield f"seconds/{phase}", seconds, step
    if architecture := report.get("architecture"):
        yield "architecture", f"{name}: {', '.join(architecture)}", step


def _measured(
    evaluated: Sequence[Mapping[str, Any]], method: str, names: Mapping[int, str]
) -> Iterator[tuple[str, float]]:
    """Accuracies of every task so far in [0, 1], task-agnostic and with the task ID given, and
    their averages.

    What a memory did not measure is left out, and an average that would need it.
    """
    routed, given = matrices(evaluated, method)
    accuracy = given if method in UPPER_BOUNDS else routed
    for index, name in names.items():
        if not np.isnan(accuracy[-1, index]):
            yield f"accuracy/{name}", float(accuracy[-1, index])
            yield f"given_accuracy/{name}", float(given[-1, index])
    found = averages(accuracy, given)
    for tag, key in AVERAGES.items():
        if (value := found[key]) is not None:
            yield tag, value


def _config(directory: Path, setting: Mapping[str, Any]) -> dict[str, Any]:
    """What the run was asked for: its settings and its configuration without hashes."""
    config = as_of_run(read_object(directory / CONFIG))
    chosen = {
        key: setting.get(key) for key in ("method", "preset", "executor", "precision", "device")
    }
    return chosen | {key: value for key, value in config.items() if not key.endswith("sha256")}


def _write(
    file: Path, points: Sequence[Point], config: Mapping[str, Any] | None, begun: float
) -> None:
    from tensorboardX import RecordWriter, summary  # pyright: ignore[reportMissingImports]
    from tensorboardX.proto.event_pb2 import Event  # pyright: ignore  (made when it is imported)

    events = [Event(wall_time=begun, file_version="brain.Event:2")]
    if config is not None:
        text = f"```json\n{json.dumps(config, indent=1)}\n```"
        events.append(Event(wall_time=begun, step=0, summary=summary.text("config", text)))
    for point in points:
        tag = re.sub(r"[^-/\w.]", "_", point.tag)
        message = (
            summary.text(tag, point.value)
            if isinstance(point.value, str)
            else summary.scalar(tag, point.value)
        )
        events.append(Event(wall_time=point.time, step=point.step, summary=message))
    # in place: whoever has it open reads on, since a longer record begins with the same bytes
    writer = RecordWriter(str(file))
    for event in events:
        writer.write(event.SerializeToString(deterministic=True))
    writer.close()


def _seconds(entry: Mapping[str, Any]) -> float:
    return datetime.datetime.fromisoformat(entry["time"]).timestamp()
