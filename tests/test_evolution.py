"""The search on toy landscapes: it runs in milliseconds and its best answer is known."""

import dataclasses

import chex
import jax
import numpy as np
import pytest

from cheem_jax.cheem import evolution, hee
from cheem_jax.cheem.config import SearchConfig
from cheem_jax.cheem.evolution import (
    TRIES,
    KeyPurpose,
    Scored,
    crossover,
    mutate,
    rank,
    search,
)
from cheem_jax.core.keys import key_at

SIZES = [2, 1, 2, 1]
GOAL = np.array([3, 2, 5, 0])
UNIFORM = hee.uniform_table(SIZES)
SPACE = {"exploit": UNIFORM, "uniform": UNIFORM, "num_images": 100}


def toy_score(genomes):
    return 100 - 20 * (genomes != GOAL).sum(axis=1).astype(float)


def no_cost(genomes):
    return np.zeros(len(genomes))


def run(score=toy_score, flops=no_cost, seed=0, **settings):
    config = SearchConfig(**{"population": 12, "generations": 10, "num_parents": 4, **settings})
    return search(jax.random.key(seed), score, flops, config=config, **SPACE)


@pytest.mark.full
def test_the_known_optimum_is_found():
    winner, scored = run()
    np.testing.assert_array_equal(winner, GOAL)
    assert scored.correct.max() == 100


def test_no_architecture_is_scored_twice():
    _, scored = run()
    assert len(np.unique(scored.genomes, axis=0)) == len(scored.genomes) == 120


def test_the_same_key_repeats_a_search_and_another_key_searches_elsewhere():
    first = run(seed=1)[1]
    again = run(seed=1)[1]
    other = run(seed=2)[1]
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
def test_a_search_that_resumes_ends_as_one_that_was_not_stopped(generations):
    config = SearchConfig(population=12, generations=5, num_parents=3)
    key = jax.random.key(4)
    winner, scored = search(key, toy_score, no_cost, config=config, **SPACE)
    populations = []
    part = dataclasses.replace(config, generations=generations)
    search(key, toy_score, no_cost, config=part, on_generation=populations.append, **SPACE)
    assert populations[-1].generations == generations
    assert len(populations[-1].scored.genomes) == 12 * generations
    calls = []

    def counted(genomes):
        calls.append(len(genomes))
        return toy_score(genomes)

    again, all_scored = search(
        key, counted, no_cost, config=config, earlier=populations[-1], **SPACE
    )
    np.testing.assert_array_equal(again, winner)
    chex.assert_trees_all_equal(all_scored, scored)
    assert sum(calls) == 12 * (5 - generations)


def test_a_search_without_any_score_says_so():
    with pytest.raises(ValueError, match="none was a finite number"):
        run(lambda genomes: np.full(len(genomes), np.nan))


def search_small_space(population: int, generations: int):
    """Search two blocks with four candidates each."""
    return search(
        jax.random.key(0),
        toy_score_two,
        no_cost,
        exploit=hee.uniform_table([1, 1]),
        uniform=hee.uniform_table([1, 1]),
        num_images=10,
        config=SearchConfig(population=population, generations=generations, num_parents=3),
    )


def test_a_small_space_is_searched_whole_and_then_the_search_stops():
    winner, scored = search_small_space(10, 5)
    assert len(scored.genomes) == 16
    assert winner.tolist() == [3, 3]


def test_a_population_as_large_as_a_small_space_is_the_whole_space(monkeypatch):
    monkeypatch.setattr(evolution, "TRIES", 1)  # samples alone would miss a third of the space
    _, scored = search_small_space(16, 1)
    assert len(scored.genomes) == 16


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


def test_an_architecture_without_a_score_does_not_change_the_groups_of_the_others():
    correct, flops = np.array([np.nan, 45.0, 44.0]), np.array([0.0, 2.0, 1.0])
    scored = Scored(np.array([[0], [1], [2]]), correct, flops)
    assert rank(scored, 51, 0.02).tolist() == [2, 1, 0]  # a drop of 1 is below 0.02 * 51


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
    table = hee.uniform_table(
        [8, 8, 8, 8]
    )  # 18 candidates: a redraw keeps the gene in 1 of 18 cases
    children = np.asarray(
        mutate(
            jax.random.key(0),
            parents,
            exploit=table,
            uniform=table,
            epsilon=0.5,
            rate=0.1,
            num=5000,
        )
    )
    changed = (children != 1).mean()
    assert abs(changed - 0.1 * 17 / 18) < 0.01


def test_integers_are_probabilities_too():
    genomes = [run(generations=2, epsilon=one, mutation_rate=one)[1].genomes for one in (1, 1.0)]
    np.testing.assert_array_equal(*genomes)


def test_without_mutation_every_parent_has_children():
    parents = np.arange(12).reshape(3, 4)
    table = hee.uniform_table([8] * 4)
    children = mutate(
        jax.random.key(0), parents, exploit=table, uniform=table, epsilon=0.5, rate=0.0, num=100
    )
    assert {tuple(child) for child in np.asarray(children).tolist()} == set(
        map(tuple, parents.tolist())
    )


def test_the_smaller_half_of_a_generation_is_crossover_and_the_rest_mutation():
    table = hee.uniform_table([8] * 12)  # so many candidates that no architecture repeats
    config = SearchConfig(population=13, generations=2, num_parents=4, mutation_rate=0.5)
    _, scored = search(
        jax.random.key(0),
        lambda genomes: genomes[:, 0].astype(float),
        no_cost,
        exploit=table,
        uniform=table,
        num_images=100,
        config=config,
    )
    first = Scored(scored.genomes[:13], scored.correct[:13], scored.flops[:13])
    parents = first.genomes[rank(first, 100, config.tolerance)[:4]]
    key = key_at(jax.random.key(0), 1)
    crossed = crossover(key_at(key, KeyPurpose.CROSSOVER), parents, num=10 * 6)
    mutated = mutate(
        key_at(key, KeyPurpose.MUTATION),
        parents,
        exploit=table,
        uniform=table,
        epsilon=config.epsilon,
        rate=0.5,
        num=10 * 7,
    )
    earlier = set(map(tuple, first.genomes.tolist()))
    expected = []
    for children, num in ((crossed, 6), (mutated, 7)):
        rows = dict.fromkeys(map(tuple, np.asarray(children).tolist()))
        new = [genome for genome in rows if genome not in earlier][:num]
        earlier |= set(new)
        expected += new
    assert list(map(tuple, scored.genomes[13:].tolist())) == expected


def test_the_first_generation_is_scored_in_the_order_sampled():
    config = SearchConfig(population=12, generations=1)
    first_key = key_at(jax.random.key(3), 0)
    samples = hee.sample_mixed(key_at(first_key, 0), UNIFORM, UNIFORM, config.epsilon, num=120)
    _, scored = search(jax.random.key(3), toy_score, no_cost, config=config, **SPACE)
    unseen = list(dict.fromkeys(tuple(genome) for genome in np.asarray(samples).tolist()))
    assert [tuple(genome) for genome in scored.genomes.tolist()] == unseen[:12]


def distances_to(genomes: np.ndarray, genome: np.ndarray) -> np.ndarray:
    """Number of genes by which each genome differs."""
    return (genomes != genome).sum(axis=1)


def test_parents_are_ranked_with_the_tolerance():
    table = hee.uniform_table([6] * 12)
    config = SearchConfig(
        population=20, generations=2, num_parents=1, tolerance=0.5, mutation_rate=0.3
    )

    def score(genomes):
        return 60.0 + genomes[:, 0]

    def flops(genomes):  # a more accurate architecture needs more FLOPs
        return 10.0 + genomes[:, 0]

    _, scored = search(
        jax.random.key(0),
        score,
        flops,
        exploit=table,
        uniform=table,
        num_images=100,
        config=config,
    )
    first = Scored(scored.genomes[:20], scored.correct[:20], scored.flops[:20])
    parent, accurate = (first.genomes[rank(first, 100, by)[0]] for by in (0.5, 0.0))
    assert distances_to(parent[None], accurate) > 6
    mutated = scored.genomes[20:30]  # one parent has no crossover, so all are mutations or random
    assert np.median(distances_to(mutated, parent)) < np.median(distances_to(mutated, accurate)) - 3


def test_samples_prefer_the_candidates_of_exploitation():
    uniform = hee.uniform_table([8] * 20)  # 18 candidates per block
    exploit = np.zeros_like(uniform)
    exploit[:, 5:7] = 0.5
    expected = 0.9 + 0.1 * 2 / 18  # share of genes that are 5 or 6 for epsilon = 0.1
    config = SearchConfig(population=300, generations=1, epsilon=0.1)
    _, scored = search(
        jax.random.key(0),
        lambda genomes: np.zeros(len(genomes)),
        no_cost,
        exploit=exploit,
        uniform=uniform,
        num_images=10,
        config=config,
    )
    assert np.isin(scored.genomes, (5, 6)).mean() == pytest.approx(expected, abs=0.05)
    mutated = np.asarray(
        mutate(
            jax.random.key(0),
            np.zeros((1, 20), np.int32),
            exploit=exploit,
            uniform=uniform,
            epsilon=0.1,
            rate=1.0,
            num=500,
        )
    )
    assert np.isin(mutated, (5, 6)).mean() == pytest.approx(expected, abs=0.02)


def test_every_generation_samples_from_its_own_key():
    # no parent has a child that is new, so each generation is filled with random architectures
    table = hee.uniform_table([6] * 12)
    config = SearchConfig(population=8, generations=3, num_parents=1, mutation_rate=0.0)
    samples = []
    for generation in range(1, 3):
        fill_key = key_at(key_at(jax.random.key(0), generation), KeyPurpose.FILL)
        rows = hee.sample_mixed(fill_key, table, table, config.epsilon, num=TRIES * 8)
        samples += np.asarray(rows)[:8].tolist()
    _, scored = search(
        jax.random.key(0),
        lambda genomes: np.zeros(len(genomes)),
        no_cost,
        exploit=table,
        uniform=table,
        num_images=10,
        config=config,
    )
    assert scored.genomes[8:].tolist() == samples
