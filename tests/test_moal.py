"""MoAL: the analytic head is exact, adapters follow their average, and rumination shifts only wrong
classes."""

import dataclasses
import functools
from typing import Any

import chex
import jax
import numpy as np
import pytest
import small
from baselines import check_method, fresh, learner

from cheem_jax.backbone import flops
from cheem_jax.backbone.config import find_config
from cheem_jax.baselines import adapters as adapters_module
from cheem_jax.baselines import moal as moal_module
from cheem_jax.baselines import ridge as ridge_module
from cheem_jax.baselines.adapters import adapter_params
from cheem_jax.baselines.moal import (
    Analytic,
    Moal,
    MoalConfig,
    drift_map,
    least_squares,
    nearest_new,
    shifted_sources,
)
from cheem_jax.baselines.ridge import lift, one_hot, ridge_inverse
from cheem_jax.core.keys import Phase, order_at
from cheem_jax.core.settings import FitConfig
from cheem_jax.data.task import Split
from cheem_jax.run.session import Session

CONFIG = MoalConfig(
    bottleneck=3, hidden=40, fit=FitConfig(epochs=2, learning_rate=1e-2), batch_size=16
)


@pytest.fixture(scope="module", autouse=True)
def smaller():
    """Adapters of full strength, a fast average, and few images per step of the head."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(adapters_module, "SCALE", 1.0)
        patched.setattr(moal_module, "EMA", 0.6)
        patched.setattr(ridge_module, "ANALYTIC_BATCH", 16)
        yield


@pytest.fixture
def no_rumination(monkeypatch):
    def own_images(labels, means, classes):
        return labels[:0], labels[:0]

    monkeypatch.setattr(moal_module, "shifted_sources", own_images)


@functools.cache
def method() -> Any:
    return learner(Moal, CONFIG)


def moal_with(**changed) -> Any:
    """Return a method with other settings of the head and the same compiled functions."""
    moal = fresh(method())
    moal.config = dataclasses.replace(CONFIG, **changed)
    return moal


def learned(moal: Any, tasks) -> Any:
    for task in tasks:
        moal.learn(task, Session())
    return moal


@pytest.mark.full
def test_moal_learns_saves_opens_and_answers_per_image(tmp_path):
    moal: Any = check_method(method(), tmp_path)
    # x64 is off in JAX, and yet nothing is lost on the way to the disk and back
    assert moal.state.analytic.inverse.dtype == moal.state.analytic.weight.dtype == np.float64
    again = fresh(method())
    again.open(tmp_path / "one")
    chex.assert_trees_all_equal(moal.state, again.state)
    np.testing.assert_array_equal(moal.state.analytic.inverse, moal.state.analytic.inverse.T)


@pytest.mark.parametrize("sizes", [(30, 70), (1, 5, 94), (100,)])
def test_recursive_least_squares_is_the_ridge_regression_on_all_images(sizes):
    rng = np.random.default_rng(0)
    x = np.maximum(rng.normal(size=(150, 60)), 0)
    y = one_hot(rng.integers(0, 5, 150), 5)
    inverse, penalty = ridge_inverse(x[:50].T @ x[:50], 0.1)
    assert penalty == 0.1
    analytic = Analytic(inverse, inverse @ x[:50].T @ y[:50])
    begin = 50
    for size in sizes:
        least_squares(analytic, x[begin : begin + size], y[begin : begin + size])
        begin += size
    closed = np.linalg.inv(x.T @ x + 0.1 * np.eye(60))
    np.testing.assert_allclose(analytic.inverse, closed, atol=1e-8)
    np.testing.assert_allclose(analytic.weight, closed @ x.T @ y, atol=1e-8)
    np.testing.assert_array_equal(analytic.inverse, analytic.inverse.T)


@pytest.mark.full
def test_without_factor_and_rumination_two_tasks_fit_the_ridge_regression_on_both(
    no_rumination, monkeypatch
):
    tasks = small.stream(2).tasks
    # with ema 1 the adapters stay, so features of the first task are still known
    moal = fresh(method())
    monkeypatch.setattr(moal_module, "FIRST_SCALE", 1.0)
    moal._average = lambda old, new: old
    report = moal.learn(tasks[0], Session())
    first = moal.state.adapters
    moal.learn(tasks[1], Session())
    chex.assert_trees_all_equal(moal.state.adapters, first)
    x = np.concatenate(
        [
            lift(moal.features_with(first, task.train.images), moal.state.projection)
            for task in tasks
        ]
    )
    y = one_hot(np.concatenate([tasks[0].train.labels, 3 + tasks[1].train.labels]), 7)
    closed = np.linalg.solve(x.T @ x + report["ridge"] * np.eye(40), x.T @ y)
    np.testing.assert_allclose(moal.state.analytic.weight, closed, atol=1e-8)
    np.testing.assert_allclose(
        moal.logits(tasks[0].test.images),
        lift(moal.features_with(first, tasks[0].test.images), moal.state.projection) @ closed,
        atol=1e-6,
    )
    # the factor is the first task's alone
    scaled = fresh(method())
    monkeypatch.setattr(moal_module, "FIRST_SCALE", 0.9)
    scaled.learn(tasks[0], Session())
    alone = np.linalg.solve(x[:40].T @ x[:40] + report["ridge"] * np.eye(40), x[:40].T @ y[:40, :3])
    np.testing.assert_allclose(scaled.state.analytic.weight, 0.9 * alone, atol=1e-8)


@pytest.mark.full
def test_adapters_follow_their_average_by_epochs_after_the_first_task():
    tasks = small.stream(2).tasks
    moal = fresh(method())
    ends = []

    def average(old, new):
        ends.append((old, jax.tree.map(np.asarray, new)))
        return method()._average(old, new)

    moal._average = average
    learned(moal, tasks[:1])
    first = moal.state.adapters
    assert ends == []
    learned(moal, tasks[1:])
    assert len(ends) == CONFIG.fit.epochs and ends[0][0] is not None
    expected = first
    for _, new in ends:
        expected = jax.tree.map(lambda a, b: 0.6 * a + 0.4 * b, expected, new)
    chex.assert_trees_all_close(moal.state.adapters, expected, rtol=1e-5, atol=1e-7)
    assert np.abs(moal.state.adapters.up - first.up).max() > 1e-4


def test_the_drift_map_is_the_identity_without_drift_and_finds_a_linear_one():
    rng = np.random.default_rng(2)
    old = rng.normal(size=(400, 8)).astype(np.float32)
    np.testing.assert_array_equal(drift_map(old, old), np.eye(8))
    turn = np.eye(8) + 0.3 * rng.normal(size=(8, 8))
    np.testing.assert_allclose(drift_map(old, (old @ turn).astype(np.float32)), turn, atol=1e-4)
    # fewer images than dimensions: near the identity in unknown directions
    few = drift_map(old[:4], (old[:4] @ turn).astype(np.float32))
    unseen = np.linalg.svd(old[:4])[2][4:]
    np.testing.assert_allclose(unseen @ few, unseen, atol=1e-4)
    np.testing.assert_array_equal(drift_map(old[:1], old[1:2]), np.eye(8))


def test_old_classes_are_stood_for_by_images_of_the_new_class_nearest_by_cosine():
    means = np.array([[1.0, 0.1], [0.1, 2.0], [0.0, 1.0], [5.0, 0.0]], np.float32)
    np.testing.assert_array_equal(nearest_new(means, 2), [3, 2])
    sources, classes = shifted_sources(np.array([2, 3, 2], np.int32), means, 2)
    np.testing.assert_array_equal(sources, [0, 1, 2, 1, 0, 2])
    np.testing.assert_array_equal(classes, [2, 3, 2, 0, 1, 1])


@pytest.mark.full
def test_rumination_learns_again_only_the_images_that_the_head_gets_wrong(request):
    tasks = list(small.stream(2).tasks)
    # labels by chance, so that much is wrong
    chance = np.random.default_rng(0).permutation(tasks[1].train.labels)
    tasks[1] = dataclasses.replace(tasks[1], train=Split(tasks[1].train.images, chance))
    first = learned(fresh(method()), tasks[:1])
    with_it = fresh(method())
    without = fresh(method())
    with_it.state, without.state = first.state, first.state
    for moal in (with_it, without):
        moal.classes.add(tasks[0].name, tasks[0].classes)
    report = with_it.learn(tasks[1], Session())
    request.getfixturevalue("no_rumination")
    assert without.learn(tasks[1], Session())["ruminated"] == 0
    # once more by hand, from where plain least squares ends
    state = with_it.state
    labels = 3 + tasks[1].train.labels
    analytic = Analytic(*(part.copy() for part in without.state.analytic))
    features = with_it.features_with(state.adapters, tasks[1].train.images)
    examples = [(feature, int(c)) for feature, c in zip(features, labels, strict=True)]
    for c, new in enumerate(nearest_new(state.means, 3)):
        examples += [(f - state.means[new] + state.means[c], c) for f in features[labels == new]]
    assert report["ruminated"] == len(examples) and 0 < report["ruminated_wrong"] < len(examples)
    order = order_at(with_it.keys.at(1, Phase.ALIGNMENT_ORDER, 1), len(examples))
    wrong = 0
    for begin in range(0, len(order), 16):
        chunk = [examples[i] for i in order[begin : begin + 16]]
        x = lift(np.stack([f for f, _ in chunk]), state.projection)
        y = np.array([c for _, c in chunk])
        missed = (x @ analytic.weight).argmax(axis=1) != y
        least_squares(analytic, x[missed], one_hot(y[missed], 7))
        wrong += missed.sum()
    assert wrong == report["ruminated_wrong"]
    np.testing.assert_allclose(state.analytic.weight, analytic.weight, rtol=1e-5, atol=1e-6)


@pytest.mark.full
def test_classes_of_one_image_are_learned():
    lone = small.lone_task()
    for tasks in ((lone, small.task("colours", 0)), (small.task("colours", 0), lone)):
        moal = learned(fresh(method()), tasks)
        assert moal.predict(lone.test.images).classes.min() >= 0
        assert np.isfinite(moal.state.analytic.weight).all()


@pytest.mark.full
def test_costs_are_those_of_one_forward_pass():
    moal = fresh(method())
    reports = [moal.learn(task, Session()) for task in small.stream(2).tasks]
    vit = moal.executor.config
    per_task = adapter_params(moal.executor.config, 3)
    adapters, head = 4 * 5 * 2 * 2 * 16 * 3, 2 * 40 * (16 + 7)
    assert reports[1]["flops_method"] == flops.backbone_flops(vit)
    assert (
        reports[1]["flops_explicit"]
        == flops.backbone_flops(vit, count_attention=True) + adapters + head
    )
    assert (
        reports[1]["flops_executed"]
        == flops.executed_backbone_flops(vit) + adapters * 16 // 20 + head
    )
    stored = (
        per_task
        + 1
        + 16 * 7
        + moal.state.means.size
        + sum(part.size for part in moal.state.analytic)
    )
    assert sum(report["params_stored"] for report in reports) == stored + moal.state.projection.size
    assert [report["params_added_percent"] > 0 for report in reports] == [True, False]
    # the table's row is the plain pass; the adapters it leaves out would make it 34.2
    base = find_config("vit_base")
    assert flops.backbone_flops(base) / 1e9 == pytest.approx(33.7, abs=0.05)
    assert (flops.backbone_flops(base) + flops.adapter_flops(base, 64)) / 1e9 == pytest.approx(
        34.16, abs=0.05
    )
    assert flops.backbone_flops(find_config("deit_tiny")) / 1e9 == pytest.approx(2.2, abs=0.06)


def test_much_memory_is_reported_beforehand():
    assert method().check(small.stream(2).tasks) == []
    assert moal_with(hidden=20000).check(small.stream(2).tasks) == [
        "20000 random features need up to 11.9 GiB of memory on the host"
    ]
