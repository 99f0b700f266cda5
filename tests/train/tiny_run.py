"""Short runs on tiny models that the tests of training share."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.tiny_models import save_model
from zloss.results.run_config import TrainConfig

SCRATCH = [
    *("--from-config", "tiny"),
    *("--train-tokenizer", "300"),
    *("--block-size", "24"),
    *("--valid-blocks", "6"),
    *("--micro-batch", "2"),
    *("--adam-every", "4"),
]
"""Options of `zloss train` for a model that trains in a moment."""


@functools.cache
def some_text() -> str:
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics)[:12])[:60_000]


def tiny_config(folder: Path, kind: str = "gpt2", **changes: Any) -> TrainConfig:
    """Twelve steps of a tiny model; text and model are saved in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    text, model = folder / "text.txt", folder / kind
    if not text.exists():
        text.write_text(some_text(), encoding="utf-8")
    if not model.exists():
        save_model(kind, model)
    base = TrainConfig(
        model=str(model),
        texts=(str(text),),
        block_size=24,
        valid_blocks=6,
        steps=12,
        warmup=2,
        lr=1e-3,
        micro_batch=2,
        accumulate=2,
        adam_every=4,
        gradient_blocks=2,
    )
    return replace(base, **changes)
