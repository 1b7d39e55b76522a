"""What stays on disk: one immutable directory per learned task, holding only what that task added.

    checkpoints/cheem/003-textures/arrays/        Orbax: new experts, head, centroids, means
    checkpoints/cheem/003-textures/task.json      names, classes, architecture, experts
    checkpoints/cheem/003-textures/manifest.json  a hash per file, against damage, and the content hash

A directory appears under its final name only when it is complete and on the disk, so an interrupted write is never
read. Opening it compares every file with the manifest, and what was read with the content hash. That one says what a
checkpoint *is*: equal for equal arrays and metadata, whatever Orbax calls its files.
"""

import functools
import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from cheem_jax.architecture import from_strings, to_strings
from cheem_jax.atomic import to_disk
from cheem_jax.ops import Expert, LowRank
from cheem_jax.pool import Head, Memory, Pool, StoredExpert, TaskMemory, grow

FORMAT = "cheem_jax-task/2"
MANIFEST = "manifest.json"
Arrays = Mapping[str, Any]


def task_directory(root: Path, index: int, name: str) -> Path:
    """Where task `index` of a method's checkpoints lives."""
    slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "task"
    return root / f"{index:03d}-{slug}"


def save_task(directory: Path, arrays: Arrays, meta: Mapping[str, Any]) -> None:
    """Write one task's arrays and metadata; refuses to touch a directory that exists.

    Raises OSError where it cannot be written, and then leaves nothing.
    """
    if directory.exists():
        raise FileExistsError(f"{directory} exists already; a learned task is never overwritten")
    partial = directory.with_name(f".{directory.name}.partial")
    arrays, meta = jax.tree.map(np.asarray, dict(arrays)), {"format": FORMAT, **meta}
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        ocp.PyTreeCheckpointer().save((partial / "arrays").absolute(), arrays)
        (partial / "task.json").write_text(_text(meta))
        manifest = {"format": FORMAT, "content_sha256": content_hash(arrays, meta), "files": _hash_files(partial)}
        (partial / MANIFEST).write_text(_text(manifest))
        for file in (*sorted(partial.rglob("*")), partial):
            to_disk(file)
        os.replace(partial, directory)
        to_disk(directory.parent)
    except Exception as error:  # Orbax writes in C++ and raises many kinds; all mean the same to a reader
        shutil.rmtree(partial, ignore_errors=True)
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise OSError(
            f"checkpoint {directory} could not be written ({reason}); nothing saved before is touched, and the same "
            "command goes on from there once the disk takes it"
        ) from error


def load_task(directory: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arrays (NumPy) and metadata of one task. Raises ValueError naming the directory where anything is damaged."""
    try:
        meta, manifest = load_meta(directory), load_manifest(directory)
        found = _hash_files(directory)
        if wrong := sorted(name for name in found.keys() | manifest["files"].keys() if _differs(name, found, manifest)):
            raise ValueError(f"damaged, missing or foreign files: {wrong[:5]}")
        arrays = ocp.PyTreeCheckpointer().restore((directory / "arrays").absolute())
        if content_hash(arrays, meta) != manifest["content_sha256"]:
            raise ValueError("its content is not what its manifest says")
    except Exception as error:  # Orbax raises many kinds; all mean the same to a reader
        raise ValueError(f"checkpoint {directory} cannot be read ({error}); restore it from a copy") from error
    return arrays, meta


def load_meta(directory: Path) -> dict[str, Any]:
    """Metadata of one task alone."""
    meta = json.loads((directory / "task.json").read_text())
    if meta.get("format") != FORMAT:
        raise ValueError(f"its format is {meta.get('format')!r}, expected {FORMAT!r}")
    return meta


def load_manifest(directory: Path) -> dict[str, Any]:
    """Hashes of one task's files and of its content."""
    text = (directory / MANIFEST).read_text()
    manifest = json.loads(text)
    if manifest.get("format") != FORMAT:
        raise ValueError(f"the format of its manifest is {manifest.get('format')!r}, expected {FORMAT!r}")
    if text != _text(manifest):
        raise ValueError("its manifest is damaged")
    return manifest


def content_hash(arrays: Arrays, meta: Mapping[str, Any]) -> str:
    """SHA-256 over sorted leaf paths, dtypes, shapes and raw bytes, and over the metadata."""
    digest = hashlib.sha256(json.dumps(meta, sort_keys=True).encode())
    leaves = {
        jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(arrays)
    }
    for path, leaf in sorted(leaves.items()):
        little = np.ascontiguousarray(leaf.astype(leaf.dtype.newbyteorder("<"), copy=False))
        digest.update(f"{path} {leaf.dtype.name} {list(leaf.shape)}\n".encode())
        digest.update(little.tobytes())
    return digest.hexdigest()


def _text(value: Mapping[str, Any]) -> str:
    return json.dumps(value, indent=1) + "\n"


def _hash_files(directory: Path) -> dict[str, str]:
    files = (file for file in sorted(directory.rglob("*")) if file.is_file())
    names = {file.relative_to(directory).as_posix(): file for file in files}
    return {name: hashlib.sha256(file.read_bytes()).hexdigest() for name, file in names.items() if name != MANIFEST}


def _differs(name: str, found: Mapping[str, str], manifest: Mapping[str, Any]) -> bool:
    return found.get(name) != manifest["files"].get(name)


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
    """The memory of all saved tasks, grown from the backbone's own pool by reading one small directory per task.

    Raises ValueError that names every damaged task, not the first alone.
    """
    read = _read_all(saved_tasks(root))
    if damaged := [str(found) for found in read if isinstance(found, ValueError)]:
        others = "; the other tasks are whole" if len(damaged) < len(read) else ""
        raise ValueError(" / ".join(damaged) + others)
    memory = Memory(pool)
    for directory, found in zip(saved_tasks(root), read, strict=True):
        assert not isinstance(found, ValueError)
        memory = _with_task(memory, directory, *found)
    return memory


def with_task(memory: Memory, directory: Path) -> Memory:
    """A memory and the next task, as it is saved."""
    return _with_task(memory, directory, *load_task(directory))


def open_usable(root: Path, pool: Pool) -> tuple[Memory, dict[str, str]]:
    """What of a damaged memory still answers exactly as before, and why each other task does not, by directory.

    What builds on a damaged task's experts is lost with it. The memory is for answering: its pool has gaps.
    """
    blocks, tasks, lost = [list(block) for block in pool], list[TaskMemory](), dict[str, str]()
    directories = saved_tasks(root)
    for index, (directory, found) in enumerate(zip(directories, _read_all(directories), strict=True)):
        if isinstance(found, ValueError):
            lost[directory.name] = str(found)
            continue
        task, learned = _task_of(*found)
        missing = []
        for number, (block, choice, expert) in enumerate(zip(blocks, task.architecture, task.experts, strict=True)):
            block += [_gap()] * (1 + max(-1 if e is None else e for e in (expert, choice.expert)) - len(block))
            needed = choice.expert if number in learned else expert
            if needed is not None and block[needed] is _gap():
                missing.append(number)
        if missing:
            lost[directory.name] = f"builds on experts of a damaged task in blocks {missing}"
            continue
        for number, params in learned.items():
            expert = task.experts[number]
            assert expert is not None
            blocks[number][expert] = StoredExpert(params, task.architecture[number].expert, index)
        tasks.append(task)
    return Memory(tuple(map(tuple, blocks)), tuple(tasks)), lost


@functools.cache
def _gap() -> StoredExpert:
    """Stands where an expert is lost; of a shape that nothing can be computed with."""
    return StoredExpert(Expert(jnp.zeros((0, 0)), jnp.zeros(0)), None, None)


def _read_all(directories: Sequence[Path]) -> list[tuple[dict[str, Any], dict[str, Any]] | ValueError]:
    def read(directory: Path) -> tuple[dict[str, Any], dict[str, Any]] | ValueError:
        try:
            return load_task(directory)
        except ValueError as error:
            return error

    return [read(directory) for directory in directories]


def _with_task(memory: Memory, directory: Path, arrays: Arrays, meta: Mapping[str, Any]) -> Memory:
    task, learned = _task_of(arrays, meta)
    pool, experts = grow(memory.pool, task.architecture, learned, len(memory.tasks))
    if experts != task.experts:
        raise ValueError(
            f"checkpoint {directory} uses experts {list(task.experts)}, but the pool before it gives {list(experts)}; "
            f"an earlier task is missing or from another run"
        )
    return Memory(pool, (*memory.tasks, task))


def _task_of(arrays: Arrays, meta: Mapping[str, Any]) -> tuple[TaskMemory, dict[int, Expert | LowRank]]:
    arrays = jax.tree.map(jnp.asarray, arrays)
    learned: dict[int, Expert | LowRank] = {
        int(block): LowRank(**leaves) if "down" in leaves else Expert(**leaves)
        for block, leaves in arrays["experts"].items()
    }
    task = TaskMemory(
        meta["name"], tuple(meta["classes"]), from_strings(meta["architecture"]), tuple(meta["experts"]),
        Head(**arrays["head"]), np.asarray(arrays["means"]), np.asarray(arrays["centroids"]),
    )  # fmt: skip
    return task, learned
