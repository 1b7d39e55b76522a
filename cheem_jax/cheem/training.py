"""Training and scoring for one task (paper sections 'Supernet Training' and following).

`train_step` is one training step as a pure function. `fit` is the training loop of two phases:
supernet training samples a new architecture for each batch; fine-tuning uses one architecture for
all batches.
"""

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, cast

import jax
import numpy as np
from jaxtyping import Float, Int
from scipy.special import log_softmax

from cheem_jax.backbone.flops import network_flops
from cheem_jax.cheem import elimination
from cheem_jax.cheem.evolution import Score
from cheem_jax.cheem.hee import sample
from cheem_jax.cheem.supernet import Supernet, SupernetState
from cheem_jax.core.architecture import Architecture, Choice, decode, encode, to_strings
from cheem_jax.core.keys import key_at, next_power_of_two
from cheem_jax.core.ops import Expert
from cheem_jax.core.pool import Head, compute_logits, merge_dense
from cheem_jax.core.settings import Advance, FitConfig, no_progress
from cheem_jax.engine.batches import Rows, batches, num_batches
from cheem_jax.engine.executor import Batch, Dense, Executor, Place, Step
from cheem_jax.engine.feed import Feed, HostImages
from cheem_jax.engine.spread import count_correct_spread, features_spread
from cheem_jax.run import training
from cheem_jax.run.training import FitState

Draws = Callable[[int, int], Int[np.ndarray, "steps L"]]
"""Function that maps an epoch and its number of steps to one architecture per step, as candidate
indices."""


class SupernetFit(NamedTuple):
    """A supernet, its learned state, and the progress of its training."""

    supernet: Supernet
    state: SupernetState
    progress: FitState = FitState()


def train_step(
    executor: Executor,
    supernet: Supernet,
    state: SupernetState,
    architecture: Architecture,
    step: Step,
    *,
    rate: float,
) -> tuple[SupernetState, jax.Array]:
    """Update one architecture by one Adam step on one batch.

    Returns the next state, and the mean loss before the update. `step` is a batch from `make_step`,
    and `rate` is Adam's learning rate. Ops outside of `architecture` keep their parameters, moments
    and step count. Adapt and New ops of `architecture` are initialised if they were never sampled.
    If the loss or a gradient is non-finite, the returned loss is NaN and no parameter changes.
    """
    state, (loss,) = train_steps(executor, supernet, state, [architecture], [step], rates=[rate])
    return state, loss


def train_steps(
    executor: Executor,
    supernet: Supernet,
    state: SupernetState,
    architectures: Sequence[Architecture],
    steps: Sequence[Step],
    *,
    rates: Sequence[float],
) -> tuple[SupernetState, list[jax.Array]]:
    """Train each architecture for one step, in order, as `train_step` does. Each call on the device
    runs at most `executor.steps_per_call` steps."""
    state = supernet.with_learners(state, architectures)
    learners, head, losses = executor.train(
        state.learners, state.head, architectures, steps, rates=rates, setup=supernet.setup
    )
    return SupernetState(learners, head), losses


def fit(
    executor: Executor,
    fitting: SupernetFit,
    feed: Feed,
    labels: Int[np.ndarray, "N"],
    *,
    draws: Draws,
    config: FitConfig,
    batch_size: int,
    order_key: jax.Array,
    advance: Advance,
    on_step: Callable[[SupernetFit], object] = lambda fitting: None,
) -> SupernetFit:
    """Train the head and the learners of the sampled architectures, from the state and progress in
    `fitting` to the last epoch.

    `order_key` determines the order of the images. `on_step` receives the current fit before each
    call of `advance`. Training that is resumed from such a fit has the same result as uninterrupted
    training. A step with a non-finite loss or gradient never changes a parameter. After such a
    step, `fit` raises FloatingPointError if `config.non_finite` is `stop`.
    """
    supernet = fitting.supernet
    steps = num_batches(len(labels), batch_size)

    def sampled(epoch: int) -> list[Architecture]:
        return [decode(codes, supernet.sizes) for codes in draws(epoch, steps)]

    def read(epoch: int, pieces: Sequence[Rows], begin: int) -> Iterator[tuple[Architecture, Step]]:
        data = steps_of(executor, feed.at(epoch), labels, pieces[begin:], batch_size)
        return zip(sampled(epoch)[begin:], data, strict=True)

    def step(
        state: SupernetState, batch: Sequence[tuple[Architecture, Step]], rates: Sequence[float]
    ) -> tuple[SupernetState, list[jax.Array]]:
        architectures, data = zip(*batch, strict=True)
        return train_steps(executor, supernet, state, architectures, data, rates=rates)

    def describe(epoch: int, step: int) -> str:
        return f" with the architecture {' '.join(to_strings(sampled(epoch)[step]))}"

    return SupernetFit(
        supernet,
        *training.fit(
            step,
            fitting.state,
            fitting.progress,
            read,
            num_images=len(labels),
            batch_size=batch_size,
            config=config,
            order_key=order_key,
            advance=advance,
            steps_per_call=executor.steps_per_call,
            layout=executor.layout,
            on_step=lambda *current: on_step(SupernetFit(supernet, *current)),
            describe=describe,
        ),
    )


def steps_of(
    executor: Executor,
    feed: Feed,
    labels: Int[np.ndarray, "N"],
    order: Sequence[Rows],
    batch_size: int,
) -> Iterator[Step]:
    """Yield the data of each step, divided into parts of `executor.rows(batch_size)` images."""
    layout = executor.layout
    rows = executor.rows(batch_size)
    parts = [
        (batch, slice(i, i + rows)) for batch in order for i in range(0, len(batch.rows), rows)
    ]
    tokens = feed.follow([batch.rows[part] for batch, part in parts])
    for batch in order:
        weights = batch.mask / batch.mask.sum()
        cuts = [slice(i, i + rows) for i in range(0, len(batch.rows), rows)]
        step = [
            Batch(next(tokens), layout.rows(labels[batch.rows[cut]]), layout.weights(weights[cut]))
            for cut in cuts
        ]
        yield step


def make_step(executor: Executor, images: np.ndarray, labels: Int[np.ndarray, "B"]) -> Step:
    """Make the data of one training step from uint8 images `[B, S, S, 3]` and labels in [0,
    num_classes)."""
    (batch,) = batches(np.arange(len(labels)), len(labels))
    return step_of(executor, HostImages(executor, images), labels, batch)


def step_of(executor: Executor, feed: Feed, labels: Int[np.ndarray, "N"], batch: Rows) -> Step:
    """Make the data of one step, divided into parts as in `steps_of`."""
    (step,) = steps_of(executor, feed, labels, [batch], len(batch.rows))
    return step


def frozen_prefix(supernet: Supernet, architecture: Architecture) -> list[Dense]:
    """Return the blocks before the first Adapt or New as a forward-only network. Fine-tuning does
    not change these blocks."""
    prefix = itertools.takewhile(lambda choice: choice.kind in ("reuse", "skip"), architecture)
    return [
        Dense(supernet.code(block, choice), supernet.frozen(block, choice))
        for block, choice in enumerate(prefix)
    ]


ADAPT, NEW = Choice("adapt", 0), Choice("new")


def prepare(
    executor: Executor,
    supernet: Supernet,
    batch_size: int,
    num_scored: int = 0,
    learnable: Sequence[Choice] = (ADAPT, NEW),
) -> None:
    """Compile all functions for training, scoring and evaluating this task by running each once.

    Compilation depends only on shapes, so the functions run on blank images and a temporary state.
    `num_scored` is the number of images on which the search scores a candidate; it determines how
    many images an accelerator processes per call. `learnable` are the ops that training will use,
    with Adapt first.
    After this call, sampling an architecture triggers no compilation, unless the executor compiles
    one function per signature (tuple of op kinds). With more than one device, the first generation
    of the search compiles the forward functions for each further device.
    """
    scratch = supernet.init()
    size = executor.config.image_size
    rows = executor.rows(batch_size)
    last = executor.num_blocks - 1
    layout = executor.layout

    def blank(rows: int) -> Batch:
        images = layout.rows(np.zeros((rows, size, size, 3), np.uint8))
        labels = layout.rows(np.zeros(rows, np.int32))
        return Batch(executor.begin(images), labels, layout.weights(np.ones(rows, np.float32)))

    one = blank(rows)
    step = [one._replace(weights=one.weights / batch_size)] * (batch_size // rows)
    reuse = Choice("reuse", 0)
    skip = Choice("skip")
    # Each pattern is (first op, middle ops, last op). Together, the patterns contain each op kind
    # after a learnable op, and each learnable op as the first learnable op.
    patterns = [(ADAPT, kind, kind) for kind in (reuse, *learnable, skip)]
    patterns += [(reuse, reuse, ADAPT)]
    if NEW in learnable:
        patterns += [(NEW, skip, reuse), (skip, reuse, NEW)]
    num = executor.num_blocks
    architectures = [(first, *[behind] * (last - 1), end)[-num:] for first, behind, end in patterns]
    if not executor.composes:
        # an executor that does not compose functions compiles one function for all patterns, or a
        # separate function for each pattern; in both cases, only the first pattern is compiled here
        architectures = architectures[:1]
    elif not executor.device.is_host:
        # An accelerator updates all learners of a kind together, by a function for their number.
        # Its forward passes have another size than a training step, so the two architectures
        # without a learner compile the forward functions for a training step.
        architectures += [
            (kind,) * learned + (reuse,) * (num - learned)
            for kind in learnable
            for learned in range(1, num + 1)
        ]
        architectures += [(reuse,) * num, (reuse,) * last + (skip,)]
    for architecture in architectures:
        scratch, _ = train_step(executor, supernet, scratch, architecture, step, rate=0.0)
    tokens, labels, mask = blank(executor.forward_rows(batch_size, num_scored))
    forward = [(ADAPT, skip), (reuse, reuse)] + [(skip, reuse)] * executor.composes
    for behind, end in forward:
        codes = encode((*[behind] * last, end), supernet.sizes)
        network = dense_network(supernet, scratch, codes, {})
        (walked,) = executor.walk([network], tokens, mask)
        executor.classify(scratch.head.params, walked.tokens, labels, mask, supernet.num_classes)
    executor.features(walked.tokens).block_until_ready()


def supernet_draws(
    mode_key: jax.Array,
    draw_key: jax.Array,
    *,
    exploit: Float[np.ndarray, "L C"],
    uniform: Float[np.ndarray, "L C"],
    epsilon: float,
) -> Draws:
    """Make a function that samples one architecture per step. All architectures of an epoch are
    sampled from `uniform` with probability `epsilon`, and from `exploit` otherwise (section
    'Balancing')."""

    def draws(epoch: int, steps: int) -> np.ndarray:
        explore = float(_unit(key_at(mode_key, epoch))) < epsilon
        table = uniform if explore else exploit
        num = next_power_of_two(steps)
        return np.asarray(sample(key_at(draw_key, epoch), table.astype(np.float32), num=num))[
            :steps
        ]

    return draws


def constant_draws(codes: Int[np.ndarray, "L"]) -> Draws:
    """Make a function that returns the same architecture for every step, for fine-tuning."""
    return lambda epoch, steps: np.broadcast_to(codes, (steps, len(codes)))


def dense_network(
    supernet: Supernet,
    state: SupernetState,
    codes: Int[np.ndarray, "L"],
    merged: dict[Place, Expert],
) -> list[Dense]:
    """Make the forward-only network of an architecture.

    `merged` caches the dense weights of Adapt and New between calls with the same state.
    """
    network = []
    for block, choice in enumerate(decode(codes, supernet.sizes)):
        place = (block, choice)
        expert = supernet.frozen(block, choice)
        if choice.kind in ("adapt", "new"):
            if place not in merged:
                params = supernet.learner(state, place).params
                merged[place] = (
                    params
                    if isinstance(params, Expert)
                    else merge_dense(cast(Expert, expert), params)
                )
            expert = merged[place]
        network.append(Dense(int(codes[block]), expert))
    return network


def supernet_score(
    executor: Executor,
    supernet: Supernet,
    state: SupernetState,
    feed: Feed,
    labels: Int[np.ndarray, "N"],
    *,
    batch_size: int,
    advance: Advance = no_progress,
) -> Score:
    """Make the score function of the search, which uses the supernet's weights and head.

    The function maps genomes `[P, L]` to numbers of correct predictions `[P]` on the held-out
    images of `feed`. `labels` are the class indices of these images within the task.
    """
    merged: dict[Place, Expert] = {}

    def score(genomes: np.ndarray) -> np.ndarray:
        networks = [dense_network(supernet, state, codes, merged) for codes in genomes]
        # a long search would otherwise keep the dense weights of every candidate
        used = {
            (block, choice)
            for codes in genomes
            for block, choice in enumerate(decode(codes, supernet.sizes))
        }
        for place in merged.keys() - used:
            del merged[place]
        return count_correct_spread(
            executor,
            networks,
            state.head.params,
            feed,
            labels,
            num_classes=supernet.num_classes,
            batch_size=batch_size,
            advance=advance,
        )

    return score


def head_losses(
    executor: Executor,
    supernet: Supernet,
    state: SupernetState,
    head: Head,
    feed: Feed,
    labels: Int[np.ndarray, "N"],
    *,
    batch_size: int,
    advance: Advance = no_progress,
) -> elimination.LossFunction:
    """Make the score function of backward elimination, which uses the supernet's weights and one
    head for all networks.

    The function maps genomes `[P, L]` to two arrays `[P, N]`: the cross-entropy on each held-out
    image of `feed`, and whether the class of the image is predicted correctly.
    """
    merged: dict[Place, Expert] = {}

    def score(genomes: np.ndarray) -> elimination.Losses:
        networks = [dense_network(supernet, state, codes, merged) for codes in genomes]
        features = features_spread(
            executor, networks, feed, len(labels), batch_size=batch_size, advance=advance
        )
        logits = compute_logits(features, head).astype(np.float64)
        values = -log_softmax(logits, axis=-1)[:, np.arange(len(labels)), labels]
        return elimination.Losses(
            # the order in which NumPy adds numbers depends on the memory layout, so fix the layout
            np.ascontiguousarray(values),
            logits.argmax(axis=-1) == labels,
        )

    return score


def architecture_flops(executor: Executor, supernet: Supernet) -> Score:
    """Make a function that maps genomes to their FLOPs by the paper's convention, without the
    head. Pairs count with the rank that is stored."""
    rank = supernet.settings.stored_rank
    return lambda genomes: np.array(
        [
            network_flops(executor.config, executor.placement, decode(codes, supernet.sizes), rank)
            for codes in genomes
        ]
    )


_unit = jax.jit(functools.partial(jax.random.uniform, shape=()))
