"""Checks of a method's settings; each raises ValueError with the setting's name, its value and what was expected."""

from typing import Any


def expect(settings: Any, name: str, holds: bool, expected: str) -> None:
    """The setting `name` has to hold."""
    if not holds:
        raise ValueError(f"{name} is {getattr(settings, name)}; expected {expected}")


def at_least_one(settings: Any, *names: str) -> None:
    """Each of these settings has to be 1 or more."""
    for name in names:
        expect(settings, name, getattr(settings, name) >= 1, "at least 1")


def positive(settings: Any, *names: str) -> None:
    """Each of these settings has to be above 0."""
    for name in names:
        expect(settings, name, getattr(settings, name) > 0, "a positive number")


def shares(settings: Any, *names: str) -> None:
    """Each of these settings has to be at least 0 and below 1."""
    for name in names:
        expect(settings, name, 0 <= getattr(settings, name) < 1, "a share in [0, 1)")


def halved(settings: Any, *names: str) -> None:
    """Each of these lengths has to have one half for keys and one for values."""
    for name in names:
        length = getattr(settings, name)
        expect(settings, name, length >= 2 and length % 2 == 0, "an even number, half keys and half values")
