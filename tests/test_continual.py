"""The loop over a stream: its files, its numbers, resuming after a stop, and refused configs."""

import contextlib
import dataclasses
import functools
import hashlib
import io
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
import small
from flax import nnx
from rich.console import Console

from cheem_jax import run_config
from cheem_jax.backbone.means import base_means
from cheem_jax.baselines.catalogue import preset_of
from cheem_jax.baselines.coda_prompt import CodaPromptConfig
from cheem_jax.baselines.dualprompt import DualPromptConfig
from cheem_jax.baselines.full_finetune import FullFinetuneConfig
from cheem_jax.baselines.l2p import L2pConfig
from cheem_jax.baselines.lora_cl import LoraFinetuneConfig
from cheem_jax.continual import RunConfig, run_stream
from cheem_jax.core import metrics
from cheem_jax.core.interruption import Stopped
from cheem_jax.core.settings import FitConfig, SeedsConfig
from cheem_jax.data.task import Stream
from cheem_jax.engine.choice import EngineConfig
from cheem_jax.report.compare import timeless
from cheem_jax.run.directory import claim, hold
from cheem_jax.run.progress import Progress
from cheem_jax.run.record import read

CONFIG = RunConfig(small.QUICK, "quick", 0, None)


def quiet():
    return Progress(Console(file=io.StringIO(), force_terminal=False))


_made = {}


@pytest.fixture(autouse=True, scope="module")
def compiled_once():
    """Share executors and upper bounds between runs of equal settings and weights."""
    make = run_config.make_executor

    bound = run_config.FullFinetune

    def once(make, vit, *settings, **named):
        weights = hashlib.sha256(
            b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(nnx.state(vit)))
        )
        key = (make, weights.hexdigest(), settings, tuple(named.items()))
        if key not in _made:
            _made[key] = make(vit, *settings, **named)
        return _made[key]

    def bound_once(given, config, keys, num_tasks):  # all runs here that have a bound have one seed
        key = (id(given.executor), config)
        if key not in _made:
            _made[key] = bound(given, config, keys, num_tasks)
        return _made[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_config, "make_executor", functools.partial(once, make))
        patch.setattr(run_config, "FullFinetune", bound_once)
        yield


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
    files = {
        "config.json",
        "metrics.jsonl",
        "results.json",
        "report.html",
        "answers.npz",
        "checkpoints",
        ".lock",
    }
    assert names == files
    hashes = results["checkpoints"]["cheem"] + results["checkpoints"]["frozen_linear"]
    assert len(set(hashes)) == 4 and all(len(result) == 64 for result in hashes)
    events = [entry["event"] for entry in read(directory)]
    assert (
        events
        == ["run", "learned", "learned", "evaluated", "learned", "learned", "evaluated"]
        + ["upper_bound"] * 2
    )


def test_the_results_contain_every_documented_key(finished):
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
    assert results["router_accuracy"] == [results["routing"][0][0], results["routing"][1][1]]
    nums = [task["num_test"] for task in results["tasks"]]
    last = np.dot(nums, matrix[-1]) / sum(nums)
    assert results["last_accuracy"] == pytest.approx(last)
    assert results["incremental_accuracy"] == pytest.approx((matrix[0, 0] + last) / 2)
    for task, fitted in zip(results["tasks"], results["similarity"], strict=True):
        assert len(task["architecture"]) == 4 and len(fitted[0]) == 4
        assert {"similarity", "supernet", "search", "finetune", "router"} <= set(task["seconds"])
    assert results["compile"]["programs"] > 0
    assert results["flops"]["executed"] > 0 and results["params_added_percent"] >= 0
    bound = results["references"]["full_finetune"]
    assert len(bound["local_accuracy"]) == 2 and set(results["fom"]) == {"frozen_linear"}


@pytest.mark.parametrize(
    "place",
    [
        ("search", "task1"),
        pytest.param(("evaluate", "2 tasks, cheem"), marks=pytest.mark.full),
        pytest.param(("upper bound", "task1"), marks=pytest.mark.full),
    ],
    ids=lambda p: p[0],
)
def test_a_stopped_run_ends_as_one_that_was_not(finished, tmp_path, place):
    stream = small.stream(2)
    directory = tmp_path / "stopped"
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
        run_stream(
            stream, small.pretrained(), config, directory, Stopping(quiet().console), save_every=0
        )
    assert json.loads((directory / "results.json").read_text())["tasks"][0]["name"] == "task0"
    results = run_stream(stream, small.pretrained(), config, directory, quiet())
    assert timeless(results) == timeless(finished[1])


class Signalling(Progress):
    """Sends itself a signal at the given report of the given phase."""

    def __init__(self, place, number, signal_number):
        super().__init__(quiet().console)
        self.place, self.remaining, self.signal_number = place, number, signal_number

    @contextlib.contextmanager
    def phase(self, phase, *, task, total):
        with super().phase(phase, task=task, total=total) as shown:

            def advance(num_images, note=""):
                shown(num_images, note)
                if (phase, task) == self.place:
                    self.remaining -= 1
                    if self.remaining == 0:
                        os.kill(os.getpid(), self.signal_number)

            yield advance


STOPS = [
    pytest.param("similarity", "task1", 1, False, marks=pytest.mark.full),
    pytest.param("supernet", "task0", 1, True, marks=pytest.mark.full),
    ("supernet", "task1", 5, True),
    ("search", "task0", 3, True),
    pytest.param("finetune", "task1", 4, True, marks=pytest.mark.full),
    pytest.param("finetune", "task0", 12, True, marks=pytest.mark.full),
    pytest.param("means", "task1", 1, True, marks=pytest.mark.full),
    pytest.param("evaluate", "2 tasks, cheem", 1, False, marks=pytest.mark.full),
]


@pytest.mark.parametrize(("phase", "task", "number", "saved"), STOPS, ids=lambda value: str(value))
def test_a_signal_saves_after_the_running_step_and_the_run_resumes_exactly(
    finished, tmp_path, phase, task, number, saved
):
    directory = tmp_path / "run"
    stream = small.stream(2)
    kind = signal.SIGTERM if number % 2 else signal.SIGINT
    with pytest.raises(Stopped) as stopped:
        run_stream(
            stream, small.pretrained(), CONFIG, directory, Signalling((phase, task), number, kind)
        )
    assert stopped.value.signal_number == kind
    assert saved == any((directory / "checkpoints" / "cheem").glob("running-*"))
    result = run_stream(stream, small.pretrained(), CONFIG, directory, quiet())
    assert timeless(result) == timeless(alone(finished))
    assert not any((directory / "checkpoints" / "cheem").glob("*running-*"))


def alone(finished):
    """The finished run's results less its upper bound."""
    results = json.loads(json.dumps(finished[1]))
    del results["references"]["full_finetune"]
    return results | {"fom": None}


@pytest.mark.full
def test_the_sweep_of_the_upper_bound_resumes_in_the_middle(finished, tmp_path):
    stream = small.stream(2)
    directory = tmp_path / "run"
    config = dataclasses.replace(CONFIG, upper_bound=FullFinetuneConfig(2, (1e-9, 1e-3), 16))
    whole = run_stream(stream, small.pretrained(), config, tmp_path / "whole", quiet())
    for number in (2, 9):  # in the first rate, and in the second
        with pytest.raises(Stopped):
            place = ("upper bound", "task0") if number == 2 else ("upper bound", "task1")
            progress = Signalling(place, number, signal.SIGINT)
            run_stream(stream, small.pretrained(), config, directory, progress)
        assert any((directory / "checkpoints" / "full_finetune").glob("running-*"))
    assert timeless(run_stream(stream, small.pretrained(), config, directory, quiet())) == timeless(
        whole
    )


@pytest.mark.full
@pytest.mark.parametrize(
    "name, score", [("whole", "shared_head"), ("scan", "shared_head"), ("stages", "closed_form")]
)
def test_resuming_is_exact_with_every_executor_and_score(tmp_path, name, score):
    method = dataclasses.replace(CONFIG.method, score=score, score_images=24)
    config = dataclasses.replace(
        CONFIG, method=method, engine=EngineConfig(executor=name, steps_per_call=2)
    )
    stream = small.stream(1)
    whole = run_stream(stream, small.pretrained(), config, tmp_path / "whole", quiet())
    for phase, number in (("supernet", 3), ("search", 5), ("finetune", 3)):
        with pytest.raises(Stopped):
            progress = Signalling((phase, "task0"), number, signal.SIGINT)
            run_stream(stream, small.pretrained(), config, tmp_path / "run", progress)
    result = run_stream(stream, small.pretrained(), config, tmp_path / "run", quiet())
    assert timeless(result) == timeless(whole)


@pytest.mark.full
def test_earlier_runs_in_the_process_change_nothing(finished, tmp_path):
    run_stream(small.stream(1), small.pretrained(3), CONFIG, tmp_path / "other", quiet())
    result = run_stream(small.stream(2), small.pretrained(), CONFIG, tmp_path / "run", quiet())
    assert result["checkpoints"] == finished[1]["checkpoints"]


@pytest.mark.full
def test_seeds_of_parts_vary_that_part_alone(tmp_path):
    stream = small.stream(1)

    def run(**seeds):
        config = dataclasses.replace(CONFIG, seeds=SeedsConfig(**seeds))
        directory = tmp_path / ("-".join(f"{part}{seed}" for part, seed in seeds.items()) or "none")
        run_stream(stream, small.pretrained(), config, directory, quiet())
        report = next(entry["report"] for entry in read(directory) if entry["event"] == "learned")
        return report["supernet_losses"], report["searched"], report["architecture"]

    plain = run()
    assert run(initialisation=0)[0] == plain[0]  # the run's own seed, by name
    assert run(search=7)[0] == plain[0]
    for part in ("initialisation", "order", "sampling"):
        assert run(**{part: 7})[0] != plain[0]


def test_a_full_disk_is_reported_before_a_task_begins(tmp_path, monkeypatch):
    free = shutil.disk_usage(tmp_path)._replace(free=2**20)
    monkeypatch.setattr(shutil, "disk_usage", lambda directory: free)
    with pytest.raises(
        ValueError, match=r"task 'task0' takes at most 4\.\d MB on the disk .* has 1\.0 MB left"
    ):
        run_stream(small.stream(1), small.pretrained(), CONFIG, tmp_path / "run", quiet())
    monkeypatch.undo()
    run_stream(small.stream(1), small.pretrained(), CONFIG, tmp_path / "run", quiet())


def test_a_corrupted_task_is_named_and_the_others_are_not(finished, tmp_path):
    directory = tmp_path / "copy"
    shutil.copytree(finished[0], directory)
    (directory / "checkpoints" / "cheem" / "001-task1" / "task.json").write_text("{}")
    with pytest.raises(ValueError, match="001-task1 is corrupted.*the other tasks are intact"):
        run_stream(small.stream(2), small.pretrained(), CONFIG, directory, quiet())


@pytest.mark.full
def test_another_runs_checkpoint_in_the_place_of_ones_own_is_noticed(finished, tmp_path):
    other = dataclasses.replace(CONFIG, seed=1)
    run_stream(small.stream(1), small.pretrained(), other, tmp_path / "other", quiet())
    directory = tmp_path / "copy"
    shutil.copytree(finished[0], directory)
    shutil.rmtree(directory / "checkpoints" / "frozen_linear" / "000-task0")
    shutil.copytree(
        tmp_path / "other/checkpoints/frozen_linear/000-task0",
        directory / "checkpoints/frozen_linear/000-task0",
    )
    with pytest.raises(
        ValueError, match="frozen_linear/000-task0 is whole, but not the one that this run saved"
    ):
        run_stream(small.stream(2), small.pretrained(), CONFIG, directory, quiet())


def test_a_finished_run_is_shown_again_and_learns_nothing(finished):
    directory, results = finished
    before = (directory / "metrics.jsonl").read_text()
    config = dataclasses.replace(CONFIG, upper_bound=FullFinetuneConfig(2, (1e-3,), 16))
    again = run_stream(small.stream(2), small.pretrained(), config, directory, quiet())
    assert again == results and (directory / "metrics.jsonl").read_text() == before


@pytest.mark.full
def test_a_run_with_other_settings_is_refused(finished, tmp_path):
    old = tmp_path / "old"
    shutil.copytree(finished[0], old)
    config = json.loads((old / "config.json").read_text())
    for changed, difference in (
        ({"gone": 2}, "cheem.gone is 2 there and missing here"),
        ({"augment": True}, "cheem.augment is true there and false here"),
    ):
        cheem = {**config["cheem"], **changed}
        (old / "config.json").write_text(json.dumps({**config, "cheem": cheem}))
        with pytest.raises(ValueError, match=rf"{difference}\. Choose"):
            run_stream(small.stream(2), small.pretrained(), CONFIG, old, quiet())


def test_a_directory_of_another_run_is_refused_with_the_difference(finished):
    directory, _ = finished
    before = (directory / "config.json").read_text()
    with pytest.raises(ValueError, match=r"seed is 0 there and 7 here"):
        run_stream(
            small.stream(2),
            small.pretrained(),
            dataclasses.replace(CONFIG, seed=7),
            directory,
            quiet(),
        )
    changed = Stream("small", (small.task("task0", 5), *small.stream(2).tasks[1:]))
    with pytest.raises(ValueError, match=r"data_sha256.task0 is"):
        run_stream(changed, small.pretrained(), CONFIG, directory, quiet())
    assert (directory / "config.json").read_text() == before


def test_the_same_tasks_in_another_order_are_another_run(finished):
    directory, _ = finished
    turned = Stream("small", small.stream(2).tasks[::-1])
    with pytest.raises(ValueError, match=r'tasks\[0\] is "task0" there and "task1" here \('):
        run_stream(turned, small.pretrained(), CONFIG, directory, quiet())


@pytest.mark.full
def test_a_run_that_measured_base_means_resumes_where_they_are_rounded_otherwise(
    tmp_path, monkeypatch
):
    stream = small.stream(2)
    directory = tmp_path / "run"
    pictures = small.task("base", 9).train.images
    run = functools.partial(run_stream, config=CONFIG, directory=directory, progress=quiet())
    with monkeypatch.context() as patched:
        patched.setattr(run_config.FrozenLinear, "learn", stopped)
        with pytest.raises(Stopped):
            run(stream, small.pretrained(), base_images=pictures)
    held = json.loads((directory / "config.json").read_text())
    assert held["base_means_sha256"] is None and held["base_data_sha256"] is not None

    with pytest.raises(ValueError, match="base_data_sha256 is"):
        run(stream, small.pretrained(), base_images=pictures[::2])
    with pytest.raises(ValueError, match="base_data_sha256 is"):
        run(stream, small.pretrained())

    def on_another_machine(vit, images, *, batch_size):
        return {
            place: means * np.float32(1 + 1e-6) for place, means in base_means(vit, images).items()
        }

    monkeypatch.setattr(run_config, "base_means", on_another_machine)
    assert run(stream, small.pretrained(), base_images=pictures)["base_means"] == "known"


def stopped(*_):
    raise Stopped("nothing was kept", signal.SIGINT)


@pytest.mark.full
def test_an_upper_bound_can_be_added_to_a_finished_run(tmp_path):
    stream = small.stream(1)
    directory = tmp_path / "run"
    alone = run_stream(stream, small.pretrained(), CONFIG, directory, quiet())
    assert set(alone["references"]) == {"frozen_linear"} and alone["average_forgetting"] is None
    bound = dataclasses.replace(CONFIG, upper_bound=FullFinetuneConfig(1, (1e-3,), 16))
    both = run_stream(stream, small.pretrained(), bound, directory, quiet())
    assert both["accuracy"] == alone["accuracy"] and "full_finetune" in both["references"]


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
    with pytest.raises(ValueError, match="is not a run directory"):
        claim(tmp_path, {"seed": 0})
    assert [f.name for f in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_first_write_that_was_killed_does_not_block_the_directory(tmp_path):
    (tmp_path / ".config.json.123.tmp").write_text("{")
    assert not claim(tmp_path, {"seed": 0})
    assert claim(tmp_path, {"seed": 0})


def test_images_of_another_size_than_the_backbones_are_refused(tmp_path):
    big = small.task("task0", 0)
    split = dataclasses.replace(
        big.train, images=np.repeat(np.repeat(big.train.images, 2, 1), 2, 2)
    )
    val = dataclasses.replace(big.val, images=np.repeat(np.repeat(big.val.images, 2, 1), 2, 2))
    test = dataclasses.replace(big.test, images=np.repeat(np.repeat(big.test.images, 2, 1), 2, 2))
    task = dataclasses.replace(big, train=split, val=val, test=test)
    with pytest.raises(ValueError, match=r"shape \(16, 16, 3\), but vit_test expects \(8, 8, 3\)"):
        run_stream(Stream("big", (task,)), small.pretrained(), CONFIG, tmp_path / "run", quiet())
    assert not (tmp_path / "run").exists()


def test_a_directory_that_another_process_uses_is_refused_with_its_number(tmp_path):
    claim(tmp_path / "run", {"seed": 0})
    program = (
        "import sys; from pathlib import Path; from cheem_jax.run.directory import hold\n"
        "with hold(Path(sys.argv[1])): print('held', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "run")]
    root = Path(__file__).parent.parent
    other = subprocess.Popen(
        command, cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert (
        other.stdout is not None and other.stdin is not None and other.stdout.readline() == "held\n"
    )
    with pytest.raises(
        ValueError, match=f"is in use by process {other.pid} on {socket.gethostname()}"
    ):
        with hold(tmp_path / "run"):
            pass
    with pytest.raises(ValueError, match=f"is in use by process {other.pid}"):
        run_stream(
            small.stream(1),
            small.pretrained(),
            dataclasses.replace(CONFIG, seed=5),
            tmp_path / "run",
            quiet(),
        )
    assert json.loads((tmp_path / "run" / "config.json").read_text()) == {"seed": 0}
    other.kill()
    other.wait()
    other.stdout.close()
    other.stdin.close()
    with hold(tmp_path / "run"):  # the system let go of it
        pass


@pytest.mark.parametrize(
    "method",
    [
        pytest.param(
            L2pConfig(pool=4, length=4, top_k=1, fit=FitConfig(2, 1e-2), batch_size=16),
            marks=pytest.mark.full,
        ),
        LoraFinetuneConfig(rank=2, fit=FitConfig(2, 1e-2), batch_size=16),
    ],
    ids=lambda config: config.name,
)
def test_any_method_runs_stops_resumes_and_has_a_report(method, tmp_path):
    config = RunConfig(method, "quick")
    stream = small.stream(2)
    whole = run_stream(stream, small.pretrained(), config, tmp_path / "whole", quiet())
    with pytest.raises(Stopped):
        progress = Signalling(("train", "task1"), 2, signal.SIGINT)
        run_stream(stream, small.pretrained(), config, tmp_path / "run", progress)
    result = run_stream(stream, small.pretrained(), config, tmp_path / "run", quiet())
    assert timeless(result) == timeless(whole)
    assert (
        result["method"] == method.name
        and result["references"] == {}
        and result["base_means"] is None
    )
    assert result["flops"].keys() == {"paper", "explicit", "executed"}
    assert result["params_stored"] == sum(task["params_stored"] for task in result["tasks"])
    is_given = method.name == "lora_finetune"
    assert (result["accuracy"] == result["local_accuracy"]) == is_given
    page = (tmp_path / "run" / "report.html").read_text()
    assert ("<h2>Architectures</h2>" in page) == is_given and "<h2>Similarity" not in page


def test_settings_that_cannot_work_with_the_stream_are_refused_before_anything_is_made(tmp_path):
    for config, message in (
        (CodaPromptConfig(pool=1, layers=(0,), batch_size=16), "pool"),
        (
            DualPromptConfig(pool=1, general_layers=(0,), expert_layers=(1,), batch_size=16),
            "has none for task 2",
        ),
        (preset_of("cheem_lite", "demo"), "give it one: --router"),
    ):
        with pytest.raises(ValueError, match=message):
            run_stream(
                small.stream(2),
                small.pretrained(),
                RunConfig(config, "demo"),
                tmp_path / "run",
                quiet(),
            )
    assert not (tmp_path / "run").exists()


@pytest.mark.full
def test_a_run_writes_event_files_while_it_runs_and_refuses_early_if_it_cannot(
    tmp_path, monkeypatch
):
    config = RunConfig(preset_of("frozen_linear", "quick"), "quick")
    run_stream(
        small.stream(2), small.pretrained(), config, tmp_path / "run", quiet(), tensorboard=True
    )
    events = tmp_path / "run" / "tensorboard" / "frozen_linear" / "events.out.tfevents.cheem_jax"
    assert events.read_bytes().count(b"average_accuracy") >= 2
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(ValueError, match=r"pip install 'cheem_jax\[tensorboard\]'"):
        run_stream(
            small.stream(2),
            small.pretrained(),
            config,
            tmp_path / "other",
            quiet(),
            tensorboard=True,
        )
    assert not (tmp_path / "other").exists()


def test_accuracies_can_be_computed_from_the_answers_of_a_run(finished):
    directory, results = finished
    with np.load(directory / "answers.npz", allow_pickle=False) as answers:
        for index, task in enumerate(small.stream(2).tasks):
            right = answers[f"given_task_{index}"] == task.test.labels
            right &= answers[f"chosen_task_{index}"] == index
            assert right.mean() == results["accuracy"][-1][index]
            assert (answers[f"given_task_{index}"] == task.test.labels).mean() == results[
                "local_accuracy"
            ][-1][index]
