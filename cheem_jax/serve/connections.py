"""Around every request: counting, and time for a client to read its refusal."""

import asyncio
import contextlib
import logging
import time

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cheem_jax.serve.metrics import Metrics

LINGER_SECONDS = 2.0
"""How long the rest of a body is still read once it has been refused."""

log = logging.getLogger(__name__)


class Answered:
    """Counts every request, and turns an error of ours into an answer.

    A refusal may come before the body has been read. A connection that is closed on unread bytes is reset, and its
    client may never see the answer: so the answer is sent, the rest is read for a moment and thrown away, and only
    then the connection ends.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics):
        self.app, self.metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        start, status = time.perf_counter(), None
        names = {name for name, _ in scope["headers"]}
        is_unread = bool(names & {b"content-length", b"transfer-encoding"})

        async def read() -> Message:
            nonlocal is_unread
            message = await receive()
            is_unread = bool(message.get("more_body", False))
            return message

        async def drain() -> None:
            while is_unread:
                await read()

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                more = [(b"x-content-type-options", b"nosniff")] + [(b"connection", b"close")] * is_unread
                message = {**message, "headers": [*message.get("headers", []), *more]}
            elif is_unread and not message.get("more_body", False):
                await send({**message, "more_body": True})
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(drain(), LINGER_SECONDS)
                message = {"type": "http.response.body", "body": b""}
            await send(message)

        try:
            await self.app(scope, read, answer)
        except Exception:
            log.exception("a request failed")
            if status is None:
                await JSONResponse({"error": "the request failed; the server's log says more"}, 500)(
                    scope, read, answer
                )
        finally:
            self.metrics.answered(scope["path"], status or 499, time.perf_counter() - start)
