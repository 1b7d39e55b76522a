"""Installation: the pinned versions, and a wheel in a separate environment."""

import json
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


# a run of two tasks, as small as its parts allow
SMALL_RUN = """
import dataclasses
from pathlib import Path
from cheem_jax.backbone.weights import load_pretrained
from cheem_jax.continual import RunConfig, run_stream
from cheem_jax.data.demo import demo_stream
from cheem_jax.data.task import Stream
from cheem_jax.cheem.config import PRESETS
from cheem_jax.run.progress import Progress

print(load_pretrained("vit_nano").source)
quick = PRESETS["quick"]
config = dataclasses.replace(
    quick,
    supernet=dataclasses.replace(quick.supernet, epochs=1),
    search=dataclasses.replace(quick.search, population=4, generations=1, num_parents=2),
    finetune=dataclasses.replace(quick.finetune, epochs=1),
)
stream = Stream("two", demo_stream(num_train=64, num_val=32, num_test=32).tasks[:2])
run_stream(stream, load_pretrained("vit_micro"), RunConfig(config, "small"), Path("run"), Progress())
"""  # noqa: E501


@pytest.mark.slow
def test_a_wheel_in_an_empty_environment_learns_with_the_bundled_weights(tmp_path):
    # the directory is not the repository and the path is not ours: nothing can be imported from the
    # tree
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def run(*command: str | Path) -> str:
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    run(sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", tmp_path, REPOSITORY)
    [wheel] = tmp_path.glob("cheem_jax-*.whl")
    run(sys.executable, "-m", "venv", tmp_path / "venv")
    python = tmp_path / "venv" / "bin" / "python"
    run(python, "-m", "pip", "install", "--constraint", REPOSITORY / "constraints.txt", wheel)

    assert "--run-dir" in run(python.with_name("cheem"), "demo", "--help")
    assert "bundled" in run(python, "-c", SMALL_RUN)
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert len(results["tasks"]) == 2 and results["local_average_forgetting"] == 0
