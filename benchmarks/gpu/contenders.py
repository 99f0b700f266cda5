"""The losses that are timed: ours by option, and those of others if they are installed. All from hidden states and head."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import zloss
from zloss.audit.implementation.implementations import find_implementation

COEF = 1e-4
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(hidden, weight, target) → scalar."""


@dataclass(frozen=True)
class Contender:
    """One way to the loss."""

    name: str
    load: Callable[[], Loss]
    """Imports what is needed."""
    has_z: bool = True
    peer: str | None = None
    """Name among zloss.audit.implementation.implementations; None for ours, for torch's own, and if `modules` decide."""
    modules: tuple[str, ...] = ()
    """Modules that have to be installed."""
    capabilities: tuple[int, ...] = ()
    """Major compute capabilities that its kernels are made for; empty: any."""
    needs_gpu: bool = False
    """Kernels that are far too slow without one, or a compiler that takes minutes."""

    def why_not(self, device: torch.device) -> str | None:
        """Why it cannot run here."""
        if self.peer is not None and not find_implementation(self.peer).installed:
            return "not installed"
        if missing := [module for module in self.modules if importlib.util.find_spec(module) is None]:
            return f"not installed: {', '.join(missing)}"
        if device.type != "cuda":
            return "needs a GPU" if self.needs_gpu else None
        if self.capabilities and torch.cuda.get_device_capability(device)[0] not in self.capabilities:
            return f"needs compute capability {' or '.join(f'{major}.x' for major in self.capabilities)}"
        return None


def _ours(objective: zloss.Objective, **options: Any) -> Callable[[], Loss]:
    def load() -> Loss:
        def loss(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
            return zloss.head_loss(hidden, weight, target, objective, **options).loss

        return loss

    return load


def _peer(name: str) -> Callable[[], Loss]:
    """The mean of a sum-reduced implementation; one that takes logits gets them from F.linear."""

    def load() -> Loss:
        implementation = find_implementation(name)

        def loss(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
            inputs = (hidden, weight) if implementation.takes == "linear" else (F.linear(hidden, weight),)
            return implementation.loss(*inputs, target, COEF, 0.0) / target.numel()

        return loss

    return load


def _liger(accumulator: torch.dtype | None) -> Callable[[], Loss]:
    def load() -> Loss:
        from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy as fused

        def loss(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
            out: Tensor = fused(hidden, weight, target, lse_square_scale=COEF, accum_dtype=accumulator)
            return out

        return loss

    return load


def _liger_cute_hopper() -> Loss:
    """Refuses a Z-loss: cross-entropy only."""
    from liger_kernel.ops.cutedsl.ops.fused_linear_cross_entropy_sm90 import LigerFusedLinearCrossEntropySM90Function

    return lambda hidden, weight, target: LigerFusedLinearCrossEntropySM90Function.apply(hidden, weight, target)


def _liger_cute_blackwell() -> Loss:
    from liger_kernel.ops.cutedsl.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

    def loss(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        # bias, class weights, ignored index, λ; the value comes first, then the optional returns.
        out: Tensor = LigerFusedLinearCrossEntropyFunction.apply(hidden, weight, target, None, None, -100, COEF)[0]
        return out

    return loss


def _quack() -> Loss:
    from quack.linear_cross_entropy import chunked_linear_cross_entropy

    return lambda hidden, weight, target: chunked_linear_cross_entropy(hidden, weight, target)


def _torch_linear() -> Loss:
    """With its automatic options, which on a GPU choose the chunk by the shape."""
    options = torch.nn.LinearCrossEntropyOptions()

    def loss(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        return F.linear_cross_entropy(hidden, weight, target, options=options)

    return loss


def _eager() -> Loss:
    def loss(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        logits = F.linear(hidden, weight).float()
        return F.cross_entropy(logits, target) + COEF * torch.logsumexp(logits, dim=-1).square().mean()

    return loss


def _eager_compiled() -> Loss:
    compiled: Loss = torch.compile(_eager())
    return compiled


STANDARD = zloss.StandardZLoss(COEF, target=0.0)
CONTENDERS = (
    Contender("zloss, default", _ours(STANDARD)),
    Contender("zloss, light statistics", _ours(STANDARD, statistics="light")),
    Contender("zloss, centered", _ours(zloss.CenteredZLoss(COEF))),
    Contender("zloss, gain-aware", _ours(zloss.GainAwareZLoss(COEF))),
    Contender("zloss, products operand", _ours(STANDARD, products="operand")),
    Contender("zloss, products fp32", _ours(STANDARD, products="fp32")),
    Contender("zloss, chunked backend", _ours(STANDARD, backend="chunked")),
    Contender("zloss, reduction none", lambda: _summed(_ours(STANDARD, reduction="none")())),
    Contender("zloss, losses of logits in Triton", _peer("triton"), needs_gpu=True),
    Contender("Liger Triton, default", _liger(None), peer="liger-linear", needs_gpu=True),
    Contender("Liger Triton, fp32 accumulators", _liger(torch.float32), peer="liger-linear", needs_gpu=True),
    Contender(
        "Liger CuTe, Hopper",
        _liger_cute_hopper,
        False,
        modules=("liger_kernel", "cutlass"),
        capabilities=(9,),
        needs_gpu=True,
    ),
    Contender(
        "Liger CuTe, Blackwell",
        _liger_cute_blackwell,
        modules=("liger_kernel", "cutlass"),
        capabilities=(10,),
        needs_gpu=True,
    ),
    Contender("QuACK", _quack, False, modules=("quack", "cutlass"), capabilities=(9, 10, 12), needs_gpu=True),
    Contender("Liger cross-entropy on F.linear", _peer("liger"), peer="liger", needs_gpu=True),
    Contender("flash-attn cross-entropy on F.linear", _peer("flash-attn"), peer="flash-attn", needs_gpu=True),
    Contender("cut-cross-entropy", _peer("cut-cross-entropy"), has_z=False, peer="cut-cross-entropy", needs_gpu=True),
    Contender("torch linear_cross_entropy", _torch_linear, has_z=False, peer="torch-linear"),
    Contender("eager CE+Z", _eager),
    Contender("eager CE+Z, torch.compile", _eager_compiled, needs_gpu=True),
)


def _summed(loss: Loss) -> Loss:
    return lambda hidden, weight, target: loss(hidden, weight, target).mean()
