"""EASE: prototypes of earlier classes are synthesised; the subspaces of all tasks predict."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small
from baselines import check_method, fresh, learner

from cheem_jax.backbone import flops
from cheem_jax.baselines import adapters as adapters_module
from cheem_jax.baselines.adapters import Bottleneck, adapter_params
from cheem_jax.baselines.ease import (
    Ease,
    EaseConfig,
    EaseTask,
    classifiers,
    in_subspace,
    synthesised,
)
from cheem_jax.core.settings import FitConfig
from cheem_jax.data.task import Task
from cheem_jax.run.session import Session

CONFIG = EaseConfig(bottleneck=3, fit=FitConfig(epochs=2, learning_rate=1e-2), batch_size=16)


@pytest.fixture(scope="module", autouse=True)
def stronger():
    """Adapters of full strength."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(adapters_module, "SCALE", 1.0)
        yield


@functools.cache
def method() -> Any:
    return learner(Ease, CONFIG)


def random_prototypes(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def random_adapters(seed: int) -> Bottleneck:
    rng = np.random.default_rng(seed)
    shapes = (4, 16, 3), (4, 3), (4, 3, 16), (4, 16)
    return Bottleneck(*(jnp.asarray(rng.normal(0, 0.3, shape), jnp.float32) for shape in shapes))


@pytest.mark.full
def test_ease_learns_saves_opens_and_predicts_per_image(tmp_path):
    ease = check_method(method(), tmp_path)
    assert [task.prototypes.shape for task in ease.tasks] == [(1, 3, 16), (2, 4, 16), (3, 3, 16)]


def test_synthesis_on_an_example_by_hand():
    # the cosines with the two later classes are 1 and 0, so the softmax is e / (e + 1), 1 / (e + 1)
    earlier = np.array([[3.0, 0.0]])
    later = np.array([[2.0, 0.0], [0.0, 5.0]])
    later_new = np.array([[10.0, 0.0], [0.0, 20.0]])
    near = np.e / (np.e + 1)
    np.testing.assert_allclose(near, 0.7310586, atol=1e-7)
    np.testing.assert_allclose(
        synthesised(earlier, later, later_new), [[10 * near, 20 * (1 - near)]], rtol=1e-6
    )
    # the only later class determines the direction alone
    np.testing.assert_allclose(synthesised(earlier, later[1:], later_new[1:]), [[0.0, 20.0]])
    # equal similarity to both
    np.testing.assert_allclose(
        synthesised(np.array([[4.0, 4.0]]), later, later_new), [[5.0, 10.0]], rtol=1e-6
    )


def test_prototypes_are_measured_up_to_a_task_and_synthesised_in_later_subspaces():
    prototypes = [random_prototypes(t, t + 1, classes, 6) for t, classes in enumerate((2, 4, 1))]
    np.testing.assert_array_equal(in_subspace(prototypes, 0, 0), prototypes[0][0])
    np.testing.assert_array_equal(in_subspace(prototypes, 2, 1), prototypes[2][1])
    for task, subspace in ((0, 1), (0, 2), (1, 2)):
        measured = prototypes[task][task].astype(np.float64)
        expected = []
        for row in measured:
            # the classes of the subspace's task and of all tasks after it
            later = np.concatenate([one[task] for one in prototypes[subspace:]])
            new = np.concatenate([one[subspace] for one in prototypes[subspace:]])
            cosines = later @ row / np.linalg.norm(later, axis=1) / np.linalg.norm(row)
            shares = np.exp(cosines) / np.exp(cosines).sum()
            expected.append(shares @ new)
        np.testing.assert_allclose(
            in_subspace(prototypes, task, subspace), expected, rtol=1e-4, atol=1e-5
        )


def test_a_class_has_length_1_in_its_own_subspace_and_a_tenth_in_others():
    prototypes = [random_prototypes(t, t + 1, classes, 6) for t, classes in enumerate((2, 3))]
    lengths = [np.linalg.norm(weight, axis=0) for weight in classifiers(prototypes)]
    np.testing.assert_allclose(lengths[0], [1, 1, 0.1, 0.1, 0.1], rtol=1e-5)
    np.testing.assert_allclose(lengths[1], [0.1, 0.1, 1, 1, 1], rtol=1e-5)
    prototypes.append(random_prototypes(2, 3, 1, 6))
    lengths = [np.linalg.norm(weight, axis=0) for weight in classifiers(prototypes)]
    np.testing.assert_allclose(lengths[2], [0.05, 0.05, 0.05, 0.05, 0.05, 1], rtol=1e-5)


@pytest.mark.full
def test_logits_are_sums_of_cosines_in_numpy():
    ease = fresh(method())
    images = small.task("colours", 0).test.images
    shapes = (2, 4, 1)
    ease.tasks = [
        EaseTask(random_adapters(t), random_prototypes(t, t + 1, classes, 16))
        for t, classes in enumerate(shapes)
    ]
    prototypes = [task.prototypes for task in ease.tasks]
    expected = np.zeros((len(images), 7))
    for subspace, task in enumerate(ease.tasks):
        features = ease.features_with(task.adapters, images).astype(np.float64)
        features /= np.linalg.norm(features, axis=1, keepdims=True)
        column = 0
        for other in range(3):
            for point in in_subspace(prototypes, other, subspace):
                share = 1 if other == subspace else 0.1 / 2  # three subspaces
                expected[:, column] += share * (features @ point) / np.linalg.norm(point)
                column += 1
    logits = ease.logits(images)
    np.testing.assert_allclose(logits[:, :7], expected, atol=1e-4)
    assert np.abs(logits[:, 7:]).max() == 0


@pytest.mark.full
def test_later_tasks_change_neither_adapters_nor_prototypes_of_a_task():
    tasks = small.stream(2).tasks
    ease = fresh(method())
    ease.learn(tasks[0], Session())
    first = jax.tree.map(np.array, ease.tasks[0])
    ease.learn(tasks[1], Session())
    jax.tree.map(np.testing.assert_array_equal, ease.tasks[0], first)
    # prototypes are class means, also of a later task in the earlier subspace
    features = ease.features_with(ease.tasks[0].adapters, tasks[1].train.images)
    for c in range(4):
        np.testing.assert_allclose(
            ease.tasks[1].prototypes[0, c],
            features[tasks[1].train.labels == c].mean(axis=0),
            rtol=1e-4,
            atol=1e-5,
        )
    # each task trains new adapters
    assert np.abs(np.asarray(ease.tasks[1].adapters.down - first.adapters.down)).max() > 0.1


@pytest.mark.full
def test_classes_of_one_image_are_learned():
    split = small.task("few", 1, num_classes=3, num=6).val
    lone = Task("few", ("c0", "c1", "c2"), split, split, split)
    ease = fresh(method())
    for task in (lone, small.task("colours", 0)):
        ease.learn(task, Session())
    assert ease.predict(split.images).classes.min() >= 0


@pytest.mark.full
def test_costs_are_a_pass_per_task():
    ease = fresh(method())
    report = ease.learn(small.task("colours", 0), Session())
    vit = ease.executor.config
    adapters = 4 * 5 * 2 * 2 * 16 * 3
    assert report["flops_method"] == 3 * flops.backbone_flops(vit)
    assert report["flops_explicit"] == 3 * (
        flops.backbone_flops(vit, count_attention=True) + adapters
    )
    # the last block's adapter runs for the class token alone
    executed = flops.executed_backbone_flops(vit) + adapters * 16 // 20 + 2 * 16 * 3
    assert report["flops_executed"] == 3 * executed
    added = adapter_params(vit, 3)
    assert added == sum(leaf.size for leaf in ease.tasks[0].adapters)
    assert report["params_stored"] == added + 16 * 3
    assert report["params_learned"] == added + 1 + 16 * 3
    second = ease.learn(small.task("textures", 1), Session())
    assert second["params_stored"] == added + 2 * 16 * 3


def test_invalid_settings_are_refused():
    with pytest.raises(ValueError, match="bottleneck is 0; expected at least 1"):
        dataclasses.replace(CONFIG, bottleneck=0)
