"""Train any pytree by gradient descent: prompts, adapters, or a whole backbone.

A method defines the loss of a batch as a pure function of learned arrays, fixed arrays and the
batch. All tasks share one compiled step.
"""

import enum
import functools
import itertools
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, Int

from cheem_jax.core.images import Images
from cheem_jax.core.keys import key_at
from cheem_jax.core.settings import Advance, FitConfig, no_progress
from cheem_jax.engine import hosts
from cheem_jax.engine.batches import Rows, batches, num_batches, side_by_side
from cheem_jax.engine.executor import add, guard
from cheem_jax.engine.layout import ONE, Layout
from cheem_jax.run.rolling import Saved
from cheem_jax.run.training import FitState, fit, restored

T = TypeVar("T")
WORKING_SET = 5 * 2**19
"""Maximum size in bytes of a block's widest activations for one part of a batch. It is half of
`executor.WORKING_SET`, because the backward pass stores the activations of the whole network."""


class Init(enum.IntEnum):
    """Arrays that `Phase.METHOD_INIT` initialises. The number of a member is part of its PRNG key,
    so new members are appended."""

    LEARNED = 0
    """Prompts, adapters or experts."""
    HEAD = 1
    EXTRA = 2
    """Random projection of MoAL and RanPAC, or auto-encoder of MoE-Adapters."""


class FitBatch(NamedTuple):
    """A training batch: input arrays `[B, ...]` keyed by name, labels, and one weight per image.
    The weights sum to 1; padding has weight 0."""

    inputs: dict[str, Any]
    labels: Int[Any, "B"]
    weights: Float[Any, "B"]
    key: Any = np.zeros(())
    """PRNG key of the step, for a loss with noise."""


class Inputs:
    """Images, additional arrays with one row per image (such as the queries that select prompts),
    or both."""

    def __init__(self, images: Images | None = None, **others: np.ndarray):
        self.images, self.others = images, others

    def __len__(self) -> int:
        """Number of images."""
        return len(next(iter(self.others.values())) if self.images is None else self.images)

    def follow(self, order: Sequence[np.ndarray], layout: Layout = ONE) -> Iterator[dict[str, Any]]:
        """Yield the inputs for each array of row numbers in `order`. Images are read in advance."""
        read = itertools.repeat(None) if self.images is None else layout.read(self.images, order)
        for rows, images in zip(order, read, strict=False):
            others = {name: layout.rows(values[rows]) for name, values in self.others.items()}
            yield others if images is None else {"images": images, **others}


class Fitting(NamedTuple):
    """Learned arrays, the optimizer's state, and the progress of the training."""

    learned: Any
    moments: Any
    progress: FitState = FitState()
    more: Mapping[str, Any] = {}
    """Additional arrays for the rolling checkpoint."""

    def saved(self) -> Saved:
        """Return a rolling checkpoint of this state."""
        arrays = {"fitting": numbered((self.learned, self.moments)), **self.more}
        if self.progress.running:
            arrays["running"] = self.progress.running_losses()
        return Saved(arrays, self.progress.meta())


class Fitter:
    """Compiled training step of a loss `loss(learned, fixed, batch)`.

    Args:
        loss: a pure function. If `rows` is given, the loss must be a weighted sum over images and
            must not use noise.
        optimizer: computes updates for the learning rate 1; by default, Adam.
        jit: compiles a function.
        rows: a function such as `Executor.rows`, which returns the number of images per part of a
            batch. A CPU computes the parts in parallel. With None, a batch is computed as a whole.
        layout: splits a batch over devices.
    """

    def __init__(
        self,
        loss: Callable[[Any, Any, FitBatch], jax.Array],
        optimizer: optax.GradientTransformation | None = None,
        *,
        jit: Callable[..., Any] = jax.jit,
        rows: Callable[[int, int], int] | None = None,
        layout: Layout = ONE,
    ):
        adam = optax.scale_by_adam() if optimizer is None else optimizer
        gradient = jax.value_and_grad(loss)

        def update(learned, moments, rate, value, grads):
            value = guard(value, grads)
            updates, next_moments = adam.update(grads, moments, learned)
            rates = jax.tree.broadcast(rate, learned)
            stepped = jax.tree.map(lambda p, u, r: p - r * u, learned, updates, rates)
            # a non-finite loss or gradient changes nothing
            learned, moments = jax.tree.map(
                lambda new, old: jnp.where(jnp.isfinite(value), new, old),
                (stepped, next_moments),
                (learned, moments),
            )
            return learned, moments, value

        @functools.partial(jit, donate_argnums=(0, 1))
        def step(learned, moments, rate, fixed, batch):
            return update(learned, moments, rate, *gradient(learned, fixed, batch))

        @jit
        def begin(learned):
            # copies, because the step donates the buffers of its inputs
            learned = jax.tree.map(jnp.copy, learned)
            return learned, adam.init(learned)

        self.loss = loss
        self.rows = rows
        self.layout = layout
        self._step = step
        self._begin = begin
        self._gradient, self._update = jit(gradient), jit(update, donate_argnums=(0, 1))

    def begin(self, learned: Any, saved: Saved | None = None) -> Fitting:
        """Start training from `learned`, or resume it from a rolling checkpoint."""
        learned = self.layout.replicate(jax.tree.map(jnp.asarray, learned))
        fitting = Fitting(*self._begin(learned))
        if saved is None:
            return fitting
        arrays = dict(saved.arrays)
        stored = unnumbered((fitting.learned, fitting.moments), arrays.pop("fitting"))
        progress = restored(saved.meta, arrays.pop("running", ()))
        return Fitting(*self.layout.replicate(stored), progress, arrays)

    def run(
        self,
        fitting: Fitting,
        fixed: Any,
        labels: Int[np.ndarray, "N"],
        inputs: Inputs,
        config: FitConfig,
        *,
        batch_size: int,
        order_key: jax.Array,
        noise_key: jax.Array,
        advance: Advance,
        scale: Any = 1.0,
        on_step: Callable[[Fitting], object] = lambda fitting: None,
        on_epoch: Callable[[Fitting], Fitting] = lambda fitting: fitting,
    ) -> Fitting:
        """Train to the last epoch; see `run.training.fit`.

        The buffers of `fitting` are donated to the steps. `labels` and `inputs` have one row per
        image. `scale` multiplies the learning rate. It is a number, or a pytree of numbers that is
        a prefix of the learned arrays. Raises FloatingPointError for a non-finite loss or gradient,
        unless `config` skips such steps.
        """
        layout = self.layout
        steps = num_batches(len(labels), batch_size)

        def read(epoch: int, pieces: Sequence[Rows], begin: int) -> Iterator[FitBatch]:
            rest = pieces[begin:]
            followed = inputs.follow([piece.rows for piece in rest], layout)
            for number, (piece, arrays) in enumerate(zip(rest, followed, strict=True), begin):
                key = key_at(noise_key, epoch * steps + number)
                weights = layout.weights(piece.mask / piece.mask.sum())
                yield FitBatch(arrays, layout.rows(labels[piece.rows]), weights, key)

        def step(current: Fitting, batch: Sequence[FitBatch], rates: Sequence[float]):
            rate = jax.tree.map(lambda factor: np.float32(factor * rates[0]), scale)
            stepped, loss = self.step(current, rate, fixed, batch[0])
            return stepped, [loss]

        current, progress = fit(
            step,
            fitting,
            fitting.progress,
            read,
            num_images=len(labels),
            batch_size=batch_size,
            config=config,
            order_key=order_key,
            advance=advance,
            layout=layout,
            on_step=lambda current, progress: on_step(current._replace(progress=progress)),
            on_epoch=on_epoch,
        )
        return current._replace(progress=progress)

    def step(
        self, fitting: Fitting, rate: Any, fixed: Any, batch: FitBatch
    ) -> tuple[Fitting, jax.Array]:
        """Take one optimizer step.

        Returns the next state, and the loss before the step. If the loss or a gradient is
        non-finite, the returned loss is NaN and the arrays are unchanged.
        """
        learned, moments = fitting[:2]
        size = len(batch.labels)
        rows = self.rows(size, WORKING_SET) if self.rows else size
        if rows == size:
            *state, loss = self._step(learned, moments, rate, fixed, batch)
        else:
            cuts = [
                operator.itemgetter(slice(start, start + rows)) for start in range(0, size, rows)
            ]
            parts = [FitBatch(*jax.tree.map(cut, batch[:3]), key=batch.key) for cut in cuts]
            gradient = functools.partial(self._gradient, learned, fixed)
            grads = functools.reduce(add, side_by_side(gradient, parts))
            *state, loss = self._update(learned, moments, rate, *grads)
        learned, moments = state
        return fitting._replace(learned=learned, moments=moments), loss

    def epoch(
        self,
        fitting: Fitting,
        rate: float,
        fixed: Any,
        batches: Iterable[FitBatch],
        advance: Advance,
        error: str,
    ) -> tuple[Fitting, float]:
        """Take one step per batch. Return the next state and the mean loss.

        Raises FloatingPointError with the message `error` for a non-finite loss or gradient.
        """
        losses = []
        for batch in batches:
            fitting, loss = self.step(fitting, np.float32(rate), fixed, batch)
            losses.append(loss)
            advance(int(np.count_nonzero(batch.weights)))
        mean = float(np.mean(jax.device_get(losses)))
        if not math.isfinite(mean):
            raise FloatingPointError(error)
        return fitting, mean


def over_batches(
    function: Callable[[dict[str, Any]], Any],
    inputs: Inputs,
    *,
    batch_size: int,
    advance: Advance = no_progress,
    layout: Layout = ONE,
) -> Any:
    """Apply a compiled function to all inputs in batches of equal shape.

    Returns a pytree of arrays `[N, ...]` on the host. Raises ValueError if there are no images.
    """
    if not len(inputs):
        raise ValueError("there are no images to predict; expected at least 1")
    pieces = list(batches(np.arange(len(inputs)), batch_size))
    results = None
    for piece, arrays in zip(
        pieces, inputs.follow([piece.rows for piece in pieces], layout), strict=True
    ):
        part = hosts.fetch(function(arrays))
        if results is None:
            results = jax.tree.map(
                lambda values: np.empty((len(inputs), *values.shape[1:]), values.dtype), part
            )
        for result, values in zip(jax.tree.leaves(results), jax.tree.leaves(part), strict=True):
            result[piece.rows[: piece.size]] = values[: piece.size]
        advance(piece.size)
    return results


def learning_only(mask: Bool[Array, "..."], tree: T) -> T:
    """Stop the gradient of the elements of `tree` whose mask is False; all values are unchanged.

    The axes of `mask` are the first axes of each array of `tree`. Adam does not change elements
    with the gradient 0, because their moments are 0 at the start of each task.
    """

    def only(leaf: Array) -> Array:
        spread = mask.reshape(*mask.shape, *[1] * (leaf.ndim - mask.ndim))
        return jnp.where(spread, leaf, jax.lax.stop_gradient(leaf))

    return jax.tree.map(only, tree)


def numbered(tree: Any) -> dict[str, Any]:
    """Convert a pytree to a dict of its leaves, keyed by number, for checkpoints."""
    return {f"{number:04d}": leaf for number, leaf in enumerate(jax.tree.leaves(tree))}


def unnumbered(like: T, arrays: Mapping[str, Any]) -> T:
    """Convert the result of `numbered` back to a pytree with the structure of `like`."""
    leaves = [jnp.asarray(leaf) for _, leaf in sorted(arrays.items())]
    return jax.tree.unflatten(jax.tree.structure(like), leaves)
