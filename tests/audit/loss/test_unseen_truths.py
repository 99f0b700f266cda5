"""The truths of `FURTHER` and `UNSEEN` hold in plain fp64 autograd; the audit is not called."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.audit.loss.further import FURTHER, gradient_error
from tests.audit.loss.observed import OBSERVABLE, observed, remainder
from tests.audit.loss.unseen import OUTSIDE, UNSEEN

NUMBERS = {name: case for name, case in {**FURTHER, **UNSEEN}.items() if gradient_error(case) is not None}


@pytest.mark.parametrize("name", NUMBERS)
def test_the_gradient_is_that_of_the_declared_numbers(name: str) -> None:
    error, tolerance = gradient_error(NUMBERS[name]), NUMBERS[name].tolerance
    assert error is not None
    assert error < (tolerance if tolerance > 1e-5 else 1e-9)


@pytest.mark.parametrize("name", UNSEEN)
def test_what_plain_calls_show_is_declared_and_what_is_declared_shows(name: str) -> None:
    case = UNSEEN[name]
    seen = observed(case.loss, case.options, shifted=case.more.get("targets") == "shifted")
    assert seen <= case.must | case.one_of | case.may
    assert case.must & OBSERVABLE <= seen
    assert not case.must_not & seen


@pytest.mark.parametrize("name", OUTSIDE)
def test_losses_outside_the_family_have_a_source_outside_its_three_shapes(name: str) -> None:
    assert remainder(UNSEEN[name].loss, UNSEEN[name].options) > 1e-4


@pytest.mark.parametrize("name", [name for name in UNSEEN if name not in OUTSIDE])
def test_the_other_losses_stay_within_the_three_shapes(name: str) -> None:
    """Except where logits are scaled or cut, labels are shifted, or the source itself is damaged."""
    case = UNSEEN[name]
    apart = {"flash-attn module", "learned temperature", "padding bias", "padding masked in place"}
    damaged = {"gradient kept in bf16", "backward without the last columns"}
    inside = name not in apart | damaged and case.more.get("targets") != "shifted"
    assert (remainder(case.loss, case.options) < 1e-9) is inside


@pytest.mark.parametrize("name", ["Megatron layout", "HF loss with num_items", "KL to uniform", "Z and max-z"])
def test_a_wrong_truth_fails(name: str) -> None:
    case = UNSEEN[name]
    assert case.coef is not None
    if case.formula is None:
        error = gradient_error(replace(case, coef=1.01 * case.coef))
    else:
        formula = case.formula
        error = gradient_error(
            replace(case, formula=lambda z, y: formula(z, y) + 1e-6 * z.logsumexp(-1).square().mean())
        )
    assert error is not None
    assert error > 1e-9
