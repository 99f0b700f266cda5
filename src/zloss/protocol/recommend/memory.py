"""Whether training the model fits into memory, said before the first step."""

from __future__ import annotations

from pathlib import Path

import torch

from zloss.errors import CheckpointError
from zloss.measure.graph_room import free_bytes
from zloss.models.checkpoint import Checkpoint

COPIES = 4
"""The copy that is trained, its gradient, and both moments of Adam, all fp32."""
WEIGHTS = (".safetensors", ".gguf", ".bin")


def check_files_fit(model: str) -> None:
    """Refuse a local model whose weights alone, loaded and trained, exceed free memory; unknown sizes pass."""
    path = Path(model)
    files = list(path.iterdir()) if path.is_dir() else [path] if path.is_file() else []
    size = sum(file.stat().st_size for file in files if file.suffix in WEIGHTS)
    # Files of 16 bits hold half the bytes of the fp32 weights, so this refuses less than it could, never too much.
    _check(model, (1 + COPIES) * size)


def check_training_fits(checkpoint: Checkpoint) -> None:
    """Refuse a loaded model whose training needs more than the free memory."""
    trained = [parameter for parameter in checkpoint.model.parameters() if parameter.is_floating_point()]
    _check(checkpoint.name, COPIES * sum(4 * parameter.numel() for parameter in trained))


def _check(name: str, needed: int) -> None:
    free = free_bytes(torch.device("cpu"))
    if free and needed > free:
        raise CheckpointError(
            f"training {Path(name).name} needs at least {needed / 1e9:.1f} GB (weights, gradient, two moments of Adam), but "
            f"{free / 1e9:.1f} GB are free: run it on a larger machine, or train there and pass the folders of those `runs`."
        )
