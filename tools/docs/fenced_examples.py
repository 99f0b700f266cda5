"""Examples in docstrings (`>>>`) as fenced blocks, for the reference: Markdown would take `>>>` for quotations."""

from __future__ import annotations

import re
from typing import Any

import griffe

EXAMPLE = re.compile(r"(?:^[ \t]*>>> .*(?:\n(?![ \t]*$).*)*\n?)+", re.MULTILINE)


def fenced(text: str) -> str:
    """`text` with every run of examples, up to the next empty line, in a fence."""
    return EXAMPLE.sub(lambda found: f"\n```pycon\n{found[0].rstrip()}\n```\n", text)


class FencedExamples(griffe.Extension):
    """Rewrites docstrings as they are loaded."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)
