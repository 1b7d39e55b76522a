"""TensorBoard event files, made from the record of a run: scalars, and images of architectures."""

import datetime
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

from cheem_jax.core.architecture import from_strings
from cheem_jax.core.settings import COLOURS
from cheem_jax.data.files import import_extra
from cheem_jax.report.table import AGNOSTIC, METHODS, UPPER_BOUNDS
from cheem_jax.run.record import NAME as RECORD
from cheem_jax.run.record import read
from cheem_jax.run.results import averages, matrices, num_tested

FOLDER, NAME = "tensorboard", "events.out.tfevents.cheem_jax"


def check_installed() -> None:
    """Raise ValueError if tensorboardX is not installed."""
    import_extra("tensorboardX", "tensorboard", "writing TensorBoard's event files")


def write_events(directory: Path) -> Path:
    """Write the events of each method to `tensorboard/METHOD/NAME` and return the folder
    `tensorboard`. Each call writes the files completely. If the record has grown since an earlier
    call, the new files begin with the bytes of the earlier files, as if events were appended.

    Raises ValueError for an unknown method in the record, because its name would be a path.
    """
    check_installed()
    from tensorboardX import RecordWriter, summary  # pyright: ignore[reportMissingImports]
    from tensorboardX.proto.event_pb2 import Event  # pyright: ignore  (generated on import)

    events = defaultdict[str, list[Any]](lambda: [Event(file_version="brain.Event:2")])
    evaluated = []
    tasks: dict[int, dict[str, Any]] = {}
    for entry in read(directory):
        evaluated += [entry] if entry["event"] == "evaluated" else []
        if entry["event"] == "learned":
            tasks[entry["report"]["index"]] = entry["report"]
        time = datetime.datetime.fromisoformat(entry["time"]).timestamp()
        for method, tag, step, value in _points(entry, evaluated, tasks):
            if method not in list(METHODS):  # it can be unhashable
                raise ValueError(
                    f"{directory / RECORD} contains the method {method!r:.40}; expected one of"
                    f" {', '.join(METHODS)}: restore the file from a copy"
                )
            # `value` is None if it was not measured or is non-finite
            if isinstance(value, int | float | np.ndarray):
                make = summary.image if isinstance(value, np.ndarray) else summary.scalar
                events[method].append(Event(wall_time=time, step=step, summary=make(tag, value)))
    for method, points in events.items():
        file = directory / FOLDER / method / NAME
        file.parent.mkdir(parents=True, exist_ok=True)
        writer = RecordWriter(str(file))
        for event in points:
            writer.write(event.SerializeToString(deterministic=True))
        writer.close()
    return directory / FOLDER


def _points(
    entry: dict[str, Any], evaluated: list[dict[str, Any]], tasks: dict[int, dict[str, Any]]
):
    """Yield the method, tag, step and value of each scalar and image of an entry. A step is the
    number of a task or of an epoch."""
    if entry["event"] == "learned":
        method, report, step = entry["method"], entry["report"], entry["report"]["index"] + 1
        for phase, seconds in report["seconds"].items():
            yield method, f"seconds/{phase}", step, seconds
        for key, value in report.items():
            for epoch, loss in enumerate(value if key.endswith("losses") else (), start=1):
                yield method, f"{key}/T{step}", epoch, loss
            yield method, key, step, value
        if architecture := report.get("architecture"):
            rgb = [list(bytes.fromhex(COLOURS[op.kind][1:])) for op in from_strings(architecture)]
            image = np.array([rgb], np.uint8).transpose(2, 0, 1)
            yield method, "architecture", step, image.repeat(32, axis=1).repeat(32, axis=2)
    for method, measured in entry.get("methods", {}).items():
        # upper bounds are given the task ID, so they have no task-agnostic accuracy
        keys = ("local_accuracy",) if method in UPPER_BOUNDS else ("accuracy", "local_accuracy")
        for key in keys:
            for task, value in enumerate(measured[key], start=1):
                yield method, f"{key}/T{task}", len(evaluated), value
        num_images = num_tested([tasks[index] for index in range(len(evaluated))])
        for key, value in averages(*matrices(evaluated, method), num_images).items():
            if not (method in UPPER_BOUNDS and key in AGNOSTIC):
                yield method, key, len(evaluated), value
    if entry["event"] == "upper_bound":
        yield "full_finetune", "local_accuracy", entry["index"] + 1, entry["test_accuracy"]
