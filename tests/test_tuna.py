"""TUNA: adapters that begin as nothing, their merge, selection by entropy, and the alignment of
heads."""

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
from cheem_jax.backbone.config import find_config
from cheem_jax.baselines import adapters as adapters_module
from cheem_jax.baselines import tuna as tuna_module
from cheem_jax.baselines.adapters import Bottleneck, adapter_params
from cheem_jax.baselines.tuna import (
    JITTER,
    Gaussians,
    Tuna,
    TunaConfig,
    TunaState,
    TunaTask,
    fit_gaussians,
    merge,
    most_certain,
)
from cheem_jax.core.ops import Reuse
from cheem_jax.core.settings import FitConfig
from cheem_jax.run.session import Session

CONFIG = TunaConfig(
    bottleneck=3, alignment_epochs=3, fit=FitConfig(epochs=2, learning_rate=1e-2), batch_size=16
)


@pytest.fixture(scope="module", autouse=True)
def smaller():
    """Adapters of full strength, and few samples for the alignment."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(adapters_module, "SCALE", 1.0)
        patched.setattr(tuna_module, "SAMPLES", 1)
        patched.setattr(tuna_module, "ALIGNMENT_RATE", 0.1)
        yield


@functools.cache
def untrained() -> Any:
    return learner(Tuna, CONFIG)


def random_adapters(seed: int, size: float = 0.3) -> Bottleneck:
    rng = np.random.default_rng(seed)
    shapes = (4, 16, 3), (4, 3), (4, 3, 16), (4, 16)
    return Bottleneck(*(jnp.asarray(rng.normal(0, size, shape), jnp.float32) for shape in shapes))


@pytest.mark.full
def test_tuna_learns_saves_opens_and_answers_per_image(tmp_path):
    check_method(untrained(), tmp_path)


@pytest.mark.full
def test_new_adapters_leave_the_backbone_as_it_is_and_others_do_not():
    tuna = untrained()
    images = small.task("colours", 0).test.images
    plain = small.backbone()(jnp.asarray(images))
    new = tuna.new_adapters(small.task("colours", 0))
    assert np.abs(new.down).max() <= 1 / 4
    assert np.abs(new.down).mean() == pytest.approx(1 / 8, rel=0.2)
    np.testing.assert_allclose(tuna.features_with(new, images), plain, atol=1e-5)
    assert np.abs(tuna.features_with(random_adapters(0), images) - plain).max() > 0.1


@pytest.mark.full
def test_an_adapter_adds_relu_of_a_product_next_to_its_ffn():
    tuna = untrained()
    image = small.task("colours", 0).test.images[:1]
    adapters = random_adapters(1)
    vit = small.backbone()
    x = vit.embed(jnp.asarray(image))
    for block, layer in enumerate(vit.blocks):
        z = layer.enter(x, placement="mlp_down")
        hidden = np.maximum(np.asarray(z) @ adapters.down[block] + adapters.down_bias[block], 0)
        plain, _ = layer.leave(
            Reuse(layer.expert("mlp_down")),
            z,
            layer.widen(z, placement="mlp_down"),
            placement="mlp_down",
        )
        x = plain + (hidden @ adapters.up[block] + adapters.up_bias[block])
    np.testing.assert_allclose(
        tuna.features_with(adapters, image), vit.features(x), rtol=1e-3, atol=1e-4
    )


def test_the_merge_has_the_sign_of_the_mean_and_the_largest_size_under_it():
    one, two = (
        Bottleneck(*(jnp.array([values])[..., None] for _ in range(4)))
        for values in ([1.0, -3.0], [2.0, 1.0])
    )
    np.testing.assert_array_equal(merge([one, two]).down[0, :, 0], [2.0, -3.0])
    # a mean of 0 counts as negative; where no task has the mean's sign nothing is left
    opposed = [
        Bottleneck(*(jnp.array([values]) for _ in range(4))) for values in ([1.0, 0.0], [-1.0, 0.0])
    ]
    np.testing.assert_array_equal(merge(opposed).up_bias[0], [-1.0, 0.0])


def test_the_lowest_entropy_is_chosen_image_by_image():
    probabilities = np.array([[[0.9, 0.1], [0.5, 0.5]], [[0.6, 0.4], [0.2, 0.8]]], np.float32)
    entropies = -(probabilities * np.log(probabilities)).sum(axis=-1)
    np.testing.assert_array_equal(
        most_certain(probabilities, entropies), [probabilities[0, 0], probabilities[1, 1]]
    )
    np.testing.assert_array_equal(
        most_certain(probabilities, np.zeros((2, 2), np.float32)), probabilities[0]
    )


@pytest.mark.full
def test_scores_are_those_of_the_most_certain_adapter_and_the_universal_one_in_numpy():
    tuna = fresh(untrained())
    images = small.task("colours", 0).test.images
    bank = [random_adapters(seed) for seed in range(3)]
    nothing = Gaussians(np.zeros((0, 16)), np.zeros((0, 16)))
    tuna.tasks = [TunaTask(adapters, nothing) for adapters in bank]
    weight = np.random.default_rng(9).normal(size=(16, 7)).astype(np.float32)
    tuna.state = TunaState(weight)
    for number, classes in enumerate([("a", "b"), ("a", "b"), ("a", "b", "c")]):
        tuna.classes.add(f"task{number}", classes)
    scores = tuna.logits(images)

    def softmax(adapters):
        features = tuna.features_with(adapters, images).astype(np.float64)
        near = features @ weight / np.linalg.norm(weight, axis=0)
        powers = np.exp(20 * near / np.linalg.norm(features, axis=1, keepdims=True))
        return powers / powers.sum(axis=1, keepdims=True)

    result = [softmax(adapters) for adapters in bank]
    best = np.array([-(p * np.log(p)).sum(axis=1) for p in result]).argmin(axis=0)
    assert len(set(best.tolist())) > 1
    beside = softmax(jax.tree.map(jnp.asarray, merge(bank)))
    expected = np.array([result[task][row] for row, task in enumerate(best)]) + beside
    np.testing.assert_allclose(scores[:, :7], expected, atol=1e-3)
    assert scores[:, 7].max() == 0


def test_classes_are_sampled_with_their_mean_and_covariance_and_one_image_is_enough():
    rng = np.random.default_rng(0)
    mixing = rng.normal(size=(16, 16))
    features = (rng.normal(size=(200, 16)) @ mixing + 3).astype(np.float32)
    features = np.concatenate([features, features[:1]])
    labels = np.repeat([0, 1], [200, 1]).astype(np.int32)
    gaussians = fit_gaussians(features, labels, 2)
    covariance = np.cov(features[:200].T) + JITTER * np.eye(16)
    samples = np.asarray(
        untrained()._sample(jax.random.key(0), gaussians.means[0], gaussians.spreads[0], 20000)
    )
    np.testing.assert_allclose(samples.mean(axis=0), features[:200].mean(axis=0), atol=0.2)
    np.testing.assert_allclose(
        gaussians.spreads[0] @ gaussians.spreads[0].T, covariance, rtol=1e-3, atol=1e-2
    )
    np.testing.assert_allclose(np.cov(samples.T), covariance, atol=0.1 * np.diag(covariance).max())
    alone = np.asarray(
        untrained()._sample(jax.random.key(1), gaussians.means[1], gaussians.spreads[1], 20000)
    )
    np.testing.assert_allclose(alone.std(axis=0), JITTER**0.5, rtol=0.05)
    np.testing.assert_allclose(alone.mean(axis=0), features[0], atol=1e-3)


@pytest.mark.full
def test_the_alignment_turns_heads_to_where_their_classes_are():
    tuna = fresh(untrained())
    tuna.config = dataclasses.replace(CONFIG, alignment_epochs=10)
    means = 2 * np.eye(16, dtype=np.float32)[:5]
    spreads = np.tile(0.1 * np.eye(16, dtype=np.float32), (5, 1, 1))
    wrong = means[[1, 2, 3, 4, 0]].T
    parts = [Gaussians(means[:2], spreads[:2]), Gaussians(means[2:], spreads[2:])]
    tuna.tasks = [TunaTask(random_adapters(0), part) for part in parts]
    head, losses = tuna.aligned(wrong, lambda num_images, note="", /: None)
    np.testing.assert_array_equal((means @ head).argmax(axis=1), np.arange(5))
    assert losses[0] > 5 > 0.5 > losses[-1]


@pytest.mark.full
def test_classes_of_one_image_are_said_and_learned():
    lone = small.lone_task()
    tuna = fresh(untrained())
    said = tuna.check([small.task("colours", 0), lone])
    assert said[0].startswith(
        "6 of 6 classes do not have more training images than the 16 dimensions"
    )
    assert (
        said[1]
        == "3 classes have a single training image; the variance of their features is set to"
        " 0.0001"
    )
    tuna.learn(small.task("colours", 0), Session())
    report = tuna.learn(lone, Session())
    assert np.isfinite(report["alignment_losses"]).all()
    assert tuna.predict(lone.train.images).classes.min() >= 0


@pytest.mark.full
def test_costs_are_a_pass_per_task_and_one_of_the_universal_adapter():
    tuna = fresh(untrained())
    report = tuna.learn(small.task("colours", 0), Session())
    vit = tuna.executor.config
    adapters = 4 * 5 * 2 * 2 * 16 * 3
    assert report["flops_method"] == 4 * flops.backbone_flops(vit)
    assert report["flops_explicit"] == 4 * (
        flops.backbone_flops(vit, count_attention=True) + adapters
    )
    # the last block's adapter for the class token alone
    ran = flops.executed_backbone_flops(vit) + adapters * 16 // 20 + 2 * 16 * 3
    assert report["flops_executed"] == 4 * ran
    per_task = adapter_params(vit, 3)
    assert per_task == sum(leaf.size for leaf in tuna.tasks[0].adapters)
    assert report["params_stored"] == per_task + 16 * 3 + 3 * (16 + 16 * 16)
    # the table's rows, MTIL and VDD; the paper counts no adapters
    for name, tasks, row in (
        ("vit_base", 11, 405.0),
        ("vit_base", 9, 337.0),
        ("deit_tiny", 11, 26.0),
        ("deit_tiny", 9, 21.5),
    ):
        assert (tasks + 1) * flops.backbone_flops(find_config(name)) / 1e9 == pytest.approx(
            row, rel=0.01
        )
    tuna.num_tasks = 1
    assert tuna.costs()["flops_method"] == flops.backbone_flops(vit)
