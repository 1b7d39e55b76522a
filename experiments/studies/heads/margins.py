"""Margins of finished runs: the best logit of an image's task minus the best logit of all other
classes."""

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import numpy as np
from jaxtyping import Float, Int

from cheem_jax.backbone.weights import Pretrained
from cheem_jax.baselines.catalogue import FrozenNetworks, make, make_preset
from cheem_jax.baselines.ewc import Ewc
from cheem_jax.baselines.moal import Moal
from cheem_jax.baselines.prompting import Prompting
from cheem_jax.core.keys import Keys
from cheem_jax.data.task import Stream
from cheem_jax.data.task import fingerprint as data_hash
from cheem_jax.engine.choice import EngineConfig
from cheem_jax.memory.contents import parse_settings
from cheem_jax.report.finished import RunRecord
from cheem_jax.run_config import make_networks
from studies.heads.theory import match_probability, match_with_unequal_others

GLOBAL_HEADS = ("ewc", "moal", "coda_prompt", "dualprompt", "l2p")
"""Methods that compute comparable logits of all classes with one pass and one head."""

FEW = 10
"""Minimum number of images of a class for a separate normal fit."""


class Margins(NamedTuple):
    """Statistics of the logits of one task's test images."""

    task: str
    num_others: int
    """Number of classes of other tasks."""
    best_own: Float[np.ndarray, "N"]
    """Largest logit within the task, the paper's Z*."""
    best_other: Float[np.ndarray, "N"]
    """Largest logit of all other classes."""
    other_mean: float
    """Mean over images and other classes."""
    other_std: float
    accuracy: float
    """Accuracy in [0, 1] of the largest logit of all classes."""
    local_accuracy: float
    """Accuracy in [0, 1] of the largest logit within the task."""
    predicted_by_class: float
    """Match probability if every other class has a separate mean and deviation for each true
    class."""

    @property
    def margin(self) -> Float[np.ndarray, "N"]:
        """Difference of the best logits; above 0 if the argmax within the task is the argmax over
        all classes."""
        return self.best_own - self.best_other


class Fit(NamedTuple):
    """Mean and standard deviation of the best logit within the task and of the logit of another
    class."""

    local_mean: float
    local_std: float
    other_mean: float
    other_std: float

    @property
    def gap(self) -> float:
        return self.local_mean - self.other_mean

    @property
    def scaled_gap(self) -> float:
        """Gap divided by the root mean square of both deviations."""
        return self.gap / float(np.sqrt((self.local_std**2 + self.other_std**2) / 2))

    def match(self, num_others: int) -> float:
        """Compute P(Z* exceeds the logits of all other classes) for normal and independent
        logits."""
        return match_probability(self.gap, self.local_std, self.other_std, num_others)


class Measured(NamedTuple):
    """A run with the margins of its tasks; there are none if every task has a separate head."""

    run: RunRecord
    margins: Sequence[Margins]

    @property
    def method(self) -> str:
        return self.run.results["method"]


def margins_of(
    task: str, logits: Float[np.ndarray, "N C"], labels: Int[np.ndarray, "N"], first: int, num: int
) -> Margins:
    """Compute margins from the logits of all classes; columns `first` to `first + num` are those of
    the task.

    Raises ValueError for non-finite logits and if there is no other class.
    """
    if not np.isfinite(logits).all():
        raise ValueError(
            f"task {task!r}: {int((~np.isfinite(logits)).sum())} logits are non-finite"
        )
    if logits.shape[1] == num:
        raise ValueError(
            f"all {num} classes are those of {task!r}; a head of one task has no other classes to"
            " compare with"
        )
    logits = logits.astype(np.float64)
    local = logits[:, first : first + num]
    others = np.delete(logits, np.s_[first : first + num], axis=1)
    return Margins(
        task,
        others.shape[1],
        local.max(axis=1),
        others.max(axis=1),
        float(others.mean()),
        float(others.std()),
        accuracy=float((logits.argmax(axis=1) == first + labels).mean()),
        local_accuracy=float((local.argmax(axis=1) == labels).mean()),
        predicted_by_class=by_class(local.max(axis=1), others, labels),
    )


def by_class(
    best: Float[np.ndarray, "N"], others: Float[np.ndarray, "N M"], labels: Int[np.ndarray, "N"]
) -> float:
    """Compute the match probability from separate normal fits of Z* and of the logits of every
    other class for each true class.

    Rare classes share one fit. They are left out if they have too few images even together, because
    such a fit would only repeat the images.
    """
    groups = np.where(np.bincount(labels)[labels] < FEW, -1, labels)
    probabilities = []
    sizes = []
    for group in np.unique(groups):
        z, logits = best[groups == group], others[groups == group]
        if len(z) >= min(FEW, len(labels)):
            sizes.append(len(z))
            probabilities.append(
                match_with_unequal_others(
                    float(z.mean()), float(z.std()), logits.mean(axis=0), logits.std(axis=0)
                )
            )
    return float(np.average(probabilities, weights=sizes))


def fit_of(parts: Sequence[Margins]) -> Fit:
    """Fit normal distributions to the logits of one task, or of more than one task together."""
    best = np.concatenate([margins.best_own for margins in parts])
    weights = np.array(
        [len(margins.best_own) * margins.num_others for margins in parts], np.float64
    )
    means, stds = (
        np.array([getattr(margins, name) for margins in parts])
        for name in ("other_mean", "other_std")
    )
    mean = np.average(means, weights=weights)
    variance = np.average(stds**2 + (means - mean) ** 2, weights=weights)
    return Fit(float(best.mean()), float(best.std()), float(mean), float(np.sqrt(variance)))


def summary(parts: Sequence[Margins]) -> dict[str, Any]:
    """Summarise measured and predicted probabilities in [0, 1] of one task, or of more than one
    task together.

    `predicted` uses one normal fit for all tasks; it is the mean over images of the match
    probability for their number of other classes.
    """
    fit = fit_of(parts)
    margin = np.concatenate([margins.margin for margins in parts])
    images = [len(margins.margin) for margins in parts]

    def mean(values: Sequence[float]) -> float:
        return float(np.average(values, weights=images))

    return {
        "images": len(margin),
        "others": mean([margins.num_others for margins in parts]),
        **fit._asdict(),
        "scaled_gap": fit.scaled_gap,
        "margin_mean": float(margin.mean()),
        "margin_std": float(margin.std()),
        "match": float((margin >= 0).mean()),
        "predicted": mean([fit.match(margins.num_others) for margins in parts]),
        "predicted_by_class": mean([margins.predicted_by_class for margins in parts]),
        "accuracy": mean([margins.accuracy for margins in parts]),
        "local_accuracy": mean([margins.local_accuracy for margins in parts]),
    }


def by_task(measured: Measured) -> list[dict[str, Any]]:
    """Return the summary of each task of a run, with stream, backbone, method and seed."""
    (stream, backbone), seed = measured.run.place, measured.run.results["seed"]
    about = {"stream": stream, "backbone": backbone, "method": measured.method, "seed": seed}
    return [{**about, "task": margins.task, **summary([margins])} for margins in measured.margins]


def check_same(run: RunRecord, stream: Stream, pretrained: Pretrained) -> None:
    """Raise ValueError if images, labels or weights differ from those of the run."""
    expected = run.config["data_sha256"]
    actual = {task.name: data_hash(task) for task in stream.tasks}
    if other := [
        name
        for name in dict.fromkeys([*run.order, *actual])
        if expected.get(name) != actual.get(name)
    ]:
        raise ValueError(
            f"{run.directory} had other images or labels of {', '.join(other)} than {stream.name!r}"
            " contains here; give the --stream, --data-dir and --split-seed of that run"
        )
    if pretrained.sha256 != (weights := run.config["weights_sha256"]):
        raise ValueError(
            f"{run.directory} began with weights {weights:.12}, but those of"
            f" {pretrained.config.name!r} from {pretrained.source} are {pretrained.sha256:.12};"
            " give its --weights"
        )


def measure(
    run: RunRecord,
    stream: Stream,
    pretrained: Pretrained,
    workshop: dict[Any, FrozenNetworks] | None = None,
) -> list[Margins]:
    """Measure the margins of every task after the last one, from the run's checkpoints and images.

    Raises ValueError if images or weights differ from those of the run, and for incomplete
    checkpoints.
    """
    check_same(run, stream, pretrained)
    name = run.results["method"]
    file = run.directory / "config.json"
    engine = parse_settings(EngineConfig, run.config["engine"], file)
    config = parse_settings(type(make_preset(name, "paper")), run.config[name], file)
    networks = make_networks(pretrained, None, config, engine, workshop=workshop)
    method = cast(
        Prompting | Ewc | Moal, make(config, networks, Keys(run.config["seed"]), len(stream.tasks))
    )
    method.open(run.directory / "checkpoints" / name)
    if (names := tuple(method.classes.names)) != run.order:
        raise ValueError(
            f"{run.directory} learned {run.order}, but its checkpoints contain {names};"
            " restore the rest"
        )
    first = method.classes.first
    margins = []
    for index, task in enumerate(stream.tasks):
        logits = method.logits(task.test.images)[:, : first[-1]]
        margins.append(
            margins_of(task.name, logits, task.test.labels, int(first[index]), len(task.classes))
        )
    return margins
