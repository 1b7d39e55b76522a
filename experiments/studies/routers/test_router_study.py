"""`experiments/router_study.py`: routers on collected runs, chosen on validation images."""

import dataclasses
import json
import shutil

import collect
import numpy as np
import pytest
import router_study

from cheem_jax.cli import run as cheem_run
from cheem_jax.core.routing import PAPER, RouterConfig

HEAD = "--stream demo --preset demo --backbone vit_nano --tasks shapes,letters"
SHORT = (
    f"{HEAD} --cheem.supernet.epochs 1 --cheem.finetune.epochs 1 --cheem.search.generations 1 "
    "--cheem.search.population 2 --cheem.search.num-parents 2 --num-seeds 2"
)
FEW = (PAPER, RouterConfig("lda", "early"), RouterConfig(features="levels", num_centroids=20))


@pytest.fixture(scope="module")
def studied(tmp_path_factory):
    """Three collected runs, their study, and the numbers that a second call writes."""
    folder = tmp_path_factory.mktemp("routers")
    for name, command in (("cheem", SHORT), ("frozen_linear", f"{HEAD} --method frozen_linear")):
        cheem_run.run_seeds(
            cheem_run.read_arguments([*command.split(), "--run-dir", str(folder / "runs" / name)])
        )
    assert collect.main(collect.Collect((folder / "runs",), folder / "collected")) == 0
    settings = router_study.RouterStudy(results=folder / "collected", out=folder / "out")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(router_study, "candidates", lambda: iter(FEW))
        router_study.main(settings)
        first = json.loads((folder / "out/routers.json").read_text())
        # features are read from the first call's files
        patched.setattr("studies.routers.trying.intermediate_features", None)
        router_study.main(settings)
    return folder, first, json.loads((folder / "out/routers.json").read_text())


@pytest.mark.full
def test_the_papers_router_fitted_again_is_that_of_the_runs(studied):
    folder, study, _ = studied
    assert study["same_answers"] == 1.0 and study["runs"] == {
        "CHEEM": [0, 1],
        "frozen, linear heads": [0],
    }
    runs = [
        json.loads((folder / f"runs/cheem/seed-{seed}/results.json").read_text()) for seed in (0, 1)
    ]
    heads = json.loads((folder / "runs/frozen_linear/results.json").read_text())
    paper, early = study["rows"][:2]
    assert paper["methods"]["CHEEM"]["accuracy"] == pytest.approx(
        np.mean([run["average_accuracy"] for run in runs])
    )
    assert paper["methods"]["frozen, linear heads"]["accuracy"] == pytest.approx(
        heads["average_accuracy"]
    )
    assert paper["methods"]["CHEEM"]["gain"]["value"] == 0
    for name in ("paper", "executed"):
        assert paper["flops"][name] == pytest.approx(np.mean([run["flops"][name] for run in runs]))
        # half of the backbone infers the task ID
        assert early["flops"][name] < paper["flops"][name]


@pytest.mark.full
def test_the_router_is_chosen_by_validation_accuracy_and_then_by_bytes(studied):
    _, study, _ = studied
    best = max(row["found"]["val"] for row in study["rows"])
    near = [row for row in study["rows"] if row["found"]["val"] >= best - router_study.NEAR_BEST]
    assert study["chosen"]["bytes_per_task"] == min(row["bytes_per_task"] for row in near)
    # 5 centroids of 48 numbers; the means of 10 classes over two patch tokens, the numbers of their
    # images, and the triangle of their scatter matrix
    assert study["rows"][0]["bytes_per_task"] == 4 * 5 * 48
    assert study["rows"][1]["bytes_per_task"] == 4 * (10 * 96 + 10 + 96 * 97 / 2)


@pytest.mark.full
def test_a_second_call_computes_the_same_from_stored_features(studied):
    _, first, again = studied
    for study in (first, again):
        for row in (*study["rows"], study["chosen"]):
            row.pop("seconds_per_task"), row.pop("microseconds_per_image")
    assert first == again


@pytest.mark.full
def test_without_runs_the_task_ids_of_the_same_images_are_inferred_alike(studied, monkeypatch):
    folder, first, _ = studied
    monkeypatch.setattr(router_study, "candidates", lambda: iter(FEW))
    out = folder / "alone"
    router_study.main(
        router_study.RouterStudy(tasks="shapes,letters", backbone="vit_nano", out=out)
    )
    study = json.loads((out / "routers.json").read_text())
    assert study["runs"] == {} and study["same_answers"] is None
    assert study["rows"][1]["found"] == first["rows"][1]["found"]  # LDA does not depend on a seed
    assert "CHEEM" not in (out / "routers.md").read_text()


@pytest.mark.full
def test_the_page_has_a_row_for_each_router(studied):
    folder, study, _ = studied
    page = (folder / "out/routers.md").read_text()
    # the paper's router, the chosen one and the best of each kind, then all routers
    assert page.count("\n| last |") == 2 and page.count("\n| early |") == 2
    assert f"**{study['chosen']['title']}**" in page


@pytest.mark.full
def test_images_and_weights_that_differ_from_the_runs_are_refused(studied, tmp_path):
    folder, _, _ = studied
    settings = router_study.RouterStudy(results=folder / "collected", out=tmp_path / "out")
    for name, key, value, message in (
        (
            "config.json",
            "weights_sha256",
            "0" * 64,
            "began with weights 000000000000, but those of 'vit_nano'",
        ),
        (
            "config.json",
            "data_sha256",
            {"shapes": "0", "letters": "0"},
            "had other images or labels of shapes, letters than 'demo' contains here",
        ),
    ):
        shutil.copytree(folder / "collected", tmp_path / key)
        for file in (tmp_path / key).rglob(name):
            file.write_text(json.dumps(json.loads(file.read_text()) | {key: value}))
        with pytest.raises(ValueError, match=message):
            router_study.main(dataclasses.replace(settings, results=tmp_path / key))


def test_options_that_the_runs_determine_are_refused(tmp_path):
    settings = router_study.RouterStudy(results=tmp_path, backbone="vit_nano", image_size=32)
    with pytest.raises(ValueError, match="determine backbone, image_size; omit --backbone, --imag"):
        router_study.main(settings)


def test_folders_without_a_collected_run_are_refused(tmp_path):
    with pytest.raises(ValueError, match="contains no collected run"):
        router_study.main(router_study.RouterStudy(results=tmp_path, out=tmp_path / "out"))
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(ValueError, match="which is not a folder"):
        router_study.main(router_study.RouterStudy(results=tmp_path, out=file))
