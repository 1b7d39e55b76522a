"""Does the order of the tasks matter? CHEEM on several orders of one stream (the paper's table on orders).

    python experiments/task_orders.py
    python experiments/task_orders.py --stream mtil --preset paper --backbone vit_base --data-dir DATA

MTIL has the paper's three orders; any other stream is shuffled `--num-orders` times, the first order being its own.
"""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

import mtil
import numpy as np
from study import Found, Study, Variant, run_all
from tables import Tables
from tables import main as write_tables

from cheem_jax.atomic import write_atomically
from cheem_jax.cli import parse, run_command
from cheem_jax.data.demo import TASKS
from cheem_jax.data.sources import plan_source
from cheem_jax.report.progress import Progress
from cheem_jax.report.table import NONE, Grid


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
    if settings.stream == "mtil":
        write_tables(Tables(runs=(settings.run_dir,), out=settings.run_dir / "tables", only="task_orders"))
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
    names = [task["name"] for task in first["tasks"]]
    last: dict[str, dict[str, list[float]]] = {}
    for variant in shown:
        for results in found[variant.name]:
            for task, accuracy in zip(results["tasks"], results["accuracy"][-1], strict=True):
                last.setdefault(task["name"], {}).setdefault(variant.name, []).append(100 * accuracy)
    averages = {
        title: {v.name: [factor * r[key] for r in found[v.name] if r[key] is not None] for v in shown}
        for title, key, factor in (
            ("average accuracy", "average_accuracy", 100.0),
            ("average forgetting", "average_forgetting", 100.0),
            ("parameters added, %", "params_added_percent", 1.0),
        )
    }
    numbers = {**{name: last[name] for name in names}, **averages}
    columns = ("task", *(variant.title for variant in shown), "spread")
    rows = tuple(
        (name, *(_mean(values[v.name]) for v in shown), _spread([values[v.name] for v in shown]))
        for name, values in numbers.items()
    )
    title = f"{first['stream']}, {first['backbone']}, {first['preset']}: accuracy at the end, %"
    grid = Grid(title, columns, rows, 1, "spread: between the means of the best and the worst order")
    orders = "\n".join(
        f"- {v.title}: {', '.join(task['name'] for task in found[v.name][0]['tasks'])}" for v in shown
    )  # fmt: skip
    text = f"# Orders of the tasks: {title}\n\n{grid.to_markdown()}\n\n{grid.caption}\n\n{orders}\n"
    write_atomically(directory / "task_orders.md", text)
    write_atomically(directory / "task_orders.csv", grid.to_csv())
    write_atomically(directory / "task_orders.json", json.dumps(numbers, indent=1) + "\n")
    return grid


def _mean(values: Sequence[float]) -> str:
    if not values:
        return NONE
    spread = f" ± {np.std(values, ddof=1):.1f}" if len(values) > 1 else ""
    return f"{np.mean(values):.1f}{spread}"


def _spread(values: Sequence[Sequence[float]]) -> str:
    means = [float(np.mean(each)) for each in values if len(each)]
    return f"{max(means) - min(means):.1f}" if len(means) > 1 else NONE


if __name__ == "__main__":
    parsed = parse(TaskOrders, description=__doc__)
    run_command(main, parsed, parsed.run_dir)
