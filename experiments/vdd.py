"""CHEEM, or any other method, on the nine tasks of VDD: the command of mtil.py with another stream.

    python experiments/vdd.py --backbone deit_tiny --data-dir DATA python experiments/vdd.py
    --method lora_cl --backbone vit_base --data-dir DATA --run-dir runs/vdd-lora

DATA is the data folder that `cheem data prepare vdd --data-dir DATA` fills.
"""

import sys
from pathlib import Path

import mtil

from cheem_jax.cli.main import run_command

if __name__ == "__main__":
    parsed = mtil.read_arguments(sys.argv[1:], __doc__, stream="vdd", run_dir=Path("runs/vdd"))
    run_command(mtil.main, parsed, parsed.run_dir)
