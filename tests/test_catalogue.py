"""Every method by name: presets, learners, and settings that are refused before training."""

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import small
from baselines import Watched, check_method, stages

from cheem_jax.baselines.catalogue import (
    NAMES,
    NEED_A_ROUTER,
    FrozenNetworks,
    check_name,
    make,
    make_preset,
)
from cheem_jax.cheem.config import (
    PRESETS,
    CheemConfig,
    CheemLiteConfig,
    ExplorationConfig,
    OpSettings,
    SearchConfig,
)
from cheem_jax.core.keys import Keys
from cheem_jax.core.routing import RouterConfig
from cheem_jax.core.settings import KINDS, FitConfig
from cheem_jax.engine.stages import Stages
from cheem_jax.report import table
from cheem_jax.report.table import UPPER_BOUNDS
from cheem_jax.run.method import FrozenFeatures, Method


def networks(*, routed: bool = False) -> FrozenNetworks:
    features = FrozenFeatures(stages(), 16)
    return FrozenNetworks(stages(), features, FrozenFeatures(stages(), 16) if routed else features)


def fitting_config(name: str, preset: str = "demo"):
    """Return a preset that fits a backbone of four blocks."""
    config = make_preset(name, preset)
    if name in ("coda_prompt", "dualprompt"):
        fields = [f.name for f in dataclasses.fields(config) if f.name.endswith("layers")]
        config = dataclasses.replace(
            config, **{field: (index,) for index, field in enumerate(fields)}
        )
    return config


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("preset", PRESETS)
def test_every_method_has_every_preset(name, preset):
    config = make_preset(name, preset)
    assert config.name == name and config.batch_size >= 1
    if preset == "paper" and name not in ("cheem", "cheem_lite"):
        assert config == type(config)()  # the defaults are the paper's comparison


def test_with_the_plus_presets_the_baselines_that_can_have_the_router_of_cheem():
    for name in ("lora_cl", "frozen_linear"):
        for preset, usual in (("quick_plus", "quick"), ("cheem_plus", "paper")):
            router = PRESETS[preset].router
            assert router != RouterConfig()
            expected = dataclasses.replace(make_preset(name, usual), router=router)
            assert make_preset(name, preset) == expected
    assert make_preset("s_prompts", "quick_plus") == make_preset("s_prompts", "quick")
    for name in ("cheem", "l2p"):
        with pytest.raises(ValueError, match="unknown preset 'papr'; .*paper"):
            make_preset(name, "papr")


@pytest.mark.parametrize("name", NAMES)
def test_every_method_is_made_from_its_settings(name):
    method = make(fitting_config(name), networks(routed=name in NEED_A_ROUTER), Keys(0), 2)
    assert isinstance(method, Method) and method.name == name
    assert all(isinstance(note, str) for note in method.check(small.stream(2).tasks))
    assert getattr(method, "needs_task_id", False) == (name in UPPER_BOUNDS)


@pytest.mark.parametrize(
    "name", ["frozen_linear", pytest.param("cheem_lite", marks=pytest.mark.full)]
)
def test_every_method_keeps_the_laws_of_a_method(name, tmp_path):
    config = make_preset(name, "demo")
    if name == "cheem_lite":
        config = CheemLiteConfig(**vars(small.QUICK))
    method = make(config, networks(routed=name == "cheem_lite"), Keys(0), 3)
    check_method(method, tmp_path, stops=name == "cheem_lite")


POOLED = ("diki", "l2p", "moe_adapters", "s_prompts")
"""Methods that choose tokens in their code, and therefore have to work without a class token as
well."""


@pytest.mark.full
@pytest.mark.parametrize(
    "name", sorted(set(NAMES) - {"cheem", "cheem_lite", "frozen_linear", "lora_finetune"})
)
def test_given_the_task_id_every_baseline_is_as_accurate_as_frozen_heads_on_an_easy_stream(name):
    executor = pooled_stages() if name in POOLED else stages()
    reference = FrozenFeatures(executor, 16)
    features = FrozenFeatures(stages(), 16) if name in NEED_A_ROUTER else reference
    config: Any = fitting_config(name)
    if name == "full_finetune":
        config = dataclasses.replace(config, batch_size=8, epochs=30, learning_rates=(1e-3,))
    else:
        rate = 1e-3 if name == "ewc" else 1e-2
        config = dataclasses.replace(
            config, batch_size=8, fit=FitConfig(epochs=30, learning_rate=rate)
        )
    if name == "ewc":
        config = dataclasses.replace(config, penalties=(10.0,))
    tasks = small.stream(2).tasks
    reached = []
    for settings, router in ((make_preset("frozen_linear", "demo"), reference), (config, features)):
        method = make(settings, FrozenNetworks(executor, reference, router), Keys(0), 2)
        method.check(tasks)
        right = []
        for index, task in enumerate(tasks):
            method.learn(task, Watched())
            given = np.full(len(task.test.labels), index)
            predictions = method.predict(task.test.images, given)
            right.append(np.mean(predictions.classes == task.test.labels))
        reached.append(np.mean(right))
    assert reached[1] >= reached[0] > 0.9


@functools.cache
def pooled_stages() -> Stages:
    """A small backbone without class token."""
    return Stages(small.backbone(pool="attention"), "mlp_down")


@pytest.mark.parametrize(
    ("name", "field", "value", "message"),
    [
        *((name, "batch_size", 0, "batch_size is 0; expected at least 1") for name in NAMES),
        ("coda_prompt", "length", 3, "length is 3; expected an even number"),
        ("coda_prompt", "pool", 0, "pool is 0"),
        ("diki", "cov_shrinkage", 2, r"cov_shrinkage is 2; expected a share in \[0, 1\]"),
        ("diki", "length", 0, "length is 0"),
        ("dualprompt", "expert_layers", (), "expert_layers is empty"),
        ("dualprompt", "expert_length", 5, "expert_length is 5; expected an even number"),
        ("dualprompt", "general_layers", (0, 2), r"blocks \[2\] have a general and an expert"),
        ("dualprompt", "pool", 0, "pool is 0"),
        ("ewc", "penalties", (), r"penalties are \(\); expected at least one finite number"),
        ("ewc", "penalties", (1.0, -1.0), r"penalties are \(1.0, -1.0\)"),
        ("full_finetune", "learning_rates", (), "learning_rates is empty"),
        ("full_finetune", "learning_rates", (0.0,), "expected positive"),
        *(("l2p", "length", num, f"length is {num}; expected an even") for num in (3, 0, -2)),
        ("l2p", "top_k", 31, r"top_k is 31; expected 1\.\.30, the size of the pool"),
        ("lora_cl", "rank", 0, "rank is 0; expected at least 1"),
        ("lora_cl", "truncated_rank", 0, "truncated_rank is 0; expected at least 1"),
        ("moal", "bottleneck", 0, "bottleneck is 0; expected at least 1"),
        ("moal", "hidden", 0, "hidden is 0; expected at least 1"),
        ("moe_adapters", "bottleneck", 0, "bottleneck is 0; expected at least 1"),
        ("moe_adapters", "experts", 1, "experts is 1; expected at least 2"),
        ("s_prompts", "length", 0, "length is 0; expected at least 1"),
        ("tuna", "alignment_epochs", 0, "alignment_epochs is 0; expected at least 1"),
        ("tuna", "bottleneck", 0, "bottleneck is 0; expected at least 1"),
    ],
)
def test_impossible_settings_are_refused(name, field, value, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(make_preset(name, "paper"), **{field: value})


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (OpSettings, {"rank": 0}),
        (OpSettings, {"new_rate": 0.0}),
        (OpSettings, {"truncated_rank": 0}),
        (FitConfig, {"epochs": 0}),
        (FitConfig, {"epochs": 1, "learning_rate": 0.0}),
        *((SearchConfig, {name: 0}) for name in ("population", "generations", "num_parents")),
        *((SearchConfig, {"mutation_rate": rate}) for rate in (-0.1, 1.5)),
        *((SearchConfig, {"epsilon": rate}) for rate in (-0.1, 1.5)),
        *((SearchConfig, {"tolerance": rate}) for rate in (-0.1, 1.5)),
        *((SearchConfig, {"max_flops": share}) for share in (-0.1, 1.5)),
        *((ExplorationConfig, {"epsilon": rate}) for rate in (-0.1, 1.5)),
        (CheemConfig, {"remove": KINDS}),
        (CheemConfig, {"remove": ("new", "new")}),
        (CheemConfig, {"sampling": "anchored", "remove": ("new",)}),
    ],
)
def test_impossible_settings_of_cheem_are_refused_by_name(kind, settings):
    with pytest.raises(ValueError, match=list(settings)[-1]):
        kind(**settings)


def test_settings_at_their_limits_are_accepted():
    least = dict.fromkeys(("population", "generations", "num_parents"), 1)
    shares = ("mutation_rate", "epsilon", "tolerance", "max_flops")
    SearchConfig(**least, **dict.fromkeys(shares, 0.0))
    SearchConfig(**dict.fromkeys(shares, 1.0))
    assert [ExplorationConfig(epsilon).epsilon for epsilon in (0.0, 1.0)] == [0, 1]
    OpSettings(rank=1, truncated_rank=1, new_rate=1e-6)
    # a rank that is not below the rank of training truncates nothing
    assert [OpSettings(8, rank).stored_rank for rank in (None, 4, 8, 9)] == [8, 4, 8, 8]
    FitConfig(epochs=1, learning_rate=1e-6)
    CheemConfig(batch_size=1, remove=("reuse", "adapt", "new"))
    CheemConfig(sampling="anchored")
    RouterConfig(num_centroids=1, shrinkage=1e-6)
    RouterConfig(shrinkage=1.0)


def by_name(settings: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested settings as one dict, keyed by names such as `search.population`."""
    result = {}
    for name, value in settings.items():
        if isinstance(value, dict):
            result |= by_name(value, f"{prefix}{name}.")
        else:
            result[f"{prefix}{name}"] = value
    return result


def test_published_results_have_the_settings_of_their_preset():
    file = Path(__file__).parents[1] / "docs/results/runs_96/cheem/seed-0/config.json"
    recorded = by_name(json.loads(file.read_text())["cheem"])
    settings = by_name(json.loads(json.dumps(dataclasses.asdict(PRESETS["quick"]))))
    compared = recorded.keys() & settings.keys()  # some settings are older than others
    assert {name for name in compared if recorded[name] != settings[name]} == set()
    assert len(compared) > 20


def test_the_paper_has_no_further_settings_and_demo_trains_longer_than_quick():
    paper, quick, demo = (PRESETS[name] for name in ("paper", "quick", "demo"))
    fits = (paper.supernet, paper.finetune)
    assert {(fit.learning_rate, fit.schedule) for fit in fits} == {(1e-3, "cosine")}
    assert (paper.search.population, paper.search.num_parents) == (50, 10)
    assert (paper.search.mutation_rate, paper.router.num_centroids) == (0.1, 5)
    assert not (paper.augment or paper.fallback or paper.remove)
    assert paper.ops.new_rate == 1
    assert (demo.supernet.epochs, demo.finetune.epochs) == (12, 24)
    assert demo.supernet.learning_rate == demo.finetune.learning_rate == 2e-3
    shorter = dataclasses.replace(demo, supernet=quick.supernet, finetune=quick.finetune)
    assert shorter == quick


def test_an_unknown_method_is_answered_with_the_nearest_names():
    with pytest.raises(ValueError, match="unknown method 'l2q'; most similar: l2p"):
        check_name("l2q")


@pytest.mark.parametrize("name", NEED_A_ROUTER)
def test_methods_that_need_another_network_say_so(name):
    with pytest.raises(ValueError, match="give one: --router"):
        make(make_preset(name, "demo"), networks(), Keys(0), 2)


def test_a_router_for_a_method_without_one_is_refused():
    with pytest.raises(ValueError, match="l2p does not infer the task ID with a router"):
        make(make_preset("l2p", "demo"), networks(routed=True), Keys(0), 2)


def test_tables_know_every_method():
    assert set(table.METHODS) == set(NAMES)
    assert set(table.UPPER_BOUNDS) < set(NAMES)
