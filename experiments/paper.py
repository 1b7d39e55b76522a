"""The paper's equations, algorithms, tables and figures as a checklist that runs in minutes.

    python experiments/paper.py
    python experiments/paper.py --only "Eq. 6,Table 1"

Each item is a worked example, compared with an independent formula, or a small run of the command
of the paper's experiment: on the bundled demo stream, or on miniature archives of data sets that
`cheem data prepare` prepares as it would prepare the official ones. Items that are finished are not
repeated; a failed item does not stop the others, and the exit status is then 1.
"""

import dataclasses
import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from resource import RUSAGE_CHILDREN, getrusage
from typing import Any

from charts import check_folder, names_in, read_numbers
from pages import write_tables
from studies.paper import equations, settings_table
from studies.paper.checklist import ITEMS, PAPER, RUNS, WORDS, Item, check, describe, filled

from cheem_jax.cli.arguments import parse
from cheem_jax.cli.running import run_command
from cheem_jax.core.atomic import write_atomically
from cheem_jax.report.table import Grid

HERE = Path(__file__).parent
MINIATURE = HERE / "studies" / "paper" / "miniature.py"
RAN = "ran"
Done = dict[str, dict[str, Any]]
"""Status and result of each item, keyed by its place."""


@dataclasses.dataclass(frozen=True)
class Paper:
    """Run the checklist of the paper."""

    only: str | None = None
    """Places of items such as `Table 1`, separated by commas; default: all."""
    out: Path = Path("runs/paper")
    """Folder of all outputs; finished items in it are not repeated."""
    fresh: bool = False
    """Repeat finished items."""
    page: Path | None = None
    """Page whose generated tables are replaced; default: `paper.md` in the folder of outputs."""


def main(settings: Paper) -> None:
    """Run the missing items, print a line for each, and write the tables."""
    places = [item.place for item in ITEMS]
    if settings.only is not None:
        places = names_in("--only", settings.only, places)
    out = settings.out
    check_folder("--out", out)
    out.mkdir(parents=True, exist_ok=True)
    file = out / "paper.json"
    done: Done = read_numbers(file, "paper.py", ()) if file.is_file() else {}
    items = [item for item in ITEMS if item.place in places]
    if settings.fresh:
        for item in items:
            done.pop(item.place, None)
            if item.run:
                shutil.rmtree(out / "runs" / item.run, ignore_errors=True)
    ended = dict[str, str]()
    failed = []
    for item in items:
        if done.get(item.place, {}).get("status") != RAN:
            done[item.place] = run(item, out, ended)
            write_atomically(file, json.dumps(done, indent=1, ensure_ascii=False) + "\n")
        status, result = (done[item.place][name] for name in ("status", "result"))
        failed += [item.place] if status != RAN else []
        without = f", without {item.missing}" if item.missing else ""
        print(f"{item.place}: {status}{without}: {result}", flush=True)
    page = settings.page or out / "paper.md"
    write_tables(page, tables(done), "From the paper to the code")
    print(f"{len(items) - len(failed)} of {len(items)} items ran: {page}")
    if failed:
        raise SystemExit(1)


def run(item: Item, out: Path, ended: dict[str, str]) -> dict[str, Any]:
    """Evaluate an item. `ended` describes how each run ended that this process started."""
    try:
        if item.example:
            result = check(item)
        else:
            for name in filter(None, (RUNS[item.run].after, item.run)):
                if name not in ended:
                    ended[name] = execute(name, out)
                if ended[name]:
                    raise ValueError(ended[name])
            result = describe(item, out)
    except Exception as error:  # no error of one item stops the next item
        return {"status": "failed", "result": f"{type(error).__name__}: {error}"}
    return {"status": RAN, "result": result}


def execute(name: str, out: Path) -> str:
    """Run the commands of a run one after another, each with a log; return an empty text, or a
    description of the failure."""
    data = out / "data"
    paths = {"DATA": data, "RUNS": out / "runs" / name, "TABLES": out / "tables" / name}
    for folder in (*paths.values(), out / "logs"):
        folder.mkdir(parents=True, exist_ok=True)
    before = getrusage(RUSAGE_CHILDREN)
    for number, command in enumerate(RUNS[name].commands):
        words = shlex.split(filled(command, RUNS[name].images))
        words = [with_path(word, paths) for word in words]
        is_cheem = words[0] == "cheem"
        if not is_cheem:
            words[0] = f"{HERE / words[0]}"
        if f"{data}" in words:
            words = [f"{MINIATURE}", f"{data}", *words]
        elif is_cheem:
            words[:1] = ["-m", "cheem_jax"]
        log = out / "logs" / f"{name}-{number}.log"
        environment = {
            "JAX_PLATFORMS": "cpu",
            "JAX_COMPILATION_CACHE_DIR": f"{out / 'compiled'}",
            "PYTHONPATH": f"{HERE.parent}",
        }
        with log.open("w") as output:
            status = subprocess.run(
                [sys.executable, *words],
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment | os.environ,
            ).returncode
        if status:
            last = log.read_text(errors="replace").strip().splitlines()[-1:]
            return f"status {status} of `{command}`: {' '.join(last)} ({log})"
    after = getrusage(RUSAGE_CHILDREN)
    seconds = sum(after[:2]) - sum(before[:2])
    print(f"run {name}: {seconds:.0f} s of one core", flush=True)
    return ""


def with_path(word: str, paths: Mapping[str, Path]) -> str:
    """Replace the name of a path with which a word of a command begins."""
    name, slash, rest = word.partition("/")
    return f"{paths[name]}{slash}{rest}" if name in paths else word


def tables(done: Done) -> dict[str, str]:
    """Make the tables of the page: examples, experiments, runs, words and settings."""
    examples = [("paper", "what it is", "code", "worked example", "result")]
    experiments = [("paper", "what it is", "code", "run", "not in this repository", "result")]
    for item in ITEMS:
        names = ", ".join(f"`{name}`" for name in item.code)
        one = done.get(item.place, {"status": "not run", "result": ""})
        result = one["result"] if one["status"] == RAN else f"{one['status']} {one['result']}"
        if item.example:
            example = " ".join((getattr(equations, item.example).__doc__ or "").split())
            examples.append((item.place, item.title, names, example, result))
            continue
        table = f", table `{item.read[1]}`" if item.read[0] == "table" else ""
        missing = item.missing or "nothing"
        run = f"`{item.run}`{table}"
        experiments.append((item.place, item.title, names, run, missing, result))
    runs = [("run", "images of the small run", "command")]
    for name, one in RUNS.items():
        runs += [(f"`{name}`", one.images, f"`{command}`") for command in one.commands]
    words: list[tuple[str, ...]] = [("word", *IMAGES)]
    for word, values in WORDS.items():
        cells = (f"`{values[name]}`" if values.get(name) else "" for name in IMAGES)
        words.append((f"`{word}`", *cells))
    pages = {"examples": examples, "experiments": experiments, "runs": runs, "words": words}
    grids = {name: Grid("", head, tuple(rows), len(head)) for name, (head, *rows) in pages.items()}
    grids["settings"] = settings_table.table()
    return {name: grid.to_markdown() for name, grid in grids.items()}


IMAGES: tuple[str, ...] = (PAPER, "demo stream", "miniature archives")

if __name__ == "__main__":
    parsed = parse(Paper, description=__doc__)
    run_command(main, parsed, parsed.out)
