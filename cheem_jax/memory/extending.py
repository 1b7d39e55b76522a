"""A memory's learner: tasks as CHEEM learns them, and more images or classes for a task that
exists.

Of each task it also keeps distances of validation images, for `none of my tasks`, the temperature
of its probabilities, and statistics of its classes in the features of its own network: means,
numbers of images and one covariance. They stand for classes whose images are absent when the task
is extended.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int
from scipy.optimize import minimize_scalar

from cheem_jax.baselines.heads import grow_head
from cheem_jax.cheem.expert_memory import task_network
from cheem_jax.cheem.learner import Cheem, Learning
from cheem_jax.cheem.training import SupernetFit
from cheem_jax.core.architecture import Choice, encode
from cheem_jax.core.keys import Phase
from cheem_jax.core.metrics import MOST_TEMPERATURE, fit_temperature, log_probability
from cheem_jax.core.ops import Expert
from cheem_jax.core.pool import Candidates, DenseExperts, Head, TaskMemory, grow, logits_of
from cheem_jax.core.routing import (
    NUM_QUANTILES,
    calibrate,
    centroid_distances,
    packed,
    unpacked,
    whitening_of,
)
from cheem_jax.data.task import Split, Task, composed, spelled_as
from cheem_jax.engine.executor import Network
from cheem_jax.engine.feed import HostImages
from cheem_jax.engine.passes import TokenMeans, network_features, token_means
from cheem_jax.run.session import Session

SAMPLES = 20_000
"""Samples that stand for a task's earlier images, over all classes, at most 200 and at least 10 of
each."""
MOVE_PENALTIES = (0.001, 0.01, 0.1, 1.0, 10.0)
"""Ridge penalties, per image, of the map between the features of two networks."""
SHRINKAGE = 0.1
"""Share of a multiple of the identity in the covariance of a head by discriminant analysis."""


class Extension(Task):
    """New images of a learned task, labelled among all of its classes; some of them may have
    none."""

    def __post_init__(self) -> None:
        """What it is made of is checked already."""


def extension_of(task: Task, learned: Sequence[str]) -> Extension:
    """The images labelled among the learned classes and, behind them, the new ones; matched by
    name.

    Raises ValueError for a name that differs from a learned one in upper and lower case alone.
    """
    names = spelled_as(task.classes, learned)
    known = {composed(name).casefold(): name for name in learned}
    new = [name for name in names if name not in learned]
    if clash := [
        (name, old) for name in new if (old := known.get(composed(name).casefold())) is not None
    ]:
        pairs = ", ".join(f"{name!r} and {old!r}" for name, old in clash[:4])
        raise ValueError(
            f"task {task.name!r}: new and learned classes differ in upper and lower case alone:"
            f" {pairs}; give equal classes the learned name, and others another one"
        )
    classes = (*learned, *new)
    places = np.array([classes.index(name) for name in names], np.int32)
    parts = {name: Split(split.images, places[split.labels]) for name, split in task.splits.items()}
    return Extension(
        task.name,
        classes,
        parts["train"],
        parts["val"],
        parts["test"],
        skipped=task.skipped,
        purpose="extend",
    )


def absent_classes(task: Extension, learned: TaskMemory) -> list[str]:
    """Learned classes without a new image. Raises ValueError where nothing is kept that could stand
    for them."""
    present = set(task.train.labels.tolist())
    absent = [name for label, name in enumerate(learned.classes) if label not in present]
    if absent and not learned.statistics:
        raise ValueError(
            f"task {task.name!r} has no statistics of its classes (it is of a run or of an earlier"
            " version), so it can only be extended with new images of every learned class; absent:"
            f" {', '.join(map(repr, absent[:8]))}"
        )
    return absent


class MemoryLearner(Cheem):
    """CHEEM that keeps more of a task than answering with the task ID given needs."""

    always_compares = True

    _statistics: Mapping[str, np.ndarray] = {}
    """Of the classes of the task that is being learned."""

    def learn(self, task: Task, session: Session) -> dict[str, Any]:
        """See `Cheem.learn`."""
        report = super().learn(task, session)
        learned = self.memory.tasks[-1]
        own = centroid_distances(self.features(task.val.images), [learned.centroids])[:, 0]
        temperature = self._temperature(task, learned)
        self._keep(distances=calibrate(own), temperature=temperature, statistics=self._statistics)
        self.features.forget(task)
        epochs = {"supernet": self.config.supernet.epochs, "finetune": self.config.finetune.epochs}
        costs = self.costs(len(self.memory.tasks) - 1)  # which count the statistics now
        settings = {
            "learning_rate": self.config.finetune.learning_rate,
            "augment": self.config.augment,
        }
        return {**report, **costs, "epochs": epochs, **settings}

    def finished_means(
        self, learning: Learning, finished: SupernetFit, network: Network
    ) -> TokenMeans:
        """See `Cheem.finished_means`."""
        seen = super().finished_means(learning, finished, network)
        self._statistics = class_statistics(
            seen.features, learning.task.train.labels, len(learning.task.classes)
        )
        return seen

    def extend(
        self, task: Extension, session: Session, index: int, num_before: int
    ) -> dict[str, Any]:
        """Learn the task at `index`, of `num_before` training images, further: as one task more,
        with copied experts.

        Candidates are the task as it is (without new classes), its network with a head that follows
        from the statistics of all classes, and, if every learned class has new images and they
        outnumber the old ones, the network fine-tuned on them. One that changes the task has to
        answer more of the new validation images correctly than the task as it is, and no fewer
        samples of what is kept of the old ones (`chosen_of`). The router's statistics add up by the
        numbers of images; centroids of the new images are added to the old ones.
        """
        before = self.memory.tasks[index]
        learning = self.begin(task, session)
        own = {block: stored.params for block, stored in self.memory.added(index).items()}
        # an adapted expert whose parent was erased has become a full one
        architecture = tuple(
            Choice("new") if choice.kind == "adapt" and isinstance(own[block], Expert) else choice
            for block, choice in enumerate(before.architecture)
        )
        kept = tuple(
            (0,) if choice.expert in (None, 0) else (0, choice.expert) for choice in architecture
        )
        learning = dataclasses.replace(
            learning, candidates=Candidates(kept, self.dense.chosen(kept), [])
        )
        chosen = tuple(
            Choice(choice.kind, None if choice.expert is None else places.index(choice.expert))
            for choice, places in zip(architecture, kept, strict=True)
        )
        supernet = self._supernet(learning, Phase.FINETUNE_INIT)
        codes = encode(chosen, learning.candidates.sizes)
        num_new = len(task.classes) - len(before.classes)
        key = self.keys.at(learning.index, Phase.METHOD_INIT)
        width = self.executor.config.width
        head = grow_head(key, before.head, width, len(before.classes), num_new)
        begun = {(block, chosen[block]): params for block, params in own.items()}
        fitting = SupernetFit(supernet, supernet.begun_with(begun, head))
        pool, used = grow(
            self.memory.pool, architecture, supernet.learned(fitting.state, chosen), learning.index
        )
        network = task_network(DenseExperts(pool, 0), used)
        labels = task.train.labels
        num = len(task.train.labels)
        with session.phase("finetune"), session.phase("means", num) as advance:
            seen = token_means(
                self.executor,
                [network],
                learning.train,
                num,
                batch_size=self.batch_size,
                advance=advance,
            )
        statistics = class_statistics(seen.features, labels, len(task.classes))
        temperature = before.temperature
        samples, sampled = np.zeros((0, width)), np.zeros(0, np.int32)
        seed = self.keys.seed_at(learning.index, Phase.METHOD_NOISE)
        if before.statistics:
            samples, sampled = samples_of(before.statistics, seed)
            statistics = added_up(before.statistics, statistics)
        val = self._val_features(task, network)
        candidates: list[Candidate] = []
        if not num_new:
            candidates.append(
                Candidate(
                    "unchanged", before.head, *_shares(before.head, val, task, samples, sampled)
                )
            )
        if before.statistics:
            head = discriminant_head(statistics, before.head)
            candidates.append(Candidate("head", head, *_shares(head, val, task, samples, sampled)))
        tuned = None
        if outnumbers(task, before, num_before):
            fitting = self.finetune(learning, fitting, codes)
            tuned = grow(
                self.memory.pool,
                architecture,
                supernet.learned(fitting.state, chosen),
                learning.index,
            )
            own_network = task_network(DenseExperts(tuned[0], 0), tuned[1])
            seen_tuned = self.finished_means(learning, fitting, own_network)
            if len(samples):
                samples = moved(samples, seen.features, seen_tuned.features)
            head = supernet.trained_head(fitting.state)
            val = self._val_features(task, own_network)
            candidates.append(
                Candidate("network", head, *_shares(head, val, task, samples, sampled))
            )
        best = chosen_of(candidates)
        head = best.head
        if best.kind == "network":
            assert tuned is not None
            (pool, used), seen, statistics = tuned, seen_tuned, self._statistics
        elif best.kind == "head":
            temperature = new_temperature(before, head, *samples_of(before.statistics, seed))
        share = num_before / (num_before + len(labels))
        self.remember(
            task,
            pool=pool,
            architecture=architecture,
            experts=used,
            head=head,
            means=share * before.means + (1 - share) * seen.means[0],
            seed=self.keys.seed_at(learning.index, Phase.CENTROIDS),
            session=session,
        )
        learned = self.memory.tasks[-1]
        rows = np.concatenate([before.centroids, learned.centroids])
        away = calibrate(centroid_distances(self.features(task.val.images), [rows])[:, 0])
        self._keep(
            centroids=rows,
            moments={
                name: share * before.moments[name] + (1 - share) * new
                for name, new in learned.moments.items()
            },
            distances=(
                None if before.distances is None else mixed_quantiles(before.distances, away, share)
            ),
            # validation images of some classes alone would tell too little
            temperature=self._temperature(task, learned) if best.kind == "network" else temperature,
            statistics=statistics,
        )
        self.features.forget(task)
        fitted = {} if tuned is None else {"finetune_losses": fitting.progress.losses}
        compared = {one.kind: {"new": one.new, "old": one.old} for one in candidates}
        extension = {
            "kept": best.kind,
            "validation_images": len(task.val.labels),
            "candidates": compared,
        }
        costs = self.costs(len(self.memory.tasks) - 1)
        return {
            **costs,
            **fitted,
            "extension": extension,
            "pool": self.memory.history(),
            "seconds": session.seconds,
        }

    def _temperature(self, task: Task, learned: TaskMemory) -> float:
        """Of the probabilities of the task's network and head, fitted on validation images."""
        features = self._val_features(task, task_network(self.dense, learned.experts))
        return fit_temperature(logits_of(features, learned.head), task.val.labels)

    def _val_features(self, task: Task, network: Network) -> Float[np.ndarray, "N D"]:
        feed = HostImages(self.executor, task.val.images)
        num = len(task.val.labels)
        return network_features(self.executor, [network], feed, num, batch_size=self.batch_size)[0]

    def _keep(self, **changes: Any) -> None:
        """Keep this of the last task, too."""
        *earlier, last = self.memory.tasks
        self.memory = dataclasses.replace(
            self.memory, tasks=(*earlier, dataclasses.replace(last, **changes))
        )


class Candidate(NamedTuple):
    """A way to go on with a task; shares of correct answers, each in [0, 1]."""

    kind: Literal["unchanged", "head", "network"]
    head: Head
    new: float
    """Of the new validation images."""
    old: float | None
    """Of samples that stand for the task's earlier images; None without statistics of these."""


def outnumbers(task: Extension, before: TaskMemory, num_before: int) -> bool:
    """Whether fine-tuning on the new images is a candidate: they show every learned class and are
    not fewer.

    Without statistics, it is also the only way to a new class.
    """
    if absent_classes(task, before):
        return False
    is_only_way = not before.statistics and len(task.classes) > len(before.classes)
    return is_only_way or len(task.train.labels) >= num_before


def chosen_of(candidates: Sequence[Candidate]) -> Candidate:
    """The candidate with the most correct answers to new validation images, of those that lose
    nothing.

    Where the task can stay as it is (the first candidate then), another one has to be better on the
    new validation images and must not be worse on the samples. With new classes, old and new count
    alike.
    """
    first = candidates[0]
    if first.kind != "unchanged":
        return max(candidates, key=lambda one: one.new + (one.old or 0))
    kept = [
        one for one in candidates[1:] if one.new > first.new and (one.old or 0) >= (first.old or 0)
    ]
    return max(kept, key=lambda one: one.new, default=first)


def _shares(
    head: Head,
    val: Float[np.ndarray, "N D"],
    task: Task,
    samples: Float[np.ndarray, "S D"],
    labels: np.ndarray,
) -> tuple[float, float | None]:
    new = float((logits_of(val, head).argmax(axis=1) == task.val.labels).mean())
    return new, (
        float((logits_of(samples, head).argmax(axis=1) == labels).mean()) if len(samples) else None
    )


def samples_of(
    statistics: Mapping[str, np.ndarray], seed: int
) -> tuple[Float[np.ndarray, "S D"], np.ndarray]:
    """Features of each class at random, from a normal distribution with its mean and the
    covariance, and labels."""
    means = statistics["means"].astype(np.float64)
    num = int(np.clip(SAMPLES // len(means), 10, 200))
    values, vectors = np.linalg.eigh(unpacked(statistics["covariance"]))
    noise = np.random.default_rng(seed).standard_normal((len(means) * num, means.shape[1]))
    labels = np.repeat(np.arange(len(means), dtype=np.int32), num)
    return means[labels] + noise @ (vectors * np.sqrt(np.maximum(values, 0))).T, labels


def moved(
    samples: Float[np.ndarray, "S D"],
    before: Float[np.ndarray, "N D"],
    after: Float[np.ndarray, "N D"],
) -> Float[np.ndarray, "S D"]:
    """Samples of one network's features in those of another, by ridge regression of their
    difference on images."""
    from sklearn.linear_model import RidgeCV  # here, because importing it takes half a second

    return samples + RidgeCV(len(before) * np.array(MOVE_PENALTIES)).fit(
        before, after - before
    ).predict(samples)


def new_temperature(
    before: TaskMemory, head: Head, samples: Float[np.ndarray, "S D"], labels: np.ndarray
) -> float:
    """The temperature of a new head on the task's network.

    With it, samples of the old classes get the mean log-probability that the old head gives them
    with its temperature, which was fitted on validation images. Fitted on samples it would be too
    low: they are easier than images.
    """
    wanted = log_probability(logits_of(samples, before.head) / before.temperature, labels)
    logits = logits_of(samples, head)
    most = float(np.log(MOST_TEMPERATURE))

    def apart(log_temperature):
        return abs(log_probability(logits / np.exp(log_temperature), labels) - wanted)

    found: Any = minimize_scalar(apart, bounds=(-most, most), method="bounded")
    return float(np.exp(found.x))


def class_statistics(
    features: Float[np.ndarray, "N D"], labels: Int[np.ndarray, "N"], num_classes: int
) -> dict[str, np.ndarray]:
    """Images and mean of each class (zeros without images), and the covariance within classes."""
    points = features.astype(np.float64)
    counts = np.bincount(labels, minlength=num_classes)
    means = np.zeros((num_classes, points.shape[1]))
    np.add.at(means, labels, points)
    means /= np.maximum(counts, 1)[:, None]
    apart = points - means[labels]
    return {
        "counts": counts,
        "means": means.astype(np.float32),
        "covariance": packed(apart.T @ apart / len(points)),
    }


def added_up(old: Mapping[str, np.ndarray], new: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The statistics of old and new images together, in the features of one network; `new` may have
    more classes."""
    num_new = len(new["counts"]) - len(old["counts"])
    counts, means = (
        np.pad(old["counts"], (0, num_new)),
        np.pad(old["means"], ((0, num_new), (0, 0))),
    )
    total = counts + new["counts"]
    share = new["counts"] / np.maximum(total, 1)
    apart = new["means"].astype(np.float64) - means
    between = (apart * (counts * share)[:, None]).T @ apart
    within = old["counts"].sum() * unpacked(old["covariance"]) + new["counts"].sum() * unpacked(
        new["covariance"]
    )
    joined = (means + share[:, None] * apart).astype(np.float32)
    return {
        "counts": total,
        "means": joined,
        "covariance": packed((within + between) / total.sum()),
    }


def mixed_quantiles(
    old: Float[np.ndarray, "Q"], new: Float[np.ndarray, "Q"], share: float
) -> Float[np.ndarray, "Q"]:
    """Quantiles of both sets of distances together, `share` of them old."""
    weights = np.repeat([share, 1 - share], NUM_QUANTILES)
    steps = np.linspace(0, 1, NUM_QUANTILES)
    found = np.quantile(np.concatenate([old, new]), steps, weights=weights, method="inverted_cdf")
    return found.astype(np.float32)


def discriminant_head(statistics: Mapping[str, np.ndarray], old: Head) -> Head:
    """Linear discriminant analysis: the class of the nearest mean by Mahalanobis distance under one
    covariance.

    Logits are scaled as those of the old head, which has the first of the classes, so that
    probabilities stay alike.
    """
    whitening = whitening_of(unpacked(statistics["covariance"]), SHRINKAGE)
    means = statistics["means"].astype(np.float64)
    weight = whitening @ (means @ whitening).T
    bias = -(means.T * weight).sum(axis=0) / 2
    norms = [
        np.linalg.norm(columns - columns.mean(axis=1, keepdims=True))
        for columns in (np.asarray(old.weight), weight[:, : old.bias.shape[0]])
    ]
    # a head of one class has no differences to follow
    scale = norms[0] / norms[1] if min(norms) > 1e-12 else 1.0
    return Head(jnp.asarray(scale * weight, jnp.float32), jnp.asarray(scale * bias, jnp.float32))
