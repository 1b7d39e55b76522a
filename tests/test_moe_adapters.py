"""MoE-Adapters: two experts per image, chosen by its task's router; frozen ones keep their
bytes."""

import dataclasses
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small
from baselines import (
    Interrupted,
    Watched,
    attention,
    check_method,
    fresh,
    learner,
    linear,
    mlp,
    norm,
)

from cheem_jax.backbone.alexnet import AlexNetConfig, build_alexnet, shapes_of
from cheem_jax.backbone.config import find_config
from cheem_jax.baselines import moe_adapters as moe_module
from cheem_jax.baselines.adapters import Bottleneck
from cheem_jax.baselines.alexnet_encoder import AlexNetEncoder
from cheem_jax.baselines.moe_adapters import (
    Gates,
    MoeAdapters,
    MoeAdaptersConfig,
    freeze,
    gate,
    init_experts,
    mixture,
    moe_costs,
    sample,
)
from cheem_jax.core.settings import FitConfig
from cheem_jax.engine.stages import Stages
from cheem_jax.run.method import Encoder, FrozenFeatures
from cheem_jax.run.session import Session

CONFIG = MoeAdaptersConfig(
    experts=6, bottleneck=2, fit=FitConfig(epochs=2, learning_rate=1e-2), batch_size=16
)


@pytest.fixture(scope="module", autouse=True)
def smaller():
    """Small auto-encoders of few steps."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(moe_module, "HIDDEN", 6)
        patched.setattr(moe_module, "ITERATIONS", 40)
        patched.setattr(moe_module, "AUTOENCODER_BATCH", 16)
        yield


@pytest.fixture(scope="module")
def untrained(smaller) -> MoeAdapters:
    """A method before its first task; each test uses the copy `moe`, which shares its compiled
    functions."""
    return learner(MoeAdapters, CONFIG, num_tasks=3)


@pytest.fixture
def moe(untrained) -> Any:
    return fresh(untrained)


def parts(moe: MoeAdapters) -> list[np.ndarray]:
    """Return its experts as host arrays."""
    return [np.asarray(leaf) for leaf in moe.state.experts]


def random_experts(seed: int = 0, experts: int = 6) -> Bottleneck:
    """Experts with no zero part."""
    shapes = init_experts(
        jax.random.key(0), small.CONFIG, dataclasses.replace(CONFIG, experts=experts)
    )
    rng = np.random.default_rng(seed)
    return Bottleneck(*(jnp.asarray(rng.normal(0, 1, leaf.shape), jnp.float32) for leaf in shapes))


@pytest.mark.full
def test_moe_adapters_learn_save_open_and_answer_per_image(untrained, tmp_path):
    method = check_method(untrained, tmp_path)
    inferred = [method.predict(task.test.images).tasks for task in small.stream(3).tasks]
    assert np.mean([np.mean(tasks == index) for index, tasks in enumerate(inferred)]) > 0.6


@pytest.mark.full
def test_they_do_so_with_another_encoder_when_experts_run_out(tmp_path):
    encoder = FrozenFeatures(Stages(small.backbone(1), "mlp_down"), 16)
    config = dataclasses.replace(CONFIG, experts=3)
    check_method(learner(MoeAdapters, config, router_features=encoder), tmp_path)


@pytest.mark.full
def test_a_task_stopped_at_its_auto_encoder_ends_as_an_unbroken_one(untrained):
    task = small.task("colours", 0)
    whole, halted, resumed = (fresh(untrained) for _ in range(3))
    watched = Watched(2 * 3 + 3 + 5)
    whole.learn(task, Session())
    with pytest.raises(Interrupted):
        halted.learn(task, watched)
    report = resumed.learn(task, Watched(saved=watched.checkpoint))
    assert len(report["losses"]) == 2
    chex.assert_trees_all_equal(resumed.tasks[0], whole.tasks[0])
    chex.assert_trees_all_equal(parts(resumed), parts(whole))


def test_zero_routers_return_two_gates_of_a_half():
    token = jax.random.normal(jax.random.key(0), (5, 16))
    gates = gate(jnp.zeros((4, 16, 6)), token, jnp.arange(5) % 4)
    np.testing.assert_array_equal(gates.weights, 0.5)
    np.testing.assert_array_equal(gates.chosen, np.tile([0, 1], (5, 1)))


@pytest.mark.full
def test_training_noise_chooses_other_experts_per_image_and_only_there():
    token = jax.random.normal(jax.random.key(0), (200, 16))
    routers = jnp.zeros((1, 16, 6))
    tasks = jnp.zeros(200, jnp.int32)
    config = dataclasses.replace(CONFIG, batch_size=200)
    samples = sample(jax.random.key(1), jnp.zeros((1, 16, 6)), 200, 5, config)
    gates = gate(routers, token, tasks, jax.tree.map(lambda leaf: leaf[0], samples))
    counts = np.bincount(np.asarray(gates.chosen).ravel(), minlength=6)
    assert counts.min() > 40  # 66.7 of 200 each by chance
    np.testing.assert_allclose(gates.weights.sum(axis=1), 1.0, rtol=1e-6)
    # softplus(0) + 0.01 is the deviation: the larger weight is the logistic of a difference of such
    # noise
    difference = np.log(gates.weights[:, 0] / gates.weights[:, 1])
    draws = np.sort(0.7031 * np.random.default_rng(0).normal(size=(20_000, 6)), axis=1)
    np.testing.assert_allclose(difference.mean(), (draws[:, -1] - draws[:, -2]).mean(), rtol=0.2)


def test_the_noise_of_an_image_does_not_depend_on_the_padding_of_its_batch():
    noise = jnp.zeros((2, 16, 6))
    num = CONFIG.batch_size
    _, normal, is_kept = sample(jax.random.key(1), noise, num, 5, CONFIG)
    # as on devices that do not divide the batch
    padded = sample(jax.random.key(1), noise, num + 2, 5, CONFIG)
    np.testing.assert_array_equal(padded.normal[:, :num], normal)
    np.testing.assert_array_equal(padded.is_kept[:, :num], is_kept)
    assert not padded.normal[:, num:].any() and padded.is_kept[:, num:].all()


@pytest.mark.full
def test_experts_add_nothing_before_they_have_learned(moe):
    images = small.task("colours", 0).test.images
    experts = init_experts(jax.random.key(0), small.CONFIG, CONFIG)
    result, _ = moe._over(
        experts, np.ones((1, 4, 16, 6), np.float32), images, np.zeros(20, np.int32)
    )
    np.testing.assert_allclose(result, moe.router_features(images), rtol=0, atol=1e-5)


def plain_block(block, x, experts, router):
    """Return one adapted block's output for one image `[N, D]`, and the chosen experts."""
    query, key, value = np.split(linear(block.qkv, norm(block.norm1, x)), 3, axis=-1)
    heads = np.split(np.arange(x.shape[1]), block.num_heads)
    mixed = [attention(query[:, head], key[:, head], value[:, head]) for head in heads]
    z = x + linear(block.proj, np.concatenate(mixed, axis=-1))
    y = z + mlp(block, z)
    logits = z[0] @ router
    chosen = np.argsort(-logits)[:2]
    weights = np.exp(logits[chosen]) / np.exp(logits[chosen]).sum()
    for expert, weight in zip(chosen, weights, strict=True):
        down, down_bias, up, up_bias = (leaf[expert] for leaf in experts)
        y = y + weight * 0.1 * (np.maximum(z @ down.T + down_bias, 0) @ up + up_bias)
    return y, chosen


@pytest.mark.full
def test_every_image_runs_the_two_experts_of_its_task_as_in_numpy(moe):
    vit = small.backbone()
    experts = random_experts()
    routers = np.random.default_rng(1).normal(0, 1, (4, 4, 16, 6)).astype(np.float32)
    images = small.task("colours", 0).test.images[:3]
    tasks = np.array([2, 0, 1], np.int32)
    result, chosen = moe._over(experts, routers, images, tasks)
    host = [np.asarray(leaf, np.float64) for leaf in experts]
    for image, task in enumerate(tasks):
        x = np.asarray(vit.embed(jnp.asarray(images[image : image + 1])), np.float64)[0]
        for index, block in enumerate(vit.blocks):
            x, picked = plain_block(block, x, [leaf[index] for leaf in host], routers[task, index])
            np.testing.assert_array_equal(chosen[image, index], picked)
        expected = norm(vit.norm, x[0])
        np.testing.assert_allclose(
            result[image], expected, rtol=0, atol=1e-4 * np.abs(expected).max()
        )
    assert len(set(map(bytes, chosen))) == 3


@pytest.mark.full
def test_dropout_leaves_hidden_values_out_and_scales_the_others(monkeypatch):
    monkeypatch.setattr(moe_module, "DROPOUT", 0.5)
    identity = jnp.broadcast_to(jnp.eye(4), (2, 4, 4))
    experts = Bottleneck(identity, jnp.zeros((2, 4)), identity, jnp.zeros((2, 4)))
    gates = Gates(jnp.tile(jnp.array([[0, 1]]), (3, 1)), jnp.full((3, 2), 0.5))
    z = jnp.ones((3, 50, 4))
    mixed = jax.jit(mixture)
    np.testing.assert_allclose(mixed(experts, gates, z), 1.0)
    config = dataclasses.replace(CONFIG, bottleneck=4)
    is_kept = sample(jax.random.key(0), jnp.zeros((1, 4, 6)), 3, 50, config).is_kept
    assert is_kept.shape == (1, 3, 50, 8)
    # each of two experts adds 0.5 * 2 or 0
    values, counts = np.unique(mixed(experts, gates, z, is_kept[0]), return_counts=True)
    np.testing.assert_allclose(values, [0, 1, 2])
    np.testing.assert_allclose(counts / 600, [0.25, 0.5, 0.25], atol=0.08)


def test_the_most_used_experts_of_each_block_are_frozen():
    uses = np.array([[5, 9, 9, 0], [1, 1, 1, 1], [0, 12, 0, 0]])
    frozen = freeze(np.zeros((3, 4), bool), uses)
    np.testing.assert_array_equal(frozen, [[0, 1, 1, 0], [1, 1, 0, 0], [0, 1, 0, 0]])
    # some of the most used can be frozen already, and fewer than two are then new
    again = freeze(frozen, np.array([[0, 3, 0, 8], [0, 9, 9, 0], [9, 9, 0, 0]]))
    np.testing.assert_array_equal(again, [[0, 1, 1, 1], [1, 1, 1, 0], [1, 1, 0, 0]])


@pytest.mark.full
def test_frozen_experts_and_earlier_tasks_keep_their_bytes_while_others_learn(moe):
    first = moe.learn(small.task("one", 1), Session())
    frozen = moe.state.frozen
    before = parts(moe)
    earlier = moe.tasks[0]
    copied = jax.tree.map(np.copy, (earlier.router, earlier.head, earlier.autoencoder))
    assert first["experts_free"] == [6] * 4
    assert [np.flatnonzero(row).tolist() for row in frozen] == first["experts_frozen"]
    np.testing.assert_array_equal(frozen.sum(axis=1), 2)
    np.testing.assert_array_equal(np.sum(first["expert_uses"], axis=1), 2 * 40)
    second = moe.learn(small.task("two", 2), Session())
    assert second["experts_free"] == [4] * 4
    for old, new in zip(before, parts(moe), strict=True):
        assert old[frozen].tobytes() == new[frozen].tobytes()
        # every block's other experts have moved, and with noise on the gates most of them
        moved = (old != new).reshape(*frozen.shape, -1).any(axis=-1)
        assert moved.sum() >= 12
    assert second["params_stored"] < first["params_stored"]
    earlier = moe.tasks[0]
    chex.assert_trees_all_equal(copied, (earlier.router, earlier.head, earlier.autoencoder))


@pytest.mark.full
def test_with_all_experts_frozen_images_still_run_them_and_router_and_head_learn(moe):
    moe.learn(small.task("one", 1), Session())
    moe.state, before = moe.state._replace(frozen=np.ones((4, 6), bool)), parts(moe)
    report = moe.learn(small.task("two", 2), Session())
    assert report["experts_free"] == [0] * 4 and report["experts_frozen"] == [[]] * 4
    np.testing.assert_array_equal(np.sum(report["expert_uses"], axis=1), 2 * 40)
    for old, new in zip(before, parts(moe), strict=True):
        assert old.tobytes() == new.tobytes()
    assert report["losses"][-1] < report["losses"][0] and np.abs(moe.tasks[1].router).max() > 0
    assert report["params_learned"] == 2 * 4 * 16 * 6 + 17 * 3 + (2 * 16 * 6 + 6 + 16)


@pytest.fixture(scope="module")
def conv5() -> Encoder:
    config = AlexNetConfig(224, "conv5")
    params = {name: np.zeros(shape, np.float32) for name, shape in shapes_of(config).items()}
    return AlexNetEncoder(build_alexnet(config, params))


@pytest.mark.parametrize(
    ("name", "width", "with_adapters", "without", "paper"),
    [("vit_base", 768, 35.33, 35.21, 35.4), ("deit_tiny", 192, 3.70, 3.67, 3.7)],
)
def test_the_papers_flops_are_twelve_auto_encoders_and_two_experts_of_rank_8(
    conv5, name, width, with_adapters, without, paper, monkeypatch
):
    monkeypatch.setattr(moe_module, "HIDDEN", 100)
    # eleven tasks and the official reference auto-encoder; the paper's 35.4 leaves no room for
    # experts of rank 64
    vit = find_config(name)
    config = MoeAdaptersConfig()
    costs = moe_costs(vit, conv5, config, 12)
    result = costs["flops_method"]
    assert (
        result - moe_costs(vit, conv5, config, 11)["flops_method"] == 17_305_600
    )  # one auto-encoder
    assert round(result / 1e9, 2) == with_adapters
    assert abs(result / 1e9 - paper) < 0.08
    adapters = 2 * 197 * 12 * 2 * width * 2 * 8
    assert round((result - adapters) / 1e9, 2) == without
    official = moe_costs(vit, conv5, dataclasses.replace(config, bottleneck=64), 12)
    assert official["flops_method"] / 1e9 > paper + 0.19
    attention = 2 * 12 * 2 * 197**2 * width
    assert costs["flops_explicit"] == result + attention


@pytest.mark.full
def test_a_report_counts_the_auto_encoders_of_the_whole_stream(moe):
    first, second = (moe.learn(small.task(f"task{i}", i), Session()) for i in range(2))
    vit = small.CONFIG
    encoder = moe.encoder
    wanted = moe_costs(vit, encoder, CONFIG, 3)["flops_method"]
    assert first["flops_method"] == second["flops_method"] == wanted
    # two passes (the encoder is the backbone), 3 auto-encoders 16-6-16, experts of rank 4 in all at
    # 3 x 5 + 1 tokens of 16 values, the logits of 4 routers (3 padded) of 6 experts in 4 blocks,
    # and a head of 3 classes
    params = 3 * 4 * 16 * 6 + 16 * 4 * 16 * 4 + 4 * 4 * 2 * 16 * 6 + 2 * 16 * 3
    assert first["flops_executed"] == 2 * encoder.executed_flops() + params
    experts, router = 4 * 6 * (2 * 2 * 16 + 2 + 16), 4 * 16 * 6
    rest = 17 * 3 + 2 * 16 * 6 + 6 + 16
    assert first["params_stored"] == experts + router + rest
    assert second["params_stored"] == router + rest
    assert first["params_learned"] == experts + 2 * router + rest
    assert second["params_learned"] == experts * 2 // 3 + 2 * router + rest


def test_the_stream_is_looked_at_before_it_is_learned(untrained, conv5):
    tasks = small.stream(3).tasks
    assert untrained.check(tasks) == []
    (said,) = learner(MoeAdapters, dataclasses.replace(CONFIG, experts=4)).check(tasks)
    assert (
        "up to 2 of 4 experts per block are frozen after each task, so fewer than 2 can remain"
        " trainable from task 3 of 3" in said
    )
    moe = learner(MoeAdapters, MoeAdaptersConfig(), router_features=FrozenFeatures(conv5, 16))
    assert moe.check(tasks * 3) == []
    many = small.task("many", 0, num=18_000)
    (said,) = moe.check([dataclasses.replace(task, test=many.test) for task in (many, many, many)])
    assert "the 43264 features per image of alexnet need up to 8.7 GiB of memory" in said
