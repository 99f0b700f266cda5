"""Every mixture-of-experts class of the support table: as many router terms as gates, and the loss of their logits.

The truth is taken where a gate multiplies: every `F.linear` with the weight of a gate, whichever module calls it and whatever
that module returns.
"""

from __future__ import annotations

import inspect
import math
import re
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from tests.integrations.transformers import tiny_configs
from tests.integrations.transformers.small_models import batch
from tests.integrations.transformers.tiny_configs import build_tiny, causal_classes
from zloss.audit.router import audit_router
from zloss.errors import InputError, ShapeError
from zloss.integrations.moe import attach_router_loss
from zloss.integrations.transformers import support
from zloss.models.routers import find_routers
from zloss.results.router import Scoring

E = 37
"""A number of experts that no other size of a small model equals."""
ROWS = (E, E + 1, 2 * math.isqrt(E))
"""Rows of a gate. One more than E: an expert that does nothing (LongCat, Zaya) or takes every token (Inkling). The last: the
product keys of Doge."""
EXPERTS = dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), E)
SPARSE: dict[str, dict[str, Any]] = {
    "DeepseekV3": {"first_k_dense_replace": 0},
    "Doge": {"is_moe": True},
    "Dots1": {"n_routed_experts": E, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    "Flint": {"mlp_only_layers": []},
    "Lfm2Moe": {"layer_types": ["full_attention", "full_attention"], "num_dense_layers": 0},
    "LongcatFlash": {"zero_expert_num": 1},
    "NemotronH": {"layers_block_type": ["moe", "full_attention"]},
}
"""What a class needs beyond the small config to have routers."""
SOFTMAX = (
    *("AriaText", "Cohere2Moe", "DeepseekV2", "Ernie4_5_Moe", "FlexOlmo", "GptOss", "GraniteMoe"),
    *("GraniteMoeHybrid", "GraniteMoeShared", "GraniteMoeSWA", "HunYuanMoEV1", "Jamba", "JetMoe", "LongcatFlash"),
    *("Mellum", "MiniMax", "Mixtral", "Olmoe", "Phimoe", "Qwen2Moe", "Qwen3_5Moe", "Qwen3Moe", "Qwen3Next", "Zaya"),
)
SIGMOID = (
    *("Afmoe", "AXK1", "AXK2", "BailingHybrid", "Beam", "DeepseekV3", "DeepseekV32", "Dots1", "ExaoneMoe", "Flint"),
    *("Glm4Moe", "Glm4MoeLite", "GlmMoeDsa", "HYV3", "HYV4", "Inkling", "KimiLinear", "Kolibri1", "Laguna"),
    *("Lfm2Moe", "Llama4", "MiMoV2Flash", "MiniMaxM2", "MiniMaxM3VL", "NemotronH", "SolarOpen"),
)
OTHER = ("DeepseekV4",)
"""Softplus, by its configuration."""
PRODUCT_KEYS = ("Doge",)
"""Two softmaxes over √E keys instead of one over E experts."""
ELSEWHERE = {"DbrxForCausalLM", "Gemma4ForCausalLM", "Gemma4ForConditionalGeneration", "Qwen4ExpForCausalLM"}
"""Not built by the small configs; Dbrx and Gemma 4 are built below."""


@pytest.fixture(autouse=True)
def _version_of_the_table() -> None:
    installed = pytest.importorskip("transformers").__version__
    if installed != support().transformers:
        pytest.skip(f"the table is of transformers {support().transformers}, not {installed}")


class GateProducts(TorchFunctionMode):
    """x @ W.T of every call of `F.linear` with the weight of a gate, in fp64."""

    def __init__(self, gates: list[Tensor]) -> None:
        super().__init__()
        self.gates = {gate.data_ptr() for gate in gates}
        self.products: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear and args[1].data_ptr() in self.gates:
            operands = (*args, *(kwargs or {}).values())
            self.products.append(F.linear(*(None if x is None else x.detach().double() for x in operands)))
        return func(*args, **(kwargs or {}))


def gate_weights(model: nn.Module) -> list[Tensor]:
    """The weights with a row for each expert, other than those of the experts themselves."""
    found = []
    for module in model.modules():
        own = list(module.parameters(recurse=False))
        if not isinstance(module, nn.Embedding) and all(p.ndim < 3 for p in own):
            found += [p for p in own if p.ndim == 2 and p.shape[0] in ROWS]
    return found


def with_scaled_gates(model: nn.Module) -> nn.Module:
    """Gates large enough that decisions differ; some classes begin with zeros."""
    with torch.no_grad():
        for gate in gate_weights(model):
            gate.normal_(generator=torch.Generator().manual_seed(gate.numel()))
    return model.train()


def built(family: str, monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    name = f"{family}ForCausalLM"
    for key, value in EXPERTS.items():
        monkeypatch.setitem(tiny_configs.SMALL, key, value)
    if family in SPARSE:
        monkeypatch.setitem(
            tiny_configs.PER_CLASS, family, {**tiny_configs.PER_CLASS.get(family, {}), **SPARSE[family]}
        )
    return with_scaled_gates(build_tiny(name, causal_classes()[name]))


def check_loss_and_count(model: nn.Module) -> None:
    """One term per gate, and Σ of them the loss of the products of the gates."""
    gates = gate_weights(model)
    assert gates
    with attach_router_loss(model, coef=1.0, convention="token_layer_mean") as handle, GateProducts(gates) as seen:
        model(**batch())
    assert handle.last is not None
    experts = handle.last.stats.decisions.experts
    assert len(handle.last.per_layer) == len(find_routers(model).modules) == len(gates) == len(seen.products)
    log_z = torch.cat([torch.logsumexp(product.reshape(-1, experts), dim=1) for product in seen.products])
    wanted = float((log_z - math.log(experts)).square().mean())
    assert wanted > 1e-3
    assert float(handle.last.loss.detach()) == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("family", SOFTMAX)
def test_a_gate_is_counted_twice_or_left_out(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """JetMoe lists the gate of its attention twice: 9 routers instead of 6, and a loss 6 % off."""
    check_loss_and_count(built(family, monkeypatch))


@pytest.mark.parametrize(("family", "scoring"), [*((f, "sigmoid") for f in SIGMOID), *((f, "other") for f in OTHER)])
def test_a_router_without_a_softmax_gets_a_z_loss(
    family: str, scoring: Scoring, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A comment that names a softmax made Laguna and MiniMax-M3 "unknown", and DeepSeek-V4's softplus passed for it too."""
    model = built(family, monkeypatch)
    routers = find_routers(model)
    assert routers.scoring == scoring
    if family != "DeepseekV4":  # routes its first layers by a hash of the token, which transformers does not record
        assert len(routers.modules) == len(gate_weights(model))
    with pytest.raises(InputError, match="no softmax normalizer"):
        attach_router_loss(model, coef=1.0, convention="token_layer_mean")


def test_a_class_with_routers_is_missing_here() -> None:
    import transformers

    named = set()
    for name in causal_classes():
        source = inspect.getsource(sys.modules[getattr(transformers, name).__module__])
        if '"router_logits": OutputRecorder' in source or '"router_logits": [' in source:
            named.add(name)
    assert named == {f"{family}ForCausalLM" for family in (*SOFTMAX, *SIGMOID, *OTHER, *PRODUCT_KEYS)} | ELSEWHERE


def test_dbrx_s_router_returns_a_tensor_by_itself() -> None:
    from transformers import DbrxConfig, DbrxForCausalLM

    parts = {
        "attn_config": {"kv_n_heads": 1, "rope_theta": 1e4, "clip_qkv": 8},
        "ffn_config": {"hidden_size": 32, "ffn_hidden_size": 24, "moe_num_experts": E, "moe_top_k": 2},
    }
    config = DbrxConfig(d_model=32, n_heads=2, n_layers=2, max_seq_len=32, vocab_size=131, **parts)
    torch.manual_seed(0)
    check_loss_and_count(with_scaled_gates(DbrxForCausalLM(config)))


def gemma4() -> nn.Module:
    from transformers import Gemma4ForCausalLM, Gemma4TextConfig

    sizes = {"vocab_size": 131, "vocab_size_per_layer_input": 131, "hidden_size": 32, "hidden_size_per_layer_input": 8}
    sizes |= {"intermediate_size": 24, "moe_intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= {"num_key_value_heads": 1, "head_dim": 16, "global_head_dim": 16, "num_kv_shared_layers": 0}
    sizes |= {"layer_types": ["sliding_attention", "full_attention"]}
    config = Gemma4TextConfig(**sizes, enable_moe_block=True, num_experts=E, top_k_experts=2)
    torch.manual_seed(0)
    return with_scaled_gates(Gemma4ForCausalLM(config))


def test_probabilities_are_taken_for_logits() -> None:
    """Gemma 4's router returns its softmax as `router_logits`: log Z of that is not the router's."""
    model = gemma4()
    with (
        attach_router_loss(model, coef=1.0, convention="token_layer_mean", top_k=2),
        pytest.raises(InputError, match=r"layers\.0\.router.*returns probabilities instead of logits"),
    ):
        model(**batch())
    found = audit_router(model, [{"input_ids": batch()["input_ids"]}], top_k=2)
    assert (found.log_z, found.absolute, found.layers) == (None, None, 2)
    assert any("returns probabilities instead of logits" in reason for reason in found.reasons)


@pytest.mark.parametrize("family", PRODUCT_KEYS)
def test_logits_that_are_not_tokens_by_experts_are_flattened_to_more_tokens(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Doge's [2, T, √E] counted as twice the tokens and √E experts."""
    model, inputs = built(family, monkeypatch), batch()
    sentence = r"router 'model\.layers\.0\.mlp' \(DogeCDMoE\) .* \[32, experts\], but gave \[2, 32, 6\]"
    with (
        attach_router_loss(model, coef=1.0, convention="token_layer_mean"),
        pytest.raises(ShapeError, match=sentence),
    ):
        model(**inputs)
    with pytest.raises(ShapeError, match=sentence), find_routers(model).capture():
        model(**inputs)
    found = audit_router(model, [{"input_ids": inputs["input_ids"]}])
    assert (found.log_z, found.absolute, found.decisions, found.layers) == (None, None, 0, 2)
    assert any(re.search(sentence, reason) for reason in found.reasons)


def test_numbers_of_a_router_are_shown_under_another_one_s_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """JetMoe calls its attention before its experts and registers it after them."""
    model = built("JetMoe", monkeypatch).eval()
    ids = batch()["input_ids"]
    found = audit_router(model, [{"input_ids": ids}])
    assert found.layers == 4
    outputs: dict[str, Tensor] = {}
    for name, module in model.named_modules():
        if name.endswith("router.layer"):
            module.register_forward_hook(lambda _m, _i, output, name=name: outputs.update({name: output}))
    with torch.no_grad():
        model(input_ids=ids)
    assert len(outputs) == 4
    got = {layer.name: layer.log_z_mean for layer in found.per_layer}
    assert got == pytest.approx(
        {name.removesuffix(".layer"): float(torch.logsumexp(out, dim=-1).mean()) for name, out in outputs.items()}
    )
