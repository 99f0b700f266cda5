"""`zloss.testing.check_loss` passes right losses and raises the findings of wrong ones."""

from __future__ import annotations

import re

import pytest
import torch

from tests.audit.loss import faulty
from zloss.errors import LossCheckError
from zloss.testing import check_loss


def test_a_right_loss_passes_and_its_audit_comes_back() -> None:
    audit = check_loss(faulty.correct, coef=faulty.COEF, target=0.0, coordinate="raw", strict=True)
    assert audit.identified.has_z


@pytest.mark.parametrize(
    ("loss", "options", "id"),
    [
        (faulty.correct, {"coef": 0.7 * faulty.COEF}, "differs_from_expected"),
        (faulty.correct, {"target": "log_v"}, "differs_from_expected"),
        (faulty.correct, {"coordinate": "centered"}, "differs_from_expected"),
        (faulty.z_over_all_tokens, {}, "denominator_mismatch"),
    ],
)
def test_a_finding_is_raised_with_its_witness(loss: object, options: dict[str, object], id: str) -> None:
    with pytest.raises(LossCheckError) as raised:
        check_loss(loss, **options)  # type: ignore[arg-type]
    first, *lines = str(raised.value).splitlines()
    assert first == f"the loss {loss.__qualname__!r} does not pass its audit:"  # type: ignore[attr-defined]
    findings = {line.split()[1]: witness for line, witness in zip(lines[::2], lines[1::2], strict=True)}
    witness = findings[f"{id}:"]
    assert re.search(
        r"expected \S+, measured \S+, noise \S+ \(probe '.+', T = \d+, V = \d+, float64, seed 0\)$", witness
    )


def test_warnings_count_with_strict_only() -> None:
    def plain(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(logits, target)

    check_loss(plain)
    with pytest.raises(LossCheckError, match="all_ignored_nonfinite"):
        check_loss(plain, strict=True)
