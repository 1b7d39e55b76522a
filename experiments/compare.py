"""Several methods on one stream under one protocol, with tables of results and training times.

    python experiments/compare.py --stream demo --methods all
    python experiments/compare.py --stream FOLDER --backbone deit_tiny --image-size 96 \\
        --methods cheem,lora_cl,s_prompts --seeds 0,1,2 --run-dir runs/compare-real
    python experiments/compare.py --stream FOLDER --methods cheem,lora_cl --choose TASK,TASK
    python experiments/compare.py --stream mtil --preset paper --data-dir DATA --launcher slurm
    python experiments/compare.py --backbone clip_vit_base --methods cheem_lite \\
        --router deit_tiny,alexnet --smoke

Every run has a separate directory, `RUN_DIR/<method>/seed-<seed>`, and is one that `cheem demo` or
`experiments/mtil.py` could have made. Finished runs are not repeated, and interrupted ones resume.
`experiments/tables.py --runs RUN_DIR` writes the paper's tables with these runs.
"""

import dataclasses
import io
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jax
import numpy as np
import study
from charts import mean_std, spread, write_page
from choosing import choose, chosen_before
from rich.console import Console
from study import Results, Study, Variant, changed

from cheem_jax.backbone.alexnet import AlexNetConfig, PretrainedAlexNet
from cheem_jax.backbone.alexnet import shapes_of as alexnet_shapes
from cheem_jax.backbone.config import at_image_size, config_of
from cheem_jax.backbone.params import init_params
from cheem_jax.backbone.weights import Pretrained
from cheem_jax.baselines.catalogue import (
    NAMES,
    NEED_A_ROUTER,
    FrozenNetworks,
    check_name,
    preset_of,
)
from cheem_jax.cheem.config import QUICK_PLUS
from cheem_jax.cli.arguments import parse
from cheem_jax.cli.running import run_command
from cheem_jax.continual import RunConfig, run_stream
from cheem_jax.data.demo import demo_stream
from cheem_jax.data.task import select
from cheem_jax.report.comparison import comparison, comparison_grid, csv_of, narrow
from cheem_jax.report.table import METHODS, NONE, Grid, format_flops
from cheem_jax.run.progress import Progress
from cheem_jax.run_config import RouterWeights


@dataclasses.dataclass(frozen=True)
class Compare(Study):
    """Methods side by side on one stream."""

    methods: str = "all"
    """Names separated by commas, or all. `cheem:closed_form` is CHEEM with the search of
    `quick_plus`, `cheem:uniform` the same with uniform sampling. `lora_cl:new` trains a full copy
    of the pretrained layer in every block per task, `lora_cl:rank128` and `lora_cl:rank192` are
    LoRA-CL with these ranks. All other settings are the preset's."""
    router: str = "vit_nano"
    """Lighter networks of `cheem_lite` and `moe_adapters`, separated by commas: backbones, or
    alexnet."""
    router_weights: Path | None = None
    """Weights of the router; of several routers, those of alexnet."""
    choose: str | None = None
    """Names of tasks, separated by commas: the rate and at most two further settings of every
    method are first chosen on their validation images; all methods then have the same number of
    epochs and the cosine schedule. Or the `chosen.json` of an earlier choice, to use its
    settings."""
    smoke: bool = False
    """Run every method on two blocks with random weights: a check that it works, without a
    meaningful accuracy."""
    run_dir: Path = Path("runs/compare")
    """Folder of runs and tables; unfinished runs resume."""


def main(settings: Compare) -> None:
    """Run the missing runs, then print and save the table."""
    progress = Progress()
    variants = variants_of(settings)
    if settings.smoke:
        smoke(variants, settings.backbone or "deit_tiny", progress)
        return
    if settings.choose is not None and settings.choose.endswith(".json"):
        variants = chosen_before(Path(settings.choose), variants, settings.chosen_preset)
    elif settings.choose is not None:
        variants = choose(settings, settings.choose, variants, progress)
    titles = {variant.name: variant.title for variant in variants}
    found = study.run_all(
        settings, variants, progress, lambda found: write(settings.run_dir, found, titles)
    )
    progress.console.print(narrow(comparison_grid(found, titles)).to_rich())
    place = settings.run_dir / "comparison"
    progress.say(
        f"table: {place}.md   numbers: {place}.json   times:"
        f" {settings.run_dir / 'training_time.md'}"
    )


def variants_of(settings: Compare) -> list[Variant]:
    """A variant per method, and one per router for methods that need a router."""
    routers = list(dict.fromkeys(name.strip() for name in settings.router.split(",")))
    variants = []
    for name in methods_of(settings.methods):
        if name in OTHERS:
            variants.append(OTHERS[name])
            continue
        method = check_name(name)
        if method not in NEED_A_ROUTER:
            variants.append(Variant(method, METHODS[method], method))
            continue
        for router in routers:
            weights = settings.router_weights if router == "alexnet" or len(routers) == 1 else None
            name = method
            title = METHODS[method]
            if len(routers) > 1:
                name, title = f"{method}-{router}", f"{METHODS[method]}, {router}"
            variants.append(
                Variant(name, title, method, run={"router": router, "router_weights": weights})
            )
    return variants


CLOSED_FORM = Variant(
    "cheem-closed_form",
    f"{METHODS['cheem']}, closed-form score",
    "cheem",
    {
        "supernet.epochs": QUICK_PLUS.supernet.epochs,
        "finetune.epochs": QUICK_PLUS.finetune.epochs,
        **{name: getattr(QUICK_PLUS, name) for name in ("ops", "search", "score", "score_images")},
    },
)
OTHERS = {
    "cheem:closed_form": CLOSED_FORM,
    "cheem:uniform": Variant(
        "cheem-uniform",
        f"{METHODS['cheem']}, uniform, closed-form score",
        "cheem",
        {**CLOSED_FORM.config, "sampling": "uniform"},
        settings_of=CLOSED_FORM.name,
    ),
    # without low-rank pairs, the rank has no effect; it is given, so that it is not chosen
    "lora_cl:new": Variant(
        "lora_cl-new", "New in every block", "lora_cl", {"op": "new", "rank": 1}
    ),
    **{
        f"lora_cl:rank{rank}": Variant(
            f"lora_cl-rank{rank}", f"{METHODS['lora_cl']}, rank {rank}", "lora_cl", {"rank": rank}
        )
        for rank in (128, 192)
    },
}
"""Methods with other settings than a preset's."""


def methods_of(text: str) -> list[str]:
    """The named methods in the order of the table."""
    if text == "all":
        return list(NAMES)
    asked = {
        name if name in OTHERS else check_name(name)
        for name in (word.strip() for word in text.split(","))
    }
    return [
        name
        for method in NAMES
        for name in (method, *OTHERS)
        if name in asked and name.split(":")[0] == method
    ]


def write(directory: Path, found: Results, titles: Mapping[str, str] = METHODS) -> None:
    """Write tables of results and of training times, as Markdown and CSV, and their numbers."""
    grid = comparison_grid(found, titles)
    rows = comparison(found)
    text = f"# {grid.title}\n\n{grid.to_markdown()}\n\n" + grid.caption.replace("\n", "  \n") + "\n"
    write_page(directory / "comparison", text, rows, csv_of(rows))
    devices = {run["engine"]["device"] for runs in found.values() for run in runs}
    phases = {name: phases_of(runs) for name, runs in found.items()}
    times = times_grid(found, phases, titles) if len(devices) == 1 else None
    text = f"No times are compared: runs of several devices ({', '.join(sorted(devices))})."
    if times is not None:
        text = f"{times.title}\n\n{times.to_markdown()}"
    write_page(directory / "training_time", f"# {text}\n", phases, times)


def phases_of(runs: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Seconds per task of each phase of learning, mean and deviation over runs, without
    evaluation."""
    names = dict.fromkeys(
        phase for run in runs for task in run["tasks"] for phase in task["seconds"]
    )
    return {
        name: mean_std([float(np.mean([task["seconds"].get(name, 0.0) for task in run["tasks"]])) for run in runs])  # noqa: E501
        for name in names if name != "evaluation"
    }  # fmt: skip  # pyright: ignore[reportReturnType]


def times_grid(
    found: Results, phases: Mapping[str, Mapping[str, Any]], titles: Mapping[str, str]
) -> Grid:
    """Seconds of training by method and phase.

    The first run of a process compiles functions that later runs share, so compilation has a
    separate column: seconds of the whole run.
    """
    totals = {name: sum(each["mean"] for each in own.values()) for name, own in phases.items()}
    rows = []
    for name, own in phases.items():
        compiling = float(np.mean([run["compile"]["seconds"] for run in found[name]]))
        largest = sorted(own.items(), key=lambda item: -item[1]["mean"])[:4]
        phrases = [
            f"{phase} {spread(each)}"
            for phase, each in largest
            if each["mean"] >= 0.005 * totals[name]
        ]
        beside = f"{totals[name] / totals['cheem']:.2f}" if totals.get("cheem") else NONE
        runs = str(len(found[name]))
        rows.append(
            (
                titles[name],
                runs,
                f"{totals[name]:,.1f}",
                beside,
                f"{compiling:.1f}",
                ", ".join(phrases),
            )
        )
    first = next(iter(found.values()))[0]
    columns = (
        "method",
        "runs",
        "seconds\nper task",
        "of CHEEM's",
        "compiling,\nwhole run",
        "longest phases",
    )
    title = (
        f"{first['stream']}, {first['backbone']}, {first['preset']}, {first['engine']['device']}:"
        " training per task"
    )
    return Grid(title, columns, tuple(rows), 1)


DEPTH = 2
IMAGE_SIZE = 64
TASKS = ("shapes", "colours")
MARK = f"smoke run: {DEPTH} blocks, random weights"
SHORT: Mapping[str, Mapping[str, Any]] = {
    "cheem": {
        "supernet.epochs": 1, "finetune.epochs": 1, "search.population": 4, "search.generations": 2,
        "search.num_parents": 2,
    },
    "dualprompt": {"fit.epochs": 1, "general_layers": (0,), "expert_layers": (1,)},
    "coda_prompt": {"fit.epochs": 1, "layers": (0, 1)},
    "diki": {"fit.epochs": 1, "layers": (0, 1)},
    "full_finetune": {"epochs": 1, "learning_rates": (1e-4,)},
    "frozen_linear": {},
}  # fmt: skip
"""One epoch, and prompts for the existing blocks."""


# ---- methods on two blocks with random weights, for backbones and routers without weights


def smoke(variants: Sequence[Variant], backbone: str, progress: Progress) -> None:
    """Learn two small tasks with each variant and reload them; print compiled functions and
    costs."""
    progress.say(
        f"{MARK}; {len(TASKS)} tasks of a few {IMAGE_SIZE}x{IMAGE_SIZE} images. Accuracies would"
        " mean nothing."
    )
    stream = select(
        demo_stream(image_size=IMAGE_SIZE, num_train=32, num_val=26, num_test=26), TASKS
    )
    pretrained = random_vit(backbone)
    workshop = dict[Any, FrozenNetworks]()
    lines = []
    for variant in variants:
        short = SHORT.get(variant.method.removesuffix("_lite"), {"fit.epochs": 1})
        method = changed(
            preset_of(variant.method, "quick"), {**variant.config, **short, "batch_size": 16}
        )
        feature = "conv5" if variant.method == "moe_adapters" else "pooled_conv"
        router = random_router(variant.run["router"], feature) if "router" in variant.run else None
        quiet = Progress(Console(file=io.StringIO(), force_terminal=False))
        with TemporaryDirectory() as folder:
            results = run_stream(
                stream,
                pretrained,
                RunConfig(method, "quick"),
                Path(folder) / "run",
                quiet,
                router=router,
                workshop=workshop,
            )
        flops = results["flops"]["paper"]
        programs = results["compile"]["programs"] + results["compile"]["cached"]
        lines.append(
            (
                variant.title,
                results["router"],
                format_flops(flops),
                f"{results['params_added_percent']:.2f}",
                str(programs),
                f"{results['seconds_total']:.0f}",
            )
        )
        progress.say(f"{variant.title}: learned, saved and read back {len(TASKS)} tasks")
    columns = (
        "method",
        "frozen\nfeatures of",
        "FLOPs\npaper",
        "params\nadded %",
        "functions",
        "seconds",
    )
    progress.console.print(Grid(f"{backbone}, {MARK}", columns, tuple(lines), 2).to_rich())


def random_vit(name: str) -> Pretrained:
    """A named network with its first blocks and random weights."""
    config = dataclasses.replace(
        at_image_size(config_of(name), IMAGE_SIZE), depth=DEPTH, num_classes=0
    )
    return Pretrained(
        config, init_params(config, jax.random.key(0)), "random weights", f"random {name}", {}
    )


def random_router(name: str, feature: str) -> RouterWeights:
    """A router with random weights."""
    if name != "alexnet":
        return random_vit(name)
    config = AlexNetConfig(image_size=IMAGE_SIZE, feature=feature)  # pyright: ignore[reportArgumentType]
    rng = np.random.default_rng(0)
    params = {
        key: 0.02 * rng.standard_normal(shape, np.float32)
        for key, shape in alexnet_shapes(config).items()
    }
    return PretrainedAlexNet(config, params, "random weights", "random alexnet")


if __name__ == "__main__":
    parsed = parse(Compare, sys.argv[1:], description=__doc__)
    run_command(main, parsed, parsed.run_dir)
