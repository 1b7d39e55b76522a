"""HTTP routes, the page for browsers, and the server's socket."""

import base64
import contextlib
import hashlib
import ipaddress
import math
import os
import re
import socket
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import uvicorn
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware, RequestResponseEndpoint
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from cheem_jax import __version__
from cheem_jax.core.paths import printable
from cheem_jax.core.settings import COLOURS
from cheem_jax.memory.predictor import Predictor
from cheem_jax.run.record import to_json
from cheem_jax.serve import Limits
from cheem_jax.serve.service import Refused, Service

PATHS = ("/", "/predict", "/health", "/metrics", "/memory")
SENTENCES = {
    404: f"unknown path; expected one of {', '.join(PATHS)}",
    405: "wrong method; send images with POST to /predict, and use GET for the other paths",
}
TEMPLATE = Path(__file__).with_name("page.html")
ANY_HOST = "*"
MORE_CONNECTIONS = 512
"""Number of connections that the server allows in addition to `max_queue`, for idle connections and
for requests that will be refused."""


def make_app(
    predictor: Predictor, limits: Limits, hosts: Sequence[str] = (ANY_HOST,), *, name: str = ""
) -> Starlette:
    """Make the application. Its `state.service` is the `Service` that predicts.

    Requests for hosts other than `hosts` are refused. Otherwise, a page of another origin could
    reach a loopback address through a DNS name that the owner of that page controls (DNS
    rebinding). `name` is the name of the memory, which the start page displays.
    """
    service = Service(predictor, limits, PATHS)
    html, headers = page()

    async def predict(request: Request) -> Response:
        start = time.perf_counter()
        answers = await service.answer(request)
        for _, prediction in answers:
            if prediction.error:
                service.metrics.refused.labels("one_of_several").inc()
            else:
                service.metrics.images.labels(printable(prediction.task or "(none)")).inc()
        values = answers[0].prediction.to_json()
        if len(answers) > 1:
            values = {"predictions": [answer.to_json() for answer in answers]}
        return JSONResponse(to_json({**values, "seconds": time.perf_counter() - start}))

    async def health(request: Request) -> Response:
        if not service.is_warm:
            return JSONResponse({"status": "warming up"}, 503, {"Retry-After": "1"})
        return JSONResponse(
            {
                "status": "ok",
                "tasks": list(predictor.classes),
                "num_classes": sum(map(len, predictor.classes.values())),
                "image_size": predictor.image_size,
                "version": __version__,
            }
        )

    async def metrics(request: Request) -> Response:
        return Response(
            generate_latest(service.metrics.registry),
            headers={"Content-Type": CONTENT_TYPE_PLAIN_0_0_4},
        )

    async def memory(request: Request) -> Response:
        return JSONResponse(
            {
                "name": name,
                "tasks": list(predictor.classes),
                "classes": predictor.classes,
                "architectures": predictor.architectures,
                "image_size": predictor.image_size,
                "open_set": predictor.open_set,
                "max_body_bytes": limits.max_body_bytes,
                "networks": predictor.counters(),
            }
        )

    async def start_page(request: Request) -> Response:
        return Response(html, headers=headers)

    async def refuse(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        sentence = SENTENCES.get(error.status_code, error.detail)
        if isinstance(error, Refused):
            service.metrics.refused.labels(error.reason).inc()
            sentence = error.detail
        return JSONResponse({"error": sentence}, error.status_code, error.headers)

    async def count(request: Request, respond: RequestResponseEndpoint) -> Response:
        """Count a request by its status, record its duration, and forbid browsers to guess the
        content type of the response."""
        start = time.perf_counter()
        status = 500  # the status if no handler accepts the exception
        try:
            host = host_in(request.headers.get("host", ""))
            is_known = ANY_HOST in hosts or host in hosts
            response = await (respond(request) if is_known else refuse(request, unknown_host(host)))
            status, response.headers["X-Content-Type-Options"] = response.status_code, "nosniff"
            return response
        finally:
            service.metrics.answered(request.scope["path"], status, time.perf_counter() - start)

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with service.running():
            yield

    get = {"/": start_page, "/health": health, "/metrics": metrics, "/memory": memory}
    app = Starlette(
        routes=[
            Route("/predict", predict, methods=["POST"]),
            *(Route(path, get[path]) for path in get),
        ],
        middleware=[Middleware(BaseHTTPMiddleware, dispatch=count)],
        exception_handlers={HTTPException: refuse},
        lifespan=lifespan,
    )
    app.router.redirect_slashes = False
    app.state.service = service
    return app


def page() -> tuple[str, dict[str, str]]:
    """Return the HTML of the start page, and its HTTP headers. The page requests `/memory`; it
    loads nothing from other hosts and sends nothing to them."""
    colours = " ".join(f"--{kind}: {colour};" for kind, colour in COLOURS.items())
    html = TEMPLATE.read_text(encoding="utf-8").replace("/* colours of the ops */", colours)
    policy = (
        f"default-src 'none'; script-src {_csp_hash('script', html)}; style-src"
        f" {_csp_hash('style', html)}; connect-src 'self'; img-src blob: data:; base-uri 'none';"
        " form-action 'none'; frame-ancestors 'none'"
    )
    headers = {
        "Content-Type": "text/html; charset=utf-8",
        "Content-Security-Policy": policy,
        "Referrer-Policy": "no-referrer",
    }
    return html, headers


def _csp_hash(element: str, html: str) -> str:
    """Return the hash expression that allows the content of `element` in the page's content
    security policy. `element` is `script` or `style`; the page has exactly one of each."""
    [text] = re.findall(f"<{element}>(.*?)</{element}>", html, re.DOTALL)
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def listen(host: str, port: int) -> socket.socket:
    """Open a listening socket; port 0 selects a free port. Raises ValueError if the address
    cannot be used."""
    if not 0 <= port <= 65535:  # the system would use larger numbers modulo 65536
        raise ValueError(f"port is {port}, expected 0 to 65535")
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family)
    except (OSError, OverflowError, UnicodeError) as error:
        # Python appends the address to some messages, so use the system's text for the error number
        number = (
            error.errno
            if isinstance(error, OSError) and not isinstance(error, socket.gaierror)
            else None
        )
        reason = os.strerror(number) if number else getattr(error, "strerror", None) or error
        raise ValueError(
            f"cannot listen on {host}:{port} ({reason}); choose another address with --host and"
            " --port (0 selects a free port)"
        ) from error


def server_url(listening: socket.socket) -> str:
    """Return the URL of the start page."""
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def host_names(listening: socket.socket, host: str, public: Sequence[str] = ()) -> tuple[str, ...]:
    """Return the host names of this server: its addresses and `public`.

    If other machines can reach the server and `public` is empty, the result is `(ANY_HOST,)`, which
    accepts every name. Raises ValueError for a public name that is not a host name.
    """
    if wrong := next(
        (name for name in public if not re.fullmatch(r"[\w.-]+|\[[\da-f:.]+\]", name, re.A | re.I)),
        None,
    ):
        raise ValueError(
            f"--public-host is {wrong!r}; expected a host name without https://, port and path,"
            " such as pets.example.org"
        )
    bound = listening.getsockname()[0]
    if not public and not ipaddress.ip_address(bound.partition("%")[0]).is_loopback:
        return (ANY_HOST,)
    addresses = (host, f"[{bound}]" if ":" in bound else bound, "localhost", "127.0.0.1", "[::1]")
    return tuple(dict.fromkeys(name.lower() for name in (*addresses, *public)))


def host_in(header: str) -> str:
    """Return the host in a Host header, without the port."""
    return re.sub(r":\d*$", "", header).rstrip(".").lower()


def unknown_host(host: str) -> Refused:
    """Make the error for a request whose Host header is not a host name of this server."""
    return Refused(
        400,
        "unknown_host",
        f"{host[:100]!r} is not a host name of this server; behind a proxy, give the name to"
        " `cheem serve` with --public-host, or let the proxy send `Host: localhost`",
    )


def make_server(app: Starlette, limits: Limits) -> uvicorn.Server:
    """Make a server for this process. After a signal, the server's `run(sockets=[...])` finishes
    the current requests before it ends."""
    seconds = math.ceil(limits.timeout_s)
    return uvicorn.Server(
        uvicorn.Config(
            app,
            loop="asyncio",
            http="h11",
            ws="none",
            lifespan="on",
            log_config=None,
            log_level="error",
            access_log=False,
            proxy_headers=False,
            server_header=False,
            limit_concurrency=limits.max_queue + MORE_CONNECTIONS,
            timeout_keep_alive=seconds,
            timeout_graceful_shutdown=seconds + 1,
        )
    )
