"""Stop requests. After Ctrl-C or SIGTERM, the current step is finished before the process stops, so
that no work is lost."""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stopped(KeyboardInterrupt):
    """Raised to end the work after a signal. The message says which state is saved."""

    def __init__(self, message: str, signal_number: int):
        super().__init__(message)
        self.signal_number = signal_number


class Stop:
    """A flag that is false at first and true after a signal."""

    def __init__(self) -> None:
        self.signal_number: int | None = None

    def __bool__(self) -> bool:
        return self.signal_number is not None

    def stopped(self, message: str) -> Stopped:
        """Return the exception that ends the work."""
        return Stopped(message, self.signal_number or signal.SIGINT)


@contextlib.contextmanager
def stop_requests() -> Iterator[Stop]:
    """Handle signals in this context: the first signal is a stop request, and the second has its
    usual effect.

    Python can set signal handlers only in the main thread. In other threads, the yielded Stop is
    always false.
    """
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def ask(number: int, frame: object) -> None:
        stop.signal_number = number
        restore()
        # `print` is not used, because the interrupted code can hold the lock of the print buffer.
        # An error of a closed stderr is ignored.
        with contextlib.suppress(OSError):
            os.write(2, b"\nstopping after the current step; repeat to stop immediately\n")

    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    # Shells start background processes in such a way that the processes ignore Ctrl-C. A handler
    # that ignores a signal is therefore not replaced.
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
