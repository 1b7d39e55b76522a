"""Memories made, begun with a run's tasks, and opened."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cheem_jax.backbone.means import base_means
from cheem_jax.backbone.params import build
from cheem_jax.backbone.weights import Pretrained, load_pretrained, save_converted, sha256_of
from cheem_jax.cheem.config import PRESETS, QUICK, CheemConfig, LearnPreset
from cheem_jax.core.keys import Keys, Phase
from cheem_jax.core.paths import absolute
from cheem_jax.core.routing import calibrate, centroid_distances, fit_statistics
from cheem_jax.core.settings import SeedsConfig
from cheem_jax.data.task import Task, repeats
from cheem_jax.data.task import fingerprint as data_hash
from cheem_jax.engine.choice import EngineConfig
from cheem_jax.memory.contents import (
    BASE,
    RUN_FORMAT,
    WEIGHTS,
    MemoryConfig,
    checkpoints_of,
    config_of,
    read_config,
    settings_of,
)
from cheem_jax.memory.data import Data, tasks_of
from cheem_jax.memory.directory import check_free, made_whole, write_config
from cheem_jax.memory.opened import OpenMemory
from cheem_jax.run import fingerprint
from cheem_jax.run.checkpoint import copy_task, save_task, saved_tasks
from cheem_jax.run.directory import NAME
from cheem_jax.run.progress import Progress
from cheem_jax.run.record import Record, read
from cheem_jax.run_config import find_base_means, make_networks

ENGINE = EngineConfig()
_BASE_NUMBER = 2**32 - 1
"""The backbone's own place among the keys, which no task reaches."""


def create(
    directory: str | Path,
    *,
    backbone: str = "deit_tiny",
    weights: str | Path | None = None,
    image_size: int | None = None,
    preset: LearnPreset = "quick",
    method: CheemConfig | None = None,
    augment: bool = False,
    seed: int = 0,
    base_data: Data | None = None,
    keep_base: bool = False,
    base_classes: Sequence[str] | None = None,
    engine: EngineConfig = ENGINE,
    progress: Progress | None = None,
) -> OpenMemory:
    """A memory without a task yet, in a new or empty folder; all or nothing.

    `weights` as for `load_pretrained`. With the preset `auto`, epochs differ by task (see
    `cheem.config.auto`). The preset `paper` decodes images as stored; others turn them as their
    EXIF orientation says. `method` are settings other than the preset's; `augment` changes training
    images at random. `base_data` are images of the pretraining data (a folder or zip as for
    `learn`), which anchor the similarity of tasks; with `keep_base` their classes become one more
    target, named `base_classes` or after the folders of the data. Raises ValueError for settings
    that do not fit, FileNotFoundError without weights.
    """
    directory = absolute(directory)
    check_free(directory)
    if preset not in (presets := {**PRESETS, "auto": QUICK}):
        raise ValueError(f"unknown preset {preset!r}; expected one of {', '.join(presets)}")
    config = presets[preset] if method is None else method
    told = preset if config == presets[preset] else f"{preset}, changed"
    if method is None:
        config = with_fallback(config, preset)
    config = dataclasses.replace(config, augment=config.augment or augment)
    upright = preset != "paper"  # whose loaders do not turn images
    pretrained = load_pretrained(backbone, weights=weights, image_size=image_size)
    config.router.blocks(pretrained.config.depth)  # raises before anything is written
    vit = build(
        dataclasses.replace(pretrained.config, precision=engine.precision), pretrained.params
    )
    size = pretrained.config.image_size
    classes = ()
    base: dict[str, Any] = {}
    if keep_base and vit.head is None:
        raise ValueError(f"{pretrained.config.name} carries no head, so it has no classes to keep")
    if keep_base and base_data is None:
        raise ValueError(
            "to keep the backbone's classes, images have to show where they lie; give base_data"
        )
    if base_classes is not None and not keep_base:
        raise ValueError(
            "base_classes names classes that this memory would not predict; give keep_base as well"
        )
    base_data_sha256 = None
    if base_data is not None:
        own = base_task_of(base_data, size, progress, upright=upright)
        base_data_sha256 = data_hash(own)
        found = base_means(vit, own.train.images, batch_size=config.batch_size)
        pretrained = dataclasses.replace(pretrained, base_means={**pretrained.base_means, **found})
        if keep_base:
            num = pretrained.config.num_classes
            usual = (
                own.classes
                if len(own.classes) == num
                else [f"class {label}" for label in range(num)]
            )
            classes = tuple(usual if base_classes is None else base_classes)
            if len(classes) != num or repeats(classes):
                raise ValueError(
                    f"{len(classes)} names (repeated: {repeats(classes)[:5]}) for the backbone's"
                    f" {num} classes"
                )
            features = make_networks(pretrained, None, config, engine).router_features
            seed_of_base = Keys(seed).seed_at(_BASE_NUMBER, Phase.CENTROIDS)
            place = fit_statistics(
                features(own.train.images), own.train.labels, config.router, seed=seed_of_base
            )
            away = centroid_distances(features(own.val.images), [place.centroids])[:, 0]
            base = {"centroids": place.centroids, "distances": calibrate(away)}
            if place.moments:
                base["moments"] = dict(place.moments)
    settings = MemoryConfig(
        pretrained.config.name,
        size,
        pretrained.sha256,
        config,
        told,
        seed,
        keeps_base=keep_base,
        base_data_sha256=base_data_sha256,
        begun_with_sha256=None,
        upright=upright,
    )
    with made_whole(directory) as partial:
        save_converted(partial / WEIGHTS, pretrained)
        if keep_base:
            save_task(partial / BASE, base, {"name": BASE, "classes": list(classes)})
        (checkpoints_of(partial, 1) / "cheem").mkdir(parents=True)
        Record(partial).write("run", **_setting(settings, pretrained))
        write_config(partial, settings)
    del vit, pretrained  # which opening reads again
    return open_memory(directory, engine=engine)


def base_task_of(
    base_data: Data, image_size: int, progress: Progress | None = None, *, upright: bool
) -> Task:
    """Images of the pretraining data; their name is the same wherever they are. Raises ValueError
    for several tasks."""
    tasks = tasks_of(base_data, image_size, progress, upright=upright)
    if len(tasks) != 1:
        raise ValueError(
            f"base_data contains {len(tasks)} tasks, expected one: {[task.name for task in tasks]}"
        )
    return dataclasses.replace(tasks[0], name=BASE)


def with_fallback(config: CheemConfig, preset: str) -> CheemConfig:
    """A preset's settings for a memory: only the paper's ignore how accurate the frozen backbone
    is."""
    return config if preset == "paper" else dataclasses.replace(config, fallback=True)


def begin_with(
    directory: str | Path,
    run: str | Path,
    *,
    weights: str | Path | None = None,
    engine: EngineConfig = ENGINE,
) -> OpenMemory:
    """A new memory that begins with what a finished run of CHEEM has learned; the run is left
    alone.

    New tasks have to be compared with the means that the run had: raises ValueError where the
    weights lack them, and as `open_memory` and `create`.
    """
    directory = absolute(directory)
    begun = open_memory(run, weights=weights, engine=engine)
    if not begun.is_run:
        raise ValueError(f"{str(run)!r} is a memory already; copy its folder, or learn in it")
    held = read_config(begun.directory)
    precision = begun.engine.precision
    method = begun.config.method
    nothing = Progress()
    known = find_base_means(
        begun.pretrained, method, precision, images=None, progress=nothing
    ).means_sha256
    # what a run measured is known by its pictures, so that any means of the weights have to be
    # taken for those
    if known is None if held.get("base_data_sha256") else known != held.get("base_means_sha256"):
        raise ValueError(
            f"run {str(begun.directory)!r} measured mean CLS tokens of the pretraining data, which"
            f" {begun.pretrained.source} lacks; write weights with them by `cheem convert"
            " --base-data`, and give those (--weights)"
        )
    data = {task.name: begun.config.data_sha256[task.name] for task in begun.tasks}
    config = dataclasses.replace(
        begun.config,
        method=with_fallback(method, begun.config.preset),
        tasks=tuple(data),
        data_sha256=data,
        num_learned=len(data),
        base_data_sha256=None,
        begun_with_sha256=fingerprint.digest(held),
    )
    kept = [entry for entry in read(begun.directory) if entry["event"] in ("learned", "evaluated")]
    kept = [entry for entry in kept if entry.get("method", "cheem") == "cheem"]
    for entry in kept:
        if entry["event"] == "evaluated":
            entry |= {"methods": {"cheem": entry["methods"]["cheem"]}, "checkpoints": {}}
    with made_whole(directory) as partial:
        save_converted(partial / WEIGHTS, begun.pretrained)
        root = checkpoints_of(partial, 1) / "cheem"
        root.mkdir(parents=True)
        for place in saved_tasks(begun.root):
            copy_task(place, root / place.name)
        record = Record(partial)
        record.write("run", **_setting(config, begun.pretrained))
        record.replace([*read(partial), *kept])
        write_config(partial, config)
    return open_memory(directory, engine=engine)


def open_memory(
    directory: str | Path,
    *,
    weights: str | Path | None = None,
    engine: EngineConfig = ENGINE,
    usable: bool = False,
) -> OpenMemory:
    """A memory, or a run of CHEEM, ready to answer.

    `weights` is for runs, which hold none: default as the run had. A memory's own file is accepted,
    wherever it is. With `usable` a damaged one answers with the tasks that are whole; `lost` tells
    why the others do not. Raises ValueError naming what is damaged, missing, of a newer format or
    not the memory's own.
    """
    directory = absolute(directory)
    held = read_config(directory)
    if held["format"] == RUN_FORMAT:
        config, pretrained = _run_config(directory, held, weights)
    else:
        config = config_of(held, directory)
        if not (directory / WEIGHTS).is_file():
            raise ValueError(f"memory {str(directory)!r} lacks {WEIGHTS}; restore it from a copy")
        pretrained = load_pretrained(config.backbone, weights=directory / WEIGHTS)
        if weights is not None:
            _check_same_weights(directory, config, pretrained, absolute(weights))
    if (
        pretrained.sha256 != config.weights_sha256
        or pretrained.config.image_size != config.image_size
    ):
        raise ValueError(
            f"{str(directory)!r} was learned with weights of SHA-256 {config.weights_sha256[:12]}"
            f" at {config.image_size} pixels, but {pretrained.source} has {pretrained.sha256[:12]}"
            f" at {pretrained.config.image_size}; give the file that it was learned with"
            " (--weights)"
        )
    return OpenMemory(
        directory, config, pretrained, engine, is_run=held["format"] == RUN_FORMAT, usable=usable
    )


def _check_same_weights(directory: Path, config: MemoryConfig, own: Pretrained, file: Path) -> None:
    given = load_pretrained(config.backbone, weights=file)
    # bundled weights, which are a converted file, are known by the file's own hash
    if config.weights_sha256 not in (given.sha256, sha256_of(file)):
        there = f"SHA-256 {config.weights_sha256[:12]}"
        here = given.sha256[:12]
    elif config.base_data_sha256 is None and not _equal_means(given, own):
        there, here = (
            "mean CLS tokens of the pretraining data for "
            + (", ".join(sorted(one.base_means)) or "no image size")
            for one in (own, given)
        )
    else:
        return
    raise ValueError(
        f"memory {str(directory)!r} was made with weights of {there}, but {file} has {here}; leave"
        " --weights out, or make another memory"
    )


def _equal_means(one: Pretrained, other: Pretrained) -> bool:
    first = one.base_means
    second = other.base_means
    return first.keys() == second.keys() and all(
        np.array_equal(first[key], second[key]) for key in first
    )


def _run_config(
    directory: Path, held: Mapping[str, Any], weights: str | Path | None
) -> tuple[MemoryConfig, Pretrained]:
    """A run of an experiment, seen as a memory."""
    if "cheem" not in held or held.get("router_weights_sha256") is not None:
        raise ValueError(
            f"{str(directory)!r} is a run of another method than cheem, or with a separate router;"
            " only CHEEM's memories answer here"
        )
    begun = next((entry for entry in read(directory) if entry["event"] == "run"), {})
    command = begun.get("command") or []
    if (
        weights is None
        and "--weights" in command
        and command[command.index("--weights") + 1] != "None"
    ):
        weights = Path(command[command.index("--weights") + 1])
    pretrained = load_pretrained(held["backbone"], weights=weights, image_size=held["image_size"])
    if "pixels" in held:
        mean, std = map(tuple, held["pixels"])
        pretrained = dataclasses.replace(
            pretrained, config=dataclasses.replace(pretrained.config, mean=mean, std=std)
        )
    method = settings_of(CheemConfig, held["cheem"], directory / NAME)
    config = MemoryConfig(
        held["backbone"],
        held["image_size"],
        held["weights_sha256"],
        method,
        begun.get("preset", "unknown"),
        held["seed"],
        settings_of(SeedsConfig, held["seeds"], directory / NAME),
        tasks=tuple(held["tasks"]),
        data_sha256=held["data_sha256"],
    )
    return config, pretrained


def _setting(config: MemoryConfig, pretrained: Pretrained) -> dict[str, Any]:
    """What the record tells of a memory before its first task."""
    return {
        "method": "cheem",
        "backbone": config.backbone,
        "source": pretrained.source,
        "stream": "memory",
        "seed": config.seed,
        "placement": config.method.placement,
        "preset": config.preset,
        "image_size": config.image_size,
        "base_means": "known" if pretrained.base_means else "neutral",
        "router": config.backbone,
        "split_sha256": {},
        "data": None,
        "command": None,
        "upper_bound": False,
        "upright": config.upright,
    }
