"""CHEEM: continual learning that selects one of the ops Reuse, New, Adapt and Skip for each block,
by hierarchical exploration and exploitation (paper section 'Our Proposed CHEEM').

Each task is learned in these phases: compute the similarity of the task to all earlier tasks, train
the supernet, search for the target network, train the target network stand-alone, add its experts
to the pool, and fit the router to the task. Backward elimination searches without similarity and
supernet.
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from jaxtyping import Float, Int

from cheem_jax.backbone.flops import network_flops
from cheem_jax.cheem.config import CheemConfig
from cheem_jax.cheem.elimination import Eliminated, LossFunction, count_scored, eliminate
from cheem_jax.cheem.evolution import Score, Searched, prepare_search, search
from cheem_jax.cheem.expert_memory import ExpertMemory, Underway, task_network
from cheem_jax.cheem.frozen_head import HeadComparison, compare_heads, frozen_features, ridge_head
from cheem_jax.cheem.hee import (
    cosines,
    exploit_table,
    norm_cosine,
    uniform_table,
    without,
)
from cheem_jax.cheem.supernet import Supernet
from cheem_jax.cheem.training import (
    ADAPT,
    Draws,
    SupernetFit,
    architecture_flops,
    constant_draws,
    dense_network,
    fit,
    frozen_prefix,
    head_losses,
    prepare,
    supernet_draws,
    supernet_score,
)
from cheem_jax.core.architecture import Choice, decode, encode
from cheem_jax.core.keys import Keys, Phase, next_power_of_two
from cheem_jax.core.ops import Expert
from cheem_jax.core.pool import (
    Candidates,
    DenseExperts,
    Head,
    Pool,
    collect_candidates,
    grow,
    pool_sizes,
)
from cheem_jax.core.settings import FitConfig, no_progress
from cheem_jax.data.augmentation import AugmentedImages
from cheem_jax.data.task import Task
from cheem_jax.engine.executor import Executor, Network
from cheem_jax.engine.feed import Budget, Feed, HostImages, cache_tokens, feed_images
from cheem_jax.engine.passes import TokenMeans, network_features, token_means
from cheem_jax.run.method import FrozenFeatures, base_network
from cheem_jax.run.results import counted_since
from cheem_jax.run.rolling import Saved
from cheem_jax.run.session import Session
from cheem_jax.run.training import FitState, images_left


class SamplingTables(NamedTuple):
    """Candidate probabilities of each block."""

    exploit: Float[np.ndarray, "L C"]
    uniform: Float[np.ndarray, "L C"]


@dataclasses.dataclass(frozen=True)
class Learning:
    """Inputs and progress of learning one task, shared by its phases."""

    index: int
    """Task number, which determines the PRNG keys of the task."""
    task: Task
    candidates: Candidates
    train: Feed
    """Feed of the training images. If the tokens of these images, computed up to the first expert,
    fit into `budget`, the feed yields them from a cache."""
    val: Feed
    """Feed of the validation images, cached in the same way."""
    budget: Budget
    underway: Underway
    session: Session


class Cheem(ExpertMemory):
    """CHEEM as a continual learner with one frozen backbone.

    `base_means` are the mean CLS tokens mu of the base task `[L, D]`, measured with the placement,
    token position and image size of this run; None sets the similarity to the base task to 0.
    `features` computes the router's features, with the backbone of `executor` or with a lighter
    network.
    """

    always_compares = False
    """Whether the report compares the target network with the frozen backbone even if
    `config.fallback` is false."""

    def __init__(
        self,
        executor: Executor,
        config: CheemConfig,
        keys: Keys,
        base_means: np.ndarray | None,
        features: FrozenFeatures,
    ):
        rank = config.ops.stored_rank
        super().__init__(executor, features, config.router, rank=rank, batch_size=config.batch_size)
        self.name = config.name
        self.config = config
        self.keys = keys
        self.base_means = base_means

    def check(self, tasks: Sequence[Task]) -> list[str]:
        """Warn if augmentation slows down training (see `Method.check`). Elimination adapts the
        first block, so without augmentation, too, every step computes all blocks."""
        if not self.config.augment or self.config.sampling == "anchored":
            return []
        return [
            "training images are augmented, so every step computes frozen blocks too and takes"
            " longer"
        ]

    def learn(self, task: Task, session: Session) -> dict[str, Any]:
        """Run all phases of learning the next task, and return its report (see `Method.learn`)."""
        counters = self.executor.counters()
        learning = self.begin(task, session)
        similarity = trained = None
        if self.config.sampling == "anchored":
            codes = self.eliminate(learning)
        else:
            similarity = self.similarity(learning)
            tables = sampling_tables(self.config, learning.candidates, similarity)
            trained = self.train_supernet(learning, tables)
            codes = self.search(learning, tables, trained)
        finished = self.finetune(learning, trained, codes)
        supernet, state, _ = finished
        choices = decode(codes, learning.candidates.sizes)
        architecture = learning.candidates.in_pool(choices)
        learned = supernet.learned(state, choices)
        pool, experts = grow(self.memory.pool, architecture, learned, learning.index)
        network = task_network(DenseExperts(pool, 0), experts)
        head = supernet.trained_head(state)
        compared = None
        if self.config.fallback or self.always_compares:
            compared = compare_with_frozen(
                self.executor, self.features, learning, network, head, self.batch_size
            )
        if compared and self.config.fallback and compared.is_frozen_better:
            architecture = (Choice("reuse", 0),) * len(pool)
            network = base_network(self.executor)
            head = compared.head
            pool, experts = grow(self.memory.pool, architecture, {}, learning.index)
        summary = self.finished_means(learning, finished, network)
        self.remember(
            task,
            pool=pool,
            architecture=architecture,
            experts=experts,
            head=head,
            means=summary.means[0],
            seed=self.keys.seed_at(learning.index, Phase.CENTROIDS),
            session=session,
        )
        self.calibrate(learning, summary.features)
        report = self.costs(len(self.memory.tasks) - 1) | {
            "pool": self.memory.history(),
            **phase_report(learning, similarity, trained, finished),
            **search_report(
                learning, codes, self.config, architecture_flops(self.executor, supernet)
            ),
            "engine": counted_since(counters, self.executor.counters()),
            "seconds": session.seconds,
        }
        if compared:
            report["frozen_head"] = compared.report(self.config.fallback)
        return report

    def begin(self, task: Task, session: Session) -> Learning:
        """Prepare learning of the next task. If `session` has saved progress, the task resumes from
        it."""
        budget = Budget(self.executor.budget)
        train, val = feed_splits(self.executor, task, session, budget, self.batch_size)
        underway = Underway.resume(session.saved)
        session.saved = None  # else, the saved arrays would stay in memory during training
        return Learning(
            self.memory.next_number,
            task,
            collect_candidates(self.memory, self.dense),
            train,
            val,
            budget,
            underway,
            session,
        )

    def similarity(self, learning: Learning) -> Float[np.ndarray, "E L"]:
        """Compute the similarity S of the new task to the base task and to every earlier task, per
        block. S is NaN in blocks that the network of the earlier task skips (section 'Task
        similarity')."""
        underway = learning.underway
        if underway.similarity is None:
            stored = [task.means for task in self.memory.tasks]
            with learning.session.phase("similarity"):
                means = earlier_means(
                    self.executor,
                    self.features,
                    learning,
                    limit=self.dense.limit,
                    batch_size=self.batch_size,
                )
                underway.similarity = similarity_to(
                    self.base_means, stored, means, learning.candidates.earlier
                )
        return underway.similarity

    def train_supernet(self, learning: Learning, tables: SamplingTables) -> SupernetFit:
        """Train the supernet (section 'Supernet Training')."""
        config = self.config
        supernet = self._supernet(learning, Phase.SUPERNET_INIT)
        fitting = learning.underway.fitting("supernet", supernet)
        with learning.session.phase("prepare"):
            num_val = len(learning.task.val.labels)
            prepare(self.executor, supernet, config.batch_size, num_val)
            prepare_search(tables.exploit, config.search)
        draws = supernet_draws(
            self.keys.at(learning.index, Phase.SUPERNET_MODE),
            self.keys.at(learning.index, Phase.SUPERNET_DRAW),
            exploit=tables.exploit,
            uniform=tables.uniform,
            epsilon=1.0 if config.sampling == "uniform" else config.exploration.epsilon,
        )
        images = self._training_images(learning, Phase.SUPERNET_AUGMENTATION)
        return self._train(learning, "supernet", fitting, images, draws, Phase.SUPERNET_ORDER)

    def search(
        self, learning: Learning, tables: SamplingTables, trained: SupernetFit
    ) -> Int[np.ndarray, "L"]:
        """Search for the target network by evolution (see `search_supernet`)."""
        key = self.keys.at(learning.index, Phase.SEARCH)
        return search_supernet(self.executor, learning, trained, tables, key, self.config)

    def eliminate(self, learning: Learning) -> Int[np.ndarray, "L"]:
        """Search for the target network by backward elimination (see `search_backward`)."""
        supernet = self._supernet(learning, Phase.FINETUNE_INIT)
        return search_backward(self.executor, learning, supernet, self.config)

    def finetune(
        self, learning: Learning, trained: SupernetFit | None, codes: Int[np.ndarray, "L"]
    ) -> SupernetFit:
        """Train the target network stand-alone, as a supernet that samples only this architecture.

        If `config.weights` is `inherited`, training starts from the weights of the supernet
        `trained`. Otherwise, or if `trained` is None, training starts from newly initialised
        weights.
        """
        config = self.config
        supernet = self._supernet(learning, Phase.FINETUNE_INIT)
        architecture = decode(codes, learning.candidates.sizes)
        fitting = learning.underway.fitting("finetune", supernet)
        is_new = not fitting.progress.step
        if config.weights == "inherited" and trained is not None and is_new:
            state = trained.supernet.inherit(trained.state, architecture)
            fitting = fitting._replace(state=state)
            learning.underway.keep("finetune", fitting)
        images = self._training_images(learning, Phase.FINETUNE_AUGMENTATION)
        prefix = frozen_prefix(supernet, architecture)
        prefix = prefix[: self.executor.backward_end(len(prefix))]
        if prefix and not config.augment:
            with learning.session.phase("keep", 0, learning.underway.saved) as advance:
                images = cache_tokens(
                    "what fine-tuning leaves unchanged",
                    self.executor,
                    images,
                    len(learning.task.train.labels),
                    prefix,
                    batch_size=self.batch_size,
                    budget=learning.budget,
                    advance=advance,
                )
        samples = constant_draws(codes)
        return self._train(learning, "finetune", fitting, images, samples, Phase.FINETUNE_ORDER)

    def finished_means(
        self, learning: Learning, finished: SupernetFit, network: Network
    ) -> TokenMeans:
        """Compute the mean CLS tokens mu of the target network over the training images, and the
        features of these images."""
        num = len(learning.task.train.labels)
        with (
            learning.session.phase("finetune"),
            learning.session.phase("means", num, learning.underway.saved) as advance,
        ):
            return token_means(
                self.executor,
                [network],
                learning.train,
                num,
                batch_size=self.batch_size,
                advance=advance,
            )

    def calibrate(self, learning: Learning, features: Float[np.ndarray, "N D"]) -> None:
        """Do nothing; subclasses can store further statistics of the new task.

        `features` are the features that the task's network computes for the training images.
        """

    def bytes_needed(self, task: Task) -> int:
        """Estimate the disk space for learning a task (see `Method.bytes_needed`).

        The estimate has three parts: the task's checkpoint with the parameters of all candidates
        (with backward elimination, of one Adapt per block), two rolling checkpoints with these
        parameters and Adam's moments, and the router's statistics.
        """
        size = anchor_size if self.config.sampling == "anchored" else supernet_size
        num = size(self.memory.pool, self.config.ops.rank, len(task.classes))
        return 4 * ((2 * 3 + 1) * num + self.router_numbers(task))

    def _train(
        self,
        learning: Learning,
        name: Literal["supernet", "finetune"],
        fitting: SupernetFit,
        images: Feed,
        draws: Draws,
        order: Phase,
    ) -> SupernetFit:
        config: FitConfig = getattr(self.config, name)
        underway = learning.underway
        labels = learning.task.train.labels
        total = images_left(fitting.progress, config, len(labels), self.batch_size)
        with learning.session.phase(name, total, underway.saved) as advance:
            return fit(
                self.executor,
                fitting,
                images,
                labels,
                draws=draws,
                config=config,
                batch_size=self.batch_size,
                order_key=self.keys.at(learning.index, order),
                advance=advance,
                on_step=functools.partial(underway.keep, name),
            )

    def _supernet(self, learning: Learning, phase: Phase) -> Supernet:
        key = self.keys.at(learning.index, phase)
        num_classes = len(learning.task.classes)
        return Supernet(key, learning.candidates.experts, num_classes, self.config.ops)

    def _training_images(self, learning: Learning, phase: Phase) -> Feed:
        if not self.config.augment:
            return learning.train
        seed = self.keys.seed_at(learning.index, phase)
        return AugmentedImages(self.executor, learning.task.train.images, seed)


def search_supernet(
    executor: Executor,
    learning: Learning,
    trained: SupernetFit,
    tables: SamplingTables,
    key: jax.Array,
    config: CheemConfig,
) -> Int[np.ndarray, "L"]:
    """Search for the target network by evolution, with the supernet's scores, and return its
    candidate indices. All scored architectures are stored in `learning.underway`."""
    underway = learning.underway
    labels = learning.task.val.labels
    num = len(labels)
    settings = config.search
    if config.sampling == "uniform":
        settings = dataclasses.replace(settings, epsilon=1.0)
    done = 0 if underway.searched is None else underway.searched.generations
    total = settings.population * num * (settings.generations - done)
    with learning.session.phase("search", total, underway.saved) as advance:

        def keep(searched: Searched) -> None:
            underway.searched = searched
            best = 100 * np.nanmax(searched.scored.correct) / num
            tried = len(searched.scored.genomes)
            advance(0, f"generation {searched.generations}: {tried} networks, best {best:.1f} %")

        codes, _ = search(
            key,
            supernet_score(
                executor,
                trained.supernet,
                trained.state,
                learning.val,
                labels,
                batch_size=config.batch_size,
                advance=advance,
            ),
            architecture_flops(executor, trained.supernet),
            exploit=tables.exploit,
            uniform=tables.uniform,
            num_images=num,
            config=settings,
            on_generation=keep,
            earlier=underway.searched,
        )
    return codes


def search_backward(
    executor: Executor,
    learning: Learning,
    supernet: Supernet,
    config: CheemConfig,
) -> Int[np.ndarray, "L"]:
    """Search for the target network by backward elimination, and return its candidate indices.

    Every block adapts the base expert. Adapting the experts of earlier tasks cost more accuracy
    than it gained (docs/search.md).

    The networks are scored before training: with the initial pairs, which change nothing, and a
    ridge head for the features of the network that adapts every block. Only blocks of the second
    half can be skipped. Before training, an early block can seem as dispensable as a late one, but
    the network learns less without it (docs/search.md).

    All scored architectures are stored in `learning.underway`.
    """
    underway = learning.underway
    task = learning.task
    with learning.session.phase("prepare"):
        num_val = len(task.val.labels)
        prepare(executor, supernet, config.batch_size, num_val, learnable=(ADAPT,))
    anchor, skips = (
        encode((choice,) * executor.num_blocks, supernet.sizes)
        for choice in (ADAPT, Choice("skip"))
    )
    total = networks_left(executor, config, underway) * len(task.val.labels)
    with learning.session.phase("search", total, underway.saved) as advance:

        @functools.cache
        def losses() -> LossFunction:
            state = supernet.init()
            (features,) = network_features(
                executor,
                [dense_network(supernet, state, anchor, {})],
                learning.train,
                len(task.train.labels),
                batch_size=config.batch_size,
                # the displayed number of images is that of the validation images
                advance=lambda num_images, note="", /: advance(0, note),
            )
            if not np.isfinite(features).all():
                raise ValueError(
                    f"task {task.name!r}: the network that adapts every block computes non-finite"
                    " features for training images before training; check the weights of the"
                    " backbone and of earlier tasks"
                )
            return head_losses(
                executor,
                supernet,
                state,
                ridge_head(features, task.train.labels, len(task.classes))[0],
                learning.val,
                task.val.labels,
                batch_size=config.batch_size,
                advance=advance,
            )

        def keep(eliminated: Eliminated) -> None:
            underway.eliminated = eliminated
            advance(0, f"{len(eliminated.genomes)} networks")

        codes, _ = eliminate(
            # a resumed search that has ended needs no head
            lambda genomes: losses()(genomes),
            anchor,
            skips,
            num_skipped(executor, config),
            first=executor.num_blocks // 2,
            on_scored=keep,
            earlier=underway.eliminated,
        )
    return codes


def num_skipped(executor: Executor, config: CheemConfig) -> int:
    """Count the blocks that backward elimination has to skip until the FLOPs are within
    `config.search.max_flops`, at most the second half of all blocks. The number does not depend on
    the blocks, because every block has the same FLOPs."""
    num = executor.num_blocks
    flops = [
        network_flops(
            executor.config,
            executor.placement,
            (Choice("skip"),) * skipped + (ADAPT,) * (num - skipped),
            config.ops.stored_rank,
        )
        for skipped in range(num)
    ]
    skipped = sum(one > config.search.max_flops * flops[0] for one in flops)
    return min(skipped, num - num // 2)


def networks_left(executor: Executor, config: CheemConfig, underway: Underway) -> int:
    """Count the networks that backward elimination has not scored yet."""
    num = executor.num_blocks
    networks = count_scored(num - num // 2, num_skipped(executor, config))
    eliminated = underway.eliminated
    return networks - (0 if eliminated is None else len(eliminated.genomes))


def feed_splits(
    executor: Executor, task: Task, session: Session, budget: Budget, batch_size: int
) -> tuple[Feed, Feed]:
    """Return the feeds of the training and the validation images.

    If the tokens of all images of a split, computed up to the first expert, fit into `budget`, the
    feed yields these tokens from a cache. Otherwise, the feed computes tokens from the images in
    every pass. The budget is used first for the images of both splits, then for tokens.
    """
    splits = (task.train, task.val)
    feeds = [feed_images(executor, split.images, budget) for split in splits]
    with session.phase("keep") as advance:
        train, val = (
            cache_tokens(
                f"{name} images",
                executor,
                feed,
                len(split.labels),
                (),
                batch_size=batch_size,
                budget=budget,
                advance=advance,
            )
            for name, feed, split in zip(("training", "validation"), feeds, splits, strict=True)
        )
    return train, val


def supernet_size(pool: Pool, rank: int, num_classes: int) -> int:
    """Count the parameters of a task's supernet: those of every Adapt and New, and of the padded
    head."""
    num_inputs, width = pool[0][0].params[0].shape
    num_experts = sum(pool_sizes(pool))
    adapted = (num_experts - len(pool)) * rank * (num_inputs + width)
    new = len(pool) * (num_inputs + 1) * width
    return anchor_size(pool, rank, num_classes) + adapted + new


def anchor_size(pool: Pool, rank: int, num_classes: int) -> int:
    """Count the parameters of the network that adapts every block: a pair per block, and the padded
    head."""
    num_inputs, width = pool[0][0].params[0].shape
    head = (width + 1) * next_power_of_two(num_classes)
    return len(pool) * rank * (num_inputs + width) + head


def earlier_means(
    executor: Executor,
    frozen: FrozenFeatures,
    learning: Learning,
    *,
    limit: int,
    batch_size: int,
) -> Float[np.ndarray, "E L D"]:
    """Compute the mean CLS tokens mu of the new task's images, once with the base network and once
    with the network of each earlier task. The mean is 0 in blocks that the network skips.

    Each pass runs several networks. Together, the experts of these networks have at most `limit`
    bytes (see `together`). If the router reads the final features of the base network, these
    features are stored in `frozen`.
    """
    task = learning.task
    # features of rounded tokens differ from features of images, which a resumed run computes
    is_exact = learning.train.block is None or executor.cached_type == np.float32
    experts, earlier = learning.candidates.experts, learning.candidates.earlier
    num = len(task.train.labels)
    means = np.zeros((len(earlier), executor.num_blocks, executor.config.width), np.float32)
    with learning.session.phase("similarity", num * len(earlier)) as advance:
        for part in together(earlier, experts, limit):
            networks = [task_network(experts, earlier[i]) for i in part]
            tokens = token_means(
                executor, networks, learning.train, num, batch_size=batch_size, advance=advance
            )
            means[part] = tokens.means
            if part[0] == 0 and is_exact and frozen.ends(executor):
                frozen.store(task.train.images, tokens.features)
    return means


def similarity_to(
    base_means: Float[np.ndarray, "L D"] | None,
    stored: Sequence[Float[np.ndarray, "L D"]],
    means: Float[np.ndarray, "E L D"],
    earlier: Sequence[Sequence[int | None]],
) -> Float[np.ndarray, "E L"]:
    """Compute the similarity S from mean CLS tokens mu.

    Each earlier network computes its `means` from the new task's images. The base network computes
    `base_means` from the pretraining images, and the network of each earlier task computes its
    `stored` means from the images of that task. S is 0 for the base task if `base_means` is None,
    and NaN in blocks that an earlier task skips.
    """
    base = np.zeros_like(means[0]) if base_means is None else base_means
    present = np.array([[expert is not None for expert in experts] for experts in earlier])
    neutral = (np.arange(len(earlier)) == 0) & (base_means is None)
    return norm_cosine(cosines(np.stack([base, *stored]), means, present), neutral)


def sampling_tables(
    config: CheemConfig, candidates: Candidates, similarity: Float[np.ndarray, "E L"]
) -> SamplingTables:
    """Compute the candidate probabilities from which supernet training and the search sample."""
    sizes = candidates.sizes
    exploit = exploit_table(similarity, candidates.earlier, sizes)
    uniform = uniform_table(sizes)
    return SamplingTables(
        without(exploit, config.remove, sizes), without(uniform, config.remove, sizes)
    )


def phase_report(
    learning: Learning,
    similarity: Float[np.ndarray, "E L"] | None,
    trained: SupernetFit | None,
    finished: SupernetFit,
) -> dict[str, Any]:
    """Report the similarity if it was computed, the losses of both training stages, the number of
    skipped steps, and descriptions of the values that did not fit into the cache."""
    report = {}
    if similarity is not None:
        report["similarity"] = [
            [None if np.isnan(s) else round(float(s), 6) for s in row] for row in similarity
        ]
    return {
        **report,
        "supernet_losses": [] if trained is None else trained.progress.losses,
        "finetune_losses": finished.progress.losses,
        "skipped_steps": learning.underway.skipped,
        "not_kept": list(dict.fromkeys(learning.budget.refused)),
    }


def search_report(
    learning: Learning, codes: Int[np.ndarray, "L"], config: CheemConfig, flops_of: Score
) -> dict[str, Any]:
    """Report a finished search. `codes` is the selected architecture, and `flops_of` counts the
    FLOPs of architectures."""
    eliminated, searched = learning.underway.eliminated, learning.underway.searched
    if eliminated is not None:
        genomes = eliminated.genomes
        correct = eliminated.correct.sum(axis=1)
        flops = flops_of(genomes)
    else:
        assert searched is not None, "the search has ended"
        genomes, correct, flops = searched.scored
    num_images = len(learning.task.val.labels)
    chosen = int(np.flatnonzero((genomes == codes).all(axis=1))[0])
    search = {
        "correct": correct.tolist(),
        "flops": flops.astype(int).tolist(),
        "population": config.search.population,
        "num_images": num_images,
        "chosen": chosen,
    }
    name = "validation_accuracy"
    if eliminated is not None:
        search["population"] = len(genomes)
        search["losses"] = eliminated.losses.mean(axis=1).round(6).tolist()
        search["score"] = "untrained"
        name = "score"  # not a validation accuracy of the trained network
    return {
        "searched": len(genomes),
        "search": search,
        name: float(correct[chosen]) / num_images,
        f"best_{name}": float(np.nanmax(correct)) / num_images,
    }


def compare_with_frozen(
    executor: Executor,
    frozen: FrozenFeatures,
    learning: Learning,
    network: Network,
    head: Head,
    batch_size: int,
) -> HeadComparison | None:
    """Compare two predictors on the validation images: the learned network, and the frozen backbone
    with a ridge head. Return None if a feature of the backbone is non-finite."""
    task = learning.task
    with learning.session.phase("finetune", 0, learning.underway.saved) as advance:
        train, val = (
            frozen_features(executor, frozen, split, feed, batch_size, advance)
            for split, feed in ((task.train, learning.train), (task.val, learning.val))
        )
        if not (np.isfinite(train).all() and np.isfinite(val).all()):
            return None
        num = len(task.val.labels)
        (learned,) = network_features(
            executor, [network], learning.val, num, batch_size=batch_size, advance=advance
        )
        return compare_heads(learned, head, task, train, val)


def fits_of(config: CheemConfig) -> dict[str, FitConfig]:
    """Return the settings of the phases that train, keyed by phase. Without a supernet, only
    fine-tuning trains."""
    fits = {} if config.sampling == "anchored" else {"supernet": config.supernet}
    return {**fits, "finetune": config.finetune}


def expected_seconds(
    executor: Executor, config: CheemConfig, task: Task, saved: Saved | None = None
) -> float:
    """Estimate the seconds for learning a task on this machine, from scratch or from the progress
    in `saved`.

    The estimate is the number of forward passes, counted per image, times the measured seconds per
    image. A training step counts as three forward passes per image. The time for augmentation is
    measured separately and added. The estimate ignores the time for compilation, and the time saved
    when networks share their first blocks.
    """
    images = task.train.images
    num = len(task.train.labels)
    rows = np.arange(min(num, config.batch_size))

    def one_pass() -> None:
        token_means(
            executor,
            [base_network(executor)],
            HostImages(executor, images),
            len(rows),
            batch_size=config.batch_size,
            advance=no_progress,
        )

    def augment() -> None:
        order = [np.resize(np.arange(num), executor.rows(config.batch_size))]
        for tokens in AugmentedImages(executor, images, 0).follow(order):
            tokens.values.block_until_ready()

    underway = Underway.resume(saved)
    is_anchored = config.sampling == "anchored"
    fits = fits_of(config)
    trained = sum(
        images_left(underway.fits.get(name, FitState()), fit, num, config.batch_size)
        for name, fit in fits.items()
    )
    if is_anchored:
        networks = networks_left(executor, config, underway)
    else:
        generations = config.search.generations
        if underway.searched is not None:
            generations -= underway.searched.generations
        networks = config.search.population * generations
    passes = 3 * trained + networks * len(task.val.labels)
    seconds = passes * _fastest(one_pass, 4) / len(rows)
    if config.augment:
        seconds += trained * _fastest(augment, 3) / executor.rows(config.batch_size)
    return seconds


def _fastest(work: Callable[[], None], repeats: int) -> float:
    """Call `work` `repeats` times and return the seconds of the fastest call. Slower calls can
    include compilation, or delays by other processes."""
    times = list[float]()
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


FEW = 4
"""Number of networks that one similarity pass can always run together, even if their experts exceed
the `limit` of `together`."""


def together(
    earlier: Sequence[Sequence[int | None]], experts: Sequence[Sequence[Expert]], limit: int
) -> Iterator[list[int]]:
    """Divide the base network (index 0) and the networks of the earlier tasks into parts, and yield
    the indices of each part.

    The experts of a part have at most `limit` bytes, or at most the bytes of `FEW` networks if that
    is more. The networks are sorted first, so that networks with shared experts tend to be in the
    same part. Usually there is only one part.
    """
    size = sum(leaf.nbytes for leaf in experts[0][0])
    limit = max(limit, FEW * len(experts) * size)
    part = [0]
    members = {(block, 0) for block in range(len(experts))}
    order = sorted(
        range(1, len(earlier)), key=lambda i: [-1 if e is None else e for e in earlier[i]]
    )
    for index in order:
        used = {
            (block, expert) for block, expert in enumerate(earlier[index]) if expert is not None
        }
        if len(members | used) * size > limit:
            yield part
            part = []
            members = set()
        part.append(index)
        members |= used
    yield part
