import io
import json
import math
import os
import shutil
import stat
import struct
import tarfile
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from official import write
from PIL import Image
from pixels import png

from cheem_jax.data import fingerprint, load_stream, load_task
from cheem_jax.data.files import files_of, list_files
from cheem_jax.data.folder import plan_manifest, plan_stream, plan_task
from cheem_jax.data.sources import plan_stream_file
from cheem_jax.data.task import cut, tenths


def write_zip(file: Path, files: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(file, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return file


def layout(**splits: dict[str, int]) -> dict[str, bytes]:
    """Return files for `layout(train={"cat": 3})`: train/cat/00.png and so on; each image of a
    class has a different grey."""
    return {
        f"{split}/{name}/{i:02d}.png": png(i)
        for split, classes in splits.items()
        for name, count in classes.items()
        for i in range(count)
    }


FULL = layout(train={"cat": 3, "dog": 2}, val={"cat": 1, "dog": 1}, test={"cat": 1, "dog": 2})


def values(split) -> list[tuple[int, int]]:
    """Return (label, grey value) of each image."""
    return list(zip(split.labels.tolist(), split.images[:, 0, 0, 0].tolist(), strict=True))


def test_a_folder_and_a_zip_load_as_the_same_task(tmp_path):
    folder = load_task(write(tmp_path / "pets", FULL), image_size=4)
    zipped = load_task(write_zip(tmp_path / "pets.zip", FULL), image_size=4)
    assert (folder.name, folder.classes) == ("pets", ("cat", "dog"))
    assert values(folder.train) == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)]
    assert values(folder.test) == [(0, 0), (1, 0), (1, 1)]
    assert fingerprint(folder) == fingerprint(zipped)


@pytest.mark.parametrize(
    "names",
    [
        ("Train", "validation", "TEST"),
        ("train", "valid", "test"),
        ("Training", "Val", "Testing"),
        ("training_set", "validation set", "test_set"),
        ("train-images", "dev", "TestSet"),
    ],
)
def test_split_folders_can_bear_other_usual_names(tmp_path, names):
    renamed = {
        file.replace("train/", f"{names[0]}/")
        .replace("val/", f"{names[1]}/")
        .replace("test/", f"{names[2]}/"): data
        for file, data in FULL.items()
    }
    want = load_task(write(tmp_path / "a" / "pets", FULL), image_size=4)
    pets = write(tmp_path / "b" / "pets", renamed)
    assert fingerprint(load_task(pets, image_size=4)) == fingerprint(want)
    (plan,) = plan_stream(pets)
    assert (
        plan.split_sha256 == plan_task(write_zip(tmp_path / "b" / "pets.zip", renamed)).split_sha256
    )


def test_an_enclosing_folder_and_hidden_files_are_looked_through(tmp_path):
    files = {f"pets-main/{name}": data for name, data in FULL.items()}
    files |= {"__MACOSX/pets-main/train/cat/._00.png": b"x", "pets-main/.git/a/b.png": b"x"}
    files |= {"pets-main/train/cat/.hidden.png": b"x", "pets-main/README.md": b"hello"}
    files["pets-main/train/cat/0.png~"] = next(iter(files.values()))  # an editor's copy
    want = load_task(write_zip(tmp_path / "pets.zip", FULL), image_size=4)
    (tmp_path / "b").mkdir()
    for place in (
        write(tmp_path / "b" / "pets", files),
        write_zip(tmp_path / "b" / "pets.zip", files),
    ):
        assert fingerprint(load_task(place, image_size=4)) == fingerprint(want)


def test_folders_of_network_storage_are_left_out_with_a_note(tmp_path):
    extra = (
        "train/cat/@eaDir/00.jpg",
        "train/dog/@eaDir/x/00.jpg",
        "#recycle/old/1.png",
        "__MACOSX/a/1.png",
    )
    files = FULL | dict.fromkeys(extra, png()) | {"train/cat/.thumbnails/1.png": png()}
    for place in (write(tmp_path / "pets", files), write_zip(tmp_path / "pets.zip", files)):
        plan = plan_task(place)
        assert plan.counts == {"train": 5, "val": 2, "test": 3}
        (note,) = plan.ignored
        assert note.startswith(f"{place.name}: folders ignored (hidden, of the system")
        assert note.endswith(": #recycle; .thumbnails; @eaDir (2); __MACOSX")


def test_suffixes_count_in_either_case_and_other_files_are_left_out(tmp_path):
    files = FULL | {"train/cat/A.PNG": png(9), "train/cat/notes.txt": b"x"}
    task = load_task(write(tmp_path / "pets", files), image_size=4)
    assert values(task.train)[:4] == [(0, 0), (0, 1), (0, 2), (0, 9)]


HEIC = b"\0\0\0\x18ftypheic\0\0\0\0mif1heic"


def test_other_files_are_counted_by_folder_and_kind_and_unknown_suffixes_by_content(
    tmp_path, monkeypatch
):
    monkeypatch.setattr("cheem_jax.data.files.READS_HEIF", False)
    files = FULL | {f"train/cat/{i}.HEIC": HEIC for i in range(20)} | {"train/cat/phone": HEIC}
    files |= {
        "train/dog/no_suffix": png(9),
        "train/dog/grey.pnm": b"P5\n2 2\n255\n1234",
        "train/dog/odd_text": b"P1 of two",
        "train/dog/odd": b"x",
        "train/dog/a.txt": b"x",
        "train/cat/b.txt": b"x",
    }
    files |= {"meta.json": b"{}", "train/cat/.DS_Store": b"x", "train/dog/x.npy": b"x"}
    for place in (write(tmp_path / "pets", files), write_zip(tmp_path / "pets.zip", files)):
        plan = plan_task(place)
        assert plan.counts == {"train": 7, "val": 2, "test": 3}
        assert list(plan.ignored) == [
            f"{place.name}: 2 files ignored (.txt)",
            f"{place.name}/train/cat: 20 files ignored (.HEIC; pip install 'cheem_jax[heic]')",
            f"{place.name}/train/cat: 1 file ignored (no suffix; pip install 'cheem_jax[heic]')",
            f"{place.name}/train/dog: 1 file ignored (.npy)",
            f"{place.name}/train/dog: 2 files ignored (no suffix)",
        ]
    monkeypatch.setattr("cheem_jax.data.files.READS_HEIF", True)
    assert plan_task(tmp_path / "pets").counts["train"] == 7 + 21


def test_many_folders_with_other_files_take_ten_lines(tmp_path):
    files = layout(train={f"c{i:02d}": 3 for i in range(12)})
    plan = plan_task(
        write(tmp_path / "pets", files | {f"train/c{i:02d}/x.npy": b"x" for i in range(12)})
    )
    assert len(plan.ignored) == 11 and plan.ignored[-1] == "pets: 2 more folders with ignored files"


def test_a_known_suffix_is_believed_without_opening_the_file(tmp_path, monkeypatch):
    folder = write(tmp_path / "pets", FULL | {"train/cat/a.txt": b"x"})
    monkeypatch.setattr(
        "cheem_jax.data.files.first_bytes",
        lambda files, row: pytest.fail(f"{files.where(row)} was opened"),
    )
    assert plan_task(folder).counts["train"] == 5


@pytest.mark.parametrize("read", [plan_task, plan_stream])
def test_a_task_of_unreadable_images_alone_does_not_vanish(tmp_path, monkeypatch, read):
    monkeypatch.setattr("cheem_jax.data.files.READS_HEIF", False)
    folder = write(tmp_path / "pets", {"cat/1.heic": b"x", "dog/1.heic": b"x"})
    with pytest.raises(
        ValueError, match=r"no images in it.*pets/cat: 1 file ignored \(\.heic; pip install"
    ):
        read(folder)
    write(tmp_path / "stream" / "birds", FULL)
    (tmp_path / "pets").rename(tmp_path / "stream" / "pets")
    with pytest.raises(ValueError, match=r"pets/cat: 1 file ignored \(\.heic; pip install"):
        plan_stream(tmp_path / "stream")


def test_meta_json_names_the_classes_in_label_order(tmp_path):
    numbered = layout(
        train={"0000": 2, "0001": 1}, val={"0000": 1, "0001": 1}, test={"0000": 1, "0001": 1}
    )
    meta = {"meta.json": json.dumps({"classes": ["zebra/1", "ant"]}).encode()}
    assert load_task(write(tmp_path / "a", numbered | meta), image_size=4).classes == (
        "zebra/1",
        "ant",
    )
    meta = {"meta.json": json.dumps({"classes": ["dog", "cat"]}).encode()}
    task = load_task(write(tmp_path / "b", FULL | meta), image_size=4)
    assert task.classes == ("dog", "cat") and task.train.labels.tolist() == [1, 1, 1, 0, 0]
    enclosed = {f"photos/{name}": data for name, data in FULL.items()}
    assert plan_task(write_zip(tmp_path / "d.zip", enclosed | meta)).classes == ("dog", "cat")
    other = {"meta.json": b'{"made by": "a camera"}'}
    assert load_task(write(tmp_path / "c", FULL | other), image_size=4).classes == ("cat", "dog")


@pytest.mark.parametrize(
    ("meta", "complaint"),
    [
        (b"{", "meta.json: not readable as JSON"),
        (b'{"classes": 3}', "meta.json: `classes` must be a list of names"),
        (
            b'{"classes": ["cat", "cow"]}',
            r"\['dog'\] are neither names nor label numbers|\['cat', 'dog'\] are neither",
        ),
        (b'{"classes": ["dog", "dog"]}', "meta.json: `classes` repeats dog"),
        (b'{"classes": ["cat", "dog", "eel"]}', "split 'train': no image of 1 of 3 classes: 'eel'"),
    ],
)
def test_a_wrong_meta_json_is_refused(tmp_path, meta, complaint):
    with pytest.raises(ValueError, match=complaint):
        load_task(write(tmp_path / "pets", FULL | {"meta.json": meta}), image_size=4)


def test_a_missing_validation_split_becomes_a_tenth_of_train_rounded_up(tmp_path):
    files = layout(train={"cat": 20, "dog": 11}, test={"cat": 2, "dog": 1})
    task = load_task(write(tmp_path / "pets", files), image_size=4)
    assert [len(split.labels) for split in task.splits.values()] == [27, 4, 3]  # ceil(3.1) = 4
    assert sorted(task.val.labels.tolist()) == [0, 0, 0, 1]  # 4 * 20/31 = 2.6 and 4 * 11/31 = 1.4
    assert sorted(values(task.train) + values(task.val)) == sorted(
        [(0, i) for i in range(20)] + [(1, i) for i in range(11)]
    )


@pytest.mark.parametrize("prefix", ["train/", "", "photos/"])
def test_without_splits_test_is_cut_first_as_three_tenths(tmp_path, prefix):
    files = {
        f"{prefix}{name}/{i:02d}.png": png(i)
        for name, n in {"cat": 30, "dog": 11}.items()
        for i in range(n)
    }
    task = load_task(write(tmp_path / "pets", files), image_size=4)
    # ceil(12.3), ceil(2.8)
    assert [len(split.labels) for split in task.splits.values()] == [25, 3, 13]
    everything = [pair for split in task.splits.values() for pair in values(split)]
    assert sorted(everything) == [(0, i) for i in range(30)] + [(1, i) for i in range(11)]


def test_the_cut_depends_on_the_seed_alone(tmp_path):
    files = layout(train={"cat": 20, "dog": 20}, test={"cat": 1, "dog": 1})
    folder = write(tmp_path / "pets", dict(reversed(files.items())))
    zipped = write_zip(tmp_path / "pets.zip", files)
    prints = [
        fingerprint(load_task(place, image_size=4, seed=7)) for place in (folder, folder, zipped)
    ]
    assert len(set(prints)) == 1
    assert fingerprint(load_task(folder, image_size=4, seed=8)) != prints[0]


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize(
    ("files", "counts", "cut"),
    [
        ({f"cat/{i}.png": png(i) for i in range(10)}, (6, 1, 3), ("val", "test")),
        (
            {f"{name}/{i}.png": png(i) for name in ("cat", "dog") for i in range(2)},
            (4, 0, 0),
            ("val", "test"),
        ),
        (
            layout(train={"cat": 3, "dog": 3, "eel": 3}, test={"cat": 2, "dog": 1}),
            (6, 3, 3),
            ("val",),
        ),
        (layout(train={"cat": 3}, test={"cat": 1, "dog": 2}), (3, 0, 3), ("val",)),
        (layout(test={"cat": 4}), (0, 0, 4), ("train", "val")),
        (layout(test={"cat": 4}, val={"dog": 1}), (0, 1, 4), ("train",)),
        (layout(train={"cat": 1}, val={"cat": 2}), (1, 2, 0), ("test",)),
    ],
)
def test_data_that_are_too_few_to_learn_from_can_be_measured(tmp_path, zipped, files, counts, cut):
    place = tmp_path / "pets"
    if zipped:
        place = write_zip(tmp_path / "pets.zip", files)
    else:
        for name, data in files.items():
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            (place / name).write_bytes(data)
    (plan,) = plan_stream(place, purpose="measure")
    assert (plan.name, tuple(plan.counts.values()), plan.cut) == ("pets", counts, cut)
    with pytest.raises(ValueError):
        plan_stream(place)


def test_data_are_split_alike_for_learning_and_measuring_and_otherwise_for_extending(tmp_path):
    files = {f"{name}/{i}.png": png(i) for name in ("cat", "dog") for i in range(30)}
    place = write_zip(tmp_path / "pets.zip", files)
    learned, measured, more = (
        plan_task(place, purpose=purpose) for purpose in ("learn", "measure", "extend")
    )
    assert measured.split_sha256 == learned.split_sha256
    assert more.counts == {"train": 54, "val": 6, "test": 0} and more.cut == ("val", "test")


def test_tenths_are_counted_in_integers_as_the_paper_rounds():
    # Caltech-101 and EuroSAT, then the validation of the rest, MNIST and Cars.
    counts = [
        tenths(8677, 3),
        tenths(6073, 1),
        tenths(27000, 3),
        tenths(18900, 1),
        tenths(60000, 1),
        tenths(8144, 1),
    ]
    assert counts == [2604, 608, 8100, 1890, 6000, 815]
    assert tenths(10, 3) == 3 and tenths(11, 3) == 4


@given(st.lists(st.integers(2, 30), min_size=2, max_size=6), st.floats(0, 1), st.integers(0, 1000))
def test_a_cut_is_exact_and_leaves_every_class_on_both_sides(sizes, share, seed):
    labels = np.repeat(np.arange(len(sizes)), sizes)
    num = math.ceil(share * len(labels))
    mask = cut(labels, num, keep=1, order=np.random.default_rng(seed).permutation(len(labels)))
    inside, outside = np.bincount(labels[mask]), np.bincount(labels[~mask])
    assert len(inside) == len(outside) == len(sizes) and inside.min() >= 1 and outside.min() >= 1
    assert mask.sum() == min(max(num, len(sizes)), len(labels) - len(sizes))


def test_a_cut_follows_the_class_sizes():
    labels = np.repeat([0, 1, 2], [50, 30, 20])
    mask = cut(labels, 10, keep=1, order=np.arange(len(labels)))
    assert np.bincount(labels[mask]).tolist() == [5, 3, 2]


def test_classes_too_small_to_be_cut_are_named(tmp_path):
    files = layout(train={"cat": 4, "dog": 1}, test={"cat": 1, "dog": 1})
    with pytest.raises(
        ValueError, match="to cut val from train every class needs 2 images or more.*'dog'"
    ):
        load_task(write(tmp_path / "pets", files), image_size=4)
    files = layout(train={"cat": 2, "dog": 3})
    with pytest.raises(
        ValueError, match="to cut test and val from train every class needs 3.*'cat'"
    ):
        load_task(write(tmp_path / "both", files), image_size=4)


@pytest.mark.parametrize(
    ("files", "complaint"),
    [
        ({"readme.txt": b"x"}, "no images in it; expected <train"),
        (layout(train={"cat": 3}), "has 1 class"),
        ({"cat/1.png": png(), "cat/2.png": png()}, "too few in 'cat'"),
        (
            layout(train={"cat": 3, "dog": 3}, test={"cat": 1}),
            "split 'test': no image of 1 of 2 classes: 'dog'",
        ),
        (
            layout(train={"cat": 3, "dog": 3}, test={"cat": 1, "dog": 1, "eel": 1}),
            r"test.*train does not.*\['eel'\]",
        ),
        (
            layout(train={"cat": 3, "dog": 3}, val={"cat": 1, "dog": 1}),
            "train and val but no test split",
        ),
        (
            layout(val={"cat": 3, "dog": 3}, test={"cat": 1, "dog": 1}),
            r"no split 'train', only \['test', 'val'\]",
        ),
        (
            FULL | layout(tset={"cat": 1}),
            r"\['tset'\] are not splits; expected train, val, test \(",
        ),
        (
            layout(birds={"owl": 3, "rook": 3}, pets={"cat": 3}),
            r"\['birds', 'pets'\] are not splits.*a \[\[task\]\] of",
        ),
        (
            {f"{split}/{i}.png": png() for split in ("Train", "test") for i in range(4)},
            "Train, test are splits, but",
        ),
        (FULL | layout(valid={"cat": 1}), r"more than one name for the split val"),
        (
            FULL | {"train/3.png": png()},
            "1 of 11 images are at an unexpected place, such as 'train/3.png'",
        ),
        (
            {"1.png": png(), "2.png": png()},
            "2 of 2 images are at an unexpected place, such as '1.png'",
        ),
        (
            FULL | {"train/cat/new/3.png": png()},
            "unexpected place, such as 'train/cat/new/3.png'; expected",
        ),
        (
            {f"a/cat/{i}.png": png() for i in range(4)} | {"a/cat/b/3.png": png()},
            "such as 'a/cat/b/3.png'",
        ),
        (
            {f"{at}/3.png": png() for at in ("cat/b", "cat/c", "dog")},
            "2 of 3 .*, such as 'cat/b/3.png'",
        ),
        (
            FULL | {"train/eel/1.npy": b"x"},
            (
                r"folders without images: \['train/eel'\]; add images.*pets/train/eel: 1"
                r" file ignored \(\.npy\)"
            ),
        ),
        (
            FULL | {"val/dog/00.png": png()[:44]},
            r"1 image file.*pets/val/dog/00\.png: the image cannot be decoded",
        ),
    ],
)
def test_unusable_folders_are_refused_by_name(tmp_path, files, complaint):
    with pytest.raises(ValueError, match=complaint):
        load_task(write(tmp_path / "pets", files), image_size=4)


def test_a_missing_path_and_a_file_that_is_no_zip_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere: no such folder or zip file"):
        load_task(tmp_path / "nowhere", image_size=4)
    with pytest.raises(FileNotFoundError, match="nowhere: no such folder or zip file"):
        load_stream(tmp_path / "nowhere", image_size=4)
    (tmp_path / "fake.zip").write_bytes(b"PK but no zip")
    with pytest.raises(ValueError, match="fake.zip is not a readable zip file"):
        load_task(tmp_path / "fake.zip", image_size=4)


@pytest.mark.parametrize(
    "name", ["../up.png", "/root.png", "a/../../b.png", "a//b.png", "C:/x.png", "./a.png"]
)
def test_zip_members_with_unsafe_names_are_refused(tmp_path, name):
    with pytest.raises(ValueError, match="its name is not a plain relative name"):
        load_task(write_zip(tmp_path / "x.zip", FULL | {name: png()}), image_size=4)


def test_a_zip_with_backslashes_is_refused_with_the_way_out(tmp_path):
    with pytest.raises(
        ValueError, match=r"'cat.*contains a backslash.*unpack the zip, and zip it again"
    ):
        load_task(write_zip(tmp_path / "x.zip", FULL | {"cat\\1.png": png()}), image_size=4)


def test_a_link_in_a_zip_is_not_followed(tmp_path):
    outside = tmp_path / "private.png"
    outside.write_bytes(png())
    file = write_zip(tmp_path / "x.zip", FULL)
    link = zipfile.ZipInfo("train/cat/link.png")
    link.create_system = 3  # Unix
    link.external_attr = (stat.S_IFLNK | 0o777) << 16
    with zipfile.ZipFile(file, "a") as archive:
        archive.writestr(link, str(outside))
    with pytest.raises(ValueError, match=r"x\.zip/train/cat/link\.png: not an image file"):
        load_task(file, image_size=4)


def test_absurd_zip_members_are_refused(tmp_path, monkeypatch):
    doubled = tmp_path / "doubled.zip"
    with (
        zipfile.ZipFile(doubled, "w") as archive,
        pytest.warns(UserWarning, match="Duplicate name"),
    ):
        archive.writestr("train/cat/1.png", png())
        archive.writestr("train/cat/1.png", png())
    with pytest.raises(ValueError, match="'train/cat/1.png' occurs twice"):
        load_task(doubled, image_size=4)
    monkeypatch.setattr("cheem_jax.data.files.MAX_FILE_BYTES", 20)
    with pytest.raises(ValueError, match="unpacks to .* bytes, expected at most 20"):
        load_task(write_zip(tmp_path / "big.zip", FULL), image_size=4)
    with pytest.raises(ValueError, match="00.png: .* bytes, expected at most 20"):
        load_task(write(tmp_path / "big", FULL), image_size=4)


def test_encrypted_and_corrupted_zip_members_are_refused_by_name(tmp_path):
    file = write_zip(tmp_path / "x.zip", FULL)
    whole = file.read_bytes()
    # the central directory's first entry; its flags are 8 bytes further on
    first = whole.index(b"PK\x01\x02")
    file.write_bytes(whole[: first + 8] + b"\x01" + whole[first + 9 :])
    with pytest.raises(ValueError, match="'train/cat/00.png': it is encrypted"):
        load_task(file, image_size=4)
    at = whole.index(b"IDAT")
    file.write_bytes(whole[:at] + b"XXXX" + whole[at + 4 :])
    with pytest.raises(ValueError, match="train/cat/00.png cannot be read: Bad CRC-32"):
        load_task(file, image_size=4)


def test_a_link_to_a_folder_above_is_left_out_with_a_note(tmp_path):
    folder = write(tmp_path / "pets", FULL)
    (folder / "loop").symlink_to(folder, target_is_directory=True)
    (folder / "train" / "up").symlink_to(tmp_path, target_is_directory=True)
    assert list_files(folder) == sorted(FULL)
    assert [note.rpartition(": ")[2] for note in plan_task(folder).ignored] == ["loop; up"]


def test_deep_folders_are_read_or_refused_but_never_cut(tmp_path):
    deep = "/".join("abcdefghijkl")
    write(tmp_path / "deep", {f"{deep}/1.png": png()})
    assert list_files(tmp_path / "deep") == [f"{deep}/1.png"]
    write(tmp_path / "deeper", {"/".join("d" * 65) + "/1.png": png()})
    with pytest.raises(ValueError, match="folders are nested more than 64 deep"):
        list_files(tmp_path / "deeper")


def test_a_link_has_its_own_name(tmp_path):
    for name in ("oxford", "cub"):
        write(tmp_path / "store" / name / "images", FULL)
    (tmp_path / "photos").mkdir()
    for name, target in (("pets", "oxford"), ("birds", "cub")):
        (tmp_path / "photos" / name).symlink_to(tmp_path / "store" / target / "images")
    assert [plan.name for plan in plan_stream(tmp_path / "photos")] == ["birds", "pets"]
    rows = "".join(f"{name},{name.split('/')[1]}\n" for name in FULL)
    write(tmp_path / "blobs", {"5d41": f"path,label\n{rows}".encode()})
    (table := tmp_path / "store" / "oxford" / "images" / "pets.csv").symlink_to(
        "../../../blobs/5d41"
    )
    plan = plan_manifest(table)
    assert plan.name == "pets" and plan.num_images == len(FULL)


def test_files_next_to_the_tasks_are_named(tmp_path):
    write(tmp_path / "pets", FULL)
    raw = {
        "birds/a/1.cr2": b"raw",
        "birds/b/1.cr2": b"raw",
        "cars.tar.gz": b"x",
        "photo.png": png(),
    }
    write(tmp_path, raw | {".trash/1.png": png()})
    (tmp_path / "fish").mkdir()
    (plan,) = plan_stream(tmp_path)
    said = "\n".join(plan.ignored)
    for note in (
        "1 image outside of the tasks ignored",
        "1 file ignored (.gz)",
        ": .trash",
        "fish: no images, so it is skipped",
        "birds/a: 1 file ignored (.cr2)",
    ):
        assert note in said
    assert plan_stream(tmp_path, ["pets"])[0].ignored == ()
    with pytest.raises(ValueError, match="contains no task.*birds/b: 1 file ignored"):
        plan_stream(write(tmp_path / "raw", {"birds/b/1.cr2": b"raw", "fish/a/1.cr2": b"raw"}))


def test_a_stream_loads_all_tasks_sorted_or_the_named_ones_in_order(tmp_path):
    for name in ("cars", "birds"):
        write(tmp_path / name, FULL)
    write_zip(tmp_path / "digits.zip", FULL)
    write(tmp_path, {"README.md": b"x", "raw/data.bin": b"x", ".cache/x/1.png": b"x"})
    stream = load_stream(tmp_path, image_size=4)
    assert (stream.name, [task.name for task in stream.tasks]) == (
        tmp_path.name,
        ["birds", "cars", "digits"],
    )
    stream = load_stream(tmp_path, ["digits", "birds"], image_size=4)
    assert [task.name for task in stream.tasks] == ["digits", "birds"]
    write(tmp_path / "sets" / "v1.2" / "cars", FULL)
    assert load_stream(tmp_path / "sets" / "v1.2", image_size=4).name == "v1.2"


def test_unusable_streams_are_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="empty contains no task"):
        load_stream(tmp_path / "empty", image_size=4)
    with pytest.raises(ValueError, match="contains no task"):
        load_stream(tmp_path, image_size=4)
    write(tmp_path / "cars", FULL)
    with pytest.raises(ValueError, match="has no task 'car'; did you mean cars?"):
        load_stream(tmp_path, ["car"], image_size=4)
    with pytest.raises(ValueError, match="empty: no images in it"):
        load_stream(tmp_path, ["empty"], image_size=4)
    write_zip(tmp_path / "cars.zip", FULL)
    with pytest.raises(ValueError, match=r"folders or zips with the same name: \['cars'\]"):
        load_stream(tmp_path, image_size=4)


def test_a_real_pack_is_read_with_its_class_names(shared):
    stream = load_stream(shared / "data", ["mnist", "daimler_pedestrians"], image_size=16)
    mnist, pedestrians = stream.tasks
    assert mnist.classes == tuple("0123456789")
    assert [len(split.labels) for split in mnist.splits.values()] == [2000, 400, 1000]
    assert np.bincount(mnist.test.labels).tolist() == [100] * 10
    assert pedestrians.classes == ("non-pedestrian", "pedestrian")
    with zipfile.ZipFile(shared / "data" / "mnist.zip") as archive:
        picture = (
            Image.open(io.BytesIO(archive.read("test/0003/0000.png")))
            .convert("RGB")
            .resize((16, 16), 3)
        )
    index = int(np.flatnonzero(mnist.test.labels == 3)[0])
    np.testing.assert_array_equal(mnist.test.images[index], np.asarray(picture))


@pytest.mark.parametrize("hidden", ["", ".DS_Store", "__MACOSX/cat/0.png"])
def test_a_class_folder_without_files_is_reported(tmp_path, hidden):
    folder = write(tmp_path / "pets", FULL)
    (folder / "train" / "eel").mkdir()
    # a Mac writes `.DS_Store` into every folder
    write(folder, {f"train/eel/{hidden}": b"x"} if hidden else {})
    whole = Path(shutil.make_archive(str(tmp_path / "whole"), "zip", folder))
    # without members for folders, as some tools write it
    files = write_zip(tmp_path / "files.zip", FULL | {f"train/eel/{hidden}": b""})
    for place in (folder, whole, files):
        with pytest.raises(ValueError, match=r"folders without images: \['train/eel'\]"):
            load_task(place, image_size=4)


def test_a_zip_with_members_for_its_folders_is_the_same_task_as_the_folder(tmp_path):
    folder = write(tmp_path / "pets", FULL | {"train/.hidden/0.png": b"x", "__MACOSX/a/b": b"x"})
    file = Path(shutil.make_archive(str(folder), "zip", folder))
    assert "train/cat/" in zipfile.ZipFile(file).namelist()
    assert plan_task(file).split_sha256 == plan_task(folder).split_sha256


def test_a_pipe_among_the_images_is_refused(tmp_path):
    folder = write(tmp_path / "pets", FULL)
    os.mkfifo(folder / "train" / "cat" / "x.png")
    with pytest.raises(ValueError, match="train/cat/x.png: not a regular file"):
        load_task(folder, image_size=4)


def test_a_name_that_is_no_unicode_is_reported(tmp_path):
    folder = write(tmp_path / "pets", FULL)
    try:
        Path(os.fsdecode(os.fsencode(folder / "train" / "cat") + b"/\xff.png")).write_bytes(png())
    except OSError:
        pytest.skip("this file system takes no such name")
    with pytest.raises(ValueError, match="not valid Unicode"):
        load_task(folder, image_size=4)


def test_a_zip_that_unpacks_to_a_hundred_times_its_size_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("cheem_jax.data.files.SMALL_BYTES", 2**20)
    file = tmp_path / "bomb.zip"
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("train/cat/1.png", bytes(2**22))
    with pytest.raises(
        ValueError,
        match=r"bomb\.zip: refused as a zip bomb: \d+ bytes unpack to 4194304, more than 100 times",
    ):
        load_task(file, image_size=4)


def test_zip_members_that_overlap_are_refused(tmp_path):
    file = write_zip(tmp_path / "x.zip", {"train/cat/1.png": bytes(5000), "train/dog/1.png": b""})
    data = bytearray(file.read_bytes())
    second = data.index(b"PK\x01\x02", data.index(b"PK\x01\x02") + 4)
    # as long as the first, and at the same place
    struct.pack_into("<II", data, second + 20, 5000, 5000)
    struct.pack_into("<I", data, second + 42, 0)
    file.write_bytes(data)
    with pytest.raises(
        ValueError, match=r"x\.zip: its members need more bytes than the file has, so they overlap"
    ):
        load_task(file, image_size=4)


@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_packings_that_are_unpacked_without_bound_are_refused(tmp_path, method):
    with zipfile.ZipFile(tmp_path / "x.zip", "w", method) as archive:
        archive.writestr("train/cat/1.png", b"x")
    with pytest.raises(
        ValueError,
        match=rf"'train/cat/1\.png': it is compressed with method {method}; zip it again",
    ):
        load_task(tmp_path / "x.zip", image_size=4)


def test_a_member_decompresses_to_at_most_the_size_in_the_directory(tmp_path):
    file = tmp_path / "x.zip"
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("1.png", bytes(2**28))
    data = bytearray(file.read_bytes())
    # its stated size when unpacked
    struct.pack_into("<I", data, data.index(b"PK\x01\x02") + 24, 10)
    file.write_bytes(data)
    tracemalloc.start()
    with pytest.raises(ValueError, match=r"1\.png cannot be read: Bad CRC-32"):
        files_of(file, list_files(file)).read(0)
    assert tracemalloc.get_traced_memory()[1] < 2**23
    tracemalloc.stop()


def test_too_many_files_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("cheem_jax.data.files.MAX_FILES", 5)
    for place in (write(tmp_path / "pets", FULL), write_zip(tmp_path / "pets.zip", FULL)):
        with pytest.raises(ValueError, match=f"{place.name}: .*5"):
            load_task(place, image_size=4)


def test_a_link_to_itself_is_refused_without_an_endless_loop(tmp_path):
    (tmp_path / "loop.zip").symlink_to("loop.zip")
    with pytest.raises(OSError, match=r"loop\.zip"):
        load_stream(tmp_path, image_size=4)


def test_a_meta_json_nested_without_end_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"meta\.json: not readable as JSON: maximum recursion"):
        load_task(write(tmp_path / "pets", FULL | {"meta.json": b"[" * 100_000}), image_size=4)


def test_a_folder_of_class_folders_is_a_task(tmp_path):
    pets = write(
        tmp_path / "photos" / "pets",
        {f"{name}/{i}.png": png(i) for name in ("cat", "dog") for i in range(8)},
    )
    write(
        tmp_path / "photos" / "birds",
        {f"{name}/{i}.png": png(i) for name in ("owl", "rook") for i in range(8)},
    )
    assert [plan.name for plan in plan_stream(pets)] == ["pets"]
    assert [plan.name for plan in plan_stream(tmp_path / "photos")] == ["birds", "pets"]
    with pytest.raises(
        ValueError,
        match="8 images and no folder; put the images of each class into a separate folder",
    ):
        plan_stream(pets / "cat")


def test_class_folders_that_differ_in_case_alone_are_refused_unless_they_are_listed(tmp_path):
    files = layout(train={"cat": 4, "Cat": 4, "dog": 4})
    with pytest.raises(ValueError, match=r"\['Cat', 'cat'\] differ only in upper and lower case"):
        plan_task(write(tmp_path / "pets", files))
    listed = write(
        tmp_path / "listed", {**files, "meta.json": b'{"classes": ["cat", "Cat", "dog"]}'}
    )
    assert plan_task(listed).classes == ("cat", "Cat", "dog")


NFC, NFD = "mus\u00e9e", "muse\u0301e"
"""One name, as most systems write it and as macOS does."""


def test_a_name_with_accents_is_one_class_however_they_are_composed(tmp_path):
    files = layout(
        train={NFC: 2, NFD: 3, "dog": 3}, val={NFC: 1, "dog": 1}, test={NFD: 2, "dog": 1}
    )
    # for folders that are one
    files = {file.replace(f"{NFD}/0", f"{NFD}/9"): data for file, data in files.items()}
    for place in (write(tmp_path / "pets", files), write_zip(tmp_path / "pets.zip", files)):
        plan = plan_task(place)
        assert plan.classes == ("dog", NFC) and plan.counts == {"train": 8, "val": 2, "test": 3}
        assert np.bincount(plan.train.labels).tolist() == [3, 5]
    listed = files | {"meta.json": json.dumps({"classes": [NFD, "dog"]}).encode()}
    assert plan_task(write_zip(tmp_path / "listed.zip", listed)).classes == (NFD, "dog")
    alone = write_zip(tmp_path / "mac.zip", layout(train={NFD: 5, "dog": 5}))
    assert plan_task(alone).classes == ("dog", NFD)  # as spelled
    files = layout(train={NFC: 3, NFD.upper(): 3, "dog": 3})
    with pytest.raises(
        ValueError, match=r"classes \['MUS.*', 'mus.*'\] differ only in upper and lower case"
    ):
        plan_task(write_zip(tmp_path / "cases.zip", files))


def test_a_copy_with_names_in_another_unicode_form_is_the_same_task(tmp_path):
    """The split, the order of classes and images, and every hash are the same."""

    def files(musee: str) -> dict[str, bytes]:
        # "musee\u0301" is before "musez", and "mus\u00e9e" after it
        names = {musee: 0, "musez": 100}
        return {
            f"{name}/{musee}{i}.png": png(start + i)
            for name, start in names.items()
            for i in range(20)
        }

    plans, prints = [], []
    for form, name in (("nfc", NFC), ("nfd", NFD)):
        place = write(tmp_path / form / "pets", files(name))
        plans.append(plan_task(place))
        prints.append(fingerprint(load_task(place, image_size=4)))
    assert plans[0].split_sha256 == plans[1].split_sha256 and prints[0] == prints[1]
    assert plans[0].classes == ("musez", NFC) and plans[1].classes == ("musez", NFD)


def test_names_of_tasks_are_compared_in_composed_form(tmp_path):
    write_zip(tmp_path / f"{NFD}.zip", FULL)
    write_zip(tmp_path / "birds.zip", FULL)
    assert [plan.name for plan in plan_stream(tmp_path, [NFC])] == [NFD]
    write(tmp_path / NFC, FULL)
    with pytest.raises(ValueError, match=f"folders or zips with the same name: .'{NFC}'"):
        plan_stream(tmp_path)


@pytest.mark.parametrize("names", [("Testing", "valid"), ("test",)])
def test_splits_without_train_are_refused_as_tasks(tmp_path, names):
    pets = write(tmp_path / "pets", layout(**{name: {"cat": 9, "dog": 9} for name in names}))
    for read in (plan_stream, plan_task):
        with pytest.raises(ValueError, match=r"pets: no split 'train', only \['test'"):
            read(pets)


def test_folders_that_look_like_parts_of_one_task_are_tasks_only_if_they_are_named(tmp_path):
    write(
        tmp_path / "all",
        layout(part1={"cat": 9, NFC: 9}, part2={"Cat": 9, NFD: 9}, other={"cat": 9, "cow": 9}),
    )
    write(tmp_path / "all", {f"empty/{split}/x.txt": b"" for split in ("train", "test")})
    with pytest.raises(
        ValueError,
        match=r"all: part1, part2 have the same classes \(cat; mus.*rename.*--tasks part1,part2",
    ):
        plan_stream(tmp_path / "all")
    assert [plan.name for plan in plan_stream(tmp_path / "all", ["part1", "part2"])] == [
        "part1",
        "part2",
    ]
    toml = tmp_path / "all.toml"
    toml.write_text("".join(f"[[task]]\npath = 'all/part{number}'\n" for number in (1, 2)))
    assert [plan.name for plan in plan_stream_file(toml)[1]] == ["part1", "part2"]
    (tmp_path / "zips").mkdir()
    for name in ("train", "test"):
        write_zip(
            tmp_path / "zips" / f"{name}.zip",
            {f"{name}/{at}/{i}.png": png() for at in "ab" for i in range(9)},
        )
    with pytest.raises(
        ValueError,
        match=r"zips named \['test', 'train'\] are splits of one task; unpack them into one",
    ):
        plan_stream(tmp_path / "zips")


def test_tasks_with_separate_splits_or_listed_classes_can_have_the_same_classes(tmp_path):
    for name in ("real", "sketch"):
        write(tmp_path / "domains" / name, FULL)
        write_zip(
            tmp_path / "domains" / f"{name}_zip.zip",
            {f"x/{file}": data for file, data in FULL.items()},
        )
        numbered = {f"{name}/{label}/{i}.png": png() for label in "01" for i in range(4)}
        write(
            tmp_path / "listed",
            numbered | {f"{name}/meta.json": json.dumps({"classes": [name, "x"]}).encode()},
        )
    assert [plan.name for plan in plan_stream(tmp_path / "domains")] == [
        "real",
        "real_zip",
        "sketch",
        "sketch_zip",
    ]
    assert [plan.classes[0] for plan in plan_stream(tmp_path / "listed")] == ["real", "sketch"]


def test_classes_above_splits_are_refused(tmp_path):
    files = {
        f"{name}/{split}/{i}.png": png()
        for name in ("cat", "dog")
        for split in ("train", "test")
        for i in range(9)
    }
    with pytest.raises(
        ValueError, match="cat: test, train are splits, but their images are not in class folders"
    ):
        plan_stream(write(tmp_path / "pets", files))
    vehicles = {f"{name}/{i}.png": png() for name in ("bus", "train") for i in range(9)}
    assert plan_stream(write(tmp_path / "vehicles", vehicles))[0].classes == ("bus", "train")


class Foreign(zipfile.ZipInfo):
    """A name as tools without UTF-8 write it."""

    encoding = "gbk"

    def _encodeFilenameFlags(self):
        return self.filename.encode(self.encoding), self.flag_bits & ~0x800


def test_names_of_another_encoding_and_other_archives_are_refused_with_the_way_out(tmp_path):
    with zipfile.ZipFile(tmp_path / "gbk.zip", "w") as archive:
        archive.writestr(Foreign("猫/0.png"), b"")
    with pytest.raises(
        ValueError, match="neither as UTF-8 nor as MS-DOS; unpack the zip with the right encoding"
    ):
        list_files(tmp_path / "gbk.zip")
    Foreign.encoding = "cp437"
    with zipfile.ZipFile(tmp_path / "dos.zip", "w") as archive:
        archive.writestr(Foreign("Gänse/0.png"), b"")
    assert list_files(tmp_path / "dos.zip") == ["Gänse/0.png"]
    with tarfile.open(tmp_path / "pets.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "dos.zip", "pets")
    with pytest.raises(
        ValueError, match=r"pets\.tar\.gz is not a readable zip file .*unpack it first"
    ):
        list_files(tmp_path / "pets.tar.gz")
