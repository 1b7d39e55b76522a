"""Claims about the networks of a planted stream: whether each run meets them, and how often random
networks do.

Every claim requires a strict difference from an unrelated task, so identical networks meet none.
docs/experiments.md states the claims.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float

from studies.planting import structure
from studies.planting.structure import (
    FAMILY,
    NEW,
    RELATED,
    STRANGER,
    Costs,
    Counts,
    count,
    index_of,
)

SAMPLES = 4000
"""Number of random networks per run."""
KIN, TWIN, EASY, ALIEN = map(index_of, ("kin", "twin", "easy", "alien"))
UNRELATED = (index_of("unrelated"), ALIEN)
"""Tasks that are not easier than `kin` and unrelated to shapes."""
SURPLUS = np.eye(5, dtype=int)[FAMILY] - np.eye(5, dtype=int)[[STRANGER, NEW]].sum(axis=0)
"""Weights of the sources: number of blocks with experts of the family minus number of blocks with
new and unrelated experts."""
CLAIMS = (
    *(
        f"{role} {claim}"
        for role in ("kin", "twin")
        for claim in ("seen", "offered", "drawn on", "rather", "cheap")
    ),
    "easy cheap",
    "alien alone",
    "alien adds",
)


class Verdict(NamedTuple):
    """One claim in one run."""

    value: float
    level: float
    """Value without any preference."""
    met: bool
    chance: float | None = None
    """Share of random networks that meet the claim; None for claims about similarity."""


class Measured(NamedTuple):
    """One claim about N structures."""

    value: Float[np.ndarray, "N"]
    level: Float[np.ndarray, "N"]
    met: Bool[np.ndarray, "N"]


def judge(results: Mapping[str, Any], costs: Costs) -> dict[str, Verdict | None]:
    """Evaluate every claim for one run. A verdict is None if the family has no expert, or if the
    run recorded no similarity."""
    networks = structure.structure_of(results, costs)
    rng = np.random.default_rng(results["seed"])
    by_chance = structure.expected(networks)
    measured = measure(count(networks), by_chance)
    sampled = measure(count(structure.random_networks(networks, rng, SAMPLES)), by_chance)
    # S of every task to the earlier networks, with the backbone's network first; NaN if a network
    # skips the block
    similarity = [np.array(task, float) for task in results["similarity"]]
    verdicts: dict[str, Verdict | None] = dict.fromkeys(CLAIMS)
    for name, one in measured.items():
        # one is added to both counts, so that the chance is never 0
        chance = float((sampled[name].met.sum() + 1) / (SAMPLES + 1))
        verdicts[name] = Verdict(float(one.value[0]), float(one.level[0]), bool(one.met[0]), chance)
    for role, task in (("kin", KIN), ("twin", TWIN)):
        verdicts[f"{role} seen"] = _judge_similarity(similarity, task, structure.first_share, 0.5)
        verdicts[f"{role} offered"] = _judge_similarity(
            similarity, task, structure.first_level_lead, 1.0
        )
    return verdicts


def measure(counts: Counts, by_chance: Float[np.ndarray, "T 5"]) -> dict[str, Measured]:
    """Evaluate the claims about structures, without the claims for which the family has no
    expert."""
    claims = {}
    added = counts.added
    ones = np.ones(len(added))
    share = counts.source[:, :, FAMILY] / np.maximum(counts.planted, 1)
    surplus = (counts.source @ SURPLUS).astype(float)
    for role, task in (("kin", KIN), ("twin", TWIN)):
        if counts.planted[task]:
            family = by_chance[task, FAMILY] / counts.planted[task]
            for name, values, least, level in (
                ("drawn on", share, 0.5, family),
                ("rather", surplus, 0.0, by_chance[task] @ SURPLUS),
            ):
                value = values[:, task]
                met = (value > least) & (value > values[:, UNRELATED].max(axis=1))
                claims[f"{role} {name}"] = Measured(value, level * ones, met)
        others = added[:, UNRELATED]
        mean = others.mean(axis=1)
        over = np.divide(added[:, task], mean, out=np.full(len(added), np.nan), where=mean > 0)
        claims[f"{role} cheap"] = Measured(over, ones, added[:, task] < others.min(axis=1))
    easy = counts.flops[:, EASY]
    others = np.delete(counts.flops, EASY, axis=1)
    claims["easy cheap"] = Measured(easy / others.mean(axis=1), ones, easy < others.min(axis=1))
    pair = [KIN, TWIN]
    available = by_chance[:, FAMILY] + by_chance[:, STRANGER]
    if available[[*pair, ALIEN]].all():
        reused = counts.source[:, :, FAMILY] + counts.source[:, :, STRANGER]
        reused = reused / np.maximum(available, 1e-12)
        alien, related = reused[:, ALIEN], reused[:, pair]
        claims["alien alone"] = Measured(alien, related.mean(axis=1), alien < related.min(axis=1))
    alien, related = added[:, ALIEN], added[:, pair]
    claims["alien adds"] = Measured(alien, related.mean(axis=1), alien > related.max(axis=1))
    return claims


def _judge_similarity(
    similarity: Sequence[Float[np.ndarray, "E L"]],
    task: int,
    measured: structure.Preference,
    least: float,
) -> Verdict | None:
    """Evaluate whether a task prefers the network of shapes to the networks outside of the family,
    and does so more than the `easy` and the `alien` task."""
    relative = 1 + RELATED[0]

    def preference(task: int) -> tuple[float, float]:
        others = [0, *(1 + other for other in range(task) if other not in RELATED)]
        return measured(similarity[task], relative, others)

    value, level = preference(task)
    if np.isnan(value):
        return None
    elsewhere = max(preference(other)[0] for other in (EASY, ALIEN))
    return Verdict(value, level, bool(value > least and not value <= elsewhere))


class Summary(NamedTuple):
    """One claim over the runs with one way of sampling."""

    claim: str
    sampling: str
    met: int
    runs: int
    """Number of runs in which the claim can be evaluated."""
    value: list[float]
    level: float | None = None
    chance: float | None = None
    p: float | None = None
    """Probability that at least as many runs meet the claim by chance, not corrected for the number
    of claims."""


def summarise(claim: str, sampling: str, verdicts: Sequence[Verdict | None]) -> Summary:
    """Summarise the verdicts of all runs for one claim and way of sampling."""
    judged = [verdict for verdict in verdicts if verdict is not None]
    met = sum(verdict.met for verdict in judged)
    values = [verdict.value for verdict in judged if not np.isnan(verdict.value)]
    summary = Summary(claim, sampling, met, len(judged), values)
    if not judged:
        return summary
    summary = summary._replace(level=float(np.mean([verdict.level for verdict in judged])))
    chances = [verdict.chance for verdict in judged if verdict.chance is not None]
    if not chances:
        return summary
    p = float(distribution(chances)[met:].sum())
    return summary._replace(chance=float(np.mean(chances)), p=p)


def distribution(chances: Sequence[float]) -> Float[np.ndarray, "n"]:
    """Return the probabilities of 0, 1, 2, ... successes of independent events with these
    chances."""
    probabilities = np.ones(1)
    for chance in chances:
        probabilities = np.convolve(probabilities, [1 - chance, chance])
    return probabilities
