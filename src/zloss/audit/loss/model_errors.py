"""Errors of an applied source on the tokens of a model: of one call, and summed over calls."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from zloss.results.loss_audit import TargetModelSource

TINY = torch.finfo(torch.float64).tiny


@dataclass(frozen=True)
class Compared:
    """One call: fp64 sources and errors, a row per token at the logits or at the hidden states."""

    value: float
    wanted_value: float
    error: Tensor
    """Applied minus fp64 of the named source."""
    wanted: Tensor
    """The fp64 source: of Z, or of the whole loss."""
    total_error: Tensor
    total: Tensor
    rounding_T: Tensor
    """Relative rounding of every token's whole gradient."""
    weight_error: float | None = None
    """‖error of dW‖², and the norm² it is compared with."""
    weight_wanted: float | None = None


class ErrorTally:
    """Sums over calls."""

    def __init__(self) -> None:
        self.forward: list[float] = []
        self.per_token: list[Tensor] = []
        self.tokens = 0
        self.finite = True
        self.error = self.wanted = self.total_error = self.total = 0.0
        self.applied = self.along = self.applied_total = self.along_total = 0.0
        self.rounding = 0.0
        self.weight: list[tuple[float, float]] = []

    def add(self, one: Compared) -> None:
        self.tokens += len(one.error)
        self.finite = self.finite and bool(torch.isfinite(one.error).all()) and abs(one.value) < float("inf")
        self.forward.append(abs(one.value - one.wanted_value) / max(abs(one.wanted_value), TINY))
        norms_T, wanted_T = one.error.norm(dim=-1), one.wanted.norm(dim=-1)
        # An ignored token has no source.
        self.per_token.append(norms_T[wanted_T > 0] / wanted_T[wanted_T > 0])
        self.error += float(norms_T.square().sum())
        self.wanted += float(wanted_T.square().sum())
        self.total_error += float(one.total_error.square().sum())
        self.total += float(one.total.square().sum())
        self.rounding += float((one.rounding_T * one.total.norm(dim=-1)).square().sum())
        applied, applied_total = one.wanted + one.error, one.total + one.total_error
        self.applied += float(applied.square().sum())
        self.along += float((applied * one.wanted).sum())
        self.applied_total += float(applied_total.square().sum())
        self.along_total += float((applied_total * one.total).sum())
        if one.weight_error is not None and one.weight_wanted is not None:
            self.weight.append((one.weight_error, one.weight_wanted))

    def record(self, found: TargetModelSource) -> TargetModelSource:
        counted = replace(found, tokens=self.tokens, calls=len(self.forward))
        if not self.finite:
            return replace(counted, reason="the loss or its gradient is not finite on these logits")
        errors_T = torch.cat(self.per_token)
        if not len(errors_T) or self.wanted == 0:
            return replace(counted, reason="the source is zero on every token of the text")
        return replace(
            counted,
            forward_rel_error=max(self.forward),
            delta_src=(self.error / self.wanted) ** 0.5,
            delta_total=(self.total_error / max(self.total, TINY)) ** 0.5,
            cosine=_cosine(self.along, self.applied, self.wanted),
            total_cosine=_cosine(self.along_total, self.applied_total, self.total),
            token_mean=float(errors_T.mean()),
            token_p99=float(errors_T.quantile(0.99)),
            token_max=float(errors_T.max()),
            delta_weight=_ratio_of_sums(self.weight),
            rounding_floor=(self.rounding / self.wanted) ** 0.5,
        )


def _ratio_of_sums(pairs: list[tuple[float, float]]) -> float | None:
    wanted = sum(second for _, second in pairs)
    return (sum(first for first, _ in pairs) / wanted) ** 0.5 if wanted else None


def _cosine(along: float, a: float, b: float) -> float | None:
    return along / (a * b) ** 0.5 if a > 0 and b > 0 else None
