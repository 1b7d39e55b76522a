"""Ablations of CHEEM, the paper's and more: a table and a figure for each.

    python experiments/ablations.py
    python experiments/ablations.py --only epsilon,sampling --seeds 0,1,2 --run-dir runs/ablations
    python experiments/ablations.py --stream mtil --preset paper --backbone vit_base --data-dir DATA

The studies: epsilon (eps1 = eps2), tolerance (tau, with S-Prompts and LoRA-CL), sampling (HEE
against uniform), placement, ops (one removed), weights (inherited from the supernet or new),
base_means (measured or neutral), plus (a better router), orders (of the tasks: the paper's three
for MTIL, shuffled for any other stream). The unchanged CHEEM belongs to all of them and is run
once. `tables.py` also reads the runs, for the paper's tables.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from charts import architecture_sheet, names_in, spread, sweep_picture, write_page
from study import Results, Study, Variant, run_all, task_names

from cheem_jax.cheem.config import PLUS, PRESETS
from cheem_jax.cli.arguments import parse
from cheem_jax.cli.running import run_command
from cheem_jax.core.atomic import write_atomically
from cheem_jax.core.settings import KINDS
from cheem_jax.report.comparison import comparison
from cheem_jax.report.table import METHODS, NONE, Grid, format_flops
from cheem_jax.run.progress import Progress


@dataclasses.dataclass(frozen=True)
class Ablations(Study):
    """CHEEM with one change at a time."""

    only: str | None = None
    """Studies separated by commas; default: all."""
    epsilons: tuple[float, ...] = (0.1, 0.3, 0.5, 0.7, 0.9)
    """Values of eps1 = eps2."""
    tolerances: tuple[float, ...] = (0.01, 0.02, 0.04, 0.06, 0.08)
    """Values of tau."""
    num_orders: int = 3
    """Number of orders, the stream's own order included; MTIL has the paper's three."""
    order_seed: int = 0
    """Seed of the shuffled orders."""
    run_dir: Path = Path("runs/ablations")
    """Folder of runs and tables; unfinished runs resume."""


def main(settings: Ablations) -> None:
    """Run the missing runs, then write a table per study."""
    progress = Progress()
    studies = studies_of(settings)
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


def studies_of(settings: Ablations) -> dict[str, list[Variant]]:
    """The variants of each selected study, the unchanged CHEEM included."""
    usual = PRESETS[settings.chosen_preset]
    tolerance = usual.search.tolerance

    def plain(title: str) -> Variant:
        return Variant("cheem", title)

    studies = {
        "epsilon": [
            plain(f"eps1 = {usual.exploration.epsilon:g}, eps2 = {usual.search.epsilon:g}"),
            *(
                Variant(f"epsilon-{e:g}", f"eps1 = eps2 = {e:g}", config=dict.fromkeys(EPSILONS, e))
                for e in _checked("epsilons", settings.epsilons)
            ),
        ],
        "tolerance": [
            *(
                plain(f"tau = {100 * t:g} %")
                if t == tolerance
                else Variant(
                    f"tolerance-{t:g}", f"tau = {100 * t:g} %", config={"search.tolerance": t}
                )
                for t in sorted({tolerance, *_checked("tolerances", settings.tolerances)})
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
            Variant("plus", "better on small real sets", config=PLUS),
        ],
    }
    every = [*studies, "orders"]
    asked = every if settings.only is None else names_in("--only", settings.only, every)
    if "orders" in asked:  # reads the names of the stream's tasks
        studies["orders"] = [plain("the stream's own order"), *orders_of(settings)]
    return {name: variants for name, variants in studies.items() if name in asked}


def orders_of(settings: Ablations) -> list[Variant]:
    """CHEEM on other orders of the tasks than the stream's own order."""
    if settings.order != "default":
        raise ValueError(
            f"--order is {settings.order}; the study `orders` runs several, leave it out"
        )
    if settings.stream == "mtil" and settings.tasks is None:
        names = ("paper_a", "paper_b", "paper_c")
        return [Variant(name, name.replace("_", " "), run={"order": name}) for name in names]
    if settings.num_orders < 2:
        raise ValueError(f"--num-orders is {settings.num_orders}; expected at least 2")
    names = task_names(settings.stream, settings.tasks, settings.data_dir, settings.class_split)
    if len(names) < 2:
        raise ValueError(
            f"{settings.stream!r} has one task, {names[0]!r}; orders need at least two"
        )
    orders = [names]
    rng = np.random.default_rng(settings.order_seed)
    for _ in range(1000):  # two tasks have only two orders
        if (
            len(orders) < settings.num_orders
            and (order := rng.permutation(names).tolist()) not in orders
        ):
            orders.append(order)
    return [
        Variant(f"order-{number}", ", ".join(order), run={"tasks": ",".join(order)})
        for number, order in enumerate(orders[1:], 2)
    ]


EPSILONS = ("exploration.epsilon", "search.epsilon")


def _checked(name: str, values: Sequence[float]) -> list[float]:
    if not values or not all(0 <= value <= 1 for value in values):
        raise ValueError(f"--{name} is {' '.join(map(str, values))}; expected numbers from 0 to 1")
    return sorted(set(values))


def write(
    directory: Path, studies: Mapping[str, Sequence[Variant]], results: Results
) -> dict[str, Grid]:
    """Write all tables as Markdown and CSV, and their numbers, without missing runs."""
    rows = {
        row["method"]: {**row, "ops": op_shares(results[row["method"]])}
        for row in comparison(results)
    }
    first = next(iter(results.values()))[0]
    preset = first["preset"].split(",")[0]  # "demo, changed" if single settings differ
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
    """The share of blocks with each op over all tasks of all runs; None for a method without
    architectures."""
    tasks = [task for run in runs for task in run["tasks"]]
    if not all("architecture" in task for task in tasks):
        return None
    chosen = [choice.split(":")[0] for task in tasks for choice in task["architecture"]]
    return {kind: chosen.count(kind) / len(chosen) for kind in KINDS}


SHOWN = ("average_accuracy", "local_average_accuracy", "average_forgetting")


def grid_of(name: str, variants: Sequence[Variant], rows: Mapping[str, Mapping[str, Any]]) -> Grid:
    """The table of one study."""
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
    """Draw the paper's figures: both sweeps, and the networks of both samplings and placements side
    by side."""
    if "epsilon" in studies:
        usual, *swept = studies["epsilon"]
        sweep_picture(
            directory / "epsilon.png",
            "exploration probability eps1 = eps2",
            [(variant.config[EPSILONS[0]], results[variant.name]) for variant in swept],
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
