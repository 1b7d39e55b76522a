"""Checkpoints: one immutable directory per learned task, with the experts and statistics that the
task added.

    checkpoints/cheem/003-textures/arrays/        Orbax: new experts, head, centroids, means
    checkpoints/cheem/003-textures/task.json      names, classes, architecture, experts
    checkpoints/cheem/003-textures/manifest.json  a hash per file and the content hash

A directory gets its final name after it is complete and synced to disk, so a partial checkpoint is
never read. Loading compares each file with its hash in the manifest, and the arrays with the
content hash. The content hash identifies a checkpoint: it depends only on arrays and metadata, not
on Orbax's file names.
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
    """Return the checkpoint directory of task `index`. `root` is the folder with the checkpoints of
    a method."""
    # the number makes the name unique, so a long name is cut: file systems limit names to 255 bytes
    slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:60] or "task"
    return root / f"{index:03d}-{slug}"


class CorruptedCheckpoint(ValueError):
    """A checkpoint has a missing or changed file, or bytes that do not parse. It can only be
    restored from a copy."""


def save_task(directory: Path, arrays: Arrays, meta: Mapping[str, Any]) -> None:
    """Write the arrays and metadata of a task into `directory`, which must not exist.

    In a job with more than one process, the first process writes and the others wait. Raises
    OSError if the checkpoint cannot be written; in this case, no file is left behind.
    """
    # Imported here, because JAX and Orbax are slow to import; reading hashes and names needs
    # neither.
    from cheem_jax.engine import hosts

    directory = absolute(directory)
    fetched = hosts.fetch(dict(arrays))
    hosts.run_on_first(lambda: _write(directory, fetched, meta))


def _write(directory: Path, arrays: Arrays, meta: Mapping[str, Any]) -> None:
    import jax

    from cheem_jax.engine import hosts

    if directory.exists():
        raise FileExistsError(f"{directory} exists; the checkpoint of a task is never overwritten")
    for remainder in directory.parent.glob(f".{directory.name}.*partial"):
        shutil.rmtree(remainder, ignore_errors=True)
    # The name is unique per attempt, because threads of a failed attempt can still write into its
    # directory.
    partial = directory.with_name(f".{directory.name}.{os.getpid()}-{next(_ATTEMPTS)}.partial")
    meta = {"format": FORMAT, **meta}
    try:
        partial.mkdir(parents=True)
        # Orbax logs disk errors with long tracebacks; the exception below reports them in one line.
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
        to_disk(directory.parent.parent)  # this directory can also be new
    # Orbax writes files by C++ code, which raises errors of many types; all of them mean that
    # writing failed.
    except Exception as error:
        _remove_for_good(partial)
        reason = _first_line(error)
        # the cause is at the end of a long message
        reason = reason if len(reason) < 160 else f"... {reason[-120:]}"
        megabytes = sum(getattr(leaf, "nbytes", 0) for leaf in jax.tree.leaves(arrays)) / 2**20
        raise OSError(
            f"checkpoint {directory} of {megabytes:,.1f} MB could not be written ({reason});"
            " earlier checkpoints are intact: make the disk writable, and repeat the command to"
            " resume"
        ) from error


def _remove_for_good(partial: Path) -> None:
    """Remove the files of a failed save. The threads of the save can still write for a short time,
    so the removal is repeated."""
    until = time.monotonic() + 0.3
    times_absent = 0
    while times_absent < 3 and time.monotonic() < until:
        shutil.rmtree(partial, ignore_errors=True)
        time.sleep(0.02)
        times_absent = 0 if partial.exists() else times_absent + 1


@functools.cache
def _checkpointer(num_processes: int, process: int) -> Any:
    """Make an Orbax checkpointer that never waits for other processes of a job. Waiting is
    unnecessary, because each process has all arrays.

    The checkpointer is cached, because making one is slower than reading a small task.
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
    """Load the arrays (NumPy) and the metadata of a task.

    Raises CorruptedCheckpoint if a file is missing, has changed or cannot be parsed; ValueError if
    the checkpoint has another format; and OSError or MemoryError if it cannot be read at present.
    Each error except MemoryError contains the directory and the reason.
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
    """Load the metadata of a task, and compare the files of its checkpoint with the hashes in the
    manifest. Raises the errors of `load_task`.

    The arrays are not parsed, so the content hash is not compared.
    """
    meta = load_meta(directory)
    manifest = load_manifest(directory)
    with named(directory):
        _check_files(directory, manifest["files"])
    return meta


def _check_files(directory: Path, files: Mapping[str, str]) -> None:
    # files that are not in the manifest, such as those of file browsers, are ignored
    hashes = _hash_files(directory, files)
    if wrong := sorted(name for name, sha in files.items() if hashes.get(name) != sha):
        raise CorruptedCheckpoint(f"missing or changed files: {wrong[:5]}")


def each_task(directories: Sequence[Path]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Load tasks one after another; stop yielding at the first corrupted task.

    If a task is corrupted, the remaining tasks are checked as well. A single ValueError then lists
    all corrupted tasks.
    """
    wrong = []
    for directory in directories:
        try:
            loaded = load_task(directory)
        except ValueError as error:
            wrong.append(error)
        else:
            if not wrong:
                yield loaded
    if wrong:
        kind = (
            CorruptedCheckpoint
            if any(isinstance(error, CorruptedCheckpoint) for error in wrong)
            else ValueError
        )
        others = "; the other tasks are intact" if len(wrong) < len(directories) else ""
        raise kind(" / ".join(map(str, wrong)) + others)


def load_meta(directory: Path) -> dict[str, Any]:
    """Load the metadata of one task. Raises the errors of `load_task`."""
    return _load_json(directory, "task.json")


def load_manifest(directory: Path) -> dict[str, Any]:
    """Load the manifest of one task: the hash of each file and the content hash. Raises the errors
    of `load_task`."""
    return _load_json(directory, MANIFEST)


def _load_json(directory: Path, name: str) -> dict[str, Any]:
    with named(directory):
        text = (directory / name).read_text(encoding="utf-8")
        value = json.loads(text)
        version = value.get("format") if isinstance(value, dict) else None
        if str(version).startswith("cheem_jax-") and version != FORMAT:
            raise ValueError(f"the format in its {name} is {version!r}, expected {FORMAT!r}")
        if version != FORMAT or text != _text(value):
            raise CorruptedCheckpoint(f"its {name} was changed")
        return value


def _restore(arrays: Path) -> dict[str, Any]:
    """Read arrays with Orbax. Raises CorruptedCheckpoint if the arrays are much larger than their
    files, because a small file can declare an array of any size."""
    import jax

    from cheem_jax.engine import hosts

    size = sum(file.stat().st_size for file in arrays.rglob("*") if file.is_file())
    checkpointer = _checkpointer(hosts.count(), hosts.index())
    try:
        described: Any = checkpointer.metadata(arrays)
        leaves = jax.tree.leaves(described.item_metadata.tree)
        declared = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)
        if declared <= max(2**30, 100 * size):
            return checkpointer.restore(arrays)
    except MemoryError:
        raise
    # Orbax and TensorStore raise errors of many types; the hashes have shown that the files are
    # intact.
    except Exception as error:
        raise OSError(
            "its files have the hashes of its manifest, but Orbax could not read them:"
            f" {_first_line(error)[:500]}"
        ) from error
    raise CorruptedCheckpoint(f"its files of {size} bytes declare {declared} bytes of arrays")


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


@contextlib.contextmanager
def named(directory: Path) -> Iterator[None]:
    """Add the checkpoint's directory to every error in this context, except MemoryError.

    Missing files and bytes that do not parse raise CorruptedCheckpoint. Other system errors raise
    OSError, and invalid content raises ValueError.
    """
    try:
        yield
    except MemoryError:
        raise
    except Exception as error:
        # an inner context has already added the directory
        if str(error).startswith(f"checkpoint {directory} "):
            raise
        reason = f"it lacks {error}" if isinstance(error, KeyError) else _first_line(error)[:500]
        if isinstance(error, CORRUPTED):
            raise CorruptedCheckpoint(
                f"checkpoint {directory} is corrupted ({reason}); restore it from a copy"
            ) from error
        if isinstance(error, OSError):
            raise OSError(f"checkpoint {directory} cannot be read ({reason})") from error
        raise ValueError(f"checkpoint {directory} is invalid ({reason})") from error


CORRUPTED = (
    CorruptedCheckpoint,
    FileNotFoundError,
    IsADirectoryError,
    NotADirectoryError,
    json.JSONDecodeError,
    UnicodeDecodeError,
    RecursionError,
)
"""Errors that are raised if a file is missing, is a directory, or does not parse."""


def content_hash(arrays: Arrays, meta: Mapping[str, Any]) -> str:
    """Compute the SHA-256 of the metadata and of the path, dtype, shape and bytes of each leaf, in
    the order of the paths."""
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
    """List the files of a task's checkpoint; other files in the directory are ignored. Raises the
    errors of `load_task`."""
    return [*sorted(load_manifest(directory)["files"]), MANIFEST]


def copy_task(
    source: Path, target: Path, copy: Callable[[str, str], object] = shutil.copy2
) -> None:
    """Copy the files of a task's checkpoint from `source` to `target`; `copy` is called like
    `shutil.copy2`."""
    for name in files_of(source):
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        copy(str(source / name), str(target / name))


def _hash_files(directory: Path, names: Collection[str] | None = None) -> dict[str, str]:
    """Hash the files below a directory, or only the files in `names`. Returns the hashes keyed by
    relative path."""
    files = (
        file for file in sorted(directory.rglob("*")) if file.is_symlink() or not file.is_dir()
    )
    by_name = {file.relative_to(directory).as_posix(): file for file in files}
    by_name.pop(MANIFEST, None)
    return {
        name: _hash_file(file) for name, file in by_name.items() if names is None or name in names
    }


def _hash_file(file: Path) -> str:
    if file.is_symlink() or not file.is_file():
        return "no regular file"
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def saved_tasks(root: Path) -> list[Path]:
    """List the directories of tasks 0, 1, ... until a number is missing."""
    directories = numbered_tasks(root)
    return [
        directories[number]
        for number in itertools.takewhile(directories.__contains__, itertools.count())
    ]


def numbered_tasks(root: Path) -> dict[int, Path]:
    """Return the directories of tasks, keyed by task number. A directory with a name such as
    `003.forgotten` belongs to a forgotten task."""
    directories: dict[int, Path] = {}
    if root.is_dir():
        # if directories share a number, the first by name is used
        for name in sorted(os.listdir(root), reverse=True):
            # copies made by a file browser have names that do not match
            match = re.fullmatch(r"(\d{3,})(-[a-z0-9-]+|\.forgotten)", name)
            if match and match[1] == f"{int(match[1]):03d}":
                directories[int(match[1])] = root / name
    return directories
