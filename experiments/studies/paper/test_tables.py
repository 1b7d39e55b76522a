"""The paper's tables: its printed numbers, and our numbers next to them."""

import csv
import json
import tempfile
from pathlib import Path

import numpy as np
import pytest
import tables

from cheem_jax.cheem.config import QUICK_PLUS
from cheem_jax.core.metrics import average_accuracy
from cheem_jax.data.benchmarks.table import MTIL
from cheem_jax.report.finished import check_comparable, describe_variant, read
from studies.paper.printed import Cell, printed, recomputed_fom

TASKS = ("shapes", "letters")
UNEVEN = {
    ("mtil", "deit_tiny", "coda_prompt"),
    ("mtil", "deit_tiny", "dualprompt"),
    ("vdd", "vit_base", "tuna"),
}
"""Figures of merit that do not follow from the printed numbers."""


def test_the_papers_figures_of_merit_follow_from_its_accuracies_and_flops():
    off = set()
    for cell, number in printed()["fom"].items():
        figures = recomputed_fom(cell.stream, cell.backbone, cell.method)
        assert figures is not None
        if abs(figures / number.value - 1) > 0.03:
            off.add((cell.stream, cell.backbone, cell.method))
    assert len(printed()["fom"]) == 36 and off == UNEVEN


def test_the_papers_averages_follow_from_its_full_rows():
    full = printed()["full"]
    averages = [cell for cell in full if cell.measure == "average_accuracy"]
    assert len(averages) == 46
    for cell in averages:
        method = cell._replace(measure="accuracy")
        row = [
            number.value
            for other, number in full.items()
            if other.task and other._replace(task="") == method
        ]
        assert len(row) == {"mtil": 11, "vdd": 9}[cell.stream]
        accuracy = np.full((len(row), len(row)), np.nan)
        accuracy[-1] = row
        assert average_accuracy(accuracy) == pytest.approx(full[cell].value, abs=0.01), cell


def write_run(directory: Path, method="cheem", seed=0, accuracy=0.8, **changed) -> Path:
    """Write the parts of a run's files that tables read."""
    num_tasks = len(changed.get("tasks", TASKS))
    matrix = [[accuracy, None], [accuracy - 0.02, accuracy]][:num_tasks]
    matrix = [row[:num_tasks] for row in matrix]
    results = {
        "stream": "demo",
        "backbone": "vit_micro",
        "method": method,
        "placement": "mlp_down",
        "router": "vit_micro",
        "image_size": 32,
        "seed": seed,
        "preset": "paper",
        "split_sha256": {"shapes": "a", "letters": "b"},
        "accuracy": matrix,
        "local_accuracy": matrix,
        "average_accuracy": accuracy - 0.01,
        "average_forgetting": 0.02,
        "local_average_accuracy": accuracy - 0.01,
        "just_trained": [accuracy, accuracy],
        "flops": {"paper": 5e9},
        "params_added_percent": 1.5,
        "seconds": 7200.0,
        "tasks": [
            {"name": name, "num_test": 50, "flops_method": 4e9, "seconds": {"supernet": 1800.0}}
            for name in TASKS
        ],
    }
    config = {
        "tasks": list(TASKS),
        "seed": seed,
        "cheem": {"sampling": "hee"},
        "data_sha256": {"shapes": "x"},
    }
    for key, value in changed.items():
        (results if key in results else config)[key] = value
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "results.json").write_text(json.dumps(results))
    return directory


def rows_of(file: Path) -> dict[str, dict[str, str]]:
    with file.open(newline="") as opened:
        return {row["method"]: row for row in csv.DictReader(opened)}


def run_tables(tmp_path: Path, *names: str) -> Path:
    out = tmp_path / "out"
    tables.main(tables.Tables(runs=(tmp_path / "runs",), out=out, only=",".join(names)))
    return out


def test_cells_are_means_over_seeds_with_the_number_of_runs(tmp_path):
    for seed, accuracy in enumerate((0.8, 0.84)):
        write_run(tmp_path / f"runs/cheem/{seed}", seed=seed, accuracy=accuracy)
    write_run(tmp_path / "runs/bound", "full_finetune", accuracy=0.91)
    write_run(tmp_path / "runs/lora", "lora_cl", accuracy=0.71)
    out = run_tables(tmp_path, "breakdown", "fom", "upper_bounds", "training_time", "full")
    rows = rows_of(out / "breakdown-5.csv")  # after the paper's four tables
    assert rows["CHEEM"] == {
        "method": "CHEEM",
        "accuracy %, ours": "81.00 ± 2.83 (2)",
        "forgetting, ours": "2.00 ± 0.00 (2)",
        "GFLOPs, ours": "5.00 ± 0.00 (2)",
    }
    # (90 - 70) / (90 - 81) * 5 / 5
    assert rows_of(out / "fom-5.csv")["LoRA-CL"]["FoM, ours"] == "2.22"
    assert rows_of(out / "upper_bounds-5.csv")["full fine-tuning"]["forgetting, ours"] == ""
    hours = rows_of(out / "training_time-2.csv")
    assert (
        hours["CHEEM"]["hours, ours"] == "1.00 ± 0.00 (2)"
        and hours["CHEEM, supernet"]["hours, ours"][:4] == "0.50"
    )
    assert rows_of(out / "full-5.csv")["LoRA-CL"]["shapes, ours"] == "69.00 (1)"


def test_class_incremental_accuracies_weigh_images_and_old_results_get_them(tmp_path):
    sizes = {"flops_method": 4e9, "seconds": {}}
    tasks = [
        {"name": name, "num_test": num, **sizes} for name, num in zip(TASKS, (30, 10), strict=True)
    ]
    write_run(tmp_path / "runs/cheem", tasks=tasks)
    write_run(tmp_path / "runs/bound", "full_finetune", tasks=tasks)
    table = rows_of(run_tables(tmp_path, "class_incremental") / "class_incremental.csv")
    # rows 0.8 and 0.78, 0.8: (30 * 0.78 + 10 * 0.8) / 40 = 0.785; Ā = (0.8 + 0.785) / 2
    assert table["CHEEM"]["last accuracy %, ours"] == "78.50 (1)"
    assert table["CHEEM"]["Ā %, ours"] == "79.25 (1)"
    assert table["full fine-tuning"]["Ā %, ours"] == ""
    assert table["full fine-tuning"]["Ā, task ID given %, ours"] == "79.25 (1)"
    assert table["CHEEM"]["params added %, ours"] == "1.50 (1)"
    assert table["CHEEM"]["seconds, ours"] == "7200.00 (1)"


def test_our_numbers_are_next_to_those_of_the_paper(tmp_path):
    write_run(tmp_path / "runs/a", stream="mtil", backbone="deit_tiny", router="deit_tiny")
    row = rows_of(run_tables(tmp_path, "placement") / "placement-2.csv")["CHEEM, mlp_down"]
    assert (row["accuracy %, ours"], row["accuracy %, paper"]) == ("79.00 (1)", "74.51")


def test_variants_and_orders_have_separate_tables(tmp_path):
    write_run(tmp_path / "runs/1")
    write_run(tmp_path / "runs/2", cheem={"sampling": "uniform"}, accuracy=0.7)
    tasks_reversed = [
        {"name": name, "num_test": 50, "flops_method": 4e9, "seconds": {}}
        for name in reversed(TASKS)
    ]
    write_run(tmp_path / "runs/3", tasks=tasks_reversed, accuracy=0.6)
    out = run_tables(tmp_path, "breakdown", "sampling", "task_orders")
    assert rows_of(out / "breakdown-5.csv")["CHEEM"]["accuracy %, ours"] == "79.00 (1)"
    assert rows_of(out / "sampling-3.csv")["CHEEM, uniform"]["accuracy %, ours"] == "69.00 (1)"
    orders = rows_of(out / "task_orders-2.csv")
    assert orders["CHEEM, reversed"]["accuracy %, ours"] == "59.00 (1)"
    assert orders["CHEEM, reversed"]["shapes, ours"] == "60.00 (1)"  # by name, not by position


def test_a_run_counts_once_and_variants_are_not_averaged(tmp_path):
    write_run(tmp_path / "runs/1")
    write_run(tmp_path / "runs/copy")
    write_run(tmp_path / "runs/uniform", cheem={"sampling": "uniform"}, accuracy=0.5)
    for router in ("vit_nano", "alexnet"):
        write_run(
            tmp_path / f"runs/{router}", "cheem_lite", router=router, router_weights_sha256=router
        )
    out = tmp_path / "out"
    tables.main(
        tables.Tables(
            runs=(tmp_path / "runs", tmp_path / "runs/1"), out=out, only="lite,full,components"
        )
    )
    lite = rows_of(out / "lite-5.csv")
    assert lite["CHEEM, vit_micro"]["accuracy %, ours"] == "79.00 (1)"
    assert {"CHEEM-lite, vit_nano", "CHEEM-lite, alexnet"} <= set(lite)
    assert rows_of(out / "full-5.csv")["CHEEM"]["shapes, ours"] == "78.00 (1)"
    assert "copy: the same run as" in (out / "tables.md").read_text()
    assert not (out / "components-2.csv").exists()  # no table of ours, because no run belongs to it


def test_the_benchmarks_orders_have_the_papers_names(tmp_path):
    names = MTIL["paper_b"].split()
    tasks = [{"name": name, "num_test": 50, "flops_method": 1e9, "seconds": {}} for name in names]
    matrix = [[0.5] * len(names)] * len(names)
    write_run(
        tmp_path / "runs/b",
        stream="mtil",
        backbone="vit_base",
        router="vit_base",
        tasks=tasks,
        accuracy=0.5,
        local_accuracy=matrix,
    )
    config = tmp_path / "runs/b/config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"tasks": names}))
    results = tmp_path / "runs/b/results.json"
    results.write_text(json.dumps(json.loads(results.read_text()) | {"accuracy": matrix}))
    row = rows_of(run_tables(tmp_path, "task_orders") / "task_orders.csv")["CHEEM, paper_b"]
    assert (row["sun397, ours"], row["sun397, paper"]) == ("50.00 (1)", "66.86")


def test_two_runs_of_one_seed_count_once_for_any_executor(tmp_path):
    write_run(tmp_path / "runs/a", engine={"executor": "stages", "precision": "float32"})
    write_run(tmp_path / "runs/b", engine={"executor": "scan", "precision": "float32"})
    runs, left_out = read([tmp_path / "runs"])
    assert len(runs) == 1 and left_out == [
        (tmp_path / "runs/b", f"the same run as {tmp_path / 'runs/a'}")
    ]


def test_runs_with_different_tasks_are_refused_with_the_names_of_the_tasks(tmp_path):
    write_run(tmp_path / "runs")
    (run, *_), _ = read([tmp_path / "runs"])
    shapes, letters = run.results["tasks"]
    other = run._replace(results={**run.results, "tasks": [shapes, {**letters, "name": "digits"}]})
    with pytest.raises(ValueError, match="but only one of them has digits, letters"):
        check_comparable([run, other])


def test_different_precisions_and_presets_are_refused(tmp_path):
    write_run(tmp_path / "runs/1")
    write_run(tmp_path / "runs/2", seed=1, engine={"precision": "bfloat16"})
    with pytest.raises(ValueError, match="precision is .float32. in the first and .bfloat16."):
        run_tables(tmp_path, "breakdown")
    write_run(tmp_path / "other/2", "l2p", preset="quick, changed")
    with pytest.raises(ValueError, match="but preset is "):
        tables.main(
            tables.Tables(runs=(tmp_path / "runs/1", tmp_path / "other"), out=tmp_path / "out")
        )


def test_runs_on_different_data_are_refused_with_the_difference(tmp_path):
    write_run(tmp_path / "runs/1")
    write_run(tmp_path / "runs/2", "lora_cl", split_sha256={"shapes": "a", "letters": "other"})
    differ = (
        r"both demo on vit_micro, but split_sha256.letters is .(b. in the first and .other|other."
        r" in the first and .b). in the second"
    )
    with pytest.raises(ValueError, match=differ):
        run_tables(tmp_path, "breakdown")
    assert not (tmp_path / "out").exists()


def test_runs_with_different_settings_do_not_share_a_cell(tmp_path):
    write_run(tmp_path / "runs/1")
    write_run(tmp_path / "runs/2", seed=1, cheem={"sampling": "hee", "batch_size": 7})
    with pytest.raises(ValueError, match="would share cells, but cheem.batch_size is"):
        run_tables(tmp_path, "breakdown")


def test_unfinished_and_corrupted_runs_are_listed_separately(tmp_path, capsys):
    write_run(tmp_path / "runs/good")
    (write_run(tmp_path / "runs/started", "lora_cl") / "results.json").unlink()
    (write_run(tmp_path / "runs/broken", "l2p") / "results.json").write_text("{")
    (write_run(tmp_path / "runs/empty", "tuna") / "results.json").write_text(
        '{"stream": "demo", "tasks": []}'
    )
    write_run(
        tmp_path / "runs/short",
        "diki",
        tasks=[{"name": "shapes", "num_test": 50, "flops_method": 1, "seconds": {}}],
    )
    page = (run_tables(tmp_path, "breakdown") / "tables.md").read_text()
    assert "started: unfinished: no results yet" in page
    assert "broken: corrupted" in page and "empty: corrupted" in page
    assert "short: unfinished: 1 of 2 tasks are missing" in page
    assert "L2P" not in page.split("demo, vit_micro")[1].split("##")[0]
    assert "left out" in capsys.readouterr().out


def test_a_folder_without_a_finished_run_is_refused(tmp_path):
    (tmp_path / "runs").mkdir()
    with pytest.raises(
        ValueError, match=r"no finished run below .*runs; expected finished run directories"
    ):
        tables.main(tables.Tables((tmp_path / "runs",), out=tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_wrong_names_are_refused(tmp_path):
    with pytest.raises(
        ValueError, match=r"--only names 'foms'; expected some of: fom, .*components"
    ):
        run_tables(tmp_path, "foms")
    with pytest.raises(ValueError, match="is not a folder; give a folder that contains runs"):
        run_tables(tmp_path, "fom")
    (tmp_path / "runs").mkdir()
    (tmp_path / "out").touch()
    with pytest.raises(ValueError, match="--out names .*, which is not a folder"):
        run_tables(tmp_path, "fom")


def test_latex_is_escaped_and_tables_are_made_without_runs(tmp_path):
    out = tmp_path / "out"
    tables.main(tables.Tables(out=out, only="breakdown"))
    text = (out / "breakdown-1.tex").read_text()
    assert r"accuracy \%, paper" in text and r"44.6 $\pm$ 6.4" in text and r"vit\_base" in text
    assert Cell("mtil", "vit_base", "ewc", "flops") in printed()["breakdown"]


def test_runs_with_base_means_of_different_images_do_not_share_a_cell(tmp_path):
    def of(*changes: dict[str, str | None]):
        folder = Path(tempfile.mkdtemp(dir=tmp_path))
        for seed, change in enumerate(changes):
            write_run(folder / str(seed), seed=seed, **change)
        return read([folder])[0]

    measured = {"base_means_sha256": None, "base_data_sha256": "a"}
    check_comparable(of(measured, measured))
    with pytest.raises(
        ValueError,
        match='share cells, but base_data_sha256 is "a" in the first and null in the s',
    ):
        check_comparable(of(measured, {**measured, "base_data_sha256": None}))
    with pytest.raises(
        ValueError,
        match='share cells, but base_data_sha256 is "a" in the first and "b" in the s',
    ):
        check_comparable(of(measured, {**measured, "base_data_sha256": "b"}))


def test_a_different_router_or_search_is_a_variant_of_any_method(tmp_path):
    early = {"router": {"kind": "lda", "features": "early"}}
    search = {"search": {"tolerance": 0.1}}
    write_run(tmp_path / "a", "lora_cl", lora_cl=early)
    write_run(tmp_path / "b", "cheem", cheem={**early, **search})
    figures = {run.results["method"]: describe_variant(run) for run in read([tmp_path])[0]}
    assert figures["lora_cl"] == "router lda early"
    assert figures["cheem"] == "tau 0.1, router lda early"
    closed_form = {"score": "closed_form", "search": {"tolerance": 0.1}}
    write_run(tmp_path / "d", "cheem", cheem={**early, **closed_form})
    [run] = read([tmp_path / "d"])[0]
    assert describe_variant(run) == "closed-form score, tau 0.1, router lda early"
    for rank, text in (
        (QUICK_PLUS.ops.truncated_rank, ""),
        (16, "truncated to rank 16"),
        (None, "not truncated"),
    ):
        elimination = {"sampling": "anchored", "ops": {"truncated_rank": rank}}
        write_run(tmp_path / f"e{rank}", "cheem", cheem=elimination)
        [run] = read([tmp_path / f"e{rank}"])[0]
        assert describe_variant(run) == ", ".join(filter(None, ("elimination", text)))
    write_run(tmp_path / "c/1", "lora_cl", lora_cl={"op": "new", "rank": 1})
    write_run(tmp_path / "c/2", "lora_cl", lora_cl={"op": "adapt", "rank": 192}, seed=1)
    variants = [describe_variant(run) for run in read([tmp_path / "c"])[0]]
    assert variants == ["new in every block", "rank 192"]
