"""What `--help` shows of a command: its options without the parser's own words; `--help-all` adds the advanced ones."""

import contextlib
import dataclasses
import functools
import inspect
import io
import re
import textwrap
from typing import Annotated, Any, get_args, get_origin

import tyro
from tyro.constructors import ConstructorRegistry, StructConstructorSpec, StructFieldSpec, StructTypeInfo

from cheem_jax.cli.main import columns

ADVANCED = "advanced"
"""Marks a setting, `Annotated[float, ADVANCED]`, that only `--help-all` shows; it is taken like any other."""
METAVARS = {str: "TEXT", int: "NUMBER", float: "NUMBER"}
"""What an option takes, in words."""


def print_help(kind: type, *, shows_all: bool, default: Any = None, **options: Any) -> None:
    """Print the options of a settings dataclass, and say where some are left out."""
    registry, hidden = ConstructorRegistry(), list[str]()
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
        return dataclasses.replace(spec, fields=tuple(_in_words(field, shows_all, hidden) for field in spec.fields))

    purpose, shown = inspect.cleandoc(options.pop("description", None) or kind.__doc__ or ""), io.StringIO()
    markers = (tyro.conf.DisallowNone, tyro.conf.PositionalMetavarFromFieldName)
    # tyro prints it and exits
    with contextlib.redirect_stdout(shown), contextlib.suppress(SystemExit):
        tyro.cli(
            kind, default=default, args=["--help"], description="", config=markers, registry=registry, **options
        )  # fmt: skip
    usage, _, sections = re.sub(" +$", "", shown.getvalue(), flags=re.MULTILINE).partition("\n\n")
    whole = re.sub(r"\[.*?\]", lambda found: found[0].replace(" ", "\0"), usage)  # what is in brackets stays together
    wrapped = textwrap.fill(whole, columns(), subsequent_indent="    ", break_on_hyphens=False)
    print(wrapped.replace("\0", " "), end="\n\n")
    for part in purpose.split("\n\n"):  # what is indented is code
        print(part if "\n " in part else textwrap.fill(part, columns()), end="\n\n")
    sections = re.sub("(?m)^ ?(.+)\n -+$", r"\1:", sections.strip())  # a heading's line becomes a colon
    print(re.sub("\n\n(?=  )", "\n", sections))  # a hint left empty may take a line
    if hidden:
        print("\n`--help-all` also shows advanced options.")


def _in_words(field: StructFieldSpec, shows_all: bool, hidden: list[str]) -> StructFieldSpec:
    """The field without None, False and line breaks of the source, and unseen where it is for experts."""
    kind, *notes = get_args(field.type) if hasattr(field.type, "__metadata__") else (field.type,)
    is_many = get_origin(kind) is tuple and tyro.conf.Positional in notes
    says_nothing = field.default is None or field.default is False or is_many
    hint = f"(default: --{field.name.replace('_', '-')})" if field.default is True else None
    metavar = next((METAVARS[one] for one in (kind, *get_args(kind)) if one in METAVARS), None)
    is_positional = tyro.conf.Positional in notes
    words: list[Any] = [tyro.conf.arg(
        help_behavior_hint="" if says_nothing else hint, metavar=None if is_positional else metavar
    )]  # fmt: skip
    if field.default is False:
        words.append(tyro.conf.FlagCreatePairsOff)
    if ADVANCED in notes and not shows_all:
        words.append(tyro.conf.Suppress)
        hidden.append(field.name)
    return dataclasses.replace(
        field, type=Annotated[(kind, *words, *notes)], helptext=functools.partial(_one_line, field)
    )


def _one_line(field: StructFieldSpec) -> str | None:
    text = field.helptext() if callable(field.helptext) else field.helptext
    return text and " ".join(text.split())
