"""The recorder of a training loop: one `with` around clipping and stepping.

    recorder = Recorder(model.parameters(), optimizer, clip=1.0, adam_every=50)
    for i in range(1, steps + 1):
        for batch in micro_batches(i):
            out = loss_of(batch)
            out.loss.backward()
            recorder.micro_batch(out.loss)
        with recorder.step(i) as step:
            step.clip_()
            optimizer.step()

Gradients are read once, before clipping, by multi-tensor operations. Their norms reach the host in one transfer per step; a
sample of Adam's state takes one more. The number of transfers does not depend on the number of parameters.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from zloss.errors import InputError
from zloss.optimizer.adam_state import StatefulOptimizer, read_adam
from zloss.optimizer.multi_tensor import l2_norm, norms
from zloss.results.step_record import AdamSample, GradientState, StepRecord


class OpenStep:
    """A step between its backward passes and its update."""

    def __init__(self, gradients: Sequence[Tensor], norm: float, inf: float, clip: float | None) -> None:
        self._gradients, self._clip = gradients, clip
        self.norm, self.inf = norm, inf
        """‖g‖₂ and ‖g‖∞ before clipping."""
        self.postclip: tuple[float, float] | None = None
        self.updated = True
        self.telemetry: dict[str, float | None] = {}
        """Further numbers of this step, for its record."""
        self.lr: float | None = None
        self.seconds: float | None = None
        self.index = 0
        self.losses: list[float] = []
        """Loss, cross-entropy and auxiliary of every micro-batch, one after the other."""
        self.param_norm = math.nan

    @property
    def gradient(self) -> GradientState:
        """Whether all entries are finite; "nan" where NaN and infinity both occur."""
        return "nan" if math.isnan(self.inf) else "inf" if math.isinf(self.inf) else "finite"

    @property
    def finite(self) -> bool:
        return self.gradient == "finite"

    @torch.no_grad()
    def clip_(self, clip: float | None = None) -> None:
        """g ← g·min(1, clip/‖g‖₂) with the measured norm; gradients at or under the threshold are not written."""
        limit = self._clip if clip is None else clip
        if limit is None:
            raise InputError("clip_ needs a threshold: pass it here, or as `clip` of the recorder.")
        # No factor makes a nonfinite gradient finite: it stays as it is.
        factor = limit / self.norm if self.finite and self.norm > limit else 1.0
        if factor != 1.0 and self._gradients:
            torch._foreach_mul_(list(self._gradients), factor)
        self.postclip = (self.norm * factor, self.inf * factor)

    def skip(self) -> None:
        """Note in the record that the update was left out."""
        self.updated = False


class Recorder:
    """Reads every step of a loop and keeps their records."""

    def __init__(
        self,
        parameters: Iterable[Tensor],
        optimizer: StatefulOptimizer | None = None,
        *,
        clip: float | None = None,
        adam_every: int | None = None,
    ) -> None:
        if adam_every is not None and (adam_every < 1 or optimizer is None):
            raise InputError(
                f"`adam_every` is expected to be at least 1 and needs the optimizer, but got {adam_every!r} "
                f"with {'an' if optimizer is not None else 'no'} optimizer."
            )
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._optimizer, self._clip, self._adam_every = optimizer, clip, adam_every
        self._micro: list[Tensor] = []
        self.records: list[StepRecord] = []

    def micro_batch(self, loss: Tensor, cross_entropy: Tensor | None = None, auxiliary: Tensor | None = None) -> None:
        """Add a loss that backward was called on; the losses of a step's micro-batches add up to that of the step."""
        parts = (loss, loss if cross_entropy is None else cross_entropy, auxiliary)
        zero = loss.detach().new_zeros(())
        self._micro.append(torch.stack([zero if part is None else part.detach().reshape(()) for part in parts]))

    @contextmanager
    def step(self, index: int) -> Iterator[OpenStep]:
        """Enter after the last backward pass, leave after the optimizer's step."""
        opened = self.begin(index)
        yield opened
        self.end(opened)

    def begin(self, index: int, *, clipped_by: float | None = None) -> OpenStep:
        """Read the gradients of step `index`, before the optimizer's step.

        `clipped_by`: the factor by which the loop has multiplied them already (1 where it clipped nothing); the norms before
        clipping are those that are read, divided by it. None: they are not clipped yet.
        """
        gradients = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        micro = torch.stack(self._micro).double() if self._micro else torch.zeros(0, 3, dtype=torch.float64)
        self._micro = []
        with torch.no_grad():
            before = norms(gradients)
            theta = l2_norm(self._parameters)
            device = before.l2.device
            flat = torch.cat([torch.stack([before.l2, before.inf, theta.to(device)]), micro.to(device).flatten()])
        norm, inf, param_norm, *losses = flat.tolist()
        # A factor of 0 or NaN belongs to a gradient that is not finite: what is left of it is read as it is.
        factor = clipped_by if clipped_by is not None and math.isfinite(clipped_by) and clipped_by > 0 else 1.0
        opened = OpenStep(gradients, norm / factor, inf / factor, self._clip)
        if clipped_by is not None:
            opened.postclip = (norm, inf)
        opened.index, opened.losses, opened.param_norm = index, losses, param_norm
        return opened

    def end(self, opened: OpenStep) -> StepRecord:
        """Complete the record of a step, after the optimizer's step."""
        if opened.postclip is None:
            opened.postclip = self._read_again()
        totals = opened.losses[0::3]
        record = StepRecord(
            step=opened.index,
            loss=sum(totals),
            cross_entropy=sum(opened.losses[1::3]),
            auxiliary=sum(opened.losses[2::3]),
            grad_norm=opened.norm,
            grad_inf=opened.inf,
            param_norm=opened.param_norm,
            postclip_norm=opened.postclip[0],
            postclip_inf=opened.postclip[1],
            micro_batches=len(totals),
            micro_nan=sum(map(math.isnan, totals)),
            micro_inf=sum(map(math.isinf, totals)),
            gradient=opened.gradient,
            updated=opened.updated,
            lr=opened.lr,
            seconds=opened.seconds,
            telemetry=opened.telemetry,
            adam=self._sample(opened.index),
        )
        self.records.append(record)
        return record

    def _read_again(self) -> tuple[float, float]:
        """The norms after a clipping that was not `clip_`, from the gradients that the optimizer was given."""
        gradients = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        after = norms(gradients)
        l2, inf = torch.stack([after.l2, after.inf]).tolist()
        return l2, inf

    def _sample(self, index: int) -> AdamSample | None:
        if self._adam_every is None or index % self._adam_every or self._optimizer is None:
            return None
        if not len(self._optimizer.state):
            return None  # every update so far was left out
        reading = read_adam(self._optimizer).stacked()
        with torch.no_grad():
            theta = l2_norm(self._parameters).to(reading.device)
        return AdamSample(*torch.cat([reading, theta.reshape(1)]).tolist())
