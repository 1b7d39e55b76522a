"""The sections of `docs/results.md` that tell what was run, on what, and how to run it again."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from cheem_jax.report.earlier import completed
from cheem_jax.report.table import Grid
from studies.paper.beside import AGAIN, Beside, pixels_of, processor_of
from studies.paper.collected import Cells, Collected, is_usual, usual_of


def setting_sections(cells: Cells, studies: Mapping[str, Mapping[str, Any]], beside: Beside) -> list[str]:
    """Setting, tasks, settings of every method, machines, commands; `studies` are those that left their numbers."""
    runs = [run for found in cells.values() for run in found.values()]
    return [
        "## What was run",
        setting_grid(runs).to_markdown(),
        task_grid(runs[0]).to_markdown(),
        "Settings that decide how long a method learns, and of variants what differs from the method as it is; all "
        "others stand in each run's `config.json`.",
        method_grid(cells).to_markdown(),
        "### Where",
        "In brackets: the fingerprint of machine, versions, code and settings; two where a run went on under others.",
        "\n".join(machines(runs)),
        "## To run it again",
        f"DATA is the folder of the image sets, whose last part has to be `{runs[0].run.place[0]}`; WEIGHTS is the "
        "file of the weights. The SHA-256 of every set stands in each run's `config.json`, each option of its "
        "command in its `record.json`. Runs were made by the code of the commits above, which the present code "
        "reads and compares; studies, collecting and this page are of the present code. With equal versions on an "
        "equal machine a new run has the same numbers: collect it into another folder OTHER, and "
        "`experiments/reproduce.py docs/results/runs/cheem/seed-0 --against OTHER/cheem/seed-0` compares them.",
        "```bash\n" + "\n".join(commands(cells, studies, beside)) + "\n```",
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
        told += [] if cell.order == "default" else [f"the tasks in the order {' '.join(run.run.order)}"]
        like = "" if usual is None or usual == cell else f"as {usual.title}, but for "
        rows.append((cell.title, ", ".join(map(str, found)), like + ", ".join(told)))
    return Grid("", ("method", "seeds", "settings"), tuple(rows), 3)


def settings_of(run: Collected) -> dict[str, Any]:
    """A method's settings by dotted names, those of before a setting existed with its default."""
    return dict(leaves(completed(run.run.config).get(run.run.results["method"], {})))


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
            f"{device.get('processor', 'processor not told')}, {number_of(device.get('threads'), 'thread')}"
            f"{accelerator}; {versions}; "
            f"code {code.get('version', '?')} at commit {(code.get('commit') or '?')[:7]}"
        )
        own = ", ".join(run.run.results["fingerprint"]) or "?"
        groups.setdefault(told, []).append(f"{run.place} ({own})")
    return [f"- {told}: {', '.join(names)}." for told, names in groups.items()]


def number_of(count: int | None, what: str) -> str:
    """So many of something."""
    return f"{'?' if count is None else count} {what}{'' if count == 1 else 's'}"


def commands(cells: Cells, studies: Mapping[str, Mapping[str, Any]], beside: Beside) -> Iterator[str]:
    """Commands that make the runs, usual ones of methods with the same seeds together, the studies, and this page."""
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
            yield from (alone(run, cell.title, cell.method, usual.get(cell.method)) for run in found.values())
    others = [(cells, f"at {pixels_of(cells)} pixels", f"at_{pixels_of(cells)}") for cells in beside.sizes]
    for other, what, folder in [(beside.again, "again", AGAIN), *others]:
        for cell, found in other.items():
            for run in found.values():
                on = f" on {processor_of(run)}" if folder == AGAIN else ""
                yield alone(run, f"{cell.title}, {what}{on}", cell.method, usual.get(cell.method), folder.upper())
        if other:
            yield f"python experiments/collect.py --runs {folder.upper()} --to docs/results/{folder}"
    if "routers" in studies:
        yield "python experiments/router_study.py --runs RUNS --out ROUTERS && cp ROUTERS/routers.json docs/results"
    if "search" in studies:
        yield search_command(cells, studies["search"], {name: shared[name] for name in SEARCHED if name in shared})
    yield "python experiments/collect.py --runs RUNS --to docs/results/runs"
    yield "python experiments/tables.py --results docs/results/runs --page docs/results.md"


def search_command(cells: Cells, found: Mapping[str, Any], shared: Mapping[str, str]) -> str:
    """The command of the study of searches, on the run whose supernets it trained again."""
    order, seed = tuple(found["order"]), found["seed"]
    places = [
        run.place for cell, own in cells.items() if (cell.method, cell.variant) == ("cheem", "")
        for run in own.values() if (run.run.order, run.run.results["seed"]) == (order, seed)
    ]  # fmt: skip
    told = " ".join(f"{name} {value}" for name, value in shared.items())
    return (
        f"python experiments/search_study.py --run RUNS/{next(iter(places), '?')} {told} \\\n"
        f"    --study {','.join(found['supernets'])} --num {found['num']} "
        f"--search-seeds {','.join(map(str, found['search_seeds']))} --run-dir SEARCH \\\n"
        "    && cp SEARCH/search_study.json docs/results/search.json"
    )


SEARCHED = ("--stream", "--data-dir", "--base-data", "--weights")
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


def alone(run: Collected, title: str, method: str, usual: Collected | None, folder: str = "RUNS") -> str:
    """The command of a run that is a variant, with what differs from the method's usual runs."""
    found = options(run.record["command"])
    known = {} if usual is None else options(usual.record["command"])
    left_out = {*SHARED, "--method", "--seed", "--run-dir"}
    own = {name: value for name, value in found.items() if name not in left_out and known.get(name) != value}
    told = {
        **shared_of(found), "--method": method, **own, "--seed": found.get("--seed", "?"),
        "--run-dir": f"{folder}/{run.place}",
    }  # fmt: skip
    return f"# {title}\npython experiments/mtil.py " + " ".join(f"{n} {v}".rstrip() for n, v in told.items())
