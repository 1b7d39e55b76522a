"""Studies that consist of runs: their runs and their files."""

import csv
import dataclasses
import json
from pathlib import Path
from typing import Any

import ablations
import compare
import pytest
import study
from launching import LauncherConfig
from PIL import Image

from cheem_jax.baselines.lora_cl import LoraClConfig
from cheem_jax.cheem.config import PRESETS, CheemConfig
from cheem_jax.cli import run as cheem_run
from cheem_jax.cli.running import run_command


def results_of(
    method="cheem", accuracy=0.8, flops=5e9, seed=0, names=("shapes", "letters"), **more
) -> dict[str, Any]:
    """Make the parts of a run's results that studies read."""
    matrix = [[accuracy, None], [accuracy - 0.1, accuracy]]
    tasks = [
        {
            "name": name, "classes": ["a", "b"], "num_train": 9, "params_added_percent": 2.0,
            "architecture": ["reuse:0", "skip", "new", "adapt:0"], "experts": [0, None, 1, 1],
            "seconds": {"supernet": 6.0, "search": 3.0, "evaluation": 100.0},
        }
        for name in names
    ]  # fmt: skip
    base = {"kind": "full", "origin": "base"}
    return {
        "stream": "demo",
        "backbone": "vit_micro",
        "method": method,
        "router": "vit_micro",
        "image_size": 32,
        "preset": "demo",
        "seed": seed,
        "accuracy": matrix,
        "tasks": tasks,
        "average_accuracy": accuracy - 0.05,
        "average_forgetting": 0.1,
        "local_average_accuracy": accuracy,
        "local_average_forgetting": 0.0,
        "just_trained": [accuracy, accuracy],
        "flops": {"paper": flops, "explicit": None, "executed": flops},
        "params_learned": 10.0,
        "params_stored": 20,
        "params_added_percent": 2.0,
        "seconds": 18.0,
        "compile": {"programs": 3, "cached": 0, "seconds": 4.0},
        "engine": {"device": "cpu: cpu"},
        "pool": [[base], [base], [base, base], [base, base]],
    } | more


def settings_of(*arguments: str) -> ablations.Ablations:
    return ablations.parse(ablations.Ablations, list(arguments))


def test_each_ablation_changes_one_setting_and_all_share_the_unchanged_cheem():
    studies = ablations.studies_of(settings_of())
    assert list(studies) == [
        "epsilon",
        "tolerance",
        "sampling",
        "placement",
        "ops",
        "weights",
        "base_means",
        "plus",
        "orders",
    ]
    usual = PRESETS["demo"]
    for name, variants in studies.items():
        assert sum(variant.name == "cheem" for variant in variants) == 1
        for variant in variants:
            config = study.run_settings(settings_of(), variant, 3).cheem
            changed = {key for key in vars(usual) if getattr(config, key) != getattr(usual, key)}
            expected = {
                "epsilon": {"exploration", "search"},
                "tolerance": {"search"},
                "ops": {"remove"},
                "plus": {"router"},
            }
            is_usual = variant.name in ("cheem", "s_prompts", "lora_cl")
            assert (
                changed <= expected.get(name, {name}) and bool(changed or variant.run) != is_usual
            ), variant
    folders = [variant.name for study_of in studies.values() for variant in study_of]
    assert len(set(folders)) == len(folders) - len(studies) + 1


def test_a_preset_without_a_supernet_has_no_ablations():
    with pytest.raises(ValueError, match="--preset quick_plus has no supernet"):
        ablations.studies_of(settings_of("--preset", "quick_plus"))


def test_a_variant_is_a_run_of_mtil_with_a_separate_folder():
    settings = settings_of(
        "--stream", "FOLDER", "--image-size", "96", "--seeds", "4", "--base-data", "PICTURES"
    )
    variant = study.Variant(
        "epsilon-0.9", "", config={"exploration.epsilon": 0.9, "search.epsilon": 0.9}
    )
    run = study.run_settings(settings, variant, 4)
    assert (run.stream, run.image_size, run.seed, run.preset) == ("FOLDER", 96, 4, "quick")
    assert (run.cheem.exploration.epsilon, run.cheem.search.epsilon) == (0.9, 0.9)
    assert run.cheem.search.population == PRESETS["quick"].search.population
    assert (
        run.run_dir == settings.run_dir / "epsilon-0.9" / "seed-4" and run.base_data == "PICTURES"
    )
    baseline = study.run_settings(settings, study.Variant("lora_cl", "", "lora_cl", {"rank": 3}), 4)
    assert (
        isinstance(cheem_run.make_method_config(baseline), LoraClConfig)
        and baseline.base_data is None
    )
    assert cheem_run.make_run_config(baseline).method.rank == 3  # pyright: ignore[reportAttributeAccessIssue]


def test_the_option_augment_is_a_setting_of_cheem():
    configs = [
        cheem_run.make_method_config(cheem_run.read_arguments([f"--{prefix}augment"]))
        for prefix in ("", "cheem.")
    ]
    assert configs == [dataclasses.replace(PRESETS["paper"], augment=True)] * 2
    with pytest.raises(
        ValueError, match="--augment is a setting of cheem, which lora_cl does not have; omit it"
    ):
        cheem_run.make_method_config(cheem_run.read_arguments(["--method", "lora_cl", "--augment"]))


def test_seeds_and_settings_follow_from_the_stream_and_the_preset():
    assert settings_of().chosen_preset == "demo" and settings_of().chosen_seeds == [0]
    assert settings_of("--stream", "mtil").chosen_preset == "quick"
    assert settings_of("--stream", "vdd", "--preset", "paper").chosen_seeds == [0, 1, 2]
    assert settings_of("--preset", "paper", "--seeds", "7").chosen_seeds == [7]


def test_mtil_runs_three_seeds_with_the_papers_settings():
    runs = cheem_run.split_seeds(cheem_run.read_arguments(["--run-dir", "/r", "--seed", "5"]))
    assert [(run.seed, str(run.run_dir), run.num_seeds) for run in runs] == [
        (5, "/r/seed-5", 1),
        (6, "/r/seed-6", 1),
        (7, "/r/seed-7", 1),
    ]
    (one,) = cheem_run.split_seeds(
        cheem_run.read_arguments(["--run-dir", "/r", "--preset", "quick"])
    )
    assert (one.seed, str(one.run_dir)) == (0, "/r")
    with pytest.raises(ValueError, match="--num-seeds is 0; expected at least 1"):
        cheem_run.split_seeds(cheem_run.read_arguments(["--num-seeds", "0"]))


@pytest.mark.parametrize(
    ("module", "arguments", "message"),
    [
        (
            ablations,
            ["--only", "epsilon,tau"],
            "--only names 'tau'; expected some of: epsilon, tolerance",
        ),
        (ablations, ["--order", "paper_a"], "the study `orders` sets the order"),
        (ablations, ["--tasks", "digits"], "orders need at least two"),
        (
            ablations,
            ["--only", "base_means", "--image-size", "16", "--backbone", "vit_nano"],
            "the study base_means needs --base-data, because the weights have no base means at 16",
        ),
        (compare, ["--methods", "chem"], "unknown method 'chem'"),
        pytest.param(
            compare,
            ["--methods", "cheem_lite", "--router", "alexnet", "--image-size", "64"],
            "weights of AlexNet are not part of the package",
            marks=pytest.mark.full,
        ),
        (compare, ["--seeds", "-1"], "--seeds is '-1'"),
    ],
)
def test_wrong_values_are_refused_before_any_run(module, arguments, message, tmp_path, capsys):
    kind = next(
        value
        for value in vars(module).values()
        if isinstance(value, type) and value.__module__ == module.__name__
    )
    with pytest.raises(SystemExit) as stop:
        settings = module.parse(kind, [*arguments, "--run-dir", str(tmp_path / "runs")])
        run_command(module.main, settings, settings.run_dir)
    assert stop.value.code == 2 and message in capsys.readouterr().err
    assert not list(tmp_path.rglob("seed-*"))


def test_ablations_are_written_with_shares_of_ops_and_spreads(tmp_path):
    settings = settings_of("--only", "sampling,ops,epsilon,tolerance")
    studies = ablations.studies_of(settings)
    names = {variant.name for variants in studies.values() for variant in variants} - {"no-new"}
    results = {name: [results_of(seed=0), results_of(accuracy=0.9, seed=1)] for name in names}
    grids = ablations.write(tmp_path, studies, results)
    assert list(grids) == ["epsilon", "tolerance", "sampling", "ops"]
    row = dict(zip(grids["sampling"].columns, grids["sampling"].rows[0], strict=True))
    assert (
        row["average\naccuracy"] == "80.0 ± 7.1"
        and row["reuse"] == "25 %"
        and row["variant"] == "HEE"
    )
    assert [line[0] for line in grids["ops"].rows] == [
        "all four ops",
        "without reuse",
        "without adapt",
        "without skip",
    ]
    assert [line[0] for line in grids["tolerance"].rows] == [
        "tau = 1 %",
        "tau = 2 %",
        "tau = 4 %",
        "tau = 6 %",
        "tau = 8 %",
        "S-Prompts",
        "LoRA-CL",
    ]
    numbers = json.loads((tmp_path / "ablations.json").read_text())
    assert numbers["sampling"][0]["average_accuracy"]["mean"] == pytest.approx(0.8)
    assert "## ops" in (tmp_path / "ablations.md").read_text()
    with (tmp_path / "ops.csv").open(newline="") as file:
        assert [line["new"] for line in csv.DictReader(file)] == ["25 %"] * 4
    ablations.draw(tmp_path, studies, results)
    for name in ("epsilon", "tolerance", "sampling"):
        with Image.open(tmp_path / f"{name}.png") as picture:
            assert picture.width > 500 and len(picture.convert("RGB").getcolors(1 << 20)) > 20


def test_orders_of_a_stream_are_distinct_and_its_default_order_is_first():
    settings = ablations.Ablations(tasks="a,b,c", only="orders")
    orders = [variant.run.get("tasks") for variant in ablations.studies_of(settings)["orders"]]
    assert orders[0] is None and "a,b,c" not in orders and len(set(orders)) == 3
    assert len(ablations.orders_of(dataclasses.replace(settings, tasks="a,b"))) == 1
    names = [variant.run for variant in ablations.orders_of(ablations.Ablations(stream="mtil"))]
    assert names == [{"order": "paper_a"}, {"order": "paper_b"}, {"order": "paper_c"}]


def test_training_time_excludes_evaluation_and_has_a_deviation_over_runs(tmp_path):
    slow = results_of(seed=1)
    for task in slow["tasks"]:
        task["seconds"] = {"supernet": 8.0, "search": 3.0, "evaluation": 100.0}
    phases = compare.phases_of([results_of(), slow])
    assert phases == {
        "supernet": {"mean": 7.0, "std": pytest.approx(2**0.5)},
        "search": {"mean": 3.0, "std": 0.0},
    }
    compare.write(tmp_path, {"cheem": [results_of()], "l2p": [results_of("l2p")]})
    page = (tmp_path / "training_time.md").read_text()
    assert "| CHEEM | 1 | 9.0 | 1.00 | 4.0 | supernet 6.0, search 3.0 |" in page


def test_times_of_different_devices_are_not_compared(tmp_path):
    results = {"cheem": [results_of()], "l2p": [results_of("l2p", engine={"device": "gpu: H200"})]}
    compare.write(tmp_path, results)
    (tmp_path / "training_time.csv").write_text("of an earlier call")
    compare.write(tmp_path, results)
    assert not (tmp_path / "training_time.csv").exists()
    page = (tmp_path / "training_time.md").read_text()
    assert "the runs had different devices (cpu: cpu, gpu: H200)" in page and "9.0" not in page


def test_more_than_one_seed_is_refused_in_the_folder_of_one_run(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="contains a run of one seed"):
        cheem_run.split_seeds(cheem_run.read_arguments(["--run-dir", str(tmp_path)]))


def test_a_folder_with_different_settings_is_refused_before_any_run(tmp_path):
    settings = ablations.Ablations(tasks="shapes,colours", only="orders", run_dir=tmp_path)
    variants = ablations.studies_of(settings)["orders"]
    expected = study.expected_config(study.run_settings(settings, variants[1], 0))
    assert (
        expected["tasks"] == ["colours", "shapes"] and expected["cheem"]["supernet"]["epochs"] == 12
    )
    folder = tmp_path / "order-2" / "seed-0"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(
        json.dumps({**expected, "seed": 1, "data_sha256": {"shapes": "x"}})
    )
    with pytest.raises(ValueError, match="order-2.*seed is 1 there and 0 here"):
        study.run_all(settings, variants, compare.Progress(), lambda results: None)
    other = {**expected, "backbone": "vit_nano"}
    (folder / "config.json").write_text(json.dumps(other))
    with pytest.raises(ValueError, match='backbone is "vit_nano" there and "vit_micro" here'):
        study.run_all(settings, variants, compare.Progress(), lambda results: None)
    assert [file.name for file in tmp_path.iterdir()] == ["order-2"]
    job = compare.Compare(
        methods="frozen_linear", run_dir=tmp_path / "jobs", launcher=LauncherConfig("local")
    )
    (variant,) = compare.variants_of(job)
    folder = tmp_path / "jobs" / "frozen_linear" / "seed-0"
    folder.mkdir(parents=True)
    expected = study.expected_config(study.run_settings(job, variant, 0))
    (folder / "config.json").write_text(json.dumps({**expected, "tasks": ["shapes"]}))
    with pytest.raises(ValueError, match="contains another run: tasks"):
        study.run_all(job, [variant], compare.Progress())


def test_methods_with_a_router_are_run_with_each_router():
    weights = Path("a.safetensors")
    settings = compare.Compare(
        methods="cheem,cheem_lite", router="deit_tiny,alexnet", router_weights=weights
    )
    assert [
        (v.name, v.run.get("router"), v.run.get("router_weights"))
        for v in compare.variants_of(settings)
    ] == [
        ("cheem", None, None),
        ("cheem_lite-deit_tiny", "deit_tiny", None),
        ("cheem_lite-alexnet", "alexnet", weights),
    ]
    (one,) = compare.variants_of(compare.Compare(methods="moe_adapters", router_weights=weights))
    assert (one.name, one.run) == (
        "moe_adapters",
        {"router": "vit_nano", "router_weights": weights},
    )


def test_an_op_is_removed_on_the_command_line():
    settings = cheem_run.read_arguments(
        ["--cheem.remove", "new", "skip", "--cheem.weights", "inherited"]
    )
    assert isinstance(settings.cheem, CheemConfig) and settings.cheem.remove == ("new", "skip")
