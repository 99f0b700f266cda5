"""In what the runs of a training table differ from the paper's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zloss.errors import InputError
from zloss.results.train_config import TrainConfig
from zloss_paper.engine.paper_models import MODEL_IDS, given_model
from zloss_paper.training.setting import TrainingTableConfig


@dataclass(frozen=True)
class PaperSetting:
    """What the paper states of a table."""

    model: str
    corpus: str
    run: TrainConfig
    seeds: int


@dataclass(frozen=True)
class StartModel:
    """The model that the user wants the runs to start from."""

    source: str
    """Where to load it."""
    name: str | None
    """Its printed name where it is not the paper's model."""


def start_model(given: Sequence[str], model: str) -> StartModel | None:
    """The start of a table whose paper model is `model`, from the models the user names; None where none fits."""
    others = []
    for word in given:
        one = given_model(word)
        if one.known == model:
            return StartModel(one.folder or MODEL_IDS[model], None)
        if one.known is None and "=" in word:
            name = word.partition("=")[0]
            raise InputError(
                f"`models` has {word!r}: {name!r} is not a model of the paper; it has {', '.join(MODEL_IDS)}."
            )
        if one.known is None:
            others.append(one)
    return StartModel(others[0].word, others[0].printed) if others else None


def deviations(config: TrainingTableConfig, stated: PaperSetting, own_model: str | None) -> tuple[str, ...]:
    """In what the runs of `config` differ from the stated setting, one sentence each."""
    ours, paper = config.train, stated.run
    found = []
    if config.base is not None:
        found.append(f"the model is a small GPT-2 that the recipe pretrains, not {stated.model}")
    elif own_model is not None:
        found.append(f"the model is {own_model}, not {stated.model}")
    if ours.head_shift:
        found.append(
            f"its head is untied and shifted until p99 |μ| is about {ours.head_shift:g}: a probe of ours that leaves CE as it is"
        )
    if {source.corpus for source in config.texts} != {stated.corpus}:
        found.append(f"the text is {' + '.join(source.title for source in config.texts)}, not {stated.corpus}")
    if (ours.steps, ours.tokens_per_step) != (paper.steps, paper.tokens_per_step):
        found.append(
            f"{ours.steps} steps of {ours.tokens_per_step} tokens, not {paper.steps} of {paper.tokens_per_step:,}"
        )
    if ours.lr != paper.lr:
        found.append(f"the learning rate is {ours.lr:g} (ours), not {paper.lr:g}")
    if (ours.precision, ours.head) != (paper.precision, paper.head):
        found.append(f"{ours.precision} with the {ours.head} head, not {paper.precision} with materialised logits")
    if len(config.seeds) != stated.seeds:
        found.append(f"{len(config.seeds)} seeds, not {stated.seeds}")
    if not found and (ours.blocks, ours.block_size) != (paper.blocks, paper.block_size):
        found.append(
            f"{ours.blocks or 'all'} blocks of {ours.block_size}, not {paper.blocks or 'all'} of {paper.block_size}"
        )
    return tuple(found)
