"""A training run at the paper's scale."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from zloss.results.train_config import TrainConfig
from zloss_paper.engine.paper_models import MODEL_IDS
from zloss_paper.engine.texts import CORPUS_NAMES


def paper_run(model: str, corpus: str, **settings: Any) -> TrainConfig:
    """A run at the paper's scale: bf16 autocast, materialised logits, the paper's optimizer; `settings` are the table's own."""
    base = TrainConfig(
        model=MODEL_IDS[model],
        corpus=CORPUS_NAMES[corpus],
        block_size=256,
        lr=5e-5,
        beta1=0.9,
        beta2=0.95,
        weight_decay=0.1,
        clip=1.0,
        precision="bf16",
        head="paper",
        steps=1200,
        warmup=60,
        micro_batch=8,
        accumulate=2,
    )
    return replace(base, **settings)
