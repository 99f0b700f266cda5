"""Everything that defines an audit, as one typed value."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import asdict, dataclass

from zloss.errors import InputError, UnknownNameError
from zloss.models.checkpoint import SMOLLM2, BosPolicy, DtypeName
from zloss.transport.spectrum import Method


@dataclass(frozen=True)
class AuditConfig:
    """A checkpoint, a text, and how to look at them."""

    model: str = SMOLLM2
    texts: tuple[str, ...] = ()
    corpus: str | None = None
    text_field: str = "text"
    blocks: int | None = 64
    """None: as many as the text gives."""
    block_size: int = 256
    offset: int = 0
    """Blocks to skip at the start of the text."""
    bos: BosPolicy = "auto"
    valid_vocab: int | str | None = None
    """Rows inside log Z, or "tokenizer" for the length of the tokenizer; None: every row."""
    diag_coef: float = 1e-4
    gain_beta: float = 1e-2
    svd: Method = "exact"
    gradient_blocks: int = 8
    """Blocks of the diagnostic batch; 0 leaves the gradient section out."""
    batch_blocks: int = 4
    dtype: DtypeName = "fp32"
    seed: int = 0
    trust_remote_code: bool = False
    allow_pickle: bool = False

    def __post_init__(self) -> None:
        if not (math.isfinite(self.diag_coef) and self.diag_coef > 0):
            raise InputError(f"λ_diag is expected to be a finite number > 0, but got {self.diag_coef!r}.")
        if self.batch_blocks < 1 or self.gradient_blocks < 0:
            raise InputError(
                f"batches need at least one block and the gradient section none or more, "
                f"but got {self.batch_blocks} and {self.gradient_blocks}."
            )
        for kind, value, known in (
            ("bos policy", self.bos, ("auto", "yes", "no")),
            ("svd method", self.svd, ("exact", "randomized")),
            ("dtype", self.dtype, ("fp32", "fp64", "bf16")),
        ):
            if value not in known:
                raise UnknownNameError(kind, value, known)

    def fingerprint(self, tokens: str) -> str:
        """Identity of the pass over the text: the settings that change its numbers, and the tokens themselves."""
        fields = asdict(self)
        for irrelevant in ("texts", "corpus", "text_field", "batch_blocks", "gradient_blocks", "allow_pickle"):
            fields.pop(irrelevant)
        return hashlib.sha256((json.dumps(fields, sort_keys=True) + tokens).encode()).hexdigest()[:16]
