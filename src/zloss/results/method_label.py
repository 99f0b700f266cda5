"""The name of a compared method with its coefficient."""

from __future__ import annotations


def method_label(method: str, coef: float) -> str:
    """Name and coefficient of a method as tables and sentences show them."""
    return f"{method}, λ {coef:g}" if coef else method
