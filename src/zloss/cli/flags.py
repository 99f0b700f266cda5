"""Names of arguments as flags: the library says `valid_vocab`, a user of the command line reads --valid-vocab."""

from __future__ import annotations

import dataclasses
import re
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import tyro

from zloss.results.option import NotAnOption, Option

POSITIONAL = get_args(tyro.conf.Positional[str])[1]


def option_hints(config_type: Any) -> dict[str, tuple[Any, tuple[Any, ...]]]:
    """Field → (plain type, what it is annotated with), in order, of every field that the command line sets."""
    hints = get_type_hints(config_type, include_extras=True)
    split = {field.name: _split(hints[field.name]) for field in dataclasses.fields(config_type)}
    return {name: found for name, found in split.items() if NotAnOption not in found[1]}


def option_of(notes: tuple[Any, ...]) -> Option:
    """The spelling that a field is annotated with; the plain one if there is none."""
    return next((found for found in notes if isinstance(found, Option)), Option())


def nested_type(hint: Any) -> Any | None:
    """The configuration that a field holds, or None for a plain value."""
    candidates = (hint, *get_args(hint))
    return next((found for found in candidates if dataclasses.is_dataclass(found)), None)


def flags_of(command_type: Any) -> dict[str, str]:
    """Field → what a user writes for it, of a command and the configurations inside it."""
    flags: dict[str, str] = {}
    for name, (hint, notes) in option_hints(command_type).items():
        option, nested = option_of(notes), nested_type(hint)
        if nested is None or option.switch is not None:
            flags[name] = _written(name, option, notes)
        if nested is not None:
            flags |= flags_of(nested)
    return flags


def with_flags(text: str, flags: dict[str, str]) -> str:
    """`text` with every name of a field between backticks replaced by its flag; other words keep their backticks."""
    return re.sub(r"`(\w+)`", lambda match: flags.get(match[1], match[0]), text)


def _written(name: str, option: Option, notes: tuple[Any, ...]) -> str:
    if option.positional or POSITIONAL in notes:
        return option.metavar or name.upper()
    given = [found.name for found in notes if isinstance(getattr(found, "name", None), str)]
    return "--" + (option.flag or (given[0] if given else name)).replace("_", "-")


def _split(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    if get_origin(hint) is Annotated:
        plain, *notes = get_args(hint)
        return plain, tuple(notes)
    return hint, ()
