"""The last n steps of a run: statistics of their tokens, kept on the device until a number is requested.

A step that is not logged costs one copy of its statistics, [T] per quantity, and no transfer. Older steps are dropped,
so memory is bounded by n·T numbers per quantity. Tails are exact: windows of the same steps in any split of tokens into
micro-batches give the same numbers.

Across processes one collective suffices: each rank sends its counts, its sums, and the K largest values of every tail. A
quantile over all tokens is exact if no value that a rank held back can lie above it; otherwise it is left out. K follows
the number of tokens; ranks agree on it without another collective, because each knows all counts of the previous one.

Axes: R ranks, P numbers that a rank sends, T tokens of this rank, K values kept.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from zloss.errors import InputError
from zloss.ranks.process_group import default_group, gathered, world_size
from zloss.source.reduction import Reduction
from zloss.source.statistics import TokenStats
from zloss.source.summary import LEVELS, MEANS, entry_name, joined, sum_of_valid, summarize_values, token_values

DEFAULT_WINDOW = 50
"""Optimizer steps of a window where none are asked for."""
DEPLOYED = {"p_z_999": ("p_z", "999"), "p_z_99": ("p_z", "99"), "a_p_99": ("gain", "99")}
"""Name of a scalar in the coordinate that the objective deploys → its quantity and level."""


@dataclass(frozen=True)
class WindowStep:
    """The tokens of one optimizer step, and its gradient norm before clipping."""

    values: dict[str, Tensor]
    tokens: Tensor
    cross_entropy: Tensor
    auxiliary: Tensor
    grad_norm: Tensor | None
    clipped: bool | Tensor | None


class StepWindow:
    """Scalars of the last `steps` optimizer steps.

    `coordinate`: "raw" or "centered", the one that the objective deploys: p_z_999, p_z_99 and a_p_99 without a suffix
    are in it. `across_ranks`: the numbers are of the tokens of all processes of the default group, each counted once;
    every process then has to ask for them at the same time. Nothing is exchanged at other times.
    """

    def __init__(self, steps: int, coordinate: str = "raw", *, across_ranks: bool = False) -> None:
        if steps < 1:
            raise InputError(f"`window` is expected to be a number of steps ≥ 1, but got {steps}.")
        self.coordinate = coordinate
        self._steps: deque[WindowStep] = deque(maxlen=steps)
        self._open: list[MicroBatch] = []
        self._join = RankJoin() if across_ranks else None

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def micro_batches(self) -> int:
        """Micro-batches since the last step ended."""
        return len(self._open)

    def add(self, part: MicroBatch) -> None:
        """One micro-batch of the step that is running."""
        self._open.append(part)

    @torch.no_grad()
    def end_step(self, grad_norm: Tensor | float | None = None, max_norm: float | None = None) -> None:
        """The running step is complete. `grad_norm`: ‖g‖₂ before clipping at `max_norm`."""
        parts, self._open = self._open, []
        if not parts:
            return
        norm = None if grad_norm is None else torch.as_tensor(grad_norm).detach().float()
        self._steps.append(
            WindowStep(
                values=joined([token_values(part.stats) for part in parts]),
                tokens=torch.stack([part.stats.valid.sum() for part in parts]).sum(),
                cross_entropy=torch.stack([part.cross_entropy.double() for part in parts]).sum(),
                auxiliary=torch.stack([part.auxiliary.double() for part in parts]).sum(),
                grad_norm=norm,
                clipped=None if norm is None or max_norm is None else norm > max_norm,
            )
        )

    def scalars(self) -> dict[str, float]:
        """Everything by name, over the tokens of all steps in the window; empty before the first step.

        ce, z: mean per valid token of the two parts of the loss. grad_norm_preclip: that of the last step;
        grad_norm_preclip_max, clip_rate: over the steps. The other names are those of `zloss.source.summary`.
        """
        return self._whole(*self._of([list(self._steps)])) if self._steps else {}

    def last_step(self) -> dict[str, float]:
        """The same numbers of the last step alone."""
        return self._of([[self._steps[-1]]])[0] if self._steps else {}

    def both(self) -> tuple[dict[str, float], dict[str, float]]:
        """(`scalars()`, `last_step()`); across ranks in one collective."""
        if not self._steps:
            return {}, {}
        whole, last = self._of([list(self._steps), [self._steps[-1]]])
        return self._whole(whole), last

    def _whole(self, found: dict[str, float]) -> dict[str, float]:
        return found | {"window_steps": float(len(self._steps))}

    def _deployed(self, found: dict[str, float]) -> dict[str, float]:
        """With the entries of the deployed coordinate under their names without a suffix."""
        centered = self.coordinate == "centered"
        for name, (quantity, level) in DEPLOYED.items():
            suffix = "centered" if centered else "raw" if quantity == "p_z" else ""
            source = entry_name(f"{quantity}_{suffix}".rstrip("_"), level)
            if source in found:
                found[name] = found[source]
        return found

    def _of(self, groups: list[list[WindowStep]]) -> list[dict[str, float]]:
        """The numbers of each group of steps."""
        totals = [
            TokenTotals(
                joined([step.values for step in steps]),
                torch.stack([step.tokens for step in steps]).sum(),
                torch.stack([step.cross_entropy for step in steps]).sum(),
                torch.stack([step.auxiliary for step in steps]).sum(),
            )
            for steps in groups
        ]
        if self._join is not None and world_size() > 1:
            found = self._join.join(totals)
        else:
            found = [_of_this_rank(part) for part in totals]
        return [
            self._deployed(numbers | _step_numbers(steps)) if numbers["tokens"] else numbers
            for numbers, steps in zip(found, groups, strict=True)
        ]


def _of_this_rank(part: TokenTotals) -> dict[str, float]:
    found = summarize_values(part.values, part.tokens)
    ce, z = (torch.stack([part.cross_entropy, part.auxiliary]) / part.tokens).tolist()
    return found | {"ce": ce, "z": z} if found["tokens"] else found


def _step_numbers(steps: list[WindowStep]) -> dict[str, float]:
    """Gradient norms and clipping, which are the same on every rank."""
    parts: dict[str, Tensor] = {}
    norms = [step.grad_norm for step in steps if step.grad_norm is not None]
    if norms:
        parts |= {"grad_norm_preclip": norms[-1], "grad_norm_preclip_max": torch.stack(norms).max()}
    clipped = [torch.as_tensor(step.clipped) for step in steps if step.clipped is not None]
    if clipped:
        parts["clip_rate"] = torch.stack(clipped).double().mean()
    if not parts:
        return {}
    numbers = torch.stack([value.double() for value in parts.values()]).tolist()
    return dict(zip(parts, numbers, strict=True))


@dataclass(frozen=True)
class MicroBatch:
    """Detached tensors on the device; nothing here has been read by the host.

    Scaling: the parts are sums over the valid tokens, so that micro-batches and steps add up whatever divisor the loop
    uses.
    """

    stats: TokenStats
    cross_entropy: Tensor
    """Σ_t CE_t, label smoothing included; 0-d."""
    auxiliary: Tensor
    """Σ_t of the penalty, its coefficient included; 0-d."""


class HasLossParts(Protocol):
    """What is read of an output of `head_loss`, `logits_loss` or a loss that contains one."""

    @property
    def stats(self) -> TokenStats: ...

    @property
    def cross_entropy(self) -> Tensor: ...

    @property
    def auxiliary(self) -> Tensor: ...


def micro_batch(
    output: HasLossParts, reduction: Reduction = "mean", normalizer: float | Tensor | None = None
) -> MicroBatch:
    """The sums of a loss without token weights; `reduction` and `normalizer` are those that the loss was called with."""
    parts = output.cross_entropy.detach(), output.auxiliary.detach()
    if reduction == "mean":
        divisor = output.stats.valid.sum() if normalizer is None else normalizer
        parts = parts[0] * divisor, parts[1] * divisor
    return MicroBatch(output.stats, parts[0].sum(), parts[1].sum())


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
