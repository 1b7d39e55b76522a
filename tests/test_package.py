"""What is installed: the pinned versions, and a wheel in an environment of its own."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent


def test_the_constraints_are_names_and_versions_and_nothing_else():
    pin = re.compile(r'[A-Za-z0-9_.-]+==[0-9][0-9a-z.]*( ; python_version (<|>=) "3\.12")?')
    lines = (REPOSITORY / "constraints.txt").read_text().splitlines()
    assert [line for line in lines if not line.startswith("#") and not pin.fullmatch(line)] == []


@pytest.mark.slow
def test_a_wheel_in_an_empty_environment_brings_the_command_and_the_bundled_weights(tmp_path):
    # the directory is not the repository and the path is not ours: nothing can come from the tree
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def run(*command: str | Path) -> str:
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    run(sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", tmp_path, REPOSITORY)
    [wheel] = tmp_path.glob("cheem_jax-*.whl")
    run(sys.executable, "-m", "venv", tmp_path / "venv")
    python = tmp_path / "venv" / "bin" / "python"
    run(python, "-m", "pip", "install", "--constraint", REPOSITORY / "constraints.txt", wheel)

    assert "--run-dir" in run(python.with_name("cheem"), "demo", "--help")
    program = "from cheem_jax.backbone.weights import load_pretrained; print(load_pretrained({!r}).source)"
    for backbone in ("vit_micro", "vit_nano"):
        assert run(python, "-c", program.format(backbone)).strip() == "bundled"
