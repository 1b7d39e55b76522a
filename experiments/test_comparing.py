"""`experiments/compare.py`: methods are compared on one stream, and finished runs are not
repeated."""

import dataclasses
import json
from pathlib import Path

import choosing
import compare
import numpy as np
import pytest
import study
import tables
from PIL import Image

from cheem_jax.baselines.catalogue import NAMES, make_preset
from cheem_jax.cheem.config import PRESETS, CheemConfig
from cheem_jax.cli import run as cheem_run
from cheem_jax.cli.running import run_command
from cheem_jax.data import streams
from cheem_jax.data.task import Split, Stream, Task
from cheem_jax.run.record import read


def stream_of_colours() -> Stream:
    rng = np.random.default_rng(0)

    def split(task: int, num: int) -> Split:
        labels = np.arange(num, dtype=np.int32) % 2
        base = np.array([[200, 30, 30], [30, 200, 30], [30, 30, 200], [200, 200, 30]], np.uint8)[
            2 * task + labels
        ]
        return Split(
            base[:, None, None] + rng.integers(0, 30, (num, 32, 32, 3)).astype(np.uint8), labels
        )

    names = ("warm", "cold")
    return Stream(
        "demo",
        tuple(
            Task(n, ("a", "b"), *(split(t, m) for m in (24, 8, 10))) for t, n in enumerate(names)
        ),
    )


@pytest.fixture
def settings(monkeypatch, tmp_path):
    stream = stream_of_colours()
    monkeypatch.setattr(streams, "demo_stream", lambda image_size: stream)
    return compare.Compare(methods="frozen_linear,diki", run_dir=tmp_path)


@pytest.mark.parametrize("method", NAMES)
@pytest.mark.parametrize("preset", ["demo", "quick", "quick_plus"])
def test_every_choice_is_among_settings_of_the_method(method, preset):
    usual = make_preset(method, preset)
    config = study.changed(usual, choosing.budget(method, preset))
    if method != "frozen_linear" and not isinstance(usual, CheemConfig):
        epochs = config.epochs if method == "full_finetune" else config.fit.epochs
        assert epochs == {"demo": 36, "quick": 16, "quick_plus": 16}[preset]
    for setting, values in choosing.grids_of(method).items():
        results = [
            study.changed(config, choosing.change(method, setting, value)) for value in values
        ]
        assert len(set(results)) == len(values) >= 2
    assert len(choosing.grids_of(method)) <= 3


@pytest.mark.parametrize(
    ("accuracies", "tried"),
    [
        ((1, 2, 3, 4), {1, 2, 3}),
        ((4, 3, 2, 1), {0, 1, 2}),
        ((9, 2, 3, 1), {1, 2, 3}),
        ((3, 3, 3, 3), {0, 1, 2}),
        ((1, 3, 2), {0, 1, 2}),
        ((3, 1, 2), {1, 2}),
        ((1, 2), {0, 1}),
        ((5, 4, 3, 2, 1), {0, 1, 2, 3}),
    ],
)
def test_a_grid_is_tried_from_the_middle_towards_the_better_side(accuracies, tried):
    calls = []

    def accuracy(number):
        calls.append(number)
        return accuracies[number]

    assert choosing.climb(accuracy, len(accuracies)) == {
        number: accuracies[number] for number in tried
    }
    assert len(calls) == len(set(calls))


@pytest.mark.full
def test_settings_are_chosen_on_validation_images_and_not_on_test_images(
    settings, monkeypatch, capsys
):
    settings = dataclasses.replace(settings, methods="diki", choose="warm,cold")
    monkeypatch.setattr(choosing, "RATES", (1e-6, 1e-2))
    monkeypatch.setitem(choosing.FURTHER, "diki", {"length": (2, 8)})
    compare.main(settings)
    rows = json.loads((settings.run_dir / "chosen.json").read_text())
    assert [row["setting"] for row in rows] == ["rate", "length"]
    for row in rows:
        assert row["chosen"] == row["values"][int(np.nanargmax(np.array(row["accuracies"], float)))]
    config = json.loads((settings.run_dir / "diki" / "seed-0" / "config.json").read_text())
    assert (config["diki"]["fit"]["learning_rate"], config["diki"]["length"]) == tuple(
        row["chosen"] for row in rows
    )
    tried = json.loads(
        (settings.run_dir / "choice" / "diki-rate-0" / "seed-0" / "config.json").read_text()
    )
    assert 2 * tried["diki"]["fit"]["epochs"] == config["diki"]["fit"]["epochs"]
    shown = (settings.run_dir / "chosen.md").read_text()
    assert "Settings chosen on warm, cold" in shown and "(an end)" in shown
    # tables of the folder leave the tries out, and a choice for another method keeps these settings
    tables.main(tables.Tables(runs=(settings.run_dir,), out=settings.run_dir / "tables"))
    page = (settings.run_dir / "tables" / "tables.md").read_text()
    assert "diki-rate-0/seed-0: measured on validation images" in page
    compare.main(dataclasses.replace(settings, methods="frozen_linear"))
    assert json.loads((settings.run_dir / "chosen.json").read_text()) == rows
    with pytest.raises(ValueError, match="were chosen on warm,cold; choose another --run-dir"):
        compare.main(dataclasses.replace(settings, choose="warm"))

    # different test images do not change the choice, and earlier tries are not repeated
    stream = streams.demo_stream(image_size=32)
    other = [
        dataclasses.replace(task, test=Split(255 - task.test.images, task.test.labels))
        for task in stream.tasks
    ]
    monkeypatch.setattr(streams, "demo_stream", lambda image_size: Stream("demo", tuple(other)))
    before = read(settings.run_dir / "choice" / "diki-rate-0" / "seed-0")
    capsys.readouterr()
    with pytest.raises(ValueError, match="contains another run: data_sha256"):
        compare.main(settings)
    assert json.loads((settings.run_dir / "chosen.json").read_text()) == rows
    assert read(settings.run_dir / "choice" / "diki-rate-0" / "seed-0") == before


CHOSEN = [
    {"method": "diki", "setting": "rate", "chosen": 1e-2},
    {"method": "diki", "setting": "layers", "chosen": "first8"},
    {"method": "diki", "setting": "cov_shrinkage", "chosen": 0.1},
    {"method": "ewc", "setting": "rate", "chosen": 1e-4},
    {"method": "ewc", "setting": "penalties", "chosen": [1e6]},
]


def test_an_earlier_choice_results_in_the_chosen_settings(tmp_path):
    file = tmp_path / "chosen.json"
    file.write_text(json.dumps(CHOSEN))
    variants = compare.variants_of(compare.Compare(methods="diki,ewc,frozen_linear"))
    results = {one.name: one.config for one in choosing.chosen_before(file, variants, "quick")}
    both = {"fit.epochs": 16, "fit.schedule": "cosine"}
    assert results == {
        "diki": both | {"fit.learning_rate": 1e-2, "layers": "first8", "cov_shrinkage": 0.1},
        "ewc": both | {"fit.learning_rate": 1e-4, "penalties": (1e6,)},
        "frozen_linear": {},
    }


def test_other_searches_have_the_settings_chosen_for_the_papers_search(tmp_path):
    file = tmp_path / "chosen.json"
    rows = [("rate", 1e-2), ("ops.rank", 64)]
    file.write_text(json.dumps([{"method": "cheem", "setting": s, "chosen": c} for s, c in rows]))
    methods = "cheem,cheem:uniform,cheem:elimination"
    variants = compare.variants_of(compare.Compare(methods=methods, preset="quick"))
    usual, elimination, uniform = choosing.chosen_before(file, variants, "quick")
    assert usual.config["ops.rank"] == 64 and usual.config["supernet.learning_rate"] == 1e-2
    assert uniform.config == {**usual.config, "sampling": "uniform"} and uniform.name != usual.name
    config = study.changed(make_preset("cheem", "quick"), elimination.config)
    plus = PRESETS["quick_plus"]
    rate = dataclasses.replace(plus.finetune, learning_rate=1e-2)
    search = {name: getattr(plus, name) for name in ("ops", "sampling", "fallback")}
    assert config == dataclasses.replace(config, finetune=rate, **search)
    for preset, epochs in (("demo", 36), ("paper", 70)):
        _, longer, _ = compare.variants_of(compare.Compare(methods=methods, preset=preset))
        usual = make_preset("cheem", preset)
        assert study.changed(usual, longer.config).finetune.epochs == epochs
        assert usual.supernet.epochs + usual.finetune.epochs == epochs


def test_references_of_the_search_keep_their_rank_and_op_when_rates_are_chosen(tmp_path):
    names = ("lora_cl", "lora_cl:new", "lora_cl:rank128", "lora_cl:rank192")
    assert compare.methods_of(",".join(names)) == list(names)
    variants = compare.variants_of(compare.Compare(methods=",".join(names)))
    rows = [{"method": variant.name, "setting": "rate", "chosen": 1e-3} for variant in variants] + [
        {"method": "lora_cl", "setting": "rank", "chosen": 64}
    ]
    file = tmp_path / "chosen.json"
    file.write_text(json.dumps(rows))
    chosen = choosing.chosen_before(file, variants, "quick")
    configs = [study.changed(make_preset("lora_cl", "quick"), one.config) for one in chosen]
    assert [(config.op, config.rank) for config in configs] == [
        ("adapt", 64),
        ("new", 1),
        ("adapt", 128),
        ("adapt", 192),
    ]
    assert {config.fit.learning_rate for config in configs} == {1e-3}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "No such file"),
        ("{", "JSONDecodeError"),
        ("[3]", "TypeError"),
        ('{"a": 1}', "it lacks 'method'"),
        ("[{}]", "it lacks 'method'"),
        ("[]", "has no rate of diki; name tasks instead"),
        (json.dumps(CHOSEN[:1]), "has no layers of diki"),
    ],
)
def test_files_that_are_not_an_earlier_choice_are_refused(
    settings, text, message, tmp_path, capsys
):
    file = tmp_path / "chosen.json"
    if text is not None:
        file.write_text(text)
    settings = dataclasses.replace(
        settings, methods="diki", choose=str(file), run_dir=tmp_path / "runs"
    )
    with pytest.raises(SystemExit) as stop:
        run_command(compare.main, settings, settings.run_dir)
    output = " ".join(capsys.readouterr().err.split())
    assert stop.value.code == 2 and message in output and str(file) in output.replace(" ", "")
    assert not settings.run_dir.exists()


@pytest.mark.full
def test_an_interrupted_comparison_resumes_and_finished_runs_do_not_change(
    settings, monkeypatch, capsys
):
    run = cheem_run.run_seed

    def stopped_after_diki(run_settings, *arguments):
        if run_settings.method == "frozen_linear":
            raise KeyboardInterrupt
        return run(run_settings, *arguments)

    monkeypatch.setattr(cheem_run, "run_seed", stopped_after_diki)
    with pytest.raises(SystemExit) as stop:
        run_command(compare.main, settings, settings.run_dir)
    assert stop.value.code == 130
    earlier = json.loads((settings.run_dir / "comparison.json").read_text())
    assert [row["method"] for row in earlier] == ["diki"]
    before = read(settings.run_dir / "diki" / "seed-0")

    monkeypatch.setattr(cheem_run, "run_seed", run)
    capsys.readouterr()
    compare.main(settings)
    output = capsys.readouterr().out
    assert (
        "seed-0 already contains all 2 tasks" in "".join(output.split("\n"))
        and "frozen, linear heads" in output
    )
    assert read(settings.run_dir / "diki" / "seed-0") == before
    rows = json.loads((settings.run_dir / "comparison.json").read_text())
    assert [row["method"] for row in rows] == ["diki", "frozen_linear"]  # in the order of the table
    assert rows[0] == earlier[0]
    results = json.loads((settings.run_dir / "diki" / "seed-0" / "results.json").read_text())
    assert rows[0]["average_accuracy"]["mean"] == results["average_accuracy"]
    assert "| DIKI |" in (settings.run_dir / "comparison.md").read_text()

    # the table of a study that is continued and interrupted again keeps all finished runs
    def stopped_at_seed_1(run_settings, *arguments):
        if run_settings.seed == 1:
            raise KeyboardInterrupt
        return run(run_settings, *arguments)

    monkeypatch.setattr(cheem_run, "run_seed", stopped_at_seed_1)
    with pytest.raises(SystemExit):
        more = dataclasses.replace(settings, seeds="0,1")
        run_command(compare.main, more, settings.run_dir)
    assert json.loads((settings.run_dir / "comparison.json").read_text()) == rows


def test_wrong_names_and_seeds_are_refused_before_any_run(settings, capsys):
    for changed, message in (
        ({"methods": "l2q"}, "unknown method 'l2q'; most similar: l2p"),
        ({"seeds": "0,x"}, "--seeds is '0,x'; expected different whole numbers"),
        ({"seeds": "1,1"}, "--seeds is '1,1'"),
        ({"seeds": ""}, "--seeds is ''"),
        ({"router": "deit_tiny"}, "--router is for cheem_lite and moe_adapters, and --methods"),
        ({"router_weights": Path("a.npz")}, "--router-weights are used with a method that needs"),
        ({"tasks": "warm,colt"}, "stream 'demo' has no task 'colt'; did you mean cold"),
        ({"order": "paper_a"}, "--order paper_a is an order of mtil"),
        ({"backbone": "vit_huge_27"}, "vit_huge_27"),
        (
            {"methods": "cheem:uniform", "choose": "warm"},
            "cheem-uniform has the settings of cheem; choose",
        ),
    ):
        with pytest.raises(SystemExit) as stop:
            run_command(compare.main, dataclasses.replace(settings, **changed), settings.run_dir)
        assert stop.value.code == 2 and message in capsys.readouterr().err
    assert not list(settings.run_dir.iterdir())


def test_all_selects_every_method_once():
    assert compare.methods_of("all") == list(compare.NAMES)
    assert compare.methods_of("l2p, cheem") == ["cheem", "l2p"]


@pytest.mark.full
def test_methods_are_compared_on_a_folder_of_tasks_with_any_backbone_and_router(tmp_path, capsys):
    stream = stream_of_colours()
    for task in stream.tasks:
        for split in task.splits:
            for index, (image, label) in enumerate(
                zip(task.splits[split].images, task.splits[split].labels, strict=True)
            ):
                file = tmp_path / "data" / task.name / split / task.classes[label] / f"{index}.png"
                file.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(image).save(file)
    settings = compare.Compare(
        stream=str(tmp_path / "data"),
        methods="frozen_linear,moe_adapters",
        backbone="vit_micro",
        run_dir=tmp_path / "runs",
    )
    compare.main(settings)
    rows = json.loads((settings.run_dir / "comparison.json").read_text())
    assert [(row["method"], row["router"]) for row in rows] == [
        ("moe_adapters", "vit_nano"),
        ("frozen_linear", "vit_micro"),
    ]
    assert (
        "MoE-Adapters: vit_nano infers the task ID"
        in (settings.run_dir / "comparison.md").read_text()
    )
    config = json.loads((settings.run_dir / "moe_adapters" / "seed-0" / "config.json").read_text())
    # the preset is quick, because none is named
    assert config["moe_adapters"]["fit"]["epochs"] == 8
