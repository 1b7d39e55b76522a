"""Runs of a study in processes of this machine, some at a time."""

import collections
import os
import signal
from time import sleep
from typing import Any

from cheem_jax.core.interruption import stop_requests
from cheem_jax.report.status import read_owner
from launchers.job import (
    SECONDS_BETWEEN_LOOKS,
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

NO_LIMIT = 525_600
"""Minutes of a job of this machine."""


def work_here(sweep: Sweep) -> dict[str, State]:
    """Every run in a process of this machine, some at a time; a request to stop waits for their running steps."""
    submitit, say = load_submitit(), sweep.progress.say
    devices = [devices_of(sweep.launcher, place) for place in range(sweep.launcher.jobs or 1)]
    waiting, jobs = collections.deque(sweep.runs), dict[int, tuple[Run, Any]]()
    states: dict[str, State] = {run.name: "queued" for run in sweep.runs}

    def start(place: int, run: Run) -> None:
        executor = submitit.LocalExecutor(sweep.logs, python=python_command(*devices[place]))
        executor.update_parameters(timeout_min=NO_LIMIT)
        # Ctrl-C reaches every process of a terminal, and submitit's would kill the run
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

    with alone(sweep.logs), stop_requests() as stop:
        return watch(sweep, look)


def devices_of(launcher: LauncherConfig, place: int) -> list[str]:
    """Words of `env` that show the run at a place its GPUs; all where no number is told, which submitit would hide."""
    name = "CUDA_VISIBLE_DEVICES"
    told = os.environ.get(name)
    if launcher.gpus is None:
        return ["-u", name] if told is None else [f"{name}={told}"]
    needed = (launcher.jobs or 1) * launcher.gpus
    gpus = [str(number) for number in range(needed)] if told is None else told.split(",")
    if len(gpus) < needed:
        raise ValueError(f"--launcher.jobs and --launcher.gpus ask for {needed} GPUs; {name} is {told!r}")
    return [f"{name}={','.join(gpus[place * launcher.gpus :][: launcher.gpus])}"]
