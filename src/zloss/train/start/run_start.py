"""The start of a run: its data, and its model, which is the same for every method of a seed."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

from zloss.models.checkpoint import Checkpoint, load_checkpoint
from zloss.models.head_check import check_head
from zloss.models.output_head import find_head
from zloss.results.train_config import TrainConfig
from zloss.train.data.blocks import TrainData, open_data, training_text
from zloss.train.moe.model import moe_checkpoint
from zloss.train.start.from_config import build_from_config
from zloss.train.start.head_changes import shift_head_to_, untie_head_
from zloss.train.start.tokenizer import DEFAULT_VOCAB, load_tokenizer, train_tokenizer


@dataclass(frozen=True)
class Start:
    """What all runs of a grid share: tokens and, for a pretrained model, weights."""

    data: TrainData
    checkpoint: Checkpoint
    """As loaded or built; a run trains a model of its own, see `initial_checkpoint`."""


def prepare_start(config: TrainConfig) -> Start:
    """Load or build the model and tokenize the texts once for all runs of the same experiment."""
    checkpoint = load_checkpoint(config.model) if config.pretrained else _from_scratch(config, _tokenizer(config))
    data = open_data(config, checkpoint.tokenizer, checkpoint.bos_id(config.bos))
    check_head(checkpoint, find_head(checkpoint), data.valid.inputs(0, 1)[0])
    return Start(data, checkpoint)


def initial_checkpoint(start: Start, config: TrainConfig) -> Checkpoint:
    """A model of its own for one run: the pretrained weights, or weights drawn from the run's seed."""
    shared = start.checkpoint
    if config.pretrained:
        model = copy.deepcopy(shared.model)
        checkpoint = Checkpoint(shared.name, shared.source, model, shared.tokenizer, shared.wants_bos)
    else:
        checkpoint = _from_scratch(config, shared.tokenizer)
    for parameter in checkpoint.model.parameters():
        parameter.requires_grad_(parameter.is_floating_point())
    if config.untie:
        untie_head_(checkpoint)
    if config.head_shift:
        shift_head_to_(checkpoint, start.data.train, config.head_shift)
    return checkpoint


def _tokenizer(config: TrainConfig) -> Any:
    """The tokenizer of a model from scratch: a given one, or one trained on the training text."""
    if config.moe is not None and config.moe.tokenizer is not None:
        return load_tokenizer(config.moe.tokenizer)
    return train_tokenizer(training_text(config), config.train_tokenizer or DEFAULT_VOCAB)


def _from_scratch(config: TrainConfig, tokenizer: Any) -> Checkpoint:
    """A model with weights drawn from the run's seed."""
    if config.moe is not None:
        return moe_checkpoint(config.moe, tokenizer, block_size=config.block_size, seed=config.seed)
    assert config.from_config is not None
    return build_from_config(config.from_config, tokenizer, block_size=config.block_size, seed=config.seed)
