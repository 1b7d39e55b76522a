"""Learning one task: supernet training, scoring, fine-tuning (paper sections 'Supernet Training' and following).

One loop serves both phases: supernet training draws a fresh architecture for every batch, fine-tuning repeats one.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import jax
import numpy as np
from jaxtyping import Float, Int

from cheem_jax.architecture import Architecture, Choice, decode, encode, to_strings
from cheem_jax.evolution import Score
from cheem_jax.execution.batches import Batch as Rows
from cheem_jax.execution.batches import batches, num_batches
from cheem_jax.execution.executor import Batch, Dense, Executor, Step
from cheem_jax.execution.feed import Feed, ahead, fed
from cheem_jax.execution.passes import Advance
from cheem_jax.execution.spread import count_right_spread
from cheem_jax.flops import network_flops
from cheem_jax.hee import sample
from cheem_jax.keys import key_at, next_power_of_two, order_at
from cheem_jax.ops import Expert, LowRank
from cheem_jax.pool import merge_dense
from cheem_jax.supernet import Supernet


@dataclasses.dataclass(frozen=True)
class FitConfig:
    """One phase of gradient training (paper: Adam, 1e-3, no weight decay)."""

    epochs: int
    """Passes over the training images (paper: 50 in the supernet, 20 in fine-tuning)."""
    learning_rate: float = 1e-3
    """Adam's rate at the start (paper: 0.001)."""
    schedule: Literal["cosine", "epoch_cosine", "constant"] = "cosine"
    """Rate over the steps of the phase: cosine to 0; the CODA-Prompt code's cosine by whole epochs, which ends at 1.6 %
    of the rate; or constant."""
    non_finite: Literal["stop", "skip"] = "stop"
    """Where a loss or gradient is no finite number: end with an error, or leave that step out and count it."""

    def __post_init__(self) -> None:
        if self.epochs < 1:
            raise ValueError(f"epochs is {self.epochs}; a phase needs at least 1")
        if not self.learning_rate > 0:
            raise ValueError(f"learning_rate is {self.learning_rate}; expected a positive number")


@dataclasses.dataclass(frozen=True)
class ExplorationConfig:
    """Exploration of supernet training."""

    epsilon: float = 0.3
    """eps1: probability that a whole epoch samples uniformly (paper: 0.3)."""
    over: Literal["uniform", "uniform_without_adapt"] = "uniform"
    """Uniform over the 2n + 2 candidates, or over Reuse(e), New and Skip only."""

    def __post_init__(self) -> None:
        if not 0 <= self.epsilon <= 1:
            raise ValueError(f"epsilon is {self.epsilon}; expected a probability in [0, 1]")


def check_batch_size(batch_size: int) -> None:
    """ValueError for a batch without images."""
    if batch_size < 1:
        raise ValueError(f"batch_size is {batch_size}; expected at least 1")


Draws = Callable[[int, int], Int[np.ndarray, "steps L"]]
"""Epoch and number of steps to candidate indices, one architecture per step."""

NOTE_EVERY = 8
"""Steps between looks at the loss: a look waits for the device."""


def learning_rate_at(config: FitConfig, step: int, total_steps: int) -> float:
    """The rate of a global step: it follows all steps of the phase, drawn or not."""
    if config.schedule == "constant":
        return config.learning_rate
    if config.schedule == "epoch_cosine":
        epoch = step * config.epochs // total_steps
        return config.learning_rate * math.cos(99 * math.pi * epoch / (200 * max(config.epochs - 1, 1)))
    return config.learning_rate * 0.5 * (1.0 + math.cos(math.pi * step / total_steps))


@dataclasses.dataclass
class FitState:
    """How far a phase of gradient training has come."""

    step: int = 0
    """Steps taken in all epochs."""
    losses: list[float] = dataclasses.field(default_factory=list)
    """Mean loss of each finished epoch."""
    running: list[jax.Array | float] = dataclasses.field(default_factory=list)
    """Loss of each step of the running epoch; NaN where the step was left out."""
    skipped: int = 0
    """Steps left out because a loss or gradient was no finite number."""


def fit(
    order_key: jax.Array,
    executor: Executor,
    supernet: Supernet,
    labels: Int[np.ndarray, "N"],
    feed: Feed,
    draws: Draws,
    config: FitConfig,
    *,
    batch_size: int,
    advance: Advance,
    state: FitState | None = None,
) -> FitState:
    """Train in place what the drawn architectures touch, and the head, from `state` to the last epoch.

    The data order comes from `order_key`. `state` is up to date whenever `advance` is called, so what is kept of it and
    of the supernet there goes on as if nothing had happened. Raises FloatingPointError where a loss or gradient is no
    finite number; no such step reaches a parameter.
    """
    state = state or FitState()
    num, steps = len(labels), num_batches(len(labels), batch_size)
    total, note = config.epochs * steps, ""
    for epoch in range(state.step // steps, config.epochs):
        begin, seen = state.step % steps, 0
        architectures = [decode(codes, supernet.sizes) for codes in draws(epoch, steps)]
        rates = [learning_rate_at(config, epoch * steps + step, total) for step in range(steps)]
        pieces = list(batches(order_at(key_at(order_key, epoch), num), batch_size))
        prepared = ahead(executor.layout, steps_of(executor, feed, labels, pieces[begin:], batch_size))
        for first in range(begin, steps, executor.steps_per_call):
            part = slice(first, first + executor.steps_per_call)
            coming = list(itertools.islice(prepared, executor.steps_per_call))
            state.running += executor.train(supernet, architectures[part], [step for step, _ in coming], rates[part])
            state.step += len(coming)
            if (first - begin) // NOTE_EVERY >= seen:
                note, seen = f"epoch {epoch + 1}/{config.epochs} loss {float(state.running[-1]):.3f}", seen + 1
            if state.step == (epoch + 1) * steps:
                finish_epoch(
                    state, config, [piece.size for piece in pieces], rates,
                    functools.partial(_drawn, architectures),
                )  # fmt: skip
            advance(sum(size for _, size in coming), note)
    return state


def _drawn(architectures: Sequence[Architecture], step: int) -> str:
    return f" with the architecture {' '.join(to_strings(architectures[step]))}"


def images_left(state: FitState, config: FitConfig, num_images: int, batch_size: int) -> int:
    """Images that a fit still works through."""
    epochs, steps = divmod(state.step, num_batches(num_images, batch_size))
    return (config.epochs - epochs) * num_images - steps * batch_size


def finish_epoch(
    state: FitState,
    config: FitConfig,
    sizes: Sequence[int],
    rates: Sequence[float],
    describe: Callable[[int], str] = lambda step: "",
) -> None:
    """Move the running losses of an epoch's steps to its mean; `describe` says what a step trained.

    Raises FloatingPointError where one is no finite number, unless such steps are to be left out.
    """
    losses = [float(loss) for loss in jax.device_get(state.running)]
    kept = [step for step, loss in enumerate(losses) if math.isfinite(loss)]
    left_out = sorted(set(range(len(losses))) - set(kept))
    if left_out and (config.non_finite == "stop" or not kept):
        step = left_out[0]
        raise FloatingPointError(
            f"the loss or a gradient became no finite number at step {step + 1} of {len(losses)} in epoch "
            f"{len(state.losses) + 1}, at the learning rate {rates[step]:.3g}"
            f"{describe(step)}; try a learning rate below {config.learning_rate}"
            + ("" if config.non_finite == "skip" else ", or non_finite=skip to leave such steps out")
        )
    state.losses.append(sum(losses[step] * sizes[step] for step in kept) / sum(sizes[step] for step in kept))
    state.skipped += len(left_out)
    state.running = []


def steps_of(
    executor: Executor, feed: Feed, labels: Int[np.ndarray, "N"], order: Sequence[Rows], batch_size: int
) -> Iterator[tuple[Step, int]]:
    """Each step's data, in parts as the executor takes them, and its number of images."""
    layout, rows = executor.layout, executor.rows(batch_size)
    parts = [(batch, slice(i, i + rows)) for batch in order for i in range(0, len(batch.rows), rows)]
    tokens = fed(feed, [batch.rows[part] for batch, part in parts])
    for batch in order:
        weights = batch.mask / batch.mask.sum()
        cuts = [slice(i, i + rows) for i in range(0, len(batch.rows), rows)]
        step = [Batch(next(tokens), layout.rows(labels[batch.rows[cut]]), layout.weights(weights[cut])) for cut in cuts]
        yield step, batch.size


def step_of(executor: Executor, feed: Feed, labels: Int[np.ndarray, "N"], batch: Rows) -> Step:
    """One step's data, in parts as the executor takes them."""
    ((step, _),) = steps_of(executor, feed, labels, [batch], len(batch.rows))
    return step


def frozen_prefix(supernet: Supernet, architecture: Architecture) -> list[Dense]:
    """The blocks before the first that learns, as a forward-only network: what fine-tuning never changes."""
    prefix = list(
        itertools.takewhile(lambda pair: pair[1].kind in ("reuse", "skip"), enumerate(architecture))
    )  # fmt: skip
    return [Dense(supernet.code(block, choice), supernet.frozen(block, choice)) for block, choice in prefix]


def prepare(executor: Executor, supernet: Supernet, batch_size: int) -> None:
    """Compile every program that training, scoring and evaluation of this task can call, by running each once.

    Only shapes matter: a scratch copy of the supernet trains on blank images, so the real one stays untouched. After
    this, drawing an architecture compiles nothing, unless the executor compiles one program per signature. Over several
    devices the search's first generation compiles its forward programs for each of them.
    """
    scratch = supernet.untrained()
    size, rows, last = executor.config.image_size, executor.rows(batch_size), executor.num_blocks - 1
    layout = executor.layout
    tokens = executor.begin(layout.rows(np.zeros((rows, size, size, 3), np.uint8)))
    labels, mask = layout.rows(np.zeros(rows, np.int32)), layout.weights(np.ones(rows, np.float32))
    step = [Batch(tokens, labels, mask / batch_size)] * (batch_size // rows)
    adapt, new, reuse, skip = Choice("adapt", 0), Choice("new"), Choice("reuse", 0), Choice("skip")
    # (first op, those behind it, the last): each kind behind a learnable one, and each learnable one as the first
    patterns = [(adapt, kind, kind) for kind in (reuse, adapt, new, skip)]
    patterns += [(new, skip, reuse), (reuse, reuse, adapt), (skip, reuse, new)]
    if executor.name != "stages":
        patterns = patterns[:1]  # one program serves them all, or each would be a program of its own
    for first, behind, end in patterns:
        architecture = (first, *[behind] * (last - 1), end)[-executor.num_blocks :]
        executor.train(scratch, [architecture], [step], [0.0])
    for codes in ([adapt] * last + [skip], [reuse] * last + [reuse]):
        network = dense_network(scratch, encode(tuple(codes), scratch.sizes), {})
        (walked,) = executor.walk([network], tokens, mask)
        executor.classify(scratch.head.params, walked.tokens, labels, mask, scratch.num_classes)
    executor.features(walked.tokens).block_until_ready()


def supernet_draws(
    mode_key: jax.Array,
    draw_key: jax.Array,
    exploit: Float[np.ndarray, "L C"],
    uniform: Float[np.ndarray, "L C"],
    epsilon: float,
) -> Draws:
    """Exploration or exploitation for a whole epoch, a fresh architecture per batch (section 'Balancing')."""

    def draws(epoch: int, steps: int) -> np.ndarray:
        explore = float(_unit(key_at(mode_key, epoch))) < epsilon
        table = uniform if explore else exploit
        num = next_power_of_two(steps)
        return np.asarray(sample(key_at(draw_key, epoch), table.astype(np.float32), num=num))[:steps]

    return draws


def constant_draws(codes: Int[np.ndarray, "L"]) -> Draws:
    """The same architecture at every step (fine-tuning)."""
    return lambda epoch, steps: np.broadcast_to(codes, (steps, len(codes)))


def dense_network(supernet: Supernet, codes: Int[np.ndarray, "L"], merged: dict) -> list[Dense]:
    """A drawn architecture as a forward-only network; `merged` remembers dense weights of Adapt between calls."""
    network = []
    for block, choice in enumerate(decode(codes, supernet.sizes)):
        code = int(codes[block])
        expert = supernet.frozen(block, choice)
        learner = supernet.learner(block, choice)
        if choice.kind == "adapt":
            if (block, code) not in merged:
                assert expert is not None and learner is not None and isinstance(learner.params, LowRank)
                merged[block, code] = merge_dense(expert, learner.params)
            expert = merged[block, code]
        elif choice.kind == "new":
            assert learner is not None and isinstance(learner.params, Expert)
            expert = learner.params
        network.append(Dense(code, expert))
    return network


def supernet_score(
    executor: Executor,
    supernet: Supernet,
    labels: Int[np.ndarray, "N"],
    feed: Feed,
    *,
    batch_size: int,
    advance: Advance,
) -> Score:
    """Right answers on held-out images with the supernet's weights (task-local top-1, the search's fitness)."""
    merged: dict = {}

    def score(genomes: np.ndarray) -> np.ndarray:
        networks = [dense_network(supernet, codes, merged) for codes in genomes]
        return count_right_spread(
            executor, networks, supernet.head.params, supernet.num_classes, feed, labels,
            batch_size=batch_size, advance=advance,
        )  # fmt: skip

    return score


def architecture_flops(executor: Executor, supernet: Supernet) -> Score:
    """FLOPs of genomes by the paper's convention, without head."""
    rank = supernet.settings.rank
    return lambda genomes: np.array([
        network_flops(executor.config, executor.placement, decode(codes, supernet.sizes), rank) for codes in genomes
    ])  # fmt: skip


_unit = jax.jit(functools.partial(jax.random.uniform, shape=()))
