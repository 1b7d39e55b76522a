"""Compute-aware evolutionary search (paper section 'Compute-Aware Target Network Selection').

The search is a pure function of keys and integer arrays. The score function is an argument, so
tests can search a toy landscape.
"""

import enum
import functools
import itertools
from collections.abc import Callable
from fractions import Fraction
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from cheem_jax.cheem.config import SearchConfig
from cheem_jax.cheem.hee import sample_mixed
from cheem_jax.core.keys import key_at

TRIES = 10
"""Number of architectures sampled per new member of the population. Architectures that were already
scored are dropped; if too few remain, uniformly sampled architectures are added."""


class KeyPurpose(enum.IntEnum):
    """Purpose of a PRNG key. Each generation has one key per purpose, made from the number of the
    purpose. If an existing number changed, the same seed would have different results."""

    FIRST = 0
    CROSSOVER = 1
    MUTATION = 2
    FILL = 3


class Scored(NamedTuple):
    """All architectures that a search has scored: genomes `[P, L]`, numbers of correct predictions
    `[P]` (non-finite if scoring failed) and FLOPs `[P]`."""

    genomes: np.ndarray
    correct: np.ndarray
    flops: np.ndarray


class Searched(NamedTuple):
    """Progress of a search: the number of finished generations, and the architectures that they
    scored."""

    generations: int
    scored: Scored


Score = Callable[[Int[np.ndarray, "P L"]], np.ndarray]


def rank(scored: Scored, num_images: int, tolerance: float) -> np.ndarray:
    """Rank architectures and return their indices from best to worst.

    Architectures are grouped by the distance of their accuracy to the best accuracy, in multiples
    of `tolerance`. They are sorted by group, then fewer FLOPs, then more correct predictions, then
    genome. Groups are computed with exact fractions, so a drop of exactly `tolerance` is in group
    1. Architectures without a score are last.
    """
    valid = np.isfinite(scored.correct)
    best = int(scored.correct[valid].max()) if valid.any() else 0
    step = Fraction(str(tolerance)) * num_images

    def place(i: int):
        if not valid[i]:
            return (1, 0, 0, 0, tuple(scored.genomes[i]))
        correct = int(scored.correct[i])
        group = (best - correct) // step if step else best - correct
        return (0, group, int(scored.flops[i]), -correct, tuple(scored.genomes[i]))

    return np.array(sorted(range(len(scored.genomes)), key=place))


def search(
    key: jax.Array,
    score: Score,
    flops: Score,
    *,
    exploit: Float[np.ndarray, "L C"],
    uniform: Float[np.ndarray, "L C"],
    num_images: int,
    config: SearchConfig,
    on_generation: Callable[[Searched], object] = lambda searched: None,
    earlier: Searched | None = None,
) -> tuple[np.ndarray, Scored]:
    """Search for the architecture that `rank` puts first. Return its genome and all scored
    architectures.

    Each architecture is scored at most once, and the search ends early if all have been scored.
    Raises ValueError if no score is finite.

    Args:
        key: root of the keys of all generations.
        score: maps genomes `[P, L]` to correct predictions `[P]` out of `num_images`.
        flops: maps genomes `[P, L]` to FLOPs `[P]`.
        exploit: candidate probabilities of HEE.
        uniform: uniform candidate probabilities.
        num_images: number of images that `score` predicts.
        config: settings of the search.
        on_generation: is called with the progress after each generation.
        earlier: progress of an interrupted search to resume; the result is the same as without the
            interruption.
    """
    num = config.population
    none = np.zeros((0, len(uniform)), np.int32)
    begin, scored = earlier or Searched(0, Scored(none, np.zeros(0), np.zeros(0)))
    history: set[tuple[int, ...]] = {tuple(genome.tolist()) for genome in scored.genomes}
    for generation in range(begin, config.generations):
        generation_key = key_at(key, generation)
        fresh: list[tuple[int, ...]] = []
        if generation == 0:
            _take(
                fresh,
                history,
                _draw(generation_key, KeyPurpose.FIRST, exploit, uniform, config),
                num,
            )
        else:
            order = rank(scored, num_images, config.tolerance)[: config.num_parents]
            parents = scored.genomes[np.resize(order, config.num_parents)]
            crossed, mutated = _children(generation_key, parents, exploit, uniform, config)
            _take(fresh, history, crossed, num // 2)
            _take(fresh, history, mutated, len(fresh) + num - num // 2)
        _fill(fresh, history, generation_key, exploit, uniform, config)
        if not fresh:
            break
        genomes = np.array(fresh, np.int32)
        latest = Scored(
            genomes, np.asarray(score(genomes), np.float64), np.asarray(flops(genomes), np.float64)
        )
        scored = Scored(*(np.concatenate(pair) for pair in zip(scored, latest, strict=True)))
        on_generation(Searched(generation + 1, scored))
    if not np.isfinite(scored.correct).any():
        raise ValueError(
            "the search found no architecture with a score: none was a finite number; try lower"
            " learning rates"
        )
    return scored.genomes[rank(scored, num_images, config.tolerance)[0]], scored


def prepare_search(exploit: Float[np.ndarray, "L C"], config: SearchConfig) -> None:
    """Compile the sampling functions for the table shape of this search by calling each once."""
    key = jax.random.key(0)
    parents = np.zeros((config.num_parents, len(exploit)), np.int32)
    _draw(key, KeyPurpose.FIRST, exploit, exploit, config)
    _children(key, parents, exploit, exploit, config)


@functools.partial(jax.jit, static_argnames="num")
def crossover(key: jax.Array, parents: Int[Array, "k L"], *, num: int) -> Int[Array, "num L"]:
    """Make `num` children. Each child has two random parents, and each gene is copied from one of
    them."""
    parent_key, gene_key = jax.random.split(key)
    pair = jax.random.randint(parent_key, (2, num), 0, parents.shape[0])
    from_first = jax.random.bernoulli(gene_key, 0.5, (num, parents.shape[1]))
    return jnp.where(from_first, parents[pair[0]], parents[pair[1]])


@functools.partial(jax.jit, static_argnames="num")
def mutate(
    key: jax.Array,
    parents: Int[Array, "k L"],
    *,
    exploit: Float[Array, "L C"],
    uniform: Float[Array, "L C"],
    epsilon: float | Float[Array, ""],
    rate: float | Float[Array, ""],
    num: int,
) -> Int[Array, "num L"]:
    """Make `num` children. Each child is a copy of a random parent, and each gene is resampled with
    probability `rate`.

    A resampled gene is sampled from `uniform` with probability `epsilon`, and from `exploit`
    otherwise.
    """
    parent_key, gene_key, draw_key = jax.random.split(key, 3)
    chosen = parents[jax.random.randint(parent_key, (num,), 0, parents.shape[0])]
    redraw = jax.random.bernoulli(gene_key, rate, chosen.shape)
    mixture = jnp.log(epsilon * uniform + (1 - epsilon) * exploit)
    return jnp.where(redraw, jax.random.categorical(draw_key, mixture, shape=chosen.shape), chosen)


def _draw(key, purpose: KeyPurpose, exploit, uniform, config: SearchConfig) -> np.ndarray:
    num = TRIES * config.population
    # settings can be integers, which JAX does not accept as probabilities
    epsilon = float(config.epsilon)
    return np.asarray(sample_mixed(key_at(key, purpose), exploit, uniform, epsilon, num=num))


def _children(
    key, parents, exploit, uniform, config: SearchConfig
) -> tuple[np.ndarray, np.ndarray]:
    half = config.population // 2
    crossed = crossover(key_at(key, KeyPurpose.CROSSOVER), parents, num=TRIES * max(half, 1))
    mutated = mutate(
        key_at(key, KeyPurpose.MUTATION),
        parents,
        exploit=exploit,
        uniform=uniform,
        epsilon=float(config.epsilon),
        rate=float(config.mutation_rate),
        num=TRIES * (config.population - half),
    )
    return np.asarray(crossed), np.asarray(mutated)


def _take(fresh: list, history: set, candidates, total: int) -> None:
    """Append candidates that are not in `history` to `fresh` until `fresh` has `total` members."""
    for genome in candidates:
        if len(fresh) >= total:
            return
        genome = tuple(int(gene) for gene in genome)
        if genome not in history:
            history.add(genome)
            fresh.append(genome)


def _fill(fresh: list, history: set, key, exploit, uniform, config: SearchConfig) -> None:
    """Complete a population with uniform samples. If too few samples are new and the search space
    is small, add architectures that were not scored yet, in lexicographic order."""
    num = config.population
    if len(fresh) < num:
        _take(fresh, history, _draw(key, KeyPurpose.FILL, uniform, uniform, config), num)
    candidates = [np.flatnonzero(row).tolist() for row in exploit + uniform]
    # in a larger space, the random samples almost certainly include enough new architectures
    if (
        len(fresh) < num
        and len(history) < np.prod([float(len(genes)) for genes in candidates]) <= 1e5
    ):
        _take(fresh, history, itertools.product(*candidates), num)
