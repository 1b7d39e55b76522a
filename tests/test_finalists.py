"""Finalists: a few of the search's best networks are fine-tuned for a while, and one of them to the end."""

import dataclasses
import signal

import chex
import numpy as np
import pytest
import small
from test_continual import Signalling, quiet, timeless

from cheem_jax.cheem.config import CheemConfig
from cheem_jax.cheem.evolution import Scored, leaders
from cheem_jax.cheem.learner import Cheem
from cheem_jax.continual import RunConfig, run_stream
from cheem_jax.core.interruption import Stopped
from cheem_jax.core.keys import Keys
from cheem_jax.engine.choice import EngineConfig
from cheem_jax.engine.stages import Stages
from cheem_jax.run.method import FrozenFeatures, Undisturbed
from cheem_jax.run.record import read

TASK = small.task("task0", 0)


def learning_of(num, **finetune):
    """A learner whose search of one task is over, how far it is, and its supernet."""
    rates = dataclasses.replace(small.QUICK.finetune, **finetune)
    config = dataclasses.replace(small.QUICK, finalists=num, finetune=rates)
    stages = Stages(small.backbone(), config.placement, token=config.token)
    cheem = Cheem(stages, config, Keys(0), None, FrozenFeatures(stages, 16))
    learning = cheem.begin(TASK, Undisturbed())
    tables = cheem.tables(learning, cheem.similarity(learning))
    trained = cheem.train_supernet(learning, tables)
    cheem.search(learning, tables, trained)
    return cheem, learning, trained


def test_finalists_are_the_first_in_rank_that_differ():
    genomes = np.array([[0, 0, 0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0, 0, 1], [0, 0, 0, 0, 0, 0, 1, 1], [2] * 8])
    scored = Scored(genomes, np.array([9.0, 8.0, 7.0, np.nan]), np.ones(4))
    found = [[codes.tolist() for codes in leaders(scored, 10, 0.0, num=num)] for num in (1, 2, 3)]
    assert found == [[[0] * 8], [[0] * 8, [0] * 6 + [1, 1]], [[0] * 8, [0] * 6 + [1, 1]]]
    with pytest.raises(ValueError, match="no architecture with a score"):
        leaders(Scored(genomes, np.full(4, np.nan), np.ones(4)), 10, 0.0, num=2)


def test_less_than_one_finalist_is_refused():
    with pytest.raises(ValueError, match="finalists is 0; expected at least 1"):
        CheemConfig(finalists=0)


@pytest.mark.full
def test_the_winner_leads_on_validation_images_and_is_what_it_becomes_alone():
    cheem, learning, trained = learning_of(3)
    found = cheem.final(learning, trained)
    right = learning.underway.finals
    assert found.name == f"finalist_{np.argmax(right)}" and len(right) == 3
    epochs = [len(learning.underway.fits[f"finalist_{i}"].losses) for i in range(3)]
    assert sorted(epochs) == [1, 1, 4] and epochs[np.argmax(right)] == 4
    again = cheem.finetune(cheem.begin(TASK, Undisturbed()), trained, [found.codes]).fit
    chex.assert_trees_all_equal(found.fit.state, again.state)
    assert found.fit.progress.losses == again.progress.losses


@pytest.mark.full
def test_a_finalist_that_fails_loses_and_only_where_all_fail_there_is_no_network(monkeypatch):
    cheem, learning, trained = learning_of(2)
    scored = learning.underway.searched.scored
    first = leaders(scored, len(TASK.val.labels), cheem.config.search.tolerance, num=1)[0].tolist()
    right = Cheem._right

    def failing(self, learning, fitting, codes):
        if codes.tolist() == first:
            raise FloatingPointError("too large a step")
        return right(self, learning, fitting, codes)

    with monkeypatch.context() as patch:
        patch.setattr(Cheem, "_right", failing)
        found = cheem.final(learning, trained)
    assert found.name == "finalist_1" and learning.underway.finals[0] == -1
    with pytest.raises(FloatingPointError, match="every finalist"):
        cheem, learning, trained = learning_of(2, learning_rate=3e38)
        cheem.final(learning, trained)


def test_the_room_on_the_disk_is_for_two_finalists():
    stages = Stages(small.backbone(), "mlp_down")
    one, two, many = (
        Cheem(stages, dataclasses.replace(small.QUICK, finalists=n), Keys(0), None, FrozenFeatures(stages, 16))
        .bytes_needed(TASK) for n in (1, 2, 20)
    )  # fmt: skip
    assert one < two == many


STOPS = [
    pytest.param([("finetune", 2), ("finetune", 3)], id="among the finalists"),
    pytest.param([("finetune", 7), ("finetune", 5)], id="later", marks=pytest.mark.full),
    pytest.param([("finetune", 14), ("means", 1)], id="winner", marks=pytest.mark.full),
]


@pytest.mark.full
@pytest.mark.parametrize("places", STOPS)
def test_going_on_is_exact(tmp_path, places):
    settings = dataclasses.replace(small.QUICK, finalists=3)
    config = RunConfig(settings, "quick", engine=EngineConfig(executor="stages"))
    stream = small.stream(1)
    whole = run_stream(stream, small.pretrained(), config, tmp_path / "whole", quiet())
    search = next(entry["report"]["search"] for entry in read(tmp_path / "whole") if entry["event"] == "learned")
    assert len(search["finals"]) == 3
    for phase, number in places:
        with pytest.raises(Stopped):
            progress = Signalling((phase, "task0"), number, signal.SIGINT)
            run_stream(stream, small.pretrained(), config, tmp_path / "run", progress)
    found = run_stream(stream, small.pretrained(), config, tmp_path / "run", quiet())
    assert timeless(found) == timeless(whole)
