"""The sections of `docs/results.md` that tell what was run, on what, and how to run it again."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from paper.collected import Cells, Collected, is_usual

from cheem_jax.report.table import Grid


def setting_sections(cells: Cells) -> list[str]:
    """Setting, tasks, settings of every method, machines, commands."""
    runs = [run for found in cells.values() for run in found.values()]
    return [
        "## What was run",
        setting_grid(runs).to_markdown(),
        task_grid(runs[0]).to_markdown(),
        "Settings that decide how long a method learns; all others stand in each run's `config.json`.",
        method_grid(cells).to_markdown(),
        "### Where",
        "\n".join(machines(runs)),
        "## To run it again",
        "DATA is the folder of the image sets, WEIGHTS the file of the weights. Every run's own command, with each "
        "option, is in its `record.json`; with equal versions on an equal machine `experiments/reproduce.py` "
        "compares a new run with an old one number by number.",
        "```bash\n" + "\n".join(commands(cells)) + "\n```",
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


LENGTHS = ("epochs", "learning_rate", "learning_rates", "batch_size")


def method_grid(cells: Cells) -> Grid:
    """Epochs, learning rates and batch size of every cell."""
    rows = []
    for cell, found in cells.items():
        config = next(iter(found.values())).run.config.get(cell.method, {})
        told = ", ".join(f"{name} {value}" for name, value in leaves(config) if name.split(".")[-1] in LENGTHS)
        rows.append((cell.title, ", ".join(map(str, found)), told))
    return Grid("", ("method", "seeds", "settings"), tuple(rows), 3)


def leaves(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Settings with dotted names."""
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def machines(runs: Sequence[Collected]) -> list[str]:
    """Machine, versions and code of the runs, those that share all of it together."""
    groups: dict[str, list[str]] = {}
    for run in runs:
        conditions = run.record.get("conditions", {})
        device, code = conditions.get("device", {}), conditions.get("code", {})
        accelerator = "" if device.get("platform", "cpu") == "cpu" else f", {device['count']} × {device['kind']}"
        versions = ", ".join(f"{name} {number}" for name, number in conditions.get("versions", {}).items())
        told = (
            f"{device.get('processor', 'processor not told')}, {device.get('threads', '?')} threads"
            f"{accelerator}; {versions}; "
            f"code {code.get('version', '?')} at commit {(code.get('commit') or '?')[:7]}; "
            f"fingerprint {', '.join(run.run.results['fingerprint']) or '?'}"
        )
        results = run.run.results
        groups.setdefault(told, []).append(f"{results['method']} {results['seed']}")
    return [f"- {told}: {', '.join(names)}." for told, names in groups.items()]


def commands(cells: Cells) -> Iterator[str]:
    """Commands that make the runs, methods with the same seeds together, and then this page."""
    groups: dict[str, list[str]] = {}
    shared: dict[str, str] = {}
    for cell, found in cells.items():
        if is_usual(cells, cell):
            groups.setdefault(",".join(map(str, found)), []).append(cell.method)
            for run in found.values():
                shared = options(run.record["command"]) | shared
    told = " ".join(f"{name} {shared[name]}" for name in SHARED if name in shared)
    for seeds, methods in groups.items():
        yield (
            f"python experiments/compare.py {told} \\\n"
            f"    --methods {','.join(dict.fromkeys(methods))} --seeds {seeds} --run-dir RUNS"
        )
    if others := [cell.title for cell in cells if not is_usual(cells, cell)]:
        yield f"# by experiments/ablations.py or experiments/task_orders.py, into RUNS: {'; '.join(others)}"
    yield "python experiments/collect.py --runs RUNS --to docs/results/runs"
    yield "python experiments/tables.py --results docs/results/runs --page docs/results.md"


SHARED = (
    "--stream", "--data-dir", "--tasks", "--base-data", "--backbone", "--weights", "--image-size", "--preset",
    "--router", "--router-weights",
)  # fmt: skip


def options(command: Sequence[str]) -> dict[str, str]:
    """Options of a recorded command that have a value, of those that `compare.py` has as well."""
    pairs = zip(command, command[1:], strict=False)
    return {name: value for name, value in pairs if name in SHARED and value != "None"}
