"""The audit recovers λ, c, coordinate and denominators of right losses, with an uncertainty that covers its error."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.audit.loss.zoo import by_hand
from zloss.audit.loss.audit import audit_loss

IGNORE = -100


def eager(coef: float, c: float, ce_by: str, z_by: str, *, centered: bool, fp32: bool) -> Callable[..., Tensor]:
    """CE + λ(log Z − c)² by autograd, each part with its own denominator."""

    def loss(logits: Tensor, target: Tensor) -> Tensor:
        z = logits.float() if fp32 else logits
        valid = target != IGNORE
        count = {"valid": int(valid.sum()), "all": valid.numel(), "sum": 1}
        ce = F.cross_entropy(z, target, ignore_index=IGNORE, reduction="sum") / count[ce_by]
        v = torch.logsumexp(z - z.mean(-1, keepdim=True) if centered else z, -1)
        return ce + coef * (v - c)[valid].square().sum() / count[z_by]

    return loss


def fused(coef: float, c: float) -> Callable[..., Tensor]:
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


def check_recovered(
    loss: Callable[..., Tensor], coef: float, c: float, names: tuple[str, str, str], *, fp64: bool
) -> None:
    got = audit_loss(loss, seed=random.randrange(1000)).identified
    assert got.coef is not None
    assert got.target is not None
    assert (got.coordinate, got.ce_denominator, got.z_denominator) == names
    assert abs(got.coef / coef - 1) <= 1e-3
    assert abs(got.target - c) <= (1e-3 if fp64 else max(1e-3, 2e-8 / coef))
    assert abs(got.coef - coef) <= (got.uncertainty.coef or 0.0)
    assert abs(got.target - c) <= (got.uncertainty.target or 0.0)


@pytest.mark.parametrize("draw", range(24))
def test_random_coefficients_targets_and_denominators_are_recovered(draw: int) -> None:
    random.seed(draw)
    coef, c = 10 ** random.uniform(-6, 0), random.uniform(-5, 15)
    ce_by, z_by = random.choice(["valid", "all", "sum"]), random.choice(["valid", "all", "sum"])
    centered, fp32 = draw % 2 == 1, draw % 4 >= 2
    loss = eager(coef, c, ce_by, z_by, centered=centered, fp32=fp32)
    check_recovered(loss, coef, c, ("centered" if centered else "raw", ce_by, z_by), fp64=not fp32)


@pytest.mark.parametrize("coef", [1e-6, 3e-6, 1e-4, 1e-2, 1.0])
@pytest.mark.parametrize("c", [-5.0, 0.0, 15.0])
def test_a_fused_fp32_kernel_is_read_beyond_its_rounding(coef: float, c: float) -> None:
    check_recovered(fused(coef, c), coef, c, ("raw", "valid", "valid"), fp64=False)


def test_an_fp32_only_loss_is_probed_in_fp32() -> None:
    inner = eager(1e-5, 2.0, "valid", "valid", centered=False, fp32=True)

    def loss(logits: Tensor, target: Tensor) -> Tensor:
        if logits.dtype == torch.float64:
            raise TypeError("float64 is not supported")
        return inner(logits, target)

    audit = audit_loss(loss)
    assert audit.provenance["probe_dtype"] == "float32"
    assert audit.identified.coef == pytest.approx(1e-5, rel=1e-3)
    assert audit.identified.target == pytest.approx(2.0, abs=2e-3)


@pytest.mark.parametrize("fp32", [False, True])
def test_no_z_is_reported_as_no_z(fp32: bool) -> None:
    got = audit_loss(lambda z, y: F.cross_entropy(z.float() if fp32 else z, y)).identified
    assert not got.has_z
    assert (got.coef, got.target, got.coordinate, got.z_denominator) == (None, None, None, None)
    assert got.ce_denominator == "valid"


def follows_log_v(z: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(z, y) + 1e-3 * (z.logsumexp(-1) - math.log(z.shape[-1]))[y != IGNORE].square().mean()


def test_a_target_that_follows_log_v_is_distinguished_from_a_constant_one() -> None:
    constant = audit_loss(eager(1e-3, math.log(96), "valid", "valid", centered=False, fp32=False)).identified
    assert audit_loss(follows_log_v).identified.target_rule == "log_v"
    assert constant.target_rule == "constant"
    assert constant.target == pytest.approx(math.log(96), abs=1e-9)


@pytest.mark.parametrize("centered", [False, True])
def test_label_smoothing_is_not_taken_for_a_penalty(centered: bool) -> None:
    def loss(z: Tensor, y: Tensor) -> Tensor:
        v = (z - z.mean(-1, keepdim=True) if centered else z).logsumexp(-1)
        return F.cross_entropy(z, y, label_smoothing=0.1) + 1e-3 * (v - 4.0)[y != IGNORE].square().mean()

    got = audit_loss(loss).identified
    assert got.label_smoothing == pytest.approx(0.1, abs=1e-6)
    assert got.coef == pytest.approx(1e-3, rel=1e-6)
    assert got.target == pytest.approx(4.0, abs=1e-6)


def test_given_logits_are_where_the_source_is_measured() -> None:
    logits = 5 + 3 * torch.randn(40, 300, generator=torch.Generator().manual_seed(0))
    target = torch.randint(300, (40,), generator=torch.Generator().manual_seed(1))
    loss = eager(1e-3, 0.0, "valid", "valid", centered=False, fp32=False)
    audit = audit_loss(loss, logits=logits, target=target)
    assert (audit.source.tokens, audit.source.of) == (40, "z")
    assert audit.source.delta_src is not None
    assert audit.source.delta_src < 1e-4

    def rounded(z: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(z, y) + 1e-3 * z.bfloat16().double().logsumexp(-1)[y != IGNORE].square().mean()

    worse = audit_loss(rounded, logits=logits, target=target)
    assert "low_precision_source" in {finding.id for finding in worse.found}


def test_a_target_that_follows_log_v_is_stated_for_the_given_vocabulary() -> None:
    got = audit_loss(follows_log_v, logits=torch.randn(8, 500), expect={"coef": 1e-3, "target": None})
    assert got.identified.vocab == 500
    assert got.identified.target == pytest.approx(math.log(500), abs=1e-6)
    assert "differs_from_expected" not in {finding.id for finding in got.found}


def test_a_penalty_without_cross_entropy_is_read_alone() -> None:
    got = audit_loss(lambda z, y: 1e-3 * (z.logsumexp(-1) - 2.0)[y != IGNORE].square().sum()).identified
    assert (got.coordinate, got.ce_denominator, got.z_denominator) == ("raw", "none", "sum")
    assert got.coef == pytest.approx(1e-3, rel=1e-6)
    assert got.target == pytest.approx(2.0, abs=1e-6)


def test_wrong_mutations_of_the_oracle_are_noticed() -> None:
    """The recovery test can fail: a λ off by 0.2 %, a c off by 0.01, another denominator."""
    names = ("raw", "valid", "valid")
    for loss in (
        eager(1.002e-3, 3.0, "valid", "valid", centered=False, fp32=False),
        eager(1e-3, 3.01, "valid", "valid", centered=False, fp32=False),
        eager(1e-3, 3.0, "valid", "all", centered=False, fp32=False),
        eager(1e-3, 3.0, "valid", "valid", centered=True, fp32=False),
    ):
        with pytest.raises(AssertionError):
            check_recovered(loss, 1e-3, 3.0, names, fp64=True)


@pytest.mark.parametrize("coef", [1e-6, 1e-5])
@pytest.mark.parametrize("c", [0.0, 4.0, 12.0])
def test_a_faint_penalty_on_log_z_less_max_is_heard(coef: float, c: float) -> None:
    """No common shift amplifies it, and in fp32 it is a few roundings of the cross-entropy on most logits."""

    def loss(logits: Tensor, target: Tensor) -> Tensor:
        z, valid = logits.float(), target != IGNORE
        v = torch.logsumexp(z - z.amax(-1, keepdim=True), -1)
        return F.cross_entropy(z, target, ignore_index=IGNORE) + coef * (v - c)[valid].square().mean()

    audit = audit_loss(loss)
    got = audit.identified
    assert (got.coordinate, got.ce_denominator, got.z_denominator) == ("max_shifted", "valid", "valid")
    assert got.coef == pytest.approx(coef, rel=0.02)
    assert got.target == pytest.approx(c, abs=0.05)
    assert "max_shifted" in {finding.id for finding in audit.found}


FAINT = {
    "raw": eager(1e-6, math.log(96), "valid", "valid", centered=False, fp32=True),
    "centered": eager(1e-6, 0.0, "valid", "valid", centered=True, fp32=True),
    "fused": fused(1e-6, 0.0),
}


@pytest.mark.parametrize("name", FAINT)
@pytest.mark.parametrize("seed", [0, 1])
def test_rounding_next_to_a_small_coefficient_in_fp32_was_blamed_as_a_miscount_of_tokens(name: str, seed: int) -> None:
    found = [one.sentence for one in audit_loss(FAINT[name], seed=seed).found if one.id != "all_ignored_nonfinite"]
    assert found == []


def test_a_count_of_z_in_fp16_is_still_seen_next_to_a_small_coefficient_in_fp32() -> None:
    """2,049 tokens are 2,048 in fp16: an error of 4.9e-4, above what the rounding of fp32 leaves open at λ = 1e-6."""

    def loss(logits: Tensor, target: Tensor) -> Tensor:
        z, valid = logits.float(), target != IGNORE
        squares = torch.logsumexp(z, -1)[valid].square().sum()
        return F.cross_entropy(z, target, ignore_index=IGNORE) + 1e-6 * squares / valid.sum().half().float()

    (found,) = (one for one in audit_loss(loss).found if one.id == "size_dependent")
    assert "2,049 tokens are counted as 2,048" in found.sentence


def test_the_target_next_to_a_small_coefficient_in_fp32_was_a_thousandth_off() -> None:
    got = audit_loss(FAINT["raw"]).identified
    assert got.target == pytest.approx(math.log(96), abs=1e-6)
    assert (got.uncertainty.target or 1.0) < 1e-4


@pytest.mark.parametrize("coef", [1e-4, 1e-3, 1e-2])
def test_the_half_width_of_a_missing_square_in_fp32_did_not_cover_its_error(coef: float) -> None:
    """All saturated tokens round w + λw alike, so that their spread says nothing about it."""

    def loss(logits: Tensor, target: Tensor) -> Tensor:
        z, valid = logits.float(), target != IGNORE
        return F.cross_entropy(z, target, ignore_index=IGNORE) + coef * torch.logsumexp(z, -1)[valid].mean()

    got = audit_loss(loss).identified
    assert got.coef is not None
    assert abs(got.coef - coef) <= (got.uncertainty.coef or 0.0) < 5e-7
