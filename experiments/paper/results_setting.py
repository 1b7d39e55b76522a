"""The sections of `docs/results.md` that tell what was run, on what, and how to run it again."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from paper.collected import Cell, Cells, Collected, is_usual

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
        if cell.order != "default":
            told = f"{told}; tasks: {', '.join(next(iter(found.values())).run.order)}"
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
            f"code {code.get('version', '?')} at commit {(code.get('commit') or '?')[:7]}"
        )
        own = ", ".join(run.run.results["fingerprint"]) or "?"
        groups.setdefault(told, []).append(f"{run.place} ({own})")
    return [f"- {told}: {', '.join(names)}." for told, names in groups.items()]


def commands(cells: Cells) -> Iterator[str]:
    """Commands that make the runs, usual ones of methods with the same seeds together, and then this page."""
    groups: dict[str, list[str]] = {}
    shared: dict[str, str] = {}
    usual: dict[str, Collected] = {}
    for cell, found in cells.items():
        if is_usual(cells, cell):
            groups.setdefault(",".join(map(str, found)), []).append(cell.method)
            for run in found.values():
                shared = shared_of(options(run.record["command"])) | shared
                usual[cell.method] = run
    told = " ".join(f"{name} {shared[name]}" for name in SHARED if name in shared)
    for seeds, methods in groups.items():
        yield (
            f"python experiments/compare.py {told} \\\n"
            f"    --methods {','.join(dict.fromkeys(methods))} --seeds {seeds} --run-dir RUNS"
        )
    for cell, found in cells.items():
        if not is_usual(cells, cell):
            yield from (alone(run, cell, usual.get(cell.method)) for run in found.values())
    yield "python experiments/collect.py --runs RUNS --to docs/results/runs"
    yield "python experiments/tables.py --results docs/results/runs --page docs/results.md"


SHARED = (
    "--stream", "--data-dir", "--tasks", "--base-data", "--backbone", "--weights", "--image-size", "--preset",
    "--router", "--router-weights",
)  # fmt: skip


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


def shared_of(found: Mapping[str, str]) -> dict[str, str]:
    """Those that `compare.py` has as well."""
    return {name: found[name] for name in SHARED if found.get(name, "None") != "None"}


def alone(run: Collected, cell: Cell, usual: Collected | None) -> str:
    """The command of a run that is a variant, with what differs from the method's usual runs."""
    found = options(run.record["command"])
    known = {} if usual is None else options(usual.record["command"])
    left_out = {*SHARED, "--method", "--seed", "--run-dir"}
    own = {name: value for name, value in found.items() if name not in left_out and known.get(name) != value}
    told = {
        **shared_of(found), "--method": cell.method, **own, "--seed": found.get("--seed", "?"),
        "--run-dir": f"RUNS/{run.place}",
    }  # fmt: skip
    return f"# {cell.title}\npython experiments/mtil.py " + " ".join(f"{n} {v}".rstrip() for n, v in told.items())
