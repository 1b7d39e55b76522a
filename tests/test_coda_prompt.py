"""CODA-Prompt: rows of a task's own, orthogonal at the start and untouched afterwards; weights
without a softmax."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small
from baselines import check_method, fresh, learner

from cheem_jax.backbone.config import find_config
from cheem_jax.backbone.flops import backbone_flops
from cheem_jax.baselines.coda_prompt import CodaPrompt, CodaPromptConfig, component_weights
from cheem_jax.core.keys import Phase
from cheem_jax.core.settings import FitConfig
from cheem_jax.run.session import Session

CONFIG = CodaPromptConfig(
    pool=7, length=4, layers=(0, 2), fit=FitConfig(2, 1e-2, "epoch_cosine"), batch_size=16
)


@pytest.fixture(scope="module")
def method():
    return learner(CodaPrompt, CONFIG)


@pytest.mark.full
def test_coda_prompt_learns_saves_opens_and_answers_per_image(tmp_path):
    coda: Any = check_method(learner(CodaPrompt, CONFIG, num_tasks=4), tmp_path)
    # a division among four tasks means something else among two
    with pytest.raises(
        ValueError, match="divided among 4 tasks, not 2; open it with the number of tasks"
    ):
        learner(CodaPrompt, CONFIG, num_tasks=2).open(tmp_path / "one")
    assert coda.check([]) == ["each of the 4 tasks has 1 of 7 components; 3 are not used"]


@pytest.mark.full
def test_earlier_rows_and_head_columns_keep_their_bytes_and_later_rows_stay_empty(method):
    coda: Any = fresh(method)
    reports = [coda.learn(small.task("first", 0), Session())]
    before = jax.tree.map(np.array, coda.state.prompts)
    head = np.array(coda.state.head.weight[:, :3])
    started = coda.begin_task(coda.keys.at(1, Phase.METHOD_INIT, 0), coda.state.prompts, 1)
    reports.append(coda.learn(small.task("second", 1, num_classes=4), Session()))
    for name, values in coda.state.prompts.items():
        np.testing.assert_array_equal(values[:, :2], before[name][:, :2])
        assert np.abs(values - started[name])[:, 2:4].reshape(4, -1).max(axis=1).min() > 1e-3
        assert not np.any(values[:, 4:])
    np.testing.assert_array_equal(coda.state.head.weight[:, :3], head)
    # per task: 2 blocks x 2 rows x (4 + 2) x 16, and its columns of the head
    assert [report["params_stored"] for report in reports] == [384 + 17 * 3, 384 + 17 * 4]
    assert reports[1]["losses"][-1] < reports[1]["losses"][0]


def test_each_task_starts_orthonormal_to_all_rows_before():
    coda = learner(CodaPrompt, dataclasses.replace(CONFIG, pool=12), num_tasks=4)
    prompts = {}
    for index in range(4):
        prompts = coda.begin_task(jax.random.key(index), prompts, index)
        num_rows = 3 * (index + 1)
        for values in prompts.values():
            rows = np.asarray(values).reshape(2, 12, -1)[:, :num_rows]
            np.testing.assert_allclose(
                rows @ rows.swapaxes(1, 2), np.tile(np.eye(num_rows), (2, 1, 1)), atol=1e-5
            )


@pytest.mark.full
def test_rows_beyond_the_width_start_in_random_directions():
    coda = learner(CodaPrompt, dataclasses.replace(CONFIG, pool=20), num_tasks=1)
    assert any("more components than the 16 dimensions" in note for note in coda.check([]))
    keys = np.asarray(coda.begin_task(jax.random.key(0), {}, 0)["keys"][0])
    np.testing.assert_allclose(np.linalg.norm(keys, axis=1), 1.0, rtol=1e-5)
    np.testing.assert_allclose(keys[:16] @ keys[:16].T, np.eye(16), atol=1e-4)
    assert np.abs(keys[16:] @ keys[:16].T).max() > 0.1


def test_eleven_tasks_own_nine_of_a_hundred_components_each():
    coda = learner(CodaPrompt, CodaPromptConfig(layers=(0,)), num_tasks=11)
    assert coda.rows == 9
    assert coda.check([])[0] == "each of the 11 tasks has 9 of 100 components; 1 are not used"


@pytest.mark.full
def test_prompts_are_weighted_sums_of_the_rows_so_far_in_numpy(method):
    coda = method
    prompts = {}
    for index in range(2):
        prompts = coda.begin_task(jax.random.key(index), prompts, index)
    query = np.asarray(jax.random.normal(jax.random.key(5), (3, 16)))
    attached = coda.attach(prompts, jnp.asarray(query), jnp.int32(1), False)
    for place, layer in enumerate((0, 2)):
        rows, keys, attention = (
            np.asarray(prompts[n][place]) for n in ("components", "keys", "attention")
        )
        for image in range(3):
            attended = query[image] * attention[:4]
            cosines = (
                (attended * keys[:4]).sum(1)
                / np.linalg.norm(attended, axis=1)
                / np.linalg.norm(keys[:4], axis=1)
            )
            mixed = np.sum(
                [weight * row for weight, row in zip(cosines, rows[:4], strict=True)], axis=0
            )
            np.testing.assert_allclose(attached.prefixes[layer].keys[image], mixed[:2], atol=1e-5)
            np.testing.assert_allclose(attached.prefixes[layer].values[image], mixed[2:], atol=1e-5)
    # a task without learned rows is left out
    first = coda.attach(prompts, jnp.asarray(query), jnp.int32(0), False)
    assert np.abs(first.prefixes[0].keys - attached.prefixes[0].keys).max() > 1e-3


@pytest.mark.full
def test_the_weight_of_an_empty_row_is_zero_with_a_finite_gradient():
    empty = jnp.zeros((2, 16))
    weights, grads = jax.value_and_grad(
        lambda a, k: component_weights(jnp.ones((3, 16)), a, k).sum(), (0, 1)
    )(empty, empty)
    assert weights == 0 and all(np.isfinite(grad).all() for grad in grads)


@pytest.mark.parametrize("backbone, paper", [("vit_base", 70.3), ("deit_tiny", 5.0)])
def test_two_passes_with_explicit_attention_and_the_prefixes_are_the_papers_flops(backbone, paper):
    vit = find_config(backbone)
    coda = SimpleNamespace(config=CodaPromptConfig(), vit=vit)
    prefixes = CodaPrompt.added_flops(coda)["attention"]  # pyright: ignore
    assert (2 * backbone_flops(vit, count_attention=True) + prefixes) / 1e9 == pytest.approx(
        paper, abs=0.05
    )
    # the two passes alone are 70.25 and 5.014: the row cannot tell prefixes from none
    assert prefixes == 4 * 197 * 4 * vit.width * 5


def test_settings_that_do_not_fit_backbone_or_stream_are_refused():
    with pytest.raises(ValueError, match=r"layers \(0, 4\) are invalid"):
        learner(CodaPrompt, dataclasses.replace(CONFIG, layers=(0, 4)))
    with pytest.raises(
        ValueError, match="7 components cannot be divided among 8 tasks; set pool to at least 8"
    ):
        learner(CodaPrompt, CONFIG, num_tasks=8).check(small.stream(2).tasks)
    with pytest.raises(ValueError, match="divided among 2 tasks and has no rows for task 3"):
        learner(CodaPrompt, CONFIG, num_tasks=2).check(small.stream(3).tasks)
