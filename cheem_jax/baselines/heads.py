"""Heads of the baselines, and predictions from their logits.

A method has one head for all classes, or one head per task. The columns of a head are padded to a
power of two, so that tasks share compiled functions.
"""

import functools
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int

from cheem_jax.core.keys import next_power_of_two
from cheem_jax.core.pool import FAR, Head
from cheem_jax.engine.inference import Inferred
from cheem_jax.run.checkpoint import load_meta, named, saved_tasks


class Classes:
    """Classes of all learned tasks. In a global head, which has columns for all classes, columns
    `first[t]` to `first[t + 1] - 1` belong to task t."""

    def __init__(self, names: Sequence[str] = (), classes: Sequence[Sequence[str]] = ()):
        self.names = list(names)
        self.classes = [tuple(names) for names in classes]

    def __len__(self) -> int:
        return len(self.names)

    def add(self, name: str, classes: Sequence[str]) -> None:
        """Append a task and its classes."""
        self.names.append(name)
        self.classes.append(tuple(classes))

    @property
    def last(self) -> tuple[int, str, tuple[str, ...]]:
        """Index, name and classes of the last task."""
        return len(self) - 1, self.names[-1], self.classes[-1]

    @property
    def first(self) -> np.ndarray:
        """First column of each task, followed by the number of all classes."""
        return np.cumsum([0, *map(len, self.classes)])

    @property
    def num(self) -> int:
        """Number of classes of all tasks."""
        return sum(map(len, self.classes))

    def inferred(
        self, logits: Float[np.ndarray, "N P"], task_ids: Int[np.ndarray, "N"] | None = None
    ) -> Inferred:
        """Infer the task and predict the class of each image from the logits of a global head.

        The inferred task is the task with the largest logit. The predicted class has the largest
        logit of the task in `task_ids`, or of the inferred task if `task_ids` is None. The class is
        -1 if a logit is non-finite; with `task_ids`, only the logits of the task in `task_ids` are
        checked.
        """
        first = self.first
        logits = logits[:, : first[-1]]
        best = logits.argmax(axis=1)
        tasks = np.searchsorted(first, best, side="right") - 1
        chosen = tasks
        is_finite = np.isfinite(logits).all(axis=1)
        if task_ids is not None:
            chosen = task_ids
            columns = np.arange(first[-1])
            begin, end = first[chosen][:, None], first[chosen + 1][:, None]
            is_own = (columns >= begin) & (columns < end)
            best = np.where(is_own, logits, -np.inf).argmax(axis=1)
            is_finite = np.isfinite(np.where(is_own, logits, 0.0)).all(axis=1)
        classes = np.where(is_finite, best - first[chosen], -1)
        return Inferred(tasks.astype(np.int32), classes.astype(np.int32))


def saved_classes(root: Path) -> Classes:
    """Read the classes of all tasks that are saved in `root`. Raises ValueError for corrupted
    metadata."""
    classes = Classes()
    for directory in saved_tasks(root):
        with named(directory):
            meta = load_meta(directory)
            classes.add(meta["name"], meta["classes"])
    return classes


def grow_head(key: jax.Array, head: Head | None, width: int, num_seen: int, num_new: int) -> Head:
    """Return a head with `num_new` additional columns; the first `num_seen` columns are unchanged.

    New weights are sampled from 0.02 times a standard normal truncated at ±2; new biases are 0.
    """
    size = next_power_of_two(num_seen + num_new)
    weight, bias = np.zeros((width, size), np.float32), np.zeros(size, np.float32)
    if head is not None:
        # on the host, because JAX would compile a new slice for every number of classes
        weight[:, :num_seen] = np.asarray(head.weight)[:, :num_seen]
        bias[:num_seen] = np.asarray(head.bias)[:num_seen]
    new = _truncated(key, width, next_power_of_two(num_new))
    weight[:, num_seen : num_seen + num_new] = np.asarray(new)[:, :num_new]
    return Head(jnp.asarray(weight), jnp.asarray(bias))


@functools.partial(jax.jit, static_argnums=(1, 2))
def _truncated(key, width: int, num: int):
    return 0.02 * jax.random.truncated_normal(key, -2.0, 2.0, (width, num))


def local_cross_entropy(
    logits: Float[Array, "B P"], labels: Int[Array, "B"], weights: Float[Array, "B"], first, num
) -> Float[Array, ""]:
    """Return the weighted sum of the images' cross-entropies over the `num` columns that start at
    `first`.

    `labels` are relative to `first`. All other columns have the gradient 0.
    """
    columns = jnp.arange(logits.shape[-1])
    logits = jnp.where((columns >= first) & (columns < first + num), logits, FAR)
    return (optax.softmax_cross_entropy_with_integer_labels(logits, labels + first) * weights).sum()


def head_logits(head: Head, features: Float[Array, "B D"]) -> Float[Array, "B P"]:
    """Compute the logits of a linear head."""
    return features @ head.weight + head.bias


def cut(head: Head, num: int) -> Head:
    """Remove the padding of a head; the result is on the host."""
    return Head(np.asarray(head.weight)[:, :num], np.asarray(head.bias)[:num])  # pyright: ignore[reportArgumentType]


def classes_by_task(
    features: Float[np.ndarray, "N D"], heads: Sequence[Head], tasks: Int[np.ndarray, "N"]
) -> Int[np.ndarray, "N"]:
    """Predict the class of each image with the head of its task. The class is -1 if a logit is
    non-finite."""
    classes = np.zeros(len(features), np.int32)
    for task in np.unique(tasks):
        rows = np.flatnonzero(tasks == task)
        logits = np.asarray(
            features[rows] @ np.asarray(heads[task].weight) + np.asarray(heads[task].bias)
        )
        classes[rows] = np.where(np.isfinite(logits).all(axis=1), logits.argmax(axis=1), -1)
    return classes
