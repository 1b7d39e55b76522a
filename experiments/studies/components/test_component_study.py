"""`experiments/component_study.py`: eleven components of a block, each fine-tuned alone."""

import dataclasses
import json
import signal
import sys

import component_study
import jax
import numpy as np
import pytest
import small

from cheem_jax.backbone.params import init_params
from cheem_jax.backbone.weights import Pretrained
from cheem_jax.baselines.full_finetune import FullFinetuneConfig
from cheem_jax.cli import run as cheem_run
from cheem_jax.core import metrics
from cheem_jax.core.interruption import Stop, Stopped
from cheem_jax.core.keys import Keys
from cheem_jax.core.settings import no_progress
from cheem_jax.engine.choice import EngineConfig
from cheem_jax.run.progress import Progress
from cheem_jax.run.record import Record, read
from cheem_jax.run_config import make_networks
from studies.components.learning import (
    COMPONENTS,
    Learner,
    Network,
    Training,
    Units,
    chosen_rate,
    components_of,
    extract,
    insert,
    num_params,
    pieces_of,
)

BY_NAME = {component.name: component for component in COMPONENTS}
TRAINING = Training(2, (1e-9, 1e-2), batch_size=16, head_rate=1e-6, max_train=32)
STREAM = small.stream(3)
VIT = dataclasses.replace(small.CONFIG, depth=2)


def pretrained() -> Pretrained:
    # ten times as large as initial weights, so that blocks matter
    params = {
        name: 10 * v if name.endswith("kernel") else v
        for name, v in init_params(VIT, jax.random.key(0)).items()
    }
    return Pretrained(VIT, params, "random", "seed 0", {})


@pytest.fixture(scope="module")
def executor():
    config = FullFinetuneConfig(batch_size=16)
    return make_networks(pretrained(), None, config, EngineConfig(executor="stages")).executor


def learn(directory, names):
    loaded = cheem_run.Loaded(STREAM, pretrained(), None, None)
    engine = EngineConfig(executor="stages")
    return component_study.learn(
        directory, loaded, TRAINING, components_of(names), [0], Progress(), engine=engine
    )


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A study of two components that was not interrupted, and its rows."""
    directory = tmp_path_factory.mktemp("finished")
    return directory, learn(directory, "ln2,projection")


def test_the_components_are_those_of_the_paper_with_the_sizes_of_their_layers(executor):
    d = 16
    f = 64
    blocks = 2
    assert num_params(executor) == {
        "ln1_ln2": blocks * 4 * d,
        "ffn": blocks * (2 * d * f + f + d),
        "mlp_down": blocks * (d * f + d),
        "ln2": blocks * 2 * d,
        "mhsa_ln1": blocks * (4 * d * d + 4 * d + 2 * d),
        "ln1": blocks * 2 * d,
        "query": blocks * (d * d + d),
        "key": blocks * (d * d + d),
        "query_key": blocks * 2 * (d * d + d),
        "value": blocks * (d * d + d),
        "projection": blocks * (d * d + d),
    }
    assert [component.index for component in COMPONENTS] == list(range(1, 12))


@pytest.mark.parametrize("name", BY_NAME)
def test_inserting_a_component_changes_only_its_parameters(executor, name):
    leaves = [np.asarray(leaf) for leaf in executor.leaves]
    pieces = pieces_of(executor, BY_NAME[name])
    parts = [part + 1 for part in extract(leaves, pieces)]
    changed = insert(leaves, pieces, parts)
    differing = sum(int((a != b).sum()) for a, b in zip(leaves, changed, strict=True))
    assert differing == num_params(executor)[name]
    for a, b in zip(extract(changed, pieces), parts, strict=True):
        np.testing.assert_array_equal(a, b)


def test_the_thirds_of_the_fused_weight_are_query_key_and_value(executor):
    """Attention is uniform without queries, for any keys, and without keys, for any queries."""
    images = STREAM.tasks[0].test.images[:4]
    features = executor.jit(lambda leaves, images: executor.merge_vit(leaves)(images))
    rng = np.random.default_rng(0)

    def with_parts(leaves, name, *, scale):
        pieces = pieces_of(executor, BY_NAME[name])
        parts = [
            scale * rng.normal(size=part.shape).astype(np.float32)
            for part in extract(leaves, pieces)
        ]
        return insert(leaves, pieces, parts)

    leaves = [np.asarray(leaf) for leaf in executor.leaves]
    for absent, silent in (("query", "key"), ("key", "query")):
        even = with_parts(leaves, absent, scale=0.0)
        reference = np.asarray(features(even, images))
        np.testing.assert_allclose(
            features(with_parts(even, silent, scale=1.0), images), reference, atol=1e-4
        )
        assert (
            np.abs(
                np.asarray(features(with_parts(even, "value", scale=1.0), images)) - reference
            ).max()
            > 0.1
        )
        assert np.abs(np.asarray(features(leaves, images)) - reference).max() > 1e-3


def fit(learner, index, rate):
    task = STREAM.tasks[index]
    fitting = learner.begin(Keys(index), index, task, learner.pretrained)
    fitting = learner.fit(fitting, Keys(index), index, task, TRAINING, rate, no_progress)
    leaves = learner.leaves(fitting.learned.parts)
    learner.network.accuracy(leaves, fitting.learned.head, task.test, len(task.classes))
    return leaves


@pytest.mark.full
def test_training_changes_only_the_component_and_compiles_one_step(executor, compilations):
    learner = Learner(Network(executor, 16), BY_NAME["key"])
    before = [np.array(leaf) for leaf in executor.leaves]
    after = [np.asarray(leaf) for leaf in fit(learner, 0, 1e-2)]
    inside = [np.zeros(leaf.shape, bool) for leaf in before]
    for piece in learner.pieces:
        inside[piece.leaf][..., piece.begin : piece.end] = True
    # biases of keys shift all logits of a softmax equally, so their gradient is only rounding noise
    changed = [
        (a[inside_leaf] != b[inside_leaf]).mean()
        for a, b, inside_leaf in zip(before, after, inside, strict=True)
        if inside_leaf.ndim == 2 and inside_leaf.any()
    ]
    assert len(changed) == VIT.depth and min(changed) > 0.9
    for a, b, c, inside_leaf in zip(before, after, executor.leaves, inside, strict=True):
        assert (
            a[~inside_leaf].tobytes() == b[~inside_leaf].tobytes()
            and a.tobytes() == np.asarray(c).tobytes()
        )
    with compilations() as programs:
        # a different rate, and 4 classes, whose head is padded to the same size as that of 3
        # classes
        fit(learner, 1, 1e-3)
    assert programs.count == 0


@pytest.mark.full
def test_the_study_sweeps_the_rate_and_a_sequence_starts_like_transfer(finished):
    directory, rows = finished
    assert [row["name"] for row in rows] == ["ln2", "projection"]
    for row in rows:
        assert row["rate"] == 1e-2 and row["validation"]["0.01"] > row["validation"]["1e-09"]
        matrix = metrics.matrix_from_json(row["sequential_accuracy"][0])
        assert matrix[0, 0] == row["accuracy"][0][0]
        forgetting = metrics.average_forgetting(matrix)
        assert forgetting is not None and row["average_forgetting"]["mean"] == 100 * forgetting
        assert row["average_accuracy"]["mean"] == pytest.approx(100 * np.mean(row["accuracy"]))
    assert rows[1]["paper"] == {"average_accuracy": 85.11, "average_forgetting": 30.5}
    assert rows[1]["ranks"]["average_forgetting"]["paper"] == 2
    saved = json.loads((directory / "component_study.json").read_text())
    assert saved["components"] == json.loads(json.dumps(rows))
    lines = (directory / "component_study.csv").read_text().splitlines()
    assert len(lines) == 3 and lines[2].startswith('"11","Projection","544",')


def units_of(directory):
    """Return the record's entries of the trained units of ln2."""
    drop = ("time", "fingerprint")
    entries = [{key: entry[key] for key in entry if key not in drop} for entry in read(directory)]
    return [entry for entry in entries if entry.get("component") == "ln2"]


@pytest.mark.full
def test_an_interrupted_study_resumes_with_identical_units(finished, tmp_path, monkeypatch):
    steps = [0]
    stopping = list[Stop]()
    fit = Learner.fit
    init = Units.__init__
    # every unit has 4 steps; the stops are in the last unit of the sweep and in the last task of
    # the sequence
    stops = {23, 35}

    def counting(self, *arguments):
        *arguments, advance, keep = arguments

        def counted(num_images, note="", /):
            steps[0] += 1
            if steps[0] in stops:
                stopping[-1].signal_number = signal.SIGINT
            advance(num_images, note)

        return fit(self, *arguments, counted, keep)

    def watched(self, *arguments):
        init(self, *arguments)
        stopping.append(self.session.stop)

    monkeypatch.setattr(Learner, "fit", counting)
    monkeypatch.setattr(Units, "__init__", watched)
    for _ in stops:
        with pytest.raises(Stopped, match="is saved"):
            learn(tmp_path, "ln2")
    learn(tmp_path, "ln2")
    assert units_of(tmp_path) == units_of(finished[0]) and steps[0] == 36

    # without its checkpoint a sequence starts again
    Record(tmp_path).keep(lambda entry: entry["event"] != "sequential" or entry["index"] < 2)
    learn(tmp_path, "ln2")
    assert units_of(tmp_path) == units_of(finished[0]) and steps[0] == 48


@pytest.mark.full
def test_a_finished_study_trains_nothing_and_refuses_other_settings(finished, monkeypatch):
    directory, rows = finished
    monkeypatch.delattr(Learner, "fit")
    assert learn(directory, "ln2,projection") == rows
    monkeypatch.setattr(sys.modules[__name__], "TRAINING", dataclasses.replace(TRAINING, epochs=3))
    with pytest.raises(ValueError, match="training.epochs is 2 there and 3 here"):
        learn(directory, "ln2,projection")


def test_the_chosen_rate_has_the_best_mean_over_tasks_and_seeds():
    accuracy = {
        (0, 1e-3): (0.9, 0.1),
        (0, 1e-2): (0.5, 0.6),
        (1, 1e-3): (0.8, 0.1),
        (1, 1e-2): (0.5, 0.5),
    }
    entries = [
        {
            "event": "transfer",
            "component": "ln1",
            "seed": seed,
            "rate": rate,
            "index": index,
            "val_accuracy": value,
        }
        for (seed, rate), values in accuracy.items()
        for index, value in enumerate(values)
    ]
    # the means are 0.475 and 0.525; the first task alone would choose the other rate
    assert chosen_rate(entries, BY_NAME["ln1"], (1e-3, 1e-2), (0, 1), 2) == 1e-2
    assert chosen_rate(entries[:-1], BY_NAME["ln1"], (1e-3, 1e-2), (0, 1), 2) is None
    assert chosen_rate(entries[:-1], BY_NAME["ln1"], (1e-3, 1e-2), (0,), 2) == 1e-2


def test_forgetting_of_seeds_has_a_mean_and_a_standard_deviation():
    sequences = {0: [[0.9], [0.7, 0.8]], 1: [[0.8], [0.8, 0.8]]}
    entries = [
        {
            "event": "sequential",
            "component": "ln1",
            "seed": seed,
            "rate": 0.1,
            "index": index,
            "accuracy": row,
        }
        for seed, rows in sequences.items()
        for index, row in enumerate(rows)
    ] + [
        {
            "event": "transfer",
            "component": "ln1",
            "seed": seed,
            "rate": 0.1,
            "index": index,
            "val_accuracy": 0.5,
            "test_accuracy": 0.6 + 0.2 * index,
        }
        for seed in sequences
        for index in range(2)
    ]
    setting = {
        "training": {"rates": [0.1]},
        "seeds": [0, 1],
        "tasks": ["a", "b"],
        "backbone_params": 400,
    }
    (row,) = component_study.rows_of(entries, [BY_NAME["ln1"]], {"ln1": 8}, setting)
    assert row["average_forgetting"]["mean"] == pytest.approx(10) and row["params_percent"] == 2
    assert row["average_forgetting"]["std"] == pytest.approx(20 / np.sqrt(2))
    assert row["average_accuracy"] == {"mean": 70, "std": 0, "runs": [70, 70]}


def test_components_have_names_or_indices_and_unknown_ones_are_refused():
    assert [component.index for component in components_of("projection, 3,mlp_down")] == [3, 11]
    assert components_of("all") == list(COMPONENTS)
    with pytest.raises(
        ValueError, match="--components names 'projektion'; expected some of: .*projection, 11"
    ):
        components_of("projektion")
    with pytest.raises(ValueError, match="--components names '12'"):
        components_of("1,12")
