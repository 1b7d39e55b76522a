"""What stays on disk: one immutable directory per learned task, holding only what that task added.

    checkpoints/cheem/003-textures/arrays/        Orbax: new experts, head, centroids, means
    checkpoints/cheem/003-textures/task.json      names, classes, architecture, experts
    checkpoints/cheem/003-textures/manifest.json  a hash per file, against damage, and the content hash

A directory appears under its final name only when it is complete and on the disk, so an interrupted write is never
read. Opening it compares every file with the manifest, and what was read with the content hash. That one says what a
checkpoint *is*: equal for equal arrays and metadata, whatever Orbax calls its files.
"""

import contextlib
import hashlib
import itertools
import json
import logging
import math
import os
import re
import shutil
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore

from cheem_jax import hosts
from cheem_jax.atomic import to_disk

FORMAT = "cheem_jax-task/2"
MANIFEST = "manifest.json"
Arrays = Mapping[str, Any]


def task_directory(root: Path, index: int, name: str) -> Path:
    """Where task `index` of a method's checkpoints lives."""
    slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "task"
    return root / f"{index:03d}-{slug}"


def save_task(directory: Path, arrays: Arrays, meta: Mapping[str, Any]) -> None:
    """Write one task's arrays and metadata; refuses to touch a directory that exists.

    In a job of several processes, which all hold them, the first one writes and the others wait. Raises OSError where
    it cannot be written, and then leaves nothing.
    """
    found = hosts.fetch(dict(arrays))
    hosts.first_does(lambda: _write(directory, found, meta))


def _write(directory: Path, arrays: Arrays, meta: Mapping[str, Any]) -> None:
    if directory.exists():
        raise FileExistsError(f"{directory} exists already; a learned task is never overwritten")
    for left in directory.parent.glob(f".{directory.name}.*partial"):
        shutil.rmtree(left, ignore_errors=True)
    # of this attempt alone, whatever one that failed still writes
    partial = directory.with_name(f".{directory.name}.{os.getpid()}-{next(_ATTEMPTS)}.partial")
    meta = {"format": FORMAT, **meta}
    try:
        partial.mkdir(parents=True)
        with _quietly():
            _checkpointer().save((partial / "arrays").absolute(), arrays)
        (partial / "task.json").write_text(_text(meta))
        manifest = {"format": FORMAT, "content_sha256": content_hash(arrays, meta), "files": _hash_files(partial)}
        (partial / MANIFEST).write_text(_text(manifest))
        for file in (*sorted(partial.rglob("*")), partial):
            to_disk(file)
        os.replace(partial, directory)
        to_disk(directory.parent)
        to_disk(directory.parent.parent)  # which may be new as well
    except Exception as error:  # Orbax writes in C++ and raises many kinds; all mean the same to a reader
        _remove_for_good(partial)
        reason = (str(error) or type(error).__name__).splitlines()[0]
        reason = reason if len(reason) < 160 else f"... {reason[-120:]}"  # what came first in a chain comes last
        raise OSError(
            f"checkpoint {directory} could not be written ({reason}); nothing saved before is touched, and the same "
            "command goes on from there once the disk takes it"
        ) from error


def _remove_for_good(partial: Path) -> None:
    """Remove what threads of a save that failed may go on writing for a moment."""
    until, times_gone = time.monotonic() + 0.3, 0
    while times_gone < 3 and time.monotonic() < until:
        shutil.rmtree(partial, ignore_errors=True)
        time.sleep(0.02)
        times_gone = 0 if partial.exists() else times_gone + 1


_ATTEMPTS = itertools.count()


def _checkpointer() -> ocp.Checkpointer:
    """Orbax for this process alone: every one holds all that is saved, so none has to wait for the others' parts."""
    if hosts.count() == 1:
        return ocp.PyTreeCheckpointer()
    process = hosts.index()
    alone = ocp.options.MultiprocessingOptions(
        primary_host=process, active_processes={process}, barrier_sync_key_prefix=f"process{process}"
    )
    return ocp.Checkpointer(ocp.PyTreeCheckpointHandler(multiprocessing_options=alone), multiprocessing_options=alone)


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Threads of Orbax's tell of a failing disk in pages of tracebacks; the exception that follows says it once."""
    logger = logging.getLogger("absl")
    told = logger.disabled, threading.excepthook, sys.unraisablehook, sys.excepthook
    logger.disabled, threading.excepthook, sys.unraisablehook, sys.excepthook = True, *[_ignore] * 3
    try:
        yield
    finally:
        logger.disabled, threading.excepthook, sys.unraisablehook, sys.excepthook = told


def _ignore(*_: object) -> None:
    pass


def load_task(directory: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arrays (NumPy) and metadata of one task. Raises ValueError naming the directory where anything is damaged."""
    meta, manifest = load_meta(directory), load_manifest(directory)
    with named(directory):
        found = _hash_files(directory)
        if wrong := sorted(name for name in found.keys() | manifest["files"].keys() if _differs(name, found, manifest)):
            raise ValueError(f"damaged, missing or foreign files: {wrong[:5]}")
        arrays = _restore(directory / "arrays")
        if content_hash(arrays, meta) != manifest["content_sha256"]:
            raise ValueError("its content is not what its manifest says")
    return arrays, meta


def load_tasks(directories: Sequence[Path]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Several tasks; one ValueError names every damaged one."""
    return list(each_task(directories))


def each_task(directories: Sequence[Path]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """The same one after the other, up to the first damaged one; the ValueError comes at the end."""
    damaged = []
    for directory in directories:
        try:
            found = load_task(directory)
        except ValueError as error:
            damaged.append(str(error))
        else:
            if not damaged:
                yield found
    if damaged:
        others = "; the other tasks are whole" if len(damaged) < len(directories) else ""
        raise ValueError(" / ".join(damaged) + others)


def load_meta(directory: Path) -> dict[str, Any]:
    """Metadata of one task alone; raises as `load_task`."""
    return _load_json(directory, "task.json")


def load_manifest(directory: Path) -> dict[str, Any]:
    """Hashes of one task's files and of its content; raises as `load_task`."""
    return _load_json(directory, MANIFEST)


def _load_json(directory: Path, name: str) -> dict[str, Any]:
    with named(directory):
        text = (directory / name).read_text()
        value = json.loads(text)
        found = value.get("format") if isinstance(value, dict) else None
        if found != FORMAT:
            raise ValueError(f"the format in its {name} is {found!r}, expected {FORMAT!r}")
        if text != _text(value):
            raise ValueError(f"its {name} is damaged")
        return value


def _restore(arrays: Path) -> dict[str, Any]:
    """What Orbax kept, unless it is far more than its files can hold: constants are stored in almost nothing."""
    size = sum(file.stat().st_size for file in arrays.rglob("*") if file.is_file())
    tree = json.loads((arrays / "_METADATA").read_text())
    if _is_plain(tree):
        return _read_plain(arrays, tree, size)
    checkpointer = _checkpointer()
    told: Any = checkpointer.metadata(arrays.absolute())
    leaves = jax.tree.leaves(told.item_metadata.tree)
    _check_promised(sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves), size)
    return checkpointer.restore(arrays.absolute())


def _is_plain(tree: Mapping[str, Any]) -> bool:
    """Whether Orbax's description is of dicts of arrays in the one form that `save_task` gives them today."""
    leaves = [*tree["tree_metadata"].values()]
    return (
        (tree["use_ocdbt"], tree["use_zarr3"]) == (True, False)
        and all(leaf["value_metadata"]["value_type"] in ("np.ndarray", "Dict") for leaf in leaves)
        and all(key["key_type"] == 2 for leaf in leaves for key in leaf["key_metadata"])
    )


def _read_plain(arrays: Path, tree: Mapping[str, Any], size: int) -> dict[str, Any]:
    """The same arrays straight from TensorStore, which Orbax stands on: a tenth of the time for small tasks."""
    store = {"driver": "ocdbt", "base": {"driver": "file", "path": f"{arrays.absolute()}/"}}
    found: dict[str, Any] = {}
    places, opening, context = [], [], tensorstore.Context()
    for leaf in tree["tree_metadata"].values():
        *keys, last = (key["key"] for key in leaf["key_metadata"])
        place = found
        for key in keys:
            place = place.setdefault(key, {})
        if leaf["value_metadata"]["value_type"] == "Dict":
            place[last] = {}
            continue
        places.append((place, last))
        # all at once: TensorStore reads in threads of its own
        path = ".".join((*keys, last)) + "/"
        opening.append(
            tensorstore.open(
                {"driver": "zarr", "kvstore": {**store, "path": path}}, open=True, read=True, context=context
            )
        )
    opened = [each.result() for each in opening]
    _check_promised(sum(math.prod(array.shape) * array.dtype.numpy_dtype.itemsize for array in opened), size)
    reading = [array.read() for array in opened]
    for (place, last), read in zip(places, reading, strict=True):
        place[last] = np.asarray(read.result())
    return found


def _check_promised(promised: int, size: int) -> None:
    if promised > max(2**30, 100 * size):
        raise ValueError(f"its files of {size} bytes promise {promised} bytes of arrays")


@contextlib.contextmanager
def named(directory: Path) -> Iterator[None]:
    """Whatever is wrong with what a checkpoint holds becomes a ValueError that names it."""
    try:
        yield
    except Exception as error:  # Orbax raises many kinds; all mean the same to a reader
        reason = str(error) or type(error).__name__
        raise ValueError(f"checkpoint {directory} cannot be read ({reason:.500}); restore it from a copy") from error


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
    files = (file for file in sorted(directory.rglob("*")) if file.is_symlink() or not file.is_dir())
    names = {file.relative_to(directory).as_posix(): file for file in files}
    return {name: _hash_file(file) for name, file in names.items() if name != MANIFEST}


def _hash_file(file: Path) -> str:
    if file.is_symlink() or not file.is_file():
        return "no regular file"
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _differs(name: str, found: Mapping[str, str], manifest: Mapping[str, Any]) -> bool:
    return found.get(name) != manifest["files"].get(name)


def saved_tasks(root: Path) -> list[Path]:
    """The directories of tasks 0, 1, ... without a gap; `003.forgotten` keeps the place of one that is forgotten."""
    names: dict[str, str] = {}
    if root.is_dir():
        for name in sorted(os.listdir(root), reverse=True):  # the first of several comes last and stays
            if match := re.match(r"\d{3,}(?=[-.])", name):
                names[match[0]] = name
    found: list[Path] = []
    while (number := f"{len(found):03d}") in names:
        found.append(root / names[number])
    return found
