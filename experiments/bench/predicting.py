"""Predictions for a folder of images, compared with decoded arrays, and the time to the first
prediction.

    python experiments/bench/predicting.py runs/demo photos --out docs/benchmarks
"""

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import tyro

from cheem_jax.cli.arguments import parse
from cheem_jax.cli.running import run_command
from cheem_jax.data.decode import decode_many
from cheem_jax.memory import open_memory
from cheem_jax.memory.data import NamedFiles, list_images
from cheem_jax.memory.predictor import predict_files
from experiments.bench.measure import Row, alternate, medians, ratio, save


@dataclasses.dataclass(frozen=True)
class Predicting:
    """A memory, images and the number of measurements."""

    memory: Annotated[Path, tyro.conf.Positional]
    """Memory, or a run directory."""
    images: Annotated[Path, tyro.conf.Positional]
    """Folder of images."""
    num: int = 600
    """Maximum number of images."""
    rounds: int = 5
    """Number of rounds in which both sides take turns."""
    out: Path | None = None
    """Folder of predicting.json; default: the numbers are only printed."""


def main(settings: Predicting) -> None:
    """Measure, then print and write the numbers."""
    files = list_images(settings.images)[0][: settings.num]
    memory = open_memory(settings.memory)
    predictor = memory.predictor()
    predictor.prepare()
    images = decode_many(NamedFiles(files, upright=predictor.upright), predictor.image_size)
    times = alternate(
        {
            "folder": lambda: list(predict_files(predictor, files)),
            "arrays": lambda: predictor(images),
        },
        settings.rounds,
    )
    seconds = medians(times)
    command = [
        sys.executable,
        "-m",
        "cheem_jax",
        "predict",
        str(settings.memory),
        files[0],
        "--json",
    ]
    first = alternate(
        {"process": lambda: subprocess.run(command, check=True, capture_output=True)}, 3
    )
    what = f"{memory.config.backbone} at {predictor.image_size} pixels, {len(memory.tasks)} tasks"
    rate = len(files) / seconds["folder"]
    rows = [
        Row(
            f"{what}: {len(files)} files of a folder, against decoded arrays",
            seconds,
            ratio(seconds, "arrays", "folder"),
            0.9,
            note=f"{rate:.0f} images/s from files",
        ),
        Row(
            f"{what}: a new process to its first prediction, compiled functions cached",
            {},
            medians(first)["process"],
            5.0,
            "at most",
            unit="s",
        ),
    ]
    save(settings.out, "predicting", rows)


if __name__ == "__main__":
    run_command(main, parse(Predicting, description=__doc__))
