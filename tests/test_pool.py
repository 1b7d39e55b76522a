"""The pool of experts grows and never changes."""

import jax
import jax.numpy as jnp
import numpy as np
import small

from cheem_jax.cheem.expert_memory import TaskNetworks
from cheem_jax.core.architecture import from_strings
from cheem_jax.core.ops import Expert, LowRank
from cheem_jax.core.pool import (
    DenseExperts,
    Head,
    TaskMemory,
    base_pool,
    dense_expert,
    grow,
    pool_sizes,
)

POOL = base_pool(small.backbone().experts("mlp_down"))


def pair(seed):
    down_key, up_key = jax.random.split(jax.random.key(seed))
    return LowRank(jax.random.normal(down_key, (64, 2)), jax.random.normal(up_key, (2, 16)))


def new(seed):
    return Expert(jax.random.normal(jax.random.key(seed), (64, 16)), np.ones(16, np.float32))


def test_new_and_adapt_become_experts_and_reuse_and_skip_add_nothing():
    architecture = from_strings(["adapt:0", "new", "reuse:0", "skip"])
    pool, experts = grow(POOL, architecture, {0: pair(0), 1: new(1)}, origin=0)
    assert experts == (1, 1, 0, None)
    assert pool_sizes(pool) == (2, 2, 1, 1)
    assert pool_sizes(POOL) == (1, 1, 1, 1)
    assert [block[-1].origin for block in pool] == [0, 0, None, None]


def test_an_adapted_expert_of_an_adapted_expert_keeps_the_chain_and_loads_merged():
    pool, _ = grow(POOL, from_strings(["adapt:0"] + ["skip"] * 3), {0: pair(0)}, origin=0)
    pool, experts = grow(pool, from_strings(["adapt:1"] + ["skip"] * 3), {0: pair(1)}, origin=1)
    assert experts[0] == 2 and pool[0][2].parent == 1
    assert isinstance(pool[0][2].params, LowRank)
    base = pool[0][0].params
    first = pair(0)
    second = pair(1)
    expected = base.weight + first.down @ first.up + second.down @ second.up
    dense = dense_expert(pool[0], 2)
    np.testing.assert_allclose(dense.weight, expected, atol=1e-5 * np.abs(expected).max())
    np.testing.assert_array_equal(dense.bias, base.bias)


def test_both_placements_begin_with_the_pretrained_layer():
    vit = small.backbone()
    for placement, layer in (("mlp_down", vit.blocks[2].down), ("attn_proj", vit.blocks[2].proj)):
        expert = dense_expert(base_pool(vit.experts(placement))[2], 0)
        np.testing.assert_array_equal(expert.weight, layer.kernel[...])


def test_a_network_is_a_hit_if_none_of_its_experts_is_merged_for_it():
    architecture = from_strings(["adapt:0", "skip", "reuse:0", "new"])
    pool, experts = grow(POOL, architecture, {0: pair(0), 3: new(1)}, origin=0)
    head = Head(jnp.zeros((16, 2)), jnp.zeros(2))
    means, centroids = np.zeros((4, 16), np.float32), np.zeros((1, 16), np.float32)
    task = TaskMemory("pets", ("a", "b"), architecture, experts, head, means, centroids)
    networks = TaskNetworks(DenseExperts(pool, 2**20), [task])
    for hits in (0, 1, 2):
        network = networks.network(0)
        counters = networks.counters()
        assert (counters["hits"], counters["misses"], counters["merged"]) == (hits, 1, 1)
    assert [expert is None for _, expert in network] == [False, True, False, False]
