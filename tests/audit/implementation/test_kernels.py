"""The kernel audit: correct implementations pass, wrong ones do not, and errors of storage and kernel are told apart."""

from __future__ import annotations

import dataclasses
import importlib.util
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from zloss.audit.implementation.implementations import (
    IMPLEMENTATIONS,
    Implementation,
    call,
    evaluate,
    find_implementation,
)
from zloss.audit.implementation.kernels import (
    KernelLine,
    gradient_difference,
    kernel_line,
    linear_inputs,
    sources_of,
    total_and_z,
)
from zloss.audit.implementation.source import fp64_head
from zloss.errors import CoordinateError, InputError, UnknownNameError
from zloss.models.output_head import OutputHead

V, D, T = 97, 12, 14
COEF = 1e-3
HEAD = OutputHead(torch.nn.Identity(), 1.5 * torch.randn(V, D, generator=torch.Generator().manual_seed(0)), None, False)
HIDDEN = torch.randn(T, D, generator=torch.Generator().manual_seed(1))
LABEL = torch.randint(V, (T,), generator=torch.Generator().manual_seed(2))
C = math.log(V)


LOGITS = fp64_head(HEAD).logits(HIDDEN.double())


def row(implementation: Implementation, storage: Any = "fp32", scale: float = 1, head: OutputHead = HEAD) -> KernelLine:
    options: dict[str, Any] = {"storage": storage, "logit_scale": scale, "coef": COEF, "target": C}
    return kernel_line(implementation, head, HIDDEN, LABEL, **options)


def test_the_truth_is_the_gradient_of_the_definition() -> None:
    z = 3 * torch.randn(T, V, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    leaf = z.clone().requires_grad_()
    penalty = COEF * ((torch.logsumexp(leaf, -1) - C) ** 2).sum()
    (F.cross_entropy(leaf, LABEL, reduction="sum") + penalty).backward()
    truth = sources_of(z, LABEL, COEF, C)
    torch.testing.assert_close(truth.total_CV, leaf.grad, rtol=1e-12, atol=1e-14)
    assert truth.value == pytest.approx(float(penalty.detach()), rel=1e-12)
    assert not torch.allclose(sources_of(z, LABEL, -COEF, C).total_CV, leaf.grad)


@pytest.mark.parametrize("name", ["dense", "chunked", "torch-ce", "log-softmax"])
def test_fp32_logits_give_fp32_sources(name: str) -> None:
    found = row(find_implementation(name))
    assert found.delta_total < 1e-6
    assert found.delta_z < 1e-6
    assert found.forward < 1e-6
    assert found.z_cosine == pytest.approx(1, abs=1e-9)


@pytest.mark.parametrize("storage", ["bf16", "fp16"])
def test_storage_is_told_from_the_kernel(storage: str) -> None:
    found = row(find_implementation("chunked"), storage, 4)
    # What the kernel itself loses is the rounding of the gradient it hands back; the storage lost far more.
    assert found.kernel_delta_z < {"bf16": 4e-3, "fp16": 5e-4}[storage]
    assert found.delta_z > 3 * found.kernel_delta_z


def wrong(name: str, loss: Any) -> Implementation:
    return Implementation(name, name, "logits", loss)


def test_wrong_losses_are_seen() -> None:
    def without_gradient(logits: Tensor, label: Tensor, coef: float, target: float) -> Tensor:
        z = coef * ((torch.logsumexp(logits, -1) - target) ** 2).sum()
        return F.cross_entropy(logits, label, reduction="sum") + z.detach()

    def max_shifted(logits: Tensor, label: Tensor, coef: float, target: float) -> Tensor:
        shifted = logits - logits.amax(-1, keepdim=True).detach()
        z = coef * ((torch.logsumexp(shifted, -1) - target) ** 2).sum()
        return F.cross_entropy(logits, label, reduction="sum") + z

    def twice(logits: Tensor, label: Tensor, coef: float, target: float) -> Tensor:
        return IMPLEMENTATIONS["torch-ce"].loss(logits, label, 2 * coef, target)

    silent = row(wrong("silent", without_gradient))
    assert silent.forward < 1e-6
    assert silent.delta_z == pytest.approx(1)
    assert row(wrong("shifted", max_shifted)).delta_z > 0.1
    assert row(wrong("twice", twice)).delta_z == pytest.approx(1, rel=1e-5)


def test_z_is_isolated_even_where_it_is_far_below_the_ce_gradient() -> None:
    z = LOGITS
    truth = sources_of(z, LABEL, 1e-9, C)
    total, z_alone = total_and_z(find_implementation("chunked"), (z.float(),), LABEL, 1e-9, C, truth.violation)
    relative = (z_alone.grads[0] - truth.z_CV).norm() / truth.z_CV.norm()
    assert float(relative) < 1e-6
    # The plain difference at λ itself would have drowned in the rounding of the CE part.
    off = evaluate(find_implementation("chunked"), (z.float(),), LABEL, [0.0], C)[0]
    drowned = (total.grads[0] - off.grads[0]).double()
    assert float((drowned - truth.z_CV).norm() / truth.z_CV.norm()) > 1e-2


def test_two_formulas_differ_by_the_rounding_of_the_storage_only() -> None:
    z = LOGITS
    one, other = find_implementation("torch-ce"), find_implementation("log-softmax")
    difference = {
        dtype: gradient_difference(one, other, z.to(dtype), LABEL, coef=COEF, target=C)
        for dtype in (torch.float32, torch.float16, torch.bfloat16)
    }
    assert difference[torch.float32] < 1e-6
    assert 1e-6 < difference[torch.float16] < 1e-3
    assert difference[torch.float16] < difference[torch.bfloat16] < 1e-2


@pytest.mark.parametrize("name", ["dense-linear", "chunked-linear"])
def test_our_projection_keeps_the_source_of_bf16_inputs(name: str) -> None:
    found = row(find_implementation(name), "bf16")
    assert found.delta_src.maximum < 1e-5
    naive = row(find_implementation("torch-projection"), "bf16")
    # The head gradient of both is rounded to bf16 at the end; the one that stores bf16 logits is worse before that.
    assert found.delta_z < 4e-3 < naive.delta_z
    assert naive.delta_src is None


@pytest.mark.parametrize("name", ["torch-projection", "chunked-linear", "torch-linear"])
def test_fp32_projections_are_right(name: str) -> None:
    if not find_implementation(name).installed:
        pytest.skip("this torch has no linear cross-entropy")
    found = row(find_implementation(name))
    assert found.delta_total < 1e-5
    assert found.delta_weight < 1e-5
    assert (found.delta_z is None) == (name == "torch-linear")


def test_a_bias_becomes_a_column_and_a_scale_goes_into_the_weight() -> None:
    bias = torch.randn(V, generator=torch.Generator().manual_seed(9))
    head = dataclasses.replace(HEAD, bias_V=bias, logit_scale=0.5)
    hidden, weight = linear_inputs(head, HIDDEN, torch.float32, 4.0)
    torch.testing.assert_close(hidden @ weight.T, 4 * head.logits(HIDDEN), rtol=1e-5, atol=1e-5)
    assert row(find_implementation("chunked-linear"), head=head).delta_z < 1e-5


def test_a_capped_head_is_refused_by_projecting_losses() -> None:
    with pytest.raises(CoordinateError, match="audit losses that take logits instead"):
        row(find_implementation("chunked-linear"), head=dataclasses.replace(HEAD, softcap=3.0))


def test_the_inputs_are_left_alone() -> None:
    def overwrites(logits: Tensor, label: Tensor, coef: float, target: float) -> Tensor:
        logits.data.zero_()
        return logits.sum()

    mine = torch.randn(T, V)
    before = mine.clone()
    call(overwrites, (mine,), LABEL, [0.0], C)
    assert torch.equal(mine, before)


def test_names() -> None:
    with pytest.raises(UnknownNameError, match="Did you mean 'chunked'"):
        find_implementation("chunkd")
    absent = dataclasses.replace(find_implementation("flash-attn"), package="no_such_package")
    assert not absent.installed
    with pytest.raises(InputError, match="no_such_package"):  # no extra of zloss installs flash-attn
        evaluate(absent, (torch.zeros(1, 2),), torch.zeros(1, dtype=torch.long), [0.0], 0.0)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize("name", ["triton", "liger"])
def test_kernels_run_interpreted_in_a_child(name: str) -> None:
    implementation = find_implementation(name)
    if not implementation.installed:
        pytest.skip(f"{implementation.package} is not installed")
    found = row(implementation)
    assert found.delta_total < 1e-6
    assert found.delta_z < 1e-6
    assert found.target == (0.0 if name == "liger" else C)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_a_failing_kernel_is_one_sentence_and_the_child_lives_on() -> None:
    implementation = find_implementation("triton")
    with pytest.raises(InputError, match=r"cannot run on Triton's interpreter: .*fp64"):
        evaluate(implementation, (torch.zeros(1, V, dtype=torch.float64),), LABEL[:1], [0.0], C)
    (outcome,) = evaluate(implementation, (torch.zeros(1, V),), LABEL[:1], [0.0], C)
    assert outcome.value == pytest.approx(C)
