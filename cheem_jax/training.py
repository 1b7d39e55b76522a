"""Learning one task: supernet training, scoring, fine-tuning (paper sections 'Supernet Training' and following).

One loop serves both phases: supernet training draws a fresh architecture for every batch, fine-tuning repeats one.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Literal, Protocol, runtime_checkable

import jax
import numpy as np
from jaxtyping import Float, Int

from cheem_jax.architecture import Architecture, Choice, decode, encode
from cheem_jax.evolution import Score
from cheem_jax.execution.batches import batches, num_batches
from cheem_jax.execution.passes import Advance, count_right
from cheem_jax.execution.stages import Dense, Stages
from cheem_jax.flops import network_flops
from cheem_jax.hee import sample
from cheem_jax.keys import key_at, next_power_of_two, order_at
from cheem_jax.ops import Expert, LowRank
from cheem_jax.pool import merge_dense
from cheem_jax.supernet import Supernet, adam_update


@dataclasses.dataclass(frozen=True)
class FitConfig:
    """One phase of gradient training (paper: Adam, 1e-3, no weight decay)."""

    epochs: int
    """Passes over the training images (paper: 50 in the supernet, 20 in fine-tuning)."""
    learning_rate: float = 1e-3
    """Adam's rate at the start (paper: 0.001)."""
    schedule: Literal["cosine", "constant"] = "cosine"
    """Rate over the steps of the phase: cosine to 0, or constant."""

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


@runtime_checkable
class Examples(Protocol):
    """Images uint8 `[N, S, S, 3]` and labels int32 `[N]`."""

    @property
    def images(self) -> np.ndarray: ...
    @property
    def labels(self) -> np.ndarray: ...


Draws = Callable[[int, int], Int[np.ndarray, "steps L"]]
"""Epoch and number of steps to candidate indices, one architecture per step."""

NOTE_EVERY = 8
"""Steps between looks at the loss: a look waits for the device."""


def learning_rate_at(config: FitConfig, step: int, total_steps: int) -> float:
    """The rate of a global step: it follows all steps of the phase, drawn or not."""
    if config.schedule == "constant":
        return config.learning_rate
    return config.learning_rate * 0.5 * (1.0 + math.cos(math.pi * step / total_steps))


def fit(
    order_key: jax.Array,
    stages: Stages,
    supernet: Supernet,
    examples: Examples,
    draws: Draws,
    config: FitConfig,
    *,
    batch_size: int,
    advance: Advance,
) -> list[float]:
    """Train in place what the drawn architectures touch, and the head; returns the mean loss of each epoch.

    The data order comes from `order_key`. Raises FloatingPointError where the loss is no number any more.
    """
    num, steps = len(examples.labels), num_batches(len(examples.labels), batch_size)
    total, losses, note = config.epochs * steps, [], ""
    for epoch in range(config.epochs):
        codes = draws(epoch, steps)
        order = order_at(key_at(order_key, epoch), num)
        epoch_losses = []
        for step, batch in enumerate(batches(order, batch_size)):
            rate = learning_rate_at(config, epoch * steps + step, total)
            loss = train_step(
                stages,
                supernet,
                decode(codes[step], supernet.sizes),
                (examples.images[batch.rows], examples.labels[batch.rows], batch.mask),
                rate,
            )
            epoch_losses.append((loss, batch.size))
            if step % NOTE_EVERY == 0:
                note = f"epoch {epoch + 1}/{config.epochs} loss {float(loss):.3f}"
            advance(batch.size, note)
        losses.append(sum(float(loss) * size for loss, size in epoch_losses) / num)
        if not math.isfinite(losses[-1]):
            raise FloatingPointError(
                f"the loss became {losses[-1]} in epoch {epoch + 1}; try a learning rate below {config.learning_rate}"
            )
    return losses


def train_step(
    stages: Stages,
    supernet: Supernet,
    architecture: Architecture,
    batch: tuple[np.ndarray, np.ndarray, np.ndarray],
    rate: float,
) -> jax.Array:
    """One Adam step on one architecture; what it does not hold keeps parameters, moments and step counts."""
    learners = [supernet.learner(block, choice) for block, choice in enumerate(architecture)]
    loss, grads, head_grad = stages.loss_and_grads(
        architecture,
        [supernet.frozen(block, choice) for block, choice in enumerate(architecture)],
        [learner.params if learner else None for learner in learners],
        supernet.head.params,
        *batch,
        supernet.num_classes,
    )
    rate32 = np.float32(rate)
    for block, grad in grads.items():
        learner = learners[block]
        assert learner is not None
        supernet.store(block, architecture[block], adam_update(learner, grad, rate32))
    supernet.head = adam_update(supernet.head, head_grad, rate32)
    return loss


def prepare(stages: Stages, supernet: Supernet, batch_size: int) -> None:
    """Compile every program that training, scoring and evaluation of this task can call, by running each once.

    Only shapes matter: a scratch copy of the supernet trains on blank images, so the real one stays untouched. After
    this, drawing an architecture compiles nothing.
    """
    scratch = supernet.untrained()
    size = stages.config.image_size
    images = np.zeros((batch_size, size, size, 3), np.uint8)
    labels, mask = np.zeros(batch_size, np.int32), np.ones(batch_size, np.float32)
    adapt, new, reuse, skip = Choice("adapt", 0), Choice("new"), Choice("reuse", 0), Choice("skip")
    patterns = [(first, then) for first in (adapt, new) for then in (reuse, adapt, new, skip)]
    for pattern in (*patterns, (reuse, skip)):
        architecture = tuple(pattern[min(block, 1)] for block in range(stages.num_blocks))
        train_step(stages, scratch, architecture, (images, labels, mask), 0.0)
    network = dense_network(scratch, encode((adapt, *architecture[1:]), scratch.sizes), {})
    (walked,) = stages.run_networks([network], images, mask)
    stages.classify(scratch.head.params, walked.tokens, labels, mask, scratch.num_classes)
    stages.features(walked.tokens).block_until_ready()


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
    stages: Stages, supernet: Supernet, examples: Examples, *, batch_size: int, advance: Advance
) -> Score:
    """Right answers on held-out images with the supernet's weights (task-local top-1, the search's fitness)."""
    merged: dict = {}

    def score(genomes: np.ndarray) -> np.ndarray:
        networks = [dense_network(supernet, codes, merged) for codes in genomes]
        return count_right(
            stages, networks, supernet.head.params, supernet.num_classes, examples.images, examples.labels,
            batch_size=batch_size, advance=advance,
        )  # fmt: skip

    return score


def architecture_flops(stages: Stages, supernet: Supernet) -> Score:
    """FLOPs of genomes by the paper's convention, without head."""
    rank = supernet.settings.rank
    return lambda genomes: np.array([
        network_flops(stages.config, stages.placement, decode(codes, supernet.sizes), rank) for codes in genomes
    ])  # fmt: skip


_unit = jax.jit(functools.partial(jax.random.uniform, shape=()))
