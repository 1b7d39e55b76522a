"""What stays on disk: one immutable directory per learned task, holding only what that task added.

    checkpoints/cheem/003-textures/arrays/     Orbax: new experts, head, centroids, means
    checkpoints/cheem/003-textures/task.json   names, classes, architecture, experts

A directory appears under its final name only when it is complete, so an interrupted write is never read.
"""

import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from cheem_jax.architecture import from_strings, to_strings
from cheem_jax.ops import Expert, LowRank
from cheem_jax.pool import Head, Memory, Pool, TaskMemory, grow

FORMAT = "cheem_jax-task/1"
Arrays = Mapping[str, Any]


def task_directory(root: Path, index: int, name: str) -> Path:
    """Where task `index` of a method's checkpoints lives."""
    slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "task"
    return root / f"{index:03d}-{slug}"


def save_task(directory: Path, arrays: Arrays, meta: Mapping[str, Any]) -> None:
    """Write one task's arrays and metadata; refuses to touch a directory that exists."""
    if directory.exists():
        raise FileExistsError(f"{directory} exists already; a learned task is never overwritten")
    partial = directory.with_name(f".{directory.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    ocp.PyTreeCheckpointer().save((partial / "arrays").absolute(), jax.tree.map(np.asarray, dict(arrays)))
    (partial / "task.json").write_text(json.dumps({"format": FORMAT, **meta}, indent=1) + "\n")
    os.replace(partial, directory)


def load_task(directory: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arrays (NumPy) and metadata of one task; a damaged directory is named."""
    try:
        meta = load_meta(directory)
        arrays = ocp.PyTreeCheckpointer().restore((directory / "arrays").absolute())
    except Exception as error:  # Orbax raises many kinds; all mean the same to a reader
        raise ValueError(f"checkpoint {directory} cannot be read ({error}); restore it from a copy") from error
    return arrays, meta


def load_meta(directory: Path) -> dict[str, Any]:
    """Metadata of one task alone."""
    meta = json.loads((directory / "task.json").read_text())
    if meta.get("format") != FORMAT:
        raise ValueError(f"its format is {meta.get('format')!r}, expected {FORMAT!r}")
    return meta


def saved_tasks(root: Path) -> list[Path]:
    """The directories of tasks 0, 1, ... without a gap."""
    found: list[Path] = []
    while matches := sorted(root.glob(f"{len(found):03d}-*")):
        found.append(matches[0])
    return found


def save_memory_task(root: Path, memory: Memory, index: int, rank: int) -> Path:
    """Save what task `index` added to the memory; `rank` is that of its Adapt pairs."""
    task = memory.tasks[index]
    experts = {}
    for block, expert in enumerate(task.experts):
        if expert is not None and memory.pool[block][expert].origin == index:
            experts[str(block)] = memory.pool[block][expert].params._asdict()
    arrays = {
        "experts": experts,
        "head": task.head._asdict(),
        "means": task.means,
        "centroids": task.centroids,
    }
    meta = {
        "name": task.name,
        "classes": list(task.classes),
        "architecture": to_strings(task.architecture),
        "experts": list(task.experts),
        "rank": rank,
    }
    directory = task_directory(root, index, task.name)
    save_task(directory, arrays, meta)
    return directory


def open_memory(root: Path, pool: Pool) -> Memory:
    """The memory of all saved tasks, grown from the backbone's own pool by reading one small directory per task."""
    memory = Memory(pool)
    for index, directory in enumerate(saved_tasks(root)):
        arrays, meta = load_task(directory)
        arrays = jax.tree.map(jnp.asarray, arrays)
        learned: dict[int, Expert | LowRank] = {
            int(block): LowRank(**leaves) if "down" in leaves else Expert(**leaves)
            for block, leaves in arrays["experts"].items()
        }
        architecture = from_strings(meta["architecture"])
        pool, experts = grow(memory.pool, architecture, learned, index)
        if list(experts) != meta["experts"]:
            raise ValueError(
                f"checkpoint {directory} uses experts {meta['experts']}, but the pool before it gives {list(experts)}; "
                f"an earlier task is missing or from another run"
            )
        task = TaskMemory(
            meta["name"], tuple(meta["classes"]), architecture, experts, Head(**arrays["head"]),
            np.asarray(arrays["means"]), np.asarray(arrays["centroids"]),
        )  # fmt: skip
        memory = Memory(pool, (*memory.tasks, task))
    return memory
