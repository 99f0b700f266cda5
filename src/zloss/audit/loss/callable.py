"""The loss as a black box: logits and targets in, scalar, logit gradient and side effects out.

Axes: T tokens, V vocabulary, D width. With `linear` the loss sees hidden = s·I (T one-hot rows of width D ≥ T) and
weight = logitsᵀ/s with s a power of two, so that hidden @ weightᵀ is the wanted logits without rounding and dWᵀ/s is the
logit gradient itself.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from zloss.audit.loss.output import LossCallError, read_output

LossFunction = Callable[..., Any]

HIDDEN_SCALE = 64.0
"""s: brings the gain of the probe head to where gain-aware losses live."""


@dataclass(frozen=True)
class Reported:
    """The Z a loss reported: its value (None if not a scalar), dtype, and whether it claims a gradient."""

    value: float | None
    shape: tuple[int, ...]
    dtype: torch.dtype | None
    requires_grad: bool


@dataclass(frozen=True)
class Outcome:
    """One call: everything in fp64 on the CPU, whatever the loss computed in."""

    value: float
    dtype: torch.dtype
    grad_TV: Tensor
    """∂(upstream · loss)/∂logits, before any conversion of ours to a mean."""
    grad_hidden_TD: Tensor | None
    """s · ∂loss/∂hidden, which is δ · logitsᵀ."""
    has_gradient: bool
    """False when the loss came without a graph."""
    reported: Reported | None
    overwritten: tuple[str, ...]
    """Names of the arguments whose contents had changed after backward."""

    @property
    def finite(self) -> bool:
        return bool(torch.isfinite(self.grad_TV).all()) and abs(self.value) < float("inf")


@dataclass
class BlackBox:
    """Calls one loss function the way a training step would; every call gets fresh inputs and the same RNG state."""

    function: LossFunction
    name: str
    linear: bool
    device: torch.device
    seed: int
    ignore_index: int = -100
    batched: bool = False
    """Whether the loss wants a leading batch axis, [1, T, V] and [1, T]; found on the first call."""
    calls: int = 0

    def __call__(
        self,
        logits_TV: Tensor,
        target_T: Tensor,
        *,
        dtype: torch.dtype = torch.float64,
        upstream: float | Tensor = 1.0,
        through: Literal["loss", "reported"] = "loss",
        per_token: bool = False,
        seed: int | None = None,
    ) -> Outcome:
        """Forward and backward; `upstream` multiplies the output (a [T] tensor for a per-token loss)."""
        leaves, arguments = self._arguments(logits_TV, dtype)
        target = self._target(target_T)
        before = [argument.detach().clone() for argument in arguments]
        self.calls += 1
        output = read_output(self._guarded(lambda: self._forward(arguments, target, seed)), self.name)
        loss = output.loss
        if loss.numel() != (target.numel() if per_token else 1):
            kind = f"a tensor of shape {list(target.shape)}" if per_token else "a scalar"
            hint = "" if per_token else " A loss with reduction='none' belongs in `per_token=`."
            raise LossCallError(
                f"{self.name} returned a tensor of shape {list(loss.shape)} for {target.numel()} targets, "
                f"but {kind} is expected.{hint}"
            )
        reported = _read_reported(output.reported)
        seed_tensor: Tensor = loss
        if through == "reported":
            assert isinstance(output.reported, Tensor)
            seed_tensor = output.reported
        if seed_tensor.requires_grad:
            factor = upstream.to(seed_tensor).view_as(seed_tensor) if isinstance(upstream, Tensor) else upstream
            scaled = (seed_tensor * factor).sum()
            self._guarded(lambda: scaled.backward())  # type: ignore[no-untyped-call]
        changed = tuple(
            name
            for name, was, now in zip(
                self._names(), [*before, self._target(target_T)], [*arguments, target], strict=True
            )
            if not torch.equal(torch.nan_to_num(was), torch.nan_to_num(now.detach()))
        )
        grad_TV, grad_hidden = self._gradients(leaves, logits_TV.shape)
        value = float(loss.detach().double().sum())
        return Outcome(value, loss.dtype, grad_TV, grad_hidden, seed_tensor.requires_grad, reported, changed)

    def values(self, logits_TV: Tensor, target_T: Tensor, *, dtype: torch.dtype = torch.float64) -> float:
        """The scalar alone, as a training step would see it (inputs still require gradients)."""
        _, arguments = self._arguments(logits_TV, dtype)
        target = self._target(target_T)
        self.calls += 1
        output = read_output(self._guarded(lambda: self._forward(arguments, target, None)), self.name)
        return float(output.loss.detach().double().sum())

    def weight_gradient(self, hidden_TD: Tensor, weight_VD: Tensor, target_T: Tensor, *, dtype: torch.dtype) -> Tensor:
        """∂loss/∂weight of a linear loss on a hidden of one's own, in fp64."""
        leaves = [x.to(self.device, dtype).requires_grad_() for x in (hidden_TD, weight_VD)]
        arguments, target = [leaf.clone() for leaf in leaves], self._target(target_T)
        self.calls += 1
        output = read_output(self._guarded(lambda: self._forward(arguments, target, None)), self.name)
        if output.loss.requires_grad and output.loss.numel() == 1:
            self._guarded(lambda: output.loss.sum().backward())  # type: ignore[no-untyped-call]
        grad = leaves[1].grad
        return torch.full_like(weight_VD, torch.nan) if grad is None else grad.detach().to("cpu", torch.float64)

    def _target(self, target_T: Tensor) -> Tensor:
        """Our −1 for ignored tokens becomes the caller's index."""
        return torch.where(target_T < 0, torch.full_like(target_T, self.ignore_index), target_T).to(self.device)

    def _names(self) -> tuple[str, ...]:
        return ("hidden", "weight", "target") if self.linear else ("logits", "target")

    def _arguments(self, logits_TV: Tensor, dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
        logits = logits_TV.to(self.device, dtype)
        if self.linear:
            tokens, vocab = logits.shape
            width = max(64, -(-tokens // 16) * 16)
            hidden = HIDDEN_SCALE * torch.eye(tokens, width, dtype=dtype, device=self.device)
            weight = torch.zeros(vocab, width, dtype=dtype, device=self.device)
            weight[:, :tokens] = logits.T / HIDDEN_SCALE
            leaves = [hidden.requires_grad_(), weight.requires_grad_()]
        else:
            leaves = [logits.clone().requires_grad_()]
        # Non-leaf copies, as logits are in a model: a loss that works in place can, and the leaf keeps the truth.
        arguments = [leaf.clone() for leaf in leaves]
        return leaves, arguments

    def _forward(self, arguments: list[Tensor], target: Tensor, seed: int | None) -> Any:
        inputs = [*arguments, target]
        if self.batched:
            inputs = [x if self.linear and i == 1 else x.unsqueeze(0) for i, x in enumerate(inputs)]
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            torch.manual_seed(self.seed if seed is None else seed)
            return self.function(*inputs)

    def _gradients(self, leaves: list[Tensor], shape: torch.Size) -> tuple[Tensor, Tensor | None]:
        grads = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]
        fp64 = [grad.detach().to("cpu", torch.float64) for grad in grads]
        if self.linear:
            return fp64[1][:, : shape[0]].T.contiguous() / HIDDEN_SCALE, fp64[0] * HIDDEN_SCALE
        return fp64[0], None

    def _guarded(self, action: Callable[[], Any]) -> Any:
        """Run foreign code; whatever it raises becomes one sentence."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                # oneDNN's 16-bit GEMMs end the process on CPUs that claim instructions they lack.
                with torch.backends.mkldnn.flags(enabled=False) if self.device.type == "cpu" else nullcontext():
                    return action()
        except (LossCallError, KeyboardInterrupt):
            raise
        except (Exception, SystemExit) as error:
            raise LossCallError(f"{self.name} raised {_first_line(error)}{_cuda_hint(error, self.device)}") from error


def _first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:300]}" if text else type(error).__name__


def _cuda_hint(error: BaseException, device: torch.device) -> str:
    text = f"{type(error).__name__} {error}".lower()
    wants_gpu = any(word in text for word in ("cuda", "gpu", "triton", "nvidia", "active drivers"))
    if device.type == "cpu" and wants_gpu:
        return " (the probes ran on the CPU; this loss seems to want a GPU: run the audit on a machine that has one)"
    return ""


def _read_reported(reported: Tensor | float | None) -> Reported | None:
    if reported is None:
        return None
    if not isinstance(reported, Tensor):
        return Reported(reported, (), None, False)
    value = float(reported.detach().double()) if reported.numel() == 1 else None
    return Reported(value, tuple(reported.shape), reported.dtype, reported.requires_grad)
