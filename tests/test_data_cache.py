"""Decoded images on the disk: the same pixels, made once, never trusted half-made."""

import io
import itertools
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from pixels import encode, stored

from cheem_jax.data import fingerprint, load, load_tasks, plan_task
from cheem_jax.data.folder import plan_manifest
from cheem_jax.data.load import ImagesConfig, StreamedImages, cache_place, load_train, open_cache


def pictures(root: Path, per_class: int = 6) -> Path:
    rng = np.random.default_rng(0)
    for split in ("train", "val", "test"):
        for name in ("cat", "dog"):
            folder = root / split / name
            folder.mkdir(parents=True)
            for row in range(per_class):
                Image.fromarray(rng.integers(0, 256, (9, 7, 3), np.uint8)).save(
                    folder / f"{row}.png"
                )
    return root


def make_cache(plan, root, keep, **options):
    (task,) = load_tasks([plan], 8, ImagesConfig(keep, root, **options))
    return task


@pytest.fixture
def plan(tmp_path):
    return plan_task(pictures(tmp_path / "pets"))


@pytest.fixture
def root(tmp_path):
    """The folder of the caches, which does not exist yet."""
    return tmp_path / "cache"


def folders(root: Path) -> list[Path]:
    return [entry for entry in root.iterdir() if entry.is_dir()]


def test_memory_and_cache_hold_the_same_pixels_and_have_one_fingerprint(plan, root):
    memory, mapped = (make_cache(plan, root, keep) for keep in ("memory", "cache"))
    assert isinstance(mapped.train.images, np.memmap) and not mapped.train.images.flags.writeable
    for split in plan.splits:
        np.testing.assert_array_equal(memory.splits[split].images, mapped.splits[split].images)
    assert fingerprint(memory) == fingerprint(mapped)
    assert memory.split_sha256 == mapped.split_sha256 == plan.split_sha256


@pytest.mark.parametrize("keep", ["memory", "cache", "stream"])
def test_photos_are_turned_in_folders_and_zips_and_keep_another_place_than_as_stored(
    keep, tmp_path
):
    # upright files, turned ones, and their pixels as stored
    kinds: list[list[bytes]] = [[], [], []]
    for seed, orientation in enumerate((1, 3, 6, 8)):
        pixels = np.random.default_rng(seed).integers(0, 256, (8, 8, 3), np.uint8)
        as_stored = stored(Image.fromarray(pixels), orientation)
        with Image.open(io.BytesIO(as_stored)) as image:
            plain = Image.fromarray(np.asarray(image))
        for kind, data in zip(
            kinds, (encode(Image.fromarray(pixels)), as_stored, encode(plain)), strict=True
        ):
            kind.append(data)
    places = []
    for name, files in zip("abc", kinds, strict=True):
        for split, label in itertools.product(("train", "val", "test"), ("cat", "dog")):
            folder = tmp_path / name / "pets" / split / label
            folder.mkdir(parents=True)
            for number, data in enumerate(files):
                (folder / f"{number}.png").write_bytes(data)
        places.append(
            Path(
                shutil.make_archive(str(tmp_path / name / "pets"), "zip", tmp_path / name / "pets")
            )
        )
        places.append(tmp_path / name / "pets")
    upright, _, photos, folder, plain, _ = map(plan_task, places)
    want = make_cache(upright, tmp_path / "cache", keep).train.images[:]
    for plan in (photos, folder):
        result = make_cache(plan.turned(True), tmp_path / "cache", keep)
        np.testing.assert_array_equal(result.train.images[:], want)
        assert fingerprint(result) != fingerprint(make_cache(plan, tmp_path / "cache", keep))
        assert cache_place(plan, 8, tmp_path) != cache_place(plan.turned(True), 8, tmp_path)
        np.testing.assert_array_equal(
            make_cache(plan, tmp_path / "cache", keep).train.images[:],
            make_cache(plain, tmp_path / "cache", keep).train.images[:],
        )


def test_a_cache_is_made_once_and_again_when_something_changes(tmp_path, plan, root):
    folder = tmp_path / "pets"
    first = cache_place(plan, 8, root)
    make_cache(plan, root, "cache")
    made = first.stat().st_mtime_ns
    make_cache(plan_task(folder), root, "cache")
    assert first.stat().st_mtime_ns == made
    assert cache_place(plan, 9, root) != first
    file = folder / "train" / "cat" / "0.png"
    os.utime(file, ns=(1, 1))
    assert cache_place(plan_task(folder), 8, root) != first


def test_another_decoder_makes_another_cache(plan, tmp_path, monkeypatch):
    first = cache_place(plan, 8, tmp_path)
    monkeypatch.setattr(load, "DECODER_VERSION", load.DECODER_VERSION + 1)
    assert cache_place(plan, 8, tmp_path) != first


def test_a_broken_image_is_named_and_nothing_is_left(tmp_path, root):
    folder = pictures(tmp_path / "pets")
    file = folder / "val" / "dog" / "3.png"
    file.write_bytes(file.read_bytes()[:50])
    with pytest.raises(ValueError, match="1 image file.*val/dog/3.png"):
        make_cache(plan_task(folder), root, "cache")
    assert folders(root) == []


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_disk_that_fills_up_is_reported_and_nothing_is_left(plan, root, monkeypatch):
    write = load._write

    def to_a_full_disk(file, *others):
        file.symlink_to("/dev/full")
        return write(file, *others)

    monkeypatch.setattr(load, "_write", to_a_full_disk)
    with pytest.raises(
        OSError,
        match=r"'pets' cannot be stored in .*No space left on device.*choose another folder",
    ):
        make_cache(plan, root, "cache")
    assert folders(root) == []


def test_too_little_room_is_reported_before_anything_is_written(plan, root, tmp_path, monkeypatch):
    usage = load.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(load.shutil, "disk_usage", lambda path: usage._replace(free=100))
    with pytest.raises(OSError, match="0.0 GB are needed, but only 0.0 GB are free"):
        make_cache(plan, root, "cache")
    assert folders(root) == []


def test_a_folder_that_cannot_be_written_to_is_named(plan, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="cannot be stored in .*file/cache"):
        make_cache(plan, tmp_path / "file" / "cache", "cache")


def with_header(data: bytes, header: str) -> bytes:
    """Return a file of images with another header."""
    return data[:8] + len(header).to_bytes(2, "little") + header.encode() + data[128:]


HEADERS = [
    "{'descr': '<i4', 'fortran_order': False, 'shape': (1000000000000,), }",
    "{'descr': '|V0', 'fortran_order': False, 'shape': (1000000000000,), }",
    "{'descr': '<f4', 'fortran_order': False, 'shape': (12,), }",
    "{'descr': '|O', 'fortran_order': False, 'shape': (6,), }",
    "{'descr': '<i4', 'fortran_order': False, 'shape': (99999999999999999999,), }",
    "[" * 3000,
]
DESCRIPTIONS = ["", "{", "{}", "[]", '{"image_size": 8, "splits": {}}', '{"splits": 3}']
DESCRIPTIONS += ['{"splits": {"../../x": {}}}', "[" * 100_000, "\ud800"]


@pytest.mark.parametrize(
    ("file", "change"),
    [
        *(("train.npy", lambda data, end=end: data[:end]) for end in (0, -5)),
        *(("train.npy", lambda data, header=h: with_header(data, header)) for h in HEADERS),
        *(
            ("cache.json", lambda data, text=text: text.encode("utf-8", "surrogatepass"))
            for text in DESCRIPTIONS
        ),
        ("cache.json", lambda data: data.replace(b'"val"', b'"more"')),
    ],
)
def test_a_corrupted_cache_is_refused_with_the_folder_to_remove(plan, root, file, change):
    make_cache(plan, root, "cache")
    place = cache_place(plan, 8, root)
    (place / file).write_bytes(change((place / file).read_bytes()))
    message = f"the cache {place} is corrupted .*remove this folder"
    for read in (lambda: make_cache(plan, root, "cache"), lambda: open_cache(place, plan)):
        with pytest.raises(ValueError, match=message):
            read()


SLOW = """
import sys, time
from pathlib import Path
from cheem_jax.data import load, plan_task
from cheem_jax.data.load import _silent
write = load._write
def slowly(file, part, *others):
    print("writing", flush=True)
    time.sleep(float(sys.argv[3]))
    return write(file, part, *others)
load._write = slowly
splits = load.cached(plan_task(Path(sys.argv[1])), 8, Path(sys.argv[2]), _silent)
print("done", splits["train"].sha256, flush=True)
"""


def start(folder, root, seconds):
    command = [sys.executable, "-c", SLOW, str(folder), str(root), str(seconds)]
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command, stdout=pipe, stderr=subprocess.DEVNULL, text=True, cwd=Path(__file__).parent.parent
    )


def stop(folder, root, number):
    """Send a signal to a process that is writing."""
    process = start(folder, root, 60)
    assert process.stdout is not None and process.stdout.readline() == "writing\n"
    process.send_signal(number)
    process.wait()
    process.stdout.close()


def test_a_process_that_is_killed_midway_leaves_nothing_that_is_trusted(tmp_path, plan, root):
    stop(tmp_path / "pets", root, signal.SIGKILL)
    assert not cache_place(plan, 8, root).exists() and any(root.glob("*.partial"))
    task = make_cache(plan, root, "cache")
    assert fingerprint(task) == fingerprint(make_cache(plan, root, "memory"))
    assert not any(root.glob("*.partial"))


def test_a_second_process_waits_for_the_first_and_both_have_the_same(tmp_path, root):
    folder = pictures(tmp_path / "pets")
    first, second = start(folder, root, 0.3), start(folder, root, 0.3)
    outputs = [process.communicate()[0].split() for process in (first, second)]
    assert [words[-2:] for words in outputs] == [outputs[0][-2:]] * 2 and outputs[0][-2] == "done"
    assert sorted(words.count("writing") for words in outputs) == [0, 3]  # only one of them decoded


@pytest.mark.parametrize("keep", ["memory", "cache", "auto"])
def test_only_the_training_images_of_the_backbones_own_task_are_decoded(tmp_path, keep):
    folder = pictures(tmp_path / "pets")
    (folder / "test" / "dog" / "1.png").write_bytes(b"broken")
    split = load_train(plan_task(folder), 8, ImagesConfig(keep, tmp_path / "cache"))
    assert len(split.images) == 12


@pytest.mark.parametrize("keep", ["memory", "cache", "stream"])
def test_only_measured_splits_are_decoded_and_from_the_cache_of_all_splits_if_there_is_one(
    tmp_path, keep
):
    if keep == "stream":
        pytest.importorskip("grain", reason="needs the extra `datasets`")
    folder = pictures(tmp_path / "pets")
    config = ImagesConfig(keep, tmp_path / "cache")
    plan = plan_task(folder, purpose="measure")
    (whole,) = load_tasks([plan], 8, config)
    copies = len(list((tmp_path / "cache").glob("pets-8-*[!k]")))
    (task,) = load_tasks([plan], 8, config, only="test")
    assert [len(split.images) for split in task.splits.values()] == [0, 0, 12]
    np.testing.assert_array_equal(task.test.images[:], whole.test.images[:])
    assert len(list((tmp_path / "cache").glob("pets-8-*[!k]"))) == copies
    (folder / "train" / "dog" / "1.png").write_bytes(b"broken")
    (task,) = load_tasks([plan_task(folder, purpose="measure")], 8, config, only="test")
    np.testing.assert_array_equal(task.test.images[:], whole.test.images[:])
    shutil.rmtree(folder / "test")  # then every image stands for the test images
    shutil.rmtree(folder / "train" / "dog")
    (task,) = load_tasks([plan_task(folder, purpose="measure")], 8, config, only="test")
    assert "test" in task.cut and sum(len(split.images) for split in task.splits.values()) == 18


def test_auto_streams_large_tasks_and_caches_the_rest_of_a_large_stream(tmp_path, monkeypatch):
    pytest.importorskip("grain", reason="needs the extra `datasets`")
    plans = [
        plan_task(pictures(tmp_path / name, num), name=name)
        for name, num in (("small", 2), ("large", 9))
    ]
    monkeypatch.setattr(load, "IN_MEMORY", 2500)  # more than the small one takes, less than both
    monkeypatch.setattr(load, "CACHED", 9000)
    small, large = load_tasks(plans, 8, ImagesConfig("auto", tmp_path / "cache"))
    assert isinstance(small.train.images, np.memmap)
    assert isinstance(large.train.images, StreamedImages)


def test_folders_of_one_name_and_time_have_different_caches(tmp_path, monkeypatch):
    """Copies that keep their times differ only in their folder; BMP files all have one size."""
    result = []
    for version, value in (("v1", 0), ("v2", 255)):
        folder = tmp_path / version / "birds"
        for split in ("train", "val", "test"):
            for name in ("cat", "dog"):
                (folder / split / name).mkdir(parents=True)
                file = folder / split / name / "0.bmp"
                Image.new("L", (4, 4), value).save(file)
                os.utime(file, ns=(1, 1))
        monkeypatch.chdir(folder.parent)
        result.append(
            make_cache(plan_task(Path("birds")), tmp_path / "cache", "cache").train.images.mean()
        )
    assert result == [0, 255]


def test_a_manifest_over_two_roots_is_two_caches(tmp_path):
    """Copies that keep their times, and one list for both; BMP files all have one size."""
    rows = [
        f"{split}/{name}/0.bmp,{name},{split}"
        for split in ("train", "val", "test")
        for name in ("cat", "dog")
    ]
    (tmp_path / "list.csv").write_text("\n".join(["path,label,split", *rows]) + "\n")
    result = []
    for version, value in (("v1", 0), ("v2", 255)):
        for row in rows:
            file = tmp_path / version / row.split(",")[0]
            file.parent.mkdir(parents=True)
            Image.new("L", (4, 4), value).save(file)
            os.utime(file, ns=(1, 1))
        plan = plan_manifest(tmp_path / "list.csv", root=tmp_path / version)
        result.append(make_cache(plan, tmp_path / "cache", "cache").train.images.mean())
    assert result == [0, 255]


def test_ctrl_c_while_decoding_leaves_nothing_behind(tmp_path, root):
    stop(pictures(tmp_path / "pets"), root, signal.SIGINT)
    assert folders(root) == []


def test_auto_keeps_a_small_stream_in_memory_and_a_large_one_on_the_disk(plan, root, monkeypatch):
    assert not isinstance(make_cache(plan, root, "auto").train.images, np.memmap)
    assert not root.exists()
    monkeypatch.setattr(load, "IN_MEMORY", 1000)
    assert isinstance(make_cache(plan, root, "auto").train.images, np.memmap)


def test_senseless_settings_are_refused():
    with pytest.raises(ValueError, match="workers is -1"):
        ImagesConfig(workers=-1)
