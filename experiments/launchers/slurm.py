"""Runs of a study as jobs of SLURM, in one array."""

import contextlib
import io
import json
import signal
import socket
import subprocess
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from cheem_jax.core.atomic import write_atomically
from cheem_jax.report.status import Owner, read_object, read_owner
from cheem_jax.report.table import NONE, Grid
from launchers.job import (
    Job,
    LauncherConfig,
    Run,
    State,
    Sweep,
    alone,
    last_error,
    load_submitit,
    python_command,
    results_of,
    watch,
)

SUBMITTED = "submitted.json"
"""Ids of SLURM's jobs by run."""
SECONDS_TO_STOP = 120
"""So long before its time is up a job is asked to stop."""


def on_slurm(sweep: Sweep) -> dict[str, State]:
    """Submits what nobody works on and tells how things stand; waits for all where that is asked for."""
    logs, say = sweep.logs, sweep.progress.say
    jobs = _submit(sweep)
    say(f"logs: {logs}   a run: cheem watch {sweep.runs[0].directory}")
    states: dict[str, State] = {run.name: "finished" if results_of(run.directory) else "queued" for run in sweep.runs}
    if not sweep.launcher.wait:
        say("the same command tells how they stand, submits again what failed, and writes the tables")
        if "finished" in states.values():
            sweep.after_each()
        return states
    missed = set[str]()

    def look() -> dict[str, State]:
        try:
            alive = _alive(jobs.values())
        except ValueError as error:  # as a busy scheduler answers at times
            say(f"{error}; asking again")
            return states
        for run in sweep.runs:
            job = jobs.get(run.name)
            if results_of(run.directory):
                states[run.name] = "finished"
            elif job in alive:
                states[run.name] = "running" if alive[job] in ("RUNNING", "COMPLETING") else "queued"
                missed.discard(run.name)
            elif _other(run, job):
                states[run.name] = "elsewhere"
            elif run.name not in missed:  # results may still be on their way over the network
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
    """Submits what is neither finished nor worked on, and prints a row per run; returns the ids of jobs by run."""
    with alone(sweep.logs):
        jobs: dict[str, str] = read_object(sweep.logs / SUBMITTED)
        alive, notes, new = _alive(jobs.values()), dict[str, str](), list[Run]()
        for run in sweep.runs:
            job = jobs.get(run.name)
            if results_of(run.directory):
                notes[run.name] = "finished"
            elif job in alive:
                notes[run.name] = f"is {alive[job].lower()}"
            elif owner := _other(run, job):
                notes[run.name] = f"left to process {owner.pid} on {owner.host}"
            else:
                new.append(run)
                notes[run.name] = "submitted" + (f" again after {last_error(sweep.logs, job)}" if job else "")
        if new:
            jobs |= _sbatch(sweep.launcher, sweep.logs, new)
            write_atomically(sweep.logs / SUBMITTED, json.dumps(jobs, indent=1) + "\n")
    rows = tuple((name, jobs.get(name, NONE), note) for name, note in notes.items())
    grid = Grid(f"{len(new)} of {len(rows)} runs submitted", ("run", "job", "state"), rows, 3)
    sweep.progress.console.print(grid.to_rich())
    return jobs


def _sbatch(launcher: LauncherConfig, logs: Path, runs: Sequence[Run]) -> dict[str, str]:
    """The runs as one array of jobs; returns their ids."""
    # jobs may be preempted by a cluster that otherwise queues none again
    further: dict[str, Any] = {"requeue": True}
    for parameter in launcher.parameters:
        key, is_pair, value = parameter.partition("=")
        further[key.removeprefix("--")] = value if is_pair else True
    # srun takes them from sbatch no more, since SLURM 22.05
    srun_args = None if launcher.cpus is None else [f"--cpus-per-task={launcher.cpus}"]
    parameters = {
        "job_name": logs.parent.name, "time": launcher.minutes, "nodes": launcher.nodes, "ntasks_per_node": 1,
        "cpus_per_task": launcher.cpus, "gpus_per_node": launcher.gpus, "partition": launcher.partition,
        "mem": None if launcher.memory_gb is None else f"{launcher.memory_gb}GB", "account": launcher.account,
        "qos": launcher.qos, "array_parallelism": launcher.jobs or len(runs), "setup": list(launcher.setup),
        "signal_delay_s": min(SECONDS_TO_STOP, 30 * launcher.minutes), "additional_parameters": further,
        "srun_args": srun_args,
    }  # fmt: skip
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # of what the error tells as well
            executor = load_submitit().SlurmExecutor(logs, max_num_timeout=launcher.requeues, python=python_command())
            executor.update_parameters(**{key: value for key, value in parameters.items() if value is not None})
            jobs = executor.submit_array([Job(run.arguments) for run in runs])
    except RuntimeError as error:
        raise ValueError(f"sbatch refused the jobs: {error}") from error
    return {run.name: job.job_id for run, job in zip(runs, jobs, strict=True)}


def _alive(jobs: Collection[str]) -> dict[str, str]:
    """What SLURM tells of those of the jobs that have not ended. ValueError where it does not answer."""
    if not jobs:
        return {}
    command = ["squeue", "--noheader", "--array", "--format=%i|%T", f"--jobs={','.join(_arrays(jobs))}"]
    answer = subprocess.run(command, capture_output=True, text=True)
    if answer.returncode and "Invalid job id" not in answer.stderr:  # what it says of one that ended long ago
        raise ValueError(f"squeue does not tell which jobs are at work: {answer.stderr.strip()}")
    rows = (line.strip().partition("|") for line in answer.stdout.splitlines())
    return {job: state for job, _, state in rows}


def _arrays(jobs: Collection[str]) -> list[str]:
    return sorted({job.partition("_")[0] for job in jobs})


def _other(run: Run, job: str | None) -> Owner | None:
    """The process that works on a run of which SLURM has no job.

    A killed job leaves its name there, and no other machine can be asked: what it submitted itself SLURM knows better.
    """
    owner = read_owner(run.directory)
    return owner if owner and (job is None or owner.host == socket.gethostname()) else None
