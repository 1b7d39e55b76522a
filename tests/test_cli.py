"""Mistyped commands: one line names the value and the way out, and the status is 2."""

import contextlib
import errno
import io
import os
import re
import shlex
import subprocess
import sys
import types
from pathlib import Path

import jax
import numpy as np
import pytest
from commands import cheem
from PIL import Image

import cheem_jax
from cheem_jax.cli import completion, data
from cheem_jax.cli import run as cheem_run
from cheem_jax.cli.commands import COMMANDS, GROUPS
from cheem_jax.cli.demo import Demo
from cheem_jax.cli.main import main as cli_main
from cheem_jax.cli.running import run_command
from cheem_jax.core.atomic import write_atomically
from cheem_jax.data.benchmarks.table import task_order

ROOT = Path(__file__).parent.parent


def write_task(folder, num_classes=2, per_class=4):
    rng = np.random.default_rng(0)
    for split in ("train", "val", "test"):
        for label in range(num_classes):
            directory = folder / split / f"class{label}"
            directory.mkdir(parents=True)
            for index in range(per_class):
                pixels = rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(directory / f"{index}.png")


def end_of(capsys, command, settings=None, directory=None):
    """Run a command until it ends the process, and return status and standard error."""
    with pytest.raises(SystemExit) as stop:
        run_command(command, settings, directory, computes=False)
    return stop.value.code, capsys.readouterr().err


def error_of(capsys, *arguments):
    """Return status and standard error of `cheem run`."""
    with pytest.raises(SystemExit) as stop:
        settings = cheem_run.read_arguments(["--backbone", "vit_micro", *map(str, arguments)])
        run_command(cheem_run.run_seeds, settings, settings.run_dir)
    return stop.value.code, capsys.readouterr().err


def raises(error):
    """A command that ends in an error."""

    def command(*_):
        raise error

    return command


@pytest.fixture
def stream(tmp_path):
    write_task(tmp_path / "stream" / "birds")
    write_task(tmp_path / "stream" / "fish")
    return tmp_path / "stream"


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["--backbone", "deit_tinny"], "unknown backbone 'deit_tinny'; most similar: deit_tiny"),
        (["--tasks", "birds,fisch"], "fish"),
        (["--image-size", "30"], "try 24 or 32"),
        (["--weights", "nowhere.safetensors"], "nowhere.safetensors"),
        (["--base-data", "nowhere"], "nowhere"),
        (["--router-weights", "nowhere.npz"], "of the network that --router names; give both"),
        (["--seed", "-1"], "seed is -1; expected an integer from 0 to 4294967295"),
        (["--seeds.search", "4294967296"], "expected an integer from 0"),
        (["--save-every", "nan"], "save_every is nan; expected seconds, 0 or more"),
        (["--engine.executor", "hole"], "whole"),
        (["--engine.precision", "float8"], "bfloat16"),
        (["--engine.memory-gb", "-1"], "memory_gb is -1"),
        (["--engine.memory-gb", "1e-6"], "the activations of one batch of 64 images need"),
        (["--engine.programs", "0"], "programs is 0"),
    ],
)
def test_a_mistyped_value_is_named_with_the_way_out(capsys, stream, tmp_path, arguments, said):
    code, error = error_of(capsys, "--stream", stream, "--run-dir", tmp_path / "run", *arguments)
    assert code == 2 and error.startswith("error: ") and error.count("\n") == 1
    assert said in error
    assert not (tmp_path / "run").exists()


def test_a_stream_that_is_not_there_is_named(capsys, tmp_path):
    code, error = error_of(capsys, "--stream", tmp_path / "gone")
    assert code == 2 and "gone" in error and error.count("\n") == 1


def test_without_prepared_data_every_missing_task_is_reported_with_its_command(capsys, tmp_path):
    code, error = error_of(capsys, "--data-dir", tmp_path / "EMPTY")
    first, *lines = error.splitlines()
    assert code == 2
    assert first.startswith(f"error: 11 of 11 tasks of 'mtil' are not prepared in {tmp_path}")
    assert [line.split(":")[0].strip() for line in lines] == list(task_order("mtil"))
    assert all(
        f"cheem data prepare {line.split(':')[0].strip()} --data-dir" in line for line in lines
    )
    assert "--stream FOLDER" in first
    assert "cars_train.tgz" in error and not (tmp_path / "EMPTY").exists()


def test_a_mistyped_stream_is_answered_with_the_names_next_to_it(
    capsys, stream, tmp_path, monkeypatch
):
    code, error = error_of(capsys, "--stream", tmp_path / "streem")
    assert code == 2 and f"did you mean {stream}?" in error
    with monkeypatch.context() as patch:
        patch.chdir(tmp_path)
        (tmp_path / "pets").mkdir()
        code, error = error_of(capsys, "--stream", "petz")
        assert code == 2 and "did you mean pets?" in error
    code, error = error_of(capsys, "--stream", "mtill")
    assert code == 2 and "did you mean mtil" in error
    code, error = error_of(capsys, "--stream", "vdd", "--order", "paper_a")
    assert code == 2 and "order 'paper_a' belongs to mtil" in error


def test_a_broken_image_is_named_and_nothing_is_begun(capsys, stream, tmp_path):
    file = stream / "fish" / "train" / "class1" / "2.png"
    file.write_bytes(file.read_bytes()[:60])
    code, error = error_of(capsys, "--stream", stream, "--run-dir", tmp_path / "run")
    assert code == 2 and "2.png" in error and not (tmp_path / "run").exists()


def test_a_preset_that_changes_cheem_alone_says_so_of_another_method(capsys, tmp_path):
    options = ["--backbone", "vit_micro", "--data-dir", str(tmp_path), "--preset", "quick_plus"]
    note = "preset quick_plus only affects CHEEM; frozen_linear uses the settings of quick\n"
    for method, has_note in (("frozen_linear", True), ("cheem", False)):
        settings = cheem_run.read_arguments([*options, "--method", method])
        with pytest.raises(SystemExit):
            run_command(cheem_run.run_seeds, settings)
        assert (note in capsys.readouterr().out) == has_note


def test_help_is_a_command_too(capsys, monkeypatch):
    printed = []
    for words in (["help"], ["--help"], ["help", "forget"], ["forget", "--help"]):
        monkeypatch.setattr("sys.argv", ["cheem", *words])
        with contextlib.suppress(SystemExit):
            cli_main()
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1] != printed[2] == printed[3] and "TASK" in printed[2]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS])
def test_a_full_or_read_only_disk_is_reported_with_path_room_and_way_out(
    capsys, monkeypatch, tmp_path, number
):
    def refuse(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", refuse)
    file = tmp_path / "a.json"
    for command, place in (
        (lambda _: write_atomically(file, 3000 * "x"), file),
        (refuse, tmp_path),
    ):
        code, error = end_of(capsys, command, directory=tmp_path)
        assert code == 2 and error.startswith(f"error: {place} cannot be written: ")
        assert "choose a folder" in error and os.strerror(number) in error
        assert ("2.9 kB must be written" in error) == (place == file)


@pytest.mark.parametrize(
    "option", [["--presett", "quick"], ["--preset", "fast"], ["--seed", "one"]]
)
def test_an_unknown_option_or_value_ends_with_status_2(capsys, option):
    with pytest.raises(SystemExit) as stop:
        cheem_run.read_arguments(option)
    error = capsys.readouterr().err
    assert stop.value.code == 2 and error.startswith("error: ") and error.count("\n") == 1
    assert option[0] in error


def test_an_unknown_option_is_answered_with_the_nearest(capsys):
    with pytest.raises(SystemExit):
        cheem_run.read_arguments(["--image-sise", "32"])
    assert "--image-size" in capsys.readouterr().err


def test_a_senseless_setting_of_the_method_is_named(capsys, stream):
    code, error = error_of(capsys, "--stream", stream, "--cheem.search.tolerance", "2")
    assert code == 2 and "tolerance is 2" in error


def test_ctrl_c_prints_the_command_that_resumes(capsys, tmp_path):
    for settings in (Demo(run_dir=tmp_path), data.Prepare("mtil", data_dir=tmp_path)):
        command = raises(KeyboardInterrupt())
        code, error = end_of(capsys, command, settings, settings.run_dir)
        assert code == 130 and f"Finished tasks are in {tmp_path}" in error


def test_the_preset_decides_the_defaults_and_options_change_them():
    settings = cheem_run.read_arguments(["--preset", "quick", "--cheem.search.generations", "9"])
    assert settings.cheem.supernet.epochs == 8 and settings.cheem.search.generations == 9
    assert cheem_run.read_arguments(["--preset=quick"]).cheem.batch_size == 32
    assert cheem_run.read_arguments([]).cheem.supernet.epochs == 50


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes."),
    ],
)
def test_out_of_memory_names_the_settings_to_change(capsys, error):
    code, said = end_of(capsys, raises(error))
    assert code == 2 and said.count("\n") == 1
    assert "out of memory" in said and "batch size" in said and "memory_gb" in said


@pytest.mark.parametrize("words", [("data", "list"), ("data", "prepare", "mtil")])
def test_without_a_home_folder_a_command_asks_for_the_data_folder(capsys, monkeypatch, words):
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # Python's answer without a home
    monkeypatch.delenv("TFDS_DATA_DIR", raising=False)
    status, _, error = cheem(capsys, *words)
    assert status == 2 and error.count("\n") == 1 and "set HOME" in error


def test_a_compilation_cache_that_cannot_be_written_does_not_stop_a_command(
    capsys, monkeypatch, tmp_path
):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    before = jax.config.jax_compilation_cache_dir
    done = []
    try:
        jax.config.update("jax_compilation_cache_dir", None)
        run_command(done.append, "settings")
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
    assert done == ["settings"] and "JAX_COMPILATION_CACHE_DIR" in capsys.readouterr().err


@pytest.mark.parametrize("command", COMMANDS.values(), ids=lambda command: command.name)
def test_every_command_shows_its_options_and_its_line_of_the_table(capsys, command):
    status, shown, _ = cheem(capsys, *command.name.split(), "--help")
    assert status == 0 and shown.startswith(f"usage: cheem {command.name} ")
    assert command.help in " ".join(shown.split())
    assert "(default: True)" not in shown  # which --no-NAME would contradict


def test_an_option_that_switches_something_off_says_so(capsys):
    shown = " ".join(cheem(capsys, "report", "--help")[1].replace("│", "").split())
    assert "--no-images Do not show test images with right and wrong predictions" in shown


def test_help_lists_all_commands_under_their_headings(capsys):
    status, shown, _ = cheem(capsys)
    assert status == 0 and shown == cheem(capsys, "--help")[1]
    names = [line[2:].split("  ")[0] for line in shown.splitlines() if re.match("  [a-z]", line)]
    assert names == list(COMMANDS)
    headings = [line[:-1] for line in shown.splitlines() if line.endswith(":")]
    assert headings == list(GROUPS)
    _, below, _ = cheem(capsys, "data")
    assert [name for name in names if f"  {name} " in below] == [
        name for name in names if name.startswith("data ")
    ]


@pytest.mark.parametrize("width", [60, 100])
def test_help_fits_the_terminal_and_hides_advanced_options(capsys, monkeypatch, width):
    assert max(map(len, cheem(capsys)[1].splitlines())) <= 80
    monkeypatch.setenv("COLUMNS", str(width))
    status, shown, _ = cheem(capsys, "learn", "--help")
    everything = cheem(capsys, "learn", "--help-all")[1]
    boxes = [line for line in everything.splitlines() if line[:1] in ("╭", "│", " ")]
    assert status == 0 and max(map(len, boxes)) <= width
    assert not any(word in everything for word in ("None", "False", "(default: )"))
    assert "usage: cheem learn [-h] [OPTIONS] MEMORY DATA\n" in shown and "--backbone STR" in shown
    assert "--engine" not in shown and "`--help-all` also shows advanced options." in shown
    assert "--engine.executor {auto,stages,whole,scan}" in everything
    assert "`--help-all`" not in everything


def test_the_version_is_reported(capsys):
    assert cheem(capsys, "--version") == (0, f"cheem_jax {cheem_jax.__version__}\n", "")


@pytest.mark.parametrize(
    ("words", "nearest"),
    [(["predct"], "predict"), (["lst"], "data list"), (["data", "prepar"], "data prepare")],
)
def test_an_unknown_command_is_answered_with_the_nearest(capsys, words, nearest):
    status, _, error = cheem(capsys, *words)
    assert status == 2
    assert f"most similar: {nearest}; expected one of" in error
    assert error.count("\n") == 1
    assert "similar" not in cheem(capsys, "xyzzy")[2]


@pytest.mark.parametrize(
    "words", [[], ["--help"], ["--version"], ["demmo"], ["doctor", "--json", "--timeout", "0.01"]]
)
def test_a_command_that_computes_nothing_imports_neither_jax_nor_the_commands_that_need_it(words):
    program = (
        f"import sys; sys.argv = {['cheem', *words]}\nfrom cheem_jax.cli.main import main\ntry:"
        " main()\nexcept SystemExit: pass\nprint([name for name in ('jax', 'jaxlib', 'flax',"
        " 'orbax', 'optax', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.splitlines()[-1] == "[]", done.stderr


@pytest.mark.parametrize("status", [1, 143])
def test_the_status_that_a_command_returns_ends_the_process(capsys, status):
    assert end_of(capsys, lambda settings: status) == (status, "")
    run_command(lambda settings: 0, None, computes=False)


def test_a_missing_package_is_one_line_and_a_fault_of_our_own_is_not_hidden(capsys):
    missing = ImportError("this needs x:\n`pip install 'cheem_jax[serve]'`")
    line = "error: this needs x: `pip install 'cheem_jax[serve]'`\n"
    assert end_of(capsys, raises(missing)) == (2, line)
    missing = ModuleNotFoundError("No module named 'flax'", name="flax")
    _, error = end_of(capsys, raises(missing))
    assert error.startswith("error: No module named 'flax'; `cheem doctor` says")
    with pytest.raises(ImportError):
        end_of(capsys, raises(ImportError("no such name", name="cheem_jax.core.ops")))


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-"])
def test_output_that_is_closed_from_the_start_is_no_failure(closed, tmp_path):
    sink = tmp_path / "kept"  # the next file that is opened would get the number of standard output
    words = "import sys; from cheem_jax.cli.main import main; sys.argv = ['cheem', '{}']; main(); "
    words += f"open({str(sink)!r}, 'w')"
    for word, status in (("--version", 0), ("nothing", 2)):
        line = f"{shlex.quote(sys.executable)} -c {shlex.quote(words.format(word))} {closed}"
        done = subprocess.run(line, shell=True, capture_output=True, text=True)
        assert done.returncode == status and "Traceback" not in done.stdout + done.stderr
        assert "error" not in done.stdout  # nor is anything written to the other stream
    assert sink.read_text() == ""


@pytest.mark.parametrize(
    "error", [AssertionError(), RuntimeError("Unable to initialize backend 'tpu'")], ids=repr
)
def test_a_platform_that_is_not_there_is_reported_in_a_line(monkeypatch, capsys, error):
    fails = raises(error)
    # another value of JAX's own setting would take its devices away
    asked = types.SimpleNamespace(jax_platforms="tpu")
    there = types.SimpleNamespace(config=asked, errors=jax.errors, devices=lambda: ["tpu"])
    monkeypatch.setitem(sys.modules, "jax", there)
    with pytest.raises(type(error)):  # a fault of our own
        end_of(capsys, fails)
    there.devices = fails
    code, shown = end_of(capsys, fails)
    assert code == 2 and shown.startswith("error: JAX has no device for JAX_PLATFORMS=tpu")
    assert "set JAX_PLATFORMS=cpu, or unset it" in shown and str(error) in shown
    assert shown.count("\n") == 1


PRINTING = """
from cheem_jax.cli.running import run_command
def command(settings):
    for number in range(100_000): print(number)
run_command(command, None, computes=False)
"""


@pytest.mark.parametrize(
    "words", [["-c", PRINTING], ["-m", "cheem_jax", "data", "list"]], ids=["print", "rich"]
)
def test_a_reader_that_leaves_ends_the_command_quietly(words):
    process = subprocess.Popen(
        [sys.executable, *words],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    with process.stderr as stream:
        assert stream.read() == ""
    assert process.wait() == 141


@pytest.mark.parametrize("command", [["--version"], ["data", "list"]])
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_output_to_a_full_disk_is_one_line_and_status_2(command):
    environment = {name: os.environ[name] for name in os.environ if name != "PYTHONUNBUFFERED"}
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "cheem_jax", *command],
            cwd=ROOT,
            env=environment,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert done.stderr.startswith("error: standard output cannot be written (No space left")


@pytest.mark.parametrize(
    ("encoding", "printed"),
    [("utf-8", b"\xc4\x80 \xff\n"), ("latin-1", b"\\u0100 \\udcff\n")],
)
def test_output_that_the_encoding_lacks_ends_no_command(monkeypatch, encoding, printed):
    output = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(output, encoding=encoding, newline="\n"))
    run_command(lambda _: print("\u0100 " + os.fsdecode(b"\xff")), None, computes=False)
    assert output.getvalue() == printed


def test_a_broken_pipe_of_somebody_else_is_reported(capsys):
    code, error = end_of(capsys, raises(BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))))
    assert code == 2 and "Broken pipe" in error


def test_bash_completes_commands_options_values_and_files(capsys, tmp_path):
    completion.print_completion(completion.Completion("bash"))
    script = tmp_path / "cheem"
    script.write_text(capsys.readouterr().out)
    assert script.read_text().startswith("# cheem completion bash > ")
    asked = [
        ["", "cheem"],
        ["da", "cheem"],
        ["", "cheem", "data"],
        ["--or", "cheem", "data", "show"],
    ]
    asked += [
        ["stag", "cheem", "demo", "--engine.executor"],
        ["runs/d", "cheem", "report"],
        ["", "cheem", "report"],
    ]
    lines = ["complete -p cheem"]
    for word, *before in asked:
        words = " ".join(f"'{text}'" for text in [*before, word])
        lines.append(
            f"COMP_WORDS=({words}); COMP_CWORD={len(before)}; _cheem cheem '{word}'; echo"
            ' "${COMPREPLY[*]}"'
        )
    done = subprocess.run(
        ["bash", "-c", f"source {script}\n" + "\n".join(lines)],
        capture_output=True,
        text=True,
        check=True,
    )
    registered, *answers = done.stdout.splitlines()
    assert registered == "complete -o default -F _cheem cheem"
    names = {command.name.split()[0] for command in COMMANDS.values()}
    assert set(answers[0].split()) == names and answers[1] == "data"
    assert answers[2:5] == ["list prepare show verify", "--order", "stages"]
    assert answers[5:] == ["", ""]  # left to bash, which offers files


@pytest.mark.parametrize(("shell", "place"), [("zsh", 1), ("fish", 0)])
def test_other_shells_complete_the_same(capsys, shell, place):
    completion.print_completion(completion.Completion(shell))
    printed = capsys.readouterr().out
    assert printed.splitlines()[place].startswith(f"# cheem completion {shell} > ")
    assert all(word in printed for word in ("tensorboard", "verify", "--upper-bound"))
    assert shell != "zsh" or (
        printed.startswith("#compdef cheem\n") and printed.endswith(" || _files\n")
    )
