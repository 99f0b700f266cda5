"""The loss as a black box: logits and targets in, scalar, logit gradient and side effects out.

Axes: T tokens, V vocabulary, D width. With `linear` row t of hidden is s_t on one column and 0 elsewhere, and that column of
weight is logits_t/s_t. s_t is a power of two, so hidden @ weightᵀ is the wanted logits without rounding, and the column of dW
over s_t is the logit gradient itself. s_t differs between tokens, so that a norm on hidden shows, and D is neither T nor V,
nor does it follow T, so that a transposed weight or a factor of √D does.
"""

from __future__ import annotations

import contextlib
import os
import random
import sys
import warnings
from collections.abc import Callable, Iterator
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

WIDTH, LARGE_WIDTH = 80, 1200
"""D of small batches and of large ones."""


def hidden_scales(tokens: int) -> Tensor:
    """s_t: 32, 64 and 128 in turn, which brings the gain of the probe head to where gain-aware losses live."""
    return 2.0 ** (5 + torch.arange(tokens, dtype=torch.float64) % 3)


def probe_width(tokens: int, vocab: int) -> int:
    """D of a probe head: at least T, never T or V itself, and the same for all small batches and for all large ones."""
    width = WIDTH if tokens < WIDTH else LARGE_WIDTH * -(-(tokens + 1) // LARGE_WIDTH)
    while width in (tokens, vocab):
        width += 16
    return width


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
    transposed: bool = False
    """Whether a linear loss wants its weight as [D, V]; found on the first call."""
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
        grad_hidden = None if grad_hidden is None else grad_hidden[:tokens, :tokens]
        value_now = float(loss.detach().double().sum())
        return Outcome(
            value_now, loss.dtype, grad_TV[:tokens], grad_hidden, seed_tensor.requires_grad, reported, changed, beyond
        )

    def values(
        self, logits_TV: Tensor, target_T: Tensor, *, dtype: torch.dtype = torch.float64, seed: int | None = None
    ) -> float:
        """The scalar alone, as a training step would see it (inputs still require gradients)."""
        logits_TV, target_T = self._moved(logits_TV, target_T)
        _, arguments = self._arguments(logits_TV, dtype)
        return float(self._summed(self._call(arguments, self._target(target_T), seed)).detach().double().sum())

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
            width, scale_T = probe_width(tokens, vocab), hidden_scales(tokens).to(self.device, dtype)
            columns = _columns(tokens, width)
            hidden = torch.zeros(tokens, width, dtype=dtype, device=self.device)
            hidden[torch.arange(tokens), columns] = scale_T
            weight = torch.zeros(vocab, width, dtype=dtype, device=self.device)
            weight[:, columns] = (logits / scale_T.unsqueeze(-1)).T
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
        if self.transposed:
            inputs[1] = inputs[1].T
        with _seeded(self.seed if seed is None else seed), torch.enable_grad():
            return self.function(*inputs)

    def _gradients(self, leaves: list[Tensor], shape: torch.Size) -> tuple[Tensor, Tensor | None]:
        grads = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]
        fp64 = [grad.detach().to("cpu", torch.float64) for grad in grads]
        if self.linear:
            scale_T, columns = hidden_scales(shape[0]), _columns(shape[0], fp64[0].shape[-1])
            return fp64[1][:, columns].T / scale_T.unsqueeze(-1), fp64[0][:, columns] * scale_T
        return fp64[0], None

    def _guarded(self, action: Callable[[], Any], arguments: list[Tensor], target: Tensor) -> Any:
        """Run foreign code; whatever it raises becomes one sentence with the call and its shapes."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                # oneDNN's 16-bit GEMMs end the process on CPUs that claim instructions they lack.
                native_off = torch.backends.mkldnn.flags(enabled=False) if self.device.type == "cpu" else nullcontext()
                with limited(self.time_limit, self.name), native_off, process_kept():
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


@contextlib.contextmanager
def process_kept() -> Iterator[None]:
    """Run foreign code and put the working directory and the standard streams back as they were."""
    folder, streams = _working_directory(), (sys.stdout, sys.stderr)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = streams
        if folder is not None and _working_directory() != folder:
            os.chdir(folder)


def _working_directory() -> str | None:
    """None where the folder is gone."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return None


@contextlib.contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """The generators of torch, of Python and, where it is loaded, of NumPy in one known state; theirs again afterwards."""
    numpy, python_state = sys.modules.get("numpy"), random.getstate()
    numpy_state = None if numpy is None else numpy.random.get_state()
    with torch.random.fork_rng(devices=[]):
        # Without a GPU `torch.manual_seed` still queues a call for one, with the text of the stack: milliseconds each time.
        (torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed)(seed)
        random.seed(seed)
        if numpy is not None:
            numpy.random.seed(seed % 2**32)
        try:
            yield
        finally:
            random.setstate(python_state)
            if numpy is not None:
                numpy.random.set_state(numpy_state)


def _columns(tokens: int, width: int) -> Tensor:
    """The column of hidden that each token has to itself, in no order."""
    return torch.randperm(width, generator=torch.Generator().manual_seed(width))[:tokens]


def loss_name(function: Callable[..., Any]) -> str:
    """What an audit calls a loss that was given no name."""
    name = getattr(function, "__qualname__", None) or type(function).__name__
    return f"the loss {name!r}"
