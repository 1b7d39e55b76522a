"""`cheem serve`: a memory that answers over HTTP and in the browser."""

import dataclasses
import signal
from types import FrameType

from cheem_jax.cli.shared import Answering
from cheem_jax.core.interruption import Stopped
from cheem_jax.core.paths import shown
from cheem_jax.run.progress import Progress

BATCH_SIZES = (1, 8, 16)
"""Sizes that are compiled beside the largest one: of 32 clients about ten meet in a batch."""


@dataclasses.dataclass(frozen=True)
class Serve(Answering):
    """Answer pictures over HTTP, with a page in the browser that shows which blocks ran (extra `serve`)."""

    host: str = "127.0.0.1"
    """Address to listen on; the default is reached from this machine only."""
    port: int = 8000
    """Port to listen on; 0 takes a free one."""
    max_body_mb: float = 10
    """Megabytes (2^20 bytes) of a request."""
    max_pixels: int = 40_000_000
    """Width times height of a picture."""
    max_queue: int = 256
    """Pictures in the server at one time; a request beyond them is refused with 429."""
    timeout_s: float = 10
    """Seconds until a request is answered; a body that takes longer ends in 408, an answer in 503."""
    batch_wait_ms: float = 2
    """Milliseconds that a picture waits for others to be answered with."""
    max_batch: int = 32
    """Pictures that are answered together."""
    open_set: float | None = None
    """Share of a task's own pictures that may be answered with "none of my tasks"; default: always a task."""
    top: int = 5
    """Classes that are named, the most probable first."""
    memory_gb: float | None = None
    """Memory for the networks of tasks that are ready; default: a quarter of the device's. What was used longest ago is
    dropped and made again when it is needed; answers are the same."""


def serve_memory(settings: Serve) -> None:
    """Answers until Ctrl-C or SIGTERM; running requests are finished."""
    try:
        from cheem_jax.serve.app import make_app
        from cheem_jax.serve.limits import Limits
        from cheem_jax.serve.server import address_of, hosts_of, listen, make_server
    except ImportError as error:
        raise ValueError(f"serving needs more packages ({error}); pip install 'cheem_jax[serve]'") from error
    limits = Limits(
        max_body_bytes=int(settings.max_body_mb * 2**20), max_pixels=settings.max_pixels,
        max_queue=settings.max_queue, max_batch=settings.max_batch,
        batch_wait_seconds=settings.batch_wait_ms / 1000, timeout_seconds=settings.timeout_s,
    )  # fmt: skip
    progress = Progress()
    usual = signal.signal(signal.SIGTERM, _stop)
    try:
        with listen(settings.host, settings.port) as listening:
            sizes = tuple(sorted({min(size, settings.max_batch) for size in (*BATCH_SIZES, settings.max_batch)}))
            predictor = settings.open().predictor(
                batch_sizes=sizes, open_set=settings.open_set, top=settings.top, memory_gb=settings.memory_gb
            )
            app = make_app(predictor, limits, hosts_of(listening, settings.host))
            server, service = make_server(app, limits), app.state.service

            def say() -> None:
                if service.failure is not None:
                    server.should_exit = True
                else:
                    progress.say(f"ready on {address_of(listening)} for browsers and POST /predict; Ctrl-C stops it")

            service.on_warm = say
            tasks = f"{len(predictor.tasks)} task{'s' if len(predictor.tasks) > 1 else ''}"
            progress.say(f"{shown(settings.memory)}: {tasks}; compiling for batches of {', '.join(map(str, sizes))}")
            server.run(sockets=[listening])
            if service.failure is not None:
                raise service.failure
    finally:
        signal.signal(signal.SIGTERM, usual)


def _stop(number: int, frame: FrameType | None) -> None:
    raise Stopped("", number)
