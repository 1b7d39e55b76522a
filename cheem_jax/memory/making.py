"""Create a memory, without tasks or with the tasks of a run, and open a memory or a run."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cheem_jax.backbone.means import base_means
from cheem_jax.backbone.params import build
from cheem_jax.backbone.weights import Pretrained, hash_file, load_pretrained, save_converted
from cheem_jax.cheem.config import (
    PRESETS,
    QUICK_PLUS,
    CheemConfig,
    LearnPreset,
    auto_router,
    computes_similarity,
)
from cheem_jax.core.keys import Keys, Phase
from cheem_jax.core.paths import absolute
from cheem_jax.core.routing import calibrate, centroid_distances, fit_statistics
from cheem_jax.core.settings import SeedsConfig, check_seed
from cheem_jax.data.task import Task, repeats
from cheem_jax.data.task import fingerprint as data_hash
from cheem_jax.engine.choice import EngineConfig
from cheem_jax.memory.contents import (
    BASE,
    RUN_FORMAT,
    WEIGHTS,
    MemoryConfig,
    checkpoint_folder,
    parse_config,
    parse_settings,
    read_config,
)
from cheem_jax.memory.data import Data, read_tasks
from cheem_jax.memory.directory import check_free, new_directory, write_config
from cheem_jax.memory.opened import OpenMemory
from cheem_jax.run import fingerprint
from cheem_jax.run.checkpoint import copy_task, save_task, saved_tasks
from cheem_jax.run.directory import NAME
from cheem_jax.run.progress import Progress
from cheem_jax.run.record import Record, read
from cheem_jax.run_config import make_networks

ENGINE = EngineConfig()
_BASE_NUMBER = 2**32 - 1
"""Task number of the pretraining data in PRNG keys; no task has such a large number."""


def create(
    directory: str | Path,
    *,
    backbone: str = "deit_tiny",
    weights: str | Path | None = None,
    image_size: int | None = None,
    preset: LearnPreset = "auto",
    method: CheemConfig | None = None,
    augment: bool = False,
    seed: int = 0,
    base_data: Data | None = None,
    keep_base: bool = False,
    base_classes: Sequence[str] | None = None,
    engine: EngineConfig = ENGINE,
    progress: Progress | None = None,
) -> OpenMemory:
    """Create a memory without tasks in a new or empty folder. If an error is raised, nothing is
    left behind.

    Args:
        weights: file of the backbone's weights; see `load_pretrained`.
        preset: settings of CHEEM. With `auto`, training images are augmented, the number of epochs
            depends on the task, and the router on the backbone (see `cheem.config.auto` and
            `auto_router`). `paper` decodes images as stored; other presets rotate them according to
            their EXIF orientation.
        method: settings of CHEEM that replace the settings of the preset.
        augment: augment training images randomly with another preset than `auto`, too.
        base_data: images of the pretraining data, in a form that `learn` accepts, for `keep_base`.
            The paper's search computes the similarity of a task to the pretraining data from their
            mean CLS tokens.
        keep_base: also predict the classes of the pretraining data.
        base_classes: names of the classes that `keep_base` adds; by default, the folder names of
            `base_data`.

    Raises:
        ValueError: settings contradict each other.
        FileNotFoundError: the weights do not exist.
    """
    directory = absolute(directory)
    check_free(directory)
    if preset not in (presets := {**PRESETS, "auto": QUICK_PLUS}):
        raise ValueError(f"unknown preset {preset!r}; expected one of {', '.join(presets)}")
    config = with_fallback(presets[preset], preset) if method is None else method
    label = preset
    if method is not None:
        equal = (name for name, settings in PRESETS.items() if settings == method)
        label = next(equal, f"{preset}, changed")
    config = dataclasses.replace(config, augment=config.augment or augment)
    pretrained = load_pretrained(backbone, weights=weights, image_size=image_size)
    if method is None and preset == "auto":
        vit = pretrained.config
        router = auto_router(vit.width, vit.depth)
        config = dataclasses.replace(config, router=router, augment=True)
    check_seed(seed)
    config.router.blocks(pretrained.config.depth)  # raises before anything is written
    if keep_base and base_data is None:
        raise ValueError(
            "keep_base needs images of the backbone's classes for the router; give base_data"
        )
    if base_data is not None and not (keep_base or computes_similarity(config)):
        raise ValueError(
            f"the preset {label} does not use base_data; omit it, or give keep_base as well"
        )
    if base_classes is not None and not keep_base:
        raise ValueError(
            "base_classes names classes that the memory would not predict; give keep_base as well"
        )
    settings = MemoryConfig(
        pretrained.config.name,
        pretrained.config.image_size,
        pretrained.sha256,
        config,
        label,
        seed,
        SeedsConfig(),
        keeps_base=keep_base,
        base_data_sha256=None,
        begun_with_sha256=None,
        upright=preset != "paper",
    )
    base = None
    if base_data is not None:
        vit = build(
            dataclasses.replace(pretrained.config, precision=engine.precision), pretrained.params
        )
        if keep_base and vit.head is None:
            raise ValueError(f"{settings.backbone} has no head, so it has no classes to keep")
        task = read_base_task(base_data, settings.image_size, progress, upright=settings.upright)
        settings = dataclasses.replace(settings, base_data_sha256=data_hash(task))
        if computes_similarity(config):
            measured = base_means(vit, task.train.images, batch_size=config.batch_size)
            means = {**pretrained.base_means, **measured}
            pretrained = dataclasses.replace(pretrained, base_means=means)
        del vit
        if keep_base:
            base = _base_target(task, base_classes, settings, pretrained, engine)
    with new_directory(directory) as partial:
        save_converted(partial / WEIGHTS, pretrained)
        if base is not None:
            save_task(partial / BASE, *base)
        checkpoint_folder(partial, 1).mkdir(parents=True)
        Record(partial).write("run", **_describe(settings, pretrained))
        write_config(partial, settings)
        open_memory(partial, engine=engine)  # raises before the folder has its name
    return open_memory(directory, engine=engine)


def _base_target(
    task: Task,
    names: Sequence[str] | None,
    config: MemoryConfig,
    pretrained: Pretrained,
    engine: EngineConfig,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the arrays and the metadata of the checkpoint from which the memory predicts the
    classes of the pretraining data."""
    num = pretrained.config.num_classes
    if names is None:
        is_named = len(task.classes) == num
        names = task.classes if is_named else [f"class {label}" for label in range(num)]
    if len(names) != num or repeats(names):
        raise ValueError(
            f"{len(names)} names (repeated: {repeats(names)[:5]}) for the backbone's {num} classes"
        )
    router = config.method.router
    features = make_networks(pretrained, None, config.method, engine).router_features
    statistics = fit_statistics(
        features(task.train.images),
        task.train.labels,
        router,
        seed=Keys(config.seed).seed_at(_BASE_NUMBER, Phase.CENTROIDS),
    )
    validation = centroid_distances(features(task.val.images), [statistics.centroids])[:, 0]
    arrays: dict[str, Any] = {"centroids": statistics.centroids, "distances": calibrate(validation)}
    if statistics.moments:
        arrays["moments"] = dict(statistics.moments)
    return arrays, {"name": BASE, "classes": list(names)}


def read_base_task(
    base_data: Data, image_size: int, progress: Progress | None = None, *, upright: bool
) -> Task:
    """Read images of the pretraining data. Raises ValueError if `base_data` is not exactly one
    task."""
    tasks = read_tasks(base_data, image_size, progress, upright=upright)
    if len(tasks) != 1:
        raise ValueError(
            f"base_data contains {len(tasks)} tasks, expected one: {[task.name for task in tasks]}"
        )
    # the fixed name makes the hash independent of the folder's name
    return dataclasses.replace(tasks[0], name=BASE)


def with_fallback(config: CheemConfig, preset: str) -> CheemConfig:
    """Return settings that allow a task to use the frozen backbone if it is more accurate than the
    learned network. With the preset `paper`, the settings do not change."""
    return config if preset == "paper" else dataclasses.replace(config, fallback=True)


def begin_with(
    directory: str | Path,
    run: str | Path,
    *,
    weights: str | Path | None = None,
    engine: EngineConfig = ENGINE,
) -> OpenMemory:
    """Create a memory from the tasks of a finished run of CHEEM; the run stays unchanged.

    New tasks are learned with the preset `auto`, with the run's router and rank of stored pairs.
    Raises ValueError if `run` is a memory, and the errors of `open_memory` and `create`.
    """
    directory = absolute(directory)
    source = open_memory(run, weights=weights, engine=engine)
    if not source.is_run:
        raise ValueError(
            f"{str(run)!r} is already a memory; copy its folder, or learn new tasks in it"
        )
    names = tuple(task.name for task in source.tasks)
    values = read_config(source.directory)
    config = dataclasses.replace(
        source.config,
        preset="auto",
        tasks=names,
        data_sha256={name: source.config.data_sha256[name] for name in names},
        num_learned=len(names),
        begun_with_sha256=fingerprint.digest(values),
    )
    num = len(names)
    # accuracies on validation images are not those of a memory, which are on test images
    is_tested = values.get("measured_on", "test") == "test"
    history = read(source.directory)
    started = next(entry for entry in history if entry["event"] == "run")
    entries = []
    # a run in progress can have learned further tasks since it was opened
    for entry in history:
        if entry["event"] == "learned" and entry["method"] == "cheem":
            if entry["report"]["index"] < num:
                entries.append(entry)
        if entry["event"] == "evaluated" and is_tested and entry["index"] < num:
            methods = {"cheem": entry["methods"]["cheem"]}
            entries.append({**entry, "methods": methods, "checkpoints": {}})
    with new_directory(directory) as partial:
        save_converted(partial / WEIGHTS, source.pretrained)
        root = checkpoint_folder(partial, 1)
        root.mkdir(parents=True)
        for task in saved_tasks(source.root)[:num]:
            copy_task(task, root / task.name)
        record = Record(partial)
        described = _describe(config, source.pretrained)
        record.write("run", **described | {"base_means": started.get("base_means")})
        record.replace([*read(partial), *entries])
        write_config(partial, config)
        open_memory(partial, engine=engine)  # raises before the folder has its name
    return open_memory(directory, engine=engine)


def open_memory(
    directory: str | Path,
    *,
    weights: str | Path | None = None,
    engine: EngineConfig = ENGINE,
    usable: bool = False,
) -> OpenMemory:
    """Open a memory or a run of CHEEM.

    Args:
        weights: weights of a run; by default, the weights that the run used. A memory contains its
            weights and accepts only identical weights.
        usable: open a corrupted memory with its intact tasks only. `OpenMemory.lost` then contains
            the error of each corrupted task.

    Raises:
        ValueError: a file is corrupted, missing or of another format, or the weights are not those
            of the memory or the run.
    """
    directory = absolute(directory)
    values = read_config(directory)
    is_run = values["format"] == RUN_FORMAT
    if is_run:
        config, pretrained = _read_run(directory, values, weights)
    else:
        config = parse_config(values, directory)
        file = directory / WEIGHTS
        if not file.is_file():
            raise ValueError(f"memory {str(directory)!r} lacks {WEIGHTS}; restore it from a copy")
        pretrained = load_pretrained(config.backbone, weights=file)
        if weights is not None:
            _check_same_weights(directory, config, pretrained, absolute(weights))
    size = pretrained.config.image_size
    if (pretrained.sha256, size) != (config.weights_sha256, config.image_size):
        raise ValueError(
            f"{str(directory)!r} was learned with weights of SHA-256 {config.weights_sha256[:12]}"
            f" at {config.image_size} pixels, but {pretrained.source} has {pretrained.sha256[:12]}"
            f" at {size}; give the weights of the run with --weights"
        )
    return OpenMemory(directory, config, pretrained, engine, is_run=is_run, usable=usable)


def _check_same_weights(
    directory: Path, config: MemoryConfig, stored: Pretrained, file: Path
) -> None:
    given = load_pretrained(config.backbone, weights=file)
    means, given_means = stored.base_means, given.base_means
    # for bundled weights, `weights_sha256` is the hash of the bundled file
    if config.weights_sha256 not in (given.sha256, hash_file(file)):
        expected = f"SHA-256 {config.weights_sha256[:12]}"
        actual = given.sha256[:12]
    elif config.base_data_sha256 is None and not (
        means.keys() == given_means.keys()
        and all(np.array_equal(means[key], given_means[key]) for key in means)
    ):
        expected, actual = (
            "mean CLS tokens of the pretraining data for "
            + (", ".join(sorted(by_size)) or "no image size")
            for by_size in (means, given_means)
        )
    else:
        return
    raise ValueError(
        f"memory {str(directory)!r} was created with weights of {expected}, but {file} has"
        f" {actual}; omit --weights, or create another memory"
    )


def _read_run(
    directory: Path, values: Mapping[str, Any], weights: str | Path | None
) -> tuple[MemoryConfig, Pretrained]:
    """Read the settings of a run, converted to settings of a memory, and the weights of the run."""
    if "cheem" not in values or values.get("router_weights_sha256") is not None:
        raise ValueError(
            f"{str(directory)!r} is a run of a method other than cheem, or with a separate router;"
            " give a run of cheem without --router"
        )
    begin = next((entry for entry in read(directory) if entry["event"] == "run"), {})
    command = begin.get("command") or []
    if weights is None and "--weights" in command:
        file = command[command.index("--weights") + 1]
        weights = None if file == "None" else Path(file)
    size = values["image_size"]
    pretrained = load_pretrained(values["backbone"], weights=weights, image_size=size)
    if "pixels" in values:
        mean, std = map(tuple, values["pixels"])
        scaled = dataclasses.replace(pretrained.config, mean=mean, std=std)
        if scaled != pretrained.config:
            # the mean CLS tokens were computed with the pixel scale of pretraining; the run did not
            # use them
            pretrained = dataclasses.replace(pretrained, config=scaled, base_means={})
    config = MemoryConfig(
        values["backbone"],
        size,
        values["weights_sha256"],
        parse_settings(CheemConfig, values["cheem"], directory / NAME),
        begin.get("preset", "unknown"),
        values["seed"],
        parse_settings(SeedsConfig, values["seeds"], directory / NAME),
        keeps_base=False,
        base_data_sha256=None,
        begun_with_sha256=None,
        upright=begin.get("upright", False),
        tasks=tuple(values["tasks"]),
        data_sha256=values["data_sha256"],
    )
    return config, pretrained


def _describe(config: MemoryConfig, pretrained: Pretrained) -> dict[str, Any]:
    """Return the first entry of a new memory's record."""
    base_means = "known" if pretrained.base_means else "neutral"
    return {
        "method": "cheem",
        "backbone": config.backbone,
        "source": pretrained.source,
        "stream": "memory",
        "seed": config.seed,
        "placement": config.method.placement,
        "preset": config.preset,
        "image_size": config.image_size,
        "base_means": base_means if computes_similarity(config.method) else None,
        "router": config.backbone,
        "split_sha256": {},
        "data": None,
        "command": None,
        "upper_bound": False,
        "upright": config.upright,
    }
