"""CHEEM, or any other method, on the nine tasks of VDD: `cheem run` with another stream.

    python experiments/vdd.py --backbone deit_tiny --data-dir DATA
    python experiments/vdd.py --method lora_cl --backbone vit_base --data-dir DATA --run-dir RUN

DATA is the data folder that `cheem data prepare vdd --data-dir DATA` fills.
"""

import sys
from pathlib import Path

from cheem_jax.cli.run import read_arguments, run_seeds
from cheem_jax.cli.running import run_command

if __name__ == "__main__":
    settings = read_arguments(
        sys.argv[1:], description=__doc__, stream="vdd", run_dir=Path("runs/vdd")
    )
    run_command(run_seeds, settings, settings.run_dir)
