"""DualPrompt: a general prompt that all tasks share, and an expert prompt per task, which is
selected by the nearest task key.

Blocks 0 and 1 have the general prompt, blocks 2 to 4 the expert prompt; both are prefixes of the
attention. A slot is the expert prompt and the task key of one task. Training uses the slot of the
current task and pulls the task key of this slot towards the queries. Prediction selects the slot
with the nearest task key, separately for each image and block. Later tasks change the general
prompt, but not the slots of earlier tasks. Wang et al., "DualPrompt: Complementary Prompting for
Rehearsal-Free Continual Learning", ECCV 2022, as implemented in the CODA-Prompt code.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from cheem_jax.backbone.flops import prefix_flops
from cheem_jax.baselines.baseline import at_least_one, expect, halved
from cheem_jax.baselines.fitting import Fitting
from cheem_jax.baselines.prompting import Attached, Prompting, Prompts, cosine, halves
from cheem_jax.core.routing import normalise
from cheem_jax.core.settings import FitConfig, check_types
from cheem_jax.data.task import Task
from cheem_jax.run.session import Session


@dataclasses.dataclass(frozen=True)
class DualPromptConfig:
    """Settings of DualPrompt, inferred from the CHEEM paper's comparison."""

    name: ClassVar[str] = "dualprompt"
    pool: int | None = None
    """Number of expert slots, at least one per task. A slot is an expert prompt and a task key.
    With None, the number of slots is 10 or the number of tasks, whichever is larger."""
    general_length: int = 6
    """Number of rows of the general prompt (original: 10): the first half is keys, the second half
    is values."""
    expert_length: int = 20
    """Number of rows of an expert prompt (original: 10 on CIFAR-100, 40 on ImageNet-R)."""
    general_layers: tuple[int, ...] = (0, 1)
    """Indices of the blocks with a general prompt."""
    expert_layers: tuple[int, ...] = (2, 3, 4)
    """Indices of the blocks with an expert prompt."""
    fit: FitConfig = FitConfig(epochs=50, schedule="epoch_cosine")
    batch_size: int = 128

    def __post_init__(self) -> None:
        check_types(self)
        at_least_one(self, "batch_size")
        is_pool = self.pool is None or self.pool >= 1
        expect(self, "pool", is_pool, "one slot per task, or none for the number of tasks")
        halved(self, "general_length", "expert_length")
        if both := set(self.general_layers) & set(self.expert_layers):
            raise ValueError(
                f"blocks {sorted(both)} have a general and an expert prompt; expected only one"
            )
        if not self.expert_layers:
            raise ValueError(
                "expert_layers is empty; expected at least one block, because expert prompts"
                " distinguish the tasks"
            )


class DualPrompt(Prompting):
    """The DualPrompt learner."""

    config: DualPromptConfig

    @property
    def pool(self) -> int:
        """Number of slots for an expert prompt and its task key. The number is fixed when the first
        task is learned."""
        if prompts := self.state.prompts:
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
                f"the pool has {self.pool} slots, but task {index + 1} needs another one; set pool"
                f" to at least {index + 1}, or omit it, before the first task is learned"
            )

    def begin_task(self, key: jax.Array, prompts: Prompts, index: int) -> Prompts:
        """Initialise all prompts and keys from U(0, 1) before the first task."""
        self._check_slot(index)
        if prompts:
            return prompts
        config = self.config
        width = self.vit.width
        experts = len(config.expert_layers)
        shapes = {
            "expert": (experts, self.pool, config.expert_length, width),
            "keys": (experts, self.pool, width),
        }
        if config.general_layers:
            shapes["general"] = (len(config.general_layers), config.general_length, width)
        keys = jax.random.split(key, len(shapes))
        return {
            name: jax.random.uniform(name_key, shape)
            for (name, shape), name_key in zip(shapes.items(), keys, strict=True)
        }

    def attach(
        self,
        prompts: Prompts,
        query: Float[Array, "B D"],
        task: Int[Array, ""],
        is_training: bool,
    ) -> Attached:
        """Select the general prompt and an expert slot: in training, the slot of the current task;
        in prediction, the slot with the nearest task key."""
        config = self.config
        key_loss = jnp.zeros(len(query))
        prefixes = {}
        for place, layer in enumerate(config.general_layers):
            general = prompts["general"][place]
            prefixes[layer] = halves(jnp.broadcast_to(general, (len(query), *general.shape)))
        for place, layer in enumerate(config.expert_layers):
            keys = prompts["keys"][place]
            if is_training:
                slot = jnp.broadcast_to(task, len(query))
                key_loss += 1.0 - cosine(query, keys[task])
            else:
                # exclude the slots of future tasks, which contain random values
                is_learned = jnp.arange(len(keys)) <= task
                near = jnp.where(is_learned, cosine(query[:, None], keys), -jnp.inf)
                slot = near.argmax(axis=1)
            prefixes[layer] = halves(prompts["expert"][place][slot])
        return Attached(prefixes, key_loss)

    def num_params(self, index: int) -> tuple[int, int]:
        """Return the number of trained parameters (general prompt and one slot) and of added
        parameters (one slot; for the first task, also the general prompt)."""
        prompts = self.state.prompts
        general = prompts["general"].size if "general" in prompts else 0
        slot = (prompts["expert"].size + prompts["keys"].size) // self.pool
        return general + slot, slot + (general if index == 0 else 0)

    def added_flops(self) -> dict[str, int]:
        """Return the FLOPs of attention to the general and expert prompts, and of the cosines
        between the query and all task keys."""
        config = self.config
        vit = self.vit
        experts = len(config.expert_layers)
        attention = prefix_flops(vit, config.general_length // 2, len(config.general_layers))
        attention += prefix_flops(vit, config.expert_length // 2, experts)
        return {"attention": attention, "executed": attention + 2 * experts * self.pool * vit.width}

    def finish(self, task: Task, fitting: Fitting, session: Session) -> dict[str, Any]:
        """Store the prompts and the head. Report the share of the training images that select each
        slot, per block."""
        report = super().finish(task, fitting, session)
        query = self.features(task.train.images)
        num = len(self.classes) + 1
        shares = []
        for keys in np.asarray(self.state.prompts["keys"])[:, :num]:
            slots = (query @ normalise(keys).T).argmax(axis=1)
            shares.append((np.bincount(slots, minlength=num) / len(query)).tolist())
        return {**report, "slots_chosen": shares}
