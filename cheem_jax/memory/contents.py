"""Settings and contents of a memory, read from its JSON files without importing JAX."""

import contextlib
import dataclasses
import json
import os
import typing
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from cheem_jax.cheem.config import CheemConfig
from cheem_jax.core.npz import read_tensors
from cheem_jax.core.settings import SeedsConfig, fits
from cheem_jax.run.checkpoint import check_task, numbered_tasks, saved_tasks
from cheem_jax.run.directory import NAME
from cheem_jax.run.record import read, read_object

FORMAT = "cheem_jax-memory/1"
RUN_FORMAT = "cheem_jax-run/1"
WEIGHTS = "backbone.safetensors"
BASE = "base"
"""Name of the pretraining data as a target of predictions, and name of the folder with the router
statistics of these data."""
SETTINGS = ("backbone", "image_size", "weights_sha256", "preset", "seed", "keeps_base", "upright")
"""Settings that `cheem info` displays."""
COSTS = ("experts", "flops_executed", "params_added", "params_added_percent")
"""Costs of a task that `cheem info` displays."""


LEARNING = ("name", "number", "data_sha256")
"""Keys of the task that is being learned."""
WAY_OUT = "if it was edited or written by another version, learn the tasks again"


@dataclasses.dataclass(frozen=True)
class MemoryConfig:
    """Settings and state of a memory, as stored in its `config.json`.

    The settings, together with the data of the tasks, determine the learned memory completely.
    """

    backbone: str
    image_size: int
    weights_sha256: str
    method: CheemConfig
    """Settings of CHEEM; with the preset `auto`, those of the latest task."""
    preset: str
    seed: int
    seeds: SeedsConfig
    keeps_base: bool
    """Whether the memory also predicts the classes of the pretraining data."""
    base_data_sha256: str | None
    """Fingerprint of the images of the pretraining data; None if the memory was created without
    them."""
    begun_with_sha256: str | None
    """Digest of the `config.json` of the run whose tasks the memory started with; None
    without such a run."""
    upright: bool
    """Whether images are rotated according to their EXIF orientation."""
    generation: int = 1
    """Number of the valid generation. Forgetting or extending a task writes all checkpoints as a
    new generation."""
    tasks: tuple[str, ...] = ()
    """Task names in learning order."""
    data_sha256: dict[str, str] = dataclasses.field(default_factory=dict)
    """Fingerprint of the data of each task; a repeated `learn` skips data with the same
    fingerprint."""
    num_learned: int = 0
    """Number of tasks that were ever learned, including forgotten tasks."""
    learning: dict[str, Any] | None = None
    """Name, number and data fingerprint of the task that is being learned; None if no task is being
    learned."""
    forgetting: tuple[dict[str, Any], ...] | None = None
    """Forgotten tasks that still have to be removed from the record, sorted by descending index;
    None after the removal."""
    replaced: tuple[int, ...] = ()
    """Former numbers of extended tasks; each extension assigns a new number to the task."""
    extended: dict[str, list[dict[str, Any]]] = dataclasses.field(default_factory=dict)
    """Extensions of each task, keyed by task name. An extension contains the fingerprint of its
    data, and the numbers of training images and of classes before and after the extension."""


def read_config(directory: Path) -> dict[str, Any]:
    """Read `config.json` of a memory or a run. Raises ValueError if the directory is neither."""
    if not directory.is_dir():
        raise ValueError(
            f"memory {str(directory)!r} does not exist; `cheem learn {directory} FOLDER` creates it"
        )
    file = directory / NAME
    try:
        values = read_object(file)
    except FileNotFoundError:
        raise ValueError(
            f"{str(directory)!r} is not a memory (it has no {NAME}); give a folder that `cheem"
            " learn` created, or a run directory"
        ) from None
    if (version := values.get("format")) not in (FORMAT, RUN_FORMAT):
        is_other_version = isinstance(version, str) and version.startswith("cheem_jax-")
        reason = (
            "it was written by another version of cheem_jax: use that version, or learn the tasks"
            " again"
            if is_other_version
            else "it is not a memory"
        )
        raise ValueError(f"{file} has the format {version!r:.60}, expected {FORMAT!r}; {reason}")
    return values


def parse_config(values: Mapping[str, Any], directory: Path) -> MemoryConfig:
    """Convert the values of `config.json` to a MemoryConfig. Raises ValueError for unknown, missing
    or invalid settings."""
    file = directory / NAME
    settings = {name: value for name, value in values.items() if name != "format"}
    config = parse_settings(MemoryConfig, settings, file)
    extensions = [one for task in config.extended.values() for one in task]
    for name, entries, keys in (
        ("learning", () if config.learning is None else (config.learning,), LEARNING),
        ("forgetting", config.forgetting or (), ("index", "name")),
        ("extended", extensions, ("data_sha256",)),
    ):
        if missing := sorted(key for key in keys if not all(key in one for one in entries)):
            raise ValueError(f"the setting {name!r} in {file} lacks {missing}; {WAY_OUT}")
    return config


REMOVED = {"score": "shared_head", "score_images": 0}
"""Settings that an earlier version wrote, with the values that mean the same as their absence."""


def parse_settings(kind: type, values: Mapping[str, Any], file: Path) -> Any:
    """Convert JSON values to a settings dataclass, and nested values to its nested dataclasses.

    Raises ValueError with the name of the file and of each unknown or missing setting.
    """
    hints = typing.get_type_hints(kind)
    values = {key: value for key, value in values.items() if REMOVED.get(key, ...) != value}
    if unknown := sorted(values.keys() - {field.name for field in dataclasses.fields(kind)}):
        raise ValueError(f"{file} contains unknown settings {unknown}; {WAY_OUT}")
    settings = {}
    try:
        for name, value in values.items():
            if dataclasses.is_dataclass(hints[name]) and isinstance(hints[name], type):
                value = parse_settings(hints[name], value, file)
            value = tuple(value) if isinstance(value, list) else value
            if not fits(value, hints[name]):
                raise TypeError(f"{name} is {value!r:.60}")
            settings[name] = value
        return kind(**settings)
    except (TypeError, AttributeError) as error:
        raise ValueError(f"the settings in {file} are invalid ({error}); {WAY_OUT}") from error


def checkpoint_folder(directory: Path, generation: int) -> Path:
    """Return the folder with the checkpoints of a generation. It contains one directory per
    task."""
    return directory / f"generation-{generation:04d}" / "cheem"


def describe(
    directory: Path,
    config: MemoryConfig,
    root: Path,
    tasks: Sequence[Mapping[str, Any]],
    pool: list[list[dict[str, Any]]],
    forgotten: Collection[int],
    *,
    is_run: bool = False,
    lost: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Build the JSON values that `cheem info` displays; sizes are in bytes on disk."""
    # Keyed by task number. A task can be absent, because another process can remove its folder.
    sizes = {number: _bytes_below(folder) for number, folder in numbered_tasks(root).items()}
    reports = {}
    with contextlib.suppress(OSError, ValueError):  # a corrupted record is ignored
        reports = {report["name"]: report for report in _reports(directory)}
    # The key of a lost task begins with its number. Lost placeholders of forgotten tasks also count
    # as forgotten.
    numbers = (folder.partition("-")[0] for folder in lost or {})
    lost_numbers = {int(number) for number in numbers if number.isdigit()}
    used = [{0, *(task["experts"][block] for task in tasks)} - {None} for block in range(len(pool))]
    return {
        "directory": str(directory),
        "kind": "run" if is_run else "memory",
        **{name: getattr(config, name) for name in SETTINGS},
        "learning": unfinished(config, len(tasks) + len(forgotten)),
        "placement": config.method.placement,
        "lost": dict(lost or {}),
        "bytes": _bytes_below(directory),
        "tasks": [
            {
                **{
                    name: task[name]
                    for name in ("name", "classes", "architecture", "number", *COSTS)
                },
                "bytes": sizes.get(task["number"], 0),
                "flops": task["flops_method"],
                "calibrated": task["calibrated"],
                "extended": config.extended.get(task["name"], []),
                "frozen_head": reports.get(task["name"], {}).get("frozen_head"),
            }
            for task in tasks
        ],
        "forgotten": sorted(set(forgotten) - lost_numbers - set(config.replaced)),
        "pool": pool,
        "candidates": [sorted(block) for block in used],
    }


def unfinished(config: MemoryConfig, next_number: int) -> dict[str, Any] | None:
    """Return the task whose learning was interrupted; None if no task was interrupted.

    `next_number` is the number of the next new task; a task with a lower number is already saved.
    """
    learning = config.learning
    return None if learning is None or learning["number"] < next_number else learning


def read_info(directory: Path) -> dict[str, Any] | None:
    """Read the values of `OpenMemory.info` without importing JAX.

    The values are read from the record and from the metadata of the tasks. The hashes of files are
    checked, but the hashes of array contents are not. Returns None if the memory has to be opened
    to compute the values. This applies to a run, and to a memory that started with the tasks of a
    run, is empty or corrupted, is being changed by another process, contains an adapted expert that
    became a full expert, or has an incomplete record.

    Raises ValueError if the directory is neither a memory nor a run.
    """
    values = read_config(directory)
    try:
        return _read_info(directory, values)
    except (ValueError, OSError, LookupError, TypeError, AttributeError):
        return None


def _read_info(directory: Path, values: Mapping[str, Any]) -> dict[str, Any] | None:
    config = parse_config(values, directory)
    # tasks of a run are not calibrated, but the code below reports all tasks as calibrated
    if values["format"] != FORMAT or config.forgetting or config.begun_with_sha256:
        return None
    _, header = read_tensors(directory / WEIGHTS)
    weights = header["sha256"], json.loads(header["config"])["image_size"]
    if weights != (config.weights_sha256, config.image_size):
        return None
    reports = sorted(_reports(directory), key=lambda report: report["index"])
    root = checkpoint_folder(directory, config.generation)
    saved = list(map(check_task, saved_tasks(root)))
    learned = {number: meta for number, meta in enumerate(saved) if "forgotten" not in meta}
    same = ("name", "classes", "architecture", "experts")
    if [[one[key] for key in same] for one in learned.values()] != [
        [report[key] for key in same] for report in reports
    ]:
        return None
    pool = reports[-1]["pool"]
    for report in reports:
        choices = zip(report["architecture"], report["experts"], strict=True)
        for block, (choice, expert) in enumerate(choices):
            if choice.startswith("adapt") and pool[block][expert]["kind"] != "adapted":
                return None  # the expert's parent was erased after the costs were recorded
    names = {report["name"] for report in reports}
    if config.data_sha256.keys() - names or len(saved) < config.num_learned:
        return None
    tasks = [
        {**report, "number": number, "calibrated": True}
        for number, report in zip(learned, reports, strict=True)
    ]
    info = describe(directory, config, root, tasks, pool, set(range(len(saved))) - learned.keys())
    return info if read_config(directory) == values else None


def _reports(directory: Path) -> list[dict[str, Any]]:
    return [entry["report"] for entry in read(directory) if entry["event"] == "learned"]


def _bytes_below(folder: Path) -> int:
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):  # another process can change the memory
                total += (Path(parent) / name).stat().st_size
    return total
