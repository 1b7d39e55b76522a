"""The sections of `docs/results.md` that tell what was run, on what, how to run it again, and what other runs show.

Others are collected runs beside the page's own: the same seeds on another processor, other image sizes.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from flax.traverse_util import flatten_dict

from cheem_jax.report.comparison import comparison
from cheem_jax.report.table import METHODS, UPPER_BOUNDS, Grid
from cheem_jax.run.differences import REMOVED, settings_apart, summary, without_removed
from studies.paper.claims import CHEEM, Claim, Verdict, compared, of_claim, shown
from studies.paper.collected import Cell, Cells, Collected, is_usual, load, usual_of


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


AGAIN, SIZES = "again", "at_*"
"""Folders of other runs, beside that of the page's runs."""


class Beside(NamedTuple):
    """What was found there."""

    again: Cells
    """Runs of the page made once more on another processor."""
    sizes: Sequence[Cells]
    """Runs on the same images in another size, a folder each, the smallest first."""


def load_beside(results: Path, cells: Cells) -> Beside:
    """What stands beside the folder of the page's runs, `cells`; raises ValueError where it does not belong to them."""
    folder = results.parent / AGAIN
    again = load(folder) if folder.is_dir() else {}
    for cell, found in again.items():
        for seed, run in found.items():
            if why := _no_twin(run, cells.get(cell, {}).get(seed)):
                raise ValueError(
                    f"{run.run.directory} is not a run of {results} made again on another processor: {why}; remove it"
                )
    first = next(run for found in cells.values() for run in found.values())
    sizes = [load(folder) for folder in results.parent.glob(SIZES) if folder.is_dir()]
    for run in (run for other in sizes for found in other.values() for run in found.values()):
        if why := _no_other_size(run, first):
            raise ValueError(f"{run.run.directory} is not a run on the same images in another size: {why}; remove it")
    return Beside(again, sorted(sizes, key=pixels_of))


def pixels_of(cells: Cells) -> int:
    """The size of the images."""
    return next(run.run.results["image_size"] for found in cells.values() for run in found.values())


def _no_twin(run: Collected, twin: Collected | None) -> str:
    if twin is None:
        return "no run there is of its method, settings and seed"
    if run.run.order != twin.run.order:
        return f"its tasks are {', '.join(run.run.order)}"
    if found := settings_apart(twin.run.config, run.run.config):
        return f"its settings differ from {twin.run.directory}: {summary(found, 'settings')}"
    processors = [one.record.get("conditions", {}).get("device", {}).get("processor") for one in (run, twin)]
    return f"both ran on {processors[0]}" if processors[0] == processors[1] else ""


def _no_other_size(run: Collected, first: Collected) -> str:
    if set(run.run.order) != set(first.run.order):
        return f"its tasks are {', '.join(run.run.order)}"
    if run.record["data"].get("split_seed") != first.record["data"].get("split_seed"):
        return "its splits have another seed"
    size = run.run.results["image_size"]
    return f"its size is {size} as well" if size == first.run.results["image_size"] else ""


def again_section(again: Cells, cells: Cells, others: Sequence[Cell], changed: Sequence[str]) -> list[str]:
    """What comparisons of single runs owe to the processor: `others` against either of two runs of CHEEM; `changed` is
    from `changed_verdicts`."""
    seeds = list(again.get(CHEEM, {}))
    if not seeds:
        return []
    theirs = {**cells, CHEEM: again[CHEEM]}
    ours = {**cells, CHEEM: {seed: cells[CHEEM][seed] for seed in seeds}}
    published = Cell(CHEEM.method, "above")
    both = {CHEEM: again[CHEEM], published: ours[CHEEM]}
    rows: list[tuple[str, ...]] = [("CHEEM run again − CHEEM above", *_found(both, CHEEM, published), "", "")]
    for cell in others:
        usual = is_usual(cells, cell)
        if set(seeds) & set(cells[cell]) and (usual or cell.method == CHEEM.method):
            one, other = (CHEEM, cell) if usual else (cell, CHEEM)
            title = f"{one.title} − {other.title}"
            rows.append((title, *_found(ours, one, other), *_found(theirs, one, other)))
    columns = ("compared", "with the run above", "95 % interval", "with the run made again", "95 % interval")
    pairs = [
        (mine["architecture"], its["architecture"])
        for seed in seeds
        for mine, its in zip(
            cells[CHEEM][seed].run.results["tasks"], again[CHEEM][seed].run.results["tasks"], strict=True
        )
    ]
    other_networks = sum(mine != its for mine, its in pairs)
    told = f"With it {', '.join(changed)}." if changed else "With it every verdict on a claim would be the same."
    return [
        "### The same seed on another kind of processor",
        f"CHEEM with {'seed' if len(seeds) == 1 else 'seeds'} {', '.join(map(str, seeds))} again, same settings, "
        f"another kind of processor: other networks for {other_networks} of {len(pairs)} tasks, since the last bits of "
        "losses decide among candidates that are nearly alike. No interval of a single seed on this page includes "
        'that; it adds to differences between runs of different processors ("Where", below). Average accuracy, from '
        f"{'this seed' if len(seeds) == 1 else 'these seeds'} alone:",
        Grid("", columns, tuple(rows), 1).to_markdown(),
        f"{told} Above and again, in this order:",
        "\n".join([*machines(list(ours[CHEEM].values())), *machines(list(again[CHEEM].values()))]),
    ]


def changed_verdicts(again: Cells, cells: Cells, judged: Sequence[tuple[Claim, Sequence[Verdict]]]) -> list[str]:
    """Claims that would be judged otherwise with the runs made again in the place of those of the page."""
    if not again:
        return []
    exchanged = {**cells, **{cell: {**cells[cell], **found} for cell, found in again.items()}}
    words = [(claim, of_claim(lines), of_claim(claim.check(exchanged))) for claim, lines in judged]
    return [f"({claim.letter}) would be “{then}” instead of “{now}”" for claim, now, then in words if now != then]


def _found(cells: Cells, one: Cell, other: Cell) -> tuple[str, ...]:
    return shown(compared("", cells, one, other, lambda _: ""))[:2]


def sizes_lines(
    sizes: Sequence[Cells], measured: Mapping[str, Mapping[str, Any]], routers: Mapping[str, Any] | None, pixels: int
) -> str:
    """What runs on other sizes of images reached, as more lines; all else is of the page's size, `pixels`."""
    best = [row["average_accuracy"]["mean"] for method, row in measured.items() if method not in UPPER_BOUNDS]
    best += [] if routers is None else [row["accuracy"] for row in map(routers["chosen"].get, METHODS) if row]
    highest, flops = max(best, default=1.0), measured["cheem"]["flops_paper"]["mean"] if "cheem" in measured else None
    told = []
    for cells in sizes:
        for cell, found in cells.items():
            if cell.method in UPPER_BOUNDS:
                continue
            [row] = comparison({cell.method: [one.run.results for one in found.values()]})
            accuracy, given, cost = (
                row[name]["mean"] for name in ("average_accuracy", "local_average_accuracy", "flops_paper")
            )
            most = f", more than any method without the task ID at {pixels}" if accuracy > highest else ""
            times = "" if flops is None else f"; an image costs {cost / flops:.1f} times CHEEM's FLOPs at {pixels}"
            told.append(
                f"\n- At {pixels_of(cells)} pixels instead of {pixels} ({number_of(len(found), 'run')}), {cell.title}: "
                f"{100 * accuracy:.1f} %, with the task ID given {100 * given:.1f} %{most}{times}."
            )
    return "".join(told)
