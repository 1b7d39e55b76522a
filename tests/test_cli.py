"""What a user sees who mistypes: one line that names the value and the way out, and status 2."""

import jax
import numpy as np
import pytest
from PIL import Image

from cheem_jax.cli import main as cli_main
from cheem_jax.cli import run_command
from cheem_jax.commands.demo import Demo
from cheem_jax.data.benchmarks.table import order_of
from experiments import mtil


def write_task(folder, num_classes=2, per_class=4):
    rng = np.random.default_rng(0)
    for split in ("train", "val", "test"):
        for label in range(num_classes):
            directory = folder / split / f"class{label}"
            directory.mkdir(parents=True)
            for index in range(per_class):
                pixels = rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(directory / f"{index}.png")


def error_of(capsys, *arguments):
    """Status and standard error of the command line."""
    with pytest.raises(SystemExit) as stop:
        settings = mtil.read_arguments([*arguments])
        run_command(mtil.main, settings, settings.run_dir)
    return stop.value.code, capsys.readouterr().err


@pytest.fixture
def stream(tmp_path):
    write_task(tmp_path / "stream" / "birds")
    write_task(tmp_path / "stream" / "fish")
    return tmp_path / "stream"


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["--backbone", "deit_tinny"], "unknown backbone 'deit_tinny'; nearest: deit_tiny"),
        (["--tasks", "birds,fisch"], "fish"),
        (["--image-size", "30"], "try 24 or 32"),
        (["--weights", "nowhere.safetensors"], "nowhere.safetensors"),
        (["--base-data", "nowhere"], "nowhere"),
        (["--engine.executor", "hole"], "whole"),
        (["--engine.precision", "float8"], "bfloat16"),
        (["--engine.memory-gb", "-1"], "memory_gb is -1"),
        (["--engine.memory-gb", "1e-6"], "the activations of one batch of 64 images take"),
        (["--engine.programs", "0"], "programs is 0"),
    ],
)
def test_a_mistyped_value_is_named_with_the_way_out(capsys, stream, tmp_path, arguments, said):
    code, error = error_of(
        capsys, "--backbone", "vit_micro", "--stream", str(stream), "--run-dir", str(tmp_path / "run"), *arguments
    )
    assert code == 2 and error.startswith("error: ") and error.count("\n") == 1
    assert said in error
    assert not (tmp_path / "run").exists()


def test_a_stream_that_is_not_there_is_named(capsys, tmp_path):
    code, error = error_of(capsys, "--backbone", "vit_micro", "--stream", str(tmp_path / "gone"))
    assert code == 2 and "gone" in error and error.count("\n") == 1


def test_without_prepared_data_every_missing_task_is_told_with_its_command(capsys, tmp_path):
    code, error = error_of(capsys, "--backbone", "vit_micro", "--data-dir", str(tmp_path / "EMPTY"))
    first, *lines = error.splitlines()
    assert code == 2 and first.startswith(f"error: 11 of 11 tasks of 'mtil' are not prepared in {tmp_path}")
    assert [line.split(":")[0].strip() for line in lines] == list(order_of("mtil"))
    assert all(f"cheem data prepare {line.split(':')[0].strip()} --data-dir" in line for line in lines)
    assert "cars_train.tgz" in error and not (tmp_path / "EMPTY").exists()


def test_a_mistyped_stream_is_answered_with_what_lies_beside_it(capsys, stream, tmp_path):
    code, error = error_of(capsys, "--backbone", "vit_micro", "--stream", str(tmp_path / "streem"))
    assert code == 2 and f"did you mean {stream}?" in error
    code, error = error_of(capsys, "--backbone", "vit_micro", "--stream", "mtill")
    assert code == 2 and "did you mean mtil" in error
    code, error = error_of(capsys, "--stream", "vdd", "--order", "paper_a")
    assert code == 2 and "order 'paper_a' belongs to mtil" in error


def test_a_broken_image_is_named_and_nothing_is_begun(capsys, stream, tmp_path):
    file = stream / "fish" / "train" / "class1" / "2.png"
    file.write_bytes(file.read_bytes()[:60])
    code, error = error_of(
        capsys, "--backbone", "vit_micro", "--stream", str(stream), "--run-dir", str(tmp_path / "run")
    )
    assert code == 2 and "2.png" in error and not (tmp_path / "run").exists()


def test_an_unknown_command_is_named(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["cheem", "demmo"])
    with pytest.raises(SystemExit) as stop:
        cli_main()
    assert (
        stop.value.code == 2
        and "unknown command 'demmo'; expected one of: demo, report, watch, " in capsys.readouterr().err
    )


@pytest.mark.parametrize("option", [["--presett", "quick"], ["--preset", "fast"], ["--seed", "one"]])
def test_an_unknown_option_or_value_ends_with_status_2(capsys, option):
    with pytest.raises(SystemExit) as stop:
        mtil.read_arguments(option)
    error = capsys.readouterr().err
    assert stop.value.code == 2 and error.startswith("error: ") and error.count("\n") == 1
    assert option[0] in error


def test_an_unknown_option_is_answered_with_the_nearest(capsys):
    with pytest.raises(SystemExit):
        mtil.read_arguments(["--image-sise", "32"])
    assert "--image-size" in capsys.readouterr().err


def test_a_senseless_setting_of_the_method_is_named(capsys, stream):
    code, error = error_of(capsys, "--stream", str(stream), "--cheem.search.tolerance", "2")
    assert code == 2 and "tolerance is 2" in error


def test_ctrl_c_says_how_to_go_on(capsys, tmp_path):
    def interrupted(settings):
        raise KeyboardInterrupt

    with pytest.raises(SystemExit) as stop:
        run_command(interrupted, Demo(run_dir=tmp_path), tmp_path)
    assert stop.value.code == 130
    assert f"Finished tasks are in {tmp_path}" in capsys.readouterr().err


def test_the_preset_decides_the_defaults_and_options_change_them():
    settings = mtil.read_arguments(["--preset", "quick", "--cheem.search.generations", "9"])
    assert settings.cheem.supernet.epochs == 8 and settings.cheem.search.generations == 9
    assert mtil.read_arguments(["--preset=quick"]).cheem.batch_size == 32
    assert mtil.read_arguments([]).cheem.supernet.epochs == 50


@pytest.mark.parametrize(
    "error", [MemoryError(), jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes.")]
)
def test_out_of_memory_names_what_to_change(capsys, error):
    def command(settings):
        raise error

    with pytest.raises(SystemExit) as stop:
        run_command(command, None)
    said = capsys.readouterr().err
    assert stop.value.code == 2 and said.count("\n") == 1
    assert "out of memory" in said and "batch size" in said and "memory_gb" in said


def test_a_cache_of_programs_that_cannot_be_written_is_no_reason_to_stop(capsys, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    enabled, done = jax.config.jax_enable_compilation_cache, []
    try:
        jax.config.update("jax_enable_compilation_cache", True)
        run_command(done.append, "settings")
    finally:
        jax.config.update("jax_enable_compilation_cache", enabled)
    assert done == ["settings"] and "JAX_COMPILATION_CACHE_DIR" in capsys.readouterr().err
