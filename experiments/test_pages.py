"""Pages of the docs: their tables and the numbers in their text are those of the records."""

import functools
import json
import operator
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import small_sets
from jit_profile import profile_grid
from pages import begin, fill, write_tables
from studies.paper.claims import largest_gap
from studies.paper.results import tables_of
from studies.routers.page import compare_streams
from studies.searching.page import WINNER
from studies.searching.page import read as read_units
from studies.searching.page import tables as search_tables

from cheem_jax.baselines.catalogue import NAMES
from cheem_jax.cheem.frozen_head import HeadComparison

DOCS = Path(__file__).parents[1] / "docs"
TABLE = re.compile(r"<!-- table (\S+) -->\n\n(.*?)\n\n<!-- end -->", re.DOTALL)
NUMBER = re.compile(r"\d[\d,]*\.\d+|\d+,\d{3}")
"""Computed numbers in a text; small whole numbers are ignored, because they also occur in names and
dates."""


def read(name: str):
    return json.loads((DOCS / name).read_text())


UNSEEN = ("deit_tiny_96", "deit_tiny_224", "vit_micro_32")
"""Backbones and image sizes of the study of routers on image sets that none was tuned on."""
PAGES = {
    "results.md": lambda: tables_of(DOCS / "results/runs"),
    "search.md": lambda: search_tables(read_units(DOCS / "results/search/units.json")),
    "concepts/routing.md": lambda: {
        "unseen": compare_streams(
            [read(f"results/routers_{name}.json") for name in UNSEEN]
        ).to_markdown()
    },
    "guides/own-data.md": lambda: {
        name: small_sets.grid_of(read(f"results/{name}.json")["units"]).to_markdown()
        for name in ("small_sets", "small_sets_micro")
    },
    "profile/jit_profile.md": lambda: {
        "executors": profile_grid(read("profile/jit_profile.json")).to_markdown()
    },
}


def test_the_array_of_all_methods_has_a_job_per_method_and_seed():
    text = (DOCS / "scale.md").read_text()
    assert "--methods all --seeds 0,1,2" in text
    assert f"It submits an array of {3 * len(NAMES)} jobs" in text


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=[pytest.mark.full] if page == "results.md" else [])
        for page in PAGES
    ],
)
def test_the_tables_of_a_page_are_those_of_its_records(page):
    tables = dict(TABLE.findall((DOCS / page).read_text()))
    assert tables == PAGES[page]()


def test_the_sentences_about_the_search_have_the_numbers_of_its_runs():
    units = read_units(DOCS / "results/search/units.json")
    text = " ".join((DOCS / "search.md").read_text().split())

    def mean(field: str, recipe: str, **place) -> float:
        place = {"image_size": 96, "rate": 3e-3, "recipe": recipe, **place}
        return np.mean([unit[field] for unit in units if place.items() <= unit.items()])

    parameters, flops = (
        100 * mean(field, "backward-90/32") / mean(field, "lora-64")
        for field in ("params_added", "flops")
    )
    assert f"has {parameters:.0f} % of LoRA-CL's parameters and {flops:.0f} % of its FLOPs" in text
    truncated = mean("params_added", "lora-64/32") / mean("params_added", "lora-64")
    assert f"truncated to rank 32 it has {100 * truncated:.0f} %" in text
    rows = TABLE.findall((DOCS / "search.md").read_text())
    differences = dict(rows)["differences"]
    for quoted, row in (
        (
            "On eleven sets at 96 pixels its accuracy is 0.3 points lower (−1.4 to 0.8)",
            "all sets | LoRA-CL | −0.3 (−1.4 to 0.8) | 11",
        ),
        (
            "(six sets on which it was developed, −0.1 to 2.7)",
            "fourth task, 96 | LoRA-CL | 1.3 (−0.1 to 2.7) | 6",
        ),
        (
            "it is 0.6 points higher (−0.4 to 1.5)",
            "the same, augmented | LoRA-CL | 0.6 (−0.4 to 1.5) | 11",
        ),
        (
            "no search was developed 0.7 points lower (−2.3 to 0.8)",
            "unseen | LoRA-CL | −0.7 (−2.3 to 0.8) | 5",
        ),
        ("the paper's search (six sets, −1.2 to 10.4)", "search | 4.6 (−1.2 to 10.4) | 6"),
        ("3.5 more than the earlier search of", "closed form | 3.5 (−1.9 to 8.9) | 5"),
    ):
        assert quoted in text and row in differences
    later, alone = (
        {
            (unit["task"], unit["seed"]): unit
            for unit in units
            if unit["image_size"] == 96
            and unit["recipe"] == WINNER
            and is_first == (unit["position"] == "first")
        }
        for is_first in (False, True)
    )
    transfer: dict[str, list[float]] = {}
    for task, seed in later:
        gain = later[task, seed]["test_accuracy"] - alone[task, seed]["test_accuracy"]
        transfer.setdefault(task, []).append(100 * gain)
    more = np.mean([np.mean(gains) for gains in transfer.values()])
    assert f"It is {more:.1f} points more accurate than as the first task" in text
    adapted = [
        sum(op.startswith("adapt") and op != "adapt:0" for op in unit["architecture"])
        for unit in later.values()
    ]
    assert (min(adapted), max(adapted)) == (2, 6)
    augmented = {unit["task"] for unit in units if unit["recipe"] == "lora-64-augmented"}

    def accuracy(recipe: str) -> float:
        field, place = "test_accuracy", {"seed": 0, "position": "first"}
        return 100 * np.mean([mean(field, recipe, task=task, **place) for task in augmented])

    gains = [
        accuracy(f"{recipe}-augmented{rank}") - accuracy(recipe + rank)
        for recipe, rank in (("lora-64", ""), ("backward-90", "/32"))
    ]
    form = "augmentation gains {:.1f} points for LoRA-CL and {:.1f} for elimination at rank 32"
    assert form.format(*gains) in text
    sets = ("gtsrb", "cars49", "dtd10", "eurosat")
    trained = [
        100 * np.mean([mean("test_accuracy", f"lora-{rank}", seed=0, task=task) for task in sets])
        for rank in (32, 128, 64)
    ]
    form = "at rank 32 or 128 has {:.1f} and {:.1f} instead of {:.1f} % on four sets (seed 0)"
    assert form.format(*trained) in text
    same_seed = [
        mean("test_accuracy", "lora-64", seed=1, task=task) for task in (*sets, "flowers12")
    ]
    assert f"in which rank 64 has {100 * np.mean(same_seed):.1f} %" in text
    cars49 = {"image_size": 224, "task": "cars49"}
    for field in ("val_accuracy", "test_accuracy"):
        lost = mean(field, "last-2/32", **cars49) - mean(field, "backward-90-any/32", **cars49)
        assert f"{100 * lost:.1f} points below the network that skips the last two" in text
    ranks = ("backward-90", "backward-90/32", "backward-90/16")
    shares = [100 * mean("test_accuracy", recipe, **cars49) for recipe in ranks]
    assert "has {:.1f} % at rank 64, {:.1f} at 32 and {:.1f} at 16".format(*shares) in text
    skipped = [
        100 * mean("test_accuracy", recipe, seed=1, task=task, position="first")
        for recipe in ("last-2/32", WINNER)
        for task in ("cars49", "dtd10")
    ]
    assert "cars49 has {:.1f} %, dtd10 {:.1f}, chosen {:.1f} and {:.1f}".format(*skipped) in text


def test_the_guide_compares_the_defaults_as_their_record_does():
    text = (DOCS / "guides/own-data.md").read_text()
    runs = read("results/learn_default.json")["runs"]
    for title, defaults in (
        ("DeiT-Tiny, 96 pixels", runs[:3]),
        ("vit_micro, 32 pixels", runs[3:]),
    ):
        assert [run["default"] for run in defaults] == ["before", "not augmented", "now"]
        numbers = [
            f"{100 * np.mean(run[field]):.1f}"
            for field in ("accuracy", "accuracy_given")
            for run in defaults
        ]
        assert f"| {title} | {' | '.join(numbers)} |" in text


def test_the_guide_says_how_much_augmentation_gains():
    text = " ".join((DOCS / "guides/own-data.md").read_text().split())
    by_cell = {}
    for unit in read("results/small_sets.json")["units"]:
        cell = by_cell.setdefault((unit["task"], unit["num_train"]), {})
        cell[unit["variant"]] = 100 * unit["test_accuracy"]
    gains = [one["auto"] - one["plain"] for one in by_cell.values() if {"auto", "plain"} <= {*one}]
    assert f"gains {min(gains):.1f} to {max(gains):.1f} points with DeiT-Tiny" in text
    whole = {
        unit["task"]: 100 * unit["test_accuracy"]
        for unit in read_units(DOCS / "results/search/units.json")
        if unit["recipe"] == WINNER and unit["task"] in ("food10", "cifar10")
    }
    assert f"{whole['food10']:.1f} and {whole['cifar10']:.1f} %" in text


def test_the_guide_says_how_often_the_frozen_backbone_answers_for_few_images():
    units = read("results/fallback.json")["units"]
    text = " ".join((DOCS / "guides/own-data.md").read_text().split())
    assert f"[{len(units)} memories]" in text and len({unit["task"] for unit in units}) == 7
    answers, earlier = [], []
    for unit in units:
        network, frozen = (
            np.array(unit[f"{name}_correct"], bool) for name in ("network", "frozen")
        )
        answers.append(HeadComparison(None, 1.0, network, frozen).is_frozen_better)
        both = zip((network.sum(), frozen.sum()), unit["log_probability"], strict=True)
        learned, backbone = both
        earlier.append(backbone > learned)
    worse = [unit["frozen_test"] < unit["network_test"] for unit in units]
    assert (sum(answers), sum(earlier), np.sum(np.array(earlier) & worse)) == (1, 10, 8)


def cut_off() -> Iterator[float]:
    """Yield accuracies in % after six data sets, of uniform sampling and of CHEEM."""
    record = read("results/cut_off.json")
    num = len(record["tasks"])
    yield np.mean(record["methods"]["cheem-uniform"]["accuracy"])
    run = read("results/runs/cheem/seed-0/results.json")
    assert [task["name"] for task in run["tasks"]][:num] == record["tasks"]
    yield 100 * np.mean(run["accuracy"][num - 1][:num])


def omniglot() -> Iterator[float]:
    """Yield accuracies in % on omniglot with the task ID given, also of LoRA-CL with a rising rate,
    and CHEEM's mean lead without omniglot."""
    yield from (
        100 * unit["test_accuracy"]
        for unit in read_units(DOCS / "results/search/units.json")
        if (unit["image_size"], unit["task"], unit["recipe"]) == (224, "omniglot", "lora-64")
    )
    names = [task["name"] for task in read("results/runs/cheem/seed-0/results.json")["tasks"]]
    place = names.index("omniglot")
    leads = []
    for seed in range(3):
        ours, theirs = (
            100 * np.array(read(f"results/runs/{name}/seed-{seed}/results.json")[key][-1])
            for name, key in (("cheem-closed_form", "accuracy"), ("lora_cl", "accuracy"))
        )
        leads.append(np.delete(ours - theirs, place).mean())
        yield (
            100
            * read(f"results/runs/lora_cl/seed-{seed}/results.json")["local_accuracy"][-1][place]
        )
    yield abs(np.mean(leads))
    for name in ("cheem", "frozen_linear"):
        yield 100 * read(f"results/runs/{name}/seed-0/results.json")["local_accuracy"][-1][place]


def routers_at_96() -> Iterator[float]:
    """Yield accuracies in % with the router that was chosen at 96 pixels."""
    for file, names in (
        ("routers_96.json", ("CHEEM", "LoRA-CL")),
        ("routers_96_chosen.json", ("CHEEM, elimination", "LoRA-CL, rising rate")),
    ):
        methods = read(f"results/{file}")["chosen"]["methods"]
        yield from (100 * methods[name]["accuracy"] for name in names)


def mean_of(method: str, path: tuple[str, ...]) -> float:
    """Compute the mean over runs of the measure at a path in their results."""
    files = (DOCS / "results/runs" / method).glob("*/results.json")
    results = [json.loads(file.read_text()) for file in files]
    return float(np.mean([functools.reduce(operator.getitem, path, run) for run in results]))


def costs() -> Iterator[float]:
    """Yield CHEEM's loss by the inferred task ID and the headroom of LoRA-CL, in points, and the
    number of training images."""
    means = {
        (method, measure): 100 * mean_of(method, (measure,))
        for method in ("cheem-closed_form", "lora_cl", "full_finetune")
        for measure in ("average_accuracy", "local_average_accuracy")
    }
    given = "local_average_accuracy"
    yield means["cheem-closed_form", given] - means["cheem-closed_form", "average_accuracy"]
    yield means["full_finetune", given] - means["lora_cl", given]
    yield sum(task["num_train"] for task in read("results/runs/cheem/seed-0/results.json")["tasks"])


def present_search() -> Iterator[float]:
    """Yield the largest difference of a set's means, in points, between backward elimination and
    LoRA-CL at 96 pixels, with the task ID given."""
    ours, theirs = (
        np.array(
            [
                read(f"results/runs_96_chosen/{method}/seed-{seed}/results.json")["local_accuracy"][
                    -1
                ]
                for seed in range(3)
            ]
        )
        for method in ("cheem-elimination", "lora_cl-warm")
    )
    yield 100 * np.abs((ours - theirs).mean(axis=0)).max()


def facts() -> Iterator[float]:
    """Yield the numbers in the text of the page of results that its tables do not have."""
    for numbers in (cut_off, omniglot, routers_at_96, present_search, costs):
        yield from numbers()


ELSEWHERE = {"0.5", "0.05", "2.9", "66.2", "89.3", "0.10", "0.11", "10,000"}
"""Further numbers in the text: the level of p, the margin, numbers of the log, versions of JAX, and
the number of resamples."""


def test_the_numbers_in_the_text_of_the_results_are_those_of_the_records():
    text = (DOCS / "results.md").read_text()
    tables = " ".join(table for _, table in TABLE.findall(text))
    tables += dict(TABLE.findall((DOCS / "search.md").read_text()))["differences"]
    values = list(facts())
    expected = {f"{abs(value):.{digits}f}" for value in values for digits in (1, 2)}
    expected |= {f"{value:,.0f}" for value in values} | {f"{100 * largest_gap():.1f}"}
    expected |= set(NUMBER.findall(tables)) | ELSEWHERE
    prose = re.sub(r"```.*?```|`[^`]*`", "", TABLE.sub("", text), flags=re.DOTALL)
    quoted = set(NUMBER.findall(prose))
    assert len(quoted) > 20
    assert sorted(quoted - expected) == []
    shares = [
        100 * np.divide(*(mean_of(method, measure) for method in ("cheem-closed_form", "lora_cl")))
        for measure in (("params_added_percent",), ("flops", "paper"))
    ]
    assert "{:.0f} % of its parameters and {:.0f} % of its FLOPs".format(*shares) in text
    ours, lora = (
        read(f"results/runs_96_chosen/{method}/seed-0/results.json")
        for method in ("cheem-elimination", "lora_cl-warm")
    )
    shares = [
        100 * ours["params_added_percent"] / lora["params_added_percent"],
        100 * ours["flops"]["paper"] / lora["flops"]["paper"],
    ]
    assert "with {:.0f} % of its parameters and {:.0f} % of its FLOPs".format(*shares) in text


def test_the_results_of_the_readme_are_those_of_the_page():
    lines = (DOCS / "results.md").read_text().splitlines()
    readme = (DOCS.parent / "README.md").read_text()
    table = re.search(r"^\| method \| seeds .*?\n\n", readme, re.MULTILINE | re.DOTALL)
    rows = [
        [cell.strip() for cell in line.split("|")[3:-1]]
        for line in table[0].splitlines()[2:]
        if line
    ]
    assert len(rows) >= 3 and all(len(row) == 5 and row.count("–") < 3 for row in rows)
    for task_agnostic, routed, *others in rows:
        cells = [cell for cell in (task_agnostic, *others) if cell != "–"]
        assert any(all(f"| {cell} " in line for cell in cells) for line in lines), cells
        assert routed == "–" or any(
            line.startswith("| levels | **") and f"| {routed}, +" in line for line in lines
        )


def test_only_the_text_between_the_markers_changes(tmp_path):
    page = tmp_path / "page.md"
    write_tables(page, {"sizes": "| a |"}, "Title")
    assert page.read_text().startswith("# Title\n") and dict(TABLE.findall(page.read_text()))
    page.write_text(f"Before.\n\n{begin('sizes')}\nold\n<!-- end -->\n\nAfter.\n")
    write_tables(page, {"sizes": "| b |"}, "Title")
    text = page.read_text()
    assert text.startswith("Before.\n") and text.endswith("\nAfter.\n")
    assert "old" not in text and dict(TABLE.findall(text)) == {"sizes": "| b |"}
    for page in (begin("sizes"), f"{begin('sizes')}\nA conclusion.\n{text}"):
        with pytest.raises(ValueError, match="add one"):
            fill(page, {"sizes": "| b |"})
