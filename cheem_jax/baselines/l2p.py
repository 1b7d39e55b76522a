"""L2P: a pool of prompts that all tasks share; each image gets those whose keys are nearest to its
frozen feature.

Query: the frozen CLS token. The five nearest of 30 keys (cosine) give their prompts, which become
    keys and values of
the first block's attention. Selected keys are pulled towards the query. Nothing is protected: every
task overwrites what it selects, so L2P forgets. Wang et al., "Learning to Prompt for Continual
Learning", CVPR 2022, in the form of the CODA-Prompt code that the paper adapted.
"""

import dataclasses
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from cheem_jax.backbone.flops import executed_halves, prefix_flops, token_flops
from cheem_jax.backbone.vit import Prefix
from cheem_jax.baselines.baseline import at_least_one, expect, halved
from cheem_jax.baselines.fitting import Fitting
from cheem_jax.baselines.prompting import Attached, Prompting, Prompts, cosine
from cheem_jax.core.routing import normalise
from cheem_jax.core.settings import FitConfig
from cheem_jax.data.task import Task


@dataclasses.dataclass(frozen=True)
class L2pConfig:
    """L2P as the paper's comparison implies it; options name what other codes do."""

    name: ClassVar[str] = "l2p"
    pool: int = 30
    """Prompts in the pool (original: 10)."""
    length: int = 20
    """Rows of a prompt: half become keys, half values (original: 10 tokens)."""
    top_k: int = 5
    """Prompts per image (original: 4)."""
    layers: tuple[int, ...] = (0,)
    """Blocks with a pool each; (0, 1, 2, 3, 4) is the variant called deep."""
    inject: Literal["prefix", "tokens"] = "prefix"
    """Keys and values of the attention, or, as originally, tokens before the class token, whose
    mean output is then classified."""
    init: Literal["uniform", "small", "symmetric"] = "uniform"
    """Start of prompts and keys: U(0, 1), the original's U(0, 0.01), or the PyTorch port's U(-1,
    1)."""
    key_loss: Literal["image", "batch"] = "image"
    """Selected keys are pulled to the query of their image, or, after an indexing slip in the
    adapted code, to those of the whole batch."""
    key_weight: float = 1.0
    """Weight of the key loss (PyTorch port: 0.1)."""
    fit: FitConfig = FitConfig(epochs=50, schedule="epoch_cosine")
    batch_size: int = 128

    def __post_init__(self) -> None:
        at_least_one(self, "batch_size", "length")
        expect(self, "top_k", 1 <= self.top_k <= self.pool, f"1..{self.pool}, the pool")
        if self.inject == "prefix":
            halved(self, "length")
        elif self.layers != (0,):
            raise ValueError(
                f"layers are {self.layers}; tokens enter before the first block alone: (0,)"
            )


class L2p(Prompting):
    """See the module."""

    config: L2pConfig

    def build(self) -> None:
        super().build()
        if self.config.key_loss == "batch":
            self.fitter.rows = None  # an image's loss depends on the others of its batch

    def begin_task(self, key: jax.Array, prompts: Prompts, index: int) -> Prompts:
        """See `Prompting.begin_task`: a pool sampled once, which every task continues to train."""
        if prompts:
            return prompts
        config = self.config
        width = self.executor.config.width
        layers = len(self.config.layers)
        low, high = {"uniform": (0.0, 1.0), "small": (0.0, 0.01), "symmetric": (-1.0, 1.0)}[
            config.init
        ]
        pool_key, keys_key = jax.random.split(key)
        return {
            "pool": jax.random.uniform(
                pool_key, (layers, config.pool, config.length, width), minval=low, maxval=high
            ),
            "keys": jax.random.uniform(
                keys_key, (layers, config.pool, width), minval=low, maxval=high
            ),
        }

    def attach(
        self,
        prompts: Prompts,
        query: Float[Array, "B D"],
        task: Int[Array, ""],
        weights: Float[Array, "B"] | None,
    ) -> Attached:
        """See `Prompting.attach`: the prompts of the nearest keys per image, in training and in
        prediction alike."""
        config = self.config
        found = {}
        key_loss = jnp.zeros(len(query))
        tokens = None
        for place, layer in enumerate(config.layers):
            near = cosine(query[:, None], prompts["keys"][place])  # [B, M]
            _, chosen = jax.lax.top_k(near, config.top_k)
            if config.key_loss == "image":
                key_loss += (1.0 - jnp.take_along_axis(near, chosen, axis=1)).sum(axis=1)
            else:
                # every selected key against every query of the batch: [B of queries, B of
                # selections, k]
                pulls = (1.0 - near[:, chosen]).sum(axis=2)
                key_loss += (
                    pulls.sum(axis=1)
                    if weights is None
                    else pulls @ (weights > 0).astype(pulls.dtype)
                )
            # [B, k, length, D]
            picked = prompts["pool"][place][chosen]
            half = config.length // 2
            if config.inject == "tokens":
                tokens = _joined(picked)
            else:
                found[layer] = Prefix(_joined(picked[:, :, :half]), _joined(picked[:, :, half:]))
        return Attached(found, config.key_weight * key_loss, tokens)

    def learn_task(self, task: Task, fitting: Fitting) -> dict[str, Any]:
        """See `Prompting.learn_task`; reports how many of the training images select each prompt,
        per block."""
        report = super().learn_task(task, fitting)
        query = normalise(self.features(task.train.images))
        uses = []
        for keys in np.asarray(self.known.prompts["keys"]):
            picked = np.argsort(-(query @ normalise(keys).T), axis=1, kind="stable")[
                :, : self.config.top_k
            ]
            uses.append(np.bincount(picked.ravel(), minlength=self.config.pool).tolist())
        return {**report, "prompts_picked": uses}

    def added_flops(self) -> dict[str, int]:
        """See `Prompting.added_flops`: cosines to all keys; tokens pass all linear layers, prefixes
        none."""
        config = self.config
        vit = self.executor.config
        cosines, rows = (
            2 * vit.width * config.pool * len(config.layers),
            config.top_k * config.length,
        )
        if config.inject == "prefix":
            attention = prefix_flops(vit, rows // 2, len(config.layers))
            return {"attention": attention, "executed": attention + cosines}
        attention = 4 * vit.depth * vit.width * ((vit.num_tokens + rows) ** 2 - vit.num_tokens**2)
        # with tokens the last block computes all of them, not the CLS token alone
        whole, trimmed = (sum(executed_halves(vit, last=last)) for last in (False, True))
        linear = token_flops(vit, rows)
        executed = linear + attention + cosines + whole - trimmed
        return {"linear": linear, "attention": attention, "executed": executed}

    def num_params(self, index: int) -> tuple[int, int]:
        """See `Prompting.num_params`: the pool, which the first task adds."""
        pool = sum(values.size for values in self.known.prompts.values())
        return pool, pool if index == 0 else 0


def _joined(prompts: Float[Array, "B k P D"]) -> Float[Array, "B kP D"]:
    return prompts.reshape(len(prompts), -1, prompts.shape[-1])
