"""Finals: a few of the search's best networks are fine-tuned in rounds."""

import dataclasses
import signal

import chex
import numpy as np
import pytest
import small
from test_continual import Signalling, quiet, timeless

from cheem_jax.cheem.config import CheemConfig
from cheem_jax.cheem.evolution import Scored
from cheem_jax.cheem.finals import FinalsConfig, epochs_of, finalists, rounds
from cheem_jax.cheem.learner import Cheem
from cheem_jax.continual import RunConfig, run_stream
from cheem_jax.core.interruption import Stopped
from cheem_jax.core.keys import Keys
from cheem_jax.engine.choice import EngineConfig
from cheem_jax.engine.stages import Stages
from cheem_jax.run.method import FrozenFeatures, Undisturbed
from cheem_jax.run.record import read

TASK = small.task("task0", 0)


def config_of(**finals) -> CheemConfig:
    return dataclasses.replace(small.QUICK, finals=FinalsConfig(**finals))


def finished(config, **changes):
    """The network that is kept of one task, and how far learning was."""
    stages = Stages(small.backbone(), config.placement, token=config.token)
    cheem = Cheem(stages, dataclasses.replace(config, **changes), Keys(0), None, FrozenFeatures(stages, 16))
    learning = cheem.begin(TASK, Undisturbed())
    tables = cheem.tables(learning, cheem.similarity(learning))
    trained = cheem.train_supernet(learning, tables)
    cheem.search(learning, tables, trained)
    return cheem, learning, trained, cheem.final(learning, trained)


def test_half_goes_on_after_every_round_and_all_are_over_by_half_of_the_epochs():
    assert rounds(1, 8) == []
    assert rounds(2, 8) == [(4, 1)]
    assert rounds(4, 8) == [(2, 2), (4, 1)]
    assert rounds(5, 20) == [(3, 3), (6, 2), (10, 1)]
    assert rounds(4, 1) == [(1, 2), (1, 1)]
    assert epochs_of(rounds(4, 8), 4, 8) == 4 * 2 + 2 * 2 + 4
    assert epochs_of(rounds(1, 8), 1, 8) == 8


def test_finalists_are_the_first_in_rank_that_differ_at_every_rate():
    genomes = np.array([[0, 0, 0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0, 0, 1], [0, 0, 0, 0, 0, 0, 1, 1], [2] * 8])
    scored = Scored(genomes, np.array([9.0, 8.0, 7.0, np.nan]), np.ones(4))
    found = finalists(scored, 10, 0.0, config=FinalsConfig(3, (1e-3, 3e-3)), rate=1e-2)
    assert [(one.codes.tolist(), one.rate) for one in found] == [
        (genomes[0].tolist(), 1e-3), (genomes[0].tolist(), 3e-3), (genomes[2].tolist(), 1e-3),
        (genomes[2].tolist(), 3e-3),
    ]  # fmt: skip
    (alone,) = finalists(scored, 10, 0.0, config=FinalsConfig(), rate=1e-2)
    assert alone.rate == 1e-2 and alone.codes.tolist() == genomes[0].tolist()


@pytest.mark.parametrize("wrong", [{"networks": 0}, {"rates": (1e-3, 0.0)}])
def test_settings_without_sense_are_refused(wrong):
    with pytest.raises(ValueError, match="finals"):
        FinalsConfig(**wrong)


def test_the_winner_leads_on_validation_images_and_is_what_it_becomes_alone():
    cheem, learning, trained, found = finished(config_of(networks=2, rates=(1e-2, 1e-4)))
    right = learning.underway.finals
    leader = max(right.values(), key=lambda rounds: (len(rounds), rounds[-1]))
    assert right[found.name] == leader and sorted(map(len, right.values())) == [1, 1, 2, 2]
    rate = dataclasses.replace(cheem.config.finetune, learning_rate=found.finalist.rate)
    cheem.config = dataclasses.replace(cheem.config, finetune=rate)
    again = cheem.finetune(cheem.begin(TASK, Undisturbed()), trained, found.finalist.codes)
    chex.assert_trees_all_equal(found.fit.state, again.state)
    assert found.fit.progress.losses == again.progress.losses


def test_a_finalist_that_fails_loses_and_only_where_all_fail_there_is_no_network():
    _, learning, _, found = finished(config_of(rates=(3e38, 1e-2)))
    assert found.finalist.rate == 1e-2 and learning.underway.finals["finalist_0"] == [-1]
    with pytest.raises(FloatingPointError, match="every finalist"):
        finished(config_of(rates=(3e38, 2e38)))


def test_the_room_on_the_disk_is_for_every_finalist():
    stages = Stages(small.backbone(), "mlp_down")
    usual, many = (
        Cheem(stages, config_of(networks=n, rates=(1e-2, 1e-3)), Keys(0), None, FrozenFeatures(stages, 16))
        for n in (1, 20)
    )
    assert many.bytes_needed(TASK) > 5 * usual.bytes_needed(TASK)


STOPS = [
    pytest.param([("finetune", 2), ("finetune", 3)], id="in the first round"),
    pytest.param([("finetune", 13), ("finetune", 5)], id="in later rounds", marks=pytest.mark.full),
    pytest.param([("finetune", 20), ("means", 1)], id="winner", marks=pytest.mark.full),
]


@pytest.mark.parametrize("places", STOPS)
def test_going_on_is_exact(tmp_path, places):
    config = RunConfig(config_of(networks=2, rates=(1e-2, 3e-3)), "quick", engine=EngineConfig(executor="stages"))
    stream = small.stream(1)
    whole = run_stream(stream, small.pretrained(), config, tmp_path / "whole", quiet())
    search = next(entry["report"]["search"] for entry in read(tmp_path / "whole") if entry["event"] == "learned")
    assert search["learning_rate"] in (1e-2, 3e-3) and len(search["finals"]) == 4
    for phase, number in places:
        with pytest.raises(Stopped):
            progress = Signalling((phase, "task0"), number, signal.SIGINT)
            run_stream(stream, small.pretrained(), config, tmp_path / "run", progress)
    found = run_stream(stream, small.pretrained(), config, tmp_path / "run", quiet())
    assert timeless(found) == timeless(whole)
