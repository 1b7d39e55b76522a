"""Speed of one accelerator: steps, scored candidates, whole tasks, and PyTorch on the same samples.

    python -m experiments.bench.accelerator --out runs/speed  # ends within 570 s
    python -m experiments.bench.accelerator --out runs/speed --miniature

Weights and images are random, so no data is read. All groups of cells first compile in parallel,
then each group measures in a separate process, most important first. `speed.json` is written after
every cell, so an interrupted run keeps its measurements. Autotuning is off unless XLA_FLAGS is set.
The miniature takes minutes on a CPU; its numbers mean nothing.
"""

import contextlib
import dataclasses
import functools
import importlib.util
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from cheem_jax.cheem.training import prepare, steps_of, supernet_score, train_steps
from cheem_jax.cli.arguments import parse
from cheem_jax.cli.running import run_command
from cheem_jax.core.architecture import Architecture, decode
from cheem_jax.core.atomic import write_atomically
from cheem_jax.core.keys import Keys, next_power_of_two
from cheem_jax.core.settings import Advance, Precision
from cheem_jax.data.task import Split, Task
from cheem_jax.engine.batches import batches
from cheem_jax.engine.choice import EngineConfig, Name, make_executor
from cheem_jax.engine.compilation import Mark, keep_programs
from cheem_jax.engine.feed import Budget, feed_images, keep_tokens
from cheem_jax.engine.passes import unwatched
from cheem_jax.run.method import Backbone, FrozenFeatures
from cheem_jax.run.record import to_json
from cheem_jax.run.session import Session
from experiments.bench import measure

FILE = "speed.json"
AUTOTUNING_OFF = "--xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false"
"""Products by cuBLAS: without autotuning XLA's reached 86 (TF32) and 11 TFLOP/s (bfloat16) on an
H100."""
NUM_CLASSES = 100
GRACE = 10
"""Seconds between SIGTERM and SIGKILL."""


@dataclasses.dataclass(frozen=True)
class Speed:
    """The cells and the time for them."""

    out: Path = Path("runs/speed")
    """Folder of speed.json; its cells are not measured again."""
    seconds: float = 570
    """Time limit of everything."""
    compiling: float = 120
    """Maximum seconds of compiling in parallel; 0: each group compiles for itself."""
    only: str | None = None
    """Groups of cells, separated by commas; default: all."""
    miniature: bool = False
    """A test without the hardware: the bundled backbones and a few small batches."""

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
    product: int = 8192
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
    256,
    ("deit_tiny",),
    32,
)


class Cell(NamedTuple):
    """One measurement: its name, its time in seconds, and the function that returns its JSON
    values."""

    name: str
    seconds: float
    measure: Callable[[], dict[str, Any]]


def groups(sizes: Sizes) -> dict[str, list[Cell]]:
    """The cells by process, most important first."""
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
            Cell("peaks", 10, functools.partial(peak_cell, sizes)),
            Cell("dispatch", 5, dispatch_cell),
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
    """Run the groups one after another, each with its share of the remaining time."""
    end = time.monotonic() + settings.seconds - GRACE
    named = groups(MINIATURE if settings.miniature else Sizes())
    wanted = (
        list(named)
        if settings.only is None
        else [name.strip() for name in settings.only.split(",")]
    )
    if unknown := [name for name in wanted if name not in named]:
        raise ValueError(f"--only names {', '.join(unknown)}; expected some of {', '.join(named)}")
    settings.out.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("XLA_FLAGS", AUTOTUNING_OFF)  # of the groups: this process uses no device
    if settings.compiling:
        processes = [
            started(settings, name, settings.compiling, "warm")
            for name in wanted
            if name != "torch"
        ]
        until = min(time.monotonic() + settings.compiling, end)
        print(f"compiling: {', '.join(ended(process, until) for process in processes)}", flush=True)
    left = {name: sum(cell.seconds for cell in named[name]) for name in wanted}
    for name in wanted:
        now = time.monotonic()
        if name == "torch" and importlib.util.find_spec("timm") is None:
            note(settings.out, name, {"left_out": "timm is not installed"}, {})
        elif now < end:
            # later groups keep their time; unused time of earlier groups is shared by all
            seconds = max(left[name] / sum(left.values()) * (end - now), min(left[name], end - now))
            print(f"{name}: {ended(started(settings, name, seconds), now + seconds)}", flush=True)
        del left[name]
    numbers = read(settings.out)
    print(f"{len(numbers['cells'])} cells in {settings.out / FILE}")


def started(settings: Speed, name: str, seconds: float, how: str = "") -> subprocess.Popen[bytes]:
    """Start one group in a separate process; `warm`: compile and cache its functions without
    measuring."""
    command = [
        sys.executable,
        "-m",
        "experiments.bench.accelerator",
        "--group",
        name,
        f"{seconds:.1f}",
    ]
    command += [str(settings.out.resolve()), str(int(settings.miniature)), how]
    environment = dict(os.environ)
    if name == "torch" or how:  # others need memory, too
        environment["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    return subprocess.Popen(command, cwd=measure.ROOT, env=environment)


def ended(process: subprocess.Popen[bytes], until: float) -> str:
    """Wait for a process until a moment, then end it; return how it ended."""
    start = time.monotonic()
    try:
        status = process.wait(max(until - start, 0))
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(GRACE / 2)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        return f"ended after {time.monotonic() - start:.0f} s"
    return f"{time.monotonic() - start:.0f} s" + (f", status {status}" if status else "")


def brief(sizes: Sizes) -> Sizes:
    """Sizes that only compile the functions of the cells."""
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


def run_cells(name: str, seconds: float, out: Path, *, miniature: bool, warm: bool = False) -> None:
    """Measure a group's cells in its process; a failed cell is recorded and does not stop the
    others."""
    end = time.monotonic() + seconds
    sizes = MINIATURE if miniature else Sizes()
    keep_programs()
    if warm:
        for cell in groups(brief(sizes))[name]:
            with contextlib.suppress(Exception):  # the measurement records it
                cell.measure()
        return
    cached = read(out)["cells"]
    machine = measure.machine() | {"xla_flags": os.environ.get("XLA_FLAGS", "")}
    for cell in groups(sizes)[name]:
        left = end - time.monotonic()
        if cell.name in cached and "error" not in cached[cell.name]:
            continue
        if left < cell.seconds / 3:
            note(out, cell.name, {"left_out": f"{left:.0f} s were left"}, machine)
            continue
        start = time.monotonic()
        try:
            numbers = cell.measure()
        except Exception as error:  # one cell of many
            numbers = {"error": f"{type(error).__name__}: {error}"[:500]}
        note(out, cell.name, {**numbers, "took_seconds": time.monotonic() - start}, machine)


def read(out: Path) -> dict[str, Any]:
    """The recorded measurements."""
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


def peak_cell(sizes: Sizes) -> dict[str, Any]:
    """Copy bandwidth, and the fastest large products in TF32 and bfloat16."""
    size = 2**28 if sizes.product > 1024 else 2**20
    values = jnp.zeros(size, jnp.float32)
    copy = jax.jit(lambda x: x + 1)
    numbers: dict[str, Any] = {
        "copy_bytes_per_second": 2 * values.nbytes / _best(lambda: copy(values))
    }
    for precision in ("float32", "bfloat16"):
        operand = jax.random.normal(jax.random.key(0), (sizes.product, sizes.product), precision)
        product = jax.jit(lambda x: jnp.matmul(x, x))
        seconds = _best(lambda product=product, operand=operand: product(operand))
        numbers[f"{precision}_flops_per_second"] = 2 * sizes.product**3 / seconds
    return numbers


def _best(work: Callable[[], jax.Array], repeats: int = 5) -> float:
    return min(measure.alternate({"": lambda: work().block_until_ready()}, repeats)[""])


def dispatch_cell() -> dict[str, Any]:
    """Host seconds per call of a trivial compiled function, by its number of arguments."""
    numbers = {}
    for num in (1, 15, 158):
        arguments = [jnp.zeros(8) + i for i in range(num)]
        first = jax.jit(lambda *a: a[0] + 1)
        first(*arguments).block_until_ready()
        start = time.perf_counter()
        for _ in range(500):
            last = first(*arguments)
        numbers[f"{num} arguments"] = (time.perf_counter() - start) / 500
        last.block_until_ready()
    return numbers


class Subject:
    """An executor with a new supernet, and tokens of random images, cached as in training."""

    def __init__(
        self, sizes: Sizes, name: str, executor: Name, batch: int, precision: Precision, num: int
    ):
        pretrained = measure.backbone(name)
        self.config: ViTConfig = dataclasses.replace(pretrained.config, precision=precision)
        vit = build(self.config, pretrained.params)
        self.executor = make_executor(
            vit, "mlp_down", EngineConfig(executor, programs=512), batch_size=batch
        )
        self.fitting = measure.new_task(self.executor.base_pool, NUM_CLASSES, sizes.rank)
        self.batch = batch
        self.labels = np.arange(num, dtype=np.int32) % NUM_CLASSES
        budget = Budget(2**36)
        images = feed_images(self.executor, measure.random_images(num, self.config), budget)
        self.feed = keep_tokens(
            "tokens", self.executor, images, num, (), batch_size=batch, budget=budget
        )

    def train(self, architectures: Sequence[Architecture]) -> list[jax.Array]:
        """Run one step per architecture without waiting; return the losses."""
        executor, fitting = self.executor, self.fitting
        order = np.resize(np.arange(len(self.labels)), len(architectures) * self.batch)
        pieces = list(batches(order, self.batch))
        steps = steps_of(executor, self.feed, self.labels, pieces, self.batch)
        losses = []
        for first in range(0, len(architectures), executor.steps_per_call):
            some = architectures[first : first + executor.steps_per_call]
            data = [next(steps) for _ in some]
            fitting.state, some_losses = train_steps(
                executor, fitting.supernet, fitting.state, some, data, rates=[1e-3] * len(some)
            )
            losses += some_losses
        return losses


def samples(config: ViTConfig, num: int) -> list[Architecture]:
    """Architectures sampled uniformly over the candidates of a first task, equal for all sides."""
    table = uniform_table([1] * config.depth).astype(np.float32)
    return [
        decode(codes, [1] * config.depth)
        for codes in np.asarray(sample(jax.random.key(0), table, num=num))
    ]


def step_cell(
    sizes: Sizes, name: str, executor: Name, batch: int, precision: Precision
) -> dict[str, Any]:
    """Seconds per supernet step: of the host, until the device is ready, and the device's busy
    share."""
    mark = Mark.now()
    subject = Subject(sizes, name, executor, batch, precision, 8 * batch)
    architectures = samples(subject.config, sizes.num_steps)
    if executor == "whole":  # it compiles a function per architecture, so one is timed
        architectures = [architectures[0]] * len(architectures)
    else:
        prepare(subject.executor, subject.fitting.supernet, batch)
    first = [float(loss) for loss in subject.train(architectures)]  # compiles everything
    warm = mark.since()
    returned = []
    done = []
    for _ in range(sizes.repeats):
        start = time.perf_counter()
        losses = subject.train(architectures)
        returned.append((time.perf_counter() - start) / len(architectures))
        jax.block_until_ready((losses, subject.fitting.state))
        done.append((time.perf_counter() - start) / len(architectures))
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
        "memory": _memory(),
    }
    return numbers | traced(
        lambda: jax.block_until_ready(subject.train(architectures[: sizes.num_traced])),
        sizes.num_traced,
    )


def candidate_cell(sizes: Sizes, name: str, precision: Precision) -> dict[str, Any]:
    """Seconds per candidate of one generation on a validation set, by rows per forward pass."""
    numbers: dict[str, Any] = {}
    subject = Subject(sizes, name, "stages", sizes.batch, precision, sizes.num_scored)
    executor, fitting = subject.executor, subject.fitting
    table = uniform_table([1] * subject.config.depth).astype(np.float32)
    codes = np.asarray(sample(jax.random.key(1), table, num=sizes.num_candidates))
    for rows in sizes.rows:
        # forward passes of an accelerator have separate sizes
        executor.device = dataclasses.replace(
            executor.device, forward_sizes=(rows,) if rows > sizes.batch else ()
        )
        score = supernet_score(
            executor,
            fitting.supernet,
            fitting.state,
            subject.feed,
            subject.labels,
            batch_size=sizes.batch,
            advance=unwatched,
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
    """The same steps and candidates in PyTorch, with images on the device and without waiting."""
    import torch

    from experiments.bench.peer import CheemPeer

    torch.set_float32_matmul_precision("high")  # TF32, as JAX's default
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
    wait = torch.cuda.synchronize if peer.device.type == "cuda" else lambda: None

    def train(some: Sequence[Architecture]) -> None:
        for architecture in some:
            peer.step(architecture, images, labels, NUM_CLASSES)
        wait()

    start = time.perf_counter()
    train(architectures[: sizes.num_traced])
    warm = time.perf_counter() - start
    times = []
    for _ in range(sizes.repeats):
        start = time.perf_counter()
        train(architectures)
        times.append((time.perf_counter() - start) / len(architectures))
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
        wanted = np.arange(sizes.num_scored, dtype=np.int32) % NUM_CLASSES
        candidates = architectures[: sizes.num_candidates]
        score = functools.partial(peer.count_right, candidates, scored, wanted, NUM_CLASSES)
        numbers["seconds_per_candidate"] = min(measure.alternate({"": score}, 3)[""]) / len(
            candidates
        )
    return numbers


def task_cell(sizes: Sizes, name: str, precision: Precision) -> dict[str, Any]:
    """Learn a whole first task at the paper's settings, compilation included; utilisation by
    phase."""
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
    with watched_device() as utilisation:
        start = time.perf_counter()
        running = Phases()
        report = learner.learn(task, running)
        seconds = time.perf_counter() - start
    busy = {
        phase: statistics.mean(shares)
        for phase, begin, end in running.spans
        if (shares := [share for moment, share in utilisation if begin <= moment <= end])
    }
    return {
        "executor": executor.name,
        "reason": executor.reason,
        "seconds": seconds,
        "seconds_by_phase": report["seconds"],
        "utilisation_by_phase": busy,
        "utilisation": statistics.mean([share for _, share in utilisation])
        if utilisation
        else None,
        "compiled": mark.since(),
        "num_train": sizes.num_train,
        "num_val": sizes.num_val,
        "searched": report["searched"],
        "memory": _memory(),
    }


class Phases(Session):
    """A session without display or checkpoints that records the start and end of each phase."""

    def __init__(self) -> None:
        super().__init__()
        self.spans: list[tuple[str, float, float]] = []

    @contextlib.contextmanager
    def phase(
        self, name: str, total: int = 0, state: Any = None, *, title: str | None = None
    ) -> Iterator[Advance]:
        """See `Session.phase`."""
        begin = time.perf_counter()
        with super().phase(name, total, state, title=title) as advance:
            yield advance
        self.spans.append((name, begin, time.perf_counter()))


@contextlib.contextmanager
def watched_device() -> Iterator[list[tuple[float, float]]]:
    """Times and the accelerator's utilisation, twice a second; empty without nvidia-smi."""
    command = [
        "nvidia-smi",
        "--query-gpu=utilization.gpu",
        "--format=csv,noheader,nounits",
        "-lms",
        "500",
    ]
    utilisation: list[tuple[float, float]] = []
    try:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
    except OSError:
        yield utilisation
        return
    assert process.stdout is not None
    lines = process.stdout

    def follow() -> None:
        for line in lines:
            if line.strip().isdigit():
                utilisation.append((time.perf_counter(), int(line) / 100))

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    try:
        yield utilisation
    finally:
        process.terminate()
        process.wait()
        thread.join()


def traced(work: Callable[[], object], num: int) -> dict[str, Any]:
    """Kernels per unit of work, their seconds and the busy share, from a profiler trace.

    Empty on a CPU, whose kernels the profiler does not name.
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
    """Length of the union of intervals."""
    total = 0.0
    end = -np.inf
    for first, last in sorted(spans):
        total += max(last - max(first, end), 0)
        end = max(end, last)
    return float(total)


def _memory() -> dict[str, int]:
    numbers = jax.local_devices()[0].memory_stats() or {}
    return {
        name: numbers[name] for name in ("bytes_in_use", "peak_bytes_in_use") if name in numbers
    }


if __name__ == "__main__":
    if sys.argv[1:2] == ["--group"]:  # a group's own process
        _, _, group, given, folder, small, how = sys.argv
        run_cells(group, float(given), Path(folder), miniature=small == "1", warm=how == "warm")
    else:
        parsed = parse(Speed, description=__doc__)
        run_command(main, parsed, parsed.out, computes=False)
