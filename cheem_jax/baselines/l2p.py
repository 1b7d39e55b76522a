"""L2P: a pool of prompts that all tasks share; each image selects the prompts with the nearest
selection keys.

The query is the frozen CLS token, and each of the 30 prompts has a learned selection key. The five
prompts whose selection keys have the largest cosines with the query become the prefix of the first
block's attention. Training pulls these five selection keys towards the query. L2P forgets because
each task changes the prompts that it selects. Wang et al., "Learning to Prompt for Continual
Learning", CVPR 2022, as implemented in the CODA-Prompt code, which the CHEEM paper adapted.
"""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from cheem_jax.backbone.flops import prefix_flops
from cheem_jax.backbone.vit import Prefix
from cheem_jax.baselines.baseline import at_least_one, expect, halved
from cheem_jax.baselines.fitting import Fitting
from cheem_jax.baselines.prompting import Attached, Prompting, Prompts, cosine
from cheem_jax.core.routing import normalise
from cheem_jax.core.settings import FitConfig, check_types
from cheem_jax.data.task import Task
from cheem_jax.run.session import Session


@dataclasses.dataclass(frozen=True)
class L2pConfig:
    """Settings of L2P, inferred from the CHEEM paper's comparison."""

    name: ClassVar[str] = "l2p"
    pool: int = 30
    """Number of prompts in the pool (original: 10)."""
    length: int = 20
    """Number of rows of a prompt (original: 10 tokens): the first half is keys, the second half is
    values."""
    top_k: int = 5
    """Number of prompts per image (original: 4)."""
    layers: tuple[int, ...] = (0,)
    """Indices of the blocks with prompts. Each block has a separate pool; (0, 1, 2, 3, 4) is the
    variant called "deep"."""
    fit: FitConfig = FitConfig(epochs=50, schedule="epoch_cosine")
    batch_size: int = 128

    def __post_init__(self) -> None:
        check_types(self)
        at_least_one(self, "batch_size")
        halved(self, "length")
        expect(self, "top_k", 1 <= self.top_k <= self.pool, f"1..{self.pool}, the size of the pool")


class L2p(Prompting):
    """The L2P learner."""

    config: L2pConfig

    def begin_task(self, key: jax.Array, prompts: Prompts, index: int) -> Prompts:
        """Initialise the pool from U(0, 1) before the first task; later tasks continue to train
        it."""
        if prompts:
            return prompts
        config = self.config
        width = self.vit.width
        layers = len(config.layers)
        pool_key, keys_key = jax.random.split(key)
        return {
            "pool": jax.random.uniform(pool_key, (layers, config.pool, config.length, width)),
            "keys": jax.random.uniform(keys_key, (layers, config.pool, width)),
        }

    def attach(
        self,
        prompts: Prompts,
        query: Float[Array, "B D"],
        task: Int[Array, ""],
        is_training: bool,
    ) -> Attached:
        """Select the prompts with the nearest selection keys."""
        config = self.config
        half = config.length // 2
        prefixes = {}
        key_loss = jnp.zeros(len(query))
        for place, layer in enumerate(config.layers):
            cosines = cosine(query[:, None], prompts["keys"][place])  # [B, M]
            _, chosen = jax.lax.top_k(cosines, config.top_k)
            key_loss += (1.0 - jnp.take_along_axis(cosines, chosen, axis=1)).sum(axis=1)
            selected = prompts["pool"][place][chosen]  # [B, k, length, D]
            prefixes[layer] = Prefix(
                *(
                    rows.reshape(len(query), -1, rows.shape[-1])
                    for rows in (selected[:, :, :half], selected[:, :, half:])
                )
            )
        return Attached(prefixes, key_loss)

    def finish(self, task: Task, fitting: Fitting, session: Session) -> dict[str, Any]:
        """Store the prompts and the head. Report the number of training images that select each
        prompt, per block."""
        report = super().finish(task, fitting, session)
        query = normalise(self.features(task.train.images))
        uses = []
        for keys in np.asarray(self.state.prompts["keys"]):
            nearest = np.argsort(-(query @ normalise(keys).T), axis=1, kind="stable")
            chosen = nearest[:, : self.config.top_k]
            uses.append(np.bincount(chosen.ravel(), minlength=self.config.pool).tolist())
        return {**report, "prompts_picked": uses}

    def added_flops(self) -> dict[str, int]:
        """Return the FLOPs of attention to the prefixes, and of the cosines between the query and
        all selection keys."""
        config = self.config
        layers = len(config.layers)
        attention = prefix_flops(self.vit, config.top_k * config.length // 2, layers)
        cosines = 2 * self.vit.width * config.pool * layers
        return {"attention": attention, "executed": attention + cosines}

    def num_params(self, index: int) -> tuple[int, int]:
        """Return the number of trained and the number of added prompt parameters. Each task trains
        the whole pool; the first task adds the whole pool, and later tasks add 0 parameters."""
        pool = sum(values.size for values in self.state.prompts.values())
        return pool, pool if index == 0 else 0
