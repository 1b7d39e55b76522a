"""Answers that share the base network's work are those of two full passes, and no request
compiles."""

import jax
import numpy as np
import pytest
import small

from cheem_jax.cheem.learner import Cheem
from cheem_jax.cheem.supernet import init_head_learner
from cheem_jax.core.keys import Keys
from cheem_jax.core.ops import init_new
from cheem_jax.engine.executor import Dense
from cheem_jax.engine.feed import HostImages
from cheem_jax.engine.inference import Inference, bucket_sizes, first_difference, pieces
from cheem_jax.engine.passes import answers
from cheem_jax.engine.stages import Stages
from cheem_jax.engine.whole import Whole
from cheem_jax.run.method import FrozenFeatures, base_network
from cheem_jax.run.session import Session

VIT = small.backbone()
IMAGES = np.random.default_rng(0).integers(0, 256, (37, 8, 8, 3), dtype=np.uint8)


def networks(executor):
    """One that equals the base network, one that leaves it at block 2, one that skips block 0."""
    base = base_network(executor)
    other = init_new(jax.random.key(1), executor.base_pool[2][0].params)
    found = [base, [*base[:2], Dense(1, other), base[3]], [Dense(-1, None), *base[1:]]]
    heads = [init_head_learner(jax.random.key(i), 16, 4).params for i in range(3)]
    return small.Given(found, heads, 3)


def by_brightness(features):
    return (np.argsort(np.argsort(features[:, 0])) % 3).astype(np.int32)


@pytest.mark.parametrize("kind", [Stages, pytest.param(Whole, marks=pytest.mark.full)])
def test_answers_are_those_of_a_full_pass_of_the_named_tasks_network(kind):
    executor = kind(VIT, "mlp_down")
    tasks = networks(executor)
    found = Inference(executor, base_network(executor), tasks, batch_size=16)(
        HostImages(executor, IMAGES), len(IMAGES), by_brightness
    )
    assert set(found.tasks) == {0, 1, 2}
    for index, (network, head) in enumerate(zip(tasks.networks, tasks.heads, strict=True)):
        rows = np.flatnonzero(found.tasks == index)
        feed = HostImages(executor, IMAGES[rows])
        wanted = answers(executor, network, head, feed, num=len(rows), num_classes=3, batch_size=16)
        np.testing.assert_array_equal(found.classes[rows], wanted)


def test_no_request_compiles(compilations):
    executor = Stages(VIT, "mlp_down")
    inference = Inference(executor, base_network(executor), networks(executor), batch_size=16)
    inference.prepare()
    rng = np.random.default_rng(0)
    with compilations() as programs:
        for num in (1, 5, 16, 37):
            feed = HostImages(executor, IMAGES[:num])
            inference(
                feed, num, lambda features: rng.integers(0, 3, len(features)).astype(np.int32)
            )
    assert programs.count == 0


def test_the_first_difference_is_where_a_network_leaves_the_base():
    executor = Stages(VIT, "mlp_down")
    base = base_network(executor)
    assert [first_difference(base, outline.codes) for outline in networks(executor).outlines] == [
        4,
        2,
        0,
    ]


def test_groups_are_cut_into_few_sizes_and_lose_nobody():
    assert bucket_sizes(64) == (64, 32, 16) and bucket_sizes(1) == (1,)
    for num in range(1, 40):
        found = pieces(np.arange(num), (16, 8, 4))
        assert {len(rows) for rows, _ in found} <= {16, 8, 4}
        np.testing.assert_array_equal(
            np.concatenate([rows[:size] for rows, size in found]), np.arange(num)
        )


def test_a_learner_predicts_task_and_class_as_its_evaluation_does():
    executor = Stages(VIT, "mlp_down")
    cheem = Cheem(executor, small.QUICK, Keys(0), None, FrozenFeatures(executor, 16))
    with pytest.raises(ValueError, match="nothing has been learned"):
        cheem.predict(IMAGES)
    tasks = small.stream(2).tasks
    for task in tasks:
        cheem.learn(task, Session())
    for index, task in enumerate(tasks):
        wanted = cheem.answers(index, task)
        found = cheem.predict(task.test.images)
        np.testing.assert_array_equal(found.tasks, wanted.chosen_task)
        own = found.tasks == index
        np.testing.assert_array_equal(found.classes[own], wanted.given_task[own])
