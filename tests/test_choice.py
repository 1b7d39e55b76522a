"""Which executor is taken, and that the log can say why."""

import dataclasses
from typing import get_args

import jax.numpy as jnp
import numpy as np
import pytest
import small
from flax import nnx

from cheem_jax.backbone.config import find_config
from cheem_jax.backbone.flops import backbone_flops
from cheem_jax.backbone.params import build
from cheem_jax.backbone.vit import ViT
from cheem_jax.core.settings import Precision
from cheem_jax.engine import choice
from cheem_jax.engine.choice import EngineConfig, choose, make_executor

SMALL, LARGE = find_config("vit_micro"), find_config("vit_base")
MEASURED = [
    {
        "platform": "gpu",
        "device": "a card",
        "name": name,
        "precision": precision,
        "flops": flops,
        "seconds": seconds,
    }
    for name, precision, flops, seconds in (
        (
            "small",
            "float32",
            32 * backbone_flops(SMALL),
            {"stages": 2.0, "whole": 9.0, "scan": 1.0},
        ),
        (
            "large",
            "float32",
            64 * backbone_flops(LARGE),
            {"stages": 2.0, "whole": 9.0, "scan": 3.0},
        ),
        ("rounded", "bfloat16", 32 * backbone_flops(LARGE), {"stages": 1.5, "scan": 1.0}),
    )
]


def test_auto_chooses_the_fastest_executor_of_the_nearest_measurement(monkeypatch):
    monkeypatch.setattr(choice, "measurements", lambda: MEASURED)
    small_one, large_one = (
        choose(EngineConfig(), SMALL, 16, "gpu"),
        choose(EngineConfig(), LARGE, 256, "gpu"),
    )
    assert small_one == (
        "scan",
        "the fastest executor in a measurement of small on a card;"
        " a batch has 0.5 times the FLOPs of that measurement",
    )
    assert large_one == (
        "stages",
        "the fastest executor in a measurement of large on a card;"
        " a batch has 4 times the FLOPs of that measurement",
    )


def test_a_measurement_of_this_very_batch_is_reported_as_it_is(monkeypatch):
    monkeypatch.setattr(choice, "measurements", lambda: MEASURED)
    assert (
        choose(EngineConfig(), SMALL, 32, "gpu")[1]
        == "the fastest executor in a measurement of small on a card"
    )


def test_without_a_measurement_auto_says_so(monkeypatch):
    monkeypatch.setattr(choice, "measurements", lambda: MEASURED)
    for config, batch_size, platform, name in (
        (SMALL, 16, "tpu", "scan"),  # small backbones wait for the host's dispatches
        (find_config("deit_tiny"), 32, "tpu", "scan"),
        (LARGE, 32, "tpu", "stages"),
        (dataclasses.replace(SMALL, precision="bfloat16"), 16, "cpu", "stages"),
    ):
        chosen, reason = choose(EngineConfig(), config, batch_size, platform)
        assert chosen == name
        assert f"there is no measurement on {platform} in {config.precision}" in reason


def test_a_measurement_in_another_precision_is_none(monkeypatch):
    monkeypatch.setattr(choice, "measurements", lambda: MEASURED)
    assert choose(EngineConfig(), LARGE, 32, "gpu")[0] == "stages"
    assert choose(EngineConfig(), dataclasses.replace(LARGE, precision="bfloat16"), 64, "gpu") == (
        "scan",
        "the fastest executor in a measurement of rounded on a card;"
        " a batch has 2 times the FLOPs of that measurement",
    )


@pytest.mark.parametrize("name", ["stages", "whole", "scan"])
def test_the_users_choice_of_executor_is_kept(name):
    executor = make_executor(
        small.backbone(), "mlp_down", EngineConfig(name, memory_gb=0.25), batch_size=4
    )
    assert executor.name == executor.counters()["executor"] == name
    assert executor.budget == 2**28
    assert choose(EngineConfig(name), SMALL, 16) == (name, "as configured")


def test_every_measured_executor_exists():
    measured = choice.measurements()
    assert measured
    for entry in measured:
        assert {"stages"} <= set(entry["seconds"]) <= set(get_args(choice.Name))
        assert entry["flops"] > 0
        assert entry["precision"] in get_args(Precision)
        assert min(entry["seconds"].values()) > 0


def test_memory_for_less_than_a_batch_is_refused_and_none_is_not():
    with pytest.raises(ValueError, match="one batch of 64 images"):
        make_executor(small.backbone(), "mlp_down", EngineConfig(memory_gb=1e-6), batch_size=64)
    assert (
        make_executor(small.backbone(), "mlp_down", EngineConfig(memory_gb=0), batch_size=64).budget
        == 0
    )


@pytest.mark.parametrize("field", ["programs", "steps_per_call"])
def test_counts_below_one_are_refused(field):
    with pytest.raises(ValueError, match=f"{field} is 0"):
        EngineConfig(**{field: 0})


@pytest.mark.full
def test_the_precision_reaches_the_blocks_and_the_answers():
    given = small.pretrained()
    images = np.random.default_rng(0).integers(0, 256, (4, 8, 8, 3), dtype=np.uint8)
    result = []
    for precision in ("float32", "bfloat16"):
        vit = build(dataclasses.replace(given.config, precision=precision), given.params)
        assert {block.precision for block in vit.blocks} == {precision}
        result.append(np.asarray(nnx.jit(ViT.__call__)(vit, jnp.asarray(images))))
    assert result[1].dtype == np.float32
    assert 0 < np.abs(result[1] - result[0]).max() < 0.2
