"""Heads over all tasks: theory against closed forms and simulation, and what a finished run's
logits say."""

import dataclasses
import io
import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

import head_analysis
import numpy as np
import pytest
import small
from rich.console import Console

from cheem_jax.baselines.catalogue import preset_of
from cheem_jax.baselines.ewc import EwcConfig
from cheem_jax.baselines.l2p import L2pConfig
from cheem_jax.cli import run as cheem_run
from cheem_jax.continual import RunConfig, run_stream
from cheem_jax.core.settings import FitConfig
from cheem_jax.data.task import Stream
from cheem_jax.memory.contents import parse_settings
from cheem_jax.report.finished import RunRecord, read
from cheem_jax.run.progress import Progress
from studies.heads.margins import (
    Margins,
    Measured,
    by_class,
    check_same,
    fit_of,
    margins_of,
    measure,
    summary,
)
from studies.heads.theory import match_probability, match_with_one_rival, match_with_unequal_rivals

SETTINGS = [
    (0.0, 1.0, 1.0),
    (2.0, 1.0, 1.0),
    (-1.5, 0.5, 2.0),
    (3.0, 30.0, 1.0),
    (0.3, 1e-4, 1.0),
    (0.3, 1.0, 1e-5),
]
"""Gap, deviation of the best logit within the task, deviation of a rival."""


def test_one_rival_is_beaten_with_phi_of_the_gap_over_both_deviations():
    assert match_with_one_rival(0.0, 1.0, 1.0) == 0.5
    assert match_with_one_rival(np.sqrt(2), 1.0, 1.0) == pytest.approx(
        0.8413447, abs=1e-7
    )  # Phi(1)
    assert match_with_one_rival(10.0, 3.0, 4.0) == pytest.approx(0.9772499, abs=1e-7)  # Phi(10 / 5)


@pytest.mark.parametrize("setting", SETTINGS)
def test_the_integral_over_one_rival_is_the_closed_form(setting):
    assert match_probability(*setting, 1) == pytest.approx(
        match_with_one_rival(*setting), abs=1e-10
    )


@pytest.mark.parametrize("num_rivals", [1, 9, 1000, 100_000])
def test_among_classes_that_are_all_alike_each_has_its_share_of_the_largest(num_rivals):
    assert match_probability(0.0, 2.0, 2.0, num_rivals) == pytest.approx(
        1 / (1 + num_rivals), rel=1e-10
    )


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_match_gets_rarer_with_every_rival_but_never_as_rare_as_if_each_met_another_logit(
    setting,
):
    one = match_with_one_rival(*setting)
    found = [match_probability(*setting, num) for num in (0, 1, 2, 10, 1000, 100_000)]
    assert found[0] == 1.0 and (np.diff(found) <= 1e-12).all()
    # E[Phi^M] >= E[Phi]^M >= 1 - M (1 - E[Phi]): Jensen, Bernoulli
    assert found[3] >= one**10 - 1e-12 >= 1 - 10 * (1 - one) - 1e-9


def test_a_match_gets_more_frequent_with_the_gap_from_never_to_always():
    found = [
        match_probability(gap, 1.0, 1.0, 1000) for gap in (-20.0, 0.0, 1.0, 2.0, 3.0, 4.0, 20.0)
    ]
    assert (np.diff(found) > 0).all()
    assert found[0] < 1e-30 and found[-1] == pytest.approx(1.0, abs=1e-12)
    # the largest of M normals lies near sqrt(2 log M): a gap of twice that is safe for 100,000
    # rivals
    assert match_probability(2 * np.sqrt(2 * np.log(1e5)), 1.0, 1.0, 100_000) > 0.999


def test_a_simulation_agrees_with_the_integral_within_its_standard_error():
    rng = np.random.default_rng(0)
    num = 20_000
    for gap, local_std, rival_std, rivals in (
        (0.0, 1.0, 1.0, 9),
        (1.0, 2.0, 0.5, 20),
        (2.0, 1.0, 1.0, 60),
    ):
        best = gap + local_std * rng.normal(size=num)
        share = (best >= rival_std * rng.normal(size=(num, rivals)).max(axis=1)).mean()
        exact = match_probability(gap, local_std, rival_std, rivals)
        assert abs(share - exact) < 3 * np.sqrt(exact * (1 - exact) / num)


def test_unequal_rivals_that_are_equal_are_the_equal_ones():
    found = match_with_unequal_rivals(2.0, 1.5, np.zeros(40), np.ones(40))
    assert found == pytest.approx(match_probability(2.0, 1.5, 1.0, 40), abs=1e-9)
    # one far below takes no part
    assert match_with_unequal_rivals(1.0, 1.0, np.array([0.0, -50.0]), np.ones(2)) == pytest.approx(
        match_with_one_rival(1.0, 1.0, 1.0), abs=1e-9
    )


@pytest.mark.parametrize(
    "wrong", [(1.0, 0.0, 1.0, 1), (1.0, 1.0, -1.0, 1), (np.nan, 1.0, 1.0, 1), (1.0, 1.0, 1.0, -1)]
)
def test_no_spread_and_no_number_are_refused(wrong):
    with pytest.raises(ValueError, match="expected"):
        match_probability(*wrong)


LOGITS = np.array(
    [[0.0, 3.0, 1.0, 2.0], [4.0, 1.0, 0.0, 0.0], [0.0, 1.0, 5.0, 0.0], [1.0, 2.0, 3.0, 0.0]],
    np.float32,
)
LABELS = np.array([0, 1, 0, 0], np.int32)
"""Of the second of two tasks of two classes each: columns 2 and 3."""


def test_margins_are_between_the_best_logit_of_the_task_and_that_of_all_others():
    found = margins_of("second", LOGITS, LABELS, 2, 2)
    np.testing.assert_array_equal(found.margin, [-1, -4, 4, 1])
    assert found.num_rivals == 2
    assert found.accuracy == 0.5  # the last two; the first two go to the other task
    assert found.local_accuracy == 0.5
    assert found.rival_mean == 1.5 and found.rival_std == pytest.approx(
        np.sqrt(1.75)
    )  # of 0 3 4 1 0 1 1 2
    told = summary([found])
    assert told["match"] == 0.5 and told["images"] == 4
    assert told["predicted"] == match_probability(
        2.5 - 1.5, float(np.std([2, 0, 5, 3])), found.rival_std, 2
    )


def test_tasks_taken_together_have_the_mean_and_deviation_of_all_their_logits():
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(30, 9))
    labels = rng.integers(2, size=30).astype(np.int32)
    parts = [
        margins_of("a", logits[:20], labels[:20], 0, 2),
        margins_of("b", logits[20:] + 1, labels[20:], 2, 5),
    ]
    rivals = np.concatenate(
        [logits[:20, 2:].ravel(), np.delete(logits[20:] + 1, np.s_[2:7], axis=1).ravel()]
    )
    fit = fit_of(parts)
    assert (fit.rival_mean, fit.rival_std) == pytest.approx((rivals.mean(), rivals.std()))
    assert fit.local_std == pytest.approx(np.concatenate([part.best_own for part in parts]).std())
    assert summary(parts)["predicted"] == pytest.approx(
        (20 * fit.match(7) + 10 * fit.match(4)) / 30
    )


def test_normal_logits_match_as_often_as_predicted():
    rng = np.random.default_rng(1)
    logits = rng.normal(size=(4000, 41))
    logits[:, 0] += 3
    told = summary([margins_of("normal", logits, np.zeros(4000, np.int32), 0, 1)])
    assert told["predicted"] == pytest.approx(told["match"], abs=0.03)
    assert told["predicted_by_class"] == pytest.approx(told["match"], abs=0.03)


def test_kindred_classes_show_in_the_prediction_by_class_alone():
    rng = np.random.default_rng(2)
    labels = np.repeat([0, 1], 2000).astype(np.int32)
    own = 3 + rng.normal(size=(4000, 1))
    rivals = rng.normal(size=(4000, 20))
    rivals[np.arange(4000), labels] += 4  # each true class has a twin in another task
    measured = (own >= rivals.max(axis=1, keepdims=True)).mean()
    assert by_class(own[:, 0], rivals, labels) == pytest.approx(measured, abs=0.03)
    alike = match_probability(3 - rivals.mean(), 1.0, rivals.std(), 20)
    assert alike > measured + 0.2


def test_rare_classes_get_no_fit_of_their_own():
    rng = np.random.default_rng(3)
    best, rivals = rng.normal(size=32), rng.normal(size=(32, 5))
    rare = np.arange(32, dtype=np.int32) // 4  # four images of each: one fit of all
    assert by_class(best, rivals, rare) == by_class(best, rivals, np.zeros(32, np.int32))


def test_logits_that_are_not_finite_or_have_no_rivals_are_refused():
    broken = LOGITS.copy()
    broken[1, 2] = np.nan
    with pytest.raises(ValueError, match="'second': 1 logits are non-finite"):
        margins_of("second", broken, LABELS, 2, 2)
    with pytest.raises(ValueError, match="no other classes"):
        margins_of("only", LOGITS, LABELS, 0, 4)


def test_settings_come_back_from_the_json_of_a_run():
    config = L2pConfig(pool=7, layers=(0, 2), fit=FitConfig(epochs=3, learning_rate=0.5))
    held = json.loads(json.dumps(dataclasses.asdict(config)))
    assert parse_settings(type(preset_of("l2p", "paper")), held, Path("config.json")) == config
    with pytest.raises(ValueError, match=r"unknown settings \['depth'\]"):
        parse_settings(L2pConfig, {"depth": 3}, Path("config.json"))


WORKSHOP = {}
"""Compiled networks, of which there is one backbone."""


def finished_run(method: L2pConfig | EwcConfig, folder: Path) -> RunRecord:
    """A run of two small tasks."""
    progress = Progress(Console(file=io.StringIO()))
    run_stream(
        small.stream(2),
        small.pretrained(),
        RunConfig(method, "paper"),
        folder,
        progress,
        workshop=WORKSHOP,
    )
    (run,), left_out = read([folder])
    assert not left_out
    return run


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> RunRecord:
    fit = FitConfig(epochs=2, learning_rate=1e-2)
    return finished_run(
        L2pConfig(pool=4, length=2, top_k=2, fit=fit, batch_size=20), tmp_path_factory.mktemp("l2p")
    )


def check_against_record(run: RunRecord, margins: Sequence[Margins]) -> None:
    """An image goes to its own task where the argmax within it is that of all."""
    for index, one in enumerate(margins):
        assert (one.margin >= 0).mean() == pytest.approx(run.results["routing"][index][index])
        assert one.accuracy == pytest.approx(run.results["accuracy"][-1][index])
        assert one.local_accuracy == pytest.approx(run.results["local_accuracy"][-1][index])


@pytest.mark.full
def test_the_heads_of_runs_are_measured_again_from_their_checkpoints(finished, tmp_path):
    margins = measure(finished, small.stream(2), small.pretrained(), WORKSHOP)
    check_against_record(finished, margins)
    head_analysis.write(tmp_path, [Measured(finished, margins)], [(Path("there"), "that is why")])
    tasks = json.loads((tmp_path / "heads.json").read_text())["tasks"]
    assert [(task["task"], task["rivals"]) for task in tasks] == [("task0", 4), ("task1", 3)]
    assert [task["match"] for task in tasks] == [(one.margin >= 0).mean() for one in margins]
    methods = json.loads((tmp_path / "heads.json").read_text())["methods"]
    rows = {(row["stream"], row["backbone"], row["method"]): row for row in methods}
    ours = rows["small", "vit_test", "l2p"]
    assert ours["match"]["mean"] == pytest.approx(50 * sum(task["match"] for task in tasks))
    assert ours["just_trained"]["mean"] == pytest.approx(
        100 * np.mean(finished.results["just_trained"])
    )
    assert rows["mtil", "vit_base", "l2p"]["paper"]["average_accuracy"] == "26.61 ± 0.16"
    page = (tmp_path / "heads.md").read_text()
    assert "| measured minus |" in page and "there: that is why" in page
    pictures = re.findall(r"\]\((.*?)\)", page)
    assert len(pictures) == 1 and all(
        (tmp_path / picture).stat().st_size > 10_000 for picture in pictures
    )


@pytest.mark.full
def test_cells_are_means_over_runs_and_heads_of_their_own_have_no_match(finished):
    runs = []
    for seed, accuracy in enumerate((0.5, 0.6)):
        results = {
            **finished.results,
            "method": "s_prompts",
            "seed": seed,
            "average_accuracy": accuracy,
        }
        runs.append(Measured(finished._replace(results=results), []))
    (row,) = (row for row in head_analysis.rows_of(runs) if row["stream"] == "small")
    assert row["runs"] == 2 and row["match"] is None and row["paper"] == {}
    assert row["average_accuracy"] == {
        "mean": pytest.approx(55.0),
        "std": pytest.approx(10 / np.sqrt(2)),
    }


@pytest.mark.full
def test_other_pictures_or_weights_than_the_runs_are_refused(finished):
    tasks = (small.stream(2).tasks[0], small.task("task1", 7, num_classes=4))
    with pytest.raises(
        ValueError, match="had other images or labels of task1 than 'small' .*--data-dir"
    ):
        check_same(finished, Stream("small", tasks), small.pretrained())
    with pytest.raises(
        ValueError, match="began with weights seed 0, but .* are seed 1; give its --weights"
    ):
        check_same(finished, small.stream(2), small.pretrained(1))


@pytest.mark.full
def test_a_run_that_has_lost_a_checkpoint_is_refused(finished, tmp_path):
    shutil.copytree(finished.directory, tmp_path / "l2p")
    shutil.rmtree(tmp_path / "l2p/checkpoints/l2p/001-task1")
    with pytest.raises(ValueError, match="restore the rest"):
        measure(
            finished._replace(directory=tmp_path / "l2p"),
            small.stream(2),
            small.pretrained(),
            WORKSHOP,
        )


@pytest.mark.full
def test_runs_that_are_told_the_task_or_differ_otherwise_are_left_out(finished, tmp_path):
    for name, changed in (
        ("bound", {"method": "full_finetune"}),
        ("lite", {"router": "vit_nano"}),
        ("usual", {}),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "results.json").write_text(json.dumps({**finished.results, **changed}))
        (tmp_path / name / "config.json").write_text(json.dumps(finished.config))
    kept, left_out = head_analysis.shown([tmp_path])
    assert [run.directory.name for run in kept] == ["usual"]
    assert {place.name: why for place, why in left_out} == {
        "bound": "an upper bound is given the task ID",
        "lite": "its settings or order differ (vit_nano)",
    }


@pytest.mark.full
def test_pictures_and_weights_are_looked_for_where_the_run_had_them(finished):
    config = {**finished.config, "stream": "mtil", "pixels": [[0, 0, 0], [1, 1, 1]]}
    source = head_analysis.HeadAnalysis(split_seed=3).settings(config)
    assert (source.stream, source.tasks, source.backbone, source.image_size) == (
        "mtil",
        "task0,task1",
        "vit_test",
        8,
    )
    assert (source.split_seed, source.pixel_norm) == (3, "unit")
    elsewhere = head_analysis.HeadAnalysis(stream="folder/of/tasks").settings(finished.config)
    assert (elsewhere.stream, elsewhere.pixel_norm) == ("folder/of/tasks", "checkpoint")


def test_without_runs_there_is_the_theory_beside_the_papers_numbers(tmp_path):
    head_analysis.main(head_analysis.HeadAnalysis(out=tmp_path))
    told = json.loads((tmp_path / "heads.json").read_text())
    assert len(told["methods"]) == 12 and not told["tasks"] and (tmp_path / "match.png").is_file()
    for curve in told["theory"]:
        assert curve["quadrature"][0] == pytest.approx(curve["one_rival"], abs=1e-10)


@pytest.mark.slow
def test_the_head_of_ewc_is_measured_again_too(tmp_path):
    config = EwcConfig((1.0,), fit=FitConfig(epochs=2, learning_rate=1e-2), batch_size=20)
    run = finished_run(config, tmp_path)
    check_against_record(run, measure(run, small.stream(2), small.pretrained(), WORKSHOP))


@pytest.mark.slow
def test_runs_on_the_demo_stream_are_analysed_as_they_lie(tmp_path):
    settings = cheem_run.read_arguments(
        [
            "--stream",
            "demo",
            "--preset",
            "demo",
            "--tasks",
            "colours,textures",
            "--method",
            "dualprompt",
        ]
    )
    cheem_run.run_seeds(dataclasses.replace(settings, run_dir=tmp_path / "runs"))
    head_analysis.main(head_analysis.HeadAnalysis(runs=(tmp_path / "runs",), out=tmp_path / "out"))
    tasks = json.loads((tmp_path / "out/heads.json").read_text())["tasks"]
    assert [task["task"] for task in tasks] == ["colours", "textures"] and tasks[0]["match"] > 0.5


def test_bad_flags_are_refused(tmp_path):
    file = tmp_path / "file"
    file.touch()
    for settings in ({"out": file}, {"runs": (file,)}):
        with pytest.raises(ValueError, match="which is not a folder"):
            head_analysis.main(head_analysis.HeadAnalysis(**settings))
