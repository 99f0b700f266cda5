"""Loss and gradients of every class equal CE + Z of the model's own logits; the table of outcomes is complete and true."""

from __future__ import annotations

import pytest
import torch

import zloss
from tests.integrations.transformers.small_models import assert_exact, small
from tests.integrations.transformers.sweep import try_class
from tests.integrations.transformers.tiny_configs import causal_classes
from zloss.errors import CoordinateError, UnsupportedModelError
from zloss.integrations.transformers import apply, support
from zloss.integrations.transformers.lazy_logits import LazyLogits

FAMILIES = (
    *("GPT2LMHeadModel", "LlamaForCausalLM", "GPTNeoXForCausalLM", "Qwen3ForCausalLM", "Gemma2ForCausalLM"),
    *("GraniteForCausalLM", "PhiForCausalLM", "OlmoeForCausalLM", "MixtralForCausalLM", "CohereForCausalLM"),
    *("BartForCausalLM", "MambaForCausalLM", "BertLMHeadModel"),
)


@pytest.mark.parametrize("name", FAMILIES)
def test_loss_and_gradients_are_those_of_the_logits(name: str) -> None:
    outcome = try_class(name, causal_classes()[name])
    assert outcome.state == "exact", outcome


def test_a_wrong_scale_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison fails where the logit scale of Granite is dropped."""
    monkeypatch.setattr(LazyLogits, "__mul__", lambda self, factor: self)
    assert try_class.__wrapped__("GraniteForCausalLM", "granite").state == "different"


def test_conditional_generation() -> None:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"vocab_size": 131, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    torch.manual_seed(0)
    model = T5ForConditionalGeneration(T5Config(**sizes, dropout_rate=0.0, decoder_start_token_id=0))
    assert_exact(model.train())


def test_models_that_cannot_be_taken_over_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedModelError, match="ProphetNetForCausalLM"):
        apply(small("ProphetNetForCausalLM"), zloss.StandardZLoss(1e-4))
    with pytest.raises(CoordinateError, match="Gemma2ForCausalLM"):  # centered under a softcap
        apply(small("Gemma2ForCausalLM"), zloss.CenteredZLoss(1e-4))
    model = small("BambaForCausalLM")
    model.config.z_loss_coefficient = 1e-3  # a Z-loss of the model's own
    with pytest.raises(UnsupportedModelError, match="z_loss_coefficient"):
        apply(model, zloss.StandardZLoss(1e-4))


def test_the_table_has_every_causal_class_and_no_third_outcome() -> None:
    transformers = pytest.importorskip("transformers")
    table = support()
    if transformers.__version__ != table.transformers:
        pytest.skip(f"the table is of transformers {table.transformers}")
    assert {model.name for model in table.classes} == set(causal_classes())
    assert {model.state for model in table.classes} <= {"exact", "refused", "not built"}
    assert table.count("exact") >= 150
    assert all(model.name in model.detail for model in table.classes if model.state == "refused")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_sweep_gives_the_table() -> None:
    states = {name: try_class(name, model_type).state for name, model_type in causal_classes().items()}
    assert states == {model.name: model.state for model in support().classes}
