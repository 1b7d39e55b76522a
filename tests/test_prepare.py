"""Preparing data sets: from local archives or from a server, with instructions for the others."""

import dataclasses
import functools
import threading
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import filelock
import official
import pytest

from cheem_jax.data.benchmarks import download
from cheem_jax.data.benchmarks import prepare as preparing
from cheem_jax.data.benchmarks.prepare import manual_dir, prepare, splits_file, status_of
from cheem_jax.data.benchmarks.table import BY_NAME, TASKS, Counts

pytest.importorskip("tensorflow_datasets", reason="needs the extra `datasets`")


@contextmanager
def silent(phase, task, total):
    yield lambda num: None


@pytest.fixture
def gtsrb(monkeypatch):
    """Make the table expect the small archives of GTSRB in a folder."""
    return functools.partial(official.expect, monkeypatch, "gtsrb", counts=Counts(43, 43, 43))


@pytest.fixture
def server(tmp_path):
    """A folder and the address under which its files are served."""
    folder = tmp_path / "served"
    folder.mkdir()

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, format, *args): ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=folder))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield folder, f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_archives_in_the_manual_folder_are_prepared_and_stay(tmp_path, gtsrb):
    gtsrb(official.put(manual_dir(tmp_path), official.gtsrb()))
    assert status_of(BY_NAME["gtsrb"], tmp_path).state == "archives"
    plan = prepare("gtsrb", tmp_path, silent)
    assert [len(part.labels) for part in plan.splits.values()] == [43, 43, 43]
    assert status_of(BY_NAME["gtsrb"], tmp_path).state == "ready"
    assert splits_file(tmp_path, "gtsrb", 0).is_file()
    assert len(list(manual_dir(tmp_path).iterdir())) == 3
    assert prepare("gtsrb", tmp_path, silent).split_sha256 == plan.split_sha256


def test_archives_are_downloaded_where_they_can_be(tmp_path, gtsrb, server):
    folder, address = server
    archives = gtsrb(official.put(folder, official.gtsrb()), url=address)
    fetched = []

    @contextmanager
    def phase(name, task, total):
        yield lambda num: fetched.append((name, task, total, num))

    plan = prepare("gtsrb", tmp_path / "data", phase)
    assert plan.num_images == 129
    for archive in archives:
        messages = [
            num
            for name, task, _, num in fetched
            if name == "download" and task == f"gtsrb {archive.file}"
        ]
        assert sum(messages) == archive.num_bytes
    assert sum(num for name, *_, num in fetched if name == "index") == 129


def test_a_download_of_other_bytes_prepares_nothing(tmp_path, gtsrb, server):
    folder, address = server
    archives = gtsrb(official.put(folder, official.gtsrb()), url=address)
    others = tuple(archive._replace(hash="0" * 64) for archive in archives)
    # undone with the changes of `monkeypatch`
    BY_NAME["gtsrb"] = dataclasses.replace(BY_NAME["gtsrb"], archives=others)
    with pytest.raises(ValueError, match="0000"):
        prepare("gtsrb", tmp_path / "data", silent)
    assert not (tmp_path / "data" / "gtsrb").exists()


def test_an_archive_that_is_not_the_published_one_is_named(tmp_path):
    official.put(manual_dir(tmp_path), official.eurosat())
    with pytest.raises(
        ValueError, match=r"EuroSAT.zip .* has the sha256 .*the published archive has 8ebea626"
    ):
        prepare("eurosat", tmp_path, silent)
    assert not (tmp_path / "eurosat").exists()


def test_archives_that_must_be_brought_are_all_named(tmp_path):
    manual_dir(tmp_path).mkdir(parents=True)
    with pytest.raises(
        FileNotFoundError,
        match=r"cars_train.tgz.*cars_test.tgz.*car_devkit.tgz.*withlabels.mat.*unreachable",
    ):
        prepare("cars", tmp_path, silent)
    with pytest.raises(FileNotFoundError, match=r"SUN397.tar.gz.*Partitions.zip"):
        prepare("sun397", tmp_path, silent)


def test_wrong_counts_after_preparing_are_refused_with_the_task_and_both_numbers(tmp_path, gtsrb):
    counts = Counts(23976, 2664, 12630)
    gtsrb(official.put(manual_dir(tmp_path), official.gtsrb()), counts=counts)
    with pytest.raises(
        ValueError, match=r"task 'gtsrb' has 43/43/43 .* expected 23,976/2,664/12,630"
    ):
        prepare("gtsrb", tmp_path, silent)


def test_without_tensorflow_a_stock_builder_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setattr(preparing.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        ValueError,
        match=r"preparing 'mnist' needs TensorFlow .*pip install 'cheem_jax\[prepare\]'",
    ):
        prepare("mnist", tmp_path, silent)
    assert "then `cheem data prepare mnist" in status_of(BY_NAME["mnist"], tmp_path).advice


def test_the_files_of_a_stock_builder_are_those_that_tfds_has_registered(tmp_path):
    (food,) = preparing.registered(BY_NAME["food101"], tmp_path)
    assert (food.file, food.num_bytes) == ("food-101.tar.gz", 4996278331) and food.hash is not None
    ucf, imagenet = (
        {archive.file for archive in preparing.registered(BY_NAME[name], tmp_path)}
        for name in ("ucf101", "imagenet12")
    )
    assert imagenet - ucf == {"decathlon-1.0-data-imagenet.tar"} and len(ucf) == 2
    assert not any(Path(tmp_path).iterdir())


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_every_missing_task_has_a_command(tmp_path, task):
    status = status_of(task, tmp_path)
    assert status.state == "missing" and status.num_bytes == 0
    assert status.advice.endswith(f"`cheem data prepare {task.name} --data-dir {tmp_path}`")


def test_commands_that_are_advised_can_be_pasted(tmp_path):
    folder = tmp_path / "my data"
    assert f"--data-dir '{folder}'`" in status_of(BY_NAME["gtsrb"], folder).advice


def test_the_rest_of_a_killed_preparation_is_invalid_and_is_cleared_away(tmp_path, gtsrb):
    gtsrb(official.put(manual_dir(tmp_path), official.gtsrb()))
    leftover = tmp_path / "gtsrb" / "incomplete.ABCDEF_1.0.0"
    leftover.mkdir(parents=True)
    (leftover / "dataset_info.json").write_text("{}")
    assert status_of(BY_NAME["gtsrb"], tmp_path).state == "archives"
    prepare("gtsrb", tmp_path, silent)
    assert not leftover.exists() and status_of(BY_NAME["gtsrb"], tmp_path).state == "ready"


def test_a_half_unpacked_folder_is_reported_and_nothing_is_downloaded(tmp_path, monkeypatch):
    official.put(manual_dir(tmp_path), official.aircraft(), unpacked=True)
    (lists,) = manual_dir(tmp_path).rglob("images_variant_val.txt")
    lists.unlink()
    monkeypatch.setattr(
        download, "download", lambda *_, **__: pytest.fail("there is something to read already")
    )
    with pytest.raises(FileNotFoundError, match="images_variant_val.txt"):
        prepare("aircraft", tmp_path, silent)


def test_a_second_process_waits_for_the_first_and_finds_its_work_done(tmp_path, gtsrb):
    gtsrb(official.put(manual_dir(tmp_path), official.gtsrb()))
    (tmp_path / "cheem_jax").mkdir()
    lock = filelock.FileLock(tmp_path / "cheem_jax" / "prepare.lock")
    said = []

    @contextmanager
    def phase(name, task, total):
        said.append(name)
        if name == "wait":
            lock.release()
        yield lambda num: None

    with lock:
        prepare("gtsrb", tmp_path, phase)
    assert said[0] == "wait" and "prepare" in said
