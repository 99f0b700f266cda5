"""Which statistics a loss returns, by the documented rule: the same for every backend, with the same values."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import fields

import torch
from torch import Tensor

import zloss
from zloss.statistics import TokenStats

OBJECTIVES = (
    zloss.CrossEntropy(),
    zloss.CenteredHead(),
    zloss.StandardZLoss(0.7),
    zloss.CenteredZLoss(0.7),
    zloss.CenteredZLoss(0.0),
    zloss.FactorizedZLoss(0.5, 0.9),
    zloss.GainAwareZLoss(0.7),
    zloss.GainAwareZLoss(None),
)
FEW = (zloss.CrossEntropy(), zloss.CenteredZLoss(0.7), zloss.GainAwareZLoss(0.7))
"""One objective of each need, where time is short."""
LEVELS = ("light", "full", "audit")
ALWAYS = {"row_max", "log_s", "target_logit", "valid", "vocab"}
VOCAB = 53

Loss = Callable[..., zloss.HeadLossOutput]


def expected(
    objective: zloss.Objective, level: str, *, smoothing: bool, mean: bool, head: bool, hidden: bool
) -> set[str]:
    """The fields by name, written again from the documented rule, case by case."""
    names = set(ALWAYS)
    if level == "light":
        if objective.active and objective.needs_gain and head:
            names |= {"p_norm", "gain"}
        if mean and (objective.needs_mu or smoothing):
            names |= {"mu"}
        return names
    names |= {"p_norm"}
    if mean:
        names |= {"mu"}
    if head:
        names |= {"gain"} | ({"gain_centered"} if mean else set())
    if hidden or level == "audit":
        names |= {"entropy"}
    if level == "audit":
        names |= {"predicted"}
    if level == "audit" and mean and hidden:
        names |= {"mu_residual"}
    return names


def present(stats: TokenStats) -> set[str]:
    return {field.name for field in fields(stats) if getattr(stats, field.name) is not None}


def cases(
    tokens: int, dtype: torch.dtype, objectives: tuple[zloss.Objective, ...]
) -> Iterator[tuple[str, Loss, tuple[Tensor, ...], dict[str, object], set[str]]]:
    """(what it is, loss, tensors, options, expected fields): both losses with every combination that is not refused."""
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, 6, generator=g).to(dtype)
    weight = (0.5 * torch.randn(VOCAB, 6, generator=g) + 0.3).to(dtype)
    bias = torch.randn(VOCAB, generator=g).to(dtype)
    target = torch.randint(40, (tokens,), generator=g)
    target[: tokens // 4] = -100
    masked = bias.clone()
    masked[45:] = -torch.inf
    for objective, level, cap, smoothing in itertools.product(objectives, LEVELS, (None, 3.0), (0.0, 0.1)):
        if cap is not None and objective.active and objective.needs_mu:
            continue
        options = {"statistics": level, "softcap": cap, "label_smoothing": smoothing}
        for name, b in (("no bias", None), ("bias", bias), ("bias with -inf", masked)):
            unmeaned = b is masked and ((objective.active and objective.needs_mu) or smoothing)
            if unmeaned:
                continue
            mean = cap is None and b is not masked
            want = expected(objective, level, smoothing=bool(smoothing), mean=mean, head=True, hidden=True)
            yield f"head_loss {objective} {options} {name}", zloss.head_loss, (hidden, weight, target), {
                "objective": objective, "bias": b, **options
            }, want  # fmt: skip
        for w in (None, weight):
            if w is None and objective.active and objective.needs_gain:
                continue
            want = expected(
                objective, level, smoothing=bool(smoothing), mean=cap is None, head=w is not None, hidden=False
            )
            logits = hidden @ weight.T + bias
            yield f"logits_loss {objective} {options} weight={w is not None}", zloss.logits_loss, (logits, target), {
                "objective": objective, "weight": w, **options
            }, want  # fmt: skip


def broken(
    *backends: str,
    tokens: int,
    dtype: torch.dtype,
    tolerance: float,
    objectives: tuple[zloss.Objective, ...] = OBJECTIVES,
    chunk_size: int | None = None,
    grad: bool = True,
) -> list[str]:
    """Every way in which the backends disagree with the rule, or with the dense backend in fp64."""
    found = []
    for (what, loss, tensors, options, want), (*_, exact_tensors, exact_options, _) in zip(
        cases(tokens, dtype, objectives), cases(tokens, torch.float64, objectives), strict=True
    ):
        truth = loss(*exact_tensors, backend="dense", **exact_options).stats
        for backend in backends:
            # With and without a gradient: a pass that forms dh has E W at hand, and must not report more for it.
            leaves = [t.clone().requires_grad_(grad and t.is_floating_point()) for t in tensors]
            stats = loss(*leaves, backend=backend, chunk_size=chunk_size, **options).stats
            if present(stats) != want:
                found.append(f"{what} {backend}: {sorted(present(stats) ^ want)}")
            for name in present(stats) & present(truth) - {"valid", "vocab", "mu_residual"}:
                error = (getattr(stats, name).double() - getattr(truth, name)).abs().max()
                if not error <= tolerance * getattr(truth, name).abs().max().clamp_min(1):
                    found.append(f"{what} {backend} {name}: {float(error):.1e}")
            if stats.mu_residual is not None and not stats.mu_residual.abs().max() <= tolerance:
                found.append(f"{what} {backend}: mu_residual {float(stats.mu_residual.abs().max()):.1e}")
    return found
