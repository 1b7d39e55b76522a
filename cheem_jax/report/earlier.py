"""Settings of runs that were begun before some of them existed."""

from collections.abc import Mapping
from typing import Any

EARLIER: Mapping[str, Mapping[str, Any]] = {
    "router": {"kind": "kmeans", "features": "last", "shrinkage": 0.01, "projections": 1000, "penalty": 0.01},
    "search": {"cost": "network", "rungs": 1, "warm_start": False},
}
"""What parts of a method's settings had in effect before these existed."""
EARLIER_WITH_SEARCH: Mapping[str, Any] = {"trained_draws": 0}
"""The same of methods that search."""

MEANS, MEASURED = "base_means_sha256", "base_data_sha256"
"""Mean class tokens that came with the weights, and the pictures that they were measured on instead. Before the second
existed, runs had a hash of measured tokens too, whose last bits are of the machine."""


def completed(config: Mapping[str, Any]) -> dict[str, Any]:
    """A run's `config.json` as a run of now would write it."""
    told = {name: _of_method(own) if isinstance(own, Mapping) else own for name, own in config.items()}
    return {MEASURED: None, **told} if MEANS in told else told


def side_by_side(one: Mapping[str, Any], other: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Two completed configs to compare; where one does not name the pictures, only whether both had mean tokens."""
    pair = completed(one), completed(other)
    return pair if MEASURED in one and MEASURED in other else (_known_alone(pair[0]), _known_alone(pair[1]))


def _known_alone(config: Mapping[str, Any]) -> dict[str, Any]:
    kept = {name: value for name, value in config.items() if name not in (MEANS, MEASURED)}
    return {**kept, "base_means": "known" if config.get(MEANS) or config.get(MEASURED) else "neutral"}


def _of_method(own: Mapping[str, Any]) -> dict[str, Any]:
    new_here = EARLIER_WITH_SEARCH if isinstance(own.get("search"), Mapping) else {}
    parts = {part: {**new, **own[part]} for part, new in EARLIER.items() if isinstance(own.get(part), Mapping)}
    return {**new_here, **own, **parts}
