"""CHEEM: continual learning by Reuse, New, Adapt and Skip, guided by hierarchical exploration and
exploitation.

For each task: similarity to all earlier networks, supernet training, evolutionary search,
fine-tuning from scratch of the chosen network, growth of the pool, task centroids (paper section
'Our Proposed CHEEM').
"""

import dataclasses
import functools
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from cheem_jax.cheem.closed_form import closed_form_score, ridge_head
from cheem_jax.cheem.config import CheemConfig
from cheem_jax.cheem.evolution import Score, Searched, prepare_search, search
from cheem_jax.cheem.expert_memory import ExpertMemory, Underway, task_network
from cheem_jax.cheem.hee import cosines, exploit_table, norm_cosine, uniform_table, without
from cheem_jax.cheem.supernet import Supernet
from cheem_jax.cheem.training import (
    SupernetFit,
    architecture_flops,
    constant_draws,
    fit,
    frozen_prefix,
    prepare,
    supernet_draws,
    supernet_score,
)
from cheem_jax.core.architecture import Choice, decode
from cheem_jax.core.keys import Keys, Phase, next_power_of_two
from cheem_jax.core.metrics import fitted
from cheem_jax.core.ops import Expert
from cheem_jax.core.pool import (
    Candidates,
    DenseExperts,
    Head,
    candidates_of,
    grow,
    logits_of,
    pool_sizes,
)
from cheem_jax.core.settings import Advance
from cheem_jax.data.augmentation import AugmentedImages
from cheem_jax.data.task import Task
from cheem_jax.engine.executor import Executor, Network
from cheem_jax.engine.feed import Budget, Feed, HostImages, Subset, feed_images, keep_tokens
from cheem_jax.engine.passes import TokenMeans, network_features, token_means, unwatched
from cheem_jax.run.method import FrozenFeatures, base_network
from cheem_jax.run.rolling import Saved
from cheem_jax.run.session import Session
from cheem_jax.run.training import FitState, images_left


class Tables(NamedTuple):
    """Probabilities of a task's candidates."""

    exploit: Float[np.ndarray, "L C"]
    uniform: Float[np.ndarray, "L C"]


class Compared(NamedTuple):
    """A task's learned network next to the frozen backbone with a ridge head, in this order."""

    head: Head
    penalty: float
    """Of the ridge head, per training image."""
    num_images: int
    """Validation images."""
    right: Sequence[int]
    """Correct answers to them."""
    log_probability: Sequence[float]
    """Their mean log-probability of the true class, each with the temperature fitted to them."""

    @property
    def is_frozen_better(self) -> bool:
        """By correct answers; by log-probability if they are equal, which is common with few
        images."""
        learned, frozen = zip(self.right, self.log_probability, strict=True)
        return frozen > learned

    def report(self, fallback: bool) -> dict[str, Any]:
        """JSON values; accuracies in [0, 1]."""
        learned, frozen = (right / self.num_images for right in self.right)
        kept = "frozen" if fallback and self.is_frozen_better else "network"
        numbers = {"validation_images": self.num_images, "network": learned, "frozen": frozen}
        return {**numbers, "penalty": self.penalty, "kept": kept}


@dataclasses.dataclass(frozen=True)
class Learning:
    """What the phases of a task share."""

    index: int
    """The task's number among the keys."""
    task: Task
    candidates: Candidates
    train: Feed
    """Training images, from where no choice at block 0 changes anything, if there is room to keep
    that."""
    val: Feed
    budget: Budget
    underway: Underway
    session: Session


class Cheem(ExpertMemory):
    """A continual learner over one frozen backbone.

    `base_means` are mu of the backbone's own task `[L, D]` at this placement, token and image size,
    or None (neutral). `features` gives the router's features; pass the learner's own backbone or a
    lighter one.
    """

    always_compares = False
    """Whether a task's report says how accurate the frozen backbone with a ridge head is, even
    without `fallback`."""

    def __init__(
        self,
        executor: Executor,
        config: CheemConfig,
        keys: Keys,
        base_means: np.ndarray | None,
        features: FrozenFeatures,
    ):
        super().__init__(
            executor, features, config.router, rank=config.ops.rank, batch_size=config.batch_size
        )
        self.name = config.name
        self.config = config
        self.keys = keys
        self.base_means = base_means

    def check(self, tasks: Sequence[Task]) -> list[str]:
        """See `Method.check`."""
        notes = super().check(tasks)
        if self.config.augment:
            notes.append(
                "training images are augmented, so every step computes frozen blocks too and takes"
                " longer"
            )
        return notes

    def learn(self, task: Task, session: Session) -> dict[str, Any]:
        """Learn the next task of the stream, from where `session` left it; returns its report."""
        learning = self.begin(task, session)
        index = learning.index
        underway = learning.underway
        similarity = self.similarity(learning)
        tables = self.tables(learning, similarity)
        trained = self.train_supernet(learning, tables)
        codes = self.search(learning, tables, trained)
        finished = self.finetune(learning, trained, codes)
        network = finished.supernet
        state = finished.state
        chosen = decode(codes, learning.candidates.sizes)
        architecture = learning.candidates.in_pool(chosen)
        pool, used = grow(self.memory.pool, architecture, network.learned(state, chosen), index)
        target = task_network(DenseExperts(pool, 0), used)
        head = network.trained_head(state)
        compared = (
            self.compare(learning, target, head)
            if self.config.fallback or self.always_compares
            else None
        )
        if compared is not None and self.config.fallback and compared.is_frozen_better:
            architecture = (Choice("reuse", 0),) * len(pool)
            target = base_network(self.executor)
            head = compared.head
            pool, used = grow(self.memory.pool, architecture, {}, index)
        means = self.finished_means(learning, finished, target).means[0]
        self.remember(
            task,
            pool=pool,
            architecture=architecture,
            experts=used,
            head=head,
            means=means,
            seed=self.keys.seed_at(index, Phase.CENTROIDS),
            session=session,
        )
        return {
            **self.costs(len(self.memory.tasks) - 1),
            "pool": self.memory.history(),
            "similarity": [
                [None if np.isnan(s) else round(float(s), 6) for s in row] for row in similarity
            ],
            "supernet_losses": trained.progress.losses,
            "finetune_losses": finished.progress.losses,
            "skipped_steps": underway.skipped,
            **self._search_report(learning, codes),
            **({} if compared is None else {"frozen_head": compared.report(self.config.fallback)}),
            "not_kept": list(dict.fromkeys(learning.budget.refused)),
            "engine": self.executor.counters(),
            "seconds": session.seconds,
        }

    def begin(self, task: Task, session: Session) -> Learning:
        """The next task, as far as `session` brought it."""
        executor = self.executor
        underway = Underway.begun(session.saved)
        budget = Budget(executor.budget)
        feeds = {
            name: feed_images(executor, task.splits[name].images, budget)
            for name in ("train", "val")
        }
        learning = Learning(
            self.memory.next_number,
            task,
            candidates_of(self.memory, self.dense),
            feeds["train"],
            feeds["val"],
            budget,
            underway,
            session,
        )
        # what no choice at block 0 changes: similarity, supernet and fine-tuning begin there
        train = self._kept(learning, "training images", learning.train, len(task.train.labels))
        val = self._kept(learning, "validation images", learning.val, len(task.val.labels))
        return dataclasses.replace(learning, train=train, val=val)

    def expected_seconds(self, task: Task, saved: Saved | None = None) -> float:
        """About how long the task takes on this machine: its passes over images, times the measured
        seconds of one.

        `saved` is what an earlier process left of it, which is not counted. A training step counts
        as three passes, and an augmented image as what changing it takes, too. Compilation is left
        out, and so is what shared prefixes save.
        """
        config = self.config
        search = self.config.search
        num = len(task.train.labels)
        batch = HostImages(self.executor, task.train.images)
        few = min(num, config.batch_size)
        times = list[float]()
        for _ in range(4):  # the first may compile, and other processes may slow some down
            start = time.perf_counter()
            token_means(
                self.executor,
                [base_network(self.executor)],
                batch,
                few,
                batch_size=config.batch_size,
                advance=unwatched,
            )
            times.append(time.perf_counter() - start)
        seconds = min(times) / few
        underway = Underway.begun(saved)
        fits = {"supernet": config.supernet, "finetune": config.finetune}
        trained = sum(
            images_left(underway.fits.get(name, FitState()), fit, num, config.batch_size)
            for name, fit in fits.items()
        )
        generations = search.generations - (
            0 if underway.searched is None else underway.searched.generations
        )
        scored = len(task.val.labels) + (
            min(config.score_images or num, num) if config.score == "closed_form" else 0
        )
        changing = self._augmenting_seconds(task) if config.augment else 0.0
        return (
            seconds * (3 * trained + search.population * generations * scored) + changing * trained
        )

    def _augmenting_seconds(self, task: Task) -> float:
        """Seconds per image of what augmented training adds to a step: changing the image and
        entering block 0."""
        images = AugmentedImages(self.executor, task.train.images, 0)
        rows = self.executor.rows(self.config.batch_size)
        order = [np.resize(np.arange(len(task.train.labels)), rows)]
        times = list[float]()
        for _ in range(3):  # the first may compile
            start = time.perf_counter()
            for tokens in images.follow(order):
                tokens.values.block_until_ready()
            times.append(time.perf_counter() - start)
        return min(times) / rows

    def similarity(self, learning: Learning) -> Float[np.ndarray, "E L"]:
        """S of the new task to the base and every earlier task, per block; NaN where a task skipped
        the block."""
        underway = learning.underway
        base = self.base_means
        if underway.similarity is None:
            with learning.session.phase("similarity"):
                means = self._earlier_means(learning)
                earlier = learning.candidates.earlier
                known = [
                    np.zeros_like(means[0]) if base is None else base,
                    *(task.means for task in self.memory.tasks),
                ]
                present = np.array([[expert is not None for expert in used] for used in earlier])
                neutral = np.zeros(len(known), bool)
                neutral[0] = base is None
                underway.similarity = norm_cosine(cosines(np.stack(known), means, present), neutral)
        return underway.similarity

    def tables(self, learning: Learning, similarity: np.ndarray) -> Tables:
        """What supernet and search draw from."""
        config = self.config
        candidates = learning.candidates
        exploit = exploit_table(similarity, candidates.earlier, candidates.sizes)
        uniform = uniform_table(candidates.sizes, with_adapt=config.exploration.over == "uniform")
        return Tables(
            *(without(table, config.remove, candidates.sizes) for table in (exploit, uniform))
        )

    def train_supernet(self, learning: Learning, tables: Tables) -> SupernetFit:
        """The supernet with all that supernet training learned."""
        config = self.config
        keys = self.keys
        index = learning.index
        labels = learning.task.train.labels
        underway = learning.underway
        supernet = self._supernet(learning, Phase.SUPERNET_INIT)
        fitting = underway.fitting("supernet", supernet)
        with learning.session.phase("prepare"):
            prepare(self.executor, supernet, config.batch_size)
            prepare_search(tables.exploit, config.search)
        epsilon = 1.0 if config.sampling == "uniform" else config.exploration.epsilon
        draws = supernet_draws(
            keys.at(index, Phase.SUPERNET_MODE),
            keys.at(index, Phase.SUPERNET_DRAW),
            **tables._asdict(),
            epsilon=epsilon,
        )
        images = self._trained_on(learning, Phase.SUPERNET_AUGMENTATION)
        left = images_left(fitting.progress, config.supernet, len(labels), config.batch_size)
        with learning.session.phase("supernet", left, underway.saved) as advance:
            return fit(
                self.executor,
                fitting,
                images,
                labels,
                draws=draws,
                config=config.supernet,
                batch_size=config.batch_size,
                order_key=keys.at(index, Phase.SUPERNET_ORDER),
                advance=advance,
                on_step=functools.partial(underway.keep, "supernet"),
            )

    def search(
        self, learning: Learning, tables: Tables, trained: SupernetFit
    ) -> Int[np.ndarray, "L"]:
        """Candidate indices of the chosen network; `underway.searched` holds what it was chosen
        from."""
        config = self.config.search
        underway = learning.underway
        if self.config.sampling == "uniform":
            config = dataclasses.replace(config, epsilon=1.0)
        rows = self._scored_rows(learning)
        key = self.keys.at(learning.index, Phase.SEARCH)
        num = len(rows) + len(learning.task.val.labels)
        done = 0 if underway.searched is None else underway.searched.generations
        left = config.population * num * (config.generations - done)
        with learning.session.phase("search", left, underway.saved) as advance:

            def keep(searched: Searched) -> None:
                underway.searched = searched
                best = 100 * np.nanmax(searched.scored.correct) / num
                tried = len(searched.scored.genomes)
                advance(
                    0, f"generation {searched.generations}: {tried} networks, best {best:.1f} %"
                )

            score = self._score(learning, trained, rows, advance)
            flops = architecture_flops(self.executor, trained.supernet)
            codes, _ = search(
                key,
                score,
                flops,
                **tables._asdict(),
                num_images=num,
                config=config,
                on_generation=keep,
                begun=underway.searched,
            )
        return codes

    def compare(self, learning: Learning, network: Network, head: Head) -> Compared | None:
        """A learned network and the frozen backbone with a ridge head, on the validation images.

        None where the backbone's features are non-finite.
        """
        task = learning.task
        executor = self.executor
        batch_size = self.config.batch_size
        with learning.session.phase("finetune"):
            if self.features.ends(executor):
                train, val = self.features(task.train.images), self.features(task.val.images)
            else:
                base = [base_network(executor)]
                train, val = (
                    network_features(
                        executor, base, feed, len(task.splits[name].labels), batch_size=batch_size
                    )[0]
                    for name, feed in (("train", learning.train), ("val", learning.val))
                )
            if not (np.isfinite(train).all() and np.isfinite(val).all()):
                return None
            num = len(task.val.labels)
            labels = task.val.labels
            (own,) = network_features(executor, [network], learning.val, num, batch_size=batch_size)
            frozen, penalty = ridge_head(train, task.train.labels, len(task.classes))
            pairs = ((own, head), (val, frozen))
            right, log_probability = zip(
                *(fitted(logits_of(*pair), labels) for pair in pairs), strict=True
            )
            return Compared(frozen, penalty, num, right, log_probability)

    def finetune(
        self, learning: Learning, trained: SupernetFit | None, codes: Int[np.ndarray, "L"]
    ) -> SupernetFit:
        """The network trained stand-alone, as a supernet of which nothing else was sampled.

        `trained` is needed only where weights are inherited.
        """
        config = self.config
        underway = learning.underway
        labels = learning.task.train.labels
        supernet = self._supernet(learning, Phase.FINETUNE_INIT)
        architecture = decode(codes, learning.candidates.sizes)
        fitting = underway.fitting("finetune", supernet)
        if config.weights == "inherited" and not fitting.progress.step:
            assert trained is not None, "inherited weights come from a supernet"
            fitting = fitting._replace(state=trained.supernet.inherit(trained.state, architecture))
            underway.keep("finetune", fitting)
        images = self._trained_on(learning, Phase.FINETUNE_AUGMENTATION)
        if not config.augment:
            prefix = frozen_prefix(supernet, architecture)
            prefix = prefix[: self.executor.start_of(len(prefix))]
            images = self._kept(
                learning, "what fine-tuning leaves unchanged", images, len(labels), prefix
            )
        left = images_left(fitting.progress, config.finetune, len(labels), config.batch_size)
        with learning.session.phase("finetune", left, underway.saved) as advance:
            return fit(
                self.executor,
                fitting,
                images,
                labels,
                draws=constant_draws(codes),
                config=config.finetune,
                batch_size=config.batch_size,
                order_key=self.keys.at(learning.index, Phase.FINETUNE_ORDER),
                advance=advance,
                on_step=functools.partial(underway.keep, "finetune"),
            )

    def _scored_rows(self, learning: Learning) -> Int[np.ndarray, "N"]:
        """The training images that the score looks at; none for the supernet's own head."""
        config = self.config
        num = len(learning.task.train.labels)
        if config.score == "shared_head":
            return np.arange(0)
        return self._subsample(learning, Phase.SCORE, config.score_images, num)

    def _subsample(
        self, learning: Learning, phase: Phase, wanted: int, num: int
    ) -> Int[np.ndarray, "N"]:
        """All of `num` rows, or a seeded choice of `wanted` of them in order."""
        if not 0 < wanted < num:
            return np.arange(num)
        rng = np.random.default_rng(self.keys.seed_at(learning.index, phase))
        return np.sort(rng.permutation(num)[:wanted])

    def _score(
        self, learning: Learning, trained: SupernetFit, rows: Int[np.ndarray, "N"], advance: Advance
    ) -> Score:
        task = learning.task
        common = {"batch_size": self.config.batch_size, "advance": advance}
        if self.config.score == "shared_head":
            return supernet_score(
                self.executor,
                trained.supernet,
                trained.state,
                learning.val,
                task.val.labels,
                **common,
            )
        return closed_form_score(
            self.executor,
            trained.supernet,
            trained.state,
            train=Subset(learning.train, rows),
            train_labels=task.train.labels[rows],
            val=learning.val,
            val_labels=task.val.labels,
            **common,
        )

    def _trained_on(self, learning: Learning, phase: Phase) -> Feed:
        """What a phase of training sees of the training images."""
        if not self.config.augment:
            return learning.train
        seed = self.keys.seed_at(learning.index, phase)
        return AugmentedImages(self.executor, learning.task.train.images, seed)

    def _kept(
        self, learning: Learning, name: str, images: Feed, num: int, prefix: Network = ()
    ) -> Feed:
        with learning.session.phase("keep"):
            return keep_tokens(
                name,
                self.executor,
                images,
                num,
                prefix,
                batch_size=self.config.batch_size,
                budget=learning.budget,
            )

    def _supernet(self, learning: Learning, phase: Phase) -> Supernet:
        key = self.keys.at(learning.index, phase)
        num_classes = len(learning.task.classes)
        return Supernet(key, learning.candidates.experts, num_classes, self.config.ops)

    def finished_means(
        self, learning: Learning, finished: SupernetFit, network: Network
    ) -> TokenMeans:
        """mu of the finished network over the training images, and their features."""
        underway = learning.underway
        num = len(learning.task.train.labels)
        session = learning.session
        with session.phase("finetune"), session.phase("means", num, underway.saved) as advance:
            return token_means(
                self.executor,
                [network],
                learning.train,
                num,
                batch_size=self.config.batch_size,
                advance=advance,
            )

    def _search_report(self, learning: Learning, codes: Int[np.ndarray, "L"]) -> dict[str, Any]:
        searched = learning.underway.searched
        config = self.config
        assert searched is not None, "the search is over"
        scored = searched.scored
        num_images = len(self._scored_rows(learning)) + len(learning.task.val.labels)
        chosen = int(np.flatnonzero((scored.genomes == codes).all(axis=1))[0])
        reached, best = (
            float(scored.correct[chosen]) / num_images,
            float(np.nanmax(scored.correct)) / num_images,
        )
        found = {
            "correct": scored.correct.tolist(),
            "flops": scored.flops.astype(int).tolist(),
            "population": config.search.population,
            "num_images": num_images,
            "chosen": chosen,
        }
        name = "validation_accuracy"
        if config.score != "shared_head":  # training images count too
            name, found["score"] = "score", config.score
        return {
            "searched": len(scored.genomes),
            "search": found,
            name: reached,
            f"best_{name}": best,
        }

    def bytes_needed(self, task: Task) -> int:
        """Everything sampled in the supernet, with Adam's moments.

        Twice: a rolling checkpoint and its successor. What the router keeps of the task is there
            once.
        """
        expert = self.memory.pool[0][0].params
        num_inputs, width = expert[0].shape
        pair, new = self.config.ops.rank * (num_inputs + width), (num_inputs + 1) * width
        head = (width + 1) * next_power_of_two(len(task.classes))
        blocks = len(self.memory.pool)
        supernet = sum(pool_sizes(self.memory.pool)) * pair + blocks * new + head
        return 4 * (3 * 2 * supernet + self.router_numbers(task))

    def _earlier_means(self, learning: Learning) -> Float[np.ndarray, "E L D"]:
        """mu of the new task by the base network and every earlier task's; zeros where a task
        skipped the block."""
        config = self.config
        task = learning.task
        candidates = learning.candidates
        earlier = candidates.earlier
        num = len(task.train.labels)
        rows = self._subsample(learning, Phase.SIMILARITY, config.similarity_images, num)
        means = np.zeros(
            (len(earlier), self.executor.num_blocks, self.executor.config.width), np.float32
        )
        with learning.session.phase("similarity", len(rows) * len(earlier)) as advance:
            for part in together(earlier, candidates.experts, self.dense.limit):
                networks = [task_network(candidates.experts, earlier[i]) for i in part]
                seen = token_means(
                    self.executor,
                    networks,
                    Subset(learning.train, rows),
                    len(rows),
                    batch_size=config.batch_size,
                    advance=advance,
                )
                means[part] = seen.means
                if part[0] == 0 and len(rows) == num and self.features.ends(self.executor):
                    self.features.store(task.train.images, seen.features)
        return means


FEW = 4
"""Networks that the similarity pass takes together, however little may be kept."""


def together(
    earlier: Sequence[Sequence[int | None]], experts: Sequence[Sequence[Expert]], limit: int
) -> Iterator[list[int]]:
    """The base network (first) and those of tasks in parts, each of experts of at most `limit`
    bytes, or of a few.

    Neighbours by their experts come together, since they share most. Usually all fit in one part.
    """
    size = sum(leaf.nbytes for leaf in experts[0][0])
    limit = max(limit, FEW * len(experts) * size)
    part = [0]
    held = {(block, 0) for block in range(len(experts))}
    order = sorted(
        range(1, len(earlier)), key=lambda i: [-1 if e is None else e for e in earlier[i]]
    )
    for index in order:
        own = {(block, expert) for block, expert in enumerate(earlier[index]) if expert is not None}
        if len(held | own) * size > limit:
            yield part
            part = []
            held = set()
        part.append(index)
        held |= own
    yield part
