"""CHEEM, or any other method, on MTIL or any other stream of image tasks, with a pretrained ViT.

    python experiments/mtil.py --backbone deit_tiny --data-dir DATA
    python experiments/mtil.py --method l2p --options.pool 10 --data-dir DATA
    python experiments/mtil.py --stream FOLDER --image-size 96 --preset quick --run-dir runs/real

The script is `cheem run`. DATA is the data folder that `cheem data prepare mtil --data-dir DATA`
fills. FOLDER contains one folder or zip file per task with `<split>/<class>/<image>` inside.
"""

import sys

from cheem_jax.cli.run import read_arguments, run_seeds
from cheem_jax.cli.running import run_command

if __name__ == "__main__":
    settings = read_arguments(sys.argv[1:], description=__doc__)
    run_command(run_seeds, settings, settings.run_dir)
