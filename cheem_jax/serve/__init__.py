"""A server that predicts over HTTP, with a page that displays the op of each block. The server
requires the extra `serve`.

This module contains only the limits of requests, so importing it does not require the packages of
the extra.
"""

import dataclasses
import math

from cheem_jax.core.settings import check_types


@dataclasses.dataclass(frozen=True)
class Limits:
    """Limits of a server."""

    max_body_mb: float = 10
    """Maximum size of the body of a request in MiB (2^20 bytes)."""
    max_pixels: int = 40_000_000
    """Maximum number of pixels (width times height) of an image."""
    max_queue: int = 256
    """Maximum number of waiting images; further requests are refused with status 429."""
    timeout_s: float = 10
    """Maximum number of seconds per request. A slower upload is answered with status 408, and a
    slower prediction with status 503."""
    batch_wait_ms: float = 2
    """Maximum time in milliseconds that the first image of a batch waits for further images."""
    max_batch: int = 32
    """Maximum number of images per batch and per request."""

    def __post_init__(self) -> None:
        check_types(self)
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(Limits)}
        wrong = [
            f"{name} is {value:g}" for name, value in values.items() if not 0 <= value < math.inf
        ]
        wrong += [
            f"{name} is 0"
            for name, value in values.items()
            if value == 0 and name != "batch_wait_ms"
        ]
        if wrong:
            raise ValueError(f"{'; '.join(wrong)}; expected finite numbers above 0")

    @property
    def max_body_bytes(self) -> int:
        """Maximum number of bytes in the body of a request."""
        return int(self.max_body_mb * 2**20)
