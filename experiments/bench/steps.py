"""Supernet steps, fine-tuning steps and scoring of candidates with DeiT-Tiny, next to PyTorch with
timm.

    python -m experiments.bench.steps

Both sides have the same weights, images and architectures, and must agree on losses and gradients
before they are timed.
"""

import dataclasses
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from cheem_jax.backbone.config import ViTConfig
from cheem_jax.backbone.weights import Pretrained
from cheem_jax.cheem.training import dense_network, frozen_prefix, prepare, step_of, supernet_score
from cheem_jax.cli.arguments import parse
from cheem_jax.core.architecture import Architecture, Choice, decode
from cheem_jax.core.keys import next_power_of_two
from cheem_jax.core.ops import LowRank
from cheem_jax.core.pool import dense_experts
from cheem_jax.core.settings import Precision, no_progress
from cheem_jax.engine.batches import batches
from cheem_jax.engine.executor import Batch, Dense
from cheem_jax.engine.feed import Feed, HostImages
from cheem_jax.engine.passes import network_features
from cheem_jax.engine.stages import Stages
from experiments.bench import measure
from experiments.bench.measure import Bench, Row, Times, alternate, compare, say
from experiments.bench.peer import CheemPeer

NUM_SAMPLES = 12
NUM_CLASSES = 20
RANK = 16
OURS = "ours"
EAGER = "PyTorch eager"
COMPILED = "torch.compile"
SINGLE, AUTOCAST = "ours float32", "PyTorch autocast"
LARGEST_DIFFERENCE = 1e-3
"""Largest accepted difference of losses and gradients between the sides, divided by the largest
entry of an array."""


class Ours:
    """Our side: the training of a new task over a pool with one expert per block."""

    def __init__(self, executor: Stages, images: np.ndarray, labels: np.ndarray):
        self.executor = executor
        self.labels = labels
        self.training = measure.new_task(executor, NUM_CLASSES, RANK)
        self.supernet = self.training.supernet
        self.pixels = images
        self.tokens = self.cache(())
        self.fill_pairs()

    def cache(self, prefix: Sequence[Dense]) -> Feed:
        """Return the tokens behind the frozen blocks `prefix`, cached as in training."""
        return measure.cached_tokens(
            self.executor, self.pixels, prefix, batch_size=len(self.labels)
        )

    def fill_pairs(self) -> None:
        """Initialise all learners with nonzero pairs, because half of the gradients of a zero pair
        are zero."""
        num = self.executor.num_blocks
        both = [(Choice("adapt", 0),) * num, (Choice("new"),) * num]
        state = self.supernet.with_learners(self.training.state, both)
        learners = dict(state.learners)
        for place, learner in state.learners.items():
            if isinstance(learner.params, LowRank):
                up = 0.02 * jax.random.normal(jax.random.key(place[0]), learner.params.up.shape)
                learners[place] = learner._replace(params=LowRank(learner.params.down, up))
        self.training.state = state._replace(learners=learners)

    def step(self, architecture: Architecture, feed: Feed) -> None:
        """Take one training step and wait until it is finished."""
        num = len(self.labels)
        (batch,) = batches(np.arange(num), num)
        self.training.step(architecture, step_of(self.executor, feed, self.labels, batch))

    def hand_over(self, peer: CheemPeer) -> None:
        """Copy all learned parameters to `peer`."""
        learned = {
            (block, choice.kind): learner.params
            for (block, choice), learner in self.training.state.learners.items()
        }
        peer.set_learned(learned, self.training.state.head.params)


def goal() -> float:
    """Return the required speed relative to PyTorch; PyTorch's kernels are faster on Intel's
    processors."""
    return 1.5 if "Intel" in measure.machine()["cpu"] else 1.8


def main(settings: Bench) -> None:
    """Measure everything and write `steps.json`."""
    pretrained = measure.backbone("deit_tiny", 32 if settings.quick else None)
    sizes, rounds = ((4, 8), 1) if settings.quick else ((16, 64), 2)
    depth = pretrained.config.depth
    codes = np.random.default_rng(0).integers(0, 4, (NUM_SAMPLES, depth))
    architectures = [decode(row, (1,) * depth) for row in codes]
    executor = make_executor(pretrained, "float32")
    peers = {EAGER: make_peer(pretrained), COMPILED: make_peer(pretrained, compiled=True)}
    rows = []
    checks = {}
    samples = {}
    for num in sizes:
        is_first = num == sizes[0]
        images, labels = data(num, pretrained.config)
        ours = Ours(executor, images, labels)
        if is_first:
            some = architectures[: 2 if settings.quick else 4]
            checks = agree(ours, peers[EAGER], some, images, labels)
        prepare(ours.executor, ours.supernet, num)
        warm = warm_compiled(peers, architectures, images, labels)
        sides: dict[str, Callable[[Architecture], object]] = {
            OURS: lambda a, ours=ours: ours.step(a, ours.tokens),
        }
        for name, peer in peers.items():
            sides[name] = lambda a, peer=peer, x=images, y=labels: peer.step(a, x, y, NUM_CLASSES)
        what = f"supernet step, {num} images"
        flops = num * mean_flops(pretrained.config, architectures)
        times = over_samples(sides, architectures, rounds if is_first else 1)
        samples[f"supernet step, {num}"] = times
        note = f"compiling by torch.compile took {warm:.0f} s"
        rows += against_torch(f"{what}, float32", times, flops, note)
        if is_first:
            fine = f"fine-tuning step, {num} images, float32"
            samples[fine] = times = finetuning(ours, peers, images, labels)
            tuned = measure.step_flops(pretrained.config, finetuned(depth), RANK, begin=2)
            rows += against_torch(fine, times, num * tuned)
            times = bfloat16(pretrained, ours, architectures, images, labels, rounds)
            samples["bfloat16"] = times
            half = f"{what}, bfloat16, against {AUTOCAST}"
            single = f"{what}, our float32 against {AUTOCAST}"
            rows += [
                compare(half, times, AUTOCAST, OURS, flops=flops, precision="bfloat16"),
                compare(single, times, AUTOCAST, SINGLE),
            ]
    row, samples["candidates"] = evaluation(executor, peers[EAGER], settings.quick)
    forward, samples["forward passes"] = forward_passes(pretrained, peers, settings.quick)
    measure.save(
        settings.out,
        "steps",
        [*rows, row, *forward],
        quick=settings.quick,
        checks=checks,
        samples=samples,
        weights=pretrained.source,
    )


def data(num: int, config: ViTConfig) -> tuple[np.ndarray, np.ndarray]:
    """Make random images and labels."""
    return measure.random_images(num, config), np.arange(num, dtype=np.int32) % NUM_CLASSES


def over_samples(
    sides: dict[str, Callable[[Architecture], object]],
    architectures: Sequence[Architecture],
    rounds: int,
) -> dict[str, list[float]]:
    """Time all sides in turns over the same architectures."""

    def in_order(side: Callable[[Architecture], object]) -> Callable[[], object]:
        following = itertools.cycle(architectures)
        return lambda: side(next(following))

    return alternate(
        {name: in_order(side) for name, side in sides.items()}, rounds * len(architectures)
    )


def against_torch(what: str, times: Times, flops: float, note: str = "") -> list[Row]:
    """Make the rows that compare our side with eager and compiled PyTorch."""
    return [
        compare(f"{what}, against {EAGER}", times, EAGER, OURS, goal(), flops=flops),
        compare(f"{what}, against {COMPILED}", times, COMPILED, OURS, goal(), note=note),
    ]


def mean_flops(config: ViTConfig, architectures: Sequence[Architecture]) -> float:
    """Return the mean FLOPs of a training step on one image from cached tokens."""
    return statistics.mean(measure.step_flops(config, one, RANK, begin=0) for one in architectures)


def finetuned(depth: int) -> Architecture:
    """Return an architecture whose first op that learns is in the third block."""
    reuse, adapt = Choice("reuse", 0), Choice("adapt", 0)
    pattern = [reuse, reuse, adapt, Choice("skip"), Choice("new"), reuse]
    return tuple(pattern[block % len(pattern)] for block in range(depth))


def finetuning(
    ours: Ours, peers: dict[str, CheemPeer], images: np.ndarray, labels: np.ndarray
) -> dict[str, list[float]]:
    """Time fine-tuning steps of one architecture that start from the tokens behind its frozen
    prefix."""
    architecture = finetuned(ours.executor.num_blocks)
    unchanged = ours.cache(frozen_prefix(ours.supernet, architecture))
    sides: dict[str, Callable[[], object]] = {
        OURS: lambda: ours.step(architecture, unchanged),
    }
    for name, peer in peers.items():
        sides[name] = lambda peer=peer: peer.step(architecture, images, labels, NUM_CLASSES)
    return alternate(sides, 5)


def bfloat16(
    pretrained: Pretrained, ours: Ours, architectures, images, labels, rounds: int
) -> dict[str, list[float]]:
    """Time supernet steps with bfloat16 operands."""
    half = Ours(make_executor(pretrained, "bfloat16"), images, labels)
    prepare(half.executor, half.supernet, len(labels))
    peer = make_peer(pretrained, precision="bfloat16")
    sides: dict[str, Callable[[Architecture], object]] = {
        OURS: lambda a: half.step(a, half.tokens),
        SINGLE: lambda a: ours.step(a, ours.tokens),
        AUTOCAST: lambda a: peer.step(a, images, labels, NUM_CLASSES),
    }
    return over_samples(sides, architectures, rounds)


def evaluation(
    executor: Stages, peer: CheemPeer, quick: bool
) -> tuple[Row, dict[str, list[float]]]:
    """Time the counting of correct predictions of candidates, as for a generation of the search."""
    num_candidates, num_images = (4, 8) if quick else (20, 64)
    images, labels = data(num_images, executor.config)
    ours = Ours(executor, images, labels)
    codes = np.random.default_rng(1).integers(0, 4, (num_candidates, ours.executor.num_blocks))
    score = supernet_score(
        ours.executor,
        ours.supernet,
        ours.training.state,
        ours.tokens,
        labels,
        batch_size=num_images,
        advance=no_progress,
    )
    counts: dict[str, np.ndarray] = {}
    ours.hand_over(peer)
    candidates = [decode(row, ours.supernet.sizes) for row in codes]
    sides: dict[str, Callable[[], object]] = {
        OURS: lambda: counts.update(ours=score(codes)),
        EAGER: lambda: counts.update(
            peer=peer.count_correct(candidates, images, labels, NUM_CLASSES)
        ),
    }
    times = alternate(sides, 1 if quick else 2)
    differing = int(np.abs(counts["ours"] - counts["peer"]).sum())
    # rounding can change a prediction if two logits are nearly equal
    if differing > max(1, num_candidates * num_images // 100):
        raise ValueError(
            f"correct predictions differ by {differing} of {num_candidates * num_images}"
        )
    note = (
        f"ours shares prefixes and begins at cached tokens; {differing} of"
        f" {num_candidates * num_images} predictions differ"
    )
    what = f"{num_candidates} candidates on {num_images} images, float32, against {EAGER}"
    networks = [dense_network(ours.supernet, ours.training.state, row, {}) for row in codes]
    flops = num_images * measure.tree_flops(executor.config, networks)
    return compare(what, times, EAGER, OURS, goal(), flops=flops, note=note), times


def forward_passes(
    pretrained: Pretrained, peers: dict[str, CheemPeer], quick: bool
) -> tuple[list[Row], dict[str, list[float]]]:
    """Time forward passes of the backbone over a data set in batches, in both precisions."""
    num, batch = (8, 4) if quick else (128, 32)
    images, _ = data(num, pretrained.config)
    base = (Choice("reuse", 0),) * pretrained.config.depth
    halves: dict[str, Precision] = {OURS: "bfloat16", SINGLE: "float32"}
    sides: dict[str, Callable[[], object]] = {}
    for name, precision in halves.items():
        executor = make_executor(pretrained, precision)
        network = [Dense(0, experts[0]) for experts in dense_experts(executor.base_pool)]
        sides[name] = lambda executor=executor, network=network: network_features(
            executor, [network], HostImages(executor, images), num, batch_size=batch
        )
    half = make_peer(pretrained, precision="bfloat16")
    for name, peer in ((AUTOCAST, half), (EAGER, peers[EAGER])):
        sides[name] = lambda peer=peer: peer.forward(base, images, batch)
    times = alternate(sides, 1 if quick else 7)
    what = f"forward passes, {num} images"
    flops = num * measure.separate_flops(pretrained.config, [network], from_images=True)
    single = f"{what}, float32, against {EAGER}"
    half = f"{what}, bfloat16, against our float32"
    rows = [
        compare(single, times, EAGER, SINGLE, flops=flops),
        compare(half, times, SINGLE, OURS, 1.6, flops=flops, precision="bfloat16"),
        compare(f"{what}, bfloat16, against {AUTOCAST}", times, AUTOCAST, OURS, 1.0),
    ]
    return rows, times


def agree(
    ours: Ours, peer: CheemPeer, architectures: Sequence[Architecture], images, labels
) -> dict[str, float]:
    """Compare losses and gradients of both sides; ValueError if they differ."""
    ours.hand_over(peer)
    largest = {"loss": 0.0, "gradient": 0.0}
    weights = np.full(len(labels), 1 / len(labels), np.float32)
    batch = Batch(ours.executor.begin(images), labels, weights)
    head = ours.training.state.head.params
    for architecture in architectures:
        ops = ours.supernet.ops(ours.training.state, architecture)
        loss, grads, head_grad = ours.executor.gradients(ops, head, batch, NUM_CLASSES)
        expected_loss, expected, expected_head = peer.gradients(
            architecture, images, labels, NUM_CLASSES
        )
        if grads.keys() != expected.keys():
            raise ValueError(
                f"gradients of blocks {sorted(grads)} here and {sorted(expected)} in PyTorch"
            )
        pairs = [
            (ours_, theirs)
            for block in grads
            for ours_, theirs in zip(grads[block], expected[block], strict=True)
        ]
        pairs += list(zip(head_grad, expected_head, strict=True))
        largest["loss"] = max(
            largest["loss"], abs(float(loss) - expected_loss) / abs(expected_loss)
        )
        largest["gradient"] = max(
            largest["gradient"], *(measure.difference(*pair) for pair in pairs)
        )
    return checked("steps", largest)


def checked(part: str, largest: dict[str, float]) -> dict[str, float]:
    """Check the largest relative differences from PyTorch; ValueError if one is too large."""
    if max(largest.values()) > LARGEST_DIFFERENCE:
        raise ValueError(
            f"loss and gradients differ from PyTorch's by {largest}; at most {LARGEST_DIFFERENCE}"
        )
    say(f"{part}: loss and gradients agree with PyTorch's, largest relative differences {largest}")
    return largest


def warm_compiled(
    peers: dict[str, CheemPeer], architectures: Sequence[Architecture], images, labels
) -> float:
    """Compile every architecture with torch.compile; return the seconds. If torch.compile fails,
    remove its side from `peers`."""
    if COMPILED not in peers:
        return 0.0
    start = time.perf_counter()
    try:
        for architecture in architectures:
            peers[COMPILED].step(architecture, images, labels, NUM_CLASSES)
    # the compiler depends on other tools, which fail in many ways
    except Exception as error:
        say(
            f"steps: torch.compile does not work here ({str(error).splitlines()[0]}), so its side"
            " is left out"
        )
        del peers[COMPILED]
    return time.perf_counter() - start


def make_executor(pretrained: Pretrained, precision: Precision) -> Stages:
    """Make our executor for training on a CPU."""
    config = dataclasses.replace(pretrained.config, precision=precision)
    return measure.stages(dataclasses.replace(pretrained, config=config))


def make_peer(pretrained: Pretrained, **options: Any) -> CheemPeer:
    """Make PyTorch's side with the same weights."""
    return CheemPeer(pretrained, rank=RANK, num_outputs=next_power_of_two(NUM_CLASSES), **options)


if __name__ == "__main__":
    measure.command(main, parse(Bench, description=__doc__))
