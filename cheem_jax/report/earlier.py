"""Settings of runs that were begun before some of them existed, or while others did that are gone."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

EARLIER: Mapping[str, Mapping[str, Any]] = {
    "router": {"kind": "kmeans", "features": "last", "shrinkage": 0.01, "projections": 1000, "penalty": 0.01},
}
"""What parts of a method's settings had in effect before these existed."""
REMOVED: Mapping[str, Any] = {"trained_draws": 0}
"""Settings of CHEEM that are gone, each with the value that had no effect."""
REMOVED_FROM_SEARCH: Mapping[str, Any] = {"cost": "network", "rungs": 1, "warm_start": False}
"""The same of its search."""
REMOVED_OPTIONS = (
    ("--cheem.search.cost", "network"), ("--cheem.search.rungs", "1"), ("--cheem.search.no-warm-start",),
    ("--cheem.trained-draws", "0"),
)  # fmt: skip
"""How recorded commands have them."""
LAST_WITH_REMOVED = "f98d135"
"""The last commit that has these settings."""

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


def without_removed(own: Mapping[str, Any]) -> dict[str, Any]:
    """A method's settings without those that are gone, where these had no effect."""
    kept = _without(own, REMOVED)
    if isinstance(own.get("search"), Mapping):
        kept["search"] = _without(own["search"], REMOVED_FROM_SEARCH)
    return kept


def removed_in(own: Mapping[str, Any]) -> list[str]:
    """Name and value of each of a method's settings that is gone and had an effect."""
    kept, search = without_removed(own), {}
    if isinstance(own.get("search"), Mapping):
        search = kept["search"]
    found = [f"{name} {kept[name]!r}" for name in REMOVED if name in kept]
    return found + [f"search.{name} {search[name]!r}" for name in REMOVED_FROM_SEARCH if name in search]


def check_removed(own: Mapping[str, Any], where: Path) -> None:
    """Raises ValueError where a method's settings hold some that are gone and had an effect."""
    if found := removed_in(own):
        raise ValueError(
            f"{where} has settings that no longer exist: {', '.join(found)}; "
            f"use cheem_jax of commit {LAST_WITH_REMOVED} for it, or begin again without them"
        )


def check_run(config: Mapping[str, Any], where: Path) -> None:
    """`check_removed` of every method of a run's `config.json`."""
    for own in config.values():
        if isinstance(own, Mapping):
            check_removed(own, where)


def without_removed_options(command: Sequence[str]) -> list[str]:
    """A recorded command without the options that are gone, where these had no effect."""
    words = list(command)
    for option in REMOVED_OPTIONS:
        for at in range(len(words)):
            if tuple(words[at : at + len(option)]) == option:
                del words[at : at + len(option)]
                break
    return words


def _without(settings: Mapping[str, Any], removed: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if name not in removed or value != removed[name]}


def _of_method(own: Mapping[str, Any]) -> dict[str, Any]:
    own = without_removed(own)
    parts = {part: {**new, **own[part]} for part, new in EARLIER.items() if isinstance(own.get(part), Mapping)}
    return {**own, **parts}
