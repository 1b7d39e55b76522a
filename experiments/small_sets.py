"""Settings of `cheem learn` for few images: the accuracy of a task by its number of images.

    python experiments/small_sets.py --stream DATA --tasks caltech101,food10 --image-size 96

A unit is a memory with one task, learned by one variant of the settings. Training and validation
images are a random share of the task's images, with equally many per class; all test images are
used. Finished units are not repeated; tasks, numbers, variants and seeds can be added later.
"""

import dataclasses
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from charts import filled, names_in, write_page
from studies.searching.units import settings_of
from study import load_stream, recorded, seeds_of

import cheem_jax
from cheem_jax.backbone.config import ViTConfig
from cheem_jax.cheem.config import DEMO, QUICK, QUICK_PLUS, CheemConfig, auto
from cheem_jax.cli import run as cheem_run
from cheem_jax.cli.arguments import arguments_of, parse
from cheem_jax.cli.running import run_command
from cheem_jax.data.task import Split, Task
from cheem_jax.data.task import fingerprint as data_hash
from cheem_jax.report.table import Grid, percent
from cheem_jax.run.progress import Progress
from cheem_jax.run.record import read

Entry = Mapping[str, Any]
Variant = Callable[[int], CheemConfig]
"""Maps the number of training images to settings."""
SHARE = ("task", "num_train", "seed")
"""Fields of a unit that identify its images."""
ROW = ("task", "num_train", "variant")
"""Fields of units that differ only in their seeds."""
PER_VALIDATION_IMAGE = 9
"""Training images per validation image, as in `cheem learn` for images without splits."""


def _auto(factor: float = 1, rate: float = 3e-3, augment: bool = True) -> Variant:
    """Make a variant of preset `auto` with `factor` times its epochs."""

    def config(num_images: int) -> CheemConfig:
        chosen = auto(QUICK_PLUS, num_images)
        epochs = round(factor * chosen.finetune.epochs)
        finetune = dataclasses.replace(chosen.finetune, epochs=epochs, learning_rate=rate)
        return dataclasses.replace(chosen, finetune=finetune, augment=augment)

    return config


def _paper(num_images: int) -> CheemConfig:
    """Return settings with the paper's search and about as many epochs as those of `auto`."""
    epochs = auto(QUICK_PLUS, num_images).finetune.epochs // 2
    is_longer = epochs > QUICK.finetune.epochs
    fit = dataclasses.replace((DEMO if is_longer else QUICK).finetune, epochs=epochs)
    return dataclasses.replace(QUICK, supernet=fit, finetune=fit, fallback=True)


VARIANTS: dict[str, Variant] = {
    "search": _paper,
    "plain": _auto(augment=False),
    "auto": _auto(),
    "half": _auto(0.5),
    "double": _auto(2),
    "slow": _auto(rate=1e-3),
}
TITLES = {
    "search": "paper's search",
    "plain": "not augmented",
    "auto": "`auto`",
    "half": "half the epochs",
    "double": "twice the epochs",
    "slow": "rate 0.001",
}
"""Titles of variants in tables."""


@dataclasses.dataclass(frozen=True)
class SmallSets(cheem_run.StreamInputs):
    """Learn shares of image sets with variants of the settings."""

    stream: str = cheem_run.DEMO
    """demo, or any other value of `experiments/mtil.py --stream`."""
    numbers: str = "60,300,1000"
    """Numbers of training images, separated by commas. A number with fewer than two images per
    class, or more than 10 % above the task's number of images, is left out for this task."""
    variants: str = ",".join(VARIANTS)
    """Names of variants, separated by commas."""
    seeds: str = "0"
    """Seeds, separated by commas."""
    run_dir: Path = Path("runs/small_sets")
    """Folder of record and table; finished units are not repeated."""


def main(settings: SmallSets) -> None:
    """Compute the missing units, then print and save the table."""
    progress = Progress()
    variants = names_in("--variants", settings.variants, VARIANTS)
    seeds = seeds_of(settings.seeds)
    numbers = numbers_of(settings.numbers)
    loaded = load_stream(settings, progress)
    backbone = loaded.pretrained.config
    identity = {
        "format": "cheem_jax-small_sets/1",
        "stream": loaded.stream.name,
        "backbone": backbone.name,
        "image_size": backbone.image_size,
        "weights_sha256": loaded.pretrained.sha256,
        "data_sha256": {},  # entries have the hashes of their images
    }
    command = ["experiments/small_sets.py", *arguments_of(settings)]
    directory = settings.run_dir
    fitting = [(task, num) for num in numbers for task in loaded.stream.tasks if fits(task, num)]
    if not fitting:
        sizes = ", ".join(
            f"{task.name} {len(task.train.labels):,} of {len(task.classes)} classes"
            for task in loaded.stream.tasks
        )
        raise ValueError(
            f"--numbers is {settings.numbers!r}, and no task has as many training images, two of"
            f" each class or more; the tasks have {sizes}"
        )
    hashes = {task.name: data_hash(task) for task in loaded.stream.tasks}
    with recorded(directory, identity, command, progress) as session:
        for seed in seeds:
            for task in [share(task, num, seed) for task, num in fitting]:
                for variant in variants:
                    place = {
                        "task": task.name,
                        "num_train": len(task.train.labels),
                        "variant": variant,
                        "settings": settings_of(VARIANTS[variant](len(task.train.labels))),
                        "seed": seed,
                        "data_sha256": data_hash(task),
                    }
                    if not any(place.items() <= entry.items() for entry in read(directory)):
                        result = learn(settings, backbone, task, variant, seed, progress)
                        whole = {"task_sha256": hashes[task.name]}
                        session.record.write("unit", **place, **whole, **result)
    units = latest([entry for entry in read(directory) if entry["event"] == "unit"])
    grid = grid_of(units)
    write_page(
        directory / "small_sets", grid.to_markdown() + "\n", {**identity, "units": units}, grid
    )
    progress.console.print(grid.to_rich())


def numbers_of(text: str) -> list[int]:
    """Return the numbers in the value of `--numbers`. Raises ValueError unless all are positive."""
    numbers = [int(part) if part.strip().isdecimal() else 0 for part in text.split(",")]
    if min(numbers) < 1:
        raise ValueError(
            f"--numbers is {text!r}; expected positive whole numbers separated by commas, such as"
            " 60,300"
        )
    return numbers


def learn(
    settings: SmallSets,
    backbone: ViTConfig,
    task: Task,
    variant: str,
    seed: int,
    progress: Progress,
) -> dict[str, Any]:
    """Learn the task in a temporary memory. Return accuracies and seconds."""
    directory = settings.run_dir / "memory"
    shutil.rmtree(directory, ignore_errors=True)
    memory = cheem_jax.create(
        directory,
        backbone=backbone.name,
        weights=settings.weights,
        image_size=backbone.image_size,
        method=VARIANTS[variant](len(task.train.labels)),
        seed=seed,
    )
    start = time.perf_counter()
    memory.learn(task, progress=progress)
    seconds = time.perf_counter() - start
    accuracies = {
        f"{split}_accuracy": memory.evaluate(task, split=split)[0].accuracy_given
        for split in ("val", "test")
    }
    result = {
        "seconds": seconds,
        "epochs": memory.config.method.finetune.epochs,
        "num_val": len(task.val.labels),
        "frozen_head": memory.info()["tasks"][0]["frozen_head"],
        "architecture": memory.tasks[0].architecture,
        **accuracies,
    }
    shutil.rmtree(directory)
    return result


def fits(task: Task, number: int) -> bool:
    """Return whether the task has `number` training images, and two of them for each class."""
    return number // len(task.classes) >= 2 and number <= 1.1 * len(task.train.labels)


def share(task: Task, number: int, seed: int) -> Task:
    """Return the task with about `number` training images, equally many per class if there are
    enough, and validation images in proportion."""

    def cut(split: Split, count: int, key: int) -> Split:
        generator = np.random.default_rng([seed, key])
        parts = [
            generator.permutation(np.flatnonzero(split.labels == label))[:count]
            for label in range(len(task.classes))
        ]
        rows = np.sort(np.concatenate(parts))
        return Split(split.images[rows], split.labels[rows])

    per_class = number // len(task.classes)
    return dataclasses.replace(
        task,
        train=cut(task.train, per_class, 0),
        val=cut(task.val, max(1, per_class // PER_VALIDATION_IMAGE), 1),
    )


def latest(units: Sequence[Entry]) -> list[Entry]:
    """Return the units without those of earlier images or settings, which a later unit has
    replaced. Units of an earlier version have the hash of their share of the images only."""
    wholes = {unit["task"]: unit["task_sha256"] for unit in units if "task_sha256" in unit}
    shares = {tuple(unit[key] for key in SHARE): unit["data_sha256"] for unit in units}
    settings = {tuple(unit[key] for key in ROW): unit["settings"] for unit in units}
    last = {
        tuple(unit[key] for key in (*ROW, "seed")): unit
        for unit in units
        if unit.get("task_sha256") in (None, wholes.get(unit["task"]))
        and unit["data_sha256"] == shares[tuple(unit[key] for key in SHARE)]
        and unit["settings"] == settings[tuple(unit[key] for key in ROW)]
    }
    return list(last.values())


def grid_of(units: Sequence[Entry]) -> Grid:
    """Make the table of test accuracies, with one row per task and number of images, sorted by this
    number, and a column for each variant that was measured: means over the seeds that all variants
    of a row have."""
    groups: dict[tuple[int, str], dict[str, list[Entry]]] = {}
    for unit in units:
        variants = groups.setdefault((unit["num_train"], unit["task"]), {})
        variants.setdefault(unit["variant"], []).append(unit)
    places = sorted(groups)
    columns = {
        "set": [task for _, task in places],
        "images": [f"{num:,}" for num, _ in places],
    }
    common = {
        place: set.intersection(*({unit["seed"] for unit in one} for one in group.values()))
        for place, group in groups.items()
    }
    measured = {unit["variant"] for unit in units}
    for name, title in TITLES.items():
        if name not in measured:
            continue
        units_of = [
            [unit for unit in groups[place].get(name, []) if unit["seed"] in common[place]]
            for place in places
        ]
        columns[f"{title} %"] = [
            percent(float(np.mean([unit["test_accuracy"] for unit in one])) if one else None)
            for one in units_of
        ]
    return filled("", columns)


if __name__ == "__main__":
    parsed = parse(SmallSets, description=__doc__)
    run_command(main, parsed, parsed.run_dir)
