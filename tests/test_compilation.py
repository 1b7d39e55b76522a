"""Counts of the compiler's work, the persistent cache, and options that another jaxlib can not
know."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from cheem_jax.backbone import means
from cheem_jax.baselines import coda_prompt
from cheem_jax.core import pool
from cheem_jax.core.device import deterministic_jit
from cheem_jax.engine import compilation
from cheem_jax.engine.compilation import (
    DETERMINISTIC,
    Compilations,
    NotCached,
    compilations,
    enable_cache,
    jit_options,
)

PROGRAM = """
import jax
from cheem_jax.engine.compilation import compilations, enable_cache
print(enable_cache())
before = compilations()
jax.jit(lambda x: x * 3 + 1)(2.0).block_until_ready()
found = compilations().since(before)
print(found.programs, found.cached, found.seconds > 0)
"""


def run(tmp_path, **environment):
    keep = {k: v for k, v in os.environ.items() if not k.startswith("JAX_")}
    environment = {**keep, "JAX_PLATFORMS": "cpu", "HOME": str(tmp_path), **environment}
    environment.pop("XDG_CACHE_HOME", None)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split("\n")


def test_a_second_process_reads_the_functions_that_the_first_compiled(tmp_path):
    first, second = run(tmp_path), run(tmp_path)
    assert first[0] == second[0]
    assert first[0].startswith(str(tmp_path / ".cache" / "cheem_jax" / "programs"))
    assert first[1] == "1 0 True" and second[1] == "0 1 True"


@pytest.mark.full
def test_compiled_functions_torn_by_a_kill_are_removed_so_that_others_are_stored(tmp_path):
    folder = Path(run(tmp_path)[0])
    (time_of_use,) = folder.glob("*-atime")
    time_of_use.unlink()
    (folder / "torn-cache").write_bytes(b"half a program")
    assert run(tmp_path)[1] == "1 0 True"  # compiled again, and kept
    assert run(tmp_path)[1] == "0 1 True" and not (folder / "torn-cache").exists()


def test_only_the_latest_used_functions_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(compilation, "_CACHED_PROGRAMS", 2)
    for age in range(4):
        (tmp_path / f"{age}-cache").write_bytes(b"a program")
        (tmp_path / f"{age}-atime").touch()
        os.utime(tmp_path / f"{age}-atime", (1e9 - age, 1e9 - age))
    compilation._tidy(tmp_path)
    names = {file.name for file in tmp_path.iterdir()} - {".lockfile"}
    assert names == {"0-cache", "0-atime", "1-cache", "1-atime"}


@pytest.mark.full
def test_the_user_names_another_directory_or_does_without(tmp_path):
    assert run(tmp_path, JAX_COMPILATION_CACHE_DIR=str(tmp_path / "here"))[0] == str(
        tmp_path / "here"
    )
    assert run(tmp_path, JAX_ENABLE_COMPILATION_CACHE="false")[0] == "None"


def test_a_directory_that_cannot_be_written_is_named_with_the_way_out(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    before = jax.config.jax_compilation_cache_dir
    try:
        jax.config.update("jax_compilation_cache_dir", None)
        with pytest.raises(NotCached, match="JAX_COMPILATION_CACHE_DIR"):
            enable_cache()
        jax.config.update("jax_compilation_cache_dir", str(tmp_path / "file" / "programs"))
        with pytest.raises(
            ValueError, match=r"cannot cache compiled functions in .*file/programs"
        ) as error:
            enable_cache()
        assert error.type is ValueError
    finally:
        jax.config.update("jax_compilation_cache_dir", before)


def test_a_user_whom_the_system_does_not_know_does_without_in_one_line(tmp_path, monkeypatch):
    def owner(self):
        raise KeyError("getpwuid(): uid not found: 12345")

    monkeypatch.setattr(Path, "owner", owner)
    before, was_enabled = (
        jax.config.jax_compilation_cache_dir,
        jax.config.jax_enable_compilation_cache,
    )
    try:
        jax.config.update("jax_compilation_cache_dir", str(tmp_path))
        with pytest.raises(NotCached, match=r"uid not found: 12345.*/etc/passwd"):
            enable_cache()
        assert not jax.config.jax_enable_compilation_cache and not list(tmp_path.iterdir())
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
        jax.config.update("jax_enable_compilation_cache", was_enabled)


@pytest.mark.full
def test_a_folder_that_others_can_write_to_stores_no_compiled_functions(monkeypatch, tmp_path):
    folder = run(tmp_path)[0]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / ".cache"))
    os.chmod(folder, 0o777)
    before = jax.config.jax_compilation_cache_dir
    try:
        jax.config.update("jax_compilation_cache_dir", None)
        with pytest.raises(NotCached, match="JAX_COMPILATION_CACHE_DIR"):
            enable_cache()
    finally:
        jax.config.update("jax_compilation_cache_dir", before)


def test_every_compiled_function_is_counted():
    before = compilations()
    jax.jit(lambda x: x - 7)(1.0)
    result = compilations().since(before)
    assert result.programs >= 1 and result.seconds > 0
    assert Compilations(5, 1, 2.5).since(Compilations(3, 1, 1.0)) == Compilations(2, 0, 1.5)


def test_the_compiler_knows_the_options_of_deterministic_runs():
    assert jax.jit(lambda x: x + 1, compiler_options=DETERMINISTIC)(1.0) == 2.0
    assert jit_options("float32", True) == jit_options(
        "float32", False
    )  # on a CPU, which needs none


def test_functions_without_an_executor_are_deterministic_on_an_accelerator(monkeypatch):
    options = []
    monkeypatch.setattr(
        jax, "jit", lambda function, **given: options.append(given["compiler_options"]) or function
    )
    for backend, expected in (("cpu", None), ("gpu", DETERMINISTIC)):
        monkeypatch.setattr(jax, "default_backend", lambda backend=backend: backend)
        doubled = deterministic_jit(lambda x: 2 * x)
        assert doubled(3) == doubled(x=3) == 6 and options.pop() is expected
    assert not options
    for function in (pool.merge_dense, means._class_tokens, coda_prompt._with_rows):
        assert function.__code__ is doubled.__code__  # and not a function of `jax.jit`


def test_bfloat16_products_keep_the_compilers_own_choice():
    assert jit_options("bfloat16") is None
    assert jit_options("float32") is None or "ynn" in str(jit_options("float32"))
