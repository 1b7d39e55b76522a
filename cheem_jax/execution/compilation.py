"""Counts what the compiler did: every backend compilation of this process, the tiny ones too."""

from typing import NamedTuple

import jax

_EVENT = "/jax/core/compile/backend_compile_duration"


class Compilations(NamedTuple):
    """Programs compiled and the seconds that took."""

    programs: int
    seconds: float

    def since(self, earlier: "Compilations") -> "Compilations":
        """What came after an earlier count."""
        return Compilations(self.programs - earlier.programs, self.seconds - earlier.seconds)


_total = Compilations(0, 0.0)


def compilations() -> Compilations:
    """The count since this module was imported."""
    return _total


def _listen(event: str, duration_secs: float, **_: object) -> None:
    global _total
    if event == _EVENT:
        _total = Compilations(_total.programs + 1, _total.seconds + duration_secs)


jax.monitoring.register_event_duration_secs_listener(_listen)
