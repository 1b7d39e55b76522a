"""Supernet steps, fine-tuning steps and candidate evaluation of DeiT-Tiny, beside plain PyTorch
with timm.

    python -m experiments.bench.steps

Both sides have the same weights, images and architectures, and must agree on losses and gradients
before anything is timed.
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
from cheem_jax.core.settings import Precision
from cheem_jax.engine.batches import batches
from cheem_jax.engine.executor import Batch, Dense
from cheem_jax.engine.feed import Feed, HostImages
from cheem_jax.engine.passes import network_features, unwatched
from cheem_jax.engine.stages import Stages
from experiments.bench import measure
from experiments.bench.measure import Bench, Row, alternate, medians, ratio, say
from experiments.bench.peer import CheemPeer

NUM_DRAWS = 12
NUM_CLASSES = 20
RANK = 16
OURS = "ours"
IMAGES = "ours from images"
EAGER = "PyTorch eager"
COMPILED = "torch.compile"
SINGLE, AUTOCAST = "ours float32", "PyTorch autocast"
LARGEST_DIFFERENCE = 1e-3
"""Of losses and gradients between the sides, relative to the largest entry of an array."""


class Ours:
    """The library's side: a fresh task whose blocks hold one expert each."""

    def __init__(self, executor: Stages, images: np.ndarray, labels: np.ndarray):
        self.executor, self.labels = executor, labels
        self.fitting = measure.new_task(executor.base_pool, NUM_CLASSES, RANK)
        self.supernet = self.fitting.supernet
        self.images = HostImages(executor, images)
        self.pixels = images
        self.kept = self.keep(())
        self.fill_pairs()

    def keep(self, prefix) -> Feed:
        """Tokens behind frozen blocks, as training keeps them."""
        return measure.kept(self.executor, self.pixels, prefix, batch_size=len(self.labels))

    def fill_pairs(self) -> None:
        """Make all learners, with pairs that are not zero: else half of their gradients would
        be."""
        num = self.executor.num_blocks
        both = [(Choice("adapt", 0),) * num, (Choice("new"),) * num]
        state = self.supernet.with_learners(self.fitting.state, both)
        learners = dict(state.learners)
        for place, learner in state.learners.items():
            if isinstance(learner.params, LowRank):
                up = 0.02 * jax.random.normal(jax.random.key(place[0]), learner.params.up.shape)
                learners[place] = learner._replace(params=LowRank(learner.params.down, up))
        self.fitting.state = state._replace(learners=learners)

    def step(self, architecture: Architecture, feed: Feed) -> None:
        """One step of training, waited for."""
        num = len(self.labels)
        (batch,) = batches(np.arange(num), num)
        measure.step(
            self.executor,
            self.fitting,
            architecture,
            step_of(self.executor, feed, self.labels, batch),
        )

    def hand_over(self, peer: CheemPeer) -> None:
        """Give a peer all that is learned."""
        learned = {
            (block, choice.kind): own.params
            for (block, choice), own in self.fitting.state.learners.items()
        }
        peer.set_learned(learned, self.fitting.state.head.params)


def goal() -> float:
    """How many times as fast as PyTorch, eager and compiled; PyTorch's kernels are better on
    Intel's processors."""
    return 1.5 if "Intel" in measure.machine()["cpu"] else 1.8


def main(settings: Bench) -> None:
    """Measure everything and write `steps.json`."""
    pretrained = measure.backbone("deit_tiny", 32 if settings.quick else None)
    sizes, rounds = ((4, 8), 1) if settings.quick else ((16, 64), 2)
    depth = pretrained.config.depth
    codes = np.random.default_rng(0).integers(0, 4, (NUM_DRAWS, depth))
    architectures = [decode(row, (1,) * depth) for row in codes]
    executor = make_executor(pretrained, "float32")
    peers = {EAGER: make_peer(pretrained), COMPILED: make_peer(pretrained, compiled=True)}
    rows = []
    checks = {}
    samples = {}
    for num in sizes:
        images, labels = data(num, pretrained.config)
        ours = Ours(executor, images, labels)
        if num == sizes[0]:
            checks = agree(
                ours, peers[EAGER], architectures[: 2 if settings.quick else 4], images, labels
            )
        prepare(ours.executor, ours.supernet, num)
        warm = warm_compiled(peers, architectures, images, labels)
        sides: dict[str, Callable[[Architecture], object]] = {
            OURS: lambda a, ours=ours: ours.step(a, ours.kept),
            IMAGES: lambda a, ours=ours: ours.step(a, ours.images),
        }
        for name, peer in peers.items():
            sides[name] = lambda a, peer=peer, x=images, y=labels: peer.step(a, x, y, NUM_CLASSES)
        times = over_draws(sides, architectures, rounds if num == sizes[0] else 1)
        samples[f"supernet step, {num}"] = times
        what = f"supernet step, {num} images, float32"
        flops = num * mean_flops(pretrained.config, architectures)
        share = measure.share_of_peak(flops, statistics.mean(times[OURS]))
        rows += compare(
            what, medians(times), goal(), share, f"torch.compile's programs took {warm:.0f} s"
        )
        if num == sizes[0]:
            found = finetuning(ours, peers, images, labels)
            fine = f"fine-tuning step, {num} images, float32"
            samples[fine] = found
            architecture = finetuned(depth)
            flops = num * measure.step_flops(pretrained.config, architecture, RANK, begin=2)
            share = measure.share_of_peak(flops, medians(found)[OURS])
            rows += compare(fine, medians(found), goal(), share)
            found = bfloat16(pretrained, ours, architectures, images, labels, rounds)
            samples["bfloat16"] = found
            seconds = medians(found)
            what = f"supernet step, {num} images"
            share = measure.share_of_peak(
                num * mean_flops(pretrained.config, architectures),
                statistics.mean(found[OURS]),
                "bfloat16",
            )
            rows.append(
                Row(
                    f"{what}, bfloat16, against {AUTOCAST}",
                    seconds,
                    ratio(seconds, AUTOCAST, OURS),
                    share=share,
                )
            )
            rows.append(
                Row(
                    f"{what}, our float32 against {AUTOCAST}",
                    seconds,
                    ratio(seconds, AUTOCAST, SINGLE),
                )
            )
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
    """Random images and labels."""
    return measure.random_images(num, config), np.arange(num, dtype=np.int32) % NUM_CLASSES


def over_draws(
    sides: dict[str, Callable[[Architecture], object]],
    architectures: Sequence[Architecture],
    rounds: int,
) -> dict[str, list[float]]:
    """Every side steps through the same architectures, in turns."""

    def in_order(side: Callable[[Architecture], object]) -> Callable[[], object]:
        following = itertools.cycle(architectures)
        return lambda: side(next(following))

    return alternate(
        {name: in_order(side) for name, side in sides.items()}, rounds * len(architectures)
    )


def compare(
    what: str, seconds: dict[str, float], goal: float, share: float, note: str = ""
) -> list[Row]:
    """Ours against each of PyTorch's ways."""
    return [
        Row(f"{what}, against {EAGER}", seconds, ratio(seconds, EAGER, OURS), goal, share=share),
        Row(
            f"{what}, against {COMPILED}", seconds, ratio(seconds, COMPILED, OURS), goal, note=note
        ),
    ]


def mean_flops(config: ViTConfig, architectures: Sequence[Architecture]) -> float:
    """FLOPs of one image's training step from kept tokens, on average."""
    return statistics.mean(measure.step_flops(config, one, RANK, begin=0) for one in architectures)


def finetuned(depth: int) -> Architecture:
    """A network that learns from its third block on."""
    reuse, adapt = Choice("reuse", 0), Choice("adapt", 0)
    pattern = [reuse, reuse, adapt, Choice("skip"), Choice("new"), reuse]
    return tuple(pattern[block % len(pattern)] for block in range(depth))


def finetuning(
    ours: Ours, peers: dict[str, CheemPeer], images: np.ndarray, labels: np.ndarray
) -> dict[str, list[float]]:
    """One architecture throughout, from the tokens that it leaves unchanged."""
    architecture = finetuned(ours.executor.num_blocks)
    unchanged = ours.keep(frozen_prefix(ours.supernet, architecture))
    sides: dict[str, Callable[[], object]] = {
        OURS: lambda: ours.step(architecture, unchanged),
        IMAGES: lambda: ours.step(architecture, ours.images),
    }
    for name, peer in peers.items():
        sides[name] = lambda peer=peer: peer.step(architecture, images, labels, NUM_CLASSES)
    return alternate(sides, 5)


def bfloat16(
    pretrained: Pretrained, ours: Ours, architectures, images, labels, rounds: int
) -> dict[str, list[float]]:
    """The same steps with bfloat16 operands."""
    half = Ours(make_executor(pretrained, "bfloat16"), images, labels)
    prepare(half.executor, half.supernet, len(labels))
    peer = make_peer(pretrained, precision="bfloat16")
    sides: dict[str, Callable[[Architecture], object]] = {
        OURS: lambda a: half.step(a, half.kept),
        SINGLE: lambda a: ours.step(a, ours.kept),
        AUTOCAST: lambda a: peer.step(a, images, labels, NUM_CLASSES),
    }
    return over_draws(sides, architectures, rounds)


def evaluation(
    executor: Stages, peer: CheemPeer, quick: bool
) -> tuple[Row, dict[str, list[float]]]:
    """Right answers of candidates, as a generation of the search scores them."""
    num_candidates, num_images = (4, 8) if quick else (20, 64)
    images, labels = data(num_images, executor.config)
    ours = Ours(executor, images, labels)
    codes = np.random.default_rng(1).integers(0, 4, (num_candidates, ours.executor.num_blocks))
    score = supernet_score(
        ours.executor,
        ours.supernet,
        ours.fitting.state,
        ours.kept,
        labels,
        batch_size=num_images,
        advance=unwatched,
    )
    found: dict[str, np.ndarray] = {}
    ours.hand_over(peer)
    candidates = [decode(row, ours.supernet.sizes) for row in codes]
    sides: dict[str, Callable[[], object]] = {
        OURS: lambda: found.update(ours=score(codes)),
        EAGER: lambda: found.update(peer=peer.count_right(candidates, images, labels, NUM_CLASSES)),
    }
    times = alternate(sides, 1 if quick else 2)
    differing = int(np.abs(found["ours"] - found["peer"]).sum())
    # images whose two best classes lie within rounding may go either way
    if differing > max(1, num_candidates * num_images // 100):
        raise ValueError(f"right answers differ by {differing} of {num_candidates * num_images}")
    note = (
        f"ours shares prefixes and begins at kept tokens; {differing} of"
        f" {num_candidates * num_images} answers differ"
    )
    seconds = medians(times)
    what = f"{num_candidates} candidates on {num_images} images, float32, against {EAGER}"
    networks = [dense_network(ours.supernet, ours.fitting.state, row, {}) for row in codes]
    share = measure.share_of_peak(
        num_images * measure.tree_flops(executor.config, networks), seconds[OURS]
    )
    return Row(what, seconds, ratio(seconds, EAGER, OURS), goal(), share=share, note=note), times


def forward_passes(
    pretrained: Pretrained, peers: dict[str, CheemPeer], quick: bool
) -> tuple[list[Row], dict[str, list[float]]]:
    """The plain backbone over a data set in batches, in both precisions; bfloat16 on both sides."""
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
    seconds = medians(times)
    what = f"forward passes, {num} images"
    flops = num * measure.separate_flops(pretrained.config, [network], from_images=True)
    shares = {
        name: measure.share_of_peak(flops, seconds[name], own) for name, own in halves.items()
    }
    rows = [
        Row(
            f"{what}, float32, against {EAGER}",
            seconds,
            ratio(seconds, EAGER, SINGLE),
            share=shares[SINGLE],
        ),
        Row(
            f"{what}, bfloat16, against our float32",
            seconds,
            ratio(seconds, SINGLE, OURS),
            1.6,
            share=shares[OURS],
        ),
        Row(f"{what}, bfloat16, against {AUTOCAST}", seconds, ratio(seconds, AUTOCAST, OURS), 1.0),
    ]
    return rows, times


def agree(
    ours: Ours, peer: CheemPeer, architectures: Sequence[Architecture], images, labels
) -> dict[str, float]:
    """Losses and gradients of both sides; ValueError where they differ."""
    ours.hand_over(peer)
    largest = {"loss": 0.0, "gradient": 0.0}
    weights = np.full(len(labels), 1 / len(labels), np.float32)
    batch = Batch(ours.executor.begin(images), labels, weights)
    head = ours.fitting.state.head.params
    for architecture in architectures:
        ops = ours.supernet.ops(ours.fitting.state, architecture)
        loss, grads, head_grad = ours.executor.gradients(ops, head, batch, NUM_CLASSES)
        wanted_loss, wanted, wanted_head = peer.gradients(architecture, images, labels, NUM_CLASSES)
        if grads.keys() != wanted.keys():
            raise ValueError(
                f"gradients of blocks {sorted(grads)} here and {sorted(wanted)} in PyTorch"
            )
        pairs = [
            (ours_, theirs)
            for block in grads
            for ours_, theirs in zip(grads[block], wanted[block], strict=True)
        ]
        pairs += list(zip(head_grad, wanted_head, strict=True))
        largest["loss"] = max(largest["loss"], abs(float(loss) - wanted_loss) / abs(wanted_loss))
        largest["gradient"] = max(
            largest["gradient"], *(measure.difference(*pair) for pair in pairs)
        )
    return checked("steps", largest)


def checked(part: str, largest: dict[str, float]) -> dict[str, float]:
    """Largest relative differences from PyTorch; ValueError where the sides compute something
    else."""
    if max(largest.values()) > LARGEST_DIFFERENCE:
        raise ValueError(
            f"loss and gradients differ from PyTorch's by {largest}; at most {LARGEST_DIFFERENCE}"
        )
    say(f"{part}: loss and gradients agree with PyTorch's, largest relative differences {largest}")
    return largest


def warm_compiled(
    peers: dict[str, CheemPeer], architectures: Sequence[Architecture], images, labels
) -> float:
    """Let torch.compile see every architecture once; returns the seconds that took."""
    if COMPILED not in peers:
        return 0.0
    start = time.perf_counter()
    try:
        for architecture in architectures:
            peers[COMPILED].step(architecture, images, labels, NUM_CLASSES)
    # the compiler calls others, which fail in many ways; all mean that it cannot be used
    except Exception as error:
        say(
            f"steps: torch.compile does not work here ({str(error).splitlines()[0]}), so its side"
            " is left out"
        )
        del peers[COMPILED]
    return time.perf_counter() - start


def make_executor(pretrained: Pretrained, precision: Precision) -> Stages:
    """The library's executor for training on a CPU."""
    config = dataclasses.replace(pretrained.config, precision=precision)
    return measure.stages(dataclasses.replace(pretrained, config=config))


def make_peer(pretrained: Pretrained, **options: Any) -> CheemPeer:
    """PyTorch with the same weights."""
    return CheemPeer(pretrained, rank=RANK, num_outputs=next_power_of_two(NUM_CLASSES), **options)


if __name__ == "__main__":
    measure.command(main, parse(Bench, description=__doc__))
