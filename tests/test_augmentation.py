"""Augmentation: the result for an image depends on its position alone, and only training is
augmented."""

import dataclasses
import json
import signal

import numpy as np
import pytest
import small
from test_continual import Signalling, quiet, timeless

from cheem_jax.cheem.learner import Cheem
from cheem_jax.continual import RunConfig, run_stream
from cheem_jax.core.interruption import Stopped
from cheem_jax.core.keys import Keys
from cheem_jax.data.augmentation import CHANGES, augment, augmented
from cheem_jax.engine.choice import EngineConfig
from cheem_jax.engine.stages import Stages
from cheem_jax.run.method import FrozenFeatures
from cheem_jax.run.session import Session

TASK = small.task("task0", 0)
IMAGES = np.random.default_rng(0).integers(0, 256, (6, 16, 16, 3), np.uint8)
AUGMENTED = dataclasses.replace(small.QUICK, augment=True)


def test_an_image_becomes_the_same_in_any_company_and_another_in_each_place():
    rows = np.array([4, 1, 5])
    together = augmented(IMAGES[rows], rows, 3, 0)
    assert together.shape == (3, 16, 16, 3) and together.dtype == np.uint8
    alone = [augmented(IMAGES[[row]], np.array([row]), 3, 0) for row in rows]
    np.testing.assert_array_equal(together, np.concatenate(alone))
    same = np.repeat(IMAGES[:1], 6, axis=0)
    places = [augmented(same, np.arange(6), *place) for place in ((3, 0), (3, 1), (4, 0))]
    assert len({image.tobytes() for image in np.concatenate(places)}) == 18


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_keeps_the_form_and_only_the_identity_keeps_the_image(monkeypatch, name):
    monkeypatch.setattr("cheem_jax.data.augmentation.SMALLEST_AREA", 1)
    monkeypatch.setattr("cheem_jax.data.augmentation.CHANGES", {name: CHANGES[name]})
    image = np.random.default_rng(2).integers(32, 256, (32, 32, 3), np.uint8)
    result = augment(image, np.random.default_rng(1))
    assert result.shape == image.shape and result.dtype == np.uint8
    assert (name == "identity") == any(
        np.array_equal(result, like) for like in (image, image[:, ::-1])
    )


@pytest.mark.full
def test_only_training_sees_augmented_images():
    learned = {}
    for config in (small.QUICK, AUGMENTED):
        stages = Stages(small.backbone(), config.placement, token=config.token)
        cheem = Cheem(
            stages, config, Keys(0), np.ones((4, 16), np.float32), FrozenFeatures(stages, 16)
        )
        learned[config.augment] = cheem.learn(TASK, Session()), cheem.memory.tasks[0]
        assert bool(cheem.check([TASK])) == config.augment
    (plain, task), (varied, other) = learned[False], learned[True]
    assert plain["similarity"] == varied["similarity"]
    np.testing.assert_array_equal(task.centroids, other.centroids)
    assert plain["supernet_losses"] != varied["supernet_losses"] != []
    assert plain["finetune_losses"] != varied["finetune_losses"] != []


@pytest.mark.full
def test_an_augmented_run_resumes_with_the_same_bits_and_the_setting_is_in_its_identity(tmp_path):
    config = RunConfig(AUGMENTED, "quick", engine=EngineConfig(executor="stages"))
    stream = small.stream(1)
    whole = run_stream(stream, small.pretrained(), config, tmp_path / "whole", quiet())
    for phase, number in (("supernet", 2), ("supernet", 2), ("finetune", 5)):
        with pytest.raises(Stopped):
            progress = Signalling((phase, "task0"), number, signal.SIGINT)
            run_stream(stream, small.pretrained(), config, tmp_path / "run", progress)
    result = run_stream(stream, small.pretrained(), config, tmp_path / "run", quiet())
    assert timeless(result) == timeless(whole)
    held = json.loads((tmp_path / "run" / "config.json").read_text())
    assert held["cheem"]["augment"] is True
    # a run without it is identified as before there was such a setting
    plain = dataclasses.replace(config, method=small.QUICK)
    with pytest.raises(ValueError, match="cheem.augment is true there and false here"):
        run_stream(stream, small.pretrained(), plain, tmp_path / "run", quiet())
