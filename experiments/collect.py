"""Copies of finished runs that may be published: numbers and settings, no image, no place of one
machine.

    python experiments/collect.py --runs runs/compare --to docs/results/runs

Every finished run below `--runs` becomes `TO/<its folder below RUNS>`. The stream has to be where
the run found it, since which answers were right follows from its labels; no image is decoded. A run
that is there already is replaced only where it differs. `experiments/tables.py --results` makes the
page.
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
from studies.paper.collected import ByTask, check_right, packed

from cheem_jax.cli.main import parse, run_command
from cheem_jax.core.atomic import write_atomically
from cheem_jax.data.demo import demo_stream
from cheem_jax.data.sources import plan_source
from cheem_jax.data.task import select
from cheem_jax.report.finished import RunRecord, read
from cheem_jax.run import fingerprint, record
from cheem_jax.run.progress import Progress

Labels = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Collect:
    """Copies of finished runs that may be published."""

    runs: tuple[Path, ...]
    """Folders with runs, at any depth."""
    to: Path = Path("docs/results/runs")
    """Where the copies are kept."""


def main(settings: Collect) -> int:
    """Collect what is finished; 1 where a finished run could not be collected."""
    progress = Progress()
    opened = dict[str, Labels]()
    failed = 0
    done = set[Path]()
    check_folder("--to", settings.to)
    for folder in settings.runs:
        runs, left_out = read([folder])
        for directory, why in left_out:
            progress.say(f"left out {directory}: {why}")
        for run in runs:
            place = settings.to / (
                run.directory.relative_to(folder) if run.directory != folder else folder.name
            )
            if place in done:
                raise ValueError(
                    f"two runs would be published as {place}; collect one folder at a time, each"
                    " --to its own"
                )
            done.add(place)
            try:
                files = files_of(run, opened)
            except (ValueError, KeyError, OSError, ImportError) as error:
                failed += 1
                progress.say(f"left out {run.directory}: {error}")
                continue
            progress.say(f"{place}: {write(place, files)}")
    return int(failed > 0)


def write(place: Path, files: Mapping[str, bytes]) -> str:
    """Write what differs and say what was done."""
    there = {name: (place / name).read_bytes() for name in files if (place / name).is_file()}
    changed = [name for name, content in files.items() if there.get(name) != content]
    place.mkdir(parents=True, exist_ok=True)
    for name in changed:
        write_atomically(place / name, files[name])
    if not there:
        return f"collected, {sum(map(len, files.values())) / 1000:.0f} kB"
    return f"replaced, since it differs in {', '.join(changed)}" if changed else "unchanged"


def files_of(run: RunRecord, opened: dict[str, Labels]) -> dict[str, bytes]:
    """What is published of a run, by file name; `results.json`, which makes a folder a finished
    run, comes last."""
    entries = list(record.read(run.directory))
    begin = next(entry for entry in entries if entry["event"] == "run")
    if not begin.get("data"):
        raise ValueError(
            "its record does not say where its images are, so no answer can be checked; run it"
            " again"
        )
    right, given = right_of(run, labels_of(run, begin["data"], opened))
    check_right(run, right, given)
    names = places_of(begin["command"], begin["data"])
    told = {
        "command": [names.get(word, word) for word in begin["command"]],
        # of a path, a number or a list of tasks only a path may have a word
        "data": {
            key: names.get(v, v) if isinstance(v, str) else v for key, v in begin["data"].items()
        },
        "conditions": begin.get("conditions", {}),
    }
    continued = [
        entry["conditions"]
        for entry in entries
        if entry["event"] == "continued" and "conditions" in entry
    ]
    if changed := dict.fromkeys(
        filter(None, (fingerprint.apart(told["conditions"], later) for later in continued))
    ):
        told["continued"] = list(changed)
    documents = {"record.json": told, "config.json": run.config, "results.json": run.results}
    for name, content in documents.items():
        if leaked := next(leaks(content), None):
            raise ValueError(
                f"{name} would hold {leaked!r}, a place on this machine; it is not published"
            )
    return {
        "right.npz": packed(right, given),
        **{name: lines(content).encode() for name, content in documents.items()},
    }


def labels_of(run: RunRecord, data: Mapping[str, Any], opened: dict[str, Labels]) -> Labels:
    """Labels of the test images by task; ValueError where other files are there now than the run
    has seen."""
    key = json.dumps([data, run.results["image_size"]], sort_keys=True)
    if key not in opened:
        if data["stream"] == "demo":
            stream = select(demo_stream(image_size=run.results["image_size"]), data["tasks"])
            opened[key] = {task.name: task.test.labels for task in stream.tasks}
        else:
            data_dir = None if data["data_dir"] is None else Path(data["data_dir"])
            _, plans = plan_source(
                data["stream"],
                data["tasks"],
                data_dir=data_dir,
                order=data["order"],
                seed=data["split_seed"],
            )
            wanted = run.results["split_sha256"]
            if changed := [
                plan.name for plan in plans if wanted.get(plan.name) != plan.split_sha256
            ]:
                raise ValueError(
                    "other files or labels are there now than the run has seen:"
                    f" {', '.join(changed)}"
                )
            opened[key] = {plan.name: plan.test.labels for plan in plans}
    return opened[key]


def right_of(run: RunRecord, labels: Labels) -> tuple[ByTask, ByTask]:
    """Which answers were right: task and class found, and the class with the task ID given."""
    file = run.directory / "answers.npz"
    right = []
    given = []
    try:
        with file.open("rb") as stream, np.load(stream, allow_pickle=False) as held:
            for index, name in enumerate(run.order):
                truth = labels[name]
                chosen = held[f"chosen_task_{index}"]
                if len(truth) != len(chosen):
                    raise ValueError(
                        f"{len(chosen)} answers for the {len(truth)} test images of {name}"
                    )
                right.append((chosen == index) & (held[f"chosen_class_{index}"] == truth))
                given.append(held[f"given_task_{index}"] == truth)
    except (ValueError, OSError, EOFError, KeyError, zipfile.BadZipFile) as error:
        raise ValueError(f"{file} cannot be used: {error}") from error
    return tuple(right), tuple(given)


PLACEHOLDERS = {
    "--stream": "DATA",
    "--weights": "WEIGHTS",
    "--run-dir": "RUN_DIR",
    "--data-dir": "DATA_DIR",
}


def places_of(command: Sequence[str], data: Mapping[str, Any]) -> dict[str, str]:
    """Absolute paths of a command line, and the word for each: what lies in the stream's folder is
    named from there."""
    stream = data["stream"]
    found = {}
    told = [
        ("--stream", stream),
        ("--data-dir", data.get("data_dir")),
        *zip(command, command[1:], strict=False),
    ]
    for option, value in told:
        if (
            value
            and option.startswith("--")
            and PurePath(value).is_absolute()
            and value not in found
        ):
            word = PLACEHOLDERS.get(
                option, option.lstrip("-").upper().replace("-", "_").replace(".", "_")
            )
            is_inside = value != stream and PurePath(value).is_relative_to(stream)
            found[value] = (
                f"DATA/{PurePath(value).relative_to(stream).as_posix()}" if is_inside else word
            )
    return found


PLACE = re.compile(r"(?:^|[\s=:'\"(\[,])(?:~|/[^\s/]+|[A-Za-z]:[\\/])")
"""The beginning of an absolute path anywhere in a text."""


def leaks(content: Any) -> Iterator[str]:
    """Texts that hold an absolute path; names of classes are the data's own and may look like
    anything."""
    if isinstance(content, str) and PLACE.search(content):
        yield content
    elif isinstance(content, Mapping):
        for key, value in content.items():
            yield from leaks(key)
            if key != "classes":
                yield from leaks(value)
    elif isinstance(content, Sequence) and not isinstance(content, str):
        for value in content:
            yield from leaks(value)


def lines(content: Mapping[str, Any]) -> str:
    """JSON with a line per key, and per element of a list of lists or objects: short, and its
    changes can be read."""

    def text(value: Any) -> str:
        if isinstance(value, list) and value and isinstance(value[0], list | dict):
            return "[\n  " + ",\n  ".join(map(json.dumps, value)) + "\n ]"
        return json.dumps(value)

    return (
        "{\n "
        + ",\n ".join(f"{json.dumps(key)}: {text(value)}" for key, value in content.items())
        + "\n}\n"
    )


if __name__ == "__main__":
    run_command(main, parse(Collect, description=__doc__), computes=False)
