"""`cheem export`: a task's network, or the whole memory, for use without this library."""

import dataclasses
import json
from pathlib import Path
from typing import Annotated

import tyro

from cheem_jax.cli.shared import Answering
from cheem_jax.core.paths import shown
from cheem_jax.export import Format, kind_of
from cheem_jax.run.progress import Progress


@dataclasses.dataclass(frozen=True)
class Export(Answering):
    """Write one task's network, or the whole memory behind its router, for use without this library."""

    file: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FILE")]
    """The file to write: .onnx, .stablehlo (JAX's own), or .safetensors (a timm state dict of one task)."""
    format: Format | None = None
    """onnx, stablehlo or timm; default: by the file's ending."""
    task: str | None = None
    """The task whose network is written; default: the whole memory (not for timm)."""
    open_set: float | None = None
    """As for `cheem predict`: the whole memory then answers -1 for `none of my tasks`."""
    overwrite: bool = False
    """Replace a file that exists."""
    json: bool = False
    """Print JSON instead."""


def export_memory(settings: Export) -> None:
    """Write it, check it against this library, and say its size and speed."""
    kind = settings.format or kind_of(settings.file)  # before the memory is opened, which takes seconds
    done = settings.open().export(
        settings.file, kind, task=settings.task, open_set=settings.open_set, overwrite=settings.overwrite
    )
    if settings.json:
        print(json.dumps({**done._asdict(), "file": str(done.file)}))
        return
    say = Progress().say
    took = "" if done.seconds_per_image is None else f", {1000 * done.seconds_per_image:.1f} ms for one image here"
    say(
        f"wrote {shown(done.file)}: {done.num_bytes / 2**20:.1f} MB{took}; differs from this library by at most "
        f"{done.largest_difference:.1e}"
    )
    for note in done.notes:
        say(note)
