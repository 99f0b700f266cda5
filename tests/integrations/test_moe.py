"""The helper that adds the router loss to a Hugging Face model."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import zloss
from tests.router.router_models import SOFTMAX, E, K, L, batch, deepseek_v3, seeded, switch
from zloss.errors import InputError, UnknownNameError
from zloss.integrations.moe import RouterZLoss, attach_router_loss
from zloss.integrations.transformers import apply
from zloss.router.loss import router_loss


@pytest.fixture(params=list(SOFTMAX))
def model(request: pytest.FixtureRequest) -> Any:
    return seeded(SOFTMAX[request.param]).train()


def test_the_loss_gains_exactly_the_router_term_and_keeps_balancing_apart(model: Any) -> None:
    inputs = batch(padded=True)
    plain = model(**inputs).loss
    outputs = model(**inputs, output_router_logits=True)
    want = router_loss(
        [layer.reshape(-1, E) for layer in outputs.router_logits],
        coef=1e-2,
        convention="olmoe",
        top_k=K,
        mask=inputs["attention_mask"].reshape(-1).bool(),
    )
    with attach_router_loss(model, coef=1e-2, convention="olmoe") as handle:
        got = model(**inputs)
        assert handle.last is not None
        assert torch.equal(handle.last.loss, want.loss)
        # the model's balancing loss was off (output_router_logits unset) and stays off
        assert float(got.loss.detach()) == pytest.approx(float((plain + want.loss).detach()), rel=1e-6)
        assert (handle.last.relative, handle.last.decisions) == (1 / K, L * int(inputs["attention_mask"].sum()))
        model.eval()
        assert torch.equal(model(**inputs).loss, plain)
    assert torch.equal(model.train()(**inputs).loss, plain)


def test_a_positional_mask_and_positional_labels_are_seen() -> None:
    """Padding was counted where the mask had no keyword, and a tuple with positional labels got no router term."""
    model, inputs = seeded(SOFTMAX["mixtral"]).train(), batch(padded=True)
    ids, mask, labels = inputs["input_ids"], inputs["attention_mask"], inputs["labels"]
    with attach_router_loss(model, coef=1e-2, convention="megatron") as handle:
        by_name = model(**inputs).loss
        by_place = model(ids, mask, labels=labels).loss
        assert handle.last is not None
        assert handle.last.decisions == L * int(mask.sum())
        assert torch.equal(by_place, by_name)
        as_tuple = model(ids, mask, None, None, None, labels, return_dict=False)[0]
        assert torch.equal(as_tuple, by_name)


def test_encoder_decoder_masks_each_stack_by_its_own() -> None:
    model, inputs = seeded(switch).train(), batch(padded=True)
    with attach_router_loss(model, coef=1e-2, convention="hf_switch") as handle:
        model(**inputs)
        assert handle.last is not None
        valid = int(inputs["attention_mask"].sum())
        assert handle.last.stats.decisions_per_layer.tolist() == [valid, valid, 30, 30]
        assert handle.last.relative == pytest.approx(2.0)


def test_micro_batches_divide_the_term_and_calls_without_labels_are_left_alone() -> None:
    model, inputs = seeded(SOFTMAX["olmoe"]).train(), batch()
    plain = model(**inputs).loss
    with attach_router_loss(model, coef=1.0, convention="token_layer_mean", target=0.0, micro_batches=4) as handle:
        got = model(**inputs).loss
        assert handle.last is not None
        assert float((got - plain).detach()) == pytest.approx(float(handle.last.loss.detach()) / 4, rel=1e-5)
        handle.last = None
        model(input_ids=inputs["input_ids"])
        assert handle.last is None


def test_bad_input() -> None:
    model = seeded(SOFTMAX["olmoe"]).train()
    with (
        attach_router_loss(model.requires_grad_(False), coef=1e-2, convention="megatron"),
        pytest.raises(InputError, match="carry no gradient"),  # not a silent nothing
    ):
        model(**batch())
    # Early releases of transformers 5 do not record the router logits of DeepSeek-V3.
    with pytest.raises(InputError, match=r"sigmoid|records no router logits"):
        attach_router_loss(seeded(deepseek_v3), coef=1e-3, convention="megatron")
    with pytest.raises(UnknownNameError, match="Did you mean 'megatron'"):
        attach_router_loss(model, coef=1e-3, convention="megatorn")


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ({"coef": math.nan}, "`coef` is expected to be None"),
        ({"coef": "1e-3"}, "`coef` is expected to be None"),
        ({"coef": -1.0}, "`coef` is expected to be None"),
        ({"target": math.nan}, "`target` is expected to be None"),
        ({"target": "x"}, "`target` is expected to be None"),
        ({"top_k": 0}, "`top_k` is expected to be an integer"),
        ({"top_k": 1.5}, "`top_k` is expected to be an integer"),
        ({"capacity": 0}, "`capacity` is expected to be an integer"),
    ],
)
def test_a_bad_setting_is_only_seen_in_the_first_training_step(setting: dict[str, Any], sentence: str) -> None:
    model = seeded(SOFTMAX["olmoe"]).train()
    options: dict[str, Any] = {"coef": 1e-3, "convention": "megatron"} | setting
    with pytest.raises(InputError, match=sentence):
        attach_router_loss(model, **options)
    with pytest.raises(InputError, match=sentence):
        apply(model, zloss.CrossEntropy(), router=RouterZLoss(**options))
    assert not model._forward_hooks


def test_a_model_and_a_router_of_a_foreign_type_are_named() -> None:
    with pytest.raises(InputError, match="`model` is expected to be a module, but got str"):
        attach_router_loss("olmoe", coef=1e-3, convention="megatron")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="`router` is expected to be a RouterZLoss, but got float"):
        apply(seeded(SOFTMAX["olmoe"]), zloss.CrossEntropy(), router=1e-3)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [-1e9, 0.5, math.nan])
def test_an_additive_attention_mask_counts_the_padding_instead(value: float) -> None:
    model, inputs = seeded(SOFTMAX["olmoe"]).train(), batch(padded=True)
    keep = inputs["attention_mask"].bool()
    inputs["attention_mask"] = torch.where(keep, 0.0, value)
    sentence = rf"`attention_mask` is expected to hold booleans, or 0 and 1, .* but got {value}"
    with attach_router_loss(model, coef=1e-2, convention="olmoe"), pytest.raises(InputError, match=sentence):
        model(**inputs)
    with pytest.raises(InputError, match=sentence):
        zloss.audit_router(model, [inputs])
    inputs["attention_mask"] = keep.float()
    with attach_router_loss(model, coef=1e-2, convention="olmoe") as handle:
        model(**inputs)
        assert handle.last is not None
        assert handle.last.decisions == L * int(keep.sum())
