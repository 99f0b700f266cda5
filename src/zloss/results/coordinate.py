"""The two coordinates of an output head."""

from __future__ import annotations

from typing import Literal

Coordinate = Literal["raw", "centered"]
"""Logits as the head gives them, or minus their mean over the vocabulary."""
