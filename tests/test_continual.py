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
from unittest.mock import Mock

import jax
import numpy as np
import pytest
import small
from flax import nnx
from rich.console import Console

from cheem_jax import run_config
from cheem_jax.backbone.means import base_means
from cheem_jax.baselines.catalogue import make_preset
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
from cheem_jax.run import peak
from cheem_jax.run.directory import claim, hold
from cheem_jax.run.peak import Peak
from cheem_jax.run.progress import Progress
from cheem_jax.run.record import Record, read
from cheem_jax.run.rolling import Rolling, Saved

CONFIG = RunConfig(small.QUICK, "quick", 0, None)


BOUNDED = dataclasses.replace(CONFIG, upper_bound=FullFinetuneConfig(2, (1e-3,), 16))
STREAM = small.stream(2)
ONE_TASK = small.stream(1)


def quiet():
    return Progress(Console(file=io.StringIO(), force_terminal=False))


def run(directory, stream=STREAM, config=CONFIG, progress=None, **options):
    """Run a stream on the small backbone, and return its results."""
    progress = progress or quiet()
    return run_stream(stream, small.pretrained(), config, directory, progress, **options)


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
    return directory, run(directory, config=BOUNDED)


@pytest.fixture
def copy(finished, tmp_path):
    """A copy of the directory of the finished run."""
    return Path(shutil.copytree(finished[0], tmp_path / "copy"))


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
    assert events == [
        "run",
        "learned",
        "learned",
        "evaluated",
        "learned",
        "learned",
        "evaluated",
    ] + ["open_set", "upper_bound", "upper_bound"]


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
    (step,) = results["open_set"]  # after the first of two tasks
    assert set(step) == {"auroc", "fpr95"} and 0 <= step["auroc"] <= 1
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
    directory = tmp_path / "stopped"

    class Stop(Exception):
        pass

    class Stopping(Progress):
        """Raises an error as the given phase begins."""

        def phase(self, phase, *, task, total):
            if (phase, task) == place:
                raise Stop
            return super().phase(phase, task=task, total=total)

    with pytest.raises(Stop):
        run(directory, config=BOUNDED, progress=Stopping(quiet().console), save_every=0)
    assert json.loads((directory / "results.json").read_text())["tasks"][0]["name"] == "task0"
    assert timeless(run(directory, config=BOUNDED)) == timeless(finished[1])


def spend(directory, method, number, seconds):
    """Pretend that the killed process has worked so long on the task with this number."""
    rolling = Rolling(directory / "checkpoints" / method)
    saved = rolling.open(number, print)
    assert saved is not None and "spent" in saved.meta
    rolling.save(number, lambda: Saved(saved.arrays, saved.meta | {"spent": seconds}))


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
    kind = signal.SIGTERM if number % 2 else signal.SIGINT
    with pytest.raises(Stopped) as stopped:
        run(directory, progress=Signalling((phase, task), number, kind))
    assert stopped.value.signal_number == kind
    assert saved == any((directory / "checkpoints" / "cheem").glob("running-*"))
    # the results without the upper bound
    expected = json.loads(json.dumps(finished[1])) | {"fom": None}
    del expected["references"]["full_finetune"]
    assert timeless(run(directory)) == timeless(expected)
    assert not any((directory / "checkpoints" / "cheem").glob("*running-*"))


@pytest.mark.full
def test_the_sweep_of_the_upper_bound_resumes_in_the_middle(tmp_path):
    directory = tmp_path / "run"
    config = dataclasses.replace(CONFIG, upper_bound=FullFinetuneConfig(2, (1e-9, 1e-3), 16))
    whole = run(tmp_path / "whole", config=config)
    for task, number in (("task0", 2), ("task1", 9)):  # in the first rate, and in the second
        with pytest.raises(Stopped):
            progress = Signalling(("upper bound", task), number, signal.SIGINT)
            run(directory, config=config, progress=progress)
        assert any((directory / "checkpoints" / "full_finetune").glob("running-*"))
    spend(directory, "full_finetune", 1, 1e6)
    result = run(directory, config=config)
    assert timeless(result) == timeless(whole)
    assert result["references"]["full_finetune"]["seconds"] > 1e6


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("whole", {}),
        ("scan", {"sampling": "anchored"}),
        ("stages", {"augment": True}),
    ],
)
def test_resuming_is_exact_with_every_executor_search_and_augmentation(tmp_path, name, settings):
    method = dataclasses.replace(small.QUICK, **settings)
    config = dataclasses.replace(
        CONFIG, method=method, engine=EngineConfig(executor=name, steps_per_call=2)
    )
    whole = run(tmp_path / "whole", ONE_TASK, config)
    phases = [("supernet", 3), ("search", 1), ("search", 5), ("finetune", 3)]
    for phase, number in phases[method.sampling == "anchored" :]:
        with pytest.raises(Stopped):
            progress = Signalling((phase, "task0"), number, signal.SIGINT)
            run(tmp_path / "run", ONE_TASK, config, progress)
    assert timeless(run(tmp_path / "run", ONE_TASK, config)) == timeless(whole)


@pytest.mark.full
def test_earlier_runs_in_the_process_change_nothing(finished, tmp_path):
    run_stream(ONE_TASK, small.pretrained(3), CONFIG, tmp_path / "other", quiet())
    result = run(tmp_path / "run")
    assert result["checkpoints"] == finished[1]["checkpoints"]


@pytest.mark.full
def test_seeds_of_parts_vary_that_part_alone(tmp_path):
    def learned(**seeds):
        config = dataclasses.replace(CONFIG, seeds=SeedsConfig(**seeds))
        directory = tmp_path / ("-".join(f"{part}{seed}" for part, seed in seeds.items()) or "none")
        run(directory, ONE_TASK, config)
        report = next(entry["report"] for entry in read(directory) if entry["event"] == "learned")
        return report["supernet_losses"], report["searched"], report["architecture"]

    plain = learned()
    assert learned(initialisation=0)[0] == plain[0]  # the run's own seed, by name
    assert learned(search=7)[0] == plain[0]
    for part in ("initialisation", "order", "sampling"):
        assert learned(**{part: 7})[0] != plain[0]


def test_a_full_disk_is_reported_before_a_task_begins(tmp_path, monkeypatch):
    free = shutil.disk_usage(tmp_path)._replace(free=2**20)
    monkeypatch.setattr(shutil, "disk_usage", lambda directory: free)
    with pytest.raises(
        ValueError, match=r"task 'task0' needs at most [45]\.\d MB on disk .* has only 1\.0 MB"
    ):
        run(tmp_path / "run", ONE_TASK)
    monkeypatch.undo()
    run(tmp_path / "run", ONE_TASK)


def test_a_corrupted_task_is_named_and_the_others_are_not(copy):
    (copy / "checkpoints" / "cheem" / "001-task1" / "task.json").write_text("{}")
    with pytest.raises(ValueError, match="001-task1 is corrupted.*the other tasks are intact"):
        run(copy)


@pytest.mark.full
def test_a_checkpoint_of_another_run_is_noticed(copy, tmp_path):
    run(tmp_path / "other", ONE_TASK, dataclasses.replace(CONFIG, seed=1))
    place = "checkpoints/frozen_linear/000-task0"
    shutil.rmtree(copy / place)
    shutil.copytree(tmp_path / "other" / place, copy / place)
    with pytest.raises(
        ValueError,
        match="frozen_linear/000-task0 is complete, but it is not the checkpoint of this run",
    ):
        run(copy)


def test_a_finished_run_is_shown_again_and_learns_nothing(finished):
    directory, results = finished
    before = (directory / "metrics.jsonl").read_text()
    again = run(directory, config=BOUNDED)
    assert again == results and (directory / "metrics.jsonl").read_text() == before


@pytest.mark.parametrize(
    ("changed", "difference"),
    [
        ({"config": dataclasses.replace(CONFIG, seed=7)}, "seed is 0 there and 7 here"),
        (
            {"config": dataclasses.replace(CONFIG, method=small.AUGMENTED)},
            "cheem.augment is false there and true here",
        ),
        (
            {"stream": Stream("small", (small.task("task0", 5), *STREAM.tasks[1:]))},
            "data_sha256.task0 is",
        ),
        (
            {"config": dataclasses.replace(CONFIG, measured_on="validation")},
            r'measured_on is missing there and "validation" here .*of that run$',
        ),
        (
            {"stream": Stream("small", STREAM.tasks[::-1])},
            r'tasks\[0\] is "task0" there and "task1" here \(',
        ),
        (
            {"config": dataclasses.replace(CONFIG, upper_bound=FullFinetuneConfig(1, (1e-3,), 16))},
            "has an upper bound with other settings: epochs is 2 there and 1 here",
        ),
    ],
    ids=["seed", "settings", "data", "split", "order", "upper bound"],
)
def test_a_directory_of_another_run_is_refused_with_the_difference(finished, changed, difference):
    directory, _ = finished
    before = (directory / "config.json").read_text()
    with pytest.raises(ValueError, match=difference):
        run(directory, **changed)
    assert (directory / "config.json").read_text() == before


def test_routers_of_one_file_with_other_settings_belong_to_different_runs(tmp_path):
    router = small.pretrained(1)
    changed = dataclasses.replace(router, config=dataclasses.replace(router.config, mean=(0, 0, 1)))
    first, second = (
        run_config.RunInputs(STREAM, small.pretrained(), network, CONFIG).identity()
        for network in (router, changed)
    )
    claim(tmp_path / "run", first)
    with pytest.raises(ValueError, match=r"router.mean\[0\] is 0.485 there and 0 here"):
        claim(tmp_path / "run", second)
    earlier = {name: value for name, value in first.items() if name != "router"}
    claim(tmp_path / "earlier", earlier)
    assert claim(tmp_path / "earlier", first)


@pytest.mark.full
def test_a_run_that_measured_base_means_resumes_where_they_are_rounded_otherwise(
    tmp_path, monkeypatch
):
    directory = tmp_path / "run"
    images = small.task("base", 9).train.images

    def stopped(*_):
        raise Stopped("nothing was kept", signal.SIGINT)

    with monkeypatch.context() as patched:
        patched.setattr(run_config.FrozenLinear, "learn", stopped)
        with pytest.raises(Stopped):
            run(directory, base_images=images)
    held = json.loads((directory / "config.json").read_text())
    assert held["base_means_sha256"] is None and held["base_data_sha256"] is not None

    for other in ({"base_images": images[::2]}, {}):
        with pytest.raises(ValueError, match="base_data_sha256 is"):
            run(directory, **other)

    def on_another_machine(vit, images, *, batch_size):
        return {
            place: means * np.float32(1 + 1e-6) for place, means in base_means(vit, images).items()
        }

    monkeypatch.setattr(run_config, "base_means", on_another_machine)
    assert run(directory, base_images=images)["base_means"] == "known"


@pytest.mark.full
def test_an_upper_bound_can_be_added_to_a_finished_run(tmp_path):
    directory = tmp_path / "run"
    alone = run(directory, ONE_TASK)
    assert set(alone["references"]) == {"frozen_linear"} and alone["average_forgetting"] is None
    both = run(directory, ONE_TASK, BOUNDED)
    assert both["accuracy"] == alone["accuracy"] and "full_finetune" in both["references"]


def test_an_upper_bound_that_was_never_measured_can_have_other_settings(copy):
    Record(copy).replace([entry for entry in read(copy) if entry["event"] != "upper_bound"])
    other = dataclasses.replace(CONFIG, upper_bound=FullFinetuneConfig(1, (1e-3,), 16))
    assert "full_finetune" in run(copy, config=other)["references"]
    with pytest.raises(ValueError, match="epochs is 1 there and 2 here"):
        run(copy, config=BOUNDED)


@pytest.mark.parametrize(
    "lost", ["metrics.jsonl", "checkpoints/cheem/000-task0", "checkpoints/cheem/001-task1"]
)
def test_a_run_whose_record_or_checkpoint_was_lost_is_refused_until_it_is_restored(copy, lost):
    results = (copy / "results.json").read_bytes()
    record = (copy / "metrics.jsonl").read_bytes()
    (copy / lost).rename(copy.parent / "lost")
    with pytest.raises(ValueError, match="record and checkpoints .* differ"):
        run(copy)
    (copy.parent / "lost").rename(copy / lost)
    assert (copy / "metrics.jsonl").read_bytes() == record
    run(copy)
    assert (copy / "results.json").read_bytes() == results


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
    task = small.enlarged(small.task("task0", 0))
    with pytest.raises(ValueError, match=r"shape \(16, 16, 3\), but vit_test expects \(8, 8, 3\)"):
        run(tmp_path / "run", Stream("big", (task,)))
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
    assert other.stdout is not None
    assert other.stdin is not None
    assert other.stdout.readline() == "held\n"
    with pytest.raises(
        ValueError, match=f"is in use by process {other.pid} on {socket.gethostname()}"
    ):
        with hold(tmp_path / "run"):
            pass
    with pytest.raises(ValueError, match=f"is in use by process {other.pid}"):
        run(tmp_path / "run", ONE_TASK, dataclasses.replace(CONFIG, seed=5))
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
    display = quiet()
    whole = run(tmp_path / "whole", config=config, progress=display)
    with pytest.raises(Stopped):
        progress = Signalling(("train", "task1"), 2, signal.SIGINT)
        run(tmp_path / "run", config=config, progress=progress)
    spend(tmp_path / "run", method.name, 1, 1e6)
    result = run(tmp_path / "run", config=config)
    assert timeless(result) == timeless(whole)
    assert result["seconds_total"] > 1e6
    assert result["method"] == method.name
    assert result["references"] == {}
    assert result["base_means"] is None
    assert result["flops"].keys() == {"paper", "explicit", "executed"}
    assert result["params_stored"] == sum(task["params_stored"] for task in result["tasks"])
    is_given = method.name == "lora_finetune"
    assert (result["accuracy"] == result["local_accuracy"]) == is_given
    assert ("images (with the task ID given)" in display.console.file.getvalue()) == is_given
    page = (tmp_path / "run" / "report.html").read_text()
    assert ("<h2>Architectures</h2>" in page) == is_given and "<h2>Similarity" not in page


def test_the_counters_of_a_run_are_sums_over_its_tasks_and_none_of_another_run(tmp_path):
    method = LoraFinetuneConfig(rank=2, fit=FitConfig(1, 1e-2), batch_size=16)
    config = RunConfig(method, "quick", engine=EngineConfig(executor="whole"))
    engines = [run(tmp_path / name, config=config)["engine"] for name in ("first", "second")]
    tasks = [
        [e["report"]["engine"] for e in read(tmp_path / name) if e["event"] == "learned"]
        for name in ("first", "second")
    ]
    for engine, counted in zip(engines, tasks, strict=True):
        for name in ("hits", "misses", "evictions"):
            assert engine[name] == sum(one[name] for one in counted)
        assert engine["executor"] == "whole"
    # both runs share the executor, so the second one compiles nothing
    assert engines[0]["misses"] > 0 and engines[0]["compile_seconds"] > 0
    assert engines[1]["misses"] == engines[1]["compile_seconds"] == 0 < engines[1]["hits"]


def test_the_peak_memory_of_a_run_is_not_that_of_earlier_work_in_its_process(monkeypatch):
    size = 2**27
    before = np.ones(size, np.uint8)
    highest = peak.peak_memory_bytes()
    del before
    since = Peak.begin()
    if not since.before:  # the system resets the peak
        assert (measured := since.measure()) is not None and measured < highest - size / 2
    monkeypatch.setattr(Path, "write_text", Mock(side_effect=PermissionError))
    monkeypatch.setattr(peak, "peak_memory_bytes", Mock(side_effect=[7, 7, 8]))
    since = Peak.begin()
    assert since.measure() is None and since.measure() == 8


def test_settings_that_cannot_work_with_the_stream_are_refused_before_anything_is_made(tmp_path):
    for config, message in (
        (CodaPromptConfig(pool=1, layers=(0,), batch_size=16), "pool"),
        (
            DualPromptConfig(pool=1, general_layers=(0,), expert_layers=(1,), batch_size=16),
            "task 2 needs another one",
        ),
        (make_preset("cheem_lite", "demo"), "give one: --router"),
    ):
        with pytest.raises(ValueError, match=message):
            run(tmp_path / "run", config=RunConfig(config, "demo"))
    assert not (tmp_path / "run").exists()


@pytest.mark.full
def test_a_run_writes_event_files_while_it_runs_and_refuses_early_if_it_cannot(
    tmp_path, monkeypatch
):
    config = RunConfig(make_preset("frozen_linear", "quick"), "quick")
    run(tmp_path / "run", config=config, tensorboard=True)
    events = tmp_path / "run" / "tensorboard" / "frozen_linear" / "events.out.tfevents.cheem_jax"
    assert events.read_bytes().count(b"average_accuracy") >= 2
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(ValueError, match=r"pip install 'cheem_jax\[tensorboard\]'"):
        run(tmp_path / "other", config=config, tensorboard=True)
    assert not (tmp_path / "other").exists()


def test_accuracies_can_be_computed_from_the_answers_of_a_run(finished):
    directory, results = finished
    with np.load(directory / "answers.npz", allow_pickle=False) as answers:
        for index, task in enumerate(STREAM.tasks):
            right = answers[f"given_task_{index}"] == task.test.labels
            assert right.mean() == results["local_accuracy"][-1][index]
            right &= answers[f"chosen_task_{index}"] == index
            assert right.mean() == results["accuracy"][-1][index]
