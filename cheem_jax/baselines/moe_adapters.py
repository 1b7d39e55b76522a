"""MoE-Adapters: experts parallel to every FFN, shared by all tasks; a router per task gives each
image two of them.

An expert is a small adapter, D -> r (ReLU) -> D, on the tokens after a block's attention half. A
task's router reads the CLS token there; the softmax of its two largest logits weighs two experts
for all tokens of the image. After a task, the two experts that its images used most are frozen in
every block: later tasks use them, and train others. The inferred task is the one whose auto-encoder
reconstructs a light network's features best. Yu et al., "Boosting Continual Learning of
Vision-Language Models via Mixture-of-Experts Adapters", CVPR 2024; here, as in the paper's
comparison, with linear heads instead of texts. Task-ID inference by auto-encoders after Aljundi,
Chakravarty, Tuytelaars, "Expert Gate: Lifelong Learning with a Network of Experts", CVPR 2017.
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
from cheem_jax.baselines.adapters import Bottleneck, executed_adapter_flops
from cheem_jax.baselines.baseline import (
    MUCH_MEMORY,
    OwnHeads,
    at_least_one,
    expect,
    params_report,
    pass_costs,
    positive,
    shares,
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
from cheem_jax.core.pool import FAR, Head
from cheem_jax.core.settings import Advance, FitConfig, Precision
from cheem_jax.data.task import Task
from cheem_jax.engine.batches import batches, num_batches
from cheem_jax.engine.passes import unwatched
from cheem_jax.run.method import Encoder

ACTIVE = 2
"""Experts per image and block."""
NOISE_FLOOR = 0.01
"""Smallest standard deviation of the noise on a router's logits."""


@dataclasses.dataclass(frozen=True)
class AutoEncoderConfig:
    """How one auto-encoder is trained; defaults as in MoE-Adapters."""

    hidden: int = 100
    """Width of the hidden layer."""
    iterations: int = 300
    """Steps of Adam per task."""
    learning_rate: float = 0.01
    """Adam's rate at the start; divided by ten after every `decay_every` epochs."""
    decay_every: int = 10
    """Epochs at one rate."""
    batch_size: int = 64

    def __post_init__(self) -> None:
        at_least_one(self, "hidden", "iterations", "decay_every", "batch_size")
        positive(self, "learning_rate")


@dataclasses.dataclass(frozen=True)
class MoeAdaptersConfig:
    """MoE-Adapters as the paper's FLOPs imply it; options name what the official code does."""

    name: ClassVar[str] = "moe_adapters"
    experts: int = 22
    """Experts in each block, for all tasks together; with `freeze` 2 they are enough for eleven
    tasks."""
    bottleneck: int = 8
    """Rank of an expert: two of 8 cost what the paper's FLOPs leave room for (official: 64)."""
    freeze: int = 2
    """Most used experts of each block that are frozen after a task, some of which may be frozen
    already; 0: none, as in the official class-incremental variant."""
    scale: float = 0.1
    """Factor of the experts' output."""
    dropout: float = 0.1
    """Share of an expert's hidden values that a training step leaves out."""
    label_smoothing: float = 0.0
    """Share of the target that is spread over the task's classes; 0: plain cross-entropy, as all
    methods of the paper (official, with texts: 0.2)."""
    autoencoder: AutoEncoderConfig = AutoEncoderConfig()
    """The auto-encoders that infer the task ID."""
    fit: FitConfig = FitConfig(epochs=20)
    batch_size: int = 64

    def __post_init__(self) -> None:
        at_least_one(self, "batch_size", "bottleneck")
        expect(
            self, "experts", self.experts >= ACTIVE, f"at least {ACTIVE}, as an image gets {ACTIVE}"
        )
        expect(
            self,
            "freeze",
            0 <= self.freeze <= self.experts,
            f"0 (never)..{self.experts}, the experts",
        )
        positive(self, "scale")
        shares(self, "dropout", "label_smoothing")


class Gates(NamedTuple):
    """The experts of each image of a batch in one block, and their weights."""

    chosen: Int[Array, "B k"]
    weights: Float[Array, "B k"]


class Training(NamedTuple):
    """The noise of training, of all blocks or of one: on the router's logits, and the hidden values
    that are kept."""

    noise: Float[Array, "*L D E"]
    normal: Float[Array, "*L B E"]
    kept: Bool[Array, "*L B N H"] | None


class MoeTask(NamedTuple):
    """A learned task's router weights, head and auto-encoder."""

    router: Float[np.ndarray, "L D E"]
    head: Head
    autoencoder: Bottleneck


class MoeState(NamedTuple):
    """The experts of all tasks, and which of them later tasks use but do not train."""

    experts: Bottleneck
    frozen: Bool[np.ndarray, "L E"]


class MoeAdapters(OwnHeads):
    """See the module. The auto-encoders read the router's features: AlexNet's conv5 in the
    paper."""

    Learned, State = MoeTask, MoeState
    config: MoeAdaptersConfig

    def build(self) -> None:
        executor = self.executor
        depth = self.executor.config.depth
        config = self.config
        self.encoder = self.router_features.encoder
        self.autoencoders = AutoEncoders(self.encoder.width, config.autoencoder, jit=executor.jit)

        def adapted(experts, routers, leaves, inputs, training: Training | None = None):
            """Features `[B, D]` and the experts chosen `[B, L, k]`; `routers` are those of all
            tasks."""
            vit = executor.vit_of(leaves)
            chosen = []

            def adapter(block: int, z: Float[Array, "B N D"]) -> Float[Array, "B N D"]:
                own, noise = (
                    jax.tree.map(operator.itemgetter(block), part) for part in (experts, training)
                )
                gates = gate(routers[:, block], summary(z, executor.config), inputs["tasks"], noise)
                chosen.append(gates.chosen)
                kept = None if noise is None or noise.kept is None else noise.kept[:, : z.shape[1]]
                precision = executor.config.precision
                return config.scale * mixture(
                    own, gates, z, kept, dropout=config.dropout, precision=precision
                )

            adapters = {block: functools.partial(adapter, block) for block in range(depth)}
            features = vit.features(vit.run_blocks(vit.embed(inputs["images"]), adapters=adapters))
            return features, jnp.stack(chosen, axis=1)

        def loss(learned, fixed, batch: FitBatch):
            (experts, router, noise, head), (leaves, frozen, num) = learned, fixed
            images = batch.inputs["images"]
            training = sample(batch.key, noise, len(images), executor.config.num_tokens, config)
            inputs = {"images": images, "tasks": jnp.zeros(len(images), jnp.int32)}
            features, _ = adapted(
                learning_only(~frozen, experts), router[None], leaves, inputs, training
            )
            return smoothed_cross_entropy(
                head_logits(head, features),
                batch.labels,
                batch.weights,
                num,
                config.label_smoothing,
            )

        self.fitter = Fitter(loss, jit=executor.jit, layout=executor.layout)
        self._adapted = executor.jit(adapted)

    def check(self, tasks: Sequence[Task]) -> list[str]:
        said = []
        config = self.config
        enough = (config.experts - ACTIVE) // config.freeze + 1 if config.freeze else len(tasks)
        if len(tasks) > enough:
            said.append(
                f"{config.freeze} of {config.experts} experts per block may be frozen after each"
                f" task, so from task {enough + 1} of {len(tasks)} on fewer than {ACTIVE} may be"
                " left to train"
            )
        most = max((len(task.train.labels) + len(task.val.labels) for task in tasks), default=0)
        kept = 4 * self.encoder.width * (most + sum(len(task.test.labels) for task in tasks))
        if kept > MUCH_MEMORY:
            said.append(
                f"features of {self.encoder.name}, {self.encoder.width} per image, may take "
                f"{kept / 2**30:.1f} GiB of memory"
            )
        return said

    def start(self, task: Task) -> tuple[Bottleneck, np.ndarray, np.ndarray, Head]:
        """All experts, a router, weights for its noise, and a head."""
        vit = self.executor.config
        key = self.key(task, Phase.METHOD_INIT, Init.LEARNED)
        experts = self.known.experts if self.known else init_experts(key, vit, self.config)
        router = noise = np.zeros((vit.depth, vit.width, self.config.experts), np.float32)
        key = self.key(task, Phase.METHOD_INIT, Init.HEAD)
        return experts, router, noise, grow_head(key, None, vit.width, 0, len(task.classes))

    def learn_task(self, task: Task, fitting: Fitting) -> dict[str, Any]:
        """Train the experts that are not frozen, a router and a head; freeze the most used; fit an
        auto-encoder."""
        config = self.config
        vit = self.executor.config
        num = len(task.classes)
        num_images = len(task.train.labels)
        before = self.known.frozen if self.known else np.zeros((vit.depth, config.experts), bool)
        self.train(fitting, task, (self.executor.leaves, before, np.int32(num)))
        experts, router, _, head = fitting.learned
        with fitting.phase("experts", num_images) as advance:
            tasks = np.zeros(num_images, np.int32)
            _, chosen = self._over(
                experts, np.asarray(router)[None], task.train.images, tasks, advance
            )
            # how many images got each expert of each block
            uses = (chosen[..., None] == np.arange(config.experts)).sum(axis=(0, 2))
        with fitting.session.phase("features"):
            features = self.router_features(task.train.images)
        with fitting.phase("router", self.autoencoders.images(num_images)) as advance:
            init_key, order_key = (
                self.key(task, Phase.METHOD_INIT, Init.EXTRA),
                self.key(task, Phase.ALIGNMENT_ORDER),
            )
            autoencoder, errors = self.autoencoders.fit(init_key, order_key, features, advance)
        all_experts = sum(leaf.size for leaf in experts)
        added = router.size + (0 if self.known else all_experts)
        self.known = MoeState(experts, freeze(before, uses, config.freeze))
        self.tasks.append(MoeTask(np.asarray(router), cut(head, num), autoencoder))
        own = (vit.width + 1) * num + sum(leaf.size for leaf in autoencoder)
        # the router is trained with weights for its noise, which are dropped after training
        learned = int((~before).sum()) * (all_experts // before.size) + 2 * router.size + own
        return {
            **params_report(vit, added=added, learned=learned, stored=added + own),
            "experts_free": (~before).sum(axis=1).tolist(),
            "experts_frozen": [np.flatnonzero(row).tolist() for row in self.known.frozen & ~before],
            "expert_uses": uses.tolist(),
            "router_errors": errors,
        }

    def costs(self) -> dict[str, int]:
        """FLOPs per image after the whole stream: F0, the encoder, all tasks' auto-encoders, two
        experts per block."""
        vit = self.executor.config
        num = max(self.num_tasks, len(self.tasks))
        return moe_costs(vit, self.encoder, self.config, num, len(self.classes.classes[-1]))

    def bytes_beside(self, task: Task) -> int:
        """See `TrainedBaseline.bytes_beside`: an auto-encoder, whose biases are fewer than its
        weights."""
        return 4 * 4 * self.encoder.width * self.config.autoencoder.hidden

    def route(self, features: Float[np.ndarray, "N E"]) -> Int[np.ndarray, "N"]:
        """See `OwnHeads.route`: the task of the auto-encoder with the lowest error."""
        known = [task.autoencoder for task in self.tasks]
        return self.autoencoders.route(
            features, self.placed(known), batch_size=self.config.batch_size
        )

    def features_by(self, images: Images, tasks: Int[np.ndarray, "N"]) -> Float[np.ndarray, "N D"]:
        routers = np.zeros(
            (next_power_of_two(len(self.tasks)), *self.tasks[0].router.shape), np.float32
        )
        routers[: len(self.tasks)] = [task.router for task in self.tasks]
        return self._over(self.known.experts, routers, images, tasks)[0]

    def _over(
        self, experts, routers, images: Images, tasks, advance=unwatched
    ) -> tuple[np.ndarray, np.ndarray]:
        """Features `[N, D]` and chosen experts `[N, L, k]`; `routers` `[T, L, D, E]` are indexed by
        `tasks` `[N]`."""
        inputs = Inputs(images, tasks=tasks)
        return self.over(
            self._adapted, inputs, experts, routers, self.executor.leaves, advance=advance
        )


def init_experts(key: jax.Array, vit: ViTConfig, config: MoeAdaptersConfig) -> Bottleneck:
    """Experts whose output is 0: down uniform within 1 / sqrt(D), all else 0."""
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
    """The noise of a training step on `num` images."""
    normal_key, kept_key = jax.random.split(key)
    normal = jax.random.normal(normal_key, (len(noise), num, config.experts))
    hidden = (len(noise), num, num_tokens, ACTIVE * config.bottleneck)
    kept = jax.random.bernoulli(kept_key, 1 - config.dropout, hidden) if config.dropout else None
    return Training(noise, normal, kept)


def gate(
    routers: Float[Array, "T D E"],
    token: Float[Array, "B D"],
    tasks: Int[Array, "B"],
    training: Training | None = None,
) -> Gates:
    """The experts of the two largest logits (ties: the first), weighted by the softmax of these
    two.

    `token` is the CLS token, `tasks` selects each image's router; training adds noise of a learned
    deviation.
    """
    # float32 products on every device, because a rounded logit may select another expert
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
    kept: Bool[Array, "B N H"] | None = None,
    *,
    dropout: float = 0.0,
    precision: Precision = "float32",
) -> Float[Array, "B N D"]:
    """The weighted sum of each image's experts; no other expert runs. Hidden values that are not
    `kept` are dropped."""
    down, down_bias, up, up_bias = (leaf[gates.chosen] for leaf in experts)  # [B, k, ...]
    num, k, rank, width = down.shape
    hidden = dot(z, down.reshape(num, k * rank, width).mT, precision) + down_bias.reshape(
        num, 1, k * rank
    )
    hidden = jax.nn.relu(hidden)
    if kept is not None:
        hidden = jnp.where(kept, hidden / (1 - dropout), 0.0)
    hidden = hidden * jnp.repeat(gates.weights, rank, axis=1)[:, None]
    bias = (gates.weights[..., None] * up_bias).sum(axis=1)
    return dot(hidden, up.reshape(num, k * rank, width), precision) + bias[:, None]


def smoothed_cross_entropy(
    logits: Float[Array, "B P"],
    labels: Int[Array, "B"],
    weights: Float[Array, "B"],
    num,
    smoothing: float,
) -> Float[Array, ""]:
    """Cross-entropy over the first `num` columns, with a share of the target spread over all of
    them."""
    sharp = local_cross_entropy(logits, labels, weights, 0, num)
    if not smoothing:
        return sharp
    taken = jnp.arange(logits.shape[-1]) < num
    logs = jax.nn.log_softmax(jnp.where(taken, logits, FAR))
    spread = -jnp.where(taken, logs, 0.0).sum(axis=-1) / num
    return (1 - smoothing) * sharp + smoothing * (spread * weights).sum()


def freeze(
    frozen: Bool[np.ndarray, "L E"], uses: Int[np.ndarray, "L E"], num: int
) -> Bool[np.ndarray, "L E"]:
    """The frozen experts, with the `num` most used ones of each block (ties: the first) that any
    image used."""
    places = np.argsort(-uses, axis=1, kind="stable").argsort(axis=1)
    return frozen | ((places < num) & (uses > 0))


class AutoEncoders:
    """The compiled functions that fit and compare auto-encoders of one width; the caller keeps what
    is learned."""

    def __init__(self, width: int, config: AutoEncoderConfig, *, jit: Callable[..., Any] = jax.jit):
        self.width, self.config = width, config
        self._init, self._errors = (
            jit(lambda key: init_autoencoder(key, width, config.hidden)),
            jit(errors),
        )

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
        """A task's auto-encoder, and its mean error per epoch, of which the last may be partial.

        Raises FloatingPointError for a non-finite error.
        """
        config = self.config
        num = len(features)
        steps = num_batches(num, config.batch_size)
        no_labels = np.zeros(config.batch_size, np.int32)
        fitting = self.fitter.begun(self._init(init_key))
        losses = list[float]()
        for epoch in range(-(-config.iterations // steps)):
            # MoE-Adapters' step schedule; the fit ends after `iterations` steps, also within an
            # epoch
            rate = np.float32(config.learning_rate * 0.1 ** (epoch // config.decay_every))
            order = order_at(key_at(order_key, epoch), num)
            left = config.iterations - epoch * steps
            running = []
            for piece in itertools.islice(batches(order, config.batch_size), left):
                batch = FitBatch(
                    {"features": features[piece.rows]}, no_labels, piece.mask / piece.mask.sum()
                )
                running.append(self.fitter.step(fitting, rate, None, batch))
                advance(piece.size)
            losses.append(float(np.mean(jax.device_get(running))))
            if not math.isfinite(losses[-1]):
                raise FloatingPointError(
                    f"non-finite error of an auto-encoder in epoch {epoch + 1}; check that the"
                    " router's features are finite, or set a learning rate below"
                    f" {config.learning_rate}"
                )
        return fitting.learned, losses

    def images(self, num: int) -> int:
        """Images that a fit on `num` of them reads in all its iterations."""
        epochs, rest = divmod(self.config.iterations, num_batches(num, self.config.batch_size))
        return epochs * num + min(rest * self.config.batch_size, num)

    def route(
        self, features: Float[np.ndarray, "N E"], learned: Sequence[Bottleneck], *, batch_size: int
    ) -> Int[np.ndarray, "N"]:
        """The task of each image: that of the lowest error (ties: the lowest task)."""

        def of_all(read: dict[str, Any]) -> Float[np.ndarray, "B T"]:
            values = jnp.asarray(read["features"])
            return np.stack([np.asarray(self._errors(one, values)) for one in learned], axis=1)

        found = over_batches(of_all, Inputs(features=features), batch_size=batch_size)
        return found.argmin(axis=1).astype(np.int32)


def init_autoencoder(key: jax.Array, width: int, hidden: int) -> Bottleneck:
    """Weights uniform within 1 / sqrt(inputs), biases 0."""
    down_key, up_key = jax.random.split(key)
    down = jax.random.uniform(down_key, (width, hidden), minval=-1.0, maxval=1.0) / math.sqrt(width)
    up = jax.random.uniform(up_key, (hidden, width), minval=-1.0, maxval=1.0) / math.sqrt(hidden)
    return Bottleneck(down, jnp.zeros(hidden), up, jnp.zeros(width))


def errors(learned: Bottleneck, features: Float[Array, "B E"]) -> Float[Array, "B"]:
    """Mean squared reconstruction error of each image's features."""
    # float32 products on every device, because errors of two tasks may be close
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
    """FLOPs per image: F0, the encoder, an auto-encoder per task, and two experts in every
    block."""
    identify = num_tasks * 2 * 2 * encoder.width * config.autoencoder.hidden
    rank = ACTIVE * config.bottleneck
    # all tasks' routers compute logits, of which an image uses its own
    routers = vit.depth * 2 * vit.width * config.experts * next_power_of_two(num_tasks)
    executed = identify + executed_adapter_flops(vit, rank) + routers
    return pass_costs(
        vit,
        num_classes,
        encoder=encoder,
        linear=identify + adapter_flops(vit, rank),
        executed=executed,
    )
