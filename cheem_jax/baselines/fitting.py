"""Gradient training of any pytree: what prompts, adapters and whole backbones have in common.

A method gives the loss of a batch as a pure function of what is learned, what is frozen and the
batch; one compiled step serves every task. Keys and data order follow from the step, so a resumed
fit ends as an uninterrupted one.
"""

import dataclasses
import enum
import functools
import itertools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, Int

from cheem_jax.core.images import Images
from cheem_jax.core.keys import key_at
from cheem_jax.core.settings import Advance, FitConfig
from cheem_jax.engine import hosts
from cheem_jax.engine.batches import Rows, batches, num_batches, side_by_side
from cheem_jax.engine.executor import add, guard
from cheem_jax.engine.layout import ONE, Layout
from cheem_jax.engine.passes import unwatched
from cheem_jax.run.rolling import Saved
from cheem_jax.run.session import Session
from cheem_jax.run.training import FitState, fit, restored

T = TypeVar("T")
WORKING_SET = 5 * 2**19
"""Bytes per part of a batch: half of an executor's, as a whole network keeps more than its widest
activations."""


class Init(enum.IntEnum):
    """What `Phase.METHOD_INIT` initialises; the number is part of the key, so members are only ever
    appended."""

    LEARNED = 0
    """Prompts, adapters or experts."""
    HEAD = 1
    EXTRA = 2
    """MoAL's random projection, MoE-Adapters' auto-encoder."""


class FitBatch(NamedTuple):
    """What one step learns from; `weights` sum to 1 and are 0 for padding, `inputs` are arrays `[B,
    ...]` by name."""

    inputs: dict[str, Any]
    labels: Int[Any, "B"]
    weights: Float[Any, "B"]
    key: Any = np.zeros(())
    """Of the noise, for a loss that has any."""


class Inputs:
    """Images of a data set, and other arrays with one row per image, such as the features that
    query prompts."""

    def __init__(self, images: Images | None = None, **others: np.ndarray):
        self.images, self.others = images, others

    def __len__(self) -> int:
        """Images."""
        return len(next(iter(self.others.values())) if self.images is None else self.images)

    def follow(self, order: Sequence[np.ndarray], layout: Layout = ONE) -> Iterator[dict[str, Any]]:
        """The inputs of each array of rows in turn; images are read ahead."""
        read = itertools.repeat(None) if self.images is None else layout.read(self.images, order)
        for rows, images in zip(order, read, strict=False):
            found = {name: layout.rows(values[rows]) for name, values in self.others.items()}
            yield found if images is None else {"images": images, **found}


@dataclasses.dataclass
class Fitting:
    """What is learned, the optimizer's state, the progress of both, and the task that they belong
    to."""

    learned: Any
    moments: Any
    state: FitState = FitState()
    more: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Further arrays of the method, which its rolling checkpoints keep."""
    session: Session = dataclasses.field(default_factory=Session)

    def saved(self) -> Saved:
        """A rolling checkpoint of this fit."""
        state = self.state
        arrays = {"fitting": numbered((self.learned, self.moments)), **self.more}
        if state.running:
            arrays["running"] = state.running_losses()
        return Saved(arrays, state.meta())

    def phase(self, name: str, total: int = 0) -> AbstractContextManager[Advance]:
        """A phase of the session, `total` in images, from which this fit can resume."""
        return self.session.phase(name, total, self.saved)


class Fitter:
    """The compiled step of one loss, a pure function of what is learned, what is fixed, and the
    batch.

    `optimizer` gives updates for the learning rate 1 (default: `optax.scale_by_adam()`); `jit`
    compiles; `layout` divides each batch over devices. `rows` gives the rows of a part, as
    `Executor.rows`: a CPU computes the parts of a batch in parallel. It is only for a loss without
    noise that is a weighted sum over images, so that parts add up; without it a batch is computed
    as a whole.
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
            # a non-finite loss or gradient must not reach any parameter
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
            # fresh buffers, because the step donates them
            learned = jax.tree.map(jnp.copy, learned)
            return learned, adam.init(learned)

        self.loss = loss
        self.rows = rows
        self.layout = layout
        self._step = step
        self._begin = begin
        self._gradient, self._update = jit(gradient), jit(update, donate_argnums=(0, 1))

    def begun(self, learned: Any, saved: Saved | None = None) -> Fitting:
        """A fit that starts from `learned`, or that resumes from a rolling checkpoint."""
        learned = self.layout.everywhere(jax.tree.map(jnp.asarray, learned))
        fitting = Fitting(*self._begin(learned))
        if saved is not None:
            arrays = dict(saved.arrays)
            found = unnumbered((fitting.learned, fitting.moments), arrays.pop("fitting"))
            fitting.learned, fitting.moments = self.layout.everywhere(found)
            fitting.state = restored(saved.meta, arrays.pop("running", ()))
            fitting.more = arrays
        return fitting

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
        after_epoch: Callable[[Fitting], None] = lambda fitting: None,
    ) -> None:
        """Train in place to the last epoch; `fitting` is up to date whenever `advance` is called.

        `fixed` is passed to the loss; `labels` and `inputs` have one row per image. `scale`
        multiplies the learning rate, as one number or as a pytree over what is learned. Raises
        FloatingPointError for a non-finite loss or gradient, unless `config` skips such steps; they
        reach no parameter.
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

        def step(state: None, batch: Sequence[FitBatch], rates: Sequence[float]):
            rate = jax.tree.map(lambda factor: np.float32(factor * rates[0]), scale)
            return None, [self.step(fitting, rate, fixed, batch[0])]

        def on_step(state: None, progress: FitState) -> None:
            fitting.state = progress

        def on_epoch(state: None) -> None:
            after_epoch(fitting)

        fit(
            step,
            None,
            fitting.state,
            read,
            num_images=len(labels),
            batch_size=batch_size,
            config=config,
            order_key=order_key,
            advance=advance,
            layout=layout,
            on_step=on_step,
            on_epoch=on_epoch,
        )

    def step(self, fitting: Fitting, rate: Any, fixed: Any, batch: FitBatch) -> jax.Array:
        """One step of the optimizer, in place; the loss before it, NaN where that or a gradient is
        non-finite."""
        size = len(batch.labels)
        rows = self.rows(size, WORKING_SET) if self.rows else size
        if rows == size:
            found = self._step(fitting.learned, fitting.moments, rate, fixed, batch)
        else:
            cuts = [
                operator.itemgetter(slice(start, start + rows)) for start in range(0, size, rows)
            ]
            parts = [FitBatch(*jax.tree.map(cut, batch[:3]), key=batch.key) for cut in cuts]
            gradient = functools.partial(self._gradient, fitting.learned, fixed)
            grads = functools.reduce(add, side_by_side(gradient, parts))
            found = self._update(fitting.learned, fitting.moments, rate, *grads)
        fitting.learned, fitting.moments, loss = found
        return loss


def over_batches(
    function: Callable[[dict[str, Any]], Any],
    inputs: Inputs,
    *,
    batch_size: int,
    advance: Advance = unwatched,
    layout: Layout = ONE,
) -> Any:
    """What a compiled function gives for all inputs, computed in batches of one shape: a pytree of
    arrays `[N, ...]`.

    Raises ValueError if there are no images.
    """
    if not len(inputs):
        raise ValueError("there are no images to predict; expected at least 1")
    pieces = list(batches(np.arange(len(inputs)), batch_size))
    found = None
    for piece, read in zip(
        pieces, inputs.follow([piece.rows for piece in pieces], layout), strict=True
    ):
        part = hosts.fetch(function(read))
        if found is None:
            found = jax.tree.map(
                lambda values: np.empty((len(inputs), *values.shape[1:]), values.dtype), part
            )
        for all_values, values in zip(jax.tree.leaves(found), jax.tree.leaves(part), strict=True):
            all_values[piece.rows[: piece.size]] = values[: piece.size]
        advance(piece.size)
    return found


def learning_only(mask: Bool[Array, "..."], tree: T) -> T:
    """The same arrays; where the mask over their first axes is False, the gradient is exactly 0.

    Adam, whose moments start at 0 with each task, then does not change their bytes.
    """

    def only(leaf: Array) -> Array:
        own = mask.reshape(*mask.shape, *[1] * (leaf.ndim - mask.ndim))
        return jnp.where(own, leaf, jax.lax.stop_gradient(leaf))

    return jax.tree.map(only, tree)


def numbered(tree: Any) -> dict[str, Any]:
    """The leaves of a pytree by number, as checkpoints store them."""
    return {f"{number:04d}": leaf for number, leaf in enumerate(jax.tree.leaves(tree))}


def unnumbered(like: T, arrays: Mapping[str, Any]) -> T:
    """The inverse of `numbered`, in the structure of `like`."""
    leaves = [jnp.asarray(leaf) for _, leaf in sorted(arrays.items())]
    return jax.tree.unflatten(jax.tree.structure(like), leaves)
