"""Heads over all tasks: the theory is compared with closed forms and simulation, and logits of
finished runs are measured."""

import dataclasses
import io
import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import head_analysis
import numpy as np
import pytest
import small
from rich.console import Console
from scipy.special import ndtr

from cheem_jax.baselines.catalogue import make_preset
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
from studies.heads.theory import match_probability, match_with_unequal_others

SETTINGS = [
    (0.0, 1.0, 1.0),
    (2.0, 1.0, 1.0),
    (-1.5, 0.5, 2.0),
    (3.0, 30.0, 1.0),
    (0.3, 1e-4, 1.0),
    (0.3, 1.0, 1e-5),
]
"""Gap, standard deviation of the best logit within the task, standard deviation of the logit of
another class."""


def match_with_one_other(gap: float, local_std: float, other_std: float) -> float:
    """Compute P(Z* >= logit of one other class) in closed form: the paper's 'A Basic Two-Class
    Example'."""
    return float(ndtr(gap / np.hypot(local_std, other_std)))


def test_the_match_probability_with_one_other_class_is_phi_of_the_scaled_gap():
    assert match_probability(0.0, 1.0, 1.0, 1) == pytest.approx(0.5)
    assert match_probability(np.sqrt(2), 1.0, 1.0, 1) == pytest.approx(
        0.8413447, abs=1e-7
    )  # Phi(1)
    # Phi(10 / 5)
    assert match_probability(10.0, 3.0, 4.0, 1) == pytest.approx(0.9772499, abs=1e-7)


@pytest.mark.parametrize("setting", SETTINGS)
def test_the_quadrature_with_one_other_class_is_the_closed_form(setting):
    assert match_probability(*setting, 1) == pytest.approx(
        match_with_one_other(*setting), abs=1e-10
    )


@pytest.mark.parametrize("num_others", [1, 9, 1000, 100_000])
def test_identical_classes_have_the_largest_logit_equally_often(num_others):
    assert match_probability(0.0, 2.0, 2.0, num_others) == pytest.approx(
        1 / (1 + num_others), rel=1e-10
    )


@pytest.mark.parametrize("setting", SETTINGS)
def test_the_match_probability_falls_with_the_number_of_other_classes_within_its_bound(
    setting,
):
    one = match_with_one_other(*setting)
    probabilities = [match_probability(*setting, num) for num in (0, 1, 2, 10, 1000, 100_000)]
    assert probabilities[0] == 1.0 and (np.diff(probabilities) <= 1e-12).all()
    # E[Phi^M] >= E[Phi]^M >= 1 - M (1 - E[Phi]), by Jensen and Bernoulli
    assert probabilities[3] >= one**10 - 1e-12 >= 1 - 10 * (1 - one) - 1e-9


def test_the_match_probability_rises_with_the_gap_from_0_to_1():
    probabilities = [
        match_probability(gap, 1.0, 1.0, 1000) for gap in (-20.0, 0.0, 1.0, 2.0, 3.0, 4.0, 20.0)
    ]
    assert (np.diff(probabilities) > 0).all()
    assert probabilities[0] < 1e-30 and probabilities[-1] == pytest.approx(1.0, abs=1e-12)
    # the largest of M normal variables is near sqrt(2 log M): a gap of twice that value is safe for
    # 100,000 other classes
    assert match_probability(2 * np.sqrt(2 * np.log(1e5)), 1.0, 1.0, 100_000) > 0.999


def test_a_simulation_agrees_with_the_quadrature():
    rng = np.random.default_rng(0)
    num = 20_000
    for gap, local_std, other_std, others in (
        (0.0, 1.0, 1.0, 9),
        (1.0, 2.0, 0.5, 20),
        (2.0, 1.0, 1.0, 60),
    ):
        best = gap + local_std * rng.normal(size=num)
        share = (best >= other_std * rng.normal(size=(num, others)).max(axis=1)).mean()
        exact = match_probability(gap, local_std, other_std, others)
        assert abs(share - exact) < 3 * np.sqrt(exact * (1 - exact) / num)


def test_unequal_other_classes_with_equal_parameters_match_the_quadrature():
    probability = match_with_unequal_others(2.0, 1.5, np.zeros(40), np.ones(40))
    assert probability == pytest.approx(match_probability(2.0, 1.5, 1.0, 40), abs=1e-9)
    # a class far below the others has no effect
    assert match_with_unequal_others(1.0, 1.0, np.array([0.0, -50.0]), np.ones(2)) == pytest.approx(
        match_with_one_other(1.0, 1.0, 1.0), abs=1e-9
    )


@pytest.mark.parametrize(
    "wrong", [(1.0, 0.0, 1.0, 1), (1.0, 1.0, -1.0, 1), (np.nan, 1.0, 1.0, 1), (1.0, 1.0, 1.0, -1)]
)
def test_invalid_parameters_are_refused(wrong):
    with pytest.raises(ValueError, match="expected"):
        match_probability(*wrong)


LOGITS = np.array(
    [[0.0, 3.0, 1.0, 2.0], [4.0, 1.0, 0.0, 0.0], [0.0, 1.0, 5.0, 0.0], [1.0, 2.0, 3.0, 0.0]],
    np.float32,
)
LABELS = np.array([0, 1, 0, 0], np.int32)
"""Logits of the second of two tasks with two classes each; its columns are 2 and 3."""


def test_a_margin_is_the_best_logit_of_the_task_minus_the_best_other_logit():
    margins = margins_of("second", LOGITS, LABELS, 2, 2)
    np.testing.assert_array_equal(margins.margin, [-1, -4, 4, 1])
    assert margins.num_others == 2
    # the last two images are correct; the first two are assigned to the other task
    assert margins.accuracy == 0.5
    assert margins.local_accuracy == 0.5
    assert margins.other_mean == 1.5 and margins.other_std == pytest.approx(
        np.sqrt(1.75)
    )  # standard deviation of 0 3 4 1 0 1 1 2
    numbers = summary([margins])
    assert numbers["match"] == 0.5 and numbers["images"] == 4
    assert numbers["predicted"] == match_probability(
        2.5 - 1.5, float(np.std([2, 0, 5, 3])), margins.other_std, 2
    )


def test_tasks_together_have_the_mean_and_deviation_of_all_their_logits():
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(30, 9))
    labels = rng.integers(2, size=30).astype(np.int32)
    parts = [
        margins_of("a", logits[:20], labels[:20], 0, 2),
        margins_of("b", logits[20:] + 1, labels[20:], 2, 5),
    ]
    others = np.concatenate(
        [logits[:20, 2:].ravel(), np.delete(logits[20:] + 1, np.s_[2:7], axis=1).ravel()]
    )
    fit = fit_of(parts)
    assert (fit.other_mean, fit.other_std) == pytest.approx((others.mean(), others.std()))
    assert fit.local_std == pytest.approx(np.concatenate([part.best_own for part in parts]).std())
    assert summary(parts)["predicted"] == pytest.approx(
        (20 * fit.match(7) + 10 * fit.match(4)) / 30
    )


def test_the_prediction_holds_for_normal_logits():
    rng = np.random.default_rng(1)
    logits = rng.normal(size=(4000, 41))
    logits[:, 0] += 3
    numbers = summary([margins_of("normal", logits, np.zeros(4000, np.int32), 0, 1)])
    assert numbers["predicted"] == pytest.approx(numbers["match"], abs=0.03)
    assert numbers["predicted_by_class"] == pytest.approx(numbers["match"], abs=0.03)


def test_only_the_prediction_by_class_detects_similar_classes():
    rng = np.random.default_rng(2)
    labels = np.repeat([0, 1], 2000).astype(np.int32)
    best_own = 3 + rng.normal(size=(4000, 1))
    others = rng.normal(size=(4000, 20))
    others[np.arange(4000), labels] += 4  # each true class has a similar class in another task
    measured = (best_own >= others.max(axis=1, keepdims=True)).mean()
    assert by_class(best_own[:, 0], others, labels) == pytest.approx(measured, abs=0.03)
    alike = match_probability(3 - others.mean(), 1.0, others.std(), 20)
    assert alike > measured + 0.2


def test_rare_classes_share_one_fit():
    rng = np.random.default_rng(3)
    best, others = rng.normal(size=32), rng.normal(size=(32, 5))
    # every class has four images, so there is one fit of all
    rare = np.arange(32, dtype=np.int32) // 4
    assert by_class(best, others, rare) == by_class(best, others, np.zeros(32, np.int32))


def test_non_finite_logits_and_a_single_task_are_refused():
    broken = LOGITS.copy()
    broken[1, 2] = np.nan
    with pytest.raises(ValueError, match="'second': 1 logits are non-finite"):
        margins_of("second", broken, LABELS, 2, 2)
    with pytest.raises(ValueError, match="no other classes"):
        margins_of("only", LOGITS, LABELS, 0, 4)


def test_settings_are_read_from_the_json_of_a_run():
    config = L2pConfig(pool=7, layers=(0, 2), fit=FitConfig(epochs=3, learning_rate=0.5))
    document = json.loads(json.dumps(dataclasses.asdict(config)))
    assert (
        parse_settings(type(make_preset("l2p", "paper")), document, Path("config.json")) == config
    )
    with pytest.raises(ValueError, match=r"unknown settings \['depth'\]"):
        parse_settings(L2pConfig, {"depth": 3}, Path("config.json"))


WORKSHOP = {}
"""Compiled networks of the backbone, which all tests share."""


def finished_run(method: L2pConfig | EwcConfig, folder: Path) -> RunRecord:
    """Make a run of two small tasks."""
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
    """Check that an image is assigned to its task if the argmax within the task is the argmax of
    all classes."""
    for index, one in enumerate(margins):
        assert (one.margin >= 0).mean() == pytest.approx(run.results["routing"][index][index])
        assert one.accuracy == pytest.approx(run.results["accuracy"][-1][index])
        assert one.local_accuracy == pytest.approx(run.results["local_accuracy"][-1][index])


@pytest.mark.full
def test_the_heads_of_runs_are_measured_from_their_checkpoints(finished, tmp_path):
    margins = measure(finished, small.stream(2), small.pretrained(), WORKSHOP)
    check_against_record(finished, margins)
    head_analysis.write(tmp_path, [Measured(finished, margins)], [(Path("there"), "that is why")])
    tasks = json.loads((tmp_path / "heads.json").read_text())["tasks"]
    assert [(task["task"], task["others"]) for task in tasks] == [("task0", 4), ("task1", 3)]
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


@pytest.mark.full
def test_cells_are_means_over_runs_and_separate_heads_have_no_match(finished):
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
def test_images_and_weights_that_differ_from_the_run_are_refused(finished):
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
def test_a_run_with_a_missing_checkpoint_is_refused(finished, tmp_path):
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
def test_upper_bounds_and_runs_with_unusual_settings_are_left_out(finished, tmp_path):
    for name, changed in (
        ("bound", {"method": "full_finetune"}),
        ("lite", {"router": "vit_nano"}),
        ("usual", {}),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "results.json").write_text(json.dumps({**finished.results, **changed}))
        (tmp_path / name / "config.json").write_text(json.dumps(finished.config))
    runs_shown, left_out = head_analysis.shown([tmp_path])
    assert [run.directory.name for run in runs_shown] == ["usual"]
    assert {place.name: why for place, why in left_out} == {
        "bound": "an upper bound is given the task ID",
        "lite": "its settings or order differ (vit_nano)",
    }


@pytest.mark.full
def test_images_and_weights_are_loaded_from_the_sources_of_the_run(finished):
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


def test_without_runs_the_page_has_the_theory_and_the_papers_numbers(tmp_path):
    head_analysis.main(head_analysis.HeadAnalysis(out=tmp_path))
    numbers = json.loads((tmp_path / "heads.json").read_text())
    assert len(numbers["methods"]) == 12 and not numbers["tasks"]
    # Phi(1 / sqrt(2)) = 0.760
    assert "\n| 1 | 0.760 |" in (tmp_path / "heads.md").read_text()


@pytest.mark.slow
def test_a_folder_without_runs_is_refused(tmp_path):
    settings = head_analysis.HeadAnalysis(runs=(tmp_path,), out=tmp_path / "out")
    with pytest.raises(ValueError, match="no finished run that can be shown"):
        head_analysis.main(settings)
    assert not (tmp_path / "out").exists()


def test_the_head_of_ewc_is_measured(tmp_path):
    config = EwcConfig((1.0,), fit=FitConfig(epochs=2, learning_rate=1e-2), batch_size=20)
    run = finished_run(config, tmp_path)
    check_against_record(run, measure(run, small.stream(2), small.pretrained(), WORKSHOP))


@pytest.mark.slow
def test_runs_on_the_demo_stream_are_analysed_without_further_options(tmp_path):
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


def test_files_instead_of_folders_are_refused(tmp_path):
    file = tmp_path / "file"
    file.touch()
    for settings in ({"out": file}, {"runs": (file,)}):
        with pytest.raises(ValueError, match="is not a folder; "):
            head_analysis.main(head_analysis.HeadAnalysis(**settings))
