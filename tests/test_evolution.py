"""The search on toy landscapes: it runs in milliseconds and its best answer is known."""

import dataclasses

import chex
import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np
import pytest

from cheem_jax import hee
from cheem_jax.evolution import (
    Scored,
    SearchConfig,
    best_of,
    contenders,
    crossover,
    first_draws,
    generation_images,
    mutate,
    rank,
    rung_images,
    rung_rows,
    search,
)
from cheem_jax.keys import key_at

SIZES = [2, 1, 2, 1]
GOAL = np.array([3, 2, 5, 0])
UNIFORM = hee.uniform_table(SIZES)


def toy_score(genomes):
    return 100 - 20 * (genomes != GOAL).sum(axis=1).astype(float)


def no_cost(genomes):
    return np.zeros(len(genomes))


def run(score=toy_score, flops=no_cost, seed=0, **settings):
    config = SearchConfig(**{"population": 12, "generations": 10, "num_parents": 4, **settings})
    return search(jax.random.key(seed), score, flops, UNIFORM, UNIFORM, 100, config)


def test_the_known_optimum_is_found():
    winner, scored = run()
    np.testing.assert_array_equal(winner, GOAL)
    assert scored.correct.max() == 100


def test_no_architecture_is_scored_twice():
    _, scored = run()
    assert len(np.unique(scored.genomes, axis=0)) == len(scored.genomes) == 120


def test_the_same_key_finds_the_same_and_another_key_goes_another_way():
    first, again, other = run(seed=1)[1], run(seed=1)[1], run(seed=2)[1]
    np.testing.assert_array_equal(first.genomes, again.genomes)
    assert not np.array_equal(first.genomes, other.genomes)


def test_a_nan_never_wins():
    def score(genomes):
        scores = toy_score(genomes)
        scores[(genomes == GOAL).all(axis=1)] = np.nan
        return scores

    winner, scored = run(score)
    assert np.isnan(scored.correct).any()
    assert toy_score(winner[None])[0] == 80


def test_an_infinite_score_never_wins():
    scored = Scored(np.array([[0], [1]]), np.array([np.inf, 3.0]), np.array([1.0, 2.0]))
    assert rank(scored, 10, 0.02).tolist() == [1, 0]


@pytest.mark.parametrize("generations", [1, 3])
def test_a_search_that_goes_on_ends_as_one_that_was_not_stopped(generations):
    config = SearchConfig(population=12, generations=5, num_parents=3)
    arguments = (toy_score, no_cost, UNIFORM, UNIFORM, 100)
    winner, scored = search(jax.random.key(4), *arguments, config)
    kept = []
    search(jax.random.key(4), *arguments, dataclasses.replace(config, generations=generations), kept.append)
    assert kept[-1].generations == generations and len(kept[-1].scored.genomes) == 12 * generations
    calls = []

    def counted(genomes):
        calls.append(len(genomes))
        return toy_score(genomes)

    again, all_scored = search(jax.random.key(4), counted, *arguments[1:], config, begun=kept[-1])
    np.testing.assert_array_equal(again, winner)
    chex.assert_trees_all_equal(all_scored, scored)
    assert sum(calls) == 12 * (5 - generations)


def test_a_search_without_any_score_says_so():
    with pytest.raises(ValueError, match="none was a finite number"):
        run(lambda genomes: np.full(len(genomes), np.nan))


@hypothesis.given(st.data())
def test_whoever_is_no_contender_never_comes_first_whatever_is_scored_later(data):
    scores = st.lists(
        st.tuples(st.sampled_from([float("nan"), 1.0, 2.0, 3.0, 4.0, 5.0]), st.integers(1, 4)), min_size=2, max_size=7
    ).filter(lambda pairs: any(np.isfinite(score) for score, _ in pairs))
    pairs, tolerance = data.draw(scores), data.draw(st.sampled_from([0.0, 0.1, 0.3, 1.0]))
    genomes = np.arange(len(pairs))[::-1, None]
    scored = Scored(genomes, np.array([score for score, _ in pairs]), np.array([flops for _, flops in pairs]))
    best = best_of(scored, 10, tolerance)
    # of each beginning, the winner over all is among those that may still win
    for num in range(best + 1, len(pairs) + 1):
        assert best in contenders(Scored(*(values[:num] for values in scored)))


def test_contenders_are_the_most_accurate_at_every_cost():
    scored = Scored(np.arange(6)[:, None], np.array([5, 4, 4, 3, np.nan, 5.0]), np.array([9, 7, 8, 7, 1, 9]))
    assert contenders(scored).tolist() == [0, 1]
    nothing = Scored(np.zeros((1, 1), np.int32), np.array([np.nan]), np.ones(1))
    assert contenders(nothing).tolist() == []


def test_first_draws_are_those_of_a_first_generation_all_different():
    config, key = SearchConfig(population=12, generations=1, num_parents=4), jax.random.key(3)
    _, scored = search(key, toy_score, no_cost, UNIFORM, UNIFORM, 100, config)
    # whatever population and rungs the search itself would have
    other = dataclasses.replace(config, population=50, rungs=3)
    for settings in (config, other):
        np.testing.assert_array_equal(first_draws(key, UNIFORM, UNIFORM, 12, settings), scored.genomes)
    assert len({tuple(genome) for genome in scored.genomes.tolist()}) == 12


def test_first_draws_follow_the_mixture_and_end_with_the_space():
    sure = np.zeros_like(UNIFORM)
    sure[np.arange(len(GOAL)), GOAL] = 1
    never = SearchConfig(epsilon=0.0)
    assert first_draws(jax.random.key(0), sure, UNIFORM, 1, never).tolist() == [GOAL.tolist()]
    small = hee.uniform_table([1])
    drawn = first_draws(jax.random.key(0), small, small, 9, SearchConfig())
    assert sorted(drawn.ravel().tolist()) == [0, 1, 2, 3]


def test_a_small_space_is_searched_whole_and_then_the_search_stops():
    winner, scored = search(
        jax.random.key(0), toy_score_two, no_cost, hee.uniform_table([1, 1]), hee.uniform_table([1, 1]), 10,
        SearchConfig(population=10, generations=5, num_parents=3),
    )  # fmt: skip
    assert len(scored.genomes) == 16
    assert winner.tolist() == [3, 3]


def toy_score_two(genomes):
    return genomes.sum(axis=1).astype(float)


def test_within_the_tolerance_fewer_flops_win():
    genomes = np.array([[0], [1], [2], [3]])
    scored = Scored(genomes, np.array([90.0, 89.0, 88.0, 70.0]), np.array([9.0, 5.0, 1.0, 0.0]))
    assert rank(scored, 100, 0.02).tolist() == [1, 0, 2, 3]


def test_a_drop_of_exactly_the_tolerance_is_the_next_group():
    # in floating point floor((0.9 - 0.88) / 0.02) is 1 or 0 depending on rounding; counts decide
    scored = Scored(np.array([[0], [1]]), np.array([45.0, 44.0]), np.array([2.0, 1.0]))
    assert rank(scored, 50, 0.02).tolist() == [0, 1]
    assert rank(scored, 51, 0.02).tolist() == [1, 0]


def test_without_tolerance_accuracy_alone_decides():
    scored = Scored(np.array([[0], [1]]), np.array([45.0, 44.0]), np.array([2.0, 1.0]))
    assert rank(scored, 50, 0.0).tolist() == [0, 1]


def test_equal_candidates_are_ordered_by_their_genes():
    scored = Scored(np.array([[2, 0], [0, 3], [0, 1]]), np.full(3, 5.0), np.zeros(3))
    assert rank(scored, 10, 0.02).tolist() == [2, 1, 0]


def test_children_take_every_gene_from_a_parent():
    parents = np.array([[0, 1, 2, 3], [4, 5, 6, 7]])
    children = np.asarray(crossover(jax.random.key(0), parents, num=200))
    assert all(gene in parents[:, block] for child in children for block, gene in enumerate(child))
    assert {tuple(c) for c in children} > {(0, 1, 2, 3), (4, 5, 6, 7)}


def test_a_mutation_redraws_about_the_given_share_of_genes():
    parents = np.full((1, 4), 1)
    table = hee.uniform_table([8, 8, 8, 8])  # 18 candidates: a redraw keeps the gene in 1 of 18 cases
    children = np.asarray(mutate(jax.random.key(0), parents, table, table, 0.5, 0.1, num=5000))
    changed = (children != 1).mean()
    assert abs(changed - 0.1 * 17 / 18) < 0.01


@pytest.mark.parametrize("settings", [{"population": 0}, {"mutation_rate": 1.5}, {"tolerance": -0.1}])
def test_senseless_settings_are_refused_by_name(settings):
    with pytest.raises(ValueError, match=next(iter(settings))):
        SearchConfig(**settings)


@pytest.mark.parametrize("settings", [{"rungs": 0}, {"population": 1, "rungs": 2}, {"population": 2, "rungs": 4}])
def test_rungs_without_candidates_are_refused(settings):
    with pytest.raises(ValueError, match="rungs"):
        SearchConfig(**settings)


def test_one_rung_scores_the_papers_candidates_in_the_order_drawn():
    config, first_key = SearchConfig(population=12, generations=1), key_at(jax.random.key(3), 0)
    drawn = hee.sample_mixed(key_at(first_key, 0), UNIFORM, UNIFORM, config.epsilon, num=120)
    _, scored = search(jax.random.key(3), toy_score, no_cost, UNIFORM, UNIFORM, 100, config)
    unseen = list(dict.fromkeys(tuple(genome) for genome in np.asarray(drawn).tolist()))
    assert [tuple(genome) for genome in scored.genomes.tolist()] == unseen[:12]


def test_rungs_spend_the_same_forward_passes_on_more_candidates():
    # 12 candidates on 100 images are 1,200 passes, as 16 * 50 + 8 * 50 and 24 * 25 + 12 * 25 + 6 * 50 are
    for rungs, candidates in ((1, (12,)), (2, (16, 8)), (3, (24, 12, 6))):
        config = SearchConfig(population=12, rungs=rungs)
        assert config.rung_candidates == candidates and generation_images(config, 100) == 1200


@hypothesis.given(st.integers(3, 60), st.integers(8, 500), st.integers(1, 4))
def test_no_generation_costs_more_than_without_halving(population, num_images, rungs):
    config = SearchConfig(population=population, rungs=rungs)
    assert generation_images(config, num_images) <= population * num_images


def test_too_few_images_for_the_rungs_are_refused():
    with pytest.raises(ValueError, match="3 validation images; so many rungs need at least 4"):
        rung_images(3, 3)


def test_the_images_of_the_rungs_are_disjoint_and_balanced_over_classes():
    labels = np.repeat(np.arange(4), 8).astype(np.int32)
    parts = rung_rows(jax.random.key(0), labels, 3)
    assert [np.bincount(labels[rows]).tolist() for rows in parts] == [[2] * 4, [2] * 4, [4] * 4]
    np.testing.assert_array_equal(np.sort(np.concatenate(parts)), np.arange(32))
    other = rung_rows(jax.random.key(1), labels, 3)
    assert not np.array_equal(parts[0], other[0])
    np.testing.assert_array_equal(rung_rows(jax.random.key(0), labels, 1)[0], np.arange(32))


class Halving:
    """A search in three rungs over 100 images, of which a quarter, a quarter and a half are new; all calls are kept."""

    config = SearchConfig(population=12, generations=4, num_parents=3, rungs=3)

    def __init__(self, **arguments):
        self.calls, self.states = [[], [], []], []
        scores = [lambda genomes, rung=rung: self.score(rung, genomes) for rung in range(3)]
        config = dataclasses.replace(self.config, **arguments.pop("changes", {}))
        self.winner, self.scored = search(
            jax.random.key(4), scores, no_cost, UNIFORM, UNIFORM, 100, config, self.states.append, **arguments
        )

    def score(self, rung, genomes):
        self.calls[rung].append(genomes)
        return toy_score(genomes) * (0.25, 0.25, 0.5)[rung]


def test_the_better_half_of_each_rung_goes_on_and_no_image_is_met_twice():
    found = Halving(changes={"generations": 1})
    (quarter,), (half,), (whole,) = found.calls
    assert (len(quarter), len(half), len(whole)) == (24, 12, 6)
    for before, after in ((quarter, half), (half, whole)):
        left = [toy_score(genome[None])[0] for genome in before if genome.tolist() not in after.tolist()]
        assert toy_score(after).min() >= max(left)
    np.testing.assert_array_equal(found.scored.genomes, whole)
    np.testing.assert_array_equal(found.scored.correct, toy_score(whole))


def test_halving_draws_nothing_again_that_it_left_out():
    found = Halving()
    drawn = np.concatenate(found.calls[0])
    assert len(np.unique(drawn, axis=0)) == len(drawn) == 4 * 24
    assert len(found.scored.genomes) == 4 * 6 and len(found.states[-1].dropped) == 4 * 18
    np.testing.assert_array_equal(found.winner, GOAL)


def test_a_search_with_rungs_that_goes_on_ends_as_one_that_was_not_stopped():
    unbroken = Halving()
    again = Halving(begun=unbroken.states[1])
    for one, other in zip((*again.scored, again.winner), (*unbroken.scored, unbroken.winner), strict=True):
        np.testing.assert_array_equal(one, other)
    np.testing.assert_array_equal(again.states[-1].dropped, unbroken.states[-1].dropped)
    assert sum(len(genomes) for genomes in again.calls[0]) == 2 * 24


@pytest.mark.parametrize("failing", [0, 2])
def test_an_architecture_without_a_score_on_some_images_never_wins(failing):
    def score(rung, genomes):
        is_failed = (genomes == GOAL).all(axis=1) & (rung == failing)
        return np.where(is_failed, np.nan, toy_score(genomes) * (0.25, 0.25, 0.5)[rung])

    scores = [lambda genomes, rung=rung: score(rung, genomes) for rung in range(3)]
    winner, _ = search(jax.random.key(4), scores, no_cost, UNIFORM, UNIFORM, 100, Halving.config)
    assert toy_score(winner[None])[0] == 80


def test_every_rung_needs_a_score():
    with pytest.raises(ValueError, match="1 scores for 3 rungs"):
        run(rungs=3)


def test_a_warm_start_comes_first_each_architecture_once_and_the_rest_is_drawn_as_before():
    first = np.array([[0, 0, 0, 0], [2, 1, 2, 1], [0, 0, 0, 0]], np.int32)
    config, key = SearchConfig(population=12, generations=1), jax.random.key(5)
    arguments = (toy_score, no_cost, UNIFORM, UNIFORM, 100, config)
    _, cold = search(key, *arguments)
    _, warm = search(key, *arguments, first=first)
    expected = list(dict.fromkeys(map(tuple, [*first[:2].tolist(), *cold.genomes.tolist()])))[:12]
    assert list(map(tuple, warm.genomes.tolist())) == expected
    many = np.concatenate([cold.genomes, first])
    np.testing.assert_array_equal(search(key, *arguments, first=many)[1].genomes, cold.genomes)
