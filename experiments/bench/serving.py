"""A server under load: latencies, compilations and memory with many concurrent clients.

python experiments/bench/serving.py runs/demo --requests 20000 --clients 32
"""

import contextlib
import dataclasses
import http.client
import io
import itertools
import json
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import tyro
from PIL import Image

from cheem_jax.cli.arguments import parse
from cheem_jax.cli.running import run_command
from experiments.bench.measure import Row, save

NUM_IMAGES = 64
"""Number of different images. Their responses under load are compared with those without load."""


@dataclasses.dataclass(frozen=True)
class Serving:
    """The served memory and the load."""

    memory: Annotated[Path, tyro.conf.Positional]
    """Memory, or a run directory."""
    requests: int = 20_000
    """Total number of requests."""
    clients: int = 32
    """Number of concurrent clients, each with a separate connection."""
    image_size: int = 64
    """Size of the square PNG images in pixels."""
    every: int = 2000
    """Number of requests between two measurements of the server's memory."""
    out: Path | None = None
    """Folder of serving.json; default: the numbers are only printed."""


def main(settings: Serving) -> None:
    """Start a server, send requests, and print the measurements."""
    if settings.requests < 1 or settings.clients < 1 or settings.every < 1:
        raise ValueError("requests, clients and every must be at least 1")
    images = make_images(NUM_IMAGES, settings.image_size)
    with server(settings.memory) as port:
        unloaded = [ask(port, image) for image in images]
        before = [
            seconds for _ in range(4) for seconds in (ask(port, image)[2] for image in images)
        ]
        start = metrics(port)
        load = under_load(port, images, [answer for _, answer, _ in unloaded], settings)
        end = metrics(port)
    results = {
        "clients": settings.clients,
        "requests": settings.requests,
        "one_client": quantiles(before),
        **load,
        "programs_after_warm_up": end["cheem_programs_since_warm_up"],
        "mean_batch": (
            (end["cheem_batch_images_sum"] - start["cheem_batch_images_sum"])
            / (end["cheem_batch_images_count"] - start["cheem_batch_images_count"])
        ),
    }
    print(
        f"statuses {load['statuses']}, lost {load['lost']}, different responses than without load"
        f" {load['other_answers']}"
    )
    save(settings.out, "serving", rows(results), numbers=results)


def rows(results: dict[str, Any]) -> list[Row]:
    """Make the rows of the table."""
    latency = results["latency"]
    resident = list(results["resident_bytes"].values())
    seconds = {name: latency[name] / 1000 for name in ("p50", "p90", "p99")}
    load = f"{results['requests']:,} requests of {results['clients']} clients"
    fine = results["statuses"].get("200", 0)
    return [
        Row(
            f"{load}, p99 over p50",
            seconds,
            latency["p99"] / latency["p50"],
            10,
            "at most",
            note=(
                f"{results['images_per_second']:.0f} images/s in batches of"
                f" {results['mean_batch']:.1f} on average"
            ),
        ),
        Row(
            f"{load}, without a response or with a different response than without load",
            {},
            results["requests"] - fine + results["other_answers"],
            0,
            "at most",
            unit="requests",
        ),
        Row(
            "functions compiled after warm-up",
            {},
            results["programs_after_warm_up"],
            0,
            "at most",
            unit="programs",
        ),
        Row(
            "memory at the end over the middle of the load",
            {},
            resident[-1] / resident[len(resident) // 2],
            1.05,
            "at most",
            note=(
                f"{resident[0] / 1e6:.0f} MB at the beginning, {resident[-1] / 1e6:.0f} MB at"
                " the end"
            ),
        ),
        Row(
            "one client",
            {"p99": results["one_client"]["p99"] / 1000},
            results["one_client"]["p50"],
            unit="ms in the median",
        ),
    ]


def make_images(num: int, size: int) -> list[bytes]:
    """Make different PNG files of coloured waves."""
    rng = np.random.default_rng(0)
    files = []
    across = np.linspace(0, 2 * np.pi, size)
    for _ in range(num):
        phase = rng.uniform(0, 6, 3)
        turns = rng.integers(1, 5, (2, 3))
        waves = np.sin(across[:, None, None] * turns[0] + across[None, :, None] * turns[1] + phase)
        buffer = io.BytesIO()
        Image.fromarray((127.5 + 127 * waves).astype(np.uint8)).save(buffer, "PNG")
        files.append(buffer.getvalue())
    return files


@contextlib.contextmanager
def server(memory: Path, *options: str) -> Iterator[int]:
    """Run `cheem serve` in a process; yield its port when it is warm."""
    command = [sys.executable, "-m", "cheem_jax", "serve", str(memory), "--port", "0", *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        for line in process.stdout:
            if match := re.search(r"ready on http://127\.0\.0\.1:(\d+)", line):
                yield int(match[1])
                break
        else:
            raise ValueError(f"the server did not start: {' '.join(command)}")
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)


def connect(port: int) -> contextlib.closing[http.client.HTTPConnection]:
    """Open a connection that is closed at the end of a `with` statement."""
    return contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60))


def ask(
    port: int, image: bytes, connection: http.client.HTTPConnection | None = None
) -> tuple[int, dict[str, Any], float]:
    """Send one request, by default on a new connection; return its status, its response without the
    server's seconds, and its seconds."""
    if connection is None:
        with connect(port) as connection:
            return ask(port, image, connection)
    start = time.perf_counter()
    connection.request("POST", "/predict", image, {"Content-Type": "image/png"})
    response = connection.getresponse()
    answer = json.loads(response.read())
    seconds = time.perf_counter() - start
    answer.pop("seconds", None)
    return response.status, answer, seconds


def metrics(port: int) -> dict[str, float]:
    """Return the server's metrics that have no labels."""
    with connect(port) as connection:
        connection.request("GET", "/metrics")
        lines = connection.getresponse().read().decode().splitlines()
    return {
        name: float(value)
        for name, value in (line.split() for line in lines if re.match(r"\w+ ", line))
    }


def under_load(
    port: int, images: Sequence[bytes], expected: Sequence[dict], settings: Serving
) -> dict[str, Any]:
    """Send requests from all clients, and measure the server's memory in between. A client waits
    for a response before it sends its next request."""
    numbers = itertools.count()
    lock = threading.Lock()
    seconds = []
    statuses = Counter[int]()
    num_different = 0
    resident = {0: metrics(port)["process_resident_memory_bytes"]}

    def client() -> None:
        nonlocal num_different
        with connect(port) as connection:
            while (number := next(numbers)) < settings.requests:
                status, answer, took = ask(port, images[number % len(images)], connection)
                with lock:
                    seconds.append(took)
                    statuses[status] += 1
                    # probabilities can differ in the last digits between batches
                    unloaded = expected[number % len(images)]
                    num_different += any(
                        answer.get(name) != unloaded[name] for name in ("task", "class", "blocks")
                    )
                if (number + 1) % settings.every == 0:
                    resident[number + 1] = metrics(port)["process_resident_memory_bytes"]

    start = time.perf_counter()
    with ThreadPoolExecutor(settings.clients) as threads:
        for client_result in [threads.submit(client) for _ in range(settings.clients)]:
            client_result.result()
    wall = time.perf_counter() - start
    return {
        "latency": quantiles(seconds),
        "images_per_second": len(seconds) / wall,
        "statuses": {str(status): num for status, num in statuses.items()},
        "other_answers": num_different,
        "lost": settings.requests - len(seconds),
        "resident_bytes": {str(at): size for at, size in resident.items()},
    }


def quantiles(seconds: Sequence[float]) -> dict[str, float]:
    """Return quantiles in milliseconds."""
    results = np.quantile(seconds, [0.5, 0.9, 0.99, 1]) * 1000
    return dict(zip(("p50", "p90", "p99", "max"), map(float, results), strict=True))


if __name__ == "__main__":
    run_command(main, parse(Serving, description=__doc__))
