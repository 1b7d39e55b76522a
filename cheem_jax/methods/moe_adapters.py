"""MoE-Adapters: experts beside every FFN that all tasks share, of which a router per task gives each image two.

An expert is a small adapter, D -> r (ReLU) -> D, on the tokens after a block's attention half. A task's router reads
the class token there; its two largest logits, through a softmax, weigh two experts for all tokens of the image. After a
task the two experts that its images used most are frozen in every block: later tasks use them, and change others.
Auto-encoders of a light network's features name the task. Yu et al., "Boosting Continual Learning of Vision-Language
Models via Mixture-of-Experts Adapters", CVPR 2024; here, as in the paper's comparison, with linear heads, not texts.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from cheem_jax.backbone.config import ViTConfig
from cheem_jax.backbone.vit import Adapter
from cheem_jax.checkpoint import load_task, load_tasks, named, save_task, saved_tasks, task_directory
from cheem_jax.data.task import Task
from cheem_jax.execution.executor import Executor
from cheem_jax.execution.inference import Inferred
from cheem_jax.flops import adapter_flops, backbone_flops, backbone_params, executed_backbone_flops
from cheem_jax.images import Images
from cheem_jax.kernels import Precision, dot
from cheem_jax.keys import Keys, Phase, next_power_of_two
from cheem_jax.methods.autoencoders import (
    AutoEncoder,
    AutoEncoderConfig,
    AutoEncoders,
    autoencoder_flops,
    autoencoder_params,
)
from cheem_jax.methods.fitting import Batch, Fitter, Inputs, left, over_batches
from cheem_jax.methods.heads import FAR, classes_by_task, cut, grow_head, head_logits, local_cross_entropy
from cheem_jax.methods.method import Answers, Clock, Encoder, FrozenFeatures, Running, check_given
from cheem_jax.methods.prompting import saved
from cheem_jax.pool import Head
from cheem_jax.training import FitConfig, check_batch_size

ACTIVE = 2
"""Experts that an image gets in every block."""
NOISE_FLOOR = 0.01
"""Least standard deviation of the noise on a router's logits."""
MUCH_MEMORY = 4 * 2**30
"""Bytes of cached features from which on `check` speaks of them."""


@dataclasses.dataclass(frozen=True)
class MoeAdaptersConfig:
    """MoE-Adapters as the paper's comparison seems to have run it; options name what the official code does."""

    name: ClassVar[str] = "moe_adapters"
    experts: int = 22
    """Experts in each block, for all tasks together; with `freeze` 2 they are enough for eleven tasks."""
    bottleneck: int = 8
    """Rank of an expert: two of 8 cost what the paper's FLOPs leave room for (official: 64)."""
    freeze: int = 2
    """Experts of each block, those its images used most, that a task may freeze; some may be frozen already. 0: never,
    as in the official class-incremental variant."""
    scale: float = 0.1
    """Factor of what experts give."""
    dropout: float = 0.1
    """Share of an expert's hidden values that a training step leaves out."""
    label_smoothing: float = 0.0
    """Share of the target that is spread over the task's classes; 0, the cross-entropy of all of the paper's methods
    (official, against texts: 0.2)."""
    autoencoder: AutoEncoderConfig = AutoEncoderConfig()
    """What names the task of an image."""
    fit: FitConfig = FitConfig(epochs=20)
    batch_size: int = 64

    def __post_init__(self) -> None:
        if self.experts < ACTIVE:
            raise ValueError(f"experts is {self.experts}; expected {ACTIVE} or more, as an image gets {ACTIVE}")
        if self.bottleneck < 1:
            raise ValueError(f"bottleneck is {self.bottleneck}; an expert needs a rank of at least 1")
        if not 0 <= self.freeze <= self.experts:
            raise ValueError(f"freeze is {self.freeze} of {self.experts} experts; expected 0 (never)..{self.experts}")
        if not self.scale > 0:
            raise ValueError(f"scale is {self.scale}; expected a positive number")
        for name in ("dropout", "label_smoothing"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; expected a share in [0, 1)")
        check_batch_size(self.batch_size)


class Experts(NamedTuple):
    """The experts of all blocks (with a first axis L), or of one."""

    down: Float[Array, "*L E r D"]
    down_bias: Float[Array, "*L E r"]
    up: Float[Array, "*L E r D"]
    up_bias: Float[Array, "*L E D"]


class Gates(NamedTuple):
    """Which experts each image of a batch gets in one block, and their weights."""

    chosen: Int[Array, "B k"]
    weights: Float[Array, "B k"]


class Training(NamedTuple):
    """What only training adds, all blocks drawn at once: noise on the logits and hidden values that stay."""

    noise: Float[Array, "*L D E"]
    normal: Float[Array, "*L B E"]
    kept: Bool[Array, "*L B N H"] | None


class MoeTask(NamedTuple):
    """What a task keeps of its own."""

    name: str
    classes: tuple[str, ...]
    router: Float[np.ndarray, "L D E"]
    head: Head
    autoencoder: AutoEncoder


class MoeAdapters:
    """See the module. `router_features` feed the auto-encoders: AlexNet's conv5 in the paper; default: the backbone's
    own."""

    name = "moe_adapters"

    def __init__(
        self,
        executor: Executor,
        features: FrozenFeatures,
        config: MoeAdaptersConfig,
        keys: Keys,
        num_tasks: int,
        *,
        router_features: FrozenFeatures | None = None,
    ):
        self.executor, self.config, self.keys, self.num_tasks = executor, config, keys, num_tasks
        self.router_features = features if router_features is None else router_features
        self.autoencoders = AutoEncoders(self.encoder.width, config.autoencoder, jit=executor.jit)
        depth = executor.config.depth
        self.experts: Experts | None = None
        self.frozen: Bool[np.ndarray, "L E"] = np.zeros((depth, config.experts), bool)
        self.tasks: list[MoeTask] = []

        def adapted(experts, routers, leaves, images, tasks, training: Training | None = None):
            """Features `[B, D]` and the experts chosen `[B, L, k]`; `routers` are those of all tasks."""
            vit, chosen = executor.vit_of(leaves), {}

            def adapter_at(block: int) -> Adapter:
                own = jax.tree.map(lambda leaf: leaf[block], experts)

                def adapter(z: Float[Array, "B N D"]) -> Float[Array, "B N D"]:
                    drawn = None if training is None else jax.tree.map(lambda leaf: leaf[block], training)
                    gates = gate(routers[:, block], z[:, 0], tasks, drawn)
                    chosen[block] = gates.chosen
                    kept = None if drawn is None or drawn.kept is None else drawn.kept[:, : z.shape[1]]
                    precision = executor.config.precision
                    return config.scale * mixture(own, gates, z, kept, dropout=config.dropout, precision=precision)

                return adapter

            x = vit.run_blocks(vit.embed(images), adapters={block: adapter_at(block) for block in range(depth)})
            return vit.features(x), jnp.stack([chosen[block] for block in range(depth)], axis=1)

        def loss(learned, fixed, batch: Batch):
            (experts, router, noise, head), (leaves, frozen, num) = learned, fixed
            images = batch.inputs["images"]
            training = draw(batch.key, noise, len(images), executor.config.num_tokens, config)
            tasks = jnp.zeros(len(images), jnp.int32)
            features, _ = adapted(hold(experts, frozen), router[None], leaves, images, tasks, training)
            return smoothed_cross_entropy(
                head_logits(head, features), batch.labels, batch.weights, num, config.label_smoothing
            )

        self._fitter, self._adapted = Fitter(loss, jit=executor.jit, layout=executor.layout), executor.jit(adapted)

    @property
    def encoder(self) -> Encoder:
        """What the auto-encoders read."""
        return self.router_features.encoder

    def check(self, tasks: Sequence[Task]) -> list[str]:
        """See `Method.check`."""
        said, config = [], self.config
        enough = (config.experts - ACTIVE) // config.freeze + 1 if config.freeze else len(tasks)
        if len(tasks) > enough:
            said.append(
                f"a task may freeze {config.freeze} of {config.experts} experts per block, so from task "
                f"{enough + 1} of {len(tasks)} on fewer than {ACTIVE} may be left to learn; it then goes on with what "
                "there is"
            )
        most = max((len(task.train.labels) + len(task.val.labels) for task in tasks), default=0)
        kept = 4 * self.encoder.width * (most + sum(len(task.test.labels) for task in tasks))
        if kept > MUCH_MEMORY:
            said.append(
                f"features of {self.encoder.name}, {self.encoder.width} per image, may take "
                f"{kept / 2**30:.1f} GiB of memory"
            )
        return said

    def learn(self, task: Task, running: Running) -> dict[str, Any]:
        """Train the experts that are not frozen, a router and a head; freeze the most used; fit an auto-encoder."""
        config, keys, index, num = self.config, self.keys, len(self.tasks), len(task.classes)
        clock = Clock(running.saved.meta["seconds"] if running.saved else None)
        experts = self.experts
        if experts is None:
            experts = init_experts(keys.at(index, Phase.METHOD_INIT, 0), self.executor.config, config)
        shape = (*self.frozen.shape[:1], self.executor.config.width, config.experts)
        head = grow_head(keys.at(index, Phase.METHOD_INIT, 1), None, shape[1], 0, num)
        fitting = self._fitter.begun(
            (experts, np.zeros(shape, np.float32), np.zeros(shape, np.float32), head), running.saved
        )
        state = functools.partial(saved, fitting, clock)
        images, num_images = task.train.images, len(task.train.labels)
        total = left(fitting, config.fit, num_images, config.batch_size)
        with clock("train"), running.phase("train", total, state) as advance:
            self._fitter.run(
                fitting, (self.executor.leaves, self.frozen, np.int32(num)), task.train.labels, Inputs(images),
                config.fit, batch_size=config.batch_size, order_key=keys.at(index, Phase.METHOD_ORDER),
                noise_key=keys.at(index, Phase.METHOD_NOISE), advance=advance,
            )  # fmt: skip
        experts, router, _, head = fitting.learned
        with clock("experts"), running.phase("experts", num_images, state) as advance:
            tasks = np.zeros(num_images, np.int32)
            _, chosen = self._over(experts, np.asarray(router)[None], images, tasks, advance)
            uses = count_uses(chosen, config.experts)
        with clock("features"):
            features = self.router_features(task, "train")
        with clock("router"), running.phase("router", self.autoencoders.images(num_images), state) as advance:
            init_key, order_key = keys.at(index, Phase.METHOD_INIT, 2), keys.at(index, Phase.ALIGNMENT_ORDER)
            autoencoder, errors = self.autoencoders.fit(init_key, order_key, features, advance)

        before, begins = self.frozen, self.experts is None
        self.experts, self.frozen = experts, freeze(before, uses, config.freeze)
        self.tasks.append(MoeTask(task.name, task.classes, np.asarray(router), cut(head, num), autoencoder))
        new = sum(leaf.size for leaf in experts) if begins else 0
        own = (shape[1] + 1) * num + sum(leaf.size for leaf in autoencoder)
        per_expert = sum(leaf.size for leaf in experts) // before.size
        return {
            "name": task.name,
            **self.costs(num),
            "params_added_percent": 100 * (new + router.size) / backbone_params(self.executor.config),
            "params_learned": int((~before).sum()) * per_expert + 2 * router.size + own,
            "params_stored": new + router.size + own,
            "experts_free": (~before).sum(axis=1).tolist(),
            "experts_frozen": [np.flatnonzero(row).tolist() for row in self.frozen & ~before],
            "expert_uses": uses.tolist(),
            "losses": fitting.state.losses,
            "router_errors": errors,
            "skipped_steps": fitting.state.skipped,
            "seconds": clock.seconds,
        }

    def costs(self, num_classes: int) -> dict[str, int]:
        """FLOPs of one image once the whole stream is learned: every task's auto-encoder looks at it."""
        vit, encoder, num = self.executor.config, self.encoder, max(self.num_tasks, len(self.tasks))
        identify = encoder.executed_flops()
        identify += num * autoencoder_flops(encoder.width, self.config.autoencoder.hidden)
        adapters = adapter_flops(vit, ACTIVE * self.config.bottleneck)
        # the last block's run for the class token alone; routers of all tasks give logits, an image takes its own
        ran = adapters * ((vit.depth - 1) * vit.num_tokens + 1) // (vit.depth * vit.num_tokens)
        routers = vit.depth * 2 * vit.width * self.config.experts * next_power_of_two(num)
        head = 2 * vit.width * num_classes
        return {
            "flops_method": moe_flops(vit, encoder, self.config, num),
            "flops_explicit": moe_flops(vit, encoder, self.config, num, count_attention=True),
            "flops_executed": identify + executed_backbone_flops(vit) + ran + routers + head,
        }

    def bytes_needed(self, task: Task) -> int:
        """A task's own arrays and all experts; in a rolling checkpoint and its successor with both moments."""
        vit, config = self.executor.config, self.config
        experts = vit.depth * config.experts * (2 * config.bottleneck * vit.width + config.bottleneck + vit.width)
        routers, head = 2 * vit.depth * vit.width * config.experts, (vit.width + 1) * 2 * len(task.classes)
        autoencoder = autoencoder_params(self.encoder.width, config.autoencoder.hidden)
        return 4 * (2 * 3 * (experts + routers + head) + autoencoder)

    def predict(self, images: np.ndarray, tasks: Int[np.ndarray, "N"] | None = None) -> Inferred:
        """See `Method.predict`."""
        check_given(self.name, len(self.tasks), tasks)
        if tasks is None:
            tasks = self._route(self.router_features.compute(images))
        tasks = np.asarray(tasks, np.int32)
        return Inferred(tasks, self._classes(images, tasks))

    def answers(self, index: int, task: Task) -> Answers:
        """See `Method.answers`."""
        local = self._classes(task.test.images, np.full(len(task.test.labels), index, np.int32))
        return Answers(local, self._route(self.router_features(task, "test")), local)

    def _route(self, features: Float[np.ndarray, "N E"]) -> Int[np.ndarray, "N"]:
        known = [task.autoencoder for task in self.tasks]
        return self.autoencoders.route(features, known, batch_size=self.config.batch_size)

    def _classes(self, images: Images, tasks: Int[np.ndarray, "N"]) -> Int[np.ndarray, "N"]:
        """The class that each image gets through its task's router and head."""
        routers = np.zeros((next_power_of_two(len(self.tasks)), *self.tasks[0].router.shape), np.float32)
        routers[: len(self.tasks)] = [task.router for task in self.tasks]
        features, _ = self._over(self.experts, routers, images, tasks)
        return classes_by_task(features, [task.head for task in self.tasks], tasks)

    def _over(self, experts, routers, images: Images, tasks, advance=None) -> tuple[np.ndarray, np.ndarray]:
        """Features `[N, D]` and chosen experts `[N, L, k]`."""
        routers = jnp.asarray(routers)

        def run(read: dict[str, Any]):
            return self._adapted(experts, routers, self.executor.leaves, read["images"], read["tasks"])

        inputs = Inputs(images, tasks=tasks)
        return over_batches(
            run, inputs, len(tasks), batch_size=self.config.batch_size, advance=advance, layout=self.executor.layout
        )

    def save(self, root: Path) -> None:
        """Save the last task and all experts, which later tasks may change, and go on with what is read back."""
        index, task = len(self.tasks) - 1, self.tasks[-1]
        assert self.experts is not None
        arrays = {
            "experts": self.experts._asdict(),
            "frozen": self.frozen,
            "router": task.router,
            "head": task.head._asdict(),
            "autoencoder": task.autoencoder._asdict(),
        }
        directory = task_directory(root, index, task.name)
        save_task(directory, arrays, {"name": task.name, "classes": list(task.classes)})
        self.tasks.pop()
        self._restore(directory, *load_task(directory))

    def open(self, root: Path) -> None:
        """Replace the state by what is saved."""
        directories = saved_tasks(root)
        self.tasks, self.experts, self.frozen = [], None, np.zeros_like(self.frozen)
        for directory, (arrays, meta) in zip(directories, load_tasks(directories), strict=True):
            self._restore(directory, arrays, meta)

    def _restore(self, directory: Path, arrays: Mapping[str, Any], meta: Mapping[str, Any]) -> None:
        with named(directory):
            self.experts = Experts(**{name: jnp.asarray(values) for name, values in arrays["experts"].items()})
            self.frozen = np.asarray(arrays["frozen"])
            autoencoder = AutoEncoder(**{name: jnp.asarray(values) for name, values in arrays["autoencoder"].items()})
            head = Head(**arrays["head"])
            self.tasks.append(MoeTask(meta["name"], tuple(meta["classes"]), arrays["router"], head, autoencoder))


def init_experts(key: jax.Array, vit: ViTConfig, config: MoeAdaptersConfig) -> Experts:
    """Experts that add nothing: down within 1 / sqrt(D), all else 0."""
    shape = (vit.depth, config.experts, config.bottleneck, vit.width)
    down = jax.random.uniform(key, shape, minval=-1.0, maxval=1.0) / math.sqrt(vit.width)
    return Experts(down, jnp.zeros(shape[:3]), jnp.zeros(shape), jnp.zeros((*shape[:2], vit.width)))


def draw(
    key: jax.Array, noise: Float[Array, "L D E"], num: int, num_tokens: int, config: MoeAdaptersConfig
) -> Training:
    """The noise of one step on `num` images."""
    normal_key, kept_key = jax.random.split(key)
    normal = jax.random.normal(normal_key, (len(noise), num, config.experts))
    if not config.dropout:
        return Training(noise, normal, None)
    hidden = (len(noise), num, num_tokens, ACTIVE * config.bottleneck)
    return Training(noise, normal, jax.random.bernoulli(kept_key, 1 - config.dropout, hidden))


def gate(
    routers: Float[Array, "T D E"], token: Float[Array, "B D"], tasks: Int[Array, "B"], drawn: Training | None = None
) -> Gates:
    """The experts of the two largest logits, ties to the first, and the softmax over these two."""
    # float32 products on every device: a rounded logit may choose another expert
    logits = jnp.einsum("bd,tde->bte", token, routers, precision="highest")
    logits = jnp.take_along_axis(logits, tasks[:, None, None], axis=1)[:, 0]
    if drawn is not None:
        deviation = jax.nn.softplus(jnp.matmul(token, drawn.noise, precision="highest")) + NOISE_FLOOR
        logits = logits + deviation * drawn.normal
    largest, chosen = jax.lax.top_k(logits, ACTIVE)
    return Gates(chosen, jax.nn.softmax(largest))


def mixture(
    experts: Experts,
    gates: Gates,
    z: Float[Array, "B N D"],
    kept: Bool[Array, "B N H"] | None = None,
    *,
    dropout: float = 0.0,
    precision: Precision = "float32",
) -> Float[Array, "B N D"]:
    """The weighted sum of each image's experts, only these being run; a share `dropout` of hidden values not `kept`."""
    down, down_bias, up, up_bias = (leaf[gates.chosen] for leaf in experts)  # [B, k, ...]
    num, k, rank, width = down.shape
    hidden = dot(z, down.reshape(num, k * rank, width).mT, precision) + down_bias.reshape(num, 1, k * rank)
    hidden = jax.nn.relu(hidden)
    if kept is not None:
        hidden = jnp.where(kept, hidden / (1 - dropout), 0.0)
    hidden = hidden * jnp.repeat(gates.weights, rank, axis=1)[:, None]
    bias = (gates.weights[..., None] * up_bias).sum(axis=1)
    return dot(hidden, up.reshape(num, k * rank, width), precision) + bias[:, None]


def hold(experts: Experts, frozen: Bool[Array, "L E"]) -> Experts:
    """The same experts, of which the frozen ones get a gradient of exactly 0, so that Adam leaves their bytes alone."""

    def held(leaf: Array) -> Array:
        mask = frozen.reshape(*frozen.shape, *[1] * (leaf.ndim - 2))
        return jnp.where(mask, jax.lax.stop_gradient(leaf), leaf)

    return jax.tree.map(held, experts)


def smoothed_cross_entropy(
    logits: Float[Array, "B P"], labels: Int[Array, "B"], weights: Float[Array, "B"], num, smoothing: float
) -> Float[Array, ""]:
    """Cross-entropy over the first `num` columns, with a share of the target spread over all of them."""
    sharp = local_cross_entropy(logits, labels, weights, 0, num)
    if not smoothing:
        return sharp
    taken = jnp.arange(logits.shape[-1]) < num
    logs = jax.nn.log_softmax(jnp.where(taken, logits, FAR))
    spread = -jnp.where(taken, logs, 0.0).sum(axis=-1) / num
    return (1 - smoothing) * sharp + smoothing * (spread * weights).sum()


def count_uses(chosen: Int[np.ndarray, "N L k"], num_experts: int) -> Int[np.ndarray, "L E"]:
    """How many images got each expert of each block."""
    return (chosen[..., None] == np.arange(num_experts)).sum(axis=(0, 2))


def freeze(frozen: Bool[np.ndarray, "L E"], uses: Int[np.ndarray, "L E"], num: int) -> Bool[np.ndarray, "L E"]:
    """With up to `num` experts more per block: its most used ones (ties: the first), some of them frozen before."""
    most = np.argsort(-uses, axis=1, kind="stable")[:, :num]
    picked = np.zeros_like(frozen)
    np.put_along_axis(picked, most, True, axis=1)
    return frozen | (picked & (uses > 0))


def moe_flops(
    vit: ViTConfig, encoder: Encoder, config: MoeAdaptersConfig, num_autoencoders: int, *, count_attention: bool = False
) -> int:
    """F0 + encoder + auto-encoders + two experts in every block, for one image."""
    identify = num_autoencoders * autoencoder_flops(encoder.width, config.autoencoder.hidden)
    passes = backbone_flops(vit, count_attention=count_attention) + encoder.flops(count_attention=count_attention)
    return passes + identify + adapter_flops(vit, ACTIVE * config.bottleneck)
