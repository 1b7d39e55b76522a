"""`experiments/planted.py`: what is planted is there, what is found is counted right, and nothing
is found for free."""

import dataclasses
import json

import numpy as np
import planted
import pytest
from PIL import Image

from cheem_jax.backbone.config import CONFIGS
from cheem_jax.backbone.flops import network_flops
from cheem_jax.cheem.config import PRESETS
from cheem_jax.cli.running import run_command
from cheem_jax.core.architecture import from_strings
from studies.planting import claims, pages
from studies.planting.claims import CLAIMS, Verdict, distribution, judge, summarise
from studies.planting.structure import (
    BASE,
    FAMILY,
    LAGS,
    NAMES,
    NEW,
    SKIP,
    STRANGER,
    Costs,
    costs_of,
    count,
    draw_noise,
    expected,
    first_level_lead,
    first_share,
    planted_stream,
    random_networks,
    sources,
    structure_of,
)

COSTS = Costs(plain=100, skip=10, adapt=5, params_adapt=1.0, params_new=4.0)
ABOUT_SIMILARITY = [claim for claim in CLAIMS if claim.split()[1] in ("seen", "offered")]
ABOUT_STRUCTURE = [claim for claim in CLAIMS if claim not in ABOUT_SIMILARITY]
FOUND = (
    ("new", "adapt:0", "reuse:0", "skip"),  # shapes
    ("reuse:0", "new", "new", "reuse:0"),  # letters
    ("reuse:0", "skip", "skip", "skip"),  # colours
    ("reuse:1", "adapt:1", "reuse:1", "reuse:0"),  # kin: shapes' experts twice, one of letters
    ("new", "new", "new", "new"),  # noise
    (
        "reuse:1",
        "reuse:3",
        "reuse:1",
        "skip",
    ),  # twin: shapes' expert, kin's, and one that kin shares with letters
)
"""Networks of four blocks that are as they should be."""


def results_of(architectures, similarity=None, seed=0):
    """Results of a run that found these networks; similarity without preference unless given."""
    pool = [[{"origin": "base", "kind": "full", "parent": None}] for _ in architectures[0]]
    tasks = []
    for origin, architecture in enumerate(architectures):
        experts = []
        for block, choice in zip(pool, architecture, strict=True):
            kind, _, expert = choice.partition(":")
            experts.append({"skip": None, "reuse": int(expert or 0)}.get(kind, len(block)))
            if kind in ("new", "adapt"):
                block.append(
                    {"origin": origin, "kind": kind, "parent": int(expert) if expert else None}
                )
        flops = (
            100
            - 10 * sum(c == "skip" for c in architecture)
            + 5 * sum(c.startswith("adapt") for c in architecture)
        )
        tasks.append(
            {
                "name": NAMES[origin],
                "architecture": list(architecture),
                "experts": experts,
                "flops": flops,
                "params_added_percent": 1.0,
            }
        )
    if similarity is None:
        similarity = [[[0.0] * len(pool) for _ in range(index + 1)] for index in range(6)]
    matrix = [[0.9] * 6 for _ in range(6)]
    return {
        "tasks": tasks,
        "pool": pool,
        "similarity": similarity,
        "seed": seed,
        "local_accuracy": matrix,
        "references": {"frozen_linear": {"local_accuracy": matrix}},
        "stream": "planted",
        "backbone": "vit_micro",
        "local_average_accuracy": 0.9,
        "params_added_percent": 1.0,
        "flops": {"paper": 4e7},
        "base_means": "known",
    }


def test_the_stream_is_the_same_again_and_another_seed_draws_other_pictures():
    sizes = {"num_train": 24, "num_val": 12, "num_test": 12}
    one, again, other = (planted_stream(seed=seed, **sizes) for seed in (3, 3, 4))
    assert tuple(task.name for task in one.tasks) == NAMES
    for task, same, different in zip(one.tasks, again.tasks, other.tasks, strict=True):
        np.testing.assert_array_equal(task.train.images[:], same.train.images[:])
        np.testing.assert_array_equal(task.train.labels, same.train.labels)
        assert (task.train.images[:] != different.train.images[:]).any()
    larger = planted_stream(seed=3, **{**sizes, "num_test": 20})
    np.testing.assert_array_equal(one.tasks[0].train.images[:], larger.tasks[0].train.images[:])
    with pytest.raises(ValueError, match="at least 12 images"):
        planted_stream(seed=0, num_train=24, num_val=11, num_test=12)


def test_the_twin_has_the_distribution_of_shapes_in_other_pictures_and_the_kin_other_colours():
    tasks = {
        task.name: task
        for task in planted_stream(seed=0, num_train=160, num_val=12, num_test=12).tasks
    }
    shapes, kin, twin = (tasks[name] for name in ("shapes", "shapes_recoloured", "shapes_again"))
    assert shapes.classes == kin.classes == twin.classes
    pictures = [
        {image.tobytes() for split in task.splits.values() for image in split.images[:]}
        for task in tasks.values()
    ]
    assert (
        len(set.union(*pictures)) == sum(map(len, pictures)) == 6 * 184
    )  # no picture twice, in no task and split
    colour = [task.train.images[:].reshape(-1, 3).mean(axis=0) for task in (shapes, twin, kin)]
    assert np.abs(colour[0] - colour[1]).max() < 5 < 40 < np.abs(colour[0] - colour[2]).max()


def test_in_the_noise_pixels_agree_at_the_lag_of_the_class_and_at_no_other():
    labels = np.arange(80, dtype=np.int32) % 8
    images = draw_noise(np.random.default_rng(0), labels, 32).astype(float)
    direction = images - images.mean(axis=(1, 2), keepdims=True)
    value = np.einsum("nyxc,nc->nyx", direction, np.sign(direction[:, 0, 0]))
    sign = np.sign(value)
    lags = list(LAGS.values())
    agreement = np.zeros((8, 8))
    for column, (y, x) in enumerate(lags):
        ahead, behind = (
            sign[:, y:, max(x, 0) : 32 + min(x, 0)],
            sign[:, : 32 - y, max(-x, 0) : 32 - max(x, 0)],
        )
        together = (ahead == behind).mean(axis=(1, 2))
        agreement[:, column] = [together[labels == label].mean() for label in range(8)]
    assert (agreement.argmax(axis=1) == np.arange(8)).all()
    # twice as far along the lag, two flips in a row must not happen: 0.9² + 0.1² = 0.82
    assert agreement.diagonal().min() > 0.86
    assert agreement[0, lags.index((0, 2))] == pytest.approx(0.82, abs=0.04)


def test_the_blocks_of_worked_networks_are_counted_by_where_their_experts_come_from():
    structure = structure_of(results_of(FOUND), COSTS)
    assert structure.sizes.tolist() == [
        [1] * 4,
        [2, 2, 1, 1],
        [2, 3, 2, 1],
        [2, 3, 2, 1],
        [2, 4, 2, 1],
        [3, 5, 3, 2],
    ]
    found = sources(structure)[0]
    assert found[3].tolist() == [FAMILY, FAMILY, STRANGER, BASE]
    assert found[5].tolist() == [
        FAMILY,
        FAMILY,
        FAMILY,
        SKIP,
    ]  # kin shares the expert of letters at the third block
    assert found[4].tolist() == [NEW] * 4 and found[2].tolist() == [BASE, SKIP, SKIP, SKIP]
    counts = count(structure)
    assert counts.flops[0].tolist() == [95, 100, 70, 105, 100, 90]
    assert counts.added[0].tolist() == [5, 8, 0, 1, 16, 0]
    assert counts.planted.tolist() == [0, 2, 2, 2, 3, 3]


def test_chance_is_worked_out_from_the_candidates():
    structure = structure_of(results_of(FOUND), COSTS)
    by_chance = expected(structure)
    # the kin has pools of 2, 3, 2 and 1 experts, so 6, 8, 6 and 4 candidates
    assert by_chance[3, FAMILY] == pytest.approx(2 / 6 + 2 / 8)
    assert by_chance[3, STRANGER] == pytest.approx(2 / 8 + 2 / 6)
    assert by_chance[3, NEW] == by_chance[3, SKIP] == pytest.approx(1 / 6 + 1 / 8 + 1 / 6 + 1 / 4)
    np.testing.assert_allclose(by_chance.sum(axis=1), 4)
    rng = np.random.default_rng(0)
    drawn = count(random_networks(structure, rng, 20_000))
    np.testing.assert_allclose(drawn.source.mean(axis=0), by_chance, atol=0.03)
    both = (drawn.source[:, 3, FAMILY] == 2).mean()
    assert (
        both
        == pytest.approx(distribution([2 / 6, 2 / 8])[2], abs=0.01)
        == pytest.approx(1 / 12, abs=0.01)
    )


def test_the_relative_ranks_first_where_it_is_more_similar_than_every_other():
    nan = np.nan
    similarity = np.array([[0.1, 0.2, 0.9, 0.0], [0.5, 0.2, 1.0, nan], [0.4, nan, 0.3, 1.0]])
    # of the three blocks where network 1 is present it leads at the first and the third
    assert first_share(similarity, 1, [0, 2]) == (
        pytest.approx(2 / 3),
        pytest.approx((1 / 3 + 1 / 2 + 1 / 3) / 3),
    )
    assert np.isnan(first_share(np.full((2, 3), nan), 0, [1])).all()


def test_costs_are_those_of_the_library():
    config = CONFIGS["vit_micro"]
    cheem = PRESETS["demo"]
    costs = costs_of(config, cheem)
    architectures = [("reuse:0",) * 8, ("new", "skip", "skip", "adapt:0") * 2, *[("skip",) * 8] * 4]
    structure = structure_of(results_of(architectures), costs)
    counts = count(structure)
    for index, architecture in enumerate(architectures):
        assert counts.flops[0, index] == network_flops(
            config, "mlp_down", from_strings(architecture), cheem.ops.rank
        )
    # two full layers of 384 x 96 and 96, two pairs of rank 16: of 897,696 parameters
    parameters = 2 * (384 * 96 + 96) + 2 * 16 * (384 + 96)
    assert counts.added[0, 1] == pytest.approx(parameters / 897_696 * 100, rel=0.02)


@pytest.fixture
def runs():
    plain = [("reuse:0",) * 4] * 6
    return {
        "hee": [results_of(FOUND, seed=s) for s in (0, 1)],
        "uniform": [results_of(plain, seed=s) for s in (0, 1)],
    }


def test_worked_networks_meet_every_claim_about_structure():
    verdicts = judge(results_of(FOUND), COSTS)
    assert all(verdicts[name].met for name in ABOUT_STRUCTURE)
    drawn, rather = verdicts["kin drawn on"], verdicts["kin rather"]
    assert (drawn.value, drawn.level) == (1.0, pytest.approx((2 / 6 + 2 / 8) / 2))
    assert drawn.chance <= 1 / 12 + 0.015
    assert rather.value == 2 - 1 and rather.level == pytest.approx(-17 / 24)
    assert verdicts["kin cheap"].value == pytest.approx(1 / 12)  # of letters' 8 and noise's 16
    assert verdicts["easy cheap"].value == pytest.approx(70 / 98)
    assert (verdicts["alien adds"].value, verdicts["alien adds"].level) == (16, 0.5)
    assert verdicts["alien alone"].value == 0
    assert not any(verdicts[name].met for name in ABOUT_SIMILARITY)  # all are equally similar
    structure = structure_of(results_of(FOUND), COSTS)
    networks = random_networks(structure, np.random.default_rng(7), 8000)
    sampled = claims.measure(count(networks), expected(structure))
    for name in ABOUT_STRUCTURE:
        assert sampled[name].met.mean() == pytest.approx(verdicts[name].chance, abs=0.025)
        assert 0 < verdicts[name].chance < 0.4


@pytest.mark.parametrize("choice", ["reuse:0", "adapt:0", "new", "skip"])
def test_equal_networks_meet_no_claim(choice):
    verdicts = judge(results_of([(choice,) * 4] * 6), COSTS)
    assert not any(verdict.met for verdict in verdicts.values() if verdict is not None)
    # without an expert of shapes there is nothing to reuse
    assert (verdicts["kin drawn on"] is None) == (choice in ("reuse:0", "skip"))


def test_an_expert_that_all_tasks_reuse_is_no_sign_of_kinship():
    verdicts = judge(results_of([("new",) * 4, *[("reuse:1",) * 4] * 5]), COSTS)
    assert verdicts["kin drawn on"].value == 1.0
    assert not any(verdicts[name].met for name in ABOUT_STRUCTURE)


@pytest.mark.parametrize("num", [2, 5])
def test_the_lead_at_the_first_level_does_not_depend_on_the_number_of_networks(num):
    equal, _ = first_level_lead(np.zeros((num, 3)), 0, range(1, num))
    np.testing.assert_allclose(equal, 1.0)
    high = np.where(np.arange(num)[:, None] == 1, [[1.0, np.nan]], [[-1.0, 0.3]])
    # at the block where it is present: e^1 against e^-1
    lead, _ = first_level_lead(high, 1, [i for i in range(num) if i != 1])
    assert lead == pytest.approx(np.e**2)


def test_a_preference_for_the_relative_is_seen_and_one_of_all_tasks_is_not():
    def similarity(of_shapes):
        return [
            [[of_shapes[task] if row == 1 else -0.5] * 4 for row in range(task + 1)]
            for task in range(6)
        ]

    kin = judge(results_of(FOUND, similarity({1: -0.6, 2: -0.6, 3: 0.9, 4: -0.6, 5: 1.0})), COSTS)
    assert all(kin[name].met and kin[name].chance is None for name in ABOUT_SIMILARITY)
    assert kin["kin seen"].value == 1.0 and kin["kin seen"].level == pytest.approx(1 / 4)
    all_tasks = judge(results_of(FOUND, similarity(dict.fromkeys(range(1, 6), 0.9))), COSTS)
    assert all_tasks["kin seen"].value == 1.0
    assert not any(all_tasks[name].met for name in ABOUT_SIMILARITY)


def test_a_summary_counts_runs_and_the_chance_of_as_many():
    met = Verdict(2.0, 1.0, True, 0.5)
    others = (None, met._replace(value=np.nan), met._replace(met=False))
    summary = summarise("kin cheap", "hee", [met, met, *others])
    assert (summary.met, summary.runs, summary.value) == (3, 4, [2.0, 2.0, 2.0])
    assert summary.chance == 0.5 and summary.p == pytest.approx(5 / 16)
    nothing = summarise("kin drawn on", "hee", [None, None])
    assert (nothing.met, nothing.runs, nothing.p) == (0, 0, None)
    np.testing.assert_allclose(distribution([0.5, 0.25]), [0.375, 0.5, 0.125])


def test_the_tables_have_a_row_per_claim_and_sampling(runs):
    verdicts = pages.judge_all(runs, COSTS)
    text = pages.claims_grid(verdicts).to_markdown()
    assert (
        "| kin drawn on | HEE | 2 of 2 |" in text and "| kin drawn on | uniform | 0 of 0 |" in text
    )
    assert len(pages.tasks_grid(runs, COSTS).rows) == 2 * len(NAMES)
    assert json.dumps(pages.numbers(runs, verdicts), allow_nan=False)


def test_every_sampling_and_seed_is_a_run_of_its_own_on_its_own_pictures(monkeypatch, tmp_path):
    begun = {}

    def finished(stream, pretrained, config, directory, progress, **more):
        begun[str(directory.relative_to(tmp_path))] = (
            stream.tasks[0].train.images[0].tobytes(),
            config,
            more,
        )
        blocks = [tuple(2 * architecture) for architecture in FOUND]
        return results_of(blocks, seed=config.seed)

    monkeypatch.setattr(planted, "run_stream", finished)
    monkeypatch.setitem(planted.SIZES, "quick", planted.Size("demo", "0,1", 12, 12, 12))
    planted.main(planted.Planted(run_dir=tmp_path))
    assert list(begun) == ["hee/seed-0", "uniform/seed-0", "hee/seed-1", "uniform/seed-1"]
    (one, hee, first), (same, uniform, more), (other, _, second), _ = begun.values()
    assert one == same != other
    # compiled networks are shared
    assert first["workshop"] is more["workshop"] is second["workshop"]
    assert hee.method.sampling == "hee" and hee.seed == 0
    assert uniform.method == dataclasses.replace(hee.method, sampling="uniform")
    again = planted.parse(planted.Planted, more["command"][1:])
    assert (again.sampling, again.seeds, again.run_dir) == (
        "uniform",
        "0",
        tmp_path / "uniform" / "seed-0",
    )
    assert {file.name for file in tmp_path.iterdir()} == {
        "planted.md",
        "planted.json",
        "architectures.png",
    }
    told = json.loads((tmp_path / "planted.json").read_text())
    assert [(run["sampling"], run["seed"]) for run in told] == [
        (s, n) for s in planted.SAMPLINGS for n in (0, 1)
    ]
    with Image.open(tmp_path / "architectures.png") as sheet:
        left, right = (
            np.asarray(sheet.crop((x, 0, x + sheet.width // 2, sheet.height)))
            for x in (0, sheet.width // 2)
        )
    assert (
        min(left.min(), right.min()) < 128 and (left != right).any()
    )  # the samplings side by side

    fixed = planted.Planted(stream_seed=5)
    streams = [planted.stream_of(fixed, seed).tasks[1].test.images[:] for seed in (0, 1)]
    np.testing.assert_array_equal(*streams)


def test_settings_that_make_no_run_are_named(tmp_path, capsys):
    for changed, said in (
        ({"seeds": "1,1"}, "--seeds is '1,1'"),
        ({"stream_seed": -1}, "--stream-seed is -1"),
    ):
        with pytest.raises(SystemExit) as stop:
            run_command(planted.main, planted.Planted(run_dir=tmp_path, **changed), tmp_path)
        assert stop.value.code == 2 and said in capsys.readouterr().err
    quick = planted.Planted()
    methods = {sampling: planted.method_of(quick, sampling) for sampling in planted.SAMPLINGS}
    assert methods["hee"] == PRESETS["demo"]
    assert methods["uniform"] == dataclasses.replace(PRESETS["demo"], sampling="uniform")
