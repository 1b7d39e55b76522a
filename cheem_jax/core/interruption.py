"""Requests to stop: Ctrl-C and SIGTERM wait for the running step, so that nothing of it is lost."""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stopped(KeyboardInterrupt):
    """Work ended because a signal asked for it; the message says what was kept."""

    def __init__(self, kept: str, signal_number: int):
        super().__init__(kept)
        self.signal_number = signal_number


class Stop:
    """Whether a signal has asked to stop, and which."""

    def __init__(self) -> None:
        self.signal_number: int | None = None

    def __bool__(self) -> bool:
        return self.signal_number is not None

    def stopped(self, kept: str) -> Stopped:
        """The exception that ends the work."""
        return Stopped(kept, self.signal_number or signal.SIGINT)


@contextlib.contextmanager
def stop_requests() -> Iterator[Stop]:
    """Signals become requests while this is open; a second signal has its usual effect.

    Only the main thread may say what signals do: elsewhere nothing changes.
    """
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def ask(number: int, frame: object) -> None:
        stop.signal_number = number
        restore()
        # not through `print`, whose buffer the interrupted code may be holding
        with contextlib.suppress(OSError):  # whoever reads it may be gone
            os.write(2, b"\nstopping after the running step; once more stops at once\n")

    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    # a background process ignores Ctrl-C, and still does
    usual = {
        number: handler
        for number, handler in handlers.items()
        if handler not in (signal.SIG_IGN, None)
    }

    def restore() -> None:
        for number, handler in usual.items():
            signal.signal(number, handler)

    try:
        for number in usual:
            signal.signal(number, ask)
        yield stop
    finally:
        restore()
