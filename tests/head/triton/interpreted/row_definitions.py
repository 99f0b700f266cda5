"""The row kernels' definitions in fp64, and how far the ops are from them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tests.laws.definitions import relative_error
from zloss.head import triton as ops


@dataclass(frozen=True)
class Rows:
    """Logits with padding columns and ignored rows, both full of what must never be read, and coefficients."""

    logits: Tensor
    index: Tensor
    coefficients: tuple[Tensor, Tensor, Tensor]
    vocab: int
    scale: float
    softcap: float | None

    @property
    def counted(self) -> Tensor:
        return self.index >= 0


def make_rows(
    vocab: int,
    *,
    padding: int = 3,
    tokens: int = 3,
    dtype: torch.dtype = torch.float32,
    scale: float = 1.0,
    softcap: float | None = None,
    spread: float = 3.0,
) -> Rows:
    g = torch.Generator().manual_seed(vocab)
    logits = (spread * torch.randn(tokens, vocab + padding, generator=g) + 1.0).to(dtype)
    logits[0, vocab - 1] = 4 * spread  # a maximum that only the last block knows
    logits[2, 0] = 4 * spread  # and one that it must not forget
    logits[:, vocab:] = 1e4
    index = torch.randint(vocab, (tokens,), generator=g)
    index[1] = -1
    p, target, uniform = (torch.rand(tokens, generator=g) + 0.5 for _ in range(3))
    return Rows(logits, index, (p, target, uniform), vocab, scale, softcap)


def final_logits(rows: Rows) -> Tensor:
    z = rows.scale * rows.logits[:, : rows.vocab].double()
    return z if rows.softcap is None else rows.softcap * torch.tanh(z / rows.softcap)


def statistics(rows: Rows) -> dict[str, Tensor]:
    """log Z, ‖p‖², the mean logit and z_y: quantities that do not depend on where a row was anchored."""
    z = final_logits(rows)
    picked = z.gather(1, rows.index.clamp_min(0).unsqueeze(1)).squeeze(1)
    return {
        "m": z.amax(1),
        "log Z": z.logsumexp(1),
        "‖p‖²": z.softmax(1).square().sum(1),
        "μ": z.mean(1),
        "z_y": torch.where(rows.counted, picked, 0.0),
        "H": torch.special.entr(z.softmax(1)).sum(1),
    }


def source(rows: Rows, *, slope: bool) -> Tensor:
    z = final_logits(rows)
    p, target, uniform = (coefficient.double().unsqueeze(1) for coefficient in rows.coefficients)
    out = torch.zeros(rows.logits.shape, dtype=torch.float64)
    inside = p * (z - z.amax(1, keepdim=True)).exp() - uniform
    inside -= target * torch.nn.functional.one_hot(rows.index.clamp_min(0), rows.vocab)
    if slope and rows.softcap is not None:
        inside *= 1 - (z / rows.softcap) ** 2
    out[:, : rows.vocab] = torch.where(rows.counted.unsqueeze(1), inside, 0.0)
    return out


def errors(rows: Rows) -> dict[str, float]:
    """Relative error of everything the ops return."""
    shape = rows.vocab, rows.scale, rows.softcap
    numbers = ops.row_statistics(rows.logits, rows.index, *shape).double()
    row_max, total, square, logit_sum, target, drop = numbers.unbind()
    got = {
        "m": row_max,
        "log Z": row_max + total.log(),
        "‖p‖²": square / total**2,
        "μ": logit_sum / rows.vocab,
        "z_y": target,
        "H": total.log() + drop / total,
    }
    found = {name: relative_error(got[name], truth) for name, truth in statistics(rows).items()}
    for slope in (False, True):
        out = ops.row_source(rows.logits, row_max.float(), rows.index, *rows.coefficients, *shape, slope, torch.float32)
        found[f"source {slope=}"] = relative_error(out, source(rows, slope=slope))
    if not rows.counted.all():
        counted = rows.logits[rows.counted][:, : rows.vocab], row_max[rows.counted].float()
        found |= exp_errors(*counted, rows)
    return found


def exp_errors(logits: Tensor, row_max: Tensor, rows: Rows) -> dict[str, float]:
    """E in 16 bits is the fp64 result to a rounding, and the maximum is found."""
    z = rows.scale * logits.double()
    slope = torch.ones_like(z)
    if rows.softcap is not None:
        z = rows.softcap * torch.tanh(z / rows.softcap)
        slope = 1 - (z / rows.softcap) ** 2
    truth = 4 * (z - z.amax(1, keepdim=True)).exp() * slope
    out = torch.full(logits.shape, torch.nan, dtype=torch.float16)
    index = ops.narrow_exp_(logits, out, row_max, 4.0, rows.scale, rows.softcap)
    # All errors are held to 1e-6; an fp16 E may be off by 2⁻¹¹.
    return {
        "E in 16 bits": relative_error(out, truth) * 1e-6 / 2**-11,
        "column of the maximum": float((z.gather(1, index[:, None])[:, 0] - z.amax(1)).abs().max()),
    }
