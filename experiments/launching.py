"""Runs of a study as jobs: processes of this machine, or jobs of SLURM, through submitit.

A job is one run of `python experiments/mtil.py`. `RUN_DIR/jobs` has scripts, logs and the IDs of
SLURM's jobs. Repeating a command submits the runs that are neither finished nor running.
"""

import collections
import contextlib
import dataclasses
import io
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from time import sleep
from types import ModuleType
from typing import Annotated, Any, Literal, NamedTuple

import filelock
import tyro

from cheem_jax.cli.running import run_command
from cheem_jax.core.atomic import write_atomically
from cheem_jax.core.interruption import stop_requests
from cheem_jax.report.status import read_object, read_owner
from cheem_jax.report.table import NONE, Grid
from cheem_jax.run.progress import Progress
from cheem_jax.run.results import read_results

State = Literal["finished", "running", "queued", "elsewhere", "failed"]
SECONDS_TO_BE_TAKEN_BACK = 600
"""Time in which SLURM queues a preempted job again; it does so only while the job exists."""
SECONDS_BETWEEN_LOOKS = {"local": 0.5, "slurm": 15.0}
"""Interval of polling jobs."""


@dataclasses.dataclass(frozen=True)
class LauncherConfig:
    """Execution of the runs of a study."""

    kind: Annotated[
        Literal["none", "local", "slurm"], tyro.conf.arg(name="launcher", prefix_name=False)
    ] = "none"
    """none: in this process, one after another; local: each in a separate process; slurm: each as a
    job of SLURM (both: extra `cluster`)."""
    jobs: int | None = None
    """Number of runs at a time; default: local 1, slurm all."""
    gpus: int | None = None
    """GPUs of a run on each of its nodes; local: concurrent runs share none; default: local all,
    slurm none."""
    wait: bool = False
    """slurm: wait until all jobs have ended, as local always does."""
    minutes: int = 1440
    """slurm: time limit of a job, which then stops, queues again and resumes."""
    requeues: int = 10
    """slurm: maximum number of such restarts."""
    nodes: int = 1
    """slurm: nodes of one run, with one process on each."""
    cpus: int | None = None
    """slurm: CPU cores of a run on each node; default, here and below: the cluster's."""
    memory_gb: int | None = None
    """slurm: main memory of a run on each node."""
    partition: str | None = None
    """slurm: partition of the jobs."""
    account: str | None = None
    """slurm: account that is charged."""
    qos: str | None = None
    """slurm: quality of service."""
    parameters: tuple[str, ...] = ()
    """slurm: further options of sbatch, each KEY=VALUE, or KEY for an option without a value."""
    setup: tuple[str, ...] = ()
    """slurm: lines of shell before the run, such as 'module load cuda'."""


class Run(NamedTuple):
    """A run of a study: its name, its folder and its arguments for `mtil.py`."""

    name: str
    directory: Path
    arguments: list[str]


class Sweep(NamedTuple):
    """Runs to finish; `after_each` is called after further runs are finished."""

    launcher: LauncherConfig
    logs: Path
    runs: Sequence[Run]
    progress: Progress
    after_each: Callable[[], object]


class Job:
    """One run, or the rest of it, as a job of submitit."""

    def __init__(self, arguments: list[str]):
        self.arguments = arguments

    def __call__(self) -> None:
        """Run until the end; on submitit's signal, stop after the current step and queue again."""
        queue_again = signal.getsignal(signal.SIGUSR2)
        asked = False

        def ask(number: int, frame: object) -> None:
            nonlocal asked
            asked = True
            signal.raise_signal(signal.SIGTERM)

        def end(number: int, frame: object) -> None:  # until learning installs its own handler
            raise SystemExit(128 + number)

        signal.signal(signal.SIGTERM, end)
        signal.signal(signal.SIGUSR2, ask)
        try:
            from cheem_jax.cli import (
                run as cheem_run,  # takes seconds, so signals are handled before
            )

            settings = cheem_run.read_arguments(self.arguments)
            run_command(cheem_run.run_seeds, settings, settings.run_dir)
        except SystemExit as stop:
            if stop.code != 128 + signal.SIGTERM:
                raise
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            signal.signal(signal.SIGUSR2, queue_again)
            if asked:
                signal.raise_signal(signal.SIGUSR2)  # ends the process on a run's first node
                return
            if os.environ.get("SUBMITIT_EXECUTOR") == "slurm":
                sleep(SECONDS_TO_BE_TAKEN_BACK)
            raise

    def checkpoint(self) -> Any:
        """The same job; the run resumes from its checkpoint."""
        return load_submitit().helpers.DelayedSubmission(self)


def results_of(directory: Path) -> dict[str, Any] | None:
    """The results of a finished run; None while tasks are missing."""
    num_tasks = len(read_object(directory / "results.json").get("tasks", ()))
    tasks = read_object(directory / "config.json").get("tasks")
    return read_results(directory) if tasks and num_tasks == len(tasks) else None


def watch(sweep: Sweep, look: Callable[[], dict[str, State]]) -> dict[str, State]:
    """Poll the jobs until none is running or queued; report changes."""
    said = collections.Counter[str]()
    while True:
        states = look()
        counts = collections.Counter[str](states.values())
        if counts != said:
            sweep.progress.say(
                f"{len(states)} runs:"
                f" {', '.join(f'{num} {state}' for state, num in counts.items())}"
            )
            if counts["finished"] > said["finished"]:
                sweep.after_each()
            said = counts
        if not counts["running"] + counts["queued"]:
            return states
        sleep(SECONDS_BETWEEN_LOOKS[sweep.launcher.kind])


def last_error(logs: Path, job: str) -> str:
    """The last line of a job's error log, and its file."""
    file = logs / f"{job}_0_log.err"
    lines = file.read_text(errors="replace").split("\n")[-20:] if file.exists() else []
    lines = [line.strip() for line in lines if line.strip() and not line.startswith("INFO:")]
    errors = [line for line in lines if line.startswith("error:")] or lines
    return f"{errors[-1] if errors else 'it ended without a message'} ({file})"


@contextlib.contextmanager
def exclusive(logs: Path) -> Iterator[None]:
    """Lock the folder of jobs, because two commands would start a run twice."""
    try:
        held = filelock.FileLock(logs / ".lock", fallback_to_soft=False).acquire(timeout=0)
    except filelock.Timeout:
        raise ValueError(
            f"another command starts jobs in {str(logs.parent)!r}; wait for it"
        ) from None
    with held:
        yield


def python_command(*environment: str) -> str:
    """The command of this Python with the experiments on its path."""
    paths = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    return shlex.join(["env", *environment, f"PYTHONPATH={os.pathsep.join(paths)}", sys.executable])


def load_submitit() -> ModuleType:
    try:
        import submitit
    except ImportError as error:
        raise ValueError(
            f"jobs need submitit ({error}); pip install 'cheem_jax[cluster]'"
        ) from error
    return submitit


def check(launcher: LauncherConfig) -> None:
    """Raise ValueError for values without effect."""
    used = {"none": {"kind"}, "local": {"kind", "jobs", "gpus"}}.get(launcher.kind)
    for field in dataclasses.fields(LauncherConfig):
        option = f"--launcher.{field.name.replace('_', '-')}"
        value = getattr(launcher, field.name)
        if used is not None and field.name not in used and value != field.default:
            raise ValueError(
                f"{option} is given, and --launcher {launcher.kind} has no use for it; leave it out"
            )
        if type(value) is int and value < 1:
            raise ValueError(f"{option} is {value}; expected at least 1")


def host_arguments(launcher: LauncherConfig) -> list[str]:
    """Arguments with which every process of a run uses all devices and nodes of its job."""
    if launcher.nodes > 1:
        return ["--hosts.coordinator", "auto", "--devices", "all"]
    return ["--devices", "all"] if (launcher.gpus or 1) > 1 else []


def finish(sweep: Sweep) -> None:
    """Return when all runs are finished.

    Raises SystemExit with status 0 if runs are left to SLURM or to other processes, and with status
    1 if some failed; ValueError without SLURM, or if it refuses the jobs.
    """
    launcher, logs = sweep.launcher, sweep.logs
    if all(results_of(run.directory) for run in sweep.runs):
        return
    if launcher.kind == "slurm" and shutil.which("sbatch") is None:
        raise ValueError(
            "--launcher slurm needs SLURM's sbatch, which is not on this machine; try --launcher"
            " local"
        )
    load_submitit()
    try:
        logs.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"{logs}, for the logs of jobs, cannot be made ({error}); choose another --run-dir"
        ) from error
    states = work_here(sweep) if launcher.kind == "local" else on_slurm(sweep)
    if failed := [name for name, state in states.items() if state == "failed"]:
        sweep.progress.say(
            f"{len(failed)} of {len(states)} runs failed; the same command tries them again"
        )
        raise SystemExit(1)
    if set(states.values()) != {"finished"}:
        raise SystemExit(0)


NO_LIMIT = 525_600
"""Time limit in minutes of a job on this machine."""


def work_here(sweep: Sweep) -> dict[str, State]:
    """Run every run in a process of this machine, `jobs` at a time; a request to stop waits for
    their current steps."""
    submitit = load_submitit()
    say = sweep.progress.say
    devices = [devices_of(sweep.launcher, place) for place in range(sweep.launcher.jobs or 1)]
    waiting = collections.deque(sweep.runs)
    jobs = dict[int, tuple[Run, Any]]()
    states: dict[str, State] = {run.name: "queued" for run in sweep.runs}

    def start(place: int, run: Run) -> None:
        executor = submitit.LocalExecutor(sweep.logs, python=python_command(*devices[place]))
        executor.update_parameters(timeout_min=NO_LIMIT)
        # Ctrl-C reaches every process of a terminal and would kill submitit's
        before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        try:
            jobs[place] = run, executor.submit(Job(run.arguments))
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        states[run.name] = "running"

    def look() -> dict[str, State]:
        if stop:
            for _, job in jobs.values():
                os.kill(int(job.job_id), signal.SIGTERM)
            while not all(job.done() for _, job in jobs.values()):
                sleep(SECONDS_BETWEEN_LOOKS["local"])
            raise stop.stopped("runs at work stopped after their running steps")
        for place, (run, job) in list(jobs.items()):
            if job.done():
                del jobs[place]
                states[run.name] = "finished" if results_of(run.directory) else "failed"
                if states[run.name] == "failed":
                    say(f"{run.name} failed: {last_error(sweep.logs, job.job_id)}")
        while waiting and len(jobs) < len(devices):
            run = waiting.popleft()
            if results_of(run.directory):
                states[run.name] = "finished"
            elif owner := read_owner(run.directory):
                states[run.name] = "elsewhere"
                say(f"{run.name} is left to process {owner.pid} on {owner.host}")
            else:
                start(next(place for place in range(len(devices)) if place not in jobs), run)
        return states

    with exclusive(sweep.logs), stop_requests() as stop:
        return watch(sweep, look)


def devices_of(launcher: LauncherConfig, place: int) -> list[str]:
    """Arguments of `env` that select the GPUs of a run; all GPUs without a number, because submitit
    would hide them."""
    name = "CUDA_VISIBLE_DEVICES"
    visible = os.environ.get(name)
    if launcher.gpus is None:
        return ["-u", name] if visible is None else [f"{name}={visible}"]
    needed = (launcher.jobs or 1) * launcher.gpus
    gpus = [str(number) for number in range(needed)] if visible is None else visible.split(",")
    if len(gpus) < needed:
        raise ValueError(
            f"--launcher.jobs and --launcher.gpus ask for {needed} GPUs; {name} is {visible!r}"
        )
    return [f"{name}={','.join(gpus[place * launcher.gpus :][: launcher.gpus])}"]


SUBMITTED = "submitted.json"
"""IDs of SLURM's jobs by run."""
SECONDS_TO_STOP = 120
"""A job is asked to stop this long before its time limit."""


def on_slurm(sweep: Sweep) -> dict[str, State]:
    """Submit the runs without a job and report all states; wait for all jobs if `wait` is set."""
    logs = sweep.logs
    say = sweep.progress.say
    jobs = _submit(sweep)
    say(f"logs: {logs}   a run: cheem watch {sweep.runs[0].directory}")
    states: dict[str, State] = {
        run.name: "finished" if results_of(run.directory) else "queued" for run in sweep.runs
    }
    if not sweep.launcher.wait:
        say(
            "the same command reports their states, submits failed runs again and writes the tables"
        )
        if "finished" in states.values():
            sweep.after_each()
        return states
    missed = set[str]()

    def look() -> dict[str, State]:
        try:
            alive = _alive(jobs.values())
        except ValueError as error:  # the scheduler can be busy
            say(f"{error}; asking again")
            return states
        for run in sweep.runs:
            job = jobs.get(run.name)
            state, _ = _state_of(run, job, alive)
            if state is not None:
                states[run.name] = state
                missed.discard(run.name)
            elif run.name not in missed:  # the file system can be slower than SLURM
                missed.add(run.name)
            elif states[run.name] != "failed":
                states[run.name] = "failed"
                say(f"{run.name} failed: {last_error(logs, job) if job else 'its process ended'}")
        return states

    try:
        return watch(sweep, look)
    except KeyboardInterrupt:
        say(f"the jobs go on; to end them: scancel {' '.join(_arrays(jobs.values()))}")
        raise SystemExit(128 + signal.SIGINT) from None


def _submit(sweep: Sweep) -> dict[str, str]:
    """Submit the runs that are neither finished nor running, print a row per run, and return the
    IDs of jobs by run."""
    with exclusive(sweep.logs):
        jobs: dict[str, str] = read_object(sweep.logs / SUBMITTED)
        alive = _alive(jobs.values())
        notes = dict[str, str]()
        new = list[Run]()
        for run in sweep.runs:
            job = jobs.get(run.name)
            state, notes[run.name] = _state_of(run, job, alive)
            if state is None:
                new.append(run)
                notes[run.name] = "submitted" + (
                    f" again after {last_error(sweep.logs, job)}" if job else ""
                )
        if new:
            jobs |= _sbatch(sweep.launcher, sweep.logs, new)
            write_atomically(sweep.logs / SUBMITTED, json.dumps(jobs, indent=1) + "\n")
    rows = tuple((name, jobs.get(name, NONE), note) for name, note in notes.items())
    grid = Grid(f"{len(new)} of {len(rows)} runs submitted", ("run", "job", "state"), rows, 3)
    sweep.progress.console.print(grid.to_rich())
    return jobs


def _sbatch(launcher: LauncherConfig, logs: Path, runs: Sequence[Run]) -> dict[str, str]:
    """Submit the runs as one array of jobs; return their IDs."""
    # a cluster can preempt jobs without queueing them again
    further: dict[str, Any] = {"requeue": True}
    for parameter in launcher.parameters:
        key, is_pair, value = parameter.partition("=")
        further[key.removeprefix("--")] = value if is_pair else True
    # since SLURM 22.05 srun no longer inherits them from sbatch
    srun_args = None if launcher.cpus is None else [f"--cpus-per-task={launcher.cpus}"]
    parameters = {
        "job_name": logs.parent.name,
        "time": launcher.minutes,
        "nodes": launcher.nodes,
        "ntasks_per_node": 1,
        "cpus_per_task": launcher.cpus,
        "gpus_per_node": launcher.gpus,
        "partition": launcher.partition,
        "mem": None if launcher.memory_gb is None else f"{launcher.memory_gb}GB",
        "account": launcher.account,
        "qos": launcher.qos,
        "array_parallelism": launcher.jobs or len(runs),
        "setup": list(launcher.setup),
        "signal_delay_s": min(SECONDS_TO_STOP, 30 * launcher.minutes),
        "additional_parameters": further,
        "srun_args": srun_args,
    }
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # the error contains it
            executor = load_submitit().SlurmExecutor(
                logs, max_num_timeout=launcher.requeues, python=python_command()
            )
            executor.update_parameters(
                **{key: value for key, value in parameters.items() if value is not None}
            )
            jobs = executor.submit_array([Job(run.arguments) for run in runs])
    except RuntimeError as error:
        raise ValueError(f"sbatch refused the jobs: {error}") from error
    return {run.name: job.job_id for run, job in zip(runs, jobs, strict=True)}


def _alive(jobs: Collection[str]) -> dict[str, str]:
    """SLURM's states of the jobs that have not ended; ValueError if it does not answer."""
    if not jobs:
        return {}
    command = [
        "squeue",
        "--noheader",
        "--array",
        "--format=%i|%T",
        f"--jobs={','.join(_arrays(jobs))}",
    ]
    answer = subprocess.run(command, capture_output=True, text=True)
    # an invalid ID is that of a job that ended long ago
    if answer.returncode and "Invalid job id" not in answer.stderr:
        raise ValueError(f"squeue does not tell which jobs are at work: {answer.stderr.strip()}")
    rows = (line.strip().partition("|") for line in answer.stdout.splitlines())
    return {job: state for job, _, state in rows}


def _arrays(jobs: Collection[str]) -> list[str]:
    return sorted({job.partition("_")[0] for job in jobs})


def _state_of(run: Run, job: str | None, alive: dict[str, str]) -> tuple[State | None, str]:
    """State of a run and its description; None if no process works on it.

    A killed job on another machine leaves its lock behind, so SLURM's answer counts for its own
    jobs.
    """
    if results_of(run.directory):
        return "finished", "finished"
    if job in alive:
        return (
            "running" if alive[job] in ("RUNNING", "COMPLETING") else "queued"
        ), f"is {alive[job].lower()}"
    owner = read_owner(run.directory)
    if owner and (job is None or owner.host == socket.gethostname()):
        return "elsewhere", f"left to process {owner.pid} on {owner.host}"
    return None, ""
