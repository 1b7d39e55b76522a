"""Miniature archives of four data sets, with the layout of the official ones and a few tiny images.

    python experiments/studies/paper/miniature.py DATA cheem data prepare aircraft --data-dir DATA
    python experiments/studies/paper/miniature.py DATA experiments/mtil.py --data-dir DATA

The archives are written into the folder of DATA for archives that the user provides, unless they
are there. Then the command runs in this process: MTIL consists of three of the data sets, VDD of
two, and any number of images is accepted. The other data sets are prepared by builders of TFDS that
need TensorFlow. If the command reads `DATA/clip.safetensors`, random weights of CLIP's ViT-B are
written.
"""

import dataclasses
import runpy
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
sys.path[:0] = [f"{ROOT / folder}" for folder in ("experiments", "tests", "")]

import jax  # noqa: E402
import official  # noqa: E402
import pytest  # noqa: E402

from cheem_jax.backbone.config import CONFIGS  # noqa: E402
from cheem_jax.backbone.params import init_params  # noqa: E402
from cheem_jax.backbone.weights import Pretrained, save_converted  # noqa: E402
from cheem_jax.data.benchmarks import table  # noqa: E402
from cheem_jax.data.benchmarks.prepare import manual_dir  # noqa: E402
from cheem_jax.data.benchmarks.table import BY_NAME  # noqa: E402

ARCHIVES = {
    "aircraft": (official.aircraft, 3),
    "eurosat": (lambda: official.eurosat(8), 10),
    "gtsrb": (official.gtsrb, 43),
    "sun397": (official.sun397, 2),
}
"""Archives and number of classes of each data set."""


def only_present(names: str) -> str:
    """Return the names of the data sets that have miniature archives."""
    return " ".join(name for name in names.split() if name in ARCHIVES)


def main(data: Path, command: list[str]) -> None:
    """Write missing archives, then run a script or `cheem` with the table of these archives."""
    place = manual_dir(data)
    with pytest.MonkeyPatch.context() as patch:
        for name, (contents, num_classes) in ARCHIVES.items():
            if not all((place / archive.file).exists() for archive in BY_NAME[name].archives):
                official.put(place, contents())
            official.expect(patch, name, place)
            task = dataclasses.replace(BY_NAME[name], num_classes=num_classes)
            patch.setitem(BY_NAME, name, task)
        for order, names in table.MTIL.items():
            patch.setitem(table.MTIL, order, only_present(names))
        patch.setattr(table, "VDD", only_present(table.VDD))
        weights = data / "clip.safetensors"
        if f"{weights}" in command and not weights.exists():
            config = CONFIGS["clip_vit_base"]
            params = init_params(config, jax.random.key(0))
            save_converted(weights, Pretrained(config, params, "random", "seed 0", {}))
        script, *arguments = command
        patch.setattr(sys, "argv", [script, *arguments])
        if script == "cheem":
            runpy.run_module("cheem_jax", run_name="__main__")
        else:
            runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
