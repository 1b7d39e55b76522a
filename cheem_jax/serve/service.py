"""One memory that answers requests: reading, decoding and predicting, each where it holds nothing up."""

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
from jaxtyping import UInt8
from starlette.requests import Request

from cheem_jax.memory.predictor import Prediction, Predictor
from cheem_jax.serve.limits import Limits, Queue, Refused, check_head, decode, read_files
from cheem_jax.serve.metrics import Metrics

log = logging.getLogger(__name__)


class Service:
    """Answers from the moment that `running` has compiled everything."""

    def __init__(self, predictor: Predictor, limits: Limits, paths: tuple[str, ...]):
        self.predictor, self.limits, self.queue = predictor, limits, Queue(limits.max_queue)
        self.metrics = Metrics(paths, lambda: self.queue.images, predictor.counters)
        self.is_warm = False
        self.failure: Exception | None = None
        """Why warming up failed."""
        self.on_warm: Callable[[], object] = lambda: None
        """Called once, after warming up or when it failed."""
        self._decoders = ThreadPoolExecutor(min(4, os.cpu_count() or 1), "cheem-decode")
        self._thread = ThreadPoolExecutor(1, "cheem-predict")
        self._batcher = Batcher(self._predict, limits)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Warms up and answers until this is left."""
        tasks = [asyncio.create_task(self._warm_up()), asyncio.create_task(self._batcher.run(self._thread))]
        try:
            yield
        finally:
            self.is_warm = False
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for executor in (self._thread, self._decoders):
                executor.shutdown(wait=False, cancel_futures=True)

    async def _warm_up(self) -> None:
        try:
            await asyncio.get_running_loop().run_in_executor(self._thread, self.predictor.prepare)
        except Exception as error:
            self.failure = error
        else:
            self.metrics.warmed_up()
            self.is_warm = True
        self.on_warm()

    def _predict(self, images: np.ndarray) -> list[Prediction]:
        self.metrics.batches.observe(len(images))
        return self.predictor(images)

    async def answer(self, request: Request) -> list[Prediction]:
        """The answers to the images in the body; raises Refused for everything that gets none."""
        if not self.is_warm:
            raise Refused(503, "not_ready", "the server is not ready; try again in a second", retry_after=1)
        check_head(request, self.limits)
        seconds = self.limits.timeout_seconds
        until = asyncio.get_running_loop().time() + seconds
        with self.queue.places(1):
            try:
                async with asyncio.timeout_at(until):
                    files = await read_files(request, self.limits)
            except TimeoutError:
                raise Refused(408, "slow_body", f"the body did not arrive within {seconds:g} s") from None
            with self.queue.places(len(files) - 1):
                try:
                    async with asyncio.timeout_at(until):
                        return await self._answers(files)
                except TimeoutError:
                    sentence = f"no answer within {seconds:g} s; try again later"
                    raise Refused(503, "timeout", sentence, retry_after=1) from None
                except Refused:
                    raise
                except Exception as error:
                    log.exception("the predictor failed")
                    raise Refused(500, "failed", "the prediction failed; the server's log says more") from error

    async def _answers(self, files: list[bytes]) -> list[Prediction]:
        names = [f"image {number}" for number in range(1, len(files) + 1)] if len(files) > 1 else ["the image"]
        size, max_pixels, loop = self.predictor.image_size, self.limits.max_pixels, asyncio.get_running_loop()
        images = [
            await loop.run_in_executor(self._decoders, decode, data, size, max_pixels, name)
            for data, name in zip(files, names, strict=True)
        ]
        files.clear()
        return await asyncio.gather(*map(self._batcher.submit, images))


class _Waiting(NamedTuple):
    image: UInt8[np.ndarray, "S S 3"]
    answer: asyncio.Future[Prediction]


class Batcher:
    """Collects images of many clients for a moment and gives them to `predict` in one call."""

    def __init__(self, predict: Callable[[np.ndarray], Sequence[Prediction]], limits: Limits):
        self._predict, self._limits = predict, limits
        self._waiting: asyncio.Queue[_Waiting] = asyncio.Queue()

    async def submit(self, image: UInt8[np.ndarray, "S S 3"]) -> Prediction:
        """The image's answer; an image whose request has ended is not predicted any more.

        Raises what the predictor raised, and Refused where the batcher ends first.
        """
        answer: asyncio.Future[Prediction] = asyncio.get_running_loop().create_future()
        self._waiting.put_nowait(_Waiting(image, answer))
        return await answer

    async def run(self, thread: ThreadPoolExecutor) -> None:
        """Answers until it is cancelled."""
        batch: list[_Waiting] = []
        try:
            while True:
                batch = [await self._waiting.get()]
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._limits.batch_wait_seconds):
                        while len(batch) < self._limits.max_batch:
                            batch.append(await self._waiting.get())
                batch = [waiting for waiting in batch if not waiting.answer.done()]
                if not batch:
                    continue
                images = np.stack([waiting.image for waiting in batch])
                try:
                    answers = await asyncio.get_running_loop().run_in_executor(thread, self._predict, images)
                    for waiting, answer in zip(batch, answers, strict=True):
                        if not waiting.answer.done():
                            waiting.answer.set_result(answer)
                except Exception as error:
                    self._fail(batch, error)
        finally:
            while not self._waiting.empty():
                batch.append(self._waiting.get_nowait())
            self._fail(batch, Refused(503, "not_ready", "the server is shutting down"))

    @staticmethod
    def _fail(batch: Sequence[_Waiting], error: Exception) -> None:
        for waiting in batch:
            if not waiting.answer.done():
                waiting.answer.set_exception(error)
