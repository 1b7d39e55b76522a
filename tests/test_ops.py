"""Laws of the four ops."""

import jax
import numpy as np

from cheem_jax.core.ops import (
    Adapt,
    Expert,
    LowRank,
    New,
    Reuse,
    apply_op,
    init_low_rank,
    init_new,
    merge,
    truncate,
)


def expert_of(key, num_inputs=12, width=4):
    weight_key, bias_key = jax.random.split(key)
    return Expert(
        jax.random.normal(weight_key, (num_inputs, width)), jax.random.normal(bias_key, (width,))
    )


def test_adapt_begins_as_reuse_exactly():
    base_key, pair_key, input_key = jax.random.split(jax.random.key(0), 3)
    expert = expert_of(base_key)
    pair = init_low_rank(pair_key, num_inputs=12, width=4, rank=3)
    u = jax.random.normal(input_key, (2, 5, 12))
    np.testing.assert_array_equal(apply_op(Adapt(expert, pair), u), apply_op(Reuse(expert), u))
    assert np.abs(pair.down).max() <= 12**-0.5 and np.abs(pair.down).min() > 0


def test_a_truncated_pair_has_the_best_product_of_its_rank():
    down_key, up_key = jax.random.split(jax.random.key(3))
    pair = LowRank(jax.random.normal(down_key, (12, 4)), jax.random.normal(up_key, (4, 6)))
    product = np.asarray(pair.down @ pair.up, np.float64)
    sizes = np.linalg.svd(product, compute_uv=False)
    for rank in (1, 2, 3):
        short = truncate(pair, rank)
        assert (short.down.shape, short.up.shape) == ((12, rank), (rank, 6))
        assert short.down.dtype == pair.down.dtype
        # the error of the best approximation (Eckart-Young)
        error = np.linalg.norm(product - np.asarray(short.down @ short.up))
        np.testing.assert_allclose(error, np.sqrt((sizes[rank:4] ** 2).sum()), rtol=1e-5)
    for rank in (4, 5):
        assert truncate(pair, rank) is pair
    assert not np.asarray(truncate(LowRank(pair.down, 0 * pair.up), 2).up).any()  # an initial pair


def test_a_layer_narrower_than_the_truncated_rank_keeps_its_product():
    down, up = (
        jax.random.normal(key, shape)
        for key, shape in zip(jax.random.split(jax.random.key(0)), ((12, 8), (8, 4)), strict=True)
    )
    pair = truncate(LowRank(down, up), 6)
    assert pair.down.shape == (12, 6) and pair.up.shape == (6, 4)
    np.testing.assert_allclose(pair.down @ pair.up, down @ up, rtol=1e-4, atol=1e-4)


def test_merged_and_unmerged_adapters_agree():
    keys = jax.random.split(jax.random.key(1), 4)
    expert = expert_of(keys[0])
    pair = LowRank(jax.random.normal(keys[1], (12, 3)), jax.random.normal(keys[2], (3, 4)))
    u = jax.random.normal(keys[3], (2, 5, 12))
    unmerged, merged = apply_op(Adapt(expert, pair), u), apply_op(Reuse(merge(expert, pair)), u)
    assert np.abs(unmerged - merged).max() <= 1e-5 * np.abs(unmerged).max()


def test_new_begins_as_asked():
    base_key, key = jax.random.split(jax.random.key(2))
    base = expert_of(base_key, 200, 50)
    random = init_new(key, base)
    assert (
        abs(np.std(random.weight) - 0.02 * 0.88) < 0.001
    )  # a normal cut at 2 sigma keeps 88 % of its deviation
    assert np.abs(random.weight).max() <= 0.04 and not random.bias.any()
    np.testing.assert_array_equal(init_new(jax.random.key(3), base, how="copy").weight, base.weight)
    u = jax.random.normal(jax.random.key(5), (1, 2, 200))
    np.testing.assert_array_equal(apply_op(New(random), u), apply_op(Reuse(random), u))
