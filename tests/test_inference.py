"""Inference shares the base network's work without changing a feature, and no request compiles."""

import jax
import numpy as np
import pytest
import small

from cheem_jax.core.ops import init_new
from cheem_jax.engine.executor import Dense
from cheem_jax.engine.feed import HostImages
from cheem_jax.engine.inference import Inference, bucket_sizes, pieces
from cheem_jax.engine.passes import network_features
from cheem_jax.engine.stages import Stages
from cheem_jax.engine.whole import Whole
from cheem_jax.run.method import base_network

VIT = small.backbone()
IMAGES = np.random.default_rng(0).integers(0, 256, (37, 8, 8, 3), dtype=np.uint8)


def networks(executor) -> small.Given:
    """The base network, one that differs from it at block 2, and one that skips block 0."""
    base = base_network(executor)
    new = init_new(jax.random.key(1), executor.base_pool[2][0].params)
    return small.Given([base, [*base[:2], Dense(1, new), base[3]], [Dense(-1, None), *base[1:]]])


@pytest.mark.parametrize("kind", [Stages, pytest.param(Whole, marks=pytest.mark.full)])
def test_features_equal_those_of_a_full_pass_of_the_routed_network(kind):
    executor = kind(VIT, "mlp_down")
    inference = Inference(executor, base_network(executor), networks(executor), batch_size=16)
    tasks = np.arange(len(IMAGES)) % 4 - 1
    batches = iter(np.split(tasks, (16, 32)))

    def route(features):
        return np.resize(next(batches), len(features))

    features = inference.features(HostImages(executor, IMAGES), len(IMAGES), route)
    assert not features[tasks == -1].any()
    for task, network in enumerate(inference.networks.networks):
        feed = HostImages(executor, IMAGES[tasks == task])
        num = int((tasks == task).sum())
        (expected,) = network_features(executor, [network], feed, num, batch_size=16)
        np.testing.assert_allclose(features[tasks == task], expected, atol=1e-5)


def test_no_request_compiles(compilations):
    executor = Stages(VIT, "mlp_down")
    inference = Inference(executor, base_network(executor), networks(executor), batch_size=16)
    inference.prepare()
    rng = np.random.default_rng(0)
    with compilations() as programs:
        for num in (1, 5, 16, 37):
            feed = HostImages(executor, IMAGES[:num])
            inference.features(feed, num, lambda features: rng.integers(0, 3, len(features)))
    assert programs.count == 0


def test_a_network_continues_at_its_first_difference_from_the_base():
    executor = Stages(VIT, "mlp_down")
    inference = Inference(executor, base_network(executor), networks(executor), batch_size=16)
    assert inference.differences == [4, 2, 0]


def test_groups_are_cut_into_few_sizes_without_losing_a_row():
    assert bucket_sizes(64) == (64, 32, 16) and bucket_sizes(1) == (1,)
    for num in range(1, 40):
        parts = pieces(np.arange(num), (16, 8, 4))
        assert {len(rows) for rows, _ in parts} <= {16, 8, 4}
        rows = np.concatenate([rows[:size] for rows, size in parts])
        np.testing.assert_array_equal(rows, np.arange(num))
