"""Pictures of many clients answered together, by one thread that calls the predictor."""

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
from jaxtyping import UInt8

from cheem_jax.memory.prediction import Prediction


@runtime_checkable
class Predictor(Protocol):
    """What a server asks; `cheem_jax.memory.predictor` makes one from a memory."""

    @property
    def image_size(self) -> int:
        """Pixels of the square images."""
        ...

    @property
    def tasks(self) -> tuple[str, ...]:
        """Names of the tasks that may answer."""
        ...

    @property
    def classes(self) -> dict[str, tuple[str, ...]]:
        """Class names of each task."""
        ...

    @property
    def architectures(self) -> dict[str, tuple[str, ...]]:
        """What runs in each block of each task's network, such as `reuse:0` or `skip`."""
        ...

    def counters(self) -> dict[str, int]:
        """Networks of tasks that were there when an image came (`hits`), or not (`misses`), `evictions`, `bytes`."""
        ...

    def prepare(self) -> None:
        """Compiles whatever a call can need."""
        ...

    def __call__(self, images: UInt8[np.ndarray, "N S S 3"]) -> list[Prediction]:
        """One answer per picture, in order."""
        ...


class Closed(Exception):
    """The server ends, and this picture was not answered."""


class _Waiting(NamedTuple):
    image: UInt8[np.ndarray, "S S 3"]
    answer: asyncio.Future[Prediction]


class Batcher:
    """Collects pictures for a moment and gives them to `predict` in one call, in a thread of `executor`."""

    def __init__(
        self,
        predict: Callable[[np.ndarray], Sequence[Prediction]],
        executor: Executor,
        *,
        max_batch: int,
        wait_seconds: float,
        on_batch: Callable[[int], object],
    ):
        self._predict, self._executor = predict, executor
        self._max_batch, self._wait_seconds, self._on_batch = max_batch, wait_seconds, on_batch
        self._waiting: deque[_Waiting] = deque()
        self._running: list[_Waiting] = []
        self._some, self._enough = asyncio.Event(), asyncio.Event()

    async def submit(self, image: UInt8[np.ndarray, "S S 3"]) -> Prediction:
        """The picture's answer; whoever cancels this takes the picture out of the queue.

        Raises what the predictor raised, and Closed where the batcher ends first.
        """
        answer: asyncio.Future[Prediction] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Waiting(image, answer))
        self._some.set()
        if len(self._waiting) >= self._max_batch:
            self._enough.set()
        return await answer

    async def run(self) -> None:
        """Answers until it is cancelled."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                await self._some.wait()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._enough.wait(), self._wait_seconds)
                self._running = self._take()
                if not self._running:
                    continue
                self._on_batch(len(self._running))
                images = np.stack([waiting.image for waiting in self._running])
                try:
                    answers = await loop.run_in_executor(self._executor, self._predict, images)
                    for waiting, answer in zip(self._running, answers, strict=True):
                        if not waiting.answer.done():
                            waiting.answer.set_result(answer)
                except Exception as error:
                    self._fail(self._running, error)
        finally:
            self._fail([*self._running, *self._waiting], Closed())

    def _take(self) -> list[_Waiting]:
        """The pictures that have waited longest, without those whose clients have gone."""
        batch: list[_Waiting] = []
        while self._waiting and len(batch) < self._max_batch:
            waiting = self._waiting.popleft()
            if not waiting.answer.done():
                batch.append(waiting)
        if not self._waiting:
            self._some.clear()
        if len(self._waiting) < self._max_batch:
            self._enough.clear()
        return batch

    @staticmethod
    def _fail(batch: Sequence[_Waiting], error: Exception) -> None:
        for waiting in batch:
            if not waiting.answer.done():
                waiting.answer.set_exception(error)
