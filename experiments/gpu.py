"""Checks, speed and runs on an accelerator within a time limit.

    python experiments/gpu.py --stream FOLDER --weights FILE --seconds 1500 --out runs/gpu
    python experiments/gpu.py --miniature --out runs/gpu-miniature

There are three parts, in this order. `smoke` compares the training of every executor with the CPU,
and two deterministic trainings with each other. `speed` is `bench/accelerator.py`: steps, scoring
and whole tasks, next to PyTorch if it is installed. `runs` calls `compare.py` for each method, the
most important method first. `--parallel` starts more than one run at a time, because a small
backbone uses little of a large accelerator; without NVIDIA's multi-process service they take turns.
A part that exceeds its time is interrupted, and the next call of this script resumes its run.
OUT/records.tar.gz has all numbers and no checkpoint. The miniature takes minutes on any machine;
its numbers are meaningless.
"""

import contextlib
import dataclasses
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any, NamedTuple, get_args

import jax
import numpy as np
from bench import measure
from charts import check_folder, names_in
from study import task_names

from cheem_jax.backbone.params import build
from cheem_jax.backbone.weights import load_pretrained
from cheem_jax.cheem.training import make_step
from cheem_jax.cli.arguments import parse
from cheem_jax.cli.running import run_command
from cheem_jax.core.architecture import from_strings
from cheem_jax.core.atomic import write_atomically
from cheem_jax.core.settings import Precision
from cheem_jax.engine import choice
from cheem_jax.engine.choice import EngineConfig, make_executor

PARTS = ("smoke", "speed", "runs")
CHECK = "check"
"""First argument of the process of the part `smoke`, followed by its folder."""
HERE = Path(__file__).parent
LARGEST_DIFFERENCE: dict[Precision, float] = {"float32": 1e-2, "bfloat16": 5e-2}
"""Largest accepted difference of a loss from the CPU's loss in float32, divided by the largest
loss."""
FIRST = (
    "frozen_linear",
    "lora_cl",
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
SEARCH = "cheem:elimination"
"""The search of the preset `quick_plus`."""
RISING = "lora_cl:warm"
"""LoRA-CL with the schedule of this search."""
QUEUE = (
    *((method, "quick", 0, "") for method in FIRST),
    (SEARCH, "quick", 0, ""),
    (RISING, "quick", 0, ""),
    *(
        (method, "quick", seed, "")
        for seed in (1, 2)
        for method in (SEARCH, RISING, "lora_cl", "cheem")
    ),
    ("full_finetune", "quick", 1, ""),
    *((method, "quick", 0, "") for method in ONCE),
    ("cheem:uniform", "quick", 0, ""),
    (SEARCH, "quick", 0, "reversed"),
    ("cheem", "paper", 0, ""),
)
"""Method, preset, seed and order of each run, the most important run first."""
GRACE = 60
"""Seconds that a part has for stopping after an interruption."""
SPEED = 570
"""Seconds of the part `speed` if there is enough time."""
PACKED = (".json", ".jsonl", ".md", ".csv", ".txt", ".log", ".npz")
MEMORY = 0.9
"""Share of the accelerator's memory that all processes use together."""
Case = tuple[choice.Name, Precision, bool]
"""An executor, a precision, and whether training is deterministic."""


@dataclasses.dataclass(frozen=True)
class Gpu:
    """The selected parts, their data and their total time."""

    stream: str = "demo"
    """Stream of the part `runs`, as for `experiments/mtil.py`."""
    weights: Path | None = None
    """Weights file of DeiT-Tiny; default: download it from the hub."""
    base_data: str | None = None
    """Images of the pretraining data, as for `experiments/mtil.py`."""
    choose: str | None = None
    """Names of the stream's tasks, separated by commas, on whose validation images settings are
    chosen, or the `chosen.json` of an earlier choice; default: use the settings of the presets, and
    leave out `cheem:elimination` and `lora_cl:warm`, whose epochs and ranks would be unequal."""
    parallel: int = 1
    """Number of concurrent processes of the part `runs`; each has a share of the accelerator's
    memory and a log in OUT/logs."""
    only: str = ",".join(PARTS)
    """Names of parts, separated by commas."""
    seconds: float = 1500
    """Time limit in seconds of all parts together."""
    miniature: bool = False
    """Test without the hardware: use the bundled backbones and two demo tasks."""
    out: Path = Path("runs/gpu")
    """Folder of all outputs; unfinished runs in it resume."""

    def __post_init__(self) -> None:
        if not self.seconds > GRACE:
            raise ValueError(
                f"--seconds is {self.seconds:g}; expected more than {GRACE}, which stopping may"
                " take"
            )
        if self.parallel < 1:
            raise ValueError(f"--parallel is {self.parallel}; expected 1 process or more")


def main(settings: Gpu) -> None:
    """Run the parts, then pack their records; a failed part does not stop the others."""
    names = names_in("--only", settings.only, list(PARTS))
    end = time.monotonic() + settings.seconds
    check_folder("--out", settings.out)
    parts = list(commands(settings, names))  # a missing stream is an error before any run
    logs = settings.out / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    ended = list[str]()
    stopped = Event()

    def work(together: Sequence[Part]) -> None:
        for part in together:
            seconds = end - GRACE - time.monotonic()
            sharing = 1 if part.name in PARTS else settings.parallel
            file = logs / f"{re.sub(r'[^a-z0-9_]+', '-', part.name)}.log"
            how = "no time was left"
            if seconds >= 1 and not stopped.is_set():
                how = limited(part.command, seconds, file if sharing > 1 else None, sharing)
            ended.append(f"{part.name}: {how}")
            print(ended[-1], flush=True)

    # parts that need all of the memory or are timed run alone; parts with the same choice of
    # settings run one after another, because the first one makes the choice
    groups = dict[str, list[Part]]()
    for part in parts:
        groups.setdefault("" if part.name in PARTS else part.choice or part.name, []).append(part)
    try:
        work(groups.pop("", []))
        with ThreadPoolExecutor(settings.parallel) as threads:
            try:
                list(threads.map(work, groups.values()))
            except BaseException:
                stopped.set()  # otherwise every thread would start its next part
                raise
    finally:
        write_atomically(settings.out / "ended.txt", "\n".join(ended) + "\n")
        print(f"records: {pack(settings.out)}")
    if failed := [line for line in ended if "status" in line]:
        raise SystemExit(
            f"error: these parts failed, see above or {settings.out / 'logs'}: {'; '.join(failed)}"
        )


class Part(NamedTuple):
    """A process: its name, its command line, and the folder of the run whose choice of settings it
    makes or uses, if any."""

    name: str
    command: list[str]
    choice: str = ""


def commands(settings: Gpu, names: Sequence[str]) -> Iterator[Part]:
    """Yield all processes in their order."""
    small = settings.miniature
    out = settings.out
    if "smoke" in names:
        yield Part("smoke", [f"{HERE}/gpu.py", CHECK, f"{out}"])
    if "speed" in names:
        options = ["--miniature"] if small else []
        if settings.seconds <= SPEED + 2 * GRACE:
            options += ["--seconds", f"{settings.seconds / 2:.0f}"]
        command = ["-m", "experiments.bench.accelerator", "--out", f"{out}/speed"]
        yield Part("speed", [*command, *options])
    if "runs" not in names:
        return
    tasks = "shapes,colours" if small else None
    backwards = ",".join(reversed(task_names(settings.stream, tasks)))  # reads the stream
    for method, preset, seed, order in QUEUE[:2] if small else QUEUE:
        if settings.choose is None and method in (SEARCH, RISING):
            continue
        # variants have the settings that were chosen for their method
        like = method.partition(":")[0]
        choice = place_of(out, like, preset)
        chosen = settings.choose
        is_choosing = chosen is not None and not chosen.endswith(".json")
        if is_choosing and (like != method or order):
            chosen = choice / "chosen.json"
        options = {
            "--stream": settings.stream,
            "--methods": method,
            "--preset": "demo" if small else preset,
            "--seeds": seed,
            "--weights": settings.weights,
            "--base-data": settings.base_data,
            "--choose": chosen,
            "--backbone": "vit_nano" if small else "deit_tiny",
            "--tasks": backwards if order else tasks,
            "--run-dir": place_of(out, method, preset, order),
        }
        words = [f"{word}" for pair in options.items() if pair[1] is not None for word in pair]
        name = ", ".join(filter(None, (method, preset, f"seed {seed}", order)))
        command = [f"{HERE}/compare.py", *words]
        yield Part(name, command, f"{choice}" if is_choosing else "")


def place_of(out: Path, method: str, preset: str, order: str = "") -> Path:
    """Return the folder of a queued run."""
    return out / "runs" / "-".join(filter(None, (method.replace(":", "-"), preset, order)))


def limited(command: list[str], seconds: float, log: Path | None = None, sharing: int = 1) -> str:
    """Run a script for at most `seconds` while `sharing` scripts share one accelerator; describe
    how it ended."""
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
        process.send_signal(signal.SIGINT)  # a run saves its state after this signal
        try:
            process.wait(GRACE / 2)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        return f"interrupted after {time.monotonic() - start:.0f} s"
    return f"{time.monotonic() - start:.0f} s" + (f", status {status}" if status else "")


def check(out: Path) -> None:
    """Compare the results of every executor with those of the CPU, and two deterministic training
    runs with each other; write `smoke.json`."""
    same: Case = ("stages", "float32", True)
    cases: list[Case] = [
        *(
            (name, precision, False)
            for precision in LARGEST_DIFFERENCE
            for name in get_args(choice.Name)
        ),
        same,
    ]
    (on_cpu,) = measure.in_child(trainings, [same], environment={"JAX_PLATFORMS": "cpu"})
    results = measure.in_child(trainings, cases)
    (again,) = measure.in_child(trainings, [same])
    report = dict[str, Any]()
    wrong = []
    for (name, precision, _), result in zip(cases[:-1], results, strict=False):
        largest = measure.difference(result["losses"], np.asarray(on_cpu["losses"]))
        report[f"{name} {precision}"] = {**result, "largest_difference": largest}
        message = (
            f"{name}, {precision} on {result['device']}: largest difference from the CPU"
            f" {largest:.1e}"
        )
        print(message, flush=True)
        wrong += [] if largest <= LARGEST_DIFFERENCE[precision] else [message]
    report["deterministic"] = results[-1]["losses"] == again["losses"]
    write_atomically(out / "smoke.json", json.dumps(report, indent=1) + "\n")
    if wrong or not report["deterministic"]:
        raise ValueError("; ".join(wrong) or "two deterministic trainings have different losses")


def trainings(cases: list[Case]) -> list[dict[str, Any]]:
    """Run the training of every case in this process."""
    return [training(*case) for case in cases]


def training(name: choice.Name, precision: Precision, deterministic: bool) -> dict[str, Any]:
    """Train for a few steps with every op on this process's device; return the losses and the peak
    memory."""
    pretrained = load_pretrained("vit_nano")
    vit = build(dataclasses.replace(pretrained.config, precision=precision), pretrained.params)
    executor = make_executor(
        vit,
        "mlp_down",
        EngineConfig(name, deterministic=deterministic, steps_per_call=4),
        batch_size=16,
    )
    ops = ["reuse:0", "adapt:0", "skip", "new", "adapt:0", "reuse:0"]
    architectures = [from_strings(ops[turn:] + ops[:turn]) for turn in (0, 3)] * 4
    images = measure.random_images(16, pretrained.config)
    step = make_step(executor, images, np.arange(16, dtype=np.int32) % 4)
    calls = measure.new_task(executor, 4, 4).train(architectures, itertools.repeat(step))
    return {
        "device": jax.devices()[0].device_kind,
        "peak_memory_bytes": measure.device_memory().get("peak_bytes_in_use"),
        "losses": [float(loss) for losses in calls for loss in losses],
    }


def pack(out: Path) -> Path:
    """Pack the records of at most 1 MB in a folder, without checkpoints and TensorBoard files."""
    file = out / "records.tar.gz"
    with tarfile.open(file, "w:gz") as archive:
        for path in sorted(out.rglob("*")):
            is_small = path.is_file() and path.stat().st_size < 2**20
            if is_small and path.suffix in PACKED and "checkpoints" not in path.parts:
                archive.add(path, path.relative_to(out))
    return file


if __name__ == "__main__":
    if sys.argv[1:2] == [CHECK]:  # this is the separate process of the part `smoke`
        check(Path(sys.argv[2]))
    else:
        parsed = parse(Gpu, description=__doc__)
        run_command(main, parsed, parsed.out)
