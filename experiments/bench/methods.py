"""Training of a baseline, L2P with DeiT-Tiny, next to PyTorch with timm.

    python -m experiments.bench.methods

Both sides have the same weights and images, and must agree on losses and gradients before they are
timed.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from torch import Tensor

from cheem_jax.backbone.weights import Pretrained
from cheem_jax.baselines.fitting import FitBatch, Inputs
from cheem_jax.baselines.l2p import L2p, L2pConfig
from cheem_jax.cli.arguments import parse
from cheem_jax.core.keys import Keys, next_power_of_two
from cheem_jax.core.pool import Head
from cheem_jax.core.settings import FitConfig, no_progress
from cheem_jax.engine.stages import Stages
from cheem_jax.run.method import FrozenFeatures, FrozenNetworks
from experiments.bench import measure, steps
from experiments.bench.measure import Bench, alternate, compare, difference
from experiments.bench.peer import L2pPeer

OURS = "ours"
CACHED = "PyTorch, cached queries"
PLAIN = "PyTorch, queries in every step"
NUM_CLASSES = 20


def main(settings: Bench) -> None:
    """Measure everything and write `methods.json`."""
    pretrained = measure.backbone("deit_tiny", 32 if settings.quick else None)
    batch, num_steps, repeats = (4, 2, 1) if settings.quick else (32, 3, 5)
    executor = steps.make_executor(pretrained, "float32")
    images, labels = steps.data(batch * num_steps, pretrained.config)
    sides, checks = l2p(pretrained, executor, images, labels, batch)
    what = (
        f"L2P, {num_steps} steps of {batch} images at {pretrained.config.image_size} pixels,"
        " float32"
    )
    times = alternate(sides, repeats)
    rows = [  # public implementations compute queries in every step, so cached queries have no goal
        compare(f"{what}, against {other}", times, other, OURS, goal)
        for other, goal in ((CACHED, None), (PLAIN, 1.0))
    ]
    measure.save(
        settings.out,
        "methods",
        rows,
        quick=settings.quick,
        checks=checks,
        samples=times,
        weights=pretrained.source,
    )


def l2p(
    pretrained: Pretrained, executor: Stages, images: np.ndarray, labels: np.ndarray, batch: int
) -> tuple[dict[str, Callable[[], object]], dict[str, float]]:
    """Return the function of each side that trains for one epoch with prompts at the first block,
    and the largest differences between the sides."""
    config = L2pConfig(fit=FitConfig(epochs=1), batch_size=batch)
    features = FrozenFeatures(executor, batch)
    method = L2p(FrozenNetworks(executor, features, features), config, Keys(0), 1)
    query = features(images)
    prompts = method.begin_task(jax.random.key(1), {}, 0)
    width = executor.config.width
    columns = next_power_of_two(NUM_CLASSES)
    weight = 0.02 * np.asarray(jax.random.normal(jax.random.key(2), (width, columns)))
    head = Head(jax.numpy.asarray(weight), jax.numpy.zeros(columns))
    fixed = (executor.leaves, np.int32(0), np.int32(0), np.int32(NUM_CLASSES))

    def ours() -> None:
        fitting = method.fitter.run(
            method.fitter.begin((prompts, head)),
            fixed,
            labels,
            Inputs(images, query=query),
            config.fit,
            batch_size=batch,
            order_key=jax.random.key(3),
            noise_key=jax.random.key(4),
            advance=no_progress,
        )
        jax.block_until_ready(fitting.learned)

    pool, keys = np.array(prompts["pool"][0]), np.array(prompts["keys"][0])
    peer = L2pPeer(pretrained, config, pool, keys, weight[:, :NUM_CLASSES])
    rows = slice(0, batch)
    weights = np.full(batch, 1 / batch, np.float32)
    inputs: Any = {"images": images[rows], "query": query[rows]}
    first_batch = FitBatch(inputs, labels[rows], weights, jax.random.key(5))  # pyright: ignore[reportArgumentType]
    loss, (grads, own_head) = jax.jit(jax.value_and_grad(method.fitter.loss))(
        (prompts, head), fixed, first_batch
    )
    expected_loss, expected = peer.gradients(images[rows], labels[rows])
    compared = [
        grads["pool"][0],
        grads["keys"][0],
        own_head.weight[:, :NUM_CLASSES],
        own_head.bias[:NUM_CLASSES],
    ]
    largest = {
        "loss": abs(float(loss) - expected_loss) / abs(expected_loss),
        "gradient": max(
            difference(grad, other) for grad, other in zip(compared, expected, strict=True)
        ),
    }
    checks = steps.checked("methods", largest)

    cached = [peer.query(images[start : start + batch]) for start in range(0, len(images), batch)]

    def theirs(queries: Sequence[Tensor | None]) -> None:
        for start, query_of_batch in zip(range(0, len(images), batch), queries, strict=True):
            part = slice(start, start + batch)
            peer.step(images[part], labels[part], query_of_batch)

    plain = [None] * len(cached)
    return {OURS: ours, CACHED: lambda: theirs(cached), PLAIN: lambda: theirs(plain)}, checks


if __name__ == "__main__":
    measure.command(main, parse(Bench, description=__doc__))
