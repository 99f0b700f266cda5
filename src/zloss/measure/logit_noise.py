"""What 16-bit logits do to log-probabilities: δ = log p₁₆ − log p₃₂ on the first blocks of a text, from the same weights.

p₃₂ comes from fp32 logits of the loaded model (fp64 for an fp64 model). What p₁₆ comes from:

| case       | rounded to bf16 or fp16 | stands for |
|------------|--------------------------|------------|
| "storage"  | the fp32 logits | a stack that computes logits in fp32 and stores them in 16 bits |
| "product"  | hidden states, head, and the logits that come out | an output layer in 16 bits |
| "operands" | hidden states and head; the logits stay fp32 | the same with the remedy "fp32 logits" |

The centered head is taken as `zloss center` would save it: the mean row is subtracted in fp64, the result is rounded to the
dtype of the checkpoint. Its p₁₆ is still compared with p₃₂ of the original head, so the second rounding counts too. The
softcapped rows compare a model whose logits are 30·tanh(z/30) with itself: what the cap would leave, not what it does to the
model.

With d = z₁₆ − z₃₂ minus its mean under p₃₂, log Z₁₆ − log Z₃₂ is KL = log Σ p₃₂ e^d plus that mean, and δ = d − KL: no
difference of large numbers. Axes: C tokens of a chunk, R rows of the head, V vocabulary, D width.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple, get_args

import torch
from torch import Tensor

from zloss.head.rows import softcapped
from zloss.models.output_head import HiddenStates, OutputHead
from zloss.results.audit import LogitNoise, NoiseNumbers
from zloss.results.logprobs import Format, LogprobNoise, NoiseCase, NoiseHead, gap_of
from zloss.tensors import compute_dtype
from zloss.text import Blocks

NOISE_BLOCKS = 8
"""Blocks on which stored logits are measured: 2,048 tokens at the default size."""
PRODUCT_BLOCKS = 2
"""Blocks on which 16-bit products are measured: each of them costs a product with the whole head."""
STORAGE: dict[Format, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16}
SOFTCAP = 30.0
ROWS, CHUNK_VALUES, GAP_VALUES = 1024, 1 << 24, 1 << 20
"""Rows of the head that are converted at once; entries of a chunk of logits (64 MB in fp32), and of a part of it that is compared
at once (4 MB, so that it stays in the cache)."""


Centered = tuple[Tensor, torch.dtype]
"""(row that is subtracted from every row of the head, dtype in which the difference is saved)."""


class Row(NamedTuple):
    """Which δ."""

    format: Format
    case: NoiseCase
    head: NoiseHead


def block_tokens(
    hidden_of: HiddenStates, blocks: Blocks, device: torch.device, batch_blocks: int, known: Mapping[int, Tensor]
) -> Iterator[tuple[Tensor, Tensor]]:
    """(hidden states [T, D], targets [T]) of each block that is measured.

    `known`: hidden states of batches that have been computed already, by their first block.
    """
    count = min(NOISE_BLOCKS, blocks.count)
    for start in range(0, count, batch_blocks):
        inputs_BN, targets_BN = blocks.batch(slice(start, min(start + batch_blocks, blocks.count)))
        hidden_TD = known.get(start)
        if hidden_TD is None:
            hidden_TD = blocks.counted(hidden_of(inputs_BN.to(device))).flatten(0, 1)
        for hidden_ND, target_N in zip(torch.split(hidden_TD, blocks.size), targets_BN.to(device), strict=True):
            if start < count:
                yield hidden_ND, target_N
            start += 1


@torch.no_grad()
def logit_noise(
    head: OutputHead,
    sequences: Iterable[tuple[Tensor, Tensor]],
    *,
    vocab: int,
    mean_row_D: Tensor | None,
    saved_dtype: torch.dtype,
) -> LogitNoise:
    """δ of the tokens of some sequences, each (hidden states, targets); 16-bit products only of the first `PRODUCT_BLOCKS`.

    `mean_row_D`: w̄ of the unscaled head, None for a head without μ; then there are no centered numbers. Tokens whose log p₃₂
    is not finite do not count. If logits overflow the 16-bit format, the numbers are None.
    """
    hidden, targets = zip(*sequences, strict=True)
    hidden_TD, target_T, sizes = torch.cat(hidden), torch.cat(targets), [len(target) for target in targets]
    size, with_products = max(1, CHUNK_VALUES // vocab), sum(sizes[:PRODUCT_BLOCKS])
    bounds = sorted({*range(0, with_products, size), *range(with_products, len(target_T), size), len(target_T)})
    gaps: dict[Row, list[Tensor]] = {}
    for start, stop in itertools.pairwise(bounds):
        chunk = hidden_TD[start:stop], target_T[start:stop].unsqueeze(1)
        for row, gap_C4 in _chunk_noise(head, vocab, *chunk, mean_row_D, saved_dtype, products=start < with_products):
            gaps.setdefault(row, []).append(gap_C4.cpu())
    found: dict[Row, list[Tensor]] = {}
    for row, parts in gaps.items():
        gap_T4 = torch.cat(parts)
        lengths = sizes if len(gap_T4) == len(target_T) else sizes[:PRODUCT_BLOCKS]
        found[row] = [gap_N4[gap_N4[:, 3] == 1, :3] for gap_N4 in torch.split(gap_T4, lengths)]
    order = [*STORAGE, *get_args(NoiseCase), *get_args(NoiseHead)]
    rows = tuple(_summary(row, found[row]) for row in sorted(found, key=lambda row: [*map(order.index, row)]))
    stored = {(row.format, row.head): row.gap for row in rows if row.case == "storage"}

    def rms(name: Format, head: NoiseHead) -> float | None:
        gap = stored.get((name, head))
        return None if gap is None or gap.nonfinite else gap.rms

    return LogitNoise(
        tokens=max((row.gap.tokens + row.gap.nonfinite for row in rows), default=0),
        saved_dtype=str(saved_dtype).removeprefix("torch."),
        **{name: NoiseNumbers(rms(name, "raw"), rms(name, "centered")) for name in STORAGE},
        rows=rows,
    )


def _summary(row: Row, sequences: list[Tensor]) -> LogprobNoise:
    """The numbers of one row from δ(y), Σ p δ² and KL of the tokens of each sequence, [T, 3]."""
    _, square_T, kl_T = torch.cat(sequences).double().T
    whole = bool(square_T.isfinite().all()) and len(square_T) > 0
    return LogprobNoise(
        **row._asdict(),
        gap=gap_of([numbers_T3[:, 0].numpy() for numbers_T3 in sequences]),
        on_policy_rms=math.sqrt(square_T.mean()) if whole else None,
        kl=float(kl_T.mean()) if whole else None,
    )


def _chunk_noise(
    head: OutputHead,
    vocab: int,
    hidden_CD: Tensor,
    target_C1: Tensor,
    mean_row_D: Tensor | None,
    saved_dtype: torch.dtype,
    *,
    products: bool,
) -> Iterator[tuple[Row, Tensor]]:
    """δ(y), Σ_i p₃₂ δ², KL(p₃₂ ‖ p₁₆), and whether log p₃₂ is finite, of every token: [C, 4] for each row of the table."""
    exact_CV = _capped(_logits(head, vocab, hidden_CD), head.softcap)
    p_CV = exact_CV.softmax(dim=1)
    finite_C1 = exact_CV.gather(1, target_C1).isfinite()

    def gap(stored_CV: Tensor) -> Tensor:
        rows = zip(
            *(torch.split(x, max(1, GAP_VALUES // vocab)) for x in (p_CV, exact_CV, stored_CV, target_C1)), strict=True
        )
        return torch.cat([torch.cat([_gap(*part) for part in rows]), finite_C1], dim=1)

    heads: dict[NoiseHead, Centered | None] = {"raw": None}
    if mean_row_D is not None:
        heads["centered"] = (mean_row_D, saved_dtype)
    for name, centered in heads.items():
        z_CV = exact_CV if centered is None else _logits(head, vocab, hidden_CD, centered)
        for format, dtype in STORAGE.items():
            yield Row(format, "storage", name), gap(z_CV.to(dtype))
            if products:
                wide_CV = _logits(head, vocab, hidden_CD, centered, dtype)
                yield Row(format, "operands", name), gap(_capped(wide_CV, head.softcap))
                narrow_CV = _capped(wide_CV.to(dtype).to(wide_CV), head.softcap).to(dtype)
                yield Row(format, "product", name), gap(narrow_CV)
    if head.softcap is None:
        exact_CV = _capped(exact_CV, SOFTCAP)
        p_CV = exact_CV.softmax(dim=1)
        for format, dtype in STORAGE.items():
            yield Row(format, "storage", "softcapped"), gap(exact_CV.to(dtype))


def _capped(z_CV: Tensor, cap: float | None) -> Tensor:
    return z_CV if cap is None else softcapped(z_CV, cap)


def _gap(p_CV: Tensor, exact_CV: Tensor, stored_CV: Tensor, target_C1: Tensor) -> Tensor:
    """δ(y), Σ p δ² and KL of every token, [C, 3]; NaN if a stored logit has overflowed."""
    d_CV = stored_CV.to(exact_CV.dtype) - exact_CV
    d_y_C1 = d_CV.gather(1, target_C1)
    mean_C1 = torch.linalg.vecdot(p_CV, d_CV).unsqueeze(1)
    if not bool(mean_C1.isfinite().all()):  # masked logits, or an overflow: what has p = 0 must not count
        d_CV.masked_fill_(p_CV == 0, 0)
        mean_C1 = torch.linalg.vecdot(p_CV, d_CV).unsqueeze(1)
    d_CV -= mean_C1
    square_C = torch.linalg.vecdot(p_CV * d_CV, d_CV)
    # Σ p d is 0 but for rounding, and e^d − 1 − d keeps it out.
    kl_C = torch.linalg.vecdot(p_CV, torch.expm1(d_CV).sub_(d_CV)).log1p()
    return torch.stack([(d_y_C1 - mean_C1).squeeze(1) - kl_C, square_C + kl_C.square(), kl_C], dim=1)


def _logits(
    head: OutputHead,
    vocab: int,
    hidden_CD: Tensor,
    centered: Centered | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Logits before a softcap, [C, V], in fp32 (fp64 for an fp64 model), from operands that are rounded to `dtype`."""
    compute = compute_dtype(hidden_CD, head.weight_VD)

    def rounded(x: Tensor) -> Tensor:
        return (x if dtype is None else x.to(dtype)).to(compute)

    hidden_CD = rounded(hidden_CD)
    z_CV = hidden_CD.new_empty(len(hidden_CD), vocab)
    for first in range(0, vocab, ROWS):
        weight_RD = head.weight_VD.detach()[first : min(first + ROWS, vocab)]
        if centered is not None:
            weight_RD = (weight_RD.double() - centered[0]).to(centered[1])
        torch.mm(hidden_CD, rounded(weight_RD).T, out=z_CV[:, first : first + ROWS])
    if head.bias_V is not None:
        bias_V = head.bias_V.detach()[:vocab]
        if centered is not None:
            bias_V = (bias_V.double() - bias_V.double().mean()).to(centered[1])
        z_CV += rounded(bias_V)
    return z_CV.mul_(head.logit_scale)
