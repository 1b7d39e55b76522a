"""Run directories as a page reads them, with numbers made up on the spot: no network is trained."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from cheem_jax.data.load import ImagesConfig, load_tasks
from cheem_jax.data.sources import plan_source
from cheem_jax.data.task import fingerprint
from cheem_jax.run.record import Record, read
from cheem_jax.run.results import results_of

SIZE = 8
"""Height and width of the images, in pixels."""
EACH = 6
"""Number of test images per class."""
RIGHT = 10 / 12
"""Accuracy of the answers that `write_run` writes for two classes."""


def write_pictures(
    folder: Path, names: Sequence[str], classes: Sequence[str] = ("cat", "dog")
) -> Path:
    """A folder stream: each class has a separate grey."""
    for name in names:
        for split in ("train", "val", "test"):
            for label, word in enumerate(classes):
                place = folder / name / split / word
                place.mkdir(parents=True)
                for number in range(EACH if split == "test" else 1):
                    pixels = np.full((SIZE, SIZE, 3), 60 * label + number, np.uint8)
                    Image.fromarray(pixels).save(place / f"{number}.png")
    return folder


def write_run(
    directory: Path, *, pictures: Path | None = None, planned: int | None = None, **made: Any
) -> Path:
    """Write the directory of a run; `made` are arguments of `entries`.

    `planned` above the number of tasks leaves the run unfinished.
    """
    directory.mkdir(parents=True)
    made = {"names": ("one", "two", "three"), "classes": ("cat", "dog"), **made}
    names = made["names"]
    plans = [] if pictures is None else plan_source(str(pictures), list(names))[1]
    splits = {plan.name: plan.split_sha256 for plan in plans}
    loaded = load_tasks(plans, SIZE, ImagesConfig("memory"))
    other = made.pop("data_sha256", "x")
    hashes = {str(name): str(other) for name in names} | {
        task.name: fingerprint(task) for task in loaded
    }
    data = {
        "stream": str(pictures),
        "data_dir": None,
        "order": "default",
        "tasks": list(names),
        "split_seed": 0,
    }
    later = [f"later{index}" for index in range((planned or len(names)) - len(names))]
    write_config(directory, [*names, *later], made.get("seed", 0), hashes)
    record = Record(directory)
    for entry in entries(**made, splits=splits, data=data if pictures else None):
        record.write(**entry)
    (directory / "results.json").write_text(json.dumps(results_of(read(directory))))
    np.savez_compressed(directory / "answers.npz", **_answers(len(names), len(made["classes"])))  # pyright: ignore[reportArgumentType]
    return directory


def write_config(
    directory: Path,
    names: Sequence[str],
    seed: int = 0,
    data_sha256: Mapping[str, str] | None = None,
) -> None:
    config = {
        "stream": "small",
        "tasks": list(names),
        "backbone": "vit_micro",
        "image_size": SIZE,
        "seed": seed,
        "weights_sha256": "w",
        "data_sha256": data_sha256 or dict.fromkeys(names, "x"),
        "cheem": {"search": {"tolerance": 0.02}},
    }
    (directory / "config.json").write_text(json.dumps(config))


def entries(
    *,
    names: Sequence[str],
    classes: Sequence[str],
    method: str = "cheem",
    seed: int = 0,
    accuracy: float = RIGHT,
    splits: Mapping[str, str] | None = None,
    data: Mapping[str, Any] | None = None,
    blocks: int = 2,
) -> Iterator[dict[str, Any]]:
    """Yield the record of a run: in block 1 each task adapts the previous task's expert; in the
    others task 0 learns one.

    Of the answers to task i, the first image is routed to the next task and the second gets a wrong
    class.
    """
    num = len(names)
    compiled = {"programs": 1, "cached": 2, "seconds": 0.25}
    yield {
        "event": "run",
        "method": method,
        "backbone": "vit_micro",
        "stream": "small",
        "seed": seed,
        "placement": "mlp_down",
        "preset": "demo",
        "image_size": SIZE,
        "base_means": "known",
        "source": "bundled",
        "router": "vit_micro",
        "executor": "whole",
        "precision": "float32",
        "device": "cpu",
        "split_sha256": splits or {},
        "command": ["cheem", "train", "--data.stream=my pictures"],
        "conditions": {"code": {"version": "0.1.0"}, "versions": {"python": "3.11"}},
        "data": data,
    }
    for index, name in enumerate(names):
        last = index == num - 1
        report = _report(index, name, classes, last=last, blocks=blocks if method == "cheem" else 0)
        yield {
            "event": "learned",
            "method": method,
            "report": report,
            "seconds": 2.0,
            "compile": compiled,
        }
        row = [
            accuracy + 0.09 * (num - 1 - index) * (task + 1) / num**2 for task in range(index + 1)
        ]
        routing = (
            ((11 * np.eye(num) + np.roll(np.eye(num), 1, axis=1)) / 12).tolist() if last else []
        )
        measured = {
            "accuracy": row,
            "local_accuracy": [value + 1 / 12 for value in row],
            "routing": routing,
        }
        yield {
            "event": "evaluated",
            "index": index,
            "methods": {method: measured},
            "checkpoints": {},
            "peak_memory_bytes": 10**9,
            "seconds": 0.5,
            "compile": compiled,
        }


def _report(index: int, name: str, classes: Sequence[str], *, last: bool, blocks: int):
    result: dict[str, Any] = {
        "index": index,
        "name": name,
        "classes": list(classes),
        "num_train": 2,
        "num_val": 2,
        "num_test": 12,
        "flops_method": 30e6,
        "flops_executed": 28e6,
        "flops_explicit": 31e6,
        "params_added_percent": 1.5,
        "params_learned": 100,
        "params_stored": 120,
        "seconds": {"train": 1.0},
    }
    if blocks:
        result["seconds"] = {"supernet": 1.0, "search": 0.5}
        result |= {"flops": 20e6, "params_added": 90, "head_params": 20, "centroid_params": 10}
        result["architecture"] = [
            f"adapt:{index}",
            *["new" if index == 0 else "skip"] * (blocks - 1),
        ]
        result["experts"] = [index + 1, *[1 if index == 0 else None] * (blocks - 1)]
        result["similarity"] = [[0.5, *[-0.5] * (blocks - 1)]] + [
            [0.25, *[None] * (blocks - 1)]
        ] * index
        chain = (
            [{"origin": i, "kind": "adapted", "parent": i} for i in range(index + 1)]
            if last
            else []
        )
        base = {"origin": "base", "kind": "full", "parent": None}
        result["pool"] = (
            [
                [base, *chain],
                *[[base, {"origin": 0, "kind": "full", "parent": None}]] * (blocks - 1),
            ]
            if last
            else []
        )
        result["search"] = {
            "correct": [5, 6, None, 8, 9, 9],
            "flops": [10e6, 20e6, 5e6, 15e6, 30e6, 12e6],
            "population": 2,
            "num_images": 10,
            "chosen": 5,
        }
    return result


def _answers(num_tasks: int, num_classes: int) -> dict[str, np.ndarray]:
    result = {}
    labels = np.repeat(np.arange(num_classes, dtype=np.int32), EACH)
    for index in range(num_tasks):
        routed = np.full_like(labels, index)
        answered = labels.copy()
        routed[0] = (index + 1) % num_tasks
        answered[1] = (labels[1] + 1) % num_classes
        result |= {f"given_task_{index}": answered, f"chosen_task_{index}": routed}
    return result
