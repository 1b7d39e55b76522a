"""`experiments/search_study.py`: units of a plan, comparisons of recipes, and the numbers on the
page."""

import dataclasses
import io
import itertools
import json
import signal
from pathlib import Path

import numpy as np
import pytest
import search_study
import small
from rich.console import Console

from cheem_jax.cheem.config import OpSettings
from cheem_jax.cli import run as cheem_run
from cheem_jax.core.interruption import Stopped
from cheem_jax.data.task import Stream
from cheem_jax.report.table import METHODS, format_flops
from cheem_jax.run.progress import Progress
from cheem_jax.run.record import read
from studies.searching import units
from studies.searching.report import accuracies_by_task, best_lora, costs, gain
from studies.searching.units import Counted

DOCS = Path(__file__).parents[3] / "docs"
STREAM = small.stream(2)
RECIPES = ["quick", "backward-90", "lora-64"]
RANKS = (2, 1)
PLAN = search_study.Plan(RECIPES, [1e-2, 3e-3], [0], ["task0"])
SCORES = ("shared_head", "closed_form")
"""Scores of the earlier study, whose tables the page contains."""
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
                    for field in ("sampling", "score", "search")
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
    # the anchor, and Skip in each block
    assert backward["images"]["search"] == 5 * 20
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


def test_the_page_has_the_means_of_the_recorded_units_of_backward_elimination():
    units = json.loads((DOCS / "results/search/backward_96.json").read_text())["units"]
    page = (DOCS / "search.md").read_text()
    recipes = ["lora-64", "backward-90", *(f"backward-90/{rank}" for rank in (32, 16, 8)), "plus"]
    tasks = ["gtsrb", "cars49", "dtd10", "eurosat", "flowers12"]

    def mean(task, recipe, field="test_accuracy"):
        chosen = (task, recipe, 3e-3)
        return np.mean(
            [
                unit[field]
                for unit in units
                if (unit["task"], unit["recipe"], unit["rate"]) == chosen
            ]
        )

    def row(title, values, form):
        return " | ".join(["| " + title, *(form.format(100 * value) for value in values)]) + " |"

    table = [[mean(task, recipe) for recipe in recipes] for task in tasks]
    lines = [row(task, values, "{:.1f}") for task, values in zip(tasks, table, strict=True)]
    lines.append(row("mean", np.mean(table, axis=0), "{:.1f}"))
    for title, field in (("parameters added", "params_added"), ("FLOPs", "flops")):
        costs = np.mean(
            [[mean(task, recipe, field) for recipe in recipes] for task in tasks], axis=0
        )
        lines.append(row(f"{title}, % of LoRA-CL's", costs / costs[0], "{:.0f}"))
    assert "\n".join(lines) in page

    text = " ".join(page.split())
    entries = [{**unit, "event": "learned", "position": "first"} for unit in units]
    entries = [entry for entry in entries if entry["task"] in tasks and entry["rate"] == 3e-3]
    rows = accuracies_by_task(entries)
    for other, form in (
        ("lora-64", "{:.1f} points more ({:.1f} to {:.1f}"),
        ("plus", "{:.1f} more than `plus` ({:.1f} to {:.1f})"),
    ):
        numbers = gain(rows, "backward-90/32", other)
        values = (100 * numbers[name] for name in ("value", "low", "high"))
        assert form.format(*values).replace("-", "−") in text
    passes = [
        np.mean([entry["passes"] for entry in entries if entry["recipe"] == recipe])
        for recipe in ("backward-90", "lora-64", "plus")
    ]
    assert (
        "{:,.0f} forward passes per task, LoRA-CL {:,.0f} and `plus` {:,.0f};".format(*passes)
        in text
    )
    skipped = {
        block
        for entry in entries
        if entry["recipe"] == "backward-90"
        for block, op in enumerate(entry["architecture"], 1)
        if op == "skip"
    }
    assert (min(skipped), max(skipped)) == (8, 12)

    def of_seed(recipe, seed, tasks):
        values = [
            entry["test_accuracy"]
            for entry in entries
            if (entry["recipe"], entry["seed"]) == (recipe, seed) and entry["task"] in tasks
        ]
        assert len(values) == len(tasks)
        return 100 * np.mean(values)

    truncated = [of_seed(f"lora-64{rank}", 1, tasks) for rank in ("", "/32", "/16", "/8")]
    form = "it has {:.1f} %, {:.1f} at rank 32, {:.1f} at rank 16 and {:.1f} at rank 8 (seed 1)"
    assert form.format(*truncated) in text
    trained = [of_seed(f"lora-{rank}", 0, tasks[:4]) for rank in (32, 64, 128)]
    form = "LoRA-CL of rank 32, 64 and 128 has {:.1f}, {:.1f} and {:.1f} % (seed 0)"
    assert form.format(*trained) in text
    assert f"omniglot (seed 1: {100 * mean('omniglot', 'backward-90/32'):.1f} %" in text


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


def test_costs_are_those_of_tasks_that_all_recipes_learned():
    more = {"passes": 10, "flops": 4, "params_added": 2, "seconds": {"search": 1.0}}
    entries = [
        learned("a", "quick", 1e-3, 0, 0.5, 0.5, **more),
        learned("b", "quick", 1e-3, 0, 0.5, 0.5, **more),
        learned("a", "plus", 1e-3, 0, 0.5, 0.5, **{**more, "passes": 20}),
        learned("a", "plus", 3e-3, 0, 0.5, 0.5, **{**more, "passes": 90}),
    ]
    numbers = costs(entries)
    assert numbers["quick"]["num"] == 1 and numbers["plus"]["passes"] == 20


@pytest.mark.parametrize("record", ["at_96", "at_224"])
def test_the_tables_of_the_two_searches_on_the_page_are_those_of_the_committed_numbers(record):
    page = (DOCS / "search.md").read_text()
    numbers = json.loads((DOCS / f"results/search/{record}.json").read_text())

    def interval(one, decimals, factor=1.0):
        values = [f"{factor * one[name]:.{decimals}f}" for name in ("value", "low", "high")]
        return "{} ({} to {})".format(*values).replace("-", "−")

    lines = [
        (row["task"], row["position"], *(interval(row[name], 2) for name in SCORES))
        for row in numbers["ranking"]
    ]
    columns = dict.fromkeys(
        (name, rate)
        for row in numbers["found"]
        for name, side in row["recipes"].items()
        for rate in side["test"]
    )
    for row in numbers["found"]:
        tests = [row["recipes"][name]["test"].get(rate) for name, rate in columns]
        tests.append(row["reuse"]["test"][row["reuse"]["best_rate"]])
        seeds = min(len(test) for test in tests[:-1] if test)
        cells = [
            "–" if test is None else f"{100 * np.mean([*test.values()]):.1f}" for test in tests
        ]
        lines.append((row["task"], row["position"], *cells, str(seeds)))
    for one in numbers["gains"]:
        rate = one["rate"] or "each at its best"
        lines.append((one["recipe"], rate, interval(one, 1, 100), str(one["num"])))
    phases = dict.fromkeys(phase for one in numbers["costs"].values() for phase in one["seconds"])
    for name, one in numbers["costs"].items():
        seconds = [one["seconds"].get(phase, 0.0) for phase in phases]
        cells = [f"{value:,.1f}" for value in (*seconds, sum(seconds))]
        cells += [format_flops(one["flops"]), f"{one['params_added']:,.0f}"]
        lines.append((name, f"{one['passes']:,.0f}", *cells))
    missing = [line for line in lines if f"| {' | '.join(line)} |" not in page]
    assert len(lines) > 5 and not missing


def test_the_stream_on_the_page_is_that_of_the_committed_numbers():
    page = (DOCS / "search.md").read_text()
    numbers = json.loads((DOCS / "results/search/stream_at_96.json").read_text())
    sides = [
        numbers[recipe][column] for column in ("given", "agnostic") for recipe in ("quick", "plus")
    ]
    for task in sides[0]:
        assert f"| {task} | {' | '.join(f'{side[task]:.1f}' for side in sides)} |" in page
    means = [
        numbers[recipe][f"mean_{column}"]
        for column in ("given", "agnostic")
        for recipe in ("quick", "plus")
    ]
    assert f"| mean | {' | '.join(f'{mean:.1f}' for mean in means)} |" in page
    for side, mean in zip(sides, means, strict=True):
        assert abs(sum(side.values()) / len(side) - mean) < 0.01


def test_the_runs_with_more_epochs_on_the_page_are_the_committed_ones():
    page = (DOCS / "search.md").read_text()
    numbers = json.loads((DOCS / "results/search/more_epochs.json").read_text())
    by_curve = itertools.groupby(numbers["runs"], lambda run: (run["task"], run["method"]))
    rows = {curve: sorted(runs, key=lambda run: run["passes"]) for curve, runs in by_curve}
    assert len(rows) == 4 and all(
        [run["passes"] for run in runs] == [8, 16, 32] for runs in rows.values()
    )
    for (task, method), runs in rows.items():
        accuracies = " | ".join(f"{run['accuracy_percent']:.1f}" for run in runs)
        learned = [
            sum(op.split(":")[0] in ("adapt", "new") for op in run["architecture"]) for run in runs
        ]
        assert (
            f"| {task} | {METHODS[method]} | {accuracies} | {', '.join(map(str, learned))} | "
            in page
        )


def test_the_searches_for_a_late_task_on_the_page_are_the_committed_ones():
    page = (DOCS / "search.md").read_text()
    numbers = json.loads((DOCS / "results/search/late_task.json").read_text())
    for run in numbers["cars49"]:
        learned = sum(op.split(":")[0] in ("adapt", "new") for op in run["architecture"])
        epochs = f"{run['supernet_epochs']} + {run['finetune_epochs']}"
        cells = (
            epochs,
            run["position"],
            run["seed"],
            run["score"],
            learned,
            f"{run['accuracy_percent']:.1f}",
        )
        assert f"| {run['search']} | {' | '.join(map(str, cells))} |" in page
    streams = {
        (processor, 0): [task["accuracy_given_percent"] for task in tasks]
        for processor, tasks in numbers["streams"].items()
    }
    for seed in (0, 1, 2):
        file = DOCS / f"results/runs/cheem-closed_form/seed-{seed}/results.json"
        streams["NVIDIA H100", seed] = [
            100 * value for value in json.loads(file.read_text())["local_accuracy"][-1]
        ]
    for (processor, seed), tasks in streams.items():
        mean = f"{sum(tasks) / 11:.1f}" if len(tasks) == 11 else "–"
        assert (
            f"| {processor} | {seed} | {sum(tasks[:8]) / 8:.1f} | {tasks[7]:.1f} | {mean} |" in page
        )
    hours = f"took {numbers['hours_of_the_second_stream']:.1f} hours on two cores of an Intel Xeon"
    assert hours in (DOCS.parent / "README.md").read_text()


def test_the_page_compares_interrupted_uniform_sampling_with_hee_at_the_same_task():
    page = (DOCS / "search.md").read_text()
    cut = json.loads((DOCS / "results/cut_off.json").read_text())
    uniform = cut["uniform_after_seven"]
    num = len(uniform["given"])
    hee = []
    for seed in (0, 1, 2):
        run = json.loads(
            (DOCS / f"results/runs/cheem-closed_form/seed-{seed}/results.json").read_text()
        )
        given = 100 * sum(run["local_accuracy"][num - 1][:num]) / num
        added = sum(task["params_added_percent"] for task in run["tasks"][:num]) / num
        hee.append((f"{given:.1f}", f"{added:.1f}"))
    shares = (
        f"{sum(uniform['given']) / num:.1f}",
        f"{sum(uniform['params_added_percent']) / num:.1f}",
    )
    assert (
        f"{shares[0]} % with the task ID given and {shares[1]} % of the backbone per task" in page
    )
    (same, first, second), added = zip(*hee, strict=True)
    others = f"{first} and {second} with {added[1]} and {added[2]} with two others"
    assert f"HEE has {same} and {added[0]} with the same seed, {others}" in page
