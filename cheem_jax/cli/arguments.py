"""Settings written as the command line that gives them again."""

import dataclasses
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cheem_jax.core.paths import absolute
from cheem_jax.data.sources import BENCHMARKS, BY_NAME


def arguments_of(settings: Any) -> list[str]:
    """Every field of a settings dataclass as tyro's options, nested ones dotted; paths become absolute.

    `parse(defaults, arguments_of(settings))` gives the settings again, whatever the defaults are.
    """
    return list(_arguments(settings, ""))


def located(source: str) -> str:
    """A source of data that means the same in every working directory: names stay, files and folders get absolute."""
    is_name = source in (*BENCHMARKS, *BY_NAME) or source.startswith("tfds:")
    return source if is_name else _text(Path(source))


def _arguments(settings: Any, prefix: str) -> Iterator[str]:
    hints = typing.get_type_hints(type(settings))
    for field in dataclasses.fields(settings):
        value, name = getattr(settings, field.name), field.name.replace("_", "-")
        option = f"--{prefix}{name}"
        if dataclasses.is_dataclass(value):
            yield from _arguments(value, f"{prefix}{name}.")
        elif value is None and any(map(dataclasses.is_dataclass, typing.get_args(hints[field.name]))):
            continue  # a part that is not there has no option of its own
        elif hints[field.name] is bool:
            yield option if value else f"--{prefix}no-{name}"
        elif isinstance(value, tuple):
            yield from (option, *_words(option, value))
        else:
            text = _text(value)
            _check_none(option, value, text, hints[field.name])
            # after a space, what begins with a hyphen would be an option of its own
            yield from [f"{option}={text}"] if text.startswith("-") else [option, text]


def _words(option: str, values: tuple[Any, ...]) -> list[str]:
    words = [_text(value) for value in values]
    unfit = [value for value in values if isinstance(value, str) and (value.startswith("-") or value == "None")]
    if unfit:
        raise ValueError(f"{option} contains {unfit[0]!r}, which a command line takes for something else; rename it")
    return words


def _check_none(option: str, value: Any, text: str, hint: Any) -> None:
    if text == "None" and value is not None and type(None) in typing.get_args(hint):
        raise ValueError(f"{option} is the text 'None', which a command line takes for no value; rename it")


def _text(value: Any) -> str:
    match value:
        case None | bool() | int() | float():
            return repr(value)
        case str():
            return value
        case Path():
            return str(absolute(value))
    raise TypeError(f"{type(value).__name__} {value!r} has no form on a command line; expected numbers, text, paths")
