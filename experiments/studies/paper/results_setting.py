"""The sections of `docs/results.md` that tell what was run, on what, and how to run it again."""

from collections.abc import Iterator, Sequence
from typing import Any

from flax.traverse_util import flatten_dict

from cheem_jax.report.table import Grid
from cheem_jax.run.differences import REMOVED, without_removed
from studies.paper.collected import Cells, Collected, is_usual, usual_of


def setting_sections(cells: Cells, has_routers: bool) -> list[str]:
    """Setting, tasks, settings of every method, machines, commands, that of the study of routers where there is one."""
    runs = [run for found in cells.values() for run in found.values()]
    return [
        "## What was run",
        setting_grid(runs).to_markdown(),
        task_grid(runs[0]).to_markdown(),
        "Settings that decide how long a method learns; of variants, what differs. All others are in each run's "
        "`config.json`.",
        method_grid(cells).to_markdown(),
        "### Where",
        "All versions are in each run's `record.json`.",
        "\n".join(machines(runs)),
        "## To run it again",
        f"DATA is the folder of the image sets, named `{runs[0].run.place[0]}`; WEIGHTS is the weights file. The "
        "command of every run, also of variants and of those on other machines and sizes, is in its `record.json`, the "
        "SHA-256 of every set in its `config.json`. With equal code, versions and machine a new run has the same "
        "numbers: collect it into another folder OTHER, and `experiments/reproduce.py docs/results/runs/cheem/seed-0 "
        "--against OTHER/cheem/seed-0` compares them.",
        "```bash\n" + "\n".join(commands(cells, has_routers)) + "\n```",
    ]


def setting_grid(runs: Sequence[Collected]) -> Grid:
    """What all runs share."""
    results, config, data = runs[0].run.results, runs[0].run.config, runs[0].record["data"]
    seeds = sorted({run.run.results["seed"] for run in runs})
    rows = [
        ("backbone", results["backbone"]),
        ("weights", f"{results['source']}, SHA-256 {config['weights_sha256'][:12]}…"),
        ("pixels", str(results["image_size"])),
        ("preset", results["preset"]),
        ("seeds", ", ".join(map(str, seeds))),
        ("seed of the splits", f"{data.get('split_seed')}, the same for all runs"),
        ("finished runs", str(len(runs))),
    ]
    return Grid("", ("setting", "value"), tuple(rows), 2)


def task_grid(run: Collected) -> Grid:
    """Images and classes."""
    rows = []
    for task in run.run.results["tasks"]:
        images = (f"{task[f'num_{split}']:,}" for split in ("train", "val", "test"))
        num_classes = len(task["classes"])
        rows.append((task["name"], str(num_classes), *images, f"{100 / num_classes:.1f}"))
    return Grid("", ("task, in learning order", "classes", "train", "validation", "test", "chance %"), tuple(rows), 1)


LENGTHS = (
    "epochs", "learning_rate", "learning_rates", "schedule", "batch_size", "rank", "population", "generations",
)  # fmt: skip


def method_grid(cells: Cells) -> Grid:
    """Epochs, learning rates and batch size of every method, and what sets its variants apart."""
    rows = []
    for cell, found in cells.items():
        run, usual = next(iter(found.values())), usual_of(cells, cell.method)
        config = settings_of(run)
        if usual is None or usual == cell:
            told = [f"{name} {value}" for name, value in config.items() if name.split(".")[-1] in LENGTHS]
        else:
            as_it_is = settings_of(next(iter(cells[usual].values())))
            told = [f"{name} {value}" for name, value in config.items() if as_it_is.get(name) != value]
        told += [f"no longer a setting, measured at commit {commit_of(run)}"] if is_gone(run) else []
        told += [] if cell.order == "default" else [f"the tasks in the order {' '.join(run.run.order)}"]
        like = "" if usual is None or usual == cell else f"as {usual.title}, but for "
        rows.append((cell.title, ", ".join(map(str, found)), like + ", ".join(told)))
    return Grid("", ("method", "seeds", "settings"), tuple(rows), 3)


def settings_of(run: Collected) -> dict[str, Any]:
    """A method's settings by dotted names."""
    return flatten_dict(without_removed(run.run.config.get(run.run.results["method"], {})), sep=".")


def is_gone(run: Collected) -> bool:
    """Whether a run was made with settings that no longer exist."""
    return not REMOVED.keys().isdisjoint(settings_of(run))


def commit_of(run: Collected) -> str:
    """The commit of the code that a run was begun with."""
    return (run.record.get("conditions", {}).get("code", {}).get("commit") or "?")[:7]


def machines(runs: Sequence[Collected]) -> list[str]:
    """Processor, JAX and code of the runs, those that share all of it together; `record.json` has every version."""
    groups: dict[str, list[str]] = {}
    for run in runs:
        conditions = run.record.get("conditions", {})
        device = conditions.get("device", {})
        accelerator = "" if device.get("platform", "cpu") == "cpu" else f", {device['count']} × {device['kind']}"
        told = (
            f"{device.get('processor', 'unknown processor')}, {number_of(device.get('threads'), 'thread')}"
            f"{accelerator}; jax {conditions.get('versions', {}).get('jax', '?')}; commit {commit_of(run)}"
        )
        groups.setdefault(told, []).append(run.place)
    return [f"- {told}: {', '.join(names)}." for told, names in groups.items()]


def number_of(count: int | None, what: str) -> str:
    """So many of something."""
    return f"{'?' if count is None else count} {what}{'' if count == 1 else 's'}"


SHARED = (
    "--stream", "--data-dir", "--tasks", "--base-data", "--backbone", "--weights", "--image-size", "--preset",
    "--router", "--router-weights",
)  # fmt: skip
"""Options of a recorded command that `compare.py` has as well."""


def commands(cells: Cells, has_routers: bool) -> Iterator[str]:
    """Commands that make the usual runs, those of the same seeds together, then the study of routers and this page."""
    groups: dict[str, list[str]] = {}
    shared: dict[str, str] = {}
    for cell, found in cells.items():
        if is_usual(cells, cell):
            groups.setdefault(",".join(map(str, found)), []).append(cell.method)
            for run in found.values():
                shared = options(run.record["command"]) | shared
    told = " ".join(f"{name} {shared[name]}" for name in SHARED if shared.get(name, "None") != "None")
    for seeds, methods in groups.items():
        names = ",".join(dict.fromkeys(methods))
        yield f"python experiments/compare.py {told} \\\n    --methods {names} --seeds {seeds} --run-dir RUNS"
    if has_routers:
        yield "python experiments/router_study.py --runs RUNS --out ROUTERS && cp ROUTERS/routers.json docs/results"
    yield "python experiments/collect.py --runs RUNS --to docs/results/runs"
    yield "python experiments/tables.py --results docs/results/runs --page docs/results.md"


def options(command: Sequence[str]) -> dict[str, str]:
    """Options of a recorded command, each with its values."""
    found: dict[str, list[str]] = {}
    values: list[str] = []
    for word in command[1:]:
        if word.startswith("--"):
            values = found[word] = []
        else:
            values.append(word)
    return {name: " ".join(values) for name, values in found.items()}
