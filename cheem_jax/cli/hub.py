"""`cheem push` and `cheem pull`: a memory to the Hugging Face hub, and from there."""

import dataclasses
from pathlib import Path
from typing import Annotated

import tyro

from cheem_jax.cli.shared import OfMemory
from cheem_jax.core.paths import shown
from cheem_jax.memory.hub import pull, push
from cheem_jax.run.progress import Progress

Repository = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="REPO")]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Push(OfMemory):
    """Put a memory on the Hugging Face hub, with a model card; no image is sent."""

    repository: Repository
    """OWNER/NAME on the hub, made if it is not there; `hf auth login` logs in."""
    license: str | None = None
    """The licence that the model card names, such as apache-2.0; default: none."""
    public: bool = False
    """A repository that is made is for everybody; default: for its owner alone."""


def push_memory(settings: Push) -> None:
    """Push it, and say what was sent."""
    names = push(settings.memory, settings.repository, license=settings.license, public=settings.public)
    Progress().say(f"{settings.repository} contains {shown(settings.memory)}: {len(names)} files, and no image")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pull:
    """Get a memory from the Hugging Face hub, whole or not at all."""

    repository: Repository
    """OWNER/NAME on the hub."""
    memory: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="MEMORY")]
    """A new or empty folder."""


def pull_memory(settings: Pull) -> None:
    """Pull it, and say what it knows."""
    memory, place = pull(settings.repository, settings.memory), shown(settings.memory)
    names = ", ".join(task.name for task in memory.tasks) or "no task"
    Progress().say(f"{place} contains {names}; cheem predict {place} IMAGES answers")
