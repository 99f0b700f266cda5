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

Distributed parameters (FSDP2, tensor parallel, both on different meshes) are not gathered: each rank reads its local part,
and one all-gather of a few numbers per step gives every rank the norms of the whole. `step.clip_()` clips by that norm,
also on meshes that `torch.nn.utils.clip_grad_norm_` refuses to mix.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from zloss.distributed import LocalParts, gathered, group_of, is_dtensor, local_part, local_parts, share_of
from zloss.errors import InputError
from zloss.optimizer.adam import StatefulOptimizer, read_adam
from zloss.optimizer.norms import l2_over_ranks, local_l2, local_norms, norms_over_ranks, whole_l2
from zloss.results.steps import AdamSample, GradientState, StepRecord


@dataclass(frozen=True)
class StepReading:
    """Numbers of a step, read before its update."""

    norm: float
    inf: float
    param_norm: float
    loss: float
    cross_entropy: float
    auxiliary: float
    micro_nan: int
    micro_inf: int
    micro_batches: int


class OpenStep:
    """A step between its backward passes and its update."""

    def __init__(
        self, index: int, gradients: Sequence[Tensor], read: StepReading, clip: float | None, clipped_by: float
    ) -> None:
        self._gradients, self._clip = gradients, clip
        self.index, self.read = index, read
        self.norm, self.inf = read.norm / clipped_by, read.inf / clipped_by
        """‖g‖₂ and ‖g‖∞ before clipping."""
        self.postclip: tuple[float, float] | None = None
        self.updated = True
        self.telemetry: dict[str, float | None] = {}
        """Additional numbers for the record of this step."""
        self.lr: float | None = None
        self.seconds: float | None = None

    @property
    def gradient(self) -> GradientState:
        """ "finite" if all entries are; "nan" if NaN and infinity both occur."""
        return "nan" if math.isnan(self.inf) else "inf" if math.isinf(self.inf) else "finite"

    @property
    def finite(self) -> bool:
        return self.gradient == "finite"

    @torch.no_grad()
    def clip_(self, clip: float | None = None) -> None:
        """g ← g·min(1, clip/‖g‖₂) with the measured norm; gradients at or below the threshold are not touched."""
        limit = self._clip if clip is None else clip
        if limit is None:
            raise InputError("clip_ needs a threshold: pass it here, or as `clip` of the recorder.")
        # No factor makes a nonfinite gradient finite, so it is left unchanged.
        factor = limit / self.norm if self.finite and self.norm > limit else 1.0
        if factor != 1.0 and self._gradients:
            torch._foreach_mul_(list(self._gradients), factor)
        self.postclip = (self.norm * factor, self.inf * factor)

    def skip(self) -> None:
        """Record that the update was skipped."""
        self.updated = False


class Recorder:
    """Reads every step of a loop and keeps the records."""

    def __init__(
        self,
        parameters: Iterable[Tensor],
        optimizer: StatefulOptimizer | None = None,
        *,
        clip: float | None = None,
        adam_every: int | None = None,
        group: ProcessGroup | None = None,
        micro_batches_add_up: bool = False,
        copies: Callable[[Tensor], int] | None = None,
    ) -> None:
        """`group`: all ranks that train the model together; the default is all ranks if parameters are DTensors, else none.
        Losses are then averaged over ranks, which is the loss of the step if each rank's loss was divided for averaged
        gradients (`zloss.global_normalizer`). `micro_batches_add_up`: every rank of the group has separate micro-batches,
        so their counts are summed; otherwise the count is that of this rank, and of nonfinite ones that of the worst rank.
        `copies(p)`: how many ranks of the group hold the plain parameter p; by default all of them. In a pipeline it is
        1, and 2 for a table that two stages share."""
        if adam_every is not None and (adam_every < 1 or optimizer is None):
            raise InputError(
                f"`adam_every` is expected to be at least 1 and needs the optimizer, but got {adam_every!r} "
                f"with {'an' if optimizer is not None else 'no'} optimizer."
            )
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._optimizer, self._clip, self._adam_every = optimizer, clip, adam_every
        self._group = group_of(self._parameters, group)
        self._ranks = 1 if self._group is None else self._group.size()
        self._add_up, self._copies = micro_batches_add_up, copies
        self._micro: list[Tensor] = []
        self.records: list[StepRecord] = []

    def micro_batch(self, loss: Tensor, cross_entropy: Tensor | None = None, auxiliary: Tensor | None = None) -> None:
        """Add a loss on which backward was called; the losses of the micro-batches of a step add up to its loss."""
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

        `clipped_by`: the factor by which the loop has already multiplied them (1 if it did not clip); the norms before
        clipping are the ones read, divided by this factor. None: the gradients are not clipped yet.
        """
        micro = torch.stack(self._micro).double() if self._micro else torch.zeros(0, 3, dtype=torch.float64)
        self._micro = []
        read = self._read(micro)
        # A factor of 0 or NaN means that the gradient was not finite; the remaining gradient is read as it is.
        factor = clipped_by if clipped_by is not None and math.isfinite(clipped_by) and clipped_by > 0 else 1.0
        gradients = [local_part(gradient) for gradient in self._gradients()]
        opened = OpenStep(index, gradients, read, self._clip, factor)
        if clipped_by is not None:
            opened.postclip = (read.norm, read.inf)
        return opened

    def end(self, opened: OpenStep) -> StepRecord:
        """Complete the record of a step, after the optimizer's step."""
        if opened.postclip is None:
            opened.postclip = self._read_again()
        read = opened.read
        record = StepRecord(
            step=opened.index,
            loss=read.loss,
            cross_entropy=read.cross_entropy,
            auxiliary=read.auxiliary,
            grad_norm=opened.norm,
            grad_inf=opened.inf,
            param_norm=read.param_norm,
            postclip_norm=opened.postclip[0],
            postclip_inf=opened.postclip[1],
            micro_batches=read.micro_batches,
            micro_nan=read.micro_nan,
            micro_inf=read.micro_inf,
            gradient=opened.gradient,
            updated=opened.updated,
            lr=opened.lr,
            seconds=opened.seconds,
            telemetry=opened.telemetry,
            adam=self._sample(opened.index),
        )
        self.records.append(record)
        return record

    def _gradients(self) -> list[Tensor]:
        return [parameter.grad for parameter in self._parameters if parameter.grad is not None]

    def _share(self, parameter: Tensor) -> float:
        """The weight of an entry of a parameter on this rank."""
        if self._copies is not None and not is_dtensor(parameter):
            return 1 / self._copies(parameter)
        return share_of(parameter, self._ranks)

    def _parameter_shares(self) -> list[LocalParts]:
        return local_parts(self._parameters, map(self._share, self._parameters))

    def _gradient_shares(self) -> list[LocalParts]:
        """A gradient is distributed like its parameter, unless it is a DTensor with placements of its own."""
        owners = [p for p in self._parameters if p.grad is not None]
        shares = [self._share(p.grad if is_dtensor(p.grad) else p) for p in owners]
        return local_parts(self._gradients(), shares)

    @torch.no_grad()
    def _read(self, micro: Tensor) -> StepReading:
        """Norms and losses of the step over all ranks: one all-gather if there are several, and one transfer."""
        before = local_norms(self._gradient_shares())
        device = before.device
        theta = local_l2(self._parameter_shares()).to(device)
        totals = micro.to(device)
        passes = totals.new_full((), len(totals))
        counts = torch.stack([totals[:, 0].isnan().sum().double(), totals[:, 0].isinf().sum().double(), passes])
        local = torch.cat([before, theta.reshape(1), totals.sum(dim=0), counts])
        everyone = gathered(local, self._group)
        norm, inf = norms_over_ranks(everyone[:, :2])
        param_norm = whole_l2(everyone[:, 2])
        losses, counted = everyone[:, 3:6].mean(dim=0), everyone[:, 6:]
        counts = counted.sum(dim=0) if self._add_up else torch.cat([counted[:, :2].amax(dim=0), passes.reshape(1)])
        numbers = torch.cat([torch.stack([norm, inf, param_norm]), losses, counts]).tolist()
        l2, largest, theta_l2, loss, cross_entropy, auxiliary, *whole = numbers
        return StepReading(l2, largest, theta_l2, loss, cross_entropy, auxiliary, *map(int, whole))

    @torch.no_grad()
    def _read_again(self) -> tuple[float, float]:
        """The norms after clipping by something other than `clip_`, from the gradients the optimizer received."""
        everyone = gathered(local_norms(self._gradient_shares()), self._group)
        l2, inf = torch.stack(norms_over_ranks(everyone)).tolist()
        return l2, inf

    def _sample(self, index: int) -> AdamSample | None:
        if self._adam_every is None or index % self._adam_every or self._optimizer is None:
            return None
        if not len(self._optimizer.state):
            return None  # every update so far was skipped
        reading = read_adam(self._optimizer, self._group, self._share)
        with torch.no_grad():
            theta = l2_over_ranks(self._parameter_shares(), self._group).to(reading.device)
        return AdamSample(*torch.cat([reading, theta.reshape(1)]).tolist())
