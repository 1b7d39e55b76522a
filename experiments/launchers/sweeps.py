"""Runs of a study as jobs: processes of this machine, or jobs of a cluster's own scheduler (SLURM), through submitit.

A job is one run and does what `python experiments/mtil.py` does with the run's arguments. Scripts, logs and the ids of
SLURM's jobs are kept in `RUN_DIR/jobs`. The same command again submits what is neither finished nor worked on.
"""

import dataclasses
import shutil

from launchers.job import LauncherConfig, Sweep, load_submitit, results_of
from launchers.local import work_here
from launchers.slurm import on_slurm


def check(launcher: LauncherConfig) -> None:
    """Raises ValueError for values that mean nothing."""
    used = {"none": {"kind"}, "local": {"kind", "jobs", "gpus"}}.get(launcher.kind)
    for field in dataclasses.fields(LauncherConfig):
        option, value = f"--launcher.{field.name.replace('_', '-')}", getattr(launcher, field.name)
        if used is not None and field.name not in used and value != field.default:
            raise ValueError(f"{option} is given, and --launcher {launcher.kind} has no use for it; leave it out")
        if type(value) is int and value < 1:
            raise ValueError(f"{option} is {value}; expected at least 1")


def host_arguments(launcher: LauncherConfig) -> list[str]:
    """What every process of a run is told beside the run's settings, so that it uses all that its job was given."""
    if launcher.nodes > 1:
        return ["--hosts.coordinator", "auto", "--devices", "all"]
    return ["--devices", "all"] if (launcher.gpus or 1) > 1 else []


def finish(sweep: Sweep) -> None:
    """Returns when all runs are finished.

    SystemExit ends the process before: status 0 where runs are left to SLURM or to other processes, 1 where some
    failed. ValueError where there is no SLURM, or it refuses the jobs.
    """
    launcher, logs = sweep.launcher, sweep.logs
    if all(results_of(run.directory) for run in sweep.runs):
        return
    if launcher.kind == "slurm" and shutil.which("sbatch") is None:
        raise ValueError("--launcher slurm needs SLURM's sbatch, which is not on this machine; try --launcher local")
    load_submitit()
    try:
        logs.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"{logs}, for the logs of jobs, cannot be made ({error}); choose another --run-dir") from error
    states = work_here(sweep) if launcher.kind == "local" else on_slurm(sweep)
    if failed := [name for name, state in states.items() if state == "failed"]:
        sweep.progress.say(f"{len(failed)} of {len(states)} runs failed; the same command tries them again")
        raise SystemExit(1)
    if set(states.values()) != {"finished"}:
        raise SystemExit(0)
