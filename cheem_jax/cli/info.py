"""`cheem info`: the contents of a memory, without importing the packages that only predictions
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
added: parameters that the task brought, in % of the backbone's
GFLOPs: 10^9 operations per image by the paper's count, with the router
executed: those that run here
open set: calibrated where `cheem predict --open-set` can reject images of other tasks"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class OfMemory:
    """A memory."""

    memory: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="MEMORY")]
    """The memory's folder."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class OfMemoryOrRun(OfMemory):
    """A memory or a finished run."""

    memory: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="MEMORY")]
    """The memory's folder, or that of a finished run of CHEEM."""
    weights: Path | None = None
    """For a run, which contains no weights: the backbone's weights file; default: the one that it
    was learned with."""
    usable: bool = False
    """Where tasks of a memory are corrupted, answer with the others."""


@dataclasses.dataclass(frozen=True)
class Info(OfMemoryOrRun):
    """Show what a memory contains: its tasks and their networks, the pool of experts, sizes."""

    json: bool = False
    """Print JSON instead: classes of every task and every expert's history as well."""


def show_info(settings: Info) -> None:
    """Print it."""
    found = None if settings.usable or settings.weights is not None else read_info(settings.memory)
    if found is None:
        from cheem_jax.memory import open_memory  # late, since JAX takes long to import

        found = open_memory(
            settings.memory, weights=settings.weights, usable=settings.usable
        ).info()
    if settings.json:
        print(json.dumps(found, indent=1))
        return
    progress = Progress()
    place = shown(Path(found["directory"]))
    kind = "run" if found["kind"] == "run" else "memory"
    progress.say(
        f"{kind} {place}: {found['backbone']} at {found['image_size']} pixels, experts at"
        f" {found['placement']}, preset {found['preset']}, seed {found['seed']},"
        f" {_size(found['bytes'])} on the disk"
    )
    if not found["upright"]:
        progress.say("images are used as stored: EXIF orientation is not applied")
    if found["keeps_base"]:
        progress.say("the backbone's own classes are a target as well")
    if found["forgotten"]:
        num = len(found["forgotten"])
        progress.say(f"forgotten: {num} task{'' if num == 1 else 's'}")
    for task, reason in found["lost"].items():
        progress.say(f"lost: {task}: {reason}")
    if found["learning"]:
        progress.say(f"interrupted: {found['learning']['name']}; the same `cheem learn` resumes it")
    if not found["tasks"]:
        progress.say(f"no task yet: cheem learn {place} FOLDER")
        return
    columns = ("task", "classes", "added %", "GFLOPs", "executed", "on disk", "open set")
    rows = []
    for task in found["tasks"]:
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
    for task in found["tasks"]:
        progress.architecture(task["name"], task["architecture"])
    for task in found["tasks"]:
        if compared := task["frozen_head"]:
            learned, frozen = (f"{100 * compared[key]:.1f} %" for key in ("network", "frozen"))
            progress.say(
                f"{task['name']}: {compared['validation_images']:,} validation images: network"
                f" {learned}, frozen backbone with a ridge head"
                f" {frozen}{' (used)' if compared['kept'] == 'frozen' else ''}"
            )
        for more in task["extended"]:
            (images, all_images), (classes, all_classes) = more["num_train"], more["num_classes"]
            progress.say(
                f"{task['name']}: extended from {images:,} training images of {classes} classes to"
                f" {all_images:,} of {all_classes}"
            )
    num_experts = [sum(expert["kind"] != "gone" for expert in block) for block in found["pool"]]
    progress.say(f"experts per block: {' '.join(map(str, num_experts))}")


def print_grid(grid: Grid, console: Console, spare: Sequence[str] = ()) -> None:
    """The table, without as many of the spare columns as a narrow terminal has no room for; long
    names wrap."""
    while grid.width - 2 > console.width and spare:
        grid = grid.without(spare[:1])
        spare = spare[1:]
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for place, name in enumerate(grid.columns):
        is_left = place < grid.num_left
        table.add_column(
            name, justify="left" if is_left else "right", overflow="fold", no_wrap=not is_left
        )
    for row in grid.rows:
        table.add_row(*map(Text, row))
    console.print(table)


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.1f} MB" if num_bytes >= 2**20 else f"{num_bytes / 2**10:.0f} kB"
