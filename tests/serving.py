"""A server in a thread, and a predictor that needs no network: it names the colour of an image."""

import contextlib
import http.client
import http.server
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import uvicorn
from PIL import Image
from pixels import encode

from cheem_jax.memory.predictor import Guess, NearTask, Prediction, Predictor
from cheem_jax.serve import Limits
from cheem_jax.serve.app import host_names, listen, make_app, make_server, server_url
from cheem_jax.serve.service import Service

DEFAULTS = Limits()
LEVELS = (32, 96, 160, 224)
COLOURS = [(red, green, blue) for red in LEVELS for green in LEVELS for blue in LEVELS]


def name_of(colour: tuple[int, int, int]) -> str:
    return "{}-{}-{}".format(*colour)


class Colours(Predictor):
    """The nearest of 64 colours, in two tasks; black is in neither. Every call waits while `gate`
    is clear."""

    image_size, upright = 8, True
    open_set = 0.05
    tasks = ("dark <b>red</b>", "bright red")
    classes = {
        tasks[0]: tuple(name_of(colour) for colour in COLOURS if colour[0] < 128),
        tasks[1]: tuple(name_of(colour) for colour in COLOURS if colour[0] > 128),
    }
    architectures = {
        tasks[0]: ("reuse:0", "adapt:1", "skip", "new", "reuse:2"),
        tasks[1]: ("reuse:0", "reuse:0", "reuse:0", "adapt:0", "skip"),
    }

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.gate, self.prepared, self.entered = (
            threading.Event(),
            threading.Event(),
            threading.Event(),
        )
        self.gate.set()
        self.prepared.set()
        self.error: Exception | None = None

    def counters(self) -> dict[str, int]:
        return {"hits": 5, "misses": 2, "evictions": 1, "bytes": 4096}

    def prepare(self) -> None:
        assert self.prepared.wait(20)
        if self.error is not None:
            raise self.error

    def __call__(self, images: np.ndarray) -> list[Prediction]:
        self.sizes.append(len(images))
        self.entered.set()
        assert self.gate.wait(20)
        if self.error is not None:
            raise self.error
        return [self.answer(image.reshape(-1, 3).mean(0)) for image in images]

    def answer(self, colour: np.ndarray) -> Prediction:
        near = tuple(
            NearTask(task, abs(float(colour[0]) - red))
            for task, red in zip(self.tasks, (64, 192), strict=True)
        )
        near = tuple(sorted(near, key=lambda one: one.distance))
        if colour.max() < 2:
            return Prediction(None, (), near, ())
        task = near[0].task
        gaps = {
            name: np.abs(np.array(name.split("-"), float) - colour).sum()
            for name in self.classes[task]
        }
        best = sorted(gaps, key=gaps.__getitem__)[:5]
        guesses = tuple(Guess(name, 0.6 / 2**place) for place, name in enumerate(best))
        return Prediction(task, guesses, near, self.architectures[task])


def picture(
    colour: tuple[int, int, int], size: tuple[int, int] = (8, 8), kind: str = "PNG"
) -> bytes:
    """An image of one colour."""
    return encode(Image.new("RGB", size, colour), kind)


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


def ask(port: int, method: str, path: str, body: bytes | None = None, **headers: str) -> Answer:
    """Send one request on a new connection; `_` in a header's name stands for `-`."""
    with contextlib.closing(
        http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    ) as connection:
        connection.request(
            method, path, body, {name.replace("_", "-"): value for name, value in headers.items()}
        )
        response = connection.getresponse()
        return Answer(
            response.status, {k.lower(): v for k, v in response.getheaders()}, response.read()
        )


class Served(NamedTuple):
    """A running server."""

    url: str
    port: int
    service: Service
    server: uvicorn.Server

    def ask(self, method: str, path: str, body: bytes | None = None, **headers: str) -> Answer:
        return ask(self.port, method, path, body, **headers)

    def predict(self, body: bytes, kind: str = "image/png") -> Answer:
        return self.ask("POST", "/predict", body, Content_Type=kind)

    def metric(self, line: str) -> float:
        """Return the value of one line of /metrics, or 0 if it is missing."""
        for result in self.ask("GET", "/metrics").body.decode().splitlines():
            if result.startswith(line + " "):
                return float(result.rpartition(" ")[2])
        return 0.0


def wait_until(condition: Callable[[], bool]) -> None:
    for _ in range(4000):
        if condition():
            return
        time.sleep(0.005)
    raise AssertionError("it did not happen within 20 s")


@contextlib.contextmanager
def serving(
    predictor: Predictor,
    limits: Limits = DEFAULTS,
    *,
    is_warm: bool = True,
    public: Sequence[str] = (),
    name: str = "",
) -> Iterator[Served]:
    """A server on a free port; warm unless `is_warm` is false."""
    with listen("127.0.0.1", 0) as listening:
        app = make_app(predictor, limits, host_names(listening, "127.0.0.1", public), name=name)
        server = make_server(app, limits)
        service = app.state.service
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        url = server_url(listening)
        port = listening.getsockname()[1]
        thread.start()
        try:
            wait_until(lambda: server.started and (service.is_warm or not is_warm))
            yield Served(url, port, service, server)
        finally:
            server.should_exit = True
            thread.join(20)
            assert not thread.is_alive()


@contextlib.contextmanager
def behind_a_proxy(port: int, prefix: str) -> Iterator[int]:
    """Start a proxy that forwards requests below `prefix` to `port` with the client's Host, and
    yield its port."""

    class Proxy(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if not self.path.startswith(prefix):
                self.send_error(404)
                return
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            answer = ask(
                port,
                self.command,
                self.path.removeprefix(prefix) or "/",
                body,
                **dict(self.headers),
            )
            self.send_response(answer.status)
            for name, value in answer.headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(answer.body)

        do_POST = do_GET  # noqa: N815

        def log_message(self, format: str, *args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Proxy) as proxy:
        thread = threading.Thread(target=proxy.serve_forever)
        thread.start()
        try:
            yield proxy.server_address[1]
        finally:
            proxy.shutdown()
            thread.join(20)
