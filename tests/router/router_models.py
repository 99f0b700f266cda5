"""Small Hugging Face mixture-of-experts models with random weights, one per family."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

V, D, E, K, L = 60, 16, 4, 2, 2


def family(name: str, **sizes: Any) -> Callable[[], Any]:
    """A function that builds a small causal model of a family."""

    def build() -> Any:
        import transformers

        common = {"vocab_size": V, "hidden_size": D, "num_hidden_layers": L, "max_position_embeddings": 32}
        common |= {
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "intermediate_size": 24,
            "num_experts_per_tok": K,
        }
        config = getattr(transformers, f"{name}Config")(**common, **sizes)
        return getattr(transformers, f"{name}ForCausalLM")(config)

    return build


def switch() -> Any:
    """An encoder and a decoder, with a router in two of four layers each."""
    from transformers import SwitchTransformersConfig, SwitchTransformersForConditionalGeneration

    sizes = {"vocab_size": V, "d_model": D, "d_kv": 8, "d_ff": 24, "num_heads": 2, "num_experts": E}
    depth = {"num_layers": 4, "num_decoder_layers": 4, "num_sparse_encoder_layers": 2, "num_sparse_decoder_layers": 2}
    noise = {"dropout_rate": 0.0, "router_jitter_noise": 0.0}
    config = SwitchTransformersConfig(**sizes, **depth, **noise, expert_capacity=64, decoder_start_token_id=0)
    return SwitchTransformersForConditionalGeneration(config)


SOFTMAX = {
    "mixtral": family("Mixtral", num_local_experts=E),
    "olmoe": family("Olmoe", num_experts=E),
    "qwen2_moe": family("Qwen2Moe", moe_intermediate_size=24, shared_expert_intermediate_size=24, num_experts=E),
    "qwen3_moe": family("Qwen3Moe", moe_intermediate_size=24, num_experts=E, head_dim=8),
}
LATENT = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}
GROUPS = {"n_routed_experts": E, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 0}
deepseek_v3 = family("DeepseekV3", moe_intermediate_size=24, **GROUPS, **LATENT)
"""A sigmoid router."""
phimoe = family("Phimoe", num_local_experts=E)
"""A router whose weights come out of a sampler: its code names neither softmax nor sigmoid."""


def seeded(build: Callable[[], Any]) -> Any:
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
