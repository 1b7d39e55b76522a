"""Test images of each task with right and wrong predictions, inside the page."""

import base64
import functools
import io
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from cheem_jax.data.decode import decode_in_order
from cheem_jax.data.demo import demo_stream
from cheem_jax.data.sources import plan_source
from cheem_jax.data.task import fingerprint, select
from cheem_jax.report.finished import Recorded, RunRecord
from cheem_jax.report.page.specs import EmptySection
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


class TaskExamples(NamedTuple):
    label: str
    right: tuple[Example, ...]
    wrong: tuple[Example, ...]
    num_right: int
    num_wrong: int


class Examples(NamedTuple):
    tasks: tuple[TaskExamples, ...]
    is_crisp: bool
    note: str


class TestImages(NamedTuple):
    """Test images of one task: labels `[N]`, rows to uint8 `[n, S, S, 3]`, and what a run records to know them by."""

    labels: np.ndarray
    decode: Callable[[Sequence[int]], np.ndarray]
    sha256: str


def examples(run: RunRecord, recorded: Recorded) -> Examples:
    """Raises EmptySection where predictions or images are not available."""
    data, size, tasks = recorded.begin.get("data"), run.results["image_size"], run.results["tasks"]
    if data is None:
        raise EmptySection(
            f"The record cannot be read: {recorded.trouble}." if recorded.trouble else
            "The run was made by a script that did not record where its images are."
        )  # fmt: skip
    answers = _answers(run.directory)
    try:
        found = _test_images(run, data)
        shown = tuple(
            _of_task(index, tasks, answers, found[task["name"]], run.results["accuracy"][-1][index])
            for index, task in enumerate(tasks[:TASKS])
        )
    except EmptySection:
        raise
    except (ValueError, OSError, ImportError) as error:
        raise EmptySection(f"The images are not where the run found them: {error}.") from error
    notes = [f"The first {TASKS} of {len(tasks):,} tasks."] if len(tasks) > TASKS else []
    if data["stream"] != "demo":
        notes.append("Files and labels are those of the run; whether their pixels are is not checked.")
    return Examples(shown, size <= CRISP, " ".join(notes))


def _test_images(run: RunRecord, data: Mapping[str, Any]) -> Mapping[str, TestImages]:
    """By the name of the task; EmptySection where they are not those of the run."""
    size = run.results["image_size"]
    if data["stream"] == "demo":
        found, known = _demo(size, run.order), run.config["data_sha256"]
        trouble = "This version makes other images than the run has seen"
    else:
        tasks = data["tasks"] and tuple(data["tasks"])
        found = _planned(size, data["stream"], tasks, data["data_dir"], data["order"], data["split_seed"])
        known = run.results["split_sha256"]
        trouble = "Other files or labels are there now than the run has seen"
    if changed := [name for name in run.order if name in found and found[name].sha256 != known.get(name)]:
        raise EmptySection(f"{trouble}: {', '.join(changed)}.")
    return found


# several runs of one stream share its images
@functools.cache
def _demo(size: int, order: tuple[str, ...]) -> Mapping[str, TestImages]:
    def test_images(task: Any) -> TestImages:
        images = task.test.images
        return TestImages(task.test.labels, lambda rows: np.asarray(images[:])[list(rows)], fingerprint(task))

    return {task.name: test_images(task) for task in select(demo_stream(image_size=size), order).tasks}


@functools.cache
def _planned(
    size: int, stream: str, tasks: tuple[str, ...] | None, data_dir: str | None, order: Any, seed: int
) -> Mapping[str, TestImages]:
    def test_images(plan: Any) -> TestImages:
        part = plan.test
        return TestImages(
            part.labels, lambda rows: np.concatenate(list(decode_in_order(part.files, size, rows))), plan.split_sha256
        )

    _, plans = plan_source(stream, tasks, data_dir=Path(data_dir) if data_dir else None, order=order, seed=seed)
    return {plan.name: test_images(plan) for plan in plans}


def _answers(directory: Path) -> Mapping[str, np.ndarray]:
    file = directory / "answers.npz"
    try:
        with file.open("rb") as stream, np.load(stream, allow_pickle=False) as held:
            return {name: held[name] for name in held.files}
    except (ValueError, OSError, EOFError, KeyError, zipfile.BadZipFile) as error:
        raise EmptySection(f"{file} cannot be read: {error}.") from error


def _of_task(
    index: int,
    tasks: Sequence[Mapping[str, Any]],
    answers: Mapping[str, np.ndarray],
    test_images: TestImages,
    accuracy: float,
) -> TaskExamples:
    task, labels = tasks[index], test_images.labels
    given, routed, classes = (answers[f"{name}_{index}"] for name in ("given_task", "chosen_task", "chosen_class"))
    is_right = (routed == index) & (classes == labels)
    if routed.max(initial=0) >= len(tasks) or abs(is_right.mean() - accuracy) > 1e-9:
        raise EmptySection(
            f"answers.npz is from another moment than the record: of {task['name']!r} {is_right.mean():.4f} are right "
            f"there, {accuracy:.4f} here; the command that began the run resumes it and writes both."
        )
    chosen = [
        [int(rows[place]) for place in spread(len(rows), EACH)]
        for rows in (np.flatnonzero(is_right), np.flatnonzero(~is_right))
    ]
    rows = [row for some in chosen for row in some]
    images = dict(zip(rows, test_images.decode(rows), strict=True))

    def example(row: int) -> Example:
        truth, source = task["classes"][labels[row]], data_uri(images[row])
        if is_right[row]:
            return Example(source, truth, "")
        if routed[row] == index:
            return Example(source, truth, task["classes"][classes[row]])
        other = f"routed to T{routed[row]} {tasks[routed[row]]['name']}"
        return Example(source, truth, other, task["classes"][given[row]])

    right, wrong = (tuple(map(example, some)) for some in chosen)
    return TaskExamples(f"T{index} {task['name']}", right, wrong, int(is_right.sum()), int((~is_right).sum()))


def data_uri(image: np.ndarray) -> str:
    """An image `[S, S, 3]` as text inside a page."""
    small, stream = Image.fromarray(image), io.BytesIO()
    if len(image) <= CRISP:
        small.save(stream, "PNG", optimize=True)
        kind = "png"
    else:
        if len(image) > LARGEST:
            small = small.resize((LARGEST, LARGEST), Image.Resampling.BICUBIC)
        small.save(stream, "JPEG", quality=85)
        kind = "jpeg"
    return f"data:image/{kind};base64,{base64.b64encode(stream.getvalue()).decode()}"
