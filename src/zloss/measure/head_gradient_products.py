"""Inner products of the gradients of several losses at the head, formed a block of vocabulary rows at a time.

Axes: T tokens of the batch, R rows of a block, U rows of a tied table that the batch reads, D width.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from zloss.head.arguments import HeadProblem
from zloss.head.gradient import head_gradient_rows
from zloss.measure.gradient_products import AgainstCe, PathProducts
from zloss.measure.gradient_seeds import CE, Seed


@dataclass(frozen=True)
class InputPath:
    """The gradient of a tied table through the input embedding, which is zero outside the rows the batch reads."""

    rows_U: Tensor
    gradient_UD: dict[str, Tensor]
    """By the name of the loss."""


@dataclass(frozen=True)
class HeadGradientProducts:
    """Inner products of head gradients with that of CE, of every objective by name."""

    weight: dict[str, AgainstCe]
    """At the head's weight: a tied table with both paths, or the untied projection."""
    bias: dict[str, AgainstCe]
    """At the head's bias; empty where there is none."""
    paths: dict[str, PathProducts]
    """The two paths of a tied table; empty for an untied head."""


def head_gradient_products(
    problem: HeadProblem, log_z_T: Tensor, seeds: Mapping[str, Seed], entering: InputPath | None
) -> HeadGradientProducts:
    """Products of every objective's head gradient with itself and with that of CE."""
    sums: defaultdict[tuple[str, ...], float] = defaultdict(float)

    def add(a: Tensor, b: Tensor, *key: str) -> None:
        sums[key] += float((a.double() * b.double()).sum())

    for rows, gradients in head_gradient_rows(problem, log_z_T, {name: seed.source for name, seed in seeds.items()}):
        if entering is not None:
            here_U = (entering.rows_U >= rows.start) & (entering.rows_U < rows.stop)
            local = entering.rows_U[here_U] - rows.start
            for name, gradient in gradients.items():
                part = entering.gradient_UD[name][here_U].to(gradient.weight_RD)
                if name != CE:
                    add(gradient.weight_RD, gradient.weight_RD, "output", name)
                    add(part, part, "input", name)
                    add(gradient.weight_RD[local], part, "cross", name)
                gradient.weight_RD.index_add_(0, local, part)
        for name, gradient in gradients.items():
            add(gradient.weight_RD, gradient.weight_RD, "weight", name)
            add(gradient.weight_RD, gradients[CE].weight_RD, "weight·ce", name)
            ce_bias_R = gradients[CE].bias_R
            if gradient.bias_R is not None and ce_bias_R is not None:
                add(gradient.bias_R, gradient.bias_R, "bias", name)
                add(gradient.bias_R, ce_bias_R, "bias·ce", name)

    objectives = [name for name in seeds if name != CE]

    def against_ce(part: str) -> dict[str, AgainstCe]:
        return {
            name: AgainstCe(sums[part, name], sums[part, CE], sums[f"{part}·ce", name])
            for name in objectives
            if (part, name) in sums
        }

    paths = {
        name: PathProducts(sums["output", name], sums["input", name], sums["cross", name])
        for name in objectives
        if entering is not None
    }
    return HeadGradientProducts(against_ce("weight"), against_ce("bias"), paths)
