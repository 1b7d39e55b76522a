"""Counts of faults, printed after the tests and written as JSON to the file CHEEM_FAULTS_JSON."""

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
    "corrupted files": "accepted by mistake",
    "fuzzed inputs": "crashed with a traceback",
}
"""Meaning of a bad result per kind of fault; other kinds went wrong."""


class Tally:
    """Numbers of faults of each kind that were tried and that went wrong, per phase of a run."""

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
        """Count `tried` faults: `bad` of them went wrong, or all except `ok`."""
        assert (ok is None) != (bad is None)
        wrong = bad if bad is not None else tried - (ok or 0)
        assert 0 <= wrong <= tried
        self.tried.setdefault(kind, Counter())[phase or ""] += tried
        self.bad.setdefault(kind, Counter())[phase or ""] += wrong

    def to_json(self) -> dict[str, Any]:
        """Return the counts per kind, and per phase if phases are known."""
        result = {}
        for kind, tried in self.tried.items():
            bad = self.bad[kind]
            phases = {
                phase: {"tried": num, "bad": bad[phase]}
                for phase, num in sorted(tried.items())
                if phase
            }
            result[kind] = {
                "tried": tried.total(),
                "bad": bad.total(),
                **({"phases": phases} if phases else {}),
            }
        return result


_TALLY = Tally()


@pytest.fixture(scope="session")
def tally() -> Tally:
    """`tally.add("kills", tried=1, ok=1, phase="search")` or `tally.add("fuzzed inputs", tried=100,
    bad=0)`."""
    return _TALLY


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path | str:
    """The built library of shim.c, or the reason why it cannot be built."""
    return build(tmp_path_factory.mktemp("shim"))


@pytest.fixture(scope="session")
def nursery(library: Path | str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    """The process that starts children, with the library preloaded if it was built."""
    if not sys.platform.startswith("linux"):
        pytest.skip("children are forked on Linux alone")
    with Nursery(
        tmp_path_factory.mktemp("nursery"), library if isinstance(library, Path) else None
    ) as result:
        yield result


@pytest.fixture(scope="session")
def faulty(library: Path | str, nursery: Nursery) -> Nursery:
    """The nursery, for tests that need the library."""
    if isinstance(library, str):
        reason = f"no faults can be made: {library}"
        pytest.fail(reason) if os.environ.get("CI") == "true" else pytest.skip(reason)
    return nursery


@dataclasses.dataclass(frozen=True)
class Undisturbed:
    """A small run without faults."""

    directory: Path
    weights: str
    outcome: dict[str, Any]
    operations: int
    """Number of file operations below its directory; 0 if they cannot be counted."""
    phases: list[str]
    """Phases in order, as `Phases` writes them."""


@pytest.fixture(scope="session")
def undisturbed(
    nursery: Nursery, library: Path | str, tmp_path_factory: pytest.TempPathFactory
) -> Undisturbed:
    """The reference of all other small runs."""
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
        result = counts[kind]
        meaning = BAD.get(kind, "went wrong")
        terminalreporter.write_line(
            f"{kind:<28}{result['tried']:>8,}{result['bad']:>8,}  {meaning}"
        )
        for phase, part in result.get("phases", {}).items():
            terminalreporter.write_line(f"  {phase:<26}{part['tried']:>8,}{part['bad']:>8,}")


def pytest_sessionfinish() -> None:
    """Write the table as JSON."""
    if (file := os.environ.get("CHEEM_FAULTS_JSON")) and _TALLY.tried:
        Path(file).write_text(json.dumps(_TALLY.to_json(), indent=1) + "\n")
