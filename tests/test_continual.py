"""The loop over a stream: its files, its numbers, going on after a stop, and another config refused."""

import dataclasses
import io
import json
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import small
from rich.console import Console

from cheem_jax import metrics
from cheem_jax.continual import RunConfig, run_stream
from cheem_jax.data.task import Stream
from cheem_jax.methods.full_finetune import FullFinetuneConfig
from cheem_jax.report.progress import Progress
from cheem_jax.report.record import read
from cheem_jax.run_directory import claim, hold

CONFIG = RunConfig(small.QUICK, "quick", 0, None)


def quiet():
    return Progress(Console(file=io.StringIO(), force_terminal=False))


def without_times(results):
    """Results less what a clock or the memory of the process decides."""
    timed = ("seconds", "seconds_total", "peak_memory_bytes", "compile")
    if isinstance(results, dict):
        return {key: without_times(value) for key, value in results.items() if key not in timed}
    return [without_times(value) for value in results] if isinstance(results, list) else results


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of two tasks with the upper bound."""
    directory = tmp_path_factory.mktemp("runs") / "whole"
    config = dataclasses.replace(CONFIG, upper_bound=FullFinetuneConfig(2, (1e-3,), 16))
    return directory, run_stream(small.stream(2), small.pretrained(), config, directory, quiet())


def test_a_run_leaves_its_files_and_the_record_tells_its_numbers(finished):
    directory, results = finished
    assert json.loads((directory / "results.json").read_text()) == json.loads(json.dumps(results))
    names = {file.name for file in directory.iterdir()}
    assert names == {"config.json", "metrics.jsonl", "results.json", "report.md", "checkpoints", "figures", ".lock"}
    hashes = results["checkpoints"]["cheem"] + results["checkpoints"]["frozen_linear"]
    assert len(set(hashes)) == 4 and all(len(found) == 64 for found in hashes)
    assert {f.name for f in (directory / "figures").iterdir()} >= {
        "architectures.png",
        "accuracy.png",
        "similarity.png",
    }
    events = [entry["event"] for entry in read(directory)]
    assert events == ["run", "learned", "learned", "evaluated", "learned", "learned", "evaluated"] + ["upper_bound"] * 2


def test_the_results_hold_what_a_reader_expects(finished):
    _, results = finished
    assert (results["method"], results["backbone"], results["stream"], results["seed"]) == (
        "cheem",
        "vit_test",
        "small",
        0,
    )
    matrix = metrics.matrix_from_json(results["accuracy"])
    assert results["accuracy"][0][1] is None
    assert results["average_accuracy"] == pytest.approx(np.mean(matrix[-1]))
    assert results["local_average_forgetting"] == 0
    local = results["local_accuracy"]
    assert local[1][0] == local[0][0] == results["just_trained"][0]
    np.testing.assert_allclose(np.sum(results["routing"], axis=1), 1)
    for task, fitted in zip(results["tasks"], results["similarity"], strict=True):
        assert len(task["architecture"]) == 4 and len(fitted[0]) == 4
        assert {"similarity", "supernet", "search", "finetune", "router"} <= set(task["seconds"])
    assert results["compile"]["programs"] > 0
    assert results["flops"]["executed"] > 0 and results["params_added_percent"] >= 0
    bound = results["yardsticks"]["full_finetune"]
    assert len(bound["local_accuracy"]) == 2 and set(results["fom"]) == {"frozen_linear"}


@pytest.mark.parametrize(
    "place", [("search", "task1"), ("evaluate", "2 tasks, cheem"), ("upper bound", "task1")], ids=lambda p: p[0]
)
def test_a_stopped_run_ends_as_one_that_was_not(finished, tmp_path, place):
    stream, directory = small.stream(2), tmp_path / "stopped"
    config = dataclasses.replace(CONFIG, upper_bound=FullFinetuneConfig(2, (1e-3,), 16))

    class Stop(Exception):
        pass

    class Stopping(Progress):
        """Stops as the given phase begins."""

        def phase(self, phase, *, task, total):
            if (phase, task) == place:
                raise Stop
            return super().phase(phase, task=task, total=total)

    with pytest.raises(Stop):
        run_stream(stream, small.pretrained(), config, directory, Stopping(quiet().console))
    assert json.loads((directory / "results.json").read_text())["tasks"][0]["name"] == "task0"
    results = run_stream(stream, small.pretrained(), config, directory, quiet())
    assert without_times(results) == without_times(finished[1])


def test_a_finished_run_is_shown_again_and_learns_nothing(finished):
    directory, results = finished
    before = (directory / "metrics.jsonl").read_text()
    config = dataclasses.replace(CONFIG, upper_bound=FullFinetuneConfig(2, (1e-3,), 16))
    again = run_stream(small.stream(2), small.pretrained(), config, directory, quiet())
    assert again == results and (directory / "metrics.jsonl").read_text() == before


def test_a_directory_of_another_run_is_refused_with_the_difference(finished):
    directory, _ = finished
    before = (directory / "config.json").read_text()
    with pytest.raises(ValueError, match=r"seed is 0 there and 7 here"):
        run_stream(small.stream(2), small.pretrained(), dataclasses.replace(CONFIG, seed=7), directory, quiet())
    changed = Stream("small", (small.task("task0", 5), *small.stream(2).tasks[1:]))
    with pytest.raises(ValueError, match=r"data_sha256.task0 is"):
        run_stream(changed, small.pretrained(), CONFIG, directory, quiet())
    assert (directory / "config.json").read_text() == before


def test_the_same_tasks_in_another_order_are_another_run(finished):
    directory, _ = finished
    turned = Stream("small", small.stream(2).tasks[::-1])
    with pytest.raises(ValueError, match=r'tasks is \["task0", "task1"\] there and \["task1", "task0"\] here'):
        run_stream(turned, small.pretrained(), CONFIG, directory, quiet())


def test_an_upper_bound_can_be_added_to_a_finished_run(tmp_path):
    stream, directory = small.stream(1), tmp_path / "run"
    alone = run_stream(stream, small.pretrained(), CONFIG, directory, quiet())
    assert set(alone["yardsticks"]) == {"frozen_linear"} and alone["average_forgetting"] is None
    bound = dataclasses.replace(CONFIG, upper_bound=FullFinetuneConfig(1, (1e-3,), 16))
    both = run_stream(stream, small.pretrained(), bound, directory, quiet())
    assert both["accuracy"] == alone["accuracy"] and "full_finetune" in both["yardsticks"]


def test_a_run_whose_record_was_lost_is_refused(finished, tmp_path):
    directory = tmp_path / "copy"
    shutil.copytree(finished[0], directory)
    (directory / "metrics.jsonl").unlink()
    with pytest.raises(ValueError, match="record and checkpoints .* differ"):
        run_stream(small.stream(2), small.pretrained(), CONFIG, directory, quiet())
    shutil.copy(finished[0] / "metrics.jsonl", directory)
    shutil.rmtree(directory / "checkpoints" / "cheem" / "001-task1")
    with pytest.raises(ValueError, match="record and checkpoints .* differ"):
        run_stream(small.stream(2), small.pretrained(), CONFIG, directory, quiet())


def test_a_folder_of_something_else_is_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(ValueError, match="is no run directory"):
        claim(tmp_path, {"seed": 0})
    assert [f.name for f in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_first_write_that_was_killed_does_not_block_the_directory(tmp_path):
    (tmp_path / ".config.json.123.tmp").write_text("{")
    assert not claim(tmp_path, {"seed": 0})
    assert claim(tmp_path, {"seed": 0})


def test_images_of_another_size_than_the_backbones_are_refused(tmp_path):
    big = small.task("task0", 0)
    split = dataclasses.replace(big.train, images=np.repeat(np.repeat(big.train.images, 2, 1), 2, 2))
    val = dataclasses.replace(big.val, images=np.repeat(np.repeat(big.val.images, 2, 1), 2, 2))
    test = dataclasses.replace(big.test, images=np.repeat(np.repeat(big.test.images, 2, 1), 2, 2))
    task = dataclasses.replace(big, train=split, val=val, test=test)
    with pytest.raises(ValueError, match=r"shape \(16, 16, 3\), but vit_test takes \(8, 8, 3\)"):
        run_stream(Stream("big", (task,)), small.pretrained(), CONFIG, tmp_path / "run", quiet())
    assert not (tmp_path / "run").exists()


def test_a_directory_that_another_process_uses_is_refused_with_its_number(tmp_path):
    claim(tmp_path / "run", {"seed": 0})
    program = (
        "import sys; from pathlib import Path; from cheem_jax.run_directory import hold\n"
        "with hold(Path(sys.argv[1])): print('held', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "run")]
    root = Path(__file__).parent.parent
    other = subprocess.Popen(command, cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert other.stdout is not None and other.stdin is not None and other.stdout.readline() == "held\n"
    with pytest.raises(ValueError, match=f"is in use by process {other.pid} on {socket.gethostname()}"):
        with hold(tmp_path / "run"):
            pass
    other.kill()
    other.wait()
    other.stdout.close()
    other.stdin.close()
    with hold(tmp_path / "run"):  # the system let go of it
        pass
