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

A plain fp32 norm of a large CPU tensor sums its squares sequentially, and its relative error grows with the length (1e-2
at 10⁸ entries). Here a large CPU tensor is read as pieces of 2¹⁵ entries, on all threads. Their fp32 norms are accurate to
1e-7 and are combined in fp64. An accelerator reduces in a tree, so its tensors are read whole.

Adam's direction is the direction of its step, before learning rate and weight decay:

    d_proxy = m / (√v + ε)                                    the paper's uncorrected proxy
    d_adam  = (m / (1 − β₁ᵗ)) / (√(v / (1 − β₂ᵗ)) + ε)        the bias-corrected direction

Scaling: norms are over all tensors as one vector.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from zloss.distributed import gathered, group_of, is_dtensor, local_part, share_of
from zloss.errors import InputError
from zloss.results.steps import AdamSample, GradientState, StepRecord

PIECE = 2**15
"""Entries of a piece of a CPU tensor."""
AT_ONCE = 2**24
"""Entries of Adam's state that are read at a time, which bounds the size of temporaries."""
EPSILON = 1e-8
"""ε_Adam, the default of every Adam; it is added to |g|, so the scale of the gradient matters."""
LOSSES, COUNTS = ("loss", "cross_entropy", "auxiliary"), ("micro_nan", "micro_inf", "micro_batches")


class StatefulOptimizer(Protocol):
    """The attributes that are read: those of `torch.optim.AdamW` and of accelerate's wrapper around it."""

    @property
    def param_groups(self) -> list[dict[str, Any]]: ...

    @property
    def state(self) -> Any: ...


class OpenStep:
    """A step between its backward passes and its update."""

    def __init__(
        self,
        gradients: Sequence[Tensor],
        norms: tuple[float, float],
        fields: dict[str, Any],
        clip: float | None,
        clipped_by: float | None,
    ) -> None:
        """`norms`: ‖g‖₂ and ‖g‖∞ as read; `fields`: what is known of its record already."""
        self._gradients, self._clip, self.fields = gradients, clip, fields
        # A factor of 0 or NaN means that the gradient was not finite; the remaining gradient is read as it is.
        factor = clipped_by if clipped_by and math.isfinite(clipped_by) else 1.0
        self.norm, self.inf = norms[0] / factor, norms[1] / factor
        """‖g‖₂ and ‖g‖∞ before clipping."""
        self.postclip = None if clipped_by is None else norms
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
            raise InputError("clip_ needs a threshold: pass it here, or as the recorder's `clip`.")
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
        so their counts are summed; otherwise the count is this rank's, and nonfinite ones are counted on the worst rank.
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
        norms, fields = self._read(micro)
        gradients = [local_part(parameter.grad) for parameter in self._parameters if parameter.grad is not None]
        return OpenStep(gradients, norms, {"step": index, **fields}, self._clip, clipped_by)

    def end(self, opened: OpenStep) -> StepRecord:
        """Complete the record of a step, after the optimizer's step."""
        if opened.postclip is None:
            # It was clipped by something other than `clip_`: the norms of what the optimizer received.
            l2, inf = joined(gathered(self._gradient_norms(), self._group), "2∞").tolist()
            opened.postclip = (l2, inf)
        record = StepRecord(
            **opened.fields,
            grad_norm=opened.norm,
            grad_inf=opened.inf,
            postclip_norm=opened.postclip[0],
            postclip_inf=opened.postclip[1],
            gradient=opened.gradient,
            updated=opened.updated,
            lr=opened.lr,
            seconds=opened.seconds,
            telemetry=opened.telemetry,
            adam=self._sample(opened.fields["step"]),
        )
        self.records.append(record)
        return record

    def _share(self, tensor: Tensor) -> float:
        """The weight of an entry of a parameter or gradient on this rank."""
        if self._copies is not None and not is_dtensor(tensor):
            return 1 / self._copies(tensor)
        return share_of(tensor, self._ranks)

    @torch.no_grad()
    def _parameter_norm(self) -> Tensor:
        """√Σ share·θ² of the entries on this rank."""
        return l2_norm([local_part(p) for p in self._parameters], [self._share(p) for p in self._parameters])

    @torch.no_grad()
    def _gradient_norms(self) -> Tensor:
        """[√Σ share·g², ‖g‖∞] of the entries on this rank.

        A gradient is distributed like its parameter, unless it is a DTensor with other placements.
        """
        pairs = [(p.grad, p.grad if is_dtensor(p.grad) else p) for p in self._parameters if p.grad is not None]
        local = [local_part(gradient) for gradient, _ in pairs]
        l2 = l2_norm(local, [self._share(owner) for _, owner in pairs])
        return torch.stack([l2, inf_norm(local).to(l2.device)])

    @torch.no_grad()
    def _read(self, micro_N3: Tensor) -> tuple[tuple[float, float], dict[str, Any]]:
        """Norms and losses of the step over all ranks: one all-gather if there are several, and one transfer."""
        before = self._gradient_norms()
        loss_N = micro_N3[:, 0]
        passes = micro_N3.new_full((), len(micro_N3))
        counts = torch.stack([loss_N.isnan().sum().double(), loss_N.isinf().sum().double(), passes])
        parts = (before, self._parameter_norm().reshape(1), micro_N3.sum(dim=0), counts)
        everyone = gathered(torch.cat([part.to(before.device) for part in parts]), self._group)
        counted = everyone[:, 6:]
        summed = counted.sum(dim=0)
        if not self._add_up:
            summed = torch.cat([counted[:, :2].amax(dim=0), passes.reshape(1).to(before.device)])
        numbers = torch.cat([joined(everyone[:, :3], "2∞2"), everyone[:, 3:6].mean(dim=0), summed])
        l2, inf, theta, *rest = numbers.tolist()
        fields: dict[str, Any] = dict(zip(LOSSES, rest[:3], strict=True))
        fields |= dict(zip(COUNTS, map(int, rest[3:]), strict=True))
        return (l2, inf), fields | {"param_norm": theta}

    def _sample(self, index: int) -> AdamSample | None:
        if self._adam_every is None or index % self._adam_every or self._optimizer is None:
            return None
        if not len(self._optimizer.state):
            return None  # every update so far was skipped
        reading = read_adam(self._optimizer, self._group, self._share)
        theta = joined(gathered(self._parameter_norm().reshape(1), self._group), "2")
        return AdamSample(*torch.cat([reading, theta.to(reading.device)]).tolist())


# Norms


def l2_norm(tensors: Sequence[Tensor], shares: Sequence[float] | None = None) -> Tensor:
    """√Σ share·‖x‖₂² in fp64, with shares of 1 by default; a NaN anywhere makes it NaN."""
    # 16-bit gradients are summed in fp32 at least.
    narrow = any(tensor.dtype in (torch.bfloat16, torch.float16) for tensor in tensors)
    dtype = torch.float32 if narrow else None
    found: list[Tensor] = []
    rest: list[Tensor] = []
    weights: list[float] = []
    for tensor, share in zip(tensors, shares or [1.0] * len(tensors), strict=True):
        flat = tensor.detach().reshape(-1)
        whole = flat.numel() // PIECE * PIECE if flat.device.type == "cpu" and flat.numel() > PIECE else 0
        if whole:
            pieces = torch.linalg.vector_norm(flat[:whole].view(-1, PIECE), dim=1, dtype=dtype)
            found.append(pieces.double() * share**0.5)
        if whole < flat.numel():
            rest.append(flat[whole:])
            weights.append(share**0.5)
    if rest:
        each = torch.stack([value.double() for value in torch._foreach_norm(rest, 2.0, dtype=dtype)])
        found.append(each if all(weight == 1 for weight in weights) else each * each.new_tensor(weights))
    total: Tensor = torch.linalg.vector_norm(torch.cat(found)) if found else torch.zeros((), dtype=torch.float64)
    return total


def inf_norm(tensors: Sequence[Tensor]) -> Tensor:
    """max_i |x_i| in fp64; a NaN anywhere makes it NaN."""
    tensors = [tensor.detach() for tensor in tensors if tensor.numel()]
    if not tensors:
        return torch.zeros((), dtype=torch.float64)
    if tensors[0].device.type == "cpu":
        # On the CPU, aminmax is vectorized and torch's ∞-norm is not.
        ends = [end for tensor in tensors for end in torch.aminmax(tensor)]
        return torch.stack(ends).double().abs().amax()
    return torch.stack([value.double() for value in torch._foreach_norm(tensors, float("inf"))]).amax()


def joined(norms_NK: Tensor, kinds: str) -> Tensor:
    """K norms of the whole from those of N disjoint parts; `kinds` says "2" or "∞" for each."""
    l2_K, largest_K = torch.linalg.vector_norm(norms_NK, dim=0), norms_NK.amax(dim=0)
    return torch.stack([l2 if kind == "2" else inf for kind, l2, inf in zip(kinds, l2_K, largest_K, strict=True)])


# Adam's state


@torch.no_grad()
def read_adam(optimizer: StatefulOptimizer, group: ProcessGroup | None, share: Callable[[Tensor], float]) -> Tensor:
    """[‖v‖∞, ‖d_proxy‖₂, ‖d_proxy‖∞, ‖d_adam‖₂, ‖d_adam‖∞] in fp64: one tensor, so one transfer to the host.

    `group`: the ranks that hold distributed state; each reads its local part, and one all-gather joins them. `share(p)`: the
    weight of an entry of p on this rank.
    """
    found = [
        (settings, optimizer.state[p], share(p))
        for settings in optimizer.param_groups
        for p in settings["params"]
        if len(optimizer.state.get(p, ()))
    ]
    if not found:
        raise InputError("the optimizer has no state yet: read it after its first step.")
    if any(not {"exp_avg", "exp_avg_sq"} <= state.keys() for _, state, _ in found):
        raise InputError(f"{type(optimizer).__name__} keeps no first and second moments: Adam or AdamW is needed.")
    steps = [local_part(torch.as_tensor(state["step"], dtype=torch.float32)).reshape(()) for _, state, _ in found]
    # A fused optimizer keeps the step counts on the device, so one transfer reads them all.
    counts = torch.stack(steps if len({step.device for step in steps}) == 1 else [step.cpu() for step in steps])
    readings: list[Tensor] = []
    for (settings, state, weight), count in zip(found, counts.tolist(), strict=True):
        first, second = (1 - beta**count for beta in settings["betas"])
        moments = (torch.split(local_part(state[key]).reshape(-1), AT_ONCE) for key in ("exp_avg", "exp_avg_sq"))
        for m, v in zip(*moments, strict=True):
            if not m.numel():
                continue  # a rank without rows of this parameter; norms of nothing are on the CPU
            proxy = m / (v.sqrt() + settings["eps"])
            adam = m / ((v / second).sqrt() + settings["eps"]) / first
            norms = [inf_norm([v]), *(norm for d in (proxy, adam) for norm in (l2_norm([d], [weight]), inf_norm([d])))]
            readings.append(torch.stack(norms))
    local = joined(torch.stack(readings), "∞2∞2∞") if readings else torch.zeros(5, dtype=torch.float64)
    return joined(gathered(local, group), "∞2∞2∞")


def first_direction(grad: Tensor) -> Tensor:
    """g / (|g| + ε): Adam's bias-corrected direction m̂/(√v̂ + ε) after one step from zero state, for any β₁, β₂.

    m₁ = (1 − β₁)g and v₁ = (1 − β₂)g², and the corrections divide by exactly these factors. Scaling: before learning
    rate and weight decay; not invariant to the scale of g, because of ε.

    >>> import torch
    >>> first_direction(torch.tensor([2.0, -1e-8, 0.0]))
    tensor([ 1.0000, -0.5000,  0.0000])
    """
    return grad / (grad.abs() + EPSILON)
