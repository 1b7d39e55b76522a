"""`cheem info`: what a memory holds."""

import dataclasses
import json
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.table import Table
from rich.text import Text

from cheem_jax.core.paths import shown
from cheem_jax.memory import open_memory
from cheem_jax.run.progress import Progress


@dataclasses.dataclass(frozen=True)
class Info:
    """Show what a memory contains: its tasks and their networks, the pool of experts, sizes."""

    memory: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="MEMORY")]
    """The memory's folder, or a finished run of CHEEM."""
    json: bool = False
    """Print JSON instead: classes of every task and every expert's history as well."""
    weights: Path | None = None
    """Weights for a run, which contains none; default: as the run had them."""
    usable: bool = False
    """If tasks of a memory are corrupted, answer with the others."""


def show_info(settings: Info) -> None:
    """Print it."""
    found = open_memory(settings.memory, weights=settings.weights, usable=settings.usable).info()
    if settings.json:
        print(json.dumps(found, indent=1))
        return
    progress = Progress()
    place = shown(Path(found["directory"]))
    kind = "run" if found["kind"] == "run" else "memory"
    progress.say(
        f"{kind} {place}: {found['backbone']} at {found['image_size']} pixels, experts at "
        f"{found['placement']}, preset {found['preset']}, seed {found['seed']}, {_size(found['bytes'])} on the disk"
    )
    if found["keeps_base"]:
        progress.say("the backbone's own classes are a target as well")
    if found["forgotten"]:
        progress.say(f"forgotten: {len(found['forgotten'])}, whose numbers {found['forgotten']} are never used again")
    for task, reason in found["lost"].items():
        progress.say(f"lost: {task}: {reason}")
    if found["learning"]:
        progress.say(f"half learned: {found['learning']['name']}; the same `cheem learn` goes on with it")
    if not found["tasks"]:
        progress.say(f"no task yet: cheem learn {place} FOLDER")
        return
    progress.console.print(_tasks(found))
    for task in found["tasks"]:
        progress.architecture(task["name"], task["architecture"])
    progress.say("experts per block: " + " ".join(_experts(block) for block in found["pool"]))


def _tasks(found: dict[str, Any]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("task")
    for name in ("number", "classes", "added %", "GFLOPs", "executed", "on disk", "open set"):
        table.add_column(name, justify="right")
    for task in found["tasks"]:
        table.add_row(
            Text(task["name"]), str(task["number"]), str(len(task["classes"])), f"{task['params_added_percent']:.2f}",
            f"{task['flops'] / 1e9:.3f}", f"{task['flops_executed'] / 1e9:.3f}", _size(task["bytes"]),
            "calibrated" if task["calibrated"] else "no",
        )  # fmt: skip
    return table


def _experts(block: list[dict[str, Any]]) -> str:
    return str(sum(expert["kind"] != "gone" for expert in block))


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.1f} MB" if num_bytes >= 2**20 else f"{num_bytes / 2**10:.0f} kB"
