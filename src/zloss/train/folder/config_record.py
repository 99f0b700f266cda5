"""What config.json of a run holds: its configuration, its data, and the weights it starts from."""

from __future__ import annotations

from zloss.models.checkpoint import weight_fingerprint
from zloss.results.run_config import RunConfig, without_paths
from zloss.results.train_config import TrainConfig
from zloss.train.start.run_start import Start


def config_record(config: TrainConfig, start: Start) -> RunConfig:
    """The record of a run, without paths of the machine it runs on."""
    return RunConfig(
        config=without_paths(config),
        data=start.data.identity,
        initial_weights=weight_fingerprint(start.checkpoint.model) if config.pretrained else "seed",
    )
