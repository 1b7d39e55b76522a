"""Checks, speed and runs on an accelerator within a time limit.

    python experiments/gpu.py --stream FOLDER --weights FILE --seconds 1500 --out runs/gpu
    python experiments/gpu.py --miniature --out runs/gpu-miniature

The parts in their order: `smoke` (training by every executor compared with the CPU, and two
deterministic trainings), `speed` (`bench/accelerator.py`: steps, scoring and whole tasks, next to
PyTorch if it is installed), `runs` (`compare.py` per method, most important first, after choosing
settings on validation images). `--parallel` starts several runs at a time, because a small backbone
uses little of a large accelerator; without NVIDIA's multi-process service they take turns. A part
that exceeds its time is interrupted; a run resumes with the next call. OUT/records.tar.gz has all
numbers and no checkpoint. The miniature takes minutes on any machine; its numbers mean nothing.
"""

import contextlib
import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import tarfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any, NamedTuple, get_args

import jax
import numpy as np
from bench import measure
from charts import check_folder, names_in
from choosing import grids_of
from study import task_names

from cheem_jax.backbone.params import build
from cheem_jax.backbone.weights import load_pretrained
from cheem_jax.cheem.config import OpSettings
from cheem_jax.cheem.supernet import Supernet
from cheem_jax.cheem.training import make_step, train_steps
from cheem_jax.cli.arguments import parse
from cheem_jax.cli.running import run_command
from cheem_jax.core.architecture import from_strings
from cheem_jax.core.atomic import write_atomically
from cheem_jax.core.pool import dense_experts
from cheem_jax.core.settings import Precision
from cheem_jax.engine import choice
from cheem_jax.engine.choice import EngineConfig, make_executor

PARTS = ("smoke", "speed", "runs")
HERE = Path(__file__).parent
LARGEST_DIFFERENCE: dict[Precision, float] = {"float32": 1e-2, "bfloat16": 5e-2}
"""Largest difference of a loss from the CPU's in float32, relative to the first loss."""
FIRST = (
    "frozen_linear",
    "lora_cl",
    "cheem:closed_form",
    "cheem",
    "full_finetune",
    "s_prompts",
)
ONCE = (
    "moal",
    "ranpac",
    "ease",
    "tuna",
    "diki",
    "coda_prompt",
    "l2p",
    "dualprompt",
    "ewc",
    "moe_adapters",
)
LIKE = "cheem:closed_form"
"""The method whose settings uniform sampling and the reversed order share."""
QUEUE = (
    *((method, "quick", 0, "") for method in FIRST),
    *((method, "quick", seed, "") for seed in (1, 2) for method in (LIKE, "lora_cl", "cheem")),
    ("full_finetune", "quick", 1, ""),
    *((method, "quick", 0, "") for method in ONCE),
    ("cheem:uniform", "quick", 0, ""),
    (LIKE, "quick", 0, "reversed"),
    ("cheem", "paper", 0, ""),
)
"""Method, preset, seed and order of the runs, most important first."""
GRACE = 60
"""Seconds for a part to stop after an interruption."""
SPEED = 570
"""Seconds of the part `speed` if enough time is available."""
PACKED = (".json", ".jsonl", ".md", ".csv", ".txt", ".log", ".npz")
MEMORY = 0.9
"""Share of an accelerator's memory for all processes together."""
Case = tuple[choice.Name, Precision, bool]
"""An executor, a precision, and whether training is deterministic."""


@dataclasses.dataclass(frozen=True)
class Gpu:
    """Parts, their data and their total time."""

    stream: str = "demo"
    """The stream of `runs`, as for `experiments/mtil.py`."""
    weights: Path | None = None
    """DeiT-Tiny's weights; default: from the hub."""
    base_data: str | None = None
    """Images of the pretraining data, as for `experiments/mtil.py`."""
    choose: str | None = None
    """Names of the stream's tasks, separated by commas, on which settings are chosen; default:
    those of the presets."""
    chosen: Path | None = None
    """The `chosen.json` of an earlier choice, whose settings are used."""
    parallel: int = 1
    """Number of processes of `runs` at a time; each has a share of the accelerator's memory and a
    log in OUT/logs."""
    only: str = ",".join(PARTS)
    """Parts, separated by commas."""
    seconds: float = 1500
    """Time limit of all parts together."""
    miniature: bool = False
    """A test without the hardware: the bundled backbones and two demo tasks."""
    out: Path = Path("runs/gpu")
    """Folder of all outputs; unfinished runs resume."""

    def __post_init__(self) -> None:
        if not self.seconds > GRACE:
            raise ValueError(
                f"--seconds is {self.seconds:g}; expected more than {GRACE}, which stopping may"
                " take"
            )
        if (self.choose or "").endswith(".json"):
            raise ValueError(
                f"--choose is {self.choose}; expected names of tasks: --chosen takes an earlier"
                " choice"
            )
        if self.chosen is not None and self.choose is None:
            raise ValueError(
                "--chosen also needs --choose: without it, methods that it lacks have other epochs"
            )
        if self.parallel < 1:
            raise ValueError(f"--parallel is {self.parallel}; expected 1 process or more")


def main(settings: Gpu) -> None:
    """Run the parts, then pack their records; a failed part does not stop the others."""
    parts = names_in("--only", settings.only, list(PARTS))
    end = time.monotonic() + settings.seconds
    check_folder("--out", settings.out)
    queued = list(commands(settings, parts))  # a missing stream is an error before any run
    (settings.out / "logs").mkdir(parents=True, exist_ok=True)
    ended = list[str]()
    stopped = Event()

    def work(together: Sequence[Part]) -> None:
        for part in together:
            left = end - GRACE - time.monotonic()
            is_alone = settings.parallel == 1 or part.name in PARTS
            log = (
                None
                if is_alone
                else settings.out / "logs" / f"{re.sub(r'[^a-z0-9_]+', '-', part.name)}.log"
            )
            how = "no time was left"
            if left >= 1 and not stopped.is_set():
                how = limited(part.command, left, log, 1 if is_alone else settings.parallel)
            ended.append(f"{part.name}: {how}")
            print(ended[-1], flush=True)

    # timed parts and parts that need all of the memory
    alone = [part for part in queued if part.name in PARTS]
    groups = dict[str, list[Part]]()
    # parts that need a choice of settings run after the one that makes it
    for part in queued[len(alone) :]:
        groups.setdefault(part.choice or part.name, []).append(part)
    try:
        work(alone)
        with ThreadPoolExecutor(settings.parallel) as threads:
            try:
                list(threads.map(work, groups.values()))
            except BaseException:
                stopped.set()  # else every thread would start its next part
                raise
    finally:
        write_atomically(settings.out / "ended.txt", "\n".join(ended) + "\n")
        print(f"records: {pack(settings.out)}")
    if failed := [line for line in ended if "status" in line]:
        raise SystemExit(
            f"error: these parts failed, see above or {settings.out / 'logs'}: {'; '.join(failed)}"
        )


class Part(NamedTuple):
    """A process: its name, its command line, and the folder of the choice of settings that it makes
    or needs, if any."""

    name: str
    command: list[str]
    choice: str = ""


def commands(settings: Gpu, parts: Sequence[str]) -> Iterator[Part]:
    """All processes in order."""
    small = settings.miniature
    out = settings.out
    chosen_earlier = methods_of(settings.chosen)
    if "smoke" in parts:
        yield Part("smoke", [f"{HERE}/gpu.py", "--only", "check", "--out", f"{out}"])
    if "speed" in parts:
        share = (
            []
            if settings.seconds > SPEED + 2 * GRACE
            else ["--seconds", f"{settings.seconds / 2:.0f}"]
        )
        options = [*share, *(["--miniature"] if small else []), "--out", f"{out}/speed"]
        yield Part("speed", ["-m", "experiments.bench.accelerator", *options])
    if "runs" in parts:
        tasks = "shapes,colours" if small else None
        for method, preset, seed, order in QUEUE[:2] if small else QUEUE:
            names = tasks
            like = LIKE if order or method == "cheem:uniform" else method
            chosen = settings.choose
            choice = f"{place_of(out, like, preset)}" if settings.choose else ""
            if like.replace(":", "-") in chosen_earlier:
                chosen = settings.chosen
                choice = ""
            elif (like != method or order) and chosen is not None:
                chosen = f"{choice}/chosen.json"
            if order:
                names = ",".join(reversed(task_names(settings.stream, tasks)))
            given = {
                "--stream": settings.stream,
                "--methods": method,
                "--preset": "demo" if small else preset,
                "--seeds": seed,
                "--weights": settings.weights,
                "--base-data": settings.base_data,
                "--choose": chosen,
                "--backbone": "vit_nano" if small else "deit_tiny",
                "--tasks": names,
                "--run-dir": place_of(out, method, preset, order),
            }
            options = [
                word
                for name, value in given.items()
                if value is not None
                for word in (name, f"{value}")
            ]
            name = ", ".join(filter(None, (method, preset, f"seed {seed}", order)))
            yield Part(name, [f"{HERE}/compare.py", *options], choice)


def methods_of(chosen: Path | None) -> set[str]:
    """The methods with all settings in an earlier choice; ValueError for any other file."""
    found = defaultdict[str, set[str]](set)
    try:
        for row in [] if chosen is None else json.loads(chosen.read_text()):
            found[row["method"]].add(row["setting"])
        return {
            name
            for name, settings in found.items()
            if settings >= grids_of(name.split("-")[0]).keys()
        }
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ValueError(
            f"--chosen is {chosen}; expected the chosen.json of an earlier choice ({error!r})"
        ) from error


def place_of(out: Path, method: str, preset: str, order: str = "") -> Path:
    """The folder of a queued run."""
    return out / "runs" / "-".join(filter(None, (method.replace(":", "-"), preset, order)))


def limited(command: list[str], seconds: float, log: Path | None = None, sharing: int = 1) -> str:
    """Run a script for at most `seconds`, with `sharing` scripts on one accelerator; return how it
    ended."""
    start = time.monotonic()
    share = {"XLA_PYTHON_CLIENT_MEM_FRACTION": f"{MEMORY / sharing:.3f}"} if sharing > 1 else {}
    with contextlib.nullcontext() if log is None else log.open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, *command],
            stdout=output,
            stderr=output and subprocess.STDOUT,
            env=share | os.environ,
        )
    try:
        status = process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)  # a run saves its state
        try:
            process.wait(GRACE / 2)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        return f"interrupted after {time.monotonic() - start:.0f} s"
    return f"{time.monotonic() - start:.0f} s" + (f", status {status}" if status else "")


def check(out: Path) -> None:
    """Compare every executor with the CPU, and two deterministic trainings; write `smoke.json`."""
    same: Case = ("stages", "float32", True)
    cases: list[Case] = [
        *(
            (name, precision, False)
            for precision in LARGEST_DIFFERENCE
            for name in get_args(choice.Name)
        ),
        same,
    ]
    (wanted,) = measure.in_child(trainings, [same], environment={"JAX_PLATFORMS": "cpu"})
    found, (again,) = measure.in_child(trainings, cases), measure.in_child(trainings, [same])
    report = dict[str, Any]()
    wrong = []
    for (name, precision, _), ours in zip(cases[:-1], found, strict=False):
        largest = measure.difference(ours["losses"], np.asarray(wanted["losses"]))
        report[f"{name} {precision}"] = {**ours, "largest_difference": largest}
        message = (
            f"{name}, {precision} on {ours['device']}: largest difference from the CPU"
            f" {largest:.1e}"
        )
        print(message, flush=True)
        wrong += [] if largest <= LARGEST_DIFFERENCE[precision] else [message]
    report["deterministic"] = found[-1]["losses"] == again["losses"]
    write_atomically(out / "smoke.json", json.dumps(report, indent=1) + "\n")
    if wrong or not report["deterministic"]:
        raise ValueError("; ".join(wrong) or "two deterministic trainings have different losses")


def trainings(cases: list[Case]) -> list[dict[str, Any]]:
    """Train every case in this process."""
    return [training(*case) for case in cases]


def training(name: choice.Name, precision: Precision, deterministic: bool) -> dict[str, Any]:
    """Losses of a few steps with every op on this process's device, and their peak memory."""
    pretrained = load_pretrained("vit_nano")
    vit = build(dataclasses.replace(pretrained.config, precision=precision), pretrained.params)
    executor = make_executor(
        vit,
        "mlp_down",
        EngineConfig(name, deterministic=deterministic, steps_per_call=4),
        batch_size=16,
    )
    supernet = Supernet(jax.random.key(1), dense_experts(executor.base_pool), 4, OpSettings(rank=4))
    ops = ["reuse:0", "adapt:0", "skip", "new", "adapt:0", "reuse:0"]
    architectures = [from_strings(ops[turn:] + ops[:turn]) for turn in (0, 1, 2, 3)] * 2
    images = measure.random_images(16, pretrained.config)
    labels = np.arange(16, dtype=np.int32) % 4
    steps = [make_step(executor, images, labels) for _ in architectures]
    _, losses = train_steps(
        executor, supernet, supernet.init(), architectures, steps, rates=[1e-3] * len(architectures)
    )
    device = jax.devices()[0]
    memory = (device.memory_stats() or {}).get("peak_bytes_in_use")
    return {
        "device": device.device_kind,
        "peak_memory_bytes": memory,
        "losses": [float(loss) for loss in losses],
    }


def pack(out: Path) -> Path:
    """Pack the folder's records of at most 1 MB, without checkpoints and TensorBoard files."""
    file = out / "records.tar.gz"
    with tarfile.open(file, "w:gz") as archive:
        for found in sorted(out.rglob("*")):
            is_small = found.is_file() and found.stat().st_size < 2**20
            if is_small and found.suffix in PACKED and "checkpoints" not in found.parts:
                archive.add(found, found.relative_to(out))
    return file


if __name__ == "__main__":
    if sys.argv[1:3] == ["--only", "check"]:  # the part `smoke`, in a separate process
        check(Path(sys.argv[4]))
    else:
        parsed = parse(Gpu, description=__doc__)
        run_command(main, parsed, parsed.out)
