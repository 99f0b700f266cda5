"""The loss as a black box: logits and targets in, scalar, logit gradient and side effects out.

Axes: T tokens, V vocabulary, D width. With `linear` the loss sees hidden = s·I (T one-hot rows of width D ≥ T) and
weight = logitsᵀ/s with s a power of two, so that hidden @ weightᵀ is the wanted logits without rounding and dWᵀ/s is the
logit gradient itself.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from zloss.audit.loss.call_errors import arguments_hint, gpu_hint, named_error, statement
from zloss.audit.loss.outcome import Outcome, read_item
from zloss.audit.loss.output import LossCallError, LossOutput, read_output
from zloss.audit.loss.time_limit import TIME_LIMIT, LossTimeoutError, limited

LossFunction = Callable[..., Any]

HIDDEN_SCALE = 64.0
"""s: brings the gain of the probe head to where gain-aware losses live."""


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
    targets: Literal["given", "shifted", "rolled"] = "given"
    """Where the loss itself looks for the target of row t; the call moves ours there."""
    added: str | None = None
    """Name of a returned value that is added to the first one, for losses whose caller adds them."""
    avoid: frozenset[int] = frozenset()
    """Classes that are no ordinary targets for this loss; probes do not draw them."""
    time_limit: float | None = TIME_LIMIT
    """Seconds that one call may take; None is no limit."""
    calls: int = 0

    def like(self, function: LossFunction, name: str) -> BlackBox:
        """Another loss, called the way this one is."""
        return replace(self, function=function, name=name, added=None, calls=0)

    def __call__(
        self,
        logits_TV: Tensor,
        target_T: Tensor,
        *,
        dtype: torch.dtype = torch.float64,
        upstream: float | Tensor = 1.0,
        through: str | None = None,
        per_token: bool = False,
        seed: int | None = None,
    ) -> Outcome:
        """Forward and backward; `upstream` multiplies the output (a [T] tensor for a per-token loss).

        `through` names a returned value to differentiate in place of the loss.
        """
        tokens = len(target_T)
        logits_TV, target_T = self._moved(logits_TV, target_T)
        leaves, arguments = self._arguments(logits_TV, dtype)
        target = self._target(target_T)
        before = [argument.detach().clone() for argument in arguments]
        output = self._call(arguments, target, seed)
        loss = self._summed(output)
        if loss.numel() != (target.numel() if per_token else 1):
            kind = f"a tensor of shape {list(target.shape)}" if per_token else "a scalar"
            hint = "" if per_token else " A loss with reduction='none' belongs in `per_token=`."
            raise LossCallError(
                f"{self.name} returned a tensor of shape {list(loss.shape)} for {target.numel()} targets, "
                f"but {kind} is expected.{hint}"
            )
        reported = tuple(read_item(item) for item in output.items)
        seed_tensor: Tensor = loss
        if through is not None:
            (value,) = (item.value for item in output.items if item.name == through)
            assert isinstance(value, Tensor)
            seed_tensor = value
        if seed_tensor.requires_grad:
            factor = upstream.to(seed_tensor).view_as(seed_tensor) if isinstance(upstream, Tensor) else upstream
            scaled = (seed_tensor * factor).sum()
            self._guarded(lambda: scaled.backward(), arguments, target)  # type: ignore[no-untyped-call]
        changed = tuple(
            name
            for name, was, now in zip(
                self._names(), [*before, self._target(target_T)], [*arguments, target], strict=True
            )
            if not torch.equal(torch.nan_to_num(was), torch.nan_to_num(now.detach()))
        )
        grad_TV, grad_hidden = self._gradients(leaves, logits_TV.shape)
        beyond = float(grad_TV[tokens:].norm())
        grad_hidden = None if grad_hidden is None else grad_hidden[:tokens]
        value_now = float(loss.detach().double().sum())
        return Outcome(
            value_now, loss.dtype, grad_TV[:tokens], grad_hidden, seed_tensor.requires_grad, reported, changed, beyond
        )

    def values(self, logits_TV: Tensor, target_T: Tensor, *, dtype: torch.dtype = torch.float64) -> float:
        """The scalar alone, as a training step would see it (inputs still require gradients)."""
        logits_TV, target_T = self._moved(logits_TV, target_T)
        _, arguments = self._arguments(logits_TV, dtype)
        return float(self._summed(self._call(arguments, self._target(target_T), None)).detach().double().sum())

    def on_head(
        self, hidden_TD: Tensor, weight_VD: Tensor, target_T: Tensor, *, dtype: torch.dtype
    ) -> tuple[float, Tensor, Tensor]:
        """(value, ∂/∂hidden, ∂/∂weight) of a linear loss on a real head, targets moved; gradients in fp64, NaN if none."""
        tokens = len(target_T)
        hidden_TD, target_T = self._moved(hidden_TD, target_T)
        leaves = [x.detach().to(self.device, dtype).requires_grad_() for x in (hidden_TD, weight_VD)]
        arguments, target = [leaf.clone() for leaf in leaves], self._target(target_T)
        loss = self._summed(self._call(arguments, target, None))
        if loss.numel() != 1:
            raise LossCallError(f"{self.name} returned a tensor of shape {list(loss.shape)}, but a scalar is expected.")
        if loss.requires_grad:
            self._guarded(lambda: loss.sum().backward(), arguments, target)  # type: ignore[no-untyped-call]
        grads = [torch.full_like(leaf, torch.nan) if leaf.grad is None else leaf.grad for leaf in leaves]
        hidden, weight = (grad.detach().to("cpu", torch.float64) for grad in grads)
        return float(loss.detach().double().sum()), hidden[:tokens], weight

    def weight_gradient(self, hidden_TD: Tensor, weight_VD: Tensor, target_T: Tensor, *, dtype: torch.dtype) -> Tensor:
        """∂loss/∂weight of a linear loss on a hidden of one's own, in fp64."""
        leaves = [x.to(self.device, dtype).requires_grad_() for x in (hidden_TD, weight_VD)]
        arguments, target = [leaf.clone() for leaf in leaves], self._target(target_T)
        loss = self._summed(self._call(arguments, target, None))
        if loss.requires_grad and loss.numel() == 1:
            self._guarded(lambda: loss.sum().backward(), arguments, target)  # type: ignore[no-untyped-call]
        grad = leaves[1].grad
        return torch.full_like(weight_VD, torch.nan) if grad is None else grad.detach().to("cpu", torch.float64)

    def _call(self, arguments: list[Tensor], target: Tensor, seed: int | None) -> LossOutput:
        self.calls += 1
        vocab = arguments[1].shape[0] if self.linear else arguments[0].shape[-1]
        entries = target.numel() * vocab

        def call() -> LossOutput:
            # Reading is foreign code too: `.loss` may be a property. A loss that shifts may return logits one row shorter.
            return read_output(self._forward(arguments, target, seed), self.name, entries // 2)

        output: LossOutput = self._guarded(call, arguments, target)
        return output

    def _summed(self, output: LossOutput) -> Tensor:
        beside = next((item.value for item in output.items if item.name == self.added), None)
        return output.loss if beside is None else output.loss + beside

    def _moved(self, logits_TV: Tensor, target_T: Tensor) -> tuple[Tensor, Tensor]:
        """Place targets where the loss looks for them. A shifting loss gets one more row, which it gives no target."""
        if self.targets == "rolled":
            return logits_TV, target_T.roll(1)
        if self.targets == "shifted":
            return torch.cat([logits_TV, torch.zeros_like(logits_TV[-1:])]), torch.cat([target_T[:1], target_T])
        return logits_TV, target_T

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

    def _guarded(self, action: Callable[[], Any], arguments: list[Tensor], target: Tensor) -> Any:
        """Run foreign code; whatever it raises becomes one sentence with the call and its shapes."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                # oneDNN's 16-bit GEMMs end the process on CPUs that claim instructions they lack.
                native_off = torch.backends.mkldnn.flags(enabled=False) if self.device.type == "cpu" else nullcontext()
                with limited(self.time_limit, self.name), native_off:
                    return action()
        except (LossCallError, LossTimeoutError, KeyboardInterrupt):
            raise
        except (Exception, SystemExit) as error:
            batch = [1] if self.batched else []
            shapes = [
                f"{name} {batch * (name != 'weight') + list(x.shape)}"
                for name, x in zip(self._names(), [*arguments, target], strict=True)
            ]
            dtype = str(arguments[0].dtype).removeprefix("torch.")
            raise LossCallError(
                f"{self.name} raised {named_error(error)}{statement(error)} when called with {', '.join(shapes)} in "
                f"{dtype}.{arguments_hint(self.function, self.linear, error)}{gpu_hint(error, self.device)}"
            ) from error


def loss_name(function: Callable[..., Any]) -> str:
    """What an audit calls a loss that was given no name."""
    name = getattr(function, "__qualname__", None) or type(function).__name__
    return f"the loss {name!r}"
