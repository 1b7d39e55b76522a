"""Methods on networks of two blocks with random weights: every step runs, and no accuracy is shown.

For backbones and routers whose weights are not at hand. Nothing is kept.
"""

import dataclasses
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jax
import numpy as np
from rich.console import Console
from study import Variant, changed

from cheem_jax.backbone.alexnet import AlexNetConfig, PretrainedAlexNet
from cheem_jax.backbone.alexnet import shapes_of as alexnet_shapes
from cheem_jax.backbone.config import at_image_size, config_of
from cheem_jax.backbone.params import init_params
from cheem_jax.backbone.weights import Pretrained
from cheem_jax.baselines.catalogue import Networks, preset_of
from cheem_jax.continual import RunConfig, run_stream
from cheem_jax.data.demo import demo_stream
from cheem_jax.data.task import select
from cheem_jax.report.table import Grid, format_flops
from cheem_jax.run.progress import Progress
from cheem_jax.run_config import RouterWeights

DEPTH, IMAGE_SIZE, TASKS = 2, 64, ("shapes", "colours")
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
"""One epoch, and prompts for the blocks that there are."""


def smoke(variants: Sequence[Variant], backbone: str, progress: Progress) -> None:
    """Learn two small tasks with each variant and read them back; prints what was compiled and what it costs."""
    progress.say(
        f"{MARK}; {len(TASKS)} tasks of a few {IMAGE_SIZE}x{IMAGE_SIZE} images. Accuracies would mean nothing."
    )
    stream = select(demo_stream(image_size=IMAGE_SIZE, num_train=32, num_val=26, num_test=26), TASKS)
    pretrained, workshop, lines = random_vit(backbone), dict[Any, Networks](), []
    for variant in variants:
        short = SHORT.get(variant.method.removesuffix("_lite"), {"fit.epochs": 1})
        method = changed(preset_of(variant.method, "quick"), {**variant.config, **short, "batch_size": 16})
        feature = "conv5" if variant.method == "moe_adapters" else "pooled_conv"
        router = random_router(variant.run["router"], feature) if "router" in variant.run else None
        quiet = Progress(Console(file=io.StringIO(), force_terminal=False))
        with TemporaryDirectory() as folder:
            results = run_stream(
                stream, pretrained, RunConfig(method, "quick"), Path(folder) / "run", quiet, router=router,
                workshop=workshop,
            )  # fmt: skip
        flops = results["flops"]["paper"]
        programs = results["compile"]["programs"] + results["compile"]["cached"]
        lines.append((
            variant.title, results["router"], format_flops(flops), f"{results['params_added_percent']:.2f}",
            str(programs), f"{results['seconds_total']:.0f}",
        ))  # fmt: skip
        progress.say(f"{variant.title}: learned, saved and read back {len(TASKS)} tasks")
    columns = ("method", "frozen\nfeatures of", "FLOPs\npaper", "params\nadded %", "programs", "seconds")
    progress.console.print(Grid(f"{backbone}, {MARK}", columns, tuple(lines), 2).to_rich())


def random_vit(name: str) -> Pretrained:
    """A named network with the first blocks alone and weights of no training."""
    config = dataclasses.replace(at_image_size(config_of(name), IMAGE_SIZE), depth=DEPTH, num_classes=0)
    return Pretrained(config, init_params(config, jax.random.key(0)), "random weights", f"random {name}", {})


def random_router(name: str, feature: str) -> RouterWeights:
    """The same of a network that infers the task."""
    if name != "alexnet":
        return random_vit(name)
    config = AlexNetConfig(image_size=IMAGE_SIZE, feature=feature)  # pyright: ignore[reportArgumentType]
    rng = np.random.default_rng(0)
    params = {key: 0.02 * rng.standard_normal(shape, np.float32) for key, shape in alexnet_shapes(config).items()}
    return PretrainedAlexNet(config, params, "random weights", "random alexnet")
