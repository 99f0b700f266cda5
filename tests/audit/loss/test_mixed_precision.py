"""CE and Z in different precision: the fp32 rounding of one part is not taken for structure of the other."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.audit.loss.faulty import bf16_arithmetic_in_z
from tests.audit.loss.zoo import ce, mean
from zloss.audit.loss.calls import BlackBox
from zloss.audit.loss.findings import TOLERANCE, Evidence, slopes
from zloss.audit.loss.identify import computes_in, identify
from zloss.audit.loss.probes import VOCAB, Space, draw
from zloss.audit.loss.audit import audit_loss
from zloss.results.loss_audit import LossAudit

COEF = 1e-3

Coordinate = Callable[[Tensor], Tensor]
Loss = Callable[[Tensor, Tensor], Tensor]

COORDINATES: dict[str, Coordinate] = {
    "raw": lambda z: torch.logsumexp(z, -1),
    "centered": lambda z: torch.logsumexp(z - z.mean(-1, keepdim=True), -1),
    "max_shifted": lambda z: torch.logsumexp(z - z.max(-1, keepdim=True).values, -1),
}
MIXES = {"ce": (True, False), "z": (False, True)}
"""Which of CE and Z is computed in fp32; the other follows the logits."""


def without_z(mix: str) -> Loss:
    narrow, _ = MIXES[mix]
    return lambda logits, target: ce(logits.float() if narrow else logits, target)


def mixed(coordinate: str, mix: str, *, coef: float = COEF, detached: bool = False) -> Loss:
    """CE + λv², with one of the two parts in fp32."""
    _, narrow = MIXES[mix]
    off, quantity = without_z(mix), COORDINATES[coordinate]

    def loss(logits: Tensor, target: Tensor) -> Tensor:
        v = quantity(logits.float() if narrow else logits)
        z = coef * mean(v**2, target)
        return off(logits, target) + (z.detach() if detached else z)

    return loss


def found(audit: LossAudit) -> set[str]:
    return {finding.id for finding in audit.found}


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize(
    ("coordinate", "coef"),
    [("raw", COEF), ("centered", COEF), ("max_shifted", COEF), ("raw", 1e-6), ("centered", 1e-6)],
)
def test_rounding_of_the_fp32_part_is_not_taken_for_structure(coordinate: str, coef: float, mix: str) -> None:
    audit = audit_loss(mixed(coordinate, mix, coef=coef), off=without_z(mix))
    got = audit.identified
    assert got.coordinate == coordinate
    assert got.coef == pytest.approx(coef, rel=1e-4 if coef == COEF else 1e-3)
    assert found(audit) == ({"max_shifted"} if coordinate == "max_shifted" else set())
    if coef == COEF:
        assert (got.ce_denominator, got.z_denominator, got.computes_in) == ("valid", "valid", "float32")
        assert got.target == pytest.approx(0.0, abs=1e-4)
        assert abs(got.coef - coef) <= (got.uncertainty.coef or 0.0)


def plain(coef: float, coordinate: str = "raw") -> Loss:
    """CE + λv² in the precision of the logits."""
    return lambda logits, target: ce(logits, target) + coef * mean(COORDINATES[coordinate](logits) ** 2, target)


@pytest.mark.parametrize("mix", MIXES)
def test_an_off_that_keeps_a_thousandth_of_the_z_is_still_not_off(mix: str) -> None:
    assert "not_off" in found(audit_loss(mixed("raw", mix), off=mixed("raw", mix, coef=1e-3 * COEF)))


@pytest.mark.parametrize(("share", "verdict"), [(1e-5, "finding"), (1e-8, "pass")])
def test_an_off_is_evaluated_by_the_share_of_the_z_that_it_keeps(share: float, verdict: str) -> None:
    audit = audit_loss(plain(COEF), off=plain(share * COEF))
    assert {finding.id: finding.verdict for finding in audit.findings}["not_off"] == verdict


def test_an_off_in_fp32_next_to_a_loss_in_fp64_is_off() -> None:
    audit = audit_loss(plain(COEF), off=without_z("ce"))
    assert audit.identified.computes_in == "float64"
    assert found(audit) == set()


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("coordinate", ["raw", "centered"])
def test_a_z_without_gradient_is_still_seen(coordinate: str, mix: str) -> None:
    assert "zero_gradient_z" in found(audit_loss(mixed(coordinate, mix, detached=True)))


@pytest.mark.parametrize("coordinate", COORDINATES)
@pytest.mark.parametrize("coef", [1e-6, 1e-3, 1.0])
def test_a_mix_is_named_by_its_coarser_part_and_fp64_alone_by_fp64(coordinate: str, coef: float) -> None:
    probe = draw("continuous", Space(VOCAB, VOCAB), seed=0)

    def betrayed(loss: Loss) -> str:
        return computes_in(BlackBox(loss, "loss", False, torch.device("cpu"), 0), probe)

    assert [betrayed(mixed(coordinate, mix, coef=coef)) for mix in MIXES] == ["float32", "float32"]
    assert betrayed(plain(coef, coordinate)) == "float64"


def test_rounding_of_the_gradient_counts_where_the_scalar_is_near_zero() -> None:
    """A constant taken off the scalar leaves no value to judge its rounding by; the gradient has its own."""
    loss, space = mixed("centered", "ce"), Space(VOCAB, VOCAB)
    first = identify(BlackBox(loss, "loss", False, torch.device("cpu"), 0), space, 0)
    level = first.first.outcomes["mixed"].value
    box = BlackBox(lambda z, y: loss(z, y) - level, "loss", False, torch.device("cpu"), 0)
    ident = identify(box, space, 0)
    evidence = Evidence(box, None, None, {}, ident, ident.first)
    assert max(slope.mismatch for slope in slopes(evidence)) < TOLERANCE


def test_a_z_of_bf16_logits_has_one_error_and_not_a_wrong_coefficient() -> None:
    def bf16_z(logits: Tensor, target: Tensor) -> Tensor:
        log_z = logits.bfloat16().logsumexp(-1)
        return ce(logits, target) + 1e-4 * mean(log_z**2, target).float()

    audit = audit_loss(bf16_z, expect={"coef": 1e-4, "target": 0.0})
    assert [finding.id for finding in audit.found] == ["low_precision_source"]
    wrong = audit_loss(bf16_z, expect={"coef": 2e-4, "target": 0.0})
    assert "differs_from_expected" in {finding.id for finding in wrong.found}


@pytest.mark.parametrize("seed", [0, 3])
def test_a_z_in_bf16_next_to_a_ce_in_fp64_had_another_denominator_and_too_small_a_half_width(seed: int) -> None:
    """λ/N is rounded to bf16 as a whole: the weights of batches differ by 4e-3 then, whatever their tokens say.

    At seeds 1 and 2 the noise leaves the whole answer open.
    """
    got = audit_loss(bf16_arithmetic_in_z, seed=seed).identified
    assert (got.ce_denominator, got.z_denominator) == ("valid", "valid")
    assert got.coef is not None
    assert abs(got.coef - COEF) <= (got.uncertainty.coef or 0.0) < 0.05 * COEF
