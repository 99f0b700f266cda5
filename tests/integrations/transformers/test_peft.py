"""Adapters of PEFT: on the body, on the head, a saved head, prompts; what is no matrix product is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.integrations.transformers.small_models import (
    OBJECTIVE,
    assert_equals_truth,
    assert_exact,
    batch,
    small,
    truth,
)
from zloss.errors import UnsupportedModelError
from zloss.integrations.transformers import apply

peft = pytest.importorskip("peft")


def adapted(model: Any = None, **options: Any) -> Any:
    model = small() if model is None else model
    torch.manual_seed(3)
    config = peft.LoraConfig(r=4, task_type="CAUSAL_LM", lora_dropout=0.0, init_lora_weights=False, **options)
    return peft.get_peft_model(model, config)


PLACES: dict[str, dict[str, Any]] = {
    "attention": {"target_modules": ["q_proj", "v_proj"]},
    "head": {"target_modules": ["q_proj", "lm_head"]},
    "saved head": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("order", ["inside first", "outside"])
def test_lora(place: str, order: str) -> None:
    wanted = truth(adapted(**PLACES[place]), batch())
    model = small()
    if order == "outside":
        model = adapted(model, **PLACES[place])
        handle = apply(model, OBJECTIVE)
    else:
        handle = apply(model, OBJECTIVE)
        model = adapted(model, **PLACES[place])
    with handle:
        assert_equals_truth(model, batch(), wanted)


def test_a_disabled_adapter_on_the_head() -> None:
    model = adapted(**PLACES["head"])
    model.base_model.disable_adapter_layers()
    model.get_input_embeddings().weight.requires_grad_(True)
    assert_exact(model)


def test_prompt_tuning() -> None:
    torch.manual_seed(3)
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    assert_exact(peft.get_peft_model(small(), config))


def test_what_is_not_plain_lora_on_the_head_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnsupportedModelError, match="DoRA"):
        apply(adapted(target_modules=["lm_head"], use_dora=True), OBJECTIVE)
    assert_exact(adapted(target_modules=["q_proj"], use_dora=True))
    model = peft.get_peft_model(small(), peft.IA3Config(target_modules=["lm_head"], feedforward_modules=[]))
    with pytest.raises(UnsupportedModelError, match="output head"):
        apply(model, OBJECTIVE)
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.20.0")
    with pytest.raises(UnsupportedModelError, match=r"peft 0\.20\.0 .* peft ≥ 0\.21"):
        apply(adapted(**PLACES["attention"]), OBJECTIVE)
