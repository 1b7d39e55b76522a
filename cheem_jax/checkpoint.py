"""What stays on disk: one immutable directory per learned task, holding only what that task added.

    checkpoints/cheem/003-textures/arrays/        Orbax: new experts, head, centroids, means
    checkpoints/cheem/003-textures/task.json      names, classes, architecture, experts
    checkpoints/cheem/003-textures/manifest.json  a hash per file, against damage, and the content hash

A directory appears under its final name only when it is complete and on the disk, so an interrupted write is never
read. Opening it compares every file with the manifest, and what was read with the content hash. That one says what a
checkpoint *is*: equal for equal arrays and metadata, whatever Orbax calls its files.
"""

import hashlib
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

FORMAT = "cheem_jax-task/2"
MANIFEST = "manifest.json"
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
    arrays, meta = jax.tree.map(np.asarray, dict(arrays)), {"format": FORMAT, **meta}
    ocp.PyTreeCheckpointer().save((partial / "arrays").absolute(), arrays)
    (partial / "task.json").write_text(_text(meta))
    manifest = {"format": FORMAT, "content_sha256": content_hash(arrays, meta), "files": _hash_files(partial)}
    (partial / MANIFEST).write_text(_text(manifest))
    for file in (*sorted(partial.rglob("*")), partial):
        _to_disk(file)
    os.replace(partial, directory)
    _to_disk(directory.parent)


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


def _to_disk(file: Path) -> None:
    """A rename may outlive a power loss that its files did not, unless they are on the disk first."""
    handle = os.open(file, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


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
