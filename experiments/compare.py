"""Several methods on one stream under one protocol, with a table of what they reach and one of what training costs.

    python experiments/compare.py --stream demo --methods all
    python experiments/compare.py --stream FOLDER --backbone deit_tiny --weights FILE --image-size 96 \\
        --methods cheem,lora_cl,s_prompts --seeds 0,1,2 --run-dir runs/compare-real
    python experiments/compare.py --stream FOLDER --methods cheem,lora_cl --choose TASK,TASK --run-dir runs/fair
    python experiments/compare.py --stream mtil --preset paper --data-dir DATA --run-dir RUNS --launcher slurm
    python experiments/compare.py --backbone clip_vit_base --methods cheem_lite --router deit_tiny,alexnet --smoke

Every run has a directory of its own, `RUN_DIR/<method>/seed-<seed>`, and is one that `cheem demo` or
`experiments/mtil.py` could have made. What is finished is not run again, and what was stopped resumes.
`experiments/tables.py --runs RUN_DIR` writes the paper's tables with these runs beside its numbers.
"""

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import study
from charts import mean_std, spread, write_page
from choosing import choose
from smoke import smoke
from study import Found, Study, Variant

from cheem_jax.baselines.catalogue import NAMES, NEED_A_ROUTER, Name, check_name
from cheem_jax.cli.main import parse, run_command
from cheem_jax.report.comparison import comparison, comparison_grid, csv_of, narrow
from cheem_jax.report.table import METHODS, NONE, Grid
from cheem_jax.run.progress import Progress


@dataclasses.dataclass(frozen=True)
class Compare(Study):
    """Methods side by side on one stream."""

    methods: str = "all"
    """Names separated by commas, or all."""
    router: str = "vit_nano"
    """Lighter networks of `cheem_lite` and `moe_adapters`, separated by commas: backbones, or alexnet."""
    router_weights: Path | None = None
    """Weights of the router; of several routers, those of alexnet."""
    choose: str | None = None
    """Names of tasks, separated by commas, on whose validation images the rate and at most two further settings of
    every method are chosen first; all methods then have the same number of epochs and the cosine schedule."""
    smoke: bool = False
    """Run every method on two blocks with random weights, which shows that it works and no accuracy."""
    run_dir: Path = Path("runs/compare")
    """Where runs and tables are kept; what is unfinished is continued."""


def main(settings: Compare) -> None:
    """Run what is missing, then print and save the table."""
    progress, variants = Progress(), variants_of(settings)
    if settings.smoke:
        smoke(variants, settings.backbone or "deit_tiny", progress)
        return
    if settings.choose is not None:
        variants = choose(settings, settings.choose, variants, progress)
    titles = {variant.name: variant.title for variant in variants}
    found = study.run_all(settings, variants, progress, lambda found: write(settings.run_dir, found, titles))
    progress.console.print(narrow(comparison_grid(found, titles)).to_rich())
    place = settings.run_dir / "comparison"
    progress.say(f"table: {place}.md   numbers: {place}.json   times: {settings.run_dir / 'training_time.md'}")


def variants_of(settings: Compare) -> list[Variant]:
    """A variant per method as it is, and per router where it needs one."""
    routers = list(dict.fromkeys(name.strip() for name in settings.router.split(",")))
    variants = []
    for method in methods_of(settings.methods):
        if method not in NEED_A_ROUTER:
            variants.append(Variant(method, METHODS[method], method))
            continue
        for router in routers:
            weights = settings.router_weights if router == "alexnet" or len(routers) == 1 else None
            name, title = (method, METHODS[method])
            if len(routers) > 1:
                name, title = f"{method}-{router}", f"{METHODS[method]}, {router}"
            variants.append(Variant(name, title, method, run={"router": router, "router_weights": weights}))
    return variants


def methods_of(text: str) -> list[Name]:
    """The methods that are asked for, in the order of the table."""
    if text == "all":
        return list(NAMES)
    asked = {check_name(name.strip()) for name in text.split(",")}
    return [name for name in NAMES if name in asked]


def write(directory: Path, found: Found, titles: Mapping[str, str] = METHODS) -> None:
    """The table as Markdown and CSV, its numbers, and the same of the training times."""
    grid, rows = comparison_grid(found, titles), comparison(found)
    text = f"# {grid.title}\n\n{grid.to_markdown()}\n\n" + grid.caption.replace("\n", "  \n") + "\n"
    write_page(directory / "comparison", text, rows, csv_of(rows))
    devices = {run["engine"]["device"] for runs in found.values() for run in runs}
    phases = {name: phases_of(runs) for name, runs in found.items()}
    times = times_grid(found, phases, titles) if len(devices) == 1 else None
    text = f"No times are compared: runs of several devices ({', '.join(sorted(devices))})."
    if times is not None:
        text = f"{times.title}\n\n{times.to_markdown()}"
    write_page(directory / "training_time", f"# {text}\n", phases, times)


def phases_of(runs: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Seconds per task of each phase of learning, mean and deviation over runs; evaluation is none of them."""
    names = dict.fromkeys(phase for run in runs for task in run["tasks"] for phase in task["seconds"])
    return {
        name: mean_std([float(np.mean([task["seconds"].get(name, 0.0) for task in run["tasks"]])) for run in runs])
        for name in names if name != "evaluation"
    }  # fmt: skip  # pyright: ignore[reportReturnType]


def times_grid(found: Found, phases: Mapping[str, Mapping[str, Any]], titles: Mapping[str, str]) -> Grid:
    """Seconds of training by method and phase.

    The first run of a process compiles what others then share, so compiling is shown apart: seconds of the whole run.
    """
    totals = {name: sum(each["mean"] for each in own.values()) for name, own in phases.items()}
    rows = []
    for name, own in phases.items():
        compiling = float(np.mean([run["compile"]["seconds"] for run in found[name]]))
        largest = sorted(own.items(), key=lambda item: -item[1]["mean"])[:4]
        told = [f"{phase} {spread(each)}" for phase, each in largest if each["mean"] >= 0.005 * totals[name]]
        beside = f"{totals[name] / totals['cheem']:.2f}" if totals.get("cheem") else NONE
        runs = str(len(found[name]))
        rows.append((titles[name], runs, f"{totals[name]:,.1f}", beside, f"{compiling:.1f}", ", ".join(told)))
    first = next(iter(found.values()))[0]
    columns = ("method", "runs", "seconds\nper task", "of CHEEM's", "compiling,\nwhole run", "longest phases")
    title = f"{first['stream']}, {first['backbone']}, {first['preset']}, {first['engine']['device']}: training per task"
    return Grid(title, columns, tuple(rows), 1)


if __name__ == "__main__":
    parsed = parse(Compare, sys.argv[1:], description=__doc__)
    run_command(main, parsed, parsed.run_dir)
