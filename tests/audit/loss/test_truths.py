"""What is written of the losses of the corpora holds in plain autograd; the audit is not called."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from operator import attrgetter

import pytest
import torch
from torch import Tensor

from tests.audit.loss.corpus import Case, batch, gradient, reference
from tests.audit.loss.further import FURTHER, gradient_error
from tests.audit.loss.generated import GENERATED
from tests.audit.loss.sixteen_bits import SIXTEEN_BITS, Kernel, head_batch
from tests.audit.loss.styles import STYLES
from tests.audit.loss.unseen import UNSEEN

ROUNDING = 1e-6  # of an fp32 gradient
MISTAKE = 4e-4
NAMED = {case.name: case for case in STYLES}


def relative(measured: Tensor, stated: Tensor) -> float:
    return float((measured - stated).norm() / stated.norm())


def distance(case: Case, *, meant: bool = False) -> float:
    """Between the gradient of the loss and that of what it trains, or was meant to."""
    inputs = batch(case)
    wide = [x.double() if x.is_floating_point() else x for x in inputs]
    return relative(gradient(case.loss, *inputs), gradient(reference(case, case.meant if meant else None), *wide))


def test_thirty_styles_are_right_and_thirty_have_a_mistake():
    assert Counter(bool(case.defects) for case in STYLES) == {False: 30, True: 30}
    assert len(NAMED) == 60


@pytest.mark.parametrize("case", [case for case in STYLES + SIXTEEN_BITS if case.truth], ids=attrgetter("name"))
def test_a_loss_trains_what_its_truth_says_in_fp32(case):
    assert distance(case) < (2**-7 if case.name == "autocast_head" else ROUNDING)


@pytest.mark.parametrize("case", [case for case in STYLES if case.meant], ids=attrgetter("name"))
def test_a_mistake_trains_something_else_than_was_meant(case):
    assert distance(case, meant=True) > MISTAKE


def test_mistakes_that_no_single_gradient_shows():
    logits, target = batch(NAMED["in_place_softmax"])
    given = logits.clone()
    NAMED["in_place_softmax"].loss(given, target)
    assert not torch.equal(given, logits)

    unscaled = NAMED["gradient_not_scaled"]
    once, thrice = (gradient(unscaled.loss, *batch(unscaled), upstream=upstream) for upstream in (1.0, 3.0))
    assert torch.equal(once, thrice)

    off = gradient(NAMED["zero_switches_the_default_on"].call["off"], logits, target)
    assert relative(off, gradient(NAMED["in_place_softmax"].loss, logits, target)) > MISTAKE

    assert not gradient(NAMED["exponentials_of_raw_logits"].loss, logits + 100, target).isfinite().all()

    by_calls = NAMED["schedule_by_calls"].loss
    assert not torch.equal(gradient(by_calls, logits, target), gradient(by_calls, logits, target))


def test_a_draw_trains_what_its_truth_says():
    """One in 32 that is not compiled (seeds are compiled every twenty), and two that are."""
    assert len(GENERATED) == 400
    assert max(map(distance, [*GENERATED[1::32], *GENERATED[:40:20]])) < ROUNDING


def rms(x: Tensor) -> float:
    return float(x.double().square().mean().sqrt())


def row_sums(kernel: Kernel, hidden: Tensor, weight: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Σ_v of the source of each valid token, and its log Z in fp64."""
    keep = target != -100
    log_z = (hidden[keep].double() @ weight.double().T).logsumexp(-1)
    return kernel.source(hidden[keep], weight, target[keep]).double().sum(-1), log_z


@pytest.mark.parametrize(
    ("peak", "phantom", "real"), [(20, 1.0e-2, 3.1e-3), (40, 2.6e-2, 5.2e-3), (80, 6.6e-2, 1.05e-2)]
)
def test_an_inconsistent_softmax_has_the_row_sums_that_were_measured(peak, phantom, real):
    sums, log_z = row_sums(Kernel(round_logits=True), *head_batch(peak, torch.bfloat16))
    assert rms(sums) == pytest.approx(phantom, rel=0.2)
    assert 2e-4 * rms(log_z) == pytest.approx(real, rel=0.2)


@pytest.mark.parametrize("sort_vocab", [False, True])
def test_a_filter_on_a_fresh_head_has_the_row_sums_that_were_measured(sort_vocab):
    hidden, weight, target = head_batch(0.5, torch.bfloat16, tokens=150, vocab=49152)
    kernel = Kernel(filter_block=(128, 128), sort_vocab=sort_vocab)
    assert rms(row_sums(kernel, hidden, weight, target)[0]) == pytest.approx(0.72, rel=0.1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("peak", [20, 80])
@pytest.mark.parametrize("case", SIXTEEN_BITS, ids=attrgetter("name"))
def test_only_copies_of_mistakes_have_other_row_sums(case, peak, dtype):
    inputs = head_batch(peak, dtype)
    sums, log_z = row_sums(case.loss, *inputs)
    excess = rms(sums - 2 * case.loss.coef * log_z)
    shows = "log Z" in case.name or (peak == 80 and "confident" in case.name)
    assert excess > 1e-3 if shows else excess < 5e-4

    if not case.defects | case.also:
        wide = [x.double() for x in inputs[:-1]]
        error = relative(gradient(case.loss, *inputs), gradient(reference(case), *wide, inputs[-1]))
        assert error < torch.finfo(dtype).eps / 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_error_of_dw_grows_with_the_chunks_that_are_summed_in_16_bits(dtype):
    hidden, weight, target = head_batch(20, dtype)
    exact = gradient(reference(SIXTEEN_BITS[0]), hidden.double(), weight.double(), target)
    few, many = (
        relative(gradient(Kernel(chunk=chunk, accumulate_in_fp32=False), hidden, weight, target), exact)
        for chunk in (128, 8)
    )
    assert many > 1.5 * few > 1.5 * relative(gradient(Kernel(chunk=8), hidden, weight, target), exact)


# The further and the unseen losses.

NUMBERS = {name: case for name, case in {**FURTHER, **UNSEEN}.items() if gradient_error(case) is not None}


@pytest.mark.parametrize("name", NUMBERS)
def test_the_gradient_is_that_of_the_declared_numbers(name):
    error, tolerance = gradient_error(NUMBERS[name]), NUMBERS[name].tolerance
    assert error < (tolerance if tolerance > 1e-5 else 1e-9)


@pytest.mark.parametrize("name", ["Megatron layout", "HF loss with num_items", "KL to uniform", "Z and max-z"])
def test_a_wrong_truth_fails(name):
    case = UNSEEN[name]
    other = replace(case, coef=1.01 * case.coef)
    if (formula := case.formula) is not None:
        other = replace(case, formula=lambda z, y: formula(z, y) + 1e-6 * z.logsumexp(-1).square().mean())
    assert gradient_error(other) > 1e-9
