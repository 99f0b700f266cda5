"""Checks of the fields of a configuration: each names the field, what was expected and what came."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, get_args

from zloss.errors import InputError, UnknownNameError


def check_counts(config: object, names: Iterable[str], *, least: int = 1) -> None:
    """Whole numbers of at least `least`."""
    for name in names:
        value = getattr(config, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise InputError(f"`{name}` is expected to be a whole number ≥ {least}, but got {value!r}.")


def check_optional_counts(config: object, names: Iterable[str]) -> None:
    """Whole numbers of at least 1, where they are not None."""
    check_counts(config, [name for name in names if getattr(config, name) is not None])


def check_numbers(config: object, names: Iterable[str], *, positive: bool = False) -> None:
    """Finite numbers ≥ 0, or > 0."""
    for name in names:
        value = getattr(config, name)
        if not (math.isfinite(value) and (value > 0 or (value == 0 and not positive))):
            raise InputError(
                f"`{name}` is expected to be a finite number {'>' if positive else '≥'} 0, but got {value!r}."
            )


def check_choices(config: object, choices: dict[str, Any]) -> None:
    """Values of a `Literal` type, by field."""
    for name, literal in choices.items():
        value = getattr(config, name)
        if value not in get_args(literal):
            raise UnknownNameError(f"`{name}`", value, get_args(literal))


def check_columns(record: object, *tables: tuple[str, ...]) -> None:
    """Columns of one table, by the names of their fields, have as many entries as one another."""
    for names in tables:
        lengths = [len(getattr(record, name)) for name in names]
        if len(set(lengths)) > 1:
            said = ", ".join(f"{length} in `{name}`" for name, length in zip(names, lengths, strict=True))
            raise InputError(
                f"{' and '.join(f'`{name}`' for name in names)} are expected to be equally long, but have {said}."
            )
