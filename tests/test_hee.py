"""Sampling in closed form: numbers worked by hand, and equality with the two-level draw."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from cheem_jax.cheem import hee
from cheem_jax.core.architecture import decode, num_candidates

NAN = float("nan")


def test_similarity_of_a_two_task_example_worked_by_hand():
    # base and one task over three blocks; the task skipped block 1
    one = np.array([[[1, 0], [1, 0], [1, 0]], [[0, 2], [0, 0], [3, 0]]], np.float32)
    other = np.array([[[1, 1], [3, 0], [0, 1]], [[0, 1], [0, 0], [4, 3]]], np.float32)
    present = np.array([[True, True, True], [True, False, True]])
    cosine = hee.cosines(one, other, present)
    np.testing.assert_allclose(cosine, [[2**-0.5, 1.0, 0.0], [1.0, NAN, 0.8]], rtol=1e-6)
    similarity = hee.norm_cosine(cosine)  # extremes 0 and 1, so S = 2 c - 1
    np.testing.assert_allclose(similarity, [[2**0.5 - 1, 1.0, -1.0], [1.0, NAN, 0.6]], rtol=1e-6)


def test_psi_and_table_of_a_block_worked_by_hand():
    similarity = np.array([[0.5], [-0.5]])
    psi, aux = hee.first_level(similarity[:, 0])
    weights = np.exp([0.5, -0.5, -0.5])  # S_aux = -max S = -0.5
    np.testing.assert_allclose([*psi, aux], weights / weights.sum(), rtol=1e-12)
    table = hee.exploit_table(similarity, [[0], [1]], [2])
    up, down = 1 / (1 + np.exp(-0.5)), 1 / (1 + np.exp(0.5))
    expected = [psi[0] * up, psi[1] * down, psi[0] * down, psi[1] * up, aux / 2, aux / 2]
    np.testing.assert_allclose(table[0, :6], expected, rtol=1e-12)
    assert table.shape == (1, 8) and not table[0, 6:].any()


def test_tasks_that_share_an_expert_keep_their_entries_but_share_its_candidates():
    similarity = np.array([[0.0], [0.0], [0.0]])
    table = hee.exploit_table(similarity, [[0], [0], [0]], [1])
    np.testing.assert_allclose(table[0], [3 / 8, 3 / 8, 1 / 8, 1 / 8], rtol=1e-12)


def test_a_block_that_every_earlier_task_skipped_is_new_or_skip():
    table = hee.exploit_table(np.array([[NAN], [NAN]]), [[None], [None]], [1])
    np.testing.assert_array_equal(table[0], [0, 0, 0.5, 0.5])


def test_unknown_base_means_are_neutral_and_stay_out_of_the_extremes():
    cosine = np.array([[0.99, -0.99], [0.2, 0.6]])
    similarity = hee.norm_cosine(cosine, np.array([True, False]))
    np.testing.assert_allclose(similarity, [[0, 0], [-1, 1]], atol=1e-12)
    alone = hee.norm_cosine(cosine[:1], np.array([True]))
    np.testing.assert_array_equal(alone, [[0, 0]])


def test_equal_cosines_lead_to_equal_probabilities():
    np.testing.assert_array_equal(hee.norm_cosine(np.array([[0.5, 0.5]])), [[0, 0]])


def test_uniform_covers_all_candidates():
    np.testing.assert_allclose(
        hee.uniform_table([1, 2])[:, :6], [[1 / 4] * 4 + [0] * 2, [1 / 6] * 6]
    )


def two_level_draw(rng: np.random.Generator, similarity, experts, size: int) -> int:
    """Sample as the paper describes it: first a task or Aux, then Reuse or Adapt, New or Skip."""
    present = [i for i in range(len(similarity)) if not np.isnan(similarity[i])]
    scores = [similarity[i] for i in present]
    scores.append(-max(scores) if scores else 0.0)
    weights = np.exp(scores)
    entry = rng.choice(len(scores), p=weights / weights.sum())
    if entry == len(present):
        return 2 * size + int(rng.random() < 0.5)
    expert = experts[present[entry]]
    reuse = rng.random() < 1 / (1 + np.exp(-similarity[present[entry]]))
    return expert if reuse else size + expert


def test_the_closed_form_equals_the_two_level_draw():
    similarity = [0.9, -0.4, NAN, 0.1]
    experts = [0, 1, None, 1]
    size = 2
    table = hee.exploit_table(np.array(similarity)[:, None], [[e] for e in experts], [size])[0, :6]
    rng = np.random.default_rng(0)
    counts = np.bincount(
        [two_level_draw(rng, similarity, experts, size) for _ in range(20_000)], minlength=6
    )
    assert stats.chisquare(counts, 20_000 * table).pvalue > 1e-3


def test_samples_follow_the_table():
    table = hee.exploit_table(np.array([[0.9, -0.3]]), [[0, 0]], [1, 1])
    codes = np.asarray(hee.sample(jax.random.key(0), table.astype(np.float32), num=8192))
    for block in range(2):
        counts = np.bincount(codes[:, block], minlength=4)
        assert stats.chisquare(counts, 8192 * table[block]).pvalue > 1e-3


def test_a_mixture_with_epsilon_one_is_uniform_and_with_zero_exploits():
    exploit = hee.exploit_table(np.array([[NAN]]), [[None]], [1])
    uniform = hee.uniform_table([1])
    exploited = np.asarray(hee.sample_mixed(jax.random.key(0), exploit, uniform, 0.0, num=256))
    assert set(exploited[:, 0]) == {2, 3}
    explored = np.asarray(hee.sample_mixed(jax.random.key(1), exploit, uniform, 1.0, num=4096))
    assert stats.chisquare(np.bincount(explored[:, 0], minlength=4)).pvalue > 1e-3


def test_the_first_samples_do_not_depend_on_the_number_of_samples():
    table = hee.uniform_table([3, 3]).astype(np.float32)
    few, many = (np.asarray(hee.sample(jax.random.key(7), table, num=n)) for n in (8, 64))
    np.testing.assert_array_equal(few, many[:8])


@settings(max_examples=5)  # each can compile
@given(st.lists(st.integers(1, 6), min_size=2, max_size=4), st.integers(0, 2**31), st.floats(0, 1))
def test_every_sampled_architecture_is_a_candidate_of_its_block(sizes, seed, epsilon):
    rng = np.random.default_rng(seed)
    experts = [[0] * len(sizes)] + [
        [int(rng.integers(0, n)) if rng.random() < 0.7 else None for n in sizes] for _ in range(3)
    ]
    similarity = np.array(
        [[NAN if e is None else rng.uniform(-1, 1) for e in row] for row in experts]
    )
    exploit = hee.exploit_table(similarity, experts, sizes)
    uniform = hee.uniform_table(sizes)
    np.testing.assert_allclose(exploit.sum(axis=1), 1.0, rtol=1e-12)
    for codes in np.asarray(
        hee.sample_mixed(jax.random.key(seed), exploit, uniform, epsilon, num=16)
    ):
        decode(codes, sizes)  # raises for a code that is no candidate
        assert all(code < num_candidates(n) for code, n in zip(codes, sizes, strict=True))


def test_drawing_from_another_table_of_the_same_bucket_compiles_nothing(compilations):
    hee.sample(jax.random.key(0), hee.uniform_table([2, 2]).astype(np.float32), num=16)
    with compilations() as programs:
        hee.sample(jax.random.key(1), hee.uniform_table([3, 1]).astype(np.float32), num=16)
    assert programs.count == 0


@pytest.mark.parametrize("sizes", [[1, 1], [4, 2]])
def test_tables_are_padded_to_powers_of_two(sizes):
    width = hee.uniform_table(sizes).shape[1]
    assert width & (width - 1) == 0 and width >= num_candidates(max(sizes))


def test_removed_candidates_have_probability_zero_and_the_rest_keep_their_proportions():
    table = np.array([[0.1, 0.2, 0.3, 0.4], [0.0, 0.0, 0.5, 0.5]])
    np.testing.assert_allclose(
        hee.without(table, ("skip",), [1, 1]), [[1 / 6, 1 / 3, 1 / 2, 0], [0, 0, 1, 0]]
    )
    # nothing that is left had a probability in the second block: uniform over reuse and adapt
    expected = [[1 / 3, 2 / 3, 0, 0], [1 / 2, 1 / 2, 0, 0]]
    np.testing.assert_allclose(hee.without(table, ("new", "skip"), [1, 1]), expected)
    assert hee.without(table, (), [1, 1]) is table
