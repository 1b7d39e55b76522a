"""Compute-aware evolutionary search (paper section 'Compute-Aware Target Network Selection').

Pure over keys and integer arrays; the score is an argument, so the search runs as well on a toy landscape.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from cheem_jax.hee import sample_mixed
from cheem_jax.keys import key_at, order_at

TRIES = 10
"""Children drawn per wanted child before random ones fill up."""


@dataclasses.dataclass(frozen=True)
class SearchConfig:
    """Settings of the evolutionary search."""

    population: int = 50
    """Architectures scored per generation."""
    generations: int = 20
    """Generations, the first included."""
    num_parents: int = 10
    """Best architectures of everything scored so far that have children (the paper's k)."""
    mutation_rate: float = 0.1
    """Probability that a mutation redraws a gene (paper: 'e.g., 0.1')."""
    epsilon: float = 0.5
    """eps2: probability that an individual, or a redrawn gene, is uniform instead of HEE (paper: 0.5)."""
    tolerance: float = 0.02
    """tau: accuracy that may be given up for fewer FLOPs (paper: 2 %, absolute)."""
    cost: Literal["network", "resumed"] = "network"
    """FLOPs that decide within tau: of the whole task network (paper), or of what still runs of it behind the router's
    pass, which it shares as far as its blocks reuse the base's experts."""
    rungs: int = 1
    """Successive halving: more candidates per generation, of which only the better half goes on each time to twice the
    validation images, for as many forward passes as with 1 (paper)."""
    warm_start: bool = False
    """Begin with what the similarity names: HEE's likeliest architecture, all Reuse and all Adapt of the base, and the
    networks of earlier tasks."""

    def __post_init__(self) -> None:
        for name in ("population", "generations", "num_parents", "rungs"):
            if getattr(self, name) < 1:
                raise ValueError(f"search {name} is {getattr(self, name)}; expected at least 1")
        for name in ("mutation_rate", "epsilon", "tolerance"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"search {name} is {getattr(self, name)}; expected a number in [0, 1]")
        if self.rung_candidates[-1] < 1:
            raise ValueError(
                f"search population is {self.population}; {self.rungs} rungs need at least {self.rungs // 2 + 1}"
            )

    @property
    def rung_candidates(self) -> tuple[int, ...]:
        """Candidates of a generation that each rung scores: 2^R / (R + 1) times the population, then half each time.

        A rung costs only the images that it adds, so R rungs together cost (R + 1) / 2 times the first, and a
        generation never more than `population` candidates on all images. Successive halving after Jamieson and
        Talwalkar, "Non-stochastic Best Arm Identification and Hyperparameter Optimization", AISTATS 2016.
        """
        drawn = self.population * 2**self.rungs // (self.rungs + 1)
        return tuple(drawn >> rung for rung in range(self.rungs))


class Scored(NamedTuple):
    """Everything a search has evaluated: genomes `[P, L]`, right answers `[P]` (not finite: failed) and FLOPs `[P]`."""

    genomes: np.ndarray
    correct: np.ndarray
    flops: np.ndarray


class Searched(NamedTuple):
    """How far a search has come: generations done, what they scored on all images, and what halving left out before."""

    generations: int
    scored: Scored
    dropped: Int[np.ndarray, "Q L"]


Score = Callable[[Int[np.ndarray, "P L"]], np.ndarray]


def rank(scored: Scored, num_images: int, tolerance: float) -> np.ndarray:
    """Indices from best to worst: tolerance groups below the best, then FLOPs, then right answers, then genome.

    In integers, so that a drop of exactly the tolerance is group 1. An architecture without a score comes last.
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


def best_of(scored: Scored, num_images: int, tolerance: float) -> int:
    """Index of the first in rank. Raises ValueError where none has a score."""
    if not np.isfinite(scored.correct).any():
        raise ValueError(
            "the search found no architecture with a score: none was a finite number; try lower learning rates"
        )
    return int(rank(scored, num_images, tolerance)[0])


def contenders(scored: Scored) -> Int[np.ndarray, "_"]:
    """Indices of those that may come first in rank beside whatever else is scored later, at any tolerance.

    Another that is neither less accurate nor costs more always comes before the rest.
    """
    correct, flops, genomes = scored.correct, scored.flops, scored.genomes
    valid = np.flatnonzero(np.isfinite(correct)).tolist()
    found, cheapest = [], np.inf
    for i in sorted(valid, key=lambda i: (-correct[i], flops[i], tuple(genomes[i]))):
        if flops[i] < cheapest:
            found.append(i)
            cheapest = flops[i]
    return np.array(found, int)


def rung_images(num_images: int, rungs: int) -> list[int]:
    """Images that candidates have met after each rung: twice as many each time, all at the last."""
    if num_images >> (rungs - 1) == 0:
        raise ValueError(
            f"search rungs is {rungs}, and a task has {num_images} validation images; so many rungs need at least "
            f"{2 ** (rungs - 1)}"
        )
    return [num_images >> (rungs - 1 - rung) for rung in range(rungs)]


def rung_rows(key: jax.Array, labels: Int[np.ndarray, "N"], rungs: int) -> list[Int[np.ndarray, "_"]]:
    """The images that each rung adds, drawn by a search's key so that every rung has its share of each class."""
    if rungs == 1:
        return [np.arange(len(labels))]
    order = order_at(key_at(key, 0, _ROWS), len(labels))
    places = np.zeros(len(labels))
    for label in np.unique(labels):
        own = np.flatnonzero(labels[order] == label)
        places[own] = (np.arange(len(own)) + 0.5) / len(own)
    order = order[np.argsort(places, kind="stable")]
    return [np.sort(rows) for rows in np.split(order, rung_images(len(labels), rungs)[:-1])]


def generation_images(config: SearchConfig, num_images: int) -> int:
    """Forward passes of a whole generation: candidates times images, at most `population * num_images`."""
    added = np.diff(rung_images(num_images, config.rungs), prepend=0)
    return int(np.dot(config.rung_candidates, added))


def search(
    key: jax.Array,
    score: Score | Sequence[Score],
    flops: Score,
    exploit: Float[np.ndarray, "L C"],
    uniform: Float[np.ndarray, "L C"],
    num_images: int,
    config: SearchConfig,
    on_generation: Callable[[Searched], object] = lambda searched: None,
    begun: Searched | None = None,
    first: Int[np.ndarray, "W L"] | None = None,
) -> tuple[np.ndarray, Scored]:
    """The first in rank of all that was evaluated on all images, and everything that was, in order.

    `score` maps genomes to right answers out of `num_images`, `flops` to their cost. With several rungs there is a
    score for each, of the images that it adds (`rung_rows`). No architecture is scored twice; where the space holds no
    unseen ones the search stops. The first generation begins with `first`, as far as it has room. A search that goes on
    from where another stopped (`begun`) ends as one that never did.
    """
    scores, images = [score] if callable(score) else score, rung_images(num_images, config.rungs)
    if len(scores) != config.rungs:
        raise ValueError(f"{len(scores)} scores for {config.rungs} rungs; expected one for each")
    num, none = config.rung_candidates[0], np.zeros((0, len(uniform)), np.int32)
    begin, scored, dropped = begun or Searched(0, Scored(none, np.zeros(0), np.zeros(0)), none)
    seen: dict[tuple[int, ...], None] = {
        tuple(genome.tolist()): None for genome in (*scored.genomes, *dropped)
    }  # fmt: skip
    for generation in range(begin, config.generations):
        generation_key = key_at(key, generation)
        fresh: list[tuple[int, ...]] = []
        if generation == 0:
            _take(fresh, seen, none if first is None else first, num)
            _take_drawn(fresh, seen, generation_key, exploit, uniform, config)
        else:
            order = rank(scored, num_images, config.tolerance)[: config.num_parents]
            parents = scored.genomes[np.resize(order, config.num_parents)]
            half = num // 2
            _take(fresh, seen, _cross(generation_key, parents, config), half)
            mutated = _mutate(generation_key, parents, exploit, uniform, config)
            _take(fresh, seen, mutated, len(fresh) + num - half)
            _fill(fresh, seen, generation_key, exploit, uniform, config)
        if not fresh:
            break
        found, left_out = _halved(np.array(fresh, np.int32), scores, flops, images, config)
        scored = Scored(*(np.concatenate(pair) for pair in zip(scored, found, strict=True)))
        dropped = np.concatenate([dropped, left_out])
        on_generation(Searched(generation + 1, scored, dropped))
    return scored.genomes[best_of(scored, num_images, config.tolerance)], scored


def first_draws(
    key: jax.Array,
    exploit: Float[np.ndarray, "L C"],
    uniform: Float[np.ndarray, "L C"],
    num: int,
    config: SearchConfig,
) -> Int[np.ndarray, "P L"]:
    """`num` different architectures, drawn as a search draws its first generation; fewer where there are no more."""
    config = dataclasses.replace(config, population=num, rungs=1)
    fresh: list[tuple[int, ...]] = []
    _take_drawn(fresh, {}, key_at(key, 0), exploit, uniform, config)
    return np.array(fresh, np.int32)


def _halved(
    genomes: Int[np.ndarray, "P L"],
    scores: Sequence[Score],
    flops: Score,
    images: Sequence[int],
    config: SearchConfig,
) -> tuple[Scored, Int[np.ndarray, "Q L"]]:
    """A generation's candidates that met all images, and those that an earlier rung left out, in the order drawn."""
    scored = Scored(genomes, np.zeros(len(genomes)), np.asarray(flops(genomes), np.float64))
    dropped = genomes[:0]
    for rung, score in enumerate(scores):
        if rung:
            order = rank(scored, images[rung - 1], config.tolerance)
            kept = np.isin(np.arange(len(order)), order[: config.rung_candidates[rung]])
            dropped = np.concatenate([dropped, scored.genomes[~kept]])
            scored = Scored(*(values[kept] for values in scored))
        scored = scored._replace(correct=scored.correct + np.asarray(score(scored.genomes), np.float64))
    return scored, dropped


def prepare_search(exploit: Float[np.ndarray, "L C"], config: SearchConfig) -> None:
    """Compile what the search draws with, for this bucket of candidates, by drawing once."""
    key, parents = jax.random.key(0), np.zeros((config.num_parents, len(exploit)), np.int32)
    _draw(key, 0, exploit, exploit, config)
    _cross(key, parents, config)
    _mutate(key, parents, exploit, exploit, config)


@functools.partial(jax.jit, static_argnames="num")
def crossover(key: jax.Array, parents: Int[Array, "k L"], *, num: int) -> Int[Array, "num L"]:
    """Children whose every gene comes from either of two random parents."""
    parent_key, gene_key = jax.random.split(key)
    pair = jax.random.randint(parent_key, (2, num), 0, parents.shape[0])
    from_first = jax.random.bernoulli(gene_key, 0.5, (num, parents.shape[1]))
    return jnp.where(from_first, parents[pair[0]], parents[pair[1]])


@functools.partial(jax.jit, static_argnames="num")
def mutate(
    key: jax.Array,
    parents: Int[Array, "k L"],
    exploit: Float[Array, "L C"],
    uniform: Float[Array, "L C"],
    epsilon: float | Float[Array, ""],
    rate: float | Float[Array, ""],
    *,
    num: int,
) -> Int[Array, "num L"]:
    """Children of one random parent each; genes are redrawn with probability `rate`: uniform by `epsilon`, else HEE."""
    parent_key, gene_key, draw_key = jax.random.split(key, 3)
    chosen = parents[jax.random.randint(parent_key, (num,), 0, parents.shape[0])]
    redraw = jax.random.bernoulli(gene_key, rate, chosen.shape)
    mixture = jnp.log(epsilon * uniform + (1 - epsilon) * exploit)
    return jnp.where(redraw, jax.random.categorical(draw_key, mixture, shape=chosen.shape), chosen)


_ROWS = 4
"""Place of the rungs' images among the draws of the first generation."""


def _draw(key, place: int, exploit, uniform, config: SearchConfig) -> np.ndarray:
    num = TRIES * config.rung_candidates[0]
    return np.asarray(sample_mixed(key_at(key, place), exploit, uniform, config.epsilon, num=num))


def _cross(key, parents, config: SearchConfig) -> np.ndarray:
    return np.asarray(crossover(key_at(key, 1), parents, num=TRIES * max(config.rung_candidates[0] // 2, 1)))


def _mutate(key, parents, exploit, uniform, config: SearchConfig) -> np.ndarray:
    drawn = config.rung_candidates[0]
    rates = config.epsilon, config.mutation_rate
    return np.asarray(
        mutate(key_at(key, 2), parents, exploit, uniform, *rates, num=TRIES * (drawn - drawn // 2))
    )  # fmt: skip


def _take(fresh: list, seen: dict, candidates, total: int) -> None:
    """Append unseen candidates until `fresh` holds `total`."""
    for genome in candidates:
        if len(fresh) >= total:
            return
        genome = tuple(int(gene) for gene in genome)
        if genome not in seen:
            seen[genome] = None
            fresh.append(genome)


def _take_drawn(fresh: list, seen: dict, key, exploit, uniform, config: SearchConfig) -> None:
    """Append what the mixture of HEE and uniform draws."""
    _take(fresh, seen, _draw(key, 0, exploit, uniform, config), config.rung_candidates[0])
    _fill(fresh, seen, key, exploit, uniform, config)


def _fill(fresh: list, seen: dict, key, exploit, uniform, config: SearchConfig) -> None:
    """Append uniform draws, and the rest of a small space, where a population is not complete."""
    num = config.rung_candidates[0]
    if len(fresh) < num:
        _take(fresh, seen, _draw(key, 3, uniform, uniform, config), num)
    if len(fresh) < num:
        _take(fresh, seen, _unseen(exploit + uniform, seen), num)


def _unseen(table: Float[np.ndarray, "L C"], seen: dict):
    """The rest of a small space in order; nothing where random draws are as good as sure to find unseen ones."""
    candidates = [np.flatnonzero(row).tolist() for row in table]
    if len(seen) < np.prod([float(len(genes)) for genes in candidates]) <= 1e5:
        yield from itertools.product(*candidates)
