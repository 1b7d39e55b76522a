"""Settings written as the command line that gives them again."""

import dataclasses
import typing
from pathlib import Path
from typing import Any

from cheem_jax.core.paths import absolute
from cheem_jax.data.sources import is_name


def arguments_of(settings: Any, prefix: str = "") -> list[str]:
    """Every field of a settings dataclass as tyro's options, nested ones dotted; paths become absolute.

    `parse(defaults, arguments_of(settings))` gives the settings again, whatever the defaults are. Raises ValueError
    for text that a command line would take for something else.
    """
    hints, arguments = typing.get_type_hints(type(settings)), list[str]()
    for field in dataclasses.fields(settings):
        value, name = getattr(settings, field.name), f"{prefix}{field.name.replace('_', '-')}"
        kinds = typing.get_args(hints[field.name])
        if dataclasses.is_dataclass(value):
            arguments += arguments_of(value, f"{name}.")
        elif value is None and any(map(dataclasses.is_dataclass, kinds)):
            continue  # a part that is not there has no option of its own
        elif hints[field.name] is bool:
            arguments.append(f"--{name}" if value else f"--{prefix}no-{name.removeprefix(prefix)}")
        elif isinstance(value, tuple):
            if unfit := [one for one in value if isinstance(one, str) and (one.startswith("-") or one == "None")]:
                raise ValueError(
                    f"--{name} contains {unfit[0]!r}, which a command line takes for something else; rename it"
                )
            arguments += [f"--{name}", *map(_text, value)]
        elif value == "None" and type(None) in kinds:
            raise ValueError(f"--{name} is the text 'None', which a command line takes for no value; rename it")
        else:
            text = _text(value)
            # after a space, what begins with a hyphen would be an option of its own
            arguments += [f"--{name}={text}"] if text.startswith("-") else [f"--{name}", text]
    return arguments


def located(source: str) -> str:
    """A source of data that means the same in every working directory: names stay, files and folders get absolute."""
    return source if is_name(source) else _text(Path(source))


def _text(value: Any) -> str:
    match value:
        case None | bool() | int() | float():
            return repr(value)
        case str():
            return value
        case Path():
            return str(absolute(value))
    raise TypeError(f"{type(value).__name__} {value!r} has no form on a command line; expected numbers, text, paths")
