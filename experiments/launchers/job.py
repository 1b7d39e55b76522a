"""What every launcher knows: its settings, the runs of a study, and what is done in a job."""

import collections
import contextlib
import dataclasses
import os
import shlex
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from time import sleep
from types import ModuleType
from typing import Annotated, Any, Literal, NamedTuple

import filelock
import tyro

from cheem_jax.cli.main import run_command
from cheem_jax.report.status import read_object
from cheem_jax.run.progress import Progress

State = Literal["finished", "running", "queued", "elsewhere", "failed"]
SECONDS_TO_BE_TAKEN_BACK = 600
"""SLURM queues a preempted job again only if it finds it still there."""
SECONDS_BETWEEN_LOOKS = {"local": 0.5, "slurm": 15.0}
"""At jobs that are waited for."""


@dataclasses.dataclass(frozen=True)
class LauncherConfig:
    """Where the runs of a study work."""

    kind: Annotated[Literal["none", "local", "slurm"], tyro.conf.arg(name="launcher", prefix_name=False)] = "none"
    """none: in this process, one after another; local: each in a separate process; slurm: each as a job of SLURM
    (both: extra `cluster`)."""
    jobs: int | None = None
    """Runs at work at a time; default: local 1, slurm all."""
    gpus: int | None = None
    """GPUs of a run on each of its nodes; local: runs at work share none; default: local what there is, slurm none."""
    wait: bool = False
    """slurm: stay until all jobs have ended, as local always does."""
    minutes: int = 1440
    """slurm: time limit of a job, which then stops, queues again and continues."""
    requeues: int = 10
    """slurm: how often it may do so."""
    nodes: int = 1
    """slurm: nodes of one run, with one process on each."""
    cpus: int | None = None
    """slurm: CPU cores of a run on each node; default, here and below: the cluster's."""
    memory_gb: int | None = None
    """slurm: main memory of a run on each node."""
    partition: str | None = None
    """slurm: where jobs queue."""
    account: str | None = None
    """slurm: who is charged."""
    qos: str | None = None
    """slurm: quality of service."""
    parameters: tuple[str, ...] = ()
    """slurm: further options of sbatch, each KEY=VALUE, or KEY where it takes no value."""
    setup: tuple[str, ...] = ()
    """slurm: lines of shell before the run, such as 'module load cuda'."""


class Run(NamedTuple):
    """A run of a study: its name, its folder, and what `mtil.py` is told."""

    name: str
    directory: Path
    arguments: list[str]


class Sweep(NamedTuple):
    """Runs to be finished; `after_each` is called when some more are."""

    launcher: LauncherConfig
    logs: Path
    runs: Sequence[Run]
    progress: Progress
    after_each: Callable[[], object]


class Job:
    """What submitit does in a job: one run, or the rest of it."""

    def __init__(self, arguments: list[str]):
        self.arguments = arguments

    def __call__(self) -> None:
        """Ends as `mtil.py` does; asked by submitit's signal, it stops after the running step and queues again."""
        queue_again, asked = signal.getsignal(signal.SIGUSR2), False

        def ask(number: int, frame: object) -> None:
            nonlocal asked
            asked = True
            signal.raise_signal(signal.SIGTERM)

        def end(number: int, frame: object) -> None:  # until learning, which has a handler of its own
            raise SystemExit(128 + number)

        signal.signal(signal.SIGTERM, end)
        signal.signal(signal.SIGUSR2, ask)
        try:
            import mtil  # takes seconds, in which signals count already

            settings = mtil.read_arguments(self.arguments)
            run_command(mtil.main, settings, settings.run_dir)
        except SystemExit as stop:
            if stop.code != 128 + signal.SIGTERM:
                raise
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            signal.signal(signal.SIGUSR2, queue_again)
            if asked:
                signal.raise_signal(signal.SIGUSR2)  # ends the process, but for those of a run's further nodes
                return
            if os.environ.get("SUBMITIT_EXECUTOR") == "slurm":
                sleep(SECONDS_TO_BE_TAKEN_BACK)
            raise

    def checkpoint(self) -> Any:
        """The same again: the run goes on from what it has kept."""
        return load_submitit().helpers.DelayedSubmission(self)


def results_of(directory: Path) -> dict[str, Any] | None:
    """What a finished run measured; None while tasks are missing."""
    results, tasks = read_object(directory / "results.json"), read_object(directory / "config.json").get("tasks")
    return results if tasks and len(results.get("tasks", ())) == len(tasks) else None


def watch(sweep: Sweep, look: Callable[[], dict[str, State]]) -> dict[str, State]:
    """Looks again and again until nothing works or waits; says what has changed."""
    said = collections.Counter[str]()
    while True:
        states = look()
        counts = collections.Counter[str](states.values())
        if counts != said:
            sweep.progress.say(f"{len(states)} runs: {', '.join(f'{num} {state}' for state, num in counts.items())}")
            if counts["finished"] > said["finished"]:
                sweep.after_each()
            said = counts
        if not counts["running"] + counts["queued"]:
            return states
        sleep(SECONDS_BETWEEN_LOOKS[sweep.launcher.kind])


def last_error(logs: Path, job: str) -> str:
    """The last line of a job's log of errors, and where it is."""
    file = logs / f"{job}_0_log.err"
    lines = file.read_text(errors="replace").split("\n")[-20:] if file.exists() else []
    lines = [line.strip() for line in lines if line.strip() and not line.startswith("INFO:")]
    told = [line for line in lines if line.startswith("error:")] or lines
    return f"{told[-1] if told else 'it was ended without a word'} ({file})"


@contextlib.contextmanager
def alone(logs: Path) -> Iterator[None]:
    """Two commands at once would start a run twice."""
    try:
        held = filelock.FileLock(logs / ".lock", fallback_to_soft=False).acquire(timeout=0)
    except filelock.Timeout:
        raise ValueError(f"another command starts jobs in {str(logs.parent)!r}; wait for it") from None
    with held:
        yield


def python_command(*environment: str) -> str:
    """This Python, as a command that finds the experiments."""
    paths = [str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    return shlex.join(["env", *environment, f"PYTHONPATH={os.pathsep.join(paths)}", sys.executable])


def load_submitit() -> ModuleType:
    try:
        import submitit
    except ImportError as error:
        raise ValueError(f"jobs need submitit ({error}); pip install 'cheem_jax[cluster]'") from error
    return submitit
