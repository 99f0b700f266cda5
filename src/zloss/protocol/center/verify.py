"""What centering changed, measured on the original and on the copy as it loads from disk.

Both models run in fp32 on the same blocks. The error of 16-bit logits is that of storing them: the mean over tokens of
|CE(rounded logits) − CE(logits)|, and the root mean square of rounded − exact over all logits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from zloss.audit.checkpoint.config import AuditConfig
from zloss.audit.checkpoint.run import run_audit
from zloss.console import Progress
from zloss.models.checkpoint import Checkpoint
from zloss.models.output_head import find_head, hidden_states
from zloss.results.centering import CenteringNumbers
from zloss.text import Blocks

CHUNK = 128
"""Tokens whose logits are held at once."""
GREEDY_TOKENS = 64
PROMPT_TOKENS = 16


@dataclass(frozen=True)
class StorageError:
    """What 16-bit logits lose."""

    cross_entropy: float
    rms: float


def measure_model(config: AuditConfig, checkpoint: Checkpoint, blocks: Blocks, progress: Progress) -> CenteringNumbers:
    """The numbers of one side, over all rows of the head; μ also over the `valid_vocab` of the configuration."""
    report = run_audit(replace(config, valid_vocab=None), checkpoint=checkpoint, progress=progress)
    valid = None
    if config.valid_vocab not in (None, report.model.vocab):
        valid = run_audit(config, checkpoint=checkpoint, progress=progress).mu_abs_99
    raw, spacing = report.heads.raw, report.precision.raw
    errors = {
        name: storage_error(checkpoint, blocks, dtype)
        for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16))
    }
    return CenteringNumbers(
        ppl=report.ppl,
        mu_abs_99=report.mu_abs_99,
        p_z_999=raw.p_z_999,
        a_p_99=raw.a_p_99,
        row_max_999=raw.row_max_999,
        bf16_spacing=spacing.bf16_spacing,
        fp16_spacing=spacing.fp16_spacing,
        bf16_ce_error=errors["bf16"].cross_entropy,
        bf16_logit_rms=errors["bf16"].rms,
        fp16_ce_error=errors["fp16"].cross_entropy,
        fp16_logit_rms=errors["fp16"].rms,
        mu_valid_abs_99=valid,
    )


@torch.no_grad()
def storage_error(checkpoint: Checkpoint, blocks: Blocks, dtype: torch.dtype) -> StorageError:
    """The error of logits stored in `dtype`, over the first block."""
    head = find_head(checkpoint)
    with hidden_states(checkpoint, head) as hidden_of:
        hidden_TD = blocks.counted(hidden_of(blocks.inputs(0, 1)))[0]
    target_T = blocks.targets(0, 1).reshape(-1)
    ce_gap, squares, logits = 0.0, 0.0, 0
    for start in range(0, len(target_T), CHUNK):
        z_CV = head.logits(hidden_TD[start : start + CHUNK])
        stored_CV = z_CV.to(dtype).float()
        part_C = target_T[start : start + CHUNK]
        exact, rounded = (F.cross_entropy(z, part_C, reduction="none") for z in (z_CV, stored_CV))
        ce_gap += float((rounded - exact).abs().double().sum())
        squares += float((stored_CV - z_CV).double().square().sum())
        logits += z_CV.numel()
    return StorageError(ce_gap / len(target_T), (squares / logits) ** 0.5)


@torch.no_grad()
def greedy_continuation(checkpoint: Checkpoint, blocks: Blocks) -> Tensor:
    """64 tokens after the first 16 of the text, each the most likely one."""
    prompt = blocks.inputs(0, 1)[:, :PROMPT_TOKENS]
    model = checkpoint.model
    out: Tensor = model.generate(  # type: ignore[operator]
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=GREEDY_TOKENS, min_new_tokens=GREEDY_TOKENS,
        do_sample=False, num_beams=1, pad_token_id=0, repetition_penalty=1.0,
    )  # fmt: skip
    return out[0, prompt.shape[1] :]
