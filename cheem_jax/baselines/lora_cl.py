"""LoRA-CL: a low-rank pair per task and block; centroids infer the task ID.

LoRA-CL is CHEEM with the op Adapt in every block and without search. In each block, one layer is
adapted (the plastic layer): it computes y = W h + b + B A h with the pretrained W and b. The
parameters of a task do not depend on the task's position in the stream. Low-rank pairs follow Hu et
al., "LoRA: Low-Rank Adaptation of Large Language Models", ICLR 2022; the continual learner is a
baseline of the CHEEM paper.

LoRA fine-tuning is an upper bound in the CHEEM paper's tables, because it is given the task ID of
each image. Its networks are identical to those of LoRA-CL with the same seed. Its FLOPs are the
FLOPs of a plain pass, because the pairs can be merged into the backbone.

With `op="new"`, every block has the op New instead of Adapt: each task trains a full copy of all
plastic layers. No architecture of CHEEM's search adds more parameters.
"""

import dataclasses
import functools
from typing import Any, ClassVar, Literal

import numpy as np

from cheem_jax.backbone.flops import backbone_flops
from cheem_jax.baselines.baseline import at_least_one
from cheem_jax.cheem.config import OpSettings
from cheem_jax.cheem.expert_memory import ExpertMemory, Underway, router_arrays
from cheem_jax.cheem.supernet import Supernet
from cheem_jax.cheem.training import constant_draws, fit
from cheem_jax.core.architecture import Choice, encode
from cheem_jax.core.keys import Keys, Phase, next_power_of_two, task_number
from cheem_jax.core.pool import TaskMemory, grow
from cheem_jax.core.routing import RouterConfig
from cheem_jax.core.settings import FitConfig, Placement, check_types
from cheem_jax.data.task import Task
from cheem_jax.engine.feed import Budget, cache_tokens, feed_images
from cheem_jax.run.method import FrozenNetworks
from cheem_jax.run.results import counted_since
from cheem_jax.run.session import Session
from cheem_jax.run.training import images_left


@dataclasses.dataclass(frozen=True)
class LoraClConfig:
    """Settings of LoRA-CL. The 20 epochs are inferred from the hours per task in the CHEEM paper.
    Rank 40 is inferred from the FLOPs in the paper, which count low-rank pairs that are not merged
    into the pretrained weights."""

    name: ClassVar[str] = "lora_cl"
    placement: Placement = "mlp_down"
    """Layer that is adapted in every block."""
    op: Literal["adapt", "new"] = "adapt"
    """Op of every block: `adapt` trains a low-rank pair; `new` trains a full copy of the pretrained
    layer, with 0.3 of the learning rate."""
    rank: int = 40
    """Rank of the pairs; for ViT-B, the paper's FLOPs correspond to a rank of 42 to 47."""
    truncated_rank: int | None = None
    """Rank to which trained pairs are truncated, as in CHEEM; None stores them as trained."""
    fit: FitConfig = FitConfig(epochs=20)
    router: RouterConfig = RouterConfig()
    batch_size: int = 64

    def __post_init__(self) -> None:
        check_types(self)
        at_least_one(self, "batch_size", "rank")
        OpSettings(self.rank, self.truncated_rank)  # raises an error for an invalid rank
        if self.op == "new" and self.truncated_rank is not None:
            raise ValueError(
                f"op new has no low-rank pairs that truncated_rank {self.truncated_rank} could"
                " truncate; leave out truncated_rank, or take op adapt"
            )

    @property
    def ops(self) -> OpSettings:
        """Settings of the ops."""
        return OpSettings(self.rank, self.truncated_rank, new_init="copy", new_rate=0.3)


class LoraCl(ExpertMemory):
    """The LoRA-CL learner."""

    name = "lora_cl"

    def __init__(self, networks: FrozenNetworks, config: LoraClConfig, keys: Keys, num_tasks: int):
        executor, _, features = networks
        super().__init__(
            executor,
            features,
            config.router,
            rank=config.ops.stored_rank,
            batch_size=config.batch_size,
        )
        self.config, self.keys = config, keys

    def learn(self, task: Task, session: Session) -> dict[str, Any]:
        """Train the op of each block and a head, then fit the centroids of the task."""
        config = self.config
        executor = self.executor
        counters = executor.counters()
        keys = self.keys
        number = task_number(task.name)
        num = len(task.train.labels)
        batch_size = self.batch_size
        underway = Underway.resume(session.saved)
        session.saved = None  # otherwise, the saved arrays stay in memory during training
        budget = Budget(executor.budget)
        experts = [[self.dense(block, 0)] for block in range(executor.num_blocks)]
        key = keys.at(number, Phase.METHOD_INIT)
        network = Supernet(key, experts, len(task.classes), config.ops)
        fitting = underway.fitting("finetune", network)
        choice = Choice("adapt", 0) if config.op == "adapt" else Choice("new")
        architecture = (choice,) * len(experts)
        train = feed_images(executor, task.train.images, budget)
        with session.phase("keep", 0, underway.saved) as advance:
            train = cache_tokens(
                "training images",
                executor,
                train,
                num,
                (),
                batch_size=batch_size,
                budget=budget,
                advance=advance,
            )
        num_images = images_left(fitting.progress, config.fit, num, batch_size)
        with session.phase("train", num_images, underway.saved) as advance:
            fitting = fit(
                executor,
                fitting,
                train,
                task.train.labels,
                draws=constant_draws(encode(architecture, network.sizes)),
                config=config.fit,
                batch_size=batch_size,
                order_key=keys.at(number, Phase.METHOD_ORDER),
                advance=advance,
                on_step=functools.partial(underway.keep, "finetune"),
            )
        index = len(self.memory.tasks)
        learned = network.learned(fitting.state, architecture)
        pool, used = grow(self.memory.pool, architecture, learned, index)
        self.remember(
            task,
            pool=pool,
            architecture=architecture,
            experts=used,
            head=network.trained_head(fitting.state),
            # The mean CLS tokens of the task are 0, because only CHEEM's search would use them.
            means=np.zeros((1, executor.config.width), np.float32),
            seed=keys.seed_at(number, Phase.CENTROIDS),
            session=session,
        )
        return {
            **self.costs(index),
            "pool": self.memory.history(),
            "losses": fitting.progress.losses,
            "skipped_steps": fitting.progress.skipped,
            "not_kept": budget.refused,
            "engine": counted_since(counters, executor.counters()),
            "seconds": session.seconds,
        }

    def stored_arrays(self, task: TaskMemory) -> list[np.ndarray]:
        return [] if self.needs_task_id else router_arrays(task)

    def bytes_needed(self, task: Task) -> int:
        """Estimate the bytes on disk for the next task.

        The estimate has three parts: the task's checkpoint with the ops and the head, two rolling
        checkpoints with these parameters and Adam's moments, and the router's statistics.
        """
        weight, bias = self.memory.pool[0][0].params
        is_new = self.config.op == "new"
        op = weight.size + bias.size if is_new else self.config.rank * sum(weight.shape)
        head = (self.executor.config.width + 1) * next_power_of_two(len(task.classes))
        numbers = self.executor.num_blocks * op + head
        return 4 * ((2 * 3 + 1) * numbers + self.router_numbers(task))


@dataclasses.dataclass(frozen=True)
class LoraFinetuneConfig(LoraClConfig):
    """Settings of LoRA fine-tuning; the settings of the router have no effect."""

    name: ClassVar[str] = "lora_finetune"


class LoraFinetune(LoraCl):
    """LoRA-CL with the task ID given."""

    name = "lora_finetune"
    needs_task_id = True

    def costs(self, index: int) -> dict[str, Any]:
        """Report the FLOPs per image of a plain pass: the method does not use the router, and
        low-rank pairs can be merged into the backbone."""
        plain = [
            backbone_flops(self.executor.config, count_attention=count) for count in (False, True)
        ]
        return {
            **super().costs(index),
            "flops": plain[0],
            "flops_method": plain[0],
            "flops_explicit": plain[1],
        }
