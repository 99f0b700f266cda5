"""The last n steps of a run: what their tokens were, kept on the device until a number is asked for.

A step that is not logged costs one copy of its statistics, [T] per quantity, and no transfer. Older steps are dropped,
so memory is bounded by n·T numbers per quantity. Tails are exact: windows of the same steps in any split of tokens to
micro-batches give the same numbers.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

from zloss.errors import InputError
from zloss.ranks.process_group import world_size
from zloss.statistics import entry_name, joined, summarize_values, token_values
from zloss.telemetry.across_ranks import RankJoin, TokenTotals
from zloss.telemetry.micro_batch import MicroBatch

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
        grad_norm_preclip_max, clip_rate: over the steps. The other names are those of `zloss.statistics`.
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
