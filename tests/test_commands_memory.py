"""From folders of images to answers through the `cheem` command, wrong turns included."""

import csv
import dataclasses
import io
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
import small
from commands import cheem
from PIL import Image
from pixels import large_png
from rich.console import Console

import cheem_jax
from cheem_jax.backbone.weights import save_converted
from cheem_jax.cli.ask import _read_standard_input
from cheem_jax.cli.main import main
from cheem_jax.cli.memory import Learn, grouped
from cheem_jax.data.task import Split
from cheem_jax.memory import create
from cheem_jax.memory import directory as directory_module
from cheem_jax.memory.forgetting import PoolPosition
from cheem_jax.memory.hub import model_card
from cheem_jax.run.directory import hold
from cheem_jax.run.record import read
from cheem_jax.run.results import results_of

TASKS = {name: small.task(name, seed, 4, 80) for seed, name in enumerate(("pets", "birds"))}
FIRST, SECOND = TASKS


def write_task(folder, task, num=8):
    """Write a few images of the first two classes of a task as files."""
    for split, part in task.splits.items():
        for label in (0, 1):
            for row in np.flatnonzero(part.labels == label)[:num]:
                file = folder / split / task.classes[label] / f"{row}.png"
                file.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(part.images[row]).save(file)
    return folder


@pytest.fixture(scope="module", autouse=True)
def one_executor():
    with small.shared_executors():
        yield


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    folder = tmp_path_factory.mktemp("photos")
    for name, task in TASKS.items():
        write_task(folder / name, task)
    return folder


@pytest.fixture(scope="module")
def memory(tmp_path_factory, photos):
    """A memory that two commands have made."""
    directory = tmp_path_factory.mktemp("memory") / "mine"
    options = ["--backbone", small.TIMM_NAME, "--weights", small.save_weights(directory.parent)]
    options += ["--preset", "demo", "--base-data", photos / SECOND]
    with pytest.MonkeyPatch.context() as patched:
        for words in ([photos / FIRST], [photos / SECOND, "--save-every", "0"]):
            patched.setattr(
                sys, "argv", ["cheem", "learn", *map(str, [directory, *words, *options])]
            )
            main()
    return directory


@pytest.fixture
def copied(memory, tmp_path):
    return shutil.copytree(memory, tmp_path / "mine")


def test_info_lists_tasks_settings_and_sizes(capsys, memory):
    status, out, _ = cheem(capsys, "info", memory)
    assert status == 0 and FIRST in out and SECOND in out and "calibrated" in out
    status, out, _ = cheem(capsys, "info", memory, "--json")
    result = json.loads(out)
    assert [task["name"] for task in result["tasks"]] == [FIRST, SECOND]
    assert result["backbone"] == small.TIMM_NAME
    assert all(len(task["architecture"]) == 4 and task["bytes"] > 0 for task in result["tasks"])


def test_predict_answers_in_three_forms(capsys, memory, photos):
    folder = photos / FIRST / "test"
    num = len(list(folder.rglob("*.png")))
    status, out, _ = cheem(capsys, "predict", memory, folder, "--json")
    lines = [json.loads(line) for line in out.splitlines()]
    assert status == 0 and len(lines) == num
    assert all(0 < line["probability"] <= 1 and len(line["blocks"]) == 4 for line in lines)
    status, out, _ = cheem(capsys, "predict", memory, folder, "--format", "csv")
    rows = list(csv.DictReader(io.StringIO(out)))
    assert [row["class"] for row in rows] == [line["class"] for line in lines]
    status, out, _ = cheem(capsys, "predict", memory, folder)
    assert status == 0 and lines[0]["class"] in out and len(out.splitlines()) >= num + 1


@pytest.mark.parametrize(
    ("name", "strict", "instead"),
    [
        ("jax_numpy_rank_promotion", "raise", "allow"),
        ("jax_numpy_dtype_promotion", "strict", "standard"),
        ("jax_transfer_guard", "disallow", "allow"),
        ("jax_enable_x64", True, None),
        ("jax_debug_nans", True, None),
    ],
)
def test_strict_options_of_jax_stop_no_answer(capsys, memory, photos, name, strict, instead):
    image = next((photos / FIRST / "test").rglob("*.png"))
    before = getattr(jax.config, name)
    [usual] = json.loads(f"[{cheem(capsys, 'predict', memory, image, '--json')[1]}]")
    try:
        jax.config.update(name, strict)
        status, out, err = cheem(capsys, "predict", memory, image, "--json")
        assert getattr(jax.config, name) == (strict if instead is None else instead)
    finally:
        jax.config.update(name, before or "allow" if name == "jax_transfer_guard" else before)
    assert status == 0 and (f"note: {name.upper()}={strict} " in err) == (instead is not None)
    [answer] = json.loads(f"[{out}]")
    assert answer["class"] == usual["class"]
    assert answer["probability"] == pytest.approx(usual["probability"], abs=1e-4)


@pytest.mark.full
def test_answers_need_no_compiler(memory, photos):
    image = next((photos / FIRST / "test").rglob("*.png"))
    # in a separate process, since uncompiled functions get NumPy's arrays, which type checks refuse
    words = [sys.executable, "-m", "cheem_jax", "predict", memory, image, "--json"]
    done = subprocess.run(
        words, env=os.environ | {"JAX_DISABLE_JIT": "1"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["task"] in TASKS


def test_a_folder_is_answered_and_the_skipped_files_are_counted(capsys, memory, photos, tmp_path):
    shutil.copy(next((photos / FIRST / "test").rglob("*.png")), tmp_path / "no_suffix")
    (tmp_path / "video.mp4").write_bytes(b"x")
    status, out, err = cheem(capsys, "predict", memory, tmp_path, "--json")
    assert status == 0
    assert len(out.splitlines()) == 1
    assert f"{tmp_path.name}: 1 file ignored (.mp4)" in err


@pytest.mark.full
def test_a_list_with_missing_and_broken_files_is_answered_up_to_its_last_entry(
    capsys, memory, photos, tmp_path, monkeypatch
):
    good = next((photos / FIRST / "test").rglob("*.png"))
    frames = [Image.new("RGB", (16, 16), colour) for colour in ("red", "blue")]
    frames[0].save(tmp_path / "moving.gif", save_all=True, append_images=frames[1:])
    (tmp_path / "text.png").write_text("hello")
    (tmp_path / "empty.jpg").write_bytes(b"")
    (tmp_path / "huge.png").write_bytes(large_png(10_000, 10_000))
    (tmp_path / "cut.png").write_bytes(good.read_bytes()[:-30])
    wrong = ["text.png", "empty.jpg", "huge.png", "cut.png", "nowhere.png"]
    listed = [str(good), *(str(tmp_path / name) for name in wrong), str(tmp_path / "moving.gif")]
    monkeypatch.setattr(
        sys, "stdin", io.TextIOWrapper(io.BytesIO(("\n".join(listed) + "\n").encode()))
    )
    status, out, err = cheem(capsys, "predict", memory, "-", "--json")
    lines = {line["file"]: line for line in map(json.loads, out.splitlines())}
    assert status == 1 and "5 of 7 images cannot be read" in err and list(lines) == listed
    assert lines[str(good)]["task"] and lines[str(tmp_path / "moving.gif")]["task"]
    for name in wrong:
        assert lines[str(tmp_path / name)]["error"]
    assert lines[str(tmp_path / "nowhere.png")]["error"].endswith("no such file")
    assert "at most" in lines[str(tmp_path / "huge.png")]["error"]
    status, _, err = cheem(capsys, "predict", memory, *listed)
    assert status == 1 and f"{tmp_path / 'text.png'}: not an image file" in err


@pytest.mark.parametrize("is_image", [True, False])
def test_an_image_can_be_read_from_standard_input(capsys, memory, photos, monkeypatch, is_image):
    file = next((photos / FIRST / "test").rglob("*.png"))
    data = file.read_bytes() if is_image else bytes(range(256))
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
    status, out, err = cheem(capsys, "predict", memory, "-", "--json")
    result = json.loads(out)
    if is_image:
        _, alone, _ = cheem(capsys, "predict", memory, file, "--json")
        assert status == 0 and result == {**json.loads(alone), "file": "-"}
    else:
        assert status == 1
        assert result["error"].startswith("not an image file")
        assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"a.png\0dir/b\nc.png\0", ["a.png", "dir/b\nc.png"]),  # find -print0
        (b"a.png\0b.png", ["a.png", "b.png"]),
        (b"a.png\r\n\nBMW/1.png\nP3.png\n", ["a.png", "BMW/1.png", "P3.png"]),
        (b"P3\n1 1\n255\n255 0 0\n", None),
        (b"P1\n# made by hand\n1 1\n0\n", None),
        (large_png(1, 1), None),
        (b"not an image\0\0", None),
    ],
)
def test_standard_input_is_an_image_or_a_list(monkeypatch, data, expected):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
    assert _read_standard_input() == ([data] if expected is None else expected)


@pytest.mark.parametrize(
    ("stdin", "said"),
    [(None, "is closed; give images"), (io.TextIOWrapper(io.BytesIO(b"\n")), "is empty; expected")],
)
def test_closed_or_empty_standard_input_is_one_line(capsys, memory, monkeypatch, stdin, said):
    monkeypatch.setattr(sys, "stdin", stdin)
    status, out, err = cheem(capsys, "predict", memory, "-")
    assert status == 2 and not out and f"standard input {said}" in err and err.count("\n") == 1


def test_sources_that_cannot_be_read_are_reported_in_their_place(
    capsys, memory, photos, tmp_path, monkeypatch
):
    good = str(next((photos / FIRST / "test").rglob("*.png")))
    listed = [good, "https://example.org/a.png", good, str(tmp_path), "nowhere.png"]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("\n".join(listed).encode())))
    status, out, err = cheem(capsys, "predict", memory, "-", "--json")
    assert status == 1 and "3 of 5 images cannot be read" in err
    lines = [json.loads(line) for line in out.splitlines()]
    assert [line["file"] for line in lines] == listed
    assert ["error" in line for line in lines] == [False, True, False, True, True]


@pytest.mark.parametrize("width", [60, 100])
def test_tables_of_a_memory_fit_the_terminal(capsys, monkeypatch, memory, photos, width):
    monkeypatch.setattr("cheem_jax.run.progress._console", lambda: Console(width=width))
    for words in (["info", memory], ["evaluate", memory, photos]):
        status, out, _ = cheem(capsys, *words)
        lines = out.splitlines()
        head = next(place for place, line in enumerate(lines) if line.startswith("task "))
        assert status == 0 and "…" not in out and max(map(len, lines[head : head + 3])) <= width
        assert FIRST in "".join(lines[head + 1 : head + 3])
        assert ("on disk" if words[0] == "info" else "task ID right %") in lines[head]
        assert words[0] == "evaluate" or ("executed" in lines[head]) == (width == 100)


def test_copies_under_another_name_are_reported_before_and_after_learning(capsys, copied, photos):
    status, out, _ = cheem(capsys, "learn", copied, photos / FIRST, "--name", "same")
    warning, accuracy = (
        next(n for n, line in enumerate(out.splitlines()) if w in line)
        for w in ("warning", "same: ")
    )
    assert status == 0
    assert f"warning: same has the same images as {FIRST};" in out
    assert warning < accuracy
    assert f"16 test images of same were routed to {FIRST}; the two tasks" in out


def test_none_of_my_tasks_can_be_said(capsys, memory, tmp_path):
    noise = np.random.default_rng(0).integers(0, 2, (8, 8, 3), dtype=np.uint8) * 255
    Image.fromarray(noise).save(tmp_path / "noise.png")
    status, out, _ = cheem(capsys, "predict", memory, tmp_path / "noise.png", "--open-set", "0.05")
    assert status == 0 and "none of my tasks" in out
    words = ["predict", memory, tmp_path / "noise.png", "--open-set", "0.05", "--format", "csv"]
    status, out, _ = cheem(capsys, *words)
    assert status == 0
    (row,) = csv.DictReader(out.splitlines())
    assert row["task"] == row["class"] == "" and float(row["distance"]) > 0
    status, out, err = cheem(capsys, *words, "--json")
    assert status == 2 and not out and "--json and --format csv contradict each other" in err
    status, _, err = cheem(capsys, "predict", memory, tmp_path / "noise.png", "--open-set", "2")
    assert status == 2 and "open_set is 2" in err


def test_evaluate_measures_tasks_by_name(capsys, memory, photos):
    status, out, _ = cheem(capsys, "evaluate", memory, photos, "--json")
    scores = json.loads(out)["tasks"]
    assert status == 0 and {score["task"] for score in scores} == {FIRST, SECOND}
    tasks = json.loads((memory / "evaluated.json").read_text())["tasks"]
    assert {(name, one["accuracy"]) for name, one in tasks.items()} == {
        (s["task"], s["accuracy"]) for s in scores
    }
    assert all(0 <= score["calibration_error"] <= 1 for score in scores)
    status, out, _ = cheem(capsys, "evaluate", memory, photos / FIRST)
    assert status == 0 and FIRST in out and "ECE %" in out and "average" not in out
    status, _, err = cheem(capsys, "evaluate", memory, photos / FIRST, "--task", "nothing")
    assert status == 2 and "no task 'nothing'" in err
    status, _, err = cheem(capsys, "evaluate", memory, photos / FIRST, "--task", "")
    assert status == 2 and "no task ''" in err
    # "None" is a name like any other
    image = next((photos / FIRST / "test").rglob("*.png"))
    for words in (["evaluate", memory, photos / FIRST], ["predict", memory, image]):
        status, _, err = cheem(capsys, *words, "--task", "None")
        assert status == 2 and "no task 'None'" in err


def test_evaluate_measures_the_rejection_of_unknown_images(capsys, memory, photos, tmp_path):
    noise = np.random.default_rng(0).integers(0, 2, (2, 32, 32, 3), dtype=np.uint8) * 255
    for row, pixels in enumerate(noise):
        Image.fromarray(pixels).save(tmp_path / f"{row}.png")
    words = ["evaluate", memory, photos / FIRST, "--unknown"]
    status, out, _ = cheem(capsys, *words, tmp_path, "--json")
    measured = json.loads(out)["open_set"]
    assert status == 0 and measured["num_unknown"] == 2 and measured["auroc"] > 0.5
    status, out, _ = cheem(capsys, *words, tmp_path)
    assert status == 0 and f"AUROC {100 * measured['auroc']:.1f} %" in " ".join(out.split())
    (tmp_path / "broken.png").write_bytes(b"no image")
    empty = tmp_path / "empty"
    empty.mkdir()
    for place, message in (
        (tmp_path, "1 unknown image(s) cannot be used"),
        (empty, "contains no image"),
        (tmp_path / "nothing", "1 unknown image(s) cannot be used"),
    ):
        status, out, err = cheem(capsys, *words, place)
        assert status == 2 and message in err and not out
        assert len(err.strip().split("error:")) == 2


def test_learning_again_with_equal_data_changes_nothing(capsys, copied, photos):
    config = json.loads((copied / "config.json").read_text())
    assert (
        config["method"].pop("augment") is False
    )  # as memories were before there was such a setting
    (copied / "config.json").write_text(json.dumps(config))
    before = {
        file: file.read_bytes()
        for file in copied.rglob("*")
        if file.is_file() and "generation" in str(file)
    }
    status, out, _ = cheem(capsys, "learn", copied, photos / FIRST, "--discard-unfinished")
    assert status == 0 and "learned already" in out and "no interrupted task to discard" in out
    assert before == {
        f: f.read_bytes() for f in copied.rglob("*") if f.is_file() and "generation" in str(f)
    }


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["--backbone", "deit_tiny"],
            f'backbone is "{small.TIMM_NAME}" there and "deit_tiny" here',
        ),
        (["--seed", "4"], "seed is 0 there and 4 here"),
        (["--preset", "auto"], 'preset is "demo" there and "auto" here'),
        (["--keep-base"], "keep_base is false there and true here"),
        (["--augment"], "augment is false there and true here"),
        (["--name", "shapes2", "--tasks", "nowhere"], "nowhere"),
    ],
)
def test_a_memory_keeps_its_settings(capsys, copied, photos, words, said):
    status, _, err = cheem(capsys, "learn", copied, photos / FIRST, *words)
    assert status == 2 and err.startswith("error: ") and said in err and err.count("\n") == 1


def test_with_begin_with_every_setting_of_the_memory_is_refused(capsys, photos, tmp_path):
    """Values that are false in Python count as given, too."""
    words = ["learn", tmp_path / "new", photos / FIRST, "--begin-with", tmp_path / "run"]
    status, _, err = cheem(capsys, *words, "--seed", "0", "--augment")
    assert status == 2 and "omit --augment, --seed" in err
    assert not (tmp_path / "new").exists()


def test_a_memory_accepts_the_settings_that_it_was_made_with_wherever_the_files_are(
    capsys, copied, photos, tmp_path
):
    """The files have other names than in the command that made the memory, and equal content."""
    file = small.save_weights(tmp_path)
    base = shutil.copytree(photos / SECOND, tmp_path / "base")
    words = ["learn", copied, photos / FIRST, "--weights", file, "--base-data", base]
    words += ["--seed", "0", "--image-size", 8]
    status, out, err = cheem(capsys, *words)
    assert status == 0 and "learned already" in out, err
    next((base / "train").rglob("*.png")).unlink()
    status, _, err = cheem(capsys, *words)
    assert status == 2 and 'base_data is "' in err and " there and " in err
    status, _, err = cheem(capsys, "learn", copied, photos / FIRST, "--begin-with", copied)
    assert status == 2 and "begin_with is null there and" in err
    save_converted(file, small.pretrained(1, name=small.TIMM_NAME))
    status, _, err = cheem(capsys, *words)
    assert status == 2 and "was created with weights of SHA-256" in err and "has seed 1" in err
    config = json.loads((copied / "config.json").read_text())
    del config["base_data_sha256"]  # as in a memory of an earlier version
    (copied / "config.json").write_text(json.dumps(config))
    status, _, err = cheem(capsys, *words)
    assert status == 2 and "'base_data_sha256'" in err and "learn the tasks again" in err


@pytest.mark.full
def test_the_kept_classes_of_the_pretraining_data_are_compared_by_name(capsys, photos, tmp_path):
    file = small.save_weights(tmp_path, num_classes=2)
    (tmp_path / "names.txt").write_text("one\ntwo\n")
    settings = {"backbone": small.TIMM_NAME, "weights": file, "base_data": photos / FIRST}
    settings["base_classes"] = ["one", "two"]
    create(tmp_path / "pets", keep_base=True, augment=True, method=small.QUICK, **settings)
    words = ["learn", tmp_path / "pets", photos / FIRST, "--base-classes", tmp_path / "names.txt"]
    words += ["--weights", file, "--base-data", photos / FIRST, "--keep-base", "--augment"]
    words += ["--backbone", f"timm/{small.TIMM_NAME}"]
    status, _, err = cheem(capsys, *words, "--extend", "nothing")
    assert status == 2 and "no task 'nothing'" in err  # which is said once all settings fit
    (tmp_path / "names.txt").write_text("one\nthree\n")
    status, _, err = cheem(capsys, *words)
    assert status == 2 and 'base_classes[1] is "two" there and "three" here' in err
    with pytest.raises(ValueError, match="give keep_base"):
        create(tmp_path / "more", **settings)


def test_wrong_data_leave_no_memory_behind(capsys, tmp_path, photos):
    twice = write_task(tmp_path / "twice", TASKS[FIRST], num=2)
    name = TASKS[FIRST].classes[0]
    shutil.copytree(twice / "train" / name, twice / "train" / name.swapcase())
    for data, said in (
        ([tmp_path / "nowhere"], "no such folder"),
        ([twice], "differ only in"),
        ([photos / FIRST, "--name", ""], "a task needs a name"),
        ([photos / FIRST, "--save-every", "-1"], "save_every is -1.0; expected seconds"),
        ([photos / FIRST, "--seed", 2**32], "expected an integer from 0 to 4294967295"),
        ([photos / FIRST, "--image-size", 10**8], "expected at most 4096 pixels"),
    ):
        place = tmp_path / "new" / "mine"
        status, _, err = cheem(capsys, "learn", place, *data, "--backbone", "vit_micro")
        assert status == 2 and said in err and not (tmp_path / "new").exists()
    occupied = tmp_path / "taken"
    occupied.mkdir()
    (occupied / "letter.txt").write_text("dear")
    status, _, err = cheem(capsys, "learn", occupied, photos / FIRST, "--backbone", "vit_micro")
    assert status == 2
    assert "not empty" in err
    assert [file.name for file in occupied.iterdir()] == ["letter.txt"]


def test_a_wrong_option_does_not_begin_a_task_in_an_existing_memory(capsys, copied, tmp_path):
    folder = write_task(tmp_path / "more", small.task("fish", 2), num=2)
    before = (copied / "config.json").read_bytes()
    status, _, err = cheem(capsys, "learn", copied, folder, "--save-every", "nan")
    assert status == 2 and "save_every is nan" in err
    assert (copied / "config.json").read_bytes() == before


def test_a_memory_in_which_another_process_learns_outlives_a_failure(
    capsys, tmp_path, photos, monkeypatch
):
    directory = tmp_path / "pets"

    def load(settings, plans, memory, progress):
        with hold(directory):  # the other process
            raise ValueError("broken image")

    monkeypatch.setattr(Learn, "load", load)
    words = ["learn", directory, photos / FIRST, "--backbone", "vit_micro"]
    remove = directory_module.remove_memory
    with monkeypatch.context() as patch:
        patch.setattr(directory_module, "remove_memory", lambda _: pytest.fail("removed"))

        def load_beside(settings, plans, memory, progress):
            memory.state.write(learning={"name": "a", "number": 0, "data_sha256": "0"})
            raise ValueError("broken image")

        patch.setattr(Learn, "load", load_beside)
        status, _, err = cheem(capsys, *words)
    assert status == 2 and "broken image" in err and (directory / "config.json").exists()
    remove(directory)
    status, _, err = cheem(capsys, *words)
    assert status == 2 and "broken image" in err and not directory.exists()


@pytest.mark.full
def test_broken_images_are_left_out_where_that_is_asked_for_and_the_record_names_them(
    capsys, copied, tmp_path
):
    task = small.task("fish", 2)
    folder = write_task(tmp_path / "more", task, num=4)
    broken = sorted((folder / "train" / task.classes[0]).iterdir())[0]
    broken.write_bytes(b"x")
    status, _, err = cheem(capsys, "learn", copied, folder)
    assert status == 2 and "1 image file(s) cannot be used" in err and str(broken) in err
    status, out, _ = cheem(capsys, "learn", copied, folder, "--skip-broken")
    assert status == 0
    assert f"excluded: {broken}" in out
    assert "more: 1 unreadable images excluded, 23 kept" in out
    learned = [entry for entry in read(copied) if entry["event"] == "learned"]
    assert learned[-1]["report"]["skipped_images"] == [broken.relative_to(folder).as_posix()]
    assert "skipped_images" not in learned[0]["report"]


def test_a_class_alone_is_measured_and_added(capsys, copied, photos, tmp_path):
    task = TASKS[FIRST]
    images = TASKS[FIRST].train
    folder = tmp_path / "held_out" / task.classes[0]
    shutil.copytree(photos / FIRST / "test" / task.classes[0], folder)
    status, out, _ = cheem(capsys, "evaluate", copied, folder.parent, "--task", FIRST, "--json")
    (score,) = json.loads(out)["tasks"]
    assert status == 0 and (score["num_images"], score["images"]) == (8, "all 8 images")
    memory = cheem_jax.open(copied)
    assert [memory.evaluate(folder.parent, task=FIRST)[0]._asdict()] == [score]
    with pytest.raises(ValueError, match="has no val images; choose another split"):
        memory.evaluate(
            Path(shutil.move(folder.parent, tmp_path / "a" / "test")).parent,
            split="val",
            task=FIRST,
        )
    new = tmp_path / "more" / task.classes[2]
    new.mkdir(parents=True)
    for row in np.flatnonzero(images.labels == 2)[:20]:
        Image.fromarray(images.images[row]).save(new / f"{row}.png")
    status, out, _ = cheem(capsys, "learn", copied, new.parent, "--extend", FIRST)
    said = " ".join(out.split())
    assert status == 0
    assert (
        f"{FIRST}: 18 more images to learn from (16 before), 2 for validation, 1 more class" in said
    )
    assert re.search(rf"{FIRST}: [\d.]+ % on 2 validation images \(", said)
    memory.refresh()
    assert memory.tasks[-1].classes == task.classes[:3]
    reported = results_of(read(copied))["tasks"][-1]
    assert (reported["num_test"], reported["tested_on"]) == (16, "validation"), "as many as before"
    card = model_card(memory, "someone/pets")
    [row] = [line for line in card.splitlines() if line.startswith(f"| {FIRST} ")]
    assert row.count(" %* |") == 2 and "right after learning the task (* on validation" in card
    status, out, _ = cheem(capsys, "learn", copied, new.parent, "--extend", FIRST)
    assert status == 0 and f"{FIRST}: learned already" in out
    for row in list(new.iterdir())[1:]:
        row.unlink()
    status, _, err = cheem(capsys, "learn", copied, new.parent, "--extend", FIRST)
    assert status == 2 and "give at least 2 images of a class" in err


def test_a_task_is_extended_by_new_classes_and_info_tells(capsys, copied, photos, tmp_path):
    task = TASKS[FIRST]
    more = write_task(
        tmp_path / "more",
        dataclasses.replace(
            task,
            classes=task.classes[::-1],
            **{
                name: Split(part.images, len(task.classes) - 1 - part.labels)
                for name, part in task.splits.items()
            },
        ),
    )
    status, out, _ = cheem(capsys, "learn", copied, more, "--extend", FIRST)
    said = " ".join(out.split())
    assert (
        status == 0
        and f"{FIRST}: 16 more images to learn from (16 before), 16 for validation, 2 more classes (2 before)"  # noqa: E501
        in said
    )
    assert f"no new images of {', '.join(task.classes[:2])}; the network stays as it is" in said
    status, out, _ = cheem(capsys, "learn", copied, more, "--extend", FIRST)
    assert status == 0 and f"{FIRST}: learned already" in out
    status, out, _ = cheem(capsys, "info", copied)
    said = " ".join(out.split())
    assert f"{FIRST}: extended from 16 training images of 2 classes to 32 of 4" in said
    assert "forgotten" not in said
    for words, reason in (
        ([copied, more, "--extend", "dgos"], "no task 'dgos'"),
        ([tmp_path / "no", more, "--extend", FIRST], "does not exist, so task"),
    ):
        status, _, err = cheem(capsys, "learn", *words)
        assert status == 2 and reason in err and err.count("\n") == 1
    assert not (tmp_path / "no").exists()


def test_forget_lists_the_removed_experts(capsys, copied, photos):
    status, out, _ = cheem(capsys, "forget", copied, FIRST)
    assert status == 0 and f"has forgotten '{FIRST}'" in out
    page = (copied / "report.html").read_text()
    assert f"T1 {SECOND}" in page and f" {FIRST}<" not in page
    status, out, _ = cheem(capsys, "info", copied, "--json")
    assert [task["name"] for task in json.loads(out)["tasks"]] == [SECOND]
    status, _, err = cheem(capsys, "forget", copied, FIRST)
    assert status == 2 and "no task" in err
    status, out, _ = cheem(capsys, "forget", copied, SECOND, "--json")
    assert status == 0 and json.loads(out)["tasks"] == [SECOND]
    assert not (copied / "report.html").exists()
    picture = next((photos / FIRST / "test").rglob("*.png"))
    status, _, err = cheem(capsys, "predict", copied, picture)
    assert status == 2 and "no task yet" in err


def test_experts_of_the_same_index_and_tasks_share_one_line():
    places = [PoolPosition(block, expert) for block, expert in ((0, 1), (1, 1), (3, 2), (4, 1))]
    owners = [("a",), ("a",), ("a",), ("a", "b")]
    assert list(grouped(zip(places, owners, strict=True))) == [
        ("blocks 1, 2: expert 1", ("a",)),
        ("block 4: expert 2", ("a",)),
        ("block 5: expert 1", ("a", "b")),
    ]


@pytest.mark.parametrize("command", ["predict", "evaluate", "info", "forget", "export"])
def test_no_memory_is_reported_by_every_command(capsys, tmp_path, command):
    words = {
        "predict": ["a.png"],
        "evaluate": [tmp_path],
        "forget": ["x"],
        "export": [tmp_path / "a.onnx"],
    }
    status, _, err = cheem(capsys, command, tmp_path / "nowhere", *words.get(command, []))
    assert status == 2 and "does not exist; `cheem learn" in err and err.count("\n") == 1


@pytest.mark.full
def test_the_first_answer_of_a_process_needs_no_second_look(memory, photos):
    """In a separate process, as a person starts it."""
    picture = next((photos / SECOND / "test").rglob("*.png"))
    done = subprocess.run(
        [sys.executable, "-m", "cheem_jax", "predict", str(memory), str(picture), "--json"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["file"] == str(picture)
