"""Counts the functions that XLA compiles."""

import contextlib
from collections.abc import Iterator

import jax


class Compilations:
    """Number of functions that the XLA backend has compiled in the block; final when the block
    ends."""

    def __init__(self) -> None:
        self.count = 0


_counting: list[Compilations] = []


def _on_duration(event: str, duration_secs: float, **_: str | int) -> None:
    if event == "/jax/core/compile/backend_compile_duration":
        for compilations in _counting:
            compilations.count += 1


jax.monitoring.register_event_duration_secs_listener(_on_duration)


@contextlib.contextmanager
def count_compilations() -> Iterator[Compilations]:
    """`with count_compilations() as programs: ...`, then `programs.count`; blocks can be nested."""
    compilations = Compilations()
    _counting.append(compilations)
    try:
        yield compilations
    finally:
        _counting.remove(compilations)
