"""The gradients of several losses at the hidden states, from the statistics and Wᵀp of the tokens.

CE has δ = w·(p − onehot(y)); an objective has δ = w·(a·p − g/V) with the coefficients
of `Objective.source`. The seed of a loss is Wᵀδ; with it a backward pass below the head starts.

Axes: T tokens of the batch, C tokens of a chunk, D width. Scaling: w = 1/T, the mean over predictions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from zloss.head.arguments import HeadProblem
from zloss.head.products import HeadProducts
from zloss.measure.hidden_source import ShapedTokens
from zloss.measure.measurement import Measurement
from zloss.objectives import Coefficients, Objective

CE = "ce"
"""The name of cross-entropy among the losses; an objective has another."""


@dataclass(frozen=True)
class Seed:
    """One loss: the coefficients of its logit source, and its gradient at the hidden states."""

    source: Coefficients
    grad_hidden_TD: Tensor


@torch.no_grad()
def gradient_seeds(
    measurement: Measurement, problem: HeadProblem, tokens: Iterable[ShapedTokens], objectives: Mapping[str, Objective]
) -> tuple[dict[str, Seed], Tensor]:
    """(seeds of CE and of every objective by name, log Z [T]); `tokens` are those of `problem`, in order."""
    scale, weight = measurement.head.logit_scale, 1.0 / max(1, problem.hidden_TD.shape[0])
    head = HeadProducts(problem.weight_VD[: problem.vocab], problem.dtype, problem.rounding)
    chunks: dict[str, list[Seed]] = {name: [] for name in (CE, *objectives)}
    log_z: list[Tensor] = []
    for chunk in tokens:
        shape_CD = chunk.shape_CD
        log_z.append(chunk.stats.log_z)
        one_C = torch.full_like(chunk.stats.log_s, weight)
        target_C = one_C if chunk.target_slope_C is None else one_C * chunk.target_slope_C
        ce_CD = weight * shape_CD - scale * target_C.unsqueeze(1) * head.select(chunk.index_C)
        chunks[CE].append(Seed(Coefficients(one_C, one_C), ce_CD))
        for name, objective in objectives.items():
            _, source = objective.source(chunk.stats)
            p_C = weight * source.a
            if source.g is None:
                uniform_C, seed_CD = None, p_C.unsqueeze(1) * shape_CD
            else:
                # a·Wᵀp − g·w̄ as a·(Wᵀp − w̄) − (g − a)·w̄: what both terms have in common cancels before it is weighted.
                uniform_C = weight * source.g
                mean_row_D = measurement.mean_row_D.to(shape_CD)
                seed_CD = p_C.unsqueeze(1) * (shape_CD - mean_row_D) - torch.outer(uniform_C - p_C, mean_row_D)
            chunks[name].append(Seed(Coefficients(p_C, None, uniform_C), seed_CD))
    return {name: _joined(parts) for name, parts in chunks.items()}, torch.cat(log_z)


def _joined(parts: list[Seed]) -> Seed:
    """The seed of all tokens from those of the chunks."""

    def column(values: list[Tensor | None]) -> Tensor | None:
        present = [value for value in values if value is not None]
        return torch.cat(present) if present else None

    return Seed(
        Coefficients(
            torch.cat([part.source.a for part in parts]),
            column([part.source.b for part in parts]),
            column([part.source.g for part in parts]),
        ),
        torch.cat([part.grad_hidden_TD for part in parts]),
    )
