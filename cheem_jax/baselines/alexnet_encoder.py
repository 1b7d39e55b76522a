"""AlexNet as a router's frozen encoder.

CHEEM-lite's centroids and MoE-Adapters' auto-encoders use the features of AlexNet, which are
float32. Images must have the size for which the network was built. The network is compiled once per
batch size.
"""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from flax import nnx
from jaxtyping import Float

from cheem_jax.backbone import alexnet
from cheem_jax.baselines.fitting import Inputs, over_batches
from cheem_jax.core.images import Images
from cheem_jax.core.settings import Advance, no_progress


class AlexNetEncoder:
    """An AlexNet as an `Encoder`; `AlexNetConfig.feature` selects the features."""

    def __init__(self, network: alexnet.AlexNet, *, jit: Callable[..., Any] = jax.jit):
        self.config = network.config
        self.name, self.width = self.config.name, self.config.width
        graphdef, self._state = nnx.split(network)
        self._features = jit(lambda state, images: nnx.merge(graphdef, state)(images))

    def flops(self, *, count_attention: bool = False) -> int:
        """Return the FLOPs per image. AlexNet has no attention, so `count_attention` has no effect.
        The method `executed_flops` returns the same number."""
        return alexnet.flops(self.config)

    executed_flops = flops

    def features(
        self, images: Images, *, batch_size: int, advance: Advance = no_progress
    ) -> Float[np.ndarray, "N D"]:
        """See `Encoder.features`."""
        return over_batches(
            lambda read: self._features(self._state, read["images"]),
            Inputs(images),
            batch_size=batch_size,
            advance=advance,
        )
