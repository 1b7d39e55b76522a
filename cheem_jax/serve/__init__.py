"""Predictions over HTTP, and a page that shows the op of each block (extra `serve`).

This module has the limits of requests; the others import the packages of the extra.
"""

import dataclasses
import math


@dataclasses.dataclass(frozen=True)
class Limits:
    """Limits of a server."""

    max_body_mb: float = 10
    """Size of a request in megabytes (2^20 bytes), at most."""
    max_pixels: int = 40_000_000
    """Width times height of an image, at most."""
    max_queue: int = 256
    """Images that can wait at the same time; further requests are refused (status 429)."""
    timeout_s: float = 10
    """Seconds per request, at most; a slower upload gets status 408, a slower prediction 503."""
    batch_wait_ms: float = 2
    """Milliseconds that an image waits for others of its batch."""
    max_batch: int = 32
    """Images per batch and per request, at most."""

    def __post_init__(self) -> None:
        given = {field.name: getattr(self, field.name) for field in dataclasses.fields(Limits)}
        wrong = [
            f"{name} is {value:g}" for name, value in given.items() if not 0 <= value < math.inf
        ]
        wrong += [
            f"{name} is 0"
            for name, value in given.items()
            if value == 0 and name != "batch_wait_ms"
        ]
        if wrong:
            raise ValueError(f"{'; '.join(wrong)}; expected finite numbers above 0")

    @property
    def max_body_bytes(self) -> int:
        """Bytes of a request's body."""
        return int(self.max_body_mb * 2**20)
