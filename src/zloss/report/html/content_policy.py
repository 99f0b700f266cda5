"""The content policy of the page: its own style sheet and script by their checksums, and nothing else.

With checksums a browser runs no other script and no attribute with code or style, whatever text reaches the page. So colours
of methods and widths of bars, which attributes would hold otherwise, are classes of the style sheet.
"""

from __future__ import annotations

import base64
import hashlib
import math

from zloss.report.charts.panel import COLOURS


def content_policy(style: str, script: str) -> str:
    """The value of `Content-Security-Policy`: no requests, no base address, no forms."""
    return (
        f"default-src 'none'; style-src '{_checksum(style)}'; script-src '{_checksum(script)}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def generated_rules() -> str:
    """The rules of the style sheet that are made of numbers: a class per colour of a method, a class per width in per cent."""
    colours = "".join(f".chip.{colour_class(colour)} {{ color: {colour}; }}\n" for colour in COLOURS)
    widths = "".join(f".value i.{width_class(share)} {{ width: {share}%; }}\n" for share in range(101))
    return colours + widths


def colour_class(colour: str) -> str:
    """The class of a method's colour."""
    return f"method-{COLOURS.index(colour)}" if colour in COLOURS else "method"


def width_class(percent: float) -> str:
    """The class of a bar's width, in whole per cent; a bar of no number has none."""
    return f"width-{0 if math.isnan(percent) else round(min(max(percent, 0), 100))}"


def _checksum(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
