"""Where a run starts: its model, the same for every method of a seed, and its data."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from zloss.errors import InputError
from zloss.models.checkpoint import Checkpoint, load_checkpoint
from zloss.models.output_head import OutputHead, check_head, find_head, hidden_states
from zloss.results.train_config import TrainConfig
from zloss.train.data import TrainData, gather, open_data, training_text
from zloss.train.from_config import DEFAULT_VOCAB, build_from_config, load_tokenizer, train_tokenizer
from zloss.train.moe.model import moe_checkpoint
from zloss.transport.interventions import shift_head_

SHIFT_BLOCKS = 4
"""Training blocks on which the size of a head shift is measured."""


@dataclass(frozen=True)
class Start:
    """What all runs of a grid share: tokens and, for a pretrained model, weights."""

    data: TrainData
    checkpoint: Checkpoint
    """As loaded; a run trains a copy."""


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
        _shift(checkpoint, start.data, config.head_shift)
    return checkpoint


def _tokenizer(config: TrainConfig) -> Any:
    if config.moe is not None and config.moe.tokenizer is not None:
        return load_tokenizer(config.moe.tokenizer)
    return train_tokenizer(training_text(config), config.train_tokenizer or DEFAULT_VOCAB)


def _from_scratch(config: TrainConfig, tokenizer: Any) -> Checkpoint:
    if config.moe is not None:
        return moe_checkpoint(config.moe, tokenizer, block_size=config.block_size, seed=config.seed)
    assert config.from_config is not None
    return build_from_config(config.from_config, tokenizer, block_size=config.block_size, seed=config.seed)


def untie_head_(checkpoint: Checkpoint) -> None:
    """Give the output head a table of its own with the same entries; an untied head stays as it is."""
    head = find_head(checkpoint)
    if head.tied:
        module: Any = head.module
        module.weight = nn.Parameter(head.weight_VD.detach().clone())
        checkpoint.config.tie_word_embeddings = False


@torch.no_grad()
def _shift(checkpoint: Checkpoint, data: TrainData, size: float) -> None:
    """Add s·ū/‖ū‖² to every row, ū the mean hidden state, with s such that p99 |μ| comes out as `size`."""
    head = find_head(checkpoint)
    if not isinstance(head.module, nn.Linear):
        raise InputError(
            f"`head_shift` needs an nn.Linear output head, but {checkpoint.name} has {type(head.module).__name__}."
        )
    hidden_TD = _hidden(checkpoint, head, data).double()
    mean_D = hidden_TD.mean(dim=0)
    direction_D = mean_D / mean_D.square().sum()
    along_T = hidden_TD @ direction_D * head.logit_scale
    shift = (size / float(along_T.abs().quantile(0.99))) * direction_D
    shift_head_(head.module, shift, model=checkpoint.model)


def _hidden(checkpoint: Checkpoint, head: OutputHead, data: TrainData) -> Tensor:
    count = min(SHIFT_BLOCKS, data.train.count)
    inputs, _ = gather(data.train, torch.arange(count))
    with hidden_states(checkpoint, head) as hidden_of:
        hidden = data.train.counted(hidden_of(inputs))
    return hidden.reshape(-1, hidden.shape[-1])
