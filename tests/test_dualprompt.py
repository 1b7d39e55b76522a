"""DualPrompt: slots per task, found by the nearest key, per image and block."""

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small
from baselines import check_method, learner

from cheem_jax.backbone.config import find_config
from cheem_jax.backbone.flops import backbone_flops
from cheem_jax.baselines.dualprompt import DualPrompt, DualPromptConfig
from cheem_jax.core.settings import FitConfig
from cheem_jax.run.session import Session

CONFIG = DualPromptConfig(
    general_length=2,
    expert_length=4,
    general_layers=(0,),
    expert_layers=(1, 2),
    fit=FitConfig(2, 1e-2),
    batch_size=16,
)


@pytest.mark.full
def test_dualprompt_learns_saves_opens_and_answers_per_image(tmp_path):
    check_method(learner(DualPrompt, CONFIG), tmp_path)


@pytest.mark.full
def test_a_task_moves_its_own_slot_and_the_general_prompt_alone():
    dual = learner(DualPrompt, dataclasses.replace(CONFIG, pool=4))
    reports = [dual.learn(small.task("first", 0), Session())]
    before = jax.tree.map(np.array, dual.state.prompts)
    reports.append(dual.learn(small.task("second", 1), Session()))
    for name in ("expert", "keys"):
        moved = np.abs(dual.state.prompts[name] - before[name]).reshape(2, 4, -1).max(axis=2) > 0
        np.testing.assert_array_equal(moved, np.tile([False, True, False, False], (2, 1)))
    assert np.abs(dual.state.prompts["general"] - before["general"]).min() > 0
    # per slot: 2 blocks x (4 rows + 1 key) x 16; the general prompt: 2 rows x 16; a head of 3 x 17
    assert [report["params_learned"] for report in reports] == [160 + 32 + 51] * 2
    assert [report["params_stored"] for report in reports] == [160 + 32 + 51, 160 + 51]
    assert reports[0]["slots_chosen"] == [[1.0], [1.0]]
    np.testing.assert_allclose(np.sum(reports[1]["slots_chosen"], axis=1), 1.0)


@pytest.mark.full
def test_an_image_gets_the_slot_of_its_nearest_learned_key_in_numpy():
    dual = learner(DualPrompt, CONFIG)
    prompts = dual.begin_task(jax.random.key(0), {}, 0)
    query = np.asarray(jax.random.normal(jax.random.key(1), (12, 16)))
    training = dual.attach(prompts, jnp.asarray(query), jnp.int32(4), True)
    prediction = dual.attach(prompts, jnp.asarray(query), jnp.int32(4), False)
    general = np.asarray(prompts["general"][0])
    key_loss = 0.0
    chosen_slots = set()
    for place, layer in enumerate((1, 2)):
        keys = np.asarray(prompts["keys"][place])
        cosines = (
            query
            @ keys.T
            / np.linalg.norm(keys, axis=1)
            / np.linalg.norm(query, axis=1, keepdims=True)
        )
        key_loss = key_loss + 1 - cosines[:, 4]
        slots = cosines[:, :5].argmax(axis=1)  # ten slots, five learned
        chosen_slots |= set(slots.tolist())
        expert = np.asarray(prompts["expert"][place])
        for image, slot in enumerate(slots):
            np.testing.assert_array_equal(prediction.prefixes[layer].keys[image], expert[slot][:2])
            np.testing.assert_array_equal(
                prediction.prefixes[layer].values[image], expert[slot][2:]
            )
            np.testing.assert_array_equal(training.prefixes[layer].keys[image], expert[4][:2])
            np.testing.assert_array_equal(prediction.prefixes[0].keys[image], general[:1])
            np.testing.assert_array_equal(prediction.prefixes[0].values[image], general[1:])
    np.testing.assert_allclose(training.key_loss, key_loss, rtol=1e-5)
    assert len(chosen_slots) > 1


@pytest.mark.parametrize("backbone, paper", [("vit_base", 70.3), ("deit_tiny", 5.0)])
def test_two_passes_with_explicit_attention_and_the_prefixes_are_the_papers_flops(backbone, paper):
    vit = find_config(backbone)
    dual = SimpleNamespace(config=DualPromptConfig(), vit=vit, pool=11)
    prefixes = DualPrompt.added_flops(dual)["attention"]  # pyright: ignore
    assert prefixes == 4 * 197 * vit.width * (3 * 2 + 10 * 3)
    assert (2 * backbone_flops(vit, count_attention=True) + prefixes) / 1e9 == pytest.approx(
        paper, abs=0.05
    )


def test_the_pool_contains_at_least_one_slot_per_task():
    assert learner(DualPrompt, CONFIG).pool == 10
    assert learner(DualPrompt, CONFIG, num_tasks=11).pool == 11
    with pytest.raises(
        ValueError,
        match="has 2 slots, but task 3 needs another one; set pool to at least 3",
    ):
        learner(DualPrompt, dataclasses.replace(CONFIG, pool=2)).check(small.stream(3).tasks)


def test_settings_that_do_not_fit_the_backbone_are_refused():
    with pytest.raises(ValueError, match=r"layers \(0, 1, 9\) are invalid"):
        learner(DualPrompt, dataclasses.replace(CONFIG, expert_layers=(1, 9)))
