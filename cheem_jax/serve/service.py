"""Handle requests: read images, decode them in threads, and predict them in batches."""

import asyncio
import contextlib
import io
import logging
import os
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from jaxtyping import UInt8
from PIL import Image
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect, Request

from cheem_jax.data.decode import decode_image, formats_of
from cheem_jax.engine.compilation import compilations
from cheem_jax.memory.predictor import FilePrediction, Prediction, Predictor
from cheem_jax.serve import Limits

Waiting = tuple[np.ndarray, asyncio.Future[Prediction]]
"""An image and the future of its prediction."""
log = logging.getLogger(__name__)
FORM = "multipart/form-data"
RAW = ("application/octet-stream", "application/x-www-form-urlencoded")
"""Content types of a body that is a single image, in addition to `image/*` and a missing type. curl
sends `application/x-www-form-urlencoded` by default."""
BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
SECONDS = (0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.2, 2.5, 5, 10)
"""Bucket bounds of the histograms: `BATCH_SIZES` in images, and `SECONDS` in seconds."""


class Refused(HTTPException):
    """A request that is answered with an error instead of a prediction; metrics count it by
    `reason`."""

    def __init__(self, status: int, reason: str, sentence: str, *, retry_after: int | None = None):
        headers = None if retry_after is None else {"Retry-After": str(retry_after)}
        super().__init__(status, sentence, headers)
        self.reason = reason


class Metrics:
    """Metrics of the server. Labels have a fixed set of values, so requests cannot increase the
    number of time series."""

    def __init__(self, paths: Sequence[str], queue_length: Callable[[], int]):
        self.registry = to = CollectorRegistry()
        self._paths = frozenset(paths)
        self._warm = compilations()
        self._requests = Counter(
            "cheem_requests", "Requests answered", ["path", "status"], registry=to
        )
        self._seconds = Histogram(
            "cheem_request_seconds",
            "Seconds from receiving a request's headers to its response",
            ["path"],
            buckets=SECONDS,
            registry=to,
        )
        self.refused = Counter(
            "cheem_refused", "Requests that were refused with an error", ["reason"], registry=to
        )
        self.batches = Histogram(
            "cheem_batch_images", "Images in one call", buckets=BATCH_SIZES, registry=to
        )
        self.images = Counter(
            "cheem_images", "Images with a prediction, by inferred task", ["task"], registry=to
        )
        queue = Gauge(
            "cheem_queue_images", "Images in the server without a prediction yet", registry=to
        )
        queue.set_function(queue_length)
        text = "Functions compiled, or read from the cache of compiled functions, since warm-up"
        Gauge("cheem_programs_since_warm_up", text, registry=to).set_function(self._compiled)
        ProcessCollector(registry=to)

    def warmed_up(self) -> None:
        """Restart the count of compiled functions at zero."""
        self._warm = compilations()

    def _compiled(self) -> int:
        since = compilations().since(self._warm)
        return since.programs + since.cached

    def answered(self, path: str, status: int, seconds: float) -> None:
        """Count a request and record its duration, whether it succeeded or not."""
        path = path if path in self._paths else "other"
        self._requests.labels(path, str(status)).inc()
        self._seconds.labels(path).observe(seconds)


class Service:
    """A service that predicts images with a memory. Images of different clients can share a
    batch."""

    def __init__(self, predictor: Predictor, limits: Limits, paths: tuple[str, ...]):
        self.predictor, self.limits = predictor, limits
        self.num_images = 0
        """Number of images in the server that have no prediction yet."""
        self.metrics = Metrics(paths, lambda: self.num_images)
        self.is_warm = False
        self.failure: Exception | None = None
        """The error that ended the warm-up."""
        self.on_warm: Callable[[], object] = lambda: None
        """Function that is called once, after the warm-up has succeeded or failed."""
        self._decoders = ThreadPoolExecutor(min(4, os.cpu_count() or 1), "cheem-decode")
        self._thread = ThreadPoolExecutor(1, "cheem-predict")
        self._waiting: asyncio.Queue[Waiting] = asyncio.Queue()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Warm up, and predict the waiting images until the context ends."""
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
        """While the context is active, reserve places in the queue for `num` more images. Raises
        Refused (429) if fewer than `num` places are free."""
        if self.num_images + num > self.limits.max_queue:
            raise Refused(
                429,
                "queue_full",
                "too many images are waiting; try again in a second",
                retry_after=1,
            )
        self.num_images += num
        try:
            yield
        finally:
            self.num_images -= num

    async def answer(self, request: Request) -> list[FilePrediction]:
        """Predict the images in the body of a request. If the body contains more than one image,
        the prediction of an unreadable image contains an error message.

        Raises Refused if a single image is unreadable, or if the request cannot be answered.
        """
        if not self.is_warm:
            raise Refused(
                503, "not_ready", "the server is not ready; try again in a second", retry_after=1
            )
        check_head(request, self.limits)
        seconds = self.limits.timeout_s
        files = None
        with self._places(1):
            try:
                async with asyncio.timeout(seconds):
                    files = await read_files(request, self.limits)
                    with self._places(len(files) - 1):
                        return await self._answers(files)
            except TimeoutError:
                if files is None:
                    raise Refused(
                        408, "slow_body", f"the body did not arrive within {seconds:g} s"
                    ) from None
                sentence = f"no prediction within {seconds:g} s; try again later"
                raise Refused(503, "timeout", sentence, retry_after=1) from None
            except Refused:
                raise
            except Exception as error:
                log.exception("the predictor failed")
                raise Refused(
                    500, "failed", "the prediction failed; the server's log contains the reason"
                ) from error

    async def _answers(self, files: list[tuple[str, bytes]]) -> list[FilePrediction]:
        size = self.predictor.image_size
        max_pixels = self.limits.max_pixels
        loop = asyncio.get_running_loop()
        names = [name for name, _ in files]
        waiting = list[Waiting]()
        answers: list[asyncio.Future[Prediction]] = [loop.create_future() for _ in files]
        for (name, data), answer in zip(files, answers, strict=True):
            try:
                image = await loop.run_in_executor(
                    self._decoders, decode, data, size, max_pixels, name, self.predictor.upright
                )
                waiting.append((image, answer))
            except Refused as refused:
                if len(files) == 1:
                    raise
                answer.set_result(Prediction(error=refused.detail.removeprefix(f"{name}: ")))
        files.clear()
        for image in waiting:
            self._waiting.put_nowait(image)
        return list(map(FilePrediction, names, await asyncio.gather(*answers)))

    async def _answer_batches(self) -> None:
        """Until cancelled, collect images for at most `batch_wait_ms`, and predict the collected
        images in one call.

        Images of requests that have ended are skipped.
        """
        batch = list[Waiting]()
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
                    predictions = await asyncio.get_running_loop().run_in_executor(
                        self._thread, self.predictor, images
                    )
                    for (_, answer), prediction in zip(batch, predictions, strict=True):
                        if not answer.done():
                            answer.set_result(prediction)
                except Exception as error:
                    _fail(batch, error)
        finally:
            while not self._waiting.empty():
                batch.append(self._waiting.get_nowait())
            _fail(batch, Refused(503, "not_ready", "the server is shutting down"))


def _fail(batch: list[Waiting], error: Exception) -> None:
    for _, answer in batch:
        if not answer.done():
            answer.set_exception(error)


class _FormInMemory(MultiPartParser):
    # The size of the body is limited, so the files of a form stay in memory and are not written to
    # disk.
    spool_max_size = 2**40


def check_head(request: Request, limits: Limits) -> None:
    """Before the body is read, raise Refused if its declared size is too large or its content type
    is not supported."""
    length = request.headers.get("content-length", "0")
    if length.isdecimal() and int(length) > limits.max_body_bytes:
        raise _too_large(limits)
    kind = _kind(request)
    if kind not in ("", FORM, *RAW) and not kind.startswith("image/"):
        raise Refused(
            415,
            "content_type",
            f"a body of type {kind:.60} is not accepted; send the image as image/* or"
            " application/octet-stream, or files in a form (curl -F image=@cat.jpg)",
        )


async def read_files(request: Request, limits: Limits) -> list[tuple[str, bytes]]:
    """Read the image in the body, or the files of a form. Return the name and the bytes of each
    image."""
    try:
        if _kind(request) == FORM:
            return await _files_of_form(request, limits)
        return [("the image", b"".join([piece async for piece in _pieces(request, limits)]))]
    except ClientDisconnect:
        raise Refused(499, "hung_up", "the client closed the connection") from None


def decode(
    data: bytes, image_size: int, max_pixels: int, name: str, upright: bool
) -> UInt8[np.ndarray, "S S 3"]:
    """Decode an image to pixels. Raises Refused for too many pixels (413), and if the data are not
    an image (400)."""
    if not data:
        raise Refused(400, "no_image", f"{name}: an empty file is not an image")
    try:
        with Image.open(io.BytesIO(data), formats=formats_of(data)) as image:
            num = image.width * image.height
            text = f"{image.width} x {image.height} pixels are"
    except (
        Image.DecompressionBombError,
        Image.DecompressionBombWarning,
    ):  # Pillow raises the warning if Python treats warnings as errors
        num = max_pixels + 1
        text = "so many pixels are"
    except Exception:  # `decode_image` below raises an error with the reason
        num, text = 0, ""
    if num > max_pixels:
        raise Refused(
            413, "pixels", f"{name}: {text} too many; send at most {max_pixels / 1e6:g} megapixels"
        )
    try:
        return decode_image(data, image_size, name=name, upright=upright)
    except ValueError as error:
        raise Refused(400, "no_image", str(error)) from error


async def _pieces(request: Request, limits: Limits) -> AsyncGenerator[bytes, None]:
    """Yield the pieces of the body as they arrive. Raises Refused if the body exceeds the limit."""
    total = 0
    async for piece in request.stream():
        total += len(piece)
        if total > limits.max_body_bytes:
            raise _too_large(limits)
        yield piece


async def _files_of_form(request: Request, limits: Limits) -> list[tuple[str, bytes]]:
    try:
        pieces = _pieces(request, limits)
        most = min(limits.max_batch, limits.max_queue)  # a larger form would never fit the queue
        form = await _FormInMemory(request.headers, pieces, max_files=most, max_fields=most).parse()
    except (MultiPartException, UnicodeError) as error:  # UnicodeError: an unknown charset
        raise Refused(400, "form", f"the form cannot be read: {error}") from error
    sent = [value for _, value in form.multi_items() if isinstance(value, UploadFile)]
    files = [  # with some charsets, a name contains surrogates, which JSON cannot represent
        (_encodable(value.filename or f"image {number}"), await value.read())
        for number, value in enumerate(sent, 1)
    ]
    await form.close()
    if not files:
        raise Refused(
            400, "form", "the form has no file; send one with a file name (curl -F image=@cat.jpg)"
        )
    return files


def _encodable(text: str) -> str:
    return text.encode(errors="replace").decode()


def _kind(request: Request) -> str:
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


def _too_large(limits: Limits) -> Refused:
    return Refused(
        413, "body_size", f"the body is too large; send at most {limits.max_body_mb:g} MiB"
    )
