"""The reference listing of the paper, with its signatures (Listing lst:centered_source).

One stated deviation: fp64 inputs stay fp64, where the listing rounds everything to fp32.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from zloss.errors import CoefficientError, ShapeError
from zloss.source.number_kind import is_number
from zloss.source.precision import at_least_fp32
from zloss.source.reduction import Reduction, check_reduction
from zloss.source.tensor_kind import check_differentiable, check_floating, check_one_device


def centered_logits_from_raw(raw_logits: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """z̃ = z_raw − μ_head·1 with μ_head = w̄·u + b̄: the finite-precision deployment (paper eq:centered_raw).

    `raw_logits` [..., V], `hidden` [..., D], `weight` [V, D], `bias` [V]. Subtracting one fp32 scalar per token keeps the
    realized softmax, which a second low-precision projection would not.

    >>> import torch, zloss
    >>> hidden, weight = torch.randn(3, 8), torch.randn(11, 8) + 1
    >>> centered = zloss.centered_logits_from_raw(hidden @ weight.T, hidden, weight)
    >>> bool(centered.mean(dim=-1).abs().max() < 1e-5)
    True
    """
    for name, tensor, dims in (("raw_logits", raw_logits, 1), ("hidden", hidden, 1), ("weight", weight, 2)):
        check_floating(name, tensor, dims)
    if bias is not None:
        check_floating("bias", bias)
    if weight.dim() != 2 or hidden.shape[-1] != weight.shape[1] or raw_logits.shape[:-1] != hidden.shape[:-1]:
        raise ShapeError(
            f"`raw_logits` [..., V], `hidden` [..., D] and `weight` [V, D] are expected, but got {list(raw_logits.shape)}, "
            f"{list(hidden.shape)} and {list(weight.shape)}."
        )
    check_one_device(raw_logits=raw_logits, hidden=hidden, weight=weight, bias=bias)
    check_differentiable(raw_logits=raw_logits, hidden=hidden, weight=weight, bias=bias)
    # The listing means fp32: autocast would round the common shift to 16 bits.
    with torch.autocast(hidden.device.type, enabled=False):
        mean_w = at_least_fp32(weight).mean(dim=0, keepdim=True)
        mean_b = None if bias is None else at_least_fp32(bias).mean().view(1)
        common_shift = F.linear(at_least_fp32(hidden), mean_w, mean_b)
        return at_least_fp32(raw_logits) - common_shift


def z_loss_source(logits: Tensor, coef: float, target: float, reduction: Reduction = "mean") -> Tensor:
    """2λ(log Z − c)·p, the gradient of λ(logsumexp(z) − c)² at the logits (paper eq:source).

    `logits` [..., V]; the source has their shape. Scaling: "mean" divides by the number of tokens; "sum" and "none" do not.

    >>> import torch, zloss
    >>> float(zloss.z_loss_source(torch.zeros(1, 4), coef=0.5, target=0.0).sum())  # 2λ·log 4
    1.386294...
    """
    check_reduction(reduction)
    check_floating("logits", logits)
    if logits.shape[-1] == 0:
        raise ShapeError(f"`logits` are expected to be [..., V] with at least one class, but got {list(logits.shape)}.")
    numbers: dict[str, object] = {"coef": coef, "target": target}
    for name, value in numbers.items():
        if not (is_number(value) or (isinstance(value, Tensor) and value.numel() == 1)):
            raise CoefficientError(f"`{name}` is expected to be a number, but got {value!r}.")
    check_differentiable(logits=logits)
    logits_f = at_least_fp32(logits)
    log_z = torch.logsumexp(logits_f, dim=-1, keepdim=True)
    scale = 2.0 * coef * (log_z - target)
    if reduction == "mean":
        scale = scale / logits_f[..., 0].numel()
    return scale * torch.softmax(logits_f, dim=-1)
