"""Settings of CHEEM that no longer exist: without an effect they are dropped, with one they need the code of then."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

REMOVED: Mapping[str, Any] = {
    "trained_draws": 0,
    "search.cost": "network",
    "search.rungs": 1,
    "search.warm_start": False,
}
"""Each with the value that had no effect."""
REMOVED_OPTIONS = (
    "--cheem.search.cost network", "--cheem.search.rungs 1", "--cheem.search.no-warm-start", "--cheem.trained-draws 0",
)  # fmt: skip
"""The same in recorded commands."""
LAST_COMMIT = "f98d135"
"""The last commit that has these settings."""


def without_removed(settings: Mapping[str, Any], where: Path | None = None, *, part: str = "") -> dict[str, Any]:
    """A method's settings, or a whole `config.json`, without removed settings that had no effect.

    One that had an effect stays; with `where`, the file of these settings, it raises ValueError. `part` is the name of
    the settings inside others.
    """
    kept = {}
    for name, value in settings.items():
        full = f"search.{name}" if part == "search" else name
        if full in REMOVED:
            if value == REMOVED[full]:
                continue
            if where is not None:
                raise ValueError(
                    f"{where} has the setting {full} {value!r}, which no longer exists; use cheem_jax of commit "
                    f"{LAST_COMMIT} for it, or begin again without this setting"
                )
        kept[name] = without_removed(value, where, part=name) if isinstance(value, Mapping) else value
    return kept


def without_removed_options(command: Sequence[str]) -> list[str]:
    """A recorded command without removed options that had no effect."""
    words = list(command)
    for option in REMOVED_OPTIONS:
        parts = option.split()
        for at in range(len(words)):
            if words[at : at + len(parts)] == parts:
                del words[at : at + len(parts)]
                break
    return words
