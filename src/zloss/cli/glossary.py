"""`zloss glossary`: what a symbol, a key or a word means."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import tyro


@dataclass(frozen=True)
class Glossary:
    """Print what symbols and keys mean: a symbol (A_p^99), a key of a written file (p_z_999), a stage of the decision map, or
    part of one of them. Without an argument: the letters, the words and the numbers of an output head. docs/glossary.md lists
    everything."""

    words: Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="[WORD ...]")] = ()
    """Symbols, keys or parts of them."""

    def run(self, argv: Sequence[str]) -> int:
        from zloss.report.glossary import glossary_document
        from zloss.report.terminal import print_document

        print_document(glossary_document(self.words))
        return 0
