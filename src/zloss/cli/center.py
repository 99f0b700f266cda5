"""`zloss center`: the row-centered head as a checkpoint that anyone can load."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from zloss.cli.arguments import RepeatedStrings
from zloss.cli.command_line import command_line


@dataclass(frozen=True)
class Center:
    """Subtract the mean row from a model's output head and write the result as an ordinary checkpoint folder. Probabilities and
    cross-entropy stay; the mean logit of every token becomes zero. The copy is loaded again and compared with the original."""

    model: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="MODEL")] = "smollm2"
    """`smollm2`, a Hugging Face id, a folder in that format, or a GGUF file (written in fp32)."""
    out: str = "zloss-centered"
    """Folder for the copy and centering.json."""
    text: Annotated[RepeatedStrings, tyro.conf.arg(metavar="FILE")] = ()
    """Text on which both are compared: plain text, .jsonl or .parquet; repeat to append. Default: one that ships with Python."""
    corpus: Literal["pydoc", "wikitext-103", "fineweb-edu"] | None = None
    """A named corpus instead of files."""
    blocks: int = 16
    """Blocks of that text."""
    block_size: int | None = None
    """Predictions per block, in tokens. Default: 256, or fewer where the model has fewer positions."""
    keep_tied: bool = False
    """Keep a tied head tied: needs learned positions that are added to the embedding (GPT-2, OPT). Default: untie the copy."""
    valid_vocab: int | None = None
    """Rows over which the mean row is taken, where the head has padding rows. Default: all."""
    force: bool = False
    """Replace what the folder holds."""
    quiet: bool = False
    """No progress and no table."""

    def run(self) -> int:
        from zloss.console.progress import choose_progress
        from zloss.protocol.center.run import CenterConfig, center_checkpoint
        from zloss.report.terminal.centering import print_centering

        config = CenterConfig(
            model=self.model,
            texts=tuple(self.text),
            corpus=self.corpus,
            blocks=self.blocks,
            block_size=self.block_size,
            keep_tied=self.keep_tied,
            valid_vocab=self.valid_vocab,
        )
        folder = Path(self.out)
        result = center_checkpoint(
            config, folder, force=self.force, progress=choose_progress(self.quiet), command=command_line()
        )
        if not self.quiet:
            print_centering(result, str(folder))
        return 0 if result.verified else 1
