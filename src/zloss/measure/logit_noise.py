"""What logits stored in 16 bits cost: δ = log p₁₆(y) − log p₃₂(y) of the target y, on the first blocks of a text.

p₃₂ comes from fp32 logits of the loaded model (fp64 for an fp64 model), p₁₆ from the same logits rounded to bf16 or fp16.
The centered head is taken as `zloss center` would save it: the mean row is subtracted in fp64, the result is rounded to the
dtype of the checkpoint. Its p₁₆ is still compared with p₃₂ of the original head, so the second rounding counts too.

The vocabulary is read in blocks of rows, so no copy of the head and no [T, V] logits are held.
Axes: T tokens, R rows of a block, V vocabulary, D width.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from zloss.measure.measurement import Measurement
from zloss.models.output_head import HiddenStates
from zloss.results.audit import LogitNoise, NoiseNumbers
from zloss.tensors import compute_dtype
from zloss.text import Blocks

NOISE_BLOCKS = 8
"""Blocks that are measured: 2,048 tokens at the default size."""
STORAGE = {"bf16": torch.bfloat16, "fp16": torch.float16}
ROWS, TOKENS = 8192, 512
"""Vocabulary rows and tokens whose logits are held at once."""


@torch.no_grad()
def logit_noise(
    measurement: Measurement,
    hidden_of: HiddenStates,
    blocks: Blocks,
    *,
    saved_dtype: torch.dtype,
    count: int = NOISE_BLOCKS,
    forward_blocks: int = 4,
) -> LogitNoise:
    """RMS of δ over the tokens of the first `count` blocks whose log p₃₂ is finite, raw and centered.

    A number is NaN where logits overflow the 16-bit format; the centered ones are None for a head without μ.
    """
    count, device = min(count, blocks.count), measurement.head.weight_VD.device
    squares: dict[tuple[str, str], float] = {}
    tokens = 0
    for start in range(0, count, forward_blocks):
        stop = min(start + forward_blocks, count)
        inputs_BN, targets_BN = blocks.batch(slice(start, stop))
        hidden_TD = blocks.counted(hidden_of(inputs_BN.to(device))).flatten(0, 1)
        target_T = targets_BN.flatten().to(device)
        for first in range(0, len(target_T), TOKENS):
            part = slice(first, first + TOKENS)
            log_p = target_log_probs(measurement, hidden_TD[part], target_T[part], saved_dtype)
            reference_T = log_p.pop(("raw", "exact")).double()
            finite_T = reference_T.isfinite()
            tokens += int(finite_T.sum())
            for key, log_p_T in log_p.items():
                gap_T = (log_p_T.double() - reference_T)[finite_T]
                squares[key] = squares.get(key, 0.0) + float(gap_T.square().sum())

    def rms(coordinate: str, storage: str) -> float | None:
        total = squares.get((coordinate, storage))
        return None if total is None or not tokens else math.sqrt(total / tokens)

    numbers = {storage: NoiseNumbers(rms("raw", storage), rms("centered", storage)) for storage in STORAGE}
    return LogitNoise(tokens=tokens, saved_dtype=str(saved_dtype).removeprefix("torch."), **numbers)


def target_log_probs(
    measurement: Measurement, hidden_TD: Tensor, target_T: Tensor, saved_dtype: torch.dtype
) -> dict[tuple[str, str], Tensor]:
    """log p(y) [T] by (coordinate, storage); storage "exact" is that of the raw logits before rounding."""
    log_z: dict[tuple[str, str], Tensor] = {}
    picked: dict[tuple[str, str], Tensor] = {}
    for first, raw_TR, centered_TR in _logits_by_rows(measurement, hidden_TD, saved_dtype):
        stored = {("raw", "exact"): raw_TR}
        for coordinate, z_TR in (("raw", raw_TR), ("centered", centered_TR)):
            if z_TR is not None:
                stored |= {(coordinate, name): z_TR.to(dtype).to(z_TR.dtype) for name, dtype in STORAGE.items()}
        here_T = (target_T >= first) & (target_T < first + raw_TR.shape[1])
        column_T1 = (target_T - first).clamp(0, raw_TR.shape[1] - 1).unsqueeze(1)
        for key, z_TR in stored.items():
            block_T, y_T = z_TR.logsumexp(dim=1), z_TR.gather(1, column_T1).squeeze(1)
            log_z[key] = torch.logaddexp(log_z[key], block_T) if key in log_z else block_T
            picked[key] = torch.where(here_T, y_T, picked.get(key, torch.zeros_like(y_T)))
    return {key: picked[key] - log_z[key] for key in log_z}


def _logits_by_rows(
    measurement: Measurement, hidden_TD: Tensor, saved_dtype: torch.dtype
) -> Iterator[tuple[int, Tensor, Tensor | None]]:
    """(first row, raw logits [T, R], those of the centered head as it would be saved, None without μ)."""
    head, vocab = measurement.head, measurement.vocab
    dtype = compute_dtype(hidden_TD, head.weight_VD)
    hidden_TD = hidden_TD.to(dtype)
    mean_row_D = measurement.mean_row_D / head.logit_scale
    bias_V = None if head.bias_V is None else head.bias_V.detach()[:vocab].double()
    for first in range(0, vocab, ROWS):
        rows = slice(first, min(first + ROWS, vocab))
        weight_RD = head.weight_VD.detach()[rows]
        raw_TR = hidden_TD @ weight_RD.to(dtype).T
        if bias_V is not None:
            raw_TR += bias_V[rows].to(dtype)
        raw_TR *= head.logit_scale
        if measurement.lacks_centered is not None:
            cap = head.softcap
            yield first, raw_TR if cap is None else cap * torch.tanh(raw_TR / cap), None
            continue
        saved_RD = (weight_RD.double() - mean_row_D).to(saved_dtype)
        centered_TR = hidden_TD @ saved_RD.to(dtype).T
        if bias_V is not None:
            centered_TR += (bias_V[rows] - bias_V.mean()).to(saved_dtype).to(dtype)
        yield first, raw_TR, centered_TR * head.logit_scale
