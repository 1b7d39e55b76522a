"""`cheem forget`: a task and what only it uses leave a memory."""

import dataclasses
import json
from pathlib import Path
from typing import Annotated

import tyro

from cheem_jax.core.paths import shown
from cheem_jax.memory import open_memory
from cheem_jax.memory.forgetting import Kept
from cheem_jax.run.progress import Progress


@dataclasses.dataclass(frozen=True)
class Forget:
    """Drop a task and what only it uses; every other task answers as before, and this cannot be undone."""

    memory: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="MEMORY")]
    """The memory's folder."""
    task: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="TASK")]
    """The task's name."""
    erase: bool = False
    """Make full experts of those that were adapted from the task's own, so that these can go as well."""
    json: bool = False
    """Print JSON instead."""


def forget_task(settings: Forget) -> None:
    """Forget it, and say what had to stay and why."""
    memory = open_memory(settings.memory)
    done = memory.forget(settings.task, erase=settings.erase)
    if settings.json:
        print(
            json.dumps(
                {
                    "task": settings.task,
                    "number": done.number,
                    "removed": [place._asdict() for place in done.removed],
                    "in_use": [_told(kept) for kept in done.in_use],
                    "ancestors": [_told(kept) for kept in done.ancestors],
                    "made_full": [place._asdict() for place in done.baked],
                }
            )
        )
        return
    say = Progress().say
    left = ", ".join(task.name for task in memory.tasks) or "no task"
    say(
        f"{shown(settings.memory)} has forgotten {settings.task!r} and {_experts(len(done.removed))} that only it "
        f"used; its number {done.number} is never used again; {left} left"
    )
    for kept in done.in_use:
        say(f"block {kept.place.block + 1}, expert {kept.place.expert} stays: used by {', '.join(kept.tasks)}")
    for kept in done.ancestors:
        say(
            f"block {kept.place.block + 1}, expert {kept.place.expert} stays, no candidate for new tasks any more: "
            f"what {', '.join(kept.tasks)} uses was adapted from it (--erase makes that a full expert)"
        )
    for place in done.baked:
        say(f"block {place.block + 1}, expert {place.expert} is a full expert now")


def _told(kept: Kept) -> dict[str, object]:
    return {**kept.place._asdict(), "tasks": list(kept.tasks)}


def _experts(num: int) -> str:
    return f"{num} expert{'' if num == 1 else 's'}"
