"""What the fault tests count, shown after the run and kept as JSON where CHEEM_FAULTS_JSON names a
file."""

import dataclasses
import json
import os
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from nursery import Nursery
from shim import build

BAD = {
    "kills": "not resumed exactly",
    "graceful stops": "not resumed exactly",
    "storage faults": "lost or silently wrong",
    "damaged files": "accepted by mistake",
    "fuzzed inputs": "crashed with a traceback",
}
"""What it means that one of a kind went wrong; other kinds simply went wrong."""


class Tally:
    """How many faults of each kind were tried and how many went wrong, in all and per phase of a
    run."""

    def __init__(self) -> None:
        self.tried: dict[str, Counter[str]] = {}
        self.bad: dict[str, Counter[str]] = {}

    def add(
        self,
        kind: str,
        *,
        tried: int = 1,
        ok: int | None = None,
        bad: int | None = None,
        phase: str | None = None,
    ) -> None:
        """Count `tried` faults, of which `bad` went wrong or `ok` did not; give one of the two."""
        if (ok is None) == (bad is None):
            raise ValueError("give either how many went well (ok) or how many went wrong (bad)")
        wrong = bad if bad is not None else tried - (ok or 0)
        if not 0 <= wrong <= tried:
            raise ValueError(f"{wrong} of {tried} cannot have gone wrong")
        self.tried.setdefault(kind, Counter())[phase or ""] += tried
        self.bad.setdefault(kind, Counter())[phase or ""] += wrong

    def to_json(self) -> dict[str, Any]:
        """Per kind the counts and, where they are known, the same per phase."""
        found = {}
        for kind, tried in self.tried.items():
            bad = self.bad[kind]
            phases = {
                phase: {"tried": num, "bad": bad[phase]}
                for phase, num in sorted(tried.items())
                if phase
            }
            found[kind] = {
                "tried": tried.total(),
                "bad": bad.total(),
                **({"phases": phases} if phases else {}),
            }
        return found


_TALLY = Tally()


@pytest.fixture(scope="session")
def tally() -> Tally:
    """`tally.add("kills", tried=1, ok=1, phase="search")` or `tally.add("fuzzed inputs", tried=100,
    bad=0)`."""
    return _TALLY


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path | str:
    """The built library of shim.c, or why there is none."""
    return build(tmp_path_factory.mktemp("shim"))


@pytest.fixture(scope="session")
def nursery(library: Path | str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    """Where children are started, with the library in them if there is one."""
    if not sys.platform.startswith("linux"):
        pytest.skip("children are forked on Linux alone")
    with Nursery(
        tmp_path_factory.mktemp("nursery"), library if isinstance(library, Path) else None
    ) as found:
        yield found


@pytest.fixture(scope="session")
def faulty(library: Path | str, nursery: Nursery) -> Nursery:
    """The same for tests that cannot do without the library."""
    if isinstance(library, str):
        pytest.skip(f"no faults can be made: {library}")
    return nursery


@dataclasses.dataclass(frozen=True)
class Undisturbed:
    """A small run that nothing happened to, and what it takes to repeat it."""

    directory: Path
    weights: str
    outcome: dict[str, Any]
    operations: int
    """File operations below its directory; 0 where they cannot be counted."""
    phases: list[str]
    """What ran, in order, as `Told` tells it."""


@pytest.fixture(scope="session")
def undisturbed(
    nursery: Nursery, library: Path | str, tmp_path_factory: pytest.TempPathFactory
) -> Undisturbed:
    """What all other small runs are compared with."""
    from jobs import outcome

    folder = tmp_path_factory.mktemp("undisturbed")
    directory = folder / "run"
    phases = folder / "phases"
    weights = str(nursery.folder / "weights.npz")
    counted = {} if isinstance(library, str) else {"fault": {}}
    operations = nursery.call(
        "small_run",
        directory=str(directory),
        weights=weights,
        phases=str(phases),
        save_every=0.0,
        **counted,
    )
    return Undisturbed(
        directory, weights, outcome(directory), operations, phases.read_text().splitlines()
    )


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """The table of all faults tried."""
    counts = _TALLY.to_json()
    if not counts:
        return
    terminalreporter.write_sep("=", "faults")
    terminalreporter.write_line(f"{'':<28}{'tried':>8}{'bad':>8}")
    for kind in sorted(counts, key=[*BAD, *counts].index):
        found = counts[kind]
        meaning = BAD.get(kind, "went wrong")
        terminalreporter.write_line(f"{kind:<28}{found['tried']:>8,}{found['bad']:>8,}  {meaning}")
        for phase, part in found.get("phases", {}).items():
            terminalreporter.write_line(f"  {phase:<26}{part['tried']:>8,}{part['bad']:>8,}")


def pytest_sessionfinish() -> None:
    """The same for a program to read."""
    if (file := os.environ.get("CHEEM_FAULTS_JSON")) and _TALLY.tried:
        Path(file).write_text(json.dumps(_TALLY.to_json(), indent=1) + "\n")
