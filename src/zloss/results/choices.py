"""Values that an option of a configuration may take, as written in files and on the command line."""

from __future__ import annotations

from typing import Literal

SMOLLM2 = "smollm2"
"""The default model of every command."""

BosPolicy = Literal["auto", "yes", "no"]
"""A BOS in front of every block: where the tokenizer itself would put one, always, or never."""
DtypeName = Literal["fp32", "fp64", "bf16"]
"""Precision of a model's weights and activations."""
CorpusName = Literal["pydoc", "wikitext-103", "fineweb-edu"]
"""Corpora that are known by name; `zloss.text` opens them."""
SvdMethod = Literal["exact", "randomized"]
"""How the spectrum of a head is computed: from its Gram matrix, or by the paper's randomized SVD."""
Precision = Literal["fp32", "bf16"]
"""Precision of a training step: fp32, or bf16 autocast over fp32 weights."""
HeadKind = Literal["fused", "paper"]
"""How a training step computes its loss: logits chunk by chunk, or materialised as in the paper."""
Decay = Literal["matrices", "all"]
"""Which parameters decay: tensors of two dimensions and more, or all."""
