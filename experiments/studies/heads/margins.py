"""Margins of finished runs: the best logit of an image's task minus that of all other classes."""

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import numpy as np
from jaxtyping import Float, Int

from cheem_jax.backbone.weights import Pretrained
from cheem_jax.baselines.catalogue import FrozenNetworks, make, preset_of
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
from studies.heads.theory import match_probability, match_with_unequal_rivals

GLOBAL_HEADS = ("ewc", "moal", "coda_prompt", "dualprompt", "l2p")
"""Methods that compute comparable logits of all classes with one pass and one head."""

FEW = 10
"""Classes with fewer images have no separate normal fit."""


class Margins(NamedTuple):
    """Statistics of the logits of one task's test images."""

    task: str
    num_rivals: int
    """Classes of other tasks."""
    best_own: Float[np.ndarray, "N"]
    """Largest logit within the task, the paper's Z*."""
    best_rival: Float[np.ndarray, "N"]
    """Largest logit of all other classes."""
    rival_mean: float
    """Over images and rivals."""
    rival_std: float
    accuracy: float
    """By the largest logit of all classes, in [0, 1]."""
    local_accuracy: float
    """By the largest logit within the task."""
    predicted_by_class: float
    """Match probability if each rival has a separate mean and deviation for each true class."""

    @property
    def margin(self) -> Float[np.ndarray, "N"]:
        """Above 0 if the argmax within the task is that over all classes."""
        return self.best_own - self.best_rival


class Fit(NamedTuple):
    """Mean and standard deviation of the best logit within the task and of a rival's."""

    local_mean: float
    local_std: float
    rival_mean: float
    rival_std: float

    @property
    def gap(self) -> float:
        return self.local_mean - self.rival_mean

    @property
    def scaled_gap(self) -> float:
        """The gap over the root mean square of both deviations."""
        return self.gap / float(np.sqrt((self.local_std**2 + self.rival_std**2) / 2))

    def match(self, num_rivals: int) -> float:
        """P(Z* exceeds all rivals) for normal and independent logits."""
        return match_probability(self.gap, self.local_std, self.rival_std, num_rivals)


class Measured(NamedTuple):
    """A run with the margins of its tasks; without margins if every task has a separate head."""

    run: RunRecord
    margins: Sequence[Margins]

    @property
    def method(self) -> str:
        return self.run.results["method"]


def margins_of(
    task: str, logits: Float[np.ndarray, "N C"], labels: Int[np.ndarray, "N"], first: int, num: int
) -> Margins:
    """Margins from the logits of all classes; columns `first` to `first + num` are the task's.

    Raises ValueError for non-finite logits and without a rival.
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
    rivals = np.delete(logits, np.s_[first : first + num], axis=1)
    return Margins(
        task,
        rivals.shape[1],
        local.max(axis=1),
        rivals.max(axis=1),
        float(rivals.mean()),
        float(rivals.std()),
        accuracy=float((logits.argmax(axis=1) == first + labels).mean()),
        local_accuracy=float((local.argmax(axis=1) == labels).mean()),
        predicted_by_class=by_class(local.max(axis=1), rivals, labels),
    )


def by_class(
    best: Float[np.ndarray, "N"], rivals: Float[np.ndarray, "N M"], labels: Int[np.ndarray, "N"]
) -> float:
    """Match probability from separate normal fits of Z* and of each rival for each true class.

    Rare classes share one fit; they are left out if they have too few images even together, because
    such a fit would only repeat the images.
    """
    groups = np.where(np.bincount(labels)[labels] < FEW, -1, labels)
    probabilities = []
    sizes = []
    for group in np.unique(groups):
        z, others = best[groups == group], rivals[groups == group]
        if len(z) >= min(FEW, len(labels)):
            sizes.append(len(z))
            probabilities.append(
                match_with_unequal_rivals(
                    float(z.mean()), float(z.std()), others.mean(axis=0), others.std(axis=0)
                )
            )
    return float(np.average(probabilities, weights=sizes))


def fit_of(parts: Sequence[Margins]) -> Fit:
    """Normal fits of the logits of one task, or of several tasks together."""
    best = np.concatenate([margins.best_own for margins in parts])
    weights = np.array(
        [len(margins.best_own) * margins.num_rivals for margins in parts], np.float64
    )
    means, stds = (
        np.array([getattr(margins, name) for margins in parts])
        for name in ("rival_mean", "rival_std")
    )
    mean = np.average(means, weights=weights)
    variance = np.average(stds**2 + (means - mean) ** 2, weights=weights)
    return Fit(float(best.mean()), float(best.std()), float(mean), float(np.sqrt(variance)))


def summary(parts: Sequence[Margins]) -> dict[str, Any]:
    """Measured and predicted probabilities, in [0, 1], of one task or of several together.

    `predicted` uses one normal fit for all; it is the mean over images of the match probability for
    their number of rivals.
    """
    fit = fit_of(parts)
    margin = np.concatenate([margins.margin for margins in parts])
    images = [len(margins.margin) for margins in parts]

    def mean(values: Sequence[float]) -> float:
        return float(np.average(values, weights=images))

    return {
        "images": len(margin),
        "rivals": mean([margins.num_rivals for margins in parts]),
        **fit._asdict(),
        "scaled_gap": fit.scaled_gap,
        "margin_mean": float(margin.mean()),
        "margin_std": float(margin.std()),
        "match": float((margin >= 0).mean()),
        "predicted": mean([fit.match(margins.num_rivals) for margins in parts]),
        "predicted_by_class": mean([margins.predicted_by_class for margins in parts]),
        "accuracy": mean([margins.accuracy for margins in parts]),
        "local_accuracy": mean([margins.local_accuracy for margins in parts]),
    }


def by_task(measured: Measured) -> list[dict[str, Any]]:
    """The summary of each task of a run, with stream, backbone, method and seed."""
    (stream, backbone), seed = measured.run.place, measured.run.results["seed"]
    about = {"stream": stream, "backbone": backbone, "method": measured.method, "seed": seed}
    return [{**about, "task": margins.task, **summary([margins])} for margins in measured.margins]


def check_same(run: RunRecord, stream: Stream, pretrained: Pretrained) -> None:
    """ValueError for other images, labels or weights than the run's."""
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
    """Margins of every task after the last one, from the run's checkpoints and images.

    Raises ValueError for other images or weights than the run's and for incomplete checkpoints.
    """
    check_same(run, stream, pretrained)
    name = run.results["method"]
    file = run.directory / "config.json"
    engine = parse_settings(EngineConfig, run.config["engine"], file)
    config = parse_settings(type(preset_of(name, "paper")), run.config[name], file)
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
