"""CODA-Prompt: a prompt is a weighted sum of components, and the weights depend on the image's
frozen feature.

Each of the first five blocks has a pool of 100 components. Component m has a key K_m and an
attention vector A_m. The weight of component m is the cosine between q * A_m and K_m for the
image's frozen feature q, without softmax. The pool is divided among the tasks before the first task
is learned. Each task initialises its components, keys and attention vectors by Gram-Schmidt, so
that they are orthogonal to all earlier components, keys and attention vectors, respectively. The
new components, keys and attention vectors are trained on this task and then frozen. Smith et al.,
"CODA-Prompt: COntinual Decomposed Attention-based Prompting for Rehearsal-Free Continual Learning",
CVPR 2023.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from cheem_jax.backbone.flops import prefix_flops
from cheem_jax.baselines.baseline import at_least_one, halved
from cheem_jax.baselines.fitting import learning_only
from cheem_jax.baselines.prompting import Attached, Prompting, Prompts, halves
from cheem_jax.core.device import deterministic_jit
from cheem_jax.core.settings import FitConfig, check_types
from cheem_jax.data.task import Task


@dataclasses.dataclass(frozen=True)
class CodaPromptConfig:
    """Settings of CODA-Prompt, as in its released scripts, except for the 50 epochs, which are
    inferred from the CHEEM paper's comparison."""

    name: ClassVar[str] = "coda_prompt"
    pool: int = 100
    """Number of components per block. They are divided equally among the tasks; the remainder is
    unused."""
    length: int = 8
    """Number of rows of a component: the first half is keys, the second half is values."""
    layers: tuple[int, ...] = (0, 1, 2, 3, 4)
    """Indices of the blocks with components."""
    fit: FitConfig = FitConfig(epochs=50, schedule="epoch_cosine")
    batch_size: int = 128

    def __post_init__(self) -> None:
        check_types(self)
        at_least_one(self, "batch_size", "pool")
        halved(self, "length")


class CodaPrompt(Prompting):
    """The CODA-Prompt learner."""

    config: CodaPromptConfig

    @property
    def rows(self) -> int:
        """Number of components per task and block."""
        return self.config.pool // self.num_tasks

    def check(self, tasks: Sequence[Task]) -> list[str]:
        config = self.config
        notes = []
        width = self.vit.width
        self._check_share(len(tasks) - 1)
        if unused := config.pool - self.rows * self.num_tasks:
            notes.append(
                f"each of the {self.num_tasks} tasks has {self.rows} of {config.pool} components;"
                f" {unused} are not used"
            )
        if self.rows * self.num_tasks > width:
            notes.append(
                f"there are more components than the {width} dimensions of their keys, so the last"
                " ones are initialised randomly instead of orthogonal to all earlier ones"
            )
        return notes

    def _check_share(self, index: int) -> None:
        if not self.rows:
            raise ValueError(
                f"a pool of {self.config.pool} components cannot be divided among {self.num_tasks}"
                f" tasks; set pool to at least {self.num_tasks}"
            )
        if index >= self.num_tasks:
            raise ValueError(
                f"the pool was divided among {self.num_tasks} tasks and has no rows for task"
                f" {index + 1}; set the number of tasks before the first one is learned"
            )

    def restore(self, index: int, arrays: Mapping[str, Any], meta: Mapping[str, Any]) -> None:
        """Restore a checkpoint. Raises ValueError if the pool in the checkpoint is divided among a
        different number of tasks."""
        if meta["num_tasks"] != self.num_tasks:
            raise ValueError(
                f"its prompts are divided among {meta['num_tasks']} tasks, not {self.num_tasks};"
                " open it with the number of tasks that it was learned with"
            )
        super().restore(index, arrays, meta)

    def begin_task(self, key: jax.Array, prompts: Prompts, index: int) -> Prompts:
        """Initialise the components, keys and attention vectors of a task so that they are
        orthogonal to the components, keys and attention vectors, respectively, of earlier tasks."""
        self._check_share(index)
        config = self.config
        width = self.vit.width
        layers = len(config.layers)
        shapes = {"components": (config.length, width), "keys": (width,), "attention": (width,)}
        result = {}
        for name, name_key in zip(shapes, jax.random.split(key, len(shapes)), strict=True):
            before = prompts.get(name, jnp.zeros((layers, config.pool, *shapes[name])))
            flat = before.reshape(layers, config.pool, -1)
            rows = _with_rows(name_key, flat, np.int32(index), np.int32(self.rows))
            result[name] = rows.reshape(before.shape)
        return result

    def attach(
        self,
        prompts: Prompts,
        query: Float[Array, "B D"],
        task: Int[Array, ""],
        is_training: bool,
    ) -> Attached:
        """Compute the weighted sums of the components of all tasks up to `task`; only the
        components of `task` have a gradient."""
        row = jnp.arange(self.config.pool)
        is_used = row < (task + 1) * self.rows
        is_current = row >= task * self.rows
        prefixes = {}
        for place, layer in enumerate(self.config.layers):
            arrays = learning_only(
                is_current, {name: values[place] for name, values in prompts.items()}
            )
            weights = component_weights(query, arrays["attention"], arrays["keys"]) * is_used
            prefixes[layer] = halves(
                jnp.einsum("bm,mld->bld", weights, arrays["components"], precision="highest")
            )
        return Attached(prefixes, jnp.zeros(len(query)))

    def num_params(self, index: int) -> tuple[int, int]:
        """Return the number of trained parameters and the number of added parameters. Both numbers
        count the components, keys and attention vectors of one task."""
        config = self.config
        num = len(config.layers) * self.rows * (config.length + 2) * self.vit.width
        return num, num

    def added_flops(self) -> dict[str, int]:
        """Return the FLOPs of attention to the prefixes, of the cosines between queries and keys,
        and of the weighted sums of the components."""
        config = self.config
        attention = prefix_flops(self.vit, config.length // 2, len(config.layers))
        sums = 2 * len(config.layers) * config.pool * self.vit.width * (2 + config.length)
        return {"attention": attention, "executed": attention + sums}


def component_weights(
    query: Float[Array, "B D"], attention: Float[Array, "M D"], keys: Float[Array, "M D"]
) -> Float[Array, "B M"]:
    """Compute cos(q * A_m, K_m) for each image and component.

    Two matrix products avoid an array `[B, M, D]`.
    """
    # <q * A, K> = <q, A * K> and |q * A|^2 = <q^2, A^2>
    inner = jnp.matmul(query, (attention * keys).T, precision="highest")
    squares = jnp.matmul(query**2, (attention**2).T, precision="highest")
    # Rows of future tasks are zero; adding 1e-24 keeps the gradients of the roots finite.
    return inner / jnp.sqrt(squares + 1e-24) / jnp.sqrt((keys**2).sum(-1) + 1e-24)


@deterministic_jit
def _with_rows(key, before, index, num):
    """Add the rows of task `index` to `before` `[layers, M, F]`: samples of N(0, 1) minus their
    projections on all earlier rows. Each new row is scaled to unit length."""
    begin = index * num
    pool = before.shape[1]
    sampled = jax.random.normal(key, before.shape)

    def next_row(row, rows):
        earlier = rows * (jnp.arange(pool) < row)[:, None]
        new = jax.lax.dynamic_index_in_dim(sampled, row, axis=1, keepdims=False)

        def orthogonal(earlier, new):
            squares = (earlier**2).sum(-1)
            along = jnp.matmul(earlier, new, precision="highest") / jnp.where(
                squares > 0, squares, 1.0
            )
            rest = new - jnp.matmul(along, earlier, precision="highest")
            # If the earlier rows span the whole space, `rest` is only a rounding error, so the
            # sampled row `new` is used instead.
            rest = jnp.where(jnp.linalg.norm(rest) > 1e-3 * jnp.linalg.norm(new), rest, new)
            return rest / jnp.linalg.norm(rest)

        return rows.at[:, row].set(jax.vmap(orthogonal)(earlier, new))

    return jax.lax.fori_loop(begin, begin + num, next_row, before)
