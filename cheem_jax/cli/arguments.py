"""Convert command lines to settings dataclasses and back."""

import contextlib
import dataclasses
import io
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

import tyro
from tyro.constructors import (
    ConstructorRegistry,
    StructConstructorSpec,
    StructFieldSpec,
    StructTypeInfo,
)

from cheem_jax.cli.running import Settings, errors_in_a_line
from cheem_jax.core.paths import absolute, with_absolute_paths

ADVANCED = "advanced"
"""Marker of a setting that only `--help-all` shows, as in `Annotated[float, ADVANCED]`."""
ALL = "--help-all"
HELP_MARKERS = (
    tyro.conf.DisallowNone,
    tyro.conf.FlagCreatePairsOff,
    tyro.conf.PositionalMetavarFromFieldName,
)


def parse(
    settings: type[Settings] | Settings, arguments: Sequence[str] | None = None, **options: Any
) -> Settings:
    """Parse a command line into a dataclass with absolute paths.

    `settings` is a dataclass, or an instance whose values are the defaults; `options` are passed to
    `tyro.cli`. On bad input, print one line and exit with status 2.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    kind, default = (settings, None) if isinstance(settings, type) else (type(settings), settings)
    if {"-h", "--help", ALL}.intersection(words):
        registry = ConstructorRegistry()
        registry.struct_rule(HelpRule(shows_advanced=ALL in words))
        options |= {"config": HELP_MARKERS, "registry": registry}
        hints = get_type_hints(kind, include_extras=True).values()
        if ALL not in words and any(ADVANCED in get_args(hint) for hint in hints):
            purpose = options.get("description") or kind.__doc__
            options["description"] = f"{purpose}\n\n`{ALL}` also shows advanced options."
        tyro.cli(kind, default=default, args=["--help"], **options)
    message = io.StringIO()
    try:
        # tyro prints errors without a box if standard output has no encoding
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(message):
            parsed = tyro.cli(kind, default=default, args=words, **options)
    except SystemExit as stop:
        # a title and paragraphs, with a line of hyphens between each two
        _title, *parts = re.split(r"\n *-+ *\n", message.getvalue())
        sentences = [" ".join(part.split()).rstrip(".") for part in parts]
        print("error:", ". ".join(sentences), file=sys.stderr)
        raise SystemExit(2) from stop
    with errors_in_a_line():
        return with_absolute_paths(parsed)


@dataclasses.dataclass
class HelpRule:
    """A tyro rule that makes the help on options readable.

    It prints each description as a paragraph, negates it if the option switches something off,
    omits the defaults None, False and True, and hides advanced options unless `shows_advanced` is
    set.
    """

    shows_advanced: bool
    is_active: bool = False

    def __call__(self, info: StructTypeInfo) -> StructConstructorSpec | None:
        if self.is_active or not dataclasses.is_dataclass(info.type):
            return None
        self.is_active = True  # prevents recursion, so only tyro's other rules apply below
        try:
            spec = ConstructorRegistry.get_struct_spec(info)
        finally:
            self.is_active = False
        assert isinstance(spec, StructConstructorSpec)
        return dataclasses.replace(spec, fields=tuple(map(self._readable, spec.fields)))

    def _readable(self, field: StructFieldSpec) -> StructFieldSpec:
        kind, *notes = get_args(Annotated[field.type, tyro.conf.arg(help_behavior_hint=_hint)])
        if ADVANCED in notes and not self.shows_advanced:
            notes.append(tyro.conf.Suppress)
        text = field.helptext() if callable(field.helptext) else field.helptext
        if text and kind is bool and field.default is True:  # the option is --no-NAME
            text = f"Do not {text[0].lower()}{text[1:]}"
        return dataclasses.replace(
            field, type=Annotated[(kind, *notes)], helptext=text and " ".join(text.split())
        )


def _hint(default: str) -> str:
    return "" if default in ("None", "False", "True", "") else f"(default: {default})"


def arguments_of(settings: Any, prefix: str = "") -> list[str]:
    """Return the command-line arguments for all fields of a dataclass. Names of nested fields are
    dotted, and paths are absolute.

    `parse(defaults, arguments_of(settings))` equals `settings` for all values of `defaults`.
    Raises ValueError for text that a command line cannot represent.
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
            continue  # no option sets a nested dataclass to None
        elif hints[field.name] is bool:
            arguments.append(f"--{name}" if value else f"--{prefix}no-{name.removeprefix(prefix)}")
        elif isinstance(value, tuple):
            words = [_text(item) for item in value]
            for item, word in zip(value, words, strict=True):
                if isinstance(item, str) and (word.startswith("-") or word == "None"):
                    raise ValueError(
                        f"--{name} contains {word!r}, which a command line cannot represent; rename"
                        " it"
                    )
            arguments += [f"--{name}", *words]
        elif value == "None" and type(None) in kinds:
            raise ValueError(
                f"--{name} is the text 'None', which a command line cannot represent; rename it"
            )
        else:
            text = _text(value)
            # a hyphen after a space would start the next option
            arguments += [f"--{name}={text}"] if text.startswith("-") else [f"--{name}", text]
    return arguments


def located(source: str) -> str:
    """Return a source of data that is valid in another working directory: names are unchanged, and
    paths become absolute."""
    # a late import, so that help works without the packages for data
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
        f"{type(value).__name__} {value!r} cannot be written on a command line; expected a number,"
        " text or a path"
    )
