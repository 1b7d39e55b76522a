"""Tables, figures and the written report, from results made up by rule."""

import io
from typing import Any

import numpy as np
import pytest
from PIL import Image
from rich.console import Console

from cheem_jax.core.architecture import from_strings
from cheem_jax.core.settings import COLOURS
from cheem_jax.report import figures, table
from cheem_jax.report.table import setting_rows, spread

OPS = ("reuse:0", "adapt:0", "new", "skip", "reuse:0")


def made_up(names: list[str], num_blocks: int, backbone: str, image_size: int) -> dict[str, Any]:
    """Return results in the form of `results.json`, with numbers derived from positions."""
    num_tasks = len(names)
    pool: list[list[dict]] = [
        [{"origin": "base", "kind": "full", "parent": None}] for _ in range(num_blocks)
    ]
    tasks, similarity = [], []
    for index, name in enumerate(names):
        architecture = [OPS[(2 * index + block) % len(OPS)] for block in range(num_blocks)]
        if index == 2:
            architecture[0] = f"reuse:{len(pool[0]) - 1}"
        for block, choice in enumerate(from_strings(architecture)):
            if choice.kind in ("adapt", "new"):
                kind = "adapted" if choice.kind == "adapt" else "full"
                pool[block].append({"origin": index, "kind": kind, "parent": choice.expert})
        similarity.append(
            [
                [None if (i, b) == (1, 2) else (b - i) / 12 for b in range(num_blocks)]
                for i in range(index + 1)
            ]
        )
        tasks.append(
            {
                "name": name,
                "classes": ["a", "b"],
                "num_train": 1000 + index,
                "num_test": 100,
                "architecture": architecture,
                "flops": 29_000_000,
                "params_added_percent": 2.5,
                "params_added": 23_000,
                "head_params": 200,
                "centroid_params": 960,
                "seconds": {"similarity": 1.0, "supernet": 20.0 + index, "search": 5.0},
            }
        )
    local = [
        [0.9 - 0.03 * j if j <= i else None for j in range(num_tasks)] for i in range(num_tasks)
    ]
    routed = [
        [0.8 - 0.03 * j if j <= i else None for j in range(num_tasks)] for i in range(num_tasks)
    ]
    return {
        "method": "cheem",
        "backbone": backbone,
        "stream": "made-up",
        "seed": 0,
        "placement": "mlp_down",
        "preset": "quick",
        "image_size": image_size,
        "base_means": "neutral",
        "source": "bundled",
        "accuracy": routed,
        "local_accuracy": local,
        "average_accuracy": 0.7123,
        "average_forgetting": 0.0214,
        "local_average_accuracy": 0.8123,
        "local_average_forgetting": 0.0,
        "just_trained": local[-1],
        "routing": np.eye(num_tasks).tolist(),
        "flops": {"paper": 58_300_000, "executed": 67_500_000},
        "params_added_percent": 2.5,
        "peak_memory_bytes": 1_300_000_000,
        "tasks": tasks,
        "pool": pool,
        "similarity": similarity,
        "compile": {"programs": 41, "seconds": 33.3},
        "seconds_total": 222.2,
        "references": {
            "frozen_linear": {
                "accuracy": routed,
                "local_accuracy": local,
                "average_accuracy": 0.5511,
                "average_forgetting": 0.03,
                "local_average_accuracy": 0.5611,
                "flops": {"paper": 29_000_000, "executed": 31_000_000},
                "params_added_percent": 0,
                "seconds": 61.0,
            },
            "full_finetune": {
                "local_accuracy": local[-1],
                "average_accuracy": 0.8456,
                "seconds": 503.0,
            },
        },
        "fom": {"frozen_linear": None},
    }


SMALL = ["digits", "letters", "textures"]
LARGE = ["caltech101", *(f"task_{index}" for index in range(9)), "daimler_pedestrians"]


def on_paper(what) -> str:
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(what)
    return console.export_text()


def test_the_final_table_has_a_row_per_method_with_units():
    text = on_paper(table.method_grid(made_up(SMALL, 8, "vit_micro", 32)).to_rich())
    rows = {line.split("  ")[0].strip(): line for line in text.splitlines()}
    assert "71.2" in rows["CHEEM"]
    assert "81.2" in rows["CHEEM"]
    assert "2.1" in rows["CHEEM"]
    assert "58.3 M" in rows["CHEEM"]
    assert "55.1" in rows["frozen, linear heads"]
    assert "84.6" in rows["full fine-tuning"] and "–" in rows["full fine-tuning"]
    assert "FoM against frozen: – (points below full FT: CHEEM 13.3, frozen 29.4)" in text


@pytest.mark.parametrize(
    ("names", "num_blocks", "backbone", "size"),
    [(SMALL, 8, "vit_micro", 32), (LARGE, 12, "deit_tiny", 96)],
)
def test_the_task_table_keeps_each_task_on_one_line_of_100_columns(
    names, num_blocks, backbone, size
):
    results = made_up(names, num_blocks, backbone, size)
    text = on_paper(table.task_grid(results).without(table.SIZES).to_rich())
    for index, task in enumerate(results["tasks"]):
        (line,) = [line for line in text.splitlines() if f"T{index + 1} {task['name']} " in line]
        assert table.letters(task["architecture"]) in line
        assert f"{100 * results['accuracy'][-1][index]:.1f}" in line


def test_a_run_without_references_has_its_tables():
    results = made_up(["only"], 4, "some_other_vit", 64) | {
        "references": {},
        "fom": None,
        "average_forgetting": None,
    }
    results["local_average_forgetting"] = None
    assert "CHEEM" in on_paper(table.method_grid(results).to_rich())
    assert "29.0 M" in on_paper(
        table.task_grid(results).without(table.SIZES).to_rich()
    )  # no config, no share: the plain number


def test_the_title_of_an_axis_is_whole_next_to_long_names_of_tasks(tmp_path):
    results = made_up(SMALL, 8, "vit_micro", 32)
    averages = {"incremental_accuracy": 0.7, "local_incremental_accuracy": 0.8}
    tasks = [task | {"name": "daimler_pedestrians"} for task in results["tasks"]]
    figures.accuracy_curve(results | averages | {"tasks": tasks}, tmp_path / "curve.png")
    with Image.open(tmp_path / "curve.png") as image:
        assert np.asarray(image.convert("L"))[:3, :80].min() == 255


def test_a_run_of_an_upper_bound_has_no_accuracy_with_the_task_id_inferred(tmp_path):
    averages = {"last_accuracy": 0.7, "incremental_accuracy": 0.7, "params_stored": 1}
    averages |= {"local_last_accuracy": 0.8, "local_incremental_accuracy": 0.8}
    results = made_up(SMALL, 8, "vit_micro", 32) | averages | {"method": "lora_finetune"}
    results |= {"references": {}, "fom": None}
    (row,) = table.method_grid(results).rows
    assert row[1:6] == ("–", "–", "–", "81.2", "–")
    assert not any("right" in column for column in table.task_grid(results).columns)
    assert "inferred" not in table.task_grid(results).caption
    widths = {}
    for method in ("cheem", "lora_finetune"):
        figures.accuracy_heatmap(results | {"method": method}, tmp_path / "matrix.png")
        figures.accuracy_curve(results | {"method": method}, tmp_path / "curve.png")
        with Image.open(tmp_path / "matrix.png") as matrix, Image.open(tmp_path / "curve.png") as c:
            blue = (np.asarray(c.convert("RGB")) == (0x1F, 0x77, 0xB4)).all(axis=-1).any()
            widths[method] = matrix.width, blue
    assert widths["lora_finetune"][0] < 0.8 * widths["cheem"][0]
    assert [blue for _, blue in widths.values()] == [True, False]


@pytest.mark.parametrize("draw", [figures.architecture_grid, figures.accuracy_heatmap])
@pytest.mark.parametrize(("names", "num_blocks"), [(SMALL, 8), (LARGE, 12)])
def test_figures_are_png_files_that_grow_with_the_stream_and_leave_no_text_outside(
    tmp_path, draw, names, num_blocks
):
    file = tmp_path / "figures" / "drawn.png"
    draw(made_up(names, num_blocks, "deit_tiny", 96), file)
    with Image.open(file) as image:
        image.load()
        assert image.format == "PNG"
        assert image.width > 75 * num_blocks
        assert image.height > 30 * len(names)
        pixels = np.asarray(image.convert("RGB"))
    assert 0.05 < (pixels != 255).any(axis=-1).mean() < 0.9  # neither blank nor flooded
    frame = np.concatenate([pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]])
    assert (frame == 255).all()  # ink on the edge would be cut-off text
    assert [result.name for result in file.parent.iterdir()] == ["drawn.png"]


def test_the_figure_of_the_accuracy_over_all_classes_so_far_has_no_text_outside(tmp_path):
    results = made_up(LARGE, 12, "deit_tiny", 96)
    results |= {"incremental_accuracy": 0.7, "local_incremental_accuracy": None}
    results["local_accuracy"][1][0] = None  # not measured: a gap
    figures.accuracy_curve(results, tmp_path / "curve.png")
    with Image.open(tmp_path / "curve.png") as image:
        pixels = np.asarray(image.convert("RGB"))
    assert 0.01 < (pixels != 255).any(axis=-1).mean() < 0.5
    frame = np.concatenate([pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]])
    assert (frame == 255).all()


def test_the_grid_paints_every_op_in_its_colour(tmp_path):
    results = made_up(SMALL, 8, "vit_micro", 32)
    figures.architecture_grid(results, tmp_path / "grid.png")
    pixels = np.asarray(Image.open(tmp_path / "grid.png").convert("RGB")).reshape(-1, 3)
    kinds = [
        choice.kind for task in results["tasks"] for choice in from_strings(task["architecture"])
    ]
    painted = {}
    for kind, colour in COLOURS.items():
        rgb = [int(colour[start : start + 2], 16) for start in (1, 3, 5)]
        painted[kind] = (pixels == rgb).all(axis=1).sum()
    per_cell = 0.74 * 0.46 * 0.86 * 0.78 * figures.DPI**2  # a cell's rounded box in pixels
    for kind, count in painted.items():
        assert 0.6 < count / (per_cell * kinds.count(kind)) < 1.2, kind


@pytest.mark.full
def test_a_thousand_tasks_with_long_names_still_make_figures_that_can_be_read(tmp_path):
    results = made_up(
        [f"a task with a rather long name, number {index}" for index in range(120)],
        2,
        "vit_micro",
        32,
    )
    results |= {"tasks": results["tasks"] * 9}
    figures.architecture_grid(results, tmp_path / "grid.png")
    with Image.open(tmp_path / "grid.png") as picture:
        assert picture.height < 61 * 0.5 * figures.DPI + 500  # 60 of 1,080 tasks under the base
    results["tasks"] = results["tasks"][:120]
    figures.accuracy_heatmap(results, tmp_path / "accuracy.png")
    with Image.open(tmp_path / "accuracy.png") as picture:
        assert picture.width < 2 * 30 * 0.6 * figures.DPI + 1000


def test_a_selection_of_many_is_spread_evenly_from_the_first_to_the_last():
    assert spread(5, 9) == [0, 1, 2, 3, 4] and spread(1, 9) == [0]
    assert spread(1000, 4) == [0, 333, 666, 999]


def test_the_settings_are_those_that_the_results_have():
    results = {"method": "cheem", "image_size": 96, "router": None, "base_means": "neutral"}
    rows = dict(setting_rows(results))
    assert rows["method"] == "cheem" and rows["image size"] == "96"
    assert "router" not in rows and "seed" not in rows and "base means" in rows
