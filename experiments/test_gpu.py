"""The script for an accelerator, tested on a CPU: its parts, its queue and its time limit."""

import json
import sys
import tarfile
import time

import gpu
import pytest

from cheem_jax.data.demo import TASKS


@pytest.mark.full
def test_the_parts_smoke_and_runs_write_records_without_checkpoints(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu, "QUEUE", gpu.QUEUE[:1])
    # its processes mostly compile, and how fast their code is does not matter
    monkeypatch.setenv("XLA_FLAGS", "--xla_backend_optimization_level=0")
    gpu.main(gpu.Gpu(only="smoke,runs", miniature=True, out=tmp_path))
    smoke = json.loads((tmp_path / "smoke.json").read_text())
    assert smoke["deterministic"] and smoke["scan bfloat16"]["largest_difference"] > 0
    assert all(
        smoke[f"{name} float32"]["largest_difference"] < 1e-4
        for name in ("stages", "whole", "scan")
    )
    with tarfile.open(tmp_path / "records.tar.gz") as archive:
        names = archive.getnames()
    assert (
        "smoke.json" in names
        and "runs/frozen_linear-quick/frozen_linear/seed-0/results.json" in names
    )
    assert not any("checkpoints" in name for name in names)


@pytest.mark.full
def test_late_scripts_are_interrupted_and_failures_are_reported(tmp_path):
    start = time.monotonic()
    how = gpu.limited(["-c", "import time; time.sleep(600)"], 0.5)
    assert how.startswith("interrupted after") and time.monotonic() - start < 300
    assert gpu.limited(["-c", "raise SystemExit(3)"], 60).endswith("status 3")


def test_no_part_starts_without_time_and_a_failed_part_is_an_error(tmp_path, monkeypatch):
    scripts = [gpu.Part("fails", ["-c", "raise SystemExit(2)"]), gpu.Part("works", ["-c", "pass"])]
    monkeypatch.setattr(gpu, "commands", lambda settings, parts: iter(scripts))
    with pytest.raises(SystemExit, match="fails: .*status 2"):
        gpu.main(gpu.Gpu(out=tmp_path))
    assert "status" not in (tmp_path / "ended.txt").read_text().splitlines()[1]
    gpu.main(gpu.Gpu(out=tmp_path, seconds=gpu.GRACE + 0.5))
    assert (
        tmp_path / "ended.txt"
    ).read_text() == "fails: no time was left\nworks: no time was left\n"


def test_parallel_processes_share_the_memory_and_have_separate_logs(tmp_path, monkeypatch):
    monkeypatch.delenv("XLA_PYTHON_CLIENT_MEM_FRACTION", raising=False)
    wait = (  # until the other process has started
        "import os, sys, time; from pathlib import Path; here = Path(sys.argv[2]); (here /"
        " sys.argv[1]).touch()\nstart = time.monotonic()\nwhile len([*here.iterdir()]) < 2 and"
        " time.monotonic() < start + 300: time.sleep(0.01)\nprint(sys.argv[1],"
        " os.environ['XLA_PYTHON_CLIENT_MEM_FRACTION'])"
    )
    (here := tmp_path / "started").mkdir()
    scripts = [gpu.Part(name, ["-c", wait, name, f"{here}"]) for name in ("one", "two")]
    monkeypatch.setattr(gpu, "commands", lambda settings, parts: iter(scripts))
    gpu.main(gpu.Gpu(out=tmp_path / "out", parallel=2))
    with tarfile.open(tmp_path / "out" / "records.tar.gz") as archive:
        logs = [archive.extractfile(f"logs/{name}.log").read() for name in ("one", "two")]
    assert logs == [b"one 0.450\n", b"two 0.450\n"]


def test_runs_with_the_same_choice_of_settings_run_one_after_another(tmp_path, monkeypatch):
    begin = (
        "import sys; from pathlib import Path; Path(sys.argv[1]).mkdir(); import time;"
        " time.sleep(0.2)"
    )
    alone = f"{begin}; Path(sys.argv[1]).rmdir()"  # fails while the other process is running
    scripts = [
        gpu.Part(name, ["-c", alone, f"{tmp_path / 'place'}"], "one choice")
        for name in ("seed 0", "seed 1")
    ]
    monkeypatch.setattr(gpu, "commands", lambda settings, parts: iter(scripts))
    gpu.main(gpu.Gpu(out=tmp_path / "out", parallel=2))
    assert "status" not in (tmp_path / "out" / "ended.txt").read_text()
    monkeypatch.undo()
    choices = {
        part.name: part.choice
        for part in gpu.commands(gpu.Gpu(choose="shapes", only="runs"), ["runs"])
    }
    like = [name for name, choice in choices.items() if choice.endswith("/cheem-quick")]
    assert {"cheem:elimination, quick, seed 1", "cheem:uniform, quick, seed 0"} < set(like)
    assert len(like) == 8


def test_an_earlier_choice_is_used_by_every_run():
    settings = gpu.Gpu(stream="demo", choose="chosen.json", only="runs")
    choices = {
        (words[words.index("--choose") + 1], choice)
        for _, words, choice in gpu.commands(settings, ["runs"])
    }
    assert choices == {("chosen.json", "")}


def test_without_a_choice_no_pair_of_unequal_epochs_and_ranks_is_run():
    parts = [part.name for part in gpu.commands(gpu.Gpu(only="runs"), ["runs"])]
    assert not any(name.startswith((gpu.SEARCH, gpu.RISING)) for name in parts)
    assert "lora_cl, quick, seed 0" in parts and "cheem:uniform, quick, seed 0" in parts


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seconds": 5.0}, "--seconds is 5"),
        ({"parallel": 0}, "--parallel is 0"),
        ({"only": "quickly"}, "--only"),
        ({"stream": "x/y"}, "x/y: no such folder"),
    ],
)
def test_wrong_settings_are_refused(tmp_path, changes, message):
    with pytest.raises((ValueError, OSError), match=message):
        gpu.main(gpu.Gpu(out=tmp_path / "new", **changes))
    assert not (tmp_path / "new").exists()


def test_the_most_important_runs_are_first_in_the_queue():
    settings = gpu.Gpu(stream="demo", choose="shapes,colours", only="runs")
    first, second, *others = list(gpu.commands(settings, ["runs"]))
    assert first[0] == "frozen_linear, quick, seed 0" and second[1][-1].endswith("lora_cl-quick")
    assert len({part.name for part in (first, second, *others)}) == len(gpu.QUEUE)
    assert (
        second[1][0].endswith("compare.py")
        and "--choose" in second[1]
        and sys.executable not in second[1]
    )


def test_uniform_sampling_and_the_reversed_order_use_the_settings_chosen_for_their_search(
    monkeypatch,
):
    ablations = (("cheem:uniform", "quick", 0, ""), (gpu.SEARCH, "quick", 0, "reversed"))
    assert set(ablations) < set(gpu.QUEUE)
    monkeypatch.setattr(gpu, "QUEUE", (("cheem", "quick", 0, ""), *ablations))
    usual, uniform, reversed_run = (
        dict(zip(words[1::2], words[2::2], strict=True))
        for _, words, _ in gpu.commands(gpu.Gpu(stream="demo", choose="shapes,colours"), ["runs"])
    )
    assert "--tasks" not in usual and usual["--choose"] == "shapes,colours"
    assert uniform["--choose"] == reversed_run["--choose"] == f"{usual['--run-dir']}/chosen.json"
    assert reversed_run["--tasks"] == ",".join(TASKS[::-1]) and "--tasks" not in uniform
    assert len({each["--run-dir"] for each in (usual, uniform, reversed_run)}) == 3
