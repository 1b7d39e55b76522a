"""Functions for the child processes of the nursery: small runs under faults, and the demo.

Arguments and results are plain JSON.
"""

import contextlib
import io
import json
import os
import random
import resource
import shutil
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import matplotlib.pyplot  # noqa: F401  once for all children
import numpy as np
import small
from rich.console import Console
from scenarios import SCENARIOS, Scenario
from shim import Fault, armed, clock_shifted

from cheem_jax.backbone.weights import Pretrained
from cheem_jax.cli import demo
from cheem_jax.cli.running import run_command
from cheem_jax.continual import RunConfig, run_stream
from cheem_jax.run.checkpoint import load_task, saved_tasks
from cheem_jax.run.progress import Progress
from cheem_jax.run.record import read

CONFIG = RunConfig(small.QUICK, "quick", 0, None)
TIMES = (
    "seconds",
    "seconds_total",
    "checkpoint_seconds",
    "compile_seconds",
    "peak_memory_bytes",
    "compile",
)
TIMES += ("hits", "misses", "evictions")
"""Fields that depend on the clock, on the memory of the process or on its compiled functions."""
METHODS = ("cheem", "frozen_linear")
ERRORS = ("ENOSPC", "EIO", "EROFS", "EDQUOT")


class Phases(Progress):
    """Progress that writes each phase into a file, for the process that sends signals.

    `on_begin(phase, task)` is called as each phase begins. `die` is the name of a phase and a
    number of reports, after which (or at the end of the phase) the process kills itself.
    """

    def __init__(
        self,
        file: Path | None,
        on_begin: Callable[[str, str], None] | None = None,
        die: tuple[str, int] | None = None,
    ):
        super().__init__(Console(file=io.StringIO()))
        self.on_begin = on_begin
        self.die = die
        self._open = list[str]()
        self._file = None if file is None else os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._tell("starting")

    @contextlib.contextmanager
    def phase(self, phase: str, *, task: str, total: int, unit: str = "images") -> Iterator[Any]:
        self._open.append(phase)
        self._tell(phase)
        if self.on_begin is not None:
            self.on_begin(phase, task)
        remaining = self.die[1] if self.die is not None and self.die[0] == phase else -1
        with super().phase(phase, task=task, total=total, unit=unit) as advance:

            def reported(num_images: int, note: str = "") -> None:
                nonlocal remaining
                advance(num_images, note)
                remaining -= 1
                if remaining == 0:
                    os.kill(os.getpid(), signal.SIGKILL)

            yield reported
        if remaining > 0:
            os.kill(os.getpid(), signal.SIGKILL)
        self._open.pop()
        # after the last phase of learning, and after every measurement, the disk is written
        last = "saving" if phase in ("finetune", "means", "evaluate") else phase
        self._tell(self._open[-1] if self._open else last)

    def _tell(self, phase: str) -> None:
        if self._file is not None:
            os.write(self._file, f"{phase}\n".encode())


def small_run(
    directory: str,
    weights: str,
    phases: str | None = None,
    fault: dict[str, Any] | None = None,
    log: str | None = None,
    save_every: float | None = None,
    clock_back: int | None = None,
    memory: tuple[int, int] | None = None,
    die: tuple[str, int] | None = None,
    command: bool = False,
) -> int:
    """Learn the stream of two small tasks, and return the counted number of file operations.

    `clock_back` sets the clock back by this number of seconds as the second task begins.
    `memory` is the number of a phase and the number of bytes that can still be allocated when it
    begins. `command` runs the stream as the `cheem` command does.
    """
    quick_to_compile()
    count = 0

    def on_begin(phase: str, task: str) -> None:
        nonlocal count
        count += 1
        if clock_back is not None and (phase, task) == ("similarity", "task1"):
            shifts.enter_context(clock_shifted(-clock_back))
        if memory is not None and count == memory[0]:
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            limit = pages * resource.getpagesize() + memory[1]
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))

    progress = Phases(Path(phases) if phases else None, on_begin, die)
    with contextlib.ExitStack() as shifts:
        struck = None
        if fault is not None or log is not None:
            struck = shifts.enter_context(
                armed(Path(directory), Fault(**fault or {}), Path(log) if log else None)
            )
        if command:
            run_command(
                lambda run: _learn(run, Path(weights), progress, save_every),
                Path(directory),
                Path(directory),
            )
        else:
            _learn(Path(directory), Path(weights), progress, save_every)
    return 0 if struck is None else struck.count


def demo_run(
    directory: str, phases: str, save_every: float | None = None, die: tuple[str, int] | None = None
) -> None:
    """`cheem demo`."""
    settings = demo.Demo(run_dir=Path(directory), save_every=save_every)
    with mock.patch.object(demo, "Progress", lambda: Phases(Path(phases), die=die)):
        run_command(demo.learn_demo, settings, Path(directory))


def quick_to_compile() -> None:
    """Compile without optimizations, in runs with and without faults alike."""
    jax.config.update("jax_disable_most_optimizations", True)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def _learn(
    directory: Path, weights: Path, progress: Progress, save_every: float | None = None
) -> None:
    run_stream(
        small.stream(2), _pretrained(weights), CONFIG, directory, progress, save_every=save_every
    )


def _pretrained(file: Path) -> Pretrained:
    """Return the weights of `small`, which are sampled once for all children."""
    if not file.exists():
        result = small.pretrained()
        part = file.with_suffix(f".{os.getpid()}.npz")
        arrays: dict[str, Any] = {name: np.asarray(value) for name, value in result.params.items()}
        np.savez(part, **arrays)
        os.replace(part, file)
    with np.load(file) as arrays:
        return Pretrained(small.CONFIG, dict(arrays), "random", "seed 0", {})


def outcome(directory: Path) -> dict[str, Any]:
    """Return the results of a run, without times, and the content hash of every checkpoint."""
    results = directory / "results.json"
    return {
        "contents": {method: contents(directory / "checkpoints" / method) for method in METHODS},
        "results": without_times(json.loads(results.read_text())) if results.exists() else None,
    }


def contents(root: Path) -> list[str]:
    """Read every saved task, and return its content hash."""
    result = []
    for directory in saved_tasks(root):
        load_task(directory)
        result.append(json.loads((directory / "manifest.json").read_text())["content_sha256"])
    return result


def without_times(value: Any) -> Any:
    """Return the results without the fields that differ between equal runs."""
    if isinstance(value, dict):
        return {key: without_times(item) for key, item in value.items() if key not in TIMES}
    return [without_times(item) for item in value] if isinstance(value, list) else value


# ---- faults of the storage, many in one process


def storage_faults(scenario: str, folder: str, variants: list[dict[str, Any]]) -> dict[str, Any]:
    """Strike every file operation of a scenario with one fault, by turns of each kind."""
    return _Trial(SCENARIOS[scenario], Path(folder)).all(variants)


class _Trial:
    """One scenario, its states before and after, and its errors."""

    def __init__(self, scenario: Scenario, folder: Path):
        self.scenario = scenario
        self.template = folder / "template"
        self.work = folder / "work"
        self.template.mkdir(parents=True)
        scenario.prepare(self.template)
        self.old = scenario.state(self.template)
        self.unchanged = _bytes_of(self.template, scenario.replaced)
        self.bad = []
        self.kinds = Counter[str]()
        self.tried = 0
        self._begin()
        with armed(self.work, Fault()) as struck:
            scenario.act(self.work)
        self.new = scenario.state(self.work)
        self.count = struck.count

    def all(self, variants: list[dict[str, Any]]) -> dict[str, Any]:
        for number in range(self.count):
            fault = Fault(**{**variants[number % len(variants)], "at": number + 1})
            try:
                self._one(fault)
            except Exception as error:
                self.bad.append(f"{fault}: {type(error).__name__}: {error}"[:400])
        return {"tried": self.tried, "bad": self.bad, "kinds": dict(self.kinds)}

    def _begin(self) -> None:
        shutil.rmtree(self.work, ignore_errors=True)
        shutil.copytree(self.template, self.work)

    def _one(self, fault: Fault) -> None:
        self._begin()
        raised: BaseException | None = None
        with armed(self.work, fault) as struck:
            try:
                self.scenario.act(self.work)
            except BaseException as error:
                raised = error
        if not struck.reached:
            return  # Orbax divides a checkpoint into fewer files this time
        self.tried += 1
        self.kinds[type(raised).__name__ if raised else "unnoticed"] += 1
        result = self.scenario.state(self.work)
        wrong = []
        if raised is not None and not is_reported(raised):
            wrong.append(f"raised {type(raised).__name__}: {raised}")
        if raised is None and result != self.new:
            wrong.append(f"reported success, left {result}")
        if result not in (self.old, self.new):
            wrong.append(f"left {result}")
        files = _bytes_of(self.work, self.scenario.replaced)
        if files | self.unchanged != files:
            wrong.append("changed earlier files")
        if result == self.old or self.scenario.repeats:
            self.scenario.act(self.work)
            if (again := self.scenario.state(self.work)) != self.new:
                wrong.append(f"then left {again}")
        if wrong:
            self.bad.append(f"{fault}: {'; '.join(wrong)}"[:400])


def is_reported(error: BaseException) -> bool:
    """Whether the command line prints this error as one line with a message."""
    if isinstance(error, jax.errors.JaxRuntimeError):
        return "RESOURCE_EXHAUSTED" in str(error)
    return isinstance(error, (ValueError, OSError, FloatingPointError, MemoryError)) and bool(
        str(error).strip()
    )


def _bytes_of(directory: Path, without: str) -> dict[str, bytes]:
    result = {}
    # failed threads of Orbax still clear up: os.walk skips folders that no longer exist
    for folder, _, names in os.walk(directory):
        for file in (Path(folder, name) for name in names):
            if not (without and file.match(without)):
                with contextlib.suppress(FileNotFoundError):
                    result[file.relative_to(directory).as_posix()] = file.read_bytes()
    return result


def stream_faults(
    folder: str, weights: str, expected: dict[str, Any], operations: int, seed: int, num: int
) -> dict[str, Any]:
    """Run the small stream `num` times, each with one random fault, and then again without."""
    quick_to_compile()
    rng = random.Random(seed)
    bad = []
    kinds = Counter[str]()
    tried = 0
    for number in range(num):
        directory = Path(folder) / f"{seed}-{number}"
        fault = Fault(
            rng.randint(1, operations), rng.choice(ERRORS), rng.random() < 0.5, rng.random() < 0.5
        )
        raised: BaseException | None = None
        with armed(directory, fault) as struck:
            try:
                _learn(directory, Path(weights), Phases(None), 0.0)
            except BaseException as error:
                raised = error
        if not struck.reached:
            continue
        tried += 1
        kinds[type(raised).__name__ if raised else "unnoticed"] += 1
        wrong = (
            []
            if raised is None or is_reported(raised)
            else [f"raised {type(raised).__name__}: {raised}"]
        )
        raised = None  # its frames keep the lock
        try:
            _learn(directory, Path(weights), Phases(None))
            if (result := outcome(directory)) != expected:
                wrong.append(f"then ended with {_differing(result, expected)}")
        except Exception as error:
            wrong.append(f"then {type(error).__name__}: {error}")
        if wrong:
            bad.append(f"{fault}: {'; '.join(wrong)}"[:600])
        else:
            shutil.rmtree(directory)
    return {"tried": tried, "bad": bad, "kinds": dict(kinds)}


def _differing(result: Any, expected: Any) -> str:
    if isinstance(result, dict) and isinstance(expected, dict):
        keys = [key for key in {*result, *expected} if result.get(key) != expected.get(key)]
        return "; ".join(f"{key}: {_differing(result.get(key), expected.get(key))}" for key in keys)
    return f"{str(result)[:100]} instead of {str(expected)[:100]}"


def read_only(directory: str, weights: str) -> dict[str, Any]:
    """Run the command in a folder that cannot be written, and return its status and output."""
    quick_to_compile()
    said = io.StringIO()
    status = None
    with (
        armed(Path(directory), Fault(1, "EROFS", persistent=True)),
        contextlib.redirect_stderr(said),
    ):
        try:
            run_command(lambda run: _learn(run, Path(weights), Phases(None)), Path(directory))
        except SystemExit as stop:
            status = stop.code
    return {"status": status, "said": said.getvalue(), "exists": Path(directory).exists()}


def unreadable(directory: str) -> dict[str, Any]:
    """Load a checkpoint once for each of its reads, with an error at this read."""
    place = Path(directory)
    accepted = []
    expected, _ = load_task(place)
    with armed(place, Fault(reads=True)) as counted:
        load_task(place)
    for at in range(1, counted.count + 1):
        with armed(place, Fault(at, "EIO", reads=True)):
            try:
                arrays, _ = load_task(place)
            except (ValueError, OSError) as error:
                if place.name not in str(error):
                    accepted.append(f"read {at}: {error}")
                continue
        # a reader that tries again can succeed, but never with other numbers
        same = jax.tree.map(np.array_equal, arrays, expected)
        if not all(jax.tree.leaves(same)):
            accepted.append(f"read {at}: other arrays")
    return {"tried": counted.count, "bad": accepted, "kinds": {}}


# ---- corrupted records of a finished run


def corrupted_records(source: str, folder: str, weights: str, num: int) -> dict[str, Any]:
    """Change bytes or lines of metrics.jsonl or config.json of a finished run, and resume it."""
    quick_to_compile()
    rng = random.Random(0)
    bad = []
    directory = Path(folder) / "corrupted"
    shutil.copytree(source, directory)
    for number in range(num):
        name = ("metrics.jsonl", "config.json")[number % 4 == 3]
        whole = (directory / name).read_bytes()
        corrupted, change = _corrupted(whole, rng)
        if corrupted == whole:
            continue
        (directory / name).write_bytes(corrupted)
        try:
            _learn(directory, Path(weights), Phases(None))
            if not _is_restored(directory, Path(source)):
                bad.append(f"{name}: {change} accepted")
        except ValueError as error:
            if name not in str(error) and str(directory) not in str(error):
                bad.append(f"{name}: {change} refused without naming it: {error}"[:300])
        except Exception as error:
            bad.append(f"{name}: {change} ended in {type(error).__name__}: {error}"[:300])
        shutil.rmtree(directory)
        shutil.copytree(source, directory)
    return {"tried": num, "bad": bad}


def _is_restored(directory: Path, source: Path) -> bool:
    """Whether the run is as before: a lost last line is measured again, a repeated one dropped."""
    configs = [json.loads((place / "config.json").read_text()) for place in (directory, source)]
    records = [
        without_times([{**entry, "time": 0} for entry in read(place)])
        for place in (directory, source)
    ]
    return (
        configs[0] == configs[1]
        and records[0] == records[1]
        and outcome(directory) == outcome(source)
    )


def _corrupted(whole: bytes, rng: random.Random) -> tuple[bytes, str]:
    kind = rng.choice(("digit", "bit", "line lost", "line twice", "emptied"))
    lines = whole.splitlines(keepends=True)
    if kind == "digit":
        places = [place for place, byte in enumerate(whole) if chr(byte).isdigit()]
        place = rng.choice(places)
        other = str((int(chr(whole[place])) + 1 + rng.randrange(9)) % 10).encode()
        return (
            whole[:place] + other + whole[place + 1 :],
            f"digit {whole[place : place + 1]!r} at {place} as {other!r}",
        )
    if kind == "bit":
        # not in the last newline: a torn last line is repaired
        place = rng.randrange(len(whole) - 1)
        return (
            whole[:place] + bytes([whole[place] ^ 1 << rng.randrange(8)]) + whole[place + 1 :],
            f"bit at {place}",
        )
    if kind == "emptied":
        return b"", "emptied"
    number = rng.randrange(1, len(lines) - 1)
    changed = (
        lines[:number] + ([] if kind == "line lost" else [lines[number]] * 2) + lines[number + 1 :]
    )
    return b"".join(changed), f"{kind}, number {number}"
