"""Settings dataclasses as command lines: their help, what a shell completes, and the words that
give them again."""

import contextlib
import dataclasses
import inspect
import io
import re
import textwrap
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import tyro
from tyro.constructors import (
    ConstructorRegistry,
    StructConstructorSpec,
    StructFieldSpec,
    StructTypeInfo,
)
from tyro.extras import SubcommandApp

from cheem_jax.cli.main import COMMANDS, columns
from cheem_jax.core.paths import absolute

ADVANCED = "advanced"
"""Marks a setting, `Annotated[float, ADVANCED]`, that only `--help-all` shows; it is taken like any
other."""
METAVARS = {str: "TEXT", int: "NUMBER", float: "NUMBER"}
"""What an option takes, in words."""


def print_help(kind: type, *, shows_all: bool, default: Any = None, **options: Any) -> None:
    """Print the options of a settings dataclass, and say where some are left out."""
    registry = ConstructorRegistry()
    hidden = list[str]()
    is_inside = False

    @registry.struct_rule
    def in_words(info: StructTypeInfo) -> StructConstructorSpec | None:
        nonlocal is_inside
        if is_inside or not dataclasses.is_dataclass(info.type):
            return None
        is_inside = True  # the rule that would have been taken makes the fields
        try:
            spec = ConstructorRegistry.get_struct_spec(info)
        finally:
            is_inside = False
        assert isinstance(spec, StructConstructorSpec)
        return dataclasses.replace(
            spec, fields=tuple(_in_words(field, shows_all, hidden) for field in spec.fields)
        )

    purpose = inspect.cleandoc(options.pop("description", None) or kind.__doc__ or "")
    shown = io.StringIO()
    markers = (tyro.conf.DisallowNone, tyro.conf.PositionalMetavarFromFieldName)
    # tyro prints it and exits
    with contextlib.redirect_stdout(shown), contextlib.suppress(SystemExit):
        tyro.cli(
            kind,
            default=default,
            args=["--help"],
            description="",
            config=markers,
            registry=registry,
            **options,
        )
    usage, _, sections = re.sub(" +$", "", shown.getvalue(), flags=re.MULTILINE).partition("\n\n")
    whole = re.sub(
        r"\[.*?\]", lambda found: found[0].replace(" ", "\0"), usage
    )  # what is in brackets stays together
    wrapped = textwrap.fill(whole, columns(), subsequent_indent="    ", break_on_hyphens=False)
    print(wrapped.replace("\0", " "), end="\n\n")
    for part in purpose.split("\n\n"):  # what is indented is code
        print(part if "\n " in part else textwrap.fill(part, columns()), end="\n\n")
    sections = re.sub(
        "(?m)^ ?(.+)\n -+$", r"\1:", sections.strip()
    )  # a heading's line becomes a colon
    print(re.sub("\n\n(?=  )", "\n", sections))  # a hint left empty may take a line
    if hidden:
        print("\n`--help-all` also shows advanced options.")


def _in_words(field: StructFieldSpec, shows_all: bool, hidden: list[str]) -> StructFieldSpec:
    """The field without None, False and line breaks of the source, and unseen where it is for
    experts."""
    kind, *notes = get_args(field.type) if hasattr(field.type, "__metadata__") else (field.type,)
    is_positional = tyro.conf.Positional in notes
    hint = f"(default: --{field.name.replace('_', '-')})" if field.default is True else None
    if (
        field.default is None
        or field.default is False
        or (is_positional and get_origin(kind) is tuple)
    ):
        hint = ""
    metavar = next(
        (METAVARS[one] for one in (kind, *get_args(kind)) if one in METAVARS and not is_positional),
        None,
    )
    words: list[Any] = [tyro.conf.arg(help_behavior_hint=hint, metavar=metavar)]
    if field.default is False:
        words.append(tyro.conf.FlagCreatePairsOff)
    if ADVANCED in notes and not shows_all:
        words.append(tyro.conf.Suppress)
        hidden.append(field.name)
    text = field.helptext() if callable(field.helptext) else field.helptext
    return dataclasses.replace(
        field, type=Annotated[(kind, *words, *notes)], helptext=text and " ".join(text.split())
    )


Shell = Literal["bash", "zsh", "fish"]

HOW_TO: dict[Shell, str] = {
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
# runs and images are no options: files are offered where nothing else fits, and options after a hyphen
_cheem() {
  _tyro_cheem
  local word fitting=()
  for word in "${COMPREPLY[@]}"; do
    [[ -z $word || ( $word == -* && $2 != -* ) ]] || fitting+=("$word")
  done
  COMPREPLY=("${fitting[@]}")
}
complete -o default -F _cheem cheem"""  # noqa: E501


@dataclasses.dataclass(frozen=True)
class Completion:
    """Print what makes a shell complete `cheem`, its commands and their options."""

    shell: Annotated[Shell, tyro.conf.Positional]
    """Your shell; the first comment of what is printed says where to save it."""


def print_completion(settings: Completion) -> None:
    """The script, with all that the commands of this version take."""
    app = SubcommandApp()
    below = SubcommandApp()
    printed = io.StringIO()
    for name, command in COMMANDS.items():
        parent = below if name.startswith("data ") else app
        parent.command(name=name.removeprefix("data "))(command.load()[0])
    app.command(below, name="data")
    # tyro prints it and exits
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        app.cli(prog="cheem", args=["--tyro-print-completion", settings.shell])
    lines = printed.getvalue().rstrip().splitlines()
    lines.insert(
        int(settings.shell == "zsh"), f"# {HOW_TO[settings.shell]}"
    )  # zsh wants to read `#compdef` first
    if settings.shell == "bash":
        lines.append(FILES_IN_BASH)
    if settings.shell == "zsh":
        lines[-1] += " || _files"  # the last line calls the function
    print("\n".join(lines))


def arguments_of(settings: Any, prefix: str = "") -> list[str]:
    """Every field of a settings dataclass as tyro's options, nested ones dotted; paths become
    absolute.

    `parse(defaults, arguments_of(settings))` gives the settings again, whatever the defaults are.
    Raises ValueError for text that a command line would take for something else.
    """
    hints = get_type_hints(type(settings))
    arguments = list[str]()
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        name = f"{prefix}{field.name.replace('_', '-')}"
        kinds = get_args(hints[field.name])
        if dataclasses.is_dataclass(value):
            arguments += arguments_of(value, f"{name}.")
        elif value is None and any(map(dataclasses.is_dataclass, kinds)):
            continue  # a part that is not there has no option of its own
        elif hints[field.name] is bool:
            arguments.append(f"--{name}" if value else f"--{prefix}no-{name.removeprefix(prefix)}")
        elif isinstance(value, tuple):
            if unfit := [
                one
                for one in value
                if isinstance(one, str) and (one.startswith("-") or one == "None")
            ]:
                raise ValueError(
                    f"--{name} contains {unfit[0]!r}, which a command line takes for something"
                    " else; rename it"
                )
            arguments += [f"--{name}", *map(_text, value)]
        elif value == "None" and type(None) in kinds:
            raise ValueError(
                f"--{name} is the text 'None', which a command line takes for no value; rename it"
            )
        else:
            text = _text(value)
            # after a space, what begins with a hyphen would be an option of its own
            arguments += [f"--{name}={text}"] if text.startswith("-") else [f"--{name}", text]
    return arguments


def located(source: str) -> str:
    """A source of data that means the same in every working directory: names stay, files and
    folders get absolute."""
    # not for the help of every command: it may be shown where packages are missing
    from cheem_jax.data.sources import is_name

    return source if is_name(source) else _text(Path(source))


def _text(value: Any) -> str:
    match value:
        case None | bool() | int() | float():
            return repr(value)
        case str():
            return value
        case Path():
            return str(absolute(value))
    raise TypeError(
        f"{type(value).__name__} {value!r} has no form on a command line; expected numbers, text,"
        " paths"
    )
