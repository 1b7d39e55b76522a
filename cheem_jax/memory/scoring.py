"""Measure accuracies of a memory on images of its tasks, and how well it rejects other images."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from cheem_jax.core.metrics import calibration_error, open_set_metrics
from cheem_jax.data.decode import PIECE, decode_pieces
from cheem_jax.data.files import join_first
from cheem_jax.data.task import SPLITS, Split, Task, spelled_as
from cheem_jax.memory.data import Data, ImageInput, NamedFiles, list_images, read_tasks
from cheem_jax.memory.predictor import Predictor, class_probabilities
from cheem_jax.memory.state import MemoryState
from cheem_jax.report.memories import Evaluated


class TaskScore(NamedTuple):
    """Accuracies on the labelled images of a task, in [0, 1]."""

    task: str
    num_images: int
    accuracy: float
    """Share of images whose task and class are predicted correctly (task-agnostic)."""
    accuracy_given: float
    """Share of images whose class is predicted correctly, with the task ID given."""
    task_accuracy: float
    """Share of images whose task is inferred correctly."""
    calibration_error: float
    """Expected calibration error (15 bins) of the class probabilities, with the task ID given."""
    images: str = ""
    """Description of the images, such as `the 40 test images`."""


def score_task(
    task: Task, split: str, predictor: Predictor, given: Predictor, *, is_learned: bool
) -> TaskScore:
    """Score the predictions for one split of a task; classes are matched by name.

    If the data have no test split, the split `test` consists of the images that were held out when
    the task was learned from these data, or of all images if the task was learned from other data,
    or only extended by these data.
    Raises ValueError if the split has no images, and for classes that the task has not learned.

    Args:
        predictor: predictor of all tasks.
        given: predictor of this task only.
        is_learned: whether the task was learned from these data.
    """
    (target,) = given.targets
    parts, text = parts_of(task, split, is_learned=is_learned)
    names = np.array(spelled_as(task.classes, target.classes))
    wanted = [name for part in parts for name in names[part.labels].tolist()]
    if unknown := sorted(set(wanted) - set(target.classes)):
        raise ValueError(
            f"task {target.name!r} has not learned the classes {unknown[:8]}; its classes are"
            f" {list(target.classes)[:8]}"
        )
    index = [one.name for one in predictor.targets].index(target.name)
    routed = list[bool]()
    right = list[bool]()
    right_given = list[bool]()
    confidence = list[float]()
    labels = iter(map(target.classes.index, wanted))
    for part in parts:
        agnostic = predictor.predict_arrays(part.images)
        logits_given = given.predict_arrays(part.images).logits
        answers = zip(agnostic.targets, agnostic.logits, logits_given, strict=True)
        for chosen, logits, own_logits in answers:
            label = next(labels)
            routed.append(bool(chosen == index))
            # the label is a class of `target`, so a prediction for another target is wrong
            right.append(routed[-1] and _predicts(logits, label))
            right_given.append(_predicts(own_logits, label))
            confidence.append(class_probabilities(own_logits, target).max())
    # a prediction from non-finite logits counts as wrong, with confidence 0
    error = calibration_error(np.nan_to_num(confidence), np.array(right_given))
    accuracy, accuracy_given, task_accuracy = (
        float(np.mean(values)) for values in (right, right_given, routed)
    )
    num = len(wanted)
    return TaskScore(
        target.name, num, accuracy, accuracy_given, task_accuracy, error, text.format(f"{num:,}")
    )


def parts_of(task: Task, split: str, *, is_learned: bool) -> tuple[list[Split], str]:
    """Return the parts of a task that contain the images of `split`, and a description of these
    images with `{}` in place of their number.

    `is_learned`: whether the task was learned from these data. Raises ValueError if the split has
    no images.
    """
    parts = [task.splits[split]]
    text = "the {} " + f"{split} images"
    if split == "test" and "test" in task.cut:
        if is_learned:
            text = "the {} images of it that were held out as test images when it was learned"
        else:
            parts = list(task.splits.values())
            text = "all {} images"
    parts = [part for part in parts if len(part.labels)]
    if not parts:
        raise ValueError(f"task {task.name!r} has no {split} images; choose another split")
    return parts, text


class OpenSetScore(NamedTuple):
    """Metrics of how well `Predictor.rejection_scores` separates unknown images from images of the
    memory's tasks."""

    auroc: float
    """Area under the ROC curve, in [0, 1]; 0.5 is chance."""
    fpr95: float
    """Share of unknown images that are accepted if 95 % of the known images are accepted."""
    num_known: int
    num_unknown: int


def read_labelled(
    state: MemoryState, data: Data, split: str, task: str | None
) -> list[tuple[str, Task, bool]]:
    """Read labelled images of learned tasks. For each task, return its name in the memory, its
    images, and whether the memory learned the task from these data.

    If the data are one task, `task` can be the name of this task in the memory. Raises ValueError
    for an unknown split, and for tasks that the memory lacks.
    """
    if split not in SPLITS:
        raise ValueError(f"split is {split!r}, expected one of {', '.join(SPLITS)}")
    size, upright = state.config.image_size, state.config.upright
    tasks = read_tasks(data, size, upright=upright, purpose="measure", only=split)
    if task is not None and len(tasks) != 1:
        raise ValueError(f"{task!r} is one task, but the data have {[t.name for t in tasks]}")
    names = [state.names[state.index(one.name if task is None else task)] for one in tasks]
    return [
        (name, one, "test" in one.cut and state.is_learned(name, one))
        for name, one in zip(names, tasks, strict=True)
    ]


def score_open_set(
    labelled: Sequence[tuple[str, Task, bool]],
    split: str,
    unknown: str | Path | Sequence[ImageInput],
    predictor: Predictor,
) -> OpenSetScore:
    """Score how well unknown images are separated from images of the tasks in `labelled`.

    `unknown` is a folder or a sequence of images, and `split` selects the images of the tasks.
    Raises ValueError for a target without calibrated distances, for a folder without images, and
    for images that cannot be read.
    """
    files = list_images(unknown)[0] if isinstance(unknown, str | Path) else unknown
    if not files:
        raise ValueError("no unknown image is given; expected at least one")
    unknown_scores = []
    broken = []
    named = NamedFiles(files, upright=predictor.upright)
    for piece in decode_pieces(named, predictor.image_size, PIECE):
        broken += filter(None, piece.errors)
        unknown_scores.append(predictor.rejection_scores(piece.images))
    if broken:
        raise ValueError(
            f"{len(broken)} unknown image(s) cannot be used: {join_first(broken)}; replace or"
            " remove them"
        )
    known_scores = [
        predictor.rejection_scores(part.images)
        for _, task, is_learned in labelled
        for part in parts_of(task, split, is_learned=is_learned)[0]
    ]
    scores = np.concatenate(known_scores), np.concatenate(unknown_scores)
    return OpenSetScore(*open_set_metrics(*scores), *map(len, scores))


def to_evaluated(scores: Sequence[TaskScore]) -> dict[str, Evaluated]:
    """Convert scores to values for `evaluated.json`, keyed by task name, with the current date."""
    date = time.strftime("%Y-%m-%d %H:%M")
    return {
        one.task: Evaluated(
            one.num_images, one.accuracy, one.accuracy_given, one.task_accuracy, date
        )
        for one in scores
    }


def _predicts(logits: np.ndarray, label: int) -> bool:
    return bool(np.isfinite(logits).all() and logits.argmax() == label)
