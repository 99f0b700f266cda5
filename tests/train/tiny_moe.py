"""Short runs of a tiny mixture of experts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.train.tiny_run import some_text
from zloss.results.run_config import MoeRun, TrainConfig, variants
from zloss.train.grid import Grid, run_grid
from zloss.train.options import RunOptions

SHAPE = {"top_k": 2, "experts": 4, "layers": 2, "width": 32, "heads": 2, "expert_width": 16}
VARIANTS = tuple(name for name in variants() if name != "token_layer_mean:matched")
COEF = 0.05
"""Large enough to show in a dozen steps."""


def tiny_moe_config(folder: Path, *, moe: dict[str, Any] | None = None, **changes: Any) -> TrainConfig:
    """Ten steps of two micro-batches."""
    folder.mkdir(parents=True, exist_ok=True)
    text = folder / "text.txt"
    if not text.exists():
        text.write_text(some_text(), encoding="utf-8")
    shape: dict[str, Any] = {**SHAPE, **(moe or {})}
    base = TrainConfig(
        model="moe",
        moe=MoeRun(**shape),
        train_tokenizer=300,
        texts=(str(text),),
        block_size=24,
        valid_blocks=6,
        steps=10,
        warmup=2,
        lr=3e-3,
        micro_batch=2,
        accumulate=2,
        adam_every=4,
        gradient_blocks=0,
    )
    return replace(base, **changes)


def routed(base: TrainConfig, router: str, **changes: Any) -> TrainConfig:
    """The run of one router variant at the tests' coefficient; `changes` are of its experts' part."""
    return replace(base, moe=replace(base.moe, router=router, router_coef=COEF, **changes))


def run_variants(
    base: TrainConfig, folder: Path, *, routers: tuple[str, ...] = VARIANTS, seeds: tuple[int, ...] = (1,)
) -> Path:
    """One folder of runs, without checkpoints."""
    grid = Grid(base, ("ce",), (0.0,), seeds, routers=routers, router_coefs=(COEF,))
    run_grid(grid, folder, options=RunOptions(checkpoint_every=0))
    return folder
