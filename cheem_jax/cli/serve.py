"""`cheem serve`: a memory that answers over HTTP and in the browser."""

import dataclasses
import signal
from types import FrameType

from cheem_jax.cli.memory import Predicting
from cheem_jax.core.interruption import Stopped
from cheem_jax.core.paths import shown
from cheem_jax.run.progress import Progress
from cheem_jax.serve.limits import Limits

BATCH_SIZES = (1, 8, 16)
"""Sizes that are compiled next to the largest one: of 32 clients about ten meet in a batch."""


@dataclasses.dataclass(frozen=True)
class Serve(Limits, Predicting):
    """Answer images over HTTP, with a page in the browser that shows which blocks ran (extra `serve`)."""

    host: str = "127.0.0.1"
    """Address to listen on; the default is reached from this machine only."""
    port: int = 8000
    """Port to listen on; 0 takes a free one."""


def serve_memory(settings: Serve) -> None:
    """Answers until Ctrl-C or SIGTERM; running requests are finished."""
    try:
        from cheem_jax.serve.app import address_of, hosts_of, listen, make_app, make_server
    except ImportError as error:
        raise ValueError(f"serving needs more packages ({error}); pip install 'cheem_jax[serve]'") from error
    progress = Progress()
    usual = signal.signal(signal.SIGTERM, _stop)
    try:
        with listen(settings.host, settings.port) as listening:
            sizes = tuple(sorted({min(size, settings.max_batch) for size in (*BATCH_SIZES, settings.max_batch)}))
            predictor = settings.predictor(batch_sizes=sizes)
            app = make_app(predictor, settings, hosts_of(listening, settings.host))
            server, service = make_server(app, settings), app.state.service

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
