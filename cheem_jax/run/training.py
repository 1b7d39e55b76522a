"""The training loop of CHEEM and all baselines: epochs, order of the images, learning rates and
losses.

Each method provides its optimizer step and its batches. PRNG keys and orders of the images are
functions of the position in the phase, so a resumed phase has the same result as an uninterrupted
phase.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np

from cheem_jax.core.keys import key_at, order_at
from cheem_jax.core.settings import Advance, FitConfig
from cheem_jax.engine.batches import Rows, batches, num_batches
from cheem_jax.engine.feed import prefetch
from cheem_jax.engine.layout import ONE, Layout

S = TypeVar("S")
B = TypeVar("B")
TrainStep = Callable[[S, Sequence[B], Sequence[float]], tuple[S, Sequence[jax.Array]]]
"""Function that maps the state, the batches and the learning rate of each batch to the next state
and the loss of each batch. The loss is computed before the step of the batch."""

NOTE_EVERY = 8
"""Number of steps between two reads of the loss; a read waits for the device."""


class FitState(NamedTuple):
    """Progress of one phase of training."""

    step: int = 0
    """Number of finished steps over all epochs."""
    losses: Sequence[float] = ()
    """Mean loss of each finished epoch."""
    running: Sequence[jax.Array | float] = ()
    """Loss of each step of the current epoch; NaN for a skipped step."""
    skipped: int = 0
    """Number of steps that were skipped because a loss or gradient was non-finite."""

    def meta(self) -> dict[str, Any]:
        """Return the JSON values for a rolling checkpoint."""
        return {"step": self.step, "losses": list(self.losses), "skipped": self.skipped}

    def running_losses(self) -> np.ndarray:
        """Return the losses of the current epoch in float64, for a rolling checkpoint."""
        return np.array(jax.device_get(list(self.running)), np.float64)


def restored(meta: Mapping[str, Any], running: Iterable[float] = ()) -> FitState:
    """Restore the progress from the results of `FitState.meta` and `FitState.running_losses`."""
    return FitState(meta["step"], meta["losses"], list(map(float, running)), meta["skipped"])


def fit(
    step: TrainStep[S, B],
    state: S,
    progress: FitState,
    read: Callable[[int, Sequence[Rows], int], Iterable[B]],
    *,
    num_images: int,
    batch_size: int,
    config: FitConfig,
    order_key: jax.Array,
    advance: Advance,
    steps_per_call: int = 1,
    layout: Layout = ONE,
    on_step: Callable[[S, FitState], object] = lambda state, progress: None,
    on_epoch: Callable[[S], S] = lambda state: state,
    describe: Callable[[int, int], str] = lambda epoch, step: "",
) -> tuple[S, FitState]:
    """Train from `progress` to the last epoch, and return the final state and progress.

    Args:
        step: function that trains on up to `steps_per_call` batches.
        state: initial state.
        progress: progress that the initial state has reached.
        read: `read(epoch, pieces, begin)` returns the batches of the epoch, without the first
            `begin` batches. `pieces` contains the image indices of each batch.
        num_images: number of training images.
        batch_size: number of images per batch.
        config: epochs, learning rate and reaction to non-finite losses.
        order_key: key of the random order of the images.
        advance: called with the number of trained images after each call of `step`.
        steps_per_call: number of batches per call of `step`.
        layout: placement of the batches on the devices.
        on_step: called with state and progress before each call of `advance`, so that a rolling
            checkpoint can store them.
        on_epoch: called after each epoch; returns the state for the next epoch.
        describe: `describe(epoch, step)` returns text for the error message of a non-finite step.

    Raises FloatingPointError if a loss or gradient is non-finite, unless `config` skips such steps
    and another step of the epoch is finite.
    """
    steps = num_batches(num_images, batch_size)
    look_every = -(-NOTE_EVERY // steps_per_call)
    note = ""
    for epoch in range(progress.step // steps, config.epochs):
        begin = progress.step % steps
        rates = [
            learning_rate_at(config, epoch * steps + number, config.epochs * steps)
            for number in range(steps)
        ]
        pieces = list(batches(order_at(key_at(order_key, epoch), num_images), batch_size))
        prepared = prefetch(layout, read(epoch, pieces, begin))
        for call, first in enumerate(range(begin, steps, steps_per_call)):
            part = slice(first, first + steps_per_call)
            earlier = progress.running or progress.losses
            state, losses = step(
                state, list(itertools.islice(prepared, steps_per_call)), rates[part]
            )
            progress = progress._replace(
                step=progress.step + len(losses), running=[*progress.running, *losses]
            )
            # With more than one step per call, the latest losses are not ready, and waiting for
            # them would leave the device idle.
            recent = losses if len(losses) == 1 else earlier
            if recent and call % look_every == 0:
                note = f"epoch {epoch + 1}/{config.epochs} loss {float(recent[-1]):.3f}"
            if progress.step == (epoch + 1) * steps:
                progress = finish_epoch(
                    progress,
                    config,
                    [piece.size for piece in pieces],
                    rates,
                    functools.partial(describe, epoch),
                )
                state = on_epoch(state)
            on_step(state, progress)
            advance(sum(piece.size for piece in pieces[part]), note)
    return state, progress


def learning_rate_at(config: FitConfig, step: int, total_steps: int) -> float:
    """Return the learning rate of a step; `step` counts the steps of all epochs."""
    if config.schedule == "constant":
        return config.learning_rate
    if config.schedule == "epoch_cosine":
        epoch = step * config.epochs // total_steps
        return config.learning_rate * math.cos(
            99 * math.pi * epoch / (200 * max(config.epochs - 1, 1))
        )
    # The head is random at first, so the first gradients change the low-rank pairs in arbitrary
    # directions. Adam's steps have the size of the learning rate, so the rate starts low.
    num_warm = total_steps // 10 if config.schedule == "warm_cosine" else 0
    if step < num_warm:
        return config.learning_rate * (step + 1) / (num_warm + 1)
    angle = math.pi * (step - num_warm) / (total_steps - num_warm)
    return config.learning_rate * 0.5 * (1.0 + math.cos(angle))


def images_left(progress: FitState, config: FitConfig, num_images: int, batch_size: int) -> int:
    """Return the number of images in the remaining steps of a phase."""
    epochs, steps = divmod(progress.step, num_batches(num_images, batch_size))
    return (config.epochs - epochs) * num_images - steps * batch_size


def finish_epoch(
    progress: FitState,
    config: FitConfig,
    sizes: Sequence[int],
    rates: Sequence[float],
    describe: Callable[[int], str] = lambda step: "",
) -> FitState:
    """Finish an epoch: replace the losses of its steps by their mean, weighted by the batch
    `sizes`.

    Raises FloatingPointError if a loss is non-finite, unless `config` skips such steps and at least
    one step of the epoch is finite.
    """
    losses = [float(loss) for loss in jax.device_get(list(progress.running))]
    finite = [step for step, loss in enumerate(losses) if math.isfinite(loss)]
    skipped = len(losses) - len(finite)
    if skipped and (config.non_finite == "stop" or not finite):
        step = next(step for step, loss in enumerate(losses) if not math.isfinite(loss))
        skip = ", or non_finite=skip to skip such steps" if config.non_finite == "stop" else ""
        raise FloatingPointError(
            f"non-finite loss or gradient at step {step + 1} of {len(losses)} in epoch "
            f"{len(progress.losses) + 1}, at the learning rate {rates[step]:.3g}{describe(step)}; "
            f"try a learning rate below {config.learning_rate}{skip}"
        )
    mean = sum(losses[step] * sizes[step] for step in finite) / sum(sizes[step] for step in finite)
    return FitState(progress.step, [*progress.losses, mean], (), progress.skipped + skipped)
