"""Implementations of CE + Z by name: ours, PyTorch's, and those of other packages where they are installed.

Each is one function of tensors and λ, sum-reduced so that a 1/N cannot push 16-bit gradients below their range:

    logits:  loss(logits [T, V], label [T], coef, target)
    linear:  loss(hidden [T, D], weight [V, D], label [T], coef, target)

Packages are imported when an implementation is loaded.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from zloss.errors import InputError, MissingDependencyError, UnknownNameError
from zloss.head.loss import head_loss, logits_loss
from zloss.objectives import StandardZLoss

Loss = Callable[..., Tensor]
Takes = Literal["logits", "linear"]
EXTRAS = {"triton": "triton", "liger_kernel": "peers", "cut_cross_entropy": "peers"}
"""Package → the extra of zloss that installs it."""


@dataclass(frozen=True)
class Implementation:
    """One way to compute CE + λ(log Z − c)², and what must be known to run it."""

    name: str
    title: str
    takes: Takes
    load: Callable[[], Loss]
    package: str | None = None
    """Module it comes from; None: this package or torch."""
    has_z: bool = True
    fixed_target: float | None = None
    """The only c it knows; None: any."""
    kernel: bool = False
    """Whether it is made of Triton kernels: a GPU, or Triton's interpreter in a process of its own."""
    backend: str | None = None
    """Ours: the backend it runs."""

    torch_function: str | None = None
    """Name of the function of `torch.nn.functional` that it calls, where older versions of torch lack it."""

    @property
    def installed(self) -> bool:
        """Whether it can be loaded here."""
        return not self._missing_packages() and self._torch_has_it()

    def require(self) -> None:
        """One sentence where it cannot be loaded."""
        for package in self._missing_packages():
            if package in EXTRAS:
                raise MissingDependencyError(package, f"Auditing {self.title}", EXTRAS[package])
            raise InputError(
                f"auditing {self.title} needs the package {package!r}, which is not installed and which no extra of zloss "
                f"installs: install it, or leave {self.name!r} out."
            )
        if not self._torch_has_it():
            raise InputError(
                f"auditing {self.title} needs a torch with torch.nn.functional.{self.torch_function}, but torch "
                f"{torch.__version__} has none: use a newer one, or leave {self.name!r} out."
            )

    def _missing_packages(self) -> list[str]:
        needed = [*([self.package] if self.package else []), *(["triton"] if self.kernel else [])]
        return [name for name in needed if importlib.util.find_spec(name) is None]

    def _torch_has_it(self) -> bool:
        return self.torch_function is None or hasattr(F, self.torch_function)


def _of_package(module: str, name: str) -> Any:
    """A function of a package that may not be there, imported now."""
    return getattr(importlib.import_module(module), name)


def _ours(backend: str) -> Callable[[], Loss]:
    def load() -> Loss:
        def loss(logits: Tensor, label: Tensor, coef: float, target: float) -> Tensor:
            objective = StandardZLoss(coef, target)
            options: dict[str, Any] = {"reduction": "sum", "statistics": "light", "backend": backend}
            return logits_loss(logits, label, objective, **options).loss

        return loss

    return load


def _ours_linear(backend: str) -> Callable[[], Loss]:
    def load() -> Loss:
        def loss(hidden: Tensor, weight: Tensor, label: Tensor, coef: float, target: float) -> Tensor:
            objective = StandardZLoss(coef, target)
            options: dict[str, Any] = {"reduction": "sum", "statistics": "light", "backend": backend}
            return head_loss(hidden, weight, label, objective, **options).loss

        return loss

    return load


def _manual_z(logits: Tensor, coef: float, target: float) -> Tensor:
    """The penalty as it is written by hand: fp32 logsumexp of the logits as they are stored."""
    return coef * ((torch.logsumexp(logits.float(), dim=-1) - target) ** 2).sum()


def _builtin() -> Loss:
    def loss(logits: Tensor, label: Tensor, coef: float, target: float) -> Tensor:
        return F.cross_entropy(logits, label, reduction="sum") + _manual_z(logits, coef, target)

    return loss


def _log_softmax() -> Loss:
    def loss(logits: Tensor, label: Tensor, coef: float, target: float) -> Tensor:
        log_p = F.log_softmax(logits.float(), dim=-1)
        return -log_p.gather(1, label.unsqueeze(1)).sum() + _manual_z(logits, coef, target)

    return loss


def _torch_projection() -> Loss:
    inner = _builtin()

    def loss(hidden: Tensor, weight: Tensor, label: Tensor, coef: float, target: float) -> Tensor:
        return inner(F.linear(hidden, weight), label, coef, target)

    return loss


def _torch_linear() -> Loss:
    def loss(hidden: Tensor, weight: Tensor, label: Tensor, coef: float, target: float) -> Tensor:
        linear: Any = F.linear_cross_entropy
        options: Any = torch.nn.LinearCrossEntropyOptions
        out: Tensor = linear(
            hidden, weight, label, reduction="sum", options=options(batch_chunk_size=256, chunking_method=None)
        )
        return out

    return loss


def _liger() -> Loss:
    liger_cross_entropy = _of_package("liger_kernel.transformers.functional", "liger_cross_entropy")

    def loss(logits: Tensor, label: Tensor, coef: float, target: float) -> Tensor:
        # It writes the gradient over its input; the copy keeps the caller's logits.
        out: Tensor = liger_cross_entropy(logits.clone(), label, reduction="sum", lse_square_scale=coef)
        return out

    return loss


def _liger_linear() -> Loss:
    fused = _of_package("liger_kernel.transformers.functional", "liger_fused_linear_cross_entropy")

    def loss(hidden: Tensor, weight: Tensor, label: Tensor, coef: float, target: float) -> Tensor:
        out: Tensor = fused(hidden, weight, label, reduction="sum", lse_square_scale=coef)
        return out

    return loss


def _cut() -> Loss:
    linear_cross_entropy = _of_package("cut_cross_entropy", "linear_cross_entropy")

    def loss(hidden: Tensor, weight: Tensor, label: Tensor, coef: float, target: float) -> Tensor:
        impl = "cce" if hidden.device.type == "cuda" else "torch_compile"
        out: Tensor = linear_cross_entropy(hidden, weight, label, reduction="sum", impl=impl)
        return out

    return loss


def _flash() -> Loss:
    cross_entropy_loss = _of_package("flash_attn.ops.triton.cross_entropy", "cross_entropy_loss")

    def loss(logits: Tensor, label: Tensor, coef: float, target: float) -> Tensor:
        losses, _ = cross_entropy_loss(logits, label, lse_square_scale=coef)
        out: Tensor = losses.sum()
        return out

    return loss


IMPLEMENTATIONS = {
    implementation.name: implementation
    for implementation in (
        Implementation("dense", "zloss, dense", "logits", _ours("dense"), backend="dense"),
        Implementation("chunked", "zloss, chunked", "logits", _ours("chunked"), backend="chunked"),
        Implementation("triton", "zloss, Triton", "logits", _ours("triton"), kernel=True, backend="triton"),
        Implementation("torch-ce", "F.cross_entropy + manual Z", "logits", _builtin),
        Implementation("log-softmax", "fp32 log_softmax CE + manual Z", "logits", _log_softmax),
        Implementation("liger", "Liger cross-entropy", "logits", _liger, "liger_kernel", True, 0.0, True),
        Implementation("flash-attn", "flash-attn cross-entropy", "logits", _flash, "flash_attn", True, 0.0, True),
        Implementation(
            "dense-linear", "zloss, dense, from hidden states", "linear", _ours_linear("dense"), backend="dense"
        ),
        Implementation(
            "chunked-linear", "zloss, chunked, from hidden states", "linear", _ours_linear("chunked"), backend="chunked"
        ),
        Implementation(
            "triton-linear",
            "zloss, Triton, from hidden states",
            "linear",
            _ours_linear("triton"),
            kernel=True,
            backend="triton",
        ),
        Implementation("torch-projection", "F.linear, F.cross_entropy + manual Z", "linear", _torch_projection),
        Implementation(
            "torch-linear",
            "F.linear_cross_entropy",
            "linear",
            _torch_linear,
            has_z=False,
            torch_function="linear_cross_entropy",
        ),
        Implementation(
            "liger-linear", "Liger fused linear cross-entropy", "linear", _liger_linear, "liger_kernel", True, 0.0, True
        ),
        Implementation("cut-cross-entropy", "cut-cross-entropy", "linear", _cut, "cut_cross_entropy", has_z=False),
    )
}
"""By name, in the order tables show them."""


def find_implementation(name: str) -> Implementation:
    """The implementation of a name."""
    if name not in IMPLEMENTATIONS:
        raise UnknownNameError("implementation", name, IMPLEMENTATIONS)
    return IMPLEMENTATIONS[name]
