"""`cheem info`: display the contents of a memory, without importing packages that only predictions
need."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from rich.table import Table
from rich.text import Text

from cheem_jax.core.paths import shown
from cheem_jax.memory.contents import read_info
from cheem_jax.report.grid import Grid
from cheem_jax.run.progress import Progress

INFO_LEGEND = """\
added: parameters added by the task, in % of the backbone's parameters
GFLOPs: 10^9 operations per image by the paper's count, including the router
executed: operations that this library executes
open set: if calibrated, `cheem predict --open-set` can reject images of other tasks"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class OfMemory:
    """Options of commands on a memory."""

    memory: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="MEMORY")]
    """Folder of the memory."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class OfMemoryOrRun(OfMemory):
    """Options of commands that open a memory or a finished run."""

    memory: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="MEMORY")]
    """Folder of the memory, or of a finished CHEEM run."""
    weights: Path | None = None
    """For a run: weights file of the backbone; default: the file that the run used. A memory
    contains its weights."""
    usable: bool = False
    """Predict with the intact tasks of a memory if other tasks are corrupted."""


@dataclasses.dataclass(frozen=True)
class Info(OfMemoryOrRun):
    """Show a memory's tasks and their networks, the pool of experts, and sizes."""

    json: bool = False
    """Print JSON instead of text, with the classes of every task and the history of every
    expert."""


def show_info(settings: Info) -> None:
    """Print the contents of a memory as text or JSON."""
    info = None if settings.usable or settings.weights is not None else read_info(settings.memory)
    if info is None:
        from cheem_jax.memory import open_memory  # imports JAX, which is slow

        info = open_memory(settings.memory, weights=settings.weights, usable=settings.usable).info()
    if settings.json:
        print(json.dumps(info, indent=1))
        return
    progress = Progress()
    directory = shown(Path(info["directory"]))
    kind = "run" if info["kind"] == "run" else "memory"
    progress.say(
        f"{kind} {directory}: {info['backbone']} at {info['image_size']} pixels, experts at"
        f" {info['placement']}, preset {info['preset']}, seed {info['seed']},"
        f" {_size(info['bytes'])} on disk"
    )
    if not info["upright"]:
        progress.say("images are used as stored: EXIF orientation is not applied")
    if info["keeps_base"]:
        progress.say("the classes of the pretraining data are also predicted")
    if info["forgotten"]:
        num = len(info["forgotten"])
        progress.say(f"forgotten: {num} task{'' if num == 1 else 's'}")
    for task, reason in info["lost"].items():
        progress.say(f"lost: {task}: {reason}")
    if info["learning"]:
        progress.say(f"interrupted: {info['learning']['name']}; the same `cheem learn` resumes it")
    if not info["tasks"]:
        progress.say(f"no task yet: cheem learn {directory} FOLDER")
        return
    columns = ("task", "classes", "added %", "GFLOPs", "executed", "on disk", "open set")
    rows = []
    for task in info["tasks"]:
        rows.append(
            (
                task["name"],
                str(len(task["classes"])),
                f"{task['params_added_percent']:.2f}",
                f"{task['flops'] / 1e9:.3f}",
                f"{task['flops_executed'] / 1e9:.3f}",
                _size(task["bytes"]),
                "calibrated" if task["calibrated"] else "no",
            )
        )
    print_grid(Grid("", columns, tuple(rows), 1), progress.console, ("executed", "open set"))
    progress.say(INFO_LEGEND)
    for task in info["tasks"]:
        progress.architecture(task["name"], task["architecture"])
    for task in info["tasks"]:
        if comparison := task["frozen_head"]:
            learned, frozen = (f"{100 * comparison[key]:.1f} %" for key in ("network", "frozen"))
            progress.say(
                f"{task['name']}: {comparison['validation_images']:,} validation images: network"
                f" {learned}, frozen backbone with a ridge head"
                f" {frozen}{' (used)' if comparison['kept'] == 'frozen' else ''}"
            )
        for extension in task["extended"]:
            (images, all_images), (classes, all_classes) = (
                extension["num_train"],
                extension["num_classes"],
            )
            progress.say(
                f"{task['name']}: extended from {images:,} training images of {classes} classes to"
                f" {all_images:,} of {all_classes}"
            )
    num_experts = [sum(expert["kind"] != "gone" for expert in block) for block in info["pool"]]
    progress.say(f"experts per block: {' '.join(map(str, num_experts))}")


def print_grid(grid: Grid, console: Console, optional: Sequence[str] = ()) -> None:
    """Print a table. While it is wider than the terminal, the columns in `optional` are omitted one
    after another; long names wrap."""
    while grid.width - 2 > console.width and optional:
        grid = grid.without(optional[:1])
        optional = optional[1:]
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for index, name in enumerate(grid.columns):
        is_left = index < grid.num_left
        table.add_column(
            name, justify="left" if is_left else "right", overflow="fold", no_wrap=not is_left
        )
    for row in grid.rows:
        table.add_row(*map(Text, row))
    console.print(table)


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.1f} MB" if num_bytes >= 2**20 else f"{num_bytes / 2**10:.0f} kB"
