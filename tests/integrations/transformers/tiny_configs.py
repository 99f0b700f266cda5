"""Every causal language model class of the installed transformers, at a size that builds in a moment."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

VOCAB = 131
LARGEST = 60_000_000
"""Parameters beyond which a class is not built: its default config has parts that no key here shrinks."""

WIDTH = dict.fromkeys(("hidden_size", "n_embd", "n_embed", "d_model", "embedding_size", "emb_dim"), 64)
WIDTH |= dict.fromkeys(("input_embedding_size", "output_embedding_size", "attention_hidden_size", "lru_width"), 64)
INNER = dict.fromkeys(("intermediate_size", "n_inner", "d_ff", "dff", "ffn_dim", "dim_ff", "d_inner"), 96)
INNER |= dict.fromkeys(("decoder_ffn_dim", "encoder_ffn_dim", "mlp_hidden_size", "ffn_hidden_size"), 96)
DEPTH = dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers"), 2)
DEPTH |= dict.fromkeys(("num_decoder_layers", "num_encoder_layers"), 2)
HEADS = dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"), 4)
HEADS |= dict.fromkeys(("encoder_attention_heads", "num_encoder_attention_heads", "num_decoder_attention_heads"), 4)
HEADS |= dict.fromkeys(("num_key_value_heads", "num_key_value_groups", "num_global_key_value_heads"), 2)
HEADS |= dict.fromkeys(("head_dim", "global_head_dim", "v_head_dim", "qk_head_dim", "dim_head", "d_kv"), 16)
HEADS |= {"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "kv_lora_rank": 16, "q_lora_rank": 16}
HEADS |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
HEADS |= {"linear_key_head_dim": 16, "linear_value_head_dim": 16}
HEADS |= {"index_topk": 4, "index_n_heads": 2, "index_head_dim": 16, "qk_dim_factor": 0.5}
LENGTH = dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_sequence_length"), 64)
LENGTH |= {"sliding_window": 16, "attention_window_size": 16, "num_hash_functions": 1, "type_vocab_size": 2}
EXPERTS = dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4)
EXPERTS |= dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk", "moe_top_k"), 2)
EXPERTS |= dict.fromkeys(
    ("moe_intermediate_size", "shared_expert_intermediate_size", "moe_shared_expert_intermediate"), 32
)
EXPERTS |= {"moe_shared_expert_intermediate_size": 32, "n_shared_experts": 1, "num_shared_experts": 1}
EXPERTS |= {"n_group": 1, "topk_group": 1, "moe_layer_start_index": 1}
STATES = {"state_size": 8, "mamba_d_state": 8, "ssm_state_size": 8, "conv_kernel": 4, "expand": 2, "mamba_expand": 2}
STATES |= {"mamba_n_heads": 4, "mamba_d_head": 32, "mamba_n_groups": 1, "mamba_headdim": 32, "n_groups": 1}
STATES |= {"mamba_num_heads": 4, "mamba_head_dim": 32, "num_mem_blocks": 1, "num_kv_shared_layers": 0}
STATES |= {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB}
SMALL = {"vocab_size": VOCAB} | WIDTH | INNER | DEPTH | HEADS | LENGTH | EXPERTS | STATES

PER_LAYER = (
    *("layer_types", "mlp_layer_types", "layers_block_type", "block_types", "no_rope_layers", "attention_layers"),
    *("moe_layers", "activation_sparsity_pattern", "layer_type_list", "hybrid_layer_ids", "mlp_only_layers"),
)
"""Lists with one entry per layer: kept at one layer of each kind."""
NESTED = ("text_config", "vision_config", "audio_config", "decoder", "encoder_config", "speech_config")
ROPE = {"head_dim": 8, "num_key_value_heads": 4}
"""Classes with latent attention rotate `qk_rope_head_dim` features, and call them `head_dim`."""
PER_CLASS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("AXK1", "AXK2", "BailingHybrid", "DeepseekV3", "DeepseekV32", "Glm4MoeLite", "GlmMoeDsa"), ROPE),
    **dict.fromkeys(("HYV4", "KimiLinear", "LongcatFlash", "MiniCPM3", "Youtu"), ROPE),
    **{key: {"rotary_dim": 8} for key in ("CodeGen", "GPTJ")},
    **{key: {"head_dim": 16} for key in ("HunYuanDenseV1", "HunYuanMoEV1", "Ministral")},
    **{key: {"logits_scaling": 8.0} for key in ("Granite", "GraniteMoe", "GraniteMoeShared")},
    **{key: {"head_dim": 16, "num_key_value_heads": 2} for key in ("Nemotron", "Qwen4Exp")},
    "DeepseekV2": ROPE | {"num_experts_per_tok": 2},
    "Bamba": {"attn_layer_indices": [1]},
    "Jamba": {"attn_layer_offset": 1, "attn_layer_period": 2},
    "GraniteMoeHybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "NemotronH": {"layers_block_type": ["linear_attention", "full_attention"]},
    "Mamba2": {"num_heads": 4, "head_dim": 32},
    "Zamba2": {"n_mamba_heads": 4, "mamba_headdim": 32, "attention_hidden_size": 128, "attention_head_dim": 32},
    "Reformer": {"axial_pos_embds_dim": (32, 32), "axial_pos_shape": (4, 4), "axial_norm_std": 1.0},
    "Marian": {"decoder_vocab_size": VOCAB},
    "xLSTM": {"embedding_dim": 64},
    "Xmod": {"default_language": "en_XX"},
    "FalconH1": {"mamba_d_ssm": 128},
}
"""What a class needs beyond the sizes above, by the beginning of its name."""
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def causal_classes() -> dict[str, str]:
    """Class name → model type, as transformers registers its causal language models."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as registered

    found: dict[str, str] = {}
    for model_type, names in registered.items():
        for name in names if isinstance(names, tuple) else (names,):
            found.setdefault(name, model_type)
    return found


def build_tiny(class_name: str, model_type: str) -> nn.Module:
    """A small fp32 model of the class, without dropout, seeded; raises what the class raises."""
    import transformers
    from transformers import CONFIG_MAPPING

    model_class = getattr(transformers, class_name)
    try:
        config = (model_class.config_class or CONFIG_MAPPING[model_type])()
    except Exception:
        config = CONFIG_MAPPING[model_type]()
    for name in NESTED:
        part = getattr(config, name, None)
        if part is not None and not isinstance(part, dict):
            _shrink(part)
    _shrink(config)
    family = class_name.removesuffix("ForCausalLM").removesuffix("ModelWithLMHead")
    for key, value in PER_CLASS.get(family, {}).items():
        _set(config, key, value)
    torch.manual_seed(0)
    with torch.device("meta"):
        size = sum(p.numel() for p in model_class(copy.deepcopy(config)).parameters())
    if size > LARGEST:
        raise ValueError(f"the small config still has {size / 1e6:.0f} M parameters")
    try:
        model = model_class._from_config(config, attn_implementation="eager")
    except Exception:
        model = model_class(config)
    model = model.float()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model  # type: ignore[no-any-return]


def _shrink(config: Any) -> None:
    for key, value in SMALL.items():
        old = getattr(config, key, None)
        if old is not None and not isinstance(old, (list, tuple)):
            _set(config, key, value)
    for key in PER_LAYER:
        old = getattr(config, key, None)
        if isinstance(old, (list, tuple)) and len(old) > 2:
            numbers = all(isinstance(entry, (int, float)) for entry in old)
            kinds = list(dict.fromkeys(old))
            _set(config, key, type(old)(list(old)[:2] if numbers else (kinds + kinds)[:2]))
    for key in list(vars(config)):
        if ("drop" in key or key.endswith("pdrop")) and isinstance(getattr(config, key), float):
            _set(config, key, 0.0)
    for key, value in TOKENS.items():
        old = getattr(config, key, None)
        if isinstance(old, list) or (isinstance(old, int) and old >= VOCAB):
            _set(config, key, value)
    if getattr(config, "is_decoder", None) is False:
        config.is_decoder = True


def _set(config: Any, key: str, value: Any) -> None:
    try:
        setattr(config, key, value)
    except Exception:  # a key that the class derives from others
        return
