"""The paper's listing: same signatures, same numbers, same errors."""

from __future__ import annotations

import inspect

import pytest
import torch

import zloss
from tests.laws.definitions import relative_error
from zloss import errors


def test_signatures_are_those_of_the_listing() -> None:
    assert list(inspect.signature(zloss.centered_logits_from_raw).parameters) == [
        "raw_logits",
        "hidden",
        "weight",
        "bias",
    ]
    assert str(inspect.signature(zloss.z_loss_source)).startswith(
        "(logits: 'Tensor', coef: 'float', target: 'float', reduction"
    )


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_the_source_is_the_gradient_of_the_penalty(reduction: str) -> None:
    logits = torch.randn(2, 5, 13, dtype=torch.float64, requires_grad=True)
    value = 0.3 * (torch.logsumexp(logits, -1) - 1.7) ** 2
    (want,) = torch.autograd.grad(value.mean() if reduction == "mean" else value.sum(), logits)
    assert relative_error(zloss.z_loss_source(logits, 0.3, 1.7, reduction), want) < 1e-14


def test_unknown_reductions_are_our_error_and_a_value_error() -> None:
    with pytest.raises(ValueError, match="unknown reduction") as caught:
        zloss.z_loss_source(torch.zeros(2, 3), 1.0, 0.0, "average")  # type: ignore[arg-type]
    assert isinstance(caught.value, errors.ReductionError)
