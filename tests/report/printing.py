"""What a terminal of some width shows of a document."""

from __future__ import annotations

import io
from collections.abc import Iterable

from rich.console import Console

from zloss.report.document import Block
from zloss.report.terminal import print_document


def printed(document: Iterable[Block], width: int = 80) -> str:
    stream = io.StringIO()
    print_document(document, Console(file=stream, width=width))
    return stream.getvalue()


def joined(document: Iterable[Block], width: int = 80) -> str:
    """The same without line breaks."""
    return " ".join(printed(document, width).split())
