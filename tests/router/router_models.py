"""Small Hugging Face mixture-of-experts models with random weights, one per family."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

V, D, E, K, L = 60, 16, 4, 2, 2
COMMON: dict[str, Any] = {
    "vocab_size": V,
    "hidden_size": D,
    "num_hidden_layers": L,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}


def mixtral() -> Any:
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(MixtralConfig(**COMMON, intermediate_size=24, num_local_experts=E, num_experts_per_tok=K))


def olmoe() -> Any:
    from transformers import OlmoeConfig, OlmoeForCausalLM

    return OlmoeForCausalLM(OlmoeConfig(**COMMON, intermediate_size=24, num_experts=E, num_experts_per_tok=K))


def qwen2_moe() -> Any:
    from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

    return Qwen2MoeForCausalLM(
        Qwen2MoeConfig(
            **COMMON,
            intermediate_size=24,
            moe_intermediate_size=24,
            shared_expert_intermediate_size=24,
            num_experts=E,
            num_experts_per_tok=K,
        )
    )


def qwen3_moe() -> Any:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            **COMMON, intermediate_size=24, moe_intermediate_size=24, num_experts=E, num_experts_per_tok=K, head_dim=8
        )
    )


def switch() -> Any:
    from transformers import SwitchTransformersConfig, SwitchTransformersForConditionalGeneration

    return SwitchTransformersForConditionalGeneration(
        SwitchTransformersConfig(
            vocab_size=V,
            d_model=D,
            d_kv=8,
            d_ff=24,
            num_layers=4,
            num_decoder_layers=4,
            num_sparse_encoder_layers=2,
            num_sparse_decoder_layers=2,
            num_heads=2,
            num_experts=E,
            expert_capacity=64,
            dropout_rate=0.0,
            router_jitter_noise=0.0,
            decoder_start_token_id=0,
        )
    )


def deepseek_v3() -> Any:
    """A sigmoid router."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    return DeepseekV3ForCausalLM(
        DeepseekV3Config(
            **COMMON,
            intermediate_size=24,
            moe_intermediate_size=24,
            n_routed_experts=E,
            num_experts_per_tok=K,
            n_group=1,
            topk_group=1,
            first_k_dense_replace=0,
            kv_lora_rank=8,
            q_lora_rank=8,
            qk_rope_head_dim=4,
            qk_nope_head_dim=4,
            v_head_dim=8,
        )
    )


def phimoe() -> Any:
    """A router whose weights come out of a sampler: its own code names neither softmax nor sigmoid."""
    from transformers import PhimoeConfig, PhimoeForCausalLM

    return PhimoeForCausalLM(PhimoeConfig(**COMMON, intermediate_size=24, num_local_experts=E, num_experts_per_tok=K))


SOFTMAX = {"mixtral": mixtral, "olmoe": olmoe, "qwen2_moe": qwen2_moe, "qwen3_moe": qwen3_moe}


def seeded(build: Any) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = build()
        # Larger routers than a fresh initialisation's: decisions that differ from one another.
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "gate.weight" in name or "classifier" in name:
                    parameter.normal_(std=0.5)
        return model


def batch(rows: int = 3, length: int = 10, *, padded: bool = False) -> dict[str, Tensor]:
    ids = torch.randint(1, V, (rows, length), generator=torch.Generator().manual_seed(5))
    mask = torch.ones_like(ids)
    if padded:
        mask[1, 6:] = 0
        mask[2, 4:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
