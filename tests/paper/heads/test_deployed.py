"""Perplexity of the centered logits as deployed."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from transformers import GPT2Config, GPT2LMHeadModel

from zloss.console import Silent
from zloss.models.checkpoint import Checkpoint
from zloss.text import Blocks
from zloss_paper.heads.recipe import deployed_perplexity

VOCAB = 50_000


def test_a_large_vocabulary_does_not_bias_the_perplexity() -> None:
    """On peaked logits torch's fp32 cross-entropy loses small terms of the softmax sum, more than centering changes."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCAB, n_positions=64, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0
    )
    model = GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        model.transformer.wte.weight.mul_(60).add_(2 * torch.randn(16))
    blocks = Blocks(torch.randint(VOCAB, (4 * 64 + 1,)), 64, 4, None, 0)
    found = deployed_perplexity(Checkpoint("tiny", "", model, None, False), blocks, Silent())
    with torch.no_grad():
        logits = model(blocks.inputs(0, 4)).logits.flatten(0, 1)
    target = blocks.targets(0, 4).reshape(-1)
    straight = math.exp(F.cross_entropy(logits.double(), target))
    assert found["raw"] == pytest.approx(straight, rel=2e-7)
    assert found["centered"] == pytest.approx(straight, rel=2e-7)
    # The mutation: the softmax left in fp32.
    assert math.exp(F.cross_entropy(logits, target, reduction="none").double().mean()) != pytest.approx(
        straight, rel=2e-7
    )
