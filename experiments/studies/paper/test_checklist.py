"""The checklist of the paper: complete, in step with its page, and truly run."""

import json
import re

import paper
import pytest
from pages import END, begin

from cheem_jax.baselines.catalogue import make_preset
from studies.paper import settings_table
from studies.paper.checklist import ITEMS, METHODS, READERS, RUNS, Run, check, filled

PAGE = paper.HERE.parent / "docs" / "paper-to-code.md"


def test_every_equation_table_and_figure_of_the_paper_is_in_the_checklist():
    for word, num in {"Eq.": 10, "Table": 20, "Fig.": 10}.items():
        places = " ".join(item.place for item in ITEMS if item.place.startswith(word))
        assert {int(number) for number in re.findall(r"\d+", places)} == {*range(1, num + 1)}
    assert len({item.place for item in ITEMS}) == len(ITEMS)


def test_the_labels_are_those_of_the_papers_source(shared):
    source = shared / "paper" / "cheem.tex"
    if not source.is_file():
        pytest.skip(f"no {source}")
    labels = re.findall(r"\\label\{((?:eq|tab|fig):[^}]*)\}", source.read_text())
    assert sorted(labels) == sorted(label for item in ITEMS for label in item.labels)


def test_every_item_has_code_and_either_an_example_or_a_run():
    for item in ITEMS:
        assert bool(item.example) != bool(item.run) == bool(item.read), item.place
        assert item.code
        scripts = [name for name in item.code if name.endswith(".py")]
        assert all((paper.HERE.parent / script).is_file() for script in scripts)
        if item.run:
            assert item.run in RUNS and item.read[0] in READERS


def test_no_word_of_a_small_run_is_left():
    for run in RUNS.values():
        for command in run.commands:
            words = re.findall(r"\b[A-Z]{4,}\b", filled(command, run.images))
            assert {*words} <= {"DATA", "RUNS", "TABLES"}, command


def test_the_tables_of_the_page_are_those_of_the_checklist():
    text = PAGE.read_text()
    for name, table in paper.tables({}).items():
        shown = text.partition(begin(name))[2].partition(END)[0].strip()
        if name in ("examples", "experiments"):
            results = [line.split(" | ")[-1] for line in shown.splitlines()]
            assert not [one for one in results if one.startswith(("failed", "not run"))]
            shown, table = (
                [line.split(" | ")[:-1] for line in lines.splitlines()] for lines in (shown, table)
            )
        assert shown == table, f"python experiments/paper.py --page {PAGE.name} writes it again"


def test_every_setting_that_the_paper_does_not_state_or_that_differs_has_a_reason():
    stated = settings_table.STATED["cheem"]
    ours = dict(settings_table.flat(make_preset("cheem", "paper")))
    assert ours.keys() == stated.keys()
    for name, value in ours.items():
        assert stated[name].get("paper") == value or stated[name]["reason"], name
    baselines = settings_table.STATED["baselines"]
    assert baselines.keys() | {"cheem", "cheem_lite"} == METHODS and all(baselines.values())


@pytest.mark.parametrize(
    "place", ["Eq. 2", "Eq. 3", "Fig. 5", "Eq. 5", "Eq. 6", "App. I M classes"]
)
def test_a_worked_example_agrees_with_its_formula(place):
    [item] = [item for item in ITEMS if item.place == place]
    assert "(formula: " in check(item)


@pytest.mark.full
def test_items_run_once_and_a_failed_item_stops_no_other(tmp_path, monkeypatch, capsys):
    settings = paper.Paper(only="Eq. 9,Table 17,Fig. 3a,Table 18", out=tmp_path)
    commands = RUNS["counts"].commands
    monkeypatch.setitem(
        RUNS, "counts", Run("demo stream", (commands[0], "cheem data list nothing"))
    )
    with pytest.raises(SystemExit):
        paper.main(settings)
    lines = capsys.readouterr().out
    assert "Eq. 9: ran" in lines and "Fig. 3a: ran, without MTIL's images: mtil.png has" in lines
    assert "Table 17: failed: ValueError: status 2 of `cheem data list nothing`" in lines
    assert "2 of 4 items ran" in lines
    monkeypatch.undo()
    paper.main(settings)
    lines = capsys.readouterr().out
    assert "run counts" in lines and "run data" not in lines
    assert "Table 17: ran: 11 tasks, 1,201 classes" in lines and "4 of 4 items ran" in lines
    done = json.loads((tmp_path / "paper.json").read_text())
    assert {one["status"] for one in done.values()} == {"ran"} and len(done) == 4
    paper.main(settings)
    assert "run counts" not in capsys.readouterr().out
