"""Writes of cheem_jax, one by one: the files before, the write, and the state read afterwards."""

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import small

from cheem_jax.cheem.saved_memory import save_memory_task
from cheem_jax.core.atomic import write_atomically
from cheem_jax.core.ops import Expert
from cheem_jax.core.pool import InternalMemory, StoredExpert
from cheem_jax.run.checkpoint import load_manifest, load_task, save_task, saved_tasks
from cheem_jax.run.directory import claim, hold
from cheem_jax.run.record import Record, read


class Scenario(NamedTuple):
    """A write and its surroundings; every function gets the directory."""

    prepare: Callable[[Path], object]
    act: Callable[[Path], object]
    state: Callable[[Path], Any]
    replaced: str = ""
    """Pattern of the files that the write replaces."""
    repeats: bool = False
    """Whether a second write changes nothing."""


@functools.cache
def memory() -> InternalMemory:
    """Two tasks with random arrays over a backbone of four blocks."""
    base = [
        StoredExpert(Expert(jnp.full((64, 16), float(block)), jnp.zeros(16)), None, None)
        for block in range(4)
    ]
    memory = InternalMemory(tuple((expert,) for expert in base))
    memory = small.grown(memory, "task 0", ["adapt:0", "new", "reuse:0", "skip"], 0)
    return small.grown(memory, "task 1", ["adapt:1", "reuse:1", "skip", "new"], 1)


def _contents(root: Path) -> list[str]:
    for directory in saved_tasks(root):
        load_task(directory)
    return [load_manifest(directory)["content_sha256"] for directory in saved_tasks(root)]


def _save(root: Path, index: int) -> None:
    rng = np.random.default_rng(index)
    arrays = {"x": rng.normal(size=50), "y": {"z": rng.normal(size=(3, 4)).astype(np.float32)}}
    save_task(root / f"{index:03d}-a", arrays, {"name": f"task {index}"})


def _record(directory: Path) -> None:
    record = Record(directory)
    for index in range(3):
        record.write("learned", index=index, values=[0.1 * index] * 5)


def _entries(directory: Path) -> list[dict[str, Any]]:
    Record(directory)  # as the next process does
    return [
        {key: value for key, value in entry.items() if key != "time"} for entry in read(directory)
    ]


def _shown(file: str) -> Callable[[Path], str | None]:
    def show(directory: Path) -> str | None:
        place = directory / file
        return place.read_text() if place.exists() else None

    return show


def _held(directory: Path) -> None:
    with hold(directory):
        pass


def _config(directory: Path) -> Any:
    file = directory / "run" / "config.json"
    return json.loads(file.read_text()) if file.exists() else None


RUN = {"seed": 0, "tasks": ["a", "b"], "rates": [0.1] * 20}


SCENARIOS = {
    "save_memory_task": Scenario(
        lambda root: save_memory_task(root, memory(), 0, rank=2),
        lambda root: save_memory_task(root, memory(), 1, rank=2),
        _contents,
    ),
    "save_task": Scenario(lambda root: _save(root, 0), lambda root: _save(root, 1), _contents),
    "write_atomically": Scenario(
        lambda root: (root / "results.json").write_text("old " * 100),
        lambda root: write_atomically(root / "results.json", "new " * 100),
        _shown("results.json"),
        replaced="results.json",
        repeats=True,
    ),
    "Record.write": Scenario(
        _record,
        lambda root: Record(root).write("evaluated", index=1, accuracy=[0.5] * 50),
        _entries,
        replaced="metrics.jsonl",
    ),
    "Record.keep": Scenario(
        _record,
        lambda root: Record(root).keep(lambda entry: entry["index"] < 2),
        _entries,
        replaced="metrics.jsonl",
        repeats=True,
    ),
    "claim": Scenario(
        lambda root: None,
        lambda root: claim(root / "run", RUN),
        _config,
        replaced="config.json",
        repeats=True,
    ),
    "hold": Scenario(lambda root: None, _held, lambda root: None, repeats=True),
}
