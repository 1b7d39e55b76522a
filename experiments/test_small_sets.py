"""`experiments/small_sets.py`: shares of tasks, and the accuracy by number of images."""

import json
from pathlib import Path

import numpy as np
import pytest
import small_sets

from cheem_jax.cheem.config import QUICK_PLUS, auto
from cheem_jax.data.demo import demo_stream
from cheem_jax.run.record import read


def task():
    return demo_stream(image_size=32, num_train=60, num_val=30, num_test=30).tasks[0]


def test_a_share_has_equally_many_images_of_each_class():
    whole = task()
    num_classes = len(whole.classes)
    part = small_sets.share(whole, 4 * num_classes, seed=0)
    assert np.bincount(part.train.labels).tolist() == [4] * num_classes
    assert np.bincount(part.val.labels).tolist() == [1] * num_classes  # at least one
    assert len(part.test.labels) == len(whole.test.labels)
    again, other = (small_sets.share(whole, 4 * num_classes, seed=seed) for seed in (0, 1))
    np.testing.assert_array_equal(part.train.images[:], again.train.images[:])
    assert (part.train.images[:] != other.train.images[:]).any()
    assert small_sets.fits(whole, 2 * num_classes)
    assert not small_sets.fits(whole, 2 * num_classes - 1) and not small_sets.fits(whole, 600)


@pytest.mark.parametrize("text", ["", "60,", "0", "-5", "6e1"])
def test_numbers_that_are_not_positive_are_refused(text):
    with pytest.raises(ValueError, match="expected positive whole numbers"):
        small_sets.numbers_of(text)


def test_both_searches_pass_over_the_images_about_equally_often():
    for num in (60, 300, 600, 1000):
        paper, ours = (small_sets.VARIANTS[name](num) for name in ("search", "auto"))
        assert paper.supernet.epochs + paper.finetune.epochs in (
            ours.finetune.epochs,
            ours.finetune.epochs - 1,
        )
    assert [small_sets.VARIANTS["search"](num).finetune.epochs for num in (60, 1000)] == [64, 8]
    assert small_sets.VARIANTS["auto"](60) == auto(QUICK_PLUS, 60)
    assert not small_sets.VARIANTS["plain"](60).augment
    assert small_sets.VARIANTS["half"](60).finetune.epochs == 64


def test_only_units_of_the_latest_images_and_settings_are_averaged():
    def unit(accuracy: float, variant="auto", seed=0, images="new", **more) -> dict:
        place = {"task": "pets", "num_train": 60, "variant": variant, "seed": seed}
        return {**place, "data_sha256": images, "settings": {}, "test_accuracy": accuracy, **more}

    units = [unit(1.0, images="old"), unit(0.9, settings={"rate": 1}), unit(0.5), unit(0.7, seed=1)]
    assert small_sets.latest(units) == units[2:]
    replaced = [unit(0.2, task_sha256="a", seed=1), unit(0.3, task_sha256="b")]
    assert small_sets.latest(replaced) == replaced[1:]
    # a variant with fewer seeds is compared on these
    assert small_sets.grid_of([*units[2:], unit(0.4, "plain")]).rows[0][2:] == ("40.0", "50.0")


def test_numbers_that_fit_no_task_are_refused(tmp_path):
    settings = small_sets.SmallSets(tasks="shapes", numbers="100000", run_dir=tmp_path / "study")
    with pytest.raises(ValueError, match="--numbers is '100000', and no task .*shapes"):
        small_sets.main(settings)
    assert not settings.run_dir.exists()


@pytest.mark.full
def test_units_are_learned_once_and_averaged_over_seeds(tmp_path, monkeypatch):
    monkeypatch.setattr("cheem_jax.cheem.config.FEWEST_AUTO_EPOCHS", 2)
    monkeypatch.setattr("cheem_jax.cheem.config.AUTO_STEPS", 2)
    settings = small_sets.SmallSets(
        tasks="shapes",
        numbers="20",
        variants="auto",
        seeds="0,1",
        run_dir=tmp_path / "study",
    )
    small_sets.main(settings)
    before = read(tmp_path / "study")
    small_sets.main(settings)
    after = read(tmp_path / "study")
    units = [[entry for entry in record if entry["event"] == "unit"] for record in (before, after)]
    assert units[0] == units[1] and len(units[0]) == 2
    assert not (tmp_path / "study/memory").exists()
    saved = json.loads((tmp_path / "study/small_sets.json").read_text())
    assert saved["units"] == units[0]
    rows = small_sets.grid_of(units[0]).rows
    mean = np.mean([one["test_accuracy"] for one in units[0]])
    assert len(rows) == 1 and rows[0][2:] == (f"{100 * mean:.1f}",)
    assert Path(tmp_path / "study/small_sets.md").read_text().count("\n") == 3
