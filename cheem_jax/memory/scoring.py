"""Accuracies of a memory on labelled images of a learned task."""

import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from cheem_jax.core.metrics import calibration_error
from cheem_jax.data.task import Task, spelled_as
from cheem_jax.memory.predictor import Predictor, class_probabilities
from cheem_jax.report.memories import Evaluated


class TaskScore(NamedTuple):
    """Accuracies on the labelled images of a task, in [0, 1]."""

    task: str
    num_images: int
    accuracy: float
    """Share of images with the right task and class (task-agnostic)."""
    accuracy_given: float
    """Share of images with the right class, the task ID given."""
    task_accuracy: float
    """Share of images with the right task."""
    calibration_error: float
    """Expected calibration error (15 bins) of the class probabilities, the task ID given."""
    images: str = ""
    """Description of the images."""


def score_task(
    task: Task, split: str, predictor: Predictor, given: Predictor, *, is_learned: bool
) -> TaskScore:
    """Score the predictions for one split of a task; classes are matched by name.

    If the data have no test split, `test` means all images, or the held-out ones if the task was
    learned from these data. Raises ValueError for a split without images and for other classes.

    Args:
        predictor: predictor of all tasks.
        given: predictor of the task alone.
        is_learned: whether the task was learned from these data.
    """
    (target,) = given.targets
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
        raise ValueError(
            f"task {task.name!r} has no {split} image to measure on; name another split"
        )
    names = np.array(spelled_as(task.classes, target.classes))
    wanted = [name for part in parts for name in names[part.labels].tolist()]
    if unknown := sorted(set(wanted) - set(target.classes)):
        raise ValueError(
            f"task {target.name!r} has not learned the classes {unknown[:8]}; it knows"
            f" {list(target.classes)[:8]}"
        )
    index = [one.name for one in predictor.targets].index(target.name)
    routed = list[bool]()
    right = list[bool]()
    right_given = list[bool]()
    confidence = list[float]()
    labels = iter(map(target.classes.index, wanted))
    for part in parts:
        agnostic = predictor.answer(part.images)
        logits_given = given.answer(part.images).logits
        answers = zip(agnostic.targets, agnostic.logits, logits_given, strict=True)
        for chosen, logits, own_logits in answers:
            label = next(labels)
            routed.append(bool(chosen == index))
            # labels are classes of this target, so other targets' logits do not count
            right.append(routed[-1] and _predicts(logits, label))
            right_given.append(_predicts(own_logits, label))
            confidence.append(class_probabilities(own_logits, target).max())
    # non-finite logits predict no class, with confidence 0
    error = calibration_error(np.nan_to_num(confidence), np.array(right_given))
    accuracy, accuracy_given, task_accuracy = (
        float(np.mean(values)) for values in (right, right_given, routed)
    )
    num = len(wanted)
    return TaskScore(
        target.name, num, accuracy, accuracy_given, task_accuracy, error, text.format(f"{num:,}")
    )


def to_evaluated(scores: Sequence[TaskScore]) -> dict[str, Evaluated]:
    """Scores in the form of reports, dated now."""
    date = time.strftime("%Y-%m-%d %H:%M")
    return {
        one.task: Evaluated(
            one.num_images, one.accuracy, one.accuracy_given, one.task_accuracy, date
        )
        for one in scores
    }


def _predicts(logits: np.ndarray, label: int) -> bool:
    return bool(np.isfinite(logits).all() and logits.argmax() == label)
