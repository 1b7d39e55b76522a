"""From a request's body to pixels, within the server's limits."""

import io
from collections.abc import AsyncGenerator

import numpy as np
from jaxtyping import UInt8
from PIL import Image
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect, Request

from cheem_jax.data.decode import FORMATS, decode_image
from cheem_jax.serve.limits import Limits

FORM = "multipart/form-data"
RAW = ("application/octet-stream", "application/x-www-form-urlencoded")
"""Types of a body that may be an image; the second is what curl says where nobody names one."""


class Refused(HTTPException):
    """A request that gets a sentence instead of a prediction; `reason` is the word that counts it."""

    def __init__(self, status: int, reason: str, sentence: str, *, retry_after: int | None = None):
        headers = None if retry_after is None else {"Retry-After": str(retry_after)}
        super().__init__(status, sentence, headers)
        self.reason = reason


class _FormInMemory(MultiPartParser):
    # the body is limited already, and nothing that was sent is written to a disk
    spool_max_size = 2**40


def check_head(request: Request, limits: Limits) -> None:
    """Refuses what the head alone tells, before anything is read."""
    length = request.headers.get("content-length", "0")
    if length.isdecimal() and int(length) > limits.max_body_bytes:
        raise _too_large(limits)
    kind = _kind(request)
    if kind not in ("", FORM, *RAW) and not kind.startswith("image/"):
        raise Refused(
            415, "content_type",
            f"a body of type {kind:.60} is not accepted; send the image as image/* or application/octet-stream, or "
            "files in a form (curl -F image=@cat.jpg)",
        )  # fmt: skip


async def read_files(request: Request, limits: Limits) -> list[tuple[str, bytes]]:
    """The files in the body with their names: one, or those of a form."""
    try:
        pieces = _pieces(request, limits)
        if _kind(request) == FORM:
            files = await _files_of_form(request, pieces, limits)
        else:
            files = [("the image", b"".join([piece async for piece in pieces]))]
    except ClientDisconnect:
        raise Refused(499, "hung_up", "the client hung up") from None
    return files


def decode(data: bytes, image_size: int, max_pixels: int, name: str) -> UInt8[np.ndarray, "S S 3"]:
    """The pixels; Refused with 413 for too many of them and with 400 for what is not an image."""
    if not data:
        raise Refused(400, "no_image", f"{name}: an empty file is not an image")
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            num, text = image.width * image.height, f"{image.width} x {image.height} pixels are"
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):  # the latter where warnings are errors
        num, text = max_pixels + 1, "so many pixels are"
    except Exception:  # what is wrong is said below
        num, text = 0, ""
    if num > max_pixels:
        raise Refused(413, "pixels", f"{name}: {text} too many; send at most {max_pixels / 1e6:g} megapixels")
    try:
        return decode_image(data, image_size, name=name)
    except ValueError as error:
        raise Refused(400, "no_image", str(error)) from error


async def _pieces(request: Request, limits: Limits) -> AsyncGenerator[bytes, None]:
    """The body as it comes, counted."""
    total = 0
    async for piece in request.stream():
        total += len(piece)
        if total > limits.max_body_bytes:
            raise _too_large(limits)
        yield piece


async def _files_of_form(
    request: Request, pieces: AsyncGenerator[bytes, None], limits: Limits
) -> list[tuple[str, bytes]]:
    try:
        parser = _FormInMemory(request.headers, pieces, max_files=limits.max_batch, max_fields=limits.max_batch)
        form = await parser.parse()
    except MultiPartException as error:
        raise Refused(400, "form", f"the form cannot be read: {error.message}") from error
    sent = [value for _, value in form.multi_items() if isinstance(value, UploadFile)]
    files = [(value.filename or f"image {number}", await value.read()) for number, value in enumerate(sent, 1)]
    await form.close()
    if not files:
        raise Refused(400, "form", "the form has no file; send one with a file name (curl -F image=@cat.jpg)")
    return files


def _kind(request: Request) -> str:
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


def _too_large(limits: Limits) -> Refused:
    return Refused(413, "body_size", f"the body is too large; send at most {limits.max_body_mb:g} MB")
