"""Test images of each task with right and with wrong predictions, embedded in the page."""

import base64
import functools
import io
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from cheem_jax.data.decode import decode_in_order
from cheem_jax.data.demo import demo_stream
from cheem_jax.data.sources import plan_source
from cheem_jax.data.task import ClassSplit, EncodedSplit, Split, fingerprint
from cheem_jax.report.finished import Recorded, RunRecord
from cheem_jax.report.page.charts import EmptySection
from cheem_jax.report.table import spread

TASKS = 24
"""Maximum number of tasks with displayed images."""
EACH = 4
"""Maximum number of displayed images with right predictions per task. The same maximum applies to
images with wrong predictions."""
LARGEST = 224
"""Maximum height and width of an image in pixels."""
CRISP = 64
"""Maximum height and width, in pixels, of an image that is stored as PNG and enlarged without
smoothing."""


class Example(NamedTuple):
    source: str
    """The image as a data URI."""
    truth: str
    answer: str
    """The wrong prediction; empty if the prediction is right."""
    given: str = ""
    """The class predicted with the task ID given; empty if the inferred task ID is right."""


class Examples(NamedTuple):
    """Examples of each task: its name, the images with right and with wrong predictions, and the
    numbers of right and wrong predictions."""

    tasks: tuple[tuple[str, list[Example], list[Example], int, int], ...]
    is_crisp: bool
    note: str


def examples(
    run: RunRecord, recorded: Recorded, tests: Mapping[str, Split | EncodedSplit] | None = None
) -> Examples:
    """Select examples for the page; `tests` contains the test images of each task, keyed by task
    name."""
    data: Mapping[str, Any] = recorded.begin.get("data") or {}
    size = run.results["image_size"]
    tasks = run.results["tasks"]
    if tests is None and not data:
        raise EmptySection(
            f"The record cannot be read: {recorded.trouble}."
            if recorded.trouble
            else "The run was made by a script that did not record where its images are."
        )
    answers = _answers(run.directory)
    try:
        is_checked = tests is not None or data["stream"] == "demo"
        tests = tests or _recorded_tests(run, data)
        shown = tuple(
            _task_examples(run, index, answers, tests[task["name"]])
            for index, task in enumerate(tasks[:TASKS])
        )
    except EmptySection:
        raise
    except (ValueError, OSError, ImportError) as error:
        raise EmptySection(f"The images of the run cannot be read: {error}.") from error
    notes = [f"The first {TASKS} of {len(tasks):,} tasks."] if len(tasks) > TASKS else []
    if not is_checked:
        notes.append("The files and labels are those of the run; the pixels were not compared.")
    return Examples(shown, size <= CRISP, " ".join(notes))


def _recorded_tests(run: RunRecord, data: Mapping[str, Any]) -> Mapping[str, Split | EncodedSplit]:
    """Return the test split of each task, keyed by task name. Raises EmptySection if a split has
    changed since the run."""
    hashes = run.results["split_sha256"]
    message = "The files or labels have changed since the run"
    if data["stream"] == "demo":
        hashes = run.config["data_sha256"]
        message = "This version makes different images than the version of the run"
    tests = _hashed_tests(
        run.results["image_size"],
        data["stream"],
        data["tasks"] and tuple(data["tasks"]),
        data.get("data_dir"),
        data.get("order", "default"),
        data.get("split_seed", 0),
        ClassSplit.of(data["class_split"]) if "class_split" in data else None,
    )
    if changed := [
        name for name in run.order if name not in tests or tests[name][1] != hashes.get(name)
    ]:
        raise EmptySection(f"{message}: {', '.join(changed)}.")
    return {name: test for name, (test, _) in tests.items()}


@functools.cache  # so that several runs of a stream share the images of the stream
def _hashed_tests(
    size: int,
    stream: str,
    tasks: tuple[str, ...] | None,
    data_dir: str | None,
    order: Any,
    seed: int,
    class_split: ClassSplit | None,
) -> Mapping[str, tuple[Split | EncodedSplit, str]]:
    """Return the test split of each task of a stream with the hash that a run records for the task,
    keyed by task name."""
    if stream == "demo":
        return {
            task.name: (task.test, fingerprint(task)) for task in demo_stream(image_size=size).tasks
        }
    _, plans = plan_source(
        stream,
        tasks,
        data_dir=Path(data_dir) if data_dir else None,
        order=order,
        seed=seed,
        class_split=class_split,
    )
    return {plan.name: (plan.test, plan.split_sha256) for plan in plans}


def _answers(directory: Path) -> Mapping[str, np.ndarray]:
    file = directory / "answers.npz"
    try:
        with file.open("rb") as stream, np.load(stream, allow_pickle=False) as arrays:
            return {name: arrays[name] for name in arrays.files}
    except (ValueError, OSError, EOFError, KeyError, zipfile.BadZipFile) as error:
        raise EmptySection(f"{file} cannot be read: {error}.") from error


def _task_examples(
    run: RunRecord, index: int, answers: Mapping[str, np.ndarray], test: Split | EncodedSplit
) -> tuple[str, list[Example], list[Example], int, int]:
    tasks = run.results["tasks"]
    size = run.results["image_size"]
    labels = test.labels
    task = tasks[index]
    accuracy = run.results["accuracy"][-1][index]
    classes, routed = answers[f"given_task_{index}"], answers[f"chosen_task_{index}"]
    is_right = (routed == index) & (classes == labels)
    if routed.max(initial=0) >= len(tasks) or abs(is_right.mean() - accuracy) > 1e-9:
        raise EmptySection(
            f"answers.npz does not belong to the record: the accuracy of {task['name']!r} is"
            f" {is_right.mean():.4f} in answers.npz and {accuracy:.4f} in the record; the command"
            " that started the run resumes it and writes both."
        )

    def example(row: int, image: np.ndarray) -> Example:
        truth = task["classes"][labels[row]]
        source = data_uri(image)
        if is_right[row]:
            return Example(source, truth, "")
        if routed[row] == index:
            return Example(source, truth, task["classes"][classes[row]])
        other = f"routed to T{routed[row] + 1} {tasks[routed[row]]['name']}"
        return Example(source, truth, other, task["classes"][classes[row]])

    def select(rows: np.ndarray) -> list[Example]:
        chosen = rows[spread(len(rows), EACH)]
        if isinstance(test, Split):
            images = test.images[chosen]
        else:
            images = [
                image for piece in decode_in_order(test.files, size, chosen) for image in piece
            ]
        return list(map(example, chosen.tolist(), images))

    right, wrong = np.flatnonzero(is_right), np.flatnonzero(~is_right)
    return f"T{index + 1} {task['name']}", select(right), select(wrong), len(right), len(wrong)


def data_uri(image: np.ndarray) -> str:
    """Encode an image `[S, S, 3]` as a data URI."""
    small = Image.fromarray(image)
    stream = io.BytesIO()
    if len(image) <= CRISP:
        small.save(stream, "PNG", optimize=True)
        kind = "png"
    else:
        if len(image) > LARGEST:
            small = small.resize((LARGEST, LARGEST), Image.Resampling.BICUBIC)
        small.save(stream, "JPEG", quality=85)
        kind = "jpeg"
    return f"data:image/{kind};base64,{base64.b64encode(stream.getvalue()).decode()}"
