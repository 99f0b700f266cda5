"""`zloss audit`: what Z-loss would do to this checkpoint."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import tyro

from zloss.cli.arguments import RepeatedStrings
from zloss.cli.command_line import command_line
from zloss.decide.thresholds import Thresholds


@dataclass(frozen=True)
class Audit:
    """Measure common shift, log-normalizer tail and output-to-hidden gain of a language model on a text, raw and centered,
    and say what to do about them. Without arguments: the embedded SmolLM2-135M on an English text that ships with Python."""

    model: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="MODEL")] = "smollm2"
    """`smollm2`, a Hugging Face id, a folder in that format, or a GGUF file."""
    text: Annotated[RepeatedStrings, tyro.conf.arg(metavar="FILE")] = ()
    """Text to audit on: plain text, .jsonl or .parquet; repeat to append."""
    corpus: Literal["pydoc", "wikitext-103", "fineweb-edu"] | None = None
    """A named corpus instead of files; pydoc is embedded, the others are fetched."""
    text_field: str = "text"
    """Field or column that holds the text in .jsonl and .parquet files."""
    blocks: int = 64
    """Number of blocks; 0 takes all the text gives."""
    block_size: int = 256
    """Predictions per block."""
    offset: int = 0
    """Blocks to skip at the start of the text."""
    bos: Literal["auto", "yes", "no"] = "auto"
    """Put a BOS in front of every block: where the tokenizer itself would, always, or never."""
    valid_vocab: str | None = None
    """Rows inside log Z, μ, w̄ and c: a number, or `tokenizer`. Default: every row of the head."""
    diag_coef: float = 1e-4
    """λ_diag of Diag Z and of the gradient section."""
    svd: Literal["exact", "randomized"] = "exact"
    """Spectrum of the head: exact from the Gram matrix, or randomized as in the paper."""
    gradient_blocks: int = 8
    """Blocks of the diagnostic batch of the gradient section; 0 leaves it out."""
    batch_blocks: int = 4
    """Blocks per forward pass."""
    dtype: Literal["fp32", "fp64", "bf16"] = "fp32"
    """Precision of the model; statistics are fp32 or better in any case."""
    seed: int = 0
    """Seed of the token sample and of a randomized spectrum."""
    out: str = "zloss-audit"
    """Folder for report.json, report.html and the figures."""
    figures: bool = True
    """Also write the figures as SVG and PNG files."""
    quiet: bool = False
    """No progress and no table."""
    resume: bool = False
    """Go on after the last finished block of an interrupted audit in the same folder."""
    trust_remote_code: bool = False
    """Run model code that comes with the checkpoint."""
    allow_pickle: bool = False
    """Also read pickled weights."""
    thresholds: Annotated[Thresholds, tyro.conf.arg(name="")] = field(default_factory=Thresholds)

    def run(self) -> int:
        from zloss.audit.checkpoint.config import AuditConfig
        from zloss.audit.checkpoint.run import run_audit
        from zloss.console.progress import choose_progress
        from zloss.decide.decision_map import with_decisions
        from zloss.report.files import write_audit
        from zloss.report.terminal.audit import print_audit
        from zloss.results.folder import check_folder

        folder = Path(self.out)
        check_folder(folder)
        config = AuditConfig(
            model=self.model,
            texts=tuple(self.text),
            corpus=self.corpus,
            text_field=self.text_field,
            blocks=self.blocks or None,
            block_size=self.block_size,
            offset=self.offset,
            bos=self.bos,
            valid_vocab=self.valid_vocab,
            diag_coef=self.diag_coef,
            svd=self.svd,
            gradient_blocks=self.gradient_blocks,
            batch_blocks=self.batch_blocks,
            dtype=self.dtype,
            seed=self.seed,
            trust_remote_code=self.trust_remote_code,
            allow_pickle=self.allow_pickle,
        )
        report = run_audit(
            config, folder=folder, resume=self.resume, progress=choose_progress(self.quiet), command=command_line()
        )
        report = with_decisions(report, thresholds=self.thresholds)
        written = write_audit(folder, report, figures=self.figures)
        if not self.quiet:
            print_audit(report)
            print("\n".join(str(path) for path in written[:2]))
        if report.status == "partial":
            print("interrupted: the report covers what was finished; `--resume` goes on from there.", file=sys.stderr)
            return 130
        return 0
