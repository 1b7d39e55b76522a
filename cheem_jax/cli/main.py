"""The `cheem` command. The first argument selects a command, which parses the other arguments."""

import difflib
import logging
import sys

from cheem_jax import __version__
from cheem_jax.cli.commands import COMMANDS, GROUPS
from cheem_jax.cli.running import errors_in_a_line, output_handled, run_command

PURPOSE = """
Continual learning with Vision Transformers: earlier tasks keep their
parameters, no old image is stored."""
CLOSING = """
`cheem COMMAND --help` shows the options; --help-all also shows advanced ones.
Exit status: 0 success; 1 partial success; 2 bad input or a missing part;
128 + N stopped by signal N."""


def main() -> None:
    """Run the command that `sys.argv` names."""
    with errors_in_a_line(), output_handled():
        words = sys.argv[1:]
        if words[:1] == ["help"]:
            words = [*words[1:], "--help"]
        if words[:1] in (["-V"], ["--version"]):
            print(f"cheem_jax {__version__}")
            return
        num_words = 2 if words[:1] == ["data"] else 1
        group, rest = words[: num_words - 1], words[num_words:]
        if words[num_words - 1 : num_words] in ([], ["-h"], ["--help"], ["--help-all"]):
            _print_help("data " if group else "")
            return
        name = " ".join(words[:num_words])
        if name not in COMMANDS:
            print(f"error: {_suggest(name)}", file=sys.stderr)
            raise SystemExit(2)
        command = COMMANDS[name]
        # Without a home folder, matplotlib prints long warnings.
        logging.getLogger("matplotlib").setLevel(logging.ERROR)
        with errors_in_a_line():
            from cheem_jax.cli.arguments import parse  # imports tyro, which is slow

            kind, function = command.load()
            defaults = kind.defaults(rest) if hasattr(kind, "defaults") else kind
            settings = parse(defaults, rest, prog=f"cheem {name}", description=command.help)
            directory = getattr(settings, "run_dir", None)
        run_command(function, settings, directory, computes=command.computes)


def _print_help(prefix: str) -> None:
    print(f"usage: cheem {prefix}COMMAND [--help]{'' if prefix else ' | cheem --version'}")
    if not prefix:
        print(PURPOSE)
    width = max(map(len, COMMANDS)) + 2
    for heading, group in GROUPS.items():
        commands = [command for command in group if command.name.startswith(prefix)]
        if commands:
            print(f"\n{heading}:")
        for command in commands:
            print(f"  {command.name:<{width}}{command.help}")
    print(CLOSING)


def _suggest(name: str) -> str:
    prefix = "data " if name.startswith("data ") else ""
    names = [command for command in COMMANDS if command.startswith(prefix)]
    # Commands of `data` also match by their second word.
    nearest = difflib.get_close_matches(name, names, n=1) or [
        command for command in names if difflib.get_close_matches(name, command.split()[-1:])
    ]
    hint = f"most similar: {', '.join(nearest)}; " if nearest else ""
    return f"unknown command {name!r}; {hint}expected one of: {', '.join(names)}"
