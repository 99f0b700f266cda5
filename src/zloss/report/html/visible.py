"""Text of tokens with its control characters made visible."""

from __future__ import annotations

_CONTROL = {code: 0x2400 + code for code in range(32)} | {0x7F: "␡", ord("\n"): "⏎", ord("\t"): "⇥"}


def visible_text(text: str) -> str:
    """Text of tokens with line breaks, tabs and control characters made visible."""
    return text.translate(_CONTROL)
