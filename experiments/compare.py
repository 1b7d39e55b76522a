"""Several methods on one stream under one protocol, with one table at the end.

    python experiments/compare.py --stream demo --methods all
    python experiments/compare.py --stream FOLDER --backbone deit_tiny --weights FILE --image-size 96 \\
        --methods cheem,lora_cl,s_prompts --seeds 0,1,2 --run-dir runs/compare-real
    python experiments/compare.py --stream mtil --preset paper --data-dir DATA --run-dir RUNS --launcher slurm

Every run has a directory of its own, `RUN_DIR/<method>/seed-<seed>`, and is one that `cheem demo` or
`experiments/mtil.py` could have made. What is finished is not run again, and what was stopped resumes.
"""

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import study
from charts import write_page
from study import Found, Study, Variant

from cheem_jax.baselines.catalogue import NAMES, NEED_A_ROUTER, Name, check_name
from cheem_jax.cli.main import parse, run_command
from cheem_jax.report.comparison import comparison, comparison_grid, csv_of, narrow
from cheem_jax.report.table import METHODS
from cheem_jax.run.progress import Progress


@dataclasses.dataclass(frozen=True)
class Compare(Study):
    """Methods side by side on one stream."""

    methods: str = "all"
    """Names separated by commas, or all."""
    router: str = "vit_nano"
    """The lighter network of `cheem_lite` and `moe_adapters`: a backbone, or alexnet."""
    router_weights: Path | None = None
    """Weights of the router."""
    run_dir: Path = Path("runs/compare")
    """Where runs and tables are kept; what is unfinished is continued."""


def main(settings: Compare) -> None:
    """Run what is missing, then print and save the table."""
    progress = Progress()
    variants = variants_of(settings, methods_of(settings.methods))
    found = study.run_all(settings, variants, progress, lambda found: write(settings.run_dir, found))
    show(settings.run_dir, found, progress)


def variants_of(settings: Compare, methods: Sequence[Name]) -> list[Variant]:
    """A variant per method, as it is."""
    lighter = {"router": settings.router, "router_weights": settings.router_weights}
    return [
        Variant(method, METHODS[method], method, run=lighter if method in NEED_A_ROUTER else {}) for method in methods
    ]


def methods_of(text: str) -> list[Name]:
    """The methods that are asked for, in the order of the table."""
    if text == "all":
        return list(NAMES)
    asked = {check_name(name.strip()) for name in text.split(",")}
    return [name for name in NAMES if name in asked]


def show(directory: Path, found: Found, progress: Progress, titles: Mapping[str, str] = METHODS) -> None:
    """The table on the terminal, and where it is kept."""
    progress.console.print(narrow(comparison_grid(found, titles)).to_rich())
    progress.say(f"table: {directory / 'comparison.md'}   numbers: {directory / 'comparison.json'}")


def write(directory: Path, found: Found, titles: Mapping[str, str] = METHODS) -> None:
    """The table as Markdown and CSV, and its numbers."""
    grid, rows = comparison_grid(found, titles), comparison(found)
    text = f"# {grid.title}\n\n{grid.to_markdown()}\n\n" + grid.caption.replace("\n", "  \n") + "\n"
    write_page(directory / "comparison", text, rows, csv_of(rows))


if __name__ == "__main__":
    parsed = parse(Compare, sys.argv[1:], description=__doc__)
    run_command(main, parsed, parsed.run_dir)
