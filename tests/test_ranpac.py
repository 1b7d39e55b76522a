"""RanPAC: adapters of the first task, and a head that equals the regression on all images."""

import dataclasses
import functools
from typing import Any

import chex
import numpy as np
import pytest
import small
from baselines import check_method, fresh, learner

from cheem_jax.backbone import flops
from cheem_jax.backbone.config import find_config
from cheem_jax.baselines import adapters as adapters_module
from cheem_jax.baselines import ridge as ridge_module
from cheem_jax.baselines.adapters import adapter_params
from cheem_jax.baselines.catalogue import make_preset
from cheem_jax.baselines.ranpac import RanPac, RanPacConfig, pack, unpack
from cheem_jax.baselines.ridge import lift, one_hot
from cheem_jax.core.settings import FitConfig
from cheem_jax.data.task import Task
from cheem_jax.run.session import Session

CONFIG = RanPacConfig(
    bottleneck=3, hidden=40, fit=FitConfig(epochs=2, learning_rate=1e-2), batch_size=16
)


@pytest.fixture(scope="module", autouse=True)
def smaller():
    """Adapters of full strength, and few images per step of the head."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(adapters_module, "SCALE", 1.0)
        patched.setattr(ridge_module, "ANALYTIC_BATCH", 16)
        yield


@functools.cache
def method() -> Any:
    return learner(RanPac, CONFIG)


@pytest.mark.full
def test_ranpac_learns_saves_opens_and_predicts_per_image(tmp_path):
    ranpac: Any = check_method(method(), tmp_path)
    # x64 is off in JAX, and yet a checkpoint loses nothing
    assert ranpac.state.moments.dtype == ranpac.state.weight.dtype == np.float64
    again = fresh(method())
    again.open(tmp_path / "one")
    chex.assert_trees_all_equal(ranpac.state, again.state)


@pytest.mark.full
def test_tasks_one_by_one_fit_the_regression_on_the_images_of_all_tasks():
    tasks = small.stream(3).tasks
    ranpac = fresh(method())
    reports = [ranpac.learn(task, Session()) for task in tasks]
    state = ranpac.state
    x, y = [], []
    first = 0
    for task in tasks:
        x.append(lift(ranpac.features_with(state.adapters, task.train.images), state.projection))
        y.append(one_hot(first + task.train.labels, 10))
        first += len(task.classes)
    x, y = np.concatenate(x), np.concatenate(y)
    np.testing.assert_allclose(unpack(state.moments, 40), x.T @ x, rtol=1e-12)
    np.testing.assert_allclose(state.products, x.T @ y, rtol=1e-12)
    ridge = reports[-1]["ridge"] * np.eye(40)
    joint = np.linalg.solve(x.T @ x + ridge, x.T @ y)
    np.testing.assert_allclose(state.weight, joint, rtol=1e-6, atol=1e-8)
    images = tasks[0].test.images
    lifted = lift(ranpac.features_with(state.adapters, images), state.projection)
    np.testing.assert_allclose(ranpac.logits(images), lifted @ joint, atol=1e-6)


@pytest.mark.full
def test_the_order_of_later_tasks_permutes_the_columns_of_the_sums():
    one, two, three = small.stream(3).tasks
    forwards = fresh(method())
    backwards = fresh(method())
    for ranpac, tasks in ((forwards, (one, two, three)), (backwards, (one, three, two))):
        for task in tasks:
            ranpac.learn(task, Session())
    np.testing.assert_allclose(forwards.state.moments, backwards.state.moments, rtol=1e-12)
    assert [len(task.classes) for task in (one, two, three)] == [3, 4, 3]
    columns = [*range(3), *range(7, 10), *range(3, 7)]
    np.testing.assert_allclose(
        forwards.state.products[:, columns], backwards.state.products, rtol=1e-12
    )


@pytest.mark.full
def test_adapters_are_trained_on_the_first_task_alone():
    tasks = small.stream(2).tasks
    ranpac = fresh(method())
    first = ranpac.learn(tasks[0], Session())
    state = ranpac.state
    assert len(first["losses"]) == 2 and np.abs(np.asarray(state.adapters.up)).max() > 1e-4
    second = ranpac.learn(tasks[1], Session())
    assert list(second["losses"]) == [] and "train" not in second["seconds"]
    chex.assert_trees_all_equal(ranpac.state.adapters, state.adapters)
    np.testing.assert_array_equal(ranpac.state.projection, state.projection)


def test_the_projection_is_standard_normal():
    ranpac = fresh(method())
    ranpac.config = dataclasses.replace(CONFIG, hidden=5000)
    projection = ranpac._projection(small.task("colours", 0))
    assert projection.shape == (5000, 16)
    assert projection.mean() == pytest.approx(0, abs=0.02)
    assert projection.std() == pytest.approx(1, abs=0.02)


def test_packed_moments_are_the_upper_triangle_row_by_row():
    moments = np.array([[1.0, 2.0, 3.0], [2.0, 4.0, 5.0], [3.0, 5.0, 6.0]])
    np.testing.assert_array_equal(pack(moments), [1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    np.testing.assert_array_equal(unpack(pack(moments), 3), moments)


@pytest.mark.full
def test_classes_of_one_image_are_learned():
    split = small.task("few", 1, num_classes=3, num=6).val
    lone = Task("few", ("c0", "c1", "c2"), split, split, split)
    for tasks in ((lone, small.task("colours", 0)), (small.task("colours", 0), lone)):
        ranpac = fresh(method())
        for task in tasks:
            ranpac.learn(task, Session())
        assert ranpac.predict(split.images).classes.min() >= 0
        assert np.isfinite(ranpac.state.weight).all()


@pytest.mark.full
def test_costs_are_those_of_one_forward_pass():
    ranpac = fresh(method())
    reports = [ranpac.learn(task, Session()) for task in small.stream(2).tasks]
    vit = ranpac.executor.config
    added = adapter_params(vit, 3)
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
    stored = added + sum(part.size for part in ranpac.state[1:])
    assert sum(report["params_stored"] for report in reports) == stored
    assert [report["params_learned"] for report in reports] == [added + 1 + 16 * 3 + 40 * 3, 40 * 7]
    assert [report["params_added_percent"] > 0 for report in reports] == [True, False]
    # 12 blocks of two matrices 768 x 64 and their biases
    assert adapter_params(find_config("vit_base"), 64) == 12 * (2 * 768 * 64 + 64 + 768)


def test_invalid_settings_are_refused_and_much_memory_is_reported():
    for wrong, sentence in (
        ({"hidden": 0}, "hidden is 0; expected at least 1"),
        ({"bottleneck": 0}, "bottleneck is 0; expected at least 1"),
    ):
        with pytest.raises(ValueError, match=sentence):
            dataclasses.replace(CONFIG, **wrong)
    assert method().check(small.stream(2).tasks) == []
    ranpac = fresh(method())
    for hidden, notes in (
        (10_000, []),
        (20_000, ["20000 random features take up to 11.9 GiB of memory on the host"]),
    ):
        ranpac.config = dataclasses.replace(CONFIG, hidden=hidden)
        assert ranpac.check(small.stream(2).tasks) == notes


def test_every_preset_trains_at_the_rate_of_the_official_code():
    for preset in ("paper", "quick", "demo"):
        assert make_preset("ranpac", preset).fit.learning_rate == 0.01
