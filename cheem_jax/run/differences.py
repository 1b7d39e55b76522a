"""Find differences between two JSON values, such as settings or records, and describe them in
words."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

LONGEST, PART = 40, 25
"""Values of up to LONGEST characters are displayed in full; longer values are shortened to PART
characters."""
HERE = ("there", "here")
"""Words for a recorded and a new value."""
NAMED = ("in the first", "in the second")
"""Words for the values of two directories that a message has named."""
MISSING = object()
"""Value of a key that is missing in one of two compared mappings."""


class Leaf(NamedTuple):
    """A difference between two values. As text, it is a sentence that says `there` for the first
    value and `here` for the second value, or other words with `between`."""

    place: tuple[str | int, ...]
    """Path from the root to the value: mapping keys and list indices."""
    first: Any
    second: Any

    def __str__(self) -> str:
        return self.between(HERE)

    def between(self, sides: tuple[str, str]) -> str:
        """Describe the difference; `sides` are the words for the places of the two values."""
        first, second = _displayed(self.first, self.second)
        return f"{dotted(self.place)} is {first} {sides[0]} and {second} {sides[1]}"


def find_differences(first: Any, second: Any, place: tuple[str | int, ...] = ()) -> list[Leaf]:
    """List all differences between two JSON values, in the order of `first`; tuples are compared
    like lists."""
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        sides = first, second
    elif isinstance(first, list | tuple) and isinstance(second, list | tuple):
        sides = dict(enumerate(first)), dict(enumerate(second))
    else:
        return [] if first == second else [Leaf(place, first, second)]
    one, other = sides
    return [
        leaf
        for key in dict.fromkeys((*one, *other))
        for leaf in find_differences(one.get(key, MISSING), other.get(key, MISSING), (*place, key))
    ]


def summary(differences: Sequence[Leaf], what: str, sides: tuple[str, str] = HERE) -> str:
    """Describe the first difference and count the others; `what` is a plural noun for the differing
    values, such as `settings`, and `sides` are the words for the places of the two values."""
    more = len(differences) - 1
    return differences[0].between(sides) + (f" ({more} more {what} differ)" if more else "")


def dotted(place: Sequence[str | int]) -> str:
    """Format the path of a value, such as `cheem.search.epsilon` or `accuracy[1][0]`."""
    return "".join(
        f"[{part}]" if isinstance(part, int) else f".{part}" for part in place
    ).removeprefix(".")


def _displayed(first: Any, second: Any) -> tuple[str, str]:
    """Format both values: floats with enough digits to tell them apart, and long texts as the part
    that differs."""
    if isinstance(first, float) and isinstance(second, float):
        digits = next(
            (n for n in range(5, 17) if f"{first:.{n}g}" != f"{second:.{n}g}"),
            17,
        )
        return f"{first:.{digits}g}", f"{second:.{digits}g}"
    texts = _text(first), _text(second)
    begin = 0
    if MISSING not in (first, second) and max(map(len, texts)) > LONGEST:
        pairs = enumerate(zip(*texts, strict=False))
        same = next((i for i, (a, b) in pairs if a != b), min(map(len, texts)))
        begin = same - 12 if same > 20 else 0
    return _cut(texts[0], begin), _cut(texts[1], begin)


def _text(value: Any) -> str:
    if value is MISSING:
        return "missing"
    # the compared value is not a mapping, so the entries of `value` need not be displayed
    return "given" if isinstance(value, Mapping) else json.dumps(value)


def _cut(text: str, begin: int) -> str:
    end = begin + (LONGEST if begin == 0 and len(text) <= LONGEST else PART)
    return ("…" if begin else "") + text[begin:end] + ("…" if end < len(text) else "")
