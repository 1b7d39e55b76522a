"""MoE-Adapters: all tasks share the experts parallel to every FFN. Each task has a router, which
selects two experts per image and block.

An expert is a small adapter, D -> r (ReLU) -> D, on the tokens after a block's attention half. The
input of a task's router is the CLS token at this point. The router selects the two experts with the
largest logits. All tokens of the image use these two experts, weighted by the softmax of the two
logits. After each task, up to two experts per block are frozen: the experts that the images of the
task used most. Later tasks can use frozen experts, but do not train them. A separate network
computes features of an image for task-ID inference; the inferred task is the task whose
auto-encoder reconstructs these features with the lowest error. Yu et al., "Boosting Continual
Learning of Vision-Language Models via Mixture-of-Experts Adapters", CVPR 2024; this implementation
predicts classes with linear heads instead of texts, as in the CHEEM paper's comparison. Task-ID
inference by auto-encoders follows Aljundi, Chakravarty, Tuytelaars, "Expert Gate: Lifelong Learning
with a Network of Experts", CVPR 2017.
"""

import dataclasses
import functools
import itertools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from cheem_jax.backbone.config import ViTConfig
from cheem_jax.backbone.flops import adapter_flops
from cheem_jax.backbone.vit import summary
from cheem_jax.baselines.adapters import DROPOUT, SCALE, Bottleneck, executed_adapter_flops
from cheem_jax.baselines.baseline import (
    MUCH_MEMORY,
    OwnHeads,
    TrainedBaseline,
    at_least_one,
    expect,
    params_report,
    pass_costs,
)
from cheem_jax.baselines.fitting import (
    FitBatch,
    Fitter,
    Fitting,
    Init,
    Inputs,
    learning_only,
    over_batches,
)
from cheem_jax.baselines.heads import cut, grow_head, head_logits, local_cross_entropy
from cheem_jax.core.images import Images
from cheem_jax.core.kernels import dot
from cheem_jax.core.keys import Phase, key_at, next_power_of_two, order_at
from cheem_jax.core.pool import Head
from cheem_jax.core.settings import Advance, FitConfig, Precision, check_types, no_progress
from cheem_jax.data.task import Task
from cheem_jax.engine.batches import batches, num_batches
from cheem_jax.run.method import Encoder
from cheem_jax.run.session import Session

ACTIVE = 2
"""Number of experts that an image uses in each block, and maximum number of experts that are frozen
in each block after a task."""
NOISE_FLOOR = 0.01
"""Smallest standard deviation of the noise on a router's logits."""
HIDDEN = 100
"""Width of an auto-encoder's hidden layer."""
ITERATIONS = 300
"""Number of Adam steps per auto-encoder."""
AUTOENCODER_RATE = 0.01
"""Adam's initial learning rate for an auto-encoder, divided by ten every `DECAY_EVERY` epochs."""
DECAY_EVERY = 10
AUTOENCODER_BATCH = 64


@dataclasses.dataclass(frozen=True)
class MoeAdaptersConfig:
    """Settings of MoE-Adapters, inferred from the FLOPs in the CHEEM paper."""

    name: ClassVar[str] = "moe_adapters"
    experts: int = 22
    """Number of experts per block, shared by all tasks. Each task freezes at most two experts per
    block, so 22 are sufficient for eleven tasks."""
    bottleneck: int = 8
    """Rank of an expert; the paper's FLOPs correspond to two experts of rank 8 (official: 64)."""
    fit: FitConfig = FitConfig(epochs=20)
    batch_size: int = 64

    def __post_init__(self) -> None:
        check_types(self)
        at_least_one(self, "batch_size", "bottleneck")
        expect(self, "experts", self.experts >= ACTIVE, f"at least {ACTIVE}, the number per image")


class Gates(NamedTuple):
    """Selected experts of each image in a block, and the factors by which the outputs of these
    experts are multiplied."""

    chosen: Int[Array, "B k"]
    weights: Float[Array, "B k"]


class Training(NamedTuple):
    """Noise of a training step for one block, or stacked for all blocks.

    The product of the CLS token and `noise` determines the standard deviation of the noise on each
    logit of the router. `normal` contains samples of a standard normal distribution, which are
    multiplied by these deviations. `is_kept` is the dropout mask.
    """

    noise: Float[Array, "*L D E"]
    normal: Float[Array, "*L B E"]
    is_kept: Bool[Array, "*L B N H"]


class MoeTask(NamedTuple):
    """Router weights, head and auto-encoder of a learned task."""

    router: Float[np.ndarray, "L D E"]
    head: Head
    autoencoder: Bottleneck


class MoeState(NamedTuple):
    """Experts of all tasks, and the mask of the frozen experts, which later tasks do not train."""

    experts: Bottleneck
    frozen: Bool[np.ndarray, "L E"]


class MoeAdapters(OwnHeads, TrainedBaseline):
    """The MoE-Adapters learner. The auto-encoders reconstruct the features of a separate network,
    which is AlexNet up to conv5 in the CHEEM paper."""

    Learned, State = MoeTask, MoeState
    config: MoeAdaptersConfig

    def build(self) -> None:
        executor = self.executor
        vit_config = executor.config
        self.encoder = self.router_features.encoder
        self.autoencoders = AutoEncoders(self.encoder.width, jit=executor.jit)

        def adapted(experts, routers, leaves, inputs, training: Training | None = None):
            """Compute features `[B, D]` and selected experts `[B, L, k]`; `routers` contains one
            router per task."""
            vit = executor.merge_vit(leaves)
            chosen = []

            def adapter(block: int, z: Float[Array, "B N D"]) -> Float[Array, "B N D"]:
                block_experts, noise = (
                    jax.tree.map(operator.itemgetter(block), part) for part in (experts, training)
                )
                gates = gate(routers[:, block], summary(z, vit_config), inputs["tasks"], noise)
                chosen.append(gates.chosen)
                is_kept = None if noise is None else noise.is_kept[:, : z.shape[1]]
                return SCALE * mixture(
                    block_experts, gates, z, is_kept, precision=vit_config.precision
                )

            adapters = {
                block: functools.partial(adapter, block) for block in range(vit_config.depth)
            }
            features = vit.features(vit.run_blocks(vit.embed(inputs["images"]), adapters=adapters))
            return features, jnp.stack(chosen, axis=1)

        def loss(learned, fixed, batch: FitBatch):
            (experts, router, noise, head), (leaves, frozen, num) = learned, fixed
            images = batch.inputs["images"]
            training = sample(batch.key, noise, len(images), vit_config.num_tokens, self.config)
            inputs = {"images": images, "tasks": jnp.zeros(len(images), jnp.int32)}
            experts = learning_only(~frozen, experts)
            features, _ = adapted(experts, router[None], leaves, inputs, training)
            logits = head_logits(head, features)
            return local_cross_entropy(logits, batch.labels, batch.weights, 0, num)

        self.fitter = Fitter(loss, jit=executor.jit, layout=executor.layout)
        self._adapted = executor.jit(adapted)

    def check(self, tasks: Sequence[Task]) -> list[str]:
        notes = []
        experts = self.config.experts
        enough = (experts - ACTIVE) // ACTIVE + 1
        if len(tasks) > enough:
            notes.append(
                f"up to {ACTIVE} of {experts} experts per block are frozen after each task, so"
                f" fewer than {ACTIVE} can remain trainable from task {enough + 1} of {len(tasks)}"
            )
        most = max((len(task.train.labels) + len(task.val.labels) for task in tasks), default=0)
        num_bytes = 4 * self.encoder.width * (most + sum(len(task.test.labels) for task in tasks))
        if num_bytes > MUCH_MEMORY:
            notes.append(
                f"the {self.encoder.width} features per image of {self.encoder.name} need up to"
                f" {num_bytes / 2**30:.1f} GiB of memory"
            )
        return notes

    def start(self, task: Task) -> tuple[Bottleneck, np.ndarray, np.ndarray, Head]:
        """Return all experts, and the task's initial router, noise weights and head."""
        vit = self.vit
        key = self.key(task, Phase.METHOD_INIT, Init.LEARNED)
        experts = self.state.experts if self.state else init_experts(key, vit, self.config)
        router = noise = np.zeros((vit.depth, vit.width, self.config.experts), np.float32)
        key = self.key(task, Phase.METHOD_INIT, Init.HEAD)
        return experts, router, noise, grow_head(key, None, vit.width, 0, len(task.classes))

    @property
    def frozen(self) -> Bool[np.ndarray, "L E"]:
        """Mask of the experts that the next task does not train."""
        if self.state:
            return self.state.frozen
        return np.zeros((self.vit.depth, self.config.experts), bool)

    def fixed(self, task: Task) -> Any:
        """Return the backbone, the mask of the frozen experts, and the number of the task's
        classes."""
        return self.executor.leaves, self.frozen, np.int32(len(task.classes))

    def finish(self, task: Task, fitting: Fitting, session: Session) -> dict[str, Any]:
        """Freeze the most used experts, store router and head, and fit an auto-encoder."""
        num = len(task.classes)
        images = task.train.images
        before = self.frozen
        experts, router, _, head = fitting.learned
        with session.phase("experts", len(images), fitting.saved) as advance:
            tasks = np.zeros(len(images), np.int32)
            _, chosen = self._over(experts, np.asarray(router)[None], images, tasks, advance)
            # number of images that use each expert, per block
            uses = (chosen[..., None] == np.arange(self.config.experts)).sum(axis=(0, 2))
        with session.phase("features", 0, fitting.saved) as advance:
            features = self.router_features(task.train.images, advance)
        total = self.autoencoders.images(len(images))
        with session.phase("router", total, fitting.saved) as advance:
            autoencoder, errors = self.autoencoders.fit(
                self.key(task, Phase.METHOD_INIT, Init.EXTRA),
                self.key(task, Phase.ALIGNMENT_ORDER),
                features,
                advance,
            )
        all_experts = sum(leaf.size for leaf in experts)
        added = router.size + (0 if self.state else all_experts)
        self.state = MoeState(experts, freeze(before, uses))
        self.tasks.append(MoeTask(np.asarray(router), cut(head, num), autoencoder))
        other_params = (self.vit.width + 1) * num + sum(leaf.size for leaf in autoencoder)
        # `learned` also counts the noise weights, which are trained but not stored
        learned = (
            int((~before).sum()) * (all_experts // before.size) + 2 * router.size + other_params
        )
        return {
            **params_report(self.vit, added=added, learned=learned, stored=added + other_params),
            "experts_free": (~before).sum(axis=1).tolist(),
            "experts_frozen": [np.flatnonzero(row).tolist() for row in self.state.frozen & ~before],
            "expert_uses": uses.tolist(),
            "router_errors": errors,
        }

    def costs(self) -> dict[str, int]:
        """Report the FLOPs per image after the whole stream, including the auto-encoders of all
        tasks."""
        num = max(self.num_tasks, len(self.tasks))
        num_classes = len(self.classes.classes[-1])
        return moe_costs(self.vit, self.encoder, self.config, num, num_classes)

    def bytes_beside(self, task: Task) -> int:
        """Return the bytes of an auto-encoder, estimated from its two weight matrices."""
        return 4 * 2 * self.encoder.width * HIDDEN

    def run(
        self, images: Images, task_ids: Int[np.ndarray, "N"] | None
    ) -> tuple[Int[np.ndarray, "N"], Float[np.ndarray, "N D"]]:
        tasks = self.route(self.router_features(images))
        return tasks, self.features_by(images, tasks if task_ids is None else task_ids)

    def route(self, features: Float[np.ndarray, "N E"]) -> Int[np.ndarray, "N"]:
        """Infer the task of each image: the task of the auto-encoder with the lowest error."""
        learned = self.placed([task.autoencoder for task in self.tasks])
        return self.autoencoders.route(features, learned, batch_size=self.config.batch_size)

    def features_by(self, images: Images, tasks: Int[np.ndarray, "N"]) -> Float[np.ndarray, "N D"]:
        """Compute the features of each image with the network of its task."""
        routers = np.zeros(
            (next_power_of_two(len(self.tasks)), *self.tasks[0].router.shape), np.float32
        )
        routers[: len(self.tasks)] = [task.router for task in self.tasks]
        return self._over(self.state.experts, routers, images, tasks)[0]

    def _over(
        self, experts, routers, images: Images, tasks, advance=no_progress
    ) -> tuple[np.ndarray, np.ndarray]:
        """Compute features `[N, D]` and selected experts `[N, L, k]`; `tasks` `[N]` are indices
        into `routers` `[T, L, D, E]`."""
        inputs = Inputs(images, tasks=tasks)
        return self.over(
            self._adapted, inputs, experts, routers, self.executor.leaves, advance=advance
        )


def init_experts(key: jax.Array, vit: ViTConfig, config: MoeAdaptersConfig) -> Bottleneck:
    """Initialise experts whose output is 0: `down` is uniform in +-1/sqrt(D), all other arrays are
    0."""
    shape = (vit.depth, config.experts, config.bottleneck, vit.width)
    down = jax.random.uniform(key, shape, minval=-1.0, maxval=1.0) / math.sqrt(vit.width)
    return Bottleneck(
        down, jnp.zeros(shape[:3]), jnp.zeros(shape), jnp.zeros((*shape[:2], vit.width))
    )


def sample(
    key: jax.Array,
    noise: Float[Array, "L D E"],
    num: int,
    num_tokens: int,
    config: MoeAdaptersConfig,
) -> Training:
    """Sample the noise of a training step on `num` images.

    Several devices can pad a batch to more than `batch_size` images. The padding has no noise, so
    that the noise of the other images does not depend on the number of devices.
    """
    normal_key, kept_key = jax.random.split(key)
    rows = min(num, config.batch_size)
    padding = [(0, 0), (0, num - rows)]
    normal = jax.random.normal(normal_key, (len(noise), rows, config.experts))
    hidden = (len(noise), rows, num_tokens, ACTIVE * config.bottleneck)
    is_kept = jax.random.bernoulli(kept_key, 1 - DROPOUT, hidden)
    return Training(
        noise,
        jnp.pad(normal, (*padding, (0, 0))),
        jnp.pad(is_kept, (*padding, (0, 0), (0, 0)), constant_values=True),
    )


def gate(
    routers: Float[Array, "T D E"],
    token: Float[Array, "B D"],
    tasks: Int[Array, "B"],
    training: Training | None = None,
) -> Gates:
    """Select the experts with the two largest logits (ties select the first), weighted by the
    softmax of these logits.

    `token` is the CLS token, and `tasks` selects each image's router. If `training` is not None,
    noise with a learned standard deviation is added to the logits.
    """
    # Products are float32 on every device, because a rounded logit can select a different expert.
    logits = jnp.einsum("bd,tde->bte", token, routers, precision="highest")
    logits = jnp.take_along_axis(logits, tasks[:, None, None], axis=1)[:, 0]
    if training is not None:
        deviation = (
            jax.nn.softplus(jnp.matmul(token, training.noise, precision="highest")) + NOISE_FLOOR
        )
        logits = logits + deviation * training.normal
    largest, chosen = jax.lax.top_k(logits, ACTIVE)
    return Gates(chosen, jax.nn.softmax(largest))


def mixture(
    experts: Bottleneck,
    gates: Gates,
    z: Float[Array, "B N D"],
    is_kept: Bool[Array, "B N H"] | None = None,
    *,
    precision: Precision = "float32",
) -> Float[Array, "B N D"]:
    """Compute the weighted sum of the outputs of each image's selected experts; the other experts
    are not computed.

    `z` contains the input tokens, and `is_kept` is the dropout mask.
    """
    down, down_bias, up, up_bias = (leaf[gates.chosen] for leaf in experts)  # [B, k, ...]
    num, k, rank, width = down.shape
    hidden = dot(z, down.reshape(num, k * rank, width).mT, precision)
    hidden = jax.nn.relu(hidden + down_bias.reshape(num, 1, k * rank))
    if is_kept is not None:
        hidden = jnp.where(is_kept, hidden / (1 - DROPOUT), 0.0)
    hidden = hidden * jnp.repeat(gates.weights, rank, axis=1)[:, None]
    bias = (gates.weights[..., None] * up_bias).sum(axis=1)
    return dot(hidden, up.reshape(num, k * rank, width), precision) + bias[:, None]


def freeze(
    frozen: Bool[np.ndarray, "L E"], uses: Int[np.ndarray, "L E"]
) -> Bool[np.ndarray, "L E"]:
    """Freeze the two most used experts of each block (ties select the first), except experts that
    no image used."""
    places = np.argsort(-uses, axis=1, kind="stable").argsort(axis=1)
    return frozen | ((places < ACTIVE) & (uses > 0))


class AutoEncoders:
    """Compiled functions of all auto-encoders whose input has `width` features."""

    def __init__(self, width: int, *, jit: Callable[..., Any] = jax.jit):
        self._init = jit(lambda key: init_autoencoder(key, width))
        self._errors = jit(errors)

        def loss(learned, fixed, batch: FitBatch):
            return (errors(learned, batch.inputs["features"]) * batch.weights).sum()

        self.fitter = Fitter(loss, jit=jit)

    def fit(
        self,
        init_key: jax.Array,
        order_key: jax.Array,
        features: Float[np.ndarray, "N E"],
        advance: Advance,
    ) -> tuple[Bottleneck, list[float]]:
        """Fit the auto-encoder of a task. Return the auto-encoder and its mean error in each epoch.

        Training ends after `ITERATIONS` steps, so the last epoch can be incomplete. Raises
        FloatingPointError for a non-finite error.
        """
        num = len(features)
        steps = num_batches(num, AUTOENCODER_BATCH)
        no_labels = np.zeros(AUTOENCODER_BATCH, np.int32)
        fitting = self.fitter.begin(self._init(init_key))
        losses = list[float]()
        for epoch in range(-(-ITERATIONS // steps)):
            rate = AUTOENCODER_RATE * 0.1 ** (epoch // DECAY_EVERY)
            order = order_at(key_at(order_key, epoch), num)
            rest = ITERATIONS - epoch * steps
            parts = (
                FitBatch(
                    {"features": features[piece.rows]}, no_labels, piece.mask / piece.mask.sum()
                )
                for piece in itertools.islice(batches(order, AUTOENCODER_BATCH), rest)
            )
            error = (
                f"non-finite error of an auto-encoder in epoch {epoch + 1}; check that the"
                " router's features are finite"
            )
            fitting, loss = self.fitter.epoch(fitting, rate, None, parts, advance, error)
            losses.append(loss)
        return fitting.learned, losses

    def images(self, num: int) -> int:
        """Return the number of images that all steps of `fit` process, for a task with `num`
        images."""
        epochs, rest = divmod(ITERATIONS, num_batches(num, AUTOENCODER_BATCH))
        return epochs * num + min(rest * AUTOENCODER_BATCH, num)

    def route(
        self, features: Float[np.ndarray, "N E"], learned: Sequence[Bottleneck], *, batch_size: int
    ) -> Int[np.ndarray, "N"]:
        """Infer the task of each image: the task with the lowest error (ties select the earliest
        task)."""

        def of_all(inputs: dict[str, Any]) -> Float[np.ndarray, "B T"]:
            values = jnp.asarray(inputs["features"])
            return np.stack([np.asarray(self._errors(one, values)) for one in learned], axis=1)

        all_errors = over_batches(of_all, Inputs(features=features), batch_size=batch_size)
        return all_errors.argmin(axis=1).astype(np.int32)


def init_autoencoder(key: jax.Array, width: int) -> Bottleneck:
    """Initialise an auto-encoder: the weights of a layer with n inputs are uniform in +-1/sqrt(n),
    and biases are 0."""
    down_key, up_key = jax.random.split(key)
    down = jax.random.uniform(down_key, (width, HIDDEN), minval=-1.0, maxval=1.0) / math.sqrt(width)
    up = jax.random.uniform(up_key, (HIDDEN, width), minval=-1.0, maxval=1.0) / math.sqrt(HIDDEN)
    return Bottleneck(down, jnp.zeros(HIDDEN), up, jnp.zeros(width))


def errors(learned: Bottleneck, features: Float[Array, "B E"]) -> Float[Array, "B"]:
    """Compute the mean squared reconstruction error of each image's features."""
    # Products are float32 on every device, because the errors of two tasks can be close.
    product = functools.partial(jnp.matmul, precision="highest")
    inputs = jax.nn.sigmoid(features)
    hidden = jax.nn.relu(product(inputs, learned.down) + learned.down_bias)
    reconstructed = jax.nn.sigmoid(product(hidden, learned.up) + learned.up_bias)
    return ((reconstructed - inputs) ** 2).mean(axis=-1)


def moe_costs(
    vit: ViTConfig,
    encoder: Encoder,
    config: MoeAdaptersConfig,
    num_tasks: int,
    num_classes: int = 0,
) -> dict[str, int]:
    """Report the FLOPs per image: a pass of the plain backbone, the encoder, an auto-encoder per
    task, and two experts per block."""
    identify = num_tasks * 2 * 2 * encoder.width * HIDDEN
    rank = ACTIVE * config.bottleneck
    # The routers of all tasks compute logits, although an image uses only the logits of one router.
    routers = vit.depth * 2 * vit.width * config.experts * next_power_of_two(num_tasks)
    executed = identify + executed_adapter_flops(vit, rank) + routers
    return pass_costs(
        vit,
        num_classes,
        encoder=encoder,
        linear=identify + adapter_flops(vit, rank),
        executed=executed,
    )
