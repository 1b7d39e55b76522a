"""Divide the classes of one data set into tasks, as benchmarks of class-incremental learning do.

The protocol "B0 Inc10" has tasks of 10 classes; "B50 Inc10" has 50 classes in the first task and 10
in each later task. An image keeps its split (train, validation or test).
"""

import collections
import dataclasses

import numpy as np
from jaxtyping import Int

from cheem_jax.data.files import Chosen
from cheem_jax.data.task import ClassSplit, EncodedSplit, Plan, Stream, repeats, spelled_as


def split_by_class(plan: Plan, split: ClassSplit) -> list[Plan]:
    """Return one plan per task: `<name>-01`, `<name>-02`, and so on.

    Every image keeps its split. The last task has the remaining classes if their number is not a
    multiple of `classes_per_task`. A single remaining class joins the task before it, because a
    task needs two classes. Raises ValueError if the classes are too few for two tasks, or if
    `class_order` does not name each class once.
    """
    num = len(plan.classes)
    increment = split.classes_per_task
    assert increment is not None
    first = split.first_task or increment
    if num < first + 2:
        raise ValueError(
            f"{plan.source}: {num} classes are too few for a first task of {first} classes and a"
            f" second task; expected at least {first + 2}, or fewer classes per task"
        )
    labels = order_classes(plan, split.class_order)
    starts = [0, *range(first, num, increment)]
    if num - starts[-1] == 1:
        starts.pop()
    digits = max(2, len(str(len(starts))))
    return [
        dataclasses.replace(
            plan,
            name=f"{plan.name}-{number:0{digits}d}",
            classes=tuple(plan.classes[label] for label in chosen),
            class_split=split,
            **{name: _select(part, chosen, num) for name, part in plan.splits.items()},
        )
        for number, chosen in enumerate(np.split(labels, starts[1:]), start=1)
    ]


def order_classes(plan: Plan, order: int | tuple[str, ...] | None) -> Int[np.ndarray, "C"]:
    """Return the labels of a plan's C classes in learning order.

    If `order` is a seed, the order is that of PILOT and other libraries for class-incremental
    learning: `np.random.seed(seed); np.random.permutation(C)`. Raises ValueError if class names in
    `order` are unknown, missing or repeated.
    """
    if order is None:
        return np.arange(len(plan.classes))
    if isinstance(order, int):
        return np.random.RandomState(order).permutation(len(plan.classes))
    names = spelled_as(order, plan.classes)
    errors = {
        "repeated": repeats(names),
        "unknown": sorted(set(names) - set(plan.classes)),
        "missing": sorted(set(plan.classes) - set(names)),
    }
    if any(errors.values()):
        listed = (f"{what}: {names[:8]}" for what, names in errors.items() if names)
        raise ValueError(
            f"class_order must name each of the {len(plan.classes)} classes of {plan.source} once;"
            f" {'; '.join(listed)}"
        )
    label_of = {name: label for label, name in enumerate(plan.classes)}
    return np.array([label_of[name] for name in names])


def _select(part: EncodedSplit, chosen: Int[np.ndarray, "K"], num_classes: int) -> EncodedSplit:
    """Return the images whose labels are in `chosen`. The new label of an image is the position of
    its old label in `chosen`."""
    new_labels = np.full(num_classes, -1, np.int32)
    new_labels[chosen] = np.arange(len(chosen))
    labels = new_labels[part.labels]
    rows = np.flatnonzero(labels >= 0)
    return EncodedSplit(Chosen(part.files, rows.tolist()), labels[rows])


def name_split(name: str, split: ClassSplit) -> str:
    """Return the name of a stream whose classes are divided, such as `cub B0 Inc20`."""
    return f"{name} B{split.first_task or 0} Inc{split.classes_per_task}"


def describe_split(stream: Stream) -> str | None:
    """Return a sentence about the division of a stream's classes, or None if the classes are not
    divided."""
    split = stream.tasks[0].class_split
    if split is None:
        return None
    match split.class_order:
        case None:
            order = "in their own order"
        case int(seed):
            order = f"permuted with seed {seed}"
        case _:
            order = "in the given order"
    counts = collections.Counter(len(task.classes) for task in stream.tasks)
    tasks = [
        f"{num} task{'s' if num > 1 else ''} of {size} classes" for size, num in counts.items()
    ]
    return f"{stream.name}: {', '.join(tasks)}; the data set's classes are {order}"
