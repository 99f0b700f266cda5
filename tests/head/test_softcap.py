"""The softcap: one function, its derivative, and masked logits."""

from __future__ import annotations

import pytest
import torch

import zloss
from tests.laws.definitions import relative_error
from zloss.head.rows import softcap_, softcap_slope, softcapped


@pytest.mark.parametrize("cap", [0.5, 30.0])
def test_all_forms_agree_with_the_definition_and_autograd(cap: float) -> None:
    z = torch.linspace(-90, 90, 181, dtype=torch.float64).requires_grad_()
    capped = softcapped(z, cap)
    (slope,) = torch.autograd.grad(capped.sum(), z)
    buffer, slope_buffer = z.detach().clone(), torch.empty_like(z)
    softcap_(buffer, slope_buffer, cap)
    assert relative_error(capped, cap * torch.tanh(z.detach() / cap)) < 1e-15
    assert relative_error(buffer, capped) < 1e-15
    assert relative_error(slope_buffer, slope) < 1e-14
    assert relative_error(softcap_slope(capped.detach(), cap), slope) < 1e-14


def test_a_masked_logit_stays_masked_and_has_no_slope() -> None:
    z = torch.tensor([-torch.inf, 1.0])
    slope = torch.empty(2)
    assert softcapped(z, 3.0)[0] == -torch.inf
    assert softcap_slope(softcapped(z, 3.0), 3.0)[0] == 0
    softcap_(z, slope, 3.0)
    assert z[0] == -torch.inf
    assert slope[0] == 0


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_label_smoothing_of_capped_logits_in_chunks(reduction: str) -> None:
    """The source along 1/V goes through the slope of every logit, which the V-wide buffer of the logits loss has."""
    g = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(9, 31, generator=g, dtype=torch.float64)
    target = torch.randint(31, (9,), generator=g)
    target[2] = -100
    found = []
    for backend in ("dense", "chunked"):
        leaf = logits.clone().requires_grad_()
        out = zloss.logits_loss(
            leaf,
            target,
            zloss.StandardZLoss(0.7),
            softcap=4.0,
            logit_scale=1.5,
            label_smoothing=0.2,
            reduction=reduction,
            backend=backend,
            chunk_size=4,
        )
        assert out.stats.mu is None
        out.loss.backward(torch.ones_like(out.loss))
        found.append((out.loss.detach(), leaf.grad))
    for got, want in zip(found[1], found[0], strict=True):
        assert relative_error(got, want) < 1e-13
