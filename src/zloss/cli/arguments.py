"""Argument types the subcommands share: comma-separated lists, and flags that append when repeated."""

from __future__ import annotations

from typing import Annotated, TypeVar

import tyro
from tyro.constructors import PrimitiveConstructorSpec

Item = TypeVar("Item", str, int, float)


def _comma_list(item: type[Item], metavar: str) -> PrimitiveConstructorSpec[tuple[Item, ...]]:
    def parse(words: list[str]) -> tuple[Item, ...]:
        return tuple(item(part.strip()) for part in words[0].split(",") if part.strip())

    return PrimitiveConstructorSpec(
        nargs=1,
        metavar=metavar,
        instance_from_str=parse,
        is_instance=lambda value: isinstance(value, tuple) and all(isinstance(part, item) for part in value),
        str_from_instance=lambda value: [",".join(str(part) for part in value)],
    )


CommaStrings = Annotated[tuple[str, ...], _comma_list(str, "A,B,...")]
CommaInts = Annotated[tuple[int, ...], _comma_list(int, "N,N,...")]
CommaFloats = Annotated[tuple[float, ...], _comma_list(float, "X,X,...")]

RepeatedStrings = tyro.conf.UseAppendAction[tuple[str, ...]]
"""`--text a --text b` keeps both; without this tyro keeps only the last."""
