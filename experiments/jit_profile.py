"""Speed and compile time of a supernet's steps with each executor.

    python experiments/jit_profile.py --backbones vit_micro deit_tiny --batch-sizes 16 64 \\
        --out docs/profile

Every executor runs the same architectures in a separate process that has compiled nothing. It first
runs each sample once (the cold pass), then all samples again. The executors take turns, so that
other load on the machine affects all of them.
"""

import contextlib
import dataclasses
import itertools
import json
import os
import platform
import statistics
import time
from collections.abc import Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, NamedTuple, get_args

import jax
import numpy as np
from bench import measure
from charts import check_folder
from pages import write_tables

from cheem_jax.backbone.config import ViTConfig, at_image_size, find_config
from cheem_jax.backbone.flops import backbone_flops
from cheem_jax.backbone.params import build
from cheem_jax.cheem.hee import sample, uniform_table
from cheem_jax.cheem.training import step_of
from cheem_jax.cli.arguments import parse
from cheem_jax.cli.running import run_command
from cheem_jax.core.architecture import Architecture, decode
from cheem_jax.core.atomic import write_atomically
from cheem_jax.core.settings import Precision
from cheem_jax.engine import choice
from cheem_jax.engine.batches import batches
from cheem_jax.engine.choice import EngineConfig, make_executor
from cheem_jax.engine.compilation import compilations
from cheem_jax.engine.feed import Budget, feed_images
from cheem_jax.report.table import Grid
from cheem_jax.run.progress import Progress
from cheem_jax.run.training import NOTE_EVERY

NUM_CLASSES = 10
RANK = 16
MEASURED = Path(choice.__file__).with_name("measured.json")


@dataclasses.dataclass(frozen=True)
class Profile:
    """Compare the executors over sampled architectures."""

    backbones: tuple[str, ...] = ("vit_micro", "deit_tiny")
    """Names of backbones; those that are not bundled have random weights, which are as fast as
    trained ones."""
    image_size: int | None = None
    """Size of the square images in pixels; default: the size of each backbone."""
    batch_sizes: tuple[int, ...] = (16, 64)
    """Numbers of images per step."""
    executors: tuple[choice.Name, ...] = get_args(choice.Name)
    """Executors to compare."""
    precisions: tuple[Precision, ...] = ("float32",)
    """Precisions of matrix products."""
    num_samples: int = 12
    """Number of architectures, sampled uniformly over the candidates of a first task."""
    repeats: int = 3
    """Number of passes over the samples after the cold pass."""
    out: Path = Path("docs/profile")
    """Folder of the numbers and the table."""
    record: bool = False
    """Also write the result into the package, where the executor `auto` looks up the fastest
    executor."""

    def __post_init__(self) -> None:
        for name in ("batch_sizes", "num_samples", "repeats"):
            if np.min(value := getattr(self, name), initial=1) < 1:
                raise ValueError(f"{name} is {value}; expected at least 1")
        if self.record and set(self.executors) != set(get_args(choice.Name)):
            raise ValueError(
                f"--record compares all executors, not only {', '.join(self.executors)}; leave out"
                " --executors"
            )


class Case(NamedTuple):
    """A configuration in which executors are compared; `codes` has one architecture per row."""

    config: ViTConfig
    batch_size: int
    codes: np.ndarray

    @property
    def name(self) -> str:
        return (
            f"{self.config.name} {self.config.image_size} px, batch {self.batch_size},"
            f" {self.config.precision}"
        )

    @property
    def architectures(self) -> list[Architecture]:
        return [decode(codes, [1] * self.config.depth) for codes in self.codes]

    @property
    def steps_per_call(self) -> int:
        """Number of steps per call of `scan`: calls have equal lengths of at most the engine's
        default."""
        calls = -(-len(self.codes) // EngineConfig.steps_per_call)
        return -(-len(self.codes) // calls)


class Subject:
    """One executor with a supernet and a batch of random images, in a separate process."""

    def __init__(self, case: Case, name: Any):
        engine = EngineConfig(name, programs=max(EngineConfig.programs, len(case.codes)))
        engine = dataclasses.replace(engine, steps_per_call=case.steps_per_call)
        vit = build(case.config, measure.backbone(case.config.name, case.config.image_size).params)
        self.executor = make_executor(vit, "mlp_down", engine, batch_size=case.batch_size)
        self.architectures = case.architectures
        self.training = measure.new_task(self.executor, NUM_CLASSES, RANK)
        images = measure.random_images(case.batch_size, case.config)
        self.labels = np.arange(case.batch_size, dtype=np.int32) % NUM_CLASSES
        self.feed = feed_images(self.executor, images, Budget(self.executor.budget))
        (self.batch,) = batches(np.arange(case.batch_size), case.batch_size)
        jax.block_until_ready((self.training.state, self.executor.leaves))

    def train(self) -> list[float]:
        """Run every sample once; return the seconds of each step, from images to updated
        parameters.

        As in training, it waits for the device every `NOTE_EVERY` steps. The time between two waits
        is divided by the number of computed steps, which includes the padding of the last call.
        """
        steps = (
            step_of(self.executor, self.feed, self.labels, self.batch) for _ in self.architectures
        )
        seconds = list[float]()
        start = time.perf_counter()
        waiting = 0
        computed = 0
        for losses in self.training.train(self.architectures, steps):
            waiting += len(losses)
            computed += self.executor.steps_per_call
            if waiting >= NOTE_EVERY or len(seconds) + waiting == len(self.architectures):
                jax.block_until_ready((losses, self.training.state))
                now = time.perf_counter()
                seconds += [(now - start) / computed] * waiting
                start = now
                waiting = 0
                computed = 0
        return seconds


_subjects: list[Subject] = []
"""The subject of a measuring process; at most one."""


def cold_pass(case: Case, name: str) -> dict[str, Any]:
    """Build the executor in a new process, then run every sample once, compilation included."""
    _subjects[:] = [Subject(case, name)]
    memory = peak_bytes()
    before = compilations()
    seconds = _subjects[0].train()
    compiled = compilations().since(before)
    return {
        "programs": compiled.programs,
        "compile_seconds": compiled.seconds,
        "memory_bytes": peak_bytes() - memory,
        "cold_seconds": seconds,
    }


def repeated_pass() -> list[float]:
    """Run every sample once more in the same process."""
    return _subjects[0].train()


def measure_case(case: Case, executors: Sequence[str], repeats: int) -> dict[str, Any]:
    """Measure one configuration: the cold pass of each executor, then repeated passes of all
    executors in turns."""
    architectures = case.architectures
    work = [case.batch_size * measure.step_flops(case.config, a, RANK) for a in architectures]
    signatures = {tuple(choice.kind for choice in architecture) for architecture in architectures}
    with contextlib.ExitStack() as stack:
        pools = {name: stack.enter_context(measure.fresh_process()) for name in executors}
        try:
            results = {
                name: pool.submit(cold_pass, case, name).result() for name, pool in pools.items()
            }
            turns = [
                {name: pool.submit(repeated_pass).result() for name, pool in pools.items()}
                for _ in range(repeats)
            ]
        except BrokenProcessPool:
            raise OSError(
                f"a measuring process died at {case.name}; is there too little memory?"
            ) from None
    peak = measure.matrix_peak(case.config.precision)
    for name, entry in results.items():
        per_draw = np.median([turn[name] for turn in turns], axis=0)
        step = float(per_draw.mean())
        entry |= {
            "repeated_seconds": [turn[name] for turn in turns],
            "first_step_seconds": statistics.fmean(entry["cold_seconds"]),
            "step_seconds": step,
            "images_per_second": case.batch_size / step,
            "flops_per_second": sum(work) / per_draw.sum(),
            "share_of_peak": sum(work) / per_draw.sum() / peak,
        }
    return {
        "name": case.name,
        "backbone": case.config.name,
        "image_size": case.config.image_size,
        "batch_size": case.batch_size,
        "precision": case.config.precision,
        "num_draws": len(architectures),
        "num_signatures": len(signatures),
        "backbone_flops": backbone_flops(case.config) * case.batch_size,
        "step_flops": statistics.fmean(work),
        "peak_flops_per_second": peak,
        "executors": results,
    }


def peak_bytes() -> int:
    """Return the peak memory in bytes of the device or, on a CPU, of this process."""
    counted = measure.device_memory().get("peak_bytes_in_use")
    return measure.process_memory("VmHWM") if counted is None else counted


def profile_grid(results: Mapping[str, Any]) -> Grid:
    """Make a row per configuration and executor; docs/profile/jit_profile.md explains the
    columns."""
    columns = (
        "backbone",
        "precision",
        "executor",
        "px",
        "batch",
        "functions",
        "compile s",
        "cold step s",
        "step s",
        "images/s",
        "GFLOP/s",
        "peak",
        "of peak",
        "memory MB",
    )
    rows = [
        (
            case["backbone"],
            case["precision"],
            name,
            str(case["image_size"]),
            str(case["batch_size"]),
            str(entry["programs"]),
            f"{entry['compile_seconds']:.1f}",
            f"{entry['first_step_seconds']:.3g}",
            f"{entry['step_seconds']:.3g}",
            f"{entry['images_per_second']:.4g}",
            f"{entry['flops_per_second'] / 1e9:.3g}",
            f"{case['peak_flops_per_second'] / 1e9:.4g}",
            f"{100 * entry['share_of_peak']:.0f} %",
            f"{entry['memory_bytes'] / 1e6:.0f}",
        )
        for case in results["configurations"]
        for name, entry in case["executors"].items()
    ]
    return Grid("Executors compared", columns, tuple(rows), 3)


def merge_measurements(results: dict[str, Any], file: Path) -> None:
    """Add the cost of a step to the file that `auto` reads; replace earlier measurements of the
    same configuration.

    The cost of `whole` is the mean step of the cold pass, because nearly every sample has a new
    signature.
    """
    device = {name: results["machine"][name] for name in ("platform", "device")}
    measurements = json.loads(file.read_text())["measurements"] if file.exists() else []
    for case in results["configurations"]:
        place = device | {"name": case["name"]}
        measurements = [entry for entry in measurements if not place.items() <= entry.items()]
        seconds = {
            name: entry["first_step_seconds" if name == "whole" else "step_seconds"]
            for name, entry in case["executors"].items()
        }
        costs = {"flops": case["backbone_flops"], "seconds": seconds}
        measurements.append({**place, "precision": case["precision"], **costs})
    write_atomically(file, json.dumps({"measurements": measurements}, indent=2) + "\n")


def cases_of(settings: Profile) -> list[Case]:
    """Return the measured configurations; raise ValueError for an unknown backbone."""
    cases = []
    for name, precision, size in itertools.product(
        settings.backbones, settings.precisions, settings.batch_sizes
    ):
        config = dataclasses.replace(find_config(name), precision=precision)
        if settings.image_size is not None:
            config = at_image_size(config, settings.image_size)
        table = uniform_table([1] * config.depth).astype(np.float32)
        codes = np.asarray(sample(jax.random.key(0), table, num=settings.num_samples))
        cases.append(Case(config, size, codes))
    return cases


def main(settings: Profile) -> None:
    """Measure every configuration; write numbers and table."""
    # the processes share an accelerator's memory
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    progress = Progress()
    cases = cases_of(settings)
    check_folder("--out", settings.out)
    settings.out.mkdir(parents=True, exist_ok=True)
    machine = measure.machine()
    if machine["platform"] == "cpu":  # `auto` compares this name with its device
        machine["device"] = f"{machine['cpu']}, {machine['cores']} cores"
    results: dict[str, Any] = {
        "machine": {**machine, "system": platform.platform()},
        "repeats": settings.repeats,
        "rank": RANK,
        "configurations": [],
    }
    for case in cases:
        numbers = measure_case(case, settings.executors, settings.repeats)
        results["configurations"].append(numbers)
        times = [
            f"{name} {entry['step_seconds']:.3g} s ({entry['first_step_seconds']:.3g} s cold)"
            for name, entry in numbers["executors"].items()
        ]
        progress.say(f"{case.name}: a step takes {', '.join(times)}")
        # after each configuration, so that an interrupted study keeps its measurements
        write_atomically(settings.out / "jit_profile.json", json.dumps(results, indent=2) + "\n")
        tables = {"executors": profile_grid(results).to_markdown()}
        write_tables(settings.out / "jit_profile.md", tables, "Executors compared")
        if settings.record:
            merge_measurements(results, MEASURED)
    progress.say(
        f"table: {settings.out / 'jit_profile.md'}   numbers: {settings.out / 'jit_profile.json'}"
    )


if __name__ == "__main__":
    run_command(main, parse(Profile, description=__doc__))
