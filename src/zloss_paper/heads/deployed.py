"""Perplexity of the centered head as the paper deploys it: one fp32 scalar subtracted from the raw logits of a token.

The audit derives log Z̃ from the statistics of the raw logits, so its two perplexities are equal by construction. Here
the raw and the centered logits of a token are both formed, and both cross-entropies computed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from zloss.console import Progress
from zloss.head.source import centered_logits_from_raw
from zloss.models.checkpoint import Checkpoint
from zloss.models.output_head import find_head, hidden_states
from zloss.text import Blocks


@dataclass(frozen=True)
class DeployedPerplexity:
    """exp of the mean cross-entropy over all predictions; None with a reason where the centered head does not exist."""

    raw: float | None
    centered: float | None
    reason: str = ""


@torch.no_grad()
def deployed_perplexity(checkpoint: Checkpoint, blocks: Blocks, progress: Progress) -> DeployedPerplexity:
    """Both perplexities, a block at a time."""
    head = find_head(checkpoint)
    if head.softcap is not None or (head.bias_V is not None and bool(head.bias_V.isneginf().any())):
        return DeployedPerplexity(None, None, "softcap or a -inf bias: the centered head does not exist")
    scale = head.logit_scale
    weight_VD = head.weight_VD if scale == 1 else scale * head.weight_VD
    bias_V = head.bias_V if head.bias_V is None or scale == 1 else scale * head.bias_V
    totals = {"raw": 0.0, "centered": 0.0}
    with (
        hidden_states(checkpoint, head) as hidden_of,
        progress.step("deployed perplexity", blocks.predictions) as step,
    ):
        for block in range(blocks.count):
            hidden_TD = blocks.counted(hidden_of(blocks.inputs(block, block + 1)))[0]
            target_T = blocks.targets(block, block + 1)[0]
            raw_TV = head.logits(hidden_TD).float()
            centered_TV = centered_logits_from_raw(raw_TV, hidden_TD, weight_VD, bias_V)
            for name, logits_TV in (("raw", raw_TV), ("centered", centered_TV)):
                # The logits are fp32, as deployed; their softmax is not: torch's fp32 sum is off by 1e-5 nat at V = 50k.
                totals[name] += float(F.cross_entropy(logits_TV.double(), target_T, reduction="sum"))
            step.advance(blocks.size)
    perplexity = {name: math.exp(total / blocks.predictions) for name, total in totals.items()}
    return DeployedPerplexity(perplexity["raw"], perplexity["centered"])
