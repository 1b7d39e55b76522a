"""What a memory answers about one image."""

import dataclasses
from typing import Any, NamedTuple


class Guess(NamedTuple):
    """A class of the answering task and its probability in [0, 1]."""

    label: str
    probability: float


class NearTask(NamedTuple):
    """A task and how far the image is from it: as the router compares them, below 0 for some kinds."""

    task: str
    distance: float


@dataclasses.dataclass(frozen=True)
class Prediction:
    """The answer to one image, decided from that image alone."""

    task: str | None
    """The task whose network answered; None where the image belongs to none of them (open set)."""
    guesses: tuple[Guess, ...]
    """Classes of that task, the most probable first; () where there is no task, or its network gives no numbers."""
    near: tuple[NearTask, ...]
    """Tasks by distance, the nearest first."""
    blocks: tuple[str, ...]
    """What ran in each block of the answering network, such as `reuse:0`, `adapt:2`, `new`, `skip`; () without a
    task."""

    @property
    def label(self) -> str | None:
        """The class, None where there is no task."""
        return self.guesses[0].label if self.guesses else None

    @property
    def probability(self) -> float | None:
        """The class's probability within its task, None where there is no task."""
        return self.guesses[0].probability if self.guesses else None

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "task": self.task,
            "class": self.label,
            "probability": self.probability,
            "runners_up": [{"class": label, "probability": probability} for label, probability in self.guesses[1:]],
            "near": [near._asdict() for near in self.near],
            "blocks": list(self.blocks),
        }
