"""What a memory is and contains, read from its JSON files alone, without JAX."""

import contextlib
import dataclasses
import json
import os
import typing
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from cheem_jax.cheem.config import CheemConfig, SearchConfig
from cheem_jax.core.npz import read_tensors
from cheem_jax.core.settings import SeedsConfig
from cheem_jax.run.checkpoint import check_task, saved_tasks
from cheem_jax.run.directory import NAME
from cheem_jax.run.record import read, read_object

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
    """Whether images are turned as their EXIF orientation says; memories of earlier versions did
    not turn them."""
    generation: int = 1
    tasks: tuple[str, ...] = ()
    """Names in learning order."""
    data_sha256: dict[str, str] = dataclasses.field(default_factory=dict)
    """What each task was learned from, so that the same command given again learns nothing
    twice."""
    num_learned: int = 0
    """Tasks ever learned, the forgotten ones included."""
    learning: dict[str, Any] | None = None
    """The task that is being learned: name, number and data."""
    forgetting: tuple[dict[str, Any], ...] | None = None
    """Tasks that are forgotten while the record still tells of them, the last one first."""
    replaced: tuple[int, ...] = ()
    """Numbers that tasks had before they were extended, each time in a new generation."""
    extended: dict[str, list[dict[str, Any]]] = dataclasses.field(default_factory=dict)
    """Each extension of a task: its data, and the numbers of training images and classes before and
    after."""


def read_config(directory: Path) -> dict[str, Any]:
    """What `config.json` holds, of a memory or of a run. Raises ValueError where it is neither."""
    if not directory.is_dir():
        raise ValueError(
            f"no memory {str(directory)!r}; `cheem learn {directory} FOLDER` makes one"
        )
    file = directory / NAME
    try:
        held = read_object(file)
    except FileNotFoundError:
        raise ValueError(
            f"{str(directory)!r} is not a memory (it has no {NAME}); give a folder that `cheem"
            " learn` made, or a run's"
        ) from None
    if (found := held.get("format")) not in (FORMAT, RUN_FORMAT):
        newer = isinstance(found, str) and found.startswith("cheem_jax-")
        told = (
            "a newer version of cheem_jax wrote it: pip install --upgrade cheem_jax"
            if newer
            else "it is not a memory"
        )
        raise ValueError(f"{file} has the format {found!r:.60}, expected {FORMAT!r}; {told}")
    return held


def config_of(held: Mapping[str, Any], directory: Path) -> MemoryConfig:
    """The settings of a memory. Raises ValueError naming what does not fit."""
    return settings_of(
        MemoryConfig, {k: v for k, v in held.items() if k != "format"}, directory / NAME
    )


GONE = ("finalists", "trained_draws", "cost", "rungs", "warm_start")
"""Removed settings that an older memory may have: they say how earlier tasks were learned, so they
are ignored."""


def settings_of(kind: type, values: Mapping[str, Any], where: Path) -> Any:
    """A settings dataclass from its JSON values, nested ones included. Raises ValueError naming
    what does not fit."""
    if kind in (CheemConfig, SearchConfig):
        values = {name: value for name, value in values.items() if name not in GONE}
    if kind is MemoryConfig and isinstance(
        values.get("forgetting"), dict
    ):  # of one task, as it was written before
        values = {**values, "forgetting": [values["forgetting"]]}
    hints = typing.get_type_hints(kind)
    known = {field.name for field in dataclasses.fields(kind)}
    if unknown := sorted(values.keys() - known):
        raise ValueError(
            f"{where} contains unknown settings {unknown}; was it written by a newer version?"
        )
    found = {}
    try:
        for name, value in values.items():
            if dataclasses.is_dataclass(hints[name]) and isinstance(hints[name], type):
                value = settings_of(hints[name], value, where)
            found[name] = tuple(value) if isinstance(value, list) else value
        return kind(**found)
    except (TypeError, AttributeError) as error:
        raise ValueError(
            f"{where} does not fit ({error}); was it edited, or written by another version?"
        ) from error


def checkpoints_of(directory: Path, generation: int) -> Path:
    """The folder of a generation's checkpoints, by method."""
    return directory / f"generation-{generation:04d}"


def info_of(
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
    """What `cheem info` tells, as JSON values; bytes on the disk per task.

    `tasks` are those that can answer, each with its costs, `pool` is the history of every expert,
    and `forgotten` are numbers that no task has any more.
    """
    sizes = dict(enumerate(map(_bytes_of, saved_tasks(root))))
    reports = {}
    with contextlib.suppress(
        OSError, ValueError
    ):  # a corrupted record does not keep a memory from answering
        reports = {report["name"]: report for report in _reports(directory)}
    told = ("backbone", "image_size", "weights_sha256", "preset", "seed", "keeps_base", "upright")
    used = [{0, *(task["experts"][block] for task in tasks)} - {None} for block in range(len(pool))]
    return {
        "directory": str(directory),
        "kind": "run" if is_run else "memory",
        **{name: getattr(config, name) for name in told},
        "learning": interrupted_of(config, len(tasks) + len(forgotten)),
        "placement": config.method.placement,
        "lost": dict(lost or {}),
        "bytes": _bytes_of(directory),
        "tasks": [
            {
                **{
                    name: task[name]
                    for name in ("name", "classes", "architecture", "number", *_COSTS)
                },
                "bytes": sizes.get(task["number"], 0),
                "flops": task["flops_method"],
                "calibrated": task["calibrated"],
                "extended": config.extended.get(task["name"], []),
                "frozen_head": reports.get(task["name"], {}).get("frozen_head"),
            }
            for task in tasks
        ],
        "forgotten": sorted(set(forgotten) - set(config.replaced)),
        "pool": pool,
        "candidates": [sorted(block) for block in used],
    }


_COSTS = ("experts", "flops_executed", "params_added", "params_added_percent")


def interrupted_of(config: MemoryConfig, next_number: int) -> dict[str, Any] | None:
    """The task that was begun and is not saved yet, where `next_number` tasks were ever saved."""
    return (
        None
        if config.learning is None or config.learning["number"] < next_number
        else config.learning
    )


def read_info(directory: Path) -> dict[str, Any] | None:
    """What `OpenMemory.info` gives, from the record, the metadata of tasks and the hashes of their
    files.

    None where only opening the memory tells: a run, an empty memory, one that is being written to
    or has an unusual history, and one with anything wrong, which opening names. The content hashes
    of tasks are not compared. Raises ValueError where there is neither a memory nor a run.
    """
    held = read_config(directory)
    try:
        return _read_info(directory, held)
    except (ValueError, OSError, LookupError, TypeError, AttributeError):
        return None


def _read_info(directory: Path, held: Mapping[str, Any]) -> dict[str, Any] | None:
    config = config_of(held, directory)
    reports = sorted(_reports(directory), key=lambda report: report["index"])
    # tasks that came from a run are not calibrated
    if (
        held["format"] != FORMAT
        or config.forgetting is not None
        or config.begun_with_sha256 is not None
    ):
        return None
    _, header = read_tensors(directory / WEIGHTS)
    if (header["sha256"], json.loads(header["config"])["image_size"]) != (
        config.weights_sha256,
        config.image_size,
    ):
        return None
    root = checkpoints_of(directory, config.generation) / "cheem"
    saved = list(map(check_task, saved_tasks(root)))
    learned = {number: meta for number, meta in enumerate(saved) if "forgotten" not in meta}
    same = ("name", "classes", "architecture", "experts")
    if not learned or [[one[key] for key in same] for one in learned.values()] != [
        [report[key] for key in same] for report in reports
    ]:
        return None
    pool = reports[-1]["pool"]
    for report in reports:
        for block, (choice, expert) in enumerate(
            zip(report["architecture"], report["experts"], strict=True)
        ):
            if choice.startswith("adapt") and pool[block][expert]["kind"] != "adapted":
                return None  # it became a full one since its costs were recorded
    if (
        config.data_sha256.keys() - {report["name"] for report in reports}
        or len(saved) < config.num_learned
    ):
        return None
    tasks = [
        {**one, "number": number, "calibrated": True}
        for number, one in zip(learned, reports, strict=True)
    ]
    found = info_of(directory, config, root, tasks, pool, set(range(len(saved))) - learned.keys())
    return found if read_config(directory) == held else None


def _reports(directory: Path) -> list[dict[str, Any]]:
    return [entry["report"] for entry in read(directory) if entry["event"] == "learned"]


def _bytes_of(folder: Path) -> int:
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):  # another process learns here
                total += (Path(place) / name).stat().st_size
    return total
