"""Two processes with two devices each, over loopback: one job, and errors if it is not one."""

import json
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import spmd

from cheem_jax.baselines.catalogue import NAMES
from cheem_jax.engine import hosts
from cheem_jax.engine.hosts import HostsConfig
from cheem_jax.run.record import read

STEPS = {"supernet": {"epochs": 17}}
"""Settings for 51 steps, three in an epoch."""
LONG = {"supernet": {"epochs": 4000}}
"""Settings for a run that lasts longer than any test waits."""


def learned(folder: Path) -> list[dict]:
    return [
        entry["report"]
        for entry in read(folder)
        if entry["event"] == "learned" and entry["method"] == "cheem"
    ]


def until(condition, processes: list) -> None:
    """Wait for an event in a job; a process that ends earlier is an error with the end of its
    output."""
    while not condition():
        for process in processes:
            assert process.poll() is None, process.stdout.read()
        time.sleep(0.1)


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Path:
    """The run of one process on one device."""
    folder = tmp_path_factory.mktemp("alone")
    ((status, said),) = spmd.finish(
        [
            spmd.start(
                "stream",
                folder / "0.json",
                devices=1,
                method="cheem",
                run_dir=str(folder / "run"),
                **STEPS,
            )
        ]
    )
    assert status == 0, said
    return folder / "run"


@pytest.mark.full
def test_two_processes_learn_the_same_as_one_and_only_the_first_writes_and_prints(alone, tmp_path):
    job = spmd.finish(
        spmd.start_job("stream", tmp_path, method="cheem", run_dir=str(tmp_path / "run"), **STEPS)
    )
    assert [status for status, _ in job] == [0, 0], job
    assert "4 devices in 2 processes" in job[0][1] and "task0" not in job[1][1]
    for one, two in zip(learned(alone), learned(tmp_path / "run"), strict=True):
        assert two["architecture"] == one["architecture"]
        assert two["search"]["correct"] == one["search"]["correct"]
        for phase in ("supernet_losses", "finetune_losses"):
            np.testing.assert_allclose(two[phase], one[phase], rtol=1e-4)
    result = [json.loads((tmp_path / f"{process}.json").read_text()) for process in range(2)]
    assert (
        result[0]["accuracy"]
        == result[1]["accuracy"]
        == json.loads((alone / "results.json").read_text())["accuracy"]
    )
    assert [entry["event"] for entry in read(alone)] == [
        entry["event"] for entry in read(tmp_path / "run")
    ]


@pytest.mark.full
@pytest.mark.parametrize(
    ("victim", "devices"), [(1, 1), pytest.param(0, 4, marks=pytest.mark.slow)]
)
def test_a_killed_process_ends_the_others_and_the_run_continues_with_another_number(
    victim, devices, alone, tmp_path
):
    run = tmp_path / "run"
    settings = {"method": "cheem", "run_dir": str(run), "save_every": 0.0, "tasks": 1, **STEPS}
    job = spmd.start_job("stream", tmp_path, **settings, hosts_timeout=10)
    until(lambda: list(run.glob("checkpoints/cheem/running-*/manifest.json")), job)
    job[victim].kill()
    status, said = spmd.finish(job)[1 - victim]
    assert status != 0, said
    # the broken connection is raised as an error, unless JAX's runtime ends the process first
    assert "Traceback" not in said or "start the job again" in said, said
    ((status, said),) = spmd.finish(
        [spmd.start("stream", tmp_path / "again.json", devices=devices, **settings)]
    )
    assert status == 0 and "resuming" in said, said
    (again,) = learned(run)
    assert again["architecture"] == learned(alone)[0]["architecture"]


@pytest.mark.full
def test_a_request_to_stop_one_process_stops_all_at_the_same_step(tmp_path):
    run = tmp_path / "run"
    settings = {"method": "cheem", "run_dir": str(run), "tasks": 1, **LONG}
    job = spmd.start_job("stream", tmp_path, **settings)
    until(
        lambda: (
            (run / ".status.json").exists() and "supernet" in (run / ".status.json").read_text()
        ),
        job,
    )
    job[1].send_signal(signal.SIGTERM)
    assert [status for status, _ in spmd.finish(job)] == [128 + signal.SIGTERM] * 2
    assert list(run.glob("checkpoints/cheem/running-*/manifest.json"))


@pytest.mark.parametrize(
    "method",
    [
        pytest.param(name, marks=pytest.mark.full if name == "auto" else pytest.mark.slow)
        for name in (*NAMES, "auto")
        if name != "cheem"
    ],
)
def test_every_method_learns_the_same_in_two_processes_as_in_one(method, tmp_path):
    # the preset auto augments, eliminates, truncates and compares with the frozen backbone
    settings = {"method": "cheem", "auto": True} if method == "auto" else {"method": method}
    (one,) = spmd.finish(
        [
            spmd.start(
                "stream",
                tmp_path / "one.json",
                devices=1,
                run_dir=str(tmp_path / "one"),
                **settings,
            )
        ]
    )
    both = spmd.finish(
        spmd.start_job(
            "stream", tmp_path / "two", run_dir=str(tmp_path / "two" / "run"), **settings
        )
    )
    assert [status for status, _ in (one, *both)] == [0, 0, 0], (one, both)
    files = (tmp_path / "one.json", tmp_path / "two" / "0.json", tmp_path / "two" / "1.json")
    alone, first, second = (json.loads(file.read_text())["accuracy"] for file in files)
    assert first == second
    # sums over two devices are rounded otherwise, which can decide a close answer among 20 images
    np.testing.assert_allclose(np.array(first, float), np.array(alone, float), atol=0.1)


@pytest.mark.full
def test_processes_with_different_settings_are_refused_before_anything_is_written(tmp_path):
    job = spmd.start_job(
        "stream",
        tmp_path,
        method="cheem",
        run_dir=str(tmp_path / "run"),
        each=[{"tasks": 2}, {"tasks": 3}],
    )
    for status, said in spmd.finish(job):
        assert (
            status == 2
            and "the data fingerprints of process 1 of 2 differ from those of process 0" in said
        ), said
    assert not (tmp_path / "run").exists()


@pytest.mark.full
def test_a_coordinator_that_cannot_be_reached_is_an_error_after_the_patience():
    with pytest.raises(
        ValueError, match="127.0.0.1:9 could not be reached within 5 s .*process 0 is running"
    ):
        hosts.connect(HostsConfig("127.0.0.1:9", 2, 1, patience=5))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"coordinator": "node:x", "num_processes": 2, "process_id": 0}, "expected HOST:PORT"),
        ({"coordinator": "node:1"}, "without num_processes or process_id; set both"),
        ({"num_processes": 2}, "without hosts coordinator"),
        (
            {"coordinator": "node:1", "num_processes": 2, "process_id": 2},
            "process_id is 2; expected 0 to 1",
        ),
        ({"timeout": 1}, "expected at least 5 s"),
    ],
)
def test_settings_of_a_job_that_cannot_work_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        HostsConfig(**settings)


@pytest.mark.parametrize(
    ("environment", "devices"),
    [
        ({"SLURM_NTASKS": "4", "SLURM_STEP_NUM_NODES": "4"}, []),
        ({"SLURM_NTASKS": "32", "SLURM_STEP_NUM_NODES": "4"}, None),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "1"}, []),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "8"}, None),
        ({}, None),
    ],
)
def test_one_process_on_a_machine_uses_all_its_devices_and_several_share_them(environment, devices):
    assert hosts._local_devices(HostsConfig("auto"), environment) == devices
    assert hosts._local_devices(HostsConfig("node:1", 2, 0), environment) == []


def test_one_process_alone_agrees_with_itself():
    assert (hosts.count(), hosts.index(), hosts.largest(3), hosts.smallest(4)) == (1, 0, 3, 4)
    assert hosts.in_order(lambda: 5) == hosts.together(lambda: 5) == 5
    hosts.check_equal("data", {"a": 1}, "nothing to do")
    with pytest.raises(OSError, match="full"):
        hosts.run_on_first(lambda: (_ for _ in ()).throw(OSError("full")))
