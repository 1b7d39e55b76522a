"""`cheem completion`: a script that completes commands, options and values in a shell."""

import contextlib
import dataclasses
import io
from typing import Annotated, Literal

import tyro
from tyro.extras import SubcommandApp

from cheem_jax.cli.commands import COMMANDS

Shell = Literal["bash", "zsh", "fish"]

HOW_TO_INSTALL: dict[Shell, str] = {
    "bash": (
        "cheem completion bash > ~/.local/share/bash-completion/completions/cheem, and open a new"
        " shell"
    ),
    "zsh": (
        "cheem completion zsh > ~/.zfunc/_cheem, with `fpath+=~/.zfunc` before `compinit` in"
        " ~/.zshrc"
    ),
    "fish": "cheem completion fish > ~/.config/fish/completions/cheem.fish",
}
FILES_IN_BASH = """
# completes file names unless a command or value matches; completes options only after a hyphen
_cheem() {
  _tyro_cheem
  local word matches=()
  for word in "${COMPREPLY[@]}"; do
    [[ -z $word || ( $word == -* && $2 != -* ) ]] || matches+=("$word")
  done
  COMPREPLY=("${matches[@]}")
}
complete -o default -F _cheem cheem"""


@dataclasses.dataclass(frozen=True)
class Completion:
    """Options of `cheem completion`."""

    shell: Annotated[Shell, tyro.conf.Positional]
    """Your shell. The first comment of the script says where to save it."""


def print_completion(settings: Completion) -> None:
    """Print the script for all commands."""
    app = SubcommandApp()
    data = SubcommandApp()
    for name, command in COMMANDS.items():
        parent = data if name.startswith("data ") else app
        parent.command(name=name.removeprefix("data "))(command.load()[0])
    app.command(data, name="data")
    script = io.StringIO()
    # tyro prints the script and exits
    with contextlib.redirect_stdout(script), contextlib.suppress(SystemExit):
        app.cli(prog="cheem", args=["--tyro-print-completion", settings.shell])
    lines = script.getvalue().rstrip().splitlines()
    # zsh requires `#compdef` in the first line
    lines.insert(int(settings.shell == "zsh"), f"# {HOW_TO_INSTALL[settings.shell]}")
    if settings.shell == "bash":
        lines.append(FILES_IN_BASH)
    if settings.shell == "zsh":
        # the last line calls the completion function; if it fails, zsh completes file names
        lines[-1] += " || _files"
    print("\n".join(lines))
