"""The public losses with backend="triton": every objective and option against the fp64 definition."""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import zloss
from tests.forked import forked_ranks
from tests.laws.definitions import OBJECTIVES, Case, assert_close, make_case, measured, reference, relative_error
from tests.laws.present_statistics import FEW, broken
from zloss import errors
from zloss.head import triton as module

CAPPED = {name: objective for name, objective in OBJECTIVES.items() if not objective.needs_mu}
FP32 = 1e-6


@pytest.fixture(autouse=True)
def several_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STATISTICS_BLOCK", 32)


def fp32_case(objective: zloss.Objective, **options: object) -> Case:
    """A problem whose operands are exact in fp32, so that the definition sees what the kernels see."""
    case = make_case(objective, tokens=6, **options)  # type: ignore[arg-type]
    tensors = {name: getattr(case, name) for name in ("hidden", "weight", "bias", "token_weight")}
    exact = {name: tensor.float().double() for name, tensor in tensors.items() if tensor is not None}
    return dataclasses.replace(case, **exact)


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_head_loss_with_every_option(name: str, reduction: str) -> None:
    some = {"with_bias": True, "with_ignored": True}
    variants = [{}, {"with_weights": True, "label_smoothing": 0.1, **some}]
    variants += [{"valid_vocab": 41, "logit_scale": -1.75, **some}] if reduction == "mean" else []
    if name in CAPPED:
        variants += [{"softcap": 3.0, "logit_scale": 2.0, "label_smoothing": ls, **some} for ls in (0.0, 0.1)]
    for options in variants:
        case = fp32_case(OBJECTIVES[name], reduction=reduction, **options)
        got = measured(case, "triton", 4, torch.float32)
        assert_close(got, reference(case), FP32)
        assert not got["weight.grad"][options.get("valid_vocab", len(case.weight)) :].any()


def test_a_masked_logit_stays_masked_under_a_softcap() -> None:
    """A bias of -inf takes a class out of log Z; tanh would bring it back at −cap."""
    case = fp32_case(CAPPED["standard"], softcap=3.0, with_bias=True)
    assert case.bias is not None
    masked = next(v for v in range(len(case.bias)) if v not in case.target)
    losses = []
    for backend in ("triton", "dense"):
        bias = case.bias.float().clone()
        bias[masked] = -torch.inf
        losses.append(
            zloss.head_loss(
                case.hidden.float(), case.weight.float(), case.target, case.objective,
                bias=bias, softcap=3.0, backend=backend,
            )
        )  # fmt: skip
    torch.testing.assert_close(losses[0].loss, losses[1].loss, rtol=FP32, atol=0)
    torch.testing.assert_close(losses[0].stats.log_z, losses[1].stats.log_z, rtol=FP32, atol=0)


def source(case: Case, part: str) -> Tensor:
    tensors = {name: getattr(case, name).float() for name in ("hidden", "weight")}
    options = case.options() | {"bias": None if case.bias is None else case.bias.float()}
    return zloss.head_source(
        **tensors, target=case.target, objective=case.objective, part=part, backend="triton", chunk_size=4, **options
    )


@pytest.mark.parametrize("name", OBJECTIVES)
def test_total_and_z_source(name: str) -> None:
    """The total is ∂loss/∂z; the Z part alone is what the objective adds to it, from the same statistics."""
    case = fp32_case(OBJECTIVES[name], with_bias=True, with_ignored=True, label_smoothing=0.1)
    truth = reference(case)["source"]
    truth_z = truth - reference(dataclasses.replace(case, objective=zloss.CrossEntropy()))["source"]
    assert relative_error(source(case, "total"), truth) <= FP32
    assert relative_error(source(case, "z"), truth_z) <= FP32


@pytest.mark.parametrize("name", CAPPED)
def test_source_under_softcap_stands_at_the_capped_logits(name: str) -> None:
    case = fp32_case(CAPPED[name], softcap=3.0, with_ignored=True, label_smoothing=0.1)
    assert relative_error(source(case, "total"), reference(case)["source"]) <= FP32


def logits_pair(case: Case) -> tuple[Tensor, Tensor]:
    """fp32 logits as a leaf, and the same numbers as a leaf in fp64."""
    z = case.hidden @ case.weight.T
    logits = (z if case.bias is None else z + case.bias).float()
    return logits.requires_grad_(), logits.detach().double().requires_grad_()


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_logits_loss_with_every_option(name: str, reduction: str) -> None:
    options = [{}, {"label_smoothing": 0.1, "logit_scale": -1.75, "valid_vocab": 41}]
    if name in CAPPED:
        options += [{"softcap": 3.0, "logit_scale": 2.0}, {"softcap": 3.0, "label_smoothing": 0.1}]
    for extra in options:
        case = fp32_case(OBJECTIVES[name], with_bias=True, with_ignored=True, valid_vocab=41)
        leaf, twin = logits_pair(case)
        shared = {"reduction": reduction, **extra}
        got = zloss.logits_loss(
            leaf, case.target, case.objective, weight=case.weight.float(), backend="triton", **shared
        )
        want = zloss.logits_loss(twin, case.target, case.objective, weight=case.weight, backend="dense", **shared)
        upstream = torch.rand_like(got.loss)
        got.loss.backward(upstream)
        want.loss.backward(upstream.double())
        for part in ("loss", "cross_entropy", "auxiliary"):
            assert relative_error(getattr(got, part), getattr(want, part)) <= FP32, part
        assert relative_error(leaf.grad, twin.grad) <= FP32
        for statistic in ("log_z", "mu", "p_norm", "gain", "gain_centered", "target_logit"):
            mine, truth = getattr(got.stats, statistic), getattr(want.stats, statistic)
            assert (mine is None) == (truth is None), statistic
            if truth is not None:
                assert relative_error(mine, truth) <= FP32, statistic


def test_the_planned_statistics() -> None:
    """For losses from hidden states and from logits."""
    assert not broken("triton", tokens=4, dtype=torch.float32, tolerance=2e-5, objectives=FEW)


@pytest.mark.parametrize("coef", [None, 0.0])
def test_off_is_off(coef: float | None) -> None:
    case = fp32_case(zloss.CrossEntropy())
    grads = []
    for objective in (zloss.CrossEntropy(), zloss.StandardZLoss(coef)):
        leaf = logits_pair(case)[0]
        out = zloss.logits_loss(leaf, case.target, objective, backend="triton")
        out.loss.backward()
        assert not out.auxiliary
        grads.append(leaf.grad)
    assert torch.equal(*grads)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_coefficient_changed_after_the_forward_changes_no_gradient(reduction: str) -> None:
    hidden, weight = (torch.randn(rows, 4).requires_grad_() for rows in (5, 9))
    logits, target = (hidden @ weight.T).detach().requires_grad_(), torch.randint(9, (5,))
    options = {"reduction": reduction, "backend": "triton"}
    for loss, leaves in ((zloss.head_loss, (hidden, weight)), (zloss.logits_loss, (logits,))):
        want = torch.autograd.grad(loss(*leaves, target, zloss.StandardZLoss(5.0), **options).loss.sum(), leaves)
        coef = torch.tensor(5.0)
        total = loss(*leaves, target, zloss.StandardZLoss(coef), **options).loss.sum()
        coef.fill_(0.0)
        for _ in range(2):
            got = torch.autograd.grad(total, leaves, retain_graph=True)
            assert max(relative_error(one, other) for one, other in zip(got, want, strict=True)) < 1e-6


def test_nothing_to_count() -> None:
    case = fp32_case(zloss.StandardZLoss(0.7))
    ignored = torch.full_like(case.target, -100)
    leaf = logits_pair(case)[0]
    out = zloss.logits_loss(leaf, ignored, case.objective, backend="triton")
    out.loss.backward()
    assert out.loss == 0
    assert not leaf.grad.any()
    hidden = case.hidden.float().requires_grad_()
    out = zloss.head_loss(hidden, case.weight.float(), ignored, case.objective, backend="triton")
    out.loss.backward()
    assert out.loss == 0
    assert not hidden.grad.any()
    empty = zloss.logits_loss(torch.empty(0, 7), torch.empty(0, dtype=torch.long), case.objective, backend="triton")
    assert empty.loss == 0


def test_ignored_rows_may_hold_anything_and_the_callers_logits_are_left_alone() -> None:
    case = fp32_case(zloss.StandardZLoss(0.7), with_ignored=True)
    assert case.target[0] == -100
    grads = []
    for poison in (0.0, torch.nan, -torch.inf):
        leaf = logits_pair(case)[0].detach().clone()
        leaf[0] = poison
        before = leaf.clone()
        leaf.requires_grad_()
        zloss.logits_loss(leaf, case.target, case.objective, backend="triton").loss.backward()
        torch.testing.assert_close(leaf.detach(), before, rtol=0, atol=0, equal_nan=True)
        grads.append(leaf.grad)
    assert torch.equal(grads[0], grads[1])
    assert torch.equal(grads[0], grads[2])


@pytest.mark.parametrize("products", ["fp32", "operand"])
@pytest.mark.parametrize("every", [True, False], ids=["all ignored", "one ignored"])
def test_an_ignored_token_without_a_distribution_adds_no_nan(products: str, every: bool) -> None:
    """Logits that overflow to inf, and a bias of -inf everywhere."""
    g = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(4, 6, generator=g), torch.randn(40, 6, generator=g) * 2.0**10
    target = torch.tensor([-100, 3, 5, -100] if not every else [-100] * 4)
    for poison, bias in ((1e36, torch.zeros(40)), (0.0, torch.full((40,), -torch.inf))):
        if bias.isinf().any() and not every:
            continue
        leaves = [hidden.bfloat16().requires_grad_(), weight.bfloat16().requires_grad_(), bias.requires_grad_()]
        with torch.no_grad():
            leaves[0][0] = poison
        out = zloss.head_loss(
            leaves[0], leaves[1], target, zloss.StandardZLoss(0.5), bias=leaves[2],
            backend="triton", products=products, statistics="light",
        )  # fmt: skip
        for grad in torch.autograd.grad(out.loss, leaves):
            assert not grad.isnan().any()
            assert not every or not grad.any()


def test_what_is_refused() -> None:
    case = fp32_case(zloss.StandardZLoss(0.7))
    leaf = logits_pair(case)[0]
    with pytest.raises(errors.DtypeError, match="fp64"):
        zloss.logits_loss(leaf.double(), case.target, case.objective, backend="triton")
    with pytest.raises(errors.DoubleBackwardError, match="dense"):
        torch.autograd.grad(
            zloss.logits_loss(leaf, case.target, case.objective, backend="triton").loss, leaf, create_graph=True
        )
    hidden = case.hidden.float().requires_grad_()
    out = zloss.head_loss(hidden, case.weight.float(), case.target, case.objective, backend="triton")
    with pytest.raises(errors.DoubleBackwardError, match="dense"):
        torch.autograd.grad(out.loss, hidden, create_graph=True)
    masked = torch.randn(2, 7)
    masked[1] = -torch.inf
    with pytest.raises(errors.CoordinateError, match="only -inf"):
        zloss.logits_loss(masked, torch.tensor([1, 2]), case.objective, backend="triton")
    masked = torch.randn(2, 7)
    masked[1, 3] = -torch.inf
    with pytest.raises(errors.CoordinateError, match="mean logit"):
        zloss.logits_loss(masked, torch.tensor([1, 2]), zloss.CenteredZLoss(0.7), backend="triton")


def test_automatic_choice_on_the_cpu_is_chunked() -> None:
    """The interpreter is for tests, so it runs only when the backend is requested by name."""
    case = fp32_case(zloss.StandardZLoss(0.7))
    tensors = case.hidden.float(), case.weight.float(), case.target, case.objective
    automatic, chunked = (zloss.head_loss(*tensors, backend=backend).loss for backend in ("auto", "chunked"))
    assert torch.equal(automatic, chunked)


def test_a_rank_without_rows_sends_as_many_numbers_as_the_others() -> None:
    """The kernels always have the sum for the entropy, and a rank that holds only padding has it only on request."""

    def on_rank() -> None:
        dist.init_process_group("gloo")
        case = fp32_case(OBJECTIVES["standard"], with_ignored=True)
        hidden, weight = case.hidden.float(), torch.cat([case.weight, case.weight]).float()
        own, vocab = weight.chunk(2)[dist.get_rank()], len(case.weight)
        for statistics in ("light", "full"):
            options = {"valid_vocab": vocab, "statistics": statistics, "backend": "triton"}
            whole = zloss.head_loss(hidden, weight, case.target, case.objective, **options)
            found = zloss.head_loss(hidden, own, case.target, case.objective, group=dist.group.WORLD, **options)
            assert relative_error(found.loss, whole.loss) < FP32

    forked_ranks(2, on_rank)


if importlib.util.find_spec("liger_kernel") is not None:

    @pytest.mark.parametrize("reduction", ["mean", "sum"])
    def test_the_setting_of_liger_that_explain_names_is_the_same_loss(reduction: str) -> None:
        """Its kernel, interpreted on the CPU; with ignored tokens."""
        from liger_kernel.transformers.functional import liger_cross_entropy

        objective = zloss.StandardZLoss(0.02, target=0.0)
        setting = zloss.explain(objective, vocab=40)["Liger"].setting
        assert setting is not None
        name, value = setting.split("=")
        torch.manual_seed(0)
        logits, target = 3 * torch.randn(6, 40), torch.tensor([3, -100, 5, 0, -100, 39])
        ours = zloss.logits_loss(logits, target, objective, reduction=reduction, backend="dense")
        theirs = liger_cross_entropy(
            logits.clone(), target, reduction=reduction, return_z_loss=True, **{name: float(value)}
        )
        torch.testing.assert_close(theirs.loss, ours.loss, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(theirs.z_loss, ours.auxiliary, rtol=1e-5, atol=1e-6)


MUTATIONS = {
    "uniform part dropped": ("weighted.g)", "0 * weighted.g)"),
    "target dropped": ("weighted.b, weighted.g", "0 * weighted.b, weighted.g"),
    "normalizer dropped": ("valid_T, sum_T)", "valid_T, torch.ones_like(sum_T))"),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_the_check_fails_on_a_mutation(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One coefficient of the loss zeroed or left unnormalized: the gradient is no longer the definition's."""
    text = inspect.getsource(module._logits_loss)
    old, new = MUTATIONS[name]
    assert old in text
    names = dict(vars(module))
    exec(compile(text.replace(old, new), module.__file__, "exec"), names)
    case = fp32_case(zloss.CenteredZLoss(0.7))
    leaf, twin = logits_pair(case)
    zloss.logits_loss(twin, case.target, case.objective, backend="dense").loss.backward()
    monkeypatch.setattr(module, "_logits_loss", names["_logits_loss"])
    zloss.logits_loss(leaf, case.target, case.objective, backend="triton").loss.backward()
    assert relative_error(leaf.grad, twin.grad) > 1e-3
