"""One memory that answers requests: reading, decoding and predicting, each where it holds nothing up."""

import asyncio
import contextlib
import functools
import logging
import os
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from starlette.requests import Request

from cheem_jax.memory.prediction import Prediction
from cheem_jax.serve.batching import Batcher, Closed, Predictor
from cheem_jax.serve.limits import Limits, Places, Refused, Visit
from cheem_jax.serve.metrics import Metrics
from cheem_jax.serve.pictures import check_head, decode, read_files

log = logging.getLogger(__name__)


class Service:
    """Answers from the moment that `running` has compiled everything."""

    def __init__(self, predictor: Predictor, limits: Limits, paths: tuple[str, ...]):
        self.predictor, self.limits = predictor, limits
        self.places = Places(limits)
        self.metrics = Metrics(paths, lambda: self.places.images, predictor.counters)
        self.is_warm = False
        self.failure: Exception | None = None
        """Why warming up failed."""
        self.on_warm: Callable[[], object] = lambda: None
        """Called once, after warming up or when it failed."""
        num_decoders = min(4, os.cpu_count() or 1)
        self._decoders = ThreadPoolExecutor(num_decoders, "cheem-decode")
        self._free_decoders = asyncio.Semaphore(num_decoders)
        self._thread = ThreadPoolExecutor(1, "cheem-predict")
        self._batcher = Batcher(
            predictor, self._thread, max_batch=limits.max_batch, wait_seconds=limits.batch_wait_seconds,
            on_batch=self.metrics.batch,
        )  # fmt: skip

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Warms up and answers until this is left."""
        tasks = [asyncio.create_task(self._warm_up()), asyncio.create_task(self._batcher.run())]
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

    async def answer(self, request: Request) -> list[Prediction]:
        """The answers to the pictures in the body; raises Refused for everything that gets none."""
        if not self.is_warm:
            raise Refused(503, "not_ready", "the server is not ready; try again in a second", retry_after=1)
        check_head(request, self.limits)
        until = asyncio.get_running_loop().time() + self.limits.timeout_seconds
        with self.places.visit() as visit:
            try:
                async with asyncio.timeout_at(until):
                    files = await read_files(request, self.limits, visit)
            except TimeoutError:
                sentence = f"the body did not arrive within {self.limits.timeout_seconds:g} s"
                raise Refused(408, "slow_body", sentence) from None
            visit.take(len(files) - 1)
            answers = await self._unless_hung_up(request, self._predict(files, visit), until)
        self.metrics.predicted(answers)
        return answers

    async def _predict(self, files: list[bytes], visit: Visit) -> list[Prediction]:
        names = [f"picture {number}" for number in range(1, len(files) + 1)] if len(files) > 1 else ["the picture"]
        images = [await self._decode(data, name) for data, name in zip(files, names, strict=True)]
        files.clear()
        visit.let_go()
        return await asyncio.gather(*map(self._batcher.submit, images))

    async def _decode(self, data: bytes, name: str) -> np.ndarray:
        """In a thread; nothing queues for one there, where it could not be taken back."""
        await self._free_decoders.acquire()
        work = functools.partial(decode, data, self.predictor.image_size, self.limits.max_pixels, name)
        running = asyncio.get_running_loop().run_in_executor(self._decoders, work)
        running.add_done_callback(lambda _: self._free_decoders.release())
        return await asyncio.shield(running)  # a thread that works cannot be stopped and stays counted

    async def _unless_hung_up(
        self, request: Request, answering: Coroutine[Any, Any, list[Prediction]], until: float
    ) -> list[Prediction]:
        """What `answering` returns, unless time is up or nobody is there any more."""
        work = asyncio.create_task(answering)
        gone = asyncio.create_task(_hung_up(request))
        try:
            left = until - asyncio.get_running_loop().time()
            await asyncio.wait({work, gone}, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                return work.result()
            if gone.done():
                raise Refused(499, "hung_up", "the client hung up")
            sentence = f"no answer within {self.limits.timeout_seconds:g} s; try again later"
            raise Refused(503, "timeout", sentence, retry_after=1)
        except Closed:
            raise Refused(503, "not_ready", "the server is shutting down") from None
        except Refused:
            raise
        except Exception as error:
            log.exception("the predictor failed")
            raise Refused(500, "failed", "the prediction failed; the server's log says more") from error
        finally:
            work.cancel()
            gone.cancel()


async def _hung_up(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
