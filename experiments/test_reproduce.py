"""Repetition of runs: the recorded command, the first difference, and runs that cannot be
repeated."""

import dataclasses
import io
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import reproduce
import small
from rich.console import Console

from cheem_jax.cheem.config import PRESETS
from cheem_jax.cli.arguments import arguments_of, parse
from cheem_jax.cli.demo import Demo
from cheem_jax.cli.running import run_command
from cheem_jax.continual import RunConfig, run_stream
from cheem_jax.run import fingerprint, record
from cheem_jax.run.progress import Progress


@dataclasses.dataclass(frozen=True)
class Small:
    run_dir: Path
    seed: int = 0
    upper_bound: bool = False


def learn_small(settings: Small) -> None:
    progress = Progress(Console(file=io.StringIO(), force_terminal=False))
    config = RunConfig(small.QUICK, "quick", settings.seed)
    run_stream(small.stream(1), small.pretrained(), config, settings.run_dir, progress)


def rewrite(directory: Path, entries: Sequence[dict[str, Any]]) -> None:
    (directory / record.NAME).unlink()
    written = record.Record(directory)
    for entry in entries:
        written.write(**{key: value for key, value in entry.items() if key != "time"})


def edit(directory: Path, **values: Any) -> None:
    """Change values of the record's entry for the whole run; None removes a value."""
    entries = record.read(directory)
    [run] = [entry for entry in entries if entry["event"] == "run"]
    run |= values
    rewrite(
        directory,
        [{key: value for key, value in entry.items() if value is not None} for entry in entries],
    )


@pytest.fixture(scope="module")
def original(tmp_path_factory) -> Path:
    """A finished run of one small task, with a command and conditions in its record."""
    directory = tmp_path_factory.mktemp("runs") / "small"
    learn_small(Small(directory))
    config = json.loads((directory / "config.json").read_text())
    edit(
        directory,
        command=["small", *arguments_of(Small(directory))],
        conditions=fingerprint.take(config),
    )
    return directory


@pytest.fixture
def run_dir(original, tmp_path, monkeypatch) -> Path:
    """A copy of the run; its command also copies the run, which needs no training."""

    def learn(settings: Small) -> None:
        shutil.copytree(original, settings.run_dir, dirs_exist_ok=True)

    monkeypatch.setitem(
        reproduce.COMMANDS, "small", (lambda arguments: parse(Small(Path()), arguments), learn)
    )
    shutil.copytree(original, tmp_path / "run")
    return tmp_path / "run"


def status_of(capsys, *arguments: str | Path) -> tuple[Any, str, str]:
    """Return the exit status, the output and the errors of the command line."""
    try:
        run_command(
            reproduce.main, parse(reproduce.Reproduce, [str(argument) for argument in arguments])
        )
        status: Any = 0
    except SystemExit as stop:
        status = stop.code
    captured = capsys.readouterr()
    return status, " ".join(captured.out.split()), captured.err


@pytest.mark.full
def test_a_repeated_run_is_identical(capsys, run_dir, monkeypatch):
    monkeypatch.setitem(reproduce.COMMANDS, "small", (reproduce.COMMANDS["small"][0], learn_small))
    status, said, errors = status_of(capsys, run_dir)
    again = run_dir.with_name("run-again")
    assert (status, errors) == (0, "") and f"identical: {run_dir} and {again}" in said
    digest = fingerprint.digest(fingerprint.take(reproduce.read_config(run_dir)))
    assert f"fingerprints equal: {digest}" in said
    assert "1 task0 equal equal" in said
    first, second = (record.read(directory) for directory in (run_dir, again))
    assert first != second and len(first) == len(second)  # the command ran and did not copy


@pytest.mark.parametrize(
    "event, keys, value, said",
    [
        (
            "learned",
            ("report", "supernet_losses", 1),
            0.125,
            "task 1 'task0', cheem: supernet_losses[1] is 0.",
        ),
        (
            "evaluated",
            ("methods", "cheem", "accuracy", 0),
            0.25,
            (
                "the evaluation after task 1 'task0': methods.cheem.accuracy[0] is 1 there and 0.25"
                " here"
            ),
        ),
        ("evaluated", ("checkpoints", "frozen_linear", 0), "ff", "checkpoints.frozen_linear[0] is"),
    ],
)
def test_the_first_different_number_is_reported_with_status_1(
    capsys, run_dir, event, keys, value, said
):
    other = run_dir.with_name("other")
    shutil.copytree(run_dir, other)
    status, output, _ = status_of(capsys, run_dir, "--against", other)
    assert status == 0 and "identical" in output
    entries = record.read(other)
    at = next(entry for entry in entries if entry["event"] == event)
    for key in keys[:-1]:
        at = at[key]
    at[keys[-1]] = value
    rewrite(other, entries)
    status, output, _ = status_of(capsys, run_dir, "--against", other)
    assert (
        status == 1
        and f"first difference: {said}" in output
        or said in output.partition("first difference")[2]
    )
    assert ("1 task0 equal differs" if value == "ff" else "1 task0 equal equal") in output


def test_a_run_with_different_settings_differs_in_its_config_and_its_record(capsys, run_dir):
    other = run_dir.with_name("other")
    shutil.copytree(run_dir, other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "seed": 1}))
    edit(other, executor="whole", conditions=None)
    status, output, _ = status_of(capsys, run_dir, "--against", other)
    assert status == 1 and "first difference: config.json: seed is 0 there and 1 here" in output
    assert "first difference: the run's setting: executor is" in output
    assert "note: a record without fingerprint" in output


def test_different_code_versions_or_devices_are_reported_before_the_run(capsys, run_dir):
    conditions = fingerprint.take(reproduce.read_config(run_dir))
    edit(run_dir, conditions={**conditions, "versions": {**conditions["versions"], "jax": "0.0.1"}})
    status, output, _ = status_of(capsys, run_dir)
    note = (
        'note: numbers may differ, since versions.jax is "0.0.1" there and'
        f' "{conditions["versions"]["jax"]}" here running'
    )
    assert status == 0 and output.index(note) < output.index("running again in") < output.index(
        "identical"
    )


def test_a_run_that_another_version_resumed_can_be_identical(capsys, run_dir):
    conditions = fingerprint.take(reproduce.read_config(run_dir))
    record.Record(run_dir).write(
        "continued", conditions={**conditions, "weights_sha256": "w"}, command=["a"]
    )
    status, output, _ = status_of(capsys, run_dir)
    assert (
        status == 0
        and 'note: numbers may differ, since weights_sha256 is "w" there and "seed 0" here'
        in output
    )


def test_only_the_finished_tasks_of_an_interrupted_run_are_compared(capsys, run_dir):
    rewrite(run_dir, record.read(run_dir)[:2])
    (run_dir / "results.json").unlink()
    status, output, _ = status_of(capsys, run_dir, "--into", run_dir.with_name("there"))
    assert status == 0 and "was stopped after 0 of 1 tasks; only these tasks are compared" in output
    assert "equal up to where the first run stopped, before task 1 'task0', frozen_linear" in output
    status, output, _ = status_of(capsys, run_dir.with_name("there"), "--against", run_dir)
    assert status == 1 and "equal up to where the second run stopped, before" in output


def test_an_upper_bound_that_was_added_later_is_repeated(run_dir, monkeypatch):
    started: list[Small] = []
    monkeypatch.setitem(
        reproduce.COMMANDS, "small", (reproduce.COMMANDS["small"][0], started.append)
    )
    reproduce.runnable(run_dir)[1](Path("/a"))
    rewrite(
        run_dir, [*record.read(run_dir), {"event": "upper_bound", "index": 0, "test_accuracy": 1.0}]
    )
    reproduce.runnable(run_dir)[1](Path("/b"))
    assert started == [Small(Path("/a")), Small(Path("/b"), upper_bound=True)]


def test_an_unfinished_repetition_resumes_and_another_run_is_refused(capsys, run_dir):
    again = run_dir.with_name("run-again")
    again.mkdir()
    shutil.copy(run_dir / "config.json", again)
    status, output, _ = status_of(capsys, run_dir)
    assert status == 0 and "identical" in output
    config = json.loads((again / "config.json").read_text())
    (again / "config.json").write_text(json.dumps({**config, "seed": 5}))
    status, _, error = status_of(capsys, run_dir)
    assert status == 2 and "seed is 5 there and 0 here" in error and "--against" in error


def refused(capsys, *arguments: str | Path) -> str:
    """Return the one line of an error with status 2."""
    status, _, error = status_of(capsys, *arguments)
    assert status == 2 and error.startswith("error: ") and error.count("\n") == 1
    return error


def test_folders_without_a_run_or_a_command_are_refused_in_one_line(capsys, run_dir, tmp_path):
    assert "gone' is not a run directory" in refused(capsys, tmp_path / "gone")
    assert "gone' is not a run directory" in refused(
        capsys, run_dir, "--against", tmp_path / "gone"
    )
    assert "is the run itself" in refused(capsys, run_dir, "--into", run_dir)
    assert "leave out --into" in refused(
        capsys, run_dir, "--into", tmp_path / "x", "--against", run_dir
    )
    edit(run_dir, command=["experiments/other.py", "--seed", "1"])
    assert "made by 'experiments/other.py --seed 1'; expected one of: cheem demo" in refused(
        capsys, run_dir
    )
    edit(run_dir, command=["small", "--sead", "1"])
    assert "--sead" in refused(capsys, run_dir)
    edit(run_dir, command=None)
    assert "contains no command: your own Python code made" in refused(capsys, run_dir)
    assert not run_dir.with_name("run-again").exists()


def test_missing_data_is_named(capsys, run_dir, tmp_path):
    settings = reproduce.cheem_run.RunSettings(
        cheem=PRESETS["demo"], preset="demo", backbone="vit_micro", stream=str(tmp_path / "birds")
    )
    edit(run_dir, command=["experiments/mtil.py", *arguments_of(settings)])
    assert f"{tmp_path / 'birds'}: no such folder" in refused(capsys, run_dir)


@pytest.mark.parametrize(
    "words, settings",
    [
        (["cheem", "demo"], Demo(Path("/somewhere"), seed=3, upper_bound=True)),
        (
            ["experiments/mtil.py"],
            reproduce.cheem_run.RunSettings(
                cheem=PRESETS["quick"],
                preset="quick",
                run_dir=Path("/somewhere"),
                seed=3,
                num_seeds=1,
            ),
        ),
    ],
)
def test_every_command_of_runs_is_repeated_with_its_settings(run_dir, monkeypatch, words, settings):
    started: list[Any] = []
    read_arguments, _ = reproduce.COMMANDS[" ".join(words)]
    monkeypatch.setitem(reproduce.COMMANDS, " ".join(words), (read_arguments, started.append))
    command: Sequence[str] = [*words, *arguments_of(settings)]
    edit(run_dir, command=command)
    recorded, run = reproduce.runnable(run_dir)
    run(Path("/elsewhere"))
    assert recorded == command and started == [
        dataclasses.replace(settings, run_dir=Path("/elsewhere"))
    ]
