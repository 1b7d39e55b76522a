"""Runs of a study as jobs: processes on this machine, or jobs of SLURM, by means of submitit.

A job is one run of `python experiments/mtil.py`. `RUN_DIR/jobs` contains scripts, logs and the IDs
of SLURM's jobs. If the command is repeated, it submits the runs that are neither finished nor
running.
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
"""Seconds within which SLURM queues a preempted job again, which it does only while the job
exists."""
SECONDS_BETWEEN_LOOKS = {"local": 0.5, "slurm": 15.0}
"""Seconds between two polls of the jobs, keyed by launcher."""


@dataclasses.dataclass(frozen=True)
class LauncherConfig:
    """Execution of the runs of a study."""

    kind: Annotated[
        Literal["none", "local", "slurm"], tyro.conf.arg(name="launcher", prefix_name=False)
    ] = "none"
    """none: run all in this process, one after another; local: run each in a separate process;
    slurm: submit each as a job of SLURM. The last two need the extra `cluster`."""
    jobs: int | None = None
    """Maximum number of concurrent runs; default: 1 for local, all for slurm."""
    gpus: int | None = None
    """Number of GPUs of a run on each of its nodes; concurrent local runs share no GPU. Default:
    all for local, none for slurm."""
    wait: bool = False
    """slurm: wait until all jobs have ended; local always waits."""
    minutes: int = 1440
    """slurm: time limit of a job in minutes; at the limit the job stops, queues again and
    resumes."""
    requeues: int = 10
    """slurm: maximum number of such restarts."""
    nodes: int = 1
    """slurm: number of nodes of one run, with one process on each."""
    cpus: int | None = None
    """slurm: number of CPU cores of a run on each node; the default here and below is that of the
    cluster."""
    memory_gb: int | None = None
    """slurm: main memory of a run on each node in GB."""
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
    """The runs to finish; `after_each` is called whenever further runs are finished."""

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
        """Run until the end. On submitit's signal, stop after the current step and queue the job
        again."""
        queue_again = signal.getsignal(signal.SIGUSR2)
        must_requeue = False

        def requeue(number: int, frame: object) -> None:
            nonlocal must_requeue
            must_requeue = True
            signal.raise_signal(signal.SIGTERM)

        def end(number: int, frame: object) -> None:  # until learning installs its handler
            raise SystemExit(128 + number)

        signal.signal(signal.SIGTERM, end)
        signal.signal(signal.SIGUSR2, requeue)
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
            if must_requeue:
                # this ends the process on the first node of a run
                signal.raise_signal(signal.SIGUSR2)
                return
            if os.environ.get("SUBMITIT_EXECUTOR") == "slurm":
                sleep(SECONDS_TO_BE_TAKEN_BACK)
            raise

    def checkpoint(self) -> Any:
        """Return the same job; its run resumes from the checkpoint."""
        return load_submitit().helpers.DelayedSubmission(self)


def results_of(directory: Path) -> dict[str, Any] | None:
    """Return the results of a finished run; None while tasks are missing."""
    num_tasks = len(read_object(directory / "results.json").get("tasks", ()))
    tasks = read_object(directory / "config.json").get("tasks")
    return read_results(directory) if tasks and num_tasks == len(tasks) else None


def watch(sweep: Sweep, look: Callable[[], dict[str, State]]) -> dict[str, State]:
    """Poll the jobs until none is running or queued; report changes and return the final states."""
    reported = collections.Counter[str]()
    while True:
        states = look()
        counts = collections.Counter[str](states.values())
        if counts != reported:
            sweep.progress.say(
                f"{len(states)} runs:"
                f" {', '.join(f'{num} {state}' for state, num in counts.items())}"
            )
            if counts["finished"] > reported["finished"]:
                sweep.after_each()
            reported = counts
        if not counts["running"] + counts["queued"]:
            return states
        sleep(SECONDS_BETWEEN_LOOKS[sweep.launcher.kind])


def last_error(logs: Path, job: str) -> str:
    """Return the last line of a job's error log, and the name of the file."""
    file = logs / f"{job}_0_log.err"
    lines = file.read_text(errors="replace").split("\n")[-20:] if file.exists() else []
    lines = [line.strip() for line in lines if line.strip() and not line.startswith("INFO:")]
    errors = [line for line in lines if line.startswith("error:")] or lines
    return f"{errors[-1] if errors else 'it ended without a message'} ({file})"


@contextlib.contextmanager
def exclusive(logs: Path) -> Iterator[None]:
    """Lock the folder of jobs, because two concurrent commands would start a run twice."""
    try:
        lock = filelock.FileLock(logs / ".lock", fallback_to_soft=False).acquire(timeout=0)
    except filelock.Timeout:
        raise ValueError(
            f"another command starts jobs in {str(logs.parent)!r}; wait for it"
        ) from None
    with lock:
        yield


def python_command(*environment: str) -> str:
    """Return the command of this Python interpreter with the experiments on its path."""
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
    """Raise ValueError for settings that are invalid or have no effect."""
    used = {"none": {"kind"}, "local": {"kind", "jobs", "gpus"}}.get(launcher.kind)
    for field in dataclasses.fields(LauncherConfig):
        option = f"--launcher.{field.name.replace('_', '-')}"
        value = getattr(launcher, field.name)
        if used is not None and field.name not in used and value != field.default:
            raise ValueError(
                f"{option} has no effect with --launcher {launcher.kind}; leave it out"
            )
        if type(value) is int and value < 1:
            raise ValueError(f"{option} is {value}; expected at least 1")


def host_arguments(launcher: LauncherConfig) -> list[str]:
    """Return the arguments with which every process of a run uses all devices and nodes of its
    job."""
    if launcher.nodes > 1:
        return ["--hosts.coordinator", "auto", "--devices", "all"]
    return ["--devices", "all"] if (launcher.gpus or 1) > 1 else []


def finish(sweep: Sweep) -> None:
    """Finish all runs with the launcher.

    Raises SystemExit with status 0 if runs are left to SLURM or to other processes, and with status
    1 if some failed. Raises ValueError if SLURM is missing or refuses the jobs.
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
    """Run every run in a process on this machine, at most `jobs` at a time. A request to stop waits
    for the current steps of all processes."""
    submitit = load_submitit()
    say = sweep.progress.say
    devices = [devices_of(sweep.launcher, place) for place in range(sweep.launcher.jobs or 1)]
    waiting = collections.deque(sweep.runs)
    jobs = dict[int, tuple[Run, Any]]()
    states: dict[str, State] = {run.name: "queued" for run in sweep.runs}

    def start(place: int, run: Run) -> None:
        executor = submitit.LocalExecutor(sweep.logs, python=python_command(*devices[place]))
        executor.update_parameters(timeout_min=NO_LIMIT)
        # Ctrl-C reaches every process of a terminal and would kill submitit's processes
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
            raise stop.stopped("all running runs stopped after their current steps")
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
                say(f"process {owner.pid} on {owner.host} is running {run.name}")
            else:
                start(next(place for place in range(len(devices)) if place not in jobs), run)
        return states

    with exclusive(sweep.logs), stop_requests() as stop:
        return watch(sweep, look)


def devices_of(launcher: LauncherConfig, place: int) -> list[str]:
    """Return the arguments of `env` that select the GPUs of a run. Without a number of GPUs they
    select all, because submitit would hide them."""
    name = "CUDA_VISIBLE_DEVICES"
    visible = os.environ.get(name)
    if launcher.gpus is None:
        return ["-u", name] if visible is None else [f"{name}={visible}"]
    needed = (launcher.jobs or 1) * launcher.gpus
    gpus = [str(number) for number in range(needed)] if visible is None else visible.split(",")
    if len(gpus) < needed:
        raise ValueError(
            f"--launcher.jobs and --launcher.gpus request {needed} GPUs; {name} is {visible!r}"
        )
    return [f"{name}={','.join(gpus[place * launcher.gpus :][: launcher.gpus])}"]


SUBMITTED = "submitted.json"
"""File with the IDs of SLURM's jobs, keyed by run."""
SECONDS_TO_STOP = 120
"""Seconds before its time limit at which a job is asked to stop."""


def on_slurm(sweep: Sweep) -> dict[str, State]:
    """Submit the runs that have no job and report all states; if `wait` is set, wait for all
    jobs."""
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
        except ValueError as error:  # the scheduler can be busy for a while
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
        say(f"the jobs continue; to end them: scancel {' '.join(_arrays(jobs.values()))}")
        raise SystemExit(128 + signal.SIGINT) from None


def _submit(sweep: Sweep) -> dict[str, str]:
    """Submit the runs that are neither finished nor running, print a row per run, and return the
    IDs of all jobs, keyed by run."""
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
    """Submit the runs as one array of jobs; return their IDs, keyed by run."""
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
        with contextlib.redirect_stderr(io.StringIO()):  # the error message contains it
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
    """Return SLURM's states of the jobs that have not ended. Raises ValueError if SLURM does not
    respond."""
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
    # the ID of a job that ended long ago is invalid
    if answer.returncode and "Invalid job id" not in answer.stderr:
        raise ValueError(f"squeue does not list the running jobs: {answer.stderr.strip()}")
    rows = (line.strip().partition("|") for line in answer.stdout.splitlines())
    return {job: state for job, _, state in rows}


def _arrays(jobs: Collection[str]) -> list[str]:
    return sorted({job.partition("_")[0] for job in jobs})


def _state_of(run: Run, job: str | None, alive: dict[str, str]) -> tuple[State | None, str]:
    """Return the state of a run and its description; the state is None if no process is running it.

    A killed job on another machine leaves its lock file. The states of jobs are therefore those
    that SLURM reports.
    """
    if results_of(run.directory):
        return "finished", "finished"
    if job in alive:
        return (
            "running" if alive[job] in ("RUNNING", "COMPLETING") else "queued"
        ), f"is {alive[job].lower()}"
    owner = read_owner(run.directory)
    if owner and (job is None or owner.host == socket.gethostname()):
        return "elsewhere", f"run by process {owner.pid} on {owner.host}"
    return None, ""
