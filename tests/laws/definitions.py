"""The definitions, written again from the paper in fp64 autograd: the oracle of every property test.

Nothing here is imported from the package but the objective classes, whose coefficients are read, not used.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import torch
from torch import Tensor

import zloss
from zloss.objectives import objective_names

OBJECTIVES: dict[str, zloss.Objective] = {
    "ce": zloss.CrossEntropy(),
    "centered-head": zloss.CenteredHead(),
    "standard": zloss.StandardZLoss(0.7),
    "standard c=0": zloss.StandardZLoss(0.7, target=0.0),
    "centered": zloss.CenteredZLoss(0.7),
    "factorized": zloss.FactorizedZLoss(0.5, 0.9, shift_target=0.4, relative_target=2.0),
    "gain-aware": zloss.GainAwareZLoss(0.7, beta=0.3),
}
# A new objective fails the property tests until its formula is in `penalty`, written again from its equation.
# An objective without a case above is tried at two targets: at c = log V few tokens lie below c.
OBJECTIVES |= {
    f"{name} c={target}": zloss.make_objective(name, 0.7, target=target)
    for name in objective_names()
    if name not in OBJECTIVES
    for target in (None, 5.5)
}


@dataclass
class Case:
    """One loss problem with every option."""

    hidden: Tensor
    weight: Tensor
    target: Tensor
    objective: zloss.Objective
    bias: Tensor | None = None
    ignore_index: int = -100
    reduction: str = "mean"
    token_weight: Tensor | None = None
    normalizer: float | None = None
    valid_vocab: int | None = None
    logit_scale: float = 1.0
    softcap: float | None = None
    label_smoothing: float = 0.0

    def options(self) -> dict[str, object]:
        tensors = ("hidden", "weight", "target", "objective")
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name not in tensors}


def penalty(objective: zloss.Objective, z: Tensor, gain: Tensor) -> Tensor:
    """aux_t of the paper's equations, from whole logits."""
    log_v = math.log(z.shape[-1])
    log_z = torch.logsumexp(z, -1)
    mu = z.mean(-1)
    match objective:
        case zloss.CrossEntropy():
            return torch.zeros_like(log_z)
        case zloss.StandardZLoss(coef, target):
            return (coef or 0) * (log_z - (log_v if target is None else target)) ** 2
        case zloss.CenteredZLoss(coef, target):
            return (coef or 0) * (log_z - mu - (log_v if target is None else target)) ** 2
        case zloss.FactorizedZLoss(shift, relative, c_mu, c_rel):
            residual = log_z - mu - (log_v if c_rel is None else c_rel)
            return (shift or 0) * (mu - c_mu) ** 2 + (relative or 0) * residual**2
        case zloss.GainAwareZLoss(coef, beta, target):
            return (coef or 0) * (log_z - (log_v if target is None else target)) ** 2 / (1 + beta * gain.detach() ** 2)
    raise AssertionError(
        f"{type(objective).__name__} has no formula here: add one, written from its equation and not copied from objectives.py"
    )


def reference(case: Case) -> dict[str, Tensor]:
    """Loss, parts, gradients (upstream 1 for scalars), statistics and source in fp64."""
    hidden = case.hidden.detach().double().requires_grad_()
    weight = case.weight.detach().double().requires_grad_()
    bias = None if case.bias is None else case.bias.detach().double().requires_grad_()
    rows = case.valid_vocab or weight.shape[0]
    z = hidden @ weight[:rows].T
    if bias is not None:
        z = z + bias[:rows]
    z = case.logit_scale * z
    slope = torch.ones_like(z)
    if case.softcap is not None:
        z = case.softcap * torch.tanh(z / case.softcap)
        slope = 1 - (z / case.softcap) ** 2
    p = torch.softmax(z, -1)
    head = case.logit_scale * weight[:rows]
    gain = ((p * slope) @ head).norm(dim=-1) / p.norm(dim=-1)
    valid = case.target != case.ignore_index
    index = torch.where(valid, case.target, 0)
    picked = z.gather(-1, index.unsqueeze(-1)).squeeze(-1)
    log_z = torch.logsumexp(z, -1)
    smoothing = case.label_smoothing
    ce = log_z - (1 - smoothing) * picked
    if smoothing:
        ce = ce - smoothing * z.mean(-1)
    aux = penalty(case.objective, z, gain)
    w = valid.double() if case.token_weight is None else torch.where(valid, case.token_weight.double(), 0.0)
    divisor = 1.0
    if case.reduction == "mean":
        divisor = case.normalizer if case.normalizer is not None else float(w.sum()) or 1.0
    ce_t, aux_t = (torch.where(valid, w * part, 0.0) / divisor for part in (ce, aux))
    if case.reduction == "none":
        loss, ce_out, aux_out = ce_t + aux_t, ce_t, aux_t
    else:
        loss, ce_out, aux_out = ce_t.sum() + aux_t.sum(), ce_t.sum(), aux_t.sum()
    (source,) = torch.autograd.grad(loss.sum(), z, retain_graph=True)
    loss.backward(upstream_like(loss))
    out = {
        "loss": loss.detach(),
        "cross_entropy": ce_out.detach(),
        "auxiliary": aux_out.detach(),
        "hidden.grad": hidden.grad,
        "weight.grad": weight.grad,
        "log_z": log_z.detach(),
        "gain": gain.detach(),
        "p_norm": p.norm(dim=-1).detach(),
        "entropy": torch.special.entr(p).sum(-1).detach(),
        "top1": ((z.argmax(-1) == case.target) & valid).double(),
        "source": source.reshape(-1, rows),
    }
    if bias is not None:
        out["bias.grad"] = bias.grad
    if case.softcap is None:
        out["mu"] = z.mean(-1).detach()
        out["gain_centered"] = ((p @ head - head.mean(0)).norm(dim=-1) / p.norm(dim=-1)).detach()
    return out


def upstream_like(loss: Tensor) -> Tensor:
    """A seeded upstream gradient: one number for a scalar, one per token otherwise."""
    generator = torch.Generator().manual_seed(7)
    return (torch.rand(loss.shape, generator=generator, dtype=torch.float64) + 0.5).to(loss.dtype)


def measured(
    case: Case, backend: str, chunk_size: int | None = None, dtype: torch.dtype | None = None, products: str = "auto"
) -> dict[str, Tensor]:
    """The same quantities from the package."""

    def leaf(x: Tensor | None) -> Tensor | None:
        return None if x is None else x.detach().to(dtype or x.dtype).requires_grad_()

    hidden, weight, bias = leaf(case.hidden), leaf(case.weight), leaf(case.bias)
    options = case.options() | {"bias": bias}
    options |= {"backend": backend, "chunk_size": chunk_size, "products": products}
    out = zloss.head_loss(hidden, weight, case.target, case.objective, **options)
    out.loss.backward(upstream_like(out.loss))
    result = {
        "loss": out.loss.detach(),
        "cross_entropy": out.cross_entropy,
        "auxiliary": out.auxiliary,
        "hidden.grad": hidden.grad,
        "weight.grad": weight.grad,
        "log_z": out.stats.log_z,
        "gain": out.stats.gain,
        "p_norm": out.stats.p_norm,
        "entropy": out.stats.entropy,
        "top1": out.stats.top1.double(),
    }
    if bias is not None:
        result["bias.grad"] = bias.grad
    if case.softcap is None:
        result |= {"mu": out.stats.mu, "gain_centered": out.stats.gain_centered}
    return result


def relative_error(got: Tensor, want: Tensor) -> float:
    """‖got − want‖ / ‖want‖ in fp64; absolute where the truth is zero."""
    got, want = got.detach().double(), want.detach().double()
    difference, scale = (got - want).norm(), want.norm()
    return float(difference / scale) if scale > 0 else float(difference)


def assert_close(got: dict[str, Tensor], want: dict[str, Tensor], tolerance: float) -> None:
    for name, truth in want.items():
        if name in got:
            assert got[name].shape == truth.shape, name
            assert relative_error(got[name], truth) <= tolerance, f"{name}: {relative_error(got[name], truth):.2e}"


def make_case(
    objective: zloss.Objective, *, seed: int = 0, tokens: int = 37, width: int = 12, vocab: int = 53, **options: object
) -> Case:
    """A seeded fp64 problem whose head has a common shift, so that raw and centered differ."""
    g = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, width, generator=g, dtype=torch.float64)
    weight = torch.randn(vocab, width, generator=g, dtype=torch.float64) * 0.4 + 0.3 * torch.randn(
        width, generator=g, dtype=torch.float64
    )
    target = torch.randint(options.get("valid_vocab") or vocab, (tokens,), generator=g)  # type: ignore[arg-type]
    if options.pop("with_bias", False):
        options["bias"] = torch.randn(vocab, generator=g, dtype=torch.float64)
    if options.pop("with_ignored", False):
        target[torch.rand(tokens, generator=g) < 0.3] = -100
        target[0] = -100
    if options.pop("with_weights", False):
        options["token_weight"] = torch.rand(tokens, generator=g, dtype=torch.float64) + 0.1
    return Case(hidden, weight, target, objective, **options)  # type: ignore[arg-type]
