"""Test images of each task with right and wrong predictions, inside the page."""

import base64
import io
import json
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from cheem_jax.data.decode import decode_in_order
from cheem_jax.data.demo import demo_stream
from cheem_jax.data.load import ImagesConfig, load_tasks
from cheem_jax.data.sources import plan_source
from cheem_jax.data.task import Plan, fingerprint, select
from cheem_jax.report.finished import RunRecord
from cheem_jax.report.page.loading import Recorded
from cheem_jax.report.page.specs import EmptySection
from cheem_jax.report.table import spread

TASKS = 24
"""Tasks with images: the first ones."""
EACH = 4
"""Right and wrong predictions per task, at most."""
LARGEST = 224
"""Pixels along a side of an image, at most."""
CHECKED = 5_000
"""Images of a task up to which all are decoded, to see whether they are those of the run."""
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
    """Test images of one task: labels `[N]`, and rows to uint8 `[n, S, S, 3]`."""

    labels: np.ndarray
    decode: Callable[[Sequence[int]], np.ndarray]
    is_checked: bool = True
    """Whether the pixels are known to be those of the run."""


class Album:
    """Opens the test images of runs, each stream once."""

    def __init__(self) -> None:
        self._opened: dict[str, dict[str, TestImages] | EmptySection] = {}

    def examples(self, run: RunRecord, recorded: Recorded) -> Examples:
        """Raises EmptySection where predictions or images are not available."""
        data = recorded.begin.get("data")
        if data is None:
            raise EmptySection(
                f"The record cannot be read: {recorded.trouble}." if recorded.trouble else
                "The run was made by a script that did not record where its images are."
            )  # fmt: skip
        answers = _answers(run.directory)
        opened = self._open(run, data)
        size, last = run.results["image_size"], run.results["accuracy"][-1]
        tasks, unchecked = [], []
        for index, task in enumerate(run.results["tasks"][:TASKS]):
            tasks.append(_of_task(index, run.results["tasks"], answers, opened[task["name"]], last[index]))
            if not opened[task["name"]].is_checked:
                unchecked.append(tasks[-1].label)
        num = len(run.results["tasks"])
        notes = [f"The first {TASKS} of {num:,} tasks."] if num > TASKS else []
        if unchecked:
            notes.append(
                f"Files and labels are those of the run; not checked are the pixels of {', '.join(unchecked)}."
            )
        return Examples(tuple(tasks), size <= CRISP, " ".join(notes))

    def _open(self, run: RunRecord, data: Mapping[str, Any]) -> dict[str, TestImages]:
        size = run.results["image_size"]
        key = json.dumps([data, size, run.config.get("data_sha256"), run.results.get("split_sha256")], sort_keys=True)
        if key not in self._opened:
            try:
                self._opened[key] = _demo(run) if data["stream"] == "demo" else _planned(run, data, size)
            except EmptySection as error:
                self._opened[key] = error
            except (ValueError, KeyError, OSError, ImportError) as error:
                self._opened[key] = EmptySection(f"The images are not where the run found them: {error}.")
        found = self._opened[key]
        if isinstance(found, EmptySection):
            raise found
        return found


def _demo(run: RunRecord) -> dict[str, TestImages]:
    stream = select(demo_stream(image_size=run.results["image_size"]), run.order)
    wanted = run.config["data_sha256"]
    if changed := [task.name for task in stream.tasks if fingerprint(task) != wanted.get(task.name)]:
        raise EmptySection(f"This version makes other images for {', '.join(changed)} than the run has seen.")
    return {
        task.name: TestImages(task.test.labels, lambda rows, images=task.test.images: np.asarray(images[:])[list(rows)])
        for task in stream.tasks
    }


def _planned(run: RunRecord, data: Mapping[str, Any], size: int) -> dict[str, TestImages]:
    data_dir = None if data["data_dir"] is None else Path(data["data_dir"])
    _, plans = plan_source(
        data["stream"], data["tasks"], data_dir=data_dir, order=data["order"], seed=data["split_seed"]
    )
    wanted = run.results["split_sha256"]
    by_name = {plan.name: plan for plan in plans if plan.name in run.order}
    if changed := [name for name, plan in by_name.items() if wanted.get(name) != plan.split_sha256]:
        raise EmptySection(f"Other files or labels are there now than the run has seen: {', '.join(changed)}.")

    hashes = run.config.get("data_sha256") or {}
    checked = {name: _is_same(by_name[name], size, hashes.get(name)) for name in run.order[:TASKS]}
    if changed := [name for name, is_same in checked.items() if is_same is False]:
        raise EmptySection(f"The files have other pixels now than the run has seen: {', '.join(changed)}.")

    def test_images(name: str) -> TestImages:
        part = by_name[name].test
        return TestImages(
            part.labels, lambda rows: np.concatenate(list(decode_in_order(part.files, size, rows))),
            checked[name] is True,
        )  # fmt: skip

    return {name: test_images(name) for name in checked}


def _is_same(plan: Plan, size: int, data_sha256: str | None) -> bool | None:
    """Whether the run has seen these images; None where too many would have to be decoded to know."""
    ways = [ImagesConfig("stream")]  # whose hash is of size and time of the files, without any pixel
    if plan.num_images <= CHECKED:
        ways.append(ImagesConfig("memory"))
    if any(fingerprint(load_tasks([plan], size, way)[0]) == data_sha256 for way in ways):
        return True
    return False if len(ways) > 1 else None


def _answers(directory: Path) -> Mapping[str, np.ndarray]:
    file = directory / "answers.npz"
    if not file.exists():
        raise EmptySection("The run has no answers.npz.")
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
    try:
        given, routed, classes = (answers[f"{name}_{index}"] for name in ("given_task", "chosen_task", "chosen_class"))
    except KeyError as error:
        raise EmptySection(f"answers.npz has no {error} for task {task['name']!r}.") from error
    if not len(given) == len(routed) == len(classes) == len(labels):
        raise EmptySection(
            f"answers.npz has {len(given)} predictions for the {len(labels)} test images of {task['name']}."
        )
    is_right = (routed == index) & (classes == labels)
    if routed.max(initial=0) >= len(tasks):
        raise EmptySection(
            "answers.npz is from a later moment than the record; the command that began the run resumes it and writes "
            "both."
        )
    if abs(is_right.mean() - accuracy) > 1e-9:
        raise EmptySection(
            f"answers.npz is from another moment than the record: of {task['name']!r} {is_right.mean():.4f} are right "
            f"there, {accuracy:.4f} here; the command that began the run resumes it and writes both."
        )
    chosen = [_few(np.flatnonzero(is_right)), _few(np.flatnonzero(~is_right))]
    try:
        images = dict(
            zip([row for rows in chosen for row in rows], test_images.decode([*chosen[0], *chosen[1]]), strict=True)
        )
    except (ValueError, OSError) as error:
        raise EmptySection(f"The images of {task['name']!r} cannot be read: {error}.") from error

    def example(row: int) -> Example:
        truth, source = task["classes"][labels[row]], data_uri(images[row])
        if is_right[row]:
            return Example(source, truth, "")
        if routed[row] == index:
            return Example(source, truth, task["classes"][classes[row]])
        other = f"routed to T{routed[row]} {tasks[routed[row]]['name']}"
        return Example(source, truth, other, task["classes"][given[row]])

    right, wrong = (tuple(map(example, rows)) for rows in chosen)
    return TaskExamples(f"T{index} {task['name']}", right, wrong, int(is_right.sum()), int((~is_right).sum()))


def _few(rows: np.ndarray) -> list[int]:
    """A few rows, evenly spread."""
    return [int(rows[position]) for position in spread(len(rows), EACH)]


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
