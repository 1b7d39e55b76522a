"""Speed of one accelerator: training steps, scored candidates, whole tasks, and PyTorch on the same
samples.

    python -m experiments.bench.accelerator --out runs/speed  # ends within 570 s
    python -m experiments.bench.accelerator --out runs/speed --miniature

Weights and images are random, so no data is read. All groups of cells first compile in parallel.
Then each group measures in a separate process, the most important group first. `speed.json` is
written after every cell, so an interrupted run keeps its measurements. Autotuning is off unless
XLA_FLAGS is set. The miniature takes minutes on a CPU; its numbers are meaningless.
"""

import contextlib
import dataclasses
import functools
import importlib.util
import itertools
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from cheem_jax.backbone.config import ViTConfig
from cheem_jax.backbone.params import build
from cheem_jax.cheem.config import PAPER, CheemConfig
from cheem_jax.cheem.hee import sample, uniform_table
from cheem_jax.cheem.learner import Cheem
from cheem_jax.cheem.training import prepare, steps_of, supernet_score
from cheem_jax.cli.arguments import parse
from cheem_jax.cli.running import run_command
from cheem_jax.core.architecture import Architecture, decode
from cheem_jax.core.atomic import write_atomically
from cheem_jax.core.keys import Keys, next_power_of_two
from cheem_jax.core.settings import Precision, no_progress
from cheem_jax.data.task import Split, Task
from cheem_jax.engine.batches import batches
from cheem_jax.engine.choice import EngineConfig, Name, make_executor
from cheem_jax.engine.compilation import Mark, enable_cache
from cheem_jax.engine.feed import Budget, cache_tokens, feed_images
from cheem_jax.run.method import Backbone, FrozenFeatures
from cheem_jax.run.record import to_json
from cheem_jax.run.session import Session
from experiments.bench import measure
from experiments.charts import names_in

FILE = "speed.json"
AUTOTUNING_OFF = "--xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false"
"""Matrix products by cuBLAS. Without autotuning, XLA's kernels reached 86 TFLOP/s (TF32) and 11
TFLOP/s (bfloat16) on an H100."""
NUM_CLASSES = 100
GRACE = 10
"""Seconds that are reserved for ending processes."""


@dataclasses.dataclass(frozen=True)
class Speed:
    """The measured cells and their time limits."""

    out: Path = Path("runs/speed")
    """Folder of speed.json; cells in an existing file are not measured again."""
    seconds: float = 570
    """Time limit in seconds of the whole command."""
    compiling: float = 120
    """Maximum number of seconds for compiling in parallel; 0: each group compiles its own
    functions."""
    only: str | None = None
    """Names of groups of cells, separated by commas; default: all."""
    miniature: bool = False
    """Test without the hardware: use the bundled backbones and a few small batches."""

    def __post_init__(self) -> None:
        if not self.seconds > 2 * GRACE:
            raise ValueError(f"--seconds is {self.seconds:g}; expected more than {2 * GRACE}")


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of the cells."""

    tiny: str = "deit_tiny"
    base: str = "vit_base"
    batch: int = 32
    large: int = 64
    rank: int = 40
    num_steps: int = 200
    num_traced: int = 24
    repeats: int = 3
    num_candidates: int = 20
    num_scored: int = 512
    rows: tuple[int, ...] = (32, 128, 512)
    num_train: int = 1000
    num_val: int = 300
    config: CheemConfig = dataclasses.replace(PAPER, batch_size=32)
    peers: tuple[str, ...] = ("deit_tiny", "vit_base")
    peer_pixels: int | None = None


MINIATURE = Sizes(
    "vit_nano",
    "vit_nano",
    4,
    8,
    4,
    16,
    8,
    1,
    3,
    8,
    (4, 8),
    12,
    6,
    dataclasses.replace(
        PAPER,
        batch_size=4,
        supernet=dataclasses.replace(PAPER.supernet, epochs=1),
        finetune=dataclasses.replace(PAPER.finetune, epochs=1),
        search=dataclasses.replace(PAPER.search, population=4, generations=2, num_parents=2),
    ),
    ("deit_tiny",),
    32,
)


class Cell(NamedTuple):
    """One measurement: its name, its expected time in seconds, and a function that measures and
    returns JSON values."""

    name: str
    seconds: float
    measure: Callable[[], dict[str, Any]]


def groups(sizes: Sizes) -> dict[str, list[Cell]]:
    """Return the cells of each group, the most important group first; each group has a separate
    process."""
    tiny, base = sizes.tiny, sizes.base

    def steps(name: str, executor: Name, batch: int, precision: Precision) -> Cell:
        measured = functools.partial(step_cell, sizes, name, executor, batch, precision)
        return Cell(f"{name}, {executor}, {batch} images, {precision}", 25, measured)

    def scores(name: str, precision: Precision) -> Cell:
        measured = functools.partial(candidate_cell, sizes, name, precision)
        return Cell(f"{name}, candidates, {precision}", 20, measured)

    def whole_task(name: str, precision: Precision) -> Cell:
        measured = functools.partial(task_cell, sizes, name, precision)
        return Cell(f"{name}, whole task, {precision}", 60, measured)

    def peer(name: str, way: str) -> Cell:
        return Cell(f"{name}, PyTorch {way}", 20, functools.partial(peer_cell, sizes, name, way))

    return {
        "tiny": [
            Cell("peaks", 10, peak_cell),
            steps(tiny, "stages", sizes.batch, "float32"),
            steps(tiny, "stages", sizes.batch, "bfloat16"),
            steps(tiny, "scan", sizes.batch, "float32"),
            steps(tiny, "scan", sizes.batch, "bfloat16"),
            scores(tiny, "float32"),
            scores(tiny, "bfloat16"),
            steps(tiny, "stages", sizes.large, "float32"),
        ],
        "base": [
            steps(base, "stages", sizes.batch, "float32"),
            steps(base, "stages", sizes.batch, "bfloat16"),
            scores(base, "bfloat16"),
            steps(base, "scan", sizes.batch, "bfloat16"),
        ],
        "task_tiny": [whole_task(tiny, "bfloat16")],
        "torch": [
            *(peer(name, way) for name in sizes.peers for way in ("TF32", "bfloat16 autocast")),
            peer(sizes.peers[0], "compiled for one network"),
        ],
        "task_base": [whole_task(base, "bfloat16")],
        "whole": [steps(tiny, "whole", sizes.batch, "float32")],
    }


def main(settings: Speed) -> None:
    """Run the groups one after another, each with a share of the remaining time."""
    end = time.monotonic() + settings.seconds - GRACE
    sizes = MINIATURE if settings.miniature else Sizes()
    cells = groups(sizes)
    names = list(cells) if settings.only is None else names_in("--only", settings.only, cells)
    settings.out.mkdir(parents=True, exist_ok=True)
    recorded = read(settings.out)
    if recorded.setdefault("miniature", settings.miniature) != settings.miniature:
        raise ValueError(
            f"--out is {settings.out}, which has cells of the other size; choose another folder"
        )
    write_atomically(settings.out / FILE, json.dumps(recorded, indent=1) + "\n")
    os.environ.setdefault("XLA_FLAGS", AUTOTUNING_OFF)  # this process uses no device
    if settings.compiling:
        until = min(time.monotonic() + settings.compiling, end)
        processes = [
            start(compile_cells, name, sizes, settings.out) for name in names if name != "torch"
        ]
        print(f"compiling: {', '.join(wait(process, until) for process in processes)}", flush=True)
    needed = {name: sum(cell.seconds for cell in cells[name]) for name in names}
    for name in names:
        now = time.monotonic()
        if name == "torch" and importlib.util.find_spec("timm") is None:
            note(settings.out, name, {"left_out": "timm is not installed"}, {})
        elif now < end:
            # a group can use the unused time of earlier groups, but not the time of later ones
            share = needed[name] / sum(needed.values()) * (end - now)
            seconds = max(share, min(needed[name], end - now))
            process = start(run_cells, name, sizes, settings.out, seconds)
            print(f"{name}: {wait(process, now + seconds)}", flush=True)
        del needed[name]
    print(f"{len(read(settings.out)['cells'])} cells in {settings.out / FILE}")


def start(work: Callable[..., None], *arguments: Any) -> BaseProcess:
    """Start a function in a new process."""
    process = multiprocessing.get_context("spawn").Process(target=work, args=arguments)
    process.start()
    return process


def wait(process: BaseProcess, until: float) -> str:
    """Wait for a process until a moment of the monotonic clock, then end it; describe its end."""
    begin = time.monotonic()
    process.join(max(until - begin, 0))
    if is_late := process.is_alive():
        process.terminate()
        process.join(GRACE / 2)
        process.kill()
        process.join()
    took = f"{time.monotonic() - begin:.0f} s"
    if is_late:
        return f"ended after {took}"
    return took + (f", status {process.exitcode}" if process.exitcode else "")


def share_memory() -> None:
    """Allocate the device's memory on demand, because other processes need it, too."""
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"


def compile_cells(name: str, sizes: Sizes, out: Path) -> None:
    """Compile and cache the functions of a group's cells without measuring."""
    share_memory()
    enable_cache()
    for cell in groups(brief(sizes))[name]:
        with contextlib.suppress(Exception):  # the measurement records the error
            cell.measure()


def brief(sizes: Sizes) -> Sizes:
    """Return sizes with which the cells compile all their functions in little time."""
    config = sizes.config
    config = dataclasses.replace(
        config,
        supernet=dataclasses.replace(config.supernet, epochs=1),
        finetune=dataclasses.replace(config.finetune, epochs=1),
        search=dataclasses.replace(config.search, generations=1),
    )
    return dataclasses.replace(
        sizes, num_steps=16, num_traced=1, num_candidates=4, repeats=1, config=config
    )


def run_cells(name: str, sizes: Sizes, out: Path, seconds: float) -> None:
    """Measure a group's cells for at most `seconds`; a failed cell is recorded and does not stop
    the others."""
    end = time.monotonic() + seconds
    if name == "torch":
        share_memory()
    enable_cache()
    cached = read(out)["cells"]
    machine = measure.machine() | {"xla_flags": os.environ.get("XLA_FLAGS", "")}
    for cell in groups(sizes)[name]:
        if cell.name in cached and "error" not in cached[cell.name]:
            continue
        remaining = end - time.monotonic()
        if remaining < cell.seconds / 3:
            note(out, cell.name, {"left_out": f"{remaining:.0f} s were left"}, machine)
            continue
        begin = time.monotonic()
        try:
            numbers = cell.measure()
        except Exception as error:  # a cell can fail in any way
            numbers = {"error": f"{type(error).__name__}: {error}"[:500]}
        note(out, cell.name, {**numbers, "took_seconds": time.monotonic() - begin}, machine)


def read(out: Path) -> dict[str, Any]:
    """Read the recorded measurements."""
    file = out / FILE
    return json.loads(file.read_text()) if file.is_file() else {"cells": {}}


def note(out: Path, name: str, numbers: Mapping[str, Any], machine: Mapping[str, Any]) -> None:
    """Record a cell and print it."""
    print(f"{name}: {json.dumps(to_json(_short(numbers)))}", flush=True)
    whole = read(out)
    whole["machine"] = whole.get("machine", {}) | machine
    whole["cells"][name] = to_json(numbers)
    write_atomically(out / FILE, json.dumps(whole, indent=1) + "\n")


def _short(numbers: Mapping[str, Any]) -> dict[str, Any]:
    def value(one: Any) -> Any:
        return float(f"{one:.4g}") if isinstance(one, float) else one

    return {name: value(one) for name, one in numbers.items() if not isinstance(one, list)}


# ---- cells


def peak_cell() -> dict[str, Any]:
    """Measure the copy bandwidth, and the fastest large matrix products in TF32 and bfloat16."""
    values = jnp.zeros(2**20 if jax.default_backend() == "cpu" else 2**28, jnp.float32)
    copy = jax.jit(lambda x: x + 1)
    seconds = min(measure.alternate({"": lambda: copy(values).block_until_ready()}, 5)[""])
    return {
        "copy_bytes_per_second": 2 * values.nbytes / seconds,
        "float32_flops_per_second": measure.matrix_peak("float32"),
        "bfloat16_flops_per_second": measure.matrix_peak("bfloat16"),
    }


class Subject:
    """An executor with a new supernet, and cached tokens of random images as in training."""

    def __init__(
        self, sizes: Sizes, name: str, executor: Name, batch: int, precision: Precision, num: int
    ):
        pretrained = measure.backbone(name)
        self.config: ViTConfig = dataclasses.replace(pretrained.config, precision=precision)
        vit = build(self.config, pretrained.params)
        self.executor = make_executor(
            vit, "mlp_down", EngineConfig(executor, programs=512), batch_size=batch
        )
        self.training = measure.new_task(self.executor, NUM_CLASSES, sizes.rank)
        self.batch = batch
        self.labels = np.arange(num, dtype=np.int32) % NUM_CLASSES
        budget = Budget(2**36)
        images = feed_images(self.executor, measure.random_images(num, self.config), budget)
        self.feed = cache_tokens(
            "tokens", self.executor, images, num, (), batch_size=batch, budget=budget
        )

    def train(self, architectures: Sequence[Architecture]) -> list[jax.Array]:
        """Take one step per architecture without waiting for the device; return the losses."""
        order = np.resize(np.arange(len(self.labels)), len(architectures) * self.batch)
        pieces = list(batches(order, self.batch))
        steps = steps_of(self.executor, self.feed, self.labels, pieces, self.batch)
        return list(itertools.chain.from_iterable(self.training.train(architectures, steps)))


def samples(config: ViTConfig, num: int) -> list[Architecture]:
    """Sample architectures uniformly over the candidates of a first task, identical for all
    sides."""
    table = uniform_table([1] * config.depth).astype(np.float32)
    return [
        decode(codes, [1] * config.depth)
        for codes in np.asarray(sample(jax.random.key(0), table, num=num))
    ]


def step_cell(
    sizes: Sizes, name: str, executor: Name, batch: int, precision: Precision
) -> dict[str, Any]:
    """Measure the seconds per supernet step, on the host and until the device is ready, and the
    device's busy share."""
    mark = Mark.now()
    subject = Subject(sizes, name, executor, batch, precision, 8 * batch)
    architectures = samples(subject.config, sizes.num_steps)
    # the executor compiles a function per architecture, so one architecture is timed
    if executor == "whole":
        architectures = [architectures[0]] * len(architectures)
    else:
        prepare(subject.executor, subject.training.supernet, batch)
    first = [float(loss) for loss in subject.train(architectures)]  # compiles all functions
    warm = mark.since()
    returned = []
    done = []
    for _ in range(sizes.repeats):
        begin = time.perf_counter()
        losses = subject.train(architectures)
        returned.append((time.perf_counter() - begin) / len(architectures))
        jax.block_until_ready((losses, subject.training.state))
        done.append((time.perf_counter() - begin) / len(architectures))
    seconds = statistics.median(done)
    flops = batch * statistics.mean(
        measure.step_flops(subject.config, one, sizes.rank, begin=0) for one in architectures
    )
    numbers = {
        "step_seconds": seconds,
        "host_seconds": statistics.median(returned),
        "all_step_seconds": done,
        "images_per_second": batch / seconds,
        "flops_per_second": flops / seconds,
        "warm_up": warm,
        "first_losses": first[:16],
        "memory": measure.device_memory(),
    }
    return numbers | traced(
        lambda: jax.block_until_ready(subject.train(architectures[: sizes.num_traced])),
        sizes.num_traced,
    )


def candidate_cell(sizes: Sizes, name: str, precision: Precision) -> dict[str, Any]:
    """Measure the seconds per candidate of one generation on a validation set, for each number of
    rows per forward pass."""
    numbers: dict[str, Any] = {}
    subject = Subject(sizes, name, "stages", sizes.batch, precision, sizes.num_scored)
    executor, training = subject.executor, subject.training
    table = uniform_table([1] * subject.config.depth).astype(np.float32)
    codes = np.asarray(sample(jax.random.key(1), table, num=sizes.num_candidates))
    for rows in sizes.rows:
        # on an accelerator, forward passes have batch sizes different from those of training
        executor.device = dataclasses.replace(
            executor.device, forward_sizes=(rows,) if rows > sizes.batch else ()
        )
        score = supernet_score(
            executor,
            training.supernet,
            training.state,
            subject.feed,
            subject.labels,
            batch_size=sizes.batch,
            advance=no_progress,
        )
        times = measure.alternate({"": functools.partial(score, codes)}, sizes.repeats)[""]
        numbers[f"{rows} rows"] = statistics.median(times) / len(codes)
        numbers[f"{rows} rows, traced"] = traced(functools.partial(score, codes), len(codes))
    return {
        "seconds_per_candidate": numbers,
        "num_images": sizes.num_scored,
        "num_candidates": sizes.num_candidates,
    }


def peer_cell(sizes: Sizes, name: str, way: str) -> dict[str, Any]:
    """Measure the same steps and candidates in PyTorch, with images on the device and without
    waiting."""
    import torch

    from experiments.bench.peer import CheemPeer

    torch.set_float32_matmul_precision("high")  # TF32, which is JAX's default
    is_fixed = "compiled" in way
    pretrained = measure.backbone(name, sizes.peer_pixels)
    peer = CheemPeer(
        pretrained,
        rank=sizes.rank,
        num_outputs=next_power_of_two(NUM_CLASSES),
        compiled=is_fixed,
        precision="bfloat16" if "bfloat16" in way else "float32",
    )
    architectures = samples(pretrained.config, sizes.num_steps)
    architectures = [architectures[0]] * len(architectures) if is_fixed else architectures
    images = torch.as_tensor(measure.random_images(sizes.batch, pretrained.config)).to(peer.device)
    labels = peer.labels(np.arange(sizes.batch, dtype=np.int32) % NUM_CLASSES)
    synchronise = torch.cuda.synchronize if peer.device.type == "cuda" else lambda: None

    def train(some: Sequence[Architecture]) -> None:
        for architecture in some:
            peer.step(architecture, images, labels, NUM_CLASSES)
        synchronise()

    begin = time.perf_counter()
    train(architectures[: sizes.num_traced])
    warm = time.perf_counter() - begin
    times = []
    for _ in range(sizes.repeats):
        begin = time.perf_counter()
        train(architectures)
        times.append((time.perf_counter() - begin) / len(architectures))
    numbers: dict[str, Any] = {
        "step_seconds": statistics.median(times),
        "all_step_seconds": times,
        "warm_up_seconds": warm,
        "torch": torch.__version__,
    }
    if not is_fixed:
        scored = torch.as_tensor(measure.random_images(sizes.num_scored, pretrained.config)).to(
            peer.device
        )
        labels_of_scored = np.arange(sizes.num_scored, dtype=np.int32) % NUM_CLASSES
        candidates = architectures[: sizes.num_candidates]
        score = functools.partial(
            peer.count_correct, candidates, scored, labels_of_scored, NUM_CLASSES
        )
        numbers["seconds_per_candidate"] = min(measure.alternate({"": score}, 3)[""]) / len(
            candidates
        )
    return numbers


def task_cell(sizes: Sizes, name: str, precision: Precision) -> dict[str, Any]:
    """Learn a whole first task with the paper's settings; measure its seconds, compilation
    included, and the device's utilisation in each phase."""
    mark = Mark.now()
    pretrained = measure.backbone(name)
    vit = build(dataclasses.replace(pretrained.config, precision=precision), pretrained.params)
    executor = make_executor(vit, "mlp_down", EngineConfig(), batch_size=sizes.config.batch_size)
    features = FrozenFeatures(Backbone(executor, sizes.config.router), sizes.config.batch_size)
    learner = Cheem(executor, sizes.config, Keys(0), None, features)

    def split(num: int, seed: int) -> Split:
        labels = np.arange(num, dtype=np.int32) % min(NUM_CLASSES, sizes.num_val)
        return Split(measure.random_images(num, pretrained.config, seed), labels)

    classes = tuple(f"class {i}" for i in range(min(NUM_CLASSES, sizes.num_val)))
    task = Task(
        "random",
        classes,
        split(sizes.num_train, 0),
        split(sizes.num_val, 1),
        split(sizes.num_val, 2),
    )
    begin = time.perf_counter()
    report = learner.learn(task, Session())
    seconds = time.perf_counter() - begin
    return {
        "executor": executor.name,
        "reason": executor.reason,
        "seconds": seconds,
        "seconds_by_phase": report["seconds"],
        "compiled": mark.since(),
        "num_train": sizes.num_train,
        "num_val": sizes.num_val,
        "searched": report["searched"],
        "memory": measure.device_memory(),
    }


def traced(work: Callable[[], object], num: int) -> dict[str, Any]:
    """Count kernels per unit of work, their seconds and the device's busy share with the profiler.

    The result is empty on a CPU, because the profiler does not name its kernels.
    """
    if jax.default_backend() == "cpu":
        work()
        return {}
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            start = time.perf_counter()
            work()
            seconds = time.perf_counter() - start
        file, *_ = Path(folder).rglob("*.xplane.pb")
        data = jax.profiler.ProfileData.from_file(str(file))
        spans = [
            (event.start_ns, event.end_ns)
            for plane in data.planes
            if plane.name.startswith("/device:GPU")
            for line in plane.lines
            if line.name.startswith("Stream")
            for event in line.events
        ]
    busy = covered(spans) / 1e9
    return {
        "kernels": len(spans) / num,
        "device_seconds": busy / num,
        "busy_share_traced": busy / seconds,
    }


def covered(spans: Sequence[tuple[float, float]]) -> float:
    """Return the length of the union of intervals."""
    total = 0.0
    end = -np.inf
    for first, last in sorted(spans):
        total += max(last - max(first, end), 0)
        end = max(end, last)
    return float(total)


if __name__ == "__main__":
    parsed = parse(Speed, description=__doc__)
    run_command(main, parsed, parsed.out, computes=False)
