"""`cheem data` as a user types it."""

import functools
import json
import re
import shutil

import commands
import numpy as np
import official
import pytest
from PIL import Image
from pixels import four_colours, stored
from test_data_cache import pictures

from cheem_jax.data import ImagesConfig, load_tasks, plan_task
from cheem_jax.data.benchmarks.prepare import manual_dir
from cheem_jax.data.benchmarks.table import BY_NAME, Counts


@pytest.fixture
def cheem(capsys):
    """Run a command line, and return status, output and errors."""
    return functools.partial(commands.cheem, capsys)


def picture(file):
    with Image.open(file) as image:
        return np.asarray(image.convert("RGB"))


@pytest.fixture
def gtsrb(tmp_path, monkeypatch):
    """A data folder with small archives of one task, which the table then expects."""
    pytest.importorskip("tensorflow_datasets", reason="needs the extra `datasets`")
    place = official.put(manual_dir(tmp_path / "data"), official.gtsrb())
    official.expect(monkeypatch, "gtsrb", place, Counts(43, 43, 43))
    return tmp_path / "data"


def test_list_tells_state_size_licence_and_the_way_to_each_task(cheem, tmp_path):
    status, out, _ = cheem("data", "list", "--data-dir", tmp_path)
    assert status == 0 and f"0 of {len(BY_NAME)} ready" in out
    status, out, _ = cheem("data", "list", "gtsrb,mtil,mnist", "--json", "--data-dir", tmp_path)
    assert status == 0
    assert [task["task"] for task in json.loads(out)["tasks"]][:2] == [
        "gtsrb",
        "aircraft",
    ]
    assert len(json.loads(out)["tasks"]) == 12
    status, out, _ = cheem("data", "list", "mtil", "--json", "--data-dir", tmp_path)
    tasks = {task["task"]: task for task in json.loads(out)["tasks"]}
    assert status == 0
    assert len(tasks) == 11
    assert tasks["mnist"]["images"] == {"train": 54000, "val": 6000, "test": 10000}
    assert tasks["dtd"]["benchmarks"] == ["mtil", "vdd"]
    assert tasks["dtd"]["licence"] == "research only"
    assert all(
        task["state"] == "missing" and "cheem data prepare" in task["advice"]
        for task in tasks.values()
    )


def test_verify_and_show_turn_photos_upright(cheem, tmp_path):
    for label in ("cat", "dog"):
        (tmp_path / "pets" / label).mkdir(parents=True)
        for number in range(4):
            (tmp_path / "pets" / label / f"{number}.png").write_bytes(
                stored(four_colours(24, 16), 6)
            )
    status, out, _ = cheem("data", "verify", tmp_path / "pets", "--json")
    assert status == 0 and json.loads(out)["tasks"]["pets"]["smallest_image"] == [24, 16]
    sheets = []
    for name in ("photos", "upright"):
        if name == "upright":
            for file in (tmp_path / "pets").rglob("*.png"):
                file.write_bytes(stored(four_colours(24, 16), 1))
        assert (
            cheem("data", "show", tmp_path / "pets", "--output", tmp_path / f"{name}.png")[0] == 0
        )
        sheets.append(picture(tmp_path / f"{name}.png"))
    np.testing.assert_array_equal(*sheets)


def test_prepare_verify_and_show_a_task_from_its_archives(cheem, gtsrb, tmp_path):
    status, out, err = cheem("data", "prepare", "gtsrb", "--data-dir", gtsrb, "--image-size", "8")
    assert (status, err) == (0, "") and "gtsrb: ready, 43 train, 43 val, 43 test" in out
    assert len(list((gtsrb / "cheem_jax" / "images").glob("gtsrb-8-*/cache.json"))) == 1
    status, out, _ = cheem("data", "list", "gtsrb", "--data-dir", gtsrb)
    assert status == 0 and "1 of 1 ready" in out
    status, out, _ = cheem("data", "verify", "gtsrb", "--data-dir", gtsrb, "--json")
    result = json.loads(out)["tasks"]["gtsrb"]
    assert status == 0 and result["sound"] and result["num"] == {"train": 43, "val": 43, "test": 43}
    assert len(result["caches"]) == 1
    file = tmp_path / "signs.png"
    status, out, _ = cheem("data", "show", "gtsrb", "--data-dir", gtsrb, "--output", file)
    assert status == 0 and picture(file).shape[1] > 500


def test_prepare_continues_with_the_other_tasks_and_lists_at_the_end_the_steps_to_do(cheem, gtsrb):
    status, out, err = cheem("data", "prepare", "cars,gtsrb", "--data-dir", gtsrb)
    assert status == 2 and "cars: not ready" in out and "gtsrb: ready" in out
    assert "cars_train.tgz" in err
    assert err.splitlines()[-1].startswith("error: 1 task(s) could not be prepared: cars")


def test_a_corrupted_cache_is_found(cheem, gtsrb):
    cheem("data", "prepare", "gtsrb", "--data-dir", gtsrb, "--image-size", "8")
    (file,) = (gtsrb / "cheem_jax" / "images").glob("gtsrb-8-*/val.npy")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    status, out, err = cheem("data", "verify", "gtsrb", "--data-dir", gtsrb)
    assert status == 2 and "1 of 1 task(s) have errors: gtsrb" in err
    assert "ERROR" in out and "val" in out and str(file.parent) in out


def test_a_stream_of_ones_own_is_verified_from_its_file(cheem, tmp_path):
    pictures(tmp_path / "pets")
    rows = [
        f"pets/{split}/{name}/{row}.png,{name},{split}"
        for split in ("train", "val", "test")
        for name in ("cat", "dog")
        for row in range(6)
    ]
    (tmp_path / "list.csv").write_text("\n".join(["path,label,split", *rows]) + "\n")
    toml = tmp_path / "my_stream.toml"
    toml.write_text('[[task]]\npath = "pets"\n\n[[task]]\nname = "same"\nmanifest = "list.csv"\n')
    status, out, _ = cheem("data", "verify", toml)
    assert status == 0 and "pets: 12 train, 12 val, 12 test" in out and "same: 12 train" in out
    (tmp_path / "pets" / "test" / "dog" / "3.png").write_bytes(b"\x89PNG\r\n\x1a\n broken")
    (tmp_path / "pets" / "test" / "dog" / "film.mp4").write_bytes(b"x")
    status, out, err = cheem("data", "verify", toml)
    assert "pets/test/dog: 1 file ignored (.mp4)" in out
    assert status == 2 and out.count("ERROR") == 2 and "3.png" in out
    assert "error: 2 of 2 task(s) have errors: pets, same" in err
    assert cheem("data", "verify", toml, "--skip-broken")[0] == 0
    out = cheem("data", "verify", toml, "--skip-broken", "--json")[1]
    assert json.loads(out)["tasks"]["pets"]["skipped"] == ["test/dog/3.png"]


def test_copies_separated_by_the_cut_differ_from_copies_in_two_given_splits(cheem, tmp_path):
    pets = pictures(tmp_path / "pets")
    shutil.rmtree(pets / "val")
    copied = (pets / "train" / "cat" / "0.png").read_bytes()
    for row in range(1, 6):  # all cats for training; one of them is cut for validation
        (pets / "train" / "cat" / f"{row}.png").write_bytes(copied)
    status, out, _ = cheem("data", "verify", pets)
    assert status == 0 and "pets: 10 train, 2 val, 12 test (val split from train); 2 classes" in out
    assert (
        "copies that were assigned to different splits" in out and "copies in two splits" not in out
    )
    assert re.search(
        r"first train/cat/\d\.png \(cat, train\) and train/cat/\d\.png \(cat, val\)",
        " ".join(out.split()),
    )
    (pets / "test" / "cat" / "0.png").write_bytes(copied)
    out = cheem("data", "verify", pets)[1]
    assert "copies in two splits" in out and "copies that were assigned" in out


def test_show_plots_every_task_and_the_whole_stream(cheem, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("birds", "fish"):
        pictures(tmp_path / "stream" / name)
    status, out, _ = cheem("data", "show", "stream")
    assert status == 0
    assert sorted(file.name for file in (tmp_path / "stream-sheets").iterdir()) == [
        "birds.png",
        "fish.png",
    ]
    status, out, _ = cheem("data", "show", "--stream", "stream", "--output", "out/all.png")
    figure = picture(tmp_path / "out" / "all.png")
    assert status == 0 and figure.shape[1] > 500 and figure.std() > 5
    status, _, _ = cheem("data", "show", "stream/birds", "--output", "out")  # an existing folder
    assert status == 0 and (tmp_path / "out" / "birds.png").exists()
    (photo := tmp_path / "out" / "birds.png").write_bytes(b"a photo of mine")
    status, _, err = cheem("data", "show", "stream/birds", "--output", "out")
    assert status == 2 and "birds.png exists; choose another --output or add --overwrite" in err
    assert photo.read_bytes() == b"a photo of mine"
    status, _, err = cheem("data", "show", "stream")
    assert status == 2 and "stream-sheets/birds.png exists" in err
    status, _, _ = cheem("data", "show", "stream/birds", "--output", "out", "--overwrite")
    assert status == 0 and picture(photo).std() > 5
    for source, output in (("stream/birds", "birds.jpg"), ("stream", "sheets.png")):
        status, _, err = cheem("data", "show", source, "--output", output)
        assert status == 2 and "--output is" in err and not (tmp_path / output).exists()
    pictures(tmp_path / "broken" / "apes")
    for file in (pictures(tmp_path / "broken" / "bats") / "train").rglob("*.png"):
        file.write_bytes(b"broken")
    status, _, err = cheem("data", "show", "broken", "--output", "sheets")
    assert status == 2 and "bats" in err and not (tmp_path / "sheets").exists()
    for name in ("a.b", "a b"):
        pictures(tmp_path / "alike" / name)
    status, _, _ = cheem("data", "show", "alike", "--output", "two")
    assert status == 0 and len(list((tmp_path / "two").iterdir())) == 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("prepare", "mtill"), "the table of benchmarks has no task 'mtill'; did you mean mtil?"),
        (("prepare", "food10"), "did you mean food101"),
        (("prepare", "gtsrb", "--image-size", "0"), "image_size is 0; expected pixels, 1 or more"),
        (("list", "vdd,nothing"), "no task 'nothing'; it has aircraft,"),
        (("verify", "nowhere"), "nowhere: no such folder, zip, stream file or benchmark"),
        (("verify", "mtil"), "11 of 11 tasks of 'mtil' are not prepared"),
        (("verify", ".", "--cache-dir", "typo"), "contains no task"),
        (("verify", "tfds:mnist"), "'mnist' is not prepared in"),
        (("show",), "give either a task or --stream"),
        (("show", "mnist", "--stream", "mtil"), "give either a task or --stream"),
        (("show", "--stream", "mtil", "--split", "val"), "--split val is for contact sheets"),
        (
            ("frobnicate",),
            "unknown command 'data frobnicate'; expected one of: data list, data prepare",
        ),
    ],
)
def test_wrong_words_are_named(cheem, tmp_path, monkeypatch, words, said):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path / "none"))
    status, _, err = cheem("data", *words)
    assert status == 2 and said in err and "Traceback" not in err
    assert not any(tmp_path.iterdir())


def test_help_lists_the_commands(cheem):
    status, out, _ = cheem("data", "--help")
    assert status == 0
    assert all(name in out for name in ("data list", "data prepare", "data verify", "data show"))
    status, out, _ = cheem("data", "prepare", "--help")
    assert status == 0 and "--image-size" in out


def test_verify_finds_caches_of_any_size(cheem, tmp_path):
    plan = plan_task(pictures(tmp_path / "pets"))
    for size in (8, 12):
        load_tasks([plan], size, ImagesConfig("cache", tmp_path / "cache"))
    status, out, _ = cheem(
        "data", "verify", tmp_path / "pets", "--cache-dir", tmp_path / "cache", "--json"
    )
    assert status == 0 and len(json.loads(out)["tasks"]["pets"]["caches"]) == 2
