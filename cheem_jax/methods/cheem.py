"""CHEEM: continual learning by Reuse, New, Adapt and Skip, guided by hierarchical exploration and exploitation.

For each task: similarity to all earlier networks, supernet training, evolutionary search, fine-tuning from scratch of
the chosen network, growth of the pool, task centroids (paper section 'Our Proposed CHEEM').
"""

import copy
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from cheem_jax.architecture import decode
from cheem_jax.data.task import Task
from cheem_jax.evolution import (
    Score,
    Scored,
    SearchConfig,
    Searched,
    best_of,
    first_draws,
    generation_images,
    prepare_search,
    rung_images,
    rung_rows,
    search,
)
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
    first_genomes,
    in_pool,
    parts_of,
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
    resumed_flops,
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

    def check(self, tasks: Sequence[Task]) -> list[str]:
        """See `Method.check`."""
        for task in tasks:
            try:
                rung_images(len(task.val.labels), self.config.search.rungs)
            except ValueError as error:
                raise ValueError(f"task {task.name!r}: {error}") from error
        return super().check(tasks)

    def learn(self, task: Task, running: Running) -> dict[str, Any]:
        """Learn the next task of the stream, from where `running` left it; returns its report."""
        learning, keys = self.begin(task, running), self.keys
        index, underway, clock = learning.index, learning.underway, learning.underway.clock
        similarity = self.similarity(learning)
        tables = self.tables(learning, similarity)
        if self.config.trained_draws:
            codes, network = self.train_draws(learning, tables)
        else:
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
            **self._search_report(learning, network, codes),
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
        left = generation_images(config, num) * (config.generations - done)
        state = functools.partial(underway.saved, "supernet", supernet)
        merged: dict = {}
        first = None
        if config.warm_start:
            first = first_genomes(tables, learning.candidates, self.similarity(learning))
        with underway.clock("search"), learning.running.phase("search", left, state) as advance:

            def keep(searched: Searched) -> None:
                underway.searched = searched
                advance(0, search_note(searched, num))

            scores = [
                supernet_score(
                    self.executor, supernet, own, feed, batch_size=self.config.batch_size, advance=advance,
                    merged=merged,
                )
                for feed, own in parts_of(learning.val, labels, rung_rows(key, labels, config.rungs))
            ]  # fmt: skip
            codes, _ = search(
                key, scores, self._cost(supernet), *tables, num, config, keep, underway.searched, first
            )  # fmt: skip
        return codes

    def finetune(self, learning: Learning, supernet: Supernet, codes: np.ndarray) -> Supernet:
        """The chosen network trained by itself, as a supernet of which nothing else was touched."""
        network = self._network(learning, Phase.FINETUNE_INIT, "finetune")
        if self.config.weights == "inherited" and not learning.underway.finetune.step:
            network.inherit(supernet, decode(codes, learning.candidates.sizes))
        self._train(learning, network, codes)
        return network

    def train_draws(self, learning: Learning, tables: Tables) -> tuple[np.ndarray, Supernet]:
        """Candidate indices `[L]` and network of the best of `trained_draws` architectures, each trained by itself.

        Whoever may still come first is kept until the last is there, since it is by FLOPs within tau of the most
        accurate. One whose training diverges has no score.
        """
        config, underway, labels = self._search_config(), learning.underway, learning.task.val.labels
        key = self.keys.at(learning.index, Phase.SEARCH)
        genomes = first_draws(key, *tables, self.config.trained_draws, config)
        for number in range(len(underway.draws), len(genomes)):
            network, draw = self._network(learning, Phase.FINETUNE_INIT, "finetune", number), genomes[[number]]
            # what one draw keeps is gone before the next
            apart = dataclasses.replace(learning, budget=copy.copy(learning.budget))
            try:
                self._train(apart, network, draw[0], number)
                correct = self._right(learning, network, draw)
            except FloatingPointError:
                correct = np.full(1, np.nan)
            underway.finish_draw(network, Scored(draw, correct, self._cost(network)(draw)))
        assert underway.searched is not None, "at least one was drawn"
        best = best_of(underway.searched.scored, len(labels), config.tolerance)
        network = self._network(learning, Phase.FINETUNE_INIT, "", best)
        network.restore(underway.drawn[best])
        underway.finetune = underway.draws[best]
        return genomes[best], network

    def _right(self, learning: Learning, network: Supernet, genomes: Int[np.ndarray, "P L"]) -> Float[np.ndarray, "P"]:
        """Right answers to the validation images by networks that were trained by themselves."""
        underway, labels = learning.underway, learning.task.val.labels
        state = functools.partial(underway.saved, "finetune", network)
        with underway.clock("search"), learning.running.phase("search", len(labels), state) as advance:
            score = supernet_score(
                self.executor, network, labels, learning.val, batch_size=self.config.batch_size, advance=advance
            )  # fmt: skip
            return np.asarray(score(genomes), np.float64)

    def _train(self, learning: Learning, network: Supernet, codes: np.ndarray, *position: int) -> None:
        """Train a network of one architecture from where it is; `position` tells draws of a task apart."""
        config, underway, labels = self.config, learning.underway, learning.task.train.labels
        architecture = decode(codes, learning.candidates.sizes)
        prefix = frozen_prefix(network, architecture)
        unchanged = self._kept(learning, "what fine-tuning leaves unchanged", learning.train, len(labels), prefix)
        left = images_left(underway.finetune, config.finetune, len(labels), config.batch_size)
        state = functools.partial(underway.saved, "finetune", network)
        with underway.clock("finetune"), learning.running.phase("finetune", left, state) as advance:
            fit(
                self.keys.at(learning.index, Phase.FINETUNE_ORDER, *position), self.executor, network, labels,
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

    def _network(self, learning: Learning, phase: Phase, name: str, *position: int) -> Supernet:
        candidates, key = learning.candidates, self.keys.at(learning.index, phase, *position)
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

    def _cost(self, supernet: Supernet) -> Score:
        """What the search takes for compute."""
        if self.config.search.cost == "resumed":
            # another network's pass leaves nothing to resume from
            until = self.router.until(self.executor.num_blocks) if self.features.of(self.executor) else 0
            return resumed_flops(self.executor, supernet, until)
        return architecture_flops(self.executor, supernet)

    def _search_report(self, learning: Learning, network: Supernet, codes: np.ndarray) -> dict[str, Any]:
        searched, config = learning.underway.searched, self.config.search
        assert searched is not None, "the search is over"
        if learning.underway.drawn:
            config = dataclasses.replace(config, population=len(searched.scored.genomes))
        flops = architecture_flops(self.executor, network)(searched.scored.genomes)
        return search_report(codes, searched, flops, len(learning.task.val.labels), config)

    def bytes_needed(self, task: Task) -> int:
        """Everything drawn in the supernet, with Adam's moments, twice (a rolling checkpoint and its successor).

        Or so many trained networks and one more, of which a New at every block is the largest. What
        names the task is there once.
        """
        expert = self.memory.pool[0][0].params
        num_inputs, width = expert[0].shape
        pairs = sum(pool_sizes(self.memory.pool)) * self.config.ops.rank * (num_inputs + width)
        news = len(self.memory.pool) * (num_inputs + 1) * width
        head = (width + 1) * next_power_of_two(len(task.classes))
        draws = self.config.trained_draws
        learned = (draws + 1) * (news + head) if draws else pairs + news + head
        return 4 * (3 * 2 * learned + self.router_numbers(task))

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
