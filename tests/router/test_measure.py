"""The measured scale against models that apply a known penalty."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.router.literal import LITERAL, Case, SideChannel, violation
from zloss.errors import CoefficientError, InputError, MissingInputError
from zloss.router.conventions import router_scale
from zloss.router.measure import MeasuredScale, measure_router_scale

L, T, D, E, K = 4, 30, 6, 5, 2
DTYPES = (torch.float64, torch.float32, torch.bfloat16)
Penalty = Callable[[Sequence[Tensor]], Tensor]


class TinyMoe(nn.Module):
    """Each layer routes its input softly over E linear experts; a router also moves what later routers see."""

    def __init__(
        self, layers: int = L, *, dtype: torch.dtype = torch.float64, dropout: float = 0.0, factor: float = 1.0
    ) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(7)

        def weight(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

        self.routers = nn.ParameterList([weight(E, D) for _ in range(layers)])
        self.experts = nn.ParameterList([weight(E, D, D) for _ in range(layers)])
        self.dropout = nn.Dropout(dropout)
        self.inputs = weight(T, D)
        with torch.no_grad():
            for router in self.routers:
                router.mul_(factor)

    def forward(self, passed: Callable[[Tensor], Tensor] = lambda logits: logits) -> tuple[Tensor, Sequence[Tensor]]:
        """A main loss and the router logits of every layer, which go through `passed`."""
        hidden, logits = self.inputs, []
        for router, experts in zip(self.routers, self.experts, strict=True):
            logits.append(passed(self.dropout(hidden) @ router.T))
            outputs = torch.einsum("td,edf->tef", hidden, experts)
            mixed = (logits[-1].softmax(dim=-1).unsqueeze(-1) * outputs).sum(dim=1)
            hidden = torch.tanh(hidden + 0.5 * mixed)
        return hidden.square().mean(), logits


def measured(
    model: TinyMoe, penalty: Penalty, *, coef: float = 1.0, coef_off: float = 0.0, **options: object
) -> MeasuredScale:
    """What is found of a model whose loss has λ·penalty(router logits) in it."""

    def loss(value: float) -> Tensor:
        main, logits = model()
        return main + value * penalty(logits)

    on, off, routers = (lambda: loss(coef)), (lambda: loss(coef_off)), list(model.routers)
    return measure_router_scale(on, off, lambda: model()[1], routers, coef=coef, coef_off=coef_off, **options)


def literal(name: str, target: float = 0.0) -> Penalty:
    context = {"model_layers": 6, "encoder_layers": 2, "labelled": 20, "micro_batches": 3}
    return lambda logits: LITERAL[name](Case(logits, 1.0, K, target, **context))


def layer_mean(of_log_z: Callable[[Tensor], Tensor]) -> Penalty:
    return lambda logits: torch.stack([of_log_z(torch.logsumexp(layer.float(), dim=1)) for layer in logits]).mean()


def layer_sum(of_logits: Callable[[Tensor], Tensor], weights: Sequence[float] = (1.0,) * L) -> Penalty:
    return lambda logits: torch.stack([w * of_logits(r) for w, r in zip(weights, logits, strict=True)]).sum()


def square_of_the_overall_mean(logits: Sequence[Tensor]) -> Tensor:
    return torch.logsumexp(torch.cat(list(logits)), dim=1).mean().square()


MEAN_OF_SQUARES = layer_mean(lambda log_z: log_z.square().mean())
SQUARE_OF_THE_MEAN = layer_mean(lambda log_z: log_z.mean().square())
MEAN = layer_mean(torch.mean)


@pytest.mark.parametrize("name", [name for name in LITERAL if not name.startswith("megatron")])
@pytest.mark.parametrize(("dtype", "target"), [(torch.float64, 0.0), (torch.float64, 1.7), (torch.float32, 0.0)])
def test_recovers_the_scale_and_target_of_each_convention(name: str, dtype: torch.dtype, target: float) -> None:
    found = measured(TinyMoe(dtype=dtype), literal(name, target), coef=1e-3)
    counts = {"layers": L, "tokens": T, "valid_tokens": 20, "micro_batches": 3}
    scale = router_scale(name, top_k=K, coef=1e-3, model_layers=6, encoder_layers=2, **counts)
    if name == "hf_nllb_moe":
        assert (found.relative, found.target, found.verdict) == (0.0, None, "nothing_applied")
        return
    assert found.relative == pytest.approx(scale.relative, rel=1e-3)
    assert found.absolute == pytest.approx(scale.absolute, rel=1e-3)
    assert found.relative_per_layer == pytest.approx(scale.relative_per_layer, rel=1e-3)
    assert found.target == pytest.approx(target, abs=1e-3)
    assert found.residual < 1e-3
    assert found.padding_ratio is None
    assert found.verdict == "explained"
    assert "explains the gradient" in found.sentence
    assert "Warning" not in found.sentence


@pytest.mark.parametrize(("scale", "want"), [(1.0, 4.0), (3.0, 12.0)])
def test_sees_through_a_side_channel_whose_scalar_is_silent(scale: float, want: float) -> None:
    """Each layer's logits pass through a scaler that injects its Z gradient; the returned loss never shows it."""
    model = TinyMoe()

    def loss(coef: float) -> Tensor:
        return model(lambda logits: SideChannel.apply(logits, coef * violation(logits, 0.0).mean()))[0]

    SideChannel.scale = scale
    assert loss(1e-3).item() == loss(0.0).item() == pytest.approx(model()[0].item(), rel=1e-12)
    found = measure_router_scale(
        lambda: loss(1e-3), lambda: loss(0.0), lambda: model()[1], list(model.routers), coef=1e-3
    )
    assert found.relative == pytest.approx(want, rel=1e-3)
    assert found.residual < 1e-6


def test_padding_that_is_counted_is_found_out_and_excluded_padding_has_ratio_zero() -> None:
    mask = torch.arange(T) < 20
    counted = measured(TinyMoe(), literal("flaxformer"), coef=1e-3, mask=mask)
    assert counted.relative_all == pytest.approx(1.0, rel=1e-3)
    assert counted.relative == pytest.approx(20 / T, rel=1e-3)
    assert counted.padding_ratio == pytest.approx(1.0, rel=1e-3)
    excluded = measured(TinyMoe(), layer_sum(lambda r: violation(r[mask], 0.0).mean()), coef=1e-3, mask=mask)
    assert excluded.relative == pytest.approx(L, rel=1e-3)
    assert excluded.padding_ratio == pytest.approx(0.0, abs=1e-3)


def test_two_coefficients_serve_as_well_as_on_and_off() -> None:
    found = measured(TinyMoe(), literal("mesh_tf"), coef=3e-3, coef_off=1e-3)
    assert found.relative == pytest.approx(L, rel=1e-3)
    assert found.coef == pytest.approx(2e-3)


def test_dropout_cancels_under_one_seed() -> None:
    found = measured(TinyMoe(dropout=0.3).train(), literal("olmoe"), coef=1e-3)
    assert found.relative == pytest.approx(1 / K, rel=1e-3)


@pytest.mark.parametrize(
    ("weights", "negative", "message"),
    [
        ((1.0, 0.0, 2.0, 5.0), (), "explains"),
        ((1.0, 1.0, -0.5, 0.0), (2,), "the scale of layer 2 is negative"),
        ((-1.0,) * L, (0, 1, 2, 3), "Warning: the scale is negative, so that training drives log Z_R away from c"),
    ],
)
def test_the_weight_of_each_layer_is_resolved_and_a_negative_one_got_no_warning(
    weights: tuple[float, ...], negative: tuple[int, ...], message: str
) -> None:
    found = measured(TinyMoe(), layer_sum(lambda r: violation(r, 0.0).mean(), weights))
    assert found.verdict == "explained"
    assert found.relative_per_layer == pytest.approx([L * weight for weight in weights], rel=1e-6, abs=1e-9)
    assert found.negative_layers == negative
    assert message in found.sentence
    assert ("Warning" in found.sentence) == bool(negative)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("penalty", "least"),
    [
        (layer_sum(lambda r: r.square().mean()), 0.1),
        # log Z after subtracting the row maximum, never restored, is another quantity and is not mistaken for one.
        (layer_sum(lambda r: violation(r - r.amax(dim=1, keepdim=True), 0.0).mean()), 0.1),
        (layer_mean(lambda log_z: log_z.abs().pow(1.5).mean()), 0.0),
        (layer_mean(lambda log_z: log_z.pow(4).mean()), 0.0),
    ],
    ids=["squared logits", "shifted by the maximum", "power 1.5", "power 4"],
)
def test_another_penalty_leaves_a_residual_that_rounding_does_not_excuse(
    penalty: Penalty, least: float, dtype: torch.dtype
) -> None:
    found = measured(TinyMoe(dtype=dtype), penalty)
    assert found.verdict == "unexplained"
    assert found.residual > least
    assert "no scale can be stated" in found.sentence


@pytest.mark.parametrize("weights", [(1.0, 1.0, 1.0, 1.0), (0.5, 2.0, 1.0, 0.0)])
def test_a_missing_square_is_named_and_not_read_as_a_far_target(weights: tuple[float, ...]) -> None:
    """λ·mean(log Z) fits a square with c → −∞ perfectly; it must not be read as one, nor as nothing."""
    found = measured(TinyMoe(), layer_sum(lambda r: torch.logsumexp(r, 1).mean(), weights), coef=1e-3)
    assert (found.verdict, found.target) == ("not_squared", None)
    assert found.relative_per_layer == pytest.approx([L * w for w in weights], rel=1e-6, abs=1e-9)
    assert "not of its square" in found.sentence


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_square_over_log_z_that_hardly_varies_is_not_called_a_missing_one(dtype: torch.dtype) -> None:
    """Small routers: log Z is within a few 0.01 of log E, and the slope of the square explains nearly all."""
    found = measured(TinyMoe(dtype=dtype, factor=0.05), literal("mesh_tf"), coef=1e-3)
    assert found.verdict == "explained"
    assert found.relative == pytest.approx(L, rel=1e-2)


@pytest.mark.parametrize("factor", [1.0, 0.3, 0.01, 0.001])
def test_the_rounding_of_bf16_was_taken_for_another_penalty(factor: float) -> None:
    """s = 0.9999 at a residual of 0.2 % got "no scale can be stated"."""
    found = measured(TinyMoe(dtype=torch.bfloat16, factor=factor), MEAN_OF_SQUARES)
    assert found.verdict == "explained"
    assert found.relative == pytest.approx(1.0, abs=0.02)
    assert found.target == pytest.approx(0.0, abs=0.02)
    assert 1e-3 < found.residual < found.limit < 0.03
    assert "that rounding can leave" in found.sentence


def test_bf16_products_that_a_router_returns_as_fp32_were_taken_for_another_penalty() -> None:
    class Autocast(TinyMoe):
        def forward(self) -> tuple[Tensor, Sequence[Tensor]]:  # type: ignore[override]
            with torch.autocast("cpu", dtype=torch.bfloat16):
                main, logits = super().forward()
            return main, [layer.float() for layer in logits]

    found = measured(Autocast(dtype=torch.float32), MEAN_OF_SQUARES)
    assert found.residual > 1e-3
    assert found.verdict == "explained"
    assert found.relative == pytest.approx(1.0, abs=0.02)


def test_a_main_loss_that_drowns_the_penalty_in_rounding_is_no_evidence_against_it() -> None:
    found = measured(TinyMoe(dtype=torch.bfloat16), MEAN_OF_SQUARES, coef=1e-3)
    assert (found.verdict, found.target) == ("undetermined", None)
    assert found.limit > 0.1
    assert "larger coefficient" in found.sentence


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("factor", [1.0, 0.01, 0.001])
@pytest.mark.parametrize("target", ["fit", 0.0])
def test_the_square_of_the_mean_passed_for_another_penalty(
    dtype: torch.dtype, factor: float, target: float | str
) -> None:
    """One batch shows only that every decision has the same source: it was called a mean without a square, and where log Z
    hardly varies the mean of squares."""
    model = TinyMoe(dtype=dtype, factor=factor)
    before = [router.detach().clone() for router in model.routers]
    squared = measured(model, SQUARE_OF_THE_MEAN, target=target)
    assert squared.verdict == "squared_mean"
    assert "square of the mean" in squared.sentence
    assert squared.target == pytest.approx(0.0, abs=0.02)
    assert squared.relative == pytest.approx(1.0, abs=0.02)
    assert measured(model, MEAN_OF_SQUARES, target=target).verdict == "explained"
    assert measured(model, MEAN, target=target).verdict == "not_squared"
    assert all(torch.equal(a, b) for a, b in zip(model.routers, before, strict=True))


def test_the_square_of_the_mean_over_all_layers_is_found_too() -> None:
    assert measured(TinyMoe(), square_of_the_overall_mean).verdict == "squared_mean"


@pytest.mark.parametrize("target", ["fit", 0.0])
def test_the_square_of_the_mean_over_all_decisions_is_found_with_a_mask_that_the_loss_ignores(
    target: float | str,
) -> None:
    """Groups of 1 to 30 decisions: the mean over decisions is not the mean of the groups' means."""
    masks = [torch.arange(T) < counted for counted in (T, 1, 2, 1)]
    found = measured(TinyMoe(), square_of_the_overall_mean, mask=masks, target=target)
    assert found.verdict == "squared_mean"
    assert found.target == pytest.approx(0.0, abs=1e-6)
    assert found.relative_all == pytest.approx(1.0, rel=1e-6)


@pytest.mark.parametrize("penalty", [MEAN_OF_SQUARES, SQUARE_OF_THE_MEAN, MEAN])
def test_what_no_batch_can_tell_apart_is_not_claimed(penalty: Penalty) -> None:
    """Logits that do not depend on the scale of the weights: log Z is the same constant in every batch."""
    found = measured(TinyMoe(2, factor=0.0), penalty)
    assert (found.verdict, found.target) == ("undetermined", None)
    assert found.sentence.startswith("This batch does not show which penalty is applied")


def test_bad_input() -> None:
    with pytest.raises(CoefficientError, match="expected to differ"):
        measured(TinyMoe(1), MEAN, coef_off=1.0)
    zero = torch.zeros((), requires_grad=True)
    with pytest.raises(MissingInputError, match="router weights"):
        measure_router_scale(lambda: zero, lambda: zero, lambda: TinyMoe(1)()[1], [], coef=1.0)


SHARED = TinyMoe()
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "coef nan": ({"coef": math.nan}, "`coef` is expected to be a finite number, but got nan"),
    "coef inf": ({"coef": math.inf}, "`coef` is expected to be a finite number, but got inf"),
    "coef text": ({"coef": "1e-3"}, "`coef` is expected to be a finite number, but got '1e-3'"),
    "coef None": ({"coef": None}, "`coef` is expected to be a finite number, but got None"),
    "coef_off nan": ({"coef_off": math.nan}, "`coef_off` is expected to be a finite number, but got nan"),
    "target text": ({"target": "log_experts"}, "`target` is expected to be 'fit' or a finite number, but got 'log_ex"),
    "target None": ({"target": None}, "`target` is expected to be 'fit' or a finite number, but got None"),
    "target nan": ({"target": math.nan}, "`target` is expected to be 'fit' or a finite number, but got nan"),
    "seed text": ({"seed": "x"}, "`seed` is expected to be an integer"),
    "seed too large": ({"seed": 2**70}, "`seed` is expected to be an integer"),
    "mask additive": ({"mask": torch.where(torch.arange(T) < 9, 0.0, -1e9)}, "`mask` is expected to hold booleans"),
    "parameters number": ({"parameters": 5}, "`parameters` is expected to be a list of router weights, but got int"),
    "parameters module": ({"parameters": nn.Linear(2, 2)}, "list of router weights, but got Linear"),
    "parameters tensor": ({"parameters": torch.ones(E, D)}, "list of router weights, but got Tensor"),
    "parameters of text": ({"parameters": ["x"]}, "`parameters[0]` is expected to be a tensor, but got str"),
    "parameters frozen": ({"parameters": [torch.ones(E, D)]}, "`parameters[0]` does not require a gradient"),
    "parameters of another model": (
        {"parameters": list(TinyMoe().routers)},
        "`router_logits` does not depend on `parameters`",
    ),
    "on None": ({"on": None}, "`on` is expected to be a function that runs the model, but got NoneType"),
    "off tensor": ({"off": torch.ones(())}, "`off` is expected to be a function that runs the model, but got Tensor"),
    "on returns a number": (
        {"on": lambda: 1.0},
        "`on` is expected to return a scalar tensor to differentiate, but ret",
    ),
    "off returns None": (
        {"off": lambda: None},
        "`off` is expected to return a scalar tensor to differentiate, but ret",
    ),
    "on returns a vector": (
        {"on": lambda: torch.ones(3, requires_grad=True) * 2},
        "`on` is expected to return a scalar",
    ),
    "off without a graph": ({"off": lambda: torch.ones(())}, "`off` returned a loss without a graph"),
    "on nan": ({"on": lambda: SHARED()[0] * math.nan}, "the gradient of `on` or of `off` is NaN or infinite"),
    "off inf": ({"off": lambda: SHARED()[0] * math.inf}, "the gradient of `on` or of `off` is NaN or infinite"),
    "router_logits None": ({"router_logits": None}, "`router_logits` is expected to be a function that runs the model"),
    "router_logits returns None": (
        {"router_logits": lambda: None},
        "`router_logits` is expected to be a tensor or one",
    ),
    "router_logits of text": ({"router_logits": lambda: ["x"]}, "`router_logits[0]` is expected to be a tensor"),
    "router_logits [B, S, E]": (
        {"router_logits": lambda: [layer.view(5, 6, E) for layer in SHARED()[1]]},
        "but layer 0 is [5, 6, 5]: flatten batch and sequence",
    ),
    "router_logits without a graph": (
        {"router_logits": lambda: [layer.detach() for layer in SHARED()[1]]},
        "layer 0 of `router_logits` has no graph",
    ),
    "router_logits nan": (
        {"router_logits": lambda: [layer * math.nan for layer in SHARED()[1]]},
        "log Z of `router_logits` is NaN or infinite",
    ),
    "router_logits empty": (
        {"router_logits": lambda: [torch.zeros(0, E, requires_grad=True)]},
        "`router_logits` has no tokens",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_value_gives_a_raw_exception_or_a_scale(name: str) -> None:
    """coef=nan gave a scale of NaN, a loss of NaN a verdict."""
    bad, sentence = BAD[name]
    model = SHARED

    def loss(value: float) -> Tensor:
        main, logits = model()
        return main + value * MEAN_OF_SQUARES(logits)

    good: dict[str, Any] = {
        "on": lambda: loss(1.0),
        "off": lambda: loss(0.0),
        "router_logits": lambda: model()[1],
        "parameters": list(model.routers),
        "coef": 1.0,
    }
    with pytest.raises(InputError, match=re.escape(sentence)):
        measure_router_scale(**good | bad)


def test_weights_from_an_iterator_are_read_once() -> None:
    model = TinyMoe()

    def loss(value: float) -> Tensor:
        main, logits = model()
        return main + value * MEAN_OF_SQUARES(logits)

    found = measure_router_scale(
        lambda: loss(1.0), lambda: loss(0.0), lambda: model()[1], iter(model.routers), coef=1.0
    )
    assert found.relative == pytest.approx(1.0, rel=1e-6)
