"""The reference listing of the paper, with its signatures (Listing lst:centered_source).

One stated deviation: fp64 inputs stay fp64, where the listing rounds everything to fp32.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from zloss.source.reduction import Reduction, check_reduction


def at_least_fp32(x: Tensor) -> Tensor:
    """fp64 stays fp64, everything else becomes fp32."""
    return x if x.dtype == torch.float64 else x.float()


def centered_logits_from_raw(raw_logits: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """z̃ = z_raw − μ_head·1 with μ_head = w̄·u + b̄: the finite-precision deployment (paper eq:centered_raw).

    Subtracting one fp32 scalar per token keeps the realized softmax, which a second low-precision projection would not.
    """
    # The listing means fp32: autocast would round the common shift to 16 bits.
    with torch.autocast(hidden.device.type, enabled=False):
        mean_w = at_least_fp32(weight).mean(dim=0, keepdim=True)
        mean_b = None if bias is None else at_least_fp32(bias).mean().view(1)
        common_shift = F.linear(at_least_fp32(hidden), mean_w, mean_b)
        return at_least_fp32(raw_logits) - common_shift


def z_loss_source(logits: Tensor, coef: float, target: float, reduction: Reduction = "mean") -> Tensor:
    """2λ(log Z − c)·p, the gradient of λ(logsumexp(z) − c)² at the logits (paper eq:source).

    Scaling: "mean" divides by the number of tokens; "sum" and "none" do not.
    """
    check_reduction(reduction)
    logits_f = at_least_fp32(logits)
    log_z = torch.logsumexp(logits_f, dim=-1, keepdim=True)
    scale = 2.0 * coef * (log_z - target)
    if reduction == "mean":
        scale = scale / logits_f[..., 0].numel()
    return scale * torch.softmax(logits_f, dim=-1)
