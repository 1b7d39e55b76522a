"""How a memory's record differs from a run's: forgotten tasks, and tasks whose images were not
available."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cheem_jax.core.architecture import Choice
from cheem_jax.core.atomic import write_atomically
from cheem_jax.core.metrics import matrix_from_json, matrix_to_json
from cheem_jax.run.record import read_object
from cheem_jax.run.results import averages

Results = Mapping[str, Any]
FORGOTTEN = "forgotten"
"""The origin of an expert whose task is gone."""
MARK = "†"
"""How a cell names it."""
ROUTED_TO_FORGOTTEN = (
    "where a row adds up to less than 100 %, the rest went to a task that is forgotten now"
)
UNAVAILABLE = (
    "their images were not available when the last task was learned; cheem evaluate measures on"
    " given images"
)
EVALUATED = "evaluated.json"
"""What `cheem evaluate` measured last of each task, next to the record."""


class Evaluated(NamedTuple):
    """How a task's test images are answered; shares in [0, 1]."""

    num_images: int
    accuracy: float
    accuracy_given: float
    found: float
    date: str


def evaluated(directory: Path, config: Mapping[str, Any]) -> dict[str, Evaluated]:
    """What was measured of each task since one was learned or forgotten; of a run, nothing."""
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
        return {}  # of another version, or edited: measured again in one command


def keep_evaluated(
    directory: Path, config: Mapping[str, Any], measured: Mapping[str, Evaluated]
) -> None:
    """Keep what was measured, and of other tasks what is still true."""
    tasks = {
        name: one._asdict() for name, one in {**evaluated(directory, config), **measured}.items()
    }
    write_atomically(
        directory / EVALUATED,
        json.dumps({"state": _state(config), "tasks": tasks}, indent=1) + "\n",
    )


def with_evaluated(results: Results, measured: Mapping[str, Evaluated]) -> dict[str, Any]:
    """Results of a memory with what `cheem evaluate` measured as the last row, and the averages
    that follow.

    Forgetting is from right after learning, or a later accuracy that is higher. Of the routing the
    share that went to the right task is known, and the others are not.
    """
    names = [task["name"] for task in results["tasks"]]
    if not measured or not set(measured) & set(names):
        return dict(results)
    accuracy, local, routing = (
        matrix_from_json(results[key]) for key in ("accuracy", "local_accuracy", "routing")
    )
    for index, name in enumerate(names):
        if (one := measured.get(name)) is not None:
            accuracy[-1, index], local[-1, index] = one.accuracy, one.accuracy_given
            if (
                routing[index, index] != one.found
            ):  # of other images: where the rest went is not known
                routing[index], routing[index, index] = np.nan, one.found
    found = {"accuracy": accuracy, "local_accuracy": local, "routing": routing}
    own = ("average_forgetting", "local_average_forgetting")
    return {
        **results,
        **{key: matrix_to_json(matrix) for key, matrix in found.items()},
        **averages(accuracy, local),
        **dict(zip(own, map(_forgetting, (accuracy, local)), strict=True)),
    }


def _forgetting(accuracy: np.ndarray) -> float | None:
    """From what was measured; None where a task lacks an accuracy right after learning or now, and
    for one task."""
    if len(accuracy) == 1 or np.isnan(np.diagonal(accuracy)).any() or np.isnan(accuracy[-1]).any():
        return None
    return float((np.nanmax(accuracy, axis=0) - accuracy[-1])[:-1].mean())


def _state(config: Mapping[str, Any]) -> list[int]:
    """Changes when a task is forgotten or learned."""
    return [config.get("generation", 1), config.get("num_learned", 0)]


def is_memory(config: Any) -> bool:
    """Whether `config.json` is that of a memory, and not of a run."""
    return isinstance(config, Mapping) and str(config.get("format")).startswith("cheem_jax-memory/")


def as_of_run(config: Mapping[str, Any]) -> dict[str, Any]:
    """A memory's configuration with the settings of CHEEM under the name that a run gives them;
    others as they are."""
    if not is_memory(config):
        return dict(config)
    return {"cheem" if key == "method" else key: value for key, value in config.items()}


def num_forgotten(config: Mapping[str, Any]) -> int:
    """How many tasks were forgotten, of those ever learned; an extended task takes a number
    more."""
    if not is_memory(config):
        return 0
    kept = len(config.get("data_sha256", ())) + len(config.get("replaced", ()))
    return max(config.get("num_learned", 0) - kept, 0)


def left_undone(config: Mapping[str, Any], directory: Path) -> str:
    """What a memory that nobody works on was stopped at, and what finishes it; empty where nothing
    is left to do."""
    if forgetting := config.get("forgetting"):
        names = ", ".join(
            repr(one["name"])
            for one in (forgetting if isinstance(forgetting, list) else [forgetting])
        )
        return (
            f"stopped while it forgot {names}; the next `cheem learn` or `cheem forget` finishes"
            " that"
        )
    if learning := config.get("learning"):
        return f"stopped in the middle of {learning['name']!r}; the same `cheem learn` resumes it"
    return "" if config.get("tasks") else f"no task yet; `cheem learn {directory} FOLDER` adds one"


def unmeasured(results: Results) -> list[int]:
    """Tasks without an accuracy after the last one."""
    last = results["local_accuracy"][-1]
    return [
        index for index, value in enumerate(last if isinstance(last, list) else []) if value is None
    ]


def routed_to_forgotten(results: Results) -> bool:
    """Whether some of the images went to a task that is forgotten now: then a row of the routing
    lacks them."""
    rows = [row for row in results.get("routing") or [] if None not in row]
    return any(sum(row) < 1 - 1e-6 for row in rows)


def after_learning(results: Results) -> tuple[float | None, int]:
    """Mean accuracy of each task right after it was learned, and of how many tasks it was
    measured."""
    measured = np.diagonal(matrix_from_json(results["accuracy"]))
    measured = measured[~np.isnan(measured)]
    return (float(measured.mean()) if len(measured) else None), len(measured)


def origin_name(origin: int | str) -> str:
    """`T1` of the first task, `base`, or the mark of an expert whose task is gone."""
    return f"T{origin + 1}" if isinstance(origin, int) else MARK if origin == FORGOTTEN else origin


def cell_text(choice: Choice, block: Sequence[Mapping[str, Any]]) -> str:
    """An architecture's choice as grids show it: the origin of its expert of the block, `+Δ` where
    it is adapted."""
    if choice.expert is None:
        return choice.kind
    return origin_name(block[choice.expert]["origin"]) + ("+Δ" if choice.kind == "adapt" else "")
