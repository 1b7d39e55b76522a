"""Runs of a study as jobs: local jobs really run, and SLURM's commands are replaced by scripts."""

import contextlib
import dataclasses
import io
import json
import os
import shlex
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import compare
import launching
import pytest
import study
from launching import SECONDS_BETWEEN_LOOKS, Job, LauncherConfig, Run, Sweep, results_of
from rich.console import Console

from cheem_jax.baselines.catalogue import NAMES
from cheem_jax.cli import run as cheem_run
from cheem_jax.cli.arguments import arguments_of
from cheem_jax.cli.running import run_command
from cheem_jax.core.interruption import Stopped, stop_requests
from cheem_jax.report.status import read_owner
from cheem_jax.run.progress import Progress
from cheem_jax.run.record import read

SHORT = study.Variant("linear", "linear heads", "frozen_linear")
BROKEN = study.Variant("broken", "broken", "frozen_linear", run={"weights": Path("nowhere.npz")})
SECONDS = 600
"""Seconds after which a test stops waiting."""


def settings_of(run_dir: Path, *arguments: str) -> compare.Compare:
    small = ("--tasks", "shapes", "--backbone", "vit_nano", "--run-dir", str(run_dir))
    return compare.parse(compare.Compare, [*small, *arguments])


@pytest.fixture
def progress() -> Progress:
    return Progress(Console(file=io.StringIO(), width=200, force_terminal=False))


def text_of(progress: Progress) -> str:
    return progress.console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]


def wait_for(condition) -> None:
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < SECONDS
        time.sleep(0.02)


@pytest.fixture
def slurm(tmp_path, monkeypatch) -> Path:
    """A folder with scripts in place of SLURM's commands. They record their arguments; the file
    `queue` contains the output of squeue."""
    folder = tmp_path / "slurm"
    folder.mkdir()
    (folder / "next").write_text("4711")
    (folder / "queue").write_text("")
    commands = {
        # one row per job of an array, as `squeue --array` prints them
        "sbatch": (
            """
            num=$(cat next); echo $((num + 1)) > next; cp "$1" $num.sh
            last=$(sed -n 's/^#SBATCH --array=0-\\([0-9]*\\).*/\\1/p' "$1")
            if [ -n "$last" ]; then for i in $(seq 0 $last); do echo "${num}_$i|PENDING" >> queue; done
            else echo "$num|PENDING" >> queue; fi
            echo "Submitted batch job $num"
        """  # noqa: E501
        ),
        "squeue": 'echo "$@" > asked; cat queue',
        "scontrol": 'echo "$@" >> requeued',
        "srun": (
            """
            cd "$OLDPWD"
            while true; do case "$1" in
                --output|--error) shift 2;;
                --*) shift;;
                *) exec "$@";;
            esac; done
        """
        ),
    }
    for name, script in commands.items():
        (folder / name).write_text(f'#!/bin/sh\ncd "{folder}"\n{script}')
        (folder / name).chmod(stat.S_IRWXU)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return folder


def submit(settings: compare.Compare, variants, progress: Progress) -> int:
    """Run the study, which must end the process; return the exit status."""
    with pytest.raises(SystemExit) as stop:
        study.run_all(settings, variants, progress, lambda results: None)
    assert isinstance(stop.value.code, int)
    return stop.value.code


@pytest.mark.full
def test_local_jobs_stop_resume_fail_and_are_not_repeated(tmp_path, progress):
    settings = settings_of(tmp_path / "runs", "--launcher", "local")
    tables = []
    directory = settings.run_dir / "linear" / "seed-0"

    def stop_when_it_works() -> None:
        wait_for(lambda: read_owner(directory))
        os.kill(os.getpid(), signal.SIGTERM)

    stopper = threading.Thread(target=stop_when_it_works)
    stopper.start()
    with pytest.raises(Stopped, match="all running runs stopped after their current steps"):
        study.run_all(settings, [SHORT, BROKEN], progress, tables.append)
    stopper.join()
    assert read_owner(directory) is None and results_of(directory) is None and not tables

    assert submit(settings, [SHORT, BROKEN], progress) == 1
    (log,) = {
        file.stem
        for file in (settings.run_dir / "jobs").glob("*_log.err")
        if "nowhere.npz" in file.read_text()
    }
    assert "broken/seed-0 failed: error: " in text_of(progress) and log in text_of(progress)
    assert "2 runs: 1 running, 1 queued" in text_of(progress) and "2 running" not in text_of(
        progress
    )
    assert "1 of 2 runs failed; the same command tries them again" in text_of(progress)

    jobs = sorted((settings.run_dir / "jobs").iterdir())
    results = study.run_all(settings, [SHORT], progress, tables.append)
    assert sorted((settings.run_dir / "jobs").iterdir()) == jobs and tables[-1] == results
    events = read(directory)
    assert [entry["event"] for entry in events if "command" in entry] == ["run", "continued"]
    alone = study.run_settings(settings, SHORT, 0)
    assert events[0]["command"] == [
        "cheem",
        "run",
        *arguments_of(cheem_run.make_portable(alone)),
    ]


@pytest.mark.full
def test_a_preempted_job_queues_again_and_resumes(tmp_path, slurm, progress):
    settings = settings_of(tmp_path / "runs", "--launcher", "slurm")
    assert submit(settings, [SHORT], progress) == 0
    directory = settings.run_dir / "linear" / "seed-0"
    script = ["bash", str(slurm / "4711.sh")]
    environment = {**os.environ, "SLURM_JOB_ID": "4711", "SLURM_PROCID": "0"}
    with subprocess.Popen(script, env=environment, stdout=subprocess.PIPE, text=True) as job:
        wait_for(lambda: read_owner(directory))
        owner = read_owner(directory)
        assert owner is not None
        os.kill(owner.pid, signal.SIGUSR2)  # as SLURM does before the time limit
        output = job.communicate()[0]
    assert "Exiting gracefully after preemption/timeout" in output
    assert (slurm / "requeued").read_text() == "requeue 4711\n" and results_of(directory) is None
    subprocess.run(script, env=environment, stdout=subprocess.DEVNULL, check=True)
    assert results_of(directory) is not None
    assert (
        study.run_all(settings, [SHORT], progress, lambda results: None)["linear"][0]["seed"] == 0
    )


@pytest.mark.parametrize(
    ("number", "expected"),
    [(signal.SIGUSR2, ["stopped", "queued"]), (signal.SIGTERM, ["stopped", 600])],
)
def test_a_job_stops_before_it_queues_again_and_waits_if_slurm_queues_it(
    number, expected, monkeypatch
):
    happened = []

    def work(settings: cheem_run.RunSettings) -> None:
        with stop_requests() as stop:
            signal.raise_signal(number)
            happened.append("stopped" if stop else "missed")
            raise stop.stopped("everything is kept")

    monkeypatch.setattr(cheem_run, "run_seeds", work)
    monkeypatch.setattr(launching, "sleep", happened.append)
    monkeypatch.setenv("SUBMITIT_EXECUTOR", "slurm")
    usual = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR2)}
    signal.signal(signal.SIGUSR2, lambda number, frame: happened.append("queued"))
    try:
        with (
            contextlib.nullcontext()
            if number == signal.SIGUSR2
            else pytest.raises(SystemExit, match="143")
        ):
            Job(["--stream", "demo", "--preset", "demo"])()
    finally:
        for number, handler in usual.items():
            signal.signal(number, handler)
    assert happened == expected


def test_the_batch_file_has_the_requested_options_and_a_queued_run_is_not_submitted_twice(
    tmp_path, slurm, progress
):
    arguments = (
        "--launcher",
        "slurm",
        "--launcher.jobs",
        "2",
        "--launcher.minutes",
        "30",
        "--launcher.cpus",
        "8",
        "--launcher.gpus",
        "1",
        "--launcher.memory-gb",
        "32",
        "--launcher.partition",
        "gpu",
        "--launcher.account",
        "a1",
        "--launcher.qos",
        "low",
        "--launcher.parameters",
        "constraint=a100",
        "exclusive",
        "--launcher.setup",
        "module load cuda",
    )
    settings = settings_of(tmp_path / "runs", "--seeds", "0,1,2", *arguments)
    assert submit(settings, [SHORT], progress) == 0
    script = (slurm / "4711.sh").read_text()
    lines = {line.removeprefix("#SBATCH --") for line in script.splitlines()}
    assert lines >= {
        "job-name=runs",
        "array=0-2%2",
        "time=30",
        "signal=USR2@120",
        "requeue",
        "open-mode=append",
        "nodes=1",
        "ntasks-per-node=1",
        "cpus-per-task=8",
        "gpus-per-node=1",
        "mem=32GB",
        "partition=gpu",
        "account=a1",
        "qos=low",
        "constraint=a100",
        "exclusive",
        "module load cuda",
    }
    assert f"PYTHONPATH={Path(__file__).parent}" in script and "submitit.core._submit" in script
    assert "--cpus-per-task=8 env" in script
    submitted = json.loads((settings.run_dir / "jobs" / "submitted.json").read_text())
    assert submitted == {f"linear/seed-{seed}": f"4711_{seed}" for seed in range(3)}
    assert "3 of 3 runs submitted" in text_of(progress) and "cheem watch" in text_of(progress)

    (slurm / "queue").write_text("4711_0|RUNNING\n4711_1|PENDING\n4711_2|PENDING\n")
    assert submit(settings, [SHORT], progress) == 0
    assert "0 of 3 runs submitted" in text_of(progress) and "is running" in text_of(progress)
    assert not (slurm / "4712.sh").exists() and "--jobs=4711" in (slurm / "asked").read_text()

    (slurm / "queue").write_text("4711_0|RUNNING\n4711_2|PENDING\n")
    (settings.run_dir / "jobs" / "4711_1_0_log.err").write_text(
        "a warning\nerror: no such weights\n\n"
    )
    assert submit(settings, [SHORT], progress) == 0
    assert "#SBATCH --array" not in (slurm / "4712.sh").read_text()
    assert "submitted again after error: no such weights" in text_of(progress)
    submitted = json.loads((settings.run_dir / "jobs" / "submitted.json").read_text())
    assert list(submitted.values()) == ["4711_0", "4712", "4711_2"]


def test_runs_of_other_processes_are_not_submitted_but_killed_jobs_are(tmp_path, slurm, progress):
    settings = settings_of(tmp_path / "runs", "--launcher", "slurm", "--seeds", "0,1")
    for seed, host in ((0, "elsewhere"), (1, socket.gethostname())):
        directory = settings.run_dir / "linear" / f"seed-{seed}"
        directory.mkdir(parents=True)
        (directory / ".owner.json").write_text(json.dumps({"pid": os.getpid(), "host": host}))
    assert submit(settings, [SHORT], progress) == 0
    assert not (
        slurm / "4711.sh"
    ).exists() and f"run by process {os.getpid()} on elsewhere" in text_of(progress)
    # the file that killed jobs leave
    (settings.run_dir / "jobs" / "submitted.json").write_text(
        json.dumps({"linear/seed-0": "17_0", "linear/seed-1": "17_1"})
    )
    assert submit(settings, [SHORT], progress) == 0
    assert "1 of 2 runs submitted" in text_of(progress) and (slurm / "4711.sh").exists()


def test_a_waiting_command_reports_every_run_that_ends(tmp_path, slurm, progress, monkeypatch):
    monkeypatch.setitem(SECONDS_BETWEEN_LOOKS, "slurm", 0.0)
    runs = [Run(name, tmp_path / "runs" / name, []) for name in ("good", "bad")]
    for run in runs:
        run.directory.mkdir(parents=True)
    (runs[0].directory / "config.json").write_text('{"tasks": ["a"]}')
    (slurm / "results").write_text('{"tasks": ["a"]}')
    (slurm / "squeue").write_text(f"""#!/bin/sh
        cd {slurm}
        echo >> calls
        case $(wc -l < calls) in
            1) echo "4711_0|RUNNING"; echo "4711_1|PENDING";;
            2) echo "slurm_load_jobs error: Socket timed out" >&2; exit 1;;
            3) cp results {runs[0].directory}/results.json; echo "4711_1|RUNNING";;
            *) echo "slurm_load_jobs error: Invalid job id specified" >&2; exit 1;;
        esac
    """)
    logs = tmp_path / "runs" / "jobs"
    calls = []
    logs.mkdir()
    (logs / "4711_1_0_log.err").write_text("error: out of memory")
    waiting = LauncherConfig("slurm", wait=True)
    with pytest.raises(SystemExit) as stop:
        launching.finish(Sweep(waiting, logs, runs, progress, lambda: calls.append("tables")))
    assert stop.value.code == 1 and calls == ["tables"]
    output = [
        line
        for line in text_of(progress).splitlines()
        if line.startswith(("2 runs:", "bad", "squeue"))
    ]
    assert output == [
        "2 runs: 1 running, 1 queued",
        (
            "squeue does not list the running jobs: slurm_load_jobs error: Socket timed out;"
            " asking again"
        ),
        "2 runs: 1 finished, 1 running",
        f"bad failed: error: out of memory ({logs / '4711_1_0_log.err'})",
        "2 runs: 1 finished, 1 failed",
    ]


def test_ctrl_c_ends_only_the_waiting_and_not_the_jobs(tmp_path, slurm, progress, monkeypatch):
    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(launching, "sleep", interrupt)
    settings = settings_of(
        tmp_path / "runs", "--launcher", "slurm", "--launcher.wait", "--seeds", "0,1"
    )
    assert submit(settings, [SHORT], progress) == 130
    assert "the jobs continue; to end them: scancel 4711\n" in text_of(progress)


@pytest.mark.parametrize("method", NAMES)
def test_a_job_reads_its_settings_from_its_arguments(method, tmp_path):
    settings = settings_of(tmp_path, "--methods", method, "--launcher", "slurm", "--seeds", "3")
    (variant,) = compare.variants_of(settings)
    one = study.run_settings(settings, variant, 3)
    again = cheem_run.read_arguments(arguments_of(cheem_run.make_portable(one)))
    assert (
        cheem_run.make_run_config(again) == cheem_run.make_run_config(one)
        and again.run_dir == tmp_path / method / "seed-3"
    )
    assert again == dataclasses.replace(one, options=again.options)


def test_concurrent_runs_share_no_gpu(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    config = LauncherConfig("local", jobs=2, gpus=2)
    assert launching.devices_of(config, 1) == ["CUDA_VISIBLE_DEVICES=2,3"]
    assert launching.devices_of(LauncherConfig("local"), 0) == ["-u", "CUDA_VISIBLE_DEVICES"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
    assert launching.devices_of(dataclasses.replace(config, gpus=1), 1) == [
        "CUDA_VISIBLE_DEVICES=5"
    ]
    assert launching.devices_of(LauncherConfig("local"), 0) == ["CUDA_VISIBLE_DEVICES=4,5,6"]
    with pytest.raises(ValueError, match="request 4 GPUs; CUDA_VISIBLE_DEVICES is '4,5,6'"):
        launching.devices_of(config, 0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            "--launcher slurm",
            "needs SLURM's sbatch, which is not on this machine; try --launcher local",
        ),
        (
            "--launcher.partition gpu",
            "--launcher.partition has no effect with --launcher none",
        ),
        (
            "--launcher local --launcher.nodes 2",
            "--launcher.nodes has no effect with --launcher local",
        ),
        ("--launcher local --launcher.jobs 0", "--launcher.jobs is 0; expected at least 1"),
        ("--launcher local --stream NOWHERE", "NOWHERE"),
    ],
)
def test_impossible_launchers_are_refused_before_anything_is_written(
    arguments, message, tmp_path, capsys, monkeypatch
):
    monkeypatch.setenv("PATH", str(tmp_path))
    settings = settings_of(tmp_path / "runs", *arguments.split())
    with pytest.raises(SystemExit) as stop:
        run_command(compare.main, settings, settings.run_dir)
    complaint = capsys.readouterr().err
    assert stop.value.code == 2 and message in complaint and complaint.count("\n") == 1
    assert not list(tmp_path.rglob("*"))


def test_a_missing_submitit_and_an_unwritable_folder_are_refused(tmp_path, progress, monkeypatch):
    settings = settings_of(tmp_path, "--launcher", "local")
    (tmp_path / "jobs").write_text("")
    with pytest.raises(
        ValueError, match=r"jobs, for the logs of jobs, cannot be made .*; choose another --run-dir"
    ):
        study.run_all(settings, [SHORT], progress, lambda results: None)
    monkeypatch.setitem(sys.modules, "submitit", None)
    with pytest.raises(
        ValueError, match=r"jobs need submitit .*; pip install 'cheem_jax\[cluster\]'"
    ):
        study.run_all(settings, [SHORT], progress, lambda results: None)


def test_a_refusal_of_slurm_is_reported_with_its_message(tmp_path, slurm, progress, capsys):
    settings = settings_of(tmp_path / "runs", "--launcher", "slurm", "--launcher.partition", "none")
    (slurm / "sbatch").write_text(
        "#!/bin/sh\necho 'sbatch: error: invalid partition specified: none' >&2; exit 1"
    )
    with pytest.raises(
        ValueError,
        match="sbatch refused the jobs: sbatch: error: invalid partition specified: none",
    ):
        study.run_all(settings, [SHORT], progress, lambda results: None)
    assert (
        capsys.readouterr().err == ""
        and not (settings.run_dir / "jobs" / "submitted.json").exists()
    )


def test_the_processes_of_a_run_on_more_than_one_node_find_each_other():
    assert launching.host_arguments(LauncherConfig("slurm")) == []
    output = shlex.join(launching.host_arguments(LauncherConfig("slurm", nodes=2)))
    assert output == "--hosts.coordinator auto --devices all"
