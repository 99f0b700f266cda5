"""The numbers of tokens that lie on several processes, in one collective: every rank's tokens count once.

Each rank sends its counts, its sums, and the K largest values of every tail. A quantile of all tokens is exact where no
value that a rank kept back can lie above it; where one can, it is left out. K follows the number of tokens: it is agreed on
without a further collective, because every rank knows all counts of the collective before.

Axes: R ranks, P numbers that a rank sends, T tokens of this rank, K values kept.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zloss.ranks.process_group import default_group, gathered
from zloss.statistics import LEVELS, MEANS, entry_name, sum_of_valid

FIRST_KEPT = 2048
"""K before the counts are known: enough for p99 of 100,000 evenly spread tokens per rank."""
SHARE = 0.02
"""K as a share of the tokens of the largest rank: twice what p99 needs where tokens are spread evenly."""


@dataclass(frozen=True)
class TokenTotals:
    """Values of this rank's tokens [T] by quantity, NaN at ignored tokens, and sums over them; all on the device."""

    values: dict[str, Tensor]
    tokens: Tensor
    cross_entropy: Tensor
    auxiliary: Tensor


class RankJoin:
    """Joins totals over all ranks; remembers how many values of a tail to send."""

    def __init__(self) -> None:
        self.kept = FIRST_KEPT

    @torch.no_grad()
    def join(self, totals: Sequence[TokenTotals]) -> list[dict[str, float]]:
        """The summary of each of `totals` over the tokens of all ranks, by name: tokens, ce, z, means and tails.

        Every rank calls it with as many totals.
        """
        kept = self.kept
        packed = torch.cat([_pack(part, kept) for part in totals])
        whole_RP = gathered(packed, default_group()).cpu()
        found, start, most = [], 0, 0.0
        for part in totals:
            width = _width(part, kept)
            found.append(_summary(list(part.values), whole_RP[:, start : start + width], kept))
            most = max(most, float(whole_RP[:, start].max()))
            start += width
        self.kept = max(FIRST_KEPT, 2 ** math.ceil(math.log2(SHARE * most + 64)))
        return found


def _tail_names(names: Sequence[str]) -> list[str]:
    return [name for name in names if name not in MEANS]


def _width(part: TokenTotals, kept: int) -> int:
    return 3 + len(part.values) + len(_tail_names(list(part.values))) * kept


def _pack(part: TokenTotals, kept: int) -> Tensor:
    """[tokens, Σ CE, Σ Z, Σ of every quantity, the K largest values of every tail], fp64."""
    device = part.tokens.device
    head = torch.stack([value.double().to(device) for value in (part.tokens, part.cross_entropy, part.auxiliary)])
    sums = [sum_of_valid(value_T.unsqueeze(0), part.tokens) for value_T in part.values.values()]
    largest = [_largest(part.values[name].double(), part.tokens, kept) for name in _tail_names(list(part.values))]
    return torch.cat([head, *sums, *largest])


def _largest(value_T: Tensor, tokens: Tensor, kept: int) -> Tensor:
    """The K largest values, −inf where there are fewer; NaN throughout where a valid token has one."""
    missing = value_T.isnan()
    filled_T = torch.cat([value_T.masked_fill(missing, -math.inf), value_T.new_full((kept,), -math.inf)])
    broken = missing.sum() > value_T.numel() - tokens
    return filled_T.topk(kept).values.masked_fill(broken, math.nan)


def _summary(names: list[str], whole_RP: Tensor, kept: int) -> dict[str, float]:
    tokens_R, ce_R, z_R = whole_RP[:, :3].T
    tokens = float(tokens_R.sum())
    if not tokens:
        return {"tokens": 0.0}
    found = {"tokens": tokens}
    for place, name in enumerate(names):
        found[name if name in MEANS else entry_name(name, "mean")] = float(whole_RP[:, 3 + place].sum()) / tokens
    start = 3 + len(names)
    for name in _tail_names(names):
        values_RK = whole_RP[:, start : start + kept]
        start += kept
        # A rank with more tokens than K kept back values, all of them at most its smallest that was sent.
        held_back = values_RK[:, -1][tokens_R > kept]
        bound = float(held_back.max()) if len(held_back) else -math.inf
        ordered = values_RK.flatten().sort(descending=True).values
        for level, q in LEVELS.items():
            value = _quantile_from_top(ordered, int(tokens), q, bound)
            if value is not None:
                found[entry_name(name, level)] = value
    # The parts of the loss come last: `ce` with label smoothing is not the mean of −log p.
    return found | {"ce": float(ce_R.sum()) / tokens, "z": float(z_R.sum()) / tokens}


def _quantile_from_top(ordered: Tensor, tokens: int, q: float, bound: float) -> float | None:
    """Linear between order statistics, from values in falling order; None where the lower one may be another."""
    rank = q * (tokens - 1)
    low = math.floor(rank)
    place = tokens - 1 - low
    if place >= len(ordered):
        return None
    below = float(ordered[place])
    if below < bound:
        return None
    above = float(ordered[max(place - 1, 0)])
    return below if rank == low else below + (above - below) * (rank - low)
