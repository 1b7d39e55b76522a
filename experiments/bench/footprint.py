"""Memory maps and resident memory of a long process with many architectures, supernets and
memories.

    python -m experiments.bench.footprint

A function compiled for a CPU needs about a hundred memory maps per block. Linux allows a process
`vm.max_map_count` of them (65,530) and ends it with a segmentation fault above, so dropped
functions must be freed. One process repeats three things with a backbone of two tiny blocks: a
training step of a sampled architecture by the executor `whole`, whose cache has 4 of the 16
signatures; a supernet with a separate executor; a memory of two tasks that is opened, used and
dropped. A compile cache on disk serves repeated compilations, as in a second run.
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
from cheem_jax.cheem.training import make_step, train_step
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
"""Limit of the maximum of the second half relative to that of the first."""


def main(settings: Bench) -> None:
    """Repeat each of the three; write `footprint.json`."""
    num, rounds = (200, 12) if settings.quick else (ARCHITECTURES, ROUNDS)
    with tempfile.TemporaryDirectory(prefix="cheem-bench-") as folder:
        measure.keep_compiled(Path(folder))
        vit = build(CONFIG, init_params(CONFIG, jax.random.key(0)))
        rng = np.random.default_rng(0)
        memory = sampled_memory(Stages(vit, "mlp_down"), 2, rank=2)
        whole = Whole(vit, "mlp_down", programs=CAPACITY)
        fitting = measure.new_task(memory.pool, NUM_CLASSES, 2)
        found = {
            "training steps of `whole`": repeat(num, lambda: train(whole, fitting, rng)),
            "supernets with executors of their own": repeat(
                rounds,
                lambda: train(
                    Stages(vit, "mlp_down"), measure.new_task(memory.pool, NUM_CLASSES, 2), rng
                ),
            ),
            "memories opened, asked and dropped": repeat(rounds, lambda: ask(vit, memory)),
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
        for name, of in found.items()
        for what in ("memory maps", "resident MB")
    ]
    measure.save(
        settings.out,
        "footprint",
        rows,
        quick=settings.quick,
        found=found,
        counters=whole.counters(),
    )


def repeat(times: int, work: Callable[[], object]) -> dict[str, Any]:
    """Maxima of both halves of the calls after the first quarter: memory maps and resident
    megabytes."""
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


def train(executor: Executor, fitting: Training, rng: np.random.Generator) -> None:
    """One training step of a sampled architecture with new learners."""
    supernet = fitting.supernet
    architecture = decode(
        [int(rng.integers(0, 2 * size + 2)) for size in supernet.sizes], supernet.sizes
    )
    step = make_step(
        executor,
        measure.random_images(BATCH, CONFIG),
        np.arange(BATCH, dtype=np.int32) % NUM_CLASSES,
    )
    jax.block_until_ready(
        train_step(executor, supernet, fitting.state, architecture, step, rate=1e-3)
    )


def ask(vit: ViT, memory: InternalMemory) -> None:
    """Make a predictor with a separate executor, predict once, and drop it."""
    networks = TaskNetworks(DenseExperts(memory.pool, 2**30), memory.tasks)
    predictor = Predictor(Stages(vit, "mlp_down"), memory.tasks, networks, RouterConfig())
    predictor.answer(measure.random_images(BATCH, CONFIG))


if __name__ == "__main__":
    measure.command(main, parse(Bench, description=__doc__))
