"""`docs/benchmarks/tables.txt` from every JSON file that there is: what was reached beside what was wanted.

python -m experiments.bench.tables
"""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cheem_jax.cli.main import parse, run_command
from cheem_jax.core.atomic import write_atomically
from experiments.bench.measure import Bench

Found = Mapping[str, Any]

HEAD = """# Benchmarks

`make bench` measures on a CPU, `make bench-gpu` on an accelerator. `experiments/bench` holds the code, which writes
this file from `docs/benchmarks/*.json`. Sides take turns. Seconds are medians (of a whole search the sum), and ratios
are ratios of those.
"""
MET = {None: "–", True: "yes", False: "**no**"}
PARTS = {
    "steps": (
        "Steps, against PyTorch",
        "DeiT-Tiny; 12 architectures sampled uniformly over the op kinds, optimiser included. Both sides have the same "
        "weights, images and architectures, and agree on losses and gradients. `ours` begins at kept tokens of block "
        "1, as training does.",
    ),
    "methods": (
        "Baselines, against PyTorch",
        "DeiT-Tiny, optimiser included, both sides from uint8 images. L2P with its defaults and a head of 20 classes: "
        "its queries are cached here; PyTorch is measured with cached ones and as the public codes do it. LoRA-CL with "
        "rank 40.",
    ),
    "sharing": (
        "Shared and kept work",
        "The same executor with and without it; both sides give equal results. Ceiling: what counted FLOPs allow.",
    ),
    "growth": (
        "Growth with the number of tasks",
        "vit_micro, its memory filled with sampled architectures; a process for every T.",
    ),
    "many_tasks": (
        "A thousand tasks",
        "vit_micro, its memory filled with sampled architectures and saved as learned tasks are. A process opens the "
        "first T of them and learns one task more, with the smallest settings and the similarity pass on 32 images. "
        "Centroids are features of five generated images per task. Seconds are CPU seconds of all threads, which other "
        "work on the machine hardly changes, unless the clock is named.",
    ),
    "footprint": (
        "A long-lived process",
        "A backbone of two tiny blocks; memory maps and resident memory of one process. A function compiled for a "
        "CPU takes about a hundred memory maps per block, and Linux allows a process 65,530.",
    ),
    "demo_compile": ("Compiling", "The bundled demo of six tasks in a process of its own."),
    "checkpoints": (
        "Saving and opening",
        "The bundled demo with the usual 30 seconds between rolling checkpoints, and a memory filled with sampled "
        "architectures.",
    ),
    "data": (
        "Images",
        "Generated photographs of 500 x 375 pixels, JPEG files of about 60 kB, in the system's page cache. Epochs are "
        "supernet training of DeiT-Tiny at 224 pixels without kept tokens, so that every step reads its images. Memory "
        "is the peak of a process that no file backs (`RssAnon`), the interpreter and JAX included: the system takes "
        "back pages of a mapped file whenever it needs them.",
    ),
    "collectives": (
        "Several devices, on paper",
        "Functions compiled for eight CPU devices and not run: a batch of 64 at 224 pixels (32 for vit_micro and "
        "vit_nano), rank 40, a head of 100 classes. `typical`: each op kind at a quarter of the blocks; `worst`: New "
        "at all of them, and for `scan` whatever its one function may send. What must be sent: gradients of what is "
        "learned and the loss, summed CLS tokens in evaluation, and with fsdp the split weights, for a pass and for "
        "its gradient.",
    ),
    "predicting": (
        "Answering",
        "A memory that `cheem learn` made of two small image sets, files in the system's page cache.",
    ),
    "serving": (
        "Serving",
        "`cheem serve` with vit_micro and the six tasks of the demo; clients on the same cores send PNG files of 64 "
        "pixels, each on a connection of its own with one request at a time. Refusals are measured while as many "
        "clients keep a server with a short queue busy.",
    ),
}
COLUMNS = {
    "growth": {
        "experts_of_largest_block": "experts of the largest block",
        "step_seconds": "supernet step (s)",
        "programs": "functions compiled",
        "similarity_seconds": "similarity pass (s)",
        "resident_megabytes": "resident memory (MB)",
        "checkpoint_kilobytes": "checkpoint of a task (kB)",
        "added_kilobytes": "of which arrays (kB)",
    },
    "many_tasks": {
        "experts_of_largest_block": "experts of the largest block",
        "open_cpu_seconds": "opening (CPU s)",
        "route_l1_cpu_seconds": "task-ID inference on 1,000 images, l1 (CPU s)",
        "route_l2_cpu_seconds": "the same in l2 (CPU s)",
        "prepare_free_cpu_seconds": "preparing to answer (CPU s)",
        "ask_free_cpu_seconds": "64 images, networks kept (CPU s)",
        "ask_limited_cpu_seconds": "64 images, 8 MB kept (CPU s)",
        "learn_cpu_seconds": "learning a task (CPU s)",
        "similarity_cpu_seconds": "of which the similarity pass (CPU s)",
        "save_seconds": "saving it (s by the clock)",
        "programs": "functions compiled or read",
        "disk_kilobytes": "a task on disk (kB)",
        "added_kilobytes": "of which arrays (kB)",
        "record_kilobytes": "a learned task's line in the record (kB)",
        "began_megabytes": "resident memory before opening (MB)",
        "opened_megabytes": "after opening (MB)",
        "limited_megabytes": "after an image of each task, 8 MB kept (MB)",
        "free_megabytes": "the same, all kept (MB)",
        "learned_megabytes": "after learning (MB)",
    },
}
"""Rows of the tables over numbers of tasks, by part."""
GPU_TITLE = "Executors on an accelerator"
GPU_TEXT = (
    "Random weights, images of 224 pixels. Hours per task follow from the measured rates for the mean task of MTIL at "
    "`paper` settings, candidates without shared prefixes; the paper's ViT-B/16 takes 1.45 h on one A100. Utilisation "
    "is of the device's peak for matrix products in that type (TF32 for float32)."
)


def main(settings: Bench) -> None:
    """Write the file."""
    file = settings.out / "tables.txt"
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, render(settings.out))
    print(f"tables: {file}")


def render(folder: Path) -> str:
    """The whole text."""
    sections = [HEAD]
    for part, (title, text) in PARTS.items():
        sections.append(f"## {title}\n\n{text}\n")
        for name, kind in ((part, "a CPU"), (f"{part}-gpu", "an accelerator")):
            found = read(folder / f"{name}.json")
            sections.append(f"Not run on {kind}.\n" if found is None else _part(found, kind))
        if part in COLUMNS and (folder.parent / f"{part}.png").exists():
            sections.append(f"![Costs over the number of learned tasks]({part}.png)\n")
    sections.append(f"## {GPU_TITLE}\n\n{GPU_TEXT}\n")
    runs = [found for file in sorted(folder.glob("gpu-*.json")) if (found := read(file)) is not None]
    sections.append(_gpu(runs) if runs else "Not run on an accelerator.\n")
    return "\n".join(sections)


def read(file: Path) -> Found | None:
    """One part's numbers, if it was run."""
    return json.loads(file.read_text()) if file.exists() else None


def _part(found: Found, kind: str) -> str:
    lines = [f"On {kind}: {_machine(found)}.\n", _goals(found["rows"])]
    if found["part"] in COLUMNS:
        lines.append(_by_tasks(found["tasks"], COLUMNS[found["part"]]))
    if found["part"] == "collectives":
        lines += [_programs(found["programs"]), _estimates(found)]
    if checks := found.get("checks"):
        worst = ", ".join(f"{name} {value:.1e}" for name, value in checks.items())
        lines.append(f"Largest relative differences from PyTorch: {worst}.\n")
    return "\n".join(lines)


def _machine(found: Found) -> str:
    machine = found["machine"]
    device = "" if machine["platform"] == "cpu" else f"{machine['device']}, "
    known = ("python", "jax", "jaxlib", "flax", "torch", "timm", "pillow", "grain")
    versions = ", ".join(f"{name} {machine[name]}" for name in known if name in machine)
    quick = "; **settings too small to mean anything**" if found["quick"] else ""
    return f"{device}{machine['cpu']}, {machine['cores']} cores; {versions}; {machine['date']}{quick}"


def _goals(rows: Sequence[Found]) -> str:
    body = []
    for row in rows:
        seconds = "<br>".join(f"{name}: {_seconds(value)}" for name, value in row["seconds"].items())
        goal = "–" if row["goal"] is None else f"{row['sense']} {_number(row['goal'])}"
        reached = "not measured" if row["reached"] is None else f"{_number(row['reached'])} {_unit(row['unit'])}"
        ceiling = "–" if row["ceiling"] is None else _number(row["ceiling"])
        body.append([row["what"], seconds or "–", reached, ceiling, goal, MET[row["met"]], row["note"]])
    return _table(["what", "median seconds", "reached", "ceiling", "goal", "met", "note"], body)


def _by_tasks(tasks: Sequence[Found], columns: Mapping[str, str]) -> str:
    head = ["", *(f"T = {entry['tasks']}" for entry in tasks)]
    return _table(head, [[title, *(_number(entry[key]) for entry in tasks)] for key, title in columns.items()])


def _programs(entries: Sequence[Found]) -> str:
    body = []
    for entry in entries:
        kinds = [f"{own['count']} {kind}: {_megabytes(own['bytes'])}" for kind, own in entry["kinds"].items()]
        steps = f", {entry['steps']} steps" if entry["steps"] > 1 else ""
        body.append([
            entry["executor"], str(entry["fsdp"]), f"{entry['backbone']}, {entry['depth']} blocks",
            entry["what"] + steps, str(entry["dispatches"]), "<br>".join(kinds) or "none",
        ])  # fmt: skip
    return _table(["executor", "fsdp", "backbone", "what", "functions called", "exchanges between devices"], body)


def _estimates(found: Found) -> str:
    """Every number here is worked out; the inputs stand above the table."""
    inputs = ", ".join(f"{name} {value:.3g}" for name, value in found["inputs"].items())
    body = [
        [
            entry["what"].removeprefix("step, "), _number(entry["batch"]), str(entry["devices"]),
            *(_seconds(entry[f"{part}_seconds"]) for part in ("float32", "bfloat16", "reduce", "dispatch")),
            *(f"{_seconds(entry[f'{kind}step_seconds'])}, {_number(entry[f'{kind}images_per_second'])} images/s: "
              f"{entry[f'{kind}limit']}" for kind in ("", "bfloat16_")),
        ]
        for entry in found["estimates"]
    ]  # fmt: skip
    head = [
        "architecture", "global batch", "devices", "arithmetic, float32", "bfloat16", "sums over devices",
        "host dispatch", "step in float32: limit", "step in bfloat16: limit",
    ]  # fmt: skip
    gathers = ", ".join(f"{entry['what']} {_seconds(entry['seconds'])}" for entry in found["gathers"])
    return (
        "**An estimate, not a measurement**: ViT-B/16 by `stages`, from the counts above, FLOPs and these inputs: "
        f"rates of an H100 SXM by its data sheet, the rest assumed ({inputs}).\n\n"
        f"{_table(head, body)}\nWith weights split over the 8 devices of a node, gathering them adds: {gathers}. Other "
        "exchanges are not in the estimate: a program that misses its goal above is slower than this.\n"
    )


def _megabytes(value: float) -> str:
    return f"{_number(value / 1e6)} MB" if value >= 1e5 else f"{_number(value / 1e3)} kB"


def _gpu(runs: Sequence[Found]) -> str:
    sections = []
    for machine in dict.fromkeys(_machine(run) for run in runs):
        body = []
        for run in runs:
            if _machine(run) != machine:
                continue
            setting = [run["backbone"], str(run["batch"]), run["precision"], run["executor"]]
            if "failed" in run:
                body.append([*setting, *["–"] * 6, "**no**", run["failed"]])
                continue
            (row,) = run["rows"]
            goal = "–" if row["goal"] is None else f"{row['goal']:.2f} h"
            use = "–" if run["utilisation"] is None else f"{100 * run['utilisation']:.0f} %"
            body.append([
                *setting, _seconds(run["step_seconds"]), _number(run["images_per_second"]),
                _number(run["forward_images_per_second"]), use, f"{row['reached']:.2f} h", goal,
                MET[row["met"]], row["note"],
            ])  # fmt: skip
        head = [
            "backbone", "batch", "precision", "executor", "step", "images/s", "forward images/s", "utilisation",
            "a task", "goal: at most", "met", "note",
        ]  # fmt: skip
        sections.append(f"{machine}.\n\n{_table(head, body)}")
    return "\n".join(sections)


def _table(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    rows = [head, ["---"] * len(head), *body]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |\n" for row in rows)


def _seconds(value: float) -> str:
    return f"{_number(1e3 * value)} ms" if value < 1 else f"{_number(value)} s"


def _number(value: float) -> str:
    """Three significant digits, whole numbers from a hundred on."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    if abs(value) >= 100 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.{max(0, 2 - math.floor(math.log10(abs(value))))}f}"


def _unit(unit: str) -> str:
    return "×" if unit == "x" else unit


if __name__ == "__main__":
    run_command(main, parse(Bench, description=__doc__))
