"""Several methods on one stream under one protocol, with one table at the end.

    python experiments/compare.py --stream demo --methods all
    python experiments/compare.py --stream FOLDER --backbone deit_tiny --weights FILE --image-size 96 \\
        --methods cheem,lora_cl,s_prompts --seeds 0,1,2 --run-dir runs/compare-real

Every run has a directory of its own, `RUN_DIR/<method>/seed-<seed>`, and is one that `cheem demo` or
`experiments/mtil.py` could have made. What is finished is not run again, and what was stopped goes on.
"""

import dataclasses
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mtil

from cheem_jax.atomic import write_atomically
from cheem_jax.cli import parse, run_command
from cheem_jax.commands.demo import Demo, run_demo
from cheem_jax.data.benchmarks.table import Order
from cheem_jax.data.demo import demo_stream
from cheem_jax.data.load import ImagesConfig
from cheem_jax.execution.choice import EngineConfig
from cheem_jax.methods.catalogue import NAMES, NEED_A_ROUTER, Name, Networks, check_name, preset_of
from cheem_jax.methods.cheem import PRESETS, CheemConfig, Preset
from cheem_jax.report.comparison import Runs, comparison, comparison_grid, csv_of, narrow
from cheem_jax.report.progress import Progress
from cheem_jax.report.table import METHODS

Run = Callable[[Progress, dict[Any, Networks]], dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Compare:
    """Methods beside each other on one stream."""

    stream: str = "demo"
    """demo, or whatever `experiments/mtil.py --stream` takes."""
    methods: str = "all"
    """Names separated by commas, or all."""
    seeds: str = "0"
    """Seeds separated by commas; cells are then means with the standard deviation."""
    preset: Preset | None = None
    """Settings of every method; default: demo for the demo stream, quick for any other."""
    backbone: str = "deit_tiny"
    """As for mtil.py; the demo stream has vit_micro."""
    weights: Path | None = None
    """A safetensors or npz file; default: bundled, else from the hub."""
    data_dir: Path | None = None
    """Where prepared data sets lie."""
    order: Order = "default"
    """Order of MTIL's tasks."""
    tasks: str | None = None
    """Names of the tasks in learning order, separated by commas; default: all."""
    images: ImagesConfig = ImagesConfig()
    """Where decoded pictures are kept."""
    image_size: int | None = None
    """Pixels of the square images; default: the backbone's own."""
    base_data: str | None = None
    """Pictures of the backbone's own task, for CHEEM's similarity."""
    router: str = "vit_nano"
    """The lighter network of `cheem_lite` and `moe_adapters`: a backbone, or alexnet."""
    router_weights: Path | None = None
    """Weights of the router."""
    engine: EngineConfig = EngineConfig()
    """How networks are run."""
    run_dir: Path = Path("runs/compare")
    """Where runs and tables are kept; what is unfinished is continued."""
    save_every: float | None = None
    """Seconds between rolling checkpoints."""


def main(settings: Compare) -> None:
    """Run what is missing, then print and save the table."""
    progress = Progress()
    methods, seeds = methods_of(settings.methods), seeds_of(settings.seeds)
    run_of, workshop = prepared(settings, methods, progress), dict[Any, Networks]()
    found: dict[str, list[dict[str, Any]]] = {}
    runs: list[tuple[Name, int]] = [(method, seed) for method in methods for seed in seeds]
    for number_of_run, (method, seed) in enumerate(runs, 1):
        directory = settings.run_dir / method / f"seed-{seed}"
        progress.say(f"{METHODS[method]}, seed {seed}: run {number_of_run} of {len(runs)}")
        found.setdefault(method, []).append(run_of(method, seed, directory)(progress, workshop))
        write(settings.run_dir, found)  # a comparison that is stopped has a table of what it has
    grid = comparison_grid(found)
    progress.console.print(narrow(grid).to_rich())
    progress.say(f"table: {settings.run_dir / 'comparison.md'}   numbers: {settings.run_dir / 'comparison.json'}")


def methods_of(text: str) -> list[Name]:
    """The methods that are asked for, in the order of the table."""
    if text == "all":
        return list(NAMES)
    asked = {check_name(name.strip()) for name in text.split(",")}
    return [name for name in NAMES if name in asked]


def seeds_of(text: str) -> list[int]:
    """Whole numbers from 0 on."""
    try:
        seeds = [int(seed) for seed in text.split(",")]
    except ValueError:
        seeds = [-1]
    if min(seeds) < 0 or len(set(seeds)) < len(seeds):
        raise ValueError(f"--seeds is {text!r}; expected different whole numbers separated by commas, such as 0,1,2")
    return seeds


def prepared(settings: Compare, methods: Sequence[Name], progress: Progress) -> Callable[[Name, int, Path], Run]:
    """Weights and pictures once for all runs; gives what starts a run."""
    if settings.stream == "demo":
        return _on_demo(settings, progress)
    router = settings.router if set(methods) & set(NEED_A_ROUTER) else None
    sources = mtil.Mtil(
        cheem=PRESETS[settings.preset or "quick"], preset=settings.preset or "quick", backbone=settings.backbone,
        weights=settings.weights, stream=settings.stream, data_dir=settings.data_dir, order=settings.order,
        tasks=settings.tasks, images=settings.images, image_size=settings.image_size, engine=settings.engine,
        save_every=settings.save_every, base_data=settings.base_data,
    )  # fmt: skip
    loaded = mtil.load(sources, progress)
    routers = {
        method: mtil.load_router(with_router(sources, method, router, settings.router_weights), loaded.size)
        for method in methods
        if method in NEED_A_ROUTER
    }

    def run_of(method: Name, seed: int, directory: Path) -> Run:
        defaults = preset_of(method, sources.preset)
        changed = dataclasses.replace(
            sources, method=method, seed=seed, run_dir=directory,
            options=None if isinstance(defaults, CheemConfig) else defaults,
        )  # fmt: skip
        if method in NEED_A_ROUTER:
            changed = with_router(changed, method, router, settings.router_weights)
        own = loaded._replace(router=routers.get(method))
        if not isinstance(defaults, CheemConfig):  # no other method asks for similarity
            changed, own = dataclasses.replace(changed, base_data=None), own._replace(base_images=None)
        return lambda progress, workshop: mtil.run(changed, mtil.config_of(changed), own, progress, workshop)

    return run_of


def with_router(settings: mtil.Mtil, method: Name, router: str | None, weights: Path | None) -> mtil.Mtil:
    """The same settings with a lighter network that names the task."""
    return dataclasses.replace(settings, method=method, router=router, router_weights=weights)


def _on_demo(settings: Compare, progress: Progress) -> Callable[[Name, int, Path], Run]:
    if settings.preset not in (None, "demo"):
        raise ValueError(f"--preset is {settings.preset!r}; the demo stream has settings of its own: demo")
    same = ("stream", "methods", "seeds", "preset", "engine", "run_dir", "save_every", "images")
    changed = [
        f"--{field.name.replace('_', '-')}"
        for field in dataclasses.fields(settings)
        if field.name not in same and getattr(settings, field.name) != field.default
    ]
    if changed:
        raise ValueError(f"the demo stream has networks and tasks of its own; leave out {', '.join(changed)}")
    progress.say("making six tasks of 32x32 images")
    stream = demo_stream()

    def run_of(method: Name, seed: int, directory: Path) -> Run:
        demo = Demo(directory, method, seed, engine=settings.engine, save_every=settings.save_every)
        return lambda progress, workshop: run_demo(demo, stream, progress, workshop)

    return run_of


def write(directory: Path, found: Runs) -> None:
    """The table as Markdown and CSV, and its numbers."""
    grid, rows = comparison_grid(found), comparison(found)
    write_atomically(directory / "comparison.json", json.dumps(rows, indent=1) + "\n")
    write_atomically(directory / "comparison.csv", csv_of(rows))
    text = f"# {grid.title}\n\n{grid.to_markdown()}\n\n" + grid.caption.replace("\n", "  \n") + "\n"
    write_atomically(directory / "comparison.md", text)


if __name__ == "__main__":
    parsed = parse(Compare, sys.argv[1:], description=__doc__)
    run_command(main, parsed, parsed.run_dir)
