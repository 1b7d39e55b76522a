"""Published copies of runs: predictions as bits, and settings without paths of this machine."""

import json
from pathlib import Path

import collect
import numpy as np
import pytest
from page_runs import write_pictures, write_run

from cheem_jax.run.record import Record
from studies.paper.collected import load, pack, unpack


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A finished run and an unfinished run."""
    images = write_pictures(tmp_path / "images", ("one", "two", "three"))
    write_run(tmp_path / "runs/cheem/seed-0", pictures=images)
    write_run(tmp_path / "runs/l2p/seed-0", pictures=images, method="l2p", planned=4)
    return tmp_path / "runs"


def collected(runs: Path, to: Path) -> int:
    return collect.main(collect.Collect((runs,), to))


def test_a_folder_without_finished_runs_is_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="no finished run below .*empty; expected run directories"):
        collected(tmp_path / "empty", tmp_path / "results")


def test_an_already_collected_run_is_left_out_with_the_reason(runs, tmp_path, capsys):
    collected(runs, tmp_path / "to")
    capsys.readouterr()
    status = collected(tmp_path / "to", tmp_path / "again")
    said = " ".join(capsys.readouterr().out.split())
    assert status == 1 and "collect the folder of the run itself" in said
    assert not (tmp_path / "again").exists()


def test_a_finished_run_is_collected_and_an_unfinished_run_is_left_out(runs, tmp_path, capsys):
    assert collected(runs, tmp_path / "to") == 0
    said = capsys.readouterr().out.replace("\n", "")
    assert "seed-0: collected" in said and "left out" in said and "unfinished" in said
    [seeds] = load(tmp_path / "to").values()
    # of twelve images, one is assigned to another task and one has a wrong class
    assert [(task.sum(), len(task)) for task in seeds[0].correct] == [(10, 12)] * 3
    assert [task.sum() for task in seeds[0].correct_given] == [11] * 3
    assert not seeds[0].correct[0][:2].any() and seeds[0].correct_given[0][0]
    assert sorted(file.name for file in (tmp_path / "to").rglob("*.*")) == [
        "config.json",
        "record.json",
        "results.json",
        "right.npz",
    ]


def test_collecting_again_replaces_only_changed_runs(runs, tmp_path, capsys):
    collected(runs, tmp_path / "to")
    before = {
        file: (file.read_bytes(), file.stat().st_mtime_ns)
        for file in (tmp_path / "to").rglob("*.*")
    }
    capsys.readouterr()
    collected(runs, tmp_path / "to")
    assert "unchanged" in capsys.readouterr().out
    assert before == {file: (file.read_bytes(), file.stat().st_mtime_ns) for file in before}
    results = runs / "cheem/seed-0/results.json"
    results.write_text(json.dumps(json.loads(results.read_text()) | {"seconds": 1.0}))
    collected(runs, tmp_path / "to")
    assert "replaced, since it differs in results.json" in capsys.readouterr().out.replace(
        "\n", " "
    )


def test_the_record_lists_changed_conditions_of_a_resumed_run(runs, tmp_path):
    record = Record(runs / "cheem/seed-0")
    for python in ("3.11", "3.12", "3.12"):
        conditions = {"code": {"version": "0.1.0"}, "versions": {"python": python}}
        record.write("continued", conditions=conditions)
    collected(runs, tmp_path / "to")
    [run] = next(iter(load(tmp_path / "to").values())).values()
    assert run.record["continued"] == ['versions.python is "3.11" there and "3.12" here']


def test_no_path_of_the_machine_is_published(runs, tmp_path, capsys):
    collected(runs, tmp_path / "to")
    text = "".join(file.read_text() for file in (tmp_path / "to").rglob("*.json"))
    assert str(tmp_path) not in text and '"stream": "DATA"' in text
    results = runs / "cheem/seed-0/results.json"
    results.write_text(
        json.dumps(json.loads(results.read_text()) | {"source": f"from {tmp_path}/weights.npz"})
    )
    assert collected(runs, tmp_path / "other") == 1
    assert "a path of this machine" in capsys.readouterr().out.replace("\n", " ")
    assert not (tmp_path / "other").exists()


def test_paths_of_a_command_are_replaced_by_words():
    command = [
        "mtil.py",
        "--weights",
        "/a/w.npz",
        "--base-data",
        "/d/base.zip",
        "--images.cache-dir",
        "/c",
        "--tasks",
        "x",
    ]
    names = collect.placeholders(command, {"stream": "/d", "data_dir": None})
    assert [names.get(word, word) for word in command] == [
        "mtil.py",
        "--weights",
        "WEIGHTS",
        "--base-data",
        "DATA/base.zip",
        "--images.cache-dir",
        "IMAGES_CACHE_DIR",
        "--tasks",
        "x",
    ]


@pytest.mark.parametrize(
    "text", ["/home/me", "--flag=/tmp/x", "see ~/runs", r"C:\runs", "in (/srv)"]
)
def test_absolute_paths_are_detected_anywhere(text):
    assert list(collect.absolute_paths({"a": [1, {"b": text}]})) == [text]
    assert not list(
        collect.absolute_paths({"classes": [text], "a": "cpu/gpu, 1 / 2, DATA/base.zip"})
    )


def test_changed_labels_and_corrupted_predictions_are_refused_with_the_reason(
    runs, tmp_path, capsys
):
    answers = runs / "cheem/seed-0/answers.npz"
    whole = answers.read_bytes()
    answers.write_bytes(whole[:100])
    assert collected(runs, tmp_path / "to") == 1
    assert "answers.npz cannot be used" in capsys.readouterr().out.replace("\n", "")
    answers.write_bytes(whole)
    (tmp_path / "images/two/test/cat/5.png").unlink()
    assert collected(runs, tmp_path / "to") == 1
    assert "files or labels changed since the run: two" in capsys.readouterr().out.replace(
        "\n", " "
    )


def test_predictions_that_do_not_match_the_results_are_refused(runs, tmp_path, capsys):
    file = runs / "cheem/seed-0/answers.npz"
    with np.load(file) as held:
        answers = {name: held[name] for name in held.files}
    answers["chosen_task_0"][3] = 1
    np.savez_compressed(file, **answers)
    assert collected(runs, tmp_path / "to") == 1
    assert "do not give the accuracy of its results: [0.75" in capsys.readouterr().out.replace(
        "\n", " "
    )


def test_unpacked_bits_are_those_that_were_packed(tmp_path):
    rng = np.random.default_rng(0)
    right, correct_given = (tuple(rng.random(size) < 0.5 for size in (3, 17, 8)) for _ in range(2))
    (tmp_path / "right.npz").write_bytes(pack(right, correct_given))
    for unpacked, packed in zip(
        unpack(tmp_path / "right.npz"), (right, correct_given), strict=True
    ):
        assert all(np.array_equal(a, b) for a, b in zip(unpacked, packed, strict=True))


def test_two_runs_with_the_same_destination_are_refused(runs, tmp_path):
    with pytest.raises(ValueError, match="two runs would be published as"):
        collect.main(collect.Collect((runs, runs), tmp_path / "to"))
