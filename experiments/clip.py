"""The paper's tables on CLIP's ViT-B/16: the methods of the comparison on a backbone that saw no ImageNet.

    python experiments/clip.py --stream mtil --preset paper --data-dir DATA
    python experiments/clip.py --stream vdd --preset paper --data-dir DATA --run-dir runs/clip-vdd
    python experiments/clip.py --smoke

The weights come from the hub, or from `--weights FILE`.
"""

import dataclasses
from pathlib import Path

import compare
from smoke import smoke
from study import run_all
from tables import Tables
from tables import main as write_tables

from cheem_jax.cli.main import parse, run_command
from cheem_jax.run.progress import Progress

METHODS = "cheem,lora_cl,s_prompts,l2p,dualprompt,coda_prompt,diki,tuna,full_finetune"


@dataclasses.dataclass(frozen=True)
class Clip(compare.Compare):
    """Methods side by side on CLIP's backbone."""

    stream: str = "mtil"
    """mtil, vdd, demo, or whatever `experiments/mtil.py --stream` takes."""
    backbone: str | None = "clip_vit_base"
    """CLIP's ViT-B/16, OpenAI's weights."""
    methods: str = METHODS
    """Names separated by commas, or all; default: those of the paper's table."""
    smoke: bool = False
    """Run every method on two blocks with random weights, which shows that it works and no accuracy."""
    run_dir: Path = Path("runs/clip")
    """Where runs and tables are kept; what is unfinished is continued."""


def main(settings: Clip) -> None:
    """Run what is missing, then write the paper's table with ours beside it."""
    progress = Progress()
    variants = compare.variants_of(settings, compare.methods_of(settings.methods))
    if settings.smoke:
        smoke(variants, settings.backbone or "clip_vit_base", progress)
        return
    run_all(settings, variants, progress, lambda found: compare.write(settings.run_dir, found))
    write_tables(Tables(runs=(settings.run_dir,), out=settings.run_dir / "tables", only="clip,full"))


if __name__ == "__main__":
    parsed = parse(Clip, description=__doc__)
    run_command(main, parsed, parsed.run_dir)
