"""The comparison of executors: counted costs, written files and refused settings."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import jit_profile
import pytest
from bench import measure

from cheem_jax.backbone.config import find_config
from cheem_jax.core.architecture import from_strings


@pytest.mark.full
def test_a_small_comparison_writes_numbers_and_a_table(tmp_path, monkeypatch):
    monkeypatch.setenv(
        "XLA_FLAGS", "--xla_backend_optimization_level=0"
    )  # for the measuring processes: quick to compile
    settings = jit_profile.Profile(
        ("vit_nano",),
        None,
        (4,),
        ("stages", "whole"),
        num_samples=2,
        repeats=1,
        out=tmp_path / "new",
    )
    jit_profile.main(settings)

    results = json.loads((tmp_path / "new" / "jit_profile.json").read_text())
    [case] = results["configurations"]
    assert (
        results["machine"]["platform"] == "cpu"
        and case["name"] == "vit_nano 32 px, batch 4, float32"
    )
    assert case["num_draws"] == case["num_signatures"] == 2
    forward = case["backbone_flops"]
    assert 0.5 * forward < case["step_flops"] < 4 * forward
    assert list(case["executors"]) == ["stages", "whole"]
    for entry in case["executors"].values():
        assert (
            entry["programs"] > 2
            and len(entry["cold_seconds"]) == len(entry["repeated_seconds"][0]) == 2
        )
        assert 0 < entry["compile_seconds"] < sum(entry["cold_seconds"]) < 100
        assert 0 < entry["step_seconds"] < entry["first_step_seconds"]
        assert entry["images_per_second"] == pytest.approx(4 / entry["step_seconds"])
        assert 0 < entry["share_of_peak"] < 1 and entry["memory_bytes"] > 0
    table = (tmp_path / "new" / "jit_profile.md").read_text()
    assert table.count("\n| vit_nano | float32 | ") == 2

    measured = tmp_path / "measured.json"
    other = {
        "platform": "gpu",
        "device": "some",
        "name": case["name"],
        "flops": 1,
        "seconds": {"scan": 1.0},
    }
    measured.write_text(json.dumps({"measurements": [other]}))
    for _ in range(2):  # the second call replaces the measurement of the first call
        jit_profile.merge_measurements(results, measured)
    earlier, new = json.loads(measured.read_text())["measurements"]
    assert earlier == other and new["name"] == case["name"] and new["flops"] == forward
    assert new["precision"] == "float32"
    executors = case["executors"]
    assert new["seconds"] == {
        "stages": executors["stages"]["step_seconds"],
        "whole": executors["whole"]["first_step_seconds"],
    }


@pytest.mark.parametrize(
    "steps_per_call, waits", [(1, [8, 16, 19]), (3, [9, 18, 21]), (8, [8, 16, 24])]
)
def test_steps_wait_for_the_device_as_often_as_training_does(monkeypatch, steps_per_call, waits):
    clock, waited = [0.0], []

    def train_steps(executor, supernet, state, samples, steps, rates):
        clock[0] += executor.steps_per_call
        return state, [0.0] * len(samples)

    monkeypatch.setattr(measure, "train_steps", train_steps)
    monkeypatch.setattr(jit_profile, "step_of", lambda *_: None)
    monkeypatch.setattr(jit_profile.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(jit_profile.jax, "block_until_ready", lambda _: waited.append(clock[0]))
    subject = object.__new__(jit_profile.Subject)
    subject.executor = SimpleNamespace(steps_per_call=steps_per_call)
    subject.training = measure.Training(subject.executor, None, None)
    subject.architectures = [None] * 19
    subject.feed = subject.labels = subject.batch = None
    assert subject.train() == [1.0] * 19 and waited == waits


@pytest.mark.parametrize(
    "changed, message",
    [
        ({"backbones": ("vit_nono",)}, "unknown backbone 'vit_nono'; most similar: vit_nano"),
        ({"batch_sizes": (16, 0)}, "batch_sizes is (16, 0); expected at least 1"),
        ({"num_samples": 0}, "num_samples is 0; expected at least 1"),
        (
            {"executors": ("stages",), "record": True},
            "--record compares all executors, not only stages",
        ),
        ({"out": Path(__file__)}, "which is not a folder; expected one that exists or can be made"),
    ],
)
def test_settings_that_cannot_be_measured_are_refused(tmp_path, changed, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        jit_profile.main(jit_profile.Profile(**({"out": tmp_path / "out"} | changed)))
    assert not (tmp_path / "out").exists()


def test_the_flops_of_a_step_follow_from_the_shapes_of_a_real_backbone():
    config = find_config("deit_tiny")
    frozen = measure.step_flops(config, from_strings(["reuse:0"] * 12), 16)
    learned = measure.step_flops(config, from_strings(["new"] + ["reuse:0"] * 11), 16)
    assert (
        2.2e9 < frozen < 2.5e9 and 1.9 < learned / frozen < 2.1
    )  # it would be 2.507 G if the last block computed all tokens
