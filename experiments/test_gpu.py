"""The command for an accelerator: on a CPU everything but the hardware, within the time that it is given."""

import json
import sys
import tarfile
import time

import gpu
import pytest

from cheem_jax.data.demo import TASKS


@pytest.mark.full
def test_the_smoke_part_and_the_first_run_leave_their_records_and_no_checkpoint(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu, "QUEUE", gpu.QUEUE[:1])
    gpu.main(gpu.Gpu(only="smoke,runs", miniature=True, out=tmp_path))
    smoke = json.loads((tmp_path / "smoke.json").read_text())
    assert smoke["deterministic"] and smoke["scan bfloat16"]["largest_difference"] > 0
    assert all(smoke[f"{name} float32"]["largest_difference"] < 1e-4 for name in ("stages", "whole", "scan"))
    with tarfile.open(tmp_path / "records.tar.gz") as archive:
        names = archive.getnames()
    assert "smoke.json" in names and "runs/frozen_linear-quick/frozen_linear/seed-0/results.json" in names
    assert not any("checkpoints" in name for name in names)


@pytest.mark.full
def test_what_does_not_end_in_time_is_interrupted_and_what_fails_is_told(tmp_path):
    begun = time.monotonic()
    told = gpu.limited(["-c", "import time; time.sleep(600)"], 0.5)
    assert told.startswith("interrupted after") and time.monotonic() - begun < 300
    assert gpu.limited(["-c", "raise SystemExit(3)"], 60).endswith("status 3")


def test_no_part_begins_without_time_left_and_a_failed_one_ends_with_an_error(tmp_path, monkeypatch):
    scripts = [("fails", ["-c", "raise SystemExit(2)"]), ("works", ["-c", "pass"])]
    monkeypatch.setattr(gpu, "commands", lambda settings, parts: iter(scripts))
    with pytest.raises(SystemExit, match="fails: .*status 2"):
        gpu.main(gpu.Gpu(out=tmp_path))
    assert "status" not in (tmp_path / "ended.txt").read_text().splitlines()[1]
    gpu.main(gpu.Gpu(out=tmp_path, seconds=gpu.GRACE + 0.5))
    assert (tmp_path / "ended.txt").read_text() == "fails: no time was left\nworks: no time was left\n"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [({"seconds": 5.0}, "--seconds is 5"), ({"only": "speed"}, "--only"), ({"stream": "x/y"}, "x/y: no such folder")],
)
def test_wrong_settings_are_refused(tmp_path, wrong, message):
    with pytest.raises((ValueError, OSError), match=message):
        gpu.main(gpu.Gpu(out=tmp_path / "new", **wrong))
    assert not (tmp_path / "new").exists()


def test_the_queue_begins_with_what_the_evidence_needs_first():
    settings = gpu.Gpu(stream="demo", choose="shapes,colours", only="runs")
    first, second, *others = list(gpu.commands(settings, ["runs"]))
    assert first[0] == "frozen_linear, quick, seed 0" and second[1][-1].endswith("lora_cl-quick")
    assert len({name for name, _ in (first, second, *others)}) == len(gpu.QUEUE)
    assert second[1][0].endswith("compare.py") and "--choose" in second[1] and sys.executable not in second[1]


def test_uniform_sampling_and_the_reversed_order_have_the_settings_chosen_for_their_search(monkeypatch):
    ablations = (("cheem:uniform", "quick", 0, ""), (gpu.LIKE, "quick", 0, "reversed"))
    assert set(ablations) < set(gpu.QUEUE)
    monkeypatch.setattr(gpu, "QUEUE", ((gpu.LIKE, "quick", 0, ""), *ablations))
    usual, uniform, turned = (
        dict(zip(words[1::2], words[2::2], strict=True))
        for _, words in gpu.commands(gpu.Gpu(stream="demo", choose="shapes,colours"), ["runs"])
    )
    assert "--tasks" not in usual and usual["--choose"] == "shapes,colours"
    assert uniform["--choose"] == turned["--choose"] == f"{usual['--run-dir']}/chosen.json"
    assert turned["--tasks"] == ",".join(TASKS[::-1]) and "--tasks" not in uniform
    assert len({each["--run-dir"] for each in (usual, uniform, turned)}) == 3
