"""Executors on an accelerator: steps, forward passes, utilisation, and what a task of the paper would take.

    python -m experiments.bench.gpu [--backbones vit_base] [--batches 64] [--precisions bfloat16] [--executors scan]

Every configuration is written when it ends; those that have a file already are left out, so that the same command goes
on after a time limit.
"""

import dataclasses
import itertools
import time
from pathlib import Path
from typing import Any, get_args

import jax
import numpy as np

from cheem_jax.backbone.config import CONFIGS
from cheem_jax.backbone.params import build, init_params
from cheem_jax.cheem.training import SupernetFit, prepare, step_of, train_steps
from cheem_jax.cli.main import parse
from cheem_jax.core.architecture import Architecture, decode
from cheem_jax.core.kernels import Precision
from cheem_jax.engine.batches import batches
from cheem_jax.engine.choice import EngineConfig, Name, make_executor
from cheem_jax.engine.executor import Executor
from cheem_jax.engine.feed import Budget, Feed, feed_images, keep_tokens
from cheem_jax.run.method import base_network
from experiments.bench.measure import (
    ROOT,
    Row,
    alternate,
    command,
    medians,
    new_task,
    random_images,
    save,
    say,
    separate_flops,
    step_flops,
)  # fmt: skip
from experiments.charts import names_in

NUM_CLASSES, RANK, REPEATS = 100, 40, 3
NUM_STEPS: dict[Name, int] = {"stages": 16, "whole": 2, "scan": 16}
"""Steps timed at once; `whole` compiles a program for each."""
TRAIN_IMAGES, VAL_IMAGES, CANDIDATES, SUPERNET_EPOCHS, FINETUNE_EPOCHS = 20_399, 2_770, 1_000, 50, 20
"""The mean MTIL task at the paper's settings."""
PAPER_HOURS = 1.45
"""Of the paper on one A100, per task."""
PEAKS: dict[str, dict[Precision, float]] = {
    "H200": {"bfloat16": 989e12, "float32": 494.5e12},
    "H100": {"bfloat16": 989e12, "float32": 494.5e12},
    "A100": {"bfloat16": 312e12, "float32": 156e12},
    "L4": {"bfloat16": 121e12, "float32": 60e12},
    "T4": {"bfloat16": 65e12, "float32": 8.1e12},
}
"""Dense products per second as the makers state them; float32 is TF32 where there is one."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """Which configurations are measured; lists are separated by commas."""

    out: Path = ROOT / "docs" / "benchmarks"
    """Folder of the JSON files."""
    backbones: str = "deit_tiny,vit_base"
    batches: str = "64,256"
    precisions: str = "float32,bfloat16"
    executors: str = "stages,scan,whole"
    again: bool = False
    """Also those that have a file already."""


def main(settings: Settings) -> None:
    """Measure every configuration."""
    if jax.default_backend() == "cpu":
        raise ValueError("JAX finds no accelerator here; on a CPU run experiments/bench/run.py")
    choices = (
        names_in("--backbones", settings.backbones, CONFIGS),
        [int(size) for size in settings.batches.split(",")],
        names_in("--precisions", settings.precisions, get_args(Precision)),
        names_in("--executors", settings.executors, NUM_STEPS),
    )  # fmt: skip
    for backbone, batch, precision, executor in itertools.product(*choices):
        part = f"gpu-{backbone}-{batch}-{precision}-{executor}"
        if not settings.again and (settings.out / f"{part}.json").exists():
            say(f"{part}: measured already")
            continue
        setting: dict[str, Any] = dict(backbone=backbone, batch=batch, precision=precision, executor=executor)
        try:
            rows, found = measure(part, **setting)
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            rows, found = [], {"failed": "out of memory"}
            say(f"{part}: out of memory")
        save(settings.out, part, rows, quick=False, **setting, **found)
        jax.clear_caches()


def measure(
    part: str, *, backbone: str, batch: int, precision: Precision, executor: Name
) -> tuple[list[Row], dict[str, Any]]:
    """One configuration."""
    config = dataclasses.replace(CONFIGS[backbone], precision=precision)
    vit = build(config, init_params(config, jax.random.key(0)))
    one = make_executor(vit, "mlp_down", EngineConfig(executor, precision), batch_size=batch)
    num_images, steps = 2 * batch, NUM_STEPS[executor]
    budget = Budget(one.budget)
    images = feed_images(one, random_images(num_images, config), budget)
    feed = keep_tokens("training images", one, images, num_images, (), batch_size=batch, budget=budget)
    fitting = new_task(one, NUM_CLASSES, RANK)
    supernet = fitting.supernet
    codes = np.random.default_rng(0).integers(0, 4, (steps, config.depth))
    architectures = [decode(row, supernet.sizes) for row in codes]
    start = time.perf_counter()
    prepare(one, supernet, batch)
    run_steps(one, fitting, architectures, feed, num_images, batch)
    preparing = time.perf_counter() - start
    seconds = medians(
        alternate({"steps": lambda: run_steps(one, fitting, architectures, feed, num_images, batch)}, REPEATS)
        | alternate({"forward": lambda: run_forward(one, feed, num_images, batch)}, REPEATS)
    )
    step_seconds, forward_rate = seconds["steps"] / steps, num_images / seconds["forward"]
    work = batch * float(np.mean([step_flops(config, a, RANK, begin=0) for a in architectures])) / step_seconds
    kind = jax.devices()[0].device_kind
    peak = next((peaks[precision] for name, peaks in PEAKS.items() if name in kind), None)
    forward_work = forward_rate * separate_flops(config, [base_network(one)])
    # every step like a supernet's, every candidate by itself
    task_steps = (SUPERNET_EPOCHS + FINETUNE_EPOCHS) * -(-TRAIN_IMAGES // batch)
    hours = (task_steps * step_seconds + CANDIDATES * VAL_IMAGES / forward_rate) / 3600
    notes = [f"{name} not kept" for name in budget.refused]
    if executor == "whole":
        notes.append("without compiling, which nearly every supernet step would have to do")
    what = f"hours per task, {part.removeprefix('gpu-')}"
    # the paper's time is that of ViT-B/16, and a rate without its compilations is no run's
    goal = PAPER_HOURS if backbone == "vit_base" and executor != "whole" else None
    row = Row(what, {}, hours, goal, "at most", "h", note="; ".join(notes))
    return [row], {
        "step_seconds": step_seconds,
        "images_per_second": batch / step_seconds,
        "forward_images_per_second": forward_rate,
        "utilisation": None if peak is None else work / peak,
        "forward_utilisation": None if peak is None else forward_work / peak,
        "model_flops_per_second": work,
        "prepare_seconds": preparing,
        "steps": steps,
    }


def run_steps(
    executor: Executor, fitting: SupernetFit, architectures: list[Architecture], feed: Feed, num_images: int, batch: int
) -> None:
    """All steps, waited for at the end, as in training."""
    labels = np.arange(num_images, dtype=np.int32) % NUM_CLASSES
    rows = itertools.cycle(list(batches(np.arange(num_images), batch)))
    data = [step_of(executor, feed, labels, next(rows)) for _ in architectures]
    losses = []
    for first in range(0, len(data), executor.steps_per_call):
        part = slice(first, first + executor.steps_per_call)
        fitting.state, found = train_steps(
            executor, fitting.supernet, fitting.state, architectures[part], data[part], rates=[1e-3] * len(data[part])
        )
        losses += found
    jax.block_until_ready((losses, fitting.state))


def run_forward(executor: Executor, feed: Feed, num_images: int, batch: int) -> None:
    """Features of one network from kept tokens, as a candidate's evaluation."""
    network, found = base_network(executor), []
    for rows in batches(np.arange(num_images), executor.rows(batch)):
        (walked,) = executor.walk([network], feed(rows.rows), rows.mask)
        found.append(executor.features(walked.tokens))
    jax.block_until_ready(found)


if __name__ == "__main__":
    command(main, parse(Settings, description=__doc__))
