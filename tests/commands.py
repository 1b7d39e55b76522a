"""The command `cheem`, and scripts, in this process."""

import sys

import pytest

from cheem_jax.cli.arguments import parse
from cheem_jax.cli.main import main
from cheem_jax.cli.running import run_command


def cheem(capsys, *words):
    """Run `cheem`, and return status, standard output and standard error."""
    status = 0
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sys, "argv", ["cheem", *map(str, words)])
        try:
            main()
        except SystemExit as stop:
            status = stop.code or 0
    printed = capsys.readouterr()
    return status, printed.out, printed.err


def status_of(script, arguments):
    """Run a conversion script, and return its exit status."""
    try:
        run_command(script.main, parse(script.Convert, arguments), computes=False)
    except SystemExit as stop:
        return stop.code
    return 0
