"""DualPrompt: a general prompt that all tasks share, and an expert prompt per task, selected by the
nearest task key.

Blocks 0 and 1 get the general prompt, blocks 2 to 4 the expert one, each as keys and values of the
attention. Training uses the current task's slot and pulls its key to the images' features;
prediction takes, per image and block, the slot with the nearest key. Expert slots stay as learned,
the general prompt does not. Wang et al., "DualPrompt: Complementary Prompting for Rehearsal-Free
Continual Learning", ECCV 2022, in the form of the CODA-Prompt code.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from cheem_jax.backbone.flops import prefix_flops
from cheem_jax.baselines.baseline import at_least_one, expect, halved
from cheem_jax.baselines.fitting import Fitting
from cheem_jax.baselines.prompting import Attached, Prompting, Prompts, cosine, halves
from cheem_jax.core.settings import FitConfig
from cheem_jax.data.task import Task


@dataclasses.dataclass(frozen=True)
class DualPromptConfig:
    """DualPrompt as the paper's comparison implies it; options name what the original code does."""

    name: ClassVar[str] = "dualprompt"
    pool: int | None = None
    """Expert slots, at least one per task; default: 10, or the number of tasks if that is more."""
    general_length: int = 6
    """Rows of the general prompt: half become keys, half values (original: 10)."""
    expert_length: int = 20
    """Rows of an expert prompt (original: 10 on CIFAR-100, 40 on ImageNet-R)."""
    general_layers: tuple[int, ...] = (0, 1)
    """Blocks with a general prompt each."""
    expert_layers: tuple[int, ...] = (2, 3, 4)
    """Blocks with expert prompts."""
    init: Literal["uniform", "small"] = "uniform"
    """Start of prompts and keys: U(0, 1), or the original's U(0, 0.01)."""
    shared_keys: bool = False
    """One key per task, as originally, instead of one per task and block."""
    copy_previous: bool = False
    """A task begins with the expert prompt of the task before, as originally."""
    key_weight: float = 1.0
    """Weight of the key loss; Adam cancels its scale, as keys have no other gradient."""
    fit: FitConfig = FitConfig(epochs=50, schedule="epoch_cosine")
    batch_size: int = 128

    def __post_init__(self) -> None:
        at_least_one(self, "batch_size")
        none = "one slot per task, or none to follow the number of tasks"
        expect(self, "pool", self.pool is None or self.pool >= 1, none)
        halved(self, "general_length", "expert_length")
        if both := set(self.general_layers) & set(self.expert_layers):
            raise ValueError(
                f"blocks {sorted(both)} have a general and an expert prompt; expected one of them"
            )
        if not self.expert_layers:
            raise ValueError(
                "expert_layers is empty; without expert prompts nothing tells the tasks apart"
            )


class DualPrompt(Prompting):
    """See the module."""

    config: DualPromptConfig

    @property
    def pool(self) -> int:
        """Expert slots: those of training, whatever the number of tasks is now."""
        if prompts := self.known.prompts:
            return prompts["expert"].shape[1]
        return self.config.pool or max(10, self.num_tasks)

    @property
    def layers(self) -> tuple[int, ...]:
        return (*self.config.general_layers, *self.config.expert_layers)

    def check(self, tasks: Sequence[Task]) -> list[str]:
        self._check_slot(len(tasks) - 1)
        return []

    def _check_slot(self, index: int) -> None:
        if index >= self.pool:
            raise ValueError(
                f"a pool of {self.pool} slots has none for task {index + 1}; expected one per task:"
                f" set pool to {index + 1} or more, or leave it out before the first task is"
                " learned"
            )

    def begin_task(self, key: jax.Array, prompts: Prompts, index: int) -> Prompts:
        """See `Prompting.begin_task`: prompts sampled once; optionally a slot starts as a copy of
        the one before."""
        self._check_slot(index)
        if prompts:
            if not self.config.copy_previous:
                return prompts
            expert = jnp.asarray(prompts["expert"])
            return {**prompts, "expert": expert.at[:, index].set(expert[:, index - 1])}
        config = self.config
        width = self.executor.config.width
        experts = len(self.config.expert_layers)
        high = {"uniform": 1.0, "small": 0.01}[config.init]
        shapes = {
            "expert": (experts, self.pool, config.expert_length, width),
            "keys": (1 if config.shared_keys else experts, self.pool, width),
        }
        if config.general_layers:
            shapes["general"] = (len(config.general_layers), config.general_length, width)
        keys = jax.random.split(key, len(shapes))
        return {
            name: jax.random.uniform(own, shape, maxval=high)
            for (name, shape), own in zip(shapes.items(), keys, strict=True)
        }

    def attach(
        self,
        prompts: Prompts,
        query: Float[Array, "B D"],
        task: Int[Array, ""],
        weights: Float[Array, "B"] | None,
    ) -> Attached:
        """See `Prompting.attach`: the general prompt, and the task's slot (training) or the nearest
        one."""
        config = self.config
        key_loss = jnp.zeros(len(query))
        found = {}
        for place, layer in enumerate(config.general_layers):
            general = prompts["general"][place]
            found[layer] = halves(jnp.broadcast_to(general, (len(query), *general.shape)))
        for place, layer in enumerate(config.expert_layers):
            keys = prompts["keys"][0 if config.shared_keys else place]
            if weights is not None:
                slot = jnp.broadcast_to(task, len(query))
                if place < len(prompts["keys"]):
                    key_loss += 1.0 - cosine(query, keys[task])
            else:
                # later slots are still random
                near = jnp.where(
                    jnp.arange(len(keys)) <= task, cosine(query[:, None], keys), -jnp.inf
                )
                slot = near.argmax(axis=1)
            found[layer] = halves(prompts["expert"][place][slot])
        return Attached(found, config.key_weight * key_loss)

    def num_params(self, index: int) -> tuple[int, int]:
        """See `Prompting.num_params`: the general prompt, which the first task adds, and a slot
        with its keys."""
        prompts = self.known.prompts
        general = prompts["general"].size if "general" in prompts else 0
        slot = (prompts["expert"].size + prompts["keys"].size) // self.pool
        return general + slot, slot + (general if index == 0 else 0)

    def added_flops(self) -> dict[str, int]:
        """See `Prompting.added_flops`: both prompts, and cosines to all keys."""
        config = self.config
        vit = self.executor.config
        attention = prefix_flops(vit, config.general_length // 2, len(config.general_layers))
        attention += prefix_flops(vit, config.expert_length // 2, len(config.expert_layers))
        tables = 1 if config.shared_keys else len(config.expert_layers)
        return {"attention": attention, "executed": attention + 2 * tables * self.pool * vit.width}

    def learn_task(self, task: Task, fitting: Fitting) -> dict[str, Any]:
        """See `Prompting.learn_task`; reports shares of the training images by inferred slot, per
        block."""
        report = super().learn_task(task, fitting)
        query = self.features(task.train.images)
        index = len(self.classes)
        spread = []
        for keys in np.asarray(self.known.prompts["keys"])[:, : index + 1]:
            near = query @ (keys / np.linalg.norm(keys, axis=1, keepdims=True)).T
            spread.append(
                (np.bincount(near.argmax(axis=1), minlength=index + 1) / len(query)).tolist()
            )
        return {**report, "slots_chosen": spread}
