"""All benchmarks of a machine without an accelerator, each in a separate process.

python experiments/bench/run.py --only steps,data --out docs/benchmarks
"""

import dataclasses
import subprocess
import sys
import time
from pathlib import Path

from cheem_jax.cli.arguments import parse
from cheem_jax.cli.running import run_command

ROOT = Path(__file__).parents[2]
PARTS = (
    "steps",
    "tasks",
    "methods",
    "sharing",
    "many_tasks",
    "footprint",
    "demo_compile",
    "data",
)


@dataclasses.dataclass(frozen=True)
class All:
    """Selected benchmarks and their output."""

    only: str = ",".join(PARTS)
    """Names of benchmarks, separated by commas."""
    out: Path = ROOT / "docs" / "benchmarks"
    """Folder of the JSON files; figures are written next to it."""
    quick: bool = False
    """Use tiny sizes to test that everything runs; the numbers are meaningless."""
    loaded: bool = False
    """Measure even if other processes use the processors, which distorts even ratios."""


def main(settings: All) -> None:
    """Run the benchmarks one after another; a failed benchmark does not stop the others."""
    parts = [part.strip() for part in settings.only.split(",")]
    if unknown := [part for part in parts if part not in PARTS]:
        raise ValueError(f"unknown parts {unknown}; expected some of: {', '.join(PARTS)}")
    options = ["--out", str(settings.out.resolve()), *(["--quick"] if settings.quick else [])]
    options += ["--loaded"] if settings.loaded else []
    failed = []
    for part in parts:
        start = time.perf_counter()
        print(f"== {part}", flush=True)
        if subprocess.run(
            [sys.executable, "-m", f"experiments.bench.{part}", *options], cwd=ROOT
        ).returncode:
            failed.append(part)
        print(f"== {part}: {time.perf_counter() - start:.0f} s", flush=True)
    if failed:
        print(f"error: these parts failed, see above: {', '.join(failed)}", file=sys.stderr)
        raise SystemExit(1)


if __name__ == "__main__":
    run_command(main, parse(All, description=__doc__))
