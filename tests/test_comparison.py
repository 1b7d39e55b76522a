"""The table over methods: means and deviations over seeds, FoM, empty cells that stay empty."""

import csv
import io

import pytest

from cheem_jax.report.comparison import comparison, comparison_grid, narrow, to_csv


def run(method, accuracy, flops, seed=0, forgetting=0.0, router="vit_micro"):
    return {
        "method": method,
        "seed": seed,
        "router": router,
        "backbone": "vit_micro",
        "stream": "demo",
        "preset": "demo",
        "image_size": 32,
        "tasks": [{}, {}],
        "average_accuracy": accuracy,
        "local_average_accuracy": accuracy + 0.05,
        "just_trained": [accuracy, accuracy + 0.1],
        "average_forgetting": forgetting,
        "local_average_forgetting": None,
        "flops": {"paper": flops, "explicit": flops, "executed": flops},
        "params_learned": 10.0,
        "params_stored": 2000,
        "params_added_percent": 1.0,
        "seconds": 3.5,
    }


FOUND = {
    "cheem": [run("cheem", 0.80, 2e6), run("cheem", 0.84, 2e6, seed=1)],
    "l2p": [run("l2p", 0.60, 4e6)],
    "moe_adapters": [run("moe_adapters", 0.5, 4e6, router="vit_nano")],
    "full_finetune": [run("full_finetune", 0.87, 1e6)],
}


def test_cells_are_means_with_the_deviation_over_seeds():
    rows = {row["method"]: row for row in comparison(FOUND)}
    assert rows["cheem"]["runs"] == 2 and rows["cheem"]["seeds"] == [0, 1]
    assert rows["cheem"]["average_accuracy"]["mean"] == pytest.approx(0.82)
    assert rows["cheem"]["average_accuracy"]["std"] == pytest.approx(0.02 * 2**0.5)
    assert rows["l2p"]["average_accuracy"]["std"] is None
    assert rows["cheem"]["just_trained"]["mean"] == pytest.approx(0.87)
    assert rows["cheem"]["local_average_forgetting"] is None


def test_the_figure_of_merit_follows_the_paper_and_needs_both_cheem_and_the_bound():
    rows = {row["method"]: row for row in comparison(FOUND)}
    # upper 0.92: gaps 0.32 and 0.10, twice the FLOPs
    assert rows["l2p"]["fom"]["mean"] == pytest.approx(0.32 / 0.10 * 2)
    assert rows["cheem"]["fom"] is None and rows["full_finetune"]["fom"] is None
    without = {
        row["method"]: row for row in comparison({"cheem": FOUND["cheem"], "l2p": FOUND["l2p"]})
    }
    assert without["l2p"]["fom"] is None


def test_the_figure_of_merit_recognises_rows_by_the_method_of_their_runs():
    names = {"cheem": "CHEEM", "full_finetune": "full fine-tuning"}
    titled = {names.get(method, method): runs for method, runs in FOUND.items()}
    rows = {row["method"]: row["fom"] for row in comparison(titled)}
    assert rows["l2p"]["mean"] == pytest.approx(0.32 / 0.10 * 2)
    assert rows["CHEEM"] is None and rows["full fine-tuning"] is None
    variant = {"CHEEM (uniform)": [run("cheem", 0.7, 2e6)]}
    assert not any(row["fom"] for row in comparison(titled | variant))  # which of the two?
    rows = {row["method"]: row["fom"] for row in comparison(FOUND | variant)}
    assert rows["l2p"]["mean"] == pytest.approx(0.32 / 0.10 * 2)
    assert rows["CHEEM (uniform)"]["mean"] == pytest.approx(0.22 / 0.10)


def test_methods_of_unknown_flops_or_accuracy_have_no_figure_of_merit():
    unknown = {"ewc": [run("ewc", 0.6, 0.0)], "tuna": [run("tuna", 0.6, 1e6)]}
    unknown["tuna"][0]["average_accuracy"] = None
    rows = {row["method"]: row["fom"] for row in comparison(FOUND | unknown)}
    assert rows["l2p"] and rows["ewc"] is rows["tuna"] is None
    without = {"cheem": [run("cheem", 0.8, 0.0)]}
    assert not any(row["fom"] for row in comparison(FOUND | without))


def test_upper_bounds_have_no_accuracy_without_the_task():
    (row,) = comparison({"full_finetune": FOUND["full_finetune"]})
    assert row["average_accuracy"] is None and row["average_forgetting"] is None
    grid = comparison_grid({"full_finetune": FOUND["full_finetune"]})
    assert grid.rows[0][1] == "–"


def test_the_table_names_the_routers_network_and_fits_a_narrow_terminal():
    grid = comparison_grid(FOUND)
    assert "MoE-Adapters: vit_nano infers the task ID" in grid.caption
    assert grid.rows[0][:3] == ("CHEEM", "2", "82.0 ± 2.8")
    small = narrow(grid)
    assert len(small.columns) == len(grid.columns) - 7
    assert all(len(row) == len(small.columns) for row in small.rows)


def test_the_csv_contains_every_number_and_leaves_missing_ones_empty():
    rows = list(csv.DictReader(io.StringIO(to_csv(comparison(FOUND)))))
    assert [row["method"] for row in rows] == list(FOUND)
    assert float(rows[0]["average_accuracy"]) == pytest.approx(0.82)
    assert rows[3]["average_accuracy"] == "" and rows[1]["average_accuracy_std"] == ""
