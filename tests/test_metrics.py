"""The metrics against matrices worked by hand; `experiments/studies/paper/test_tables.py` has the
paper's own rows."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cheem_jax.core import metrics

nan = np.nan


def test_the_temperature_is_the_one_by_which_labels_were_sampled():
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 4, (4000, 5)).astype(np.float32)
    for temperature in (0.5, 2.0):
        labels = (logits / temperature + rng.gumbel(size=logits.shape)).argmax(axis=1)
        assert metrics.fit_temperature(logits, labels) == pytest.approx(temperature, rel=0.1)
    assert metrics.fit_temperature(logits, logits.argmax(axis=1)) == pytest.approx(1 / 5, rel=1e-3)
    assert metrics.fit_temperature(np.where(logits > 8, np.inf, logits), labels) == 1


def test_the_calibration_error_weighs_each_bins_gap_by_its_images():
    confidence, right = (
        np.array([0.95, 0.95, 0.65, 0.65, 1.0]),
        np.array([True, True, True, False, True]),
    )
    np.testing.assert_allclose(
        metrics.calibration_error(confidence, right), (2 * 0.05 + 2 * 0.15 + 0) / 5
    )


def test_the_calibration_error_has_fifteen_bins():
    """Against the definition, bin by bin; another number of bins has another value."""
    rng = np.random.default_rng(0)
    confidence = rng.uniform(0, 1, 400)
    correct = rng.uniform(size=400) < 0.5 + 0.4 * np.sin(30 * confidence)

    def by_definition(num):
        error = 0.0
        for begin in np.arange(num) / num:
            inside = (confidence >= begin) & (confidence < begin + 1 / num)
            if inside.any():
                error += inside.mean() * abs(correct[inside].mean() - confidence[inside].mean())
        return error

    assert metrics.calibration_error(confidence, correct) == pytest.approx(by_definition(15))
    for num in (5, 10, 14, 16, 20):
        assert metrics.calibration_error(confidence, correct) != pytest.approx(by_definition(num))


def test_the_temperature_is_the_best_of_a_fine_grid():
    rng = np.random.default_rng(1)
    logits = rng.normal(0, 3, (300, 4)).astype(np.float32)
    labels = (logits / 1.7 + rng.gumbel(size=logits.shape)).argmax(axis=1)

    def loss(temperature):
        scaled = logits.astype(np.float64) / temperature
        probabilities = np.exp(scaled) / np.exp(scaled).sum(axis=1, keepdims=True)
        return -np.log(probabilities[np.arange(300), labels]).mean()

    grid = np.geomspace(0.2, 5, 4001)
    best = grid[np.argmin([loss(temperature) for temperature in grid])]
    assert metrics.fit_temperature(logits, labels) == pytest.approx(best, rel=2e-3)
    assert metrics.log_probability(logits, labels) == pytest.approx(-loss(1.0), rel=1e-6)


def test_fom_is_undefined_where_a_method_reaches_the_bound():
    assert metrics.figure_of_merit(0.8, 0.8, 1, 0.7, 1) is None
    assert metrics.figure_of_merit(0.8, 0.7, 1, 0.9, 1) is None
    assert metrics.figure_of_merit(0.8, 0.7, 2, 0.6, 3) == pytest.approx(3.0)


def test_forgetting_is_the_mean_drop_from_the_best_accuracy_so_far():
    # task 0: best 0.9, last 0.85; task 1: best 0.7, last 0.6; the last task does not count
    accuracy = np.array([[0.9, nan, nan], [0.8, 0.7, nan], [0.85, 0.6, 0.5]])
    assert metrics.average_forgetting(accuracy) == pytest.approx((0.05 + 0.1) / 2)


def test_the_accuracy_curve_counts_images_of_all_classes_seen_so_far():
    # 10 and 30 images: (0.8 * 10 + 0.6 * 30) / 40; after the third task (8 + 15 + 60 * 0.7) / 100
    accuracy = np.array([[0.9, nan, nan], [0.8, 0.6, nan], [0.8, 0.5, 0.7]])
    curve = metrics.accuracy_curve(accuracy, np.array([10, 30, 60]))
    np.testing.assert_allclose(curve, [0.9, 0.65, 0.65])
    np.testing.assert_allclose(curve.mean(), 2.2 / 3)


def test_the_accuracy_curve_lacks_the_steps_at_which_a_task_was_not_measured():
    accuracy = np.array([[0.9, nan], [nan, 0.6]])
    curve = metrics.accuracy_curve(accuracy, np.array([10, 30]))
    np.testing.assert_array_equal(curve, [0.9, nan])


def test_a_task_that_improves_later_forgets_from_its_best_and_never_less_than_nothing():
    rising = np.array([[0.5, nan, nan], [0.9, 0.4, nan], [0.7, 0.6, 0.5]])
    assert metrics.average_forgetting(rising) == pytest.approx((0.2 + 0.0) / 2)


def test_a_single_task_has_no_forgetting():
    assert metrics.average_forgetting(np.array([[0.7]])) is None


def test_missing_measurements_are_refused_by_name():
    accuracy = np.array([[0.9, nan], [nan, 0.7]])
    with pytest.raises(ValueError, match=r"\[\[1, 0\]\]"):
        metrics.average_forgetting(accuracy)
    with pytest.raises(ValueError, match=r"tasks \[0\]"):
        metrics.average_accuracy(accuracy)


@settings(deadline=None)
@given(st.integers(1, 6), st.integers(0, 2**31))
def test_without_change_after_learning_there_is_no_forgetting_and_the_diagonal_is_the_accuracy(
    num_tasks, seed
):
    just = np.random.default_rng(seed).uniform(size=num_tasks)
    accuracy = np.where(np.tri(num_tasks, dtype=bool), just, nan)
    assert metrics.average_forgetting(accuracy) in (None, 0.0)
    np.testing.assert_array_equal(metrics.just_trained(accuracy), just)
    assert metrics.average_accuracy(accuracy) == pytest.approx(just.mean())
    restored = metrics.matrix_from_json(metrics.matrix_to_json(accuracy))
    np.testing.assert_array_equal(restored, accuracy)


def test_routing_counts_fractions_of_the_true_task():
    true, chosen = np.array([0, 0, 0, 0, 1]), np.array([0, 0, 0, 2, 1])
    confusion = metrics.routing_confusion(true, chosen, 3)
    np.testing.assert_array_equal(confusion, [[0.75, 0, 0.25], [0, 1, 0], [nan, nan, nan]])
    assert metrics.matrix_to_json(confusion)[2] == [None, None, None]


def test_open_set_metrics_rank_unknown_images_above_known_ones():
    # of the 4 * 2 pairs, 0.9 is above all four and 0.35 above 0.1 and 0.2: 6 of 8
    measured = metrics.open_set_metrics(np.array([0.1, 0.2, 0.4, 0.6]), np.array([0.35, 0.9]))
    assert measured.auroc == pytest.approx(6 / 8)
    # accepting 95 % of four images accepts all of them, up to 0.6, and accepts 0.35
    assert measured.fpr95 == pytest.approx(1 / 2)


def test_open_set_metrics_count_ties_half_and_accept_nineteen_of_twenty():
    known_scores = np.append(np.linspace(0, 0.5, 19), 1.0)
    measured = metrics.open_set_metrics(known_scores, np.array([0.5, 0.75, 1.0]))
    # 0.5: 18 below and a tie; 0.75: 19 below; 1.0: 19 below and a tie
    assert measured.auroc == pytest.approx((18.5 + 19 + 19.5) / 60)
    assert measured.fpr95 == pytest.approx(1 / 3)  # the threshold 0.5 accepts 19 of 20


def test_after_each_task_images_of_later_tasks_are_unknown_and_only_learned_tasks_count():
    # rows: two images of task 0, one of task 1, one of task 2; columns: distances to tasks 0, 1, 2
    distances = np.array([[1.0, 9, 9], [5, 9, 0], [4, 1, 9], [8, 6, 0]])
    first, second = metrics.open_set_steps(distances, np.array([0, 0, 1, 2]))
    # after task 0: known 1 and 5, unknown 4 and 8; accepting both known accepts 4
    assert first == (pytest.approx(3 / 4), pytest.approx(1 / 2))
    # after task 1: known 1, 5 and 1, unknown 6
    assert second == (1.0, 0.0)


def test_an_image_without_a_finite_score_is_rejected_first():
    measured = metrics.open_set_metrics(np.array([0.1, 0.2]), np.array([np.nan, np.inf]))
    assert measured == (1.0, 0.0)


def test_the_accuracy_curve_can_weigh_every_step_by_its_own_images():
    accuracy = np.array([[0.5, np.nan], [0.4, 0.8]])
    curve = metrics.accuracy_curve(accuracy, np.array([[10, 30], [30, 10]]))
    np.testing.assert_allclose(curve, [0.5, (30 * 0.4 + 10 * 0.8) / 40])
