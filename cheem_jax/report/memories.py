"""Memories in reports: forgotten tasks, and tasks whose images are not available."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cheem_jax.core.architecture import Choice
from cheem_jax.core.atomic import write_atomically
from cheem_jax.core.metrics import matrix_from_json, matrix_to_json
from cheem_jax.run.record import read_object
from cheem_jax.run.results import Results, averages, num_tested

FORGOTTEN = "forgotten"
"""Origin of an expert of a forgotten task."""
MARK = "†"
"""The same in a cell of a table."""
ROUTED_TO_FORGOTTEN = (
    "where a row adds up to less than 100 %, the rest went to a task that is forgotten now"
)
UNAVAILABLE = (
    "their images were not available when the last task was learned; cheem evaluate measures on"
    " given images"
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


def evaluated(directory: Path, config: Mapping[str, Any]) -> dict[str, Evaluated]:
    """Read the latest accuracies of each task; those from before the last change of the memory are
    dropped."""
    try:
        held = read_object(directory / EVALUATED)
        if held["state"] != _state(config):
            return {}
        fields = Evaluated.__annotations__.items()
        return {
            name: Evaluated(*(kind(one[key]) for key, kind in fields))
            for name, one in held["tasks"].items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}  # of another version, or edited: one command measures them again


def keep_evaluated(
    directory: Path, config: Mapping[str, Any], measured: Mapping[str, Evaluated]
) -> None:
    """Store new accuracies, and keep valid ones of other tasks."""
    tasks = {
        name: one._asdict() for name, one in {**evaluated(directory, config), **measured}.items()
    }
    write_atomically(
        directory / EVALUATED,
        json.dumps({"state": _state(config), "tasks": tasks}, indent=1) + "\n",
    )


def with_evaluated(results: Results, measured: Mapping[str, Evaluated]) -> dict[str, Any]:
    """Replace the last row of a memory's results by the latest accuracies, and update its averages.

    Forgetting is relative to the highest accuracy since learning. A new row of the routing has the
    share of the right task only.
    """
    names = [task["name"] for task in results["tasks"]]
    if not measured or not set(measured) & set(names):
        return dict(results)
    accuracy, local, routing = (
        matrix_from_json(results[key]) for key in ("accuracy", "local_accuracy", "routing")
    )
    num_images = num_tested(results["tasks"])
    for index, name in enumerate(names):
        if (one := measured.get(name)) is not None:
            accuracy[-1, index], local[-1, index] = one.accuracy, one.accuracy_given
            num_images[index] = one.num_images
            if routing[index, index] != one.task_accuracy:
                routing[index] = np.nan  # other images: the tasks of the rest are unknown
                routing[index, index] = one.task_accuracy
    matrices = {"accuracy": accuracy, "local_accuracy": local, "routing": routing}
    return {
        **results,
        **{key: matrix_to_json(matrix) for key, matrix in matrices.items()},
        **averages(accuracy, local, num_images),
        "average_forgetting": _forgetting(accuracy),
        "local_average_forgetting": _forgetting(local),
    }


def _forgetting(accuracy: np.ndarray) -> float | None:
    """Average forgetting; None for one task, and if an accuracy right after learning or now is
    missing."""
    if len(accuracy) == 1 or np.isnan(np.diagonal(accuracy)).any() or np.isnan(accuracy[-1]).any():
        return None
    return float((np.nanmax(accuracy, axis=0) - accuracy[-1])[:-1].mean())


def _state(config: Mapping[str, Any]) -> list[int]:
    """Numbers that change with every learned or forgotten task."""
    return [config.get("generation", 1), config.get("num_learned", 0)]


def is_memory(config: Any) -> bool:
    """Whether a `config.json` belongs to a memory."""
    return isinstance(config, Mapping) and str(config.get("format")).startswith("cheem_jax-memory/")


def as_of_run(config: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration in the form of a run's: the settings of CHEEM are under `cheem`."""
    if not is_memory(config):
        return dict(config)
    return {"cheem" if key == "method" else key: value for key, value in config.items()}


def num_forgotten(config: Mapping[str, Any]) -> int:
    """The number of forgotten tasks; an extended task has several numbers and is not forgotten."""
    if not is_memory(config):
        return 0
    remaining = len(config.get("data_sha256", ())) + len(config.get("replaced", ()))
    return max(config.get("num_learned", 0) - remaining, 0)


def left_undone(config: Mapping[str, Any], directory: Path) -> str:
    """The interrupted work of a memory and the command that finishes it; empty if there is none."""
    if forgetting := config.get("forgetting"):
        names = ", ".join(repr(task["name"]) for task in forgetting)
        return (
            f"stopped while it forgot {names}; the next `cheem learn` or `cheem forget` finishes"
            " that"
        )
    if learning := config.get("learning"):
        return f"stopped in the middle of {learning['name']!r}; the same `cheem learn` resumes it"
    return "" if config.get("tasks") else f"no task yet; `cheem learn {directory} FOLDER` adds one"


def unmeasured(results: Results) -> list[int]:
    """Indices of tasks without an accuracy after the last task."""
    last = results["local_accuracy"][-1]
    return [
        index for index, value in enumerate(last if isinstance(last, list) else []) if value is None
    ]


def routed_to_forgotten(results: Results) -> bool:
    """Whether a row of the routing lacks images that were routed to a task forgotten since."""
    rows = [row for row in results.get("routing") or [] if None not in row]
    return any(sum(row) < 1 - 1e-6 for row in rows)


def after_learning(results: Results) -> tuple[float | None, int]:
    """Average accuracy right after learning, and the number of tasks with such an accuracy."""
    measured = np.diagonal(matrix_from_json(results["accuracy"]))
    measured = measured[~np.isnan(measured)]
    return (float(measured.mean()) if len(measured) else None), len(measured)


def origin_name(origin: int | str) -> str:
    """The displayed origin of an expert: `T1` for the first task, `base`, or a mark for a forgotten
    task."""
    return f"T{origin + 1}" if isinstance(origin, int) else MARK if origin == FORGOTTEN else origin


def cell_text(choice: Choice, block: Sequence[Mapping[str, Any]]) -> str:
    """The choice of a block in grids: the origin of its expert, with `+Δ` if it is adapted."""
    if choice.expert is None:
        return choice.kind
    return origin_name(block[choice.expert]["origin"]) + ("+Δ" if choice.kind == "adapt" else "")
