"""Change the internal memory: `learn` adds a task, and `extend` trains a task on more images.

Both functions also store quantiles of the task's router distances for open-set prediction, the
temperature of its class probabilities, and statistics of its classes (see `extending`).
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Float

from cheem_jax.backbone.weights import Pretrained
from cheem_jax.baselines.heads import grow_head
from cheem_jax.cheem.config import CheemConfig
from cheem_jax.cheem.expert_memory import router_arrays, task_network
from cheem_jax.cheem.learner import Cheem, Learning, expected_seconds, fits_of
from cheem_jax.cheem.training import SupernetFit
from cheem_jax.core.architecture import Choice, encode
from cheem_jax.core.keys import Keys, Phase, next_power_of_two
from cheem_jax.core.metrics import fit_temperature
from cheem_jax.core.ops import Expert
from cheem_jax.core.pool import (
    Candidates,
    DenseExperts,
    Head,
    InternalMemory,
    Pool,
    compute_logits,
    grow,
)
from cheem_jax.core.routing import NUM_QUANTILES, calibrate, centroid_distances
from cheem_jax.core.settings import FitConfig
from cheem_jax.data.task import Task
from cheem_jax.engine.choice import EngineConfig
from cheem_jax.engine.executor import Executor, Network
from cheem_jax.engine.passes import network_features
from cheem_jax.memory.contents import MemoryConfig
from cheem_jax.memory.extending import (
    Candidate,
    Statistics,
    absent_classes,
    add_router_statistics,
    add_statistics,
    best_candidate,
    can_finetune,
    class_statistics,
    discriminant_head,
    mix_quantiles,
    move_samples,
    new_temperature,
    sample_features,
)
from cheem_jax.memory.forgetting import without_numbers
from cheem_jax.run.method import FrozenFeatures
from cheem_jax.run.progress import Progress, duration
from cheem_jax.run.session import Session
from cheem_jax.run_config import find_base_means, make_networks

EFFECTS = {
    "unchanged": (
        "no change was better on the new validation images without a loss on the old classes, so"
        " network and head stay as they are"
    ),
    "head": "the network stays as it is and has a new head",
    "network": "the fine-tuned network is used",
}
"""Descriptions of an extension's effect, keyed by the kind of the selected candidate."""


class LearnerSetup(NamedTuple):
    """Networks, settings and PRNG keys of a learner."""

    executor: Executor
    config: CheemConfig
    keys: Keys
    base_means: np.ndarray | None
    """Mean CLS tokens of the pretraining data `[L, D]`; None if unknown."""
    features: FrozenFeatures
    """Features of the frozen backbone for the router."""

    def learner(self, memory: InternalMemory) -> "MemoryLearner":
        """Return a learner whose internal memory is `memory`."""
        learner = MemoryLearner(*self)
        learner.memory = memory
        return learner

    def costs(self, memory: InternalMemory) -> list[dict[str, Any]]:
        """Return the costs of each task, and whether the task is calibrated."""
        learner = self.learner(memory)
        return [
            {**learner.costs(index), "calibrated": task.distances is not None}
            for index, task in enumerate(memory.tasks)
        ]


def make_setup(pretrained: Pretrained, config: MemoryConfig, engine: EngineConfig) -> LearnerSetup:
    """Build the networks, settings and PRNG keys with which a memory learns."""
    networks = make_networks(pretrained, None, config.method, engine)
    base = find_base_means(
        pretrained, config.method, engine.precision, images=None, progress=Progress()
    )
    return LearnerSetup(
        networks.executor,
        config.method,
        Keys(config.seed, config.seeds),
        base.values,
        networks.router_features,
    )


def learn(
    memory: InternalMemory, task: Task, setup: LearnerSetup, session: Session
) -> tuple[InternalMemory, dict[str, Any]]:
    """Learn one more task. Return the memory with this task, and the report for the record."""
    learner = setup.learner(memory)
    index = len(memory.tasks)
    num = len(task.train.labels)
    seconds = expected_seconds(setup.executor, setup.config, task, session.saved)
    session.expect(seconds)
    # The estimate is rounded up to tens of seconds, because it is not more precise.
    text = duration(10 * max(math.ceil(seconds / 10), 1))
    session.say(
        f"task {index + 1}: {task.name}, {len(task.classes)} classes, {num:,} training images; "
        + (f"takes about {text}" if session.saved is None else f"about {text} left")
    )
    report = learner.learn(task, session)
    session.expect(None)
    config = setup.config
    return learner.memory, {
        "index": index,
        **{f"num_{name}": len(split.labels) for name, split in task.splits.items()},
        **({"skipped_images": list(task.skipped)} if task.skipped else {}),
        **report,
        **fit_settings(config, fits_of(config)),
    }


def fit_settings(config: CheemConfig, fits: Mapping[str, FitConfig]) -> dict[str, Any]:
    """Return the settings of a task's training for its report. `fits` are the training phases,
    keyed by name."""
    return {
        "epochs": {name: fit.epochs for name, fit in fits.items()},
        "learning_rate": config.finetune.learning_rate,
        "augment": config.augment,
    }


def extend(
    memory: InternalMemory,
    index: int,
    task: Task,
    setup: LearnerSetup,
    session: Session,
    earlier: Mapping[str, Any],
) -> tuple[InternalMemory, dict[str, Any]]:
    """Replace the task at `index` by a task that has also learned the images of `task`.

    `task` was relabelled by `label_among`, so its first classes are the learned classes. `earlier`
    is the latest report of the task at `index`. Returns the memory with the extended task as its
    last task, and the report. Predictions of all other tasks stay the same.
    """
    before = memory.tasks[index]
    name = task.name
    num_before = earlier["num_train"]
    more = len(task.classes) - len(before.classes)
    session.say(
        f"{name}: {len(task.train.labels):,} more images to learn from"
        f" ({num_before:,} before), {len(task.val.labels):,} for validation, {more} more"
        f" class{'' if more == 1 else 'es'} ({len(before.classes)} before)"
    )
    if absent := absent_classes(task, before):
        listed = ", ".join(absent[:8]) + (", ..." if len(absent) > 8 else "")
        reason = (
            f"no new images of {listed}; the network stays as it is, and the head is computed from"
            " the stored means and covariance of these classes"
        )
    elif can_finetune(task, before, num_before):
        reason = (
            "every learned class has new images, and there are enough of them, so fine-tuning is"
            " tried"
        )
    else:
        reason = (
            "there are fewer new images than before, so the network stays as it is, and a head"
            " computed from means and covariance of all images is tried"
        )
    session.say(f"{name}: {reason}")
    # fine-tuning starts from the weights of the learned task, and trains pairs at their rank
    ops = dataclasses.replace(setup.config.ops, rank=setup.config.ops.stored_rank)
    config = dataclasses.replace(setup.config, ops=ops, weights="inherited")
    learner = setup._replace(config=config).learner(memory)
    report = learner.extend(task, index, num_before, session)
    session.say(f"{name}: {describe_effect(report['extension'])}")
    sizes = {
        f"num_{split}": earlier[f"num_{split}"] + len(images.labels)
        for split, images in task.splits.items()
    }
    sizes_then = {
        "num_train": [num_before, sizes["num_train"]],
        "num_classes": [len(before.classes), len(task.classes)],
    }
    skipped = [*earlier.get("skipped_images", []), *task.skipped]
    if "similarity" in earlier:
        # similarities to tasks that were learned after this task are unknown
        unknown = [[None] * len(memory.pool)] * (len(memory.tasks) - index)
        earlier = {**earlier, "similarity": [*earlier["similarity"], *unknown]}
    if report["extension"]["kept"] != "unchanged":
        # the frozen backbone was compared with the head before the extension
        earlier = {key: value for key, value in earlier.items() if key != "frozen_head"}
    return without_numbers(learner.memory, memory.numbers[index]).memory, {
        **earlier,
        **report,
        **sizes,
        "index": len(memory.tasks),
        "extended": [*earlier.get("extended", []), sizes_then],
        "tested_on": "test" if len(task.test.labels) else "validation",
        "num_tested": len(task.test.labels) or len(task.val.labels),
        **({"skipped_images": skipped} if skipped else {}),
        "seconds": dict(Counter(earlier["seconds"]) + Counter(report["seconds"])),
    }


def describe_effect(extension: Mapping[str, Any]) -> str:
    """Describe the effect of an extension, with the accuracies on old and new classes."""
    candidates = extension["candidates"]
    num = extension["validation_images"]
    before = candidates.get("unchanged")
    after = candidates[extension["kept"]]

    def compare(key: str) -> str:
        if before is None:
            return f"{100 * after[key]:.1f} %"
        return f"{100 * before[key]:.1f} % before, {100 * after[key]:.1f} % now"

    text = (
        f"{EFFECTS[extension['kept']]}; {compare('new')} on {num:,} new validation"
        f" image{'' if num == 1 else 's'}"
    )
    if after["old"] is not None:
        text += (
            f", {compare('old')} on samples from the stored means and covariance of the old classes"
        )
    return text


class MemoryLearner(Cheem):
    """A learner that calibrates each task, and can extend it."""

    always_compares = True

    def calibrate(self, learning: Learning, features: Float[np.ndarray, "N D"]) -> None:
        """Store router distances, temperature and class statistics of the new task."""
        task = learning.task
        last = self.memory.tasks[-1]
        val = self._val_features(learning, task_network(self.dense, last.experts))
        self._change_last(
            distances=self._quantiles(task, last.centroids),
            temperature=fit_temperature(compute_logits(val, last.head), task.val.labels),
            statistics=class_statistics(features, task.train.labels, len(task.classes)),
        )
        self.features.forget(task)

    def bytes_needed(self, task: Task) -> int:
        """Estimate the disk space for learning a task, with the statistics of its classes."""
        return super().bytes_needed(task) + self._bytes_of_statistics(len(task.classes))

    def bytes_to_extend(self, task: Task, index: int) -> int:
        """Estimate the disk space for extending the task at `index` by `task`, which has all
        classes.

        The parameters are those of the extended task's experts, which can be full, and of its
        padded head. As in `bytes_needed`, they are in the checkpoint, and with Adam's moments in
        two rolling checkpoints. The router keeps its centroids and adds those of the new images.
        """
        before = self.memory.tasks[index]
        experts = [stored.params for stored in self.memory.added(index).values()]
        num = sum(leaf.size for leaf in jax.tree.leaves(experts))
        num += (self.executor.config.width + 1) * next_power_of_two(len(task.classes))
        router = self.router_numbers(task) + sum(array.size for array in router_arrays(before))
        statistics = self._bytes_of_statistics(len(task.classes))
        return 4 * ((2 * 3 + 1) * num + router) + statistics

    def _bytes_of_statistics(self, num_classes: int) -> int:
        """Return the size of a task's mean CLS tokens, class statistics and router distances."""
        width, depth = self.executor.config.width, self.executor.config.depth
        num = (depth + num_classes) * width + width * (width + 1) // 2 + NUM_QUANTILES
        return 4 * num + 8 * num_classes  # counts are int64

    def extend(self, task: Task, index: int, num_before: int, session: Session) -> dict[str, Any]:
        """Train a copy of the task at `index` on the images of `task`; return the report.

        The copy starts with the same experts. `best_candidate` selects one of up to three
        candidates: the unchanged task (only if there are no new classes), the same network with a
        head computed from the statistics of all classes, and the fine-tuned network. `can_finetune`
        returns whether fine-tuning is a candidate; `num_before` is the number of earlier training
        images. In every case, the router's statistics of old and new images are combined
        (`add_router_statistics`).
        """
        before = self.memory.tasks[index]
        labels = task.train.labels
        num_classes = len(task.classes)
        experts = {block: stored.params for block, stored in self.memory.added(index).items()}
        # An adapted expert whose parent was erased is a full expert now.
        architecture = tuple(
            Choice("new")
            if choice.kind == "adapt" and isinstance(experts[block], Expert)
            else choice
            for block, choice in enumerate(before.architecture)
        )
        # the supernet contains only the experts of this architecture, and expert 0 of every block
        used = tuple((0, choice.expert) if choice.expert else (0,) for choice in architecture)
        chosen = tuple(
            Choice(choice.kind, None if choice.expert is None else block.index(choice.expert))
            for choice, block in zip(architecture, used, strict=True)
        )
        learning = dataclasses.replace(
            self.begin(task, session), candidates=Candidates(used, self.dense.chosen(used), [])
        )
        supernet = self._supernet(learning, Phase.FINETUNE_INIT)
        head = grow_head(
            self.keys.at(learning.index, Phase.METHOD_INIT),
            before.head,
            self.executor.config.width,
            len(before.classes),
            num_classes - len(before.classes),
        )
        params = {(block, chosen[block]): params for block, params in experts.items()}
        fitting = SupernetFit(supernet, supernet.start_from(params, head))
        # Orbax cannot store an empty tree, and without this state, a rolling checkpoint could have
        # no arrays
        if "finetune" not in learning.underway.fits:
            learning.underway.keep("finetune", fitting)

        def version(fitting: SupernetFit) -> Version:
            learned = supernet.learned(fitting.state, chosen)
            pool, experts = grow(self.memory.pool, architecture, learned, learning.index)
            network = task_network(DenseExperts(pool, 0), experts)
            summary = self.finished_means(learning, fitting, network)
            statistics = class_statistics(summary.features, labels, num_classes)
            val = self._val_features(learning, network)
            return Version(pool, experts, summary.means[0], summary.features, statistics, val)

        def candidate(kind: Any, head: Head, val: np.ndarray, samples: np.ndarray) -> Candidate:
            new = _accuracy(val, head, task.val.labels)
            old = _accuracy(samples, head, sample_labels) if len(samples) else None
            return Candidate(kind, head, new, old)

        result = version(fitting)
        seed = self.keys.seed_at(learning.index, Phase.METHOD_NOISE)
        samples, sample_labels = sample_features(before.statistics, seed)
        candidates = []
        if num_classes == len(before.classes):
            candidates.append(candidate("unchanged", before.head, result.val, samples))
        if before.statistics:
            statistics = add_statistics(before.statistics, result.statistics)
            result = result._replace(statistics=statistics)
            head = discriminant_head(statistics, before.head)
            candidates.append(candidate("head", head, result.val, samples))
        training = {}
        tuned = None
        if can_finetune(task, before, num_before):
            fitting = self.finetune(learning, fitting, encode(chosen, learning.candidates.sizes))
            tuned = version(fitting)
            moved = samples
            if len(samples):
                moved = move_samples(samples, result.features, tuned.features)
            head = supernet.trained_head(fitting.state)
            candidates.append(candidate("network", head, tuned.val, moved))
        best = best_candidate(candidates)
        temperature = before.temperature
        if best.kind == "network":
            assert tuned is not None
            result = tuned
            training = {
                "finetune_losses": fitting.progress.losses,
                **fit_settings(self.config, {"finetune": self.config.finetune}),
            }
            # fine-tuning requires images of every class, so the temperature can be fitted to the
            # new validation images
            temperature = fit_temperature(compute_logits(result.val, best.head), task.val.labels)
        elif best.kind == "head":
            temperature = new_temperature(
                before, best.head, samples, sample_labels, result.val, task.val.labels
            )
        share = num_before / (num_before + len(labels))
        self.remember(
            task,
            pool=result.pool,
            architecture=architecture,
            experts=result.experts,
            head=best.head,
            means=share * before.means + (1 - share) * result.means,
            seed=self.keys.seed_at(learning.index, Phase.CENTROIDS),
            session=session,
        )
        places = add_router_statistics(
            before.router_statistics, self.memory.tasks[-1].router_statistics, labels, num_classes
        )
        quantiles = self._quantiles(task, places.centroids)
        self._change_last(
            centroids=places.centroids,
            moments=places.moments,
            distances=(
                None
                if before.distances is None
                else mix_quantiles(before.distances, quantiles, share)
            ),
            temperature=temperature,
            statistics=result.statistics,
        )
        self.features.forget(task)
        return {
            **self.costs(len(self.memory.tasks) - 1),
            **training,
            "extension": {
                "kept": best.kind,
                "validation_images": len(task.val.labels),
                "candidates": {one.kind: {"new": one.new, "old": one.old} for one in candidates},
            },
            "pool": self.memory.history(),
            "seconds": session.seconds,
        }

    def _val_features(self, learning: Learning, network: Network) -> Float[np.ndarray, "N D"]:
        num = len(learning.task.val.labels)
        (features,) = network_features(
            self.executor, [network], learning.val, num, batch_size=self.batch_size
        )
        return features

    def _quantiles(self, task: Task, centroids: Float[np.ndarray, "K E"]) -> Float[np.ndarray, "Q"]:
        features = self.features(task.val.images)
        return calibrate(centroid_distances(features, [centroids])[:, 0])

    def _change_last(self, **changes: Any) -> None:
        *earlier, last = self.memory.tasks
        tasks = (*earlier, dataclasses.replace(last, **changes))
        self.memory = dataclasses.replace(self.memory, tasks=tasks)


class Version(NamedTuple):
    """A version of an extended task's network, and the features that it computes."""

    pool: Pool
    experts: tuple[int | None, ...]
    means: Float[np.ndarray, "L D"]
    features: Float[np.ndarray, "N D"]
    """Features of the training images."""
    statistics: Statistics
    val: Float[np.ndarray, "V D"]
    """Features of the validation images."""


def _accuracy(features: Float[np.ndarray, "N D"], head: Head, labels: np.ndarray) -> float:
    return float((compute_logits(features, head).argmax(axis=1) == labels).mean())
