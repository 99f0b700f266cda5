"""Any section of a result as lines of key and text, keys of newer versions included."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zloss.report.text.numbers import MISSING, number

Lines = list[tuple[str, str]]
"""(key, text) of a small table."""


def flat_lines(data: Mapping[str, Any], *, skip: tuple[str, ...] = (), prefix: str = "") -> Lines:
    """Nested plain values as (dotted key, text); the members of `extra` are shown without its name."""
    lines: Lines = []
    for key, value in data.items():
        if key in skip:
            continue
        name = prefix if key == "extra" else f"{prefix}.{key}" if prefix else key
        if isinstance(value, dict):
            lines += flat_lines(value, prefix=name)
        elif isinstance(value, (list, tuple)) and any(isinstance(item, dict) for item in value):
            for i, item in enumerate(value):
                lines += (
                    flat_lines(item, prefix=f"{name}.{i}") if isinstance(item, dict) else [(f"{name}.{i}", show(item))]
                )
        else:
            lines.append((name, show(value)))
    return lines


def show(value: Any) -> str:
    """A value of unknown type as text."""
    if value is None:
        return MISSING
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (int, float)):
        return number(value, 6)
    if isinstance(value, (list, tuple)):
        return ", ".join(show(item) for item in value)
    return str(value)
