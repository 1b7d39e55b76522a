"""Signals ask to stop, once; their earlier handlers are restored."""

import os
import signal
import threading

import pytest

from cheem_jax.core.interruption import Stop, Stopped, stop_requests


@pytest.fixture(autouse=True)
def foreground():
    """In a background process, such as `make test &`, Ctrl-C is ignored."""
    usual = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, usual)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_becomes_a_request_and_says_so(number, capfd):
    usual = signal.getsignal(number)
    with stop_requests() as stop:
        assert not stop
        os.kill(os.getpid(), number)
        assert stop and stop.signal_number == number
        assert signal.getsignal(number) is usual  # a second one has its usual effect
    assert "stopping after the current step" in capfd.readouterr().err
    stopped = stop.stopped("after a step")
    assert isinstance(stopped, Stopped) and isinstance(stopped, KeyboardInterrupt)
    assert (str(stopped), stopped.signal_number) == ("after a step", number)


def test_without_a_signal_the_work_ends_as_after_ctrl_c():
    assert Stop().stopped("the disk is full").signal_number == signal.SIGINT


def test_a_second_ctrl_c_stops_at_once():
    with pytest.raises(KeyboardInterrupt):
        with stop_requests():
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)


def test_a_background_process_resumes_ignoring_ctrl_c():
    usual = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with stop_requests() as stop:
            os.kill(os.getpid(), signal.SIGINT)
            assert not stop
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, usual)


def test_earlier_signal_handlers_are_restored():
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with stop_requests():
        assert signal.getsignal(signal.SIGTERM) is not before[1]
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_a_thread_other_than_the_main_one_leaves_signals_alone():
    result = []

    def work():
        with stop_requests() as stop:
            result.append((bool(stop), signal.getsignal(signal.SIGINT)))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert result == [(False, signal.getsignal(signal.SIGINT))]
