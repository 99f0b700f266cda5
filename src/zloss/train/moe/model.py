"""The paper's controlled mixture-of-experts model as a small OLMoE: four blocks, width 256, eight experts, tied.

The paper does not state the expert width, the tokenizer or the positional encoding; ours are 512, the caller's
vocabulary and OLMoE's rotary embedding. About 16 M parameters at V = 8192.
"""

from __future__ import annotations

from typing import Any

import torch

from zloss.errors import MissingDependencyError
from zloss.models.checkpoint import Checkpoint
from zloss.results.moe_config import MoeRun
from zloss.router.conventions import check_count


def moe_checkpoint(moe: MoeRun, tokenizer: Any, *, block_size: int, seed: int) -> Checkpoint:
    """The model of a run, with as many rows as the tokenizer has entries."""
    # A block may have a BOS in front of its inputs.
    model = build_moe(moe, vocab=len(tokenizer), positions=block_size + 1, seed=seed)
    return Checkpoint(f"moe:top-{moe.top_k}", "config", model, tokenizer, wants_bos=False)


def build_moe(moe: MoeRun, *, vocab: int, positions: int = 256, seed: int) -> Any:
    """An `OlmoeForCausalLM` for blocks of up to `positions` tokens, with its load-balancing loss on.

    The weights are drawn from `seed`; the global random state stays as it was.
    """
    try:
        from transformers import OlmoeConfig, OlmoeForCausalLM
    except ImportError as error:
        raise MissingDependencyError("transformers", "The mixture-of-experts model", "train") from error
    for name, value in (("vocab", vocab), ("positions", positions)):
        check_count(name, value)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model_type: Any = OlmoeForCausalLM
        return model_type(
            OlmoeConfig(
                vocab_size=vocab,
                hidden_size=moe.width,
                intermediate_size=moe.expert_width,
                num_hidden_layers=moe.layers,
                num_attention_heads=moe.heads,
                num_key_value_heads=moe.heads,
                num_experts=moe.experts,
                num_experts_per_tok=moe.top_k,
                norm_topk_prob=True,
                max_position_embeddings=positions,
                tie_word_embeddings=True,
                output_router_logits=True,
                router_aux_loss_coef=moe.load_balance,
                pad_token_id=None,
                bos_token_id=None,
                eos_token_id=None,
                use_cache=False,
            )
        )
