"""The paper's controlled mixture-of-experts model as a small OLMoE: four blocks, width 256, eight experts, tied.

The paper does not state the expert width, the tokenizer or the positional encoding; ours are 512, the caller's
vocabulary and OLMoE's rotary embedding. About 16 M parameters at V = 8192.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from zloss.errors import InputError, MissingDependencyError
from zloss.models.checkpoint import Checkpoint
from zloss.source.router.convention import check_count
from zloss.train.moe.config import MoeRun


@dataclass(frozen=True)
class MoeModelConfig:
    """Shape of the model; the defaults are the paper's where it states them."""

    vocab: int
    top_k: int = 4
    layers: int = 4
    width: int = 256
    heads: int = 4
    experts: int = 8
    expert_width: int = 512
    block_size: int = 256
    load_balance_coef: float = 1e-2
    """Coefficient of the model's own load-balancing loss, applied when the router logits are output."""

    def __post_init__(self) -> None:
        for name in ("vocab", "top_k", "layers", "width", "heads", "experts", "expert_width", "block_size"):
            check_count(name, getattr(self, name))
        if self.top_k > self.experts:
            raise InputError(
                f"`top_k` is expected to be at most {self.experts}, the number of experts, but got {self.top_k}."
            )
        if self.width % self.heads:
            raise InputError(f"`width` is expected to be a multiple of `heads` = {self.heads}, but got {self.width}.")
        if self.width // self.heads % 2:
            raise InputError(
                f"the width of a head is expected to be even (rotary embedding), but {self.width} / {self.heads} is "
                f"{self.width // self.heads}."
            )


def moe_checkpoint(moe: MoeRun, tokenizer: Any, *, block_size: int, seed: int) -> Checkpoint:
    """The model of a run, with as many rows as the tokenizer has entries."""
    shape = MoeModelConfig(
        vocab=len(tokenizer),
        top_k=moe.top_k,
        layers=moe.layers,
        width=moe.width,
        heads=moe.heads,
        experts=moe.experts,
        expert_width=moe.expert_width,
        block_size=block_size + 1,
        load_balance_coef=moe.load_balance,
    )
    return Checkpoint(f"moe:top-{moe.top_k}", "config", build_moe(shape, seed=seed), tokenizer, wants_bos=False)


def build_moe(config: MoeModelConfig, *, seed: int) -> Any:
    """An `OlmoeForCausalLM` with seeded weights, untouched global random state, and its load-balancing loss on."""
    try:
        from transformers import OlmoeConfig, OlmoeForCausalLM
    except ImportError as error:
        raise MissingDependencyError("transformers", "The mixture-of-experts model", "train") from error
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model_type: Any = OlmoeForCausalLM
        return model_type(
            OlmoeConfig(
                vocab_size=config.vocab,
                hidden_size=config.width,
                intermediate_size=config.expert_width,
                num_hidden_layers=config.layers,
                num_attention_heads=config.heads,
                num_key_value_heads=config.heads,
                num_experts=config.experts,
                num_experts_per_tok=config.top_k,
                norm_topk_prob=True,
                max_position_embeddings=config.block_size,
                tie_word_embeddings=True,
                output_router_logits=True,
                router_aux_loss_coef=config.load_balance_coef,
                pad_token_id=None,
                bos_token_id=None,
                eos_token_id=None,
                use_cache=False,
            )
        )
