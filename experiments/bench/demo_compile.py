"""Shares of compilation and of checkpoints in the time of a run: the demo with an empty and with a
filled cache.

    python -m experiments.bench.demo_compile
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from cheem_jax.cli.arguments import parse
from cheem_jax.run.record import read
from experiments.bench import measure
from experiments.bench.measure import Bench, Row

GOAL_COLD = 0.15
GOAL_WARM = 0.03
GOAL_PROGRAMS = 100.0
"""Limits of the share of compilation in the time, with an empty and with a filled cache, and limit
of the number of compiled functions."""
GOAL_SAVING = 0.02
"""Limit of the share of checkpoints in the time."""


def main(settings: Bench) -> None:
    """Run the demo twice and write `demo_compile.json`."""
    with tempfile.TemporaryDirectory(prefix="cheem-bench-") as folder:
        cache = Path(folder) / "programs"
        cold = run_demo(Path(folder) / "cold", cache, settings.quick)
        warm = run_demo(Path(folder) / "warm", cache, settings.quick)
    share = {
        name: run["compile_seconds"] / run["seconds"]
        for name, run in (("cold", cold), ("warm", warm))
    }
    walls = {"cold": cold["seconds"], "warm": warm["seconds"]}
    rows = [
        Row(
            "programs compiled in the demo",
            {},
            float(cold["programs"]),
            GOAL_PROGRAMS,
            "at most",
            "programs",
        ),
        Row(
            "share of compiling, empty cache",
            walls,
            share["cold"],
            GOAL_COLD,
            "at most",
            "of the time",
            note=_note(cold),
        ),
        Row(
            "share of compiling, filled cache",
            walls,
            share["warm"],
            GOAL_WARM,
            "at most",
            "of the time",
            note=_note(warm),
        ),
        Row(
            "saving and reading back, share of the demo",
            {"demo": warm["seconds"], "checkpoints": warm["checkpoint_seconds"]},
            warm["checkpoint_seconds"] / warm["seconds"],
            GOAL_SAVING,
            "at most",
            "of the time",
            note="rolling ones where due; fsync and hashes included",
        ),
    ]
    measure.save(
        settings.out, "demo_compile", rows, quick=settings.quick, runs={"cold": cold, "warm": warm}
    )


def run_demo(directory: Path, cache: Path, quick: bool) -> dict[str, Any]:
    """Run the demo in a new process; its wall-clock seconds include the start of Python."""
    environment = {"JAX_COMPILATION_CACHE_DIR": str(cache), "JAX_ENABLE_COMPILATION_CACHE": "true"}
    command = [sys.executable, "-m", "cheem_jax", "demo", "--run-dir", str(directory)]
    command += ["--method", "frozen_linear"] if quick else []
    start = time.perf_counter()
    subprocess.run(
        command, check=True, env={**os.environ, **environment}, stdout=subprocess.DEVNULL
    )
    seconds = time.perf_counter() - start
    entries = read(directory)
    timed = [entry["compile"] for entry in entries if "compile" in entry]
    return {
        "seconds": seconds,
        "programs": sum(entry["programs"] for entry in timed),
        "cached": sum(entry["cached"] for entry in timed),
        "compile_seconds": sum(entry["seconds"] for entry in timed),
        "checkpoint_seconds": sum(
            entry["checkpoint_seconds"] for entry in entries if entry["event"] == "evaluated"
        ),
    }


def _note(run: dict[str, Any]) -> str:
    return (
        f"{run['programs']} programs compiled and {run['cached']} read from the cache "
        f"in {run['compile_seconds']:.1f} of {run['seconds']:.1f} s"
    )


if __name__ == "__main__":
    measure.command(main, parse(Bench, description=__doc__))
