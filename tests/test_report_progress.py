import io
import sys

import pytest
from rich.console import Console

from cheem_jax.run.progress import Progress, on_screen


class Clock:
    """A clock that moves only when a test advances it."""

    def __init__(self):
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def plain() -> tuple[Progress, Clock, io.StringIO]:
    text = io.StringIO()
    clock = Clock()
    return Progress(Console(file=text, width=40), clock=clock), clock, text


def test_without_a_terminal_a_phase_prints_its_start_a_line_now_and_then_and_its_end():
    progress, clock, text = plain()
    with progress.phase("supernet", task="digits", total=2000) as advance:
        for _ in range(20):
            clock.now += 2.0
            advance(100, note="loss 1.23")
    lines = text.getvalue().splitlines()
    assert lines[0] == "[supernet] digits: 2,000 images"
    assert lines[1] == "[supernet] digits: 800 of 2,000 images, 50 images/s, 24 s left, loss 1.23"
    assert (
        lines[2] == "[supernet] digits: 1,600 of 2,000 images, 50 images/s, 8.0 s left, loss 1.23"
    )
    assert lines[3] == "[supernet] digits: done in 40 s, 2,000 images, 50 images/s"
    assert len(lines) == 4


def test_a_phase_without_progress_states_no_remaining_time():
    progress, clock, text = plain()
    with progress.phase("search", task="digits", total=2000) as advance:
        clock.now += 60.0
        advance(0)
        clock.now += 60.0
        advance(100)
    lines = text.getvalue().splitlines()
    assert lines[1] == "[search] digits: 0 of 2,000 images"
    assert lines[2] == "[search] digits: 100 of 2,000 images, 1 images/s, 38 min 00 s left"


def test_a_phase_that_is_over_at_once_tells_no_speed():
    progress, clock, text = plain()
    with progress.phase("evaluate", task="digits", total=2000) as advance:
        clock.now += 0.005
        advance(2000)
    assert text.getvalue().splitlines()[-1] == "[evaluate] digits: done in 0.0 s, 2,000 images"


def test_ctrl_c_passes_through_and_the_cursor_is_restored():
    terminal = io.StringIO()
    progress = Progress(
        Console(file=terminal, force_terminal=True, width=120, _environ={"TERM": "xterm"})
    )
    with pytest.raises(KeyboardInterrupt):
        with progress.phase("search", task="digits [kin]", total=10) as advance:
            advance(5, note="[best] 0.5")
            raise KeyboardInterrupt
    hide, show = "\x1b[?25l", "\x1b[?25h"
    assert terminal.getvalue().count(hide) == terminal.getvalue().count(show) == 1
    assert terminal.getvalue().rindex(show) > terminal.getvalue().rindex(hide)
    assert "done" not in terminal.getvalue()
    with progress.phase("search", task="digits", total=10) as advance:  # and the next phase works
        advance(10)
    assert "done" in terminal.getvalue()


def test_messages_keep_their_brackets_and_are_not_wrapped():
    progress, _, text = plain()
    message = "[digits] " + "a long message " * 10
    progress.say(message)
    assert text.getvalue() == message + "\n"


def test_an_architecture_is_a_row_of_letters_with_a_legend_the_first_time():
    progress, _, text = plain()
    for name in ("digits", "letters"):
        progress.architecture(name, ["reuse:0", "adapt:0", "new", "skip", "reuse:3"])
    legend, *rows = text.getvalue().splitlines()
    assert all(kind in legend for kind in ("reuse", "adapt", "new", "skip"))
    assert [row.split() for row in rows] == [
        [name, "R", "A", "N", "S", "R3"] for name in ("digits", "letters")
    ]
    assert "\x1b" not in text.getvalue()


def test_a_terminal_with_colours_shows_the_four_of_the_figures():
    terminal = io.StringIO()
    console = Console(
        file=terminal,
        force_terminal=True,
        color_system="truecolor",
        width=120,
        _environ={"TERM": "xterm"},
    )
    Progress(console).architecture("digits", ["reuse:0", "adapt:0", "new", "skip"])
    row = terminal.getvalue().splitlines()[1]
    for red, green, blue in ((156, 206, 167), (254, 178, 76), (158, 201, 226), (242, 172, 202)):
        assert f"48;2;{red};{green};{blue}" in row


def test_without_a_console_nothing_is_shown(monkeypatch):
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, None)
    progress = Progress()
    progress.say("hello")
    with progress.phase("train", task="pets", total=2) as advance:
        advance(2)
    progress.architecture("pets", ["reuse:0", "skip"])
    assert not progress.has_bars and not on_screen()
