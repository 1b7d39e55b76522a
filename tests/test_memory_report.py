"""`cheem report`, `cheem watch` and `cheem tensorboard` of memories, which lack numbers and forget
tasks."""

import dataclasses
import io
import json
import os
import re
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import small
from rich.console import Console
from test_memory import begin
from test_report_page import parsed
from test_tensorboard import numbers_in

import cheem_jax
from cheem_jax.cli.report import Tensorboard, Watch, watch_run, write_tensorboard
from cheem_jax.memory import TaskScore
from cheem_jax.report import finished
from cheem_jax.report.live import line
from cheem_jax.report.memories import num_forgotten
from cheem_jax.report.page import assemble
from cheem_jax.report.page.assemble import architectures, page, refresh_page
from cheem_jax.report.page.charts import pool_growth
from cheem_jax.report.status import read_owner, read_snapshot
from cheem_jax.report.tensorboard import NAME
from cheem_jax.run.directory import OWNER, hold
from cheem_jax.run.progress import Progress

METHOD = dataclasses.replace(small.QUICK, remove=("skip", "adapt"))


class Halt(Progress):
    """Progress that is interrupted as the last phase of learning begins."""

    def phase(self, phase: str, **fields: Any):
        if phase == "finetune":
            raise KeyboardInterrupt
        return super().phase(phase, **fields)


@pytest.fixture(scope="module")
def moments(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One memory as it was at five moments, by name."""
    folder = tmp_path_factory.mktemp("memories")
    work = folder / "work"

    def keep(name: str) -> None:
        shutil.copytree(work, folder / name)

    memory = begin(work, method=METHOD)
    keep("empty")
    for number in range(3):  # each without the images of the others
        memory.learn(small.task(f"task{number}", number))
    keep("three")
    memory.forget("task0")
    keep("forgot")
    with pytest.raises(KeyboardInterrupt):
        memory.learn(small.task("task9", 9), progress=Halt())
    keep("half")
    memory.learn(small.task("task9", 9))
    keep("later")
    return folder


@pytest.fixture
def moment(moments: Path, tmp_path: Path) -> Callable[[str], Path]:
    """A copy that a test can write into."""
    return lambda name: shutil.copytree(moments / name, tmp_path / name)


def watched(directory: Path) -> str:
    text = io.StringIO()
    watch_run(Watch(directory, once=True), Console(file=text, width=120))
    return text.getvalue()


def results_in(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "results.json").read_text())


@pytest.mark.parametrize("name", ["three", "forgot", "half", "later"])
def test_a_page_says_that_it_is_about_a_memory_and_shows_no_number_that_was_not_measured(
    moment, name
):
    directory = moment(name)
    page = parsed(directory)
    results = results_in(directory)
    num = len(results["tasks"])
    assert f"Memory {name} on vit_tiny_patch4_8" in page.text and f"{num} tasks so far" in page.text
    assert "Corrupted" not in page.text and "nan" not in page.text.lower().split()
    tiles = page.text.split("Average accuracy", 1)[1].split("FLOPs per image")[0].split()
    assert tiles[:3] == [
        "–",
        "not",
        "measured:",
    ]
    assert f"`cheem evaluate {name} DATA` fills this in" in " ".join(tiles)
    first = next(row for row in page.text.split("\n") if row.startswith("T1 task") and "40" in row)
    assert "––" in first and "–0." in first  # found and given; routed, before the FLOPs
    assert "Not measured after the last task, and displayed as –: T1 task" in page.text
    assert "no task's images were available when a later" in page.text
    matrices = [
        chart["data"][0]["z"] for chart in page.charts if chart["data"][0]["type"] == "heatmap"
    ]
    assert results["accuracy"][-1][:-1] == [None] * (num - 1)
    assert any(
        rows[-1][:-1] == [None] * (num - 1) and rows[-1][-1] is not None
        for rows in matrices
        if len(rows) == num
    )


def test_a_page_shows_the_last_evaluation_until_the_memory_changes(moment):
    directory = moment("three")
    memory = cheem_jax.open(directory)
    memory.store_scores([TaskScore("task0", 40, 0.5, 0.75, 0.6, 0.1)])
    assert "(1 measured so far)" in parsed(directory).text
    memory.store_scores(
        [TaskScore("task1", 20, 0.25, 0.5, 0.5, 0.1), TaskScore("task2", 30, 0.75, 1.0, 1.0, 0.1)]
    )
    text = parsed(directory).text
    assert "50.0" in text and "task-agnostic; cheem evaluate on 90 test images" in text
    assert "Measured by cheem evaluate" in text and "fills this in" not in text
    (directory / "evaluated.json").write_text('{"state": [1, 3], "tasks": {"task0": {}}}')
    assert "(0 measured so far)" in parsed(directory).text  # not as it is written
    memory.store_scores([TaskScore("task0", 40, 0.5, 0.75, 0.6, 0.1)])
    stale = cheem_jax.open(directory)
    memory.forget("task0")
    assert not (directory / "evaluated.json").exists()
    with pytest.raises(ValueError, match="has changed since it was read"):
        stale.store_scores([TaskScore("task0", 40, 0.5, 0.75, 0.6, 0.1)])
    assert not (directory / "evaluated.json").exists()
    assert "(0 measured so far)" in parsed(directory).text


def test_after_evaluating_all_tasks_the_page_and_the_view_agree_on_every_number(moment):
    directory = moment("three")
    learned = [row[index] for index, row in enumerate(results_in(directory)["accuracy"])]
    memory = cheem_jax.open(directory)
    memory.store_scores([TaskScore("task0", 40, 0.1, 0.75, 0.3, 0.1)])
    text = parsed(directory).text
    assert (
        "Not measured after the last task, and displayed as –: T2 task1;" in text
    )  # and no longer T1
    memory.store_scores([TaskScore("task2", 30, 0.0, 1.0, 1.0, 0.1)])
    average = f"{100 * sum(learned) / 3:.1f}"
    assert f"Right after learning{average} %" in parsed(directory).text
    assert f"right after learning {average} %" in line(read_snapshot(directory, 0.0))
    memory.store_scores(
        [TaskScore("task1", 20, 0.2, 0.5, 0.5, 0.1), TaskScore("task2", 30, 0.75, 1.0, 1.0, 0.1)]
    )
    page = parsed(directory)
    results = read_snapshot(directory, 0.0).results
    forgetting = (
        100 * sum(max(was - now, 0) for was, now in zip(learned, (0.1, 0.2), strict=False)) / 2
    )
    assert forgetting > 0
    tiles = page.text.split("Average accuracy", 1)[1].split("FLOPs per image")[0]
    assert tiles.startswith("35.0 %")
    assert "75.0 %" in tiles
    assert f"Forgetting{forgetting:.1f} points" in tiles
    assert (
        "not measured" not in page.text.lower().split("gaps were")[0].split("cells on or below")[0]
    )
    assert results["learned_accuracy"] == learned, "and not the accuracy of cheem evaluate"
    # over 40, 20 and 30 images: (0.1 * 40 + 0.2 * 20 + 0.75 * 30) / 90
    assert f"CHEEM35.033.9–75.0{forgetting:.1f}" in page.text
    rows = [
        next(
            row
            for row in page.text.split("\n")
            if row.startswith(f"T{i + 1} task{i}") and "40" in row
        )
        for i in range(3)
    ]
    # between them: the network and the frozen backbone on validation images
    for row, (measured, right) in zip(
        rows, (("10.075.0", "30.0"), ("20.050.0", "50.0"), ("75.0100.0", "100.0")), strict=True
    ):
        assert re.search(rf"{measured}(\d+\.\d){{2}}{right}", row)
    assert "The task ID is right for 60.0 % on average" in page.text
    assert "does not report the inferred tasks of the other images" in page.text
    status = watched(directory)
    assert (
        f"average accuracy 35.0 %, task ID given 75.0 %, forgetting {forgetting:.1f} points"
        in status
    )
    assert "not measured" not in status


def test_a_memory_that_another_process_works_on_is_not_said_to_be_stopped(moment):
    directory = moment("half")
    pid = os.getppid()
    (directory / OWNER).write_text(json.dumps({"pid": pid, "host": socket.gethostname()}))
    text = parsed(directory).text
    assert f"Process {pid} on {socket.gethostname()} is learning 'task9' now" in text
    assert "Stopped" not in text
    (directory / "results.json").unlink()
    with pytest.raises(ValueError, match=rf"process {pid} on .* is learning 'task9' now"):
        page([directory], images=False)


def test_the_page_of_a_memory_is_written_under_its_lock_and_not_about_its_writer(
    moment, monkeypatch
):
    directory = moment("half")
    owners = []

    def refreshed(directory):
        owners.append(read_owner(directory))
        refresh_page(directory)

    monkeypatch.setattr(assemble, "refresh_page", refreshed)
    assemble.refresh_memory_page(directory)
    file = directory / assemble.PAGE
    assert [owner is not None and owner.is_self for owner in owners] == [True]
    assert read_owner(directory) is None
    assert "Stopped while learning" in file.read_text() and "works on it" not in file.read_text()
    file.unlink()
    with hold(directory):  # as by another process, which forgets a task
        assemble.refresh_memory_page(directory)
    assert not file.exists() and len(owners) == 1
    shutil.rmtree(directory)
    assemble.refresh_memory_page(directory)
    assert not directory.exists()


def test_tasks_forgotten_together_all_count():
    config = {
        "format": "cheem_jax-memory/1",
        "num_learned": 3,
        "data_sha256": {"left": "0"},
        "generation": 2,
    }
    assert num_forgotten(config) == 2


def test_a_page_tells_of_forgotten_and_interrupted_tasks(moment):
    assert "1 task was forgotten:" not in parsed(moment("three")).text
    assert "1 task was forgotten:" in parsed(moment("forgot")).text
    text = parsed(moment("half")).text
    assert "Stopped while learning 'task9'" in text and "2 tasks so far" in text
    assert "Stopped" not in parsed(moment("later")).text


def test_a_memory_that_cannot_be_shown_says_why(moment):
    with pytest.raises(ValueError, match=r"no task yet; `cheem learn .*empty FOLDER` adds one"):
        page([moment("empty")], images=False)
    directory = moment("three")
    config = json.loads((directory / "config.json").read_text())
    config |= {"tasks": ["task1", "task2"], "forgetting": [{"index": 0, "name": "task0"}]}
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        ValueError, match="stopped while forgetting 'task0'; the next `cheem learn`"
    ):
        page([directory], images=False)
    assert "stopped while forgetting 'task0'" in watched(directory)


def test_measurements_from_before_a_task_was_forgotten_are_marked_as_older(moment):
    directory = moment("forgot")
    results = results_in(directory)
    results["routing"][-1] = [0.25, 0.25]  # the other half was routed to the removed task
    (directory / "results.json").write_text(json.dumps(results))
    text = parsed(directory).text
    assert "images routed to it as wrong" in text
    assert "the other images were routed to a task that was forgotten since" in text
    assert "the other images were routed to" not in parsed(moment("three")).text
    assert "1 forgotten; in older measurements, images could still" in watched(directory)


def test_a_page_compares_memories_and_no_table_of_runs_lists_them(moment):
    one, other = moment("three"), moment("later")
    page = parsed(one, other)
    assert "Memory three on" in page.text
    assert "Memory later on" in page.text
    assert "comparison" not in page.ids()
    runs, left_out = finished.read([one.parent])
    assert runs == [] and {reason for _, reason in left_out} == {finished.MEMORY}


def test_watch_follows_a_memory(moment):
    empty = watched(moment("empty"))
    assert "no task yet; `cheem learn" in empty
    assert "0 tasks learned" in empty
    assert "now" not in empty
    three = watched(moment("three"))
    assert "idle since" in three
    assert "3 tasks learned" in three
    assert "right after learning" in three
    assert "– not measured: their images were not available" in three and "nan" not in three
    assert next(row for row in three.split("\n") if "T1 task0" in row).split().count("–") == 3
    half = watched(moment("half"))
    assert "stopped while learning 'task9'; the same `cheem learn` resumes it" in half
    assert "2 tasks learned" in half
    later = moment("later")
    diagonal = [row[index] for index, row in enumerate(results_in(later)["accuracy"])]
    sentence = (
        f"3 tasks learned, right after learning {100 * sum(diagonal) / 3:.1f} %, mean of 3 tasks"
    )
    assert line(read_snapshot(later, 0.0)).endswith(sentence)


def test_event_files_contain_every_measurement_and_no_average_that_is_missing(moment):
    directory = moment("three")
    write_tensorboard(Tensorboard((directory,)))
    file = directory / "tensorboard" / "cheem" / NAME
    numbers = numbers_in(file)
    diagonal = [row[i] for i, row in enumerate(results_in(directory)["accuracy"])]
    assert [numbers[f"accuracy/T{i + 1}"] for i in range(3)] == [
        [(i + 1, diagonal[i])] for i in range(3)
    ]
    assert [step for step, _ in numbers["average_accuracy"]] == [1]
    assert "average_forgetting" not in numbers


def test_the_page_counts_the_experts_that_are_there(moment):
    for name in ("forgot", "later"):
        directory = moment(name)
        there = sum(
            expert["kind"] != "gone"
            for block in cheem_jax.open(directory).info()["pool"]
            for expert in block
        )
        assert f"of the backbone: {there} in total" in parsed(directory).text


def expert(origin: int | str, parent: int | None = None, kind: str = "") -> dict[str, Any]:
    return {
        "origin": origin,
        "parent": parent,
        "kind": kind or ("full" if parent is None else "adapted"),
    }


def test_an_expert_of_a_forgotten_task_counts_from_the_start_and_is_named():
    # block 1: used by T1; block 2: T1's expert was adapted from it; blocks 3 and 4: removed
    results = {
        "pool": [
            [expert("base"), expert("forgotten")],
            [expert("base"), expert("forgotten"), expert(0, 1)],
            [expert("base"), expert("forgotten", kind="gone")],
            [expert("base"), expert("forgotten", kind="gone"), expert(1)],
        ],
        "tasks": [
            {
                "name": "cats", "architecture": ["skip", "adapt:1", "reuse:0", "skip"],
                "experts": [None, 2, 0, None], "params_added_percent": 1.0,
            },
            {
                "name": "dogs", "architecture": ["reuse:1", "skip", "skip", "new"],
                "experts": [1, None, None, 2], "params_added_percent": 1.0,
            },
        ],
    }  # fmt: skip
    charts = architectures(results)
    assert [[text for _, text, _ in cells] for _, cells, _ in charts.rows[1:]] == [
        ["skip", "†+Δ", "base", "skip"],
        ["†", "skip", "skip", "new"],
    ]
    assert "†: expert of a forgotten task" in charts.caption
    assert charts.pool[1] == [
        (-1, -1),
        (-2, -1),
        (0, 1),
    ]
    chart = pool_growth(results)
    assert chart.variants[""]["data"][0]["z"] == [[2, 2, 2], [2, 3, 3], [1, 1, 1], [1, 1, 2]]
    assert "8 in total after the last task. 2 of them remain from forgotten tasks" in chart.caption
