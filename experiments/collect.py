"""Copies of finished runs for publication: numbers and settings, without images and without paths
of this machine.

    python experiments/collect.py --runs runs/compare --to docs/results/runs

Every finished run below `--runs` becomes `TO/<its path below RUNS>`. The stream must be at its path
in the run, because correct predictions follow from its labels; no image is decoded. An existing
copy is replaced only if it differs. `experiments/tables.py --results` makes tables from the copies.
"""

import dataclasses
import json
import re
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

import numpy as np
from charts import check_folder
from studies.paper.collected import Correct, check_correct, pack, read_tested

from cheem_jax.cli.arguments import parse
from cheem_jax.cli.running import run_command
from cheem_jax.core.atomic import write_atomically
from cheem_jax.data.demo import demo_stream
from cheem_jax.data.sources import plan_source
from cheem_jax.data.task import ClassSplit, select
from cheem_jax.report.finished import RunRecord
from cheem_jax.run import fingerprint, record
from cheem_jax.run.progress import Progress

Labels = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Collect:
    """Copy finished runs for publication."""

    runs: tuple[Path, ...]
    """Folders that contain runs, at any depth."""
    to: Path = Path("docs/results/runs")
    """Folder of the copies."""


def main(settings: Collect) -> int:
    """Collect the finished runs; return 1 if one of them could not be collected."""
    progress = Progress()
    labels = dict[str, Labels]()
    failed = 0
    places = set[Path]()
    check_folder("--to", settings.to)
    for folder in settings.runs:
        runs, left_out = read_tested([folder])
        for directory, why in left_out:
            progress.say(f"left out {directory}: {why}")
        for run in runs:
            below = run.directory.relative_to(folder)
            place = settings.to / (folder.name if run.directory == folder else below)
            if place in places:
                raise ValueError(
                    f"two runs would be published as {place}; collect one folder at a time, each"
                    " with its own --to"
                )
            places.add(place)
            try:
                files = files_of(run, labels)
            except (ValueError, KeyError, OSError, ImportError) as error:
                failed += 1
                progress.say(f"left out {run.directory}: {error}")
                continue
            progress.say(f"{place}: {write(place, files)}")
    if not places:
        raise ValueError(
            f"no finished run below {', '.join(map(str, settings.runs))}; expected run directories"
        )
    return int(failed > 0)


def write(place: Path, files: Mapping[str, bytes]) -> str:
    """Write the files that differ; return a description of the changes."""
    earlier = {name: (place / name).read_bytes() for name in files if (place / name).is_file()}
    changed = [name for name, content in files.items() if earlier.get(name) != content]
    place.mkdir(parents=True, exist_ok=True)
    for name in changed:
        write_atomically(place / name, files[name])
    if not earlier:
        return f"collected, {sum(map(len, files.values())) / 1000:.0f} kB"
    return f"replaced, since it differs in {', '.join(changed)}" if changed else "unchanged"


def files_of(run: RunRecord, labels: dict[str, Labels]) -> dict[str, bytes]:
    """Return the published files of a run, keyed by name; `results.json`, which marks a finished
    run, is last."""
    entries = list(record.read(run.directory))
    begin = next((entry for entry in entries if entry["event"] == "run"), {})
    if not begin.get("data"):
        raise ValueError(
            "its record does not name its images, so no prediction can be checked; run it again, or"
            " collect the folder of the run itself"
        )
    correct, correct_given = correct_predictions(run, labels_of(run, begin["data"], labels))
    check_correct(run, correct, correct_given)
    words = placeholders(begin["command"], begin["data"])
    conditions = begin.get("conditions", {})
    published = {
        "command": [words.get(word, word) for word in begin["command"]],
        "data": {
            key: words.get(value, value) if isinstance(value, str) else value
            for key, value in begin["data"].items()
        },
        "conditions": conditions,
    }
    changes = [
        fingerprint.apart(conditions, entry["conditions"])
        for entry in entries
        if entry["event"] == "continued" and "conditions" in entry
    ]
    if changed := list(dict.fromkeys(filter(None, changes))):
        published["continued"] = changed
    documents = {"record.json": published, "config.json": run.config, "results.json": run.results}
    for name, content in documents.items():
        if path := next(absolute_paths(content), None):
            raise ValueError(f"{name} would contain {path!r}, a path of this machine")
    encoded = {name: to_lines(content).encode() for name, content in documents.items()}
    return {"right.npz": pack(correct, correct_given), **encoded}


def labels_of(run: RunRecord, data: Mapping[str, Any], labels: dict[str, Labels]) -> Labels:
    """Return the labels of the test images of each task. Raises ValueError if the files changed
    since the run."""
    key = json.dumps([data, run.results["image_size"]], sort_keys=True)
    if key in labels:
        return labels[key]
    if data["stream"] == "demo":
        stream = select(demo_stream(image_size=run.results["image_size"]), data["tasks"])
        labels[key] = {task.name: task.test.labels for task in stream.tasks}
        return labels[key]
    _, plans = plan_source(
        data["stream"],
        data["tasks"],
        data_dir=None if data["data_dir"] is None else Path(data["data_dir"]),
        order=data["order"],
        seed=data["split_seed"],
        class_split=ClassSplit.of(data["class_split"]) if "class_split" in data else None,
    )
    hashes = run.results["split_sha256"]
    if changed := [plan.name for plan in plans if hashes.get(plan.name) != plan.split_sha256]:
        raise ValueError(f"files or labels changed since the run: {', '.join(changed)}")
    labels[key] = {plan.name: plan.test.labels for plan in plans}
    return labels[key]


def correct_predictions(run: RunRecord, labels: Labels) -> tuple[Correct, Correct]:
    """Return whether the task and class of each test image are correct, and whether its class is
    correct with the task ID given."""
    file = run.directory / "answers.npz"
    correct = []
    correct_given = []
    try:
        with file.open("rb") as stream, np.load(stream, allow_pickle=False) as arrays:
            for index, name in enumerate(run.order):
                truth = labels[name]
                tasks = arrays[f"chosen_task_{index}"]
                if len(truth) != len(tasks):
                    raise ValueError(
                        f"{len(tasks)} predictions for the {len(truth)} test images of {name}"
                    )
                correct_given.append(arrays[f"given_task_{index}"] == truth)
                correct.append((tasks == index) & correct_given[-1])
    except (ValueError, OSError, EOFError, KeyError, zipfile.BadZipFile) as error:
        raise ValueError(f"{file} cannot be used: {error}") from error
    return tuple(correct), tuple(correct_given)


def placeholders(command: Sequence[str], data: Mapping[str, Any]) -> dict[str, str]:
    """Return a word for each absolute path of a command line; for a path inside of the stream's
    folder, it starts with DATA."""
    stream = data["stream"]
    options = [
        ("--stream", stream),
        ("--data-dir", data.get("data_dir")),
        *zip(command, command[1:], strict=False),
    ]
    words = {}
    for option, value in options:
        if not value or not option.startswith("--") or not PurePath(value).is_absolute():
            continue
        word = re.sub(r"[-.]", "_", option.removeprefix("--").upper())
        if word == "STREAM":
            word = "DATA"
        elif PurePath(value).is_relative_to(stream) and value != stream:
            word = f"DATA/{PurePath(value).relative_to(stream).as_posix()}"
        words.setdefault(value, word)
    return words


PATH = re.compile(r"(?:^|[\s=:'\"(\[,])(?:~|/[^\s/]+|[A-Za-z]:[\\/])")
"""Start of an absolute path anywhere in a text."""


def absolute_paths(content: Any) -> Iterator[str]:
    """Yield the texts that contain an absolute path; names of classes are not searched."""
    if isinstance(content, str) and PATH.search(content):
        yield content
    elif isinstance(content, Mapping):
        for key, value in content.items():
            yield from absolute_paths(key)
            if key != "classes":
                yield from absolute_paths(value)
    elif isinstance(content, Sequence) and not isinstance(content, str):
        for value in content:
            yield from absolute_paths(value)


def to_lines(content: Mapping[str, Any]) -> str:
    """Format JSON with one line per key, and per element of a list of lists or objects, so that
    differences are readable."""

    def text(value: Any) -> str:
        if isinstance(value, list) and value and isinstance(value[0], list | dict):
            return "[\n  " + ",\n  ".join(map(json.dumps, value)) + "\n ]"
        return json.dumps(value)

    lines = (f"{json.dumps(key)}: {text(value)}" for key, value in content.items())
    return "{\n " + ",\n ".join(lines) + "\n}\n"


if __name__ == "__main__":
    run_command(main, parse(Collect, description=__doc__), computes=False)
