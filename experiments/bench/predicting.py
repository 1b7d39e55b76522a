"""A folder of pictures answered, against decoded arrays through the same router and networks; and the first answer.

python experiments/bench/predicting.py runs/demo photos [--rounds 5] [--output docs/benchmarks/predicting.json]
"""

import dataclasses
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated

import numpy as np
import tyro

from cheem_jax.atomic import write_atomically
from cheem_jax.cli import parse, run_command
from cheem_jax.data.decode import decode_many
from cheem_jax.memory import open_memory
from cheem_jax.predict import NamedFiles, files_in, predict_files
from experiments.bench.measure import machine


@dataclasses.dataclass(frozen=True)
class Predicting:
    """Which memory answers which pictures."""

    memory: Annotated[Path, tyro.conf.Positional]
    """A memory, or a run's directory."""
    pictures: Annotated[Path, tyro.conf.Positional]
    """A folder of pictures."""
    num: int = 600
    """The first pictures of the folder that are answered, at most."""
    rounds: int = 5
    """Rounds of both sides, alternating; medians are told."""
    output: Path | None = None
    """A JSON file for the numbers."""


def main(settings: Predicting) -> None:
    """Print and write the numbers."""
    files = files_in(settings.pictures)[: settings.num]
    memory = open_memory(settings.memory)
    predictor = memory.predictor()
    predictor.prepare()
    images = decode_many(NamedFiles(files), predictor.image_size)
    found: dict[str, list[float]] = {"folder": [], "arrays": []}
    for _ in range(settings.rounds):
        for name, seconds in found.items():
            start = time.perf_counter()
            if name == "folder":
                answers = [asked.prediction for asked in predict_files(predictor, files)]
            else:
                answers = predictor(images)
            seconds.append(time.perf_counter() - start)
            assert len(answers) == len(files)
    single = []
    for image in images[:50]:
        start = time.perf_counter()
        predictor(image[None])
        single.append(time.perf_counter() - start)
    first = []
    for _ in range(3):
        start = time.perf_counter()
        command = [sys.executable, "-m", "cheem_jax", "predict", str(settings.memory), files[0], "--json"]
        subprocess.run(command, check=True, capture_output=True)
        first.append(time.perf_counter() - start)
    rates = {name: len(files) / statistics.median(seconds) for name, seconds in found.items()}
    results = {
        "machine": machine(),
        "backbone": memory.config.backbone,
        "image_size": memory.config.image_size,
        "tasks": len(memory.tasks),
        "pictures": len(files),
        "rounds": settings.rounds,
        "images_per_second": rates,
        "ratio": rates["folder"] / rates["arrays"],
        "one_image_seconds": statistics.median(single),
        "process_to_first_answer_seconds": statistics.median(first),
        "bytes_per_picture": float(np.mean([Path(file).stat().st_size for file in files])),
    }
    print(f"folder {rates['folder']:.1f} images/s, arrays {rates['arrays']:.1f}: {results['ratio']:.2f}x")
    print(f"one image {1000 * results['one_image_seconds']:.1f} ms; a process and its first answer {first}")
    if settings.output is not None:
        write_atomically(settings.output, json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    run_command(main, parse(Predicting, description=__doc__))
