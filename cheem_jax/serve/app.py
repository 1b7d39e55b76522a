"""The routes of the server."""

import contextlib
import time
from collections.abc import AsyncIterator, Sequence

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from cheem_jax import __version__
from cheem_jax.run.record import to_json
from cheem_jax.serve.batching import Predictor
from cheem_jax.serve.connections import Answered
from cheem_jax.serve.limits import Limits, Refused
from cheem_jax.serve.page import page
from cheem_jax.serve.service import Service

PATHS = ("/", "/predict", "/health", "/metrics", "/memory")
SENTENCES = {404: f"unknown path; there are {', '.join(PATHS)}", 405: "wrong method; pictures are sent with POST"}
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def make_app(predictor: Predictor, limits: Limits, hosts: Sequence[str] = ("*",)) -> Starlette:
    """The application; `state.service` is what answers. Requests for hosts of other names are refused.

    A page of another origin that a browser shows could otherwise reach a loopback address under a name of its own
    (DNS rebinding).
    """
    service = Service(predictor, limits, PATHS)
    html, headers = page()

    async def predict(request: Request) -> Response:
        start = time.perf_counter()
        answers = [answer.to_json() for answer in await service.answer(request)]
        seconds = time.perf_counter() - start
        if len(answers) == 1:
            return JSONResponse(to_json({**answers[0], "seconds": seconds}))
        return JSONResponse(to_json({"predictions": answers, "seconds": seconds}))

    async def health(request: Request) -> Response:
        if not service.is_warm:
            return JSONResponse({"status": "warming up"}, 503, {"Retry-After": "1"})
        return JSONResponse({
            "status": "ok",
            "tasks": list(predictor.tasks),
            "num_classes": sum(len(predictor.classes[task]) for task in predictor.tasks),
            "image_size": predictor.image_size,
            "version": __version__,
        })  # fmt: skip

    async def metrics(request: Request) -> Response:
        return Response(service.metrics.text(), headers={"Content-Type": METRICS_TYPE})

    async def memory(request: Request) -> Response:
        return JSONResponse({
            "tasks": list(predictor.tasks),
            "classes": {task: list(predictor.classes[task]) for task in predictor.tasks},
            "architectures": {task: list(predictor.architectures[task]) for task in predictor.tasks},
            "image_size": predictor.image_size,
            "max_body_bytes": limits.max_body_bytes,
            "networks": predictor.counters(),
        })  # fmt: skip

    async def start_page(request: Request) -> Response:
        return Response(html, headers=headers)

    async def refuse(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        sentence = SENTENCES.get(error.status_code, error.detail)
        if isinstance(error, Refused):
            service.metrics.refused(error.reason)
            sentence = error.detail
        return JSONResponse({"error": sentence}, error.status_code, error.headers)

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with service.running():
            yield

    get = {"/": start_page, "/health": health, "/metrics": metrics, "/memory": memory}
    app = Starlette(
        routes=[Route("/predict", predict, methods=["POST"]), *(Route(path, get[path]) for path in get)],
        middleware=[
            Middleware(Answered, metrics=service.metrics),
            Middleware(TrustedHostMiddleware, allowed_hosts=list(hosts), www_redirect=False),
        ],
        exception_handlers={HTTPException: refuse},
        lifespan=lifespan,
    )
    app.router.redirect_slashes = False
    app.state.service = service
    return app
