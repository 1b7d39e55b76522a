"""`cheem info`: what a memory holds."""

import dataclasses
import json
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from cheem_jax.cli.shared import Answering
from cheem_jax.core.paths import shown
from cheem_jax.run.progress import Progress


@dataclasses.dataclass(frozen=True)
class Info(Answering):
    """Show what a memory holds: its tasks and their networks, the pool of experts, sizes."""

    json: bool = False
    """Print JSON instead: classes of every task and every expert's history as well."""


def show_info(settings: Info) -> None:
    """Print it."""
    found = settings.open().info()
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
