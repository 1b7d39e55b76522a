"""Speed and compile time of a supernet's steps with each executor.

    python experiments/jit_profile.py --backbones vit_micro,deit_tiny --batch-sizes 16,64 \\
        --out docs/profile

Every executor runs the same architectures in a separate process with nothing compiled: first each
sample once (the cold pass), then all samples again. The executors take turns, so that other load on
the machine affects all of them.
"""

import contextlib
import dataclasses
import datetime
import itertools
import json
import multiprocessing
import os
import platform
import statistics
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, NamedTuple, get_args

import jax
import numpy as np
from bench import measure
from charts import check_folder, names_in
from pages import write_tables

from cheem_jax.backbone.config import ViTConfig, at_image_size, config_of
from cheem_jax.backbone.flops import backbone_flops
from cheem_jax.backbone.params import build
from cheem_jax.cheem.config import OpSettings
from cheem_jax.cheem.hee import sample, uniform_table
from cheem_jax.cheem.training import step_of, train_steps
from cheem_jax.cli.arguments import parse
from cheem_jax.cli.running import run_command
from cheem_jax.core.architecture import Architecture, decode
from cheem_jax.core.atomic import write_atomically
from cheem_jax.core.kernels import dot
from cheem_jax.core.settings import Precision
from cheem_jax.engine import choice
from cheem_jax.engine.batches import batches
from cheem_jax.engine.choice import EngineConfig, make_executor
from cheem_jax.engine.compilation import compilations, jit_options
from cheem_jax.engine.feed import Budget, feed_images
from cheem_jax.report.table import Grid
from cheem_jax.run.progress import Progress
from cheem_jax.run.training import NOTE_EVERY

NUM_CLASSES = 10
MEASURED = Path(choice.__file__).with_name("measured.json")


@dataclasses.dataclass(frozen=True)
class Profile:
    """Compare the executors over sampled architectures."""

    backbones: str = "vit_micro,deit_tiny"
    """Names separated by commas; those that are not bundled have random weights, which are as fast
    as trained ones."""
    image_size: int | None = None
    """Pixels of the square images; default: each backbone's own."""
    batch_sizes: str = "16,64"
    """Images per step, separated by commas."""
    executors: str = "stages,whole,scan"
    """Executors to compare, separated by commas."""
    precisions: str = "float32"
    """float32, bfloat16, or both separated by a comma."""
    num_draws: int = 12
    """Architectures, sampled uniformly over the candidates of a first task."""
    repeats: int = 3
    """Passes over the samples after the cold one."""
    rank: int = 16
    """Rank of Adapt's low-rank pair."""
    seed: int = 0
    """Root of the samples."""
    out: Path = Path("docs/profile")
    """Folder of the numbers and the table."""
    record: bool = False
    """Also write the result into the package, where the executor `auto` looks up the fastest."""


class Case(NamedTuple):
    """A configuration in which executors are compared; `codes` has one architecture per step."""

    config: ViTConfig
    batch_size: int
    rank: int
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
        """Steps per dispatch of `scan`: calls of equal length, at most the engine's default."""
        calls = -(-len(self.codes) // EngineConfig.steps_per_call)
        return -(-len(self.codes) // calls)


class Subject:
    """One executor with a supernet and a batch of random pixels, in a separate process."""

    def __init__(self, case: Case, name: Any):
        engine = EngineConfig(name, programs=max(EngineConfig.programs, len(case.codes)))
        engine = dataclasses.replace(engine, steps_per_call=case.steps_per_call)
        vit = build(case.config, measure.backbone(case.config.name, case.config.image_size).params)
        self.executor = make_executor(vit, "mlp_down", engine, batch_size=case.batch_size)
        self.architectures, self.batch_size = case.architectures, case.batch_size
        self.fitting = measure.new_task(self.executor.base_pool, NUM_CLASSES, case.rank)
        images = measure.random_images(case.batch_size, case.config)
        self.labels = np.arange(case.batch_size, dtype=np.int32) % NUM_CLASSES
        self.feed = feed_images(self.executor, images, Budget(self.executor.budget))
        (self.batch,) = batches(np.arange(case.batch_size), case.batch_size)
        jax.block_until_ready((self.fitting.state, self.executor.leaves))

    def train(self) -> list[float]:
        """Run every sample once; return the seconds of each step, from images to updated
        parameters.

        Like training, it waits for the device every `NOTE_EVERY` steps. The time between two waits
        is divided among their steps, padding steps of a last call included.
        """
        executor, fitting = self.executor, self.fitting
        seconds = list[float]()
        start = time.perf_counter()
        waiting = 0
        run = 0
        for first in range(0, len(self.architectures), executor.steps_per_call):
            samples = self.architectures[first : first + executor.steps_per_call]
            steps = [step_of(executor, self.feed, self.labels, self.batch) for _ in samples]
            rates = [1e-3] * len(samples)
            fitting.state, losses = train_steps(
                executor, fitting.supernet, fitting.state, samples, steps, rates=rates
            )
            waiting, run = waiting + len(samples), run + executor.steps_per_call
            if waiting >= NOTE_EVERY or len(seconds) + waiting == len(self.architectures):
                jax.block_until_ready((losses, fitting.state))
                now = time.perf_counter()
                seconds += [(now - start) / run] * waiting
                start = now
                waiting = 0
                run = 0
        return seconds


_subjects: list[Subject] = []
"""The subject of a measuring process."""


def cold_pass(case: Case, name: str) -> dict[str, Any]:
    """Build the executor in a fresh process, then run every sample once, compilation included."""
    measure.compile_everything()
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
    """Measure one configuration: each executor cold and alone, then all in turns."""
    architectures = case.architectures
    work = [case.batch_size * measure.step_flops(case.config, a, case.rank) for a in architectures]
    signatures = {tuple(choice.kind for choice in architecture) for architecture in architectures}
    spawn = multiprocessing.get_context("spawn")  # a fork would inherit compiled functions
    with contextlib.ExitStack() as stack:
        pools = {
            name: stack.enter_context(ProcessPoolExecutor(1, mp_context=spawn))
            for name in executors
        }
        try:
            found = {
                name: pool.submit(cold_pass, case, name).result() for name, pool in pools.items()
            }
            turns, peaks = [], []
            for _ in range(repeats):
                turns.append(
                    {name: pool.submit(repeated_pass).result() for name, pool in pools.items()}
                )
                peaks.append(product_peak(case.config.precision))
        except BrokenProcessPool:
            raise OSError(
                f"a measuring process died at {case.name}; is there too little memory?"
            ) from None
    peak = statistics.median(peaks)
    for name, entry in found.items():
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
        "executors": found,
    }


def product_peak(precision: Precision) -> float:
    """FLOP/s of one large matrix product with float32 sums: the median of five."""
    size = 2048 if jax.default_backend() == "cpu" else 8192
    a = jax.random.normal(jax.random.key(0), (size, size)).astype(precision)
    product = jax.jit(lambda a: dot(a, a, precision), compiler_options=jit_options(precision))
    times = measure.alternate({"product": lambda: product(a).block_until_ready()}, 5)
    return 2 * size**3 / measure.medians(times)["product"]


def peak_bytes() -> int:
    """Peak memory of the device if it is counted, else of this process."""
    counted = jax.devices()[0].memory_stats() or {}
    if "peak_bytes_in_use" in counted:
        return counted["peak_bytes_in_use"]
    return measure.process_memory("VmHWM")


def profile_grid(results: Mapping[str, Any]) -> Grid:
    """A row per configuration and executor; docs/profile/jit_profile.md explains the columns."""
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
    """Add the cost of a step to the file that `auto` reads; replace measurements of the same
    configuration.

    For `whole` this is the mean step of the cold pass, because nearly every sample has a new
    signature.
    """
    platform_, device = results["machine"]["platform"], results["machine"]["device"]
    new = {}
    for case in results["configurations"]:
        seconds = {
            name: entry["first_step_seconds" if name == "whole" else "step_seconds"]
            for name, entry in case["executors"].items()
        }
        entry = {
            "platform": platform_,
            "device": device,
            "name": case["name"],
            "precision": case["precision"],
        }
        new[platform_, device, case["name"]] = {
            **entry,
            "flops": case["backbone_flops"],
            "seconds": seconds,
        }
    earlier = json.loads(file.read_text())["measurements"] if file.exists() else []
    others = [
        entry for entry in earlier if (entry["platform"], entry["device"], entry["name"]) not in new
    ]
    write_atomically(file, json.dumps({"measurements": [*others, *new.values()]}, indent=2) + "\n")


def cases_of(settings: Profile) -> tuple[list[Case], list[str]]:
    """Configurations and executors of the settings; ValueError for unknown ones."""
    for name in ("num_draws", "repeats"):
        if getattr(settings, name) < 1:
            raise ValueError(f"{name} is {getattr(settings, name)}; expected at least 1")
    OpSettings(settings.rank)
    executors = names_in("--executors", settings.executors, get_args(choice.Name))
    if settings.record and set(executors) != set(get_args(choice.Name)):
        raise ValueError(
            f"--record compares all executors, not only {', '.join(executors)}; leave out"
            " --executors"
        )
    sizes = [size.strip() for size in settings.batch_sizes.split(",")]
    if wrong := [size for size in sizes if not size.isdigit() or int(size) < 1]:
        raise ValueError(f"batch size is {wrong[0]!r}; expected a whole number of at least 1")
    cases = []
    precisions = names_in("--precisions", settings.precisions, get_args(Precision))
    for name, precision, size in itertools.product(
        settings.backbones.split(","), precisions, sizes
    ):
        config = dataclasses.replace(config_of(name.strip()), precision=precision)
        config = (
            config if settings.image_size is None else at_image_size(config, settings.image_size)
        )
        table = uniform_table([1] * config.depth).astype(np.float32)
        codes = np.asarray(sample(jax.random.key(settings.seed), table, num=settings.num_draws))
        cases.append(Case(config, int(size), settings.rank, codes))
    return cases, executors


def main(settings: Profile) -> None:
    """Measure every configuration and write numbers and table."""
    # the processes share an accelerator's memory
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    progress = Progress()
    cases, executors = cases_of(settings)
    check_folder("--out", settings.out)
    settings.out.mkdir(parents=True, exist_ok=True)
    machine = measure.machine()
    if machine["platform"] == "cpu":  # `auto` compares it with its own device
        machine["device"] = f"{machine['cpu']}, {machine['cores']} cores"
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    results: dict[str, Any] = {
        "machine": {**machine, "system": platform.platform(), "date": now},
        "repeats": settings.repeats,
        "rank": settings.rank,
        "configurations": [],
    }
    for case in cases:
        found = measure_case(case, executors, settings.repeats)
        results["configurations"].append(found)
        times = [
            f"{name} {entry['step_seconds']:.3g} s ({entry['first_step_seconds']:.3g} s cold)"
            for name, entry in found["executors"].items()
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
