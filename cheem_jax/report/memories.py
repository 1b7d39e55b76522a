"""Memories in reports: forgotten tasks, and tasks whose images are not available."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cheem_jax.core.architecture import Choice
from cheem_jax.core.atomic import write_atomically
from cheem_jax.core.metrics import matrix_from_json, matrix_to_json
from cheem_jax.run.record import read_object, to_json
from cheem_jax.run.results import Results, averages, num_tested

FORGOTTEN = "forgotten"
"""Value of an expert's `origin` if the task that added the expert was forgotten."""
MARK = "†"
"""Mark of a forgotten task in table cells."""
ROUTED_TO_FORGOTTEN = (
    "if a row adds up to less than 100 %, the other images were routed to a task that was"
    " forgotten since"
)
UNAVAILABLE = (
    "their images were not available when the last task was learned; cheem evaluate measures the"
    " accuracy if it is given the images"
)
EVALUATED = "evaluated.json"
"""File with the latest accuracies of each task from `cheem evaluate`."""


class Evaluated(NamedTuple):
    """Accuracies on a task's test images, in [0, 1]."""

    num_images: int
    accuracy: float
    accuracy_given: float
    task_accuracy: float
    date: str


def read_evaluated(directory: Path, config: Mapping[str, Any]) -> dict[str, Evaluated]:
    """Read the latest accuracies of each task; accuracies from before the last change of the memory
    are ignored."""
    try:
        stored = read_object(directory / EVALUATED)
        if stored["state"] != _state(config):
            return {}
        fields = Evaluated.__annotations__.items()
        return {
            name: Evaluated(*(kind(one[key]) for key, kind in fields))
            for name, one in stored["tasks"].items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        # The file is missing, was edited, or is from another version; `cheem evaluate` measures the
        # accuracies again.
        return {}


def store_evaluated(
    directory: Path, config: Mapping[str, Any], measured: Mapping[str, Evaluated]
) -> None:
    """Store the accuracies in `measured`. Stored accuracies of other tasks are kept, unless they
    are from before the last change of the memory."""
    tasks = {
        name: one._asdict()
        for name, one in {**read_evaluated(directory, config), **measured}.items()
    }
    write_atomically(
        directory / EVALUATED,
        json.dumps({"state": _state(config), "tasks": tasks}, indent=1) + "\n",
    )


def with_evaluated(results: Results, measured: Mapping[str, Evaluated]) -> dict[str, Any]:
    """Replace the last row of the accuracy matrices in a memory's results by the latest accuracies,
    and update the averages.

    Forgetting is the drop from the highest accuracy since the task was learned. If `cheem evaluate`
    used other images of a task, only one entry of the task's row in the routing matrix remains: the
    share of these images for which the router inferred the right task ID. `learned_accuracy` keeps
    the accuracy of each task right after learning it, because that of the last task is replaced.
    """
    names = [task["name"] for task in results["tasks"]]
    if not measured or not set(measured) & set(names):
        return dict(results)
    accuracy, local, routing = (
        matrix_from_json(results[key]) for key in ("accuracy", "local_accuracy", "routing")
    )
    # the images given to `cheem evaluate` count only in the last row
    learned = np.diagonal(accuracy).copy()
    num_images = np.tile(num_tested(results["tasks"]), (len(names), 1))
    for index, name in enumerate(names):
        if (one := measured.get(name)) is not None:
            accuracy[-1, index], local[-1, index] = one.accuracy, one.accuracy_given
            num_images[-1, index] = one.num_images
            if routing[index, index] != one.task_accuracy:
                # `cheem evaluate` used different images, and only the share of right task IDs is
                # known.
                routing[index] = np.nan
                routing[index, index] = one.task_accuracy
    matrices = {"accuracy": accuracy, "local_accuracy": local, "routing": routing}
    return {
        **results,
        **{key: matrix_to_json(matrix) for key, matrix in matrices.items()},
        "learned_accuracy": to_json(learned),
        **averages(accuracy, local, num_images),
        "average_forgetting": _forgetting(accuracy),
        "local_average_forgetting": _forgetting(local),
    }


def _forgetting(accuracy: np.ndarray) -> float | None:
    """Return the average forgetting, or None if there is only one task, or if an accuracy on the
    diagonal or in the last row is missing."""
    if len(accuracy) == 1 or np.isnan(np.diagonal(accuracy)).any() or np.isnan(accuracy[-1]).any():
        return None
    return float((np.nanmax(accuracy, axis=0) - accuracy[-1])[:-1].mean())


def _state(config: Mapping[str, Any]) -> list[int]:
    """Return counters that change with every learned or forgotten task."""
    return [config.get("generation", 1), config.get("num_learned", 0)]


def is_memory(config: Any) -> bool:
    """Return whether a `config.json` belongs to a memory."""
    return isinstance(config, Mapping) and str(config.get("format")).startswith("cheem_jax-memory/")


def like_run(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a memory's configuration in the layout of a run's configuration, in which CHEEM's
    settings have the key `cheem`. The configuration of a run is returned as it is."""
    if not is_memory(config):
        return dict(config)
    return {"cheem" if key == "method" else key: value for key, value in config.items()}


def num_forgotten(config: Mapping[str, Any]) -> int:
    """Return the number of forgotten tasks. Each extension of a task increases `num_learned`, but
    does not count as a forgotten task."""
    if not is_memory(config):
        return 0
    remaining = len(config.get("data_sha256", ())) + len(config.get("replaced", ()))
    return max(config.get("num_learned", 0) - remaining, 0)


def interrupted_work(config: Mapping[str, Any], directory: Path) -> str:
    """Describe the interrupted work of a memory, or say that the memory has no task yet. The text
    includes the next command to run. It is empty if nothing is interrupted and the memory has a
    task."""
    if forgetting := config.get("forgetting"):
        names = ", ".join(repr(task["name"]) for task in forgetting)
        return (
            f"stopped while forgetting {names}; the next `cheem learn` or `cheem forget` finishes"
            " this"
        )
    if learning := config.get("learning"):
        return f"stopped while learning {learning['name']!r}; the same `cheem learn` resumes it"
    return "" if config.get("tasks") else f"no task yet; `cheem learn {directory} FOLDER` adds one"


def unmeasured(results: Results) -> list[int]:
    """Return the indices of the tasks that were not measured after the last task was learned."""
    last = results["local_accuracy"][-1]
    return [
        index for index, value in enumerate(last if isinstance(last, list) else []) if value is None
    ]


def routed_to_forgotten(results: Results) -> bool:
    """Return whether a complete row of the routing matrix adds up to less than 1. The other images
    were routed to a task that was forgotten since."""
    rows = [row for row in results.get("routing") or [] if None not in row]
    return any(sum(row) < 1 - 1e-6 for row in rows)


def learned_accuracy(results: Results) -> list[float | None]:
    """Return the accuracy of each task right after learning it; None if it was not measured."""
    rows = enumerate(results["accuracy"])
    return results.get("learned_accuracy") or [row[index] for index, row in rows]


def after_learning(results: Results) -> tuple[float | None, int]:
    """Return the average accuracy right after learning, and the number of tasks in this average."""
    measured = [value for value in learned_accuracy(results) if value is not None]
    return (float(np.mean(measured)) if measured else None), len(measured)


def origin_name(origin: int | str) -> str:
    """Format the origin of an expert: `T1` for the first task, `base`, or a mark for a forgotten
    task."""
    return f"T{origin + 1}" if isinstance(origin, int) else MARK if origin == FORGOTTEN else origin


def cell_text(choice: Choice, block: Sequence[Mapping[str, Any]]) -> str:
    """Format the choice of a block: `new` or `skip`, or else the origin of the reused or adapted
    expert, with `+Δ` if the expert is adapted."""
    if choice.expert is None:
        return choice.kind
    return origin_name(block[choice.expert]["origin"]) + ("+Δ" if choice.kind == "adapt" else "")
