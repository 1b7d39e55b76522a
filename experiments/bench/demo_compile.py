"""What a real run pays for compiling and for losing nothing: the demo with an empty cache, and again with a filled one.

    python -m experiments.bench.demo_compile

Also checks that drawing ten times as many architectures compiles nothing more.
"""

import dataclasses
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax

from cheem_jax.backbone.weights import load_pretrained
from cheem_jax.cheem.config import PRESETS, CheemConfig
from cheem_jax.cheem.learner import Cheem
from cheem_jax.cli.main import parse
from cheem_jax.continual import RunConfig, run_stream
from cheem_jax.core.keys import Keys
from cheem_jax.data.demo import demo_stream
from cheem_jax.data.task import Stream, Task
from cheem_jax.engine.compilation import compilations, keep_programs
from cheem_jax.run.method import FrozenFeatures, Undisturbed
from cheem_jax.run.progress import Progress
from cheem_jax.run.record import read
from experiments.bench import measure
from experiments.bench.measure import Bench, Row

GOAL_COLD, GOAL_WARM, GOAL_PROGRAMS = 0.15, 0.03, 100.0
"""Largest share of the wall time that compiling may take, without and with a filled cache."""
GOAL_SAVING = 0.02
"""The same of checkpoints."""


def main(settings: Bench) -> None:
    """Run the demo twice and write `demo_compile.json`."""
    with tempfile.TemporaryDirectory(prefix="cheem-bench-") as folder:
        cache = Path(folder) / "programs"
        cold = run_demo(Path(folder) / "cold", cache, settings.quick)
        warm = run_demo(Path(folder) / "warm", cache, settings.quick)
    once, often = programs(1, settings.quick), programs(10, settings.quick)
    measure.say(f"demo_compile: {once} programs, and {often} with ten times as many architectures")
    share = {name: run["compile_seconds"] / run["seconds"] for name, run in (("cold", cold), ("warm", warm))}
    walls = {"cold": cold["seconds"], "warm": warm["seconds"]}
    rows = [
        Row(
            "programs compiled in the demo", {}, float(cold["programs"]), GOAL_PROGRAMS, "at most", "programs",
        ),
        Row(
            "share of compiling, empty cache", walls, share["cold"], GOAL_COLD, "at most", "of the time",
            note=_note(cold),
        ),
        Row(
            "share of compiling, filled cache", walls, share["warm"], GOAL_WARM, "at most", "of the time",
            note=_note(warm),
        ),
        Row(
            "programs for ten times as many architectures", {}, float(often), float(once), "at most", "programs",
            note=f"one task; {once} with as many epochs and candidates as usual",
        ),
        Row(
            "saving and reading back, share of the demo",
            {"demo": warm["seconds"], "checkpoints": warm["checkpoint_seconds"]},
            warm["checkpoint_seconds"] / warm["seconds"], GOAL_SAVING, "at most", "of the time",
            note="rolling ones where due; fsync and hashes included",
        ),
    ]  # fmt: skip
    measure.save(settings.out, "demo_compile", rows, quick=settings.quick, runs={"cold": cold, "warm": warm})


def run_demo(directory: Path, cache: Path, quick: bool) -> dict[str, Any]:
    """One run in a process of its own; wall seconds include starting Python."""
    environment = {"JAX_COMPILATION_CACHE_DIR": str(cache), "JAX_ENABLE_COMPILATION_CACHE": "true"}
    start = time.perf_counter()
    if quick:
        measure.in_child(small_run, str(directory), environment=environment)
    else:
        command = [sys.executable, "-m", "cheem_jax", "demo", "--run-dir", str(directory)]
        subprocess.run(command, check=True, env={**os.environ, **environment}, stdout=subprocess.DEVNULL)
    seconds = time.perf_counter() - start
    entries = read(directory)
    timed = [entry["compile"] for entry in entries if "compile" in entry]
    return {
        "seconds": seconds,
        "programs": sum(entry["programs"] for entry in timed),
        "cached": sum(entry["cached"] for entry in timed),
        "compile_seconds": sum(entry["seconds"] for entry in timed),
        "checkpoint_seconds": sum(entry["checkpoint_seconds"] for entry in entries if entry["event"] == "evaluated"),
    }


def small_run(directory: str) -> None:
    """The demo with two tasks, as small as their parts allow."""
    jax.config.update("jax_enable_compilation_cache", True)
    keep_programs()
    stream = Stream("two", small_tasks()[:2])
    run_stream(stream, load_pretrained("vit_micro"), RunConfig(small(1), "demo"), Path(directory), Progress())


def small_tasks() -> tuple[Task, ...]:
    """The demo's tasks with few images."""
    return demo_stream(num_train=64, num_val=32, num_test=32).tasks


def small(times: int) -> CheemConfig:
    """The demo's settings for a moment's work: `times` as many epochs and candidates."""
    preset = PRESETS["demo"]
    return dataclasses.replace(
        preset,
        supernet=dataclasses.replace(preset.supernet, epochs=times),
        search=dataclasses.replace(preset.search, population=6 * times, generations=2, num_parents=2),
        finetune=dataclasses.replace(preset.finetune, epochs=1),
    )


def programs(times: int, quick: bool) -> int:
    """Programs that one task needs in a fresh executor: similarity, supernet, search, fine-tuning, router."""
    jax.clear_caches()
    executor, start = measure.stages(load_pretrained("vit_nano" if quick else "vit_micro")), compilations()
    config = small(times)
    learner = Cheem(executor, config, Keys(0), None, FrozenFeatures(executor, config.batch_size))
    learner.learn(small_tasks()[0], Undisturbed())
    return compilations().since(start).programs


def _note(run: dict[str, Any]) -> str:
    return (
        f"{run['programs']} programs compiled and {run['cached']} read from the cache "
        f"in {run['compile_seconds']:.1f} of {run['seconds']:.1f} s"
    )


if __name__ == "__main__":
    measure.command(main, parse(Bench, description=__doc__))
