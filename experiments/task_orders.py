"""Does the order of the tasks matter? CHEEM on several orders of one stream (the paper's table on orders).

    python experiments/task_orders.py
    python experiments/task_orders.py --stream mtil --preset paper --backbone vit_base --data-dir DATA

MTIL has the paper's three orders; any other stream is shuffled `--num-orders` times, the first order being its own.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import mtil
import numpy as np
from charts import spread, write_page
from study import Found, Study, Variant, run_all

from cheem_jax.cli.main import parse, run_command
from cheem_jax.data.demo import TASKS
from cheem_jax.data.sources import plan_source
from cheem_jax.report.table import NONE, Grid
from cheem_jax.run.progress import Progress


@dataclasses.dataclass(frozen=True)
class TaskOrders(Study):
    """CHEEM on several orders of the same tasks."""

    num_orders: int = 3
    """Orders of a stream that is not MTIL."""
    order_seed: int = 0
    """Shuffles them."""
    run_dir: Path = Path("runs/task_orders")
    """Where runs and tables are kept; what is unfinished is continued."""


def main(settings: TaskOrders) -> None:
    """Run what is missing, then write a row per task and order."""
    progress, variants = Progress(), variants_of(settings)
    found = run_all(settings, variants, progress, lambda found: write(settings.run_dir, variants, found))
    progress.console.print(write(settings.run_dir, variants, found).to_rich())
    progress.say(f"table: {settings.run_dir / 'task_orders.md'}")


def variants_of(settings: TaskOrders) -> list[Variant]:
    """The orders as variants of a run."""
    if settings.order != "default":
        raise ValueError(f"--order is {settings.order}; this study runs several, leave it out")
    if settings.stream == "mtil" and settings.tasks is None:
        names = ("paper_a", "paper_b", "paper_c")
        return [Variant(name, name.replace("_", " "), run={"order": name}) for name in names]
    if settings.num_orders < 2:
        raise ValueError(f"--num-orders is {settings.num_orders}; expected at least 2")
    own = tasks_of(settings)
    if len(own) < 2:
        raise ValueError(f"{settings.stream!r} has one task, {own[0]!r}; orders need at least two")
    orders, rng = [own], np.random.default_rng(settings.order_seed)
    for _ in range(1000):  # of two tasks there are no three orders
        if len(orders) < settings.num_orders and (order := rng.permutation(own).tolist()) not in orders:
            orders.append(order)
    return [
        Variant(f"order-{number}", f"order {number}", run={"tasks": ",".join(order)})
        for number, order in enumerate(orders, 1)
    ]


def tasks_of(settings: TaskOrders) -> list[str]:
    """The stream's tasks in its own order."""
    if settings.tasks is not None:
        return [name.strip() for name in settings.tasks.split(",")]
    if settings.stream == mtil.DEMO:
        return list(TASKS)
    return [plan.name for plan in plan_source(settings.stream, data_dir=settings.data_dir)[1]]


def write(directory: Path, variants: Sequence[Variant], found: Found) -> Grid:
    """Accuracy on each task at the end, by order, as Markdown, CSV and numbers."""
    shown = [variant for variant in variants if variant.name in found]
    first = found[shown[0].name][0]
    numbers: dict[str, dict[str, list[float]]] = {
        name: {v.name: [100 * run["accuracy"][-1][tasks_in(run).index(name)] for run in found[v.name]] for v in shown}
        for name in tasks_in(first)
    }
    for title, key, factor in (
        ("average accuracy", "average_accuracy", 100.0),
        ("average forgetting", "average_forgetting", 100.0),
        ("parameters added, %", "params_added_percent", 1.0),
    ):
        numbers[title] = {v.name: [factor * run[key] for run in found[v.name] if run[key] is not None] for v in shown}
    rows = []
    for name, values in numbers.items():
        means = [float(np.mean(each)) for each in values.values() if each]
        lead = f"{max(means) - min(means):.1f}" if len(means) > 1 else NONE
        rows.append((name, *(spread(each) for each in values.values()), lead))
    title = f"{first['stream']}, {first['backbone']}, {first['preset']}: accuracy at the end, %"
    columns = ("task", *(variant.title for variant in shown), "spread")
    grid = Grid(title, columns, tuple(rows), 1, "spread: between the means of the best and the worst order")
    orders = "\n".join(f"- {v.title}: {', '.join(tasks_in(found[v.name][0]))}" for v in shown)
    text = f"# Orders of the tasks: {title}\n\n{grid.to_markdown()}\n\n{grid.caption}\n\n{orders}\n"
    write_page(directory / "task_orders", text, numbers, grid)
    return grid


def tasks_in(run: Mapping[str, Any]) -> list[str]:
    """Names of a run's tasks in the order in which it learned them."""
    return [task["name"] for task in run["tasks"]]


if __name__ == "__main__":
    parsed = parse(TaskOrders, description=__doc__)
    run_command(main, parsed, parsed.run_dir)
