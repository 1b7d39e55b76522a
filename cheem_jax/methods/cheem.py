"""CHEEM: continual learning by Reuse, New, Adapt and Skip, guided by hierarchical exploration and exploitation.

For each task: similarity to all earlier networks, supernet training, evolutionary search, fine-tuning from scratch of
the chosen network, growth of the pool, task centroids (paper section 'Our Proposed CHEEM').
"""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Literal

import numpy as np

from cheem_jax.architecture import Architecture, Choice, decode
from cheem_jax.centroids import RouterConfig, fit_centroids
from cheem_jax.data.task import Task
from cheem_jax.evolution import SearchConfig, Searched, prepare_search, search
from cheem_jax.execution.executor import Executor, Network, Token
from cheem_jax.execution.feed import Budget, Feed, Subset, feed_images, keep_tokens
from cheem_jax.execution.passes import token_means
from cheem_jax.hee import cosines, exploit_table, norm_cosine, uniform_table, without
from cheem_jax.keys import Keys, Phase, next_power_of_two
from cheem_jax.methods.expert_memory import ExpertMemory, dense_task_network, task_network
from cheem_jax.methods.method import FrozenFeatures, Running
from cheem_jax.methods.underway import Underway
from cheem_jax.ops import KINDS, Expert, Kind, Placement
from cheem_jax.pool import DenseExperts, TaskMemory, grow, pool_sizes
from cheem_jax.supernet import OpSettings, Supernet
from cheem_jax.training import (
    ExplorationConfig,
    FitConfig,
    architecture_flops,
    check_batch_size,
    constant_draws,
    fit,
    frozen_prefix,
    images_left,
    prepare,
    supernet_draws,
    supernet_score,
)


@dataclasses.dataclass(frozen=True)
class CheemConfig:
    """Everything that decides what CHEEM learns."""

    name: ClassVar[str] = "cheem"
    placement: Placement = "mlp_down"
    """Component that holds the experts."""
    token: Token = "component"
    """Where mean class tokens are read: the component's output before the residual sum, or the block's output."""
    ops: OpSettings = OpSettings()
    remove: tuple[Kind, ...] = ()
    """Ops that no task may choose, such as skip; the paper has all four."""
    base_means: Literal["known", "neutral"] = "known"
    """`neutral` takes the similarity to the backbone's own task as 0 even where its mean class tokens are known."""
    supernet: FitConfig = FitConfig(epochs=50)
    sampling: Literal["hee", "uniform"] = "hee"
    """`uniform` is the paper's pure exploration: eps1 = eps2 = 1, mutation included."""
    exploration: ExplorationConfig = ExplorationConfig()
    search: SearchConfig = SearchConfig()
    finetune: FitConfig = FitConfig(epochs=20)
    weights: Literal["initial", "inherited"] = "initial"
    """Where fine-tuning begins: all anew, as in the paper, or with what the supernet has learned."""
    router: RouterConfig = RouterConfig()
    batch_size: int = 64
    """Images per step; the last, partial batch is padded and masked."""
    similarity_images: int = 0
    """Training images that the similarity of tasks looks at, a seeded subsample; 0: all, as in the paper."""

    def __post_init__(self) -> None:
        check_batch_size(self.batch_size)
        if self.similarity_images < 0:
            raise ValueError(f"similarity_images is {self.similarity_images}; expected 0 (all) or more")
        if not len(set(self.remove)) == len(self.remove) < len(KINDS):
            raise ValueError(f"remove names {', '.join(self.remove)}; expected some of {', '.join(KINDS)}, each once")


PAPER = CheemConfig(ops=OpSettings(rank=40))
"""The paper's settings, and ours where it is silent."""

QUICK = CheemConfig(
    supernet=FitConfig(epochs=8),
    search=SearchConfig(population=20, generations=8, num_parents=5),
    finetune=FitConfig(epochs=8),
    batch_size=32,
)
"""Every part switched on, sized for a CPU: 160 architectures scored per task."""

DEMO = dataclasses.replace(
    QUICK,
    supernet=FitConfig(epochs=12, learning_rate=2e-3),
    finetune=FitConfig(epochs=24, learning_rate=2e-3),
)
"""`quick` with more and larger steps, for tasks of a few hundred small images."""

Preset = Literal["paper", "quick", "demo"]
PRESETS: dict[Preset, CheemConfig] = {"paper": PAPER, "quick": QUICK, "demo": DEMO}


class Cheem(ExpertMemory):
    """A continual learner over one frozen backbone.

    `base_means` are mu of the backbone's own task `[L, D]` at this placement, token and image size, or None (neutral).
    `features` gives the router's features; pass the learner's own backbone or a lighter one.
    """

    name = "cheem"

    def __init__(
        self,
        executor: Executor,
        config: CheemConfig,
        keys: Keys,
        base_means: np.ndarray | None,
        features: FrozenFeatures,
    ):
        super().__init__(executor, features, config.router, rank=config.ops.rank, batch_size=config.batch_size)
        self.config, self.keys, self.base_means = config, keys, base_means

    def learn(self, task: Task, running: Running) -> dict[str, Any]:
        """Learn the next task of the stream, from where `running` left it; returns its report."""
        config, executor, keys, index = self.config, self.executor, self.keys, self.memory.next_number
        underway = Underway.begun(running.saved)
        clock = underway.clock
        # what may be chosen, numbered anew without the gaps that forgotten tasks leave
        kept_experts, num_classes = self.memory.candidates(), len(task.classes)
        candidates = tuple(
            tuple(block[i] for i in kept) for block, kept in zip(self.memory.pool, kept_experts, strict=True)
        )
        sizes = pool_sizes(candidates)
        experts = self.dense.chosen(kept_experts)
        places = [{expert: place for place, expert in enumerate(kept)} for kept in kept_experts]
        used_by_tasks = [
            tuple(None if expert is None else place[expert] for expert, place in zip(task.experts, places, strict=True))
            for task in self.memory.tasks
        ]
        earlier = [tuple(0 for _ in sizes), *used_by_tasks]
        budget, num, num_val = Budget(executor.budget), len(task.train.labels), len(task.val.labels)
        train = feed_images(executor, task.train.images, budget)
        val = feed_images(executor, task.val.images, budget)

        def kept(name: str, images: Feed, count: int, prefix: Network = ()) -> Feed:
            with clock("keep"):
                return keep_tokens(name, executor, images, count, prefix, batch_size=config.batch_size, budget=budget)

        def network_for(phase: Phase, name: str) -> Supernet:
            network = Supernet(keys.at(index, phase), candidates, num_classes, config.ops, experts)
            underway.restore(name, network)
            return network

        # what no choice at block 0 changes: similarity, supernet and fine-tuning begin there
        train = kept("training images", train, num)
        val = kept("validation images", val, num_val)
        if underway.similarity is None:
            with clock("similarity"):
                underway.similarity = self._similarity(index, task, train, experts, earlier, running)
        similarity = underway.similarity
        exploit = without(exploit_table(similarity, earlier, sizes), config.remove, sizes)
        with_adapt = config.exploration.over == "uniform"
        uniform = without(uniform_table(sizes, with_adapt=with_adapt), config.remove, sizes)
        epsilon1, epsilon2 = config.exploration.epsilon, config.search.epsilon
        if config.sampling == "uniform":
            epsilon1 = epsilon2 = 1.0

        supernet = network_for(Phase.SUPERNET_INIT, "supernet")
        with clock("prepare"):
            prepare(executor, supernet, config.batch_size)
            prepare_search(exploit, config.search)
        draws = supernet_draws(
            keys.at(index, Phase.SUPERNET_MODE), keys.at(index, Phase.SUPERNET_DRAW), exploit, uniform, epsilon1
        )
        left = images_left(underway.supernet, config.supernet, num, config.batch_size)
        state = functools.partial(underway.saved, "supernet", supernet)
        with clock("supernet"), running.phase("supernet", left, state) as advance:
            fit(
                keys.at(index, Phase.SUPERNET_ORDER), executor, supernet, task.train.labels, train, draws,
                config.supernet, batch_size=config.batch_size, advance=advance, state=underway.supernet,
            )  # fmt: skip

        search_config = dataclasses.replace(config.search, epsilon=epsilon2)
        done = 0 if underway.searched is None else underway.searched.generations
        left = search_config.population * (search_config.generations - done)
        with clock("search"), running.phase("search", left * num_val, state) as advance:

            def keep(searched: Searched) -> None:
                underway.searched = searched
                advance(0, search_note(searched, num_val))

            codes, scored = search(
                keys.at(index, Phase.SEARCH),
                supernet_score(
                    executor, supernet, task.val.labels, val, batch_size=config.batch_size, advance=advance
                ),
                architecture_flops(executor, supernet),
                exploit, uniform, num_val, search_config, keep, underway.searched,
            )  # fmt: skip
        architecture = decode(codes, sizes)

        network = network_for(Phase.FINETUNE_INIT, "finetune")
        if config.weights == "inherited" and not underway.finetune.step:
            network.inherit(supernet, architecture)
        unchanged = kept("what fine-tuning leaves unchanged", train, num, frozen_prefix(network, architecture))
        left = images_left(underway.finetune, config.finetune, num, config.batch_size)
        state = functools.partial(underway.saved, "finetune", network)
        with clock("finetune"):
            with running.phase("finetune", left, state) as advance:
                fit(
                    keys.at(index, Phase.FINETUNE_ORDER), executor, network, task.train.labels, unchanged,
                    constant_draws(codes), config.finetune, batch_size=config.batch_size, advance=advance,
                    state=underway.finetune,
                )  # fmt: skip
            learned = network.learned(architecture)
            architecture = in_pool(architecture, kept_experts)
            pool, used = grow(self.memory.pool, architecture, learned, index)
            finished = task_network(DenseExperts(pool, 0), used)
            with running.phase("means", num, state) as advance:
                means = token_means(
                    executor, [finished], train, num, batch_size=config.batch_size, advance=advance
                ).means[0]

        with clock("router"):
            seed = keys.seed_at(index, Phase.CENTROIDS)
            centroids = fit_centroids(self.features(task, "train"), seed=seed, config=config.router)
        head = network.trained_head()
        self.remember(pool, TaskMemory(task.name, task.classes, architecture, used, head, means, centroids))
        return {
            **self.costs(len(self.memory.tasks) - 1),
            "pool": self.memory.history(),
            "similarity": [[None if np.isnan(s) else round(float(s), 6) for s in row] for row in similarity],
            "supernet_losses": underway.supernet.losses,
            "finetune_losses": underway.finetune.losses,
            "skipped_steps": underway.supernet.skipped + underway.finetune.skipped,
            "searched": len(scored.genomes),
            "search": {
                "correct": scored.correct.tolist(),
                "flops": scored.flops.astype(int).tolist(),
                "population": config.search.population,
                "num_images": num_val,
                "chosen": int(np.flatnonzero((scored.genomes == codes).all(axis=1))[0]),
            },
            "validation_accuracy": float(scored.correct[(scored.genomes == codes).all(axis=1)][0]) / num_val,
            "best_validation_accuracy": float(np.nanmax(scored.correct)) / num_val,
            "not_kept": budget.refused,
            "engine": executor.counters(),
            "seconds": clock.seconds,
        }

    def bytes_needed(self, task: Task) -> int:
        """Everything drawn in the supernet, with Adam's moments, twice (a rolling checkpoint and its successor)."""
        expert = self.memory.pool[0][0].params
        num_inputs, width = expert[0].shape
        pairs = sum(pool_sizes(self.memory.pool)) * self.config.ops.rank * (num_inputs + width)
        news = len(self.memory.pool) * (num_inputs + 1) * width
        head = (width + 1) * next_power_of_two(len(task.classes))
        return 4 * 3 * 2 * (pairs + news + head)

    def _similarity(self, index: int, task: Task, train: Feed, experts, earlier, running: Running) -> np.ndarray:
        """S of the new task to the base and every earlier task, per block; NaN where a task skipped the block."""
        config, num = self.config, len(task.train.labels)
        rows = np.arange(num)
        if 0 < config.similarity_images < num:
            rng = np.random.default_rng(self.keys.seed_at(index, Phase.SIMILARITY))
            rows = np.sort(rng.permutation(num)[: config.similarity_images])
        means = np.zeros((len(earlier), self.executor.num_blocks, self.executor.config.width), np.float32)
        with running.phase("similarity", len(rows) * len(earlier)) as advance:
            for part in together(earlier, experts, self.dense.limit):
                networks = [dense_task_network(experts, earlier[i]) for i in part]
                seen = token_means(
                    self.executor, networks, Subset(train, rows), len(rows), batch_size=config.batch_size,
                    advance=advance,
                )  # fmt: skip
                means[part] = seen.means
                if part[0] == 0 and len(rows) == num and self.features.of(self.executor):
                    self.features.remember(task, "train", seen.features)
        base = np.zeros_like(means[0]) if self.base_means is None else self.base_means
        known = np.stack([base, *(task.means for task in self.memory.tasks)])
        present = np.array([[expert is not None for expert in used] for used in earlier])
        neutral = np.zeros(len(known), bool)
        neutral[0] = self.base_means is None
        return norm_cosine(cosines(known, means, present), neutral)


def together(
    earlier: Sequence[Sequence[int | None]], experts: Sequence[Sequence[Expert]], limit: int
) -> Iterator[list[int]]:
    """The base network (first) and those of tasks in parts, each of experts of at most `limit` bytes, or of a few.

    Neighbours by their experts come together, since they share most. Usually all fit in one part.
    """
    size = sum(leaf.nbytes for leaf in experts[0][0])
    limit = max(limit, FEW * len(experts) * size)
    part, held = [0], {(block, 0) for block in range(len(experts))}
    order = sorted(range(1, len(earlier)), key=lambda i: [-1 if e is None else e for e in earlier[i]])
    for index in order:
        own = {(block, expert) for block, expert in enumerate(earlier[index]) if expert is not None}
        if len(held | own) * size > limit:
            yield part
            part, held = [], set()
        part.append(index)
        held |= own
    yield part


FEW = 4
"""Networks that the similarity pass takes together, however little may be kept."""


def in_pool(architecture: Architecture, kept: Sequence[Sequence[int]]) -> Architecture:
    """An architecture over candidates as one over the pool; `kept` are the candidates of each block."""
    return tuple(
        Choice(choice.kind, None if choice.expert is None else experts[choice.expert])
        for choice, experts in zip(architecture, kept, strict=True)
    )


def search_note(searched: Searched, num_images: int) -> str:
    """What a search has found so far."""
    generations, scored = searched
    best = 100 * np.nanmax(scored.correct) / num_images
    return f"generation {generations}: {len(scored.genomes)} networks, best {best:.1f} %"
