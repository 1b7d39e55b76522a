"""`experiments/search_study.py`: units of a plan, and comparisons of recipes."""

import dataclasses
import io
import json
import signal

import pytest
import search_study
import small
from rich.console import Console

from cheem_jax.cheem.config import OpSettings
from cheem_jax.cli import run as cheem_run
from cheem_jax.core.interruption import Stopped
from cheem_jax.data.task import Stream
from cheem_jax.run.progress import Progress
from cheem_jax.run.record import read
from studies.searching import units
from studies.searching.report import accuracies_by_task, best_lora, costs, gain, latest
from studies.searching.units import Counted

STREAM = small.stream(2)
RECIPES = ["quick", "backward-90", "lora-64"]
RANKS = (2, 1)
PLAN = search_study.Plan(RECIPES, [1e-2, 3e-3], [0], ["task0"])
WORKSHOP = {}
"""Compiled networks of the backbone, which all tests share."""


@pytest.fixture(scope="module", autouse=True)
def recipes():
    """Recipes that take seconds."""
    with pytest.MonkeyPatch.context() as patch:
        for name, recipe in units.RECIPES.items():
            small_config = dataclasses.replace(
                small.QUICK,
                **{
                    field: getattr(recipe.config, field)
                    for field in ("sampling", "search")
                    if name != "quick"
                },
                ops=OpSettings(rank=4),
            )
            ranks = RANKS if recipe.ranks else ()
            patch.setitem(units.RECIPES, name, recipe._replace(config=small_config, ranks=ranks))
        yield


def quiet():
    return Progress(Console(file=io.StringIO()))


def study(directory, plan=PLAN, stream=STREAM):
    search_study.study(
        directory,
        cheem_run.Loaded(stream, small.pretrained(), None, None),
        plan,
        quiet(),
        workshop=WORKSHOP,
    )


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A study of the second task, as the first and behind the other, that nobody stopped."""
    directory = tmp_path_factory.mktemp("study")
    study(directory)
    return directory


def entries_of(directory, *events):
    drop = ("time", "fingerprint", "seconds")
    return [
        {key: entry[key] for key in entry if key not in drop}
        for entry in read(directory)
        if entry["event"] in events
    ]


@pytest.mark.full
def test_every_unit_is_computed_once_first_and_behind(finished):
    positions = {entry["position"] for entry in entries_of(finished, "learned")}
    assert positions == {"first", "behind task0"}
    learned = entries_of(finished, "learned")
    names = ["quick"]  # followed by the copies of the other networks
    names += [f"{name}{rank}" for name in RECIPES[1:] for rank in ("/1", "/2", "")]
    wanted = [(name, rate) for rate in (1e-2, 3e-3) for name in names]
    behind = [unit for unit in wanted if not unit[0].startswith("lora-64")]  # needs no past
    assert [(entry["recipe"], entry["rate"]) for entry in learned] == wanted + behind
    assert len(entries_of(finished, "reuse")) == 4
    one = learned[0]  # 3 and 4 epochs of 40 images; 12 candidates on 20 images, and similarity
    assert one["images"]["supernet"] == 3 * 40 and one["images"]["finetune"] == 4 * 40
    assert one["images"]["search"] == 12 * 20
    assert one["passes"] == 3 * (3 + 4) * 40 + sum(one["images"].values()) - (3 + 4) * 40
    numbers = json.loads((finished / "search_study.json").read_text())
    assert set(numbers["costs"]) == set(names)
    assert {one["over"] for one in numbers["gains"]} == {"lora-64", "quick"}
    assert "| recipe | minus | points | tasks |" in (finished / "search_study.md").read_text()
    assert (finished / "search_study.png").stat().st_size > 10_000


@pytest.mark.full
def test_copies_of_a_network_have_fewer_parameters_and_the_same_training(finished):
    by_recipe = {entry["recipe"]: entry for entry in entries_of(finished, "learned")[:7]}
    lora, backward = by_recipe["lora-64"], by_recipe["backward-90"]
    assert lora["architecture"] == ["adapt:0"] * 4 and "search" not in lora["images"]
    assert sorted(backward["architecture"]) == ["adapt:0"] * 3 + ["skip"]
    # the anchor, and Skip in each of the last two blocks
    assert backward["images"]["search"] == 3 * 20
    assert 0.75 * lora["params_added"] == backward["params_added"]
    for name, whole in (("lora-64", lora), ("backward-90", backward)):
        for rank in RANKS:
            copy = by_recipe[f"{name}/{rank}"]
            assert copy["params_added"] == whole["params_added"] * rank / 4
            assert copy["flops"] < whole["flops"]
            for field in ("architecture", "images", "passes"):
                assert copy[field] == whole[field]


@pytest.mark.full
def test_an_interrupted_study_resumes_with_identical_numbers(finished, tmp_path, monkeypatch):
    phase = Counted.phase
    phases = [0]

    def stopping(self, name, total=0, state=None, **more):
        phases[0] += 1
        if phases[0] in (2, 9, 30):
            self.stop.signal_number = signal.SIGINT
        return phase(self, name, total, state, **more)

    monkeypatch.setattr(Counted, "phase", stopping)
    for _ in range(3):
        with pytest.raises(Stopped, match="is saved"):
            study(tmp_path)
    study(tmp_path)
    events = ("learned", "reuse")
    assert entries_of(tmp_path, *events) == entries_of(finished, *events)


@pytest.mark.full
def test_a_finished_study_computes_nothing_and_other_images_are_another_task(
    finished, tmp_path, monkeypatch
):
    num = len(read(finished))
    study(finished)
    assert [entry["event"] for entry in read(finished)[num:]] == ["continued"]
    other = Stream("small", (STREAM.tasks[0], small.task("task1", 7, num_classes=4)))
    monkeypatch.setattr(units.TaskUnits, "_begin", lambda *_: pytest.fail("begun"))
    with pytest.raises(pytest.fail.Exception, match="begun"):
        study(finished, stream=other)


def test_wrong_settings_are_named():
    with pytest.raises(
        ValueError, match="--behind names task7; the stream's tasks are task0, task1"
    ):
        study("nowhere", PLAN._replace(behind=["task7"]))
    with pytest.raises(ValueError, match="--rates is '0,1'"):
        search_study.rates_of("0,1")
    with pytest.raises(ValueError, match="--recipes names 'slow'"):
        search_study.main(search_study.SearchStudy(recipes="slow"))


def learned(task, recipe, rate, seed, val, test, **further):
    return {
        "event": "learned",
        "task": task,
        "recipe": recipe,
        "rate": rate,
        "seed": seed,
        "val_accuracy": val,
        "test_accuracy": test,
        "genome": [0],
        "position": "first",
        **further,
    }


def test_only_units_of_the_latest_images_are_in_the_tables():
    def unit(images: str, seed: int, accuracy: float) -> dict:
        place = {"event": "learned", "task": "pets", "position": "first", "recipe": "quick"}
        return {
            **place,
            "rate": 1e-3,
            "seed": seed,
            "data_sha256": images,
            "test_accuracy": accuracy,
        }

    entries = [unit("old", 0, 0.1), unit("old", 1, 0.2), unit("new", 0, 0.3), unit("new", 0, 0.4)]
    assert latest([*entries, {"event": "continued"}]) == entries[3:]


def test_each_side_is_compared_at_its_best_rate_on_validation_images():
    entries = [
        learned("a", "quick", 1e-3, 0, 0.5, 0.9),
        learned("a", "quick", 3e-3, 0, 0.6, 0.7),
        learned("a", "plus", 1e-3, 0, 0.9, 0.6),
        learned("a", "plus", 3e-3, 0, 0.95, 0.8),
        learned("b", "quick", 1e-3, 0, 0.5, None),
        learned("b", "plus", 1e-3, 0, 0.5, 0.5),
    ]
    rows = accuracies_by_task(entries)
    sides = rows[0]["recipes"]
    assert sides["quick"]["best_rate"] == "0.003" and sides["plus"]["best_rate"] == "0.003"
    gained = gain(rows, "plus", "quick")
    # a failed training counts as 0
    assert gained is not None and gained["value"] == pytest.approx((0.1 + 0.5) / 2)
    # 12.7 is the quantile of Student's t with one degree of freedom
    assert gained["num"] == 2 and gained["low"] == pytest.approx(0.3 - 12.706 * 0.2, abs=1e-3)
    assert gain(rows, "plus", "anchor") is None


def test_lora_cl_is_compared_at_its_best_rank_in_every_position():
    behind = {"position": "behind z"}
    entries = [
        learned("a", "lora-8", 3e-3, 0, 0.5, 0.9),
        learned("a", "lora-16", 3e-3, 0, 0.7, 0.6),
        learned("b", "lora-8", 3e-3, 0, 0.5, 0.9),
        learned("b", "lora-16", 3e-3, 0, 0.4, 0.5),
        learned("a", "plus", 3e-3, 0, 0.5, 0.8),
        learned("a", "plus", 3e-3, 0, 0.5, 0.7, **behind),
        learned("b", "lora-64", 3e-3, 0, 0.9, 0.9),  # not on all tasks
    ]
    rows = accuracies_by_task(entries)
    assert best_lora(rows) == "lora-16"
    gained = gain(rows, "plus", "lora-16")
    # both positions of one task; an interval needs two tasks
    assert gained is not None and gained["num"] == 1 and gained["low"] is None
    assert gained["value"] == pytest.approx((0.2 + 0.1) / 2)


def test_costs_are_means_over_seeds_of_tasks_that_all_recipes_learned():
    more = {"passes": 10, "flops": 4, "params_added": 2, "seconds": {"search": 1.0}}
    entries = [
        learned("a", "quick", 1e-3, 0, 0.5, 0.5, **more),
        learned("a", "quick", 1e-3, 1, 0.5, 0.7, **more),
        learned("b", "quick", 1e-3, 0, 0.5, 0.5, **more),
        learned("a", "plus", 1e-3, 0, 0.5, 0.5, **{**more, "passes": 20}),
        learned("a", "plus", 3e-3, 0, 0.5, 0.5, **{**more, "passes": 90}),
    ]
    numbers = costs(entries)
    assert numbers["quick"]["num"] == 1 and numbers["plus"]["passes"] == 20
    assert numbers["quick"]["test_accuracy"] == pytest.approx(0.6)
