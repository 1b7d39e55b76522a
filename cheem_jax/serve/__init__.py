"""Images answered over HTTP, and a page in the browser that shows which blocks ran (extra `serve`).

Here is what one request, and all of them together, may take of a server; the rest needs the extra's
packages.
"""

import dataclasses
import math


@dataclasses.dataclass(frozen=True)
class Limits:
    """What a server accepts."""

    max_body_mb: float = 10
    """Megabytes (2^20 bytes) of a request, at most."""
    max_pixels: int = 40_000_000
    """Width times height of an image, at most."""
    max_queue: int = 256
    """Images that may wait at one time; a request beyond them is refused (status 429)."""
    timeout_s: float = 10
    """Seconds until a request is answered; a slower upload ends in status 408, a slower answer in
    503."""
    batch_wait_ms: float = 2
    """Milliseconds that an image waits for others, because several are answered faster together."""
    max_batch: int = 32
    """Images that are answered together, and images of one request, at most."""

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
