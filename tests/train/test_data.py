"""Batches are a pure function of seed and step; validation and training text are disjoint."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tiny_models import save_tokenizer
from tests.train.tiny_run import some_text
from zloss.errors import CorpusError
from zloss.results.run_config import TrainConfig
from zloss.train.data import batch_of, micro_batches, open_data


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from transformers import AutoTokenizer

    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(folder)
    return AutoTokenizer.from_pretrained(folder)


def config(folder: Path, **changes: Any) -> TrainConfig:
    text = folder / "text.txt"
    text.write_text(some_text(), encoding="utf-8")
    return replace(TrainConfig(texts=(str(text),), block_size=16, valid_blocks=5), **changes)


@pytest.mark.parametrize("bos", [None, 7])
def test_a_batch_holds_the_blocks_of_its_indices(tmp_path: Path, tokenizer: Any, bos: int | None) -> None:
    blocks = open_data(config(tmp_path), tokenizer, bos).train
    index = torch.tensor([3, 0, blocks.count - 1])
    inputs, targets = blocks.batch(index)
    for row, i in enumerate(index.tolist()):
        assert torch.equal(inputs[row], blocks.inputs(i, i + 1)[0])
        assert torch.equal(targets[row], blocks.targets(i, i + 1)[0])


def test_every_epoch_sees_every_block_once_in_an_order_of_its_own(tmp_path: Path, tokenizer: Any) -> None:
    blocks = open_data(config(tmp_path, blocks=24), tokenizer, None).train
    epochs = [torch.cat([batch_of(blocks, 1, step, 6) for step in range(4 * e + 1, 4 * e + 5)]) for e in range(2)]
    for order in epochs:
        assert sorted(order.tolist()) == list(range(24))
    assert epochs[0].tolist() != epochs[1].tolist()
    # A batch may straddle two epochs, and depends on nothing but seed and step.
    assert torch.equal(batch_of(blocks, 1, 2, 16), torch.cat([epochs[0][16:], epochs[1][:8]]))
    assert not torch.equal(batch_of(blocks, 2, 1, 6), batch_of(blocks, 1, 1, 6))


def test_dropout_differs_between_seeds_steps_and_micro_batches_and_not_between_methods(
    tmp_path: Path, tokenizer: Any
) -> None:
    base = config(tmp_path, micro_batch=2, accumulate=2)
    data = open_data(base, tokenizer, None)

    def seeds(**changes: Any) -> list[int]:
        runs = [replace(base, seed=seed, **changes) for seed in (1, 2)]
        return [batch.seed for run in runs for step in (1, 2) for batch in micro_batches(run, data, step)]

    assert len(set(seeds())) == 2 * 2 * 2
    assert seeds() == seeds(method="standard", coef=1e-3)


def test_one_text_serves_both_without_overlap(tmp_path: Path, tokenizer: Any) -> None:
    whole = open_data(config(tmp_path), tokenizer, None)
    assert whole.train.offset == 0
    assert whole.valid.offset == whole.train.count
    assert whole.valid.count == 5
    limited = open_data(config(tmp_path, blocks=10, offset=3), tokenizer, None)
    assert (limited.train.offset, limited.train.count, limited.valid.offset) == (3, 10, 13)
    assert torch.equal(limited.train.stream[:160], whole.train.stream[48:208])
    far = open_data(config(tmp_path, blocks=10, valid_offset=40), tokenizer, None)
    assert torch.equal(far.valid.stream, whole.train.stream[640:721])
    before = open_data(config(tmp_path, offset=20, valid_offset=2), tokenizer, None)
    assert (before.valid.offset, before.train.offset) == (2, 20)


def test_shared_text_is_refused(tmp_path: Path, tokenizer: Any) -> None:
    with pytest.raises(CorpusError, match="share text"):
        open_data(config(tmp_path, blocks=10, valid_offset=8), tokenizer, None)
    copy = tmp_path / "copy.txt"
    copy.write_text(some_text(), encoding="utf-8")
    with pytest.raises(CorpusError, match="share text"):
        open_data(config(tmp_path, valid_texts=(str(copy),)), tokenizer, None)
    apart = open_data(config(tmp_path, blocks=10, valid_texts=(str(copy),), valid_offset=10), tokenizer, None)
    assert apart.valid.offset == 10
    other = tmp_path / "other.txt"
    other.write_text("Nothing of this was trained on. " * 40, encoding="utf-8")
    assert open_data(config(tmp_path, valid_texts=(str(other),)), tokenizer, None).valid.offset == 0
    with pytest.raises(CorpusError, match="none to train on"):
        open_data(config(tmp_path, offset=10**5), tokenizer, None)


def test_a_text_with_fewer_blocks_than_validation_takes_says_so(tmp_path: Path, tokenizer: Any) -> None:
    """The error used to say that training blocks 0…37 and validation blocks -27…37 share text."""
    count = open_data(config(tmp_path), tokenizer, None).train.count + 5
    for valid_blocks in (count, count + 27):
        aside = rf"has {count} blocks of 16, .* after setting aside {valid_blocks} for validation"
        with pytest.raises(CorpusError, match=aside):
            open_data(config(tmp_path, valid_blocks=valid_blocks), tokenizer, None)


def test_wikitext_is_trained_on_its_own_split_and_says_so_when_it_cannot_be_fetched(
    tmp_path: Path, tokenizer: Any
) -> None:
    """Offline, the error names the train split, not the validation split."""
    with pytest.raises(CorpusError, match="the train split of Salesforce/wikitext"):
        open_data(replace(config(tmp_path), texts=(), corpus="wikitext-103", blocks=4), tokenizer, None)
