"""The start of a run: its data, and its model, which is the same for every method of a seed."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any

from zloss.measure.model_blocks import check_token_ids
from zloss.models.checkpoint import DEFAULT_BLOCK_SIZE, Checkpoint, load_checkpoint, resolve_block_size
from zloss.models.output_head import check_head, find_head
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
    notes: tuple[str, ...] = ()
    """Sentences on how the texts were cut."""

    def settled(self, config: TrainConfig) -> TrainConfig:
        """`config` with the block size of these texts, where it leaves that to the model."""
        return replace(config, block_size=self.data.train.size) if config.block_size is None else config


def prepare_start(config: TrainConfig) -> Start:
    """Load or build the model and tokenize the texts once for all runs of the same experiment."""
    if config.pretrained:
        checkpoint = load_checkpoint(config.model, allow_pickle=None)
    else:
        checkpoint = _from_scratch(config, _tokenizer(config))
    bos_id = checkpoint.bos_id(config.bos)
    cut = resolve_block_size(checkpoint, config.block_size, bos=bos_id is not None)
    data = open_data(replace(config, block_size=cut.size), checkpoint.tokenizer, bos_id)
    check_token_ids(checkpoint, data.train, data.valid)
    check_head(checkpoint, find_head(checkpoint), data.valid.inputs(0, 1)[0])
    return Start(data, checkpoint, (cut.note,) if cut.note else ())


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
    size = config.block_size or DEFAULT_BLOCK_SIZE
    if config.moe is not None:
        return moe_checkpoint(config.moe, tokenizer, block_size=size, seed=config.seed)
    assert config.from_config is not None
    return build_from_config(config.from_config, tokenizer, block_size=size, seed=config.seed)
