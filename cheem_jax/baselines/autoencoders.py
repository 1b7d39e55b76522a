"""Task-ID inference by auto-encoders: the inferred task is the one whose auto-encoder reconstructs the features best.

One per task, E -> 100 (ReLU) -> E (sigmoid), on the sigmoid of a frozen encoder's features; its error is the mean
square over the E values of one image. Aljundi, Chakravarty, Tuytelaars, "Expert Gate: Lifelong Learning with a Network
of Experts", CVPR 2017, in the form that MoE-Adapters gave it.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from cheem_jax.baselines.fitting import FitBatch, Fitter, Inputs, fit_batch, over_batches
from cheem_jax.baselines.settings import at_least_one, positive
from cheem_jax.cheem.training import NOTE_EVERY
from cheem_jax.core.keys import key_at, order_at
from cheem_jax.engine.batches import batches, num_batches
from cheem_jax.engine.passes import Advance


class AutoEncoder(NamedTuple):
    """One task's auto-encoder."""

    down: Float[Array, "E H"]
    down_bias: Float[Array, "H"]
    up: Float[Array, "H E"]
    up_bias: Float[Array, "E"]


@dataclasses.dataclass(frozen=True)
class AutoEncoderConfig:
    """How one auto-encoder is trained; defaults as in MoE-Adapters."""

    hidden: int = 100
    """Width of the hidden layer."""
    iterations: int = 300
    """Steps of Adam per task."""
    learning_rate: float = 0.01
    """Adam's rate at the start; divided by ten after every `decay_every` epochs."""
    decay_every: int = 10
    """Epochs at one rate."""
    batch_size: int = 64

    def __post_init__(self) -> None:
        at_least_one(self, "hidden", "iterations", "decay_every", "batch_size")
        positive(self, "learning_rate")


class AutoEncoders:
    """The compiled functions that fit and compare auto-encoders of one width; the caller keeps what is learned."""

    def __init__(self, width: int, config: AutoEncoderConfig, *, jit: Callable[..., Any] = jax.jit):
        self.width, self.config = width, config
        self._init, self._errors = jit(lambda key: init_autoencoder(key, width, config.hidden)), jit(errors)

        def loss(learned, fixed, batch: FitBatch):
            return (errors(learned, batch.inputs["features"]) * batch.weights).sum()

        self.fitter = Fitter(loss, jit=jit)

    def fit(
        self, init_key: jax.Array, order_key: jax.Array, features: Float[np.ndarray, "N E"], advance: Advance
    ) -> tuple[AutoEncoder, list[float]]:
        """A task's auto-encoder, and its mean error per epoch, of which the last may be partial.

        Raises FloatingPointError for a non-finite error.
        """
        config, num = self.config, len(features)
        steps, note = num_batches(num, config.batch_size), ""
        no_labels = np.zeros(config.batch_size, np.int32)
        fitting, losses = self.fitter.begun(self._init(init_key)), list[float]()
        for epoch in range(-(-config.iterations // steps)):
            # MoE-Adapters' step schedule; the fit ends after `iterations` steps, also within an epoch
            rate = np.float32(config.learning_rate * 0.1 ** (epoch // config.decay_every))
            order = order_at(key_at(order_key, epoch), num)
            left, running = config.iterations - epoch * steps, []
            for piece in itertools.islice(batches(order, config.batch_size), left):
                batch = fit_batch({"features": features[piece.rows]}, no_labels, piece.mask / piece.mask.sum())
                loss = self.fitter.step(fitting, rate, None, batch)
                if len(running) % NOTE_EVERY == 0:
                    note = f"auto-encoder, step {epoch * steps + len(running) + 1}, error {float(loss):.4f}"
                running.append(loss)
                advance(piece.size, note)
            losses.append(float(np.mean(jax.device_get(running))))
            if not math.isfinite(losses[-1]):
                raise FloatingPointError(
                    f"non-finite error of an auto-encoder in epoch {epoch + 1}; check that the router's features are "
                    f"finite, or set a learning rate below {config.learning_rate}"
                )
        return fitting.learned, losses

    def images(self, num: int) -> int:
        """Images that a fit on `num` of them reads in all its iterations."""
        epochs, rest = divmod(self.config.iterations, num_batches(num, self.config.batch_size))
        return epochs * num + min(rest * self.config.batch_size, num)

    def route(
        self, features: Float[np.ndarray, "N E"], learned: Sequence[AutoEncoder], *, batch_size: int
    ) -> Int[np.ndarray, "N"]:
        """The task of each image: that of the lowest error (ties: the lowest task)."""

        def of_all(read: dict[str, Any]) -> Float[np.ndarray, "B T"]:
            values = jnp.asarray(read["features"])
            return np.stack([np.asarray(self._errors(one, values)) for one in learned], axis=1)

        found = over_batches(of_all, Inputs(features=features), batch_size=batch_size)
        return found.argmin(axis=1).astype(np.int32)


def init_autoencoder(key: jax.Array, width: int, hidden: int) -> AutoEncoder:
    """Weights uniform within 1 / sqrt(inputs), biases 0."""
    down_key, up_key = jax.random.split(key)
    down = jax.random.uniform(down_key, (width, hidden), minval=-1.0, maxval=1.0) / math.sqrt(width)
    up = jax.random.uniform(up_key, (hidden, width), minval=-1.0, maxval=1.0) / math.sqrt(hidden)
    return AutoEncoder(down, jnp.zeros(hidden), up, jnp.zeros(width))


def errors(learned: AutoEncoder, features: Float[Array, "B E"]) -> Float[Array, "B"]:
    """Mean squared reconstruction error of each image's features."""
    # float32 products on every device, because errors of two tasks may be close
    product = functools.partial(jnp.matmul, precision="highest")
    inputs = jax.nn.sigmoid(features)
    hidden = jax.nn.relu(product(inputs, learned.down) + learned.down_bias)
    reconstructed = jax.nn.sigmoid(product(hidden, learned.up) + learned.up_bias)
    return ((reconstructed - inputs) ** 2).mean(axis=-1)


def autoencoder_flops(width: int, hidden: int) -> int:
    """FLOPs of one auto-encoder for one image (2 x multiply-adds)."""
    return 2 * 2 * width * hidden
