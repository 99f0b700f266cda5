"""A small model trained by us, with and without a common shift of its head."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.train.tiny_run import some_text
from zloss.decide.recommend import CE_ARM
from zloss.models.checkpoint import load_checkpoint
from zloss.protocol.config import RecommendConfig
from zloss.results.run_config import TrainConfig
from zloss.train.options import RunOptions
from zloss.train.run import run_training
from zloss.train.start import prepare_start, shift_head_to_, untie_head_

SHIFT = 250.0


def train_model(folder: Path) -> Path:
    """A model from scratch after 60 steps, in the Hugging Face format; its text is `text.txt` in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    text = folder / "text.txt"
    text.write_text(some_text(), encoding="utf-8")
    config = TrainConfig(
        from_config="tiny",
        train_tokenizer=400,
        texts=(str(text),),
        block_size=64,
        valid_blocks=8,
        micro_batch=4,
        steps=60,
        warmup=6,
        lr=3e-3,
        gradient_blocks=0,
    )
    run_training(config, prepare_start(config), folder / "run", options=RunOptions(save_model=True, checkpoint_every=0))
    return folder / "run" / "model"


def shift_model(model: Path, folder: Path) -> Path:
    """The same model, untied, with rows shifted until p99 |μ| is 250: softmax and cross-entropy do not change."""
    checkpoint = load_checkpoint(str(model))
    data = prepare_start(replace(tiny_recommendation(model).train_config(CE_ARM, 1, 100))).data
    untie_head_(checkpoint)
    shift_head_to_(checkpoint, data.train, SHIFT)
    saved: Any = checkpoint.model
    saved.save_pretrained(folder)
    checkpoint.tokenizer.save_pretrained(folder)
    return folder


def tiny_recommendation(model: Path, **changes: Any) -> RecommendConfig:
    """100 steps of 64 tokens, two arms, two seeds."""
    text = next(parent / "text.txt" for parent in model.parents if (parent / "text.txt").is_file())
    base = RecommendConfig(
        model=str(model),
        texts=(str(text),),
        steps=100,
        seeds=(1, 2),
        max_arms=2,
        lr=1e-4,
        micro_batch=1,
        block_size=64,
        blocks=100,
        valid_blocks=32,
        audit_blocks=8,
    )
    return replace(base, **changes)
