"""Everything that defines a measurement of drift, as one typed value without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from zloss.audit.checkpoint.config import AuditConfig
from zloss.errors import InputError
from zloss.results.checks import check_choices, check_counts, check_numbers, check_optional_counts
from zloss.results.choices import BosPolicy, DtypeName
from zloss.results.option import Option
from zloss.results.text_options import BlockCount, TextFiles, TextOptions

LEAST_BLOCKS, LEAST_TOKENS = 8, 1000
"""Below them neither the interval of CE nor a 95 % quantile with 50 tokens beyond it exists."""


@dataclass(frozen=True)
class DriftConfig(TextOptions):
    """Checkpoints of one run, a text, and how to look at them."""

    checkpoints: Annotated[tuple[str, ...], Option(positional=True, metavar="CHECKPOINT...")] = ()
    """Folders of checkpoints with a step in their names (`checkpoint-500`), a folder that holds them, or one Hugging Face
    id with `revisions`."""
    revisions: Annotated[tuple[str, ...], Option(metavar="A,B,...", comma_separated=True)] = ()
    """Revisions of the Hugging Face id, each with a step in its name, such as step1000,step2000."""
    texts: TextFiles = ()
    """Text to measure on: plain text, .jsonl or .parquet; repeat to append. Default: the corpus `pydoc`."""
    blocks: BlockCount = 64
    """Number of blocks, at least 8; 0 takes all the text gives."""
    block_size: int | None = None
    """Predictions per block, in tokens; all blocks together need at least 1000. Default: 256, or fewer where the model has
    fewer positions."""
    offset: int = 0
    """Blocks to skip at the start of the text."""
    valid_vocab: Annotated[int | str | None, Option(metavar="N|tokenizer")] = None
    """Rows of the head inside log Z, μ, w̄ and c: a number, or `tokenizer` for its length. Default: every row."""
    diag_coef: float = 1e-4
    """λ_diag of R_Z."""
    gradient_blocks: int = 8
    """Blocks of the diagnostic batch of R_Z; 0 leaves it out."""
    batch_blocks: int = 4
    """Blocks per forward pass."""
    dtype: DtypeName = "fp32"
    """Precision of the model; statistics are fp32 or better in any case."""
    trust_remote_code: bool = False
    """Run model code that comes with the checkpoints."""
    allow_pickle: bool = False
    """Also read pickled weights."""

    def __post_init__(self) -> None:
        check_numbers(self, ("diag_coef",), positive=True)
        check_counts(self, ("batch_blocks",))
        check_optional_counts(self, ("block_size",))
        check_counts(self, ("gradient_blocks", "offset"), least=0)
        check_choices(self, {"bos": BosPolicy, "dtype": DtypeName})
        if self.blocks is not None:
            check_counts(self, ("blocks",), least=LEAST_BLOCKS)
            if self.block_size is not None and self.blocks * self.block_size < LEAST_TOKENS:
                raise InputError(
                    f"`blocks` times `block_size` is expected to be at least {LEAST_TOKENS} tokens, but is "
                    f"{self.blocks * self.block_size}: a tail needs 50 tokens beyond its quantile."
                )

    def audit(self, name: str) -> AuditConfig:
        """The audit of one checkpoint, under the name that results show."""
        return AuditConfig(
            model=name,
            **self.text_options(),
            offset=self.offset,
            valid_vocab=self.valid_vocab,
            diag_coef=self.diag_coef,
            gradient_blocks=self.gradient_blocks,
            batch_blocks=self.batch_blocks,
            dtype=self.dtype,
            trust_remote_code=self.trust_remote_code,
            allow_pickle=self.allow_pickle,
        )
