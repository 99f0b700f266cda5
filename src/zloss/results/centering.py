"""`centering.json` with schema "zloss.centering/1": a checkpoint before and after its head was row-centered."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from zloss.results.provenance import Provenance
from zloss.results.record import ResultRecord

CopyAction = Literal["keep", "neutral", "discard"]
"""What to do with a centered copy."""


@dataclass(frozen=True)
class CopyVerdict:
    """Whether the copy is worth keeping."""

    action: CopyAction
    """keep: its 16-bit logits are more precise; discard: it predicts worse, or its logits are less precise; neutral: neither."""
    sentence: str
    """The answer in one sentence, with the text and the number of tokens."""


@dataclass(frozen=True)
class CenteringNumbers:
    """One side, measured in fp32 on the same blocks; quantiles are over tokens."""

    ppl: float | None
    """Perplexity."""
    mu_abs_99: float | None
    """p99 |μ| of the deployed logits, over all rows."""
    p_z_999: float | None
    """p99.9 |log Z − log V| of the deployed logits."""
    a_p_99: float | None
    """p99 of the output-to-hidden gain."""
    row_max_999: float | None
    """p99.9 of the largest logit of a token."""
    bf16_spacing: float | None
    """Gap between neighboring bf16 numbers at that maximum."""
    fp16_spacing: float | None
    """The same for fp16; None beyond its range."""
    bf16_ce_error: float | None
    """Mean |ΔCE| per token when logits are stored in bf16, in nats."""
    bf16_logit_rms: float | None
    """Root mean square of bf16 − fp32 over all logits."""
    fp16_ce_error: float | None
    """Mean |ΔCE| per token when logits are stored in fp16, in nats."""
    fp16_logit_rms: float | None
    """Root mean square of fp16 − fp32 over all logits."""
    mu_valid_abs_99: float | None = None
    """p99 |μ| over the first `valid_vocab` rows; None if these are all rows."""
    bf16_noise: float | None = None
    """Root mean square over tokens y of log p(y) from bf16 logits minus log p(y) of the original from fp32 logits, in nats; None
    where logits overflow. For the copy, this includes the second rounding of its head."""
    fp16_noise: float | None = None
    """The same for fp16 logits."""


@dataclass(frozen=True)
class Centering(ResultRecord):
    """What was done to the head, and what it changed."""

    SCHEMA: ClassVar[str] = "zloss.centering/1"
    FILE: ClassVar[str] = "centering.json"

    model: str
    """The original, as it was named."""
    corpus: str
    """The text on which the two were compared."""
    predictions: int
    """Tokens scored."""
    tied_before: bool
    """Whether the head shared its table with the input embedding."""
    tied_after: bool
    """Whether it still does."""
    extra_bytes: int
    """How much the weights grew, in bytes."""
    stored_dtype: str
    """Dtype in which the changed tensors are stored, as in the original."""
    vocab: int
    """Rows of the head."""
    valid_vocab: int
    """Number of leading rows that w̄ and b̄ were averaged over."""
    mean_row_norm: float
    """‖w̄‖₂ of the original head."""
    mean_bias: float | None
    """b̄ of the original head; None without a bias."""
    before: CenteringNumbers
    """The original."""
    after: CenteringNumbers
    """The copy, as it loads from disk."""
    ppl_relative_difference: float
    """|PPL after − PPL before| / PPL before."""
    greedy_tokens: int
    """Length of the greedy continuation that was compared."""
    greedy_equal: bool
    """Whether both continuations are the same tokens."""
    verified: bool
    """PPL equal to 1e-6 (relative) and greedy continuations equal."""
    provenance: Provenance
    """What made it."""
    notes: tuple[str, ...] = ()
    """Notes on how the text was split into blocks."""
    logits: str = "bf16"
    """Precision in which the user's stack stores its logits; the verdict is about it."""
    verdict: CopyVerdict | None = None
    """Whether the copy is worth keeping."""
    findings: tuple[str, ...] = ()
    """What the comparison of this copy with its original showed, in sentences; its model card has them too."""
