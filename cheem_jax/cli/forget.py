"""`cheem forget`: a task and what only it uses leave a memory."""

import dataclasses
import json
from typing import Annotated

import tyro

from cheem_jax.cli.shared import OfMemory
from cheem_jax.core.paths import shown
from cheem_jax.memory import open_memory
from cheem_jax.run.progress import Progress


@dataclasses.dataclass(frozen=True)
class Forget(OfMemory):
    """Drop a task and what only it uses; every other task answers as before, and this cannot be undone."""

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
        removed, made_full = ([place._asdict() for place in places] for places in (done.removed, done.baked))
        in_use, ancestors = (
            [{**kept.place._asdict(), "tasks": list(kept.tasks)} for kept in group]
            for group in (done.in_use, done.ancestors)
        )
        found = {"task": settings.task, "number": done.number, "removed": removed, "in_use": in_use}
        print(json.dumps({**found, "ancestors": ancestors, "made_full": made_full}))
        return
    say = Progress().say
    left = ", ".join(task.name for task in memory.tasks) or "no task"
    num = len(done.removed)
    say(
        f"{shown(settings.memory)} has forgotten {settings.task!r} and {num} expert{'' if num == 1 else 's'} that only "
        f"it used; its number {done.number} is never used again; {left} left"
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
