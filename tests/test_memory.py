"""A memory that lives on: learned in several sittings, asked, corrupted, killed, forgotten."""

import dataclasses
import errno
import io
import json
import re
import shutil
import struct
import unicodedata
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small
from PIL import Image
from pixels import STORED, encode, four_colours, stored
from scipy.special import softmax
from serving import serving
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis

import cheem_jax
from cheem_jax.backbone.means import base_means
from cheem_jax.backbone.weights import load_pretrained, save_converted
from cheem_jax.cheem.config import (
    DEMO,
    PRESETS,
    QUICK,
    QUICK_PLUS,
    OpSettings,
    SearchConfig,
    auto,
    auto_router,
)
from cheem_jax.cheem.expert_memory import TaskNetworks, task_network
from cheem_jax.cheem.frozen_head import HeadComparison
from cheem_jax.cheem.saved_memory import save_memory_task
from cheem_jax.continual import RunConfig, run_stream
from cheem_jax.core.keys import Phase
from cheem_jax.core.metrics import calibration_error, fit_temperature, log_probability
from cheem_jax.core.ops import LowRank
from cheem_jax.core.pool import DenseExperts, Head, TaskMemory, compute_logits
from cheem_jax.core.routing import RouterConfig, fit_statistics, num_stored, packed
from cheem_jax.core.settings import FitConfig, no_progress
from cheem_jax.data.decode import decode_pieces
from cheem_jax.data.load import load_stream
from cheem_jax.data.task import Split, Stream, Task
from cheem_jax.engine.feed import HostImages
from cheem_jax.engine.passes import token_means
from cheem_jax.export import kind_of
from cheem_jax.memory import OpenMemory
from cheem_jax.memory.contents import read_info
from cheem_jax.memory.data import NamedFiles
from cheem_jax.memory.extending import (
    SHRINKAGE,
    Candidate,
    add_router_statistics,
    add_statistics,
    best_candidate,
    class_statistics,
    discriminant_head,
    label_among,
    mix_quantiles,
    move_samples,
    new_temperature,
    sample_features,
)
from cheem_jax.memory.making import with_fallback
from cheem_jax.memory.predictor import NearTask, Prediction, Predictor
from cheem_jax.memory.state import MemoryState
from cheem_jax.report.memories import num_forgotten
from cheem_jax.report.table import task_grid
from cheem_jax.run.checkpoint import load_manifest, saved_tasks
from cheem_jax.run.directory import hold
from cheem_jax.run.progress import Progress
from cheem_jax.run.record import Record, read
from cheem_jax.run.results import results_of
from cheem_jax.run.session import Session
from cheem_jax.run_config import RunInputs
from cheem_jax.serve import Limits

NAME = small.TIMM_NAME
STREAM = small.stream(3)
FIELDS = dataclasses.fields(small.CONFIG)


def begin(directory: Path, **settings) -> OpenMemory:
    folder = directory.with_name(f"{directory.name}-weights")
    folder.mkdir()
    fields = {field.name: settings.pop(field.name) for field in FIELDS if field.name in settings}
    file = small.save_weights(folder, **fields)
    return cheem_jax.create(
        directory, backbone=NAME, weights=file, **{"method": small.QUICK, **settings}
    )


@pytest.fixture(scope="module", autouse=True)
def one_executor():
    with small.shared_executors():
        yield


@pytest.fixture(scope="module")
def learned(tmp_path_factory) -> Path:
    """Three tasks, each learned by a memory that was opened again."""
    directory = tmp_path_factory.mktemp("memory") / "pets"
    begin(directory)
    for task in STREAM.tasks:
        cheem_jax.open(directory).learn(task)
    return directory


@pytest.fixture
def copied(learned, tmp_path) -> Path:
    return Path(shutil.copytree(learned, tmp_path / "pets"))


@pytest.fixture
def memory(copied) -> OpenMemory:
    """The memory of the folder `copied`."""
    return cheem_jax.open(copied)


def contents(directory: Path) -> list[str]:
    root = next(directory.glob("generation-*")) / "cheem"
    return [load_manifest(place)["content_sha256"] for place in saved_tasks(root)]


def given(memory: OpenMemory, name: str) -> np.ndarray:
    """Return the logits of a task's network for its test images."""
    task = next(task for task in STREAM.tasks if task.name == name)
    return np.stack(memory.predictor(task=name).predict_arrays(task.test.images).logits)


def test_a_memory_does_not_depend_on_its_sittings_and_new_tasks_change_no_earlier_answer(
    learned, tmp_path
):
    memory = begin(tmp_path / "at-once")
    memory.learn(STREAM.tasks[0])
    before = given(memory, "task0")
    memory.learn(STREAM)
    np.testing.assert_array_equal(given(memory, "task0"), before)
    assert contents(tmp_path / "at-once") == contents(learned)
    assert [task.name for task in memory.tasks] == ["task0", "task1", "task2"]


def test_answers_do_not_depend_on_the_company_of_an_image(learned):
    memory = cheem_jax.open(learned)
    images = STREAM.tasks[1].test.images
    together = memory.predict(images)
    one_by_one = [memory.predict(image)[0] for image in images]
    for a, b in zip(together, one_by_one, strict=True):
        assert (a.task, a.label, a.blocks) == (b.task, b.label, b.blocks)
        np.testing.assert_allclose(a.probability, b.probability, atol=1e-5)


def test_an_image_can_be_a_file_bytes_a_pil_image_or_pixels(learned, tmp_path):
    memory = cheem_jax.open(learned)
    image = STREAM.tasks[0].test.images[0]
    Image.fromarray(image).save(tmp_path / "a.png")
    file = tmp_path / "a.png"
    wanted = memory.predict(image)
    for form in (file, str(file), file.read_bytes(), Image.fromarray(image)):
        assert memory.predict(form) == wanted
    (result,) = wanted
    assert result.task in {task.name for task in memory.tasks}
    assert sum(guess.probability for guess in result.guesses) == pytest.approx(1, abs=1e-6)
    assert [near.distance for near in result.near] == sorted(near.distance for near in result.near)
    assert len(result.blocks) == small.CONFIG.depth and json.dumps(result.to_json())


MODES = (
    "1",
    "L",
    "LA",
    "PA",
    "P",
    "RGB",
    "RGBA",
    "RGBX",
    "CMYK",
    "YCbCr",
    "HSV",
    "LAB",
    "I",
    "I;16",
    "I;16B",
    "I;16L",
)


def open_image(mode: str) -> Image.Image:
    """An image of large values in a mode of Pillow."""
    rng = np.random.default_rng(5)
    if mode.startswith("I"):
        kind = {"I": "<i4", "I;16B": ">u2"}.get(mode, "<u2")
        return Image.frombytes(mode, (8, 8), rng.integers(0, 65536, (8, 8)).astype(kind).tobytes())
    image = Image.fromarray(rng.integers(0, 256, (8, 8, 3), np.uint8)).convert(
        "P" if mode == "PA" else mode
    )
    if mode == "P":
        image.info["transparency"] = 3
    return image.convert("PA") if mode == "PA" else image


@pytest.mark.parametrize("mode", MODES)
def test_an_open_image_has_the_pixels_of_its_file(mode, tmp_path):
    image = open_image(mode)
    file = tmp_path / "a.tif"
    if mode in ("HSV", "I;16L", "PA", "RGBX"):  # which no file keeps
        same = image.convert("RGB" if mode != "I;16L" else "I")
        same.save(file, "TIFF")
    else:
        image.save(file, "PNG" if mode == "P" else "TIFF")
    before = image.tobytes()
    ((_, pixels, errors),) = decode_pieces(NamedFiles([image, file], upright=True), 8, 2)
    assert errors == ["", ""] and image.tobytes() == before
    np.testing.assert_array_equal(pixels[0], pixels[1])
    if mode.startswith("I"):
        np.testing.assert_allclose(pixels[0, ..., 0], np.asarray(image) / 257, atol=0.5)


def test_a_broken_image_is_an_error_of_that_image_however_it_is_given():
    good = Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8))
    good.save(file := io.BytesIO(), "PNG")
    data = file.getvalue()
    middle = data.index(b"IDAT") + 2000
    broken = data[:middle] + b"\xff\xff\xff\xffID\0T" + data[middle:]
    length = struct.pack(">I", middle - data.index(b"IDAT") - 4 - 4)  # of the chunk before
    at = data.index(b"IDAT") - 4
    broken = broken[:at] + length + broken[at + 4 :]
    images = [good, broken, Image.open(io.BytesIO(broken))]
    ((_, pixels, errors),) = decode_pieces(NamedFiles(images, upright=True), 8, 3)
    assert len(pixels) == 1 and errors[0] == ""
    assert all("-: the image cannot be decoded" in error for error in errors[1:])
    with pytest.raises(ValueError, match=r"image 0 is uint8 \[0, 5, 3\], expected a file"):
        NamedFiles([np.zeros((0, 5, 3), np.uint8)], upright=True)


@pytest.mark.parametrize(
    ("mode", "reason"), [("F", "floating-point pixels"), ("I", "outside the 16-bit range")]
)
def test_an_open_image_is_refused_as_its_file_is(mode, reason, tmp_path):
    image = Image.new(mode, (8, 8), 70_000)
    image.save(tmp_path / "a.tif")
    ((_, _, errors),) = decode_pieces(NamedFiles([image, tmp_path / "a.tif"], upright=True), 8, 2)
    assert all(reason in error for error in errors)
    assert len({error.partition(": ")[2] for error in errors}) == 1


def test_an_image_is_answered_upright_in_every_form(copied, tmp_path):
    image = four_colours(8, 8)
    files = {f"{orientation}.png": stored(image, orientation) for orientation in STORED}
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    memory = cheem_jax.open(copied)
    assert memory.config.upright and memory.info()["upright"]
    want, *others = wanted = memory.predict([np.asarray(image)] * 8)
    # on some processors the last bits depend on the position of an image in its batch
    assert [one.probability for one in others] == pytest.approx([want.probability] * 7, abs=1e-6)
    assert memory.predict([tmp_path / name for name in files]) == wanted
    assert memory.predict([*files.values()]) == wanted
    assert memory.predict([Image.open(io.BytesIO(data)) for data in files.values()]) == wanted
    with serving(memory.predictor(batch_sizes=(1,)), Limits(max_batch=1)) as served:
        result = [served.predict(data).json["probability"] for data in files.values()]
    assert result == pytest.approx([want.probability] * 8, abs=1e-6)

    config = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps({**config, "upright": False}))
    memory = cheem_jax.open(copied)
    assert not memory.config.upright
    turn = STORED[6]
    assert turn is not None
    assert (
        memory.predict(files["6.png"])
        == memory.predict(np.asarray(image.transpose(turn)))
        != [want]
    )
    with serving(memory.predictor(batch_sizes=(1,)), Limits(max_batch=1)) as served:
        result = served.predict(files["6.png"]).json["probability"]
    assert result == pytest.approx(memory.predict(files["6.png"])[0].probability, abs=1e-6)


def test_a_memory_with_the_papers_settings_reads_images_as_stored(tmp_path):
    file = small.save_weights(tmp_path)
    for preset, upright in (("paper", False), ("quick", True)):
        memory = cheem_jax.create(tmp_path / preset, backbone=NAME, weights=file, preset=preset)
        assert memory.config.upright is upright and read(memory.directory)[0]["upright"] is upright


def test_an_invalid_image_is_named(learned, tmp_path):
    memory = cheem_jax.open(learned)
    broken = tmp_path / "broken.png"
    broken.write_bytes(b"no picture")
    good = STREAM.tasks[0].test.images[0]
    result = memory.predict([broken, good, tmp_path / "nowhere.png", b""])
    assert [one.error.split(": ")[-1] for one in result][2] == "no such file"
    assert "broken.png" in result[0].error
    assert [bool(one.error) for one in result] == [True, False, True, True]
    assert result[1] == memory.predict(good)[0]
    assert result[3].to_json() == {"error": result[3].error}
    with pytest.raises(ValueError, match=r"image 0 is float64 \[8, 8\]"):
        memory.predict([np.zeros((8, 8))])
    with pytest.raises(ValueError, match=r"uint8 \[1, 9, 8, 3\], expected uint8 \[N, 8, 8, 3\]"):
        memory.predictor().predict_arrays(np.zeros((1, 9, 8, 3), np.uint8))


def test_no_request_compiles_once_prepared(learned, compilations):
    predictor = cheem_jax.open(learned).predictor(batch_sizes=(1, 4))
    predictor.prepare()
    images = np.concatenate([task.test.images for task in STREAM.tasks])
    with compilations() as programs:
        for num in (1, 2, 4, 5, 9, 23):
            assert len(predictor(images[:num])) == num
    assert programs.count == 0


def test_an_export_needs_an_ending_that_names_its_format(learned, tmp_path):
    kinds = [kind_of(Path(f"a.{end}")) for end in ("onnx", "STABLEHLO", "safetensors")]
    assert kinds == ["onnx", "stablehlo", "timm"]
    with pytest.raises(
        ValueError, match=r"q.onx' has an unknown suffix; use one of .*\.onnx \(onnx\)"
    ):
        cheem_jax.open(learned).export(tmp_path / "q.onx")


def test_a_task_is_measured_by_name_and_classes_by_theirs(learned):
    memory = cheem_jax.open(learned)
    scores = memory.evaluate(STREAM)
    assert [score.task for score in scores] == ["task0", "task1", "task2"]
    assert all(
        score.accuracy <= min(score.accuracy_given, score.task_accuracy) <= 1 for score in scores
    )
    task = STREAM.tasks[1]
    reordered = dataclasses.replace(
        task,
        classes=task.classes[::-1],
        **{
            name: Split(s.images, len(task.classes) - 1 - s.labels)
            for name, s in task.splits.items()
        },
    )
    assert memory.evaluate(reordered) == [scores[1]]
    with pytest.raises(ValueError, match=r"has not learned the classes \['fish'\]"):
        memory.evaluate(dataclasses.replace(task, classes=(*task.classes[:-1], "fish")))
    with pytest.raises(ValueError, match="has no task 'taks1'; did you mean task1"):
        memory.evaluate(dataclasses.replace(task, name="taks1"))
    assert memory.evaluate(dataclasses.replace(task, name="other"), task="task1") == [scores[1]]


def test_data_without_a_test_split_are_measured_whole_unless_they_were_learned(learned):
    memory = cheem_jax.open(learned)
    task = STREAM.tasks[1]
    (held_out,) = memory.evaluate(dataclasses.replace(task, cut=("val", "test")))
    assert held_out.num_images == len(task.test.labels) and "held out" in held_out.images
    assert held_out._replace(images="the 20 test images") == memory.evaluate(task)[0]
    (whole,) = memory.evaluate(dataclasses.replace(task, test=task.val, cut=("val", "test")))
    assert (whole.num_images, whole.images) == (80, "all 80 images")
    parts = [memory.evaluate(task, split=split)[0] for split in ("train", "val", "val")]
    assert whole.accuracy == pytest.approx(sum(one.accuracy * one.num_images for one in parts) / 80)
    (val,) = memory.evaluate(dataclasses.replace(task, cut=("val", "test")), split="val")
    assert val.images == "the 20 val images"


def test_the_temperature_changes_probabilities_for_the_better_and_no_class(learned):
    memory = cheem_jax.open(learned)
    images = STREAM.tasks[0].val.images
    labels = STREAM.tasks[0].val.labels
    fitted = memory.predict(images, task="task0")
    assert all(
        0.2 <= task.temperature <= 5 and task.temperature != 1 for task in memory.internal.tasks
    )
    tasks = tuple(dataclasses.replace(task, temperature=1.0) for task in memory.internal.tasks)
    targets = tasks[:1]
    networks = TaskNetworks(DenseExperts(memory.internal.pool, 0), targets)
    plain = Predictor(memory.executor, targets, networks, memory.config.method.router)(images)
    order = [
        [[guess.label for guess in answer.guesses] for answer in answers]
        for answers in (fitted, plain)
    ]
    assert order[0] == order[1]
    wanted = [STREAM.tasks[0].classes[label] for label in labels]
    result = [
        np.mean(
            [
                np.log(dict(answer.guesses)[name])
                for answer, name in zip(answers, wanted, strict=True)
            ]
        )
        for answers in (fitted, plain)
    ]
    assert result[0] > result[1]


def test_the_record_contains_every_measurement_and_null_for_the_rest(learned):
    result = results_of(read(learned))
    assert result["accuracy"][2][:2] == [None, None] and result["accuracy"][2][2] is not None
    assert result["average_accuracy"] is None and result["average_forgetting"] is None
    assert json.loads((learned / "results.json").read_text())["accuracy"] == result["accuracy"]


def test_equal_data_are_learned_once_and_other_data_not_under_the_same_name(copied, memory):
    before = contents(copied)
    memory.learn(STREAM)
    assert contents(copied) == before
    with pytest.raises(ValueError, match="task 'task0' was already learned from other images"):
        memory.learn(small.task("TASK0", 7))
    with pytest.raises(ValueError, match="forget"):
        memory.learn(small.task("task0", 7))
    assert contents(copied) == before


class Killed(Progress):
    """Progress that is interrupted as a phase begins."""

    def __init__(self, phase: str):
        super().__init__()
        self.last = phase

    def phase(self, phase, *, task, total, unit="images"):
        if phase == self.last:
            raise KeyboardInterrupt
        return super().phase(phase, task=task, total=total, unit=unit)


@pytest.mark.parametrize(
    "phase",
    [
        pytest.param("similarity", marks=pytest.mark.full),
        "search",
        pytest.param("means", marks=pytest.mark.full),
        pytest.param("evaluate", marks=pytest.mark.full),
    ],
)
def test_a_killed_learning_resumes_and_ends_with_the_same_bits(learned, tmp_path, phase, capsys):
    memory = begin(tmp_path / "pets")
    memory.learn(STREAM.tasks[:2])
    with pytest.raises(KeyboardInterrupt):
        memory.learn(STREAM.tasks[2], progress=Killed(phase), save_every=0)
    memory = cheem_jax.open(tmp_path / "pets")
    capsys.readouterr()
    memory.learn(STREAM.tasks[2])
    assert (" s left\n" in capsys.readouterr().out) == (phase in ("search", "means"))
    assert contents(tmp_path / "pets") == contents(learned)
    measured = [
        entry["index"] for entry in read(tmp_path / "pets") if entry["event"] == "evaluated"
    ]
    assert measured == [0, 1, 2] and memory.config.learning is None


@pytest.mark.full
def test_forgetting_keeps_an_interrupted_task_until_it_succeeds(copied, memory, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(KeyboardInterrupt):
        memory.learn(small.task("fourth", 8), progress=Killed("search"), save_every=0)
    before = {f: f.read_bytes() for f in copied.rglob("*") if f.is_file()}
    assert list(copied.rglob("running-*"))
    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space left"):
        patch.setattr("cheem_jax.memory.state.write_generation", full)
        memory.forget("task0", "fourth")
    assert {f: f.read_bytes() for f in copied.rglob("*") if f.is_file()} == before

    # a task whose checkpoint cannot be saved after its line is in the record
    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space left"):
        patch.setattr("cheem_jax.memory.changing.save_memory_task", full)
        memory.learn(small.task("fourth", 8))
    names = [e["report"]["name"] for e in read(copied) if e["event"] == "learned"]
    assert names == ["task0", "task1", "task2", "fourth"]
    memory.forget("task0", "fourth")
    assert not list(copied.rglob("running-*")) and memory.info()["learning"] is None
    names = [e["report"]["name"] for e in read(copied) if e["event"] == "learned"]
    assert names == ["task1", "task2"]


@pytest.mark.full
def test_an_interrupted_task_is_replaced_if_that_is_asked_for(memory):
    for phase in ("search", "finetune"):
        with pytest.raises(KeyboardInterrupt):
            memory.learn(small.task("fourth", 8), progress=Killed(phase), save_every=0)
    memory.learn(small.task("fifth", 9), discard_unfinished=True)
    assert [task.name for task in memory.tasks] == ["task0", "task1", "task2", "fifth"]


def test_another_task_waits_for_an_interrupted_one_even_without_a_checkpoint(copied, memory):
    before = contents(copied)
    fourth, fifth = small.task("fourth", 8), small.task("fifth", 9)
    with pytest.raises(KeyboardInterrupt):
        memory.learn(fourth, progress=Killed("similarity"))
    assert not list(copied.rglob("running-*"))
    assert cheem_jax.open(copied).info()["learning"]["name"] == "fourth"
    for change in (
        lambda: memory.learn(fifth),
        lambda: memory.learn([fifth, fourth]),
        lambda: memory.learn(small.task("fourth", 9)),
        lambda: memory.forget("task0"),
    ):
        with pytest.raises(ValueError, match="'fourth' is interrupted"):
            change()
    assert contents(copied) == before and len(memory.predict(STREAM.tasks[0].test.images[:1])) == 1
    with pytest.raises(ValueError, match="no task 'nowhere'"):
        memory.forget("fourth", "nowhere")
    assert memory.info()["learning"]["name"] == "fourth"
    memory.forget("fourth", "task0")
    assert memory.info()["learning"] is None
    assert [task.name for task in memory.tasks] == [
        "task1",
        "task2",
    ]


def test_a_task_that_is_saved_is_not_interrupted(copied, memory):
    sha256 = memory.config.data_sha256["task2"]
    memory.state.write(learning={"name": "task2", "number": 2, "data_sha256": sha256})
    assert cheem_jax.open(copied).info()["learning"] is None


def test_an_interrupted_task_can_be_forgotten(copied, memory):
    before = contents(copied)
    with pytest.raises(KeyboardInterrupt):
        memory.learn(small.task("fourth", 8), progress=Killed("search"), save_every=0)
    assert cheem_jax.open(copied).info()["learning"]["name"] == "fourth"
    # a killed process leaves these files, and `cheem report` writes the page
    partial = next(copied.glob("generation-*")) / "cheem" / ".003-fourth.123-0.partial"
    partial.mkdir()
    names = (".status.json", ".config.json.123.tmp", "report.html")
    for file in (*(copied / name for name in names), partial / "task.json"):
        file.write_text("fourth")
    assert memory.forget("fourth").removed == ()
    assert memory.info()["learning"] is None and contents(copied) == before
    assert not [f for f in copied.rglob("*") if "fourth" in f.name]
    assert not [f for f in copied.rglob("*") if f.is_file() and b"fourth" in f.read_bytes()]


def test_a_lost_task_and_a_corrupted_record_are_reported_before_anything_changes(copied):
    root = copied / "generation-0001" / "cheem"
    shutil.move(root / "002-task2", copied.parent / "away")
    with pytest.raises(ValueError, match="lacks learned tasks .task2"):
        cheem_jax.open(copied)
    shutil.move(copied.parent / "away", root / "002-task2")
    memory = cheem_jax.open(copied)
    record = copied / "metrics.jsonl"
    text = record.read_text()
    record.write_text(text.replace('"event": "learned"', '"event": "learnt"', 1))
    with pytest.raises(ValueError, match="was changed"):
        memory.forget("task0")
    record.write_text(text)
    assert [task.name for task in cheem_jax.open(copied).tasks] == ["task0", "task1", "task2"]
    assert len(list(copied.glob("generation-*"))) == 1


def test_images_of_another_size_are_refused_before_anything_changes(copied):
    before = (copied / "config.json").read_bytes()
    with pytest.raises(
        ValueError, match=r"task 'big' contains images of shape \(16, 16, 3\), expected \(8, 8, 3\)"
    ):
        cheem_jax.open(copied).learn(small.enlarged(small.task("big", 4)))
    assert (copied / "config.json").read_bytes() == before


def test_a_network_that_computes_no_numbers_answers_nothing(learned):
    memory = cheem_jax.open(learned)
    broken = memory.predictor(task="task1")
    (target,) = broken.targets
    broken.targets = (
        dataclasses.replace(
            target, head=target.head._replace(bias=jnp.full_like(target.head.bias, np.nan))
        ),
    )
    for answer in broken(STREAM.tasks[1].test.images[:2]):
        assert answer.task == "task1" and answer.label is None and answer.guesses == ()
        assert "NaN" not in json.dumps(answer.to_json())
    far = Prediction(near=(NearTask("task1", float("inf")), NearTask("task2", float("nan"))))
    assert [near["distance"] for near in far.to_json()["near"]] == [None, None]


@pytest.mark.parametrize("erase", [False, True])
def test_forgetting_leaves_other_answers_and_no_trace(copied, memory, erase):
    others = {name: given(memory, name) for name in ("task0", "task2")}
    memory.forget("task1", erase=erase)
    for opened in (memory, cheem_jax.open(copied)):
        assert [(task.name, task.number) for task in opened.tasks] == [("task0", 0), ("task2", 2)]
        for name, logits in others.items():
            np.testing.assert_allclose(given(opened, name), logits, atol=1e-5, rtol=0)
            assert erase or (given(opened, name) == logits).all()
    files = [file for file in copied.rglob("*") if file.is_file()]
    assert not [
        file
        for file in files
        if b"task1" in file.read_bytes() or "task1" in str(file.relative_to(copied))
    ]
    result = results_of(read(copied))
    assert [task["name"] for task in result["tasks"]] == ["task0", "task2"]
    memory.learn(small.task("task3", 3))
    assert memory.tasks[-1].number == 3
    assert [entry["report"]["index"] for entry in read(copied) if entry["event"] == "learned"] == [
        0,
        1,
        2,
    ]
    with pytest.raises(ValueError, match="no task 'task1'"):
        memory.forget("task1")


def test_several_tasks_are_forgotten_together_or_none(copied, memory):
    before = contents(copied)
    for names, reason in (
        (("task0", "task9"), "no task 'task9'"),
        (("task0", "task0"), "give each name once"),
        ((), "no task"),
    ):
        with pytest.raises(ValueError, match=reason):
            memory.forget(*names)
    assert contents(copied) == before
    expected = given(memory, "task2")
    assert memory.forget("task1", "task0").numbers == (0, 1)
    opened = cheem_jax.open(copied)
    assert [(task.name, task.number) for task in opened.tasks] == [("task2", 2)]
    np.testing.assert_array_equal(given(opened, "task2"), expected)
    assert [entry["report"]["index"] for entry in read(copied) if entry["event"] == "learned"] == [
        0
    ]
    assert b"task0" not in (copied / "metrics.jsonl").read_bytes()


def dying(write, name):
    """Return `MemoryState.write` of a process that is killed after it has written this setting."""

    def die_after(self, **changes):
        state = write(self, **changes)
        if changes.get(name):
            raise KeyboardInterrupt
        return state

    return die_after


def killed(*_):
    raise KeyboardInterrupt


@pytest.mark.parametrize("names", [("task0",), ("task0", "task1")])
def test_the_next_writer_finishes_a_killed_forgetting(copied, memory, monkeypatch, names):
    with monkeypatch.context() as patched:
        patched.setattr(MemoryState, "write", dying(MemoryState.write, "forgetting"))
        with pytest.raises(KeyboardInterrupt):
            memory.forget(*names)
    config = json.loads((copied / "config.json").read_text())
    assert len(config["forgetting"]) == len(names)
    reopened = cheem_jax.open(copied)
    remaining = [task for task in ("task0", "task1", "task2") if task not in names]
    assert [task.name for task in reopened.tasks] == remaining, "it counts from that moment on"
    assert len(list(copied.glob("generation-*"))) == 2
    reopened.learn(STREAM.tasks[2])  # nothing to learn, but a writer
    assert len(list(copied.glob("generation-*"))) == 1
    record = (copied / "metrics.jsonl").read_bytes()
    assert not [name for name in names if name.encode() in record]


DEEP = dataclasses.replace(
    small.QUICK,
    remove=("reuse", "skip"),
    ops=dataclasses.replace(small.QUICK.ops, rank=3, truncated_rank=2),
)
"""Every block of every task adapts or renews an expert, so that tasks build on each other. Pairs
are truncated, and extended at that rank."""


@pytest.fixture(scope="module")
def deep(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("deep") / "pets"
    begin(directory, method=DEEP).learn(STREAM)
    return directory


@pytest.mark.full
@pytest.mark.parametrize("erase", [False, True])
def test_forgetting_the_parents_of_other_tasks_experts_keeps_their_predictions_on_the_disk_too(
    deep, tmp_path, erase
):
    directory = Path(shutil.copytree(deep, tmp_path / "pets"))
    memory = cheem_jax.open(directory)
    others = {name: given(memory, name) for name in ("task1", "task2")}
    done = memory.forget("task0", erase=erase)
    assert done.removed and (done.merged if erase else done.ancestors), "this memory is made for it"
    assert not (erase and done.ancestors)
    for opened in (memory, cheem_jax.open(directory)):
        for name, logits in others.items():
            np.testing.assert_array_equal(given(opened, name), logits)
    candidates = memory.internal.candidates()
    assert candidates == cheem_jax.open(directory).internal.candidates()
    for place in (candidates.place for candidates in done.ancestors):
        assert place.expert not in candidates[place.block]
    memory.learn(small.task("task3", 3))
    assert memory.tasks[-1].number == 3
    for name, logits in others.items():
        np.testing.assert_array_equal(given(memory, name), logits)
    if not erase:  # the next erasure includes the experts that waited
        later = memory.forget("task3", erase=True)
        assert later.merged and not later.ancestors
        assert not any(
            e["origin"] == "forgotten" and e["kind"] != "gone"
            for b in memory.internal.history()
            for e in b
        )


def only(task: Task, *labels: int) -> Task:
    """Return the task with the images of some of its classes."""
    parts = {}
    for name, split in task.splits.items():
        rows = np.isin(split.labels, labels)
        parts[name] = Split(
            split.images[rows], np.searchsorted(labels, split.labels[rows]).astype(np.int32)
        )
    return Task(task.name, tuple(task.classes[label] for label in labels), **parts)


MORE = small.task("photos", 0, num=48)
"""Other images of the classes of `task0`."""
SWAPPED = dataclasses.replace(MORE, classes=("c1", "c0", "c2"))
"""The same with two classes swapped: learning them costs the old images."""
NEW = only(small.task("photos", 50, num_classes=5), 3, 4)
"""Images of classes that `task0` lacks."""


def last_report(directory: Path) -> dict:
    """Return the report of the task that was learned or extended last."""
    return [entry["report"] for entry in read(directory) if entry["event"] == "learned"][-1]


def extension_in(directory: Path) -> dict:
    """Return the record's description of the last extension."""
    return last_report(directory)["extension"]


def test_an_extension_that_would_cost_the_old_images_is_refused(copied, memory):
    before = given(memory, "task0")
    memory.learn(SWAPPED, extend="task0")
    result = extension_in(copied)
    assert result["candidates"]["network"]["new"] > result["candidates"]["unchanged"]["new"]
    assert result["candidates"]["network"]["old"] < 0.9 and result["kept"] == "unchanged"
    np.testing.assert_array_equal(given(memory, "task0"), before)


def test_more_images_of_every_class_change_one_task_alone(copied, memory, capsys):
    others = {name: given(memory, name) for name in ("task1", "task2")}
    before = given(memory, "task0")
    (extended,) = memory.learn(MORE, extend="task0")
    assert (extended.name, extended.number, extended.classes) == ("task0", 3, ("c0", "c1", "c2"))
    for opened in (memory, cheem_jax.open(copied)):
        assert [task.name for task in opened.tasks] == ["task1", "task2", "task0"]
        for name, logits in others.items():
            np.testing.assert_array_equal(given(opened, name), logits)
        np.testing.assert_array_equal(given(opened, "task0"), before, "100 % cannot become better")
        extension = opened.info()["tasks"][2]["extended"][0]
        assert (extension["num_train"], extension["num_classes"]) == ([40, 88], [3, 3])
    said = " ".join(capsys.readouterr().out.split())
    assert "there are enough of them, so fine-tuning is tried" in said
    assert "on 24 new validation images" in said
    assert set(extension_in(copied)["candidates"]) == {"unchanged", "head", "network"}
    assert len(memory.internal.tasks[2].centroids) == 10, (
        "centroids of the new images are added to the old ones"
    )
    tasks = results_of(read(copied))["tasks"]
    assert [(task["name"], task["num_train"]) for task in tasks] == [
        ("task1", 40),
        ("task2", 40),
        ("task0", 88),
    ]
    assert tasks[2]["extended"] == [{"num_train": [40, 88], "num_classes": [3, 3]}]
    assert tasks[2]["num_tested"] == len(MORE.test.labels)
    results = results_of(read(copied))
    spent = sum(sum(task["seconds"].values()) for task in tasks)
    assert results["seconds_total"] > spent  # the first learning of task0 counts, too
    caption = task_grid(results).caption
    assert "FLOPs: per image by the paper's convention, of the target network" in caption
    assert "T3 was learned from 40 training images of 3 classes and extended since" in caption
    assert num_forgotten(json.loads((copied / "config.json").read_text())) == 0
    after = contents(copied)
    for again in (MORE, dataclasses.replace(STREAM.tasks[0], name="again")):
        memory.learn(again, extend="task0")
        assert "task0: learned already" in capsys.readouterr().out and contents(copied) == after
    memory.learn(small.task("task3", 3))
    memory.forget("task0")
    files = [file for file in copied.rglob("*") if file.is_file()]
    assert not [file for file in files if b"task0" in file.read_bytes()]


def test_an_extended_task_changes_only_for_the_better():
    head = Head(jnp.zeros((1, 1)), jnp.zeros(1))

    def best(*shares: tuple[str, float, float | None]) -> str:
        return best_candidate([Candidate(kind, head, new, old) for kind, new, old in shares]).kind

    same = ("unchanged", 0.8, 0.9)
    assert best(same, ("head", 0.8, 0.99), ("network", 0.9, 0.85)) == "unchanged"
    assert best(same, ("head", 0.85, 0.9), ("network", 0.95, 0.85)) == "head"
    assert best(same, ("head", 0.85, 0.9), ("network", 0.95, 0.9)) == "network"
    assert best(("unchanged", 0.8, None), ("network", 0.9, None)) == "network"
    assert best(("head", 0.8, 0.9), ("network", 0.9, 0.7)) == "head"


def test_few_images_of_the_learned_classes_change_no_expert_and_keep_probabilities_calibrated(
    copied, memory, capsys
):
    few = small.task("photos", 0, num=12)
    old = memory.internal.tasks[0]
    experts = memory.internal.added(0)
    memory.learn(few, extend="task0")
    said = " ".join(capsys.readouterr().out.split())
    assert "fewer new images than before, so the network stays as it is" in said
    assert re.search(
        r"% before, [\d.]+ % now on 6 new validation images, .* on samples from the stored means",
        said,
    )
    assert "on 6 test images" in said
    memory = cheem_jax.open(copied)
    for block, expert in memory.internal.added(2).items():
        jax.tree.map(np.testing.assert_array_equal, expert.params, experts[block].params)
    new = memory.internal.tasks[2]
    assert new.statistics["counts"].sum() == 52
    result = extension_in(copied)
    assert result["kept"] in ("unchanged", "head")
    assert set(result["candidates"]) == {
        "unchanged",
        "head",
    }
    samples, labels = sample_features(old.statistics, 0)
    head = discriminant_head(new.statistics, old.head)
    # the temperature of the samples is the square of the mean by that of the images
    temperature = new_temperature(old, head, samples, labels, samples, labels)
    temperature = temperature**2 / fit_temperature(compute_logits(samples, head), labels)
    before, after = (
        log_probability(compute_logits(samples, used_head) / by, labels)
        for used_head, by in ((old.head, old.temperature), (head, temperature))
    )
    assert (
        temperature in (pytest.approx(0.2, rel=0.01), pytest.approx(5, rel=0.01))
        or abs(before - after) < 1e-3
    )
    one = old.head._replace(weight=old.head.weight[:, :1], bias=old.head.bias[:1])
    assert np.abs(discriminant_head(new.statistics, one).weight).max() > 0


def test_samples_move_with_the_features_that_they_stand_for():
    rng = np.random.default_rng(0)
    means = rng.normal(size=(3, 4)).astype(np.float32)
    spread = np.diag([0.1, 0.2, 0.3, 0.4])
    samples, labels = sample_features(
        {"means": means, "covariance": packed(spread), "counts": np.ones(3)}, 0
    )
    centres = np.stack([samples[labels == label].mean(axis=0) for label in range(3)])
    np.testing.assert_allclose(centres, means, atol=0.2)
    np.testing.assert_allclose(np.cov((samples - centres[labels]).T), spread, atol=0.05)
    turn, points = rng.normal(size=(4, 4)), rng.normal(size=(200, 4))
    np.testing.assert_allclose(
        move_samples(samples, points, points @ turn + 1), samples @ turn + 1, atol=0.2
    )


def test_without_new_images_of_a_class_the_network_stays_as_it_is(copied, memory, capsys):
    old = memory.internal.tasks[0]
    experts = memory.internal.added(0)
    memory.learn(NEW, extend="task0")
    assert "no new images of c0, c1, c2; the network stays as it is" in " ".join(
        capsys.readouterr().out.split()
    )
    memory = cheem_jax.open(copied)
    new = memory.internal.tasks[2]
    copies = memory.internal.added(2)
    assert new.classes == ("c0", "c1", "c2", "c3", "c4") and new.architecture == old.architecture
    assert experts and experts.keys() == copies.keys()
    for block, expert in experts.items():
        jax.tree.map(np.testing.assert_array_equal, expert.params, copies[block].params)
    assert new.statistics["counts"].tolist() == [14, 13, 13, 8, 8]
    for task in (STREAM.tasks[0], NEW):
        assert memory.evaluate(task, task="task0")[0].accuracy_given > 0.8


@pytest.mark.full
@pytest.mark.parametrize(
    ("data", "phase"), [(MORE, "finetune"), (MORE, "means"), (NEW, "means"), (NEW, "evaluate")]
)
def test_a_killed_extension_leaves_the_task_and_ends_with_the_same_bits(
    copied, tmp_path, data, phase
):
    whole = Path(shutil.copytree(copied, tmp_path / "whole"))
    cheem_jax.open(whole).learn(data, extend="task0")
    memory = cheem_jax.open(copied)
    before = contents(copied)
    with pytest.raises(KeyboardInterrupt):
        memory.learn(data, extend="task0", progress=Killed(phase), save_every=0)
    memory = cheem_jax.open(copied)
    assert contents(copied) == (contents(whole) if phase == "evaluate" else before)
    memory.learn(data, extend="task0")
    assert contents(copied) == contents(whole)
    assert results_of(read(copied))["accuracy"] == results_of(read(whole))["accuracy"]


def test_an_extension_that_is_killed_before_its_record_is_finished_by_the_next_writer(
    copied, memory, monkeypatch
):
    with monkeypatch.context() as patched:
        patched.setattr(MemoryState, "write", dying(MemoryState.write, "forgetting"))
        with pytest.raises(KeyboardInterrupt):
            memory.learn(NEW, extend="task2")
    with monkeypatch.context() as patched:  # and once more, when the record is already right
        patched.setattr("cheem_jax.memory.directory.write_results", killed)
        with pytest.raises(KeyboardInterrupt):
            cheem_jax.open(copied).learn(NEW, extend="task2")
    cheem_jax.open(copied).learn(NEW, extend="task2")
    assert [task["name"] for task in results_of(read(copied))["tasks"]] == [
        "task0",
        "task1",
        "task2",
    ]
    assert len(list(copied.glob("generation-*"))) == 1


def test_names_match_however_their_accents_are_composed(tmp_path):
    nfc, nfd = (unicodedata.normalize(form, "mus\u00e9e") for form in ("NFC", "NFD"))
    task = small.task("task", 0)
    memory = begin(tmp_path / "memory")
    memory.learn(
        dataclasses.replace(task, name=nfd, classes=(nfd, "c1", "c2"))
    )  # as an earlier version, on a Mac
    other = dataclasses.replace(small.task("task", 0, num=24), name=nfc, classes=(nfc, "c1", "c2"))
    assert [score.task for score in memory.evaluate(other)] == [nfd]
    assert memory.predictor(task=nfc).classes == {nfd: (nfd, "c1", "c2")}
    assert (
        memory.learn(dataclasses.replace(task, name=nfc, classes=(nfd, "c1", "c2")))[0].number == 0
    )
    memory.learn(other, extend=nfc)
    assert [(info.name, info.classes) for info in memory.tasks] == [(nfd, (nfd, "c1", "c2"))]
    memory.forget(nfc)
    assert not memory.tasks
    listed = label_among(("c", "C"), dataclasses.replace(task, classes=("C", "c", "new")))
    assert listed.classes == ("c", "C", "new")


def test_an_extension_that_does_not_fit_is_refused_before_anything_changes(copied, memory):
    before = (copied / "config.json").read_bytes()
    clash = dataclasses.replace(MORE, classes=("C0", "c1", "c2"))
    for data, words, reason in (
        (MORE, {"extend": "taks0"}, "has no task 'taks0'; did you mean task0"),
        (clash, {"extend": "task0"}, "differ in upper and lower case alone: 'C0' and 'c0'"),
        (MORE, {"extend": "task0", "name": "more"}, "cannot get the name 'more'"),
        (STREAM, {"extend": "task0"}, "'task0' is for one task, but the data contain 3"),
    ):
        with pytest.raises(ValueError, match=reason):
            memory.learn(data, **words)
    assert (copied / "config.json").read_bytes() == before
    with pytest.raises(KeyboardInterrupt):
        memory.learn(NEW, extend="task0", progress=Killed("means"))
    assert cheem_jax.open(copied).info()["learning"]["name"] == "task0"
    for data, words in (
        (MORE, {"extend": "task0"}),
        (NEW, {"extend": "task1"}),
        (small.task("task3", 3), {}),
    ):
        with pytest.raises(ValueError, match="'task0' is interrupted"):
            memory.learn(data, **words)
    memory.forget("task0")
    assert [task.name for task in memory.tasks] == ["task1", "task2"]
    assert memory.info()["learning"] is None


def test_the_disk_space_for_an_extension_counts_the_full_experts_of_the_task(tmp_path, monkeypatch):
    method = dataclasses.replace(small.QUICK, sampling="anchored")
    memory = begin(tmp_path / "pets", method=method)
    full = small.grown(memory.internal, "full", ["new"] * 4)
    folder = save_memory_task(memory.root, full, 0, method.ops.rank)
    Record(memory.directory).write("learned", method="cheem", report={"index": 0})
    needed = []

    def refuse(self, num_bytes, what):
        needed.append(num_bytes)
        raise ValueError("no room")

    monkeypatch.setattr(Session, "check_room", refuse)
    images = dataclasses.replace(small.task("photos", 0), classes=("a", "b", "c"))
    with pytest.raises(ValueError, match="no room"):
        memory.learn(images, extend="full")
    experts = [stored.params for stored in full.added(0).values()]
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(experts))
    # the task, and two rolling checkpoints with two moments
    assert needed[0] >= 7 * size
    assert needed[0] >= sum(f.stat().st_size for f in folder.rglob("*") if f.is_file())


def test_a_task_of_an_earlier_version_is_extended_by_images_of_every_class_alone(copied, memory):
    task = dataclasses.replace(memory.internal.tasks[2], statistics={})
    shutil.rmtree(copied / "generation-0001" / "cheem" / "002-task2")
    older = dataclasses.replace(memory.internal, tasks=(*memory.internal.tasks[:2], task))
    save_memory_task(copied / "generation-0001" / "cheem", older, 2, small.QUICK.ops.rank)
    memory = cheem_jax.open(copied)
    with pytest.raises(
        ValueError, match="has no statistics of its classes .* new images of every learned class"
    ):
        memory.learn(NEW, extend="task2")
    memory.learn(small.task("photos", 2, num_classes=4, num=24), extend="task2")
    assert extension_in(copied)["kept"] == "network"
    report = last_report(copied)
    epochs = small.QUICK.finetune.epochs
    assert report["epochs"] == {"finetune": epochs} and len(report["finetune_losses"]) == epochs
    assert memory.tasks[2].classes == (
        "c0",
        "c1",
        "c2",
        "c3",
    )
    memory.learn(NEW, extend="task2")
    assert memory.tasks[2].classes == ("c0", "c1", "c2", "c3", "c4")


@pytest.mark.full
@pytest.mark.parametrize("erased", [False, True])
def test_extending_the_parents_of_other_tasks_experts_keeps_their_predictions(
    deep, tmp_path, erased
):
    directory = Path(shutil.copytree(deep, tmp_path / "pets"))
    memory = cheem_jax.open(directory)
    name = "task1" if erased else "task0"
    if erased:  # some adapted experts of `task1` become full ones
        memory.forget("task0", erase=True)
    others = {task.name: given(memory, task.name) for task in memory.tasks if task.name != name}
    memory.learn(NEW, extend=name)
    memory = cheem_jax.open(directory)
    pairs = [
        expert.params
        for block in memory.internal.pool
        for expert in block
        if isinstance(expert.params, LowRank)
    ]
    assert pairs and all(pair.down.shape[1] == 2 for pair in pairs)
    for other, logits in others.items():
        np.testing.assert_array_equal(given(memory, other), logits)


def test_statistics_of_parts_add_up_to_those_of_all():
    rng = np.random.default_rng(0)
    features = rng.normal(size=(60, 4)).astype(np.float32)
    labels = np.arange(60) % 3
    features += labels[:, None]
    first, labels[40:] = labels[:40] % 2, labels[40:]
    old = class_statistics(features[:40], first, 2)
    new = class_statistics(features[40:], labels[40:], 3)
    everything = class_statistics(features, np.concatenate([first, labels[40:]]), 3)
    for name, values in add_statistics(old, new).items():
        np.testing.assert_allclose(values, everything[name], rtol=1e-5, atol=1e-5)
    far = mix_quantiles(np.linspace(0, 1, 201), np.linspace(10, 11, 201), 0.9)
    assert far[0] == 0 and far[-1] == 11 and far[178] < 1 < 10 <= far[182]


@pytest.mark.parametrize("new_classes", [(2,), (0,), (0, 2, 3)])
def test_router_statistics_of_parts_add_up_to_those_of_all(new_classes):
    rng = np.random.default_rng(1)
    config = RouterConfig("lda")
    features = (rng.normal(size=(90, 5)) @ rng.normal(size=(5, 5))).astype(np.float32)
    old_labels = np.repeat(np.arange(3, dtype=np.int32), [20, 9, 11])
    new_labels = rng.choice(np.array(new_classes, np.int32), 50)
    old = fit_statistics(features[:40], old_labels, config, seed=0)
    new = fit_statistics(features[40:], new_labels, config, seed=0)
    labels = np.concatenate([old_labels, new_labels])
    expected = fit_statistics(features, labels, config, seed=0)
    num_classes = int(labels.max()) + 1
    together = add_router_statistics(old, new, new_labels, num_classes)
    assert len(together.centroids) == num_classes  # a repeated class has one row
    chex.assert_trees_all_close(together, expected, rtol=1e-5, atol=1e-6)
    # in two steps
    first, second = (
        fit_statistics(features[part], labels[part], config, seed=0)
        for part in (slice(40, 60), slice(60, 90))
    )
    steps = add_router_statistics(old, first, labels[40:60], num_classes)
    steps = add_router_statistics(steps, second, labels[60:], num_classes)
    chex.assert_trees_all_close(steps, expected, rtol=1e-5, atol=1e-6)


def test_one_more_class_leaves_the_statistics_of_all_images_at_once(tmp_path):
    router = RouterConfig("lda")
    memory = begin(tmp_path / "memory", method=dataclasses.replace(small.QUICK, router=router))
    first, more = small.task("pets", 0), small.task("pets", 7, num=24)
    labels = first.val.labels.copy()
    labels[::4] = (labels[::4] + 1) % 3  # wrong, so that the temperature is not at its bound
    first = dataclasses.replace(first, val=Split(first.val.images, labels))
    memory.learn(first)
    [before] = memory.internal.tasks

    parts = {
        name: Split(split.images, np.zeros_like(split.labels))
        for name, split in more.splits.items()
    }
    one = dataclasses.replace(more, classes=("c9",), **parts, purpose="extend")
    memory.learn(one, extend="pets")
    [task] = memory.internal.tasks
    assert task.classes == ("c0", "c1", "c2", "c9")
    assert extension_in(memory.directory)["kept"] == "head"
    images = np.concatenate([first.train.images, one.train.images])
    labels = np.concatenate([first.train.labels, np.full(24, 3, np.int32)])
    expected = fit_statistics(memory.setup.features(images), labels, router, seed=0)
    chex.assert_trees_all_close(task.router_statistics, expected, rtol=1e-4, atol=1e-6)
    learner = memory.setup.learner(memory.internal)
    feed = HostImages(learner.executor, images)
    network = task_network(learner.dense, task.experts)
    result = token_means(
        learner.executor, [network], feed, len(images), batch_size=16, advance=no_progress
    )
    np.testing.assert_allclose(task.means, result.means[0], rtol=1e-4, atol=1e-5)
    at_once = class_statistics(result.features, labels, 4)
    chex.assert_trees_all_close(dict(task.statistics), at_once, rtol=1e-3, atol=1e-4)
    expected_head = discriminant_head(task.statistics, before.head)
    chex.assert_trees_all_close(task.head, expected_head, rtol=1e-3, atol=1e-3)
    samples = sample_features(before.statistics, memory.setup.keys.seed_at(1, Phase.METHOD_NOISE))
    feed = HostImages(learner.executor, one.val.images)
    val = token_means(
        learner.executor, [network], feed, 12, batch_size=16, advance=no_progress
    ).features
    val_labels = np.full(12, 3, np.int32)
    temperature = new_temperature(before, task.head, *samples, val, val_labels)
    assert task.temperature == pytest.approx(temperature, rel=1e-4)
    assert task.temperature != pytest.approx(before.temperature, rel=1e-2)


def test_probabilities_stay_calibrated_without_the_old_images():
    """Features of images that were not trained on have twice the variance of training features, as
    those of a fine-tuned network have."""
    rng = np.random.default_rng(6)
    num_old = 6
    means = 1.1 * rng.normal(size=(8, 12))

    def sampled(classes, num, variance):
        labels = np.repeat(np.array(classes, np.int32), num)
        noise = np.sqrt(variance) * rng.normal(size=(len(labels), 12))
        return (means[labels] + noise).astype(np.float32), labels

    old_classes, new_classes = range(num_old), range(num_old, 8)
    features, labels = sampled(old_classes, 60, 1)
    zeros = Head(jnp.zeros((12, num_old)), jnp.zeros(num_old))
    statistics = class_statistics(features, labels, num_old)
    head = discriminant_head(statistics, zeros)
    head = Head(0.7 * head.weight, 0.7 * head.bias)
    val_features, val_labels = sampled(old_classes, 60, 2)
    temperature = fit_temperature(compute_logits(val_features, head), val_labels)
    blank = np.zeros((1, 1), np.float32)
    before = TaskMemory("pets", (), (), (), head, blank, blank, None, {}, temperature, statistics)
    more = class_statistics(*sampled(new_classes, 60, 1), 8)
    new_head = discriminant_head(add_statistics(statistics, more), head)
    fitted = new_temperature(
        before, new_head, *sample_features(statistics, 0), *sampled(new_classes, 60, 2)
    )
    test_features, test_labels = sampled(range(8), 1000, 2)
    logits = compute_logits(test_features, new_head).astype(float)

    def error(temperature):
        probabilities = softmax(logits / temperature, axis=1)
        correct = probabilities.argmax(axis=1) == test_labels
        return calibration_error(probabilities.max(axis=1), correct)

    assert error(fitted) < 0.02 < error(temperature)


def test_the_closed_form_head_is_that_of_scikit_learn():
    rng = np.random.default_rng(0)
    labels = np.repeat(np.arange(4, dtype=np.int32), 15)  # equal classes have equal priors
    means = 3 * rng.normal(size=(4, 6)) + np.arange(4)[:, None]
    features = (means[labels] + rng.normal(size=(60, 6)) @ rng.normal(size=(6, 6))).astype("f4")
    old = Head(jnp.asarray(rng.normal(size=(6, 3)), jnp.float32), jnp.zeros(3))
    head = discriminant_head(class_statistics(features, labels, 4), old)
    lda = LinearDiscriminantAnalysis(solver="lsqr", shrinkage=SHRINKAGE, priors=[1 / 4] * 4)
    points = 4 * rng.normal(size=(200, 6)).astype(np.float32)
    expected = lda.fit(features, labels).decision_function(points)
    logits = compute_logits(points, head)
    np.testing.assert_array_equal(logits.argmax(axis=1), expected.argmax(axis=1))
    logits, expected = (
        values - values.mean(axis=1, keepdims=True) for values in (logits, expected)
    )
    scale = (logits * expected).sum() / np.square(expected).sum()
    assert scale > 0
    np.testing.assert_allclose(logits, scale * expected, rtol=1e-2, atol=1e-3 * abs(logits).max())


def test_forgetting_works_where_files_cannot_be_linked(copied, monkeypatch):
    def refuse(*_):
        raise OSError("no links here")

    monkeypatch.setattr("cheem_jax.memory.directory.os.link", refuse)
    memory = cheem_jax.open(copied)
    memory.forget("task0")
    assert [task.name for task in cheem_jax.open(copied).tasks] == ["task1", "task2"]


def test_one_process_writes_at_a_time(copied, memory):
    with hold(copied), pytest.raises(ValueError, match="in use by process"):
        memory.forget("task0")
    assert len(cheem_jax.open(copied).tasks) == 3


def test_the_open_set_is_measured_on_images_of_no_task(learned):
    memory = cheem_jax.open(learned)
    noise = np.random.default_rng(0).integers(0, 2, (5, 8, 8, 3), dtype=np.uint8) * 255
    score = memory.evaluate_open_set(STREAM, list(noise))
    num = sum(len(task.test.labels) for task in STREAM.tasks)
    assert (score.num_known, score.num_unknown) == (num, 5)
    predictor = memory.predictor()
    known_scores = np.concatenate(
        [predictor.rejection_scores(task.test.images) for task in STREAM.tasks]
    )
    unknown_scores = predictor.rejection_scores(noise)
    pairs = (
        np.sign(unknown_scores[:, None] - known_scores) / 2 + 0.5
    )  # 1: ranked rightly; 0.5: a tie
    assert score.auroc == pytest.approx(pairs.mean()) and score.auroc > 0.8
    threshold = np.sort(known_scores)[int(np.ceil(0.95 * num)) - 1]
    assert score.fpr95 == np.mean(unknown_scores <= threshold)
    same = memory.evaluate_open_set(STREAM.tasks[0], list(STREAM.tasks[0].test.images))
    assert same.auroc == pytest.approx(0.5)
    with pytest.raises(ValueError, match="no unknown image is given"):
        memory.evaluate_open_set(STREAM, [])


def test_an_image_far_from_every_task_belongs_to_none_if_asked(learned):
    memory = cheem_jax.open(learned)
    answers = memory.predict(STREAM.tasks[0].val.images, open_set=0.1)
    refused = np.mean([answer.task is None for answer in answers])
    assert refused <= 0.3, "about a tenth of a task's own images may be refused"
    noise = np.random.default_rng(0).integers(0, 2, (4, 8, 8, 3), dtype=np.uint8) * 255
    for answer in memory.predict(noise, open_set=0.1):
        assert answer.task is None
        assert answer.label is None
        assert answer.guesses == ()
        assert answer.blocks == ()
        assert len(answer.near) == 3
    assert all(answer.task is not None for answer in memory.predict(noise))
    with pytest.raises(ValueError, match="open_set is 5"):
        memory.predict(noise, open_set=5)


@pytest.mark.full
def test_the_backbones_own_classes_can_be_a_target(tmp_path):
    base = small.task("photos", 11)
    with pytest.raises(ValueError, match="give base_data"):
        begin(tmp_path / "a", num_classes=3, keep_base=True)
    with pytest.raises(ValueError, match="auto does not use base_data"):
        cheem_jax.create(
            tmp_path / "a", backbone=NAME, weights=small.save_weights(tmp_path), base_data=base
        )
    with pytest.raises(ValueError, match="has no head"):
        begin(tmp_path / "b", base_data=base, keep_base=True)
    memory = begin(tmp_path / "c", num_classes=3, base_data=base, keep_base=True)
    memory.learn(STREAM.tasks[0])
    memory = cheem_jax.open(tmp_path / "c")
    assert [target.name for target in memory.targets] == ["task0", "base"]
    wanted = np.asarray(memory.vit.logits(memory.vit(jnp.asarray(base.test.images)))).argmax(axis=1)
    answers = memory.predict(base.test.images)
    mine = [i for i, answer in enumerate(answers) if answer.task == "base"]
    assert len(mine) > len(answers) / 2
    assert [answers[i].label for i in mine] == [base.classes[wanted[i]] for i in mine]
    with pytest.raises(ValueError, match="the pretraining data"):
        memory.learn(small.task("Base", 5))


@pytest.mark.full
def test_a_run_answers_and_a_new_memory_can_begin_with_it(tmp_path):
    file, run = small.save_weights(tmp_path), tmp_path / "run"
    pretrained = load_pretrained(NAME, weights=file)
    run_stream(
        Stream("two", STREAM.tasks[:2]),
        pretrained,
        RunConfig(small.QUICK, "quick"),
        run,
        Progress(),
    )
    memory = cheem_jax.open(run, weights=file)
    assert memory.is_run and [task.name for task in memory.tasks] == ["task0", "task1"]
    assert [task.temperature for task in memory.internal.tasks] == [1, 1]
    wanted = memory.predict(STREAM.tasks[1].test.images)
    with pytest.raises(ValueError, match="--begin-with"):
        memory.learn(STREAM.tasks[2])
    with pytest.raises(ValueError, match="without a calibrated distance"):
        memory.predict(STREAM.tasks[1].test.images, open_set=0.1)
    with pytest.raises(ValueError, match="without a calibrated distance"):
        memory.evaluate_open_set(STREAM.tasks[1], list(STREAM.tasks[2].test.images))
    other = tmp_path / "other.safetensors"
    save_converted(other, dataclasses.replace(pretrained, sha256="1" * 64))
    with pytest.raises(ValueError, match="was learned with weights of SHA-256"):
        cheem_jax.open(run, weights=other)
    started = cheem_jax.begin_with(tmp_path / "pets", run, weights=file)
    assert started.predict(STREAM.tasks[1].test.images) == wanted
    assert started.config.preset == "auto"
    started.learn(STREAM.tasks[2])
    method = started.config.method
    assert (method.sampling, method.fallback) == ("anchored", True)
    before = cheem_jax.open(run, weights=file).config.method
    assert method.router == before.router and method.ops.stored_rank == before.ops.rank
    assert [(task.name, task.number) for task in started.tasks] == [
        ("task0", 0),
        ("task1", 1),
        ("task2", 2),
    ]
    assert results_of(read(tmp_path / "pets"))["accuracy"][1] == results_of(read(run))["accuracy"][
        1
    ] + [None]
    with pytest.raises(ValueError, match="is already a memory"):
        cheem_jax.begin_with(tmp_path / "again", tmp_path / "pets")


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A finished run of three tasks, next to its weights."""
    folder = tmp_path_factory.mktemp("run")
    pretrained = load_pretrained(NAME, weights=small.save_weights(folder))
    run_stream(STREAM, pretrained, RunConfig(small.QUICK, "quick"), folder / "run", Progress())
    return folder / "run"


def test_accuracies_on_validation_images_are_not_those_of_a_memory(run, tmp_path):
    weights = run.with_name("weights.safetensors")
    copied = Path(shutil.copytree(run, tmp_path / "run"))
    file = copied / "config.json"
    for measured_on, num in (("validation", 0), ("test", 3)):
        file.write_text(json.dumps(json.loads(file.read_text()) | {"measured_on": measured_on}))
        memory = cheem_jax.begin_with(tmp_path / measured_on, copied, weights=weights)
        events = [entry["event"] for entry in read(memory.directory)]
        assert (events.count("learned"), events.count("evaluated")) == (3, num)


@pytest.mark.parametrize("upright", [True, False])
def test_a_run_of_rotated_images_rotates_the_images_that_it_predicts(run, tmp_path, upright):
    for number in range(20):
        file = tmp_path / "photos" / f"c{number % 2}" / f"{number}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(stored(four_colours(8, 8), 6))
    stream = load_stream(tmp_path, ["photos"], image_size=8, upright=upright)
    weights = run.with_name("weights.safetensors")
    config = RunConfig(small.QUICK, "quick")
    inputs = RunInputs(stream, load_pretrained(NAME, weights=weights), None, config)
    copied = Path(shutil.copytree(run, tmp_path / "run"))
    begin, *entries = read(copied)
    assert begin["upright"] is False
    Record(copied).replace([begin | {"upright": inputs.settings()["upright"]}, *entries])
    assert cheem_jax.open(copied, weights=weights).config.upright is upright
    memory = cheem_jax.begin_with(tmp_path / "pets", copied, weights=weights)
    assert memory.config.upright is upright


def test_a_memory_begins_with_the_tasks_that_a_run_in_progress_had(run, tmp_path, monkeypatch):
    copied = Path(shutil.copytree(run, tmp_path / "run"))
    record = (copied / "metrics.jsonl").read_text()
    Record(copied).keep(lambda entry: entry["event"] != "evaluated" or entry["index"] < 2)
    last = copied / "checkpoints" / "cheem" / "002-task2"
    shutil.move(last, tmp_path)

    def learn_another(file, pretrained):
        shutil.copytree(tmp_path / last.name, last)
        (copied / "metrics.jsonl").write_text(record)
        save_converted(file, pretrained)

    monkeypatch.setattr("cheem_jax.memory.making.save_converted", learn_another)
    weights = run.with_name("weights.safetensors")
    memory = cheem_jax.begin_with(tmp_path / "pets", copied, weights=weights)
    assert [task.name for task in memory.tasks] == list(memory.config.tasks) == ["task0", "task1"]
    events = [entry["event"] for entry in read(memory.directory)]
    assert (events.count("learned"), events.count("evaluated")) == (2, 2)


def test_a_memory_begins_with_a_run_of_another_pixel_scale_or_leaves_nothing(
    run, tmp_path, monkeypatch
):
    copied, carrying = Path(shutil.copytree(run, tmp_path / "run")), tmp_path / "with.safetensors"
    file = copied / "config.json"
    unit = {"pixels": [[0.0] * 3, [1.0] * 3]}
    file.write_text(json.dumps(json.loads(file.read_text()) | unit))
    pretrained = load_pretrained(NAME, weights=run.with_name("weights.safetensors"))
    means = base_means(small.backbone(), STREAM.tasks[0].val.images)
    save_converted(carrying, dataclasses.replace(pretrained, base_means=means))
    memory = cheem_jax.begin_with(tmp_path / "pets", copied, weights=carrying)
    config = cheem_jax.open(tmp_path / "pets").pretrained.config
    assert (config.mean, config.std) == ((0, 0, 0), (1, 1, 1))
    assert not memory.pretrained.base_means

    def save_others(file, pretrained):
        save_converted(file, dataclasses.replace(pretrained, sha256="1" * 64))

    monkeypatch.setattr("cheem_jax.memory.making.save_converted", save_others)
    with pytest.raises(ValueError, match="was learned with weights of SHA-256"):
        cheem_jax.begin_with(tmp_path / "other", copied, weights=carrying)
    assert not (tmp_path / "other").exists()


@pytest.mark.full
def test_a_memory_begins_with_a_run_that_measured_base_means_without_these_means(tmp_path):
    run = tmp_path / "run"
    pretrained = load_pretrained(NAME, weights=small.save_weights(tmp_path))
    stream, pictures = Stream("one", STREAM.tasks[:1]), small.task("base", 9).train.images
    config = RunConfig(small.QUICK, "quick")
    run_stream(stream, pretrained, config, run, Progress(), base_images=pictures)
    assert results_of(read(run))["base_means"] == "known"
    memory = cheem_jax.begin_with(tmp_path / "pets", run, weights=tmp_path / "weights.safetensors")
    memory.learn(STREAM.tasks[1])
    first, second = (
        entry["report"] for entry in read(tmp_path / "pets") if entry["event"] == "learned"
    )
    assert "similarity" in first and "similarity" not in second
    results = results_of(read(tmp_path / "pets"))
    assert results["base_means"] == "known" and "similarity" not in results


@pytest.mark.full
@pytest.mark.parametrize(
    "fields",
    [
        {"num_registers": 2},
        {"num_registers": 4, "rotary": 100.0, "gated": True, "activation": "silu"},
        {"pool": "attention", "activation": "gelu_tanh"},
    ],
    ids=["like DINOv2", "like DINOv3", "like SigLIP"],
)
def test_a_memory_on_a_backbone_of_another_family_learns_answers_exports_serves_and_forgets(
    tmp_path, fields
):
    memory = begin(tmp_path / "pets", depth=2, **fields)
    memory.learn(STREAM)
    images = STREAM.tasks[1].test.images
    result = memory.predict(images)
    assert np.mean([one.task == "task1" for one in result]) > 0.5
    assert memory.export(tmp_path / "pets.stablehlo").largest_difference < 1e-4
    with serving(memory.predictor(batch_sizes=(1,)), Limits(max_batch=1)) as served:
        answer = served.predict(encode(Image.fromarray(images[0]))).json
    assert (answer["task"], answer["class"]) == (result[0].task, result[0].label)
    before = given(memory, "task2")
    memory.forget("task0")
    opened = cheem_jax.open(tmp_path / "pets")
    assert [task.name for task in opened.tasks] == ["task1", "task2"]
    np.testing.assert_array_equal(given(opened, "task2"), before)


def test_an_invalid_memory_is_reported_before_anything_is_read(tmp_path, copied):
    with pytest.raises(ValueError, match="cheem learn"):
        cheem_jax.open(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="is not a memory"):
        cheem_jax.open(tmp_path)
    config = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps({**config, "format": "cheem_jax-memory/2"}))
    with pytest.raises(
        ValueError, match="written by another version of cheem_jax.* learn the tasks again"
    ):
        cheem_jax.open(copied)
    (copied / "config.json").write_text(json.dumps({**config, "colour": "red"}))
    with pytest.raises(ValueError, match=r"unknown settings \['colour'\]"):
        cheem_jax.open(copied)
    for score in ("closed_form", "shared_head"):  # settings of an earlier version
        method = {**config["method"], "score": score, "score_images": 0}
        (copied / "config.json").write_text(json.dumps({**config, "method": method}))
        if score == "closed_form":
            with pytest.raises(ValueError, match=r"unknown settings \['score'\]"):
                cheem_jax.open(copied)
    assert cheem_jax.open(copied).tasks
    for name, value in (
        ("num_learned", "3"),
        ("generation", None),
        ("generation", "1"),
        ("data_sha256", []),
        ("learning", {}),
        ("extended", None),
        ("extended", {"task1": [{}]}),
        ("forgetting", [{"index": 1}]),
        ("seed", "x"),
        ("upright", None),
        ("preset", 5),
        ("tasks", None),
        ("method", {**config["method"], "batch_size": 1.5}),
        ("method", {**config["method"], "sampling": "always"}),
    ):
        (copied / "config.json").write_text(json.dumps({**config, name: value}))
        with pytest.raises(ValueError, match=r"config\.json.*if it was edited"):
            cheem_jax.open(copied)
    (copied / "config.json").write_text("{")
    with pytest.raises(ValueError, match="is not JSON"):
        cheem_jax.open(copied)
    with pytest.raises(ValueError, match="not empty"):
        begin(copied)


def test_a_corrupted_task_is_named_and_the_others_can_answer(copied, learned):
    victim = next((copied / "generation-0001" / "cheem").glob("001-*/arrays/**/d/*"), None)
    assert victim is not None
    victim.write_bytes(victim.read_bytes()[:-1] + b"?")
    with pytest.raises(ValueError, match="001-task1"):
        cheem_jax.open(copied)
    usable = cheem_jax.open(copied, usable=True)
    assert [task.name for task in usable.tasks] == ["task0", "task2"]
    assert list(usable.lost or {}) == ["001-task1"]
    assert usable.info()["forgotten"] == []
    assert [(task.name, task.number) for task in usable.tasks] == [("task0", 0), ("task2", 2)]
    np.testing.assert_array_equal(given(usable, "task2"), given(cheem_jax.open(learned), "task2"))
    with pytest.raises(ValueError, match="opened with usable"):
        usable.learn(STREAM)


def test_a_missing_task_is_named_and_the_others_can_answer(copied, learned):
    root = copied / "generation-0001" / "cheem"
    logits = given(cheem_jax.open(learned), "task2")
    shutil.rmtree(root / "001-task1")
    with pytest.raises(ValueError, match="lacks learned tasks"):
        cheem_jax.open(copied)
    usable = cheem_jax.open(copied, usable=True)
    assert [(task.name, task.number) for task in usable.tasks] == [("task0", 0), ("task2", 2)]
    assert usable.lost == {"001": "its directory is missing; restore it from a copy"}
    info = usable.info()
    assert info["forgotten"] == [] and all(task["bytes"] > 0 for task in info["tasks"])
    np.testing.assert_array_equal(given(usable, "task2"), logits)
    shutil.rmtree(root / "002-task2")
    usable.refresh()
    assert [task.name for task in usable.tasks] == ["task0"]
    assert list(usable.lost or {}) == ["001", "002"]


@pytest.mark.parametrize("number", [1, 2])
def test_a_missing_task_of_a_run_is_named_and_the_others_can_answer(run, tmp_path, number):
    weights = run.with_name("weights.safetensors")
    copied = Path(shutil.copytree(run, tmp_path / "run"))
    shutil.rmtree(copied / "checkpoints" / "cheem" / f"00{number}-task{number}")
    with pytest.raises(ValueError, match=f"lacks learned tasks, the first is 'task{number}'"):
        cheem_jax.open(copied, weights=weights)
    usable = cheem_jax.open(copied, weights=weights, usable=True)
    remaining = [f"task{other}" for other in range(3) if other != number]
    assert [task.name for task in usable.tasks] == remaining
    assert usable.lost == {f"00{number}": "its directory is missing; restore it from a copy"}


def test_a_run_in_progress_opens_with_its_finished_tasks(run, tmp_path):
    copied = Path(shutil.copytree(run, tmp_path / "run"))
    # task2 is in the record as learned, and its checkpoint is not complete yet
    Record(copied).keep(lambda entry: entry["event"] != "evaluated" or entry["index"] < 2)
    shutil.rmtree(copied / "checkpoints" / "cheem" / "002-task2")
    memory = cheem_jax.open(copied, weights=run.with_name("weights.safetensors"))
    assert [task.name for task in memory.tasks] == ["task0", "task1"]


def test_a_usable_memory_follows_the_changes_of_other_processes(copied):
    usable = cheem_jax.open(copied, usable=True)
    cheem_jax.open(copied).forget("task1")
    usable.refresh()
    assert [task.name for task in usable.tasks] == ["task0", "task2"] and usable.lost == {}


def test_info_needs_no_network_and_tells_the_same(copied):
    def is_same() -> bool:
        return json.dumps(read_info(copied)) == json.dumps(cheem_jax.open(copied).info())

    assert is_same()
    memory = cheem_jax.open(copied)
    memory.learn(NEW, extend="task1")
    assert is_same()
    memory.forget("task0")
    assert is_same() and read_info(copied)["forgotten"] == [0]
    memory.forget("task2", erase=True)
    assert is_same() and [task["name"] for task in read_info(copied)["tasks"]] == ["task1"]
    victim = next(copied.glob("generation-*/cheem/*-task1/arrays/**/d/*"))
    victim.write_bytes(victim.read_bytes()[:-1] + b"?")
    assert read_info(copied) is None  # opening it then reports the corrupted task


@pytest.mark.parametrize(
    "changed",
    [
        {"unknown": 1},
        {"forgetting": [{"index": 0, "name": "task0"}]},
        {"begun_with_sha256": "0" * 64},
    ],
)
def test_info_omits_the_facts_that_only_opening_finds_out(copied, changed):
    file = copied / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changed))
    assert read_info(copied) is None
    file.unlink()
    with pytest.raises(ValueError, match="is not a memory"):  # without opening it
        read_info(copied)


def test_auto_trains_512_steps_within_bounds_and_keeps_the_settings_of_learned_tasks():
    fits = {num: auto(QUICK_PLUS, num).finetune for num in (10, 127, 600, 992, 993, 5000)}
    assert [fit.epochs for fit in fits.values()] == [128, 128, 27, 17, 16, 16]
    assert auto(QUICK_PLUS, 5000) == dataclasses.replace(QUICK_PLUS, augment=True)
    limited = dataclasses.replace(
        DEMO, batch_size=8, remove=("skip",), search=SearchConfig(max_flops=0.8)
    )
    chosen = auto(limited, 600)
    assert (chosen.sampling, chosen.remove, chosen.fallback) == ("anchored", (), True)
    assert (chosen.ops.rank, chosen.ops.stored_rank) == (64, DEMO.ops.rank)
    assert chosen.finetune.epochs == 16 and chosen.finetune.schedule == "warm_cosine"
    for name in ("router", "placement", "token", "batch_size", "search"):
        assert getattr(chosen, name) == getattr(limited, name)
    assert auto(chosen, 600) == chosen
    high = auto(dataclasses.replace(QUICK, ops=OpSettings(rank=128)), 600)
    assert (high.ops.rank, high.ops.stored_rank) == (128, 128)


def test_the_router_of_auto_stores_at_most_1_5_mb_without_class_means():
    routers = {
        192: ("lda", "levels"),
        384: ("lda", "early"),
        768: ("lda", "last"),
        1024: ("kmeans", "levels"),
    }
    for width, expected in routers.items():
        router = auto_router(width, 12)
        assert (router.kind, router.features) == expected
        assert 4 * num_stored(router, router.num_parts(12) * width, 0) <= 1_500_000
    assert auto_router(192, 2) == RouterConfig()


@pytest.mark.full
def test_with_auto_epochs_differ_by_task_and_nothing_else_does(tmp_path, monkeypatch, capsys):
    for name, num in (("AUTO_STEPS", 15), ("FEWEST_AUTO_EPOCHS", 4)):
        monkeypatch.setattr(f"cheem_jax.cheem.config.{name}", num)
    # on this backbone of random weights a ridge head is better than any network
    monkeypatch.setattr(HeadComparison, "is_frozen_better", False)
    begin(tmp_path / "pets", preset="auto", method=None)
    for name, num in (("few", 90), ("many", 180)):  # 3 and 6 steps of 32 images
        cheem_jax.open(tmp_path / "pets").learn(small.task(name, num, num=num))
    said = " ".join(capsys.readouterr().out.split())
    assert "few: auto chose 5 epochs at the learning rate 0.003, with augmented images" in said
    assert "many: auto chose 4 epochs at the learning rate 0.003" in said
    reports = [entry["report"] for entry in read(tmp_path / "pets") if entry["event"] == "learned"]
    assert [len(report["finetune_losses"]) for report in reports] == [5, 4]
    assert [report["epochs"]["finetune"] for report in reports] == [5, 4]
    assert all(report["augment"] for report in reports)
    memory = cheem_jax.open(tmp_path / "pets")
    router = RouterConfig("lda", "levels")
    assert memory.config.preset == "auto" and memory.config.method.router == router
    assert memory.config.method == auto(dataclasses.replace(QUICK_PLUS, router=router), 180)
    memory.learn(small.task("more", 90, num=120), extend="few")
    assert "fine-tuning is tried" in " ".join(capsys.readouterr().out.split())
    assert memory.info()["tasks"][1]["extended"][0]["num_train"] == [90, 210]
    assert memory.config.method.finetune.epochs == 4  # of 4 steps
    added = [stored.params for block in memory.internal.pool for stored in block[1:]]
    ranks = {params.down.shape[1] for params in added if isinstance(params, LowRank)}
    assert ranks == {QUICK_PLUS.ops.stored_rank}


def test_an_earlier_memory_of_auto_keeps_its_router_and_its_rank(tmp_path):
    directory = tmp_path / "pets"
    begin(directory).learn(STREAM.tasks[0])
    file = directory / "config.json"
    file.write_text(file.read_text().replace('"preset": "auto, changed"', '"preset": "auto"'))
    memory = cheem_jax.open(directory)
    before = memory.config.method
    assert memory.config.preset == "auto" and before.sampling == "hee"
    memory.learn(STREAM.tasks[1])
    after = cheem_jax.open(directory).config.method
    assert after.sampling == "anchored" and after.router == before.router
    assert after.ops.stored_rank == before.ops.rank
    pairs = [
        stored.params
        for block in memory.internal.pool
        for stored in block
        if isinstance(stored.params, LowRank)
    ]
    assert pairs and {len(pair.up) for pair in pairs} == {before.ops.rank}


def test_a_task_that_an_earlier_version_began_is_finished_with_its_settings(tmp_path):
    task = STREAM.tasks[0]
    directory = tmp_path / "pets"
    with pytest.raises(KeyboardInterrupt):
        begin(directory).learn(task, progress=Killed("finetune"), save_every=0)
    file = directory / "config.json"
    file.write_text(file.read_text().replace('"preset": "auto, changed"', '"preset": "auto"'))
    memory = cheem_jax.open(directory)
    memory.learn(task)
    assert memory.config.preset == "auto" and memory.config.method == small.QUICK
    at_once = begin(tmp_path / "at-once")
    at_once.learn(task)
    assert memory.tasks[0].architecture == at_once.tasks[0].architecture


FALLBACK = dataclasses.replace(
    small.QUICK, finetune=FitConfig(epochs=1, learning_rate=1e-6), fallback=True
)
"""The head of the learned network keeps its initial values, so that the frozen backbone with a
ridge head is better."""


def test_a_task_whose_measurement_was_interrupted_is_learned_in_this_process_too(tmp_path):
    memory = begin(tmp_path / "pets")
    with pytest.raises(KeyboardInterrupt):
        memory.learn(STREAM.tasks[0], progress=Killed("evaluate"))
    assert [task.name for task in memory.tasks] == [STREAM.tasks[0].name]
    assert memory.info()["tasks"][0]["bytes"] > 0
    assert memory.predict(STREAM.tasks[0].test.images[:1])[0].task == STREAM.tasks[0].name


def test_a_network_worse_than_the_frozen_backbone_is_not_kept(tmp_path, capsys):
    memory = begin(tmp_path / "pets", method=FALLBACK)
    task = STREAM.tasks[0]
    with pytest.raises(KeyboardInterrupt):
        memory.learn(task, progress=Killed("means"), save_every=0)
    cheem_jax.open(tmp_path / "pets").learn(task)
    said = " ".join(capsys.readouterr().out.split())
    begin(tmp_path / "at-once", method=FALLBACK).learn(task)
    assert contents(tmp_path / "pets") == contents(tmp_path / "at-once")
    memory = cheem_jax.open(tmp_path / "pets")
    assert memory.tasks[0].architecture == ("reuse:0",) * small.CONFIG.depth
    assert not memory.internal.added(0)
    compared = memory.info()["tasks"][0]["frozen_head"]
    assert compared["kept"] == "frozen" and compared["network"] < compared["frozen"]
    assert compared["frozen"] == memory.evaluate(task, split="val")[0].accuracy_given > 0.9
    assert f"the frozen backbone with a ridge head: {100 * compared['frozen']:.1f} %" in said
    assert "better, by more than one standard error, so the task uses it" in said
    caption = task_grid(results_of(read(tmp_path / "pets"))).caption
    assert "the latter is more accurate and used for T1" in caption
    sure = [
        answer.guesses[0].probability
        for answer in memory.predict(task.val.images, open_set=0.1)
        if answer.guesses
    ]
    assert np.mean(sure) > 0.8, "its logits have a temperature"
    assert memory.export(tmp_path / "task0.stablehlo", task="task0").largest_difference < 1e-4
    memory.learn(MORE, extend="task0")
    assert extension_in(tmp_path / "pets")["kept"] == "unchanged"
    assert memory.info()["tasks"][0]["frozen_head"] == compared
    memory.learn(NEW, extend="task0")
    assert memory.evaluate(NEW, task="task0")[0].accuracy_given > 0.8
    assert memory.info()["tasks"][0]["frozen_head"] is None, "the extended task has another head"
    memory.forget("task0")
    assert memory.tasks == ()


def test_the_network_stays_where_it_is_better_or_the_preset_is_the_papers(tmp_path):
    other = begin(tmp_path / "kept", method=dataclasses.replace(FALLBACK, fallback=False))
    other.learn(STREAM.tasks[0])
    compared = other.info()["tasks"][0]["frozen_head"]
    assert compared["kept"] == "network" and compared["network"] < compared["frozen"]
    head = other.internal.tasks[0].head
    few = np.arange(10) < 4
    for more, less, better in ((0, 0, False), (1, 0, False), (2, 0, True), (3, 1, False)):
        # the backbone classifies `more` other images correctly, and `less` of the network's wrongly
        backbone = np.roll(np.arange(10) < 4 + more - less, less)
        compared = HeadComparison(head, 1.0, few, backbone)
        assert compared.is_frozen_better == better, (more, less)
    never = HeadComparison(head, 1.0, None, np.zeros(10, bool))
    assert never.is_frozen_better, "the network's logits are non-finite"
    assert never.report(True) | {"kept": ""} == never.report(False) | {"kept": ""}
    presets = {
        preset: with_fallback(PRESETS.get(preset, QUICK), preset).fallback
        for preset in ("auto", "quick", "paper")
    }
    assert presets == {"auto": True, "quick": True, "paper": False} and not QUICK.fallback


def test_nothing_is_left_of_a_memory_that_could_not_be_made(tmp_path):
    with pytest.raises(ValueError, match="unknown backbone"):
        cheem_jax.create(tmp_path / "pets", backbone="deit_tinny")
    for seed in (-1, 2**32, True):
        with pytest.raises(ValueError, match="expected an integer from 0 to"):
            cheem_jax.create(tmp_path / "pets", backbone="vit_nano", seed=seed)
    assert list(tmp_path.iterdir()) == []


def test_a_stream_needs_unique_names_and_one_name_is_for_one_task(memory):
    with pytest.raises(ValueError, match="unique"):
        memory.learn([small.task("a", 1), small.task("a", 2)])
    with pytest.raises(
        ValueError, match=r"'c' is for one task, but the data contain 2: \['a', 'b'\]"
    ):
        memory.learn(Stream("two", (small.task("a", 1), small.task("b", 2))), name="c")
