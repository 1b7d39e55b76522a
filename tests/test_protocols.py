"""Protocols of class-incremental learning by name, on small archives with the official layouts."""

from pathlib import Path

import numpy as np
import official
import pytest
from test_prepare import silent

from cheem_jax.data import ImagesConfig, load_tasks
from cheem_jax.data.benchmarks.prepare import manual_dir, prepare, status_of
from cheem_jax.data.benchmarks.table import BY_NAME, PROTOCOLS, task_names
from cheem_jax.data.sources import MissingTasks, cache_dir_of, plan_source
from cheem_jax.data.task import ClassSplit

pytest.importorskip("tensorflow_datasets", reason="needs the extra `datasets`")


@pytest.fixture
def fill(tmp_path, monkeypatch):
    """Put small archives into a data folder, and make the table expect these."""

    def put(name: str, contents: official.Contents) -> Path:
        place = official.put(manual_dir(tmp_path), contents)
        official.expect(monkeypatch, name, place)
        prepare(name, tmp_path, silent)
        return tmp_path

    return put


def test_the_settings_are_those_of_pilot():
    settings = {
        name: (protocol.data_set, protocol.class_split.classes_per_task)
        for name, protocol in PROTOCOLS.items()
    }
    assert settings == {
        "cifar100_b0_inc10": ("cifar100", 10),
        "imagenet_r_b0_inc20": ("imagenet_r", 20),
        "imagenet_a_b0_inc20": ("imagenet_a", 20),
        "cub200_b0_inc20": ("cub200", 20),
        "cub200_b0_inc10": ("cub200", 10),
        "vtab50_b0_inc10": ("vtab50", 10),
        "omnibenchmark_b0_inc30": ("omnibenchmark", 30),
    }
    for name, protocol in PROTOCOLS.items():
        split = protocol.class_split
        assert BY_NAME[protocol.data_set].num_classes % split.classes_per_task == 0
        assert split.first_task is None  # B0
        assert split.class_order == (None if name.startswith("vtab") else 1993)
    assert [BY_NAME[name].num_classes for name in task_names("cil")] == [
        100,
        200,
        200,
        200,
        50,
        300,
    ]


def test_vtab_keeps_its_five_data_sets_apart(fill):
    data_dir = fill("vtab50", official.pilot("vtab", 50))
    name, plans = plan_source("vtab50_b0_inc10", data_dir=data_dir)
    assert name == "vtab50 B0 Inc10"
    assert [plan.name for plan in plans] == [f"vtab50-0{number}" for number in range(1, 6)]
    assert [plan.classes for plan in plans] == [
        tuple(str(first + i) for i in range(10)) for first in range(10, 60, 10)
    ]
    # of four training images of each class, one is for validation
    assert [plan.counts for plan in plans] == [{"train": 30, "val": 10, "test": 20}] * 5
    (task,) = load_tasks(plans[:1], 8, ImagesConfig("memory"))
    assert [*np.unique(task.test.labels)] == [*range(10)]


def test_birds_and_renditions_are_permuted_like_in_pilot(fill):
    np.random.seed(1993)
    order = np.random.permutation(200)
    birds = [f"{label + 1:03d}.Bird_{label}" for label in range(200)]
    data_dir = fill("cub200", official.cub200(200))
    for increment in (20, 10):
        _, plans = plan_source(f"cub200_b0_inc{increment}", data_dir=data_dir)
        assert [len(plan.classes) for plan in plans] == [increment] * (200 // increment)
        classes = [name for plan in plans for name in plan.classes]
        assert classes == [birds[label] for label in order]
    data_dir = fill("imagenet_a", official.imagenet_variant("imagenet-a", 200))
    _, plans = plan_source("imagenet_a_b0_inc20", data_dir=data_dir)
    assert [name for plan in plans for name in plan.classes] == [f"n{label:08d}" for label in order]
    assert [plan.counts for plan in plans] == [{"train": 60, "val": 20, "test": 20}] * 10


def test_a_copy_by_pilot_needs_no_official_archive(fill):
    data_dir = fill("imagenet_r", official.pilot("imagenet-r", 200, first=1000))
    _, plans = plan_source("imagenet_r_b0_inc20", ["imagenet_r-10"], data_dir=data_dir)
    assert [plan.name for plan in plans] == ["imagenet_r-10"]
    assert status_of(BY_NAME["imagenet_r"], data_dir).state == "ready"


def test_options_override_a_protocol(fill):
    data_dir = fill("vtab50", official.pilot("vtab", 50))
    name, plans = plan_source("vtab50_b0_inc10", data_dir=data_dir, class_split=ClassSplit(5, 30))
    assert name == "vtab50 B30 Inc5" and [len(plan.classes) for plan in plans] == [30, 5, 5, 5, 5]


def test_options_that_are_not_given_leave_the_order_of_the_protocol(fill):
    data_dir = fill("cub200", official.cub200(200))

    def classes(given: ClassSplit | None) -> list[tuple[str, ...]]:
        _, plans = plan_source("cub200_b0_inc20", data_dir=data_dir, class_split=given)
        return [plan.classes for plan in plans]

    order = sum(classes(None), ())
    assert order != tuple(sorted(order))
    assert classes(ClassSplit(10)) == [order[start : start + 10] for start in range(0, 200, 10)]
    halved = classes(ClassSplit(first_task=100))
    assert sum(halved, ()) == order and [*map(len, halved)] == [100, 20, 20, 20, 20, 20]
    other = classes(ClassSplit(class_order=7))
    assert [*map(len, other)] == [20] * 10 and sum(other, ()) != order


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_missing_images_are_reported_with_the_next_step(tmp_path, protocol):
    with pytest.raises(MissingTasks) as error:
        plan_source(protocol, data_dir=tmp_path)
    name = PROTOCOLS[protocol].data_set
    (advice,) = error.value.advice
    assert f"`cheem data prepare {name} --data-dir {tmp_path}`" in advice
    if name in ("vtab50", "omnibenchmark"):
        archive = f"{name.removesuffix('50')}.zip into {manual_dir(tmp_path)}"
        assert f"put {archive}" in advice and "github.com/sun-hailong/LAMDA-PILOT" in advice
    assert cache_dir_of(protocol, tmp_path) == tmp_path / "cheem_jax" / "images"


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("cub200", "cub.zip"),
        ("cub200", "cub"),
        ("imagenet_r", "imagenet-r.zip"),
        ("imagenet_a", "imagenet-a"),
        ("vtab50", "vtab"),
        ("omnibenchmark", "omnibenchmark"),
    ],
)
def test_copies_and_folders_that_the_reader_accepts_are_listed(tmp_path, name, file):
    assert status_of(BY_NAME[name], tmp_path).state == "missing"
    copy = manual_dir(tmp_path) / file
    copy.parent.mkdir(parents=True)
    copy.write_bytes(b"zip") if copy.suffix else copy.mkdir()
    status = status_of(BY_NAME[name], tmp_path)
    assert status.state == "archives" and status.advice.startswith(f"`cheem data prepare {name} ")


def test_a_misspelled_protocol_is_suggested():
    with pytest.raises(FileNotFoundError, match="did you mean .*cub200_b0_inc20"):
        plan_source("cub_b0_inc20")
