"""What one request and all of them together may take, and how a request is refused."""

import contextlib
import dataclasses
from collections.abc import Iterator

from starlette.exceptions import HTTPException

HELD_BODIES = 16
"""Bodies of the largest size that are held at one time, read or half read."""


@dataclasses.dataclass(frozen=True)
class Limits:
    """What a server accepts."""

    max_body_bytes: int = 10 * 2**20
    """Bytes of a request's body."""
    max_pixels: int = 40_000_000
    """Width times height of an image."""
    max_queue: int = 256
    """Images that are in the server at one time, from the first byte to the answer."""
    max_batch: int = 32
    """Images in one call of the predictor, and in one form."""
    batch_wait_seconds: float = 0.002
    """How long an image waits for others to be answered with."""
    timeout_seconds: float = 10.0
    """From a request's first byte to its answer."""


class Refused(HTTPException):
    """A request that gets a sentence instead of a prediction; `reason` is the word that counts it."""

    def __init__(self, status: int, reason: str, sentence: str, *, retry_after: int | None = None):
        headers = None if retry_after is None else {"Retry-After": str(retry_after)}
        super().__init__(status, sentence, headers)
        self.reason = reason


class Visit:
    """The places and bytes that one request holds."""

    def __init__(self, places: "Places"):
        self._places, self.images, self.held = places, 0, 0

    def take(self, num: int) -> None:
        """Places for so many pictures more."""
        places = self._places
        if places.images + num > places.limits.max_queue:
            raise Refused(429, "queue_full", "too many images are waiting; try again in a second", retry_after=1)
        self.images, places.images = self.images + num, places.images + num

    def hold(self, num_bytes: int) -> None:
        """So many bytes more of the body are kept."""
        places = self._places
        if places.held + num_bytes > HELD_BODIES * places.limits.max_body_bytes:
            raise Refused(429, "memory_full", "too many large images at one time; try again in a second", retry_after=1)
        self.held, places.held = self.held + num_bytes, places.held + num_bytes

    def let_go(self) -> None:
        """The body is kept no longer."""
        self.held, self._places.held = 0, self._places.held - self.held


class Places:
    """All pictures that are in the server, and the bytes of their files."""

    def __init__(self, limits: Limits):
        self.limits, self.images, self.held = limits, 0, 0

    @contextlib.contextmanager
    def visit(self) -> Iterator[Visit]:
        """One request with one picture so far; raises Refused (429) where no place is free."""
        visit = Visit(self)
        visit.take(1)
        try:
            yield visit
        finally:
            visit.let_go()
            self.images -= visit.images
