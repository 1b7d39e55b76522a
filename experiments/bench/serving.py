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

NUM_PICTURES = 64
"""Number of different images, whose responses are compared with those without load."""
QUEUE = 16
"""Length of the queue of the overloaded server."""


@dataclasses.dataclass(frozen=True)
class Serving:
    """The memory and the load."""

    memory: Annotated[Path, tyro.conf.Positional]
    """A run directory, or a memory."""
    requests: int = 20_000
    """Total number of requests."""
    clients: int = 32
    """Number of concurrent clients, each with a separate connection."""
    picture_size: int = 64
    """Pixels of the square PNG images."""
    every: int = 2000
    """Number of requests between two measurements of the server's memory."""
    out: Path | None = None
    """Folder of serving.json; default: the numbers are only printed."""


def main(settings: Serving) -> None:
    """Start a server, send requests, and print the measurements."""
    if settings.requests < 1 or settings.clients < 1 or settings.every < 1:
        raise ValueError("requests, clients and every must be at least 1")
    pictures = make_pictures(NUM_PICTURES, settings.picture_size)
    with server(settings.memory) as port:
        alone = [ask(port, picture) for picture in pictures]
        before = [
            seconds for _ in range(4) for seconds in (ask(port, picture)[2] for picture in pictures)
        ]
        start = metrics(port)
        load = under_load(port, pictures, [answer for _, answer, _ in alone], settings)
        end = metrics(port)
    with server(settings.memory, "--max-queue", str(QUEUE)) as port:
        refused = over_limits(port, pictures, settings.clients)
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
        "over_limits": refused,
    }
    print(
        f"statuses {load['statuses']}, lost {load['lost']}, other answers than alone"
        f" {load['other_answers']}"
    )
    save(settings.out, "serving", rows(results), numbers=results)


def rows(results: dict[str, Any]) -> list[Row]:
    """The rows of the table."""
    latency = results["latency"]
    resident = list(results["resident_bytes"].values())
    seconds = {name: latency[name] / 1000 for name in ("p50", "p90", "p99")}
    load = f"{results['requests']:,} requests of {results['clients']} clients"
    fine = results["statuses"].get("200", 0)
    refused = {"429": results["over_limits"]["429"], **results["over_limits"]["413"]}
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
            f"{load}, without an answer or with another one than alone",
            {},
            results["requests"] - fine + results["other_answers"],
            0,
            "at most",
            unit="requests",
        ),
        Row(
            "programs compiled after warm-up",
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
        in_the_median("one client", results["one_client"]),
        *(
            in_the_median(f"refused while the server is busy: {what}", times)
            for what, times in refused.items()
            if times is not None
        ),
    ]


def in_the_median(what: str, milliseconds: dict[str, float]) -> Row:
    """A row without a goal."""
    return Row(
        what, {"p99": milliseconds["p99"] / 1000}, milliseconds["p50"], unit="ms in the median"
    )


def make_pictures(num: int, size: int) -> list[bytes]:
    """Different PNG files of coloured waves."""
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
    """A new connection, closed at the end of a `with`."""
    return contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60))


def ask(
    port: int, picture: bytes, connection: http.client.HTTPConnection | None = None
) -> tuple[int, dict[str, Any], float]:
    """Status, response without its time, and seconds of one request, on a new connection by
    default."""
    if connection is None:
        with connect(port) as connection:
            return ask(port, picture, connection)
    start = time.perf_counter()
    connection.request("POST", "/predict", picture, {"Content-Type": "image/png"})
    response = connection.getresponse()
    answer = json.loads(response.read())
    seconds = time.perf_counter() - start
    answer.pop("seconds", None)
    return response.status, answer, seconds


def announce(port: int, num_bytes: int) -> tuple[int, float]:
    """Status and seconds of a request that sends only its headers."""
    with connect(port) as connection:
        start = time.perf_counter()
        connection.putrequest("POST", "/predict")
        connection.putheader("Content-Length", str(num_bytes))
        connection.endheaders()
        return connection.getresponse().status, time.perf_counter() - start


def metrics(port: int) -> dict[str, float]:
    """The server's metrics without labels."""
    with connect(port) as connection:
        connection.request("GET", "/metrics")
        lines = connection.getresponse().read().decode().splitlines()
    return {
        name: float(value)
        for name, value in (line.split() for line in lines if re.match(r"\w+ ", line))
    }


def under_load(
    port: int, pictures: Sequence[bytes], expected: Sequence[dict], settings: Serving
) -> dict[str, Any]:
    """Send requests by all clients, each one at a time, and measure memory in between."""
    numbers = itertools.count()
    lock = threading.Lock()
    seconds = []
    statuses = Counter[int]()
    wrong = 0
    resident = {0: metrics(port)["process_resident_memory_bytes"]}

    def client() -> None:
        nonlocal wrong
        with connect(port) as connection:
            while (number := next(numbers)) < settings.requests:
                status, answer, took = ask(port, pictures[number % len(pictures)], connection)
                with lock:
                    seconds.append(took)
                    statuses[status] += 1
                    # probabilities can differ in the last digits in another batch
                    alone = expected[number % len(pictures)]
                    wrong += any(
                        answer.get(name) != alone[name] for name in ("task", "class", "blocks")
                    )
                if (number + 1) % settings.every == 0:
                    resident[number + 1] = metrics(port)["process_resident_memory_bytes"]

    start = time.perf_counter()
    with ThreadPoolExecutor(settings.clients) as threads:
        for done in [threads.submit(client) for _ in range(settings.clients)]:
            done.result()
    wall = time.perf_counter() - start
    return {
        "latency": quantiles(seconds),
        "images_per_second": len(seconds) / wall,
        "statuses": {str(status): num for status, num in statuses.items()},
        "other_answers": wrong,
        "lost": settings.requests - len(seconds),
        "resident_bytes": {str(at): size for at, size in resident.items()},
    }


def over_limits(port: int, pictures: Sequence[bytes], clients: int) -> dict[str, Any]:
    """Seconds until requests above a limit are refused, while `clients` keep the server busy."""
    stop = threading.Event()
    answers = list[tuple[int, float]]()

    def busy() -> None:
        while not stop.is_set():
            status, _, seconds = ask(port, pictures[0])
            answers.append((status, seconds))

    buffer = io.BytesIO()
    Image.new("1", (10_000, 10_000)).save(buffer, "PNG")
    with ThreadPoolExecutor(clients) as threads:
        for _ in range(clients):
            threads.submit(busy)
        try:
            refused = {
                "announced body of 11 MB": [announce(port, 11 * 2**20) for _ in range(50)],
                "sent body of 11 MB": [ask(port, bytes(11 * 2**20))[::2] for _ in range(50)],
                "picture of 100 megapixels": [ask(port, buffer.getvalue())[::2] for _ in range(50)],
            }
        finally:
            stop.set()
    statuses = Counter(status for status, _ in answers)
    return {
        "statuses_of_busy_clients": {str(status): num for status, num in statuses.items()},
        "429": quantiles([seconds for status, seconds in answers if status == 429]),
        "413": {
            what: quantiles([took for status, took in tries if status == 413])
            for what, tries in refused.items()
        },
        "resident_bytes_after": metrics(port)["process_resident_memory_bytes"],
    }


def quantiles(seconds: Sequence[float]) -> dict[str, float] | None:
    """Quantiles in milliseconds; None without measurements."""
    if not seconds:
        return None
    results = np.quantile(seconds, [0.5, 0.9, 0.99, 1]) * 1000
    return dict(zip(("p50", "p90", "p99", "max"), map(float, results), strict=True))


if __name__ == "__main__":
    run_command(main, parse(Serving, description=__doc__))
