"""Test images of each task with right and wrong predictions, inside the page."""

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
from cheem_jax.data.task import EncodedSplit, Split, fingerprint
from cheem_jax.report.finished import Recorded, RunRecord
from cheem_jax.report.page.charts import EmptySection
from cheem_jax.report.table import spread

TASKS = 24
"""Tasks with images: the first ones."""
EACH = 4
"""Right and wrong predictions per task, at most."""
LARGEST = 224
"""Pixels along a side of an image, at most."""
CRISP = 64
"""Pixels up to which an image is enlarged with its pixels visible, and kept as PNG."""


class Example(NamedTuple):
    source: str
    """A data URI."""
    truth: str
    answer: str
    """The wrong prediction; empty where it is right."""
    given: str = ""
    """The prediction with the task ID given, where another task was inferred."""


class Examples(NamedTuple):
    """Per task its name, right and wrong ones, and how many of each there are."""

    tasks: tuple[tuple[str, list[Example], list[Example], int, int], ...]
    is_crisp: bool
    note: str


def examples(
    run: RunRecord, recorded: Recorded, tests: Mapping[str, Split | EncodedSplit] | None = None
) -> Examples:
    """Raises EmptySection if predictions or images are not available; `tests` are test images by
    task."""
    data = recorded.begin.get("data")
    size = run.results["image_size"]
    tasks = run.results["tasks"]
    if tests is None and data is None:
        raise EmptySection(
            f"The record cannot be read: {recorded.trouble}."
            if recorded.trouble
            else "The run was made by a script that did not record where its images are."
        )
    answers = _answers(run.directory)
    try:
        is_checked = tests is not None or data["stream"] == "demo"
        tests = tests or _tests_of(run, data)
        shown = tuple(
            _of_task(run, index, answers, tests[task["name"]])
            for index, task in enumerate(tasks[:TASKS])
        )
    except EmptySection:
        raise
    except (ValueError, OSError, ImportError) as error:
        raise EmptySection(f"The images are not where the run found them: {error}.") from error
    notes = [f"The first {TASKS} of {len(tasks):,} tasks."] if len(tasks) > TASKS else []
    if not is_checked:
        notes.append(
            "Files and labels are those of the run; whether their pixels are is not checked."
        )
    return Examples(shown, size <= CRISP, " ".join(notes))


def _tests_of(run: RunRecord, data: Mapping[str, Any]) -> Mapping[str, Split | EncodedSplit]:
    """The test split of each task by its name; EmptySection where they are not those of the run."""
    known = run.results["split_sha256"]
    trouble = "Other files or labels are there now than the run has seen"
    if data["stream"] == "demo":
        known = run.config["data_sha256"]
        trouble = "This version makes other images than the run has seen"
    found = _known_tests(
        run.results["image_size"],
        data["stream"],
        data["tasks"] and tuple(data["tasks"]),
        data.get("data_dir"),
        data.get("order", "default"),
        data.get("split_seed", 0),
    )
    if changed := [
        name for name in run.order if name not in found or found[name][1] != known.get(name)
    ]:
        raise EmptySection(f"{trouble}: {', '.join(changed)}.")
    return {name: test for name, (test, _) in found.items()}


@functools.cache  # several runs of one stream share its images
def _known_tests(
    size: int,
    stream: str,
    tasks: tuple[str, ...] | None,
    data_dir: str | None,
    order: Any,
    seed: int,
) -> Mapping[str, tuple[Split | EncodedSplit, str]]:
    """The test split of each task of a stream, and the hash by which a run knows its images."""
    if stream == "demo":
        return {
            task.name: (task.test, fingerprint(task)) for task in demo_stream(image_size=size).tasks
        }
    _, plans = plan_source(
        stream, tasks, data_dir=Path(data_dir) if data_dir else None, order=order, seed=seed
    )
    return {plan.name: (plan.test, plan.split_sha256) for plan in plans}


def _answers(directory: Path) -> Mapping[str, np.ndarray]:
    file = directory / "answers.npz"
    try:
        with file.open("rb") as stream, np.load(stream, allow_pickle=False) as held:
            return {name: held[name] for name in held.files}
    except (ValueError, OSError, EOFError, KeyError, zipfile.BadZipFile) as error:
        raise EmptySection(f"{file} cannot be read: {error}.") from error


def _of_task(
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
            f"answers.npz is from another moment than the record: of {task['name']!r}"
            f" {is_right.mean():.4f} are right there, {accuracy:.4f} here; the command that began"
            " the run resumes it and writes both."
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

    def some_of(rows: np.ndarray) -> list[Example]:
        chosen = rows[spread(len(rows), EACH)]
        if isinstance(test, Split):
            images = test.images[chosen]
        else:
            images = [
                image for piece in decode_in_order(test.files, size, chosen) for image in piece
            ]
        return list(map(example, chosen.tolist(), images))

    right, wrong = np.flatnonzero(is_right), np.flatnonzero(~is_right)
    return f"T{index + 1} {task['name']}", some_of(right), some_of(wrong), len(right), len(wrong)


def data_uri(image: np.ndarray) -> str:
    """An image `[S, S, 3]` as text inside a page."""
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
