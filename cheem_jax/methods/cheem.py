"""CHEEM: continual learning by Reuse, New, Adapt and Skip, guided by hierarchical exploration and exploitation.

For each task: similarity to all earlier networks, supernet training, evolutionary search, fine-tuning from scratch of
the chosen network, growth of the pool, task centroids (paper section 'Our Proposed CHEEM').
"""

import dataclasses
import functools
from typing import Any

import numpy as np

from cheem_jax.architecture import decode
from cheem_jax.data.task import Task
from cheem_jax.evolution import SearchConfig, Searched, prepare_search, search
from cheem_jax.execution.executor import Executor, Network
from cheem_jax.execution.feed import Budget, Feed, Subset, feed_images, keep_tokens
from cheem_jax.execution.passes import token_means
from cheem_jax.hee import cosines, exploit_table, norm_cosine, uniform_table, without
from cheem_jax.keys import Keys, Phase, next_power_of_two
from cheem_jax.methods.cheem_config import CheemConfig
from cheem_jax.methods.expert_memory import ExpertMemory, dense_task_network, task_network
from cheem_jax.methods.learning import (
    Learning,
    Tables,
    candidates_of,
    in_pool,
    search_note,
    search_report,
    together,
)
from cheem_jax.methods.method import FrozenFeatures, Running
from cheem_jax.methods.underway import Underway
from cheem_jax.pool import DenseExperts, grow, pool_sizes
from cheem_jax.supernet import Supernet
from cheem_jax.training import (
    architecture_flops,
    constant_draws,
    fit,
    frozen_prefix,
    images_left,
    prepare,
    supernet_draws,
    supernet_score,
)


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
        learning, keys = self.begin(task, running), self.keys
        index, underway, clock = learning.index, learning.underway, learning.underway.clock
        similarity = self.similarity(learning)
        tables = self.tables(learning, similarity)
        supernet = self.train_supernet(learning, tables)
        codes = self.search(learning, tables, supernet)
        network = self.finetune(learning, supernet, codes)
        architecture = decode(codes, learning.candidates.sizes)
        learned = network.learned(architecture)
        architecture = in_pool(architecture, learning.candidates.kept)
        pool, used = grow(self.memory.pool, architecture, learned, index)
        means = self._means(learning, network, task_network(DenseExperts(pool, 0), used))
        seed = keys.seed_at(index, Phase.CENTROIDS)
        self.remember(pool, task, architecture, used, network.trained_head(), means, seed=seed, clock=clock)
        return {
            **self.costs(len(self.memory.tasks) - 1),
            "pool": self.memory.history(),
            "similarity": [[None if np.isnan(s) else round(float(s), 6) for s in row] for row in similarity],
            "supernet_losses": underway.supernet.losses,
            "finetune_losses": underway.finetune.losses,
            "skipped_steps": underway.skipped,
            **self._search_report(learning, codes),
            "not_kept": list(dict.fromkeys(learning.budget.refused)),
            "engine": self.executor.counters(),
            "seconds": clock.seconds,
        }

    def begin(self, task: Task, running: Running) -> Learning:
        """The next task, as far as `running` brought it."""
        executor, underway = self.executor, Underway.begun(running.saved)
        budget = Budget(executor.budget)
        feeds = {name: feed_images(executor, task.splits[name].images, budget) for name in ("train", "val")}
        learning = Learning(
            self.memory.next_number, task, candidates_of(self.memory, self.dense), feeds["train"], feeds["val"], budget,
            underway, running,
        )  # fmt: skip
        # what no choice at block 0 changes: similarity, supernet and fine-tuning begin there
        train = self._kept(learning, "training images", learning.train, len(task.train.labels))
        val = self._kept(learning, "validation images", learning.val, len(task.val.labels))
        return dataclasses.replace(learning, train=train, val=val)

    def similarity(self, learning: Learning) -> np.ndarray:
        """S of the new task to the base and every earlier task, per block; NaN where a task skipped the block."""
        underway, candidates = learning.underway, learning.candidates
        if underway.similarity is None:
            with underway.clock("similarity"):
                underway.similarity = self._similarity(
                    learning.index, learning.task, learning.train, candidates.experts, candidates.earlier,
                    learning.running,
                )  # fmt: skip
        return underway.similarity

    def tables(self, learning: Learning, similarity: np.ndarray) -> Tables:
        """What supernet and search draw from."""
        config, candidates = self.config, learning.candidates
        exploit = exploit_table(similarity, candidates.earlier, candidates.sizes)
        uniform = uniform_table(candidates.sizes, with_adapt=config.exploration.over == "uniform")
        return Tables(*(without(table, config.remove, candidates.sizes) for table in (exploit, uniform)))

    def train_supernet(self, learning: Learning, tables: Tables) -> Supernet:
        """The supernet with all that supernet training learned."""
        config, keys, index, task = self.config, self.keys, learning.index, learning.task
        underway, clock, num = learning.underway, learning.underway.clock, len(learning.task.train.labels)
        supernet = self._network(learning, Phase.SUPERNET_INIT, "supernet")
        with clock("prepare"):
            prepare(self.executor, supernet, config.batch_size)
            prepare_search(tables.exploit, config.search)
        epsilon = 1.0 if config.sampling == "uniform" else config.exploration.epsilon
        draws = supernet_draws(
            keys.at(index, Phase.SUPERNET_MODE), keys.at(index, Phase.SUPERNET_DRAW), *tables, epsilon
        )  # fmt: skip
        left = images_left(underway.supernet, config.supernet, num, config.batch_size)
        state = functools.partial(underway.saved, "supernet", supernet)
        with clock("supernet"), learning.running.phase("supernet", left, state) as advance:
            fit(
                keys.at(index, Phase.SUPERNET_ORDER), self.executor, supernet, task.train.labels, learning.train, draws,
                config.supernet, batch_size=config.batch_size, advance=advance, state=underway.supernet,
            )  # fmt: skip
        return supernet

    def search(self, learning: Learning, tables: Tables, supernet: Supernet) -> np.ndarray:
        """Candidate indices `[L]` of the chosen network; `underway.searched` holds what it was chosen from."""
        config, underway, labels = self._search_config(), learning.underway, learning.task.val.labels
        key, num = self.keys.at(learning.index, Phase.SEARCH), len(labels)
        done = 0 if underway.searched is None else underway.searched.generations
        left = config.population * num * (config.generations - done)
        state = functools.partial(underway.saved, "supernet", supernet)
        with underway.clock("search"), learning.running.phase("search", left, state) as advance:

            def keep(searched: Searched) -> None:
                underway.searched = searched
                advance(0, search_note(searched, num))

            score = supernet_score(
                self.executor, supernet, labels, learning.val, batch_size=self.config.batch_size, advance=advance
            )  # fmt: skip
            flops = architecture_flops(self.executor, supernet)
            codes, _ = search(key, score, flops, *tables, num, config, keep, underway.searched)
        return codes

    def finetune(self, learning: Learning, supernet: Supernet, codes: np.ndarray) -> Supernet:
        """The chosen network trained by itself, as a supernet of which nothing else was touched."""
        network = self._network(learning, Phase.FINETUNE_INIT, "finetune")
        if self.config.weights == "inherited" and not learning.underway.finetune.step:
            network.inherit(supernet, decode(codes, learning.candidates.sizes))
        self._train(learning, network, codes)
        return network

    def _train(self, learning: Learning, network: Supernet, codes: np.ndarray) -> None:
        """Train a network of one architecture from where it is."""
        config, underway, labels = self.config, learning.underway, learning.task.train.labels
        architecture = decode(codes, learning.candidates.sizes)
        prefix = frozen_prefix(network, architecture)
        unchanged = self._kept(learning, "what fine-tuning leaves unchanged", learning.train, len(labels), prefix)
        left = images_left(underway.finetune, config.finetune, len(labels), config.batch_size)
        state = functools.partial(underway.saved, "finetune", network)
        with underway.clock("finetune"), learning.running.phase("finetune", left, state) as advance:
            fit(
                self.keys.at(learning.index, Phase.FINETUNE_ORDER), self.executor, network, labels,
                unchanged, constant_draws(codes), config.finetune, batch_size=config.batch_size, advance=advance,
                state=underway.finetune,
            )  # fmt: skip

    def _search_config(self) -> SearchConfig:
        config = self.config.search
        return dataclasses.replace(config, epsilon=1.0) if self.config.sampling == "uniform" else config

    def _kept(self, learning: Learning, name: str, images: Feed, num: int, prefix: Network = ()) -> Feed:
        with learning.underway.clock("keep"):
            return keep_tokens(
                name, self.executor, images, num, prefix, batch_size=self.config.batch_size, budget=learning.budget
            )  # fmt: skip

    def _network(self, learning: Learning, phase: Phase, name: str) -> Supernet:
        candidates, key = learning.candidates, self.keys.at(learning.index, phase)
        num_classes = len(learning.task.classes)
        network = Supernet(key, candidates.pool, num_classes, self.config.ops, candidates.experts)
        learning.underway.restore(name, network)
        return network

    def _means(self, learning: Learning, network: Supernet, finished: Network) -> np.ndarray:
        """mu of the finished network over the training images; `network` is what fine-tuning left."""
        underway, num = learning.underway, len(learning.task.train.labels)
        state = functools.partial(underway.saved, "finetune", network)
        with underway.clock("finetune"), learning.running.phase("means", num, state) as advance:
            return token_means(
                self.executor, [finished], learning.train, num, batch_size=self.config.batch_size, advance=advance
            ).means[0]

    def _search_report(self, learning: Learning, codes: np.ndarray) -> dict[str, Any]:
        searched, num_images = learning.underway.searched, len(learning.task.val.labels)
        assert searched is not None, "the search is over"
        return search_report(codes, searched.scored, num_images=num_images, population=self.config.search.population)

    def bytes_needed(self, task: Task) -> int:
        """Everything sampled in the supernet, with Adam's moments, twice (a rolling checkpoint and its successor).

        What the router keeps of the task is there once.
        """
        expert = self.memory.pool[0][0].params
        num_inputs, width = expert[0].shape
        pairs = sum(pool_sizes(self.memory.pool)) * self.config.ops.rank * (num_inputs + width)
        news = len(self.memory.pool) * (num_inputs + 1) * width
        head = (width + 1) * next_power_of_two(len(task.classes))
        return 4 * (3 * 2 * (pairs + news + head) + self.router_numbers(task))

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
                if part[0] == 0 and len(rows) == num and self.features.ends(self.executor):
                    self.features.remember(task, "train", seen.features)
        base = np.zeros_like(means[0]) if self.base_means is None else self.base_means
        known = np.stack([base, *(task.means for task in self.memory.tasks)])
        present = np.array([[expert is not None for expert in used] for used in earlier])
        neutral = np.zeros(len(known), bool)
        neutral[0] = self.base_means is None
        return norm_cosine(cosines(known, means, present), neutral)
