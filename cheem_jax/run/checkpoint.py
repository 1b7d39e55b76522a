"""What stays on disk: one immutable directory per learned task, holding only what that task added.

    checkpoints/cheem/003-textures/arrays/        Orbax: new experts, head, centroids, means
    checkpoints/cheem/003-textures/task.json      names, classes, architecture, experts
    checkpoints/cheem/003-textures/manifest.json  a hash per file, against damage, and the content
    hash

A directory appears under its final name only when it is complete and on the disk, so an interrupted
write is never read. Opening it compares every file with the manifest, and what was read with the
content hash. That one says what a checkpoint *is*: equal for equal arrays and metadata, whatever
Orbax calls its files.
"""

import contextlib
import functools
import hashlib
import itertools
import json
import logging
import math
import os
import re
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cheem_jax.core.atomic import to_disk
from cheem_jax.core.paths import absolute

FORMAT = "cheem_jax-task/2"
MANIFEST = "manifest.json"
_ATTEMPTS = itertools.count()
Arrays = Mapping[str, Any]


def task_directory(root: Path, index: int, name: str) -> Path:
    """Where task `index` of a method's checkpoints lives."""
    slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "task"
    return root / f"{index:03d}-{slug}"


class CorruptedCheckpoint(ValueError):
    """A checkpoint with a missing or changed file, or bytes that do not parse; only a copy brings
    it back."""


def save_task(directory: Path, arrays: Arrays, meta: Mapping[str, Any]) -> None:
    """Write one task's arrays and metadata; refuses to touch a directory that exists.

    In a job of several processes, which all hold them, the first one writes and the others wait.
    Raises OSError where it cannot be written, and then leaves nothing.
    """
    # late, here and below: JAX and Orbax take long to import, and whoever only reads hashes and
    # names needs neither
    from cheem_jax.engine import hosts

    directory = absolute(directory)
    found = hosts.fetch(dict(arrays))
    hosts.first_does(lambda: _write(directory, found, meta))


def _write(directory: Path, arrays: Arrays, meta: Mapping[str, Any]) -> None:
    import jax

    from cheem_jax.engine import hosts

    if directory.exists():
        raise FileExistsError(f"{directory} exists already; a learned task is never overwritten")
    for left in directory.parent.glob(f".{directory.name}.*partial"):
        shutil.rmtree(left, ignore_errors=True)
    # of this attempt alone, whatever one that failed still writes
    partial = directory.with_name(f".{directory.name}.{os.getpid()}-{next(_ATTEMPTS)}.partial")
    meta = {"format": FORMAT, **meta}
    try:
        partial.mkdir(parents=True)
        # Orbax logs a failing disk as pages of tracebacks; the exception that follows says it once
        logger = logging.getLogger("absl")
        was_disabled = logger.disabled
        logger.disabled = True
        try:
            _checkpointer(hosts.count(), hosts.index()).save(partial / "arrays", arrays)
        finally:
            logger.disabled = was_disabled
        (partial / "task.json").write_text(_text(meta))
        manifest = {
            "format": FORMAT,
            "content_sha256": content_hash(arrays, meta),
            "files": _hash_files(partial),
        }
        (partial / MANIFEST).write_text(_text(manifest))
        for file in (*sorted(partial.rglob("*")), partial):
            to_disk(file)
        os.replace(partial, directory)
        to_disk(directory.parent)
        to_disk(directory.parent.parent)  # which may be new as well
    except (
        Exception
    ) as error:  # Orbax writes in C++ and raises many kinds; all mean the same to a reader
        _remove_for_good(partial)
        reason = _first_line(error)
        reason = (
            reason if len(reason) < 160 else f"... {reason[-120:]}"
        )  # what came first in a chain comes last
        megabytes = sum(getattr(leaf, "nbytes", 0) for leaf in jax.tree.leaves(arrays)) / 2**20
        raise OSError(
            f"checkpoint {directory} of {megabytes:,.1f} MB could not be written ({reason});"
            " nothing saved before is touched, and the same command resumes from there once the"
            " disk takes it"
        ) from error


def _remove_for_good(partial: Path) -> None:
    """Remove what threads of a save that failed may go on writing for a moment."""
    until = time.monotonic() + 0.3
    times_gone = 0
    while times_gone < 3 and time.monotonic() < until:
        shutil.rmtree(partial, ignore_errors=True)
        time.sleep(0.02)
        times_gone = 0 if partial.exists() else times_gone + 1


@functools.cache
def _checkpointer(num_processes: int, process: int) -> Any:
    """Orbax for this process alone: each contains all that is saved, so none waits for the others'
    parts.

    One serves every task, since making one takes longer than reading a small task.
    """
    import orbax.checkpoint as ocp

    if num_processes == 1:
        return ocp.PyTreeCheckpointer()
    alone = ocp.options.MultiprocessingOptions(
        primary_host=process,
        active_processes={process},
        barrier_sync_key_prefix=f"process{process}",
    )
    return ocp.Checkpointer(
        ocp.PyTreeCheckpointHandler(multiprocessing_options=alone), multiprocessing_options=alone
    )


def load_task(directory: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arrays (NumPy) and metadata of one task.

    Raises CorruptedCheckpoint where files are missing, changed or do not parse; ValueError for
    another format; OSError or MemoryError where it cannot be read now. Each names the directory and
    the reason.
    """
    directory = absolute(directory)
    meta = load_meta(directory)
    manifest = load_manifest(directory)
    with named(directory):
        _check_files(directory, manifest["files"])
        arrays = _restore(directory / "arrays")
        if content_hash(arrays, meta) != manifest["content_sha256"]:
            raise CorruptedCheckpoint("its content differs from the hash in its manifest")
    return arrays, meta


def check_task(directory: Path) -> dict[str, Any]:
    """Metadata of one task whose files have the hashes of its manifest; raises as `load_task`.

    Arrays are not read, so the content hash is not compared.
    """
    meta = load_meta(directory)
    manifest = load_manifest(directory)
    with named(directory):
        _check_files(directory, manifest["files"])
    return meta


def _check_files(directory: Path, files: Mapping[str, str]) -> None:
    found = _hash_files(
        directory, files
    )  # others, such as those of a system that shows folders, change nothing
    if wrong := sorted(name for name, sha in files.items() if found.get(name) != sha):
        raise CorruptedCheckpoint(f"missing or changed files: {wrong[:5]}")


def each_task(directories: Sequence[Path]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Several tasks one after the other, up to the first corrupted one; then one ValueError names
    all of these."""
    wrong = []
    for directory in directories:
        try:
            found = load_task(directory)
        except ValueError as error:
            wrong.append(error)
        else:
            if not wrong:
                yield found
    if wrong:
        kind = (
            CorruptedCheckpoint
            if any(isinstance(error, CorruptedCheckpoint) for error in wrong)
            else ValueError
        )
        others = "; the other tasks are intact" if len(wrong) < len(directories) else ""
        raise kind(" / ".join(map(str, wrong)) + others)


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
        if isinstance(found, str) and found.startswith("cheem_jax-") and found != FORMAT:
            raise ValueError(f"the format in its {name} is {found!r}, expected {FORMAT!r}")
        if found != FORMAT or text != _text(value):
            raise CorruptedCheckpoint(f"its {name} was changed")
        return value


def _restore(arrays: Path) -> dict[str, Any]:
    """What Orbax kept, unless it is far more than its files can hold: constants are stored in
    almost nothing."""
    import jax

    from cheem_jax.engine import hosts

    size = sum(file.stat().st_size for file in arrays.rglob("*") if file.is_file())
    checkpointer = _checkpointer(hosts.count(), hosts.index())
    try:
        described: Any = checkpointer.metadata(arrays)
        leaves = jax.tree.leaves(described.item_metadata.tree)
        promised = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)
        if promised <= max(2**30, 100 * size):
            return checkpointer.restore(arrays)
    except MemoryError:
        raise
    # Orbax and TensorStore raise many kinds, and the hashes said that the files are right
    except Exception as error:
        raise OSError(
            "its files have the hashes of its manifest, but Orbax could not read them:"
            f" {_first_line(error)[:500]}"
        ) from error
    raise CorruptedCheckpoint(f"its files of {size} bytes promise {promised} bytes of arrays")


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


@contextlib.contextmanager
def named(directory: Path) -> Iterator[None]:
    """Whatever goes wrong while a checkpoint is read names it, and says `corrupted` only of what
    is.

    A missing file and bytes that do not parse become CorruptedCheckpoint; another failure of the
    system stays an OSError; content that does not fit becomes a ValueError.
    """
    try:
        yield
    except MemoryError:
        raise
    except Exception as error:
        if str(error).startswith(f"checkpoint {directory} "):  # an inner block has named it already
            raise
        reason = f"it lacks {error}" if isinstance(error, KeyError) else _first_line(error)[:500]
        if isinstance(error, CORRUPTED):
            raise CorruptedCheckpoint(
                f"checkpoint {directory} is corrupted ({reason}); restore it from a copy"
            ) from error
        if isinstance(error, OSError):
            raise OSError(f"checkpoint {directory} cannot be read ({reason})") from error
        raise ValueError(f"checkpoint {directory} does not fit ({reason})") from error


CORRUPTED = (
    CorruptedCheckpoint,
    FileNotFoundError,
    IsADirectoryError,
    NotADirectoryError,
    json.JSONDecodeError,
    UnicodeDecodeError,
    RecursionError,
)
"""What reading raises where a file is missing, is none, or does not parse."""


def content_hash(arrays: Arrays, meta: Mapping[str, Any]) -> str:
    """SHA-256 over sorted leaf paths, dtypes, shapes and raw bytes, and over the metadata."""
    import jax

    digest = hashlib.sha256(json.dumps(meta, sort_keys=True).encode())
    leaves = {
        jax.tree_util.keystr(path): np.asarray(leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(arrays)
    }
    for path, leaf in sorted(leaves.items()):
        little = np.ascontiguousarray(leaf.astype(leaf.dtype.newbyteorder("<"), copy=False))
        digest.update(f"{path} {leaf.dtype.name} {list(leaf.shape)}\n".encode())
        digest.update(little.tobytes())
    return digest.hexdigest()


def _text(value: Mapping[str, Any]) -> str:
    return json.dumps(value, indent=1) + "\n"


def files_of(directory: Path) -> list[str]:
    """Names of the files that belong to one task's checkpoint, which may lie beside foreign ones;
    as `load_task`."""
    return [*sorted(load_manifest(directory)["files"]), MANIFEST]


def copy_task(
    source: Path, target: Path, copy: Callable[[str, str], object] = shutil.copy2
) -> None:
    """Copy what belongs to one task's checkpoint; `copy` has the arguments of `shutil.copy2`."""
    for name in files_of(source):
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        copy(str(source / name), str(target / name))


def _hash_files(directory: Path, names: Collection[str] | None = None) -> dict[str, str]:
    """Hashes by name of the files below a directory, of those in `names` alone if it is given."""
    files = (
        file for file in sorted(directory.rglob("*")) if file.is_symlink() or not file.is_dir()
    )
    found = {file.relative_to(directory).as_posix(): file for file in files}
    found.pop(MANIFEST, None)
    return {
        name: _hash_file(file) for name, file in found.items() if names is None or name in names
    }


def _hash_file(file: Path) -> str:
    if file.is_symlink() or not file.is_file():
        return "no regular file"
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def saved_tasks(root: Path) -> list[Path]:
    """The directories of tasks 0, 1, ... without a gap; `003.forgotten` keeps the place of one that
    is forgotten."""
    names: dict[str, str] = {}
    if root.is_dir():
        for name in sorted(
            os.listdir(root), reverse=True
        ):  # the first of several comes last and stays
            if match := re.fullmatch(
                r"(\d{3,})(-[a-z0-9-]+|\.forgotten)", name
            ):  # no copy of one beside it
                names[match[1]] = name
    found: list[Path] = []
    while (number := f"{len(found):03d}") in names:
        found.append(root / names[number])
    return found
