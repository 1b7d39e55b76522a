"""EWC: its Fisher information, the effect of its penalty, and the choice of its strength."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small
from baselines import Interrupted, Watched, check_method, fresh, learner

from cheem_jax.backbone import flops
from cheem_jax.backbone.config import find_config
from cheem_jax.baselines.ewc import Ewc, EwcConfig, squared_gradients
from cheem_jax.core.keys import Phase
from cheem_jax.core.settings import FitConfig, no_progress
from cheem_jax.run.session import Session

CONFIG = EwcConfig(penalties=(100.0,), fit=FitConfig(epochs=2, learning_rate=1e-3), batch_size=16)


@functools.cache
def untrained() -> Ewc:
    ewc = learner(Ewc, CONFIG)
    ewc.chunk = 16  # so that the last one is padded
    return ewc


def ewc_with(**changed) -> Ewc:
    """Return a method with other settings and the same compiled functions."""
    ewc = fresh(untrained())
    ewc.config = dataclasses.replace(CONFIG, **changed)
    ewc.penalty = ewc.config.penalties[0] if len(ewc.config.penalties) == 1 else None
    return ewc


@pytest.mark.full
def test_ewc_learns_saves_opens_and_answers_per_image(tmp_path):
    check_method(untrained(), tmp_path)


def logistic(weight, x, y):
    return y * jax.nn.log_sigmoid(weight @ x) + (1 - y) * jax.nn.log_sigmoid(-weight @ x)


def test_the_fisher_information_of_logistic_regression_is_the_analytic_one():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(50, 3)).astype(np.float32)
    weight = np.array([0.5, -1.0, 2.0], np.float32)
    p = 1 / (1 + np.exp(-x @ weight))
    y = (rng.random(50) < 0.5).astype(np.float32)
    mean = np.full(50, 1 / 50, np.float32)
    empirical = squared_gradients(
        logistic, weight, jnp.asarray(mean), jnp.asarray(x), jnp.asarray(y)
    )
    np.testing.assert_allclose(empirical, ((y - p)[:, None] ** 2 * x**2).mean(axis=0), rtol=1e-4)
    # the expectation over labels from the model itself: both labels, as often as the model samples
    both = squared_gradients(logistic, weight, jnp.asarray(p / 50), jnp.asarray(x), jnp.ones(50))
    both += squared_gradients(
        logistic, weight, jnp.asarray((1 - p) / 50), jnp.asarray(x), jnp.zeros(50)
    )
    np.testing.assert_allclose(both, ((p * (1 - p))[:, None] * x**2).mean(axis=0), rtol=1e-4)


@functools.cache
def spelled_out():
    """Log-probabilities of one image, and the gradient of one of them."""
    merge_vit = untrained().executor.merge_vit

    def log_probabilities(leaves, head, image):
        features = merge_vit(leaves)(image[None])
        return jax.nn.log_softmax((features @ head.weight + head.bias)[0, :3])

    gradient = jax.grad(
        lambda leaves, head, image, label: log_probabilities(leaves, head, image)[label]
    )
    return jax.jit(log_probabilities), jax.jit(gradient)


@pytest.mark.full
def test_the_networks_fisher_information_is_that_of_a_loop_over_its_images():
    ewc = fresh(untrained())
    task = small.task("colours", 0)
    leaves, head = ewc.fitter.begin(ewc.start(task)).learned
    fisher = ewc.add_fisher(ewc.state.fisher, (leaves, head), task, no_progress)

    values, gradient = spelled_out()
    key = ewc.keys.at(0, Phase.METHOD_NOISE, 1)
    labels = [
        int(
            jax.random.categorical(
                jax.random.fold_in(key, row), jnp.append(values(leaves, head, image), -1e30)
            )
        )
        for row, image in enumerate(task.train.images)
    ]
    assert 0 < (labels != task.train.labels).sum() < 40
    images = [
        gradient(leaves, head, image, label)
        for image, label in zip(task.train.images, labels, strict=True)
    ]
    for leaf, gradients in zip(fisher, zip(*images, strict=True), strict=True):
        gradients = np.stack(gradients).astype(np.float64)
        expected = (gradients**2).mean(axis=0)
        np.testing.assert_allclose(leaf, expected, rtol=2e-3, atol=2e-5 * expected.max() + 1e-12)


@pytest.mark.full
def test_the_first_task_pays_no_penalty_and_a_larger_one_keeps_later_tasks_nearer():
    tasks = small.stream(2).tasks
    steps = {}
    for penalty in (0.0, 1e6):
        ewc = ewc_with(penalties=(penalty,))
        ewc.learn(tasks[0], Session())
        first = ewc.state
        ewc.learn(tasks[1], Session())
        assert all(leaf.min() >= 0 for leaf in first.fisher)
        # only the first task's columns are unchanged
        np.testing.assert_array_equal(ewc.state.head.weight[:, :3], first.head.weight[:, :3])
        assert np.abs(ewc.state.head.weight[:, 3:7]).min() > 0
        pairs = zip(ewc.state.backbone, first.backbone, first.fisher, strict=True)
        steps[penalty] = sum(float((f * (new - old) ** 2).sum()) for new, old, f in pairs), first
    assert steps[1e6][0] < 0.2 * steps[0.0][0]
    chex.assert_trees_all_equal(steps[0.0][1].backbone, steps[1e6][1].backbone)


@pytest.mark.full
def test_the_penalty_is_the_best_on_validation_and_a_stopped_search_resumes(tmp_path):
    tasks = small.stream(3).tasks
    searching = ewc_with(penalties=(0.0, 1e2, 1e9))
    assert searching.check(tasks) == [
        "task1, task2 are learned 3 times beforehand, to select one of 3 penalties on the"
        " validation split"
    ]
    whole = fresh(searching)
    report = whole.learn(tasks[0], Session())
    accuracies = report["penalty_accuracies"]
    assert list(accuracies) == ["0.0", "100.0", "1000000000.0"]
    assert len(set(accuracies.values())) > 1
    assert accuracies[str(report["penalty"])] == max(accuracies.values())

    # the result of the search for a penalty equals that of a stream with this penalty
    alone = ewc_with(penalties=(100.0,))
    right = []
    for task in tasks:
        alone.learn(task, Session())
    for index, task in enumerate(tasks):
        result = alone.predict(task.val.images)
        right.append(((result.tasks == index) & (result.classes == task.val.labels)).mean())
    assert accuracies["100.0"] == pytest.approx(np.mean(right), abs=1e-9)

    # training has 6 steps, the Fisher information 3 chunks, each penalty 2 x (6 + 3)
    stopped = fresh(searching)
    watched = Watched(until=9 + 18 + 3)
    with pytest.raises(Interrupted):
        stopped.learn(tasks[0], watched)
    assert np.isnan(watched.checkpoint.arrays["tried"]).tolist() == [False, True, True]
    again = fresh(searching)
    counted = Watched(saved=watched.checkpoint)
    assert again.learn(tasks[0], counted)["penalty_accuracies"] == accuracies
    assert counted.reports == 3 + 2 * 18
    again.save(tmp_path)
    opened = fresh(searching)
    opened.open(tmp_path)
    assert opened.penalty == report["penalty"]


@pytest.mark.full
def test_costs_are_those_of_one_plain_forward_pass():
    ewc = fresh(untrained())
    report = ewc.learn(small.task("colours", 0), Session())
    vit = ewc.executor.config
    assert report["flops_method"] == flops.backbone_flops(vit)
    assert report["flops_explicit"] == flops.backbone_flops(vit, count_attention=True)
    assert report["flops_executed"] == flops.executed_backbone_flops(vit) + 2 * 16 * 3
    params = flops.backbone_params(vit)
    assert (report["params_learned"], report["params_stored"]) == (params + 17 * 3, params + 17 * 3)
    # the table's row: 33.7 and 2.2 (rounded up there), attention products not counted
    for name, row in (("vit_base", 33.7), ("deit_tiny", 2.2)):
        assert flops.backbone_flops(find_config(name)) / 1e9 == pytest.approx(row, abs=0.06)


@pytest.mark.full
def test_penalties_are_compared_on_a_stream_that_is_known_beforehand():
    tasks = small.stream(2).tasks
    ewc = ewc_with(penalties=(1.0, 2.0))
    with pytest.raises(
        ValueError, match=r"starts with 'task0'; call check\(tasks\) first, or give one penalty"
    ):
        ewc.learn(tasks[0], Session())
    assert ewc.check(tasks[:1]) == [
        "a single task needs no penalty, so none of the 2 penalties is selected"
    ]
    assert ewc.learn(tasks[0], Session())["penalty"] == 1.0
