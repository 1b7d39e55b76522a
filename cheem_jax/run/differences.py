"""Where two JSON values differ, and one way to say it: of settings, conditions, records and results
alike."""

import enum
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

Place = tuple[str | int, ...]
"""Keys and list positions that lead to a value."""
LONGEST, PART = 40, 25
"""Characters of a value that are shown whole, and of a longer one where it differs."""


class Missing(enum.Enum):
    """What one side does not have."""

    VALUE = "missing"


class Leaf(NamedTuple):
    """One difference, as small as it gets; as text a sentence about the first side (there) and the
    second (here)."""

    place: Place
    first: Any
    second: Any

    def __str__(self) -> str:
        one, other = _shown(self.first, self.second)
        return f"{dotted(self.place)} is {one} there and {other} here"


def leaves(first: Any, second: Any, place: Place = ()) -> Iterator[Leaf]:
    """Every difference between two JSON values, in the order of the first; tuples count as
    lists."""
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        keys = dict.fromkeys((*first, *second))
        sides = (first, second)
    elif isinstance(first, list | tuple) and isinstance(second, list | tuple):
        keys = range(max(len(first), len(second)))
        sides = (dict(enumerate(first)), dict(enumerate(second)))
    else:
        if first != second:
            yield Leaf(place, first, second)
        return
    for key in keys:
        yield from leaves(
            sides[0].get(key, Missing.VALUE), sides[1].get(key, Missing.VALUE), (*place, key)
        )


def settings_apart(
    there: Mapping[str, Any], here: Mapping[str, Any], defaults: Mapping[str, Any] | None = None
) -> list[Leaf]:
    """The settings in which two runs differ, in the order of the first.

    A setting that only the second has makes no difference where it has the value in `defaults`,
    since without a setting runs did what its default does.
    """

    def default_of(place: Place) -> Any:
        value: Any = defaults
        for key in place:
            value = value.get(key, Missing.VALUE) if isinstance(value, Mapping) else Missing.VALUE
        return value

    found = leaves(there, here)
    return [
        leaf
        for leaf in found
        if leaf.first is not Missing.VALUE or leaf.second != default_of(leaf.place)
    ]


def summary(found: Sequence[Leaf], what: str) -> str:
    """The first difference and how many more there are; `what` is their noun in the plural."""
    return f"{found[0]}" + (f" ({len(found) - 1} more {what} differ)" if len(found) > 1 else "")


def dotted(place: Place) -> str:
    """`cheem.search.epsilon`, `accuracy[1][0]`."""
    return "".join(
        f"[{part}]" if isinstance(part, int) else f".{part}" for part in place
    ).removeprefix(".")


def _shown(first: Any, second: Any) -> tuple[str, str]:
    """Both values with as many digits, or as much of the text, as tells them apart."""
    if isinstance(first, float) and isinstance(second, float):
        for digits in range(5, 18):
            pair = f"{first:.{digits}g}", f"{second:.{digits}g}"
            if pair[0] != pair[1]:
                return pair
    one, other = map(_text, (first, second))
    begin = 0
    if Missing.VALUE not in (first, second) and max(len(one), len(other)) > LONGEST:
        same = next(
            (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b),
            min(len(one), len(other)),
        )
        begin = max(same - 12, 0) if same > 20 else 0
    return _cut(one, begin), _cut(other, begin)


def _text(value: Any) -> str:
    if isinstance(value, Missing):
        return value.value
    return (
        "given" if isinstance(value, Mapping) else json.dumps(value)
    )  # settings of which the other side has none


def _cut(text: str, begin: int) -> str:
    end = begin + (LONGEST if begin == 0 and len(text) <= LONGEST else PART)
    return ("…" if begin else "") + text[begin:end] + ("…" if end < len(text) else "")
