"""What of a Trainer's arguments defines an experiment: the settings that config.json of a recorded run holds.

Paths, logging, evaluation and hub settings are left out: runs may differ in them and still be a matched pair.
"""

from __future__ import annotations

from enum import Enum
from typing import Any

NAMES = (
    *("learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "warmup_ratio", "max_steps"),
    *("num_train_epochs", "per_device_train_batch_size", "gradient_accumulation_steps", "world_size", "max_grad_norm"),
    *("optim", "optim_args", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "bf16", "fp16", "tf32"),
    *("data_seed", "dataloader_drop_last", "train_sampling_strategy", "average_tokens_across_devices"),
    *("neftune_noise_alpha", "gradient_checkpointing", "torch_compile"),
    # TRL's SFTConfig
    *("max_length", "packing", "packing_strategy", "padding_free", "completion_only_loss", "assistant_only_loss"),
)


def experiment_settings(args: Any) -> dict[str, Any]:
    """The settings above that these arguments have, as JSON values."""
    found = {name: getattr(args, name) for name in NAMES if hasattr(args, name)}
    return {name: value.value if isinstance(value, Enum) else value for name, value in found.items()}


def training_data(dataset: Any) -> dict[str, Any] | None:
    """Fingerprint and length of the training data, as far as it has them."""
    found: dict[str, Any] = {}
    if isinstance(getattr(dataset, "_fingerprint", None), str):  # a dataset of `datasets`
        found["fingerprint"] = dataset._fingerprint
    if hasattr(dataset, "__len__"):
        found["examples"] = len(dataset)
    return found or None
