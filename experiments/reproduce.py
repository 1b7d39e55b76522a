"""Repetition of a run: all numbers are identical, or the first difference is reported.

    python experiments/reproduce.py runs/demo
    python experiments/reproduce.py runs/demo --against runs/copied-from-another-machine

The exit status is 0 if the runs are identical, 1 if they differ, and 2 if they cannot be compared.
"""

import dataclasses
import itertools
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import planted
import tyro

from cheem_jax.cli import run as cheem_run
from cheem_jax.cli.arguments import parse
from cheem_jax.cli.demo import Demo, learn_demo
from cheem_jax.cli.running import run_command
from cheem_jax.report.compare import differences, read_config
from cheem_jax.report.table import NONE, Grid
from cheem_jax.run import fingerprint
from cheem_jax.run.differences import find_differences, summary
from cheem_jax.run.progress import Progress
from cheem_jax.run.record import read

RUN = (
    lambda arguments: dataclasses.replace(cheem_run.read_arguments(arguments), num_seeds=1),
    cheem_run.run_seeds,
)
COMMANDS: dict[str, tuple[Callable[[list[str]], Any], Callable[[Any], None]]] = {
    "cheem demo": (lambda arguments: parse(Demo, arguments), learn_demo),
    "cheem run": RUN,
    "experiments/mtil.py": RUN,
    "experiments/planted.py": (
        lambda arguments: parse(planted.Planted, arguments),
        planted.run_alone,
    ),
}
"""Parser of the arguments and function that runs the settings, keyed by recorded command."""


@dataclasses.dataclass(frozen=True)
class Reproduce:
    """Repeat a run, or compare two runs, and report the first difference."""

    run_dir: Annotated[Path, tyro.conf.Positional]
    """Run directory to reproduce."""
    into: Path | None = None
    """Folder of the repeated run, which resumes if it is unfinished; default: the name of the run
    with -again."""
    against: Path | None = None
    """Compare with this run directory, and run nothing."""


def main(settings: Reproduce) -> None:
    """Repeat the run and compare both runs. Raises SystemExit with status 1 if they differ."""
    progress = Progress()
    first = settings.run_dir
    second = settings.against
    if second is None:
        second = again_of(first) if settings.into is None else settings.into
        run_again(first, second, progress)
    elif settings.into is not None:
        raise ValueError(
            "--against compares and runs nothing, so there is no new folder; leave out --into"
        )
    else:
        for directory in (first, second):
            read_config(directory)
        report_fingerprints(progress, fingerprints_of(first), fingerprints_of(second))
    # the repeated run must have every task of the run and can have more
    if not compare(first, second, progress, is_longer_accepted=settings.against is None):
        raise SystemExit(1)


def run_again(first: Path, second: Path, progress: Progress) -> None:
    """Run the command of a run in another directory, or resume it there."""
    config = read_config(first)
    command, run = runnable(first)
    if second.resolve() == first.resolve():
        raise ValueError(f"--into {str(second)!r} is the run itself; name another directory")
    if (second / "config.json").exists() and (
        changed := find_differences(read_config(second), config)
    ):
        raise ValueError(
            f"{str(second)!r} contains another run than {str(first)!r}:"
            f" {summary(changed, 'settings')}; compare them with --against, or name"
            " another directory with --into"
        )
    report_fingerprints(progress, fingerprints_of(first), [fingerprint.take(config)])
    finished = sum(entry["event"] == "evaluated" for entry in read(first))
    total = len(config["tasks"])
    if finished < total:
        progress.say(
            f"{first} was stopped after {finished} of {total} tasks; only these tasks are compared"
        )
    progress.say(f"running again in {second}: {shlex.join(command)}")
    run(second)


def compare(
    first: Path, second: Path, progress: Progress, *, is_longer_accepted: bool = False
) -> bool:
    """Print a table of the checkpoints and the first difference; return whether the runs are
    identical.

    With `is_longer_accepted`, the second run can have further tasks after the last task of the
    first run.
    """
    progress.console.print(task_grid(first, second).to_rich())
    changes = list(differences(first, second))
    if not changes:
        progress.say(f"identical: {first} and {second}")
        return True
    # a setting that only one of the versions has does not always change a number
    for difference in changes[: 2 if changes[0].place.startswith("config.json") else 1]:
        progress.say(str(difference) if difference.stopped else f"first difference: {difference}")
    return is_longer_accepted and [difference.stopped for difference in changes] == ["first"]


def task_grid(first: Path, second: Path) -> Grid:
    """Make a row per task that tells whether its checkpoints have identical content."""
    names = read_config(first)["tasks"]
    records = [
        [entry for entry in read(directory) if entry["event"] == "evaluated"]
        for directory in (first, second)
    ]
    checkpoints: list[Mapping[str, Sequence[str]]] = [
        record[-1].get("checkpoints", {}) if record else {} for record in records
    ]
    methods = list(dict.fromkeys((*checkpoints[0], *checkpoints[1])))

    def cell(method: str, index: int) -> str:
        hashes = [side.get(method, [])[index : index + 1] for side in checkpoints]
        return NONE if [] in hashes else "equal" if hashes[0] == hashes[1] else "differs"

    rows = tuple(
        (f"{i + 1} {name}", *(cell(method, i) for method in methods))
        for i, name in enumerate(names)
    )
    return Grid(
        "content of the checkpoints",
        ("task", *methods),
        rows,
        1,
        "equal: the same arrays, bit for bit",
    )


def fingerprints_of(directory: Path) -> list[dict[str, Any]]:
    """Return the full fingerprints of the processes of a run."""
    return [entry["conditions"] for entry in read(directory) if entry.get("conditions")]


def runnable(directory: Path) -> tuple[list[str], Callable[[Path], None]]:
    """Return the recorded command, and a function that runs it in a directory."""
    command = next(
        (entry.get("command") for entry in read(directory) if entry["event"] == "run"), None
    )
    if not command:
        raise ValueError(
            f"the record of {str(directory)!r} contains no command: your own Python code made"
            " the run, or it was made before commands were recorded; run that again yourself and"
            " compare with --against"
        )
    name = next((name for name in COMMANDS if command[: len(name.split())] == name.split()), None)
    if name is None:
        raise ValueError(
            f"{str(directory)!r} was made by {shlex.join(command)!r}; expected one of:"
            f" {', '.join(COMMANDS)}; run it again yourself and compare with --against"
        )
    read_arguments, run = COMMANDS[name]
    settings = read_arguments(command[len(name.split()) :])
    if any(entry["event"] == "upper_bound" for entry in read(directory)):
        # the upper bound can be added to a finished run
        settings = dataclasses.replace(settings, upper_bound=True)
    return command, lambda into: run(dataclasses.replace(settings, run_dir=into))


def again_of(directory: Path) -> Path:
    """Return the default folder of the repeated run, next to the run directory."""
    directory = directory.resolve()
    return directory.with_name(f"{directory.name}-again")


def report_fingerprints(
    progress: Progress, first: list[dict[str, Any]], second: list[dict[str, Any]]
) -> None:
    """Report whether identical numbers can be expected."""
    pairs = itertools.product(first, second)
    changed = dict.fromkeys(
        sentence for one, other in pairs for sentence in map(str, find_differences(one, other))
    )
    if not first or not second:
        progress.say(
            "note: a record without fingerprint; whether code, versions and device are the same is"
            " not known"
        )
    elif changed:
        progress.say(f"note: numbers may differ, since {'; '.join(changed)}")
    else:
        progress.say(f"fingerprints equal: {fingerprint.digest(first[0])}")


if __name__ == "__main__":
    parsed = parse(Reproduce, description=__doc__)
    directory = None if parsed.against else parsed.into or again_of(parsed.run_dir)
    run_command(main, parsed, directory)
