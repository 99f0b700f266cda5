"""A made-up training run of a tiny model as checkpoint folders, with or without a common shift that grows."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import zloss
from tests.tiny_models import save_model
from zloss.protocol.config import DriftConfig

STEPS = (100, 200, 500, 1000, 1500, 2000)
"""As text, 1000 comes before 200: the order must be numeric."""


def save_run(folder: Path, shifts: Sequence[float], *, steps: Sequence[int] = STEPS, noise: float = 1e-4) -> Path:
    """Checkpoints that differ by small random changes of every weight and a shift of all head rows.

    `shifts` are multiples of one fixed vector: they move μ of every token and leave softmax as it is.
    """
    from transformers import AutoModelForCausalLM

    first = save_model("neox", folder / "start")
    model: Any = AutoModelForCausalLM.from_pretrained(first)
    shutil.rmtree(first)
    generator = torch.Generator().manual_seed(7)
    head = model.get_output_embeddings()
    direction_D, given = torch.randn(head.weight.shape[1], generator=generator), 0.0
    for step, shift in zip(steps, shifts, strict=True):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += noise * parameter.std() * torch.randn(parameter.shape, generator=generator)
        zloss.shift_head_(head, (shift - given) * direction_D)
        given = shift
        save_checkpoint(model, folder / f"checkpoint-{step}")
    return folder


def save_checkpoint(model: Any, folder: Path) -> None:
    from tests.tiny_models import save_tokenizer

    model.save_pretrained(folder)
    save_tokenizer(folder)


def tiny_drift(*checkpoints: Path, **changes: Any) -> DriftConfig:
    options: dict[str, Any] = {"blocks": 16, "block_size": 64, "gradient_blocks": 2, **changes}
    return DriftConfig(checkpoints=tuple(map(str, checkpoints)), **options)
