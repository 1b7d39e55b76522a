"""`cheem watch`: the status that a run writes, and its view from another process."""

import io
import json
import os
import re
import socket
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import pytest
from page_runs import entries
from rich.console import Console
from test_report_progress import Clock

from cheem_jax.cli import report as watch
from cheem_jax.cli.report import Watch, watch_run
from cheem_jax.report import live
from cheem_jax.report.live import shown_tasks, view
from cheem_jax.report.status import read_owner, read_snapshot, read_status
from cheem_jax.run.directory import hold
from cheem_jax.run.progress import STATUS_FILE, Doing, Status
from cheem_jax.run.record import Record

NAMES = ["digits", "letters", "textures"]


def unseen(num_images: int, note: str = "") -> None:
    pass


def doing_in(directory: Path) -> Doing:
    doing = read_status(directory)
    assert doing is not None
    return doing


def begin(directory: Path, names: list[str] = NAMES) -> Record:
    directory.mkdir(exist_ok=True)
    config = {"stream": "made-up", "tasks": names, "backbone": "vit_micro", "seed": 7, "cheem": {}}
    (directory / "config.json").write_text(json.dumps(config))
    record = Record(directory)
    record.write(**next(entries(names=names, classes=("a", "b"))) | {"preset": "quick, changed"})
    return record


def learn(record: Record, index: int, accuracy: list[float], seconds: float = 8.0) -> None:
    """Record a task of `seconds` + 2 s, measured."""
    *_, learned, evaluated = entries(names=NAMES[: index + 1], classes=("a", "b"))
    result = evaluated["methods"]["cheem"] | {
        "accuracy": accuracy,
        "local_accuracy": [0.9] * len(accuracy),
    }
    record.write(**learned | {"seconds": seconds})
    record.write(**evaluated | {"methods": {"cheem": result}, "seconds": 2.0})


def bound(record: Record, index: int, accuracy: float) -> None:
    """Record the upper bound of a task."""
    costs = {
        "learning_rate": 1e-3,
        "flops_paper": 20_000_000,
        "flops_executed": 21_000_000,
        "seconds": 4.0,
    }
    record.write("upper_bound", index=index, name=NAMES[index], test_accuracy=accuracy, **costs)


def text_of(directory: Path, width: int = 100, rows: int = 20, now: float | None = None) -> str:
    console = Console(width=width, file=io.StringIO(), record=True)
    console.print(view(read_snapshot(directory, time.time() if now is None else now), width, rows))
    return console.export_text()


def line_with(word: str, text: str) -> str:
    (line,) = [line for line in text.splitlines() if word in line]
    return line


def test_a_phase_reports_its_progress_every_two_seconds(tmp_path):
    clock = Clock()
    shown = []

    def advance(num_images: int, note: str = "") -> None:
        shown.append((num_images, note))

    with Status(tmp_path, clock=clock) as status:
        with status.phase("finetune", "digits", 400, nullcontext(advance)) as tell:
            assert doing_in(tmp_path)[:6] == ("finetune", "digits", 0, 400, 0.0, "")
            clock.now = 1.9
            tell(100, "epoch 1/2 loss 2.000")
            assert doing_in(tmp_path).done == 0  # not again before two seconds are over
            clock.now = 2.0
            tell(60, "epoch 1/2 loss 1.500")
            clock.now = 4.0
            tell(40, "epoch 2/2 loss 1.000")
        statuses = doing_in(tmp_path)
        assert (statuses.done, statuses.total, statuses.seconds, statuses.note) == (
            200,
            400,
            4.0,
            "epoch 2/2 loss 1.000",
        )
        assert statuses.pid == os.getpid()
    assert shown == [
        (100, "epoch 1/2 loss 2.000"),
        (60, "epoch 1/2 loss 1.500"),
        (40, "epoch 2/2 loss 1.000"),
    ]
    assert list(tmp_path.iterdir()) == []  # removed at the end


@pytest.mark.parametrize("step", ["write_text", "replace"])
def test_a_status_that_cannot_be_written_stops_nothing_and_leaves_nothing(
    tmp_path, monkeypatch, step
):
    def full(*_):
        (tmp_path / f".{STATUS_FILE}.{os.getpid()}.tmp").touch()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(*((Path, step) if step == "write_text" else (os, step)), full)
    shown = []

    def advance(num_images: int, note: str = "") -> None:
        shown.append(num_images)

    with Status(tmp_path, clock=Clock()) as status:
        with status.phase("search", "digits", 10, nullcontext(advance)) as tell:
            tell(10)
    assert shown == [10] and list(tmp_path.iterdir()) == []


def test_a_slow_disk_makes_the_status_rarer_so_that_it_uses_a_bounded_share_of_the_time(
    tmp_path, monkeypatch
):
    clock = Clock()
    writes = []

    def slow(self, doing):
        clock.now += 0.1
        writes.append(clock.now)

    monkeypatch.setattr(Status, "_write", slow)
    with Status(tmp_path, clock=clock).phase("train", "digits", 1, nullcontext(unseen)) as tell:
        while clock.now < 1000:
            clock.now += 0.5
            tell(0)
    assert 0.1 * len(writes) / clock.now <= 0.01 and len(writes) > 80


def test_a_running_run_shows_tasks_phase_and_the_time_that_the_finished_ones_foretell(tmp_path):
    record = begin(tmp_path)
    clock = Clock()
    with hold(tmp_path), Status(tmp_path, clock=clock) as status:
        learn(record, 0, [0.9])
        learn(record, 1, [0.85, 0.7], seconds=18.0)
        with status.phase("finetune", "textures", 4000, nullcontext(unseen)) as tell:
            for epoch in range(1, 5):
                clock.now += 5.0
                tell(250, f"epoch {epoch}/16 loss {1 / epoch:.3f}")
            now = doing_in(tmp_path).time
            text = text_of(tmp_path, now=now)
            said = live.line(read_snapshot(tmp_path, now))
    assert "made-up · vit_micro · CHEEM · seed 7 · preset quick, changed" in text
    assert f"process {os.getpid()} on {socket.gethostname()}" in line_with("running since", text)
    # tasks took 10 s and 20 s; the third has just begun
    assert "67 %" in line_with("2 of 3 tasks", text)
    assert "about 15 s left" in line_with("2 of 3 tasks", text)
    assert "average accuracy 77.5 %, task ID given 90.0 %, forgetting 5.0 points" in text
    assert "25 %" in line_with("finetune", text)
    assert "1,000 of 4,000 images, 50 images/s, 1 min 00 s left" in text
    assert "epoch 4/16 loss 0.250" in text
    assert line_with("T1 digits", text).split()[:6] == [
        "T1",
        "digits",
        "learned",
        "AN",
        "85.0",
        "90.0",
    ]
    assert line_with("T2 letters", text).split()[:6] == [
        "T2",
        "letters",
        "learned",
        "AS",
        "70.0",
        "90.0",
    ]
    assert line_with("T3 textures", text).split() == ["T3", "textures", "learning"]
    for part in (
        "2 of 3 tasks",
        "[finetune] textures: 1,000 of 4,000 images",
        "about 15 s left in all",
    ):
        assert part in said and "\n" not in said


def test_a_killed_run_is_reported_with_the_phase_it_was_in_and_ends_the_view(tmp_path):
    learn(begin(tmp_path), 0, [0.9])
    ended = subprocess.Popen([sys.executable, "-S", "-c", ""])
    os.waitid(
        os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT
    )  # ended, though its parent has not asked how
    child = ended.pid
    (tmp_path / ".owner.json").write_text(json.dumps({"pid": child, "host": socket.gethostname()}))
    doing = {
        "phase": "search",
        "task": "letters",
        "done": 3,
        "total": 4,
        "seconds": 1.0,
        "note": "",
    }
    now = time.time()
    (tmp_path / STATUS_FILE).write_text(json.dumps({**doing, "pid": child, "time": now - 90}))
    try:
        assert read_owner(tmp_path) is None
        text = text_of(tmp_path, now=now)
        assert "stopped" in text and "the same command resumes it" in text
        assert "3 of 4 images, last update 1 min 30 s ago" in text
        assert line_with("T2 letters", text).split() == ["T2", "letters", "waiting"]
        watch_run(Watch(tmp_path), Console(file=io.StringIO(), width=80))  # ends by itself
    finally:
        ended.wait()
    assert read_owner(tmp_path) is None
    # of another machine nobody knows whether it lives, only for how long it has said nothing
    (tmp_path / ".owner.json").write_text(json.dumps({"pid": child, "host": "elsewhere"}))
    assert f"process {child} on elsewhere, silent for 10 min" in text_of(
        tmp_path, now=time.time() + 600
    )


def test_the_status_of_an_earlier_process_is_not_shown(tmp_path):
    begin(tmp_path)
    with Status(tmp_path) as status, hold(tmp_path):
        with status.phase("search", "letters", 10, nullcontext(unseen)):
            assert "search" in text_of(tmp_path)
            on_disk = json.loads((tmp_path / STATUS_FILE).read_text())
            (tmp_path / STATUS_FILE).write_text(json.dumps({**on_disk, "pid": on_disk["pid"] + 1}))
            assert "search" not in text_of(tmp_path)
            for damaged in (
                "",
                "{",
                "[]",
                "{}",
                json.dumps({**on_disk, "from": "another version"}),
            ):
                (tmp_path / STATUS_FILE).write_text(damaged)
                assert "search" not in text_of(tmp_path)


@pytest.mark.parametrize("width", [40, 60, 80, 120])
@pytest.mark.parametrize("blocks", [4, 24])
def test_every_width_keeps_names_states_and_accuracies_and_no_line_is_longer(
    tmp_path, width, blocks
):
    names = ["a_task_with_a_rather_long_name", "b"]
    record = begin(tmp_path, names)
    _, learned, evaluated = entries(names=names[:1], classes=("a", "b"), accuracy=0.873)
    letters = "RN" * (blocks // 2)
    learned["report"]["architecture"] = ["reuse:0", "new"] * (blocks // 2)
    record.write(**learned)
    record.write(**evaluated)
    text = text_of(tmp_path, width)
    assert max(len(line.rstrip()) for line in text.splitlines()) <= width
    row = line_with("learned", text)
    assert "T1" in row and "87.3" in row and (letters in row) == (width == 120)


def test_of_many_tasks_those_around_the_one_that_is_learned_are_shown_and_the_others_counted(
    tmp_path,
):
    names = [f"task_{index}" for index in range(100)]
    record = begin(tmp_path, names)
    result = [*entries(names=names[:70], classes=("a", "b"))]
    record.replace([{**entry, "time": "2026-01-01T00:00:00+00:00"} for entry in result])
    with hold(tmp_path):
        text = text_of(tmp_path, rows=12)
    assert [int(number) for number in re.findall(r"task_(\d+)", text)] == list(range(61, 73))
    assert "100 tasks; not displayed: 61 before and 27 after these" in text
    assert "learning" in line_with("task_70", text) and len(text.splitlines()) < 30


def test_the_tasks_shown_fill_the_room_and_hold_the_current_one():
    assert shown_tasks(3, 1, 10) == range(3)
    assert shown_tasks(1000, 0, 10) == range(10)
    assert shown_tasks(1000, 1000, 10) == range(990, 1000)
    for num in (1, 5, 50):
        for current in range(num):
            for rows in (3, 7, 20):
                shown = shown_tasks(num, current, rows)
                assert current in shown and len(shown) == min(num, rows) and shown.stop <= num


def test_a_corrupted_record_is_reported_and_the_rest_is_shown(tmp_path):
    record = begin(tmp_path)
    learn(record, 0, [0.9])
    learn(record, 1, [0.8, 0.7])
    file = tmp_path / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join([*lines[:2], "\0nonsense\n", *lines[3:]]))
    text = " ".join(text_of(tmp_path, 200).split())
    assert "line 3 was changed" in text and "its numbers are missing below" in text
    assert "made-up · vit_micro · CHEEM · seed 7" in text and "T1 digits waiting" in text
    (tmp_path / "config.json").write_text("{")
    assert "config.json cannot be read" in " ".join(text_of(tmp_path, 200).split())


def test_the_record_is_read_again_only_where_it_changed(tmp_path):
    record = begin(tmp_path)
    first = read_snapshot(tmp_path, 0.0)
    assert read_snapshot(tmp_path, 1.0).entries is first.entries
    learn(record, 0, [0.9])
    assert len(read_snapshot(tmp_path, 2.0).entries) == 3


def test_an_invalid_run_is_named_with_the_way_out(tmp_path):
    with pytest.raises(ValueError, match="nowhere' does not exist; a run creates its folder"):
        read_snapshot(tmp_path / "nowhere", 0.0)
    with pytest.raises(
        ValueError, match="is not a run directory .it has no config.json.; give the"
    ):
        read_snapshot(tmp_path, 0.0)
    (tmp_path / "compare").mkdir()
    begin(tmp_path / "compare" / "cheem")
    with pytest.raises(ValueError, match="it contains 1 runs, such as .*compare/cheem"):
        read_snapshot(tmp_path, 0.0)
    for every in (0.0, -1.0, float("nan"), float("inf"), 86_401.0):
        with pytest.raises(ValueError, match=f"every is {every}"):
            watch_run(Watch(tmp_path, every=every))


def test_a_finished_run_shows_its_result_and_ends(tmp_path):
    record = begin(tmp_path, ["digits"])
    learn(record, 0, [0.9])
    shown = io.StringIO()
    watch_run(Watch(tmp_path), Console(file=shown, width=80))
    assert "finished" in shown.getvalue()
    assert "1 of 1 tasks" in shown.getvalue()
    assert "90.0" in shown.getvalue()
    assert "full fine-tuning" not in shown.getvalue()
    bound(record, 0, 0.846)
    assert "84.6" in line_with(
        "full fine-tuning  ", text_of(tmp_path)
    )  # the table of the run and its references


def test_without_a_terminal_there_is_a_line_after_every_task_and_the_view_at_the_end(
    tmp_path, monkeypatch
):
    record = begin(tmp_path)
    shown = io.StringIO()
    running = hold(tmp_path)
    running.__enter__()
    steps = [
        lambda: None,
        lambda: learn(record, 0, [0.9]),
        lambda: None,
        lambda: running.__exit__(None, None, None),
    ]
    monkeypatch.setattr(watch, "sleep", lambda seconds: steps.pop(0)())
    watch_run(Watch(tmp_path), Console(file=shown, width=100))
    lines = [line for line in shown.getvalue().splitlines() if line.startswith("running")]
    assert ["0 of 3" in line for line in lines] == [True, False] and "1 of 3 tasks" in lines[1]
    assert "stopped" in shown.getvalue() and steps == []


def test_ctrl_c_ends_the_view_restores_the_terminal_and_leaves_the_run_alone(tmp_path, monkeypatch):
    def interrupted(seconds):
        raise KeyboardInterrupt

    begin(tmp_path)
    monkeypatch.setattr(watch, "sleep", interrupted)
    terminal = io.StringIO()
    with hold(tmp_path):
        before = sorted(file.name for file in tmp_path.iterdir())
        watch_run(
            Watch(tmp_path),
            Console(
                file=terminal, force_terminal=True, width=80, height=24, _environ={"TERM": "xterm"}
            ),
        )
        assert sorted(file.name for file in tmp_path.iterdir()) == before
    shown = terminal.getvalue()
    for on, off in (
        ("\x1b[?25l", "\x1b[?25h"),
        ("\x1b[?1049h", "\x1b[?1049l"),
    ):  # the cursor and the alternate screen
        assert shown.count(on) == shown.count(off) == 1 and shown.index(on) < shown.index(off)
    assert "T1 digits" in shown[shown.index("\x1b[?1049l") :]  # the last view stays


def test_once_shows_a_running_run_and_ends(tmp_path):
    begin(tmp_path)
    shown = io.StringIO()
    with hold(tmp_path):
        watch_run(Watch(tmp_path, once=True), Console(file=shown, width=80))
    assert "running since" in shown.getvalue() and "known after one task" in shown.getvalue()


def test_a_run_that_was_stopped_before_its_last_upper_bound_is_not_finished(tmp_path):
    record = begin(tmp_path, NAMES[:2])
    record.write("continued", upper_bound=True)
    learn(record, 0, [0.8])
    learn(record, 1, [0.7, 0.9])
    assert "stopped" in text_of(tmp_path)
    for index in range(2):
        assert "the same command resumes it" in text_of(tmp_path)
        bound(record, index, 0.95)
    assert "finished" in text_of(tmp_path) and "upper bound of 2" in text_of(tmp_path)


def test_the_estimate_that_a_task_began_with_is_shown_before_any_task_is_learned(tmp_path):
    begin(tmp_path)
    with hold(tmp_path), Status(tmp_path, clock=Clock()) as status:
        status.ends = time.time() + 1000
        with status.phase("supernet", "digits", 4000, nullcontext(unseen)):
            assert "about 1 min 40 s left" in text_of(tmp_path, now=status.ends - 100)
            assert "known after one task" in text_of(tmp_path, now=status.ends + 1)


def test_a_process_that_began_after_the_name_was_written_is_another_one(tmp_path):
    owner = tmp_path / ".owner.json"
    owner.write_text(json.dumps({"pid": os.getpid(), "host": socket.gethostname()}))
    assert read_owner(tmp_path) is not None
    os.utime(owner, (1e9, 1e9))  # long before this process began
    assert read_owner(tmp_path) is None
