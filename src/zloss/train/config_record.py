"""What config.json of a run holds: its configuration, its data, and the weights it starts from."""

from __future__ import annotations

import hashlib

from torch import nn

from zloss.results.run_config import RunConfig, without_paths
from zloss.results.train_config import TrainConfig
from zloss.train.start import Start


def config_record(config: TrainConfig, start: Start) -> RunConfig:
    """The record of a run, without paths of the machine it runs on."""
    return RunConfig(
        config=without_paths(config),
        data=start.data.identity,
        initial_weights=weight_fingerprint(start.checkpoint.model) if config.pretrained else "seed",
    )


def weight_fingerprint(model: nn.Module) -> str:
    """A checksum of the name, the shape and the first 64 entries of every tensor: cheap, and different between checkpoints."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        sample = tensor.detach().reshape(-1)[:64].double().tolist()
        digest.update(f"{name} {list(tensor.shape)} {sample}".encode())
    return digest.hexdigest()[:16]
