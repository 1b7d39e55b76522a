"""Settings of runs that were begun before some of them existed."""

from collections.abc import Mapping
from typing import Any

EARLIER: Mapping[str, Mapping[str, Any]] = {
    "router": {"kind": "kmeans", "features": "last", "shrinkage": 0.01, "projections": 1000, "penalty": 0.01},
    "search": {"cost": "network", "rungs": 1, "warm_start": False},
}
"""What parts of a method's settings had in effect before these existed."""
EARLIER_BESIDE: Mapping[str, Mapping[str, Any]] = {"search": {"trained_draws": 0}}
"""The same of what stands beside such a part."""


def completed(config: Mapping[str, Any]) -> dict[str, Any]:
    """A run's `config.json` as a run of now would write it."""
    return {name: _of_method(own) if isinstance(own, Mapping) else own for name, own in config.items()}


def _of_method(own: Mapping[str, Any]) -> dict[str, Any]:
    beside = {name: value for part, new in EARLIER_BESIDE.items() if part in own for name, value in new.items()}
    parts = {part: {**new, **own[part]} for part, new in EARLIER.items() if isinstance(own.get(part), Mapping)}
    return {**beside, **own, **parts}
