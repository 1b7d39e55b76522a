import contextlib
import json
import os
import re
import zipfile

import numpy as np
import pytest
from official import write
from PIL import Image
from pixels import encode, png

from cheem_jax.cli.main import main
from cheem_jax.data import ImagesConfig, load_tasks, plan_stream, plan_task
from cheem_jax.data.load import cached
from cheem_jax.data.verify import notes_on, verify, verify_caches, without_broken
from cheem_jax.memory.data import decode
from cheem_jax.run.progress import Progress


def full() -> dict[str, bytes]:
    """Return three images per class for training, and two and two for the other splits, all
    different."""
    names = [
        f"{split}/{name}/{i}.png"
        for split, num in (("train", 3), ("val", 2), ("test", 2))
        for name in ("cat", "dog")
        for i in range(num)
    ]
    return {name: png(value) for value, name in enumerate(names)}


def test_a_sound_task_is_counted(tmp_path):
    files = full() | {
        "train/dog/3.png": png(99, (9, 2), "L"),
        "test/cat/2.png": png(98, (2, 3), "P"),
    }
    result = verify(plan_task(write(tmp_path / "pets", files)))
    assert result.sound
    assert (result.task, result.num, result.num_classes) == (
        "pets",
        {"train": 7, "val": 4, "test": 5},
        2,
    )
    assert (result.smallest_class, result.largest_class) == (("cat", 3), ("dog", 4))
    assert (result.smallest_image, result.largest_image) == ((2, 3), (9, 2))  # 6 and 18 pixels
    assert result.modes == {"L": 1, "P": 1, "RGB": 14}
    assert result.num_bytes == sum(map(len, files.values()))
    assert (result.broken, result.across, result.contradictory) == ([], [], [])


def test_every_broken_file_is_named_and_the_others_are_counted(tmp_path):
    files = full() | {
        "train/cat/0.png": png(0)[:44],
        "test/dog/1.png": b"<html>",
        "val/cat/0.png": b"",
    }
    folder = write(tmp_path / "pets", files)
    plan = plan_task(folder)
    (folder / "val" / "dog" / "0.png").unlink()
    result = verify(plan)
    assert not result.sound and sum(result.modes.values()) == 10
    where = [next(name for name in files if name in line) for line in result.broken]
    assert where == ["train/cat/0.png", "val/cat/0.png", "val/dog/0.png", "test/dog/1.png"]
    assert "cannot be decoded" in result.broken[0] and "not an image file" in result.broken[3]


def test_a_corrupted_member_of_a_zip_is_named(tmp_path):
    with zipfile.ZipFile(tmp_path / "pets.zip", "w") as archive:
        for name, data in full().items():
            archive.writestr(name, data)
    whole = (tmp_path / "pets.zip").read_bytes()
    at = whole.index(b"IDAT")
    (tmp_path / "pets.zip").write_bytes(whole[:at] + b"XXXX" + whole[at + 4 :])
    [line] = verify(plan_task(tmp_path / "pets.zip")).broken
    assert "train/cat/0.png cannot be read: Bad CRC-32" in line


def test_copies_across_splits_are_reported_and_leave_the_task_sound(tmp_path):
    files = full()
    files["test/cat/0.png"] = files["test/cat/1.png"] = files["val/cat/1.png"] = files[
        "train/cat/1.png"
    ]
    result = verify(plan_task(write(tmp_path / "pets", files)))
    first = ("train", "cat", "train/cat/1.png")
    assert result.sound
    assert result.across == [
        (first, ("val", "cat", "val/cat/1.png")),
        (first, ("test", "cat", "test/cat/0.png")),
        (first, ("test", "cat", "test/cat/1.png")),
    ]


def test_the_same_bytes_under_two_labels_are_reported(tmp_path):
    files = full()
    files["train/dog/0.png"] = files["train/cat/2.png"]
    result = verify(plan_task(write(tmp_path / "pets", files)))
    assert result.sound
    assert result.contradictory == [
        (("train", "cat", "train/cat/2.png"), ("train", "dog", "train/dog/0.png"))
    ]


def deep(value: int) -> bytes:
    """Return a grey PNG of 16 bits."""
    return encode(Image.fromarray(np.full((4, 4), value, np.uint16)))


@pytest.mark.parametrize(
    ("brightest", "is_dim"), [(4095, True), (16383, True), (16384, False), (65535, False)]
)
def test_16_bit_images_that_use_a_part_of_the_range_are_reported(
    tmp_path, capsys, monkeypatch, brightest, is_dim
):
    files = {name: deep(number) for number, name in enumerate(full())} | {
        "train/cat/1.png": deep(brightest)
    }
    files["train/cat/2.png"] = png(255)  # of 8 bits, which says nothing of the others
    plan = plan_task(write(tmp_path / "ct", files))
    assert verify(plan).brightest == brightest
    said = (
        f"is {brightest} of 65535, so they are nearly black; if they contain"
        f" {brightest.bit_length()}-bit data"
    )
    (task,) = load_tasks([plan], 4, ImagesConfig("stream"))  # which is no reason to decode all
    notes = notes_on(plan, task)
    assert len(notes) == is_dim
    assert all(said in note and note.startswith("note: ct: ") for note in notes)
    monkeypatch.setattr("sys.argv", ["cheem", "data", "verify", str(tmp_path / "ct")])
    main()
    assert (said in " ".join(capsys.readouterr().out.split())) == is_dim


def test_images_of_8_bits_are_not_taken_for_dim_ones(tmp_path):
    plan = plan_task(write(tmp_path / "pets", full()))
    assert verify(plan).brightest is None and notes_on(plan, *load_tasks([plan], 4)) == []


@pytest.mark.parametrize("keep", ["memory", "cache"])
def test_learning_tells_equal_images_under_two_labels(tmp_path, capsys, keep):
    files = full() | {f"train/cat/{i}.png": png(100 + i) for i in range(5)}
    # other bytes, the same image
    files |= {f"train/dog/{i}.png": png(100 + i, size=(8, 8)) for i in range(4)}
    files["test/cat/0.png"] = files["train/cat/4.png"]  # under one label
    plan = plan_task(write(tmp_path / "pets", files))
    decode([plan], 4, ImagesConfig(keep, tmp_path / "cache"), Progress(), upright=True)
    printed = " ".join(capsys.readouterr().out.split())
    pairs = "; ".join(f"train/cat/{i}.png (cat) and train/dog/{i}.png (dog)" for i in range(3))
    assert (
        f"note: pets: 8 images are identical to an image with another label: {pairs}; and 1 more"
        in printed
    )


def test_findings_go_through_json(tmp_path):
    files = full() | {"test/dog/1.png": b"x"}
    files["val/cat/0.png"] = files["train/cat/0.png"]
    report = json.loads(json.dumps(verify(plan_task(write(tmp_path / "pets", files))).to_json()))
    assert report["sound"] is False and len(report["broken"]) == 1
    assert report["across"] == [
        [["train", "cat", "train/cat/0.png"], ["val", "cat", "val/cat/0.png"]]
    ]


def test_progress_adds_up_and_threads_change_nothing(tmp_path, monkeypatch):
    files = full() | {f"train/cat/x{i}.png": png(i % 250, (3, 1 + i % 7), "L") for i in range(300)}
    plan = plan_task(write(tmp_path / "pets", files))
    done: list[int] = []
    result = verify(plan, on_progress=done.append)
    assert sum(done) == plan.num_images and len(done) > 3
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    assert verify(plan) == result


def test_a_task_without_any_readable_image_is_reported(tmp_path):
    result = verify(plan_task(write(tmp_path / "pets", dict.fromkeys(full(), b"x"))))
    assert (len(result.broken), result.smallest_image, result.largest_image, result.across) == (
        14,
        None,
        None,
        [],
    )


@pytest.mark.parametrize("splits", [("train", "val", "test"), ("val",), ("val", "test")])
def test_a_cache_is_held_against_its_hashes(tmp_path, splits):
    plan = plan_task(write(tmp_path / "pets", full()))
    cached(
        plan,
        4,
        tmp_path / "cache",
        lambda task, num_images: contextlib.nullcontext(lambda num_images: None),
        splits,
    )
    [place] = [entry for entry in (tmp_path / "cache").iterdir() if entry.is_dir()]
    assert verify_caches(plan, [tmp_path / "cache"]) == ([str(place)], [])
    whole = (place / "val.npy").read_bytes()
    # one bit of one pixel; one byte less
    for damaged in (whole[:-1] + bytes([whole[-1] ^ 1]), whole[:-1]):
        (place / "val.npy").write_bytes(damaged)
        intact, [line] = verify_caches(plan, [tmp_path / "cache"])
        assert intact == [] and re.search(r"cache .* is corrupted.*remove this folder", line)


def test_unreadable_images_are_left_out_up_to_a_twentieth_rounded_up_of_a_class_and_of_a_split(
    tmp_path,
):
    files = full() | {f"train/cat/{i}.png": png(100 + i) for i in range(3, 20)}
    folder = write(tmp_path / "pets", files)
    plan = plan_task(folder)
    assert without_broken(plan) == (plan, [])
    for name in ("train/cat/7.png", "val/cat/0.png"):  # of 24 cats 2 can go
        (folder / name).write_bytes(b"x")
    rest, reasons = without_broken(plan_task(folder))
    assert rest.counts == {"train": 22, "val": 3, "test": 4}
    assert rest.skipped == (
        "train/cat/7.png",
        "val/cat/0.png",
    )
    assert len(reasons) == 2 and "train/cat/7.png: not an image file" in reasons[0]
    (task,) = load_tasks([rest], 4, ImagesConfig("memory"))
    assert task.skipped == rest.skipped
    assert sorted(task.train.images[:, 0, 0, 0].tolist()) == [
        *range(6),
        *range(103, 107),
        *range(108, 120),
    ]
    (folder / "val/dog/0.png").write_bytes(b"x")
    with pytest.raises(
        ValueError,
        match=r"pets: 3 images cannot be read, more than 5 % .*\(2 of 4 in split 'val'\)",
    ):
        without_broken(plan_task(folder))
    (folder / "val/dog/0.png").write_bytes(files["val/dog/0.png"])
    (folder / "train/cat/8.png").write_bytes(b"x")
    with pytest.raises(ValueError, match=r"\(3 of 24 in class 'cat'\); replace or remove"):
        without_broken(plan_task(folder))


def test_the_only_image_of_a_class_in_a_split_cannot_be_left_out(tmp_path):
    files = {f"{name}/{i}.png": png(i) for name in ("cat", "dog") for i in range(10)}
    folder = write(tmp_path / "pets", files)
    val = plan_task(folder).val
    assert val.labels.tolist().count(0) == 1  # a tenth
    name = val.files.key(val.labels.tolist().index(0))
    (folder / name).write_bytes(b"x")
    with pytest.raises(ValueError, match=rf"split 'val': no image of 1 of 2 .*{re.escape(name)}"):
        without_broken(plan_task(folder))


def test_links_to_missing_files_are_broken_images_and_those_to_missing_folders_are_refused(
    tmp_path,
):
    folder = write(
        tmp_path / "all" / "pets",
        {f"{name}/{i}.png": png(i) for name in ("cat", "dog") for i in range(9)},
    )
    (folder / "cat" / "zz.png").symlink_to("/not/mounted/zz.png")
    plan = plan_task(folder)
    [line] = verify(plan).broken
    assert line.endswith("pets/cat/zz.png: no such file (a link to /not/mounted/zz.png)")
    with pytest.raises(
        ValueError, match=r"1 image file.*zz\.png: no such file \(a link to .*--skip-broken"
    ):
        load_tasks([plan], 4, ImagesConfig("memory"))
    rest, reasons = without_broken(plan)
    assert (reasons, rest.skipped, rest.num_images) == ([line], ("cat/zz.png",), 18)
    (folder / "eel").symlink_to("/not/mounted/eel")
    with pytest.raises(ValueError, match=r"folders without images: \['eel'\]"):
        plan_task(folder)
    (tmp_path / "all" / "birds").symlink_to("/not/mounted/birds")
    with pytest.raises(FileNotFoundError, match="birds: no such folder or zip file"):
        plan_stream(tmp_path / "all")


@pytest.mark.full
def test_two_real_packs_are_sound(shared):
    result = verify(plan_task(shared / "data" / "mnist.zip"))
    assert result.sound
    assert not result.across
    assert result.num == {"train": 2000, "val": 400, "test": 1000}
    assert (result.num_classes, result.modes) == (10, {"L": 3400})
    assert result.smallest_image == result.largest_image == (28, 28)
    result = verify(plan_task(shared / "data" / "daimler_pedestrians.zip"))
    assert result.sound
    assert not result.across
    assert result.smallest_class[1] == result.largest_class[1] == 200
    assert result.largest_image == (18, 36)


@pytest.mark.full
def test_all_twelve_real_packs_are_sound(shared):
    plans = plan_stream(
        shared / "data", [file.stem for file in sorted((shared / "data").glob("*.zip"))]
    )
    result = {plan.name: verify(plan) for plan in plans}
    assert len(result) == 12
    assert all(findings.sound and not findings.contradictory for findings in result.values())
    copies = {name: len(findings.across) for name, findings in result.items() if findings.across}
    assert copies == {"flowers12": 1, "food10": 1}  # as their description says
    assert {len(set(np.bincount(plan.train.labels))) for plan in plans} == {1}
