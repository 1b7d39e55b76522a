"""The HTML page: its contents, its refusals, and that no name or size breaks it."""

import base64
import csv
import html
import io
import json
import re
import shutil
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import small
from page_runs import entries, write_config, write_pictures, write_run
from PIL import Image
from plotly.offline import get_plotlyjs

from cheem_jax.backbone.config import CONFIGS, at_image_size
from cheem_jax.backbone.flops import backbone_flops
from cheem_jax.cli.report import Report, write_report_page
from cheem_jax.report.finished import read, read_record
from cheem_jax.report.page.assemble import page, refresh_page
from cheem_jax.report.page.charts import EmptySection, search_chart
from cheem_jax.report.page.examples import data_uri
from cheem_jax.run import record
from cheem_jax.run.progress import duration
from cheem_jax.run.results import results_of

HOSTILE = "</script><script>alert(1)</script><b>\"'`{{7*7}}%{x}$x$"
PLOTLY = get_plotlyjs()
NAMES = ("one", "two", "three")
PLAIN = backbone_flops(at_image_size(CONFIGS["vit_micro"], 8))


class Parsed(HTMLParser):
    """Elements of a page with their attributes, its text outside scripts and styles, and the
    contents of its scripts."""

    def __init__(self, text: str):
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.scripts = []
        self._inside = ""
        assert text.count(PLOTLY) == 1  # megabytes, needed once
        self.feed(text.replace(PLOTLY, ""))

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        self._inside = tag if tag in ("script", "style") else ""

    def handle_endtag(self, tag):
        self._inside = ""

    def handle_data(self, data):
        if self._inside == "script":
            self.scripts.append(data)
        elif not self._inside:
            self.text += data

    @property
    def charts(self) -> list[dict]:
        specs = [json.loads(script) for script in self.scripts if script.startswith(("{", "["))]
        return [spec for spec in specs if "data" in spec]

    def ids(self) -> list[str]:
        return [attributes["id"] or "" for _, attributes in self.elements if "id" in attributes]


def report(*runs: Path, images: bool = True) -> str:
    out = runs[0].parent / "page.html"
    write_report_page(Report(runs, out, images))
    return out.read_text()


def parsed(*runs: Path, images: bool = True) -> Parsed:
    return Parsed(report(*runs, images=images))


def change(run: Path, edit: Callable[[dict], object]) -> None:
    """Edit the results of a run."""
    held = json.loads((run / "results.json").read_text())
    edit(held)
    (run / "results.json").write_text(json.dumps(held))


def sections(page: Parsed, run: int = 1) -> list[str]:
    return [
        name.removeprefix(f"run-{run}-") for name in page.ids() if name.startswith(f"run-{run}-")
    ]


@pytest.fixture
def run(tmp_path) -> Path:
    return write_run(tmp_path / "run", pictures=write_pictures(tmp_path / "small", NAMES))


def test_a_run_of_cheem_has_every_section(run, capsys):
    write_report_page(Report((run,)))
    assert "wrote" in capsys.readouterr().out
    page = Parsed((run / "report.html").read_text())
    assert sections(page) == [
        "architectures",
        "pool",
        "tasks",
        "accuracy",
        "curve",
        "forgetting",
        "routing",
        "similarity",
        "search",
        "time",
        "examples",
        "setting",
    ]
    assert (
        len(page.charts) == 1 + 2 + 2 + 1 + 1 + 3 + 3 + 1
    )  # pool, accuracy, all classes so far, forgetting, routing, S, search by task, time


def test_figures_and_tables_are_written_as_files_on_request(run, capsys):
    write_report_page(Report((run,), figures=True))
    assert f"wrote {run / 'figures'}" in capsys.readouterr().out
    names = ["accuracy.png", "architectures.png", "curve.png", "methods.csv", "tasks.csv"]
    assert sorted(file.name for file in (run / "figures").iterdir()) == names
    rows = [*csv.DictReader((run / "figures" / "tasks.csv").read_text().splitlines())]
    assert [row["task"] for row in rows] == ["T1 one", "T2 two", "T3 three"]
    assert rows[0]["CHEEM %"] == "83.3"


def test_a_run_shows_how_well_images_of_later_tasks_are_rejected(tmp_path):
    run = write_run(tmp_path / "run")
    steps = [{"auroc": 0.9, "fpr95": 0.4}, {"auroc": 0.75, "fpr95": 0.5}]
    record.Record(run).write("open_set", steps=steps)
    results = results_of(record.read(run))
    assert results["open_set"] == steps
    (run / "results.json").write_text(json.dumps(results))
    page = parsed(run)
    assert "open-set" in sections(page)
    (chart,) = [spec for spec in page.charts if spec["data"][0].get("name") == "AUROC"]
    assert [(trace["name"], trace["y"]) for trace in chart["data"]] == [
        ("AUROC", [90.0, 75.0]),
        ("FPR95", [40.0, 50.0]),
    ]
    assert chart["data"][0]["x"] == ["T1 one", "T2 two"]


def test_a_method_without_a_pool_has_neither_architectures_nor_a_search(tmp_path):
    page = parsed(write_run(tmp_path / "run", method="ewc"))
    assert sections(page) == [
        "tasks",
        "accuracy",
        "curve",
        "forgetting",
        "routing",
        "time",
        "examples",
        "setting",
    ]


def test_the_page_loads_nothing_from_elsewhere(run):
    page = parsed(run)
    places = [
        value or ""
        for _, result in page.elements
        for name, value in result.items()
        if name in ("src", "href")
    ]
    assert len(places) > 10 and all(place.startswith(("data:", "#")) for place in places)
    style = re.search("<style>(.*?)</style>", report(run), re.DOTALL)
    assert style and "url(" not in style[1] and "@import" not in style[1]


def test_hostile_names_are_text_and_nothing_else(tmp_path):
    run = write_run(tmp_path / "run", names=(HOSTILE, "two"), classes=(HOSTILE, "dog"))
    assert "<script>alert(1)" not in report(run)
    page = parsed(run)
    assert HOSTILE in page.text
    assert [tag for tag, _ in page.elements].count("script") == 3 + 1 + len(
        page.charts
    )  # one contains the pool
    [label] = {
        text
        for spec in page.charts
        for text in spec["layout"]["xaxis"].get("categoryarray", ())
        if "T1" in text
    }
    assert label.startswith("T1 &lt;/script&gt;")  # plotly reads markup and entities


def test_the_tiles_are_the_headline_numbers(run):
    result = re.findall(r"<dt>(.*)</dt><dd><b>(.*)</b> <i>(.*)</i><small>(.*)</small>", report(run))
    assert result == [
        ("Average accuracy", "83.3", "%", "task-agnostic: task ID inferred per image"),
        ("Task ID given", "91.7", "%", "class predicted among those of the task"),
        (
            "Forgetting",
            "2.0",
            "points",
            "drop from the best earlier accuracy to the last one, mean over tasks",
        ),
        ("FLOPs per image", "30.0", "M", f"{30e6 / PLAIN:.2f} × the plain backbone"),
        ("Parameters added", "1.50", "%", "per task, of the backbone; 0.1 k learned"),
        ("Time", "7.5", "s", "the whole run; 20 % compiling"),
    ]


def test_a_cell_names_the_origin_of_its_expert(run):
    cells = re.findall(
        r'<td class="(\w+)" tabindex="-1"(?: data-e="(\d)")?><span>(.*?)</span>', report(run)
    )
    assert cells == [
        ("base", "0", "base"),
        ("base", "0", "base"),
        ("adapt", "1", "base+Δ"),
        ("new", "1", "new"),
        ("adapt", "2", "T1+Δ"),
        ("skip", "", "skip"),
        ("adapt", "3", "T2+Δ"),
        ("skip", "", "skip"),
    ]


def test_charts_hold_the_numbers_of_the_run(run):
    page = parsed(run)
    pool, routed, given, curve, curve_given, forgetting, routing, *similarity = page.charts[:10]
    assert pool["data"][0]["x"] == ["base", "T1 one", "T2 two", "T3 three"]
    assert pool["data"][0]["z"] == [[1, 2, 3, 4], [1, 2, 2, 2]]
    matrix = [[85.33, None, None], [84.33, 85.33, None], [83.33, 83.33, 83.33]]
    assert routed["data"][0]["z"] == matrix
    assert given["data"][0]["z"][1] == [92.67, 93.67, None]
    # tasks have 12 test images each, so an entry is the mean of a row of the matrix
    assert [trace["y"] for trace in curve["data"]] == [[85.33, 84.83, 83.33]]
    assert [trace["y"] for trace in curve_given["data"]] == [[93.67, 93.17, 91.67]]
    assert [(trace["x"], trace["y"]) for trace in forgetting["data"]] == [
        (["T1 one", "T2 two", "T3 three"], [85.33, 84.33, 83.33]),
        (["T2 two", "T3 three"], [85.33, 83.33]),
        (["T3 three"], [83.33]),
    ]
    assert routing["data"][0]["z"] == [
        [91.67, 8.333, 0.0],
        [0.0, 91.67, 8.333],
        [8.333, 0.0, 91.67],
    ]
    assert [spec["data"][0]["z"] for spec in similarity] == [
        [[0.5, -0.5], *[[0.25, None]] * earlier] for earlier in range(3)
    ]
    assert similarity[2]["data"][0]["y"] == ["base", "T1 one", "T2 two"]
    assert {trace["name"]: trace["y"] for trace in page.charts[-1]["data"]} == {
        "supernet training": [1.0] * 3,
        "search": [0.5] * 3,
        "evaluation": [0.5] * 3,
    }
    assert (
        "The whole run took 7.5 s. Compiling took 1.5 s of it (20 %): 6 functions compiled, 12 read"
        " from" in page.text
    )


def test_examples_are_images_with_their_answers(run):
    text = report(run)
    result = re.findall(
        r'<figure class="example (\w+)">\n<img'
        r' src="data:image/png;base64,(.*?)".*\n<figcaption><b>(.*?)</b>(.*)</fig',
        text,
    )
    greys = [
        int(np.unique(np.asarray(Image.open(io.BytesIO(base64.b64decode(source)))))[0])
        for _, source, *_ in result
    ]
    messages = [
        (kind, truth, re.sub("<.*?>", " ", html.unescape(rest)).split("  "))
        for kind, _, truth, rest in result
    ]
    # dogs are 60 lighter than cats; of ten right answers four, both wrong ones
    assert greys == 3 * [2, 5, 62, 65, 0, 1]
    assert [answer[:2] for answer in messages[:4]] == [("right", "cat")] * 2 + [
        ("right", "dog")
    ] * 2
    for index, next_one in enumerate(("T2 two", "T3 three", "T1 one")):
        assert messages[6 * index + 4] == (
            "wrong",
            "cat",
            [f" routed to {next_one}", "task ID given: cat "],
        )
        assert messages[6 * index + 5] == ("wrong", "cat", [" dog "])
    assert text.count("10 right") == 3 and text.count("2 wrong") == 3


def test_answers_of_another_moment_than_the_record_are_not_shown(run):
    with np.load(run / "answers.npz") as held:
        answers = dict(held)
    later = {
        name: np.where(rows == 1, 3, rows) if name == "chosen_task_0" else rows
        for name, rows in answers.items()
    }
    np.savez(run / "answers.npz", **later)  # pyright: ignore[reportArgumentType]
    assert "answers.npz does not belong to the record: the accuracy of 'one'" in parsed(run).text
    later = answers | {"given_task_1": answers["given_task_0"][::-1]}
    np.savez(run / "answers.npz", **later)  # pyright: ignore[reportArgumentType]
    messages = (
        "answers.npz does not belong to the record: the accuracy of 'two' is 0.0833 in answers.npz"
        " and 0.8333 in the record"
    )
    assert messages in parsed(run).text


def test_small_images_keep_their_pixels_and_large_ones_become_smaller():
    rng = np.random.default_rng(0)
    small = rng.integers(0, 256, (8, 8, 3), np.uint8)
    kind, _, text = data_uri(small).partition(";base64,")
    assert kind == "data:image/png"
    np.testing.assert_array_equal(np.asarray(Image.open(io.BytesIO(base64.b64decode(text)))), small)
    kind, _, text = data_uri(np.zeros((384, 384, 3), np.uint8)).partition(";base64,")
    assert kind == "data:image/jpeg"
    assert Image.open(io.BytesIO(base64.b64decode(text))).size == (
        224,
        224,
    )


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (
            lambda run: shutil.move(run.parent / "small", run.parent / "elsewhere"),
            "The images of the run cannot be read",
        ),
        (
            lambda run: (run.parent / "small/two/test/cat/0.png").rename(
                run.parent / "small/two/test/cat/z.png"
            ),
            "The files or labels have changed since the run: two.",
        ),
        (
            lambda run: change(run, lambda results: results.update(split_sha256={})),
            "The files or labels have changed since the run: one, two, three.",
        ),
        (
            lambda run: (run / "answers.npz").write_bytes(b"PK\x03\x04 no archive"),
            "answers.npz cannot be read",
        ),
    ],
    ids=["moved", "renamed", "unknown", "corrupted answers"],
)
def test_examples_of_other_images_or_answers_than_the_runs_are_not_shown(run, edit, message):
    edit(run)
    page = parsed(run)
    assert message in page.text and "search" in sections(page)
    assert not any(tag == "img" for tag, _ in page.elements)


def test_a_page_lists_the_checks_that_it_does_not_make_of_the_images(run):
    assert (
        "The files and labels are those of the run; the pixels were not compared."
        in parsed(run).text
    )


def test_the_images_of_the_demo_stream_are_compared_with_those_of_the_run(tmp_path):
    run = write_run(tmp_path / "run", names=("colours", "digits"))
    lines = record.read(run)
    lines[0]["data"] = {"stream": "demo", "tasks": ["colours", "digits"]}
    (run / "metrics.jsonl").unlink()
    for line in lines:
        record.Record(run).write(
            **{key: value for key, value in line.items() if key not in ("time", "check")}
        )
    assert (
        "This version makes different images than the version of the run: colours, digits."
        in parsed(run).text
    )


def test_without_images_there_is_no_such_section(run):
    page = parsed(run, images=False)
    assert "examples" not in sections(page) and not any(tag == "img" for tag, _ in page.elements)


def test_a_run_of_a_script_says_that_its_images_are_unknown(tmp_path):
    page = parsed(write_run(tmp_path / "run"))
    assert "made by a script that did not record where its images are" in page.text


def test_a_corrupted_record_costs_only_the_sections_that_need_it(run):
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text(
        "".join([*lines[:2], lines[2].replace("0.9", "0.8"), *lines[3:]])
    )
    page = parsed(run)
    assert "metrics.jsonl, line 3 was changed" in page.text
    assert "The search is only in the record, which cannot be read." in page.text
    assert "accuracy" in sections(page)


def test_an_unfinished_run_is_shown_up_to_its_last_entry(tmp_path):
    page = parsed(write_run(tmp_path / "run", planned=5))
    assert "Unfinished: 3 of 5 tasks so far" in page.text and "search" in sections(page)


def test_a_run_without_an_evaluated_task_cannot_be_shown(tmp_path):
    run = write_run(tmp_path / "run", planned=5)
    first = (run / "metrics.jsonl").read_text().splitlines(keepends=True)[0]
    (run / "metrics.jsonl").write_text(first)
    (run / "results.json").unlink()
    with pytest.raises(
        ValueError, match="run: unfinished: no results yet; the command that started the run"
    ):
        report(run)


def test_several_runs_are_compared_with_their_spread_over_seeds(tmp_path):
    for seed, accuracy in enumerate((0.8, 0.84)):
        write_run(tmp_path / f"runs/cheem/{seed}", seed=seed, accuracy=accuracy)
    write_run(tmp_path / "runs/ewc", method="ewc", accuracy=0.5)
    write_run(tmp_path / "runs/bound", method="full_finetune", accuracy=0.9)
    page = parsed(tmp_path / "runs")
    table = page.text[: page.text.index("Up and to the left")]
    assert "82.0 ± 2.8" in table
    assert "CHEEM, seed 1" in page.text and "EWC, seed 0" in page.text
    assert "2.96" in table  # FoM against EWC: 48.33 points below the bound, CHEEM 16.33
    links = [
        result["href"]
        for tag, result in page.elements
        if tag == "a" and (result.get("href") or "").startswith("#run")
    ]
    assert {"#run-1", "#run-2", "#run-3"} <= set(links)
    assert [
        (trace["x"], trace["y"], trace["error_y"]["array"], trace["text"])
        for trace in page.charts[0]["data"]
    ] == [
        ([30.0], [82.0], [2.828], ["CHEEM"]),
        ([30.0], [50.0], [0.0], ["EWC"]),
        ([30.0], [98.33], [0.0], ["full fine-tuning"]),
    ]


def test_variants_of_a_method_have_separate_rows(tmp_path):
    write_run(tmp_path / "runs/usual")
    changed = write_run(tmp_path / "runs/uniform", accuracy=0.7)
    config = json.loads((changed / "config.json").read_text())
    (changed / "config.json").write_text(
        json.dumps(config | {"cheem": {**config["cheem"], "sampling": "uniform"}})
    )
    page = parsed(tmp_path / "runs")
    named = {name for trace in page.charts[0]["data"] for name in trace["text"]}
    assert named == {"CHEEM", "CHEEM (uniform)"} and "CHEEM (uniform), seed 0" in page.text


@pytest.mark.parametrize(
    ("made", "fields", "message"),
    [
        ({"names": ("one", "two")}, {}, "differ: order of tasks."),
        ({"names": ("three", "two", "one")}, {}, "differ: order of tasks."),
        ({"data_sha256": "y"}, {}, "data_sha256.one is .x. in the first and .y. in the second"),
        ({}, {"stream": "big"}, "stream is .* in the first and .*big"),
        ({}, {"backbone": "vit_nano"}, "backbone is .* in the first and .*vit_nano"),
        ({}, {"image_size": 9}, "image_size is .* in the first and .*9"),
    ],
)
def test_runs_of_other_data_or_settings_are_refused(tmp_path, made, fields, message):
    write_run(tmp_path / "runs/a")
    other = write_run(tmp_path / "runs/b", method="ewc", **made)
    for name in ("config.json", "results.json"):
        contents = json.loads((other / name).read_text())
        (other / name).write_text(json.dumps(contents | fields))
    with pytest.raises(ValueError, match=message):
        report(tmp_path / "runs")


def test_corrupted_runs_are_listed_apart(tmp_path):
    write_run(tmp_path / "runs/good")
    broken = write_run(tmp_path / "runs/broken", method="l2p")
    (broken / "results.json").write_text("{")
    strange = write_run(tmp_path / "runs/strange", seed=1)
    change(strange, lambda held: held["compile"].clear())
    page = parsed(tmp_path / "runs")
    text = page.text[page.text.index("Not displayed") :]
    assert "broken corrupted" in text and "strange corrupted (KeyError('seconds'))" in text
    assert "run-1" in page.ids() and "run-2" not in page.ids()


def test_a_corrupted_file_costs_only_the_section_that_needs_it(run):
    change(run, lambda held: held["tasks"][1].update(experts=[7, None]))
    text = report(run)
    assert text.count('class="missing"') == 1 and "uses expert 7 of a block with 4" in text
    assert "architectures" in sections(Parsed(text)) and 'class="architectures"' not in text


def test_a_comparison_that_cannot_be_made_costs_no_run(tmp_path):
    change(write_run(tmp_path / "runs/a"), lambda held: held.update(params_stored="many"))
    write_run(tmp_path / "runs/b", method="ewc")
    page = parsed(tmp_path / "runs")
    assert page.text.count("Corrupted: a value of this section is invalid") == 1
    assert {"comparison", "run-1", "run-2"} <= set(page.ids())


def test_a_non_numeric_accuracy_is_reported_with_its_run(tmp_path):
    finished = write_run(tmp_path / "finished")
    change(finished, lambda held: held.update(average_accuracy=None))
    unfinished = write_run(tmp_path / "unfinished", accuracy=float("nan"), planned=5)
    for run in (finished, unfinished):
        with pytest.raises(ValueError, match=f"{run}: corrupted "):
            report(run)
    matrix = write_run(tmp_path / "matrix", pictures=write_pictures(tmp_path / "small", NAMES))
    change(matrix, lambda held: held["accuracy"][-1].__setitem__(0, None))
    page = parsed(matrix)
    assert page.charts[1]["data"][0]["z"][2] == [None, 83.33, 83.33]
    assert sections(page)[-2] == "examples"
    assert page.text.count("Corrupted: a value of this section") == 1  # the images


def test_unfinished_runs_are_shown_up_to_their_last_entry_and_not_compared(tmp_path):
    write_run(tmp_path / "runs/a", planned=5)
    write_run(tmp_path / "runs/b", method="ewc", planned=4)
    broken = write_run(tmp_path / "runs/broken", planned=4)
    (broken / "config.json").write_text("{")
    page = parsed(tmp_path / "runs")
    assert "CHEEM, seed 0, unfinished: 3 of 5 tasks" in page.text
    assert "EWC, seed 0, unfinished: 3 of 4" in page.text
    assert "comparison" not in page.ids() and {"run-1", "run-2", "runs"} <= set(page.ids())
    text = page.text[page.text.index("Not displayed") :]
    assert "broken corrupted" in text and "the command that started" not in text
    for method in ("l2p", "coda_prompt"):
        write_run(tmp_path / f"runs/{method}", method=method)
    page = parsed(tmp_path / "runs")
    assert "2 runs" in page.text and "run-4" in page.ids()
    assert {name for trace in page.charts[0]["data"] for name in trace["text"]} == {
        "L2P",
        "CODA-Prompt",
    }


def test_runs_without_flops_are_left_out_of_the_chart(tmp_path):
    for method, paper in (("cheem", 30e6), ("ewc", 300e6), ("l2p", 0.0)):
        run = write_run(tmp_path / f"runs/{method}", method=method)
        change(run, lambda held, paper=paper: held["flops"].update(paper=paper))
    page = parsed(tmp_path / "runs")
    assert page.charts[0]["layout"]["xaxis"]["type"] == "log"
    assert {name for trace in page.charts[0]["data"] for name in trace["text"]} == {"CHEEM", "EWC"}
    assert "Not displayed, because the FLOPs are unknown: L2P." in page.text


def test_folders_without_a_run_are_refused(tmp_path):
    with pytest.raises(ValueError, match="no run to display in"):
        report(tmp_path)
    with pytest.raises(ValueError, match="is not a folder"):
        report(tmp_path / "absent")
    with pytest.raises(ValueError, match="no run given"):
        write_report_page(Report(()))


def test_a_folder_cannot_be_written_as_a_file(run):
    with pytest.raises(ValueError, match="is a folder"):
        write_report_page(Report((run,), run))


def test_a_run_shows_itself_alone_on_its_own_page_and_needs_no_page(run, capsys):
    write_run(run / "inner", names=("zebras",))
    refresh_page(run)
    assert capsys.readouterr().err == "" and "zebras" not in (run / "report.html").read_text()
    (run / "results.json").write_text("[]")
    refresh_page(run)
    assert "note: report.html is not written" in capsys.readouterr().err


def test_a_page_is_the_same_in_every_locale(run, monkeypatch):
    expected = page([run], images=False)[0]
    assert "low-rank Δ" in expected
    small.assume_ascii(monkeypatch)
    assert page([run], images=False)[0] == expected


def test_only_pages_are_overwritten(run):
    write_report_page(Report((run,), run / "page.html"))
    write_report_page(Report((run,), run / "page.html"))
    before = (run / "metrics.jsonl").read_bytes()
    with pytest.raises(
        ValueError,
        match="metrics.jsonl' exists and is not a page of `cheem report`; choose another",
    ):
        write_report_page(Report((run,), run / "metrics.jsonl"))
    assert (run / "metrics.jsonl").read_bytes() == before
    foreign = run / "thesis.html"
    text = "<!doctype html>\n<html>\n<title>My thesis</title>\n"
    foreign.write_text(text)
    with pytest.raises(ValueError, match="is not a page of `cheem report`"):
        write_report_page(Report((run,), foreign))
    assert foreign.read_text() == text
    # an earlier version, without <meta name="generator">
    foreign.write_text("<!doctype html>\n<html>\n<title>demo · cheem report</title>\n")
    write_report_page(Report((run,), foreign))


def test_a_folder_that_cannot_be_written_to_asks_for_another_place(run, monkeypatch):
    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(
        "cheem_jax.report.page.assemble.write_atomically", refuse
    )  # the superuser can write anywhere
    with pytest.raises(
        ValueError,
        match="report.html cannot be written .Permission denied.; choose another file with --out",
    ):
        write_report_page(Report((run,)))


def test_a_search_without_any_score_says_so(run):
    [result], _ = read([run])
    recorded = read_record(result)
    for result in recorded.reports:
        result["search"]["correct"] = [None] * 6
    with pytest.raises(EmptySection, match="No architecture of the search has a score"):
        search_chart(recorded, 0.02)


def test_the_command_can_be_pasted_into_a_shell(tmp_path):
    run = write_run(tmp_path / "run")
    assert "cheem train '--data.stream=my pictures'" in parsed(run).text


@pytest.mark.full
def test_a_thousand_tasks_stay_small(tmp_path):
    names = [f"task{index}" for index in range(1000)]
    write_config(tmp_path, names)
    results = results_of([*entries(names=names, classes=("cat", "dog"))])
    (tmp_path / "results.json").write_text(json.dumps(results))
    text = report(tmp_path)
    assert len(text) < 8_500_000
    page = Parsed(text)
    cells = [result for tag, result in page.elements if tag == "td" and "data-e" in result]
    assert len(cells) <= 2 * 401
    assert max(len(trace.get("z", ())) for spec in page.charts for trace in spec["data"]) == 60
    assert "60 of 1,000 tasks are displayed, evenly spaced." in page.text


def test_a_thousand_classes_stay_small_too(tmp_path):
    few, many = (
        write_run(tmp_path / str(num), classes=[f"class{i}" for i in range(num)])
        for num in (2, 1000)
    )
    assert len(report(many)) < len(report(few)) + 1000


def test_a_single_task_has_no_forgetting_and_no_routing(tmp_path):
    assert sections(parsed(write_run(tmp_path / "run", names=("one",), method="ewc"))) == [
        "tasks",
        "accuracy",
        "time",
        "examples",
        "setting",
    ]


def test_the_ring_is_around_the_chosen_candidate(run):
    [result], _ = read([run])
    chart = search_chart(read_record(result), 0.02)
    spec = next(iter(chart.variants.values()))
    dots, ring = spec["data"]
    assert (ring["x"], ring["y"]) == ([12.0], [90.0])
    assert dots["y"] == [50.0, 60.0, 80.0, 90.0, 90.0]  # of six candidates one has no score
    assert dots["x"] == [10.0, 20.0, 15.0, 30.0, 12.0]
    [band] = spec["layout"]["shapes"]
    assert (band["y0"], band["y1"]) == (88.0, 90.0)
    assert dots["marker"]["color"] == [1, 1, 2, 3, 3]


def test_backward_elimination_has_no_band_of_accuracies(run):
    [result], _ = read([run])
    recorded = read_record(result)
    # the second task of a memory that began with a run of the paper's search
    later = recorded.reports[1]["search"]
    later |= {"losses": [1.0] * 6, "population": 6, "score": "untrained"}
    chart = search_chart(recorded, 0.02)
    assert "validation images or accuracy on the validation images before training" in chart.caption
    assert "with a band, it is the cheapest" in chart.caption and "generation" in chart.caption
    bands = [len(spec["layout"]["shapes"]) for spec in chart.variants.values()]
    assert bands[:2] == [1, 0]
    for report in recorded.reports:
        report["search"] |= later
    chart = search_chart(recorded, 0.02)
    assert "the network that the search chose." in chart.caption
    assert all(not spec["layout"]["shapes"] for spec in chart.variants.values())


def test_a_search_of_an_earlier_version_has_a_chart(run):
    [result], _ = read([run])
    recorded = read_record(result)
    for report in recorded.reports:
        report["search"]["score"] = "closed_form"
    (chart, *_) = search_chart(recorded, 0.02).variants.values()
    assert "ridge head" in str(chart)


def test_durations_have_two_units():
    assert [duration(s) for s in (2.345, 59.4, 127.4, 3600, 7260)] == [
        "2.3 s",
        "59 s",
        "2 min 07 s",
        "1 h 00 min",
        "2 h 01 min",
    ]
