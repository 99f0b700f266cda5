"""Everything that defines a centering, as one typed value without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from zloss.results.checks import check_counts, check_optional_counts
from zloss.results.choices import SMOLLM2, CorpusName
from zloss.results.option import Option
from zloss.results.text_options import TextFiles


@dataclass(frozen=True)
class CenterConfig:
    """What to center, and the text on which the copy is checked."""

    model: Annotated[str, Option(positional=True, metavar="MODEL")] = SMOLLM2
    """`smollm2`, a Hugging Face id, a folder in that format, or a GGUF file (written in fp32)."""
    texts: TextFiles = ()
    """Text on which both are compared: plain text, .jsonl or .parquet; repeat to append. Default: the corpus `pydoc`."""
    corpus: CorpusName | None = None
    """A named corpus instead of `texts`; pydoc is embedded, the others are fetched."""
    blocks: int = 16
    """Blocks of that text."""
    block_size: int | None = None
    """Predictions per block, in tokens. Default: 256, or fewer where the model has fewer positions."""
    keep_tied: bool = False
    """Keep a tied head tied, by moving the mean row into learned positions that are added to the embedding (GPT-2, OPT).
    Default: untie the copy."""
    valid_vocab: Annotated[int | str | None, Option(metavar="N|tokenizer")] = None
    """Rows over which the mean row is taken, where the head has padding rows: a number, or 'tokenizer' for those with a token.
    Default: all."""

    def __post_init__(self) -> None:
        check_counts(self, ("blocks",))
        check_optional_counts(self, ("block_size",))
