"""A run that is killed at any moment and started again ends exactly as an undisturbed one."""

import random
import signal
import time
from pathlib import Path

import pytest
from jobs import METHODS, contents, outcome
from nursery import Child

AT_FILES = [
    {"kill": "before", "name": "rename", "part": "checkpoints/cheem/000-"},
    {"kill": "after", "name": "rename", "part": "checkpoints/cheem/000-"},
    {"kill": "within", "name": "writev", "part": "checkpoints/frozen_linear/"},
    {"kill": "after", "name": "rename", "part": "checkpoints/frozen_linear/000-"},
    {"kill": "before", "name": "rename", "part": "results.json"},
    {"kill": "within", "name": "write", "part": "metrics.jsonl"},
    {"kill": "before", "name": "rename", "part": "checkpoints/cheem/001-"},
]
AT_RANDOM = 4
PHASES = ("similarity", "supernet", "search", "finetune", "means", "evaluate", "saving")


def phase_of(file: Path) -> str:
    """Return the phase that ran last."""
    return (phases_in(file) or ["starting"])[-1]


def only_true_checkpoints(directory: Path, expected: dict) -> bool:
    """Whether every checkpoint equals that of the undisturbed run."""
    for method in METHODS:
        result = contents(directory / "checkpoints" / method)
        if result != expected["contents"][method][: len(result)]:
            return False
    return True


def strike(
    child, phases: Path, number: int, *, after: int = 1, seconds: float = 0.0, phase: str = ""
) -> int:
    """Send a signal some seconds after the start of the child's `after`-th phase, or of `phase`.

    Returns the exit status of the child.
    """
    before = len(phases_in(phases))
    while child.poll() is None:
        lines = phases_in(phases)[before:]
        if phase in lines if phase else len(lines) >= after:
            time.sleep(seconds)
            child.send(number)
            break
        time.sleep(0.002)
    return child.wait(1800)


def phases_in(file: Path) -> list[str]:
    """Return the phases so far."""
    return file.read_text().splitlines() if file.exists() else []


class Kills:
    """The kills of one run: phase of each, and whether all checkpoints were true after it."""

    def __init__(self, directory: Path, expected: dict):
        self.directory = directory
        self.expected = expected
        self.kills = list[tuple[str, bool]]()

    def add(self, phase: str) -> None:
        """A kill has just happened."""
        self.kills.append((phase, only_true_checkpoints(self.directory, self.expected)))

    def end(self, tally, last: Child) -> None:
        """Wait for the end of the run; if it differs, every kill counts as not resumed."""
        status = last.wait(1800)
        good = status == 0 and outcome(self.directory) == self.expected
        for phase, true in self.kills:
            tally.add("kills", tried=1, ok=int(good and true), phase=phase)
        assert good, (
            f"started again after kills in {self.kills} it ended with {status}: {last.tail()}"
        )
        assert all(true for _, true in self.kills), (
            f"checkpoints were not true after some of {self.kills}"
        )


@pytest.mark.parametrize(
    "faults",
    [AT_FILES[2:3], pytest.param(AT_FILES[:2] + AT_FILES[3:], marks=pytest.mark.full)],
    ids=["one", "others"],
)
def test_a_run_killed_at_chosen_writes_ends_as_an_undisturbed_one(
    faulty, tally, undisturbed, tmp_path, faults
):
    run = {"directory": str(tmp_path / "run"), "weights": undisturbed.weights}
    kills = Kills(tmp_path / "run", undisturbed.outcome)
    for fault in faults:
        child = faulty.start("small_run", **run, fault={"at": 1, **fault})
        assert child.wait() == -signal.SIGKILL, f"{fault}: {child.tail()}"
        kills.add("saving")
    kills.end(tally, faulty.start("small_run", **run))


@pytest.mark.full
def test_a_run_killed_at_random_moments_ends_as_an_undisturbed_one(
    nursery, tally, undisturbed, tmp_path
):
    run = {"directory": str(tmp_path / "run"), "weights": undisturbed.weights}
    phases = tmp_path / "phases"
    rng = random.Random(0)
    kills = Kills(tmp_path / "run", undisturbed.outcome)
    for _ in range(AT_RANDOM):
        child = nursery.start("small_run", **run, phases=str(phases), save_every=0.0)
        # a moment within the remaining phases
        after = rng.randint(1, len(undisturbed.phases) // 3)
        seconds = rng.choice([0, 0, rng.random()])
        if strike(child, phases, signal.SIGKILL, after=after, seconds=seconds) != -signal.SIGKILL:
            break
        kills.add(phase_of(phases))
    kills.end(tally, nursery.start("small_run", **run))
    assert kills.kills


def stop_and_resume(
    nursery, tally, undisturbed, folder: Path, number: int, rng: random.Random
) -> str:
    """Ask a run to stop, resume it, and return the errors of both, joined by semicolons."""
    run = {"directory": str(folder / "run"), "weights": undisturbed.weights}
    phases = folder / "phases"
    last = len(undisturbed.phases)
    child = nursery.start("small_run", **run, phases=str(phases), command=True)
    wrong = []
    # requests are handled between the first and the last phases
    status = strike(
        child, phases, number, after=rng.randint(2, last // 2), seconds=rng.random() / 5
    )
    place = f"signal {number} in {phase_of(phases)}"
    if status != 128 + number:
        wrong.append(f"{place} ended it with {status}; its output ends: {child.tail()[-500:]}")
    elif "Traceback" in child.tail():
        wrong.append(f"{place} showed a traceback: {child.tail()[-500:]}")
    nursery.call("small_run", **run)
    if outcome(folder / "run") != undisturbed.outcome:
        wrong.append(f"{place} was followed by another end")
    tally.add("graceful stops", tried=1, ok=int(not wrong))
    return "; ".join(wrong)


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_a_run_asked_to_stop_does_so_and_resumes_exactly(
    nursery, tally, undisturbed, tmp_path, number
):
    assert not stop_and_resume(
        nursery, tally, undisturbed, tmp_path, number, random.Random(int(number))
    )


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_a_run_asked_to_stop_at_many_moments_resumes_exactly(
    nursery, tally, undisturbed, tmp_path, number
):
    rng = random.Random(1000 + int(number))
    wrong = []
    for trial in range(10):
        folder = tmp_path / str(trial)
        folder.mkdir()
        wrong.append(stop_and_resume(nursery, tally, undisturbed, folder, number, rng))
    assert not any(wrong), wrong


@pytest.mark.slow
@pytest.mark.parametrize("kill", ["before", "after", "within"])
def test_a_run_killed_once_at_any_file_operation_resumes_exactly(
    faulty, tally, undisturbed, tmp_path, kill
):
    rng = random.Random(kill)
    for trial in range(15):
        run = {"directory": str(tmp_path / str(trial)), "weights": undisturbed.weights}
        kills = Kills(tmp_path / str(trial), undisturbed.outcome)
        fault = {"at": rng.randint(1, undisturbed.operations), "kill": kill}
        if faulty.start("small_run", **run, fault=fault, save_every=0.0).wait() == -signal.SIGKILL:
            kills.add("file operation")
        kills.end(tally, faulty.start("small_run", **run))


@pytest.fixture(scope="module")
def demo(nursery, tmp_path_factory):
    """Outcome of an undisturbed demo, which also fills the compilation cache."""
    directory = tmp_path_factory.mktemp("demo") / "run"
    nursery.start(
        "demo_run", directory=str(directory), phases=str(directory.parent / "phases")
    ).result(1800)
    return outcome(directory)


@pytest.mark.slow
def test_kills_through_a_whole_demo_run(nursery, tally, demo, tmp_path):
    num = 50
    rng = random.Random(0)
    covered = set[str]()
    tried = 0
    runs = 0
    while tried < num or not covered >= set(PHASES):
        kills = Kills(tmp_path / str(runs), demo)
        phases = tmp_path / f"{runs}.txt"
        ended = False
        run = {"directory": str(kills.directory), "phases": str(phases), "save_every": 1.0}
        runs += 1
        while not ended and (tried < num or not covered >= set(PHASES)):
            missing = [phase for phase in PHASES if phase not in covered]
            # every third kill aims at a phase in which no random kill has happened, if any
            aim = rng.choice(missing) if missing and tried % 3 == 2 else ""
            if aim and aim != "saving":
                child = nursery.start("demo_run", **run, die=(aim, rng.randint(1, 9)))
                ended = child.wait(1800) != -signal.SIGKILL
            else:
                child = nursery.start("demo_run", **run)
                seconds = 0.0 if aim else rng.uniform(2, 20)
                ended = (
                    strike(child, phases, signal.SIGKILL, seconds=seconds, phase=aim)
                    != -signal.SIGKILL
                )
            if not ended:
                tried += 1
                kills.add(phase_of(phases))
                covered.add(phase_of(phases))
            assert tried < 10 * num, f"after {tried} kills still none in {missing}"
        kills.end(tally, nursery.start("demo_run", **run))
