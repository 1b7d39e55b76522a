"""`experiments/search_study.py`: how the supernet ranks, and what searches find in it."""

import io
import json
import signal

import mtil
import numpy as np
import pytest
import search_study
import small
from rich.console import Console

from cheem_jax.continual import RunConfig, run_stream
from cheem_jax.core.interruption import Stopped
from cheem_jax.data.task import Stream
from cheem_jax.engine.choice import EngineConfig
from cheem_jax.run.progress import Progress
from cheem_jax.run.record import read
from studies.searching.measures import Points, best_of, correlation, points_of, summary, trainings, without_search
from studies.searching.report import OTHERS, told
from studies.searching.units import Counted

STREAM = small.stream(2)
CONFIG = RunConfig(small.QUICK, "quick", engine=EngineConfig(executor="stages"))
WORKSHOP = {}
"""Compiled networks, of which there is one backbone."""


def quiet():
    return Progress(Console(file=io.StringIO()))


def study(directory, run, stream=STREAM, seeds=(0,)):
    loaded = mtil.Loaded(Stream("small", stream.tasks[1:]), small.pretrained(), None, None)
    search_study.study(directory, run, loaded, ["task1"], 4, list(seeds), quiet(), workshop=WORKSHOP)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of two tasks, and a study of the second one that nobody stopped."""
    run, directory = tmp_path_factory.mktemp("run"), tmp_path_factory.mktemp("study")
    results = run_stream(STREAM, small.pretrained(), CONFIG, run, quiet(), workshop=WORKSHOP)
    study(directory, run)
    return run, results, directory


def entries_of(directory, event):
    drop = ("time", "fingerprint", "seconds")
    return [
        {key: entry[key] for key in entry if key not in drop} for entry in read(directory) if entry["event"] == event
    ]


@pytest.mark.full
def test_supernet_search_and_network_of_the_run_come_again(finished):
    run, results, directory = finished
    (report,) = (
        e["report"]
        for e in read(run)
        if e["event"] == "learned" and e["report"]["name"] == "task1" and e["method"] == "cheem"
    )
    (supernet,) = entries_of(directory, "supernet")
    assert supernet["losses"] == report["supernet_losses"]
    winners = json.loads((directory / "search_study.json").read_text())["winners"]
    (paper,) = winners
    assert paper["variant"] == "paper"
    assert paper["architecture"] == report["architecture"] and paper["flops"] == report["flops"]
    assert paper["supernet_accuracy"] == report["validation_accuracy"]
    assert paper["test_accuracy"] == results["just_trained"][1]
    page = (directory / "search_study.md").read_text()
    assert "the same losses as in the run" in page and "in the order task0, task1" in page
    assert (directory / "search_study.png").stat().st_size > 10_000


@pytest.mark.full
def test_every_architecture_is_retrained_once(finished):
    directory = finished[2]
    searches, retrained = entries_of(directory, "searched"), entries_of(directory, "finetuned")
    (drawn,) = entries_of(directory, "drawn")
    # 6 candidates on 20 images in 2 generations
    assert [search["candidate_images"] for search in searches] == [2 * 6 * 20]
    wanted = {tuple(genome) for genome in (*drawn["genomes"], *(search["genome"] for search in searches))}
    assert len(drawn["genomes"]) == 4 and sorted(wanted) == sorted(tuple(entry["genome"]) for entry in retrained)
    assert all(entry["flops_resumed"] <= entry["flops"] + 10**6 for entry in retrained)


@pytest.mark.full
def test_a_study_stopped_anywhere_goes_on_as_if_nothing_had_happened(finished, tmp_path, monkeypatch):
    run, _, directory = finished
    phase, seen = Counted.phase, [0]

    def stopping(self, name, total, state=None):
        seen[0] += 1
        if seen[0] in (1, 3, 6):  # scoring those sampled, the search, a fine-tuning
            self.stop.signal_number = signal.SIGINT
        return phase(self, name, total, state)

    monkeypatch.setattr(Counted, "phase", stopping)
    for _ in range(3):
        with pytest.raises(Stopped, match="is kept"):
            study(tmp_path, run)
    study(tmp_path, run)
    for event in ("supernet", "drawn", "searched", "finetuned"):
        assert entries_of(tmp_path, event) == entries_of(directory, event)


@pytest.mark.full
def test_a_finished_study_computes_nothing_and_belongs_to_its_run(finished, monkeypatch):
    run, _, directory = finished
    page = (directory / "search_study.md").read_text()
    monkeypatch.delattr(search_study, "TaskUnits")
    study(directory, run)
    assert (directory / "search_study.md").read_text() == page
    with pytest.raises(ValueError, match="num is 4 there and 5 here"):
        loaded = mtil.Loaded(Stream("small", STREAM.tasks[1:]), small.pretrained(), None, None)
        search_study.study(directory, run, loaded, ["task1"], 5, [0], quiet())


@pytest.mark.full
def test_other_pictures_weights_and_tasks_are_refused(finished, tmp_path):
    run = finished[0]
    other = Stream("small", (STREAM.tasks[0], small.task("task1", 7, num_classes=4)))
    with pytest.raises(ValueError, match="other images or labels of task1"):
        study(tmp_path, run, other)
    with pytest.raises(ValueError, match="began with weights"):
        loaded = mtil.Loaded(STREAM, small.pretrained(1), None, None)
        search_study.study(tmp_path, run, loaded, ["task1"], 4, [0], quiet())
    with pytest.raises(ValueError, match="--study names task7; the run's tasks are task0, task1"):
        search_study.main(search_study.SearchStudy(run=run, study="task7"))
    with pytest.raises(ValueError, match="--search-seeds is '0,0'"):
        search_study.main(search_study.SearchStudy(run=run, study="task1", search_seeds="0,0"))
    with pytest.raises(ValueError, match="holds no config.json"):
        search_study.main(search_study.SearchStudy(run=tmp_path / "none", study="task1"))
    with pytest.raises(ValueError, match="--num is 3"):
        search_study.SearchStudy(run=run, study="task1", num=3)


def test_a_rank_correlation_has_an_interval_and_none_where_all_are_equal():
    x = np.array([0.1, 0.2, 0.3, 0.4, 0.5])
    found = correlation((x, x**2), kind="kendall")
    assert found is not None and [found[name] for name in ("value", "low", "high")] == pytest.approx([1, 1, 1])
    assert found["num"] == 5
    # 1 of 10 pairs is the other way round: tau 0.8; squared differences of ranks 1 + 1: rho 1 - 6 * 2 / 120
    swapped = np.array([0.1, 0.3, 0.2, 0.4, 0.5])
    for kind, value in (("kendall", 0.8), ("spearman", 0.9)):
        found = correlation((x, swapped), kind=kind)
        assert found is not None and found["value"] == pytest.approx(value) and found["low"] < value <= found["high"]
    assert correlation((x, np.ones(5)), kind="spearman") is None
    together = correlation((x, swapped), (x, -x), kind="kendall")
    assert together is not None and together["value"] == pytest.approx((0.8 - 1) / 2) and together["num"] == 10
    assert together["low"] < 0 and together["high"] == pytest.approx(0)


def test_points_are_those_drawn_that_were_retrained():
    entries = [
        {"event": "drawn", "task": "a", "genomes": [[0], [1], [2]], "supernet_accuracy": [0.5, 0.6, 0.7]},
        {"event": "finetuned", "task": "a", "genome": [2], "val_accuracy": 0.8, "test_accuracy": 0.9},
        {"event": "finetuned", "task": "a", "genome": [1], "val_accuracy": None, "test_accuracy": None},
        {"event": "finetuned", "task": "b", "genome": [0], "val_accuracy": 0.1, "test_accuracy": 0.1},
    ]
    points = points_of(entries, "a")
    assert [values.tolist() for values in points] == [[0.7], [0.8], [0.9]]


def test_the_best_of_several_by_validation_is_a_mean_over_all_ways_to_take_them():
    points = Points(np.zeros(4), np.array([0.5, 0.9, 0.7, 0.1]), np.array([0.2, 0.6, 0.8, 0.4]))
    assert best_of(points, 1) == pytest.approx(0.5) and best_of(points, 4) == pytest.approx(0.6)
    # of six pairs the second network wins three, the third two, the first one
    assert best_of(points, 2) == pytest.approx((3 * 0.6 + 2 * 0.8 + 0.2) / 6)
    rows = without_search({"a": points, "b": Points(*(values[:3] for values in points))}, 4)  # b lacks one of its four
    assert [(row["drawn"], row["trained"]) for row in rows] == [(d, n) for d in ("HEE", "uniform") for n in (1, 2)]
    assert [row["test_accuracy"]["a"] for row in rows] == pytest.approx([0.4, 0.6, 0.6, 0.8])
    assert all(list(row["test_accuracy"]) == ["a"] for row in rows) and without_search({}, 4) == []
    # as many epochs for the supernet; 90 candidate images are 30 training steps of an image, of 2 epochs of 30
    cost = trainings({"candidate_images": 90}, {"num_train": 30}, {"supernet": 2, "finetune": 2})
    assert cost == pytest.approx(1 + 0.5 + 1)


def test_the_searches_are_summed_up_by_their_means():
    def winner(variant, seed, test_accuracy):
        same = dict.fromkeys(("supernet_accuracy", "candidate_images", "flops", "flops_resumed", "val_accuracy"), 1.0)
        return {"task": "a", "variant": variant, "seed": seed, "test_accuracy": test_accuracy, **same}

    (row,) = summary([winner("paper", 0, 0.5), winner("paper", 1, 0.7), winner("paper", 2, None)])
    assert (row["variant"], row["searches"], row["test_accuracy"]) == ("paper", 3, pytest.approx(0.6))
    # a study of before may have had other searches
    assert summary([winner("warm start", 0, 0.5)]) == []


def test_a_page_with_searches_that_no_longer_exist_says_so():
    found = {"seed": 0, "num": 4, "search_seeds": [0], "order": ["a"], "supernets": {}}
    assert OTHERS in told({**found, "winners": [{"variant": "paper"}, {"variant": "warm start"}]})
    assert OTHERS not in told({**found, "winners": [{"variant": "paper"}]})
