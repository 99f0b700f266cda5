"""What a model is measured with: its head with c, λ_diag, β and the spectra, and the blocks of a text that it can read."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zloss.errors import CheckpointError, InputError
from zloss.head.arguments import HeadProblem, prepare_head
from zloss.head.options import HeadOptions, check_vocab
from zloss.head.spectrum import HeadSpectrum, head_spectra
from zloss.models.checkpoint import Checkpoint, resolve_block_size
from zloss.models.output_head import OutputHead, find_head
from zloss.objectives import CrossEntropy
from zloss.results.options import BosPolicy, Coordinate, SvdMethod
from zloss.text import Blocks, Corpus, make_blocks

COORDINATES: tuple[Coordinate, ...] = ("raw", "centered")
SOFTCAPPED = "softcapped logits are not shift-invariant, so μ and the centered head are undefined"
INFINITE_BIAS = "the head's bias contains -inf, so μ and the centered head are undefined"


@dataclass(frozen=True)
class Measurement:
    """One output head and the constants with which its tokens are measured."""

    head: OutputHead
    vocab: int
    """Rows inside log Z."""
    target: float
    """c."""
    coef: float
    """λ_diag."""
    gain_beta: float
    """β of the gain-aware weight 1 / (1 + β·A_p²)."""
    spectra: tuple[HeadSpectrum, HeadSpectrum]
    """The spectra of the raw and the row-centered head, in the order of `COORDINATES`."""
    mean_row_D: Tensor
    """w̄ of the scaled head, fp64."""

    def problem(self, hidden_TD: Tensor, target_T: Tensor) -> HeadProblem:
        """The head loss whose statistics an audit reads: plain cross-entropy with every statistic."""
        options = HeadOptions(
            objective=CrossEntropy(),
            valid_vocab=self.vocab,
            logit_scale=self.head.logit_scale,
            softcap=self.head.softcap,
            statistics="audit",
        )
        head = self.head
        return prepare_head(hidden_TD, head.weight_VD, target_T, head.bias_V, options)

    def spectrum(self, coordinate: Coordinate) -> HeadSpectrum:
        """The spectrum of the head in one coordinate."""
        return self.spectra[COORDINATES.index(coordinate)]

    @property
    def coordinates(self) -> tuple[Coordinate, ...]:
        """The coordinates that exist for this head."""
        return COORDINATES if self.lacks_centered is None else ("raw",)

    @property
    def lacks_centered(self) -> str | None:
        """Why μ and the centered head do not exist; None if they do."""
        return lacks_centered(self.head, self.vocab)


def lacks_centered(head: OutputHead, vocab: int) -> str | None:
    """Why the first `vocab` rows of a head have no μ and cannot be centered; None if they can."""
    if head.softcap is not None:
        return SOFTCAPPED
    return INFINITE_BIAS if head.bias_V is not None and bool(head.bias_V[:vocab].isneginf().any()) else None


def resolve_vocab(requested: int | str | None, rows: int, tokenizer_rows: int | None) -> int:
    """The number of rows inside log Z, μ and w̄ for a configured `valid_vocab`: a number, "tokenizer", or None for all."""
    if requested == "tokenizer":
        if tokenizer_rows is None:
            raise InputError("`valid_vocab` is 'tokenizer', but there is none: pass `tokenizer`, or a number.")
        return min(tokenizer_rows, rows)
    if isinstance(requested, str):
        try:
            requested = int(requested)
        except ValueError as error:
            raise InputError(
                f"`valid_vocab` is expected to be a number or 'tokenizer', but got {requested!r}."
            ) from error
    return check_vocab(requested, rows)


def measurement_of(
    head: OutputHead,
    valid_vocab: int | None = None,
    *,
    coef: float,
    gain_beta: float = 1e-2,
    svd: SvdMethod = "exact",
    seed: int = 0,
) -> Measurement:
    """The measurement of the first `valid_vocab` rows of a head (None: of all), at c = log V."""
    vocab = check_vocab(valid_vocab, head.vocab)
    weight_VD = head.weight_VD.detach()[:vocab]
    spectra = head_spectra(weight_VD, logit_scale=head.logit_scale, method=svd, seed=seed)
    mean_row_D = weight_VD.mean(dim=0, dtype=torch.float64) * head.logit_scale
    return Measurement(head, vocab, math.log(vocab), coef, gain_beta, spectra, mean_row_D)


@dataclass(frozen=True)
class ModelBlocks:
    """Blocks, and sentences for the report on how they were cut."""

    blocks: Blocks
    notes: tuple[str, ...]


def model_blocks(
    checkpoint: Checkpoint,
    corpus: Corpus,
    *,
    size: int | None,
    count: int | None,
    bos: BosPolicy = "auto",
    offset: int = 0,
) -> ModelBlocks:
    """The first `count` blocks after `offset`, or all; `size` None is the smaller of 256 and the number of positions of
    the model."""
    for name, value in (("blocks", count), ("block_size", size)):
        if value is not None and value < 1:
            raise InputError(f"`{name}` is expected to be a whole number ≥ 1, but got {value}.")
    bos_id = checkpoint.bos_id(bos)
    block_size, note = resolve_block_size(checkpoint, size, bos=bos_id is not None)
    blocks = make_blocks(corpus, checkpoint.tokenizer, size=block_size, count=count, bos_id=bos_id, offset=offset)
    check_token_ids(checkpoint, blocks)
    return ModelBlocks(blocks, (note,) if note else ())


def check_token_ids(checkpoint: Checkpoint, *texts: Blocks) -> None:
    """An error if the tokenizer gives an id for which the input embedding (or the head of a custom model) has no row."""
    model: Any = checkpoint.model
    if checkpoint.custom is None:
        part, rows = "input embedding", model.get_input_embeddings().weight.shape[0]
    else:
        part, rows = "head", find_head(checkpoint).vocab
    for blocks in texts:
        largest = max(int(blocks.stream.max()), blocks.bos_id or 0)
        if largest >= rows and checkpoint.tokenizer is None:
            raise InputError(f"`tokens` hold the id {largest}, but the {part} of {checkpoint.name} has {rows} rows.")
        if largest >= rows:
            raise CheckpointError(
                f"the tokenizer of {checkpoint.name} gives the token id {largest}, but the {part} has {rows} "
                "rows: put the tokenizer files that belong to these weights next to them."
            )
