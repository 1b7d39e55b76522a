"""The profiling study: what it counts, what it writes, what it refuses."""

import json
from pathlib import Path
from types import SimpleNamespace

import jit_profile
import pytest
from bench import measure

from cheem_jax.backbone.config import config_of
from cheem_jax.cli.running import run_command
from cheem_jax.core.architecture import from_strings


@pytest.mark.full
def test_a_small_study_writes_numbers_and_a_table(tmp_path, monkeypatch):
    monkeypatch.setenv(
        "XLA_FLAGS", "--xla_backend_optimization_level=0"
    )  # for the measuring processes: quick to compile
    settings = jit_profile.Profile(
        "vit_nano", None, "4", "stages,whole", num_draws=2, repeats=1, out=tmp_path / "new"
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
    for _ in range(2):  # the second time it replaces what the first one wrote
        jit_profile.merge_measurements(results, measured)
    kept, new = json.loads(measured.read_text())["measurements"]
    assert kept == other and new["name"] == case["name"] and new["flops"] == forward
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

    def trained(executor, supernet, state, drawn, steps, rates):
        clock[0] += executor.steps_per_call
        return state, [0.0] * len(drawn)

    monkeypatch.setattr(jit_profile, "train_steps", trained)
    monkeypatch.setattr(jit_profile, "step_of", lambda *_: None)
    monkeypatch.setattr(jit_profile.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(jit_profile.jax, "block_until_ready", lambda _: waited.append(clock[0]))
    subject = object.__new__(jit_profile.Subject)
    subject.executor = SimpleNamespace(steps_per_call=steps_per_call)
    subject.fitting = SimpleNamespace(supernet=None, state=None)
    subject.architectures = [None] * 19
    subject.feed = subject.labels = subject.batch = None
    assert subject.train() == [1.0] * 19 and waited == waits


@pytest.mark.parametrize(
    "changed, said",
    [
        (
            {"executors": "stages,hole"},
            "--executors names 'hole'; expected some of: stages, whole, scan",
        ),
        ({"backbones": "vit_nono"}, "unknown backbone 'vit_nono'; nearest: vit_nano"),
        ({"batch_sizes": "16,0"}, "batch size is '0'; expected a whole number"),
        ({"precisions": "float16"}, "--precisions names 'float16'"),
        ({"num_draws": 0}, "num_draws is 0; expected at least 1"),
        (
            {"executors": "stages", "record": True},
            "--record compares all executors, not only stages",
        ),
        ({"out": Path(__file__)}, "which is not a folder; expected one that exists or can be made"),
    ],
)
def test_what_cannot_be_measured_is_named_in_one_line_and_status_2(capsys, tmp_path, changed, said):
    settings = jit_profile.Profile(**({"out": tmp_path / "out"} | changed))
    with pytest.raises(SystemExit) as stop:
        run_command(jit_profile.main, settings)
    error = capsys.readouterr().err
    assert stop.value.code == 2 and error.startswith("error: ") and error.count("\n") == 1
    assert said in error
    assert not (tmp_path / "out").exists()


def test_a_real_backbone_costs_what_its_shapes_say():
    config = config_of("deit_tiny")
    frozen = measure.step_flops(config, from_strings(["reuse:0"] * 12), 16)
    learned = measure.step_flops(config, from_strings(["new"] + ["reuse:0"] * 11), 16)
    assert (
        2.2e9 < frozen < 2.5e9 and 1.9 < learned / frozen < 2.1
    )  # 2.507 G if the last block did all its tokens
