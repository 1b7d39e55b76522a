"""A backbone and tasks small enough that tests of the whole method take seconds."""

import contextlib
import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cheem_jax.backbone.config import ViTConfig
from cheem_jax.backbone.params import build, init_params
from cheem_jax.backbone.vit import ViT
from cheem_jax.backbone.weights import Pretrained, save_converted
from cheem_jax.cheem.config import CheemConfig, OpSettings, SearchConfig
from cheem_jax.core.architecture import from_strings
from cheem_jax.core.ops import Expert, LowRank
from cheem_jax.core.pool import Head, InternalMemory, TaskMemory, grow
from cheem_jax.core.settings import FitConfig
from cheem_jax.data.task import Split, Stream, Task
from cheem_jax.engine.choice import make_executor
from cheem_jax.engine.executor import Network

CONFIG = ViTConfig("vit_test", 16, 4, 2, image_size=8, patch_size=4, num_classes=0)
QUICK = CheemConfig(
    ops=OpSettings(rank=2),
    supernet=FitConfig(epochs=3, learning_rate=1e-2),
    search=SearchConfig(population=6, generations=2, num_parents=2),
    finetune=FitConfig(epochs=4, learning_rate=1e-2),
    batch_size=16,
)


AUGMENTED = dataclasses.replace(QUICK, augment=True)
TIMM_NAME = "vit_tiny_patch4_8"
"""A name of the small backbone that commands and memories accept."""


def pretrained(seed: int = 0, **fields) -> Pretrained:
    """Return random weights ten times as large as initial ones, so that blocks and ops matter.

    `fields` replace those of `CONFIG`.
    """
    config = dataclasses.replace(CONFIG, **fields)
    params = {
        name: 10 * value if name.endswith("kernel") else value
        for name, value in init_params(config, jax.random.key(seed)).items()
    }
    return Pretrained(config, params, "random", f"seed {seed}", {})


def save_weights(directory: Path, **fields) -> Path:
    """Save `pretrained` under `TIMM_NAME`, and return the file."""
    file = directory / "weights.safetensors"
    save_converted(file, pretrained(name=TIMM_NAME, **fields))
    return file


@functools.cache
def backbone(seed: int = 0, **fields) -> ViT:
    """Return the small backbone, which all tests share because nothing changes it."""
    weights = pretrained(seed, **fields)
    return build(weights.config, weights.params)


def task(name: str, seed: int, num_classes: int = 3, num: int = 40) -> Task:
    """Return a task whose classes are colours with noise, sampled from the seed: a few steps learn
    it."""
    rng = np.random.default_rng(seed)
    colours = rng.integers(0, 256, (num_classes, 3))

    def split(size: int) -> Split:
        labels = np.arange(size, dtype=np.int32) % num_classes
        noise = rng.normal(0, 25, (size, 8, 8, 3))
        return Split(
            np.clip(colours[labels][:, None, None] + noise, 0, 255).astype(np.uint8), labels
        )

    return Task(
        name,
        tuple(f"c{i}" for i in range(num_classes)),
        split(num),
        split(num // 2),
        split(num // 2),
    )


def enlarged(task: Task) -> Task:
    """Return the task with images of twice the size."""
    splits = {
        name: Split(split.images.repeat(2, axis=1).repeat(2, axis=2), split.labels)
        for name, split in task.splits.items()
    }
    return dataclasses.replace(task, **splits)


def lone_task() -> Task:
    """Return a task with one image per class and split."""
    few = task("few", 1, num=6)
    return dataclasses.replace(few, train=few.val, test=few.val)


def stream(num_tasks: int = 2) -> Stream:
    return Stream(
        "small", tuple(task(f"task{i}", i, num_classes=3 + i % 2) for i in range(num_tasks))
    )


def assume_ascii(patched: pytest.MonkeyPatch) -> None:
    """Read text files as in a locale without UTF-8, if the caller names no encoding."""
    read_text = Path.read_text

    def read(self: Path, encoding: str | None = None, errors: str | None = None) -> str:
        return read_text(self, encoding or "ascii", errors)

    patched.setattr(Path, "read_text", read)


@contextlib.contextmanager
def shared_executors():
    """Share executors between memories with equal weights, as processes share the compilation
    cache."""
    made = {}

    def make(vit, placement, engine, **settings):
        place = (vit.config, placement, engine, *settings.items())
        if place not in made:
            made[place] = make_executor(vit, placement, engine, **settings)
        return made[place]

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("cheem_jax.run_config.make_executor", make)
        yield


def grown(memory: InternalMemory, name: str, texts: list[str], seed: int = 0) -> InternalMemory:
    """Return a memory with one more task whose arrays are random."""
    rng = np.random.default_rng(seed)

    def sample(*shape):
        return jnp.asarray(rng.normal(size=shape).astype(np.float32))

    architecture = from_strings(texts)
    make = {
        "adapt": lambda: LowRank(sample(64, 2), sample(2, 16)),
        "new": lambda: Expert(sample(64, 16), sample(16)),
    }
    learned: dict[int, Any] = {
        block: make[choice.kind]()
        for block, choice in enumerate(architecture)
        if choice.kind in make
    }
    pool, experts = grow(memory.pool, architecture, learned, len(memory.tasks))
    head = Head(sample(16, 3), sample(3))
    means, centroids = np.asarray(sample(4, 16)), np.asarray(sample(5, 16))
    task = TaskMemory(name, ("a", "b", "c"), architecture, experts, head, means, centroids)
    return InternalMemory(pool, (*memory.tasks, task))


class Given(NamedTuple):
    """Finished networks for `Inference`."""

    networks: Sequence[Network]

    @property
    def codes(self) -> list[list[int]]:
        """See `Networks`."""
        return [[step.code for step in network] for network in self.networks]

    def network(self, index: int) -> Network:
        """See `Networks`."""
        return self.networks[index]
