"""Head gradients by blocks of rows equal those of the head loss, also where autocast rounds its operands."""

from __future__ import annotations

import pytest
import torch

import zloss
from tests.laws.definitions import make_case, relative_error
from zloss.head import source
from zloss.head.arguments import prepare_head
from zloss.head.options import HeadOptions
from zloss.head.source import Coefficients, head_gradient_rows


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_cross_entropy_at_weight_and_bias(
    autocast: bool, softcap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source, "_BLOCK_BYTES", 4 * 37 * 20)  # three blocks of rows
    case = make_case(zloss.CrossEntropy(), with_bias=True)
    assert case.bias is not None
    leaves = [tensor.float().requires_grad_() for tensor in (case.hidden, case.weight, case.bias)]
    hidden, weight, bias = leaves
    options = HeadOptions(zloss.CrossEntropy(), logit_scale=1.5, softcap=softcap)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out = zloss.head_loss(
            hidden,
            weight,
            case.target,
            zloss.CrossEntropy(),
            bias=bias,
            logit_scale=1.5,
            softcap=softcap,
            reduction="sum",
        )
        problem = prepare_head(hidden, weight, case.target, bias, options)
        ones = torch.ones(len(hidden))
        found = list(head_gradient_rows(problem, out.stats.log_z, {"ce": Coefficients(ones, ones)}))
    _, want_weight, want_bias = torch.autograd.grad(out.loss, leaves)
    assert len(found) == 3
    assert relative_error(torch.cat([rows["ce"].weight_RD for _, rows in found]), want_weight) < 2e-6
    assert relative_error(torch.cat([rows["ce"].bias_R for _, rows in found]), want_bias) < 2e-6
