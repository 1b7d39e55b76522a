"""The checklist of the paper's equations, algorithms, tables and figures, read from
`checklist.toml`, and readers that describe the result of a run in one line."""

import json
import re
import tomllib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tables import LAYOUTS

from cheem_jax.baselines.catalogue import NAMES
from studies.paper import equations
from studies.paper.printed import printed

PAPER = "paper"
"""Column of `WORDS` with the values for the paper's experiment."""
NO_CELL = "–"
_FACTS = tomllib.loads((Path(__file__).parent / "checklist.toml").read_text(encoding="utf-8"))


class Item(NamedTuple):
    """An equation, an algorithm, a table or a figure, with a worked example or a run."""

    place: str
    """Number in the paper, or the section of an algorithm."""
    title: str
    code: Sequence[str]
    """Names in the package, or scripts."""
    labels: Sequence[str] = ()
    """Labels in the LaTeX source; some equations and one table have none."""
    example: str = ""
    """Function of `equations.py`."""
    run: str = ""
    """Key of `RUNS`; more than one item can share a run."""
    read: Sequence[Any] = ()
    """Name and arguments of the reader of the run's result."""
    missing: str = ""
    """Images and weights of the paper's experiment that this repository does not contain."""


class Run(NamedTuple):
    """Commands, and the images of the small run. `DATA`, `RUNS`, `TABLES` and `ALEXNET` are paths;
    other words in capitals are keys of `WORDS`."""

    images: str
    commands: Sequence[str]
    after: str = ""
    """Another run whose output the commands read."""


ITEMS = tuple(Item(**fields) for fields in (*_FACTS["examples"], *_FACTS["experiments"]))
RUNS = {name: Run(**fields) for name, fields in _FACTS["runs"].items()}
METHODS = {
    cell.method for name, table in printed().items() if name != "components" for cell in table
}
WORDS: Mapping[str, Mapping[str, str]] = _FACTS["words"] | {
    "METHODS": {PAPER: ",".join(name for name in NAMES if name in METHODS)}
}
"""Words in commands: their values for the paper's experiment and for the small runs."""


def filled(command: str, images: str) -> str:
    """Replace the words of a command by their values for `images`, or else for the paper's
    experiment."""
    for word, values in WORDS.items():
        command = re.sub(rf"\b{word}\b", values.get(images, values[PAPER]), command)
    return command


def check(item: Item) -> str:
    """Evaluate a worked example; raises ValueError if the formula has a different result."""
    example: equations.Example = getattr(equations, item.example)
    ours, formula, tolerance = example()
    ours, formula = (np.ravel(np.asarray(numbers)) for numbers in (ours, formula))
    texts = [", ".join(f"{number:.4g}" for number in numbers) for numbers in (ours, formula)]
    if not np.allclose(ours, formula, rtol=0, atol=tolerance):
        raise ValueError(f"{texts[0]}; expected {texts[1]} ± {tolerance:g}")
    return f"{texts[0]} (formula: {texts[1]})"


def describe(item: Item, out: Path) -> str:
    """Describe the result of an item's run in an output folder."""
    reader, *arguments = item.read
    return READERS[reader](out, item.run, *arguments)


def table(out: Path, run: str, name: str, rows: str = "") -> str:
    """Return our columns of a table of `tables.py`: the row of CHEEM, two further rows, and the
    number of rows. `rows` is a part of the names of the rows that count. Raises ValueError if no
    row has a number of ours."""
    parts = (out / "tables" / run / "tables.md").read_text().split("\n\n")
    for title, text in zip(parts, parts[1:], strict=False):
        if not title.startswith(f"{LAYOUTS[name].title}: "):
            continue
        head, _, *lines = [
            [cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()
        ]
        ours = [i for i, column in enumerate(head) if column.endswith(", ours")]
        values = [
            f"{line[0]}: {', '.join(line[i].removesuffix(' (1)') or NO_CELL for i in ours)}"
            for line in sorted(lines, key=lambda line: not line[0].startswith("CHEEM"))
            if rows in line[0] and any(line[i] for i in ours)
        ]
        if values:
            columns = ", ".join(head[i].removesuffix(", ours") for i in ours)
            return f"({columns}) {'; '.join(values[:3])} (rows: {len(values)})"
    raise ValueError(f"the table {name!r} has no row {rows!r} with our numbers")


def architectures(
    out: Path,
    run: str,
    variant: str = "cheem",
    figure: str = "cheem/seed-0/figures/architectures.png",
) -> str:
    """Return the ops of the target networks, and the size of their figure."""
    tasks = []
    for task in _results(out, run, variant)["tasks"]:
        ops = Counter(choice.split(":")[0] for choice in task["architecture"])
        tasks.append(f"{task['name']}: {', '.join(f'{num} {op}' for op, num in ops.items())}")
    return f"{'; '.join(tasks)}; {_size(out / 'runs' / run / figure)}"


def search(out: Path, run: str) -> str:
    """Return the seconds of the phases of CHEEM's first task, and the result of its search."""
    task = _results(out, run)["tasks"][0]
    seconds = (f"{name} {task['seconds'][name]:.1f} s" for name in PHASES)
    return (
        f"{', '.join(seconds)}; {task['searched']} architectures scored, validation accuracy"
        f" {task['best_validation_accuracy']:.3f}, {task['validation_accuracy']:.3f} of the target"
        " network"
    )


PHASES = ("similarity", "supernet", "search", "finetune")


def memory(out: Path, run: str) -> str:
    """Return the sizes of the internal and of the external memory after the last task."""
    results = _results(out, run)
    pool = ", ".join(str(len(block)) for block in results["pool"])
    numbers = ", ".join(str(task["centroid_params"]) for task in results["tasks"])
    return f"experts per block: {pool}; numbers in the centroids of each task: {numbers}"


def methods(out: Path, run: str) -> str:
    """Return the names of all methods that were run."""
    rows = json.loads((out / "runs" / run / "comparison.json").read_text())
    return f"{len(rows)} methods: {', '.join(row['method'] for row in rows)}"


def times(out: Path, run: str) -> str:
    """Return the seconds of training per task of the methods in the paper's table."""
    phases = json.loads((out / "runs" / run / "training_time.json").read_text())
    seconds = (
        f"{method} {sum(phase['mean'] for phase in phases[method].values()):.1f}"
        for method in dict.fromkeys(cell.method for cell in printed()["training_time"])
    )
    return f"seconds per task: {', '.join(seconds)}"


def heads(out: Path, run: str) -> str:
    """Return the accuracies of methods with one head, and how often both argmaxes agree."""
    rows = json.loads((out / "tables" / run / "heads.json").read_text())["methods"]
    names = ("average_accuracy", "local_average_accuracy", "match", "predicted")
    values = (
        f"{row['method']}: {', '.join(_mean(row[name]) for name in names)}"
        for row in rows
        if row["runs"] and row["match"]
    )
    return f"(Acc_Global, Acc_Local, match, predicted) {'; '.join(values)}"


def components(out: Path, run: str) -> str:
    """Return the accuracy and the forgetting of the two components that the paper selects."""
    rows = json.loads((out / "runs" / run / "component_study.json").read_text())["components"]
    values = (
        f"{row['title']}: {', '.join(_mean(row[name]) for name in MEASURES)}"
        for row in rows
        if row["index"] in (3, 11)
    )
    return f"(accuracy %, forgetting) {'; '.join(values)} (rows: {len(rows)})"


MEASURES = ("average_accuracy", "average_forgetting")


def counts(out: Path, run: str, command: int) -> str:
    """Return the number of tasks, classes and images that one of the run's commands printed."""
    tasks = json.loads((out / "logs" / f"{run}-{command}.log").read_text())["tasks"]
    total = np.sum([[*task["images"].values()] for task in tasks], axis=0)
    images = "/".join(f"{num:,}" for num in total)
    num_classes = sum(task["classes"] for task in tasks)
    return f"{len(tasks)} tasks, {num_classes:,} classes, {images} train/val/test images"


def images(out: Path, run: str, name: str) -> str:
    """Return the size of the figure of a benchmark's images."""
    return _size(out / "runs" / run / f"{name}.png")


READERS: Mapping[str, Callable[..., str]] = {
    function.__name__: function
    for function in (
        table,
        architectures,
        search,
        memory,
        methods,
        times,
        heads,
        components,
        counts,
        images,
    )
}


def _results(out: Path, run: str, variant: str = "cheem") -> dict[str, Any]:
    return json.loads((out / "runs" / run / variant / "seed-0" / "results.json").read_text())


def _size(file: Path) -> str:
    return f"{file.name} has {file.stat().st_size / 1000:.0f} kB"


def _mean(statistics: Mapping[str, Any] | None) -> str:
    return NO_CELL if statistics is None else f"{statistics['mean']:.1f}"
