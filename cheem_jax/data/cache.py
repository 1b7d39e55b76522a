"""Decoded images in files that are mapped into memory: made once for a plan, a size and a version of the decoder.

A cache is a folder `<task>-<size>-<key>` with one `.npy` per split and `cache.json`. It is written under another name
and renamed when it is complete, so a folder of that name can be trusted; a lock makes a second process wait for the
first.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import filelock
import numpy as np

from cheem_jax.core.paths import absolute
from cheem_jax.data.decode import DECODER_VERSION, Progress, decode_in_order
from cheem_jax.data.task import Part, Plan, Split

FORMAT = "cheem_jax-images/1"
SPLIT_NAMES = ("train", "val", "test")

Phase = Callable[[str, int], AbstractContextManager[Progress]]
"""Opens a phase of work on a task, by the task's name and its number of images; gives the function that counts them."""


def default_directory() -> Path:
    """Where caches are by default: in the user's cache folder."""
    return absolute(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "cheem_jax" / "images"


def bytes_needed(num_images: int, image_size: int) -> int:
    """Bytes of so many decoded images."""
    return num_images * image_size * image_size * 3


def cache_key(plan: Plan, image_size: int, names: Sequence[str] = SPLIT_NAMES) -> str:
    """What decides the pixels of some splits: which files in which order, their stamp, the size and the decoder."""
    digest = hashlib.sha256(json.dumps([FORMAT, DECODER_VERSION, image_size, plan.source, plan.stamp]).encode())
    for split in names:
        part = plan.splits[split]
        digest.update(f"{split} {len(part.files)}\n".encode())
        for row, label in enumerate(part.labels.tolist()):
            digest.update(f"{part.files.key(row)}\t{label}\n".encode())
    return digest.hexdigest()


def cache_place(plan: Plan, image_size: int, root: Path, names: Sequence[str] = SPLIT_NAMES) -> Path:
    """The folder of a plan's decoded images, whether it exists or not."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "_", plan.name)[:60]
    return root / f"{name}-{image_size}-{cache_key(plan, image_size, names)[:16]}"


def cached(
    plan: Plan, image_size: int, root: Path, phase: Phase, names: Sequence[str] = SPLIT_NAMES
) -> dict[str, Split]:
    """Splits with their images mapped from files, which are made if they do not exist.

    Waits for another process that makes them. Raises ValueError for broken images, OSError if there is no room or no
    permission; then nothing is left.
    """
    place = cache_place(plan, image_size, root, names)
    if not place.is_dir():
        try:
            root.mkdir(parents=True, exist_ok=True)
            with filelock.FileLock(f"{place}.lock"):
                if not place.is_dir():
                    _make(plan, names, image_size, place, phase)
        except OSError as error:
            raise OSError(
                f"the decoded images of {plan.name!r} cannot be kept in {root}: {error.strerror or error}; name "
                "another folder for decoded images, one with room and write permission"
            ) from error
    splits = open_cache(place)
    if splits.keys() != set(names):
        raise ValueError(
            f"the cache {place} is corrupted (it contains {sorted(splits)}); remove this folder and it is made again"
        )
    return splits


def open_cache(place: Path) -> dict[str, Split]:
    """The splits of a finished cache. Raises ValueError naming what is corrupted."""
    try:
        meta = json.loads((place / "cache.json").read_text())
        splits = {}
        if not meta["splits"]:
            raise ValueError("it names no split")
        for name, known in meta["splits"].items():
            if name not in SPLIT_NAMES:
                raise ValueError(f"it names a split {name!r:.40}")
            # mapped, so that a header that promises more than there is takes no memory
            images = np.lib.format.open_memmap(place / f"{name}.npy", mode="r")
            labels = np.lib.format.open_memmap(place / f"{name}.labels.npy", mode="r")
            if images.shape != (known["num"], meta["image_size"], meta["image_size"], 3) or images.dtype != np.uint8:
                raise ValueError(f"{name} has the shape {images.shape} of {images.dtype}")
            if labels.shape != images.shape[:1] or labels.dtype != np.int32:
                raise ValueError(f"{name} has labels of the shape {labels.shape} of {labels.dtype}")
            splits[name] = Split(images, np.array(labels), str(known["sha256"]))
    except PermissionError as error:
        raise OSError(f"the cache {place} cannot be read ({error.strerror}: {error.filename})") from error
    except Exception as error:  # NumPy's parser of headers raises almost anything on a broken file
        raise ValueError(
            f"the cache {place} is corrupted ({error}); remove this folder and it is made again"
        ) from error
    return splits


def _make(plan: Plan, names: Sequence[str], image_size: int, place: Path, phase: Phase) -> None:
    """Decode everything into a folder next to the place, then rename it. Only one process does this at a time."""
    partial = place.with_name(f"{place.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # of a process that was killed
    parts = {name: plan.splits[name] for name in names}
    num_images = sum(len(part.labels) for part in parts.values())
    needed, free = bytes_needed(num_images, image_size), shutil.disk_usage(place.parent).free
    if needed > free:
        raise OSError(f"{needed / 1e9:.1f} GB are needed and {free / 1e9:.1f} GB free")
    partial.mkdir()
    try:
        splits = {}
        with phase(plan.name, num_images) as on_progress:
            for name, part in parts.items():
                np.save(partial / f"{name}.labels.npy", part.labels)
                sha256 = _write(partial / f"{name}.npy", part, image_size, on_progress)
                splits[name] = {"num": len(part.labels), "sha256": sha256}
        meta = {
            "format": FORMAT,
            "task": plan.name,
            "source": plan.source,
            "image_size": image_size,
            "decoder": DECODER_VERSION,
            "split_sha256": plan.split_sha256,
            "splits": splits,
        }
        (partial / "cache.json").write_text(json.dumps(meta, indent=1) + "\n")
        os.rename(partial, place)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _write(file: Path, part: Part, image_size: int, on_progress: Progress) -> str:
    """A `.npy` written piece by piece, so that a full disk is an error here and no signal later; returns its hash."""
    digest = hashlib.sha256(part.labels.astype("<i4").tobytes())
    header = {"descr": "|u1", "fortran_order": False, "shape": (len(part.labels), image_size, image_size, 3)}
    with file.open("wb") as stream:
        np.lib.format.write_array_header_1_0(stream, header)
        for piece in decode_in_order(part.files, image_size, range(len(part.files))):
            stream.write(piece.data)
            digest.update(piece.data)
            on_progress(len(piece))
        stream.flush()
        os.fsync(stream.fileno())
    return digest.hexdigest()
