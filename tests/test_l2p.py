"""L2P: selection by cosine, per image, and the parameters that its losses reach."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small
from baselines import check_method, learner

from cheem_jax.backbone.config import CONFIGS
from cheem_jax.backbone.flops import backbone_flops, prefix_flops
from cheem_jax.baselines.l2p import L2p, L2pConfig
from cheem_jax.core.settings import FitConfig
from cheem_jax.run.session import Session

CONFIG = L2pConfig(
    pool=5, length=4, top_k=2, fit=FitConfig(epochs=2, learning_rate=1e-2), batch_size=16
)


@pytest.mark.full
def test_l2p_learns_saves_opens_and_answers_per_image(tmp_path):
    check_method(learner(L2p, dataclasses.replace(CONFIG, layers=(0, 2))), tmp_path)


@pytest.mark.full
def test_keys_that_no_image_selects_keep_their_bytes():
    l2p = learner(L2p, dataclasses.replace(CONFIG, pool=40, top_k=1))
    state = l2p.begin_task(jax.random.key(1), {}, 0)
    l2p.state = l2p.state._replace(prompts=state)
    task = small.task("colours", 0)
    query = l2p.features(task.train.images)
    report = l2p.learn(task, Session())
    assert sum(report["prompts_picked"][0]) == len(task.train.labels)
    near = query @ state["keys"][0].T / np.linalg.norm(state["keys"][0], axis=1)
    never = sorted(set(range(40)) - set(near.argmax(axis=1).tolist()))
    moved = np.abs(np.asarray(l2p.state.prompts["pool"][0]) - np.asarray(state["pool"][0])).max(
        axis=(1, 2)
    )
    assert len(never) > 30
    np.testing.assert_array_equal(moved[never[:30]] > 0, False)


@pytest.mark.full
def test_the_prefix_of_an_image_is_that_of_its_nearest_keys_in_numpy():
    l2p = learner(L2p, CONFIG)
    prompts = l2p.begin_task(jax.random.key(0), {}, 0)
    query = jax.random.normal(jax.random.key(1), (3, 16))
    attached = l2p.attach(prompts, query, jnp.int32(0), True)
    pool, keys = np.asarray(prompts["pool"][0]), np.asarray(prompts["keys"][0])
    for image in range(3):
        cosines = (
            keys
            @ np.asarray(query[image])
            / np.linalg.norm(keys, axis=1)
            / np.linalg.norm(query[image])
        )
        best = np.argsort(-cosines)[:2]
        np.testing.assert_allclose(
            attached.prefixes[0].keys[image], np.concatenate([pool[b][:2] for b in best])
        )
        np.testing.assert_allclose(
            attached.prefixes[0].values[image], np.concatenate([pool[b][2:] for b in best])
        )
        np.testing.assert_allclose(attached.key_loss[image], (1 - cosines[best]).sum(), rtol=1e-5)


def test_layers_that_do_not_fit_the_backbone_are_refused():
    with pytest.raises(
        ValueError,
        match=r"layers \(7,\) are invalid for this backbone; expected different numbers in 0\.\.3",
    ):
        learner(L2p, dataclasses.replace(CONFIG, layers=(7,)))


@pytest.mark.full
def test_one_layer_has_the_papers_flops_of_vit_base_and_five_those_of_deit_tiny():
    """70.3 / 5.1 in the paper: the first fits one layer, the second five; no setting fits both."""
    for name, expected in (("vit_base", (70.28, 70.40)), ("deit_tiny", (5.02, 5.05))):
        config = CONFIGS[name]
        result = []
        for layers in (1, 5):
            plain = 2 * backbone_flops(config, count_attention=True)
            result.append((plain + prefix_flops(config, 50, layers)) / 1e9)
        np.testing.assert_allclose(result, expected, atol=0.005)
    task = small.task("colours", 0)
    report = learner(L2p, CONFIG).learn(task, Session())
    assert report["flops_method"] == 2 * backbone_flops(small.CONFIG)
