"""One memory that answers requests: reading, decoding and predicting, each where it holds nothing up."""

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from starlette.requests import Request

from cheem_jax.memory.predictor import Asked, Prediction, Predictor
from cheem_jax.serve.limits import Limits
from cheem_jax.serve.metrics import Metrics
from cheem_jax.serve.reading import Refused, check_head, decode, read_files

log = logging.getLogger(__name__)


class Service:
    """Answers from the moment that `running` has compiled everything; images of many clients share a batch."""

    def __init__(self, predictor: Predictor, limits: Limits, paths: tuple[str, ...]):
        self.predictor, self.limits = predictor, limits
        self.num_images = 0
        """Images in the server that are not answered yet."""
        self.metrics = Metrics(paths, lambda: self.num_images, predictor.counters)
        self.is_warm = False
        self.failure: Exception | None = None
        """Why warming up failed."""
        self.on_warm: Callable[[], object] = lambda: None
        """Called once, after warming up or when it failed."""
        self._decoders = ThreadPoolExecutor(min(4, os.cpu_count() or 1), "cheem-decode")
        self._thread = ThreadPoolExecutor(1, "cheem-predict")
        self._waiting: asyncio.Queue[tuple[np.ndarray, asyncio.Future[Prediction]]] = asyncio.Queue()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Warms up and answers until this is left."""
        tasks = [asyncio.create_task(self._warm_up()), asyncio.create_task(self._answer_batches())]
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

    @contextlib.contextmanager
    def _places(self, num: int) -> Iterator[None]:
        """Places for so many images more; raises Refused (429) where they are not free."""
        if self.num_images + num > self.limits.max_queue:
            raise Refused(429, "queue_full", "too many images are waiting; try again in a second", retry_after=1)
        self.num_images += num
        try:
            yield
        finally:
            self.num_images -= num

    async def answer(self, request: Request) -> list[Asked]:
        """The answers to the images in the body, of several also why one gets none; raises Refused where none does."""
        if not self.is_warm:
            raise Refused(503, "not_ready", "the server is not ready; try again in a second", retry_after=1)
        check_head(request, self.limits)
        seconds = self.limits.timeout_s
        until = asyncio.get_running_loop().time() + seconds
        with self._places(1):
            try:
                async with asyncio.timeout_at(until):
                    files = await read_files(request, self.limits)
            except TimeoutError:
                raise Refused(408, "slow_body", f"the body did not arrive within {seconds:g} s") from None
            with self._places(len(files) - 1):
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

    async def _answers(self, files: list[tuple[str, bytes]]) -> list[Asked]:
        size, max_pixels, loop = self.predictor.image_size, self.limits.max_pixels, asyncio.get_running_loop()
        images, names = list[np.ndarray](), [name for name, _ in files]
        answers: list[asyncio.Future[Prediction]] = [loop.create_future() for _ in files]
        good = list[asyncio.Future[Prediction]]()
        for (name, data), answer in zip(files, answers, strict=True):
            try:
                images.append(await loop.run_in_executor(self._decoders, decode, data, size, max_pixels, name))
                good.append(answer)
            except Refused as refused:
                if len(files) == 1:
                    raise
                answer.set_result(Prediction.failed(refused.detail.removeprefix(f"{name}: ")))
        files.clear()
        for waiting in zip(images, good, strict=True):
            self._waiting.put_nowait(waiting)
        return list(map(Asked, names, await asyncio.gather(*answers)))

    async def _answer_batches(self) -> None:
        """Collects images for a moment and predicts them in one call, until it is cancelled.

        An image whose request has ended is not predicted any more.
        """
        batch: list[tuple[np.ndarray, asyncio.Future[Prediction]]] = []
        try:
            while True:
                batch = [await self._waiting.get()]
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self.limits.batch_wait_ms / 1000):
                        while len(batch) < self.limits.max_batch:
                            batch.append(await self._waiting.get())
                batch = [(image, answer) for image, answer in batch if not answer.done()]
                if not batch:
                    continue
                self.metrics.batches.observe(len(batch))
                images = np.stack([image for image, _ in batch])
                try:
                    found = await asyncio.get_running_loop().run_in_executor(self._thread, self.predictor, images)
                    for (_, answer), prediction in zip(batch, found, strict=True):
                        if not answer.done():
                            answer.set_result(prediction)
                except Exception as error:
                    _fail(batch, error)
        finally:
            while not self._waiting.empty():
                batch.append(self._waiting.get_nowait())
            _fail(batch, Refused(503, "not_ready", "the server is shutting down"))


def _fail(batch: list[tuple[np.ndarray, asyncio.Future[Prediction]]], error: Exception) -> None:
    for _, answer in batch:
        if not answer.done():
            answer.set_exception(error)
