"""A dozen families: loss and gradients equal CE + Z of the model's own logits."""

from __future__ import annotations

import pytest
import torch

import zloss
from tests.integrations.transformers.small_models import assert_equals_truth, batch, small, truth
from tests.integrations.transformers.sweep import outcome_of, try_class
from tests.integrations.transformers.tiny_configs import causal_classes
from zloss.errors import CoordinateError, UnsupportedModelError
from zloss.integrations.transformers import apply
from zloss.integrations.transformers.lazy_logits import LazyLogits

FAMILIES = (
    *("GPT2LMHeadModel", "LlamaForCausalLM", "GPTNeoXForCausalLM", "Qwen3ForCausalLM", "Gemma2ForCausalLM"),
    *("GraniteForCausalLM", "PhiForCausalLM", "OlmoeForCausalLM", "MixtralForCausalLM", "CohereForCausalLM"),
    *("BartForCausalLM", "MambaForCausalLM", "BertLMHeadModel"),
)


@pytest.mark.parametrize("name", FAMILIES)
def test_loss_and_gradients_are_those_of_the_logits(name: str) -> None:
    outcome = outcome_of(name, causal_classes()[name])
    assert outcome.state == "exact", outcome


def test_a_wrong_scale_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison fails where the logit scale of Granite is dropped."""
    monkeypatch.setattr(LazyLogits, "_times", lambda self, factor: self)
    assert try_class("GraniteForCausalLM", "granite").state == "different"


def test_conditional_generation() -> None:
    import transformers

    config = transformers.T5Config(
        vocab_size=131,
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_heads=4,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )
    torch.manual_seed(0)
    model = transformers.T5ForConditionalGeneration(config).train()
    wanted = truth(model, batch())
    with apply(model, zloss.StandardZLoss(1e-2, target=0.0)):
        assert_equals_truth(model, batch(), wanted)


@pytest.mark.parametrize("name", ["ProphetNetForCausalLM"])
def test_a_class_that_cannot_be_taken_over_is_refused_by_name(name: str) -> None:
    with pytest.raises(UnsupportedModelError, match=name):
        apply(small(name), zloss.StandardZLoss(1e-4))


def test_centered_under_a_softcap_is_refused_at_apply() -> None:
    with pytest.raises(CoordinateError, match="Gemma2ForCausalLM"):
        apply(small("Gemma2ForCausalLM"), zloss.CenteredZLoss(1e-4))


def test_a_z_loss_of_the_models_own_is_refused() -> None:
    model = small("BambaForCausalLM")
    model.config.z_loss_coefficient = 1e-3
    with pytest.raises(UnsupportedModelError, match="z_loss_coefficient"):
        apply(model, zloss.StandardZLoss(1e-4))
