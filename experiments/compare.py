"""Several methods on one stream under one protocol, with tables of results and training times.

    python experiments/compare.py --stream demo --methods all
    python experiments/compare.py --stream FOLDER --backbone deit_tiny --image-size 96 \\
        --methods cheem,lora_cl,s_prompts --seeds 0,1,2 --run-dir runs/compare-real
    python experiments/compare.py --stream FOLDER --methods cheem,lora_cl --choose TASK,TASK
    python experiments/compare.py --stream mtil --preset paper --data-dir DATA --launcher slurm

Every run has a separate directory, `RUN_DIR/<method>/seed-<seed>`, and is a run that `cheem demo`
or `experiments/mtil.py` could have made. Finished runs are not repeated, and interrupted runs
resume. `experiments/tables.py --runs RUN_DIR` writes the paper's tables with these runs.
"""

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import study
from charts import mean_std, spread, write_page
from choosing import choose, chosen_before, num_epochs
from study import Results, Study, Variant

from cheem_jax.baselines.catalogue import (
    NAMES,
    NEED_A_ROUTER,
    check_name,
)
from cheem_jax.cheem.config import PRESETS, QUICK_PLUS
from cheem_jax.cli.arguments import parse
from cheem_jax.cli.running import run_command
from cheem_jax.report.comparison import comparison, comparison_grid, narrow, to_csv
from cheem_jax.report.table import METHODS, NONE, Grid
from cheem_jax.run.progress import Progress


@dataclasses.dataclass(frozen=True)
class Compare(Study):
    """Compare methods on one stream."""

    methods: str = "all"
    """Names of methods, separated by commas, or all. `cheem:elimination` is CHEEM with the search
    of `quick_plus` and as many epochs as the preset has in both phases; `cheem:uniform` has the
    paper's search with uniform sampling. Both have the learning rate chosen for CHEEM.
    `lora_cl:warm` is LoRA-CL with a learning rate that rises at the start, like that of
    `cheem:elimination`. `lora_cl:new` trains a full copy of the pretrained layer in every block per
    task, and `lora_cl:rank128` and `lora_cl:rank192` are LoRA-CL with these ranks. All other
    settings are those of the preset."""
    router: str = "vit_nano"
    """Lighter networks for `cheem_lite` and `moe_adapters`, separated by commas: names of
    backbones, or alexnet."""
    router_weights: Path | None = None
    """Weights file of the router; with more than one router, the weights file of alexnet."""
    choose: str | None = None
    """Names of tasks, separated by commas: the learning rate and at most two further settings of
    every method are first chosen on the validation images of these tasks; all methods then have the
    same number of epochs and the cosine schedule. Or the `chosen.json` of an earlier choice, whose
    settings are used."""
    run_dir: Path = Path("runs/compare")
    """Folder of runs and tables; unfinished runs resume."""


def main(settings: Compare) -> None:
    """Run the missing runs, then print and save the table."""
    progress = Progress()
    variants = variants_of(settings)
    check_router(settings, variants)
    if settings.choose is not None and settings.choose.endswith(".json"):
        variants = chosen_before(Path(settings.choose), variants, settings.chosen_preset)
    elif settings.choose is not None:
        variants = choose(settings, settings.choose, variants, progress)
    titles = {variant.name: variant.title for variant in variants}
    results = study.run_all(
        settings, variants, progress, lambda results: write(settings.run_dir, results, titles)
    )
    progress.console.print(narrow(write(settings.run_dir, results, titles)).to_rich())
    place = settings.run_dir / "comparison"
    progress.say(
        f"table: {place}.md   numbers: {place}.json   times:"
        f" {settings.run_dir / 'training_time.md'}"
    )


def check_router(settings: Compare, variants: Sequence[Variant]) -> None:
    """Raise ValueError for options of a router that no method uses."""
    routers = {variant.run["router"] for variant in variants if "router" in variant.run}
    if not routers and settings.router != Compare.router:
        raise ValueError(
            f"--router is for {' and '.join(NEED_A_ROUTER)}, and --methods names none of them;"
            " leave it out"
        )
    if settings.router_weights is not None and not any(
        variant.run.get("router_weights") for variant in variants
    ):
        needed = "a method that needs a router" if not routers else "a single router, or alexnet"
        raise ValueError(f"--router-weights are used with {needed}; leave them out")


def variants_of(settings: Compare) -> list[Variant]:
    """Return one variant per method, or one per router if the method needs a router."""
    routers = list(dict.fromkeys(name.strip() for name in settings.router.split(",")))
    variants = []
    for name in methods_of(settings.methods):
        if name in OTHERS:
            variant = OTHERS[name]
            if name == "cheem:elimination":
                epochs = {"finetune.epochs": num_epochs(PRESETS[settings.chosen_preset])}
                variant = variant._replace(config={**variant.config, **epochs})
            variants.append(variant)
            continue
        method = check_name(name)
        if method not in NEED_A_ROUTER:
            variants.append(Variant(method, METHODS[method], method))
            continue
        for router in routers:
            weights = settings.router_weights if router == "alexnet" or len(routers) == 1 else None
            name = method
            title = METHODS[method]
            if len(routers) > 1:
                name, title = f"{method}-{router}", f"{METHODS[method]}, {router}"
            variants.append(
                Variant(name, title, method, run={"router": router, "router_weights": weights})
            )
    return variants


OTHERS = {
    "cheem:elimination": Variant(
        "cheem-elimination",
        f"{METHODS['cheem']}, elimination",
        "cheem",
        {
            "finetune": QUICK_PLUS.finetune,
            "ops.rank": QUICK_PLUS.ops.rank,
            "ops.truncated_rank": QUICK_PLUS.ops.truncated_rank,
            "sampling": QUICK_PLUS.sampling,
            "fallback": QUICK_PLUS.fallback,
        },
        settings_of="cheem",
    ),
    "cheem:uniform": Variant(
        "cheem-uniform",
        f"{METHODS['cheem']}, uniform",
        "cheem",
        {"sampling": "uniform"},
        settings_of="cheem",
    ),
    # without low-rank pairs, the rank has no effect; it is given, so that it is not chosen
    "lora_cl:new": Variant(
        "lora_cl-new", "New in every block", "lora_cl", {"op": "new", "rank": 1}
    ),
    "lora_cl:warm": Variant(
        "lora_cl-warm",
        f"{METHODS['lora_cl']}, rising rate",
        "lora_cl",
        {"fit.schedule": "warm_cosine"},
        settings_of="lora_cl",
    ),
    **{
        f"lora_cl:rank{rank}": Variant(
            f"lora_cl-rank{rank}", f"{METHODS['lora_cl']}, rank {rank}", "lora_cl", {"rank": rank}
        )
        for rank in (128, 192)
    },
}
"""Methods with settings that differ from those of the preset."""


def methods_of(text: str) -> list[str]:
    """Return the names of the methods in the order of the table."""
    if text == "all":
        return list(NAMES)
    selected = {
        name if name in OTHERS else check_name(name)
        for name in (word.strip() for word in text.split(","))
    }
    return [
        name
        for method in NAMES
        for name in (method, *OTHERS)
        if name in selected and name.split(":")[0] == method
    ]


def write(directory: Path, results: Results, titles: Mapping[str, str] = METHODS) -> Grid:
    """Write the tables of results and of training times as Markdown and CSV, with their numbers;
    return the table of results."""
    rows = comparison(results)
    grid = comparison_grid(results, titles, rows)
    caption = grid.caption.replace("\n", "  \n")
    text = f"# {grid.title}\n\n{grid.to_markdown()}\n\n{caption}\n"
    write_page(directory / "comparison", text, rows, to_csv(rows))
    devices = sorted({run["engine"]["device"] for runs in results.values() for run in runs})
    phases = {name: phases_of(runs) for name, runs in results.items()}
    times = None
    text = f"No times are compared: the runs had different devices ({', '.join(devices)})."
    if len(devices) == 1:
        times = times_grid(results, phases, titles)
        text = f"{times.title}\n\n{times.to_markdown()}"
    else:
        (directory / "training_time.csv").unlink(missing_ok=True)
    write_page(directory / "training_time", f"# {text}\n", phases, times)
    return grid


def phases_of(runs: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the mean and standard deviation over runs of the seconds per task of each phase of
    learning; evaluation does not count."""
    phases: dict[str, Any] = {}
    for number, run in enumerate(runs):
        for task in run["tasks"]:
            for name, seconds in task["seconds"].items():
                means = phases.setdefault(name, [0.0] * len(runs))
                means[number] += seconds / len(run["tasks"])
    return {name: mean_std(means) for name, means in phases.items() if name != "evaluation"}  # pyright: ignore[reportReturnType]


def times_grid(
    results: Results, phases: Mapping[str, Mapping[str, Any]], titles: Mapping[str, str]
) -> Grid:
    """Make the table of training seconds of each method and phase.

    The first run of a process compiles functions that later runs share. Compilation therefore has a
    separate column, which counts the seconds of the whole run.
    """
    totals = {name: sum(seconds["mean"] for seconds in phases[name].values()) for name in results}
    rows = []
    for name, total in totals.items():
        longest = sorted(phases[name].items(), key=lambda item: -item[1]["mean"])[:4]
        rows.append(
            (
                titles[name],
                str(len(results[name])),
                f"{total:,.1f}",
                f"{total / totals['cheem']:.2f}" if totals.get("cheem") else NONE,
                f"{np.mean([run['compile']['seconds'] for run in results[name]]):.1f}",
                ", ".join(
                    f"{phase} {spread(seconds)}"
                    for phase, seconds in longest
                    if seconds["mean"] >= 0.005 * total
                ),
            )
        )
    columns = (
        "method",
        "runs",
        "seconds\nper task",
        "of CHEEM's",
        "compiling,\nwhole run",
        "longest phases",
    )
    first = next(iter(results.values()))[0]
    title = (
        f"{first['stream']}, {first['backbone']}, {first['preset']}, {first['engine']['device']}:"
        " training per task"
    )
    return Grid(title, columns, tuple(rows), 1)


if __name__ == "__main__":
    parsed = parse(Compare, sys.argv[1:], description=__doc__)
    run_command(main, parsed, parsed.run_dir)
