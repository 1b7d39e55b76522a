"""DIKI: learned keys and values per task with a separate softmax, and a router with a Gaussian per
task.

The attention to the learned keys and values is computed in parallel to a block's attention, and the
two results are added. Values are initialised with 0, so the network of an untrained task is
identical to the pretrained network. The inferred task is the task whose Gaussian has the largest
density at the frozen, normalised feature of the image. Tang et al., "Mind the Interference:
Retaining Pre-trained Knowledge in Parameter Efficient Continual Learning of Vision-Language
Models", ECCV 2024. This implementation omits the text tower.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float64, Int
from scipy.linalg import solve_triangular

from cheem_jax.backbone.flops import executed_halves, pool_flops, prefix_flops
from cheem_jax.backbone.vit import SidePrefix, ViT
from cheem_jax.baselines.baseline import at_least_one, expect, pass_costs
from cheem_jax.baselines.fitting import Inputs
from cheem_jax.baselines.prompting import OwnPrompts, PromptedTask, Prompts, check_layers
from cheem_jax.core.images import Images
from cheem_jax.core.routing import normalise
from cheem_jax.core.settings import FitConfig, check_types
from cheem_jax.data.task import Task
from cheem_jax.engine import hosts
from cheem_jax.run.session import Session

JITTER = 1e-7
"""Number added to the diagonal of every covariance, as in the official code."""


@dataclasses.dataclass(frozen=True)
class DikiConfig:
    """Settings of DIKI with one image tower and linear heads, inferred from the CHEEM paper's
    comparison."""

    name: ClassVar[str] = "diki"
    length: int = 8
    """Number of key-value pairs per block."""
    layers: Literal["last3", "first8"] | tuple[int, ...] = "last3"
    """Blocks with prefixes. `last3` reproduces the paper's FLOPs; `first8` selects the blocks of
    the official code; a tuple selects blocks by index. Router and prediction share the computation
    of the blocks before the first prefix."""
    cov_shrinkage: float = 0.0
    """Share of a scaled identity matrix in each covariance; the scale keeps the mean variance
    unchanged. With the official value 0 and fewer images than dimensions, hardly any test image has
    its largest density under the Gaussian of its task."""
    fit: FitConfig = FitConfig(epochs=20)
    batch_size: int = 64

    def __post_init__(self) -> None:
        check_types(self)
        at_least_one(self, "batch_size", "length")
        expect(self, "cov_shrinkage", 0 <= self.cov_shrinkage <= 1, "a share in [0, 1]")


class Diki(OwnPrompts):
    """The DIKI learner."""

    config: DikiConfig

    def build(self) -> None:
        executor = self.executor
        if not self.router_features.of(executor):
            raise ValueError(
                "diki infers the task ID within the same pass; give it the features of the same"
                " backbone"
            )
        self.layers = find_layers(self.config.layers, executor.config.depth)
        super().build()

        @executor.jit
        def tokens_and_features(leaves, inputs):
            vit = executor.merge_vit(leaves)
            tokens = self.enter(vit, inputs["images"])
            return tokens, vit.features(vit.run_blocks(tokens, begin=self.layers[0]))

        @executor.jit
        def tokens(leaves, inputs):
            return self.enter(executor.merge_vit(leaves), inputs["images"])

        self._tokens, self._tokens_and_features = tokens, tokens_and_features

    def check(self, tasks: Sequence[Task]) -> list[str]:
        width = self.vit.width
        few = [task.name for task in tasks if len(task.train.labels) <= width]
        if not few or self.config.cov_shrinkage:
            return []
        return [
            f"{', '.join(few)}: not more training images than the {width} dimensions of a Gaussian,"
            f" so some directions only have the variance {JITTER:g} and the router can fail; set"
            " cov_shrinkage"
        ]

    def begin_prompts(self, key: jax.Array) -> Prompts:
        """Initialise the keys from U(-1, 1) and the values with 0."""
        shape = (len(self.layers), self.config.length, self.vit.width)
        return {
            "keys": jax.random.uniform(key, shape, minval=-1.0, maxval=1.0),
            "values": jnp.zeros(shape),
        }

    def enter(self, vit: ViT, images: Array) -> Float[Array, "B N D"]:
        """Compute the input of the first block with prefixes."""
        return vit.run_blocks(vit.embed(images), until=self.layers[0])

    def prompted(
        self,
        vit: ViT,
        tokens: Float[Array, "B N D"],
        prompts: Mapping[str, Float[Array, "B ..."]],
    ) -> Float[Array, "B D"]:
        """Compute the features of each image with the prefixes of its task."""
        prefixes = {
            layer: SidePrefix(prompts["keys"][:, place], prompts["values"][:, place])
            for place, layer in enumerate(self.layers)
        }
        return vit.features(vit.run_blocks(tokens, begin=self.layers[0], prefixes=prefixes))

    def inputs(self, task: Task, session: Session) -> Inputs:
        """Return the input tokens of the first block with prefixes, so that epochs do not compute
        them again. If the tokens need more than `executor.budget` bytes, return the images
        instead."""
        images = Inputs(task.train.images)
        if 4 * len(images) * self.vit.num_tokens * self.vit.width > self.executor.budget:
            return images
        with session.phase("keep", len(images)) as advance:
            leaves = self.executor.leaves
            return Inputs(tokens=self.over(self._tokens, images, leaves, advance=advance))

    def fit_router(self, features: Float[np.ndarray, "N E"], task: Task) -> dict[str, np.ndarray]:
        """Fit a Gaussian. Return its mean and the lower triangle of its covariance's Cholesky
        factor."""
        gaussian = fit_gaussian(features, self.config.cov_shrinkage)
        rows, columns = np.tril_indices(len(gaussian.mean))
        return {"mean": gaussian.mean, "factor": gaussian.factor[rows, columns]}

    def run(
        self, images: Images, task_ids: Int[np.ndarray, "N"] | None
    ) -> tuple[Int[np.ndarray, "N"], Float[np.ndarray, "N D"]]:
        """Infer the task ID of each image and compute its features in one pass over the images.

        Router and prediction share the computation of the blocks before the first prefix.
        """
        gaussians = [unpack_gaussian(task) for task in self.tasks]

        def answer(leaves, stack, inputs: dict[str, Any]) -> tuple[Any, Any]:
            tokens, features = self._tokens_and_features(leaves, inputs)
            features = hosts.fetch(features)
            densities = [log_density(features, gaussian) for gaussian in gaussians]
            tasks = np.argmax(densities, axis=0).astype(np.int32)
            used = inputs.get("task", tasks)
            return tasks, self._answer(leaves, stack, {"tokens": tokens, "task": used})

        inputs = Inputs(images) if task_ids is None else Inputs(images, task=task_ids)
        return self.over(answer, inputs, self.executor.leaves, self.stack())

    def bytes_beside(self, task: Task) -> int:
        """Return the bytes of a Gaussian: its mean and the triangle of its Cholesky factor, in
        float64."""
        width = self.vit.width
        return 8 * (width + width * (width + 1) // 2)

    def costs(self) -> dict[str, int]:
        """Report the FLOPs per image: one pass, and a second pass that starts at the first block
        with a prefix.

        `flops_as_printed` counts attention products only in the second pass. For `last3`, it is the
        number in the CHEEM paper's table.
        """
        vit = self.vit
        again = range(self.layers[0], self.vit.depth)
        linear = 2 * vit.num_tokens * (4 * vit.width**2 + vit.mlp_weights) * len(again)
        prefixes = prefix_flops(vit, self.config.length, len(self.layers))
        attention = 4 * vit.num_tokens**2 * vit.width * len(again) + prefixes
        executed = sum(sum(executed_halves(vit, last=block == vit.depth - 1)) for block in again)
        executed += prefixes + len(self.tasks) * vit.width**2  # one triangular system per task
        # the second pass pools its tokens, too
        pooled = pool_flops(vit, count_attention=False)
        linear += pooled
        attention += pool_flops(vit) - pooled
        executed += pool_flops(vit)
        num_classes = len(self.classes.classes[-1])
        costs = pass_costs(vit, num_classes, linear=linear, attention=attention, executed=executed)
        return {**costs, "flops_as_printed": costs["flops_method"] + attention}


class Gaussian(NamedTuple):
    """A Gaussian with a full covariance: its mean, and the lower Cholesky factor of the
    covariance."""

    mean: Float64[np.ndarray, "D"]
    factor: Float64[np.ndarray, "D D"]


def fit_gaussian(features: Float[np.ndarray, "N D"], shrinkage: float = 0.0) -> Gaussian:
    """Compute mean and covariance of normalised features in float64.

    `shrinkage` is the share of a scaled identity matrix in the covariance. Raises ValueError if the
    covariance is singular.
    """
    points = normalise(features.astype(np.float64))
    mean = points.mean(axis=0)
    width = points.shape[1]
    covariance = (points - mean).T @ (points - mean) / max(len(points) - 1, 1)
    level = float(np.trace(covariance)) / width
    # (1 - s) C + (s tr(C) / D + jitter) I, invertible even with fewer images than dimensions
    covariance = (1 - shrinkage) * covariance + (shrinkage * level + JITTER) * np.eye(width)
    try:
        return Gaussian(mean, np.linalg.cholesky(covariance))
    except np.linalg.LinAlgError as error:
        raise ValueError(
            f"the covariance of {len(points)} images in {width} dimensions is singular; set"
            " cov_shrinkage"
        ) from error


def unpack_gaussian(task: PromptedTask) -> Gaussian:
    """Unpack a learned task's Gaussian."""
    mean = task.router["mean"]
    factor = np.zeros((len(mean), len(mean)))
    factor[np.tril_indices(len(mean))] = task.router["factor"]
    return Gaussian(mean, factor)


def log_density(features: Float[np.ndarray, "N D"], gaussian: Gaussian) -> Float64[np.ndarray, "N"]:
    """Normalise the features, and compute their log density under `gaussian` in float64."""
    departure = normalise(features.astype(np.float64)) - gaussian.mean
    whitened = solve_triangular(gaussian.factor, departure.T, lower=True)
    log_det = 2 * np.log(np.diag(gaussian.factor)).sum()
    return -0.5 * ((whitened**2).sum(axis=0) + log_det + len(gaussian.mean) * math.log(2 * math.pi))


def find_layers(
    layers: Literal["last3", "first8"] | tuple[int, ...], depth: int
) -> tuple[int, ...]:
    """Return the sorted indices of the blocks with prefixes. Raises ValueError for blocks that the
    backbone does not have."""
    named = {"last3": tuple(range(depth - 3, depth)), "first8": tuple(range(8))}
    blocks = named[layers] if isinstance(layers, str) else layers
    check_layers(blocks, depth)
    return tuple(sorted(blocks))
