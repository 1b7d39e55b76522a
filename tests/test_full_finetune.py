"""The upper bound: a separate network per task, its rate chosen on validation."""

import chex
import jax
import numpy as np
import pytest
import small
from baselines import check_method, learner

from cheem_jax.baselines import full_finetune
from cheem_jax.baselines.full_finetune import FullFinetune, FullFinetuneConfig
from cheem_jax.run.session import Session

CONFIG = FullFinetuneConfig(epochs=2, learning_rates=(1e-3, 1e-2), batch_size=16)


@pytest.mark.full
def test_full_finetuning_learns_saves_opens_and_answers_per_image(tmp_path):
    check_method(learner(FullFinetune, CONFIG), tmp_path, needs_task_id=True)


def test_the_rate_is_selected_on_validation_and_every_task_starts_from_the_pretrained_weights(
    monkeypatch,
):
    monkeypatch.setattr(full_finetune, "HEAD_RATE", 1e-9)
    task = small.task("colours", 0)
    config = FullFinetuneConfig(epochs=6, learning_rates=(1e-9, 1e-2), batch_size=16)
    method = learner(FullFinetune, config)
    result = method.bound(0, task, Session())
    assert result.learning_rate == 1e-2 and result.test_accuracy > 0.6
    assert method.bound(0, task, Session()) == result


def test_a_rate_that_ends_in_nan_loses_to_one_that_does_not():
    config = FullFinetuneConfig(epochs=2, learning_rates=(1e30, 1e-2), batch_size=16)
    assert (
        learner(FullFinetune, config).bound(0, small.task("colours", 0), Session()).learning_rate
        == 1e-2
    )


def test_rates_that_all_end_in_nan_are_refused_with_a_way_out():
    config = FullFinetuneConfig(epochs=2, learning_rates=(1e30,), batch_size=16)
    with pytest.raises(FloatingPointError, match="non-finite losses with each .*set smaller ones"):
        learner(FullFinetune, config).bound(0, small.task("colours", 0), Session())


def test_a_network_that_is_wrong_on_all_validation_images_is_a_result(monkeypatch):
    monkeypatch.setattr(
        full_finetune, "classes_by_task", lambda features, *_: np.full(len(features), 99)
    )
    result = learner(FullFinetune, CONFIG).bound(0, small.task("colours", 0), Session())
    assert result == (0.0, 0.0, CONFIG.learning_rates[0])


def test_no_step_changes_the_pretrained_weights():
    method = learner(FullFinetune, CONFIG)
    before = [np.array(leaf) for leaf in method.executor.leaves]
    method.learn(small.task("colours", 0), Session())
    chex.assert_trees_all_equal(before, method.executor.leaves)
    assert not np.array_equal(jax.tree.leaves(method.tasks[0])[0], before[0])
