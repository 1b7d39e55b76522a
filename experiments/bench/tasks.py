"""Learning a whole task with DeiT-Tiny at 224 pixels, next to the same procedure in PyTorch with
timm.

    python -m experiments.bench.tasks

Our side learns a task as the first task of a memory and records its samples: one architecture per
step, the candidates of every generation, and the target network. The peer then does the same work
with these samples: similarity, supernet, search, fine-tuning, mean tokens and router. Epochs, and
the candidates of the paper's search, are a quarter of those of the presets. Images are read from
the folder CHEEM_SHARED.
"""

import dataclasses
import functools
import itertools
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from cheem_jax.backbone.weights import Pretrained
from cheem_jax.cheem.config import QUICK, QUICK_PLUS, CheemConfig
from cheem_jax.cheem.learner import Cheem, Learning
from cheem_jax.cheem.training import supernet_draws
from cheem_jax.cli.arguments import parse
from cheem_jax.core.architecture import Architecture, Choice, decode, encode
from cheem_jax.core.keys import Keys, Phase, key_at, next_power_of_two, order_at
from cheem_jax.core.ops import Expert
from cheem_jax.core.routing import fit_statistics, join_tokens
from cheem_jax.data.demo import demo_stream
from cheem_jax.data.load import load_tasks
from cheem_jax.data.sources import plan_source
from cheem_jax.data.task import Split, Task
from cheem_jax.engine.batches import batches, num_batches
from cheem_jax.engine.executor import Dense
from cheem_jax.run.method import Backbone, FrozenFeatures
from cheem_jax.run.session import Session
from experiments.bench import measure
from experiments.bench.measure import Bench, Row
from experiments.bench.peer import TaskPeer

OURS, PEER = "ours", "PyTorch eager"
TASKS = ("flowers12", "gtsrb")
EXPERT = Expert(jnp.zeros((1, 1)), jnp.zeros(1))
"""Placeholder for an expert when FLOPs are counted."""


def fewer(config: CheemConfig, supernet: int, finetune: int, **search: int) -> CheemConfig:
    """Return the settings with fewer epochs and candidates."""
    return dataclasses.replace(
        config,
        supernet=dataclasses.replace(config.supernet, epochs=supernet),
        finetune=dataclasses.replace(config.finetune, epochs=finetune),
        search=dataclasses.replace(config.search, **search),
    )


BUDGETS = {
    "the paper's search": (fewer(QUICK, 2, 2, generations=2), 2.0),
    # the peer has no frozen head to compare with
    "the search of quick_plus": (
        dataclasses.replace(fewer(QUICK_PLUS, 1, 4), fallback=False),
        3.0,
    ),
}
"""Settings and the required speed relative to PyTorch, keyed by the name of the search."""


@dataclasses.dataclass
class Plan:
    """The samples of learning one task."""

    supernet: list[Architecture] = dataclasses.field(default_factory=list)
    """One architecture per step."""
    generations: list[list[Architecture]] = dataclasses.field(default_factory=list)
    """Architectures that are scored together."""
    target: Architecture = ()
    """The target network."""


class RecordingCheem(Cheem):
    """A learner that records its samples in `plan`."""

    plan: Plan

    def similarity(self, learning: Learning) -> np.ndarray:
        """See `Cheem`; this call starts a new plan."""
        self.plan = Plan()
        return super().similarity(learning)

    def train_supernet(self, learning: Learning, tables: Any) -> Any:
        """See `Cheem`."""
        config = self.config
        keys = self.keys
        index = learning.index
        draws = supernet_draws(
            keys.at(index, Phase.SUPERNET_MODE),
            keys.at(index, Phase.SUPERNET_DRAW),
            exploit=tables.exploit,
            uniform=tables.uniform,
            epsilon=config.exploration.epsilon,
        )
        steps = num_batches(len(learning.task.train.labels), config.batch_size)
        for epoch in range(config.supernet.epochs):
            self.plan.supernet += [
                decode(codes, learning.candidates.sizes) for codes in draws(epoch, steps)
            ]
        return super().train_supernet(learning, tables)

    def search(self, learning: Learning, tables: Any, trained: Any) -> Any:
        """See `Cheem`."""
        codes = super().search(learning, tables, trained)
        searched = learning.underway.searched
        assert searched is not None, "the search has ended"
        population = self.config.search.population
        self._record(learning, searched.scored.genomes, lambda index: index // population)
        return codes

    def eliminate(self, learning: Learning) -> Any:
        """See `Cheem`."""
        codes = super().eliminate(learning)
        eliminated = learning.underway.eliminated
        assert eliminated is not None, "the elimination has ended"
        # the networks of a round skip the same number of blocks
        skips = (eliminated.genomes != eliminated.genomes[0]).sum(axis=1)
        self._record(learning, eliminated.genomes, lambda index: skips[index])
        return codes

    def _record(
        self, learning: Learning, genomes: np.ndarray, generation: Callable[[int], int]
    ) -> None:
        sizes = learning.candidates.sizes
        self.plan.generations = [
            [decode(genomes[index], sizes) for index in indices]
            for _, indices in itertools.groupby(range(len(genomes)), generation)
        ]

    def finetune(self, learning: Learning, trained: Any, codes: np.ndarray) -> Any:
        """See `Cheem`."""
        self.plan.target = decode(codes, learning.candidates.sizes)
        return super().finetune(learning, trained, codes)


def main(settings: Bench) -> None:
    """Measure everything and write `tasks.json`."""
    pretrained = measure.backbone("deit_tiny", 32 if settings.quick else None)
    tasks = small_tasks() if settings.quick else [shortened(task, None) for task in real_tasks()]
    executor = measure.stages(pretrained)
    rows = []
    phases = []
    checks = {}
    for task, (what, (config, goal)) in itertools.product(tasks, BUDGETS.items()):
        learner = functools.partial(new_learner, executor, config)
        # compile all functions first, because `demo_compile` measures compilation
        learner().learn(shortened(task, 2 * config.batch_size), Session())
        start = time.perf_counter()
        ours = learner()
        report = ours.learn(task, Session())
        elapsed = time.perf_counter() - start
        start = time.perf_counter()
        seconds_of_peer, features = replay(pretrained, ours.plan, config, task, ours.keys)
        theirs = time.perf_counter() - start
        expected = ours.features.encoder.features(
            task.train.images[:32], batch_size=config.batch_size
        )
        checks[f"{task.name}, {what}"] = difference = measure.difference(features[:32], expected)
        if difference > 1e-3:
            raise ValueError(f"features differ from PyTorch's by {difference}; at most 1e-3")
        phases.append(
            {"task": task.name, "search": what, OURS: report["seconds"], PEER: seconds_of_peer}
        )
        share = (
            flops_of(pretrained, ours.plan, config, task) / elapsed / measure.matrix_peak("float32")
        )
        title = f"learning {task.name}, {len(task.train.labels):,} images, {what}, against {PEER}"
        rows.append(Row(title, {OURS: elapsed, PEER: theirs}, theirs / elapsed, goal, share=share))
        measure.say(f"tasks: {title}: {theirs / elapsed:.2f} ({elapsed:.1f} and {theirs:.1f} s)")
        # save after each task, because a task takes minutes
        measure.save(
            settings.out,
            "tasks",
            rows,
            quick=settings.quick,
            phases=phases,
            checks=checks,
            weights=pretrained.source,
        )


def flops_of(pretrained: Pretrained, plan: Plan, config: CheemConfig, task: Task) -> float:
    """Count the FLOPs of all forward and backward passes of our side; a shared prefix counts
    once."""
    vit = pretrained.config
    num = len(task.train.labels)
    num_val = len(task.val.labels)

    def networks(architectures: Sequence[Architecture]) -> list[list[Dense]]:
        sizes = (1,) * vit.depth
        return [
            [
                Dense(code, None if choice.kind == "skip" else EXPERT)
                for code, choice in zip(encode(architecture, sizes), architecture, strict=True)
            ]
            for architecture in architectures
        ]

    base: Architecture = (Choice("reuse", 0),) * vit.depth
    steps = [
        measure.step_flops(vit, architecture, config.ops.rank, begin=0)
        for architecture in plan.supernet
    ]
    begin = next(
        (block for block, choice in enumerate(plan.target) if choice.kind in ("adapt", "new")),
        vit.depth,
    )
    anchor = 0 if plan.supernet else num * measure.separate_flops(vit, networks([base]))
    return (
        anchor
        + num * measure.separate_flops(vit, networks([base]), from_images=True)
        + (num * config.supernet.epochs * float(np.mean(steps)) if steps else 0.0)
        + num_val
        * sum(measure.tree_flops(vit, networks(generation)) for generation in plan.generations)
        + num
        * config.finetune.epochs
        * measure.step_flops(vit, plan.target, config.ops.rank, begin=begin)
        + num * measure.separate_flops(vit, networks([plan.target]))
    )


def real_tasks() -> Sequence[Task]:
    """Load the two tasks at 224 pixels."""
    folder = Path(os.environ.get("CHEEM_SHARED", measure.ROOT.parent / "shared"))
    _, plans = plan_source(str(folder / "data224" / "eleven.toml"))
    return load_tasks([plan for plan in plans if plan.name in TASKS], 224)


def small_tasks() -> Sequence[Task]:
    """Generate a small task to test that everything runs."""
    return demo_stream(num_train=64, num_val=32, num_test=32).tasks[:1]


def shortened(task: Task, num: int | None) -> Task:
    """Return the task with its images in memory, restricted to the first `num` training and
    validation images and one image of every class."""

    def cut(split: Split) -> Split:
        firsts = np.unique(split.labels, return_index=True)[1]
        rows = np.unique(np.concatenate([firsts, np.arange(len(split.labels))[:num]]))
        return Split(np.asarray(split.images[rows]), split.labels[rows])

    return dataclasses.replace(task, train=cut(task.train), val=cut(task.val))


def new_learner(executor: Any, config: CheemConfig) -> RecordingCheem:
    """Make a learner without tasks."""
    features = FrozenFeatures(Backbone(executor, config.router), config.batch_size)
    return RecordingCheem(executor, config, Keys(0), None, features)


def replay(
    pretrained: Pretrained, plan: Plan, config: CheemConfig, task: Task, keys: Keys
) -> tuple[dict[str, float], np.ndarray]:
    """Repeat the work in PyTorch; return the seconds of each phase and the router's features `[N,
    D]`."""
    seconds_of_peer: dict[str, float] = {}

    def timed(phase: str, work: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        result = work()
        seconds_of_peer[phase] = seconds_of_peer.get(phase, 0.0) + time.perf_counter() - start
        return result

    num_classes = len(task.classes)
    batch = config.batch_size
    depth = pretrained.config.depth
    new = functools.partial(
        TaskPeer,
        pretrained,
        rank=config.ops.rank,
        num_outputs=next_power_of_two(num_classes),
        batch_size=batch,
    )
    peer = new()
    reads = config.router
    blocks = () if reads.features == "last" else reads.blocks(depth)
    images = np.asarray(task.train.images)
    labels = task.train.labels
    val_images = np.asarray(task.val.images)
    val_labels = task.val.labels
    base = timed("similarity", lambda: peer.walk(peer.base, images, blocks))
    last = [base.features] if reads.until(depth) == depth else []
    features = join_tokens([*base.patch_tokens, *last]) if blocks else base.features

    def steps(
        peer: TaskPeer, architectures: Sequence[Architecture], phase: Phase, epochs: Sequence[int]
    ) -> None:
        following = iter(architectures)
        for epoch in epochs:
            order = order_at(key_at(keys.at(0, phase), epoch), len(labels))
            for rows in batches(order, batch):
                subset = rows.rows[: rows.size]
                peer.step(next(following), images[subset], labels[subset], num_classes)

    if plan.supernet:
        epochs = range(config.supernet.epochs)
        timed("supernet", lambda: steps(peer, plan.supernet, Phase.SUPERNET_ORDER, epochs))

    def search() -> None:
        if not plan.supernet:  # the head of the elimination needs the features of the anchor
            peer.walk(peer.base, images)
        for generation in plan.generations:
            peer.count_in_batches(generation, val_images, val_labels, num_classes)

    timed("search", search)

    def finetune() -> TaskPeer:
        peer = new()
        epochs = range(config.finetune.epochs)
        architectures = [plan.target] * len(epochs) * num_batches(len(labels), batch)
        steps(peer, architectures, Phase.FINETUNE_ORDER, epochs)
        peer.walk(plan.target, images)
        return peer

    timed("finetune", finetune)
    timed(
        "router",
        lambda: fit_statistics(features, labels, reads, seed=keys.seed_at(0, Phase.CENTROIDS)),
    )
    return seconds_of_peer, features


if __name__ == "__main__":
    measure.command(main, parse(Bench, description=__doc__))
