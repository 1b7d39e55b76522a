"""CHEEM-lite: another network infers the task, as in MoE-Adapters (the paper's tables on lighter ones).

    python experiments/lite.py
    python experiments/lite.py --stream mtil --preset paper --backbone vit_base --routers deit_tiny,alexnet \\
        --alexnet-weights ALEXNET --data-dir DATA
    python experiments/lite.py --backbone vit_base --routers deit_tiny,alexnet --smoke

ALEXNET is what convert/torchvision_alexnet.py writes.
"""

import dataclasses
from pathlib import Path

import compare
import mtil
from smoke import smoke
from study import Study, Variant, run_all
from tables import Tables
from tables import main as write_tables

from cheem_jax.cli.main import parse, run_command
from cheem_jax.report.table import METHODS
from cheem_jax.run.progress import Progress


@dataclasses.dataclass(frozen=True)
class Lite(Study):
    """CHEEM with lighter networks that infer the task."""

    routers: str | None = None
    """Backbones, or alexnet, separated by commas; default: alexnet, on the demo stream the bundled vit_nano."""
    alexnet_weights: Path | None = None
    """Weights of AlexNet."""
    smoke: bool = False
    """Run every variant on two blocks with random weights, which shows that it works and no accuracy."""
    run_dir: Path = Path("runs/lite")
    """Where runs and tables are kept; what is unfinished is continued."""


def main(settings: Lite) -> None:
    """Run what is missing, then write the paper's table with ours beside it."""
    progress, variants = Progress(), variants_of(settings)
    titles = {variant.name: variant.title for variant in variants}
    if settings.smoke:
        smoke(variants, settings.backbone or "deit_tiny", progress)
        return
    found = run_all(settings, variants, progress, lambda found: compare.write(settings.run_dir, found, titles))
    compare.show(settings.run_dir, found, progress, titles)
    write_tables(Tables(runs=(settings.run_dir,), out=settings.run_dir / "tables", only="lite"))


def variants_of(settings: Lite) -> list[Variant]:
    """CHEEM, then each lighter network; MoE-Adapters has the last of them."""
    default = "vit_nano" if settings.stream == mtil.DEMO and not settings.smoke else "alexnet"
    routers = list(dict.fromkeys(name.strip() for name in (settings.routers or default).split(",")))

    def run(router: str) -> dict:
        weights = settings.alexnet_weights if router == "alexnet" else None
        return {"router": router, "router_weights": weights}

    return [
        Variant("cheem", METHODS["cheem"]),
        *(Variant(f"cheem_lite-{r}", f"{METHODS['cheem_lite']}, {r}", "cheem_lite", run=run(r)) for r in routers),
        Variant("moe_adapters", f"{METHODS['moe_adapters']}, {routers[-1]}", "moe_adapters", run=run(routers[-1])),
    ]


if __name__ == "__main__":
    parsed = parse(Lite, description=__doc__)
    run_command(main, parsed, parsed.run_dir)
