"""`experiments/router_study.py`: routers on finished runs, chosen on validation images."""

import dataclasses
import json
import shutil

import collect
import mtil
import numpy as np
import pytest
import router_study

from cheem_jax.backbone.config import CONFIGS, at_image_size
from cheem_jax.backbone.flops import executed_pass_flops
from cheem_jax.core.routing import RouterConfig
from studies.routers.trying import PAPER

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
        patched.setattr("studies.routers.trying.features_on_the_way", None)  # what the backbone said is kept
        router_study.main(settings)
    return folder, first, json.loads((folder / "out/routers.json").read_text())


@pytest.mark.full
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


@pytest.mark.full
def test_the_choice_is_by_validation_and_then_by_bytes(studied):
    _, found, _ = studied
    best = max(row["validation"] for row in found["rows"])
    near = [row for row in found["rows"] if row["validation"] >= best - router_study.NEAR_BEST]
    assert found["chosen"]["bytes_per_task"] == min(row["bytes_per_task"] for row in near)
    # 5 centroids of 48 numbers; the means of 10 classes of two patch tokens, and the triangle of their scatter
    assert found["rows"][0]["bytes_per_task"] == 4 * 5 * 48
    assert found["rows"][1]["bytes_per_task"] == 4 * (10 * 96 + 96 * 97 / 2)


@pytest.mark.full
def test_a_second_call_computes_the_same_from_what_is_kept(studied):
    _, first, again = studied
    for found in (first, again):
        for row in (*found["rows"], found["chosen"]):
            row.pop("seconds_per_task"), row.pop("microseconds_per_image")
    assert first == again


@pytest.mark.full
def test_the_page_has_a_row_for_each_router_and_task(studied):
    folder, found, _ = studied
    page = (folder / "out/routers.md").read_text()
    # once with all that is known of it and once in the list of all
    assert page.count("\n| last |") == 4 and page.count("\n| early |") == 2 and "\n| shapes |" in page
    assert f"**{found['chosen']['title']}**" in page


@pytest.fixture(scope="module")
def collected(studied):
    """Copies of both runs, and studies of one run each with the other by its copy: of seed 1, then of seed 0."""
    folder, _, _ = studied
    assert collect.main(collect.Collect((folder / "runs",), folder / "collected")) == 0
    settings = []
    for seed in (1, 0):
        shutil.copytree(folder / "out", folder / f"out-{seed}")  # what backbone and networks said is kept
        settings.append(
            router_study.RouterStudy(
                (folder / f"runs/seed-{seed}",), collected=folder / "collected", out=folder / f"out-{seed}"
            )
        )
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(router_study, "candidates", lambda: iter(FEW))
        router_study.main(settings[0])
        yield settings


def told_by(settings):
    return json.loads((settings.out / "routers.json").read_text())


@pytest.mark.full
def test_collected_runs_count_by_their_answers(studied, collected):
    _, both, _ = studied
    found = told_by(collected[0])
    assert sorted(run["seed"] for run in found["runs"]) == [0, 1]
    assert found["validated"] == [1]
    for ours, theirs in zip(found["rows"], both["rows"], strict=True):
        assert ours["flops"] == pytest.approx(theirs["flops"])
        assert ours["cheem"]["accuracy"] == pytest.approx(theirs["cheem"]["accuracy"])
    assert "with seed 1. Of" in (collected[0].out / "routers.md").read_text()


@pytest.mark.full
def test_an_earlier_study_counts_as_if_its_networks_were_still_there(studied, collected):
    folder, both, _ = studied
    earlier = collected[0].out / "routers.json"
    router_study.main(dataclasses.replace(collected[1], earlier=earlier))
    found = told_by(collected[1])
    assert found["validated"] == [0, 1] and found["chosen"]["config"] == both["chosen"]["config"]
    for ours, theirs in zip(found["rows"], both["rows"], strict=True):
        assert ours["validation"] == pytest.approx(theirs["validation"])
    assert "with seeds 0, 1. Of" in (collected[1].out / "routers.md").read_text()

    with pytest.raises(ValueError, match=r"is of CHEEM with seeds \[0, 1\] on demo; expected seeds of --collected"):
        router_study.main(dataclasses.replace(collected[1], earlier=folder / "out/routers.json"))
    with pytest.raises(ValueError, match="results.json cannot be used .*; expected a routers.json"):
        router_study.main(dataclasses.replace(collected[1], earlier=folder / "runs/seed-0/results.json"))


@pytest.mark.full
def test_an_earlier_choice_serves_new_runs_of_other_methods(studied, collected, tmp_path, monkeypatch):
    folder, both, _ = studied
    head = SHORT.split(" --cheem")[0].split()
    run = [*head, "--method", "lora_cl", "--options.fit.epochs", "1", "--run-dir", str(tmp_path / "runs")]
    mtil.main(mtil.read_arguments(run))
    monkeypatch.setattr(router_study, "candidates", lambda: iter(FEW))
    earlier, out = folder / "out/routers.json", tmp_path / "out"
    shutil.copytree(folder / "out/seen", out / "seen")
    settings = router_study.RouterStudy((tmp_path / "runs",), collected[0].collected, earlier, out=out)
    router_study.main(settings)
    found = told_by(settings)
    assert {(run["method"], run["seed"]) for run in found["runs"]} == {("lora_cl", 0), ("cheem", 0), ("cheem", 1)}
    for name in ("validated", "same_as_run"):
        assert found[name] == both[name]
    for ours, theirs in zip(found["rows"], both["rows"], strict=True):
        assert ours["validation"] == theirs["validation"]
        assert ours["cheem"]["accuracy"] == pytest.approx(theirs["cheem"]["accuracy"])
    own = json.loads((tmp_path / "runs/results.json").read_text())["average_accuracy"]
    lora = found["rows"][0]["lora_cl"]
    assert lora["runs"] == 1 and lora["accuracy"] == pytest.approx(own, abs=0.02)  # k-means begins with other seeds
    result = json.loads((tmp_path / "runs/results.json").read_text())  # its networks leave the backbone at once
    vit = at_image_size(CONFIGS["vit_nano"], result["image_size"])
    for router in FEW:
        until = router.until(vit.depth)
        counts = [router_study.behind_pass(vit, "mlp_down", task, until) for task in result["tasks"]]
        whole, begun = (executed_pass_flops(vit, "mlp_down", end) for end in (vit.depth, until))
        assert np.mean(counts) == result["flops"]["executed"] + begun - whole
    with pytest.raises(ValueError, match="hold no finished run of cheem with"):
        router_study.main(dataclasses.replace(settings, earlier=None))


@pytest.mark.full
def test_collected_runs_of_another_stream_are_refused(collected):
    folder = collected[0].collected
    shutil.rmtree(folder / "seed-1")
    file = folder / "seed-0/results.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"seed": 1, "stream": "another"}))
    with pytest.raises(ValueError, match="--collected .* contains runs of another stream"):
        router_study.main(collected[1])


def test_folders_without_a_run_of_cheem_are_refused(tmp_path):
    with pytest.raises(ValueError, match="hold no finished run of cheem"):
        router_study.main(router_study.RouterStudy((tmp_path,), out=tmp_path / "out"))
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(ValueError, match="which is not a folder"):
        router_study.main(router_study.RouterStudy((tmp_path,), out=file))
