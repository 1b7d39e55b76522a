"""S-Prompts: ten prompt tokens and a linear head per task; the nearest centroid of frozen features
infers the task ID.

The tokens are inserted between the CLS token and the patches before the first block, without
position embedding. Tasks share no parameters, so an additional task affects earlier tasks only if
the router confuses the tasks. Wang, Huang and Hong, "S-Prompts Learning with Pre-trained
Transformers: An Occam's Razor for Domain Incremental Learning", NeurIPS 2022. This implementation
is the image-only variant.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from cheem_jax.backbone.flops import executed_backbone_flops, token_flops
from cheem_jax.backbone.vit import ViT
from cheem_jax.baselines.baseline import at_least_one, pass_costs
from cheem_jax.baselines.fitting import Inputs
from cheem_jax.baselines.prompting import OwnPrompts, Prompts
from cheem_jax.core.images import Images
from cheem_jax.core.keys import Phase
from cheem_jax.core.routing import PAPER, RouterConfig, centroid_distances, fit_centroids
from cheem_jax.core.settings import FitConfig, check_types
from cheem_jax.data.task import Task


@dataclasses.dataclass(frozen=True)
class SPromptsConfig:
    """Settings of S-Prompts; the 20 epochs of Adam are inferred from the CHEEM paper's
    comparison."""

    name: ClassVar[str] = "s_prompts"
    length: int = 10
    """Number of prompt tokens per task."""
    fit: FitConfig = FitConfig(epochs=20, schedule="constant")
    router: RouterConfig = RouterConfig()
    batch_size: int = 64

    def __post_init__(self) -> None:
        check_types(self)
        at_least_one(self, "batch_size", "length")
        if (self.router.kind, self.router.features) != (PAPER.kind, PAPER.features):
            raise ValueError(
                f"router kind is {self.router.kind!r} and features are {self.router.features!r};"
                " S-Prompts requires kmeans on the last CLS token: omit both settings"
            )


class SPrompts(OwnPrompts):
    """The S-Prompts learner."""

    config: SPromptsConfig

    def begin_prompts(self, key: jax.Array) -> Prompts:
        """Initialise the prompt tokens from U(-1/sqrt(D), 1/sqrt(D)), as in the official code."""
        width = self.vit.width
        bound = 1 / math.sqrt(width)
        shape = (self.config.length, width)
        return {"tokens": jax.random.uniform(key, shape, minval=-bound, maxval=bound)}

    def enter(self, vit: ViT, images: Array) -> Float[Array, "B N D"]:
        """Compute the image tokens with their position embedding."""
        return vit.embed(images)

    def prompted(
        self,
        vit: ViT,
        tokens: Float[Array, "B N D"],
        prompts: Mapping[str, Float[Array, "B ..."]],
    ) -> Float[Array, "B D"]:
        """Compute the features of each image with the prompt tokens of its task."""
        first = int(vit.config.pool == "class")
        parts = [tokens[:, :first], prompts["tokens"], tokens[:, first:]]
        return vit.features(vit.run_blocks(jnp.concatenate(parts, axis=1)))

    def fit_router(self, features: Float[np.ndarray, "N E"], task: Task) -> dict[str, np.ndarray]:
        seed = self.keys.seed_at(self.number(task), Phase.CENTROIDS)
        return {"centroids": fit_centroids(features, self.config.router.num_centroids, seed=seed)}

    def run(
        self, images: Images, task_ids: Int[np.ndarray, "N"] | None
    ) -> tuple[Int[np.ndarray, "N"], Float[np.ndarray, "N D"]]:
        tasks = self.route(self.router_features(images))
        return tasks, self.features_by(images, tasks if task_ids is None else task_ids)

    def route(self, features: Float[np.ndarray, "N E"]) -> Int[np.ndarray, "N"]:
        """Infer the task of each image: the task of the nearest centroid."""
        centroids = [task.router["centroids"] for task in self.tasks]
        return centroid_distances(features, centroids).argmin(axis=1).astype(np.int32)

    def features_by(self, images: Images, tasks: Int[np.ndarray, "N"]) -> Float[np.ndarray, "N D"]:
        """Compute the features of each image with the network of its task."""
        return self.over(
            self._answer, Inputs(images, task=tasks), self.executor.leaves, self.stack()
        )

    def bytes_beside(self, task: Task) -> int:
        """Return the bytes of the centroids."""
        return 4 * self.config.router.num_centroids * self.router_features.encoder.width

    def costs(self) -> dict[str, int]:
        """Report the FLOPs per image: a pass of the router's network, and a pass with prompts. If
        the router uses the backbone, the CHEEM paper counts two plain passes, and the linear layers
        for the prompt tokens."""
        vit = self.vit
        extra = self.config.length
        num_classes = len(self.classes.classes[-1])
        attention = 4 * vit.depth * vit.width * ((vit.num_tokens + extra) ** 2 - vit.num_tokens**2)
        executed = executed_backbone_flops(vit, extra) - executed_backbone_flops(vit)
        return pass_costs(
            vit,
            num_classes,
            encoder=self.router_features.encoder,
            linear=token_flops(vit, extra),
            attention=attention,
            executed=executed,
        )
