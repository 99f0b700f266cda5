"""Edges of the head loss: off is off, empty is zero, bad input is help, and autograd's other machinery."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import zloss
from tests.laws.definitions import make_case, reference, relative_error
from zloss import errors

BACKENDS = ("dense", "chunked")
ACTIVE = (
    zloss.StandardZLoss(0.5),
    zloss.CenteredZLoss(0.5),
    zloss.FactorizedZLoss(0.5, 0.5),
    zloss.GainAwareZLoss(0.5),
)
ALL = (zloss.CrossEntropy(), zloss.CenteredHead(), *ACTIVE)


def problem(tokens: int = 20, width: int = 6, vocab: int = 17, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, width, generator=g).requires_grad_()
    weight = torch.randn(vocab, width, generator=g).requires_grad_()
    return hidden, weight, torch.randint(vocab, (tokens,), generator=g)


def gradients(
    hidden: Tensor, weight: Tensor, target: Tensor, objective: zloss.Objective, **options: object
) -> tuple[Tensor, ...]:
    out = zloss.head_loss(hidden, weight, target, objective, **options)  # type: ignore[arg-type]
    return out.loss.detach(), *torch.autograd.grad(out.loss.sum(), (hidden, weight))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("off", [0, 0.0, None])
def test_a_coefficient_of_zero_or_none_is_off_bit_for_bit(backend: str, off: float | None) -> None:
    hidden, weight, target = problem()
    plain = gradients(hidden, weight, target, zloss.CrossEntropy(), backend=backend)
    for objective in (
        zloss.CenteredHead(),
        zloss.StandardZLoss(off),
        zloss.CenteredZLoss(off),
        zloss.FactorizedZLoss(off, off),
        zloss.GainAwareZLoss(off),
    ):
        for got, want in zip(gradients(hidden, weight, target, objective, backend=backend), plain, strict=True):
            assert torch.equal(got, want)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("objective", ALL, ids=lambda o: o.name)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("count", ["no token", "all ignored", "normalizer 0"])
def test_a_batch_that_counts_nothing_is_zero(
    backend: str, objective: zloss.Objective, reduction: str, count: str
) -> None:
    hidden, weight, target = problem(0 if count == "no token" else 5)
    normalizer = 0 if count == "normalizer 0" and reduction == "mean" else None
    if normalizer is None:
        target.fill_(-100)
    options = {"backend": backend, "reduction": reduction, "normalizer": normalizer}
    loss, *grads = gradients(hidden, weight, target, objective, **options)
    assert not loss.any()
    assert all(not grad.any() and grad.shape == like.shape for grad, like in zip(grads, (hidden, weight), strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("objective", ALL, ids=lambda o: o.name)
def test_huge_logits_and_a_huge_common_shift_stay_right(backend: str, objective: zloss.Objective) -> None:
    for scale, shift in ((3e3, 0.0), (1.0, 1e4), (1.0, -1e4)):
        case = make_case(objective, tokens=9, with_bias=True)
        case.weight.mul_(scale)
        case.bias.add_(shift)
        truth = reference(case)
        hidden, weight, bias = (x.clone().requires_grad_() for x in (case.hidden, case.weight, case.bias))
        out = zloss.head_loss(hidden, weight, case.target, objective, bias=bias, backend=backend)
        assert relative_error(out.loss.detach(), truth["loss"]) < 1e-10
        assert relative_error(out.cross_entropy, truth["cross_entropy"]) < 1e-10
        narrow = zloss.head_loss(
            hidden.float(), weight.float(), case.target, objective, bias=bias.float(), backend=backend
        )
        assert torch.isfinite(narrow.loss)
        assert relative_error(narrow.loss.detach(), truth["loss"]) < 2e-3


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_vocabulary_of_one_has_no_loss_and_only_z(backend: str) -> None:
    hidden, weight, target = problem(vocab=1)
    loss, grad_hidden, _ = gradients(hidden, weight, target, zloss.CrossEntropy(), backend=backend)
    assert loss == 0
    assert grad_hidden.abs().max() < torch.finfo(torch.float32).eps  # Wᵀp − W[y] rounds where p − y would be exact
    out = zloss.head_loss(hidden, weight, target, zloss.StandardZLoss(1.0), backend=backend)
    want = ((hidden @ weight.T).squeeze(1) ** 2).mean()
    assert torch.allclose(out.loss, want)


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_of_nan_are_a_nan_loss_and_not_a_masking_mistake(backend: str) -> None:
    """Weights of a diverged run give logits that are all NaN; a training loop counts the loss and continues."""
    hidden, weight, target = problem()
    for broken in (torch.nan, torch.inf):
        out = zloss.head_loss(
            hidden.detach(), torch.full_like(weight, broken), target, zloss.StandardZLoss(0.5), backend=backend
        )
        assert out.loss.isnan()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_masked_vocabulary_entries_of_minus_infinity(backend: str, softcap: float | None) -> None:
    """Under a softcap too: tanh(-inf) is the finite −cap, and a masked row once came back into log Z."""
    hidden, weight, target = problem()
    target.clamp_(max=9)
    bias = torch.zeros(17)
    bias[10:] = -torch.inf
    bias.requires_grad_()
    for objective in (
        zloss.CrossEntropy(),
        zloss.StandardZLoss(0.5, target=1.0),
        zloss.GainAwareZLoss(0.5, target=1.0),
    ):
        out = zloss.head_loss(hidden, weight, target, objective, bias=bias, softcap=softcap, backend=backend)
        assert out.stats.mu is None
        assert out.stats.gain_centered is None
        masked = torch.autograd.grad(out.loss, (hidden, weight, bias))
        cut = zloss.head_loss(hidden, weight[:10], target, objective, softcap=softcap, backend=backend)
        for got, want in ((out.loss, cut.loss), (out.stats.log_z, cut.stats.log_z), (out.stats.gain, cut.stats.gain)):
            assert relative_error(got, want) < 1e-6
        assert relative_error(masked[0], torch.autograd.grad(cut.loss, hidden)[0]) < 1e-6
        assert all(torch.isfinite(grad).all() for grad in masked)
    for objective in (zloss.CenteredZLoss(0.5), zloss.FactorizedZLoss(0.5, 0.5)):
        with pytest.raises(errors.CoordinateError, match="valid_vocab"):
            zloss.head_loss(hidden, weight, target, objective, bias=bias, backend=backend)
        assert torch.isfinite(
            zloss.head_loss(hidden, weight, target, objective, bias=bias, valid_vocab=10, backend=backend).loss
        )
    with pytest.raises(errors.CoordinateError, match="label_smoothing"):
        zloss.head_loss(hidden, weight, target, zloss.CrossEntropy(), bias=bias, label_smoothing=0.1, backend=backend)
    with pytest.raises(errors.CoordinateError, match="only -inf"):
        zloss.head_loss(
            hidden, weight, target, zloss.CrossEntropy(), bias=torch.full((17,), -torch.inf), backend=backend
        )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_nonfinite_tokens_are_located_and_reach_the_loss_unless_they_are_ignored(backend: str, poison: float) -> None:
    hidden, weight, target = problem()
    broken = hidden.detach().clone()
    broken[4, 0] = poison
    out = zloss.head_loss(broken, weight, target, zloss.CenteredZLoss(0.5), backend=backend)
    assert not torch.isfinite(out.loss)
    assert out.stats.nonfinite.nonzero().flatten().tolist() == [4]
    target[4] = -100
    clean = gradients(hidden, weight, target, zloss.CenteredZLoss(0.5), backend=backend)
    with torch.no_grad():
        hidden[4] = poison
    for got, want in zip(
        gradients(hidden, weight, target, zloss.CenteredZLoss(0.5), backend=backend), clean, strict=True
    ):
        assert torch.equal(got, want)
    out = zloss.head_loss(hidden, weight, target, zloss.CenteredZLoss(0.5), backend=backend)
    assert bool(out.stats.nonfinite[4])
    assert not out.stats.valid[4]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("every", [True, False], ids=["all ignored", "one ignored"])
@pytest.mark.parametrize("softcap", [None, 30.0])
def test_an_ignored_token_whose_logits_overflow_adds_no_nan(backend: str, every: bool, softcap: float | None) -> None:
    hidden, weight, target = problem()
    with torch.no_grad():
        weight.mul_(2.0**20)
    target[:] = torch.where(torch.arange(20) == 4, -100, -100 if every else target)
    options = {"backend": backend, "softcap": softcap}
    with torch.no_grad():
        hidden[4] = 0
    clean = gradients(hidden, weight, target, zloss.StandardZLoss(0.5), **options)
    with torch.no_grad():
        hidden[4] = torch.tensor([1e36, -1e36, 1e36, -1e36, 1e36, -1e36])  # finite, but W u is not
    for got, want in zip(gradients(hidden, weight, target, zloss.StandardZLoss(0.5), **options), clean, strict=True):
        assert torch.equal(got, want)


def test_another_default_device_changes_nothing() -> None:
    """Nor the predicted token, which is searched in blocks if the vocabulary is large."""
    hidden, weight, target = problem(vocab=5000)
    want = zloss.head_loss(hidden, weight, target, zloss.CenteredZLoss(0.5), statistics="audit")
    with torch.device("meta"):
        got = zloss.head_loss(hidden, weight, target, zloss.CenteredZLoss(0.5), statistics="audit")
    assert torch.equal(got.loss, want.loss)
    assert torch.equal(got.stats.predicted, (hidden @ weight.T).argmax(dim=1))


def test_tokens_without_a_distribution_are_counted_over_all_chunks() -> None:
    with pytest.raises(errors.CoordinateError, match="only -inf logits"):
        zloss.head_source(
            torch.randn(3, 4), torch.randn(5, 4), torch.arange(3), ALL[2], bias=torch.full((5,), -torch.inf)
        )
    logits = torch.randn(10, 5)
    logits[7:9] = -torch.inf
    for backend in BACKENDS:
        with pytest.raises(errors.CoordinateError, match=r"2 tokens \(the first is 7\) have only -inf logits"):
            zloss.logits_loss(logits, torch.zeros(10).long(), zloss.CrossEntropy(), backend=backend, chunk_size=3)


def test_low_precision_inputs_keep_the_source() -> None:
    """bf16 and fp16 operands, fp32 everything else: the source stays within 1e-4 of the fp64 source of the same operands."""
    g = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(96, 64, generator=g), 2 * torch.randn(1500, 64, generator=g)
    target = torch.randint(1500, (96,), generator=g)
    for dtype in (torch.bfloat16, torch.float16):
        low = (hidden.to(dtype), weight.to(dtype))
        for objective in (zloss.StandardZLoss(1e-4, target=0.0), zloss.CenteredZLoss(1e-4), zloss.GainAwareZLoss(1e-4)):
            for part in ("z", "total"):
                got = zloss.head_source(*low, target, objective, part=part, backend="chunked")
                truth = zloss.head_source(*(x.double() for x in low), target, objective, part=part, backend="dense")
                assert got.dtype == torch.float32
                assert relative_error(got, truth) < 2e-6
        stored = (low[0] @ low[1].T).double()  # what a peer that stores its logits in this dtype injects
        rounded = zloss.z_loss_source(stored, 1e-4, 0.0)
        exact = zloss.z_loss_source(low[0].double() @ low[1].double().T, 1e-4, 0.0)
        assert relative_error(rounded, exact) > 500 * 2e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backend", BACKENDS)
def test_low_precision_gradients_are_rounded_once(dtype: torch.dtype, backend: str) -> None:
    case = make_case(zloss.CenteredZLoss(0.5), tokens=40, with_bias=True)
    hidden, weight, bias = (x.to(dtype).requires_grad_() for x in (case.hidden, case.weight, case.bias))
    for reduction in ("mean", "none"):
        out = zloss.head_loss(
            hidden, weight, case.target, case.objective, bias=bias, reduction=reduction, backend=backend
        )
        assert (
            out.loss.dtype == out.cross_entropy.dtype == out.auxiliary.dtype == out.stats.log_z.dtype == torch.float32
        )
        grads = torch.autograd.grad(out.loss.mean(), (hidden, weight, bias))
        wanted = torch.autograd.grad(
            zloss.head_loss(
                hidden.double(), weight.double(), case.target, case.objective, bias=bias.double(), backend="dense"
            ).loss,
            (hidden, weight, bias),
        )
        for got, want in zip(grads, wanted, strict=True):
            assert got.dtype == dtype
            assert relative_error(got, want) < 2 * torch.finfo(dtype).eps


def test_fp16_gradients_survive_until_the_loss_scale() -> None:
    """Gradients below fp16's smallest number must not be flushed before a loss scaler multiplies them."""
    hidden, weight, target = problem()
    half = weight.detach().half().requires_grad_()
    out = zloss.head_loss(hidden, half, target, zloss.CrossEntropy(), normalizer=1e9)
    (grad,) = torch.autograd.grad(out.loss * 2.0**20, half)
    want = torch.autograd.grad(
        zloss.head_loss(hidden, half, target, zloss.CrossEntropy(), normalizer=1e9 / 2**20).loss, half
    )[0]
    assert want.count_nonzero() > 90
    assert relative_error(grad, want) < 1e-3


@pytest.mark.parametrize("backend", BACKENDS)
def test_autocast_rounds_operands_as_linear_would_and_nothing_else(backend: str) -> None:
    hidden, weight, target = problem(64, 32, 101)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = zloss.head_loss(hidden, weight, target, zloss.CenteredZLoss(0.5), backend=backend)
    grads = torch.autograd.grad(out.loss, (hidden, weight))
    rounded = [x.detach().bfloat16().double().requires_grad_() for x in (hidden, weight)]
    truth = zloss.head_loss(*rounded, target, zloss.CenteredZLoss(0.5), backend="dense")
    assert relative_error(out.loss.detach(), truth.loss.detach()) < 1e-6
    for got, want in zip(grads, torch.autograd.grad(truth.loss, rounded), strict=True):
        assert got.dtype == torch.float32
        assert relative_error(got, want) < 2e-6


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_grad_gives_the_same_numbers_and_no_graph(backend: str) -> None:
    hidden, weight, target = problem()
    with torch.no_grad():
        quiet = zloss.head_loss(hidden, weight, target, zloss.CenteredZLoss(0.5), backend=backend)
    loud = zloss.head_loss(hidden, weight, target, zloss.CenteredZLoss(0.5), backend=backend)
    assert not quiet.loss.requires_grad
    assert loud.loss.requires_grad
    assert torch.equal(quiet.loss, loud.loss.detach())
    for part in (loud.cross_entropy, loud.auxiliary, loud.stats.log_z, loud.stats.gain, loud.stats.mu):
        assert part is not None
        assert not part.requires_grad
    assert torch.allclose(loud.loss.detach(), loud.cross_entropy + loud.auxiliary)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_only_the_requested_gradients_are_computed(reduction: str) -> None:
    hidden, weight, target = problem()
    frozen = zloss.head_loss(hidden, weight.detach(), target, zloss.CenteredZLoss(0.5), reduction=reduction)
    both = zloss.head_loss(hidden, weight, target, zloss.CenteredZLoss(0.5), reduction=reduction)
    assert torch.equal(
        torch.autograd.grad(frozen.loss.sum(), hidden)[0], torch.autograd.grad(both.loss.sum(), hidden)[0]
    )
    head_only = zloss.head_loss(hidden.detach(), weight, target, zloss.CenteredZLoss(0.5), reduction=reduction)
    head_only.loss.sum().backward()
    assert weight.grad is not None


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_activation_checkpointing(reduction: str) -> None:
    hidden, weight, target = problem()

    def block(h: Tensor) -> Tensor:
        return zloss.head_loss(torch.tanh(h), weight, target, zloss.CenteredZLoss(0.5), reduction=reduction).loss.sum()

    plain = torch.autograd.grad(block(hidden), (hidden, weight))
    kept = torch.autograd.grad(checkpoint(block, hidden, use_reentrant=False), (hidden, weight))
    assert all(torch.equal(a, b) for a, b in zip(plain, kept, strict=True))


COMPILED = {
    "plain": {},
    "every option": {"label_smoothing": 0.1, "softcap": 4.0, "logit_scale": 1.5, "valid_vocab": 15, "chunk_size": 7},
    "sum": {"reduction": "sum", "statistics": "light"},
    "per token": {"reduction": "none", "label_smoothing": 0.1},
    "dense": {"backend": "dense"},
}


@pytest.mark.parametrize("name", COMPILED)
@pytest.mark.parametrize("of", ["hidden states", "logits"])
def test_one_compiled_graph_has_the_numbers_of_eager(name: str, of: str) -> None:
    torch._dynamo.reset()
    hidden, weight, target = problem()
    target.clamp_(max=14)[3] = -100
    bias = torch.randn(17, requires_grad=True)
    options, objective = COMPILED[name], zloss.GainAwareZLoss(50.0, beta=0.3)

    def step(h: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        if of == "logits":
            out = zloss.logits_loss(torch.tanh(h) @ w.T + b, target, objective, weight=w.detach(), **options)
        else:
            out = zloss.head_loss(torch.tanh(h), w, target, objective, bias=b, **options)
        return 2 * out.loss, out.auxiliary, out.stats.log_z

    found = []
    for function in (torch.compile(step, backend="aot_eager", fullgraph=True), step):
        loss, *parts = function(hidden, weight, bias)
        upstream = torch.linspace(0.5, 1.5, loss.numel()).reshape(loss.shape)
        found.append((loss, *parts, *torch.autograd.grad(loss, (hidden, weight, bias), upstream)))
    for got, want in zip(*found, strict=True):
        assert relative_error(got, want) < 1e-6


def test_a_coefficient_in_a_tensor_changes_without_a_new_graph() -> None:
    torch._dynamo.reset()
    graphs = []

    def count(graph: torch.fx.GraphModule, inputs: object) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    hidden, weight, target = problem()
    step = torch.compile(
        lambda objective: zloss.head_loss(hidden, weight, target, objective).loss, backend=count, fullgraph=True
    )
    for value in (0.5, 2.0, 0.0, 50.0):
        want = zloss.head_loss(hidden, weight, target, zloss.StandardZLoss(value)).loss
        assert relative_error(step(zloss.StandardZLoss(torch.tensor(value))), want) < 1e-6
    assert len(graphs) == 1


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_an_exported_loss_keeps_its_gradients(reduction: str) -> None:
    """It once was exported without them: the loss required no gradient."""

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = torch.nn.Parameter(problem()[1].detach())

        def forward(self, h: Tensor, t: Tensor) -> Tensor:
            return zloss.head_loss(h, self.head, t, zloss.CenteredZLoss(0.5), reduction=reduction).loss

    hidden, _, target = problem()
    model = Model()
    exported = torch.export.export(model, (hidden.detach(), target)).module()
    found = []
    for function in (exported, model):
        loss = function(hidden, target)
        head = dict(function.named_parameters())["head"]
        found.append((loss, *torch.autograd.grad(loss.sum(), (hidden, head))))
    for got, want in zip(*found, strict=True):
        assert relative_error(got, want) < 1e-6


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_double_backward_is_refused_by_chunked_and_right_in_dense(reduction: str) -> None:
    hidden, weight, target = problem()
    out = zloss.head_loss(hidden, weight, target, zloss.StandardZLoss(0.5), reduction=reduction)
    with pytest.raises(errors.DoubleBackwardError, match="dense"):
        torch.autograd.grad(out.loss.sum(), hidden, create_graph=True)
    dense = zloss.head_loss(hidden, weight, target, zloss.StandardZLoss(0.5), reduction=reduction, backend="dense")
    (first,) = torch.autograd.grad(dense.loss.sum(), hidden, create_graph=True)
    assert torch.autograd.grad(first.square().sum(), weight)[0].any()


def test_transforms_of_torch_func_are_refused_by_chunked_and_right_in_dense() -> None:
    hidden, weight, target = problem()
    frozen, objective = weight.detach(), zloss.StandardZLoss(0.5)
    with pytest.raises(errors.InputError, match=r"torch\.func.*backend='dense'"):
        torch.func.grad(lambda h: zloss.head_loss(h, frozen, target, objective).loss)(hidden.detach())
    got = torch.func.grad(lambda h: zloss.head_loss(h, frozen, target, objective, backend="dense").loss)(
        hidden.detach()
    )
    assert relative_error(got, gradients(hidden, weight, target, objective)[1]) < 1e-6


def test_light_statistics_leave_loss_and_gradient_as_they_are() -> None:
    hidden, weight, target = problem()
    for objective in ALL:
        full = gradients(hidden, weight, target, objective)
        light = gradients(hidden, weight, target, objective, statistics="light")
        assert all(torch.equal(a, b) for a, b in zip(full, light, strict=True))
    out = zloss.head_loss(hidden, weight, target, zloss.CrossEntropy(), statistics="light")
    assert out.stats.gain is None
    assert torch.isfinite(out.stats.log_z).all()


def test_the_record_names_its_denominator() -> None:
    hidden, weight, target = problem()
    target[:5] = -100
    loss, weights = zloss.HeadLoss(zloss.StandardZLoss(1e-3)), torch.rand(20)
    for name, keyword, want in (
        ("valid_tokens", {}, 15),
        ("token_weight", {"token_weight": weights}, float(weights[5:].sum())),
        ("normalizer", {"normalizer": 7}, 7),
    ):
        out = loss(hidden, weight, target, **keyword)
        assert (out.denominator_name, float(out.denominator)) == (name, pytest.approx(want))


BAD = {
    "transposed weight": ({"weight": torch.zeros(6, 17)}, errors.ShapeError, r"pass `weight\.T`"),
    "weight of another width": (
        {"weight": torch.zeros(17, 5)},
        errors.ShapeError,
        r"\(the width of `hidden`\), but got \[17, 5\]\.$",
    ),
    "logits as hidden": (
        {"hidden": torch.zeros(20, 17)},
        errors.ShapeError,
        r"pass `weight\.T`\. If `hidden` holds logits, use `zloss\.logits_loss`\.$",
    ),
    "module as weight": (
        {"weight": torch.nn.Linear(6, 17)},
        errors.DtypeError,
        r"a tensor, but got Linear: pass `head\.weight` \(and `bias=head\.bias`\)\.$",
    ),
    "module as hidden": (
        {"hidden": torch.nn.Linear(6, 17)},
        errors.DtypeError,
        r"`hidden` is expected to be a tensor, but got Linear\.$",
    ),
    "list as hidden": (
        {"hidden": [1.0]},
        errors.DtypeError,
        r"`hidden` is expected to be a tensor, but got list\.$",
    ),
    "weight with one axis": ({"weight": torch.zeros(17)}, errors.ShapeError, r"\[V, D\]"),
    "empty vocabulary": ({"weight": torch.zeros(0, 6)}, errors.ShapeError, "V = 0"),
    "bias shape": ({"bias": torch.zeros(16)}, errors.ShapeError, "bias"),
    "target shape": ({"target": torch.zeros(19, dtype=torch.long)}, errors.ShapeError, "target"),
    "token weight shape": ({"token_weight": torch.ones(19)}, errors.ShapeError, "token_weight"),
    "float target": ({"target": torch.zeros(20)}, errors.DtypeError, r"target\.long"),
    "soft targets": ({"target": torch.rand(20, 17)}, errors.DtypeError, "`target` holds probabilities"),
    "integer hidden": ({"hidden": torch.zeros(20, 6, dtype=torch.long)}, errors.DtypeError, "hidden"),
    "other device": ({"weight": torch.zeros(17, 6, device="meta")}, errors.DeviceError, "one device"),
    "target too large": ({"target": torch.full((20,), 17)}, errors.TargetRangeError, "17"),
    "target negative": ({"target": torch.full((20,), -1)}, errors.TargetRangeError, "ignore_index"),
    "target in padding": ({"valid_vocab": 3}, errors.TargetRangeError, "3 rows"),
    "valid_vocab": ({"valid_vocab": 18}, errors.InputError, "valid_vocab"),
    "reduction": ({"reduction": "maen"}, errors.ReductionError, "Did you mean 'mean'"),
    "backend": ({"backend": "dens"}, errors.UnknownNameError, "Did you mean 'dense'"),
    "products": ({"products": "fp16"}, errors.UnknownNameError, "products"),
    "normalizer": ({"normalizer": -1.0}, errors.InputError, "normalizer"),
    "normalizer shape": ({"normalizer": torch.ones(2)}, errors.InputError, "0-d"),
    "normalizer with sum": ({"normalizer": 3.0, "reduction": "sum"}, errors.InputError, "mean"),
    "objective": ({"objective": "centered"}, errors.InputError, "CenteredZLoss"),
    "list target": ({"target": [1, 2]}, errors.DtypeError, "expected"),
    "list token weight": ({"token_weight": [1.0]}, errors.DtypeError, "expected"),
    "text normalizer": ({"normalizer": "2"}, errors.InputError, "expected"),
    "negative tensor normalizer": ({"normalizer": torch.tensor(-2.0)}, errors.InputError, "expected"),
    "no width": ({"hidden": torch.zeros(20, 0), "weight": torch.zeros(17, 0)}, errors.ShapeError, "width"),
    "nothing but shapes": (
        {name: value.to("meta") for name, value in zip(("hidden", "weight", "target"), problem(), strict=True)},
        errors.DeviceError,
        "meta",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_answered_with_help(name: str) -> None:
    changes, error, message = BAD[name]
    hidden, weight, target = problem()
    arguments = {"hidden": hidden, "weight": weight, "target": target, "objective": zloss.CrossEntropy()} | changes
    with pytest.raises(error, match=message) as caught:
        zloss.head_loss(**arguments)
    assert isinstance(caught.value, errors.ZlossError)


@pytest.mark.parametrize("vocab", [3, 4096, 4097, 5000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_predicted_tokens_break_ties_as_torch_does(vocab: int, dtype: torch.dtype) -> None:
    """Small whole numbers as logits, so that most rows have several maxima, in any block and in the last columns."""
    g = torch.Generator().manual_seed(vocab)
    weight = torch.randint(-1, 2, (vocab, 3), generator=g).to(dtype)
    hidden, target = torch.randint(-1, 2, (50, 3), generator=g).to(dtype), torch.zeros(50, dtype=torch.long)
    weight[-2:] = 1
    want = (hidden @ weight.T).argmax(dim=1)
    for backend, products in (("dense", "auto"), ("chunked", "auto"), ("chunked", "operand")):
        options = {"statistics": "audit", "backend": backend, "chunk_size": 7}
        out = zloss.head_loss(hidden, weight, target, zloss.CrossEntropy(), products=products, **options)
        assert torch.equal(out.stats.predicted, want)
        out = zloss.logits_loss(hidden @ weight.T, target, zloss.CrossEntropy(), **options)
        assert torch.equal(out.stats.predicted, want)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("make", [zloss.StandardZLoss, lambda coef: zloss.FactorizedZLoss(coef, coef)])
def test_a_coefficient_changed_after_the_forward_changes_no_gradient(make: Any, reduction: Any) -> None:
    """A backward pass that recomputed once took the new value."""
    hidden, weight, target = problem()
    logits = (hidden @ weight.T).detach().requires_grad_()
    for loss, leaves in ((zloss.head_loss, (hidden, weight)), (zloss.logits_loss, (logits,))):
        want = torch.autograd.grad(loss(*leaves, target, make(5.0), reduction=reduction).loss.sum(), leaves)
        coef = torch.tensor(5.0)
        total = loss(*leaves, target, make(coef), reduction=reduction).loss.sum()
        coef.fill_(0.0)
        for _ in range(2):
            got = torch.autograd.grad(total, leaves, retain_graph=True)
            assert max(relative_error(one, other) for one, other in zip(got, want, strict=True)) < 1e-6


@pytest.mark.parametrize("objective", [zloss.CenteredZLoss(0.1), zloss.FactorizedZLoss(0.1, 0.1)])
def test_a_module_that_can_never_run_is_refused_when_it_is_made(objective: zloss.Objective) -> None:
    with pytest.raises(errors.CoordinateError, match="needs the mean logit μ, but `softcap` is not shift-invariant"):
        zloss.HeadLoss(objective, softcap=5.0)


def test_a_gradient_handed_out_may_be_changed_without_harm_to_a_retained_graph() -> None:
    """Backward once returned its saved buffer itself: clipping a gradient in place broke or poisoned the next backward."""
    hidden, weight, target = problem()
    for reduction in ("mean", "none"):
        loss = zloss.head_loss(hidden, weight, target, zloss.CenteredZLoss(0.5), reduction=reduction).loss.sum()
        first = torch.autograd.grad(loss, (hidden, weight), retain_graph=True)
        kept = [grad.clone() for grad in first]
        for grad in first:
            grad.data.zero_()
        again = torch.autograd.grad(loss, (hidden, weight), retain_graph=True)
        scaled = torch.autograd.grad(3 * loss, (hidden, weight))
        for want, second, third in zip(kept, again, scaled, strict=True):
            assert relative_error(second, want) < 1e-6
            assert relative_error(third, 3 * want) < 1e-6
    for _ in range(3):
        loss = zloss.head_loss(hidden, weight, target, zloss.StandardZLoss(0.5)).loss
        for _ in range(3):
            loss.backward(retain_graph=True)
            torch.nn.utils.clip_grad_norm_([hidden, weight], 1e-3)


@pytest.mark.parametrize("options", [{}, {"softcap": 3.0}, {"statistics": "light"}])
def test_an_empty_batch_has_the_statistics_of_a_full_one(options: dict[str, object]) -> None:
    hidden, weight, target = problem()
    objective = zloss.StandardZLoss(0.5)
    full = zloss.head_loss(hidden, weight, target, objective, **options).stats
    empty = zloss.head_loss(hidden[:0], weight, target[:0], objective, **options).stats
    for field in dataclasses.fields(full):
        assert (getattr(full, field.name) is None) == (getattr(empty, field.name) is None), field.name


@pytest.mark.parametrize("vocab", [49_152, 50_257])
def test_the_norm_of_p_over_a_long_vocabulary_is_as_exact_as_a_sum(vocab: int) -> None:
    """In one sum of squares it is off by up to 7e-6, and with it the gain."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(rows, 8, generator=generator) for rows in (16, vocab))
    target = torch.randint(vocab, (16,), generator=generator)
    out = zloss.head_loss(hidden, weight, target, zloss.StandardZLoss(1e-4))
    exact = torch.softmax(hidden.double() @ weight.double().T, dim=1).norm(dim=1)
    assert out.stats.p_norm is not None
    torch.testing.assert_close(out.stats.p_norm.double(), exact, rtol=1e-6, atol=0)
    assert float(zloss.head_loss(hidden[:0], weight, target[:0], zloss.StandardZLoss(1e-4)).loss) == 0


def test_an_output_prints_in_one_line() -> None:
    """It printed the statistics of every token."""
    hidden, weight, target = problem()
    target[3] = -100
    out = zloss.head_loss(hidden, weight, target, zloss.StandardZLoss(0.5))
    assert repr(out) == (
        f"HeadLossOutput(loss={out.loss:.6g}, cross_entropy={out.cross_entropy:.6g}, auxiliary={out.auxiliary:.6g}, "
        "tokens=19 of 20)"
    )
    per_token = zloss.head_loss(hidden, weight, target, zloss.StandardZLoss(0.5), reduction="none")
    assert str(per_token) == "HeadLossOutput(loss=[20], cross_entropy=[20], auxiliary=[20], tokens=19 of 20)"
