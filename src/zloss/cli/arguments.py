"""Argument types the subcommands share: comma-separated lists, repeated flags, counts with 0 for none, numbers or words."""

from __future__ import annotations

from typing import Annotated, TypeVar

import tyro
from tyro.constructors import PrimitiveConstructorSpec

Item = TypeVar("Item", str, int, float)


def comma_list(item: type[Item], metavar: str) -> PrimitiveConstructorSpec[tuple[Item, ...]]:
    """`a,b,c` as a tuple of `item`."""

    def parse(words: list[str]) -> tuple[Item, ...]:
        return tuple(item(part.strip()) for part in words[0].split(",") if part.strip())

    return PrimitiveConstructorSpec(
        nargs=1,
        metavar=metavar,
        instance_from_str=parse,
        is_instance=lambda value: isinstance(value, tuple) and all(isinstance(part, item) for part in value),
        str_from_instance=lambda value: [",".join(str(part) for part in value)],
    )


def zero_is_none(metavar: str) -> PrimitiveConstructorSpec[int | None]:
    """A whole number, 0 for None."""
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar=metavar,
        instance_from_str=lambda words: int(words[0]) or None,
        is_instance=lambda value: value is None or isinstance(value, int),
        str_from_instance=lambda value: [str(value or 0)],
    )


def number_or_word(metavar: str) -> PrimitiveConstructorSpec[float | str | None]:
    """A number where it reads as one, else the word itself; `None` is None."""

    def parse(words: list[str]) -> float | str | None:
        try:
            return None if words[0] == "None" else float(words[0])
        except ValueError:
            return words[0]

    return PrimitiveConstructorSpec(
        nargs=1,
        metavar=metavar,
        instance_from_str=parse,
        is_instance=lambda value: value is None or isinstance(value, (int, float, str)),
        str_from_instance=lambda value: [str(value)],
    )


CommaStrings = Annotated[tuple[str, ...], comma_list(str, "A,B,...")]
CommaInts = Annotated[tuple[int, ...], comma_list(int, "N,N,...")]
CommaFloats = Annotated[tuple[float, ...], comma_list(float, "X,X,...")]

RepeatedStrings = tyro.conf.UseAppendAction[tuple[str, ...]]
"""`--text a --text b` keeps both; without this tyro keeps only the last."""
