"""`experiments/planted.py`: the planted structure exists, networks are counted correctly, and
identical networks meet no claim."""

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
EXAMPLES = (
    ("new", "adapt:0", "reuse:0", "skip"),  # shapes
    ("reuse:0", "new", "new", "reuse:0"),  # letters
    ("reuse:0", "skip", "skip", "skip"),  # colours
    ("reuse:1", "adapt:1", "reuse:1", "reuse:0"),  # `kin`: two experts of shapes and one of letters
    ("new", "new", "new", "new"),  # noise
    (
        "reuse:1",
        "reuse:3",
        "reuse:1",
        "skip",
    ),  # `twin`: an expert of shapes, one of `kin`, and one that `kin` shares with letters
)
"""Networks of four blocks that meet every claim about structure."""


def results_of(architectures, similarity=None, seed=0):
    """Make the results of a run with these networks; the default similarity has no preference."""
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


def test_the_stream_depends_only_on_its_seed():
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


def test_shapes_again_have_the_distribution_of_shapes_and_recoloured_shapes_have_not():
    tasks = {
        task.name: task
        for task in planted_stream(seed=0, num_train=160, num_val=12, num_test=12).tasks
    }
    shapes, kin, twin = (tasks[name] for name in ("shapes", "shapes_recoloured", "shapes_again"))
    assert shapes.classes == kin.classes == twin.classes
    images_of_tasks = [
        {image.tobytes() for split in task.splits.values() for image in split.images[:]}
        for task in tasks.values()
    ]
    assert (
        len(set.union(*images_of_tasks)) == sum(map(len, images_of_tasks)) == 6 * 184
    )  # all images of all tasks and splits differ
    colour = [task.train.images[:].reshape(-1, 3).mean(axis=0) for task in (shapes, twin, kin)]
    assert np.abs(colour[0] - colour[1]).max() < 5 < 40 < np.abs(colour[0] - colour[2]).max()


def test_pixels_of_the_noise_agree_only_at_the_lag_of_their_class():
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
    # pixels at twice the lag agree without flips or with two flips: 0.9² + 0.1² = 0.82
    assert agreement.diagonal().min() > 0.86
    assert agreement[0, lags.index((0, 2))] == pytest.approx(0.82, abs=0.04)


def test_the_blocks_of_worked_networks_are_counted_by_the_source_of_their_experts():
    structure = structure_of(results_of(EXAMPLES), COSTS)
    assert structure.sizes.tolist() == [
        [1] * 4,
        [2, 2, 1, 1],
        [2, 3, 2, 1],
        [2, 3, 2, 1],
        [2, 4, 2, 1],
        [3, 5, 3, 2],
    ]
    kinds = sources(structure)[0]
    assert kinds[3].tolist() == [FAMILY, FAMILY, STRANGER, BASE]
    assert kinds[5].tolist() == [
        FAMILY,
        FAMILY,
        FAMILY,
        SKIP,
    ]  # `kin` shares the expert of letters at the third block
    assert kinds[4].tolist() == [NEW] * 4 and kinds[2].tolist() == [BASE, SKIP, SKIP, SKIP]
    counts = count(structure)
    assert counts.flops[0].tolist() == [95, 100, 70, 105, 100, 90]
    assert counts.added[0].tolist() == [5, 8, 0, 1, 16, 0]
    assert counts.planted.tolist() == [0, 2, 2, 2, 3, 3]


def test_the_expectation_by_chance_follows_from_the_candidates():
    structure = structure_of(results_of(EXAMPLES), COSTS)
    by_chance = expected(structure)
    # the pools of `kin` have 2, 3, 2 and 1 experts, so there are 6, 8, 6 and 4 candidates
    assert by_chance[3, FAMILY] == pytest.approx(2 / 6 + 2 / 8)
    assert by_chance[3, STRANGER] == pytest.approx(2 / 8 + 2 / 6)
    assert by_chance[3, NEW] == by_chance[3, SKIP] == pytest.approx(1 / 6 + 1 / 8 + 1 / 6 + 1 / 4)
    np.testing.assert_allclose(by_chance.sum(axis=1), 4)
    rng = np.random.default_rng(0)
    sampled = count(random_networks(structure, rng, 20_000))
    np.testing.assert_allclose(sampled.source.mean(axis=0), by_chance, atol=0.03)
    both = (sampled.source[:, 3, FAMILY] == 2).mean()
    assert (
        both
        == pytest.approx(distribution([2 / 6, 2 / 8])[2], abs=0.01)
        == pytest.approx(1 / 12, abs=0.01)
    )


def test_a_network_ranks_first_at_blocks_with_the_highest_similarity():
    nan = np.nan
    similarity = np.array([[0.1, 0.2, 0.9, 0.0], [0.5, 0.2, 1.0, nan], [0.4, nan, 0.3, 1.0]])
    # network 1 is in three blocks, and it is more similar than the others at the first and the
    # third
    assert first_share(similarity, 1, [0, 2]) == (
        pytest.approx(2 / 3),
        pytest.approx((1 / 3 + 1 / 2 + 1 / 3) / 3),
    )
    assert np.isnan(first_share(np.full((2, 3), nan), 0, [1])).all()


def test_costs_are_those_that_the_library_counts():
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
    # two full layers of 384 x 96 and 96, and two pairs of rank 16, as a share of 897,696 parameters
    parameters = 2 * (384 * 96 + 96) + 2 * 16 * (384 + 96)
    assert counts.added[0, 1] == pytest.approx(parameters / 897_696 * 100, rel=0.02)


@pytest.fixture
def runs():
    plain = [("reuse:0",) * 4] * 6
    return {
        "hee": [results_of(EXAMPLES, seed=s) for s in (0, 1)],
        "uniform": [results_of(plain, seed=s) for s in (0, 1)],
    }


def test_worked_networks_meet_every_claim_about_structure():
    verdicts = judge(results_of(EXAMPLES), COSTS)
    assert all(verdicts[name].met for name in ABOUT_STRUCTURE)
    sampled, rather = verdicts["kin drawn on"], verdicts["kin rather"]
    assert (sampled.value, sampled.level) == (1.0, pytest.approx((2 / 6 + 2 / 8) / 2))
    assert sampled.chance <= 1 / 12 + 0.015
    assert rather.value == 2 - 1 and rather.level == pytest.approx(-17 / 24)
    assert verdicts["kin cheap"].value == pytest.approx(1 / 12)  # of letters' 8 and noise's 16
    assert verdicts["easy cheap"].value == pytest.approx(70 / 98)
    assert (verdicts["alien adds"].value, verdicts["alien adds"].level) == (16, 0.5)
    assert verdicts["alien alone"].value == 0
    # all networks are equally similar
    assert not any(verdicts[name].met for name in ABOUT_SIMILARITY)
    structure = structure_of(results_of(EXAMPLES), COSTS)
    networks = random_networks(structure, np.random.default_rng(7), 8000)
    sampled = claims.measure(count(networks), expected(structure))
    for name in ABOUT_STRUCTURE:
        assert sampled[name].met.mean() == pytest.approx(verdicts[name].chance, abs=0.025)
        assert 0 < verdicts[name].chance < 0.4


@pytest.mark.parametrize("choice", ["reuse:0", "adapt:0", "new", "skip"])
def test_identical_networks_meet_no_claim(choice):
    verdicts = judge(results_of([(choice,) * 4] * 6), COSTS)
    assert not any(verdict.met for verdict in verdicts.values() if verdict is not None)
    # without an expert of shapes, no expert of the family can be reused
    assert (verdicts["kin drawn on"] is None) == (choice in ("reuse:0", "skip"))


def test_an_expert_that_all_tasks_reuse_meets_no_claim():
    verdicts = judge(results_of([("new",) * 4, *[("reuse:1",) * 4] * 5]), COSTS)
    assert verdicts["kin drawn on"].value == 1.0
    assert not any(verdicts[name].met for name in ABOUT_STRUCTURE)


@pytest.mark.parametrize("num", [2, 5])
def test_the_lead_at_the_first_level_is_independent_of_the_number_of_networks(num):
    equal, _ = first_level_lead(np.zeros((num, 3)), 0, range(1, num))
    np.testing.assert_allclose(equal, 1.0)
    high = np.where(np.arange(num)[:, None] == 1, [[1.0, np.nan]], [[-1.0, 0.3]])
    # at the block with this network: e^1 and e^-1
    lead, _ = first_level_lead(high, 1, [i for i in range(num) if i != 1])
    assert lead == pytest.approx(np.e**2)


def test_a_preference_of_the_family_is_detected_and_a_preference_of_all_tasks_is_not():
    def similarity(of_shapes):
        return [
            [[of_shapes[task] if row == 1 else -0.5] * 4 for row in range(task + 1)]
            for task in range(6)
        ]

    kin = judge(
        results_of(EXAMPLES, similarity({1: -0.6, 2: -0.6, 3: 0.9, 4: -0.6, 5: 1.0})), COSTS
    )
    assert all(kin[name].met and kin[name].chance is None for name in ABOUT_SIMILARITY)
    assert kin["kin seen"].value == 1.0 and kin["kin seen"].level == pytest.approx(1 / 4)
    all_tasks = judge(results_of(EXAMPLES, similarity(dict.fromkeys(range(1, 6), 0.9))), COSTS)
    assert all_tasks["kin seen"].value == 1.0
    assert not any(all_tasks[name].met for name in ABOUT_SIMILARITY)


def test_a_summary_counts_runs_and_their_probability_by_chance():
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


def test_every_sampling_and_seed_is_a_separate_run_and_every_seed_has_separate_images(
    monkeypatch, tmp_path
):
    started = {}

    def finished(stream, pretrained, config, directory, progress, **more):
        started[str(directory.relative_to(tmp_path))] = (
            stream.tasks[0].train.images[0].tobytes(),
            config,
            more,
        )
        blocks = [tuple(2 * architecture) for architecture in EXAMPLES]
        return results_of(blocks, seed=config.seed)

    monkeypatch.setattr(planted, "run_stream", finished)
    monkeypatch.setitem(planted.SIZES, "quick", planted.Size("demo", "0,1", 12, 12, 12))
    planted.main(planted.Planted(run_dir=tmp_path))
    assert list(started) == ["hee/seed-0", "uniform/seed-0", "hee/seed-1", "uniform/seed-1"]
    (one, hee, first), (same, uniform, more), (other, _, second), _ = started.values()
    assert one == same != other
    # runs share compiled networks
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
    numbers = json.loads((tmp_path / "planted.json").read_text())
    assert [(run["sampling"], run["seed"]) for run in numbers] == [
        (s, n) for s in planted.SAMPLINGS for n in (0, 1)
    ]
    with Image.open(tmp_path / "architectures.png") as sheet:
        first_half, right = (
            np.asarray(sheet.crop((x, 0, x + sheet.width // 2, sheet.height)))
            for x in (0, sheet.width // 2)
        )
    assert (
        min(first_half.min(), right.min()) < 128 and (first_half != right).any()
    )  # the samplings are next to each other


def test_invalid_settings_are_refused(tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        run_command(planted.main, planted.Planted(seeds="1,1", run_dir=tmp_path), tmp_path)
    assert stop.value.code == 2 and "--seeds is '1,1'" in capsys.readouterr().err
    quick = planted.Planted()
    methods = {sampling: planted.method_of(quick, sampling) for sampling in planted.SAMPLINGS}
    assert methods["hee"] == PRESETS["demo"]
    assert methods["uniform"] == dataclasses.replace(PRESETS["demo"], sampling="uniform")
