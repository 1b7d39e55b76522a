"""DIKI: a second softmax whose values start at zero, and Gaussians that infer the task."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small
from baselines import attention, check_method, fresh, learner, linear, mlp, norm
from scipy.stats import multivariate_normal

from cheem_jax.backbone.config import find_config
from cheem_jax.backbone.flops import (
    backbone_flops,
    embed_flops,
    executed_backbone_flops,
    prefix_flops,
)
from cheem_jax.baselines.diki import (
    Diki,
    DikiConfig,
    find_layers,
    fit_gaussian,
    log_density,
    unpack_gaussian,
)
from cheem_jax.core.settings import FitConfig
from cheem_jax.engine.stages import Stages
from cheem_jax.run.method import FrozenFeatures
from cheem_jax.run.session import Session

CONFIG = DikiConfig(length=2, layers=(1, 3), fit=FitConfig(2, 1e-2), batch_size=16)


@pytest.fixture(scope="module")
def untrained():
    return learner(Diki, CONFIG)


@pytest.mark.full
def test_diki_learns_saves_opens_and_answers_per_image(untrained, tmp_path):
    check_method(untrained, tmp_path)


@pytest.mark.full
def test_a_task_starts_exactly_at_the_plain_network(untrained):
    vit = small.backbone()
    images = jnp.asarray(small.task("any", 0).test.images[:4])
    prompts = {
        name: jnp.broadcast_to(values, (4, *values.shape))
        for name, values in untrained.begin_prompts(jax.random.key(0)).items()
    }
    assert not prompts["values"].any() and 0.9 < float(jnp.abs(prompts["keys"]).max()) <= 1.0
    tokens = untrained.enter(vit, images)
    np.testing.assert_array_equal(
        untrained.prompted(vit, tokens, prompts), vit.features(vit.run_blocks(tokens, begin=1))
    )
    np.testing.assert_allclose(untrained.prompted(vit, tokens, prompts), vit(images), atol=1e-5)


@pytest.mark.full
def test_prefixes_have_a_separate_softmax_in_numpy():
    method = learner(Diki, dataclasses.replace(CONFIG, layers=(3,)))
    vit = small.backbone()
    x = np.asarray(jax.random.normal(jax.random.key(0), (2, 5, 16)), np.float64)
    keys, values = np.asarray(jax.random.normal(jax.random.key(1), (2, 2, 1, 2, 16)), np.float64)

    block = vit.blocks[3]
    expected = []
    for image in range(2):
        query, key, value = np.split(linear(block.qkv, norm(block.norm1, x[image])), 3, axis=-1)
        heads = []
        for cut in (slice(0, 8), slice(8, 16)):
            added = attention(query[:, cut], keys[image, 0][:, cut], values[image, 0][:, cut])
            heads.append(attention(query[:, cut], key[:, cut], value[:, cut]) + added)
        z = x[image] + linear(block.proj, np.concatenate(heads, axis=-1))
        expected.append(norm(vit.norm, (z + mlp(block, z))[0]))
    prompts = {"keys": jnp.asarray(keys, jnp.float32), "values": jnp.asarray(values, jnp.float32)}
    result = method.prompted(vit, jnp.asarray(x, jnp.float32), prompts)
    np.testing.assert_allclose(result, np.stack(expected), atol=1e-4)


def test_log_densities_are_scipys():
    rng = np.random.default_rng(0)
    features = rng.normal(size=(50, 6)).astype(np.float32) @ rng.normal(size=(6, 6)).astype(
        np.float32
    )
    gaussian = fit_gaussian(features)
    points = features.astype(np.float64) / np.linalg.norm(
        features.astype(np.float64), axis=1, keepdims=True
    )
    covariance = np.cov(points, rowvar=False) + 1e-7 * np.eye(6)
    # scipy annotates no argument: a type checker uses the type of the default
    expected = multivariate_normal.logpdf(points, points.mean(axis=0), covariance)  # pyright: ignore[reportArgumentType]
    np.testing.assert_allclose(log_density(features, gaussian), expected, rtol=1e-9)


def test_shrinkage_moves_a_covariance_to_a_multiple_of_the_identity():
    # mean (1/2, 1/2), covariance [[1/2, -1/2], [-1/2, 1/2]], half of it moved to the diagonal
    corners = np.array([[3.0, 0.0], [0.0, 7.0]], np.float32)
    gaussian = fit_gaussian(corners, 0.5)
    np.testing.assert_allclose(
        gaussian.factor @ gaussian.factor.T, [[0.5, -0.25], [-0.25, 0.5]], atol=2e-7
    )
    # twelve images in sixteen dimensions: unseen images of the same kind look far less strange
    rng = np.random.default_rng(0)
    training, unseen = (
        rng.normal(1, 1, (12, 16)).astype(np.float32),
        rng.normal(1, 1, (12, 16)).astype(np.float32),
    )
    plain, shrunk = fit_gaussian(training), fit_gaussian(training, 0.5)
    assert log_density(unseen, plain).max() < -1e3 < log_density(unseen, shrunk).min()
    one = fit_gaussian(training[:1])
    np.testing.assert_allclose(one.factor, np.sqrt(1e-7) * np.eye(16))


@pytest.mark.full
def test_tasks_learn_the_same_in_any_order_and_with_or_without_kept_tokens(untrained):
    def learned(order, budget):
        method: Any = fresh(untrained)
        method.executor.budget = budget
        reports = {
            f"task{index}": method.learn(small.task(f"task{index}", index), Session())
            for index in order
        }
        return dict(zip(method.classes.names, method.tasks, strict=True)), reports, method

    before = untrained.executor.budget
    try:
        forwards, reports, method = learned([0, 1], before)
        backwards, _, _ = learned([1, 0], before)
        from_images, images_reports, _ = learned([1, 0], 40 * 5 * 16 * 4 - 1)
    finally:
        untrained.executor.budget = before
    for name, task in forwards.items():
        for part in ("keys", "values"):
            np.testing.assert_array_equal(task.prompts[part], backwards[name].prompts[part])
            np.testing.assert_allclose(
                task.prompts[part], from_images[name].prompts[part], atol=1e-4
            )
        np.testing.assert_array_equal(task.head.weight, backwards[name].head.weight)
        np.testing.assert_allclose(
            reports[name]["losses"], images_reports[name]["losses"], rtol=1e-3
        )
        assert np.abs(task.prompts["values"]).max(axis=(1, 2)).min() > 0
        # 2 blocks x 2 pairs of 16, a head of 17 x 3; a mean and a triangle of 16 x 17 / 2
        assert reports[name]["params_learned"] == 128 + 51
        assert reports[name]["params_stored"] == 128 + 51 + 16 + 136
    features = method.features(small.task("task1", 1).train.images)
    result = unpack_gaussian(method.tasks[1])
    expected = fit_gaussian(features)
    np.testing.assert_array_equal(result.factor, expected.factor)


@pytest.mark.parametrize("backbone, printed", [("vit_base", 42.4), ("deit_tiny", 2.8)])
def test_a_fused_pass_and_three_blocks_with_explicit_attention_are_near_the_papers_flops(
    backbone, printed, untrained
):
    method: Any = fresh(untrained)
    method.vit = vit = find_config(backbone)
    method.config = DikiConfig()
    method.layers = find_layers("last3", 12)
    method.classes.add("headless", ())
    result = method.costs()
    assert round(result["flops_as_printed"] / 1e9, 1) == printed  # the paper prints 42.5 and 2.8
    # all attention counted, the routing pass's too, is more
    attention = backbone_flops(vit, count_attention=True) - backbone_flops(vit)
    assert result["flops_explicit"] - result["flops_as_printed"] == attention
    # as is the official first eight blocks: two passes but for the patch embedding
    method.layers = find_layers("first8", 12)
    twice = 2 * backbone_flops(vit) - 2 * 196 * 768 * vit.width
    assert method.costs()["flops_method"] == twice


def test_both_passes_of_a_backbone_with_attention_pooling_pool(untrained):
    method: Any = fresh(untrained)
    method.vit = vit = dataclasses.replace(method.vit, pool="attention")
    method.config = DikiConfig()
    method.layers = tuple(range(vit.depth))  # the second pass omits the patch embedding alone
    method.classes.add("headless", ())
    result = method.costs()
    assert result["flops_method"] == 2 * backbone_flops(vit) - embed_flops(vit)
    prefixes = prefix_flops(vit, method.config.length, vit.depth)
    twice = 2 * executed_backbone_flops(vit) - embed_flops(vit)
    assert result["flops_executed"] == twice + prefixes


def test_impossible_settings_are_refused_and_thin_covariances_reported(untrained):
    with pytest.raises(
        ValueError, match=r"invalid for this backbone; expected different numbers in 0\.\.3"
    ):
        learner(Diki, dataclasses.replace(CONFIG, layers="first8"))
    other = FrozenFeatures(Stages(small.backbone(), "mlp_down"), 16)
    with pytest.raises(ValueError, match="give it the features of the same backbone"):
        learner(Diki, CONFIG, router_features=other)
    assert find_layers("last3", 4) == (1, 2, 3) and find_layers("first8", 12) == tuple(range(8))
    tasks = [small.task("small", 0, num=16), small.task("large", 1)]
    assert [note.split(": ")[0] for note in untrained.check(tasks)] == ["small"]
    shrunk: Any = fresh(untrained)
    shrunk.config = dataclasses.replace(CONFIG, cov_shrinkage=0.1)
    assert shrunk.check(tasks) == []
