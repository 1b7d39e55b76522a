"""CHEEM-lite: CHEEM whose tasks are named by a lighter network than the one that answers.

The paper routes with DeiT-Tiny or AlexNet in front of ViT-B, which nearly halves its FLOPs (table on CHEEM-lite). All
that is learned is CHEEM's; the centroids are those of the lighter network's features.
"""

import dataclasses
from typing import ClassVar

from cheem_jax.cheem.config import CheemConfig
from cheem_jax.cheem.learner import Cheem


@dataclasses.dataclass(frozen=True)
class CheemLiteConfig(CheemConfig):
    """The settings of CHEEM; the run has to name a lighter network as its router."""

    name: ClassVar[str] = "cheem_lite"


class CheemLite(Cheem):
    """See the module."""

    name = "cheem_lite"
