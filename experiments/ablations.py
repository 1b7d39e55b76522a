"""Ablations of CHEEM, those of the paper and further ones, with a table for each.

    python experiments/ablations.py
    python experiments/ablations.py --only epsilon,sampling --seeds 0,1,2 --run-dir runs/ablations
    python experiments/ablations.py --stream mtil --preset paper --backbone vit_base --data-dir DATA

The studies are: epsilon (eps1 = eps2), tolerance (tau, with S-Prompts and LoRA-CL), sampling (HEE
or uniform), placement, ops (one is removed), weights (inherited from the supernet or new),
base_means (measured or neutral), plus (a better router), and orders (of the tasks: the paper's
three for MTIL, shuffled for any other stream). The unchanged CHEEM belongs to all studies and is
run once. `tables.py` reads the runs, too, for the paper's tables.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from charts import architecture_sheet, names_in, spread, sweep_picture, write_page
from study import Results, Study, Variant, run_all, task_names

from cheem_jax.cheem.config import PRESETS, QUICK_PLUS
from cheem_jax.cli import run as cheem_run
from cheem_jax.cli.arguments import parse
from cheem_jax.cli.running import run_command
from cheem_jax.core.atomic import write_atomically
from cheem_jax.core.settings import KINDS
from cheem_jax.report.comparison import comparison
from cheem_jax.report.table import METHODS, NONE, Grid, format_flops
from cheem_jax.run.progress import Progress
from cheem_jax.run_config import find_base_means

BOTH = ("exploration.epsilon", "search.epsilon")
EPSILONS = (0.1, 0.3, 0.5, 0.7, 0.9)
"""Values of eps1 = eps2."""
TOLERANCES = (0.01, 0.02, 0.04, 0.06, 0.08)
"""Values of tau."""
NUM_ORDERS = 3
"""Number of orders of a stream, including its default order."""


@dataclasses.dataclass(frozen=True)
class Ablations(Study):
    """Run CHEEM with one change at a time."""

    only: str | None = None
    """Names of studies, separated by commas; default: all."""
    run_dir: Path = Path("runs/ablations")
    """Folder of runs and tables; unfinished runs resume."""


def main(settings: Ablations) -> None:
    """Run the missing runs, then write the table of every study."""
    progress = Progress()
    studies = studies_of(settings)
    if "base_means" in studies and (reason := lacks_base_means(settings, progress)):
        if settings.only is not None:
            raise ValueError(reason)
        progress.say(f"left out: {reason}")
        del studies["base_means"]
    variants = {variant.name: variant for study in studies.values() for variant in study}
    results = run_all(
        settings,
        list(variants.values()),
        progress,
        lambda results: write(settings.run_dir, studies, results),
    )
    grids = write(settings.run_dir, studies, results)
    draw(settings.run_dir, studies, results)
    for grid in grids.values():
        progress.console.print(grid.to_rich())
    progress.say(
        f"tables: {settings.run_dir / 'ablations.md'}   numbers:"
        f" {settings.run_dir / 'ablations.json'}"
    )


def lacks_base_means(settings: Ablations, progress: Progress) -> str:
    """Return the reason why measured base means are unknown; an empty text if they are known."""
    if settings.base_data is not None:
        return ""
    weights = cheem_run.load_weights(settings)
    config = PRESETS[settings.chosen_preset]
    means = find_base_means(weights, config, "float32", images=None, progress=progress)
    if means.values is not None:
        return ""
    return (
        "the study base_means needs --base-data, because the weights have no base means at"
        f" {weights.config.image_size} pixels"
    )


def studies_of(settings: Ablations) -> dict[str, list[Variant]]:
    """Return the variants of each selected study, including the unchanged CHEEM."""
    usual = PRESETS[settings.chosen_preset]
    if usual.sampling == "anchored":
        raise ValueError(
            f"--preset {settings.chosen_preset} has no supernet, so there is nothing to ablate;"
            " take paper, quick or demo"
        )
    tolerance = usual.search.tolerance

    def plain(title: str) -> Variant:
        return Variant("cheem", title)

    studies = {
        "epsilon": [
            plain(f"eps1 = {usual.exploration.epsilon:g}, eps2 = {usual.search.epsilon:g}"),
            *(
                Variant(f"epsilon-{e:g}", f"eps1 = eps2 = {e:g}", config=dict.fromkeys(BOTH, e))
                for e in EPSILONS
            ),
        ],
        "tolerance": [
            *(
                plain(f"tau = {100 * t:g} %")
                if t == tolerance
                else Variant(
                    f"tolerance-{t:g}", f"tau = {100 * t:g} %", config={"search.tolerance": t}
                )
                for t in sorted({tolerance, *TOLERANCES})
            ),
            Variant("s_prompts", METHODS["s_prompts"], "s_prompts"),
            Variant("lora_cl", METHODS["lora_cl"], "lora_cl"),
        ],
        "sampling": [plain("HEE"), Variant("uniform", "uniform", config={"sampling": "uniform"})],
        "placement": [
            plain("mlp_down"),
            Variant("attn_proj", "attn_proj", config={"placement": "attn_proj"}),
        ],
        "ops": [
            plain("all four ops"),
            *(
                Variant(f"no-{kind}", f"without {kind}", config={"remove": (kind,)})
                for kind in KINDS
            ),
        ],
        "weights": [
            plain("newly initialised"),
            Variant("inherited", "inherited from the supernet", config={"weights": "inherited"}),
        ],
        "base_means": [
            plain("measured base means"),
            Variant("neutral", "neutral base means", config={"base_means": "neutral"}),
        ],
        "plus": [
            plain("the paper's"),
            Variant("plus", "better on small real sets", config={"router": QUICK_PLUS.router}),
        ],
    }
    every = [*studies, "orders"]
    selected = every if settings.only is None else names_in("--only", settings.only, every)
    if "orders" in selected:  # this study reads the names of the stream's tasks
        studies["orders"] = [plain("the stream's own order"), *orders_of(settings)]
    return {name: variants for name, variants in studies.items() if name in selected}


def orders_of(settings: Ablations) -> list[Variant]:
    """Return variants of CHEEM with orders of the tasks that differ from the stream's order."""
    if settings.order != "default":
        raise ValueError(
            f"--order is {settings.order}; the study `orders` sets the order, leave it out"
        )
    if settings.stream == "mtil" and settings.tasks is None:
        names = ("paper_a", "paper_b", "paper_c")
        return [Variant(name, name.replace("_", " "), run={"order": name}) for name in names]
    names = task_names(settings.stream, settings.tasks, settings.data_dir, settings.class_split)
    if len(names) < 2:
        raise ValueError(
            f"{settings.stream!r} has one task, {names[0]!r}; orders need at least two"
        )
    rng = np.random.default_rng(0)
    # two tasks have only two orders
    orders = dict.fromkeys(tuple(rng.permutation(names).tolist()) for _ in range(1000))
    orders.pop(tuple(names), None)
    return [
        Variant(f"order-{number}", ", ".join(order), run={"tasks": ",".join(order)})
        for number, order in enumerate(list(orders)[: NUM_ORDERS - 1], 2)
    ]


def write(
    directory: Path, studies: Mapping[str, Sequence[Variant]], results: Results
) -> dict[str, Grid]:
    """Write the tables of all studies as Markdown and CSV with their numbers; missing runs are
    omitted."""
    rows = {
        row["method"]: {**row, "ops": op_shares(results[row["method"]])}
        for row in comparison(results)
    }
    first = next(iter(results.values()))[0]
    preset = first["preset"].split(",")[0]  # it is "demo, changed" if individual settings differ
    head = (
        f"# Ablations: {first['stream']}, {len(first['tasks'])} tasks, {first['backbone']}, preset"
        f" {preset}"
    )
    pages = [head, CAPTION]
    grids = {}
    numbers = {}
    for name, study in studies.items():
        finished = [variant for variant in study if variant.name in rows]
        if len(finished) > 1:
            grids[name] = grid_of(name, finished, rows)
            numbers[name] = [
                {**rows[variant.name], "variant": variant.title} for variant in finished
            ]
            pages.append(f"## {name.replace('_', ' ')}\n\n{grids[name].to_markdown()}")
    write_page(directory / "ablations", "\n\n".join(pages) + "\n", numbers)
    for name, grid in grids.items():
        write_atomically(directory / f"{name}.csv", grid.to_csv())
    return grids


CAPTION = """Accuracies in % (mean ± standard deviation over runs), FLOPs per image by the paper's convention with the
router's pass, parameters added per task in % of the backbone, and the share of blocks with each op over all tasks."""  # noqa: E501


def op_shares(runs: Sequence[Mapping[str, Any]]) -> dict[str, float] | None:
    """Return the share of blocks with each op over all tasks of all runs; None if the method has no
    architectures."""
    tasks = [task for run in runs for task in run["tasks"]]
    if not all("architecture" in task for task in tasks):
        return None
    kinds = [choice.split(":")[0] for task in tasks for choice in task["architecture"]]
    return {kind: kinds.count(kind) / len(kinds) for kind in KINDS}


SHOWN = ("average_accuracy", "local_average_accuracy", "average_forgetting")


def grid_of(name: str, variants: Sequence[Variant], rows: Mapping[str, Mapping[str, Any]]) -> Grid:
    """Make the table of one study."""
    columns = (
        "variant",
        "runs",
        "average\naccuracy",
        "task ID\ngiven",
        "forget-\nting",
        "FLOPs\npaper",
        "params\nadded %",
        *KINDS,
        "learning s",
    )
    lines = []
    for variant in variants:
        row = rows[variant.name]
        ops = row["ops"]
        lines.append(
            (
                variant.title,
                str(row["runs"]),
                *(spread(row[key], factor=100) for key in SHOWN),
                format_flops(row["flops_paper"]["mean"]),
                f"{row['params_added_percent']['mean']:.2f}",
                *(NONE if ops is None else f"{100 * ops[kind]:.0f} %" for kind in KINDS),
                f"{row['seconds']['mean']:,.0f}",
            )
        )
    return Grid(name, columns, tuple(lines), 1)


def draw(directory: Path, studies: Mapping[str, Sequence[Variant]], results: Results) -> None:
    """Draw the paper's figures: both sweeps, and the target networks of both samplings and of both
    placements."""
    if "epsilon" in studies:
        usual, *swept = studies["epsilon"]
        sweep_picture(
            directory / "epsilon.png",
            "exploration probability eps1 = eps2",
            [(variant.config[BOTH[0]], results[variant.name]) for variant in swept],
            "params_added_percent",
            {usual.title: results[usual.name]},
        )
    if "tolerance" in studies:
        *swept, prompts, lora = studies["tolerance"]
        sweep_picture(
            directory / "tolerance.png",
            "tolerance tau, points of accuracy",
            [(float(variant.title.split()[2]), results[variant.name]) for variant in swept],
            "flops_paper",
            {variant.title: results[variant.name] for variant in (prompts, lora)},
        )
    for name in ("sampling", "placement"):
        if name in studies:
            architecture_sheet(
                directory / f"{name}.png", [{v.title: results[v.name][0]} for v in studies[name]]
            )


if __name__ == "__main__":
    parsed = parse(Ablations, description=__doc__)
    run_command(main, parsed, parsed.run_dir)
