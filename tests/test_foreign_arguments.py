"""Arguments of foreign types get our errors, by the name of the argument. The fuzzer of losses draws more of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import zloss
from zloss.errors import DeviceError, InputError, ShapeError

FOREIGN: dict[str, Callable[[torch.Tensor], Any]] = {
    "none": lambda x: None,
    "text": lambda x: "x",
    "array": lambda x: x.numpy(),
    "numpy scalar": lambda x: np.float32(1.0),
    "list": lambda x: x.tolist(),
    "sparse": lambda x: x.to_sparse(),
    "nested": lambda x: torch.nested.nested_tensor(list(x)),
    "quantized": lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8),
    "complex": lambda x: x.to(torch.complex64),
}


def calls() -> dict[str, Callable[[Any], Any]]:
    """Function and argument → the call with that argument replaced."""
    hidden, weight, target = torch.randn(5, 4, requires_grad=True), torch.randn(7, 4), torch.randint(7, (5,))
    objective = zloss.StandardZLoss(1e-4)
    return {
        "head_loss hidden": lambda x: zloss.head_loss(x, weight, target, objective),
        "head_loss weight": lambda x: zloss.head_loss(hidden, x, target, objective),
        "head_loss target": lambda x: zloss.head_loss(hidden, weight, x, objective),
        "HeadLoss weight": lambda x: zloss.HeadLoss(objective)(hidden, x, target),
        "head_source hidden": lambda x: zloss.head_source(x, weight, target, objective),
        "logits_loss logits": lambda x: zloss.logits_loss(x, target, objective),
        "logits_loss target": lambda x: zloss.logits_loss(hidden, x, objective),
        "router_loss router_logits": lambda x: zloss.router_loss(x, coef=1e-3, convention="megatron", top_k=2),
        "z_loss_source logits": lambda x: zloss.z_loss_source(x, 1e-4, 0.0),
        "centered_logits_from_raw weight": lambda x: zloss.centered_logits_from_raw(torch.randn(5, 7), hidden, x),
        "shift_head_ shift": lambda x: zloss.shift_head_(torch.nn.Linear(4, 7), x),
    }


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("call", calls())
@pytest.mark.parametrize("kind", FOREIGN)
def test_an_argument_of_a_foreign_type_is_named(call: str, kind: str) -> None:
    name = call.split()[1]
    with pytest.raises(InputError, match=name):
        calls()[call](FOREIGN[kind](torch.randn(5, 4)))


def test_a_tensor_made_in_inference_mode_is_named_where_a_gradient_is_wanted() -> None:
    weight, target = torch.randn(7, 4, requires_grad=True), torch.randint(7, (5,))
    with torch.inference_mode():
        hidden, logits = torch.randn(5, 4), torch.randn(5, 7)
        assert zloss.head_loss(hidden, weight, target, zloss.CrossEntropy()).loss.isfinite()
    with pytest.raises(InputError, match=r"`hidden` was created under torch.inference_mode.*clone"):
        zloss.head_loss(hidden, weight, target, zloss.CrossEntropy())
    assert zloss.logits_loss(logits, target, zloss.CrossEntropy()).loss.isfinite()


@pytest.mark.parametrize("value", ["x", None, [], True, float("nan"), np.float32(1.0), torch.ones(3)], ids=repr)
def test_numbers_of_foreign_types_are_named(value: Any) -> None:
    if value is not None:
        with pytest.raises(InputError, match="`coef`"):
            zloss.StandardZLoss(value)
        with pytest.raises(InputError, match="`coef`"):
            zloss.router_scale("megatron", layers=2, tokens=4, top_k=1, coef=value)
    with pytest.raises(InputError, match="`vocab`"):
        zloss.explain(zloss.CrossEntropy(), vocab=value)
    with pytest.raises(InputError, match="`objective`"):
        zloss.explain(value, vocab=7)


def test_a_whole_number_beyond_the_range_of_floats_is_no_number() -> None:
    with pytest.raises(InputError, match="`coef`"):
        zloss.StandardZLoss(10**400)
    with pytest.raises(InputError, match="`target`"):
        zloss.CenteredZLoss(1e-4, target=-(10**400))


def test_a_tensor_without_values_beside_real_ones_is_named() -> None:
    logits, options = torch.randn(5, 7), {"coef": 1e-3, "convention": "megatron", "top_k": 2}
    calls = {
        "router_logits": lambda: zloss.router_loss(logits.to("meta"), **options),
        "mask": lambda: zloss.router_loss(logits, mask=torch.ones(5, dtype=torch.bool, device="meta"), **options),
        "weight": lambda: zloss.router_loss(logits, weight=torch.ones(7, 4, device="meta"), **options),
        "shift": lambda: zloss.shift_head_(torch.nn.Linear(4, 7), torch.ones(4, device="meta")),
    }
    for name, call in calls.items():
        with pytest.raises(DeviceError, match=f"`{name}` is on the meta device"):
            call()


def test_logits_without_a_class_are_refused() -> None:
    with pytest.raises(ShapeError, match="at least one class"):
        zloss.z_loss_source(torch.ones(5, 0), 1e-4, 0.0)


@pytest.mark.parametrize(
    "value",
    ["x", b"x", ["x"], None, [None], True, [True], 10**400, 1j, object, {"labels": 1}, [[1, 2]], np.int64(3)],
    ids=lambda value: repr(value)[:20],
)
def test_tokens_of_a_foreign_type_are_named(value: Any) -> None:
    """b"x" counted 120 tokens."""
    with pytest.raises(InputError, match="`tokens` is expected to "):
        zloss.global_normalizer(value)


def test_tokens_without_values_and_counts_that_are_not_real_are_named() -> None:
    with pytest.raises(DeviceError, match="`tokens` is on the meta device"):
        zloss.global_normalizer(torch.ones(3, dtype=torch.long, device="meta"))
    for count in (torch.tensor(1j), torch.tensor(True)):
        with pytest.raises(InputError, match=f"`tokens` is expected to .* {count.dtype}"):
            zloss.global_normalizer(count)


@pytest.mark.parametrize("groups", [5, "x", [5], [None]], ids=repr)
def test_groups_of_a_foreign_type_are_named(groups: Any) -> None:
    with pytest.raises(InputError, match="`groups` is expected to be one process group or several"):
        zloss.global_normalizer(torch.tensor([1, 2]), groups=groups)
