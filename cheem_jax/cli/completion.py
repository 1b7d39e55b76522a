"""`cheem completion`: what makes a shell complete the command, its sub-commands and their options."""

import contextlib
import dataclasses
import io
from typing import Annotated, Any, Literal, Union

import tyro

from cheem_jax.cli.main import COMMANDS

Shell = Literal["bash", "zsh", "fish"]

HOW_TO: dict[Shell, str] = {
    "bash": "cheem completion bash > ~/.local/share/bash-completion/completions/cheem, and open a new shell",
    "zsh": "cheem completion zsh > ~/.zfunc/_cheem, with `fpath+=~/.zfunc` before `compinit` in ~/.zshrc",
    "fish": "cheem completion fish > ~/.config/fish/completions/cheem.fish",
}

FILES_IN_BASH = """
# runs and images are no options: files are offered where nothing else fits, and options after a hyphen
_cheem() {
  _tyro_cheem
  local word fitting=()
  for word in "${COMPREPLY[@]}"; do
    [[ -z $word || ( $word == -* && $2 != -* ) ]] || fitting+=("$word")
  done
  COMPREPLY=("${fitting[@]}")
}
complete -o default -F _cheem cheem"""
CALL_IN_ZSH = '_tyro_cheem "$@"'


@dataclasses.dataclass(frozen=True)
class Completion:
    """Print what makes a shell complete `cheem`, its commands and their options."""

    shell: Annotated[Shell, tyro.conf.Positional]
    """Your shell; the first comment of what is printed says where to save it."""


def print_completion(settings: Completion) -> None:
    """The script, with all that the commands of this version take."""
    print(script(settings.shell))


def script(shell: Shell) -> str:
    """The completion of the whole command, in the shell's language."""
    printed = io.StringIO()
    # tyro prints it and exits
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        tyro.cli(_everything(), prog="cheem", args=["--tyro-print-completion", shell])
    lines = printed.getvalue().rstrip().splitlines()
    place = 1 if shell == "zsh" else 0  # zsh wants to read `#compdef` first
    lines[place:place] = [f"# {HOW_TO[shell]}"]
    if shell == "bash":
        lines.append(FILES_IN_BASH)
    if shell == "zsh" and lines[-1] == CALL_IN_ZSH:
        lines[-1] += " || _files"
    return "\n".join(lines)


def _everything() -> Any:
    """All commands as one union of dataclasses, those below `data` as a union of their own."""
    kinds: dict[str, Any] = {name: command.load()[0] for name, command in COMMANDS.items()}
    below = {name.removeprefix("data "): kinds.pop(name) for name in COMMANDS if name.startswith("data ")}
    field = tyro.conf.OmitArgPrefixes[tyro.conf.OmitSubcommandPrefixes[_union(below)]]
    return _union({**kinds, "data": dataclasses.make_dataclass("Data", [("command", field)])})


def _union(kinds: dict[str, Any]) -> Any:
    return Union[tuple(Annotated[kind, tyro.conf.subcommand(name)] for name, kind in kinds.items())]  # noqa: UP007
