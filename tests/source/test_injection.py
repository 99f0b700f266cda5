"""What a loss injects: values and coefficients against autograd at the logits."""

from __future__ import annotations

import pytest
import torch

import zloss
from tests.laws.definitions import relative_error
from zloss import errors
from zloss.objectives import inject, weighted_auxiliary_source, weighted_source
from zloss.statistics import TokenStats

OBJECTIVES = (zloss.CrossEntropy(), zloss.StandardZLoss(0.7), zloss.CenteredZLoss(0.7), zloss.FactorizedZLoss(0.5, 0.9))


def statistics(z: torch.Tensor, index: torch.Tensor, valid: torch.Tensor) -> tuple[TokenStats, torch.Tensor]:
    row_max = z.amax(1)
    exp = torch.exp(z - row_max.unsqueeze(1))
    picked = z.gather(1, index.unsqueeze(1)).squeeze(1)
    return TokenStats(row_max, exp.sum(1).log(), picked, valid, z.shape[1], mu=z.mean(1)), exp


@pytest.mark.parametrize("objective", OBJECTIVES, ids=lambda objective: objective.name)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_coefficients_give_the_gradient_at_the_logits(objective: zloss.Objective, smoothing: float) -> None:
    g = torch.Generator().manual_seed(0)
    z = torch.randn(6, 11, generator=g, dtype=torch.float64).requires_grad_()
    index, weight = torch.randint(11, (6,), generator=g), torch.rand(6, generator=g, dtype=torch.float64)
    valid = torch.tensor([True, True, False, True, True, True])
    ce = torch.nn.functional.cross_entropy(z, index, reduction="none", label_smoothing=smoothing)
    aux = objective.penalty(z, None)
    counted = torch.where(valid, weight, 0.0)
    total = torch.autograd.grad((counted * (ce + aux)).sum(), z, retain_graph=True)[0]
    cross_entropy = torch.autograd.grad((counted * ce).sum(), z)[0]

    stats, exp = statistics(z.detach(), index, valid)
    injection = inject(stats, objective, smoothing)
    assert relative_error(injection.cross_entropy, ce) < 1e-14
    assert relative_error(injection.auxiliary, aux) < 1e-14
    onehot = torch.nn.functional.one_hot(index, 11)
    for weighted, want in ((weighted_source, total), (weighted_auxiliary_source, total - cross_entropy)):
        source = weighted(injection, exp.sum(1), valid, weight)
        got = source.along_exp_C.unsqueeze(1) * exp
        if source.along_target_C is not None:
            got = got - source.along_target_C.unsqueeze(1) * onehot
        if source.along_uniform_C is not None:
            got = got - source.along_uniform_C.unsqueeze(1) / 11
        assert relative_error(got, want) < 1e-13


def test_label_smoothing_needs_the_mean_logit() -> None:
    one = torch.ones(2)
    stats = TokenStats(one, one, one, one.bool(), 5)
    with pytest.raises(errors.CoordinateError, match="label_smoothing"):
        inject(stats, zloss.CrossEntropy(), 0.1)
