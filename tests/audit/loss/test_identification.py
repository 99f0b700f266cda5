"""The audit recovers λ, c, coordinate and denominators of right losses, with an uncertainty that covers its error."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.audit.loss.faulty import bf16_arithmetic_in_z
from tests.audit.loss.zoo import IGNORE, by_hand, ce, mean, plain
from zloss.audit.loss.audit import audit_loss
from zloss.audit.loss.calls import Loss
from zloss.audit.loss.evidence import Evidence, identify
from zloss.audit.loss.probes import Space
from zloss.results.loss_audit import Identified, LossAudit

COEF = 1e-3
Function = Callable[[Tensor, Tensor], Tensor]


def evidence(loss: Function, seed: int = 0) -> Evidence:
    return identify(Loss(loss, "the loss"), Space(), seed)


def identified(loss: Function, seed: int = 0) -> Identified:
    return evidence(loss, seed).identified


def found(audit: LossAudit) -> set[str]:
    return {finding.id for finding in audit.found}


COORDINATES: dict[str, Callable[[Tensor], Tensor]] = {
    "raw": lambda z: torch.logsumexp(z, -1),
    "centered": lambda z: torch.logsumexp(z - z.mean(-1, keepdim=True), -1),
    "max_shifted": lambda z: torch.logsumexp(z - z.max(-1, keepdim=True).values, -1),
}


def eager(
    coef: float, c: float, ce_by: str = "valid", z_by: str = "valid", *, coordinate: str = "raw", fp32: bool = False
) -> Function:
    """CE + λ(v − c)² by autograd, each part with its own denominator."""

    def loss(logits: Tensor, target: Tensor) -> Tensor:
        z, valid = logits.float() if fp32 else logits, target != IGNORE
        count = {"valid": int(valid.sum()), "all": valid.numel(), "sum": 1}
        ce = F.cross_entropy(z, target, ignore_index=IGNORE, reduction="sum") / count[ce_by]
        return ce + coef * (COORDINATES[coordinate](z) - c)[valid].square().sum() / count[z_by]

    return loss


def fused(coef: float, c: float) -> Function:
    """(1 + 2λ(log Z − c))·p − y formed as a whole in fp32, as fused kernels do: the Z is rounded with the CE."""

    def loss(logits: Tensor, target: Tensor) -> Tensor:
        x, valid = logits.detach().float(), target != IGNORE
        log_z = torch.logsumexp(x, -1)
        rows, safe = torch.arange(len(target)), target.clamp(min=0)
        grad = (1 + 2 * coef * (log_z - c))[:, None] * torch.exp(x - log_z[:, None])
        grad[rows, safe] -= 1
        grad = grad * valid[:, None] / valid.sum()
        per_token = log_z - x[rows, safe] + coef * (log_z - c) ** 2
        return by_hand(per_token[valid].sum() / valid.sum(), lambda upstream: (upstream * grad,), logits.float())

    return loss


def check_recovered(loss: Function, coef: float, c: float, names: tuple[str, str, str], *, fp64: bool) -> None:
    got = identified(loss, seed=random.randrange(1000))
    assert got.coef is not None
    assert got.target is not None
    assert (got.coordinate, got.ce_denominator, got.z_denominator) == names
    assert abs(got.coef / coef - 1) <= 1e-3
    assert abs(got.target - c) <= (1e-3 if fp64 else max(1e-3, 2e-8 / coef))
    assert abs(got.coef - coef) <= (got.uncertainty.coef or 0.0)
    assert abs(got.target - c) <= (got.uncertainty.target or 0.0)


@pytest.mark.parametrize("draw", range(6))
def test_random_coefficients_targets_and_denominators_are_recovered(draw: int) -> None:
    random.seed(draw)
    coef, c = 10 ** random.uniform(-6, 0), random.uniform(-5, 15)
    ce_by, z_by = random.choice(["valid", "all", "sum"]), random.choice(["valid", "all", "sum"])
    coordinate, fp32 = ("centered" if draw % 2 else "raw"), draw % 4 >= 2
    loss = eager(coef, c, ce_by, z_by, coordinate=coordinate, fp32=fp32)
    check_recovered(loss, coef, c, (coordinate, ce_by, z_by), fp64=not fp32)


@pytest.mark.parametrize(("coef", "c"), [(1e-6, 15.0), (1e-6, -5.0), (1e-4, 15.0), (1.0, -5.0)])
def test_a_fused_fp32_kernel_is_read_beyond_its_rounding(coef: float, c: float) -> None:
    check_recovered(fused(coef, c), coef, c, ("raw", "valid", "valid"), fp64=False)


def test_wrong_mutations_of_the_oracle_are_noticed() -> None:
    """The recovery test can fail: a λ off by 0.2 %, a c off by 0.01, another denominator."""
    for loss in (eager(1.002e-3, 3.0), eager(1e-3, 3.01), eager(1e-3, 3.0, z_by="all")):
        with pytest.raises(AssertionError):
            check_recovered(loss, 1e-3, 3.0, ("raw", "valid", "valid"), fp64=True)


def test_an_fp32_only_loss_is_probed_in_fp32() -> None:
    inner = eager(1e-5, 2.0, fp32=True)

    def loss(logits: Tensor, target: Tensor) -> Tensor:
        if logits.dtype == torch.float64:
            raise TypeError("float64 is not supported")
        return inner(logits, target)

    got = evidence(loss)
    assert got.fine == torch.float32
    assert got.identified.coef == pytest.approx(1e-5, rel=1e-3)
    assert got.identified.target == pytest.approx(2.0, abs=2e-3)


@pytest.mark.parametrize("fp32", [False, True])
def test_no_z_is_reported_as_no_z(fp32: bool) -> None:
    got = identified(lambda z, y: F.cross_entropy(z.float() if fp32 else z, y))
    assert got.has_z is False
    assert (got.coef, got.target, got.coordinate, got.z_denominator) == (None, None, None, None)
    assert got.ce_denominator == "valid"


def follows_log_v(z: Tensor, y: Tensor) -> Tensor:
    return plain(z, y, c=math.log(z.shape[-1]))


def test_a_target_that_follows_log_v_is_distinguished_from_a_constant_one() -> None:
    constant = identified(eager(1e-3, math.log(96)))
    assert identified(follows_log_v).target_rule == "log_v"
    assert constant.target_rule == "constant"
    assert constant.target == pytest.approx(math.log(96), abs=1e-9)


@pytest.mark.parametrize("coordinate", ["raw", "centered"])
def test_label_smoothing_is_not_taken_for_a_penalty(coordinate: str) -> None:
    def loss(z: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(z, y, label_smoothing=0.1) + mean(1e-3 * (COORDINATES[coordinate](z) - 4.0) ** 2, y)

    got = identified(loss)
    smoothings = [got.label_smoothing, got.extra.get("or_label_smoothing")]
    targets = [got.target, got.extra.get("or_target")]
    assert any(one == pytest.approx(0.1, abs=1e-6) for one in smoothings)
    assert any(one == pytest.approx(4.0, abs=1e-6) for one in targets)
    assert got.coef == pytest.approx(1e-3, rel=1e-6)


def test_a_penalty_without_cross_entropy_is_read_alone() -> None:
    got = identified(lambda z, y: 1e-3 * (z.logsumexp(-1) - 2.0)[y != IGNORE].square().sum())
    assert (got.coordinate, got.ce_denominator, got.z_denominator) == ("raw", "none", "sum")
    assert got.coef == pytest.approx(1e-3, rel=1e-6)
    assert got.target == pytest.approx(2.0, abs=1e-6)


def test_given_logits_are_where_the_source_is_measured() -> None:
    logits = 5 + 3 * torch.randn(40, 300, generator=torch.Generator().manual_seed(0))
    target = torch.randint(300, (40,), generator=torch.Generator().manual_seed(1))
    audit = audit_loss(plain, logits=logits, target=target)
    assert (audit.source.tokens, audit.source.of) == (40, "z")
    assert audit.source.delta_src is not None
    assert audit.source.delta_src < 1e-4
    rounded = audit_loss(
        lambda z, y: ce(z, y) + COEF * mean(z.bfloat16().double().logsumexp(-1) ** 2, y), logits=logits
    )
    assert "low_precision_source" in found(rounded)


def test_a_target_that_follows_log_v_is_stated_for_the_given_vocabulary() -> None:
    got = audit_loss(follows_log_v, logits=torch.randn(8, 500), expect={"coef": 1e-3, "target": None})
    assert got.identified.vocab == 500
    assert got.identified.target == pytest.approx(math.log(500), abs=1e-6)
    assert "differs_from_expected" not in found(got)


@pytest.mark.parametrize(("coef", "c"), [(1e-5, 0.0), (1e-5, 12.0), (1e-5, 4.0)])
def test_a_faint_penalty_on_log_z_less_max_is_heard(coef: float, c: float) -> None:
    """No common shift amplifies it, and in fp32 it is a few roundings of the cross-entropy on most logits."""
    got = identified(eager(coef, c, coordinate="max_shifted", fp32=True))
    assert (got.coordinate, got.ce_denominator, got.z_denominator) == ("max_shifted", "valid", "valid")
    assert got.coef == pytest.approx(coef, rel=0.02)
    assert abs(got.coef - coef) <= (got.uncertainty.coef or 0.0)
    assert got.target == pytest.approx(c, abs=0.05)


FAINT = {
    "raw": eager(1e-6, math.log(96), fp32=True),
    "centered": eager(1e-6, 0.0, coordinate="centered", fp32=True),
    "fused": fused(1e-6, 0.0),
}


@pytest.mark.parametrize("name", FAINT)
def test_rounding_next_to_a_small_coefficient_in_fp32_was_blamed_as_a_miscount_of_tokens(name: str) -> None:
    assert found(audit_loss(FAINT[name], seed=1)) <= {"all_ignored_nonfinite"}


def test_the_target_next_to_a_small_coefficient_in_fp32_was_a_thousandth_off() -> None:
    got = identified(FAINT["raw"])
    assert got.target == pytest.approx(math.log(96), abs=1e-5)
    assert (got.uncertainty.target or 1.0) < 1e-4


@pytest.mark.parametrize("coef", [1e-4, 1e-2])
def test_a_missing_square_in_fp32_is_read_with_its_factor(coef: float) -> None:
    got = identified(lambda z, y: ce(z.float(), y) + coef * mean(z.float().logsumexp(-1), y))
    assert (got.has_z, got.coef, got.target, got.coordinate) == (True, None, None, "other")
    assert got.extra["linear_coef"] == pytest.approx(coef, abs=5e-7)
    assert "linear" in (got.reason or "")


# CE and Z in different precision: the rounding of one part is not taken for structure of the other.

MIXES = {"ce": (True, False), "z": (False, True)}
"""Which of CE and Z is computed in fp32; the other follows the logits."""


def without_z(mix: str) -> Function:
    narrow, _ = MIXES[mix]
    return lambda logits, target: ce(logits.float() if narrow else logits, target)


def mixed(coordinate: str, mix: str, *, coef: float = COEF, detached: bool = False) -> Function:
    """CE + λv², with one of the two parts in fp32."""
    _, narrow = MIXES[mix]

    def loss(logits: Tensor, target: Tensor) -> Tensor:
        z = coef * mean(COORDINATES[coordinate](logits.float() if narrow else logits) ** 2, target)
        return without_z(mix)(logits, target) + (z.detach() if detached else z)

    return loss


@pytest.mark.parametrize(
    ("coordinate", "coef", "mix"),
    [("raw", COEF, "ce"), ("raw", COEF, "z"), ("centered", COEF, "ce"), ("raw", 1e-6, "z")],
)
def test_rounding_of_the_fp32_part_is_not_taken_for_structure(coordinate: str, coef: float, mix: str) -> None:
    audit = audit_loss(mixed(coordinate, mix, coef=coef), off=without_z(mix))
    got = audit.identified
    assert got.coordinate == coordinate
    assert got.coef == pytest.approx(coef, rel=1e-4 if coef == COEF else 1e-3)
    assert found(audit) == set()
    assert (got.ce_denominator, got.z_denominator, got.computes_in) == ("valid", "valid", "float32")
    assert got.target == pytest.approx(0.0, abs=1e-4 if coef == COEF else 2e-2)
    assert abs(got.coef - coef) <= (got.uncertainty.coef or 0.0)


def test_losses_of_one_precision_are_named_by_it() -> None:
    assert identified(plain).computes_in == "float64"
    assert identified(eager(COEF, 0.0, fp32=True)).computes_in == "float32"


@pytest.mark.parametrize(("share", "verdict"), [(1e-3, "finding"), (1e-5, "finding"), (1e-8, "pass")])
def test_an_off_is_evaluated_by_the_share_of_the_z_that_it_keeps(share: float, verdict: str) -> None:
    audit = audit_loss(plain, off=lambda z, y: plain(z, y, share * COEF))
    assert {finding.id: finding.verdict for finding in audit.findings}["not_off"] == verdict


@pytest.mark.parametrize(("coordinate", "mix"), [("raw", "ce"), ("centered", "z")])
def test_a_z_without_gradient_is_still_seen(coordinate: str, mix: str) -> None:
    assert "zero_gradient_z" in found(audit_loss(mixed(coordinate, mix, detached=True)))


def test_rounding_of_the_gradient_counts_where_the_scalar_is_near_zero() -> None:
    """A constant taken off the scalar leaves no value to judge its rounding by; the gradient has its own."""
    loss = mixed("centered", "ce")
    level = evidence(loss).mixed[1].value
    assert found(audit_loss(lambda z, y: loss(z, y) - level)) <= {"constant_in_value"}


def test_a_z_of_bf16_logits_has_one_error_and_not_a_wrong_coefficient() -> None:
    def bf16_z(logits: Tensor, target: Tensor) -> Tensor:
        return ce(logits, target) + 1e-4 * mean(logits.bfloat16().logsumexp(-1) ** 2, target).float()

    assert found(audit_loss(bf16_z, expect={"coef": 1e-4, "target": 0.0})) == {"low_precision_source"}


@pytest.mark.parametrize("seed", [0])
def test_a_z_in_bf16_next_to_a_ce_in_fp64_has_no_wrong_number(seed: int) -> None:
    """λ/N is rounded to bf16 as a whole: the weights of batches differ by 4e-3 then, whatever their tokens say."""
    got = identified(bf16_arithmetic_in_z, seed=seed)
    assert got.has_z is not False
    if got.coef is None:
        assert got.reason
    else:
        assert (got.ce_denominator, got.z_denominator) == ("valid", "valid")
        assert abs(got.coef - COEF) <= (got.uncertainty.coef or 0.0) < 0.05 * COEF
