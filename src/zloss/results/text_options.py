"""The options that select a text and cut it into blocks, declared once for every configuration that reads a text.

The fields of a base class precede those of the class that inherits them. A configuration redeclares a field to change its
default or its help; the field keeps its place.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Annotated, Any

from zloss.results.choices import BosPolicy, CorpusName
from zloss.results.option import Option

TextFiles = Annotated[tuple[str, ...], Option(flag="text", metavar="FILE", repeated=True)]
ValidTextFiles = Annotated[tuple[str, ...], Option(flag="valid-text", metavar="FILE", repeated=True)]
BlockCount = Annotated[int | None, Option(metavar="INT", zero_is_none=True)]


@dataclass(frozen=True)
class TextOptions:
    """A text, and the blocks of tokens that are read from it."""

    texts: TextFiles = ()
    """Text to audit on: plain text, .jsonl or .parquet; repeat to append. Default: the corpus `pydoc`."""
    corpus: CorpusName | None = None
    """A named corpus instead of `texts`; pydoc is embedded, the others are fetched."""
    text_field: str = "text"
    """Field or column that holds the text in .jsonl and .parquet files."""
    blocks: BlockCount = 64
    """Number of blocks; 0 takes all the text gives."""
    block_size: int | None = None
    """Predictions per block, in tokens. Default: 256, or fewer where the model has fewer positions."""
    bos: BosPolicy = "auto"
    """Put a BOS in front of every block: where the tokenizer itself would, always, or never."""

    def text_options(self, **changes: Any) -> dict[str, Any]:
        """The fields of this class by name, with `changes`, for another configuration that reads the same text."""
        return {field.name: getattr(self, field.name) for field in fields(TextOptions)} | changes
