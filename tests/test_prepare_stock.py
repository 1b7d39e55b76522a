"""A stock builder of TFDS for real: prepared with TensorFlow, then read without it."""

import importlib.util
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from cheem_jax.data.benchmarks.prepare import manual_dir, prepare_stock

pytestmark = pytest.mark.prepare

PREPARE = """
import sys
from pathlib import Path
from cheem_jax.data.benchmarks.prepare import prepare_stock
print(prepare_stock("cmaterdb/devanagari", Path(sys.argv[1])))
"""
READ = """
import importlib.util
import sys
assert importlib.util.find_spec("tensorflow") is None
from pathlib import Path
from cheem_jax.data import ImagesConfig, fingerprint, load_tasks
from cheem_jax.data.records import plan_tfds
plan = plan_tfds("cmaterdb/devanagari", Path(sys.argv[1]))
for keep in ("memory", "cache", "stream"):
    (task,) = load_tasks([plan], 32, ImagesConfig(keep, Path(sys.argv[1]) / "images"))
    print(keep, [len(split.labels) for split in task.splits.values()], task.train.images[:8].mean())
"""


def run(program, data_dir, *, packages=None):
    """Run a script, and return its printed lines; `packages` replaces the installed packages."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    options = []
    root = Path(__file__).parent.parent
    if packages is not None:
        environment["PYTHONPATH"], options = f"{root}:{packages}", ["-S"]
    command = [sys.executable, *options, "-c", program, str(data_dir)]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def without_tensorflow(folder):
    """Return a folder with links to the installed packages, except TensorFlow."""
    folder.mkdir()
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if entry.name not in ("tensorflow", "keras") and not entry.name.startswith("tensorflow-"):
            (folder / entry.name).symlink_to(entry)
    return folder


def test_devanagari_digits_from_their_registered_files(shared, tmp_path):
    assert importlib.util.find_spec("tensorflow"), "this test needs the extra `prepare`"
    place = manual_dir(tmp_path)
    place.mkdir(parents=True)
    for file in (shared / "data" / "tfds_raw" / "cmaterdb_devanagari").iterdir():
        (place / file.name).symlink_to(file)
    assert run(PREPARE, tmp_path)[-1] == str(tmp_path / "cmaterdb" / "devanagari" / "1.0.0")
    packages = without_tensorflow(tmp_path / "packages")
    memory, cache, stream = run(READ, tmp_path, packages=packages)[-3:]
    assert memory.startswith("memory [2250, 250, 500] ")
    assert cache.split(" ", 1)[1] == stream.split(" ", 1)[1] == memory.split(" ", 1)[1]


def test_a_raw_file_of_other_bytes_is_refused_and_nothing_is_left(shared, tmp_path):
    place = manual_dir(tmp_path)
    place.mkdir(parents=True)
    for file in (shared / "data" / "tfds_raw" / "cmaterdb_devanagari").iterdir():
        (place / file.name).write_bytes(file.read_bytes()[:-1] + b"x")
    with pytest.raises(ValueError, match="TFDS could not prepare 'cmaterdb/devanagari'"):
        prepare_stock("cmaterdb/devanagari", tmp_path)
    assert not (tmp_path / "cmaterdb" / "devanagari" / "1.0.0").exists()
