"""`results.json`, computed from the record of a run: the measurements for all tables and
figures."""

import io
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from cheem_jax.core import metrics
from cheem_jax.core.atomic import write_atomically
from cheem_jax.data.task import Task
from cheem_jax.engine.inference import Inferred
from cheem_jax.run.record import read, read_object, to_json

Entry = Mapping[str, Any]
Results = Mapping[str, Any]
"""The content of `results.json`."""


def accuracies(
    predictions: Mapping[int, Inferred], tasks: Mapping[int, Task], num: int
) -> dict[str, Any]:
    """Compute the accuracy of a method on each of `num` tasks, both task-agnostic and with the task
    ID given, and the routing confusion of the method.

    `predictions` and `tasks` are keyed by task index. The classes in `predictions` must be
    predicted with the task ID given.
    """
    accuracy: list[float | None] = [None] * num
    given: list[float | None] = [None] * num
    true_tasks, routed_tasks = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for index, predicted in predictions.items():
        is_right = predicted.classes == tasks[index].test.labels
        accuracy[index] = float(((predicted.tasks == index) & is_right).mean())
        given[index] = float(is_right.mean())
        true_tasks.append(np.full(len(is_right), index))
        routed_tasks.append(predicted.tasks)
    routing = metrics.routing_confusion(
        np.concatenate(true_tasks), np.concatenate(routed_tasks), num
    )
    return {"accuracy": accuracy, "local_accuracy": given, "routing": routing}


def write_answers(directory: Path, predictions: Mapping[int, Inferred]) -> None:
    """Write `answers.npz` with two arrays per learned task `i`: `chosen_task_i` is the inferred
    task ID of each test image, and `given_task_i` is the class predicted with the task ID given."""
    arrays = {
        f"{name}_{index}": values.astype(np.int32)
        for index, predicted in predictions.items()
        for name, values in (("chosen_task", predicted.tasks), ("given_task", predicted.classes))
    }
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)  # pyright: ignore[reportArgumentType]
    write_atomically(directory / "answers.npz", buffer.getvalue())


def write_results(directory: Path) -> None:
    """Write `results.json` from the record. If no task is evaluated, remove the file."""
    entries = read(directory)
    file = directory / "results.json"
    if any(entry["event"] == "evaluated" for entry in entries):
        write_atomically(file, json.dumps(to_json(results_of(entries)), indent=1) + "\n")
    else:
        file.unlink(missing_ok=True)


def read_results(directory: Path) -> dict[str, Any]:
    """Read `results.json`. Averages that earlier versions did not write are computed from the
    accuracy matrices."""
    results = read_object(directory / "results.json")

    def completed(run: Results) -> dict[str, Any]:
        if "accuracy" not in run or "incremental_accuracy" in run:
            return dict(run)
        accuracy, local = (
            metrics.matrix_from_json(run[key]) for key in ("accuracy", "local_accuracy")
        )
        return {**averages(accuracy, local, num_tested(results["tasks"])), **run}

    references = (results.get("references") or {}).items()
    return {**completed(results), "references": {name: completed(run) for name, run in references}}


def results_of(entries: Sequence[Entry]) -> dict[str, Any]:
    """Compute the results after the last evaluated task. The results of references and upper bounds
    are under the key `references`.

    Raises ValueError if the record is incomplete.
    """
    try:
        return _results_of(entries)
    except (
        StopIteration,
        KeyError,
        TypeError,
        IndexError,
        AttributeError,
        ArithmeticError,
    ) as error:
        raise ValueError(f"the record is incomplete ({error!r:.200})") from error


def _results_of(entries: Sequence[Entry]) -> dict[str, Any]:
    setting = next(entry for entry in entries if entry["event"] == "run")
    evaluated = [entry for entry in entries if entry["event"] == "evaluated"]
    if not evaluated:
        raise ValueError("the record contains no evaluated task yet")
    num_tasks = len(evaluated)
    timed = [entry for entry in entries if "compile" in entry]
    methods = list(evaluated[0]["methods"])
    learned = {method: _learned(entries, method)[:num_tasks] for method in methods}
    name = setting["method"]
    main = learned[name]
    measured = {method: _method(evaluated, learned[method], method) for method in methods}
    references = {method: measured[method] for method in methods if method != name}
    bounds = [entry for entry in entries if entry["event"] == "upper_bound"]
    bound = _upper_bound(bounds, num_tested(main))
    if bound:
        references["full_finetune"] = bound
    result = {
        **{key: setting[key] for key in SETTING},
        **measured[name],
        "split_sha256": setting["split_sha256"],
        "checkpoints": evaluated[-1]["checkpoints"],
        "fingerprint": list(
            dict.fromkeys(entry["fingerprint"] for entry in entries if "fingerprint" in entry)
        ),
        "peak_memory_bytes": max(
            filter(None, (entry["peak_memory_bytes"] for entry in evaluated)), default=None
        ),
        "tasks": [
            _task(report, entry["seconds"]) for report, entry in zip(main, evaluated, strict=True)
        ],
        "engine": (
            {key: setting.get(key) for key in ("executor", "precision", "device")}
            | add_counters(report.get("engine", {}) for report in main)
        ),
        "compile": {
            key: sum(entry["compile"][key] for entry in timed)
            for key in ("programs", "cached", "seconds")
        },
        "seconds_total": sum(entry["seconds"] for entry in timed),
        "references": references,
    }
    if steps := next((e["steps"] for e in entries if e["event"] == "open_set"), None):
        result["open_set"] = steps
    if "pool" in main[-1]:
        result["pool"] = main[-1]["pool"]
    # elimination computes none; the first tasks of a memory can have another search
    if all("similarity" in report for report in main):
        result["similarity"] = [report["similarity"] for report in main]
    result["fom"] = _figure_of_merit(result)
    return result


def counted_since(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """Return the counters of an executor since `before`; runs of one process can share it. Texts
    stay."""
    return {
        key: value - before[key] if isinstance(value, int | float) else value
        for key, value in after.items()
    }


def add_counters(counters: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the sums of the counters of all tasks; an earlier version counted since the executor
    was made."""
    total: dict[str, Any] = {}
    for one in counters:
        total |= {
            key: total.get(key, 0) + value if isinstance(value, int | float) else value
            for key, value in one.items()
        }
    return total


SETTING = (
    "method",
    "backbone",
    "stream",
    "seed",
    "placement",
    "preset",
    "image_size",
    "base_means",
    "source",
    "router",
)


def _learned(entries: Sequence[Entry], method: str) -> list[dict[str, Any]]:
    reports = [e["report"] for e in entries if e["event"] == "learned" and e["method"] == method]
    return sorted(reports, key=lambda report: report["index"])


def _method(evaluated: Sequence[Entry], reports: Sequence[Entry], method: str) -> dict[str, Any]:
    accuracy, local = matrices(evaluated, method)
    routing = evaluated[-1]["methods"][method]["routing"]
    return {
        "accuracy": metrics.matrix_to_json(accuracy),
        "local_accuracy": metrics.matrix_to_json(local),
        **averages(accuracy, local, num_tested(reports)),
        "just_trained": list(metrics.just_trained(local)),
        "routing": routing,
        "router_accuracy": [row[index] for index, row in enumerate(routing)],
        "flops": {
            "paper": _mean(reports, "flops_method"),
            "executed": _mean(reports, "flops_executed"),
            "explicit": _mean(reports, "flops_explicit"),
        },
        "params_added_percent": _mean(reports, "params_added_percent"),
        "params_learned": _mean(reports, "params_learned"),
        "params_stored": sum(report["params_stored"] for report in reports),
        "seconds": sum(sum(report["seconds"].values()) for report in reports),
    }


def matrices(evaluated: Sequence[Entry], method: str) -> tuple[np.ndarray, np.ndarray]:
    """Return two matrices `[T, T]`: task-agnostic accuracy, and accuracy with the task ID given.
    Row i contains the accuracies after task i is learned; column j is the evaluated task. Values
    that were not measured are NaN."""
    accuracy, local = np.full((2, len(evaluated), len(evaluated)), np.nan)
    for i, entry in enumerate(evaluated):
        measured = entry["methods"][method]
        accuracy[i, : i + 1], local[i, : i + 1] = measured["accuracy"], measured["local_accuracy"]
    return accuracy, local


def num_tested(tasks: Sequence[Entry]) -> np.ndarray:
    """Return the number of images on which each task is evaluated: its test images, or its
    validation images if it has no test images. Of an extended task, only new images count."""
    return np.array(
        [task.get("num_tested") or task["num_test"] or task["num_val"] for task in tasks]
    )


def curve_of(
    rows: Sequence[Sequence[float | None]], tasks: Sequence[Entry]
) -> Float[np.ndarray, " T"]:
    """Compute `metrics.accuracy_curve` from parts of `results.json`: `rows` is an accuracy matrix,
    and `tasks` contains one entry per task."""
    return metrics.accuracy_curve(metrics.matrix_from_json(rows), num_tested(tasks))


def averages(
    accuracy: np.ndarray, local: np.ndarray, num_images: np.ndarray
) -> dict[str, float | None]:
    """Average the accuracies and the forgetting; `num_images` contains the number of test images of
    each task, as in `metrics.accuracy_curve`.

    Average accuracy is the mean over tasks after the last task is learned. Last accuracy is the
    last value of `metrics.accuracy_curve`; average incremental accuracy is the mean of this curve.
    An average is None if the memory was evaluated without images of earlier tasks.
    """
    means: dict[str, float | None] = {}
    for prefix, matrix in (("", accuracy), ("local_", local)):
        curve = metrics.accuracy_curve(matrix, num_images)
        is_last_measured = not np.isnan(curve[-1])
        is_all_measured = not np.isnan(curve).any()
        means |= {
            f"{prefix}average_accuracy": (
                metrics.average_accuracy(matrix) if is_last_measured else None
            ),
            f"{prefix}last_accuracy": float(curve[-1]) if is_last_measured else None,
            f"{prefix}incremental_accuracy": float(curve.mean()) if is_all_measured else None,
            f"{prefix}average_forgetting": (
                metrics.average_forgetting(matrix) if is_all_measured else None
            ),
        }
    return means


def _task(report: Entry, seconds_evaluation: float) -> dict[str, Any]:
    hidden = (
        "index",
        "pool",
        "similarity",
        "search",
        "supernet_losses",
        "finetune_losses",
        "losses",
    )
    task = {key: value for key, value in report.items() if key not in hidden}
    return {**task, "seconds": {**report["seconds"], "evaluation": seconds_evaluation}}


def _upper_bound(entries: Sequence[Entry], num_images: np.ndarray) -> dict[str, Any] | None:
    """Combine the upper bounds of all tasks; `num_images` contains the number of evaluated images
    of each task. Returns None until all tasks are measured."""
    num_tasks = len(num_images)
    if len(entries) < num_tasks:
        return None
    entries = sorted(entries, key=lambda entry: entry["index"])[:num_tasks]
    local = np.array([entry["test_accuracy"] for entry in entries])
    # each task has a separate network, so its accuracy is the same after every later task
    curve = metrics.accuracy_curve(np.tile(local, (num_tasks, 1)), num_images)
    return {
        "local_accuracy": local.tolist(),
        "average_accuracy": float(local.mean()),
        "local_last_accuracy": float(curve[-1]),
        "local_incremental_accuracy": float(curve.mean()),
        "learning_rates": [entry["learning_rate"] for entry in entries],
        "flops": {"paper": entries[0]["flops_paper"], "executed": entries[0]["flops_executed"]},
        "params_added_percent": 100.0,
        "seconds": sum(entry["seconds"] for entry in entries),
    }


def _figure_of_merit(result: Mapping[str, Any]) -> dict[str, float | None] | None:
    references = result["references"]
    if "full_finetune" not in references:
        return None
    upper = references["full_finetune"]["average_accuracy"]
    return {
        name: metrics.figure_of_merit(
            upper,
            result["average_accuracy"],
            result["flops"]["paper"],
            other["average_accuracy"],
            other["flops"]["paper"],
        )
        for name, other in references.items()
        if name != "full_finetune"
    }


def _mean(reports: Sequence[Entry], key: str) -> float:
    return float(np.mean([report[key] for report in reports]))
