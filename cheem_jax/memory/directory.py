"""The directory of a memory that a person keeps: complete in itself, and changed as a whole or not at all.

    config.json                     what the memory is, and the generation that counts
    backbone.safetensors            the frozen backbone with its head and mean CLS tokens of its data
    base/                           where the pretraining data lie among features, if their classes are kept as a target
    generation-0001/cheem/000-cats  one directory per task, as in a run
    metrics.jsonl                   how each task was learned and what was measured
    evaluated.json                  what `cheem evaluate` measured since then

Learning adds a directory. Forgetting or extending a task writes a new generation beside the old one and then says in
`config.json` that it counts; whatever a killed process leaves is taken away by the next one that writes.
"""

import contextlib
import dataclasses
import glob
import json
import os
import re
import shutil
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from cheem_jax.cheem.config import CheemConfig
from cheem_jax.cheem.evolution import SearchConfig
from cheem_jax.cheem.saved_memory import save_forgotten, save_memory_task
from cheem_jax.core.atomic import REFUSING, to_disk, write_atomically
from cheem_jax.core.keys import SeedsConfig
from cheem_jax.core.paths import is_of_system
from cheem_jax.core.pool import InternalMemory
from cheem_jax.memory.forgetting import changed_tasks
from cheem_jax.run.checkpoint import copy_task, saved_tasks
from cheem_jax.run.directory import NAME, OURS
from cheem_jax.run.record import read_object, to_json

FORMAT = "cheem_jax-memory/1"
RUN_FORMAT = "cheem_jax-run/1"
WEIGHTS = "backbone.safetensors"
BASE = "base"
UNRECORDED = "unrecorded"
"""A hash in `config.json` that the memory is too old to have."""


@dataclasses.dataclass(frozen=True)
class MemoryConfig:
    """What a memory is; together with the data it decides what is learned."""

    backbone: str
    image_size: int
    weights_sha256: str
    method: CheemConfig
    """With the preset `auto`, epochs and learning rate are those of the last task."""
    preset: str
    seed: int = 0
    seeds: SeedsConfig = SeedsConfig()
    keeps_base: bool = False
    """Whether the backbone's classes are one more target."""
    base_data_sha256: str | None = UNRECORDED
    """Fingerprint of the images of the pretraining data; None: none were given."""
    begun_with_sha256: str | None = UNRECORDED
    """Digest of the run whose tasks the memory began with; None: it began empty."""
    upright: bool = False
    """Whether images are turned as their EXIF orientation says; memories of earlier versions did not turn them."""
    generation: int = 1
    tasks: tuple[str, ...] = ()
    """Names in learning order."""
    data_sha256: dict[str, str] = dataclasses.field(default_factory=dict)
    """What each task was learned from, so that the same command given again learns nothing twice."""
    num_learned: int = 0
    """Tasks ever learned, the forgotten ones included."""
    learning: dict[str, Any] | None = None
    """The task that is being learned: name, number and data."""
    forgetting: tuple[dict[str, Any], ...] | None = None
    """Tasks that are forgotten while the record still tells of them, the last one first."""
    replaced: tuple[int, ...] = ()
    """Numbers that tasks had before they were extended, each time in a new generation."""
    extended: dict[str, list[dict[str, Any]]] = dataclasses.field(default_factory=dict)
    """Each extension of a task: its data, and the numbers of training images and classes before and after."""


def read_config(directory: Path) -> dict[str, Any]:
    """What `config.json` holds, of a memory or of a run. Raises ValueError where it is neither."""
    if not directory.is_dir():
        raise ValueError(f"no memory {str(directory)!r}; `cheem learn {directory} FOLDER` makes one")
    file = directory / NAME
    try:
        held = read_object(file)
    except FileNotFoundError:
        raise ValueError(
            f"{str(directory)!r} is not a memory (it has no {NAME}); give a folder that `cheem learn` made, or a run's"
        ) from None
    if (found := held.get("format")) not in (FORMAT, RUN_FORMAT):
        newer = isinstance(found, str) and found.startswith("cheem_jax-")
        told = (
            "a newer version of cheem_jax wrote it: pip install --upgrade cheem_jax" if newer else "it is not a memory"
        )
        raise ValueError(f"{file} has the format {found!r:.60}, expected {FORMAT!r}; {told}")
    return held


def config_of(held: Mapping[str, Any], directory: Path) -> MemoryConfig:
    """The settings of a memory. Raises ValueError naming what does not fit."""
    return settings_of(MemoryConfig, {k: v for k, v in held.items() if k != "format"}, directory / NAME)


GONE = ("finalists", "trained_draws", "cost", "rungs", "warm_start")
"""Removed settings that an older memory may have: they say how earlier tasks were learned, so they are ignored."""


def settings_of(kind: type, values: Mapping[str, Any], where: Path) -> Any:
    """A settings dataclass from its JSON values, nested ones included. Raises ValueError naming what does not fit."""
    if kind in (CheemConfig, SearchConfig):
        values = {name: value for name, value in values.items() if name not in GONE}
    if kind is MemoryConfig and isinstance(values.get("forgetting"), dict):  # of one task, as it was written before
        values = {**values, "forgetting": [values["forgetting"]]}
    hints, known = typing.get_type_hints(kind), {field.name for field in dataclasses.fields(kind)}
    if unknown := sorted(values.keys() - known):
        raise ValueError(f"{where} contains unknown settings {unknown}; was it written by a newer version?")
    found = {}
    try:
        for name, value in values.items():
            if dataclasses.is_dataclass(hints[name]) and isinstance(hints[name], type):
                value = settings_of(hints[name], value, where)
            found[name] = tuple(value) if isinstance(value, list) else value
        return kind(**found)
    except (TypeError, AttributeError) as error:
        raise ValueError(f"{where} does not fit ({error}); was it edited, or written by another version?") from error


def write_config(directory: Path, config: MemoryConfig) -> None:
    """Replace `config.json`, whole or not at all."""
    values = {"format": FORMAT, **to_json(dataclasses.asdict(config))}
    write_atomically(directory / NAME, json.dumps(values, indent=1) + "\n")


def checkpoints_of(directory: Path, generation: int) -> Path:
    """The folder of a generation's checkpoints, by method."""
    return directory / f"generation-{generation:04d}"


def write_generation(directory: Path, config: MemoryConfig, before: InternalMemory, after: InternalMemory) -> None:
    """The next generation, complete and on the disk; it counts once `config.json` says so.

    Tasks that did not change share their files with the generation before.
    """
    old, new = (checkpoints_of(directory, config.generation + more) for more in (0, 1))
    shutil.rmtree(new, ignore_errors=True)  # of a process that was killed before it counted
    changed = changed_tasks(before, after)
    with made_whole(new) as partial:
        root = partial / "cheem"
        root.mkdir()
        saved = saved_tasks(old / "cheem")
        for number in range(after.next_number):
            if number in after.forgotten:
                save_forgotten(root, after, number)
            elif number in changed or number >= len(saved):  # which was extended
                save_memory_task(root, after, after.numbers.index(number), config.method.ops.rank)
            else:
                copy_task(saved[number], root / saved[number].name, _link)


def _link(source: str, target: str) -> None:
    """Files of a task are never written again, so two generations may share them; some file systems have no links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def remove_old_generations(directory: Path, generation: int) -> None:
    """Take away every generation that does not count, and nothing that is called almost so."""
    counting = checkpoints_of(directory, generation).name
    for folder in list(directory.iterdir()):
        is_one = re.fullmatch(r"generation-\d{4,}|\.generation-\d{4,}\.\d+\.partial", folder.name)
        if is_one and folder.name != counting:
            shutil.rmtree(folder)


def check_free(directory: Path) -> None:
    """Raises ValueError where something stands in the way of a new memory."""
    if directory.exists() and not directory.is_dir():
        raise ValueError(f"{str(directory)!r} is a file; a memory is a folder")
    if directory.exists() and not all(is_of_system(file.name) for file in directory.iterdir()):
        raise ValueError(
            f"{str(directory)!r} exists and is not empty; choose another folder for the memory, or empty it"
        )


@contextlib.contextmanager
def made_whole(directory: Path) -> Iterator[Path]:
    """A hidden folder to fill, whose content is the directory's at the end, on the disk; nothing is left if that fails.

    A new directory appears by one rename. One that is there may be a mount point, or below a folder that cannot be
    written: it is filled from a hidden folder inside, `config.json` last, without which nothing opens. Raises
    ValueError where there is something already, OSError naming the directory if it cannot be made.
    """
    check_free(directory)
    directory = directory.resolve()
    is_there, moved = directory.is_dir(), list[Path]()
    name = f".{directory.name}.{os.getpid()}.partial"
    partial = directory / name if is_there else directory.with_name(name)
    for left in directory.glob(f"{glob.escape(f'.{directory.name}.')}*.partial") if is_there else [partial]:
        shutil.rmtree(left, ignore_errors=True)  # of a process that was killed
    try:
        partial.mkdir(parents=True)
    except OSError as error:
        way_out = "" if error.errno in REFUSING else ": nothing can be made there; choose another folder"
        raise OSError(error.errno, f"{error.strerror}{way_out}", str(directory)) from error
    try:
        yield partial
        for place in (*partial.rglob("*"), partial):
            to_disk(place)
        if is_there:
            for entry in sorted(partial.iterdir(), key=lambda entry: entry.name == NAME):
                if entry.name == NAME:
                    to_disk(directory)
                moved.append(directory / entry.name)
                os.rename(entry, moved[-1])
            to_disk(directory)
        else:
            os.replace(partial, directory)
            to_disk(directory.parent)
    except BaseException:
        for place in reversed(moved):
            remove(place)
        raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def take_away(directory: Path) -> None:
    """Remove a memory; a folder that has to stay, such as a mount point, keeps foreign hidden files alone."""
    (directory / NAME).unlink(missing_ok=True)  # from here on it is none
    for place in list(directory.iterdir()):
        if place.name.startswith(OURS) or not is_of_system(place.name):
            remove(place)
    with contextlib.suppress(OSError):
        directory.rmdir()


def remove(place: Path) -> None:
    """Remove a file or a folder with all that is in it, if it is there."""
    if place.is_dir() and not place.is_symlink():
        shutil.rmtree(place)
    else:
        place.unlink(missing_ok=True)
