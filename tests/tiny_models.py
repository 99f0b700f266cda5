"""Tiny language models of real architectures, random weights, saved in the Hugging Face format with a real tokenizer.

Heads get a common shift, so that raw and centered coordinates differ.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch

VOCAB, WIDTH = 512, 32


@functools.cache
def tokenizer_json() -> str:
    """A byte-level BPE trained on the documentation topics of Python."""
    from pydoc_data.topics import topics

    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB - 12, special_tokens=["<s>", "</s>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator([topics[name] for name in sorted(topics)[:40]], trainer)
    return str(tokenizer.to_str())


def save_tokenizer(folder: Path, *, bos: bool = False) -> None:
    from tokenizers import Tokenizer
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer.from_str(tokenizer_json())
    if bos:
        tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>").save_pretrained(folder)


def configs() -> dict[str, Any]:
    """One config per way a head can be: tied, untied, with bias, with scale, with cap, behind routers."""
    import transformers as t

    common = {"vocab_size": VOCAB, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None}
    llama = common | {
        "hidden_size": WIDTH,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
    }
    return {
        "gpt2": t.GPT2Config(**common, n_embd=WIDTH, n_layer=2, n_head=4, n_positions=128),
        "neox": t.GPTNeoXConfig(
            **common,
            hidden_size=WIDTH,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=48,
            max_position_embeddings=128,
            tie_word_embeddings=False,
        ),
        "phi": t.PhiConfig(**llama, tie_word_embeddings=False),
        "cohere": t.CohereConfig(**llama, logit_scale=0.25, tie_word_embeddings=True),
        "granite": t.GraniteConfig(**llama, logits_scaling=4.0, tie_word_embeddings=True),
        "gemma2": t.Gemma2Config(**llama, head_dim=8, final_logit_softcapping=2.0, query_pre_attn_scalar=8),
        "mixtral": t.MixtralConfig(**llama, num_local_experts=4, num_experts_per_tok=2, tie_word_embeddings=False),
    }


def save_model(kind: str, folder: Path, *, bos: bool = False, seed: int = 0) -> Path:
    """The tiny model `kind` with its tokenizer in `folder`."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(configs()[kind], dtype=torch.float32)
    with torch.no_grad():
        head = model.get_output_embeddings()
        head.weight.mul_(12).add_(0.4 * torch.randn(WIDTH))
        if getattr(head, "bias", None) is not None:
            head.bias.normal_()
    model.save_pretrained(folder)
    save_tokenizer(folder, bos=bos)
    return folder
