"""S-Prompts: tokens and a head per task, each image with those of the task that its nearest
centroid names."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small
from baselines import check_method, fresh, learner

from cheem_jax.backbone.config import find_config
from cheem_jax.backbone.flops import backbone_flops, executed_backbone_flops, token_flops
from cheem_jax.baselines.s_prompts import SPrompts, SPromptsConfig
from cheem_jax.core.ops import Reuse
from cheem_jax.core.routing import RouterConfig
from cheem_jax.core.settings import FitConfig
from cheem_jax.run.session import Session

CONFIG = SPromptsConfig(
    length=3,
    fit=FitConfig(2, 1e-2, "constant"),
    router=RouterConfig(num_centroids=2),
    batch_size=16,
)


@pytest.fixture(scope="module")
def untrained():
    return learner(SPrompts, CONFIG)


@pytest.mark.full
def test_s_prompts_learn_save_open_and_answer_per_image(untrained, tmp_path):
    check_method(untrained, tmp_path)


def test_tasks_learn_the_same_in_any_order_and_images_of_all_share_one_compiled_function(
    untrained, compilations
):
    def learned(order):
        method: Any = fresh(untrained)
        for index in order:
            report = method.learn(small.task(f"task{index}", index), Session())
        # 3 tokens of 16, a head of 17 x 3, 2 centroids
        assert (report["params_learned"], report["params_stored"]) == (48 + 51, 48 + 51 + 32)
        return dict(zip(method.classes.names, method.tasks, strict=True)), method

    forwards, _ = learned([0, 1, 2])
    backwards, method = learned([2, 1, 0])
    for name, task in forwards.items():
        np.testing.assert_array_equal(task.prompts["tokens"], backwards[name].prompts["tokens"])
        np.testing.assert_array_equal(task.head.weight, backwards[name].head.weight)
        np.testing.assert_array_equal(task.router["centroids"], backwards[name].router["centroids"])
    images = np.asarray(small.task("task0", 0).test.images)
    three = method.predict(images)
    method.tasks.append(method.tasks[0])  # a fourth task fits the stack of three
    method.classes.add("task3", method.classes.classes[0])
    with compilations() as programs:
        four = method.predict(images, np.full(len(images), 3, np.int32))
    assert programs.count == 0
    rows = three.tasks == 0
    np.testing.assert_array_equal(four.classes[rows], three.classes[rows])


@pytest.mark.full
def test_the_prompt_tokens_are_between_class_token_and_patches(untrained):
    vit = small.backbone()
    images = jnp.asarray(small.task("any", 0).test.images[:2])
    prompts = jax.random.normal(jax.random.key(0), (2, 3, 16))
    x = vit.embed(images)
    x = jnp.stack(
        [
            jnp.concatenate([tokens[:1], prompt, tokens[1:]])
            for tokens, prompt in zip(x, prompts, strict=True)
        ]
    )
    for block in vit.blocks:
        x, _ = block.run(Reuse(block.expert("mlp_down")), x, placement="mlp_down")
    result = untrained.prompted(vit, untrained.enter(vit, images), {"tokens": prompts})
    np.testing.assert_allclose(result, vit.norm(x[:, 0]), atol=1e-5)
    # without position embeddings their order is irrelevant
    swapped = untrained.prompted(vit, untrained.enter(vit, images), {"tokens": prompts[:, ::-1]})
    np.testing.assert_allclose(result, swapped, atol=1e-5)
    start = untrained.begin_prompts(jax.random.key(1))["tokens"]
    assert 0.2 < float(jnp.abs(start).max()) <= 0.25


def test_the_named_task_is_the_nearest_in_l1_by_brute_force(untrained):
    method: Any = fresh(untrained)
    rng = np.random.default_rng(0)
    method.learn(small.task("task0", 0), Session())
    centroids = [rng.normal(size=(2, 16)).astype(np.float32) / 4 for _ in range(5)]
    method.tasks = [method.tasks[0]._replace(router={"centroids": some}) for some in centroids]
    features = rng.normal(size=(40, 16)).astype(np.float32)
    points = features / np.linalg.norm(features, axis=1, keepdims=True)
    away = points[:, None, None] - np.stack(centroids)  # [N, T, K, D]
    by_l1 = np.abs(away).sum(-1).min(-1).argmin(-1)
    by_l2 = (away**2).sum(-1).min(-1).argmin(-1)
    np.testing.assert_array_equal(method.route(features), by_l1)
    assert (by_l1 != by_l2).any()


def test_the_papers_flops_need_one_token_for_vit_b_and_ten_for_deit_tiny():
    def method_flops(backbone, length):
        vit = find_config(backbone)
        return (2 * backbone_flops(vit) + token_flops(vit, length)) / 1e9

    # printed 67.6 and 4.4: no one length fits both
    assert method_flops("vit_base", 1) == pytest.approx(67.6, abs=0.05)
    assert method_flops("deit_tiny", 1) == pytest.approx(4.31, abs=0.01)
    assert method_flops("vit_base", 10) == pytest.approx(69.09, abs=0.01)
    assert method_flops("deit_tiny", 10) == pytest.approx(4.4, abs=0.05)


def test_the_reported_flops_count_the_router_and_the_longer_sequence(untrained):
    method: Any = fresh(untrained)
    method.classes.add("task0", ("a", "b", "c"))
    vit = method.executor.config
    result = method.costs()
    assert result["flops_method"] == 2 * backbone_flops(vit) + token_flops(vit, 3)
    longer = 4 * 4 * 16 * (8**2 - 5**2)  # 4 blocks, 5 tokens and 3 prompts
    assert (
        result["flops_explicit"]
        == 2 * backbone_flops(vit, count_attention=True) + token_flops(vit, 3) + longer
    )
    # three blocks of 8 tokens, the last of them for the class token alone
    whole = 3 * 2 * (12 * 8 * 16**2 + 2 * 8 * 8 * 16)
    last = 2 * (2 * 8 + 2 + 8) * 16**2 + 4 * 8 * 16
    assert executed_backbone_flops(vit, 3) == 2 * 4 * 48 * 16 + whole + last
    assert (
        result["flops_executed"]
        == executed_backbone_flops(vit) + executed_backbone_flops(vit, 3) + 2 * 16 * 3
    )
