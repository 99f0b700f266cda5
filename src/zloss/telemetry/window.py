"""The last n steps of a run: statistics of their tokens, kept on the device until a number is requested.

A step that is not logged costs one copy of its statistics, [T] per quantity, and no transfer. Older steps are dropped,
so memory is bounded by n·T numbers per quantity. Tails are exact, however the tokens are split into micro-batches.

Across processes one collective suffices: each rank sends its counts, its sums, and the K largest values of every tail. A
quantile over all tokens is exact if no value that a rank did not send can lie above it; otherwise it is left out. K follows
the number of tokens; ranks agree on it without another collective, because each knows all counts of the previous one.

Axes: R ranks, P numbers that a rank sends, T tokens of this rank, K values that it sends of every tail.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from zloss.distributed import default_group, gathered, world_size
from zloss.errors import InputError
from zloss.head.loss import HeadLossOutput
from zloss.head.options import Reduction
from zloss.results.options import Coordinate
from zloss.results.quantities import DEPLOYED, SCALARS, TELEMETRY_KEYS
from zloss.statistics import LEVELS, MEANS, joined, sum_of_valid, summarize_values, token_values

DEFAULT_WINDOW = 50
"""Optimizer steps whose tokens are kept, unless another number is requested."""
FIRST_KEPT = 2048
"""K before the counts are known: enough for p99 of 100,000 evenly spread tokens per rank."""
SHARE = 0.02
"""K as a share of the tokens of the largest rank: twice what p99 needs if tokens are spread evenly."""


class StepWindow:
    """Scalars of the last `steps` optimizer steps.

    `coordinate`: "raw" or "centered", the one that the objective deploys, in which p_z_999, p_z_99 and a_p_99 without a
    suffix are reported. `across_ranks`: the numbers cover the tokens of all processes of `group` (None: the default group),
    each counted once; every one must then request them at the same time. Nothing is exchanged at other times.

    `since_restart`: only steps after the last `restart()` count. `ce` and `z` then cover all of them, even if they are
    more than `steps`; every other number covers the last `steps` of them.
    """

    def __init__(
        self,
        steps: int,
        coordinate: Coordinate = "raw",
        *,
        across_ranks: bool = False,
        group: ProcessGroup | None = None,
        since_restart: bool = False,
    ) -> None:
        if steps < 1:
            raise InputError(f"`window` is expected to be a number of steps ≥ 1, but got {steps}.")
        self.coordinate = coordinate
        self._steps: deque[_Step] = deque(maxlen=steps)
        self._open: list[TokenTotals] = []
        self._across_ranks = across_ranks
        self._group = group
        self._kept = FIRST_KEPT
        self._since_restart = since_restart
        self._restarting = False
        self._dropped: Tensor | None = None
        """[tokens, Σ CE, Σ Z] of the steps since the restart that are no longer kept, fp64."""

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def micro_batches(self) -> int:
        """Micro-batches since the last step ended."""
        return len(self._open)

    def add(self, part: TokenTotals) -> None:
        """Add a micro-batch of the running step."""
        self._open.append(part)

    def restart(self) -> None:
        """With `since_restart`, the next step replaces all steps so far; until then their numbers can still be read."""
        self._restarting = self._since_restart

    @torch.no_grad()
    def end_step(self, grad_norm: Tensor | float | None = None, max_norm: float | None = None) -> None:
        """The running step is complete. `grad_norm`: ‖g‖₂ before clipping at `max_norm`."""
        parts, self._open = self._open, []
        if not parts:
            return
        if self._restarting:
            self._steps.clear()
            self._dropped, self._restarting = None, False
        if self._since_restart and len(self._steps) == self._steps.maxlen:
            oldest = self._steps[0].totals.loss_sums
            self._dropped = oldest if self._dropped is None else self._dropped + oldest
        norm = None if grad_norm is None else torch.as_tensor(grad_norm).detach().float()
        clipped = None if norm is None or max_norm is None else norm > max_norm
        self._steps.append(_Step(_total(parts), norm, clipped))

    def scalars(self) -> dict[str, float]:
        """Everything by name, over the tokens of all steps in the window; empty before the first step.

        ce, z: mean per valid token of the two parts of the loss. grad_norm_preclip: that of the last step;
        grad_norm_preclip_max, clip_rate: over the steps. The other names are those of `zloss.statistics`.
        """
        return self._numbers(whole=True)[0]

    def last_step(self) -> dict[str, float]:
        """The same numbers of the last step alone."""
        return self._numbers(last=True)[0]

    def step_tails(self) -> dict[str, float | None]:
        """p99.9 |log Z − c|, p99 A_p and p99 |μ| of the last step's valid tokens; None for a number that does not exist.

        c = log V, whatever the target of the objective is. The numbers reach the host in one transfer.
        """
        found = self.last_step()
        values = {key: found.get(name, math.nan) for key, name in TELEMETRY_KEYS.items()}
        return {key: value if math.isfinite(value) else None for key, value in values.items()}

    def both(self) -> tuple[dict[str, float], dict[str, float]]:
        """(`scalars()`, `last_step()`); across ranks in one collective."""
        whole, last = self._numbers(whole=True, last=True)
        return whole, last

    def _numbers(self, *, whole: bool = False, last: bool = False) -> list[dict[str, float]]:
        """The numbers of the whole window, of its last step, or of both."""
        groups = [list(self._steps)] * whole + [list(self._steps)[-1:]] * last
        if not self._steps:
            return [{} for _ in groups]
        totals = [_total([step.totals for step in steps]) for steps in groups]
        if whole and self._dropped is not None:
            totals[0] = replace(totals[0], loss_sums=totals[0].loss_sums + self._dropped)
        if self._across_ranks and world_size() > 1:
            summaries = self._over_ranks(totals)
        else:
            summaries = [_of_this_rank(part) for part in totals]
        found = [
            self._deployed(numbers | _step_numbers(steps)) if numbers["tokens"] else numbers
            for numbers, steps in zip(summaries, groups, strict=True)
        ]
        if whole:
            found[0]["window_steps"] = float(len(self._steps))
        return found

    @torch.no_grad()
    def _over_ranks(self, totals: Sequence[TokenTotals]) -> list[dict[str, float]]:
        """The summary of each of `totals` over the tokens of all ranks; every rank passes the same number of totals."""
        kept = self._kept
        whole_RP = gathered(torch.cat([_pack(part, kept) for part in totals]), self._group or default_group()).cpu()
        found, start, most = [], 0, 0.0
        for part in totals:
            names = list(part.values)
            width = 4 + len(names) + len(_tail_names(names)) * kept
            found.append(_summary(names, whole_RP[:, start : start + width], kept))
            most = max(most, float(whole_RP[:, start].max()))
            start += width
        self._kept = max(FIRST_KEPT, 2 ** math.ceil(math.log2(SHARE * most + 64)))
        return found

    def _deployed(self, found: dict[str, float]) -> dict[str, float]:
        """With the entries of the deployed coordinate also under their names without a suffix."""
        named = {name: scalars[self.coordinate] for name, scalars in DEPLOYED.items()}
        return found | {name: found[scalar] for name, scalar in named.items() if scalar in found}


@dataclass(frozen=True)
class TokenTotals:
    """The tokens of a micro-batch, a step or a window on this rank. Detached tensors on the device; the host has read none.

    Scaling: the parts of the loss are sums over the valid tokens, so that micro-batches and steps add up whatever divisor
    the loop uses.
    """

    values: dict[str, Tensor]
    """Values of the tokens [T] by quantity, NaN at ignored tokens."""
    tokens: Tensor
    """The number of valid tokens."""
    loss_sums: Tensor
    """[tokens, Σ CE, Σ Z], fp64, label smoothing and coefficient included; more tokens than `tokens` if the loss covers more
    steps than the values."""


@torch.no_grad()
def micro_batch(
    output: HeadLossOutput, reduction: Reduction = "mean", normalizer: float | Tensor | None = None
) -> TokenTotals:
    """The totals of a loss without token weights; pass the `reduction` and `normalizer` of the call of the loss."""
    tokens = output.stats.valid.sum()
    divisor = 1 if reduction != "mean" else tokens if normalizer is None else normalizer
    ce, z = ((part * divisor).sum().double() for part in (output.cross_entropy, output.auxiliary))
    return TokenTotals(token_values(output.stats), tokens, torch.stack([tokens.double(), ce, z]))


@dataclass(frozen=True)
class _Step:
    """One optimizer step."""

    totals: TokenTotals
    grad_norm: Tensor | None
    """‖g‖₂ before clipping."""
    clipped: Tensor | None


def _total(parts: Sequence[TokenTotals]) -> TokenTotals:
    """The totals of all parts together."""
    return TokenTotals(
        joined([part.values for part in parts]),
        torch.stack([part.tokens for part in parts]).sum(),
        torch.stack([part.loss_sums for part in parts]).sum(0),
    )


def _of_this_rank(part: TokenTotals) -> dict[str, float]:
    found = summarize_values(part.values, part.tokens)
    ce, z = (part.loss_sums[1:] / part.loss_sums[0]).tolist()
    return found | {"ce": ce, "z": z} if found["tokens"] else found


def _step_numbers(steps: list[_Step]) -> dict[str, float]:
    """Gradient norms and clipping, which are the same on every rank."""
    parts: dict[str, Tensor] = {}
    norms = [step.grad_norm for step in steps if step.grad_norm is not None]
    if norms:
        parts |= {"grad_norm_preclip": norms[-1], "grad_norm_preclip_max": torch.stack(norms).max()}
    clipped = [step.clipped for step in steps if step.clipped is not None]
    if clipped:
        parts["clip_rate"] = torch.stack(clipped).double().mean()
    if not parts:
        return {}
    numbers = torch.stack([value.double() for value in parts.values()]).tolist()
    return dict(zip(parts, numbers, strict=True))


def _pack(part: TokenTotals, kept: int) -> Tensor:
    """[tokens, their loss sums, Σ of every quantity, the K largest values of every tail], fp64."""
    tokens = part.tokens.double().reshape(1)
    sums = [sum_of_valid(value_T.unsqueeze(0), part.tokens) for value_T in part.values.values()]
    largest = [_largest(part.values[name].double(), part.tokens, kept) for name in _tail_names(list(part.values))]
    return torch.cat([tokens, part.loss_sums.to(tokens.device), *sums, *largest])


def _tail_names(names: Sequence[str]) -> list[str]:
    return [name for name in names if name not in MEANS]


def _largest(value_T: Tensor, tokens: Tensor, kept: int) -> Tensor:
    """The K largest values, padded with −inf; all NaN if a valid token is NaN."""
    missing = value_T.isnan()
    filled_T = torch.cat([value_T.masked_fill(missing, -math.inf), value_T.new_full((kept,), -math.inf)])
    broken = missing.sum() > value_T.numel() - tokens
    return filled_T.topk(kept).values.masked_fill(broken, math.nan)


def _summary(names: list[str], whole_RP: Tensor, kept: int) -> dict[str, float]:
    """The numbers of all tokens by name, from what every rank sent."""
    tokens_R, *loss_sums = whole_RP[:, :4].T
    tokens = float(tokens_R.sum())
    if not tokens:
        return {"tokens": 0.0}
    found = {"tokens": tokens}
    for place, name in enumerate(names):
        found[SCALARS[name][0]] = float(whole_RP[:, 4 + place].sum()) / tokens
    start = 4 + len(names)
    for name in _tail_names(names):
        values_RK = whole_RP[:, start : start + kept]
        start += kept
        # A rank with more than K tokens did not send values that are at most the smallest one it sent.
        unsent = values_RK[:, -1][tokens_R > kept]
        bound = float(unsent.max()) if len(unsent) else -math.inf
        ordered = values_RK.flatten().sort(descending=True).values
        for scalar, level in zip(SCALARS[name][1:], LEVELS, strict=True):
            value = _quantile_from_top(ordered, int(tokens), level, bound)
            if value is not None:
                found[scalar] = value
    # The parts of the loss come last: `ce` with label smoothing is not the mean of −log p.
    loss_tokens, ce, z = (float(sum_R.sum()) for sum_R in loss_sums)
    return found | {"ce": ce / loss_tokens, "z": z / loss_tokens}


def _quantile_from_top(ordered: Tensor, tokens: int, q: float, bound: float) -> float | None:
    """Linear between order statistics, from values in descending order; None if an unsent value (≤ `bound`) may matter."""
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
