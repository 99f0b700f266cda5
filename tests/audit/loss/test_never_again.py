"""Kinds of wrong answer that the design excludes, each in several spellings."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.audit.loss.styles import STYLES
from tests.audit.loss.zoo import (
    LAMBDA,
    adding,
    capped,
    ce,
    ce_sum,
    count_of,
    lse,
    mean,
    padded_shift,
    penalty,
    plain,
    shifted,
    three_axes,
    total,
    wide,
    zl,
)
from zloss.audit.loss.audit import audit_loss
from zloss.audit.loss.calls import LossCallError, read
from zloss.results.loss_audit import LossAudit

Loss = Callable[..., Any]
STYLE = {case.name: case for case in STYLES}
BELIEVED = {"coef": LAMBDA, "target": 0.0}


def audit_style(name: str) -> LossAudit:
    return audit_loss(STYLE[name].loss, **STYLE[name].call)


def loud(audit: LossAudit) -> set[str]:
    return {one.id for one in audit.found if one.severity != "note"}


def notes(audit: LossAudit) -> set[str]:
    return {one.id for one in audit.found if one.severity == "note"}


# A capped or scaled head whose labels are shifted inside was accused of leaking.

CAPPED: dict[str, tuple[Loss, dict[str, float]]] = {
    "cap, sliced": (lambda z, y: shifted(capped(30.0)(z), y), {"softcap": 30.0}),
    "scale, padded": (lambda z, y: padded_shift(z / 8, y), {"logit_scale": 1 / 8}),
    "cap and scale, three axes": (
        lambda z, y: three_axes(capped(20.0, 0.5)(z), y),
        {"softcap": 20.0, "logit_scale": 0.5},
    ),
}


@pytest.mark.parametrize("name", CAPPED)
def test_a_capped_or_scaled_head_with_shifted_labels_leaks_nothing(name: str) -> None:
    loss, stated = CAPPED[name]
    audit = audit_loss(loss, **stated)
    assert audit.identified.targets == "shifted"
    assert audit.identified.coef == pytest.approx(LAMBDA, rel=1e-4)
    assert loud(audit) == set()


def test_a_capped_head_that_is_not_stated_is_open_and_says_what_to_pass() -> None:
    unstated = audit_loss(CAPPED["cap, sliced"][0])
    assert loud(unstated) == {"unexplained_source"}
    assert "softcap=" in (unstated.identified.reason or "")


@pytest.mark.parametrize("name", ["gemma_with_z", "granite_with_z"])
def test_heads_of_real_models_with_shifted_labels_leak_nothing(name: str) -> None:
    assert loud(audit_style(name)) == set()


# A loss that detaches and re-wraps, or clamps, ended in a traceback.


@pytest.mark.parametrize("loss", [
    lambda z, y: plain(z.detach().float().requires_grad_(), y),
    lambda z, y: plain(torch.tensor(z.tolist(), requires_grad=True), y),
    lambda z, y: plain(z.data.requires_grad_(), y),
    lambda z, y: plain(z, y).detach().requires_grad_(),
])  # fmt: skip
def test_a_loss_cut_off_from_its_inputs_is_refused_in_one_sentence(loss: Loss) -> None:
    with pytest.raises(LossCallError, match="without a gradient at its inputs") as caught:
        audit_loss(loss)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("change", [
    lambda z: z.clamp(-20, 20), lambda z: z.clamp(max=5), Tensor.relu
])  # fmt: skip
def test_clamped_logits_are_open_or_right(change: Callable[[Tensor], Tensor]) -> None:
    audit = audit_loss(lambda z, y: plain(change(z), y))
    assert audit.identified.has_z is not False
    assert audit.identified.coef is None or audit.identified.coef == pytest.approx(LAMBDA, rel=1e-2)
    assert loud(audit) <= {"unexplained_source", "forward_backward_mismatch"}


# What is logged next to the loss was judged, and which of several returned values is trained was guessed wrong.

TRAINED, LOGGED, DETACHED = torch.ones((), requires_grad=True), torch.zeros((), requires_grad=True), torch.tensor(3.0)
WHOLE = torch.ones(9, 9, requires_grad=True)


class Parts(NamedTuple):
    ce_loss: Tensor
    loss: Tensor


@pytest.mark.parametrize("returned", [
    TRAINED, (TRAINED, LOGGED), [TRAINED, DETACHED], (WHOLE, TRAINED), (DETACHED, TRAINED), (TRAINED, {"loss": DETACHED}),
    {"loss": LOGGED, "total_loss": TRAINED}, {"loss": DETACHED, "total_loss": TRAINED}, {"total_loss": DETACHED, "loss": TRAINED},
    {"loss": LOGGED, "aux": (LOGGED, {"total": DETACHED}), "total_loss": TRAINED}, {"nll": DETACHED, "total": TRAINED},
    {"objective": TRAINED, "loss": DETACHED}, SimpleNamespace(loss=TRAINED, logits=WHOLE), Parts(DETACHED, TRAINED),
    {"z_loss": DETACHED, "metrics": {"loss": DETACHED}, "loss": TRAINED},
])  # fmt: skip
def test_the_trained_value_is_the_total_and_never_a_detached_one(returned: Any) -> None:
    assert read(returned, 40)[0] is TRAINED


def router_terms(z: Tensor, y: Tensor) -> Any:
    routed = torch.linspace(-2, 3, 64).view(8, 8).requires_grad_()
    aux, router_z = routed.softmax(-1).mean(), routed.logsumexp(-1).square().mean()
    return plain(z, y) + 0.01 * aux + 1e-3 * router_z, {
        "aux_loss": aux,
        "router_z_loss": router_z,
        "z_loss": 1e-3 * router_z,
    }


NEXT_TO_THE_LOSS: dict[str, Loss] = {
    "sums": lambda z, y: (plain(z, y), zl(z, y).detach() * count_of(y), ce_sum(z, y).detach(), count_of(y)),
    "Z before accumulation": lambda z, y: {"loss": plain(z, y) / 8, "z_loss": zl(z, y).detach()},
    "Z in 16 bits": lambda z, y: (plain(wide(z), y), zl(z, y).detach().bfloat16()),
    "Z over all tokens": lambda z, y: {"loss": plain(z, y), "z_loss": LAMBDA * lse(z).square().mean().detach()},
    "NaN": lambda z, y: {"loss": plain(z, y), "z_loss": torch.full((), math.nan), "perplexity": ce(z, y).detach().exp()},
    "another Z": lambda z, y: {"total_loss": plain(z, y), "loss": ce(z, y), "z": 16 * zl(z, y)},
    "router": router_terms,
}  # fmt: skip


@pytest.mark.parametrize("name", NEXT_TO_THE_LOSS)
def test_what_is_logged_next_to_a_loss_is_not_judged(name: str) -> None:
    audit = audit_loss(NEXT_TO_THE_LOSS[name])
    assert audit.found == ()
    assert audit.identified.coef == pytest.approx(LAMBDA / (8 if "accumulation" in name else 1), rel=1e-5)


# A scaled CE next to a centered Z is label smoothing with another c, too: both are said.


@pytest.mark.parametrize(("scale", "c"), [(0.7, math.log(96)), (8.0, 2.0)])
def test_a_scaled_ce_next_to_a_centered_z_is_label_smoothing_as_well(scale: float, c: float) -> None:
    def loss(z: Tensor, y: Tensor) -> Tensor:
        return scale * ce(z, y) + 1e-2 * mean((lse(z) - z.mean(-1) - c) ** 2, y)

    got = audit_loss(loss, expect={"coef": 1e-2 / scale, "target": c, "coordinate": "centered"})
    assert loud(got) == set()
    assert got.identified.ce_scale == pytest.approx(scale)
    assert got.identified.target == pytest.approx(c, abs=1e-5)
    assert got.identified.extra["or_label_smoothing"] == pytest.approx(1 - scale, abs=1e-6)
    # ε(log Z − μ) is a shift of c.
    assert got.identified.extra["or_target"] == pytest.approx(c + (1 - scale) / 2e-2, rel=1e-4)


def test_label_smoothing_that_could_be_a_scale_is_not_another_one_than_expected() -> None:
    def loss(z: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(z, y, label_smoothing=0.1) + 1e-2 * mean((lse(z) - z.mean(-1) - 4.0) ** 2, y)

    audit = audit_loss(loss, expect={"target": 4.0, "label_smoothing": 0.1, "coordinate": "centered"})
    assert loud(audit) == set()


# λ is relative to the weight on CE.

SCALED: dict[str, Loss] = {
    "accumulation": lambda z, y: plain(z, y) / 8,
    "loss scaling": lambda z, y: 1024 * plain(z, y),
    "sums": total,
    "in bits": lambda z, y: plain(z, y) / math.log(2),
}


@pytest.mark.parametrize("name", SCALED)
def test_a_common_factor_is_not_another_coefficient(name: str) -> None:
    assert loud(audit_loss(SCALED[name], expect=BELIEVED)) == set()


@pytest.mark.parametrize("factor", [1 / 8, 3.5])
def test_a_factor_on_ce_alone_is_another_coefficient(factor: float) -> None:
    assert loud(audit_loss(lambda z, y: factor * ce(z, y) + zl(z, y), expect=BELIEVED)) & {
        "differs_from_expected", "counted_twice"
    }  # fmt: skip


# A constant in the value, and a batch without targets on a plain CE, are notes.


@pytest.mark.parametrize("constant", [-5.0, 1e3])
def test_a_constant_in_the_value_is_a_note(constant: float) -> None:
    audit = audit_loss(lambda z, y: plain(z, y) + constant)
    assert (loud(audit), notes(audit)) == (set(), {"constant_in_value"})


@pytest.mark.parametrize("loss", [
    F.cross_entropy, torch.nn.CrossEntropyLoss(), lambda z, y: F.nll_loss(z.log_softmax(-1), y),
    lambda z, y: F.cross_entropy(z, y) + LAMBDA * lse(z)[y != -100].square().mean(),
    lambda z, y: -z.log_softmax(-1)[y != -100].gather(1, y[y != -100, None]).mean(),
])  # fmt: skip
def test_a_plain_ce_on_a_batch_without_targets_is_a_note(loss: Loss) -> None:
    audit = audit_loss(loss)
    assert (loud(audit), notes(audit)) == (set(), {"all_ignored_nonfinite"})


# A tail of tokens that is never trained passed.


def tail(size: Callable[[int], int]) -> Loss:
    """The rows beyond a multiple of `size(T)` are left out."""

    def loss(z: Tensor, y: Tensor) -> Tensor:
        kept = len(y) // size(len(y)) * size(len(y)) or len(y)
        return total(z[:kept], y[:kept]) / count_of(y)

    return loss


@pytest.mark.usefixtures("all_sizes")
@pytest.mark.parametrize("size", [lambda n: 48, lambda n: 2048, lambda n: max(n // 48, 1)])
def test_a_tail_that_is_never_trained_is_seen_for_every_chunk(size: Callable[[int], int]) -> None:
    audit = audit_loss(tail(size))
    (one,) = (one for one in audit.errors if one.id == "size_dependent")
    assert "no gradient" in one.sentence


@pytest.mark.usefixtures("all_sizes")
@pytest.mark.parametrize("size", [48])
def test_chunks_with_a_remainder_that_is_trained_are_right(size: int) -> None:
    def loss(z: Tensor, y: Tensor) -> Any:
        return sum(total(a, b) for a, b in zip(z.split(size), y.split(size), strict=True)) / count_of(y)

    assert audit_loss(loss).found == ()


# [B, T, V] with B > 1 was never tried; branches by dtype were hidden from checks in fp64.


@pytest.mark.parametrize("name", ["megatron", "z_of_the_first_sequence"])
def test_a_loss_of_sequences_gets_more_than_one(name: str) -> None:
    shapes: list[torch.Size] = []
    case = STYLE[name]

    def loss(z: Tensor, y: Tensor) -> Any:
        assert z.dim() == 3, "sequences only"
        shapes.append(z.shape)
        return case.loss(z, y)

    audit = audit_loss(loss, **case.call)
    assert max(shape[0] for shape in shapes) > 1
    assert bool(audit.errors) == bool(case.defects), audit.found


def only_in(dtype: torch.dtype, there: Loss, elsewhere: Loss = plain) -> Loss:
    return lambda z, y: (there if z.dtype == dtype else elsewhere)(z, y)


def unmasked(z: Tensor, y: Tensor) -> Tensor:
    return ce(z, y) + LAMBDA * lse(z).square().mean()


class _Unscaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: Tensor) -> Tensor:
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> Tensor:
        return torch.ones_like(upstream)


@pytest.mark.parametrize(("there", "id"), [
    (ce, "zero_gradient_z"), (unmasked, "ignored_tokens_leak"), (F.cross_entropy, "all_ignored_nonfinite"),
    (lambda z, y: _Unscaled.apply(plain(z, y)), "upstream_ignored"),
])  # fmt: skip
def test_what_is_wrong_in_fp32_only_is_found(there: Loss, id: str) -> None:
    audit = audit_loss(only_in(torch.float32, there), expect=BELIEVED)
    assert id in {one.id for one in audit.found}


def test_what_only_fp64_trains_is_a_note_and_the_answer_is_that_of_fp32() -> None:
    audit = audit_loss(only_in(torch.float64, ce))
    assert audit.identified.coef == pytest.approx(LAMBDA, rel=1e-4)
    assert (loud(audit), notes(audit)) == (set(), {"depends_on_dtype"})


# Hinges, kinks and the sum of raw and centered Z were called size-dependent, or a gradient that is not the derivative.

KINKED: dict[str, Loss] = {
    "hinge": penalty(lambda v: F.relu(v - 12) ** 2),
    "dead zone": penalty(lambda v: F.relu((v - 5).abs() - 4) ** 2),
    "clipped": penalty(lambda v: v.clamp(max=20.0) ** 2),
    "centered hinge": adding(lambda z, y: LAMBDA * mean(F.relu(lse(z) - z.mean(-1) - 6) ** 2, y)),
    "raw and centered": adding(lambda z, y: mean(LAMBDA * lse(z) ** 2 + 3e-3 * (lse(z) - z.mean(-1) - 4.5) ** 2, y)),
    "raw and centered around log V": STYLE["raw_plus_centered"].loss,
}


@pytest.mark.usefixtures("all_sizes")
@pytest.mark.parametrize("name", KINKED)
def test_another_function_of_log_z_is_named_and_nothing_else_is_found(name: str) -> None:
    audit = audit_loss(KINKED[name])
    assert audit.identified.has_z
    assert audit.identified.curve or "raw and centered" in name
    assert loud(audit) == {"unexplained_source"}


# The ignore index of the loss is not the one that is given.


@pytest.mark.parametrize(("index", "given"), [(-1, -100), (-100, -1), (95, -100)])
def test_another_ignore_index_is_found(index: int, given: int) -> None:
    def loss(z: Tensor, y: Tensor) -> Tensor:
        valid = y != index
        rows = F.cross_entropy(z, y, ignore_index=index, reduction="none") + LAMBDA * lse(z) ** 2
        return rows[valid].sum() / valid.sum().clamp(min=1)

    audit = audit_loss(loss, ignore_index=given)
    assert audit.identified.coef == pytest.approx(LAMBDA, rel=1e-5)
    assert "other_ignore_index" in {one.id for one in audit.found}
    assert loud(audit) == set()


def test_targets_of_minus_100_that_are_trained_as_a_class_are_an_error() -> None:
    audit = audit_style("masks_minus_one_only")
    assert {"other_ignore_index", "ignored_tokens_leak"} & {one.id for one in audit.errors}
