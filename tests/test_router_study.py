"""`experiments/router_study.py`: routers on finished runs, chosen on validation images."""

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "experiments"))  # as where it is run
import collect
import mtil
import router_study
from routers.second_look import Looked, by_task, decide
from routers.trying import PAPER

from cheem_jax.routing.config import RouterConfig

SHORT = (
    "--stream demo --preset demo --backbone vit_nano --tasks shapes,letters --cheem.supernet.epochs 1 "
    "--cheem.finetune.epochs 1 --cheem.search.generations 1 --cheem.search.population 2 --cheem.search.num-parents 2"
)
FEW = (PAPER, RouterConfig("lda", "early"), RouterConfig("ridge", "levels", projections=50), RouterConfig("gaussian"))


@pytest.fixture(scope="module")
def studied(tmp_path_factory):
    """Two runs, the study of them, and what a second call of it writes."""
    folder = tmp_path_factory.mktemp("routers")
    mtil.main(mtil.read_arguments([*SHORT.split(), "--num-seeds", "2", "--run-dir", str(folder / "runs")]))
    settings = router_study.RouterStudy((folder / "runs",), out=folder / "out")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(router_study, "candidates", lambda: iter(FEW))
        router_study.main(settings)
        first = json.loads((folder / "out/routers.json").read_text())
        patched.setattr("routers.seen.features_on_the_way", None)  # what the backbone said is kept
        router_study.main(settings)
    return folder, first, json.loads((folder / "out/routers.json").read_text())


def test_the_papers_router_made_again_is_that_of_the_runs(studied):
    folder, found, _ = studied
    assert found["same_as_run"] == [1.0, 1.0]
    runs = [json.loads((folder / f"runs/seed-{seed}/results.json").read_text()) for seed in (0, 1)]
    own = np.mean([run["average_accuracy"] for run in runs])
    assert found["rows"][0]["cheem"]["accuracy"] == pytest.approx(own)
    assert found["rows"][0]["cheem"]["gain"]["value"] == 0
    for name in ("paper", "executed"):
        assert found["rows"][0]["flops"][name] == pytest.approx(np.mean([run["flops"][name] for run in runs]))
        assert found["rows"][1]["flops"][name] < found["rows"][0]["flops"][name]  # half of the backbone names the task


def test_the_choice_is_by_validation_and_then_by_bytes(studied):
    _, found, _ = studied
    best = max(row["validation"] for row in found["rows"])
    near = [row for row in found["rows"] if row["validation"] >= best - router_study.NEAR_BEST]
    assert found["chosen"]["bytes_per_task"] == min(row["bytes_per_task"] for row in near)
    # 5 centroids of 48 numbers; the means of 10 classes of two patch tokens, and the triangle of their scatter
    assert found["rows"][0]["bytes_per_task"] == 4 * 5 * 48
    assert found["rows"][1]["bytes_per_task"] == 4 * (10 * 96 + 96 * 97 / 2)


def test_a_second_call_computes_the_same_from_what_is_kept(studied):
    _, first, again = studied
    for found in (first, again):
        for row in (*found["rows"], found["chosen"]):
            row.pop("seconds_per_task"), row.pop("microseconds_per_image")
    assert first == again


def test_alone_the_second_looks_router_is_the_chosen_one(studied):
    _, found, _ = studied
    alone = np.mean([one["alone"] for one in found["second_look"]])
    assert alone == pytest.approx(found["chosen"]["cheem"]["accuracy"])
    assert all(0 <= row["second"] <= 1 for one in found["second_look"] for row in one["rows"])


def test_the_page_has_a_row_for_each_router_and_task(studied):
    folder, found, _ = studied
    page = (folder / "out/routers.md").read_text()
    assert page.count("\n| last |") == 2 and page.count("\n| early |") == 1 and "\n| shapes |" in page
    assert f"**{found['chosen']['title']}**" in page


def test_close_calls_are_decided_by_router_and_heads():
    # the second task is right for all three; its head is surer of the first two, and the router sure of the second
    looked = Looked(
        np.array([1, 1, 1]), np.array([4, 4, 4]), np.array([[0, 1]] * 3), np.array([1.0, 9.0, 1.0]),
        np.log(np.array([[0.5, 0.9], [0.5, 0.9], [0.9, 0.5]])), np.array([[4, 4]] * 3),
    )  # fmt: skip
    right, second = decide(looked, closest=2.0, scale=10.0, weight=1.0)
    assert right.tolist() == [True, False, False] and second == pytest.approx(2 / 3)
    assert not decide(looked, closest=2.0, scale=1.0, weight=1.0)[0].any()  # the router's lead counts ten times more
    assert [own.tolist() for own in by_task(looked, right)] == [[], [True, False, False]]


def test_collected_runs_count_by_their_answers(studied, monkeypatch):
    folder, found, _ = studied
    assert collect.main(collect.Collect((folder / "runs",), folder / "collected")) == 0
    shutil.copytree(folder / "out/seen", folder / "few/seen")
    monkeypatch.setattr(router_study, "candidates", lambda: iter(FEW))
    settings = router_study.RouterStudy(
        (folder / "runs/seed-0",), collected=folder / "collected", out=folder / "few"
    )  # fmt: skip
    router_study.main(settings)
    few = json.loads((folder / "few/routers.json").read_text())
    assert (
        few["runs"] == found["runs"] and few["validated"] == [0] and [one["seed"] for one in few["second_look"]] == [0]
    )
    for ours, both in zip(few["rows"], found["rows"], strict=True):
        for name in ("cheem", "flops"):
            assert ours[name] == both[name]
    assert "with seed 0, by which" in (folder / "few/routers.md").read_text()

    shutil.rmtree(folder / "collected/seed-1")
    changed = json.loads((folder / "collected/seed-0/results.json").read_text())
    changed["seed"], changed["stream"] = 1, "another"
    (folder / "collected/seed-0/results.json").write_text(json.dumps(changed))
    with pytest.raises(ValueError, match="--collected .* holds runs of another stream"):
        router_study.main(settings)


def test_folders_without_a_run_of_cheem_are_refused(tmp_path):
    with pytest.raises(ValueError, match="hold no finished run of cheem"):
        router_study.main(router_study.RouterStudy((tmp_path,), out=tmp_path / "out"))
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(ValueError, match="which is no folder"):
        router_study.main(router_study.RouterStudy((tmp_path,), out=file))
