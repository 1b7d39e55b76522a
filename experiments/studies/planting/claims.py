"""What HEE-NAS should find, claim by claim: yes or no per run, and how often chance would say yes.

Every claim asks for a strict difference to what an unrelated task does, so networks that are all
alike meet none: what everybody draws on is no sign of kinship.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float
from scipy.stats import binomtest

from studies.planting import structure
from studies.planting.structure import (
    FAMILY,
    NEW,
    PLAN,
    RELATED,
    STRANGER,
    Costs,
    Counts,
    counts_of,
    place_of,
)

NUM_REDRAWN = 4000
"""Structures drawn by chance per run."""
KIN, TWIN, EASY, ALIEN = map(place_of, ("kin", "twin", "easy", "alien"))
UNRELATED = (place_of("unrelated"), ALIEN)
"""Tasks that are no easier than the kin, and that nothing links to shapes."""


SURPLUS = np.eye(5, dtype=int)[FAMILY] - np.eye(5, dtype=int)[[STRANGER, NEW]].sum(axis=0)
"""Weights of the sources: the family's blocks minus those with new and unrelated experts."""


class Verdict(NamedTuple):
    """One claim in one run."""

    value: float
    level: float
    """What the value would be without any preference."""
    found: bool
    random: float | None
    """How often networks drawn from all candidates would be a yes; None for claims about
    similarity."""
    exchanged: float
    """How often a yes would come out with the experts, networks or tasks that are compared
    exchanged at random."""

    @property
    def chance(self) -> float:
        """The larger of the two."""
        return max(self.random or 0.0, self.exchanged)

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            **self._asdict(),
            "value": None if np.isnan(self.value) else self.value,
            "chance": self.chance,
        }


class Measured(NamedTuple):
    """A claim about N structures."""

    value: Float[np.ndarray, "N"]
    level: Float[np.ndarray, "N"]
    found: Bool[np.ndarray, "N"]


class Claim(NamedTuple):
    """A statement about one task; a run says yes if `criterion` holds."""

    name: str
    task: int
    statement: str
    value: str
    criterion: str
    compared: int = 0
    """Tasks that could take each other's place; 0: experts or networks are exchanged instead."""

    @property
    def about_similarity(self) -> bool:
        """Whether it holds of what HEE is offered, and not of what the search then takes."""
        return self.name.split()[-1] in ("seen", "offered")


def _per_relation() -> tuple[Claim, ...]:
    found = []
    for place, role in ((KIN, "kin"), (TWIN, "twin")):
        found += [
            Claim(
                f"{role} seen",
                place,
                f"the relative is what the {role} is most similar to",
                "share of blocks at which it ranks first",
                "more than half, and more than for colours and noise",
            ),
            Claim(
                f"{role} offered",
                place,
                f"the first level of HEE prefers the relative of the {role}",
                "its psi over the mean of unrelated networks",
                "above 1, theirs, and its own for colours and noise",
            ),
            Claim(
                f"{role} drawn on",
                place,
                f"the {role} draws on its family's experts",
                "share of the blocks that have some",
                "more than half, and more than of letters and of noise",
            ),
            Claim(
                f"{role} rather",
                place,
                f"the {role} takes its family's experts rather than new or unrelated ones",
                "family's minus new and unrelated tasks', blocks",
                "above 0 and above that of letters and of noise",
            ),
            Claim(
                f"{role} cheap",
                place,
                f"the {role} adds few parameters",
                "parameters added over those of letters and noise",
                "fewer than either",
                3,
            ),
        ]
    return tuple(found)


CLAIMS = (
    *_per_relation(),
    Claim(
        "easy cheap",
        EASY,
        "the easy task's network is the cheapest",
        "FLOPs over the mean of the others",
        "fewer than any other task",
        len(PLAN),
    ),
    Claim(
        "alien alone",
        ALIEN,
        "the alien draws less on other tasks' experts than kin and twin",
        "blocks that do, over those by chance; level: kin and twin",
        "less than either",
        3,
    ),
    Claim(
        "alien adds",
        ALIEN,
        "the alien adds more parameters than kin and twin",
        "parameters added, % of backbone; level: kin and twin",
        "more than either",
        3,
    ),
)


def judge(results: Mapping[str, Any], costs: Costs) -> dict[str, Verdict | None]:
    """Every claim about one run; None where it had nothing to find, because no expert was there."""
    own = structure.structure_of(results, costs)
    rng = np.random.default_rng(results["seed"])
    by_chance = structure.expected(own)
    # S of every task to the earlier networks, the backbone's first; NaN where one skips the block
    similarity = [np.array(task, float) for task in results["similarity"]]
    measured, random, exchanged = (
        measure(counts_of(drawn), by_chance)
        for drawn in (
            own,
            structure.random_networks(own, rng, NUM_REDRAWN),
            structure.random_experts(own, rng, NUM_REDRAWN),
        )
    )
    verdicts: dict[str, Verdict | None] = {}
    for claim in CLAIMS:
        if claim.about_similarity:
            verdicts[claim.name] = _similar(similarity, claim.task, claim.name.split()[-1])
        elif claim.name not in measured:
            verdicts[claim.name] = None
        else:
            one = measured[claim.name]
            permuted = exchanged[claim.name].found
            verdicts[claim.name] = Verdict(
                float(one.value[0]),
                float(one.level[0]),
                bool(one.found[0]),
                frequency(random[claim.name].found),
                1 / claim.compared if claim.compared else frequency(permuted),
            )
    return verdicts


def frequency(found: Bool[np.ndarray, "N"]) -> float:
    """Share of yes with one added to both counts, so that it is never 0."""
    return float((found.sum() + 1) / (len(found) + 1))


def measure(counts: Counts, by_chance: Float[np.ndarray, "T 5"]) -> dict[str, Measured]:
    """The claims about structures; those that have nothing to find are left out."""
    found = {}
    added = counts.added
    flops = counts.flops
    ones = np.ones(len(added))
    share = counts.source[:, :, FAMILY] / np.maximum(counts.planted, 1)
    surplus = (counts.source @ SURPLUS).astype(float)
    for role, task in (("kin", KIN), ("twin", TWIN)):
        if counts.planted[task]:
            for name, values, least, level in (
                ("drawn on", share, 0.5, by_chance[task, FAMILY] / counts.planted[task]),
                ("rather", surplus, 0.0, by_chance[task] @ SURPLUS),
            ):
                own = values[:, task]
                others = values[:, UNRELATED].max(axis=1)
                found[f"{role} {name}"] = Measured(
                    own, level * ones, (own > least) & (own > others)
                )
        others = added[:, UNRELATED]
        mean = others.mean(axis=1)
        over = np.divide(added[:, task], mean, out=np.full(len(added), np.nan), where=mean > 0)
        found[f"{role} cheap"] = Measured(over, ones, added[:, task] < others.min(axis=1))
    others = np.delete(flops, EASY, axis=1)
    cheapest = flops[:, EASY] < others.min(axis=1)
    found["easy cheap"] = Measured(flops[:, EASY] / others.mean(axis=1), ones, cheapest)
    available = by_chance[:, FAMILY] + by_chance[:, STRANGER]
    if available[[KIN, TWIN, ALIEN]].all():
        drawn = (counts.source[:, :, FAMILY] + counts.source[:, :, STRANGER]) / np.maximum(
            available, 1e-12
        )
        found["alien alone"] = Measured(
            drawn[:, ALIEN],
            drawn[:, [KIN, TWIN]].mean(axis=1),
            drawn[:, ALIEN] < drawn[:, [KIN, TWIN]].min(axis=1),
        )
    related = added[:, [KIN, TWIN]]
    found["alien adds"] = Measured(
        added[:, ALIEN], related.mean(axis=1), added[:, ALIEN] > related.max(axis=1)
    )
    return found


def _similar(
    similarity: Sequence[Float[np.ndarray, "E L"]], task: int, kind: str
) -> Verdict | None:
    """`seen` or `offered`; exchanged: every unrelated network in the place of the relative."""

    def measured(task: int, network: int, networks: Sequence[int]) -> tuple[float, float]:
        rivals = [other for other in networks if other != network]
        if kind == "offered":
            return structure.first_level_lead(similarity[task], network, rivals), 1.0
        return structure.first_share(similarity[task], network, rivals)

    own, networks = relative_and_rivals(task)
    value, level = measured(task, own, networks)
    if np.isnan(value):
        return None
    values = {network: measured(task, network, networks)[0] for network in networks}
    least = {"seen": 0.5, "offered": 1.0}[kind]
    leads = [
        value > least and (kind == "seen" or value >= np.nanmax(list(values.values())))
        for value in values.values()
    ]
    elsewhere = [measured(other, own, relative_and_rivals(other)[1])[0] for other in (EASY, ALIEN)]
    yes = leads[0] and not any(value <= other for other in elsewhere)
    # where nobody leads, a yes is still as rare as one network among those compared
    return Verdict(value, level, bool(yes), None, float(np.mean(leads)) or 1 / len(networks))


def relative_and_rivals(task: int) -> tuple[int, list[int]]:
    """Rows of a task's similarity: that of shapes; and it with the networks outside the family."""
    relative = 1 + RELATED[0]
    return relative, [relative, 0, *(1 + other for other in range(task) if other not in RELATED)]


class Summary(NamedTuple):
    """One claim over the runs of one way of sampling."""

    claim: str
    sampling: str
    yes: int
    runs: int
    """Runs that had something to find."""
    interval: tuple[float, float] | None
    """95 % interval of the probability of a yes (Wilson)."""
    value: float | None
    std: float | None
    level: float | None
    chance: float | None
    """Mean chance of a yes, each run's the larger one."""
    p: float | None
    """Probability of so many yes or more by chance."""


def summarise(claim: str, sampling: str, verdicts: Sequence[Verdict | None]) -> Summary:
    """Counts, interval and chance."""
    scored = [verdict for verdict in verdicts if verdict is not None]
    yes = sum(verdict.found for verdict in scored)
    runs = len(scored)
    if not runs:
        return Summary(claim, sampling, 0, 0, *[None] * 6)
    interval = binomtest(yes, runs).proportion_ci(0.95, method="wilson")
    values = np.array([verdict.value for verdict in scored])
    known = values[~np.isnan(values)]
    chances = [verdict.chance for verdict in scored]
    return Summary(
        claim,
        sampling,
        yes,
        runs,
        (float(interval.low), float(interval.high)),
        float(known.mean()) if known.size else None,
        float(known.std(ddof=1)) if known.size > 1 else None,
        float(np.mean([verdict.level for verdict in scored])),
        float(np.mean(chances)),
        float(yes_distribution(chances)[yes:].sum()),
    )


def yes_distribution(chances: Sequence[float]) -> Float[np.ndarray, "n"]:
    """Probabilities of 0, 1, 2, ... yes among independent ones with these chances."""
    distribution = np.ones(1)
    for chance in chances:
        distribution = np.convolve(distribution, [1 - chance, chance])
    return distribution


def holm(p: Mapping[str, float], level: float = 0.05) -> list[str]:
    """Names whose p stays below the level when corrected for their number (Holm's step-down
    procedure)."""
    found = []
    for rank, (name, value) in enumerate(sorted(p.items(), key=lambda item: item[1])):
        if value * (len(p) - rank) >= level:
            break
        found.append(name)
    return found
