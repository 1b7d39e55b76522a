"""Memory maps and resident memory of a long process with many architectures, supernets and
memories.

    python -m experiments.bench.footprint

A function compiled for a CPU needs about a hundred memory maps per block. Linux allows a process
`vm.max_map_count` maps (65,530) and ends it with a segmentation fault if it needs more, so dropped
functions must be freed. One process repeats three things with a backbone of two tiny blocks: a
training step with a sampled architecture by the executor `whole`, whose cache has room for 4 of the
16 signatures; a step of a new supernet with a separate executor; a memory of two tasks that is
opened, used and dropped. A compilation cache on disk serves repeated compilations, as in a second
run.
"""

import gc
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from cheem_jax.backbone.config import ViTConfig
from cheem_jax.backbone.params import build, init_params
from cheem_jax.backbone.vit import ViT
from cheem_jax.cheem.expert_memory import TaskNetworks
from cheem_jax.cheem.training import make_step
from cheem_jax.cli.arguments import parse
from cheem_jax.core.architecture import decode
from cheem_jax.core.pool import DenseExperts, InternalMemory
from cheem_jax.core.routing import RouterConfig
from cheem_jax.engine.executor import Executor
from cheem_jax.engine.stages import Stages
from cheem_jax.engine.whole import Whole, memory_map_limit, memory_maps
from cheem_jax.memory.predictor import Predictor
from experiments.bench import measure
from experiments.bench.measure import Bench, Row, Training
from experiments.bench.memories import sampled_memory

CONFIG = ViTConfig("tiny", 16, 2, 2, image_size=8, patch_size=4, num_classes=0)
ARCHITECTURES = 2000
ROUNDS = 60
CAPACITY = 4
BATCH = 8
NUM_CLASSES = 3
GOAL = 1.1
"""Limit of the maximum of the second half, divided by the maximum of the first half."""


def main(settings: Bench) -> None:
    """Repeat the three things; write `footprint.json`."""
    num, rounds = (200, 12) if settings.quick else (ARCHITECTURES, ROUNDS)
    with tempfile.TemporaryDirectory(prefix="cheem-bench-") as folder:
        measure.keep_compiled(Path(folder))
        vit = build(CONFIG, init_params(CONFIG, jax.random.key(0)))
        rng = np.random.default_rng(0)
        memory = sampled_memory(Stages(vit, "mlp_down"), 2, rank=2)
        whole = Whole(vit, "mlp_down", programs=CAPACITY)

        def new_task(executor: Executor) -> Training:
            return measure.new_task(executor, NUM_CLASSES, 2, memory.pool)

        training = new_task(whole)
        footprints = {
            "training steps of `whole`": repeat(num, lambda: train(training, rng)),
            "supernets with separate executors": repeat(
                rounds, lambda: train(new_task(Stages(vit, "mlp_down")), rng)
            ),
            "memories opened, used and dropped": repeat(rounds, lambda: predict(vit, memory)),
        }
    measure.say(f"footprint: {whole.counters()}; Linux allows {memory_map_limit():,} memory maps")
    rows = [
        Row(
            f"{of['times']:,} {name}: {what}",
            {},
            of[what][1] / max(of[what][0], 1),
            GOAL,
            "at most",
            note=f"at most {of[what][0]:,.0f} in the first half, {of[what][1]:,.0f} in the second",
        )
        for name, of in footprints.items()
        for what in ("memory maps", "resident MB")
    ]
    measure.save(
        settings.out,
        "footprint",
        rows,
        quick=settings.quick,
        found=footprints,
        counters=whole.counters(),
    )


def repeat(times: int, work: Callable[[], object]) -> dict[str, Any]:
    """Call `work` `times` times; return the maxima of memory maps and resident megabytes in both
    halves of the calls after the first quarter."""
    gc.collect()
    sizes = []
    for _ in range(times):
        work()
        sizes.append((memory_maps(), measure.process_memory("VmRSS") / 1e6))
    warm = np.array(sizes[times // 4 :])
    first, second = (half.max(axis=0) for half in (warm[: len(warm) // 2], warm[len(warm) // 2 :]))
    return {
        "times": times,
        "memory maps": [first[0], second[0]],
        "resident MB": [first[1], second[1]],
    }


def train(training: Training, rng: np.random.Generator) -> None:
    """Take one training step with a sampled architecture."""
    sizes = training.supernet.sizes
    architecture = decode([int(rng.integers(0, 2 * size + 2)) for size in sizes], sizes)
    images = measure.random_images(BATCH, CONFIG)
    labels = np.arange(BATCH, dtype=np.int32) % NUM_CLASSES
    training.step(architecture, make_step(training.executor, images, labels))


def predict(vit: ViT, memory: InternalMemory) -> None:
    """Make a predictor with a separate executor, predict once, and drop it."""
    networks = TaskNetworks(DenseExperts(memory.pool, 2**30), memory.tasks)
    predictor = Predictor(Stages(vit, "mlp_down"), memory.tasks, networks, RouterConfig())
    predictor.predict_arrays(measure.random_images(BATCH, CONFIG))


if __name__ == "__main__":
    measure.command(main, parse(Bench, description=__doc__))
